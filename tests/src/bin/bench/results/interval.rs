use std::fmt;

use serde::{Deserialize, Serialize};

/// A mean, and where the true one is with 95 %.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Interval {
    pub mean: f64,
    pub from: f64,
    pub to: f64,
}

impl Interval {
    /// Of independent values that are more than a few; `None` of less than two.
    pub fn of(values: &[f64]) -> Option<Interval> {
        let count = values.len() as f64;
        if values.len() < 2 {
            return None;
        }
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
        // Student's t is a little more than the normal distribution's 1.96: Cornish and Fisher's first correction.
        let t = 1.96 + 2.37 / (count - 1.0);
        let half = t * (variance / count).sqrt();
        Some(Interval { mean, from: mean - half, to: mean + half })
    }

    pub fn width(&self) -> f64 {
        self.to - self.from
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:+.1} [{:.1}, {:.1}]", self.mean, self.from, self.to)
    }
}
