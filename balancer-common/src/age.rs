use bytemuck::{Pod, Zeroable};

use crate::Traffic;

/// Buckets of an `AgeProfile`.
pub const AGES: usize = 48;

/// What the flows of one service have carried, both directions together, by how long ago they were opened: one CPU's
/// count. From it the controller learns what a flow brings by each age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AgeProfile {
    /// By `age_bucket`; every field only grows, and wraps at 2^64.
    pub ages: [Traffic; AGES],
}

const _: () = assert!(size_of::<AgeProfile>() == 768);

/// The bucket of an age in stamps (67 ms): exact up to 7, then four buckets for each doubling, up to 8,191
/// (9 minutes); `None` beyond.
#[inline(always)]
pub const fn age_bucket(age: u32) -> Option<usize> {
    if age < 8 {
        return Some(age as usize);
    }
    if age >= 8 << 10 {
        return None;
    }
    // The number of the highest bit, without a count of leading zeros, which the bpf target lacks.
    let mut octave = 0;
    let mut rest = age >> 3;
    if rest >= 1 << 8 {
        rest >>= 8;
        octave += 8;
    }
    if rest >= 1 << 4 {
        rest >>= 4;
        octave += 4;
    }
    if rest >= 1 << 2 {
        rest >>= 2;
        octave += 2;
    }
    if rest >= 1 << 1 {
        octave += 1;
    }
    Some(8 + octave * 4 + ((age >> (octave + 1)) as usize & 3))
}

/// The smallest age, in stamps, of a bucket; of `AGES`, the age where the last bucket ends.
pub const fn bucket_start(bucket: usize) -> u32 {
    if bucket < 8 {
        return bucket as u32;
    }
    let octave = (bucket - 8) / 4;
    (4 + (bucket as u32 & 3)) << (octave + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_age_is_in_the_bucket_that_starts_last_before_it() {
        for age in 0..bucket_start(AGES) {
            let bucket = age_bucket(age).unwrap();
            assert!(bucket < AGES && bucket_start(bucket) <= age && age < bucket_start(bucket + 1), "{age}");
        }
        assert_eq!(bucket_start(AGES), 8192);
        assert_eq!(age_bucket(8192), None);
        assert_eq!(age_bucket(u32::MAX), None);
    }
}
