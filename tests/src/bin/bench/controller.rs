//! What the controller's work costs: ticks, walks over the flow table, changes of the configuration, and memory.

mod bed;
mod memory;

use anyhow::{Context as _, Result};
use balancer_tests::harness::Harness;
use balancer_user::config::Config;

use self::bed::{Bed, Size};
use crate::{
    packet::pin,
    results::{Cell, Machine, Output, Results, Spread, Target},
};

/// `cargo xtask bench controller`: the real controller on real maps, in which the program opens flows.
///
/// Times are those of one thread, in rounds in which each size takes its turn. A tick is measured when nothing has come since
/// the last one, and when each service has had ten new flows, so that all rings are planned anew; a reload when the file is the
/// same, and when one weight has changed: as long as it is read and judged beside the controller, and as long as it holds the
/// controller up. The walk over the flow table is made in one go, where the daemon spreads it over a second.
#[derive(clap::Args)]
pub struct Options {
    /// Rounds
    #[arg(long, default_value_t = 31, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    rounds: u32,
    /// Few sizes, few rounds, for a check that it works
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    output: Output,
    /// The CPU to run on
    #[arg(long, default_value_t = 0)]
    cpu: usize,
}

const SIZES: [Size; 6] = [
    Size { services: 1, backends: 10 },
    Size { services: 10, backends: 10 },
    Size { services: 100, backends: 10 },
    Size { services: 1000, backends: 10 },
    Size { services: 10, backends: 100 },
    Size { services: 10, backends: 1000 },
];
const FLOWS: [u32; 4] = [1 << 10, 1 << 14, 1 << 18, 1 << 21];
/// New flows of each service before a busy tick.
const ARRIVALS: u32 = 10;
/// Flows whose memory is looked at.
const MEMORY: [u32; 2] = [1 << 18, 1 << 20];

/// Milliseconds that a tick of the largest size may take, and bytes that both directions of an IPv4 flow may.
const TICK: f64 = 10.0;
const BYTES: f64 = 192.0;
/// What grows linearly may cost so many times as much for each piece, where caches and noise have their part.
const LINEAR: f64 = 1.25;

/// The times of one size, in milliseconds.
#[derive(Default)]
struct Times {
    quiet: Vec<f64>,
    busy: Vec<f64>,
    /// Of reloads: read and judged, applied; of the same file, and of one with another weight.
    reloads: [[Vec<f64>; 2]; 2],
}

/// Measures. False: a target was missed.
pub fn run(options: &Options) -> Result<bool> {
    let machine = Machine::here()?;
    pin(options.cpu)?;
    let mut results = Results::new("controller", machine);
    let (sizes, flows, rounds) =
        if options.verify { (&SIZES[..2], &FLOWS[..1], 2) } else { (&SIZES[..], &FLOWS[..], options.rounds) };
    configurations(&mut results, sizes, rounds)?;
    walks(&mut results, flows, rounds)?;
    memory(&mut results)?;
    results.note(
        "Milliseconds: median of the rounds, and from the lowest to the highest tenth. Busy: ten new flows for each service since the \
         last tick. Reloads: read and judged on a thread beside the controller, then applied by it.",
    );
    results.finish(&options.output)
}

fn configurations(results: &mut Results, sizes: &[Size], rounds: u32) -> Result<()> {
    let mut beds = Vec::new();
    for size in sizes {
        let bed = Bed::new(*size, 1 << 18);
        let mut bed = bed.with_context(|| format!("prepare {size}"))?;
        bed.warm_up()?;
        beds.push((bed, Times::default()));
    }
    for round in 1..=rounds {
        for (bed, times) in &mut beds {
            times.quiet.push(bed.tick(bed::PERIOD)?);
            bed.arrive(ARRIVALS)?;
            times.busy.push(bed.tick(bed::PERIOD)?);
            for (is_changed, times) in [false, true].into_iter().zip(&mut times.reloads) {
                let took = bed.reload(is_changed)?;
                times.iter_mut().zip(took).for_each(|(times, took)| times.push(took));
            }
        }
        eprint!("\rconfigurations: round {round} of {rounds}");
    }
    eprintln!();
    let table = results.table(&[
        "services",
        "backends of each",
        "quiet tick, ms",
        "busy tick, ms",
        "same file: read, ms",
        "applied, ms",
        "one weight: read, ms",
        "applied, ms",
    ]);
    for (size, (_, times)) in sizes.iter().zip(&beds) {
        let reloads = times.reloads.iter().flatten().map(|times| Cell::from(Spread::of(times)));
        let ticks = [&times.quiet, &times.busy].map(|times| Cell::from(Spread::of(times)));
        let counts = [size.services, size.backends].map(|count| Cell::from(u32::from(count)));
        table.row(counts.into_iter().chain(ticks).chain(reloads));
    }
    let of = |size: Size| {
        let found = sizes.iter().zip(&beds).find(|(known, _)| **known == size);
        found.map(|(_, (_, times))| times)
    };
    let largest = Size { services: 1000, backends: 10 };
    let targets = [
        ("1,000 services instead of 100", largest, Size { services: 100, backends: 10 }),
        ("1,000 backends of a service instead of 100", SIZES[5], SIZES[4]),
    ];
    for (what, large, small) in targets {
        let (Some(large_times), Some(small_times)) = (of(large), of(small)) else { continue };
        let pieces = f64::from(large.total()) / f64::from(small.total());
        let growth = |pick: fn(&Times) -> &Vec<f64>| {
            let ratio = Spread::of_ratios(pick(large_times), pick(small_times))?;
            ratio.sound().map(|ratio| ratio / pieces)
        };
        results.targets([
            Target::at_most(
                format!("busy tick, for each backend: {what}"),
                growth(|times| &times.busy),
                LINEAR,
            ),
            Target::at_most(
                format!("read a changed file, for each backend: {what}"),
                growth(|times| &times.reloads[1][0]),
                LINEAR,
            ),
        ]);
    }
    if let Some(times) = of(largest) {
        let busy = Spread::of(&times.busy).map(|busy| busy.median);
        results.targets([Target::at_most("busy tick of 1,000 services with 10 backends, ms", busy, TICK)]);
    }
    Ok(())
}

fn walks(results: &mut Results, flows: &[u32], rounds: u32) -> Result<()> {
    let mut harness = Harness::load()?;
    let mut beds = Vec::new();
    for count in flows {
        let mut bed = Bed::new(SIZES[0], *count)?;
        bed.fill(&mut harness, *count).with_context(|| format!("open {count} flows"))?;
        beds.push((bed, Vec::new()));
    }
    for round in 1..=rounds {
        for (bed, times) in &mut beds {
            // The first ends the walk that was under way; what follows from it comes with the next.
            bed.tick(bed::WALK)?;
            let rest = bed.tick(bed::MOMENT)?;
            times.push(bed.tick(bed::WALK)? - rest);
            bed.tick(bed::MOMENT)?;
        }
        eprint!("\rwalks: round {round} of {rounds}");
    }
    eprintln!();
    let table = results.table(&["flows", "walk over the table, ms", "ns for each flow"]);
    let mut each = Vec::new();
    for (count, (_, times)) in flows.iter().zip(&beds) {
        let of_one: Vec<f64> = times.iter().map(|time| time * 1e6 / f64::from(*count)).collect();
        table.row([(*count).into(), Spread::of(times).into(), Spread::of(&of_one).into()]);
        each.push(of_one);
    }
    if let [.., small, large] = &each[..] {
        let growth = Spread::of_ratios(large, small).and_then(|ratio| ratio.sound());
        results.targets([Target::at_most("walk, for each flow: 2 M flows instead of 256 k", growth, LINEAR)]);
    }
    Ok(())
}

fn memory(results: &mut Results) -> Result<()> {
    let [small, large] = MEMORY;
    let table =
        results.table(&["family", "bytes of both directions", "bytes reserved for each of max-flows"]);
    let mut targets = Vec::new();
    for ipv6 in [false, true] {
        let reserved =
            (memory::of_maps(large, ipv6)? - memory::of_maps(small, ipv6)?) / f64::from(large - small);
        let used = memory::of_flow(ipv6);
        table.row([if ipv6 { "IPv6" } else { "IPv4" }.into(), used.into(), reserved.into()]);
        if !ipv6 {
            targets.push(Target::at_most(
                "bytes of both directions of an IPv4 flow",
                Some(used as f64),
                BYTES,
            ));
        }
    }
    results.note(
        "Memory: what the entries of a flow take in the table, and what the kernel accounts for all maps more with each flow of \
         max-flows: a table is never full, and clients are remembered beside it.",
    );
    results.targets(targets);
    Ok(())
}

/// A configuration as text, and as it is understood.
fn parse(text: &str) -> Result<Config> {
    Ok(Config::parse("the bench's configuration", text)?)
}
