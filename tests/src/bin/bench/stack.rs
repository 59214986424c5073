//! What a user would notice: web servers behind this balancer, and behind what else there is.

mod client;
mod subject;

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, Result};

use self::{
    client::Client,
    subject::{Servers, Subject},
};
use crate::results::{Cell, Interval, Results, Spread, Target};

/// How long each load lasts.
const CONNECTIONS: Duration = Duration::from_secs(2);
const OTHERS: Duration = Duration::from_secs(1);
/// The interval of the extra time for a connection is to be no wider, in microseconds.
const WIDTH: f64 = 10.0;
/// Rounds in which all is measured; then connections alone, of those whose intervals are compared.
const ALL: u32 = 8;

/// What one subject came to, round by round.
#[derive(Default)]
struct Measured {
    connections: Vec<f64>,
    latency: Vec<f64>,
    /// CPU time of the whole machine for a connection, in microseconds.
    time: Vec<f64>,
    requests: Vec<f64>,
    gigabits: Vec<f64>,
    round_trips: Vec<f64>,
}

/// Measures in so many rounds at most.
pub fn run(results: &mut Results, most: u32) -> Result<()> {
    let servers = Servers::start().context("start the servers")?;
    let client = Client::new(&servers);
    let mut subjects = Vec::new();
    for subject in Subject::ALL {
        match subject.missing() {
            None => subjects.push(subject),
            Some(what) => results.note(format!("{}: left out, since {what} is missing.", subject.name())),
        }
    }
    let mut measured: BTreeMap<Subject, Measured> = BTreeMap::new();
    let mut round = 0;
    while round < most && (round < ALL.min(most) || !is_narrow(&measured)) {
        round += 1;
        let is_whole = round <= ALL;
        for subject in subjects.iter().copied().filter(|subject| is_whole || subject.is_compared()) {
            let name = subject.name();
            let running = servers.put(subject).with_context(|| format!("start {name}"))?;
            client.wait(subject).with_context(|| format!("reach the servers through {name}"))?;
            let of = measured.entry(subject).or_default();
            let load = client
                .connections(subject, CONNECTIONS)
                .with_context(|| format!("connect through {name}"))?;
            of.connections.push(load.rate);
            of.latency.push(load.latency);
            of.time.push(load.time);
            if is_whole {
                of.requests.push(client.requests(subject, OTHERS)?.rate);
                of.gigabits.push(client.gigabits(subject, OTHERS)?);
                if subject.carries_datagrams() {
                    of.round_trips.push(client.round_trip(subject)?);
                }
            }
            drop(running);
        }
        eprint!("\rfull stack: round {round} of {most} at most");
    }
    eprintln!();
    report(results, &subjects, &measured, round);
    Ok(())
}

/// Whether it is known well enough what a connection takes more than directly.
fn is_narrow(measured: &BTreeMap<Subject, Measured>) -> bool {
    let compared =
        [Subject::Nftables, Subject::Balancer].map(|subject| extra(measured, subject, Subject::Direct));
    compared.into_iter().flatten().all(|extra| extra.width() <= WIDTH)
}

/// CPU time for a connection through one, more than through the other, in the same rounds.
fn extra(measured: &BTreeMap<Subject, Measured>, one: Subject, other: Subject) -> Option<Interval> {
    let (one, other) = (measured.get(&one)?, measured.get(&other)?);
    Interval::of(&one.time.iter().zip(&other.time).map(|(one, other)| one - other).collect::<Vec<_>>())
}

fn report(results: &mut Results, subjects: &[Subject], measured: &BTreeMap<Subject, Measured>, rounds: u32) {
    let table = results.table(&[
        "through",
        "connections/s",
        "median latency of one, ms",
        "CPU for one, µs",
        "more than directly, µs",
        "requests/s, kept alive",
        "TCP, Gbit/s",
        "UDP round trip, µs",
    ]);
    for subject in subjects {
        let Some(of) = measured.get(subject) else { continue };
        let spread = |values: &[f64]| Cell::from(Spread::of(values));
        let extra =
            if *subject == Subject::Direct { None } else { extra(measured, *subject, Subject::Direct) };
        table.row([
            subject.name().into(),
            spread(&of.connections),
            spread(&of.latency),
            spread(&of.time),
            extra.into(),
            spread(&of.requests),
            spread(&of.gigabits),
            spread(&of.round_trips),
        ]);
    }
    results.note(format!(
        "Client and web servers on one CPU, proxies on another where there is one; frames of 1500 bytes at most, no offloads. CPU: of the \
         whole machine, client and servers included. More than directly: mean of the differences within a round, and its 95 % interval; \
         {rounds} rounds."
    ));
    if !is_narrow(measured) {
        results.note(format!("After {rounds} rounds the intervals are still wider than {WIDTH} µs: measure again on a quiet machine."));
    }
    let more = extra(measured, Subject::Balancer, Subject::Nftables).filter(|_| is_narrow(measured));
    results.targets([Target::at_most(
        "CPU for a connection, more than through nftables, µs",
        more.map(|more| more.mean),
        0.0,
    )]);
}
