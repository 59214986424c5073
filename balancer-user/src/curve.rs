//! What one flow has carried by each age.

use balancer_common::{AGES, STAMP_SHIFT, age_bucket, bucket_start};

use crate::load::Load;

/// One stamp, in nanoseconds.
const STAMP: u64 = 1 << STAMP_SHIFT;
/// Parts of a unit in which carried load is kept.
pub const MICRO: u64 = 1_000_000;

/// What is yet to come weighs one part in so many more than what has come.
///
/// A flow then weighs most when it is new, and less and less with age. If it weighed the same until it leaves the
/// window, every correction would come back when its flows leave: with flows that are all alike and live
/// longer than the window, such echoes grow until one backend is picked 28 times in a row. With a quarter more
/// they die out, and for all other flows it costs next to nothing (measured by `cargo xtask bench balance`).
const MARGIN: u64 = 4;

/// Where the ages of a bucket begin, in nanoseconds.
///
/// Ages are counted in whole stamps between two moments, each rounded down: an age of d stamps stands for
/// anything from d − 1 to d + 1, and for d on average. So a bucket begins half a stamp before its first age; only
/// bucket 0 begins at 0.
pub const fn bucket_edge(bucket: usize) -> u64 {
    bucket_start(bucket) as u64 * STAMP - if bucket == 0 { 0 } else { STAMP / 2 }
}

/// The bucket in which an age, in nanoseconds, falls by `bucket_edge`.
pub const fn bucket_of(age: u64) -> Option<usize> {
    let stamps = age.saturating_add(STAMP / 2) >> STAMP_SHIFT;
    if stamps > u32::MAX as u64 { None } else { age_bucket(stamps as u32) }
}

/// C(a): the mean load that one flow has carried by the age a, up to the window's span.
///
/// What is carried in bucket 0 is there at once, with the first packet: so a flow of one packet never has anything
/// left to bring. In each other bucket the load grows linearly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Curve {
    /// C where each bucket begins, and where the last one ends; in millionths. Index 0 is not used.
    carried: Vec<u64>,
    /// Age where C ends.
    span: u64,
    total: u64,
}

impl Curve {
    /// From what a flow carries in each bucket, in millionths: as many buckets as the span (nanoseconds) reaches.
    pub fn new(brought: impl IntoIterator<Item = u64>, span: u64) -> Curve {
        let mut sum = 0u64;
        let carried = std::iter::once(0).chain(brought.into_iter().map(|brought| {
            sum = sum.saturating_add(brought);
            sum
        }));
        let mut curve = Curve { carried: carried.collect(), span, total: 0 };
        curve.total = curve.by(span);
        curve
    }

    /// What a new flow is charged: what it brings at once, and what is committed then.
    pub fn charge(&self) -> Load {
        Load::micros(u128::from(self.by(0)) + u128::from(self.committed(0)))
    }

    /// C(age), in millionths.
    pub fn by(&self, age: u64) -> u64 {
        let age = age.min(self.span);
        let bucket = bucket_of(age).unwrap_or(AGES);
        let at = |bucket: usize| self.carried.get(bucket).or(self.carried.last()).copied().unwrap_or(0);
        let start = at(bucket.max(1));
        if bucket == 0 || bucket == AGES {
            return start;
        }
        // The width is a power of two: a shift divides by it.
        let width = width(bucket).trailing_zeros();
        let part = (u128::from(at(bucket + 1) - start) * u128::from(age - bucket_edge(bucket))) >> width;
        // Less than what the bucket brings.
        start + part as u64
    }

    /// What a flow of this age has yet to bring within the window, in millionths: C(span) − C(age), and a `MARGIN` of it.
    pub fn committed(&self, age: u64) -> u64 {
        let unseen = self.total - self.by(age);
        unseen.saturating_add(unseen / MARGIN)
    }
}

/// How long a bucket from 1 on lasts, in nanoseconds: a power of two.
pub const fn width(bucket: usize) -> u64 {
    bucket_edge(bucket + 1) - bucket_edge(bucket)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SPAN: u64 = 14_000_000_000;

    #[test]
    fn buckets_are_centred_on_their_ages() {
        assert_eq!([0, 1, 2].map(bucket_edge), [0, STAMP / 2, STAMP / 2 * 3]);
        for bucket in 0..AGES {
            assert_eq!(bucket_of(bucket_edge(bucket)), Some(bucket));
            assert_eq!(bucket_of(bucket_edge(bucket + 1) - 1), Some(bucket));
            assert!(bucket == 0 || width(bucket).is_power_of_two());
        }
        assert_eq!(bucket_of(bucket_edge(AGES)), None);
        assert_eq!(bucket_of(u64::MAX), None);
    }

    #[test]
    fn a_flow_of_one_packet_has_nothing_left_to_bring() {
        let curve = Curve::new([MICRO], SPAN);
        assert_eq!(curve.charge(), Load::ONE);
        for age in [0, 1, STAMP / 2, STAMP, SPAN, u64::MAX] {
            assert_eq!(curve.committed(age), 0);
        }
    }

    #[test]
    fn load_grows_linearly_within_a_bucket_and_ends_with_the_span() {
        // 1 packet at once, 4 in bucket 1, then 2 in each.
        let curve = Curve::new([MICRO, 4 * MICRO].into_iter().chain([2 * MICRO; 30]), 3 * STAMP);
        assert_eq!(curve.by(STAMP / 2), MICRO);
        assert_eq!(curve.by(STAMP), 3 * MICRO);
        assert_eq!(curve.by(2 * STAMP), 6 * MICRO);
        // One at once, 7 to come, 2 of them after two stamps.
        assert_eq!(curve.charge(), Load::from_decimal("9.75").unwrap());
        assert_eq!(curve.committed(2 * STAMP), 2_500_000);
        assert_eq!(curve.committed(4 * STAMP), 0);
        // A span beyond all buckets ends with them.
        assert_eq!(Curve::new([MICRO; AGES], u64::MAX).by(u64::MAX), AGES as u64 * MICRO);
        assert_eq!(Curve::new([], SPAN).charge(), Load::ZERO);
    }

    proptest! {
        #[test]
        fn what_is_carried_never_falls_with_age(brought in prop::collection::vec(0..u64::MAX >> 4, 0..AGES), ages in prop::collection::vec(0..2 * SPAN, 2)) {
            let curve = Curve::new(brought, SPAN);
            let (young, old) = (ages[0].min(ages[1]), ages[0].max(ages[1]));
            prop_assert!(curve.by(young) <= curve.by(old));
            prop_assert!(curve.committed(old) <= curve.committed(young));
        }
    }
}
