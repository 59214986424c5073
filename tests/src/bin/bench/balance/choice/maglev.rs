//! Consistent hashing as Maglev does it (Eisenbud et al., NSDI 2016, section 3.4): each flow by the hash of its
//! addresses and ports, here a random number.

use fastrand::Rng;

use super::{Choice, Live};

/// Entries of the table: a prime.
const ENTRIES: usize = 65_537;

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
        const FREE: usize = usize::MAX;
        let mut table = vec![FREE; ENTRIES];
        // Where each backend's own permutation of the table starts, and its step.
        let mut walks: Vec<(usize, usize)> = (0..weights.len() as u64)
            .map(|id| {
                let mut hash = Rng::with_seed(id);
                (hash.usize(0..ENTRIES), hash.usize(1..ENTRIES))
            })
            .collect();
        let turns = (0..weights.len()).flat_map(|id| std::iter::repeat_n(id, usize::from(weights[id])));
        for id in turns.collect::<Vec<_>>().into_iter().cycle().take(ENTRIES) {
            let (place, step) = &mut walks[id];
            while table[*place] != FREE {
                *place = (*place + *step) % ENTRIES;
            }
            table[*place] = id;
        }
        self.table = table;
    }

    fn choose(&mut self, _: &[Live]) -> usize {
        self.table[self.random.usize(0..ENTRIES)]
    }
}
