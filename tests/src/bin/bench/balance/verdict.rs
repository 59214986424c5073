//! How evenly the backends were loaded.

use std::collections::VecDeque;

use balancer_user::{balance::Observation, method::Method};

use super::play::{SPAN, TICK};

/// What is measured in a run, or in several together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Verdict {
    /// Standard deviation ÷ mean of N / weight over the backends: mean over time.
    pub deviation: f64,
    /// Largest N / weight ÷ mean: maximum over time.
    pub overload: f64,
    /// Longest run of picks of one backend.
    pub run: u64,
    /// Of several runs' longest: the middle one. What is longest of all grows with the number of seeds.
    pub typical: u64,
}

/// Watches a run.
pub struct Judge {
    weights: Vec<f64>,
    method: Method,
    /// From when on runs of picks count.
    picks_from: u64,
    /// From when on loads count.
    loads_from: u64,
    /// The window of each backend.
    loads: Vec<f64>,
    ticks: VecDeque<Vec<f64>>,
    last: Option<usize>,
    run: u64,
    longest: u64,
    deviations: f64,
    count: u64,
    overload: f64,
}

impl Verdict {
    /// Over several runs: the mean deviation, the worst overload, the longest run and the middle of the longest.
    pub fn of(runs: &[Verdict]) -> Verdict {
        let mut longest: Vec<u64> = runs.iter().map(|run| run.run).collect();
        longest.sort_unstable();
        Verdict {
            deviation: runs.iter().map(|run| run.deviation).sum::<f64>() / runs.len().max(1) as f64,
            overload: runs.iter().map(|run| run.overload).fold(0.0, f64::max),
            run: longest.last().copied().unwrap_or(0),
            typical: longest.get(longest.len() / 2).copied().unwrap_or(0),
        }
    }
}

impl Judge {
    pub fn new(weights: &[u8], method: Method, picks_from: u64, loads_from: u64) -> Judge {
        Judge {
            weights: weights.iter().copied().map(f64::from).collect(),
            method,
            picks_from,
            loads_from,
            loads: vec![0.0; weights.len()],
            ticks: VecDeque::new(),
            last: None,
            run: 0,
            longest: 0,
            deviations: 0.0,
            count: 0,
            overload: 0.0,
        }
    }

    pub fn pick(&mut self, at: u64, backend: usize) {
        if at < self.picks_from {
            return;
        }
        self.run = if self.last == Some(backend) { self.run + 1 } else { 1 };
        self.last = Some(backend);
        self.longest = self.longest.max(self.run);
    }

    pub fn count(&mut self, now: u64, growth: &[Observation]) {
        let grown = |observation: &Observation| match self.method {
            Method::LeastBandwidth => observation.traffic.bytes as f64,
            _ => observation.traffic.packets as f64,
        };
        // Whole numbers below 2^53: sums are exact.
        let tick: Vec<f64> = growth.iter().map(grown).collect();
        for (load, more) in self.loads.iter_mut().zip(&tick) {
            *load += more;
        }
        self.ticks.push_back(tick);
        if self.ticks.len() as u64 > SPAN / TICK
            && let Some(old) = self.ticks.pop_front()
        {
            for (load, less) in self.loads.iter_mut().zip(old) {
                *load -= less;
            }
        }
        if now > self.loads_from {
            self.judge();
        }
    }

    fn judge(&mut self) {
        let loads: Vec<f64> =
            self.loads.iter().zip(&self.weights).map(|(load, weight)| load / weight).collect();
        let mean = loads.iter().sum::<f64>() / loads.len() as f64;
        if mean > 0.0 {
            let variance = loads.iter().map(|load| (load - mean).powi(2)).sum::<f64>() / loads.len() as f64;
            self.deviations += variance.sqrt() / mean;
            self.overload = self.overload.max(loads.iter().copied().fold(0.0, f64::max) / mean);
        }
        self.count += 1;
    }

    pub fn verdict(&self) -> Verdict {
        Verdict {
            deviation: self.deviations / self.count.max(1) as f64,
            overload: self.overload,
            run: self.longest,
            typical: self.longest,
        }
    }
}
