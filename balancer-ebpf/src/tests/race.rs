//! The table under two CPUs at once: what is found is one flow, whole, and nothing is lost from the counts.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use balancer_common::{Control, FlowEntry, FlowKey, FlowState, NO_TWIN, UDP, flags};
use bytemuck::Zeroable;

use super::buffer::{Kernel, Memory, insert};
use crate::table::{find, hash, is_unchanged, protect, release};

/// More keys than two buckets have room for.
const KEYS: u32 = 40;
const BUCKETS: u32 = 3;
const TIME: Duration = Duration::from_secs(1);

fn key(number: u32) -> FlowKey {
    FlowKey { source: number.to_be_bytes(), protocol: UDP, ..FlowKey::zeroed() }
}

/// An entry each of whose fields says which key it belongs to.
fn entry(number: u32, twin: u32) -> FlowEntry {
    let [low, high] = [number as u8, !number as u8];
    FlowEntry {
        key: key(number),
        new_source: [low, high, low, high],
        new_destination: [high, low, high, low],
        new_source_port: [low, high],
        new_destination_port: [high, low],
        ip_delta: number as u16,
        l4_delta: !number as u16,
        neighbour: [low; 6],
        via: number as u16,
        backend: 0,
        opened: number as u16,
        service: !number as u16,
        timeout: number as u16,
        twin,
        stamp: number,
        exchange: !number,
        control: Control::new(FlowState::HalfOpen, flags::ACTIVE, 0),
    }
}

/// A sequence of numbers without a pattern (xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 32) as u32) % limit
    }
}

/// What one CPU did.
#[derive(Clone, Copy, Debug, Default)]
struct Deeds {
    opened: u64,
    closed: u64,
    found: u64,
    changed: u64,
    refused: u64,
}

fn work(memory: Arc<Memory>, cpu: u64, until: Instant) -> Deeds {
    let kernel = Kernel::new(memory, 1);
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15 ^ cpu);
    let mut deeds = Deeds::default();
    let mut last = NO_TWIN;
    while Instant::now() < until {
        for _ in 0..100 {
            let number = numbers.below(KEYS);
            let hash = hash(&kernel, &key(number));
            let found = find(&kernel, &key(number), hash);
            if !found.exists() {
                // Entries of both CPUs name each other as twins, or do not: a release may take any along.
                let entry = entry(number, if numbers.below(4) == 0 { last } else { NO_TWIN });
                match insert(&kernel, &entry) {
                    Some(index) => {
                        deeds.opened += 1;
                        last = index;
                    }
                    None => deeds.refused += 1,
                }
                continue;
            }
            let read = kernel.memory.entry(found.index);
            if is_unchanged(&found) {
                deeds.found += 1;
                assert!(found.control.is_live());
                let expected = FlowEntry { control: read.control, twin: read.twin, ..entry(number, NO_TWIN) };
                assert_eq!(read, expected, "two halves of flows");
            } else {
                deeds.changed += 1;
            }
            match numbers.below(8) {
                0..3 => release(&kernel, &found),
                3 => protect(&kernel, found.index, true),
                4 => protect(&kernel, found.index, false),
                _ => {}
            }
        }
    }
    deeds.closed = kernel.counted(0).closed;
    deeds
}

#[test]
fn two_cpus_share_the_table() {
    let memory = Memory::new(BUCKETS, [3, 4]);
    let until = Instant::now() + TIME;
    let cpus = [1, 2].map(|cpu| {
        let memory = Arc::clone(&memory);
        thread::spawn(move || work(memory, cpu, until))
    });
    let deeds = cpus.map(|cpu| cpu.join().unwrap());
    memory.assert_consistent();
    let sum = |of: fn(&Deeds) -> u64| deeds.iter().map(of).sum::<u64>();
    assert_eq!(sum(|cpu| cpu.opened) - sum(|cpu| cpu.closed), memory.active(), "{deeds:?}");
    assert!(deeds.iter().all(|cpu| cpu.opened > 1_000 && cpu.found > 1_000), "{deeds:?}");
}
