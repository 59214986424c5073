//! The targets.

use super::{
    case::{Case, Kind},
    frame::{IPV4, Mode, Way},
    report::{Report, Samples},
};
use crate::results::{Spread, Target};

/// A packet of a known flow may take so many times the floor: rewritten, IPv4.
const HIT: f64 = 4.0;
/// The same by other ways, and of IPv6.
const HIT_OTHERWISE: f64 = 6.0;
/// One that is none of ours.
const FOREIGN: f64 = 2.0;
/// So many cache misses more for a packet of one among a million flows.
const MISSES: f64 = 3.0;
/// A new flow against an established one, at a million.
const NEW: f64 = 2.0;

/// Each target with what was measured.
pub fn targets(report: &Report) -> Vec<Target> {
    report.rows.iter().filter_map(|row| target(report, row)).collect()
}

/// How many loads that no cache has a packet of one among many flows takes more than one of a single flow, in each round.
pub fn misses(report: &Report, row: &Samples) -> Option<Vec<f64>> {
    let is_among_many = matches!(row.case.kind, Kind::Hit) && row.case.flows > 1;
    let one = other(report, row, Case { flows: 1, ..row.case }).filter(|_| is_among_many)?;
    let extra = row.times.iter().zip(&one.times).zip(&report.misses);
    Some(extra.map(|((many, one), miss)| (many - one) / miss).collect())
}

/// What a row is judged by.
fn target(report: &Report, row: &Samples) -> Option<Target> {
    let Case { kind, shape, flows } = row.case;
    let name = format!("{}: {}, {flows} flows", row.object, row.case.name());
    let of_floor = |limit| {
        let ratio = row.ratio().and_then(|ratio| ratio.sound());
        Some(Target::at_most(format!("{name}: × floor"), ratio, limit))
    };
    match kind {
        Kind::Hit if flows == 1 => {
            of_floor(if shape.family == IPV4 && shape.mode == Mode::Nat { HIT } else { HIT_OTHERWISE })
        }
        Kind::Foreign if flows == 1 => of_floor(FOREIGN),
        Kind::Hit => {
            let misses = misses(report, row)?;
            let median = Spread::of(&misses).map(|misses| misses.median);
            Some(Target::at_most(format!("{name}: cache misses more than with one flow"), median, MISSES))
        }
        Kind::New => {
            let shape = super::case::established(shape.family, shape.transport, Way::Request);
            let known = other(report, row, Case { kind: Kind::Hit, shape, flows })?;
            let ratio = Spread::of_ratios(&row.times, &known.times).and_then(|ratio| ratio.sound());
            Some(Target::at_most(format!("{name}: × an established one"), ratio, NEW))
        }
        _ => None,
    }
}

/// Another case, of the same build.
fn other<'a>(report: &'a Report, row: &Samples, case: Case) -> Option<&'a Samples> {
    report.rows.iter().find(|other| other.object == row.object && other.case == case)
}
