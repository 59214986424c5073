//! How many packets a second cross the program on a real path, beside the least that any takes.

mod road;
mod subject;

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use balancer_tests::harness::Harness;

use self::{
    road::Road,
    subject::{Bench, Subject},
};
use crate::{
    packet::pin,
    results::{Cell, Machine, Output, Results, Spread, Target},
    stack,
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
    #[command(flatten)]
    output: Output,
    /// The CPU to run on
    #[arg(long, default_value_t = 0)]
    cpu: usize,
}

/// `cargo xtask bench rivals`: the same as `live` beside nftables' DNAT, and then what a user would notice: web servers (nginx)
/// directly, and behind nftables, HAProxy, nginx, and this balancer.
#[derive(clap::Args)]
pub struct RivalOptions {
    #[command(flatten)]
    live: Options,
    /// Rounds of the full stack, at most: it ends when the extra CPU time for a connection is known well enough. 0 = none
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(..=1_000))]
    stack_rounds: u32,
    /// The full stack alone
    #[arg(long)]
    stack_only: bool,
}

/// Measures. False: a target was missed.
pub fn run(options: &Options) -> Result<bool> {
    let mut results = Results::new("live", Machine::here()?);
    pin(options.cpu)?;
    packets(&mut results, options, false)?;
    results.finish(&options.output)
}

/// Measures the rivals as well. False: a target was missed.
pub fn run_rivals(options: &RivalOptions) -> Result<bool> {
    let mut results = Results::new("rivals", Machine::here()?);
    pin(options.live.cpu)?;
    if !options.stack_only {
        packets(&mut results, &options.live, true)?;
    }
    if options.stack_rounds > 0 {
        stack::run(&mut results, options.stack_rounds)?;
    }
    results.finish(&options.live.output)
}

fn packets(results: &mut Results, options: &Options, rivals: bool) -> Result<()> {
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
    let mut targets = Vec::new();
    let columns = ["case", "flows", "Mpps", "of the limit", "of nftables"];
    let table = results.table(&columns);
    for (subject, rate) in subjects.iter().zip(rates.values()) {
        let of_limit = of(&Subject::Limit).and_then(|limit| Spread::of_ratios(rate, limit));
        let rival = subject.rival().and_then(|rival| of(&rival));
        let of_rival = rival.and_then(|rival| Spread::of_ratios(rate, rival));
        let flows = Some(subject.flows()).filter(|flows| *flows > 0);
        let rate: Cell = Spread::of(rate).into();
        table.row([subject.name().into(), flows.into(), rate, of_limit.into(), of_rival.into()]);
        if let (Some(ratio), Some(least)) = (of_rival, subject.least()) {
            let what = format!("{}, {} flows: × nftables", subject.name(), subject.flows());
            targets.push(Target::at_least(what, ratio.sound(), least));
        }
    }
    results.note("Millions of packets a second on one CPU, the generator's and the devices' time included; ratios within a round.");
    results.targets(targets);
    Ok(())
}
