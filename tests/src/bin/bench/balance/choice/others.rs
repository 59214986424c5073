//! What other balancers offer.

use balancer_user::rotation::cycle;
use fastrand::Rng;

use super::{Choice, Live};

/// Weighted, as evenly mixed as may be.
#[derive(Default)]
pub struct RoundRobin {
    cycle: Vec<usize>,
    turn: usize,
}

impl Choice for RoundRobin {
    fn set_weights(&mut self, _: u64, weights: &[u8]) {
        self.cycle = cycle(weights, 0);
        self.turn = 0;
    }

    fn choose(&mut self, _: &[Live]) -> usize {
        let pick = self.cycle[self.turn % self.cycle.len()];
        self.turn += 1;
        pick
    }
}

/// By chance, in proportion to the weights.
pub struct Random {
    random: Rng,
    weights: Vec<u8>,
}

impl Random {
    pub fn new(random: Rng) -> Random {
        Random { random, weights: Vec::new() }
    }

    fn pick(&mut self) -> usize {
        let sum = self.weights.iter().copied().map(usize::from).sum();
        let mut rest = self.random.usize(0..sum);
        let index = self.weights.iter().position(|weight| {
            let is_here = rest < usize::from(*weight);
            rest = rest.saturating_sub(usize::from(*weight));
            is_here
        });
        index.unwrap_or(0)
    }
}

impl Choice for Random {
    fn set_weights(&mut self, _: u64, weights: &[u8]) {
        self.weights = weights.to_vec();
    }

    fn choose(&mut self, _: &[Live]) -> usize {
        self.pick()
    }
}

/// Of two by chance, the one with fewer open flows for its weight.
pub struct TwoChoices(Random);

impl TwoChoices {
    pub fn new(random: Rng) -> TwoChoices {
        TwoChoices(Random::new(random))
    }
}

impl Choice for TwoChoices {
    fn set_weights(&mut self, now: u64, weights: &[u8]) {
        self.0.set_weights(now, weights);
    }

    fn choose(&mut self, live: &[Live]) -> usize {
        let (one, other) = (self.0.pick(), self.0.pick());
        let load = |of: usize, weight_of: usize| live[of].active * u64::from(self.0.weights[weight_of]);
        if load(other, one) < load(one, other) { other } else { one }
    }
}

/// As IPVS `wlc`: open flows × 256 + those that ended within two minutes, for the weight; the first of equals.
#[derive(Default)]
pub struct LeastConnections {
    weights: Vec<u8>,
}

impl Choice for LeastConnections {
    fn set_weights(&mut self, _: u64, weights: &[u8]) {
        self.weights = weights.to_vec();
    }

    fn choose(&mut self, live: &[Live]) -> usize {
        let load = |of: usize, weight_of: usize| {
            (live[of].active * 256 + live[of].inactive) * u64::from(self.weights[weight_of])
        };
        let eligible = (0..self.weights.len()).filter(|index| self.weights[*index] > 0);
        eligible
            .reduce(|least, other| if load(other, least) < load(least, other) { other } else { least })
            .unwrap_or(0)
    }
}
