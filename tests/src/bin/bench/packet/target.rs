//! The targets, and which of them are missed.

use super::{
    case::{Kind, MANY},
    frame::Way,
    report::{Report, Row, Spread},
};

/// A packet of a known flow may take so many times the floor.
const HIT: f64 = 4.0;
/// One that is none of ours.
const FOREIGN: f64 = 2.0;
/// So many cache misses more for a packet of one among a million flows.
const MISSES: f64 = 3.0;
/// A new flow against an established one, at a million.
const NEW: f64 = 2.0;

/// Prints each target with what was measured; whether all of this build's own are met.
pub fn check(report: &Report) -> bool {
    println!();
    let mut is_met = true;
    for row in &report.rows {
        for (what, value, limit) in figures(report, row) {
            let met = value <= limit;
            is_met &= met;
            let verdict = if met { "met" } else { "MISSED" };
            println!(
                "{verdict}: {}: {}, {} flows: {what} {value:.2}, at most {limit}",
                row.object, row.case, row.flows
            );
        }
    }
    is_met
}

/// What a row is judged by: what it is, how much, and how much it may be.
fn figures(report: &Report, row: &Row) -> Vec<(&'static str, f64, f64)> {
    let mut figures = Vec::new();
    // A ratio that can't be stood behind meets no target.
    let ratio = if row.disagrees { f64::INFINITY } else { row.ratio.median };
    match row.what.kind {
        Kind::Hit if row.flows == 1 => figures.push(("× floor", ratio, HIT)),
        Kind::Foreign if row.flows == 1 => figures.push(("× floor", ratio, FOREIGN)),
        Kind::Hit if row.flows == MANY => {
            let one = other(report, row, |other| other.what.kind == Kind::Hit && other.flows == 1);
            if let Some(one) = one {
                let extra =
                    pairs(row, one).zip(&report.misses).map(|((many, one), miss)| (many - one) / miss);
                figures.push(("cache misses more than for one", median(extra), MISSES));
            }
        }
        Kind::New => {
            let known = other(report, row, |other| other.what.kind == Kind::Hit && other.flows == MANY);
            if let Some(known) = known {
                figures.push((
                    "× an established one",
                    median(pairs(row, known).map(|(new, old)| new / old)),
                    NEW,
                ));
            }
        }
        _ => {}
    }
    figures
}

/// The row to compare with: of the same build and protocol; requests with requests, new flows with those as well.
fn other<'a>(report: &'a Report, row: &Row, is_wanted: impl Fn(&Row) -> bool) -> Option<&'a Row> {
    let way = if row.what.kind == Kind::Hit { row.what.shape.way } else { Way::Request };
    report.rows.iter().find(|other| {
        let (ours, theirs) = (row.what.shape, other.what.shape);
        let is_alike =
            ours.family == theirs.family && ours.transport == theirs.transport && theirs.way == way;
        other.object == row.object && is_alike && is_wanted(other)
    })
}

/// Times of the same rounds.
fn pairs<'a>(one: &'a Row, other: &'a Row) -> impl Iterator<Item = (f64, f64)> {
    one.times.iter().copied().zip(other.times.iter().copied())
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    Spread::of(&values.collect::<Vec<_>>()).median
}
