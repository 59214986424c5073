//! Tables of loads, played through the same schedule as the live rings.

mod input;

use std::{error::Error, fmt};

use serde::Serialize;

use crate::{
    load::Load,
    method::Method,
    rotation::cycle,
    schedule::{Candidate, Schedule, Step},
};

/// A table to be played: a method, the services it chooses from with their loads, and the requests that come.
///
/// Read from JSON: `name`, `method`, `services` (each `name`, `load`, `weight` (0 to 100), `step` (default 1)) and `adds` (default: eight times 1). Loads, steps and adds are numbers of 0 or more, decimals allowed. `unit`,
/// `about`, `note` and `expect` are for readers; any other key is an error. A weight of 0 is never picked. Where no
/// service has a weight, N itself is shown; where only some have one, it is 1 for the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    name: String,
    method: Method,
    services: Vec<Service>,
    adds: Vec<Load>,
    is_weighted: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Service {
    name: String,
    load: Load,
    weight: u8,
    step: Load,
}

/// What the cases gave, in the order of the input.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tables {
    /// One table for each case.
    pub cases: Vec<Table>,
}

/// What one case gave.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Table {
    /// The case's name.
    pub name: String,
    /// One row for each request.
    pub rows: Vec<Row>,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Its number, from 1.
    pub request: usize,
    /// The name of the service that was picked.
    pub pick: String,
    /// Nw (N where no weights are set) of that service before the request, rounded to two decimals.
    pub before: f64,
    /// The same after it.
    pub after: f64,
}

/// The input is not a table, and where that shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadInput {
    /// Line in the input, from 1.
    pub line: usize,
    /// Column in the line, from 1.
    pub column: usize,
    /// Which case, which service and which field, and what is wrong.
    pub message: String,
}

impl fmt::Display for BadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.line, self.column, self.message)
    }
}

impl Error for BadInput {}

impl Case {
    /// Reads one case, or all of `{"cases": […]}`.
    ///
    /// # Errors
    ///
    /// `BadInput` for what is no JSON, has keys or values that no table has, or leaves nothing to be picked.
    pub fn read(text: &str) -> Result<Vec<Case>, BadInput> {
        input::read(text)
    }

    /// Plays the requests one by one.
    ///
    /// N of `round-robin` is the number of its picks so far: loads and steps mean nothing to it.
    pub fn play(&self) -> Table {
        let rows = self.steps().into_iter().enumerate().filter_map(|(index, step)| {
            let service = self.services.get(step.pick)?;
            let shown = |n: Load| match self.is_weighted {
                true => n.shown_weighted(service.weight).unwrap_or_default(),
                false => n.shown(),
            };
            Some(Row {
                request: index + 1,
                pick: service.name.clone(),
                before: shown(step.before),
                after: shown(step.after),
            })
        });
        Table { name: self.name.clone(), rows: rows.collect() }
    }

    fn steps(&self) -> Vec<Step> {
        if self.method == Method::RoundRobin {
            return self.turns();
        }
        let candidates =
            self.services.iter().map(|s| Candidate { n: s.load, weight: s.weight, charge: s.step }).collect();
        let mut schedule = Schedule::new(candidates, None);
        self.adds.iter().map_while(|factor| schedule.step(*factor)).collect()
    }

    fn turns(&self) -> Vec<Step> {
        let weights: Vec<u8> = self.services.iter().map(|service| service.weight).collect();
        let mut picks = vec![0; weights.len()];
        let turns = cycle(&weights, 0).into_iter().cycle().take(self.adds.len());
        turns
            .map(|pick| {
                picks[pick] += 1;
                Step { pick, before: Load::units(picks[pick] - 1), after: Load::units(picks[pick]) }
            })
            .collect()
    }
}

/// Plays every case of a JSON text (`Case::read`).
///
/// # Errors
///
/// As `Case::read`.
pub fn play(text: &str) -> Result<Tables, BadInput> {
    Ok(Tables { cases: Case::read(text)?.iter().map(Case::play).collect() })
}

#[cfg(test)]
mod tests;
