use bytemuck::{Pod, Zeroable};

/// Packets and bytes of one direction. Both only grow, and wrap at 2^64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Traffic {
    /// Packets forwarded.
    pub packets: u64,
    /// Bytes of IP total length forwarded: link-layer padding and tags do not count.
    pub bytes: u64,
}

/// What one CPU has counted for one backend. Every field only grows, and wraps at 2^64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BackendCounters {
    /// From clients to the backend.
    pub request: Traffic,
    /// From the backend to clients.
    pub reply: Traffic,
    /// Flows opened towards the backend.
    pub opened: u64,
    /// Flows that the program itself saw end; those that the sweep expires are counted in user space.
    pub closed: u64,
    /// Exchanges begun: the client of a flow without one has sent payload.
    pub asked: u64,
    /// Exchanges ended, by an answer or with their flow, as far as the program itself saw it.
    pub answered: u64,
    /// Flows counted as closed for a RST that turned out to be nobody's: they go on.
    pub reopened: u64,
}

const _: () = assert!(size_of::<BackendCounters>() == 72);

/// Buckets of `ResponseTimes::histogram`.
pub const RESPONSE_BUCKETS: usize = 30;

/// The bucket of `ResponseTimes::histogram` that a time belongs to: as many as the number has binary digits.
#[inline(always)]
pub const fn response_bucket(time: u32) -> usize {
    // The bpf target has no count of leading zeros.
    let (mut digits, mut rest) = (0, time);
    let mut step = 16;
    while step > 0 {
        if rest >> step != 0 {
            rest >>= step;
            digits += step;
        }
        step /= 2;
    }
    let bucket = digits as usize + rest as usize;
    if bucket < RESPONSE_BUCKETS { bucket } else { RESPONSE_BUCKETS - 1 }
}

/// How long the answers of one backend took, from the first packet of a request's payload to the first of its answer's:
/// one CPU's count. Every field only grows, and wraps at 2^64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ResponseTimes {
    /// Sum of the times, in units of 2^`EXCHANGE_SHIFT` ns.
    pub sum: u64,
    /// How many there were.
    pub count: u64,
    /// How many took less than 2^bucket units and not less than half of that; the last bucket, all that took longer.
    pub histogram: [u64; RESPONSE_BUCKETS],
}

const _: () = assert!(size_of::<ResponseTimes>() == 256);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_in_the_bucket_of_its_power_of_two() {
        for (time, bucket) in
            [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (1023, 10), (1024, 11), (1 << 28, 29), (u32::MAX, 29)]
        {
            assert_eq!(response_bucket(time), bucket, "{time}");
        }
    }
}
