//! What a packet costs: nanoseconds in the kernel, beside the least that any program takes.

pub mod bed;
pub mod case;
pub mod frame;
mod miss;
mod report;
mod target;

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result, bail};
use balancer_harness::names;
use balancer_tests::harness::{Harness, Subject};

use self::{
    bed::{Bed, Scale},
    case::{Case, MANY},
    report::{Report, Samples},
};
use crate::results::{Machine, Output};

/// `cargo xtask bench packet`: what the program takes for a packet, beside an XDP program that only says `XDP_TX`.
///
/// A harness program in the kernel makes each packet anew and calls the program under test (BPF_PROG_TEST_RUN); that of the
/// floor is in its time as in the others'. Each case runs right after a floor of its own, in rounds: ratios are those of
/// neighbours. Every case is compared byte for byte first, and the program's counters must say that each packet did what
/// the case's name says. Random order where there are several flows; frames of 64 bytes; one backend; replies and requests
/// leave by the interface that they came in by.
#[derive(clap::Args)]
pub struct Options {
    /// Rounds
    #[arg(long, default_value_t = 31, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    #[command(flatten)]
    output: Output,
    /// Only check, with few flows, that each case does what its name says; no times
    #[arg(long)]
    verify: bool,
    /// Measure another build as well, side by side: NAME=FILE, an object file as `cargo xtask build` makes it
    #[arg(long, value_name = "NAME=FILE", value_parser = parse_object)]
    object: Vec<(String, PathBuf)>,
    /// Only cases whose name, or its end with ", N flows", contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// The CPU to run on
    #[arg(long, default_value_t = 0)]
    cpu: usize,
}

fn parse_object(text: &str) -> Result<(String, PathBuf), String> {
    let (name, path) = text.split_once('=').ok_or("NAME=FILE, please")?;
    Ok((name.to_owned(), PathBuf::from(path)))
}

/// The measured scale: a million flows; runs of some ten milliseconds.
const FULL: Scale = Scale { many: MANY, packets: 1 << 17 };
/// The scale of a check without times.
const SMALL: Scale = Scale { many: 1 << 12, packets: 1 << 10 };

/// Verifies and measures. False: a target was missed.
pub fn run(options: &Options) -> Result<bool> {
    let scale = if options.verify { SMALL } else { FULL };
    let mut cases = case::all();
    if let Some(text) = &options.only {
        cases.retain(|case| format!("{}, {} flows", case.name(), case.flows).contains(text));
    }
    if cases.is_empty() {
        bail!("no case is called so");
    }
    let mut objects = vec![("balancer", None)];
    for (name, path) in &options.object {
        let object = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        objects.push((name, Some(object)));
    }
    let machine = Machine::here()?;
    pin(options.cpu)?;
    let mut harness = Harness::load()?;
    let mut beds = Vec::new();
    for (name, object) in &objects {
        let bed = Bed::new(&mut harness, name, object.as_deref(), scale, &cases);
        beds.push(bed.with_context(|| format!("prepare the build {name}"))?);
    }
    for bed in &mut beds {
        for case in &cases {
            bed.verify(&mut harness, case, scale)?;
        }
    }
    if options.verify {
        for bed in &mut beds {
            for case in &cases {
                bed.run(&mut harness, case, scale, 1).with_context(|| bed.name.clone())?;
                println!("{}: {}, {} flows: right", bed.name, case.name(), scale.flows(case));
            }
        }
        return Ok(true);
    }
    let report = measure(&mut harness, &mut beds, &cases, options.rounds)?;
    report.results(machine).finish(&options.output)
}

/// Plays the rounds.
fn measure(harness: &mut Harness, beds: &mut [Bed], cases: &[Case], rounds: u32) -> Result<Report> {
    let floor = Subject::Own(names::FLOOR);
    let mut samples: Vec<Samples> =
        beds.iter().flat_map(|bed| cases.iter().map(|case| Samples::new(&bed.name, *case))).collect();
    let mut misses = Vec::new();
    for round in 0..rounds {
        let mut slots = (0..samples.len()).collect::<Vec<_>>();
        // Builds of one case side by side.
        slots.sort_by_key(|slot| slot % cases.len());
        for slot in slots {
            let (bed, case) = (&mut beds[slot / cases.len()], &cases[slot % cases.len()]);
            let packets = case.shape.packets(0, 1, None)?;
            harness.call(&floor)?;
            harness.make(&packets)?;
            let (floor, _) = harness.run(FULL.packets, packets.length as usize)?;
            let seed = (u64::from(round) << 32) | (slot as u64 * 7919);
            samples[slot].add(floor, bed.run(harness, case, FULL, seed)?);
        }
        misses.push(beds[0].miss(FULL.packets, u64::from(round)));
        eprint!("\rround {} of {rounds}", round + 1);
    }
    eprintln!();
    Ok(Report { rows: samples, misses })
}

/// Stays on one CPU, so that all is measured with the same caches.
pub fn pin(cpu: usize) -> Result<()> {
    let mut set = nix::sched::CpuSet::new();
    set.set(cpu).with_context(|| format!("there is no CPU {cpu}"))?;
    nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set)
        .with_context(|| format!("stay on CPU {cpu}"))
}
