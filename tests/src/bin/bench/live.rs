//! How many packets a second cross the program on a real path, beside the least that any takes.

mod road;
mod subject;

use std::{collections::BTreeMap, fs::File, path::PathBuf};

use anyhow::{Context as _, Result};
use balancer_tests::harness::Harness;
use serde::Serialize;

use self::{
    road::Road,
    subject::{Bench, Subject},
};
use crate::packet::{
    pin,
    report::{Machine, Spread},
};

/// `cargo xtask bench live`: packets a second through a pair of veth devices, all on one CPU.
///
/// A program in the kernel makes frames of 60 bytes and more and puts them on one end of the pair (BPF_PROG_TEST_RUN with
/// live frames); the program under test is on the other end and sends them back; where they came from, they are counted.
/// A run counts only if all that were made have come. The generator, the devices and the sink take their part of the time,
/// the same in each row: `drop` is what is left without a way back.
#[derive(clap::Args)]
pub struct Options {
    /// Rounds
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    rounds: u32,
    /// Packets of a run
    #[arg(long, default_value_t = 1 << 19, value_parser = clap::value_parser!(u32).range(1..=1 << 22))]
    packets: u32,
    /// Write the results as JSON to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Compare with the targets: exit 1 with those that are missed (`bench rivals`)
    #[arg(long)]
    check: bool,
    /// The CPU to run on
    #[arg(long, default_value_t = 0)]
    cpu: usize,
}

#[derive(Serialize)]
struct Report {
    machine: Machine,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    case: String,
    flows: u32,
    /// Millions of packets a second.
    rate: Spread,
    /// The rate, divided by that of the limit (fixed rewrite, no lookup) in the same round.
    of_limit: Spread,
    /// Divided by nftables' with as many flows in the same round.
    of_nftables: Option<Spread>,
}

/// Measures; with `rivals`, nftables as well. False: a target was missed.
pub fn run(options: &Options, rivals: bool) -> Result<bool> {
    pin(options.cpu)?;
    let mut harness = Harness::load()?;
    let mut road = Road::new(&mut harness)?;
    let mut bench = Bench::new(&mut harness, &mut road)?;
    let subjects = Subject::all(rivals);
    let mut rates: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    // The first round is not counted: flows learn where their packets come from now.
    for round in 0..=options.rounds {
        for (number, subject) in subjects.iter().enumerate() {
            let seed = (u64::from(round) << 32) | (number as u64 * 7919);
            let time = bench.run(&mut harness, &mut road, subject, options.packets, seed);
            let time = time.with_context(|| format!("measure {}", subject.name()))?;
            if round > 0 {
                rates.entry(number).or_default().push(f64::from(options.packets) / time.as_secs_f64() / 1e6);
            }
        }
        eprint!("\rround {round} of {}", options.rounds);
    }
    eprintln!();
    let of = |wanted: &Subject| {
        subjects.iter().position(|subject| subject == wanted).and_then(|at| rates.get(&at))
    };
    let against = |rate: &[f64], other: &[f64]| {
        Spread::of(&rate.iter().zip(other).map(|(rate, other)| rate / other).collect::<Vec<_>>())
    };
    let rows = subjects.iter().zip(rates.values()).map(|(subject, rate)| Row {
        case: subject.name().to_owned(),
        flows: subject.flows(),
        rate: Spread::of(rate),
        of_limit: of(&Subject::Limit).map_or(Spread::of(&[]), |limit| against(rate, limit)),
        of_nftables: subject.rival().and_then(|rival| of(&rival)).map(|rival| against(rate, rival)),
    });
    let report = Report { machine: Machine::here()?, rows: rows.collect() };
    report.print();
    if let Some(path) = &options.json {
        let file = File::create(path).with_context(|| format!("create {}", path.display()))?;
        serde_json::to_writer_pretty(file, &report).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(!options.check || report.check(&subjects))
}

impl Report {
    fn print(&self) {
        println!("{}\n", self.machine.line());
        println!("| case | flows | Mpps, median | 10 % to 90 % | of the limit | of nftables |");
        println!("| --- | ---: | ---: | ---: | ---: | ---: |");
        for Row { case, flows, rate, of_limit, of_nftables } in &self.rows {
            let rival = of_nftables.map_or(String::new(), |ratio| format!("{:.1} ×", ratio.median));
            println!(
                "| {case} | {flows} | {:.2} | {:.2}–{:.2} | {:.2} | {rival} |",
                rate.median, rate.low, rate.high, of_limit.median
            );
        }
    }

    /// Prints each target with what was measured; whether all are met.
    fn check(&self, subjects: &[Subject]) -> bool {
        println!();
        let mut is_met = true;
        for (row, subject) in self.rows.iter().zip(subjects) {
            let (Some(ratio), Some(least)) = (row.of_nftables, subject.least()) else { continue };
            let met = ratio.median >= least;
            is_met &= met;
            let verdict = if met { "met" } else { "MISSED" };
            println!(
                "{verdict}: {}, {} flows: {:.2} × nftables, at least {least}",
                row.case, row.flows, ratio.median
            );
        }
        is_met
    }
}
