//! Consistent hashing by this balancer's own Maglev tables: each flow by the hash of its addresses and ports, here a
//! random number.

use balancer_user::maglev::{Candidate, table};
use fastrand::Rng;

use super::{Choice, Live};

pub struct Maglev {
    random: Rng,
    table: Vec<usize>,
}

impl Maglev {
    pub fn new(random: Rng) -> Maglev {
        Maglev { random, table: Vec::new() }
    }
}

impl Choice for Maglev {
    fn set_weights(&mut self, _: u64, weights: &[u8]) {
        let candidates = (0..).zip(weights).map(|(identity, weight)| Candidate { identity, weight: *weight });
        self.table = table(&candidates.collect::<Vec<_>>());
    }

    fn choose(&mut self, _: &[Live]) -> usize {
        self.table[self.random.usize(0..self.table.len())]
    }
}
