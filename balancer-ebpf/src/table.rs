//! The flow table: buckets of eight cache-line entries in an array map, found by a word of tags.
//!
//! A key belongs into one of two buckets; each bucket has a 64-bit word of eight tags, so that a lookup reads
//! one or two words and then, almost always, just the entry it looks for, whose whole key decides. The high bit
//! of a tag protects an established flow. An entry is claimed, published and freed by compare-and-exchange on its
//! control word. Its sequence number grows with each claim: who reads it unchanged before and after has read one
//! flow and not two halves. How a flow comes in is told in [`enter`](crate::enter).

use core::{
    ptr,
    sync::atomic::{Ordering, compiler_fence},
};

use balancer_common::{Address, BackendId, Control, FlowEntry, FlowKey, FlowState, NO_TWIN, WAYS, flags};

use crate::{Environment, FlowMemory, atomic, rounds::Rounds};

/// How often a change of a control word is tried: it is changed by at most the packets of its flow that are under way at
/// once.
pub const TRIES: usize = 4;

/// The first and the second bucket of a key, and its tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hash {
    /// Where it goes, unless the second has clearly more room.
    pub buckets: [u32; 2],
    /// Seven bits; never 0, which marks an empty way.
    pub tag: u8,
    /// The way that is replaced first when both buckets are full.
    pub lot: u8,
}

/// What a lookup found: where the entry is, and the control word that it had.
///
/// Not an `Option`: its undefined parts make registers that the verifier refuses to see copied.
#[derive(Clone, Copy)]
pub struct Found {
    /// The entry; nowhere when nothing was found.
    pub entry: Entry,
    /// Bucket × `WAYS` + way.
    pub index: u32,
    /// The control word, read before the key was compared.
    pub control: Control,
}

/// A place in the table: within the memory of a bucket, aligned, and shared with other CPUs and user space.
#[derive(Clone, Copy)]
pub struct Entry(*mut FlowEntry);

impl Entry {
    /// What stands there. Another CPU may be writing it: a torn read shows in the control word's sequence.
    #[inline(always)]
    pub fn flow(&self) -> &FlowEntry {
        // SAFETY: valid and aligned, and every bit pattern is a flow entry.
        unsafe { &*self.0 }
    }

    /// Reads the control word.
    #[inline(always)]
    pub fn control(self) -> Control {
        // SAFETY: valid and aligned; the word is read whole.
        Control(unsafe { ptr::read_volatile(&raw const (*self.0).control.0) })
    }

    /// Replaces the control word if it is still `from`; says whether it was.
    #[inline(always)]
    pub fn exchange(self, from: Control, to: Control) -> bool {
        // SAFETY: valid and aligned, and this word is only ever changed atomically.
        unsafe { atomic::compare_exchange(&raw mut (*self.0).control.0, from.0, to.0) == from.0 }
    }

    /// Adds and takes flags of the flow whose sequence number is `sequence`; says whether they were not so before.
    #[inline(always)]
    pub fn mark(self, sequence: u16, add: u8, take: u8) -> bool {
        for _ in Rounds::new(TRIES) {
            let before = self.control();
            if !before.is_live() || before.sequence() != sequence {
                return false;
            }
            let after = Control::new(before.state(), (before.flags() | add) & !take, sequence);
            if after == before {
                return false;
            }
            if self.exchange(before, after) {
                return true;
            }
        }
        false
    }

    /// Writes all but the control word, by which the entry is the caller's alone.
    #[inline(always)]
    pub fn write(self, entry: &FlowEntry) {
        // Whole words: LLVM 22's BPF backend, where it copies 12 bytes between places of a cache line's alignment, copies four.
        let [addresses, rest]: [u64; 2] = bytemuck::cast(entry.key);
        // SAFETY: valid and aligned, and no other CPU writes what this one has claimed.
        let place = unsafe {
            self.0.cast::<u64>().write_volatile(addresses);
            self.0.cast::<u64>().add(1).write_volatile(rest);
            &mut *self.0
        };
        place.new_source = entry.new_source;
        place.new_destination = entry.new_destination;
        place.new_source_port = entry.new_source_port;
        place.new_destination_port = entry.new_destination_port;
        place.ip_delta = entry.ip_delta;
        place.l4_delta = entry.l4_delta;
        place.neighbour = entry.neighbour;
        place.via = entry.via;
        place.backend = entry.backend;
        place.exchange = entry.exchange;
        place.service = entry.service;
        place.timeout = entry.timeout;
        place.twin = entry.twin;
        place.stamp = entry.stamp;
        place.opened = entry.opened;
    }

    /// Notes how the exchange stands.
    #[inline(always)]
    pub fn set_exchange(self, exchange: u32) {
        // SAFETY: valid and aligned; written whole.
        unsafe { ptr::write_volatile(&raw mut (*self.0).exchange, exchange) };
    }

    /// Names the entry of the other direction.
    #[inline(always)]
    pub fn set_twin(self, twin: u32) {
        // SAFETY: valid and aligned; written whole.
        unsafe { ptr::write_volatile(&raw mut (*self.0).twin, twin) };
    }

    /// Notes when the last packet came.
    #[inline(always)]
    pub fn set_stamp(self, stamp: u32) {
        // SAFETY: valid and aligned; written whole.
        unsafe { ptr::write_volatile(&raw mut (*self.0).stamp, stamp) };
    }

    /// Sets how long the flow may be silent.
    #[inline(always)]
    pub fn set_timeout(self, timeout: u16) {
        // SAFETY: valid and aligned; written whole.
        unsafe { ptr::write_volatile(&raw mut (*self.0).timeout, timeout) };
    }

    /// `neighbour` and `via`, as the one aligned word that they are: the MAC in the low 48 bits.
    #[inline(always)]
    pub fn client_side(self) -> u64 {
        const { assert!(core::mem::offset_of!(FlowEntry, neighbour) == 32) };
        const { assert!(core::mem::offset_of!(FlowEntry, via) == 38) };
        // SAFETY: valid and aligned; read whole.
        unsafe { ptr::read_volatile((&raw const (*self.0).neighbour).cast::<u64>()) }
    }

    /// Writes both.
    #[inline(always)]
    pub fn set_client_side(self, word: u64) {
        // SAFETY: valid and aligned; written whole.
        unsafe { ptr::write_volatile((&raw mut (*self.0).neighbour).cast::<u64>(), word) };
    }
}

impl Found {
    /// Nothing was found.
    pub const NOTHING: Found =
        Found { entry: Entry(ptr::null_mut()), index: NO_TWIN, control: Control::new(FlowState::Free, 0, 0) };

    /// The entry with this index, whose control word was `control`.
    #[inline(always)]
    pub fn at<M: FlowMemory>(memory: &M, index: u32, control: Control) -> Found {
        match entry_at(memory, index) {
            Some(entry) => Found { entry, index, control },
            None => Found::NOTHING,
        }
    }

    /// The entry with this index, as it is now.
    #[inline(always)]
    pub fn now<M: FlowMemory>(memory: &M, index: u32) -> Found {
        match entry_at(memory, index) {
            Some(entry) => Found { entry, index, control: entry.control() },
            None => Found::NOTHING,
        }
    }

    /// Whether there is an entry.
    #[inline(always)]
    pub fn exists(&self) -> bool {
        !self.entry.0.is_null()
    }
}

const LANES: u64 = 0x0101_0101_0101_0101;
pub(crate) const HIGH: u64 = LANES << 7;
/// The bit of a tag that says that the flow must not be replaced.
const PROTECTION: u64 = 0x80;

/// Sixty-four bits that depend on every bit of two words and of the seed.
#[inline(always)]
pub const fn mix([low, high]: [u64; 2], [seed_low, seed_high]: [u64; 2]) -> u64 {
    // Rounds of xor-shift-multiply (the finalizer of MurmurHash3), each keyed.
    let mut hash = (low ^ seed_low).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^= hash >> 32;
    hash = (hash ^ high ^ seed_high).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^= hash >> 29;
    hash = hash.wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^ (hash >> 32)
}

/// What stands for an IPv6 address in keys, so that they are as short as IPv4's: 32 bits that nobody can foresee who does
/// not know the seed. Whoever finds something by them compares the whole address.
#[inline(always)]
pub fn digest(address: &Address, seed: [u64; 2]) -> [u8; 4] {
    (mix(bytemuck::cast(*address), seed) as u32).to_ne_bytes()
}

/// Hashes a key with the table's secret.
#[inline(always)]
pub fn hash<M: FlowMemory>(memory: &M, key: &FlowKey) -> Hash {
    let hash = mix(bytemuck::cast(*key), memory.seed());
    let buckets = u64::from(memory.buckets());
    let first = ((hash & 0x0fff_ffff) * buckets) >> 28;
    let second = (((hash >> 28) & 0x0fff_ffff) * buckets) >> 28;
    let tag = (hash >> 57) as u8;
    // The buckets depend on the high bits of their 28; these are the low ones.
    let lot = (hash >> 28) as u8 & 7;
    Hash { buckets: [first as u32, second as u32], tag: if tag == 0 { 1 } else { tag }, lot }
}

/// The lanes of `word` that are zero but for their high bit, as their high bits; exact.
#[inline(always)]
pub(crate) const fn zero_lanes(word: u64) -> u64 {
    !((word & !HIGH) + !HIGH) & HIGH
}

/// The number of the lowest lane whose high bit is set in `lanes`.
#[inline(always)]
pub(crate) const fn lowest_lane(lanes: u64) -> u32 {
    let lowest = (lanes & lanes.wrapping_neg()) >> 7;
    ((lowest.wrapping_mul(0x0001_0203_0405_0607) >> 56) & 7) as u32
}

/// How many lanes have their high bit set in `lanes`.
#[inline(always)]
pub(crate) const fn count_lanes(lanes: u64) -> u64 {
    (lanes >> 7).wrapping_mul(LANES) >> 56
}

#[inline(always)]
fn entry_of<M: FlowMemory>(memory: &M, bucket: u32, way: u32) -> Option<Entry> {
    let bucket = memory.bucket(bucket)?;
    // SAFETY: `way & 7` is within the eight entries of the bucket that `memory` vouches for.
    Some(Entry(unsafe { (&raw mut (*bucket).entries).cast::<FlowEntry>().add((way & 7) as usize) }))
}

/// The entry with this index.
#[inline(always)]
pub fn entry_at<M: FlowMemory>(memory: &M, index: u32) -> Option<Entry> {
    entry_of(memory, index / WAYS as u32, index % WAYS as u32)
}

/// The entry of the flow's other direction, and its sequence number; `None` when it is gone.
#[inline(always)]
pub fn twin<M: FlowMemory>(memory: &M, found: &Found) -> Option<(Entry, u16)> {
    let twin = entry_at(memory, found.entry.flow().twin)?;
    let sequence = twin.control().sequence();
    // An entry that has gone to another flow names another twin.
    (twin.flow().twin == found.index).then_some((twin, sequence))
}

/// Looks a key up.
#[inline(always)]
pub fn find<M: FlowMemory>(memory: &M, key: &FlowKey, hash: Hash) -> Found {
    let found = find_in(memory, key, hash.buckets[0], hash.tag);
    if found.exists() { found } else { find_in(memory, key, hash.buckets[1], hash.tag) }
}

/// The ways of a bucket whose tags are `tag`, as the high bits of their lanes.
#[inline(always)]
pub(crate) fn tagged<M: FlowMemory>(memory: &M, bucket: u32, tag: u8) -> u64 {
    zero_lanes(tag_word(memory, bucket) ^ (u64::from(tag) * LANES))
}

/// The tags of a bucket.
#[inline(always)]
pub(crate) fn tag_word<M: FlowMemory>(memory: &M, bucket: u32) -> u64 {
    // A bucket that isn't there has no room, and its flows are protected.
    let Some(tags) = memory.tags(bucket) else { return u64::MAX };
    // SAFETY: tag words are valid and aligned.
    unsafe { ptr::read_volatile(tags) }
}

#[inline(always)]
fn find_in<M: FlowMemory>(memory: &M, key: &FlowKey, bucket: u32, tag: u8) -> Found {
    let mut matches = tagged(memory, bucket, tag);
    let wanted: [u64; 2] = bytemuck::cast(*key);
    for _ in 0..WAYS {
        if matches == 0 {
            break;
        }
        let way = lowest_lane(matches);
        let Some(entry) = entry_of(memory, bucket, way) else { break };
        let control = entry.control();
        compiler_fence(Ordering::Acquire);
        let stored: [u64; 2] = bytemuck::cast(entry.flow().key);
        if stored == wanted && control.is_live() {
            return Found { entry, index: bucket * WAYS as u32 + way, control };
        }
        matches &= matches - 1;
    }
    Found::NOTHING
}

/// Whether what was read of an entry since `found` belongs to one flow.
#[inline(always)]
pub fn is_unchanged(found: &Found) -> bool {
    // What was read must have been read by now, not later. (The processor keeps loads in order on x86-64.)
    compiler_fence(Ordering::Acquire);
    found.entry.control().sequence() == found.control.sequence()
}

/// Whether neither direction of the flow has been used within its timeout.
#[inline(always)]
pub fn is_expired<M: FlowMemory>(memory: &M, found: &Found, now: u32) -> bool {
    let flow = found.entry.flow();
    flow.is_expired(now)
        && entry_at(memory, flow.twin)
            .is_none_or(|twin| twin.flow().twin != found.index || twin.flow().is_expired(now))
}

/// Whether the port that a reply's entry holds may go to another flow: its own has ended, and not just now.
#[inline(always)]
pub fn has_rested<M: FlowMemory>(memory: &M, found: &Found, now: u32) -> bool {
    let flow = found.entry.flow();
    flow.has_rested(now)
        && entry_at(memory, flow.twin)
            .is_none_or(|twin| twin.flow().twin != found.index || twin.flow().has_rested(now))
}

/// Writes the tag of an entry, which the caller has claimed.
#[inline(always)]
pub(crate) fn set_tag<M: FlowMemory>(memory: &M, index: u32, tag: u8) {
    let Some(tags) = memory.tags(index / WAYS as u32) else { return };
    // SAFETY: the word has eight bytes, of which the lowest in memory is way 0 on the little-endian machines that
    // this runs on; a byte is written whole.
    unsafe { ptr::write_volatile(tags.cast::<u8>().add((index & 7) as usize), tag) };
}

/// Protects a flow's entry from being replaced, or no longer.
#[inline(always)]
pub fn protect<M: FlowMemory>(memory: &M, index: u32, is_protected: bool) {
    let Some(tags) = memory.tags(index / WAYS as u32) else { return };
    let lane = PROTECTION << (u64::from(index & 7) * 8);
    // SAFETY: tag words are valid and aligned. An entry that has gone to another flow meanwhile is protected, or
    // not, until that flow's state changes: no harm.
    unsafe { if is_protected { atomic::set_bits(tags, lane) } else { atomic::clear_bits(tags, lane) } };
}

/// Takes a flow out of the table: both its entries, and its share of the active count.
#[inline(always)]
pub fn release<E: Environment>(environment: &E, found: &Found) {
    let count = |backend, ended| count(environment, backend, ended);
    take_out(environment, found, &count, |twin| _ = free(environment, twin, &count));
}

/// Takes a flow that is over out of the table. `found` is its request direction; where the reply's entry holds a port,
/// the port rests from `now` on.
#[inline(always)]
pub fn end<E: Environment>(environment: &E, found: &Found, now: u32) {
    end_with(environment, found, now, |backend, ended| count(environment, backend, ended));
}

/// The same, where `count` is told whose flow it was, and what ended with it (`flags::ACTIVE`, `flags::AWAITING`). False,
/// and the flow stays, when another CPU changed the entry since it was found.
#[inline(always)]
pub fn end_with<M: FlowMemory>(memory: &M, found: &Found, now: u32, count: impl Fn(BackendId, u8)) -> bool {
    take_out(memory, found, &count, |twin| {
        if twin.entry.flow().holds_port() {
            rest(memory, twin, now);
        } else {
            free(memory, twin, &count);
        }
    })
}

/// Frees an entry, and leaves its twin to `then`; false when another CPU changed it meanwhile.
#[inline(always)]
fn take_out<M: FlowMemory>(
    memory: &M,
    found: &Found,
    count: &impl Fn(BackendId, u8),
    then: impl FnOnce(&Found),
) -> bool {
    let twin = found.entry.flow().twin;
    if !free(memory, found, count) {
        return false;
    }
    if twin == NO_TWIN {
        return true;
    }
    let Some(entry) = entry_at(memory, twin) else { return true };
    let control = entry.control();
    // An entry that has gone to another flow names another twin.
    if control.is_live() && entry.flow().twin == found.index {
        then(&Found { entry, index: twin, control });
    }
    true
}

/// Lets the port that a reply's entry holds rest: the entry stays where it is, so that nobody takes its key, but has
/// expired for every packet.
#[inline(always)]
fn rest<M: FlowMemory>(memory: &M, found: &Found, now: u32) {
    let sequence = found.control.sequence();
    let busy = Control::new(FlowState::Busy, 0, sequence);
    if !found.entry.exchange(found.control, busy) {
        return;
    }
    protect(memory, found.index, false);
    found.entry.set_twin(NO_TWIN);
    found.entry.set_timeout(0);
    found.entry.set_stamp(now.wrapping_sub(1));
    found.entry.exchange(busy, Control::new(FlowState::Closing, flags::REPLY, sequence));
}

/// Frees one entry; false when another CPU changed it meanwhile.
#[inline(always)]
fn free<M: FlowMemory>(memory: &M, found: &Found, count: &impl Fn(BackendId, u8)) -> bool {
    let backend = found.entry.flow().backend;
    let sequence = found.control.sequence();
    let busy = Control::new(FlowState::Busy, 0, sequence);
    if !found.entry.exchange(found.control, busy) {
        return false;
    }
    // The tag goes first: once the entry is free, another CPU may give it a new one.
    set_tag(memory, found.index, 0);
    found.entry.exchange(busy, Control::new(FlowState::Free, 0, sequence));
    count(backend, ended(found.control, Control::default()));
    true
}

/// What ends when a flow's entry goes from one control word to another: the active flow (`flags::ACTIVE`), and its
/// exchange (`flags::AWAITING`). Both are counted by the entry of the request direction.
#[inline(always)]
const fn ended(before: Control, after: Control) -> u8 {
    if before.flags() & flags::REPLY != 0 {
        return 0;
    }
    before.flags() & !after.flags() & (flags::ACTIVE | flags::AWAITING)
}

/// Counts what ends, or comes back, when a flow's entry goes from one control word to another.
#[inline(always)]
pub fn count_change<E: Environment>(environment: &E, backend: BackendId, before: Control, after: Control) {
    count(environment, backend, ended(before, after));
    if after.flags() & !before.flags() & flags::ACTIVE != 0
        && let Some(counters) = environment.counters(backend)
    {
        // SAFETY: counters are valid, aligned, and this CPU's own.
        unsafe { (*counters).reopened = (*counters).reopened.wrapping_add(1) };
    }
}

#[inline(always)]
fn count<E: Environment>(environment: &E, backend: BackendId, ended: u8) {
    if ended == 0 {
        return;
    }
    let Some(counters) = environment.counters(backend) else { return };
    // SAFETY: counters are valid, aligned, and this CPU's own.
    let counters = unsafe { &mut *counters };
    counters.closed = counters.closed.wrapping_add(u64::from(ended & flags::ACTIVE != 0));
    counters.answered = counters.answered.wrapping_add(u64::from(ended & flags::AWAITING != 0));
}
