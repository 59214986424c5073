//! The next picks of a method that picks the least loaded, fast: the same as `Schedule` makes, one by one.

use std::{cmp::Ordering, ops::Add};

use crate::load::Load;

/// A backend, as the choice sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contender {
    /// What is compared.
    pub n: Load,
    /// Its weight among the others', in whatever unit: at most 2^20; 0 is never picked.
    pub weight: u32,
    /// What one pick adds to N.
    pub charge: Load,
    /// How many picks it may get.
    pub room: u64,
}

impl Contender {
    /// Whether it may be picked.
    const fn is_eligible(&self) -> bool {
        self.weight > 0 && self.room > 0
    }
}

/// The next `length` picks, as positions in configured order; fewer if nobody may be picked any more.
///
/// N / weight is compared exactly. All loads are brought to a common multiple of the weights once, so that a pick costs
/// one pass over plain integers; only distances between them matter, which mostly fit into 64 bits. Where
/// not even 128 bits hold them (many large weights without common divisors), fractions are cross-multiplied.
pub fn fill(contenders: &[Contender], last: Option<usize>, length: usize) -> Vec<usize> {
    let first = last.map_or(0, |last| last + 1);
    let Some(scaled) = Scaled::new(contenders, length) else {
        return cross_multiplied(contenders.to_vec(), first, length);
    };
    match scaled.narrow() {
        Some((keys, charges)) => picks(contenders, keys, &charges, u64::MAX, first, length),
        None => picks(contenders, scaled.keys, &scaled.charges, u128::MAX, first, length),
    }
}

/// Loads that compare as N / weight does. The largest key stands for those that are never picked.
struct Scaled {
    keys: Vec<u128>,
    charges: Vec<u128>,
    /// No key of a contender grows beyond this.
    limit: u128,
}

impl Scaled {
    /// `None` if they don't fit.
    fn new(contenders: &[Contender], length: usize) -> Option<Scaled> {
        let eligible = || contenders.iter().filter(|contender| contender.is_eligible());
        let multiple =
            eligible().try_fold(1u64, |multiple, each| common_multiple(multiple, each.weight.into()))?;
        let (mut keys, mut charges) = (Vec::with_capacity(contenders.len()), Vec::new());
        charges.reserve_exact(contenders.len());
        let (mut lowest, mut highest, mut steepest) = (u128::MAX, 0, 0u128);
        for each in contenders {
            let (mut key, mut charge) = (u128::MAX, 0);
            if each.is_eligible() {
                let factor = u128::from(multiple / u64::from(each.weight));
                (key, charge) =
                    (each.n.parts().checked_mul(factor)?, each.charge.parts().checked_mul(factor)?);
                lowest = lowest.min(key);
                highest = highest.max(key);
                steepest = steepest.max(charge);
            }
            keys.push(key);
            charges.push(charge);
        }
        for (key, _) in keys.iter_mut().zip(contenders).filter(|(_, each)| each.is_eligible()) {
            *key -= lowest;
        }
        let limit = steepest.checked_mul(length as u128)?.checked_add(highest.saturating_sub(lowest))?;
        (limit < u128::MAX).then_some(Scaled { keys, charges, limit })
    }

    /// The same in 64 bits, if they fit.
    fn narrow(&self) -> Option<(Vec<u64>, Vec<u64>)> {
        // Cut to the largest where that is its 128-bit counterpart.
        let cut = |wide: &[u128]| wide.iter().map(|value| *value as u64).collect();
        (self.limit < u128::from(u64::MAX)).then(|| (cut(&self.keys), cut(&self.charges)))
    }
}

fn picks<Key: Copy + Ord + Add<Output = Key>>(
    contenders: &[Contender],
    mut keys: Vec<Key>,
    charges: &[Key],
    never: Key,
    mut first: usize,
    length: usize,
) -> Vec<usize> {
    let mut picks = Vec::with_capacity(length);
    let mut rooms: Vec<u64> = contenders.iter().map(|contender| contender.room).collect();
    for _ in 0..length {
        let (before, from) = keys.split_at(first.min(keys.len()));
        let (mut pick, mut lowest) = (0, never);
        // Circularly from `first`; among equals the one met first stays.
        for (start, part) in [(before.len(), from), (0, before)] {
            for (index, key) in part.iter().enumerate() {
                if *key < lowest {
                    (pick, lowest) = (start + index, *key);
                }
            }
        }
        if lowest == never {
            break;
        }
        rooms[pick] -= 1;
        keys[pick] = if rooms[pick] == 0 { never } else { lowest + charges[pick] };
        picks.push(pick);
        first = pick + 1;
    }
    picks
}

fn cross_multiplied(mut contenders: Vec<Contender>, mut first: usize, length: usize) -> Vec<usize> {
    let mut picks = Vec::with_capacity(length);
    for _ in 0..length {
        let (before, from) = contenders.split_at(first.min(contenders.len()));
        let in_turn = (before.len()..).zip(from).chain((0..).zip(before));
        let lowest = in_turn.filter(|(_, each)| each.is_eligible()).reduce(|lowest, other| {
            match other.1.n.cmp_weighted(other.1.weight, lowest.1.n, lowest.1.weight) {
                Ordering::Less => other,
                Ordering::Equal | Ordering::Greater => lowest,
            }
        });
        let Some((pick, _)) = lowest else { break };
        contenders[pick].n = contenders[pick].n.plus(contenders[pick].charge);
        contenders[pick].room -= 1;
        picks.push(pick);
        first = pick + 1;
    }
    picks
}

fn common_multiple(a: u64, b: u64) -> Option<u64> {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    (a / divisor).checked_mul(b)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::schedule::{Candidate, Schedule};

    fn contender(n: u64, weight: u32) -> Contender {
        Contender { n: Load::units(n), weight, charge: Load::ONE, room: u64::MAX }
    }

    #[test]
    fn nobody_to_pick_is_no_pick() {
        assert_eq!(fill(&[], None, 5), [0; 0]);
        assert_eq!(fill(&[contender(0, 0), contender(3, 0)], Some(1), 5), [0; 0]);
        assert_eq!(fill(&[contender(0, 0), contender(3, 7)], Some(9), 3), [1, 1, 1]);
    }

    #[test]
    fn weights_without_a_common_multiple_are_compared_all_the_same() {
        let primes = [97, 89, 83, 79, 73, 71, 67, 61, 59, 53, 47, 43, 41, 37, 31, 29, 23, 19, 17, 13, 11, 7];
        let contenders: Vec<_> = primes.iter().map(|prime| contender(u64::MAX, *prime)).collect();
        assert!(Scaled::new(&contenders, 1).is_none());
        let all = primes.iter().sum::<u32>() as usize;
        let idle: Vec<_> = primes.iter().map(|prime| contender(0, *prime)).collect();
        let picks = fill(&idle, None, all);
        for (index, prime) in primes.iter().enumerate() {
            let count = picks.iter().filter(|pick| **pick == index).count();
            assert_eq!(count, *prime as usize, "a share of {prime}");
        }
    }

    proptest! {
        #[test]
        fn picks_are_those_of_the_schedule(
            loads in prop::collection::vec((0u64..20, 0u8..=100, 0u64..3), 1..24), last in prop::option::of(0usize..9),
            // From what fits 64 bits to what does not fit 128.
            size in prop::sample::select(vec![1u64, 1_000_000_000_000, 500_000_000_000_000]),
        ) {
            let of = |units: u64| Load::units(units * size).times(if size > 1 { 1_000_000 } else { 1 });
            let candidates: Vec<_> = loads
                .iter()
                .map(|(n, weight, charge)| Candidate { n: of(*n), weight: *weight, charge: of(*charge) })
                .collect();
            let contenders: Vec<_> = candidates
                .iter()
                .map(|each| Contender { n: each.n, weight: each.weight.into(), charge: each.charge, room: u64::MAX })
                .collect();
            let expected: Vec<_> = Schedule::new(candidates, last).take(60).map(|step| step.pick).collect();
            prop_assert_eq!(fill(&contenders, last, 60), expected);
        }
    }
}
