//! How long the answers of a backend took, as the program counted it: the time to first byte (TTFB), from the first packet
//! of a request's payload to the first packet of its answer's.

use balancer_common::{EXCHANGE_SHIFT, RESPONSE_BUCKETS};

use crate::{
    load::Load,
    window::{Growth, piece},
};

/// Answers, and the sum of their times in units of 2^`EXCHANGE_SHIFT` ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Responses {
    /// Sum of the times.
    pub sum: u64,
    /// How many there were.
    pub count: u64,
}

impl Responses {
    /// Their mean time in milliseconds, at least a microsecond; `None` of none.
    pub fn mean(self) -> Option<Load> {
        let nanos = self.sum.saturating_mul(1 << EXCHANGE_SHIFT);
        (self.count > 0)
            .then(|| Load::mean(nanos, self.count.saturating_mul(1_000_000)).max(Load::micros(1_000)))
    }
}

impl Growth for Responses {
    const ZERO: Responses = Responses { sum: 0, count: 0 };

    fn plus(self, other: Responses) -> Responses {
        Responses { sum: self.sum.wrapping_add(other.sum), count: self.count.wrapping_add(other.count) }
    }

    fn minus(self, other: Responses) -> Responses {
        Responses { sum: self.sum.wrapping_sub(other.sum), count: self.count.wrapping_sub(other.count) }
    }

    fn piece(self, index: u64, count: u64) -> Responses {
        Responses { sum: piece(self.sum, index, count), count: piece(self.count, index, count) }
    }
}

/// How many answers took how long, by `response_bucket`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Histogram(pub [u32; RESPONSE_BUCKETS]);

impl Histogram {
    /// The time in milliseconds within which this part (0 to 1) of the answers came: exact to a factor of two, taking
    /// those within one bucket as spread evenly. `None` of none.
    pub fn quantile(&self, part: f64) -> Option<f64> {
        let count: u64 = self.0.iter().copied().map(u64::from).sum();
        let wanted = part * count as f64;
        let mut below = 0.0;
        for (bucket, answers) in self.0.iter().enumerate().filter(|(_, answers)| **answers > 0) {
            let answers = f64::from(*answers);
            if below + answers >= wanted {
                let [from, until] = [bucket as i32 - 1, bucket as i32]
                    .map(|power| if power < 0 { 0.0 } else { 2f64.powi(power) });
                let units = from + (until - from) * (wanted - below).max(0.0) / answers;
                return Some(units * f64::from(1 << EXCHANGE_SHIFT) / 1e6);
            }
            below += answers;
        }
        None
    }
}

impl Growth for Histogram {
    const ZERO: Histogram = Histogram([0; RESPONSE_BUCKETS]);

    fn plus(self, other: Histogram) -> Histogram {
        Histogram(std::array::from_fn(|bucket| self.0[bucket].wrapping_add(other.0[bucket])))
    }

    fn minus(self, other: Histogram) -> Histogram {
        Histogram(std::array::from_fn(|bucket| self.0[bucket].wrapping_sub(other.0[bucket])))
    }

    fn piece(self, index: u64, count: u64) -> Histogram {
        // A piece is at most the whole.
        Histogram(self.0.map(|answers| piece(answers.into(), index, count) as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_in_milliseconds_and_never_nothing() {
        assert_eq!(Responses::ZERO.mean(), None);
        assert_eq!(Responses { sum: 0, count: 5 }.mean(), Some(Load::micros(1_000)));
        // 3 × 1,000,000 units of 1,024 ns are 3,072 ms.
        assert_eq!(Responses { sum: 3_000_000, count: 3 }.mean(), Some(Load::units(1_024)));
    }

    #[test]
    fn quantiles_are_within_their_bucket() {
        assert_eq!(Histogram::ZERO.quantile(0.5), None);
        let mut histogram = Histogram::ZERO;
        // 98 answers of 512 to 1,023 units, two of 2^20 to 2^21 - 1.
        (histogram.0[10], histogram.0[21]) = (98, 2);
        let [median, late] = [0.5, 0.99].map(|part| histogram.quantile(part).unwrap());
        assert!(median > 0.524 && median < 1.048, "{median}");
        assert!((late - 1.5 * 1_073.741_824).abs() < 1e-6, "{late}");
        let mut instant = Histogram::ZERO;
        instant.0[0] = 1;
        assert_eq!(instant.quantile(0.5), Some(0.5 * 0.001_024));
    }
}
