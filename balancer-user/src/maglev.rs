//! Maglev tables: consistent hashing by a table that each backend fills in an order of its own, in turn (Eisenbud et
//! al., NSDI 2016, section 3.4), here with weights: a backend's turn comes as often as its share of the largest weight.
//!
//! The order of a backend depends on its identity alone, so that balancers with the same backends agree, and one that
//! leaves moves few flows of the others.

use std::net::SocketAddr;

/// Slots of a table: the largest prime that fits into a half of a selection ring.
pub const SLOTS: usize = 4093;

/// A backend that may take flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// What tells it from others for good: see [`identity`].
    pub identity: u64,
    /// 1 to 100; 0 takes no slot.
    pub weight: u8,
}

/// What tells a backend from others, on every balancer alike: its address and port.
pub fn identity(endpoint: SocketAddr) -> u64 {
    let port = u64::from(endpoint.port());
    match endpoint {
        SocketAddr::V4(endpoint) => u64::from(endpoint.ip().to_bits()) << 16 | port,
        SocketAddr::V6(endpoint) => {
            let bits = endpoint.ip().to_bits();
            [(bits >> 64) as u64, bits as u64, port].into_iter().fold(0, |hash, word| mix(hash ^ word))
        }
    }
}

/// For each slot, the index of the candidate that owns it; empty when no weight is above 0.
pub fn table(candidates: &[Candidate]) -> Vec<usize> {
    let Some(largest) =
        candidates.iter().map(|candidate| candidate.weight).max().filter(|weight| *weight > 0)
    else {
        return Vec::new();
    };
    let mut turns: Vec<(usize, Turn)> = candidates.iter().map(Turn::new).enumerate().collect();
    turns.sort_by_key(|(index, _)| candidates.get(*index).map(|candidate| candidate.identity));
    let mut owners = vec![None; SLOTS];
    let mut free = SLOTS;
    while free > 0 {
        for (index, turn) in &mut turns {
            if free > 0 && turn.is_due(largest) {
                let slot = turn.next_free(&owners);
                owners[slot] = Some(*index);
                free -= 1;
            }
        }
    }
    owners.into_iter().flatten().collect()
}

/// Where a candidate is in its own order of all slots.
struct Turn {
    weight: u8,
    credit: u16,
    slot: usize,
    skip: usize,
}

impl Turn {
    fn new(candidate: &Candidate) -> Turn {
        let [first, second] = [mix(candidate.identity), mix(candidate.identity ^ 0x9e37_79b9_7f4a_7c15)];
        Turn {
            weight: candidate.weight,
            credit: 0,
            slot: (first % SLOTS as u64) as usize,
            // Any skip but 0 visits every slot of a table of prime size.
            skip: (second % (SLOTS as u64 - 1)) as usize + 1,
        }
    }

    /// Whether it claims a slot in this round.
    fn is_due(&mut self, largest: u8) -> bool {
        self.credit += u16::from(self.weight);
        let is_due = self.credit >= u16::from(largest);
        if is_due {
            self.credit -= u16::from(largest);
        }
        is_due
    }

    /// The next slot of its order that nobody owns; there must be one.
    fn next_free(&mut self, owners: &[Option<usize>]) -> usize {
        while owners[self.slot].is_some() {
            self.slot = (self.slot + self.skip) % SLOTS;
        }
        self.slot
    }
}

/// The finalizer of SplitMix64.
const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(count: u64, weight: impl Fn(u64) -> u8) -> Vec<Candidate> {
        (0..count).map(|id| Candidate { identity: 0x0a00_020b_1f90 + id, weight: weight(id) }).collect()
    }

    fn owned(table: &[usize], candidates: usize) -> Vec<usize> {
        (0..candidates).map(|index| table.iter().filter(|owner| **owner == index).count()).collect()
    }

    #[test]
    fn equal_weights_own_equal_parts() {
        for count in [1, 2, 3, 10, 100] {
            let owned = owned(&table(&candidates(count, |_| 1)), count as usize);
            let (least, most) = (owned.iter().min().unwrap(), owned.iter().max().unwrap());
            assert_eq!(owned.iter().sum::<usize>(), SLOTS);
            assert!(most - least <= 1, "{count}: {least} to {most}");
        }
    }

    #[test]
    fn slots_follow_the_weights() {
        let owned = owned(&table(&candidates(4, |id| id as u8 + 1)), 4);
        for (id, owned) in owned.into_iter().enumerate() {
            let ideal = SLOTS * (id + 1) / 10;
            assert!(owned.abs_diff(ideal) <= 2, "{owned} instead of {ideal}");
        }
    }

    #[test]
    fn nobody_with_weight_0_owns_a_slot() {
        assert!(table(&[]).is_empty());
        assert!(table(&candidates(3, |_| 0)).is_empty());
        assert_eq!(owned(&table(&candidates(3, |id| u8::from(id != 1))), 3)[1], 0);
    }

    /// One of n leaves: of the slots that others own, at most 2/n change hands; and the order of the rest is the same
    /// whoever stands beside them in the configuration.
    #[test]
    fn one_that_leaves_moves_few_others() {
        for count in [3u64, 10, 50] {
            let before = candidates(count, |id| (id % 3) as u8 + 1);
            let full = table(&before);
            for gone in 0..count as usize {
                let mut after = before.clone();
                after[gone].weight = 0;
                let rest = table(&after);
                let kept = full.iter().zip(&rest).filter(|(owner, _)| **owner != gone);
                let moved = kept.clone().filter(|(before, after)| before != after).count();
                assert!(
                    moved * count as usize <= 2 * kept.count(),
                    "{moved} of {SLOTS} moved, {gone} of {count} left"
                );
            }
        }
    }

    /// Balancers that were built at different times must agree.
    #[test]
    fn the_identity_of_a_backend_is_fixed() {
        let identity = |text: &str| identity(text.parse().unwrap());
        assert_eq!(identity("10.0.2.11:8080"), 0x0a00_020b_1f90);
        let ipv6 = [
            ("[2001:db8:2::11]:8080", 0x52f1_9d98_e556_390c),
            ("[2001:db8:2::11]:8081", 0xe839_f227_a9ce_4727),
            ("[2001:db8:2::12]:8080", 0x9f4f_55b0_9369_26aa),
            ("[2001:db8:3::11]:8080", 0x1121_810b_3dfc_f7e8),
        ];
        for (text, expected) in ipv6 {
            assert_eq!(identity(text), expected, "{text}");
        }
    }

    #[test]
    fn balancers_agree_whatever_the_order_of_their_configurations() {
        let forward = candidates(10, |id| id as u8 + 1);
        let backward: Vec<Candidate> = forward.iter().rev().copied().collect();
        let identities = |candidates: &[Candidate]| -> Vec<u64> {
            table(candidates).into_iter().map(|owner| candidates[owner].identity).collect()
        };
        assert_eq!(identities(&forward), identities(&backward));
    }
}
