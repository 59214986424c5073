//! How a flow comes into the table: a way for each of its directions, and never a second one with the same key.
//!
//! Two CPUs may get the first packets of one flow at the same moment, or of two flows whose replies would look alike. Each
//! writes its entries, announces them (`Opening`: seen by who opens, and by no packet), and only then looks for a rival, so
//! that of two at least one sees the other. A flow stays. Of two that are opening, the pair with the lower index goes
//! before, and changes the other's control word, so that it can't go on. With no rival in either direction, both entries
//! go live.
//!
//! When both buckets are full, a new flow takes the place of one that is half open or closing, or a single datagram without
//! an answer, which the tags alone tell, so that a flood of those can't push out the others.

use core::sync::atomic::{Ordering, compiler_fence};

use balancer_common::{Address, Control, FlowEntry, FlowKey, FlowState, NO_TWIN, STAMP_SHIFT, WAYS, flags};

use crate::{
    Environment, FlowMemory,
    table::{
        self, Entry, Found, HIGH, Hash, TRIES, count_lanes, entry_at, hash, lowest_lane, set_tag, tag_word,
        tagged, zero_lanes,
    },
};

/// How long an established flow must have been silent before a new one may take its place when both buckets are full, in
/// stamps (60 s).
const PATIENT: i32 = (60_000_000_000_u64 >> STAMP_SHIFT) as i32;
/// The same for a UDP flow that the backend has not answered (10 s). Any other flow gives way at once.
const IMPATIENT: i32 = (10_000_000_000_u64 >> STAMP_SHIFT) as i32;

/// More stamps than any flow is idle.
const NEVER_ANSWERED: i32 = 1 << 30;

/// With fewer free ways than this a bucket is crowded: a key goes into its second bucket if that has more.
///
/// Nearly all keys of a table with room stay in their first bucket, where a lookup finds them sooner.
const CROWDED: u64 = 5;

/// How often a rival that is about to go live is looked at: longer than it takes, unless its CPU is interrupted. Then it is not
/// waited for.
const PATIENCE: usize = 256;

/// How the opening of a flow ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Entered {
    /// It is live, and counted.
    New = 0,
    /// Another CPU has opened it meanwhile.
    Joined = 1,
    /// Another CPU was faster, and what it has opened is another flow, or did not come, and was put out of the race.
    Lost = 2,
}

impl Entered {
    /// By its number.
    #[inline(always)]
    pub const fn from_number(number: u32) -> Entered {
        match number {
            0 => Entered::New,
            1 => Entered::Joined,
            _ => Entered::Lost,
        }
    }
}

/// Claims a free way for each of two keys where that is done at once, without anybody giving way; `NO_TWIN` where it is not.
///
/// What a new flow costs is, above all, to bring the cache lines of its two entries in. Both are asked for before the first
/// is claimed, which nothing overtakes.
#[inline(always)]
pub fn claim_free<M: FlowMemory>(memory: &M, keys: [&FlowKey; 2]) -> [u32; 2] {
    let hashes = keys.map(|key| hash(memory, key));
    let ways = hashes.map(|hash| {
        let rooms = hash.buckets.map(|bucket| zero_lanes(tag_word(memory, bucket)));
        let ((bucket, room), _) = roomier(hash.buckets, rooms);
        if room == 0 { NO_TWIN } else { bucket * WAYS as u32 + lowest_lane(room) }
    });
    for way in ways {
        if let Some(entry) = entry_at(memory, way) {
            entry.control();
        }
    }
    let claim_way =
        |place: usize| if claim(memory, ways[place], hashes[place].tag) { ways[place] } else { NO_TWIN };
    [claim_way(0), claim_way(1)]
}

/// Of a key's two buckets and their free ways the one that it goes into; and whether that is the second.
#[inline(always)]
const fn roomier(buckets: [u32; 2], rooms: [u64; 2]) -> ((u32, u64), bool) {
    let free = count_lanes(rooms[0]);
    let is_second = free < CROWDED && count_lanes(rooms[1]) > free;
    if is_second { ((buckets[1], rooms[1]), true) } else { ((buckets[0], rooms[0]), false) }
}

/// Claims a way for a key: the index of an entry that is nobody else's until it is withdrawn, or live. `NO_TWIN` when both
/// buckets are full of flows in use.
#[inline(always)]
pub fn reserve<E: Environment>(environment: &E, key: &FlowKey, now: u32) -> u32 {
    let hash = hash(environment, key);
    let [first, second] = hash.buckets;
    let mut first_room = zero_lanes(tag_word(environment, first));
    let mut second_room = zero_lanes(tag_word(environment, second));
    for _ in 0..WAYS {
        let ((bucket, room), is_second) = roomier(hash.buckets, [first_room, second_room]);
        if room == 0 {
            break;
        }
        let index = bucket * WAYS as u32 + lowest_lane(room);
        if claim(environment, index, hash.tag) {
            return index;
        }
        // Another CPU was faster.
        if is_second { second_room &= room - 1 } else { first_room &= room - 1 }
    }
    let mut first_lanes = unprotected_lanes(environment, first);
    let mut second_lanes = unprotected_lanes(environment, second);
    for _ in 0..TRIES {
        let is_second = first_lanes == 0;
        let (bucket, lanes) = if is_second { (second, second_lanes) } else { (first, first_lanes) };
        if lanes == 0 {
            break;
        }
        // Of two, by the new flow's hash, the one whose entry has been silent for longer: a handshake that is under way gives
        // way only to chance, twice.
        let one = next_lane(lanes, hash.lot & 7);
        let other = next_lane(lanes, (one + 1) & 7);
        let [one, other] = [one, other].map(|way| bucket * WAYS as u32 + u32::from(way));
        let index = older(environment, one, other);
        let lane = 0x80 << (u64::from(index % WAYS as u32) * 8);
        if replace(environment, index, hash.tag) {
            return index;
        }
        if is_second { second_lanes &= !lane } else { first_lanes &= !lane }
    }
    let index = idle(environment, hash, now);
    if index != NO_TWIN && replace(environment, index, hash.tag) { index } else { NO_TWIN }
}

/// The first lane from `from` on, going round, whose high bit is set in `lanes`.
#[inline(always)]
const fn next_lane(lanes: u64, from: u8) -> u8 {
    let ahead = lanes & (u64::MAX << (from as u32 * 8));
    lowest_lane(if ahead == 0 { lanes } else { ahead }) as u8
}

/// Which of two entries has been silent for longer.
#[inline(always)]
fn older<M: FlowMemory>(memory: &M, one: u32, other: u32) -> u32 {
    let [Some(first), Some(second)] = [one, other].map(|index| entry_at(memory, index)) else { return one };
    let is_older = (second.flow().stamp.wrapping_sub(first.flow().stamp) as i32) < 0;
    if is_older { other } else { one }
}

/// Claims the way of a flow that is in the table, which goes.
#[inline(always)]
fn replace<E: Environment>(environment: &E, index: u32, tag: u8) -> bool {
    let Some(entry) = entry_at(environment, index) else { return false };
    let control = entry.control();
    if control.is_live() {
        environment.release(&Found { entry, index, control });
    }
    let is_taken = claim(environment, index, tag);
    if is_taken && let Some(phase) = control.state().phase() {
        environment.evicted(phase);
    }
    is_taken
}

/// Claims a way if it is free.
#[inline(always)]
fn claim<M: FlowMemory>(memory: &M, index: u32, tag: u8) -> bool {
    let Some(entry) = entry_at(memory, index) else { return false };
    let before = entry.control();
    // The sequence moves with the claim: a reader of the former flow finds out whatever it has read by now.
    let control = Control::new(FlowState::Busy, 0, before.sequence().wrapping_add(1));
    if before.state() as u8 != FlowState::Free as u8 || !entry.exchange(before, control) {
        return false;
    }
    // The tag goes before the flow: once that is live, another CPU may free it again by way of its twin, and a tag
    // written after that would belong to whoever came next.
    set_tag(memory, index, tag);
    true
}

/// Gives a way back that was reserved, and is not live.
#[inline(always)]
pub fn withdraw<M: FlowMemory>(memory: &M, index: u32) {
    let Some(entry) = entry_at(memory, index) else { return };
    let before = entry.control();
    let busy = Control::new(FlowState::Busy, 0, before.sequence());
    // It is busy already when it was not announced yet, or a rival has put it out of the race.
    entry.exchange(before, busy);
    set_tag(memory, index, 0);
    entry.exchange(busy, Control::new(FlowState::Free, 0, before.sequence()));
}

/// Writes a reserved entry, and lets others that open see it. Its twin must be named, and reserved too.
#[inline(always)]
pub fn announce<M: FlowMemory>(memory: &M, index: u32, flow: &FlowEntry, marks: u8) {
    let Some(entry) = entry_at(memory, index) else { return };
    entry.write(flow);
    let busy = entry.control();
    entry.exchange(busy, Control::new(FlowState::Opening, marks, busy.sequence()));
}

/// Writes the addresses of a reserved entry: as packets arrive (source, destination), and as they leave.
#[inline(always)]
pub fn set_addresses<E: Environment>(
    environment: &E,
    index: u32,
    [source, destination, new_source, new_destination]: [&Address; 4],
) {
    let Some(place) = environment.addresses(index) else { return };
    // SAFETY: valid and aligned, and no other CPU writes what this one has claimed.
    let place = unsafe { &mut *place };
    place.source = *source;
    place.destination = *destination;
    place.new_source = *new_source;
    place.new_destination = *new_destination;
}

/// Makes a flow live whose entries were announced, the request's being `request`, and counts it if it is to be active. If
/// another CPU was faster, its ways are given back.
#[inline(always)]
pub fn enter<E: Environment>(environment: &E, request: u32) -> Entered {
    let Some(request_entry) = entry_at(environment, request) else { return Entered::Lost };
    let reply = request_entry.flow().twin;
    // There is none where replies go past the balancer.
    let replies = Found::now(environment, reply);
    let rank = rank(request, reply);
    let marks = request_entry.control().flags();
    let key = request_entry.flow().key;
    // The request's direction decides between two CPUs that open one flow, the reply's between two flows.
    let has_rival = rival(environment, &key, request, rank).exists()
        || replies.exists() && rival(environment, &replies.entry.flow().key, reply, rank).exists();
    if has_rival || !go_live(request_entry) {
        withdraw(environment, request);
        withdraw(environment, reply);
        return if comes(environment, &key) { Entered::Joined } else { Entered::Lost };
    }
    let is_active = marks & flags::ACTIVE != 0;
    if is_active && let Some(counters) = environment.counters(request_entry.flow().backend) {
        // SAFETY: counters are valid, aligned, and this CPU's own.
        unsafe { (*counters).opened = (*counters).opened.wrapping_add(1) };
    }
    if replies.exists() && !go_live(replies.entry) {
        withdraw(environment, reply);
        let control = request_entry.control();
        table::release(environment, &Found { entry: request_entry, index: request, control });
        return Entered::Lost;
    }
    Entered::New
}

/// Makes an announced entry live, unless a rival has put it out of the race.
#[inline(always)]
fn go_live(entry: Entry) -> bool {
    let before = entry.control();
    before.state() as u8 == FlowState::Opening as u8
        && entry.exchange(before, Control::new(FlowState::HalfOpen, before.flags(), before.sequence()))
}

/// The lower of two pairs goes before.
#[inline(always)]
fn rank(index: u32, twin: u32) -> u32 {
    if index < twin { index } else { twin }
}

/// Another live entry with the same key as entry `own`, or an opening one that goes before it. Those that don't are put out
/// of the race.
#[inline(always)]
fn rival<M: FlowMemory>(memory: &M, key: &FlowKey, own: u32, own_rank: u32) -> Found {
    let hash = hash(memory, key);
    let found = rival_in(memory, key, hash.buckets[0], hash.tag, own, own_rank);
    if found.exists() {
        return found;
    }
    rival_in(memory, key, hash.buckets[1], hash.tag, own, own_rank)
}

#[inline(always)]
fn rival_in<M: FlowMemory>(
    memory: &M,
    key: &FlowKey,
    bucket: u32,
    tag: u8,
    own: u32,
    own_rank: u32,
) -> Found {
    let wanted: [u64; 2] = bytemuck::cast(*key);
    let mut matches = tagged(memory, bucket, tag);
    for _ in 0..WAYS {
        if matches == 0 {
            break;
        }
        let index = bucket * WAYS as u32 + lowest_lane(matches);
        matches &= matches - 1;
        let Some(entry) = entry_at(memory, index) else { break };
        let control = entry.control();
        compiler_fence(Ordering::Acquire);
        let stored: [u64; 2] = bytemuck::cast(entry.flow().key);
        if stored != wanted || index == own {
            continue;
        }
        let is_opening = control.state() as u8 == FlowState::Opening as u8;
        if is_opening && rank(index, entry.flow().twin) > own_rank {
            let out = Control::new(FlowState::Busy, 0, control.sequence());
            if entry.exchange(control, out) {
                continue;
            }
        }
        let now = entry.control();
        let is_there = now.is_live() || (is_opening && now.0 == control.0);
        if is_there && now.sequence() == control.sequence() {
            return Found { entry, index, control: now };
        }
    }
    Found::NOTHING
}

/// Whether another CPU has opened a flow with this key, or is about to and does. One that does not come is put out of the race,
/// so that it can't stand in the way of the next try.
#[inline(always)]
fn comes<M: FlowMemory>(memory: &M, key: &FlowKey) -> bool {
    let found = rival(memory, key, NO_TWIN, NO_TWIN);
    if !found.exists() {
        return false;
    }
    for _ in 0..PATIENCE {
        let Some(entry) = entry_at(memory, found.index) else { break };
        let control = entry.control();
        let is_opening = control.state() as u8 == FlowState::Opening as u8;
        if is_opening && control.sequence() == found.control.sequence() {
            continue;
        }
        return control.is_live() && control.sequence() == found.control.sequence();
    }
    put_out(memory, &found);
    false
}

/// Puts both directions of a flow out of the race that another CPU was opening: when that goes on, it finds out.
#[inline(always)]
fn put_out<M: FlowMemory>(memory: &M, found: &Found) {
    let twin = found.entry.flow().twin;
    let out = |control: Control| Control::new(FlowState::Busy, 0, control.sequence());
    if !found.entry.exchange(found.control, out(found.control)) {
        return;
    }
    let Some(twin) = entry_at(memory, twin) else { return };
    let control = twin.control();
    if control.state() as u8 == FlowState::Opening as u8 && twin.flow().twin == found.index {
        twin.exchange(control, out(control));
    }
}

/// The ways of a bucket that hold an unprotected flow, as the high bits of their lanes.
#[inline(always)]
fn unprotected_lanes<M: FlowMemory>(memory: &M, bucket: u32) -> u64 {
    let tags = tag_word(memory, bucket);
    !tags & HIGH & !zero_lanes(tags)
}

/// The way of a bucket whose protected flow has been silent the longest beyond what it is forgiven, of those that were never
/// answered, else of the others; `NO_TWIN` if none has.
#[inline(always)]
fn idle<M: FlowMemory>(memory: &M, hash: Hash, now: u32) -> u32 {
    let bucket = if hash.lot & 1 == 0 { hash.buckets[0] } else { hash.buckets[1] };
    let (mut idlest, mut longest) = (NO_TWIN, 0);
    for way in 0..WAYS as u32 {
        let index = bucket * WAYS as u32 + way;
        let Some(entry) = entry_at(memory, index) else { break };
        let control = entry.control();
        let is_one_way = control.state() as u8 == FlowState::OneWay as u8;
        let forgiven = if is_one_way { IMPATIENT } else { PATIENT };
        let mut idle = now.wrapping_sub(entry.flow().stamp) as i32 - forgiven;
        if idle > 0
            && let Some(twin) = entry_at(memory, entry.flow().twin)
            && twin.flow().twin == index
        {
            idle = idle.min(now.wrapping_sub(twin.flow().stamp) as i32 - forgiven);
        }
        if idle > 0 && is_one_way {
            idle |= NEVER_ANSWERED;
        }
        if idle > longest && control.is_live() {
            (idlest, longest) = (index, idle);
        }
    }
    idlest
}
