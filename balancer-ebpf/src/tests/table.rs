//! The flow table by itself: found, replaced and freed as a map would, and as full as documented.

use std::{
    collections::{HashMap, HashSet},
    vec,
    vec::Vec,
};

use balancer_common::{
    Control, FlowEntry, FlowKey, FlowState, NO_TWIN, TCP, WAYS, family, flags, flow_buckets,
};
use bytemuck::Zeroable;
use proptest::{collection::vec as sequence, prelude::*};

use super::{
    buffer::{Kernel, Memory, insert},
    cases,
};
use crate::{
    FlowMemory as _,
    enter::{Entered, announce, claim_free, enter, reserve, withdraw},
    table::{
        Found, count_change, count_lanes, entry_at, find, hash, is_expired, is_unchanged, lowest_lane,
        protect, release, zero_lanes,
    },
};

const SEED: [u64; 2] = [0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210];
/// Stamps of the silence that an established flow is forgiven when the table is full.
const MINUTE: u32 = (60_000_000_000_u64 >> 26) as u32;

/// The key of the request or the reply direction of flow `number`.
fn key(number: u32, is_reply: bool) -> FlowKey {
    let client = (0x0a01_0000 + number / 50_000).to_be_bytes();
    let port = (10_000 + (number % 50_000) as u16).to_be_bytes();
    let (server, server_port) = if is_reply {
        ([10, 0, 2, 11 + (number % 3) as u8], 8080_u16.to_be_bytes())
    } else {
        ([192, 0, 2, 10], 80_u16.to_be_bytes())
    };
    let [source, destination] = if is_reply { [server, client] } else { [client, server] };
    let [source_port, destination_port] = if is_reply { [server_port, port] } else { [port, server_port] };
    FlowKey {
        source,
        destination,
        source_port,
        destination_port,
        protocol: TCP,
        family: family::IPV4,
        reserved: [0; 2],
    }
}

fn entry(key: FlowKey, marks: u8, stamp: u32) -> FlowEntry {
    let control = Control::new(FlowState::HalfOpen, marks, 0);
    FlowEntry { key, control, stamp, twin: NO_TWIN, timeout: 10, ..FlowEntry::zeroed() }
}

fn look_up(kernel: &Kernel, key: &FlowKey) -> Found {
    find(kernel, key, hash(kernel, key))
}

#[test]
fn lane_arithmetic_is_exact() {
    for mask in 1..=u8::MAX {
        let lanes =
            (0..8).filter(|lane| mask >> lane & 1 == 1).fold(0, |word, lane| word | 0x80_u64 << (lane * 8));
        assert_eq!(lowest_lane(lanes), mask.trailing_zeros());
        assert_eq!(count_lanes(lanes), u64::from(mask.count_ones()));
    }
    assert_eq!(count_lanes(0), 0);
    // Every byte in every lane, beside lanes that a carry or a borrow would come from.
    for fill in [0x00, 0x01, 0x7f, 0x80, 0x81, 0xff] {
        for lane in 0..WAYS {
            for byte in 0..=u8::MAX {
                let mut bytes = [fill; WAYS];
                bytes[lane] = byte;
                let expected = bytes.map(|byte| if byte & 0x7f == 0 { 0x80 } else { 0 });
                assert_eq!(
                    zero_lanes(u64::from_le_bytes(bytes)),
                    u64::from_le_bytes(expected),
                    "{bytes:02x?}"
                );
            }
        }
    }
}

#[test]
fn an_entry_is_found_by_its_whole_key_until_it_is_released() {
    let kernel = Kernel::new(Memory::new(4, SEED), 1);
    let original = key(7, false);
    assert!(!look_up(&kernel, &original).exists());
    let index = insert(&kernel, &entry(original, 0, 0)).unwrap();
    let found = look_up(&kernel, &original);
    assert!(found.exists() && is_unchanged(&found));
    assert_eq!(found.index, index);
    // Any other key, even with this one's tag and buckets, is not it.
    let bytes: [u8; 16] = bytemuck::cast(original);
    for bit in 0..128 {
        let mut other = bytes;
        other[bit / 8] ^= 1 << (bit % 8);
        let other: FlowKey = bytemuck::cast(other);
        assert!(!look_up(&kernel, &other).exists());
        assert!(!find(&kernel, &other, hash(&kernel, &original)).exists());
    }
    free(&kernel, &found);
    assert!(!look_up(&kernel, &original).exists());
    assert_eq!(kernel.memory.entry(index).control.state(), FlowState::Free);
    assert_eq!(kernel.memory.tag(index), 0);
    // Its successor has another sequence number, by which a reader that was slow finds out.
    assert!(is_unchanged(&found));
    for number in 8..40 {
        insert(&kernel, &entry(key(number, false), 0, 0)).unwrap();
    }
    assert!(kernel.memory.entry(index).control.is_live());
    assert!(!is_unchanged(&found));
}

/// Only what names this entry as its twin keeps it alive.
#[test]
fn another_flow_refreshes_nothing() {
    let kernel = Kernel::new(Memory::new(4, SEED), 1);
    let one = insert(&kernel, &entry(key(1, false), 0, 0)).unwrap();
    let other = insert(&kernel, &entry(key(2, true), 0, 100)).unwrap();
    kernel.memory.set_twin(one, other);
    let is_over = |now| is_expired(&kernel, &look_up(&kernel, &key(1, false)), now);
    assert_eq!([40, 41, 140].map(is_over), [false, true, true]);
    kernel.memory.set_twin(other, one);
    assert_eq!([41, 140, 141].map(is_over), [false, false, true]);
}

/// What another CPU has claimed but not yet published is in nobody's way, and nobody's.
#[test]
fn a_claimed_entry_is_neither_found_nor_taken() {
    let kernel = Kernel::new(Memory::new(1, SEED), 1);
    let indices =
        Vec::from_iter((0..8).map(|number| insert(&kernel, &entry(key(number, false), 0, 0)).unwrap()));
    for index in &indices {
        let control = kernel.memory.entry(*index).control;
        kernel.memory.set_control(*index, Control::new(FlowState::Busy, 0, control.sequence()));
    }
    for number in 0..8 {
        assert!(!look_up(&kernel, &key(number, false)).exists());
    }
    for number in 8..40 {
        assert_eq!(insert(&kernel, &entry(key(number, false), 0, 0)), None);
    }
}

/// A release by someone who looked before the entry changed does nothing.
#[test]
fn a_stale_release_frees_nothing() {
    let kernel = Kernel::new(Memory::new(1, SEED), 1);
    let index = insert(&kernel, &entry(key(1, false), flags::ACTIVE, 0)).unwrap();
    let stale = look_up(&kernel, &key(1, false));
    let control = kernel.memory.entry(index).control;
    kernel.memory.set_control(index, Control::new(FlowState::Established, flags::ACTIVE, control.sequence()));
    free(&kernel, &stale);
    assert!(look_up(&kernel, &key(1, false)).exists());
    assert_eq!(kernel.counted(0).closed, 0);
    free(&kernel, &look_up(&kernel, &key(1, false)));
    free(&kernel, &stale);
    assert_eq!(kernel.counted(0).closed, 1);
}

/// Twins go together; an entry whose twin has become another flow's goes alone.
#[test]
fn a_release_takes_the_twin_along() {
    let kernel = Kernel::new(Memory::new(4, SEED), 1);
    let request = insert(&kernel, &entry(key(1, false), flags::ACTIVE, 0)).unwrap();
    let reply = FlowEntry { twin: request, ..entry(key(1, true), flags::REPLY, 0) };
    let reply = insert(&kernel, &reply).unwrap();
    let stranger = FlowEntry { twin: request, ..entry(key(2, true), flags::REPLY, 0) };
    insert(&kernel, &stranger).unwrap();
    kernel.memory.set_twin(request, reply);
    // The stranger names the flow as its twin, but not the other way round.
    free(&kernel, &look_up(&kernel, &key(2, true)));
    assert!(look_up(&kernel, &key(1, false)).exists() && look_up(&kernel, &key(1, true)).exists());
    free(&kernel, &look_up(&kernel, &key(1, true)));
    assert_eq!(kernel.memory.live().count(), 0);
    assert_eq!(kernel.counted(0).closed, 1, "the share of the request's entry");
    kernel.memory.assert_consistent();
}

/// As many flows as the sizes promise, none of which may be replaced; then each gives way to another, out of turn.
#[test]
fn the_documented_number_of_flows_fits() {
    const FLOWS: u32 = 250_000;
    let kernel = Kernel::new(Memory::new(flow_buckets(FLOWS), SEED), 1);
    let enter = |number| {
        let indices = [false, true].map(|is_reply| insert(&kernel, &entry(key(number, is_reply), 0, 0)));
        let [Some(request), Some(reply)] = indices else { panic!("no room for flow {number}") };
        for (index, twin) in [(request, reply), (reply, request)] {
            kernel.memory.set_twin(index, twin);
            protect(&kernel, index, true);
        }
    };
    (0..FLOWS).for_each(enter);
    let mut numbers = Vec::from_iter(0..FLOWS);
    for next in FLOWS..2 * FLOWS {
        // A step that has no divisor in common with the number of flows: each is met once.
        let place = (u64::from(next) * 314_159 % u64::from(FLOWS)) as usize;
        free(&kernel, &look_up(&kernel, &key(numbers[place], false)));
        numbers[place] = next;
        enter(next);
    }
    for (number, is_there) in (0..FLOWS).map(|old| (old, false)).chain(numbers.iter().map(|new| (*new, true)))
    {
        for is_reply in [false, true] {
            assert_eq!(look_up(&kernel, &key(number, is_reply)).exists(), is_there, "flow {number}");
        }
    }
    kernel.memory.assert_consistent();
}

/// Keys that differ little, as those of real clients do, spread as random ones would.
#[test]
fn keys_spread_over_buckets_and_tags() {
    const BUCKETS: u32 = 1024;
    let memory = Memory::new(BUCKETS, SEED);
    let chi_squared = |counts: &[u32]| {
        let expected = f64::from(counts.iter().sum::<u32>()) / counts.len() as f64;
        counts.iter().map(|count| (f64::from(*count) - expected).powi(2) / expected).sum::<f64>()
    };
    // Within six standard deviations of the mean of a chi-squared distribution.
    let assert_even = |what: &str, counts: &[u32]| {
        let freedom = counts.len() as f64 - 1.0;
        let (value, slack) = (chi_squared(counts), 6.0 * (2.0 * freedom).sqrt());
        assert!((value - freedom).abs() < slack, "{what}: {value} of {freedom} ± {slack}");
    };
    for is_reply in [false, true] {
        let mut firsts = vec![0; BUCKETS as usize];
        let mut seconds = firsts.clone();
        let mut pairs = firsts.clone();
        let mut tags = vec![0; 127];
        let mut lots = vec![0; 8];
        for number in 0..100_000 {
            let hash = hash(&*memory, &key(number, is_reply));
            assert!(
                hash.buckets.iter().all(|bucket| *bucket < BUCKETS)
                    && (1..128).contains(&hash.tag)
                    && hash.lot < 8
            );
            firsts[hash.buckets[0] as usize] += 1;
            seconds[hash.buckets[1] as usize] += 1;
            pairs[(hash.buckets[0] / 32 * 32 + hash.buckets[1] / 32) as usize] += 1;
            tags[usize::from(hash.tag) - 1] += 1;
            lots[hash.lot as usize] += 1;
        }
        assert_even("first buckets", &firsts);
        assert_even("second buckets", &seconds);
        assert_even("the two together", &pairs);
        // Tag 1 is also that of hashes whose seven bits are 0.
        assert_even("tags", &tags[1..]);
        assert_even("lots", &lots);
    }
}

#[test]
fn the_seed_decides_where_a_key_goes() {
    let [one, other] = [[1, 2], [1, 3]].map(|seed| Memory::new(1 << 20, seed));
    let same = (0..1_000).filter(|number| {
        let key = key(*number, false);
        hash(&*one, &key).buckets[0] == hash(&*other, &key).buckets[0]
    });
    assert!(same.count() < 3);
}

fn free(kernel: &Kernel, found: &Found) {
    release(kernel, found);
}

/// A step of the model test; keys and places are taken modulo what there is.
#[derive(Clone, Debug)]
enum Step {
    Open(u32),
    Release(u32, bool),
    Protect(u32, bool),
    Wait(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..40_u32).prop_map(Step::Open),
        1 => (0..40_u32, any::<bool>()).prop_map(|(flow, is_reply)| Step::Release(flow, is_reply)),
        4 => (0..40_u32, prop::bool::weighted(0.9)).prop_map(|(flow, on)| Step::Protect(flow, on)),
        1 => (0..MINUTE).prop_map(Step::Wait),
    ];
    sequence(step, 1..120)
}

/// The table as a map from flows to the indices of their two entries, and who is protected.
#[derive(Default)]
struct Model {
    flows: HashMap<u32, [u32; 2]>,
    protected: HashSet<u32>,
}

impl Model {
    fn owner(&self, index: u32) -> Option<u32> {
        self.flows.iter().find(|(_, indices)| indices.contains(&index)).map(|(flow, _)| *flow)
    }

    fn remove(&mut self, flow: u32) {
        for index in self.flows.remove(&flow).into_iter().flatten() {
            self.protected.remove(&index);
        }
    }

    /// Reserves a way beside `other`, and removes from the model the flow that had it, if that was allowed.
    fn reserve(&mut self, kernel: &Kernel, key: &FlowKey, other: u32, now: u32) -> Option<u32> {
        let memory = &kernel.memory;
        let hash = hash(kernel, key);
        let places = hash.buckets.map(|bucket| bucket * 8..bucket * 8 + 8);
        let idle_places = places[(hash.lot & 1) as usize].clone().filter(|index| *index != other);
        let idle_places = Vec::from_iter(idle_places);
        let places = Vec::from_iter(places.into_iter().flatten());
        let is_full = places.iter().all(|index| memory.entry(*index).control.state() != FlowState::Free);
        let has_unprotected = places.iter().any(|index| !self.protected.contains(index) && *index != other);
        let silence = HashMap::<u32, u32>::from_iter(
            places.iter().map(|index| (*index, now - memory.entry(*index).stamp)),
        );
        let index = reserve(kernel, key, now);
        if index == NO_TWIN {
            assert!(is_full && !has_unprotected, "refused though there was room");
            assert!(idle_places.iter().all(|index| silence[index] <= MINUTE), "refused though one was idle");
            return None;
        }
        assert!(places.contains(&index) && index != other);
        assert_eq!((memory.tag(index), memory.is_protected(index)), (hash.tag, false));
        if let Some(evicted) = self.owner(index) {
            assert!(is_full, "replaced {index} though there was room");
            if self.protected.contains(&index) {
                assert!(!has_unprotected, "replaced an established flow before another");
                assert!(silence[&index] > MINUTE, "replaced an established flow in use");
                assert_eq!(idle_places.iter().map(|index| silence[index]).max(), Some(silence[&index]));
            }
            self.remove(evicted);
        }
        Some(index)
    }

    fn open(&mut self, kernel: &Kernel, flow: u32, now: u32) {
        let keys = [false, true].map(|is_reply| key(flow, is_reply));
        let Some(request) = self.reserve(kernel, &keys[0], NO_TWIN, now) else { return };
        let Some(reply) = self.reserve(kernel, &keys[1], request, now) else {
            withdraw(kernel, request);
            return;
        };
        announce(kernel, request, &FlowEntry { twin: reply, ..entry(keys[0], 0, now) }, flags::ACTIVE);
        announce(kernel, reply, &FlowEntry { twin: request, ..entry(keys[1], 0, now) }, flags::REPLY);
        assert!(!keys.iter().any(|key| look_up(kernel, key).exists()), "found before it is live");
        assert_eq!(enter(kernel, request), Entered::New);
        self.flows.insert(flow, [request, reply]);
    }

    #[track_caller]
    fn compare(&self, kernel: &Kernel) {
        for flow in 0..40 {
            let indices = [false, true].map(|is_reply| {
                let found = look_up(kernel, &key(flow, is_reply));
                found.exists().then_some(found.index)
            });
            let expected = self.flows.get(&flow).map_or([None; 2], |indices| indices.map(Some));
            assert_eq!(indices, expected, "flow {flow}");
        }
        assert_eq!(kernel.memory.live().count(), self.flows.len() * 2);
        assert_eq!(kernel.counted(0).opened - kernel.counted(0).closed, self.flows.len() as u64);
        assert_eq!(kernel.memory.active(), self.flows.len() as u64);
        for index in 0..kernel.memory.entries() {
            assert_eq!(kernel.memory.is_protected(index), self.protected.contains(&index), "entry {index}");
        }
        kernel.memory.assert_consistent();
    }
}

proptest! {
    #![proptest_config(cases(300))]

    /// Small tables, mostly full, against a map.
    #[test]
    fn the_table_is_a_map(steps in steps(), buckets in 1..5_u32, seed: [u64; 2], start: u32) {
        let kernel = Kernel::new(Memory::new(buckets, seed), 1);
        let mut model = Model::default();
        let mut now = start;
        for step in steps {
            match step {
                Step::Open(flow) if !model.flows.contains_key(&flow) => model.open(&kernel, flow, now),
                Step::Open(_) => {}
                Step::Release(flow, is_reply) => {
                    let found = look_up(&kernel, &key(flow, is_reply));
                    if found.exists() {
                        free(&kernel, &found);
                        model.remove(flow);
                    }
                }
                Step::Protect(flow, on) => {
                    for index in model.flows.get(&flow).copied().into_iter().flatten() {
                        protect(&kernel, index, on);
                        if on { model.protected.insert(index); } else { model.protected.remove(&index); }
                    }
                }
                Step::Wait(stamps) => now = now.wrapping_add(stamps),
            }
            model.compare(&kernel);
        }
    }
}

#[test]
fn a_backend_that_does_not_exist_is_not_counted() {
    let kernel = Kernel::new(Memory::new(1, SEED), 1);
    count_change(&kernel, 1, Control::new(FlowState::HalfOpen, flags::ACTIVE, 0), Control::default());
    assert_eq!(kernel.counted(0).closed, 0);
}

/// What is claimed for a new flow at once is where `reserve` would have put it, and nobody gives way for it.
#[test]
fn free_ways_are_claimed_for_both_directions_at_once() {
    let states = |kernel: &Kernel| -> Vec<FlowState> {
        let ways = 0..kernel.buckets() * WAYS as u32;
        ways.map(|way| entry_at(kernel, way).unwrap().control().state()).collect()
    };
    let mut both = 0;
    for number in 0..64 {
        let keys = [key(number, false), key(number, true)];
        let kernel = Kernel::new(Memory::new(4, SEED), 1);
        let ways = claim_free(&kernel, [&keys[0], &keys[1]]);
        let other = Kernel::new(Memory::new(4, SEED), 1);
        assert_eq!(ways[0], reserve(&other, &keys[0], 0), "flow {number}");
        let claimed: Vec<u32> = ways.into_iter().filter(|way| *way != NO_TWIN).collect();
        both += usize::from(claimed.len() == 2);
        for (way, state) in (0..).zip(states(&kernel)) {
            let expected = if claimed.contains(&way) { FlowState::Busy } else { FlowState::Free };
            assert_eq!(state, expected, "flow {number}, way {way}");
        }
        if ways[1] == NO_TWIN {
            // The same place, which the request has; another is there for who asks.
            assert_ne!(reserve(&kernel, &keys[1], 0), NO_TWIN, "flow {number}");
        } else {
            withdraw(&other, ways[0]);
            assert_eq!(ways[1], reserve(&other, &keys[1], 0), "flow {number}");
        }
    }
    assert!(both > 32, "{both} of 64");

    let full = Kernel::new(Memory::new(1, SEED), 1);
    for number in 0..WAYS as u32 {
        insert(&full, &entry(key(number, false), 0, 5)).unwrap();
    }
    let before = states(&full);
    assert_eq!(claim_free(&full, [&key(100, false), &key(100, true)]), [NO_TWIN; 2]);
    assert_eq!(states(&full), before, "half-open flows do not give way here");
}
