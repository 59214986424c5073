//! The balance simulation: the selection core, as the controller drives it, beside what other balancers do.

mod choice;
mod play;
mod rivals;
mod table;
mod verdict;
mod workload;

use std::{
    num::NonZero,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use anyhow::{Result, anyhow};
use balancer_user::method::Method;

use self::{
    choice::Kind,
    play::{Scene, Weights},
    verdict::Verdict,
    workload::Workload,
};
use crate::results::{Machine, Output};

/// `cargo xtask bench balance`: the same flows through each method.
///
/// Flows arrive at random and are given to backends; counters are read every 100 ms, and the windows are 14 s long.
/// Deviation is the standard deviation of the backends' N / weight ÷ its mean (mean over time), overload the largest
/// N / weight ÷ its mean (maximum over time), run the longest run of flows to one backend. Over several seeds: mean,
/// maximum, median, maximum. `+1` = the last backend is down for the first minute and comes back empty. At the end stands
/// where another method loads the backends more evenly, and why.
#[derive(clap::Args)]
pub struct Options {
    /// Leave out 10 and 100 backends: some seconds instead of some minutes
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    output: Output,
    /// How many seeds, from 1 on
    #[arg(long, default_value = "9")]
    seeds: NonZero<u8>,
    /// Simulated seconds, the first 60 of them warm-up
    #[arg(long, default_value_t = 210, value_parser = clap::value_parser!(u16).range(130..=36_000))]
    seconds: u16,
}

/// A scene and a method.
struct Job {
    scene: Scene,
    kind: Kind,
    runs: Vec<Verdict>,
}

/// Plays all scenes with all methods. False: a target was missed.
pub fn run(options: &Options) -> Result<bool> {
    let machine = Machine::here()?;
    let mut jobs: Vec<Job> = scenes(options.quick)
        .into_iter()
        .flat_map(|scene| Kind::ALL.map(|kind| Job { scene, kind, runs: Vec::new() }))
        .collect();
    let scenes = jobs.len() / Kind::ALL.len();
    let tasks: Vec<(usize, u64)> = (1..=u64::from(options.seeds.get()))
        .flat_map(|seed| (0..scenes).map(move |scene| (scene, seed)))
        .collect();
    let next = AtomicUsize::new(0);
    let worker = || -> Vec<(usize, u64, Verdict)> {
        let mut done = Vec::new();
        while let Some((scene, seed)) = tasks.get(next.fetch_add(1, Ordering::Relaxed)).copied() {
            let first = scene * Kind::ALL.len();
            let verdicts = play::play(&jobs[first].scene, seed, options.seconds.into());
            done.extend((first..).zip(verdicts).map(|(job, verdict)| (job, seed, verdict)));
        }
        done
    };
    let mut done = thread::scope(|scope| -> Result<Vec<_>> {
        let threads = thread::available_parallelism().map_or(1, NonZero::get);
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        let mut done = Vec::new();
        for worker in workers {
            done.extend(worker.join().map_err(|_| anyhow!("a simulation panicked"))?);
        }
        Ok(done)
    })?;
    done.sort_by_key(|(job, seed, _)| (*job, *seed));
    for (job, _, verdict) in done {
        jobs[job].runs.push(verdict);
    }
    table::results(machine, &jobs, Kind::ALL.len()).finish(&options.output)
}

/// Each workload: steady and with a backend that comes back; three backends, more, unequal ones; by bytes.
fn scenes(quick: bool) -> Vec<Scene> {
    let packets = [Weights::Equal(3), Weights::Rising, Weights::Equal(10), Weights::Equal(100)];
    let packets = if quick { &packets[..2] } else { &packets[..] };
    let mut settings: Vec<_> = packets.iter().map(|weights| (*weights, Method::LeastPackets)).collect();
    settings.push((Weights::Equal(3), Method::LeastBandwidth));
    let mut scenes = Vec::new();
    for (weights, measure) in settings {
        for returns in [false, true] {
            scenes.extend(Workload::ALL.map(|workload| Scene { workload, weights, measure, returns }));
        }
    }
    scenes
}
