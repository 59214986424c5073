//! `cargo xtask soak` runs this: a balancer that is changed, killed and cut off at random, under TCP and UDP load whose every
//! byte is compared. At the end nothing may be wrong, lost that was not to be lost, or left behind.

mod leftovers;
mod load;
mod model;
mod operator;
mod record;

use std::{process::ExitCode, sync::Arc, thread, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use balancer_tests::{Balancer, Plan, eventually, process::Place, status};
use clap::Parser;

use leftovers::Leftovers;
use load::{Load, Servers};
use model::{BACKENDS, Model};
use operator::Operator;
use record::Record;

/// How long the flow table may take to be empty once nobody sends any more: its timeouts are shorter.
const EMPTY_AFTER: Duration = Duration::from_secs(60);
/// How much more memory a daemon may have at the end than when it had run for a while.
const GROWTH_KIB: u64 = 8 << 10;

/// A balancer that is changed, killed and cut off at random, under a load whose every byte is compared.
#[derive(Parser)]
#[command(name = "cargo xtask soak", bin_name = "cargo xtask soak")]
struct Options {
    /// How long
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=10_080))]
    minutes: u16,
    /// Choose as an earlier soak did, which said its seed [default: another each time]
    #[arg(long)]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..));
    match soak(Duration::from_secs(60 * u64::from(options.minutes)), seed) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}\nsoak: to choose so again: --seed {seed}");
            ExitCode::FAILURE
        }
    }
}

fn soak(time: Duration, seed: u64) -> Result<()> {
    println!("soak: {} s with seed {seed}", time.as_secs());
    let bench = Plan::backends(BACKENDS).build()?;
    let record = Arc::new(Record::new());
    let servers = Servers::start(&bench)?;
    let model = Model::new();
    let place = Place::new()?;
    place.write_config(&model.text())?;
    let mut operator = Operator::new(&bench, &record, seed, model)?;
    let mut balancer = Balancer::start_in(place, &bench.balancer)?;
    status::wait_until_up(&balancer)?;
    let before = Leftovers::of(&bench, &balancer)?;

    let load = Arc::new(Load::new(Arc::clone(&record), seed));
    let ended = thread::scope(|scope| {
        let driven = scope.spawn(|| bench.client.run(|| load.drive()));
        // A daemon that lives for the second half shows what it gathers.
        let first = operator.work(balancer, time / 2, true);
        let ended = first.and_then(|balancer| {
            let half = leftovers::memory_kib(&balancer)?;
            let balancer = operator.work(balancer, time / 2, false)?;
            let balancer = operator.restore(balancer)?;
            Ok((half, balancer))
        });
        load.stop();
        let driven = driven.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        driven.context("drive the load")?;
        ended
    });
    let half;
    (half, balancer) = ended?;
    println!("{}", operator.summary());
    println!("{}", record.summary());
    record.verdict().with_context(|| format!("the balancer printed:\n{}", tail(&balancer.log())))?;

    let empty = eventually(EMPTY_AFTER, "an empty flow table, and every backend up", || {
        status::read(&balancer).ok().filter(leftovers::is_idle)
    });
    empty.with_context(|| format!("last: {:#?}", status::read(&balancer)))?;
    let memory = leftovers::memory_kib(&balancer)?;
    println!("memory of the daemon: {half} KiB after the first half, {memory} KiB at the end");
    ensure!(memory <= half + GROWTH_KIB, "the daemon's memory grew from {half} to {memory} KiB");
    let after = before.wait_for(&bench, &balancer)?;
    println!("left behind: nothing ({after})");
    drop(servers);

    let (status, place) = balancer.stop()?;
    ensure!(status.success(), "the balancer ended so: {status}");
    leftovers::detach(&bench, &place)?;
    if record.is_silent() {
        bail!("no flow was opened");
    }
    println!("soak: passed");
    Ok(())
}

/// The last lines of a log.
fn tail(log: &str) -> String {
    const LINES: usize = 40;
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}
