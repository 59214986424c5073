use std::fmt;

use serde::{Deserialize, Serialize};

/// What a measured value must come to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Target {
    what: String,
    /// `None`: nothing that can be stood behind, which meets no target.
    value: Option<f64>,
    bound: Bound,
    limit: f64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Bound {
    AtMost,
    AtLeast,
}

impl Target {
    pub fn at_most(what: impl Into<String>, value: Option<f64>, limit: f64) -> Target {
        Target { what: what.into(), value, bound: Bound::AtMost, limit }
    }

    pub fn at_least(what: impl Into<String>, value: Option<f64>, limit: f64) -> Target {
        Target { what: what.into(), value, bound: Bound::AtLeast, limit }
    }

    pub fn is_met(&self) -> bool {
        self.value.is_some_and(|value| match self.bound {
            Bound::AtMost => value <= self.limit,
            Bound::AtLeast => value >= self.limit,
        })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.is_met() { "met" } else { "MISSED" };
        let bound = match self.bound {
            Bound::AtMost => "at most",
            Bound::AtLeast => "at least",
        };
        write!(out, "{verdict}: {}: ", self.what)?;
        match self.value {
            Some(value) => super::short(value, out)?,
            None => write!(out, "nothing that can be stood behind")?,
        }
        write!(out, ", {bound} {}", self.limit)
    }
}
