//! The forward simulation of a method that picks the least loaded: who is chosen if nothing but these picks happens.

use std::cmp::Ordering;

use crate::load::Load;

/// A backend, as the choice sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// N: what it carries now.
    pub n: Load,
    /// 1 to 100; 0 is never picked.
    pub weight: u8,
    /// What one pick is expected to add to N.
    pub charge: Load,
}

/// One pick, with N of the picked backend on either side of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Position of the picked backend in configured order.
    pub pick: usize,
    /// Its N when it was picked.
    pub before: Load,
    /// Its N after the pick was charged.
    pub after: Load,
}

/// Picks one backend after the other, each time the one with the lowest Nw, and charges it.
///
/// Among equals it is the next one after the last pick, in configured order, circularly. As an iterator it ends only
/// where no candidate may be picked.
#[derive(Clone, Debug)]
pub struct Schedule {
    candidates: Vec<Candidate>,
    last: Option<usize>,
}

impl Schedule {
    /// Starts from these loads, in configured order, after the pick `last`.
    pub const fn new(candidates: Vec<Candidate>, last: Option<usize>) -> Schedule {
        Schedule { candidates, last }
    }

    /// Who is next: the lowest Nw, the first such one after the last pick.
    pub fn choose(&self) -> Option<usize> {
        let first = self.last.map_or(0, |last| last + 1).min(self.candidates.len());
        let (before, from) = self.candidates.split_at(first);
        let in_turn = (first..).zip(from).chain((0..).zip(before));
        in_turn
            .filter(|(_, candidate)| candidate.weight > 0)
            .reduce(|lowest, other| {
                let order = other.1.n.cmp_weighted(other.1.weight.into(), lowest.1.n, lowest.1.weight.into());
                if order == Ordering::Less { other } else { lowest }
            })
            .map(|(index, _)| index)
    }

    /// Picks who is next and charges it `factor` times.
    pub fn step(&mut self, factor: Load) -> Option<Step> {
        let pick = self.choose()?;
        Some(self.charge(pick, self.candidates[pick].charge.scaled(factor)))
    }

    fn charge(&mut self, pick: usize, charge: Load) -> Step {
        let candidate = &mut self.candidates[pick];
        let before = candidate.n;
        candidate.n = before.plus(charge);
        self.last = Some(pick);
        Step { pick, before, after: candidate.n }
    }
}

impl Iterator for Schedule {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        let pick = self.choose()?;
        Some(self.charge(pick, self.candidates[pick].charge))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fill(candidates: Vec<Candidate>, last: Option<usize>, length: usize) -> Vec<usize> {
        Schedule::new(candidates, last).take(length).map(|step| step.pick).collect()
    }

    fn candidate(n: u64, weight: u8) -> Candidate {
        Candidate { n: Load::units(n), weight, charge: Load::ONE }
    }

    fn equal(count: usize) -> Vec<Candidate> {
        vec![candidate(0, 1); count]
    }

    #[test]
    fn idle_backends_take_turns_after_the_last_pick() {
        assert_eq!(fill(equal(3), None, 7), [0, 1, 2, 0, 1, 2, 0]);
        assert_eq!(fill(equal(3), Some(0), 4), [1, 2, 0, 1]);
        assert_eq!(fill(equal(3), Some(2), 4), [0, 1, 2, 0]);
        let weighted = vec![candidate(0, 1), candidate(0, 50), candidate(0, 7)];
        assert_eq!(fill(weighted, Some(1), 3), [2, 0, 1]);
    }

    #[test]
    fn a_last_pick_that_is_gone_starts_from_the_first() {
        assert_eq!(fill(equal(2), Some(9), 3), [0, 1, 0]);
    }

    #[test]
    fn only_the_tied_take_turns() {
        let three = vec![candidate(4, 1), candidate(9, 1), candidate(4, 1)];
        assert_eq!(fill(three, Some(0), 5), [2, 0, 2, 0, 2]);
    }

    #[test]
    fn weight_zero_is_never_picked_yet_keeps_its_place() {
        let three = vec![candidate(0, 1), candidate(0, 0), candidate(0, 1)];
        assert_eq!(fill(three, Some(1), 3), [2, 0, 2]);
        assert_eq!(fill(vec![candidate(0, 0)], None, 5), [0; 0]);
        assert_eq!(fill(Vec::new(), None, 5), [0; 0]);
    }

    #[test]
    fn thirty_flows_on_five_idle_backends_are_six_each() {
        let picks = fill(equal(5), None, 30);
        for backend in 0..5 {
            assert_eq!(picks.iter().filter(|pick| **pick == backend).count(), 6);
        }
    }

    proptest! {
        #[test]
        fn each_pick_is_the_next_of_the_lowest(
            loads in prop::collection::vec((0u64..20, 0u8..=5, 0u64..3), 1..8), last in prop::option::of(0usize..8),
        ) {
            let candidates: Vec<_> = loads
                .iter()
                .map(|(n, weight, charge)| Candidate { n: Load::units(*n), weight: *weight, charge: Load::units(*charge) })
                .collect();
            let mut loads = loads;
            let mut last = last.filter(|last| *last < loads.len());
            for step in Schedule::new(candidates, last).take(40) {
                // The plain definition, in fractions over 60 = lcm(1..5).
                let nw = |index: usize| loads[index].0 * 60 / u64::from(loads[index].1);
                let eligible = (0..loads.len()).filter(|index| loads[*index].1 > 0);
                let lowest = eligible.clone().map(nw).min().unwrap();
                let distance = |index: usize| (index + loads.len() - last.map_or(0, |last| last + 1)) % loads.len();
                let expected = eligible.filter(|index| nw(*index) == lowest).min_by_key(|index| distance(*index));
                prop_assert_eq!(Some(step.pick), expected);
                prop_assert_eq!(step.before, Load::units(loads[step.pick].0));
                loads[step.pick].0 += loads[step.pick].2;
                prop_assert_eq!(step.after, Load::units(loads[step.pick].0));
                last = Some(step.pick);
            }
        }
    }
}
