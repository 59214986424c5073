//! Weighted round robin: one cycle of turns, as evenly mixed as whole turns allow.

/// The turns of one cycle, as positions in configured order; going round it for ever is the method.
///
/// Each backend has exactly its weight's share (divided by what all weights have in common). At each turn, of those
/// that are not ahead of their share, the one whose next turn is due first gets it; among equals the first one from
/// `origin` on, circularly. Weights of 0 have no turn. The state of the method is thus one position in
/// the cycle: nobody can fall behind, and a newcomer has nothing to catch up on.
pub fn cycle(weights: &[u8], origin: usize) -> Vec<usize> {
    let divisor = divisor(weights.iter().copied());
    let weights: Vec<u64> = weights.iter().map(|weight| u64::from(*weight) / divisor).collect();
    let length: u64 = weights.iter().sum();
    let origin = origin.min(weights.len());
    let order: Vec<usize> =
        (origin..weights.len()).chain(0..origin).filter(|index| weights[*index] > 0).collect();
    let mut turns = vec![0u64; weights.len()];
    let mut cycle = Vec::new();
    for turn in 0..length {
        let ready = order.iter().copied().filter(|index| turns[*index] * length <= turn * weights[*index]);
        // The due time is (turns + 1) / weight, compared exactly; `reduce` keeps the first of equals.
        let next = ready.reduce(|first, other| {
            let is_sooner = (turns[other] + 1) * weights[first] < (turns[first] + 1) * weights[other];
            if is_sooner { other } else { first }
        });
        if let Some(next) = next {
            turns[next] += 1;
            cycle.push(next);
        }
    }
    cycle
}

/// How many turns a cycle has.
pub fn cycle_length(weights: impl Iterator<Item = u8> + Clone) -> usize {
    let divisor = divisor(weights.clone());
    // Below 2^24, as there are no more than 2^16 backends.
    weights.map(|weight| u64::from(weight) / divisor).sum::<u64>() as usize
}

/// What all weights have in common; at least 1.
fn divisor(weights: impl Iterator<Item = u8>) -> u64 {
    u64::from(weights.fold(0, common_divisor).max(1))
}

const fn common_divisor(a: u8, b: u8) -> u8 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn turns_are_mixed() {
        assert_eq!(cycle(&[1, 1, 1], 0), [0, 1, 2]);
        assert_eq!(cycle(&[1, 1, 1], 1), [1, 2, 0]);
        assert_eq!(cycle(&[5, 1, 1], 0), [0, 1, 0, 0, 2, 0, 0]);
        assert_eq!(cycle(&[2, 1], 0), [0, 1, 0]);
        assert_eq!(cycle(&[40, 20], 0), [0, 1, 0]);
        assert_eq!(cycle(&[0, 7, 0], 0), [1]);
        assert_eq!(cycle(&[0, 0], 0), [0; 0]);
        assert_eq!(cycle(&[], 3), [0; 0]);
    }

    proptest! {
        #[test]
        fn at_no_time_is_anyone_a_whole_turn_off_its_share(
            weights in prop::collection::vec(0u8..=100, 1..8), origin in 0usize..9,
        ) {
            let total: i64 = weights.iter().map(|weight| i64::from(*weight)).sum();
            let cycle = cycle(&weights, origin);
            prop_assert_eq!(total == 0, cycle.is_empty());
            let mut turns = vec![0i64; weights.len()];
            for (past, pick) in cycle.iter().chain(&cycle).enumerate() {
                turns[*pick] += 1;
                for (index, weight) in weights.iter().enumerate() {
                    let off = turns[index] * total - (past as i64 + 1) * i64::from(*weight);
                    prop_assert!(off < total && off > -total, "{index} is off by {off}/{total}");
                }
            }
            prop_assert_eq!(cycle.len(), cycle_length(weights.iter().copied()));
            let length = cycle.len() as i64;
            for (index, weight) in weights.iter().enumerate() {
                prop_assert_eq!(turns[index] * total, 2 * length * i64::from(*weight));
            }
        }
    }
}
