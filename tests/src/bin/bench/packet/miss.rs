//! What a load from the flow table's memory takes when no cache has it.

use balancer_common::{Bucket, WAYS};
use balancer_ebpf::FlowMemory;

/// Loads from every bucket once, so that all of the table's memory is mapped: `probe` must not wait for that.
pub fn map<M: FlowMemory>(table: &M) {
    for bucket in (0..table.buckets()).filter_map(|bucket| table.bucket(bucket)) {
        // SAFETY: as below.
        std::hint::black_box(unsafe { std::ptr::read_volatile(bucket.cast::<u64>()) });
    }
}

/// Loads from random entries, each place depending on what the load before has brought; what one took in nanoseconds, beyond
/// what the same takes where all loads are from one bucket.
pub fn probe<M: FlowMemory>(table: &M, loads: u32, seed: u64) -> f64 {
    chase(table, u64::from(table.buckets()), loads, seed) - chase(table, 1, loads, seed)
}

fn chase<M: FlowMemory>(table: &M, buckets: u64, loads: u32, seed: u64) -> f64 {
    let start = std::time::Instant::now();
    let mut state = seed;
    for _ in 0..loads {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let place = ((state >> 32) * buckets * WAYS as u64) >> 32;
        let Some(bucket) = table.bucket((place / WAYS as u64) as u32) else { continue };
        // SAFETY: a bucket of the table is valid and aligned as long as it is mapped, and has `WAYS` entries; one aligned
        // word of one is read.
        let word = unsafe {
            let entry = bucket.cast::<Bucket>().cast::<[u64; 8]>().add(place as usize % WAYS);
            std::ptr::read_volatile(entry.cast::<u64>().add(7))
        };
        // Nothing is known of the word but that the next place depends on it.
        state ^= std::hint::black_box(word) & 1;
    }
    start.elapsed().as_nanos() as f64 / f64::from(loads)
}
