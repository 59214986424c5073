use std::fmt;

use serde::{Deserialize, Serialize};

/// How values of several rounds are distributed.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Spread {
    pub least: f64,
    /// A tenth is below.
    pub low: f64,
    pub median: f64,
    /// A tenth is above.
    pub high: f64,
}

impl Spread {
    /// Rounds that are further apart than this (the tenth part that is highest against the tenth part that is lowest) say
    /// nothing.
    pub const MOST: f64 = 3.0;

    /// `None` of no values.
    pub fn of(values: &[f64]) -> Option<Spread> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |part: f64| {
            let place = part * (sorted.len().max(1) - 1) as f64;
            sorted.get(place.round() as usize).copied()
        };
        Some(Spread { least: at(0.0)?, low: at(0.1)?, median: at(0.5)?, high: at(0.9)? })
    }

    /// Of one value divided by the other, round by round.
    pub fn of_ratios(values: &[f64], others: &[f64]) -> Option<Spread> {
        Spread::of(&values.iter().zip(others).map(|(value, other)| value / other).collect::<Vec<_>>())
    }

    /// Whether the rounds are so far apart that nothing can be said.
    pub fn disagrees(&self) -> bool {
        self.high > self.low * Spread::MOST
    }

    /// The middle, if it can be stood behind.
    pub fn sound(&self) -> Option<f64> {
        (!self.disagrees()).then_some(self.median)
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.sound() {
            Some(median) => super::short(median, out)?,
            None => write!(out, "?")?,
        }
        write!(out, " (")?;
        super::short(self.low, out)?;
        write!(out, "–")?;
        super::short(self.high, out)?;
        write!(out, ")")
    }
}
