//! What was measured, round by round, and what it comes to.

use super::{case::Case, target};
use crate::results::{Cell, Machine, Results, Spread};

/// What was measured of one case.
pub struct Samples {
    pub object: String,
    pub case: Case,
    /// The floor's times, in nanoseconds.
    floors: Vec<f64>,
    /// The case's, each right after the floor's.
    pub times: Vec<f64>,
}

/// All that was measured.
pub struct Report {
    pub rows: Vec<Samples>,
    /// What a load from the flow table's memory took, in each round.
    pub misses: Vec<f64>,
}

impl Samples {
    pub fn new(object: &str, case: Case) -> Samples {
        Samples { object: object.to_owned(), case, floors: Vec::new(), times: Vec::new() }
    }

    pub fn add(&mut self, floor: f64, time: f64) {
        self.floors.push(floor);
        self.times.push(time);
    }

    /// The times, divided by the floor's.
    pub fn ratio(&self) -> Option<Spread> {
        Spread::of_ratios(&self.times, &self.floors)
    }
}

impl Report {
    /// As a table, with the targets.
    pub fn results(&self, machine: Machine) -> Results {
        let mut results = Results::new("packet", machine);
        let floors: Vec<f64> = self.rows.iter().flat_map(|row| &row.floors).copied().collect();
        let columns = ["case", "flows", "build", "× floor", "cache misses", "ns, least", "ns, median"];
        let table = results.table(&columns);
        let nanoseconds = |times: &[f64]| {
            let spread = Spread::of(times);
            [spread.map(|spread| spread.least), spread.map(|spread| spread.median)].map(Cell::from)
        };
        let line = |name: &str, times: &[f64]| {
            let [least, median] = nanoseconds(times);
            [name.into(), Cell::Nothing, Cell::Nothing, Cell::Nothing, Cell::Nothing, least, median]
        };
        table.row(line("floor: XDP_TX", &floors));
        table.row(line("one load that no cache has", &self.misses));
        let mut rows: Vec<&Samples> = self.rows.iter().collect();
        rows.sort_by_key(|row| self.rows.iter().position(|other| other.case == row.case));
        for row in rows {
            let [least, median] = nanoseconds(&row.times);
            let misses = target::misses(self, row).and_then(|misses| Spread::of(&misses));
            table.row([
                row.case.name().into(),
                row.case.flows.into(),
                row.object.as_str().into(),
                row.ratio().into(),
                misses.into(),
                least,
                median,
            ]);
        }
        results.note(
            "× floor: the time of a packet ÷ that of `XDP_TX` alone right before it; median of the rounds, and from the lowest to \
             the highest tenth. Cache misses: what it takes more than with one flow ÷ a load that no cache has, in the same round. \
             Of wrapped packets, the time in which the harness takes the wrapping off again is in it.",
        );
        results.targets(target::targets(self));
        results
    }
}
