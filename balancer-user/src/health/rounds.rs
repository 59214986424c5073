//! When checks are made: each backend's at its own place within the interval, so that they are spread in time.

use std::{
    hash::{DefaultHasher, Hash, Hasher as _},
    time::Duration,
};

use crate::clock::Monotonic;

/// Within what part of the interval all first checks are made: they are waited for.
const FIRST: u32 = 10;

/// The checks of one backend.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounds {
    begin: Monotonic,
    interval: Duration,
    /// Place within the interval.
    place: Duration,
}

impl Rounds {
    /// From `begin` on, at the place that `who` has, always the same.
    pub(super) fn new(begin: Monotonic, interval: Duration, who: &impl Hash) -> Rounds {
        let mut hasher = DefaultHasher::new();
        who.hash(&mut hasher);
        Rounds {
            begin,
            interval,
            place: interval.mul_f64((hasher.finish() >> 32) as f64 / (1_u64 << 32) as f64),
        }
    }

    /// When the first check is made.
    pub(super) fn first(&self) -> Monotonic {
        self.begin.plus(self.place / FIRST)
    }

    /// When the next check is made after one that was begun at `begun`: half an interval later at least.
    pub(super) fn after(&self, begun: Monotonic) -> Monotonic {
        let least = begun.plus(self.interval / 2).since(self.begin.plus(self.place));
        let rounds = least.as_nanos().div_ceil(self.interval.as_nanos().max(1));
        let rounds = u32::try_from(rounds).unwrap_or(u32::MAX);
        self.begin.plus(self.place).plus(self.interval.saturating_mul(rounds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEGIN: Monotonic = Monotonic::from_boot(Duration::from_secs(1000));
    const INTERVAL: Duration = Duration::from_secs(5);

    #[test]
    fn checks_are_an_interval_apart_each_backends_at_its_own_place() {
        let mut tenths = [0; 10];
        for who in 0..1000 {
            let rounds = Rounds::new(BEGIN, INTERVAL, &who);
            tenths[(rounds.place.as_millis() / 500) as usize] += 1;
            assert!(rounds.first().since(BEGIN) < INTERVAL / 10);
            let second = rounds.after(rounds.first());
            let apart = second.since(rounds.first());
            assert!(apart >= INTERVAL / 2 && apart <= INTERVAL * 3 / 2, "{apart:?}");
            assert_eq!(rounds.after(second).since(second), INTERVAL);
            // One that was begun late does not move those after it.
            let late = second.plus(Duration::from_millis(2_400));
            assert_eq!(rounds.after(late), second.plus(INTERVAL));
            assert_eq!(Rounds::new(BEGIN, INTERVAL, &who).first(), rounds.first());
        }
        assert!(tenths.iter().all(|count| (60..140).contains(count)), "{tenths:?}");
    }
}
