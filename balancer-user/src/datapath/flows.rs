//! The controller's part in the flow table, without a system call: what has been silent for too long is freed, and what
//! is there can be looked at and taken out. How an entry is claimed, read and freed is the program's own code.

use std::{cell::RefCell, net::SocketAddr, ops::Range, sync::atomic::Ordering};

use balancer_common::{BackendId, Bucket, FlowAddresses, FlowEntry, WAYS, family, flags, mapped};
use balancer_ebpf::{
    FlowMemory,
    table::{self, Found},
};

use super::memory::SharedArray;
use crate::address;

/// The flow table, shared with the program.
pub struct FlowTable {
    seed: [u64; 2],
    tags: SharedArray<u64>,
    entries: SharedArray<FlowEntry>,
    /// Those of the entries of IPv6 flows; as many as entries where there may be such.
    addresses: SharedArray<FlowAddresses>,
}

/// A flow, as its request direction's entry was when it was looked at.
#[derive(Clone, Copy)]
pub struct Flow {
    /// The entry.
    pub entry: FlowEntry,
    addresses: FlowAddresses,
    found: Found,
}

/// For each entry that was freed and counted: its backend, and the flags by which it did (`flags::ACTIVE`,
/// `flags::AWAITING`).
pub type Ended = Vec<(BackendId, u8)>;

/// What a slice of the sweep found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sweep {
    /// What was freed.
    pub ended: Ended,
    /// The bucket that the next slice starts at.
    pub next: usize,
}

impl Flow {
    /// Where the client talks from.
    pub fn client(&self) -> SocketAddr {
        address::socket_from_wire(self.addresses.source, self.entry.key.source_port)
    }

    /// What the client talks to.
    pub fn service(&self) -> SocketAddr {
        address::socket_from_wire(self.addresses.destination, self.entry.key.destination_port)
    }

    /// Who serves it.
    pub fn backend(&self) -> SocketAddr {
        address::socket_from_wire(self.addresses.new_destination, self.entry.new_destination_port)
    }

    /// Where it is in the table: bucket × `WAYS` + way.
    pub fn index(&self) -> u32 {
        self.found.index
    }
}

impl FlowTable {
    /// The table in this memory: one word of tags for each bucket, `WAYS` entries each, and as many `addresses` if there may
    /// be IPv6 flows.
    pub(super) fn new(
        seed: [u64; 2],
        tags: SharedArray<u64>,
        entries: SharedArray<FlowEntry>,
        addresses: SharedArray<FlowAddresses>,
    ) -> FlowTable {
        FlowTable { seed, tags, entries, addresses }
    }

    /// How many buckets there are.
    pub fn bucket_count(&self) -> usize {
        self.tags.len()
    }

    /// Looks at `count` buckets from `start` on, going round at the end, and frees flows of which neither direction
    /// has been used within its timeout at the stamp `now`, and those that are `doomed`, which is asked for each flow's
    /// request direction. Empty ways cost nothing: their tags say so.
    pub fn sweep(
        &self,
        start: usize,
        count: usize,
        now: u32,
        mut doomed: impl FnMut(&FlowEntry) -> bool,
    ) -> Sweep {
        let buckets = self.bucket_count();
        let ended = RefCell::default();
        let mut next = start % buckets;
        for _ in 0..count.min(buckets) {
            for index in self.used(next) {
                let Some(found) = self.found(index) else { continue };
                let is_doomed = self.request(found).is_some_and(|entry| doomed(&entry));
                if is_doomed || table::is_expired(self, &found, now) {
                    self.expire(&found, now, &ended);
                }
            }
            next = (next + 1) % buckets;
        }
        Sweep { ended: ended.into_inner(), next }
    }

    fn expire(&self, found: &Found, now: u32, ended: &RefCell<Ended>) {
        let entry = found.entry.flow();
        let twin = table::twin(self, found).map(|(twin, _)| twin);
        // The port that a reply's entry holds is not free with its flow, which ends when the request's entry is looked at.
        if entry.holds_port() && (twin.is_some() || !entry.has_rested(now)) {
            return;
        }
        let rests_from = match twin {
            Some(twin) if twin.control().state().is_closing() => later(entry.stamp, twin.flow().stamp),
            _ => now,
        };
        end(self, found, rests_from, ended);
    }

    /// The flows whose request direction is in these buckets. The program goes on changing them meanwhile.
    pub fn flows(&self, buckets: Range<usize>) -> impl Iterator<Item = Flow> {
        let buckets = buckets.start..buckets.end.min(self.bucket_count());
        buckets.flat_map(|bucket| self.used(bucket)).filter_map(|index| self.flow(index))
    }

    /// The flow as it is now; `None` when it is gone.
    pub fn again(&self, flow: &Flow) -> Option<Flow> {
        let now = self.flow(flow.found.index)?;
        (now.found.control.sequence() == flow.found.control.sequence()).then_some(now)
    }

    /// When the last packet of either direction came, as a stamp.
    pub fn last_used(&self, flow: &Flow) -> u32 {
        let twin = self.found(flow.entry.twin).map(|twin| self.entries.snapshot(twin.index as usize));
        match twin {
            Some(twin) if twin.twin == flow.found.index => later(twin.stamp, flow.entry.stamp),
            _ => flow.entry.stamp,
        }
    }

    /// What the other direction's entry of this one waits for (`FlowEntry::exchange`); 0 if it has none any more.
    pub fn expected(&self, entry: &FlowEntry) -> u32 {
        let twin = self.found(entry.twin);
        let twin = twin.filter(|twin| table::twin(self, twin).is_some());
        twin.map_or(0, |twin| self.entries.snapshot(twin.index as usize).exchange)
    }

    /// Takes the flow out of the table; a port that it holds rests from the stamp `now` on. `None`, and it stays, when it
    /// is no longer as it was looked at.
    pub fn remove(&self, flow: &Flow, now: u32) -> Option<Ended> {
        let ended = RefCell::default();
        end(self, &flow.found, now, &ended).then(|| ended.into_inner())
    }

    /// The entries of a bucket that have a tag.
    fn used(&self, bucket: usize) -> impl Iterator<Item = u32> + use<> {
        let tags = self.tags.word(bucket).load(Ordering::Acquire).to_le_bytes();
        (0..).zip(tags).filter(|(_, tag)| *tag != 0).map(move |(way, _)| (bucket * WAYS) as u32 + way)
    }

    fn found(&self, index: u32) -> Option<Found> {
        let entry = table::entry_at(self, index)?;
        let control = entry.control();
        control.is_live().then_some(Found { entry, index, control })
    }

    fn flow(&self, index: u32) -> Option<Flow> {
        let found = self.found(index)?;
        let entry = self.request(found)?;
        let addresses = self.addresses(index, &entry)?;
        table::is_unchanged(&found).then_some(Flow { entry, addresses, found })
    }

    fn addresses(&self, index: u32, entry: &FlowEntry) -> Option<FlowAddresses> {
        if entry.key.family == family::IPV6 {
            let index = index as usize;
            return (index < self.addresses.len()).then(|| self.addresses.snapshot(index));
        }
        let [source, destination, new_source, new_destination] =
            [entry.key.source, entry.key.destination, entry.new_source, entry.new_destination].map(mapped);
        Some(FlowAddresses { source, destination, new_source, new_destination })
    }

    /// `None` for the reply direction, and for one that has changed hands while it was read.
    fn request(&self, found: Found) -> Option<FlowEntry> {
        if found.control.flags() & flags::REPLY != 0 {
            return None;
        }
        let entry = FlowEntry { control: found.control, ..self.entries.snapshot(found.index as usize) };
        table::is_unchanged(&found).then_some(entry)
    }
}

impl FlowMemory for FlowTable {
    fn seed(&self) -> [u64; 2] {
        self.seed
    }

    fn buckets(&self) -> u32 {
        self.tags.len() as u32
    }

    fn tags(&self, bucket: u32) -> Option<*mut u64> {
        self.tags.pointer(bucket as usize)
    }

    fn bucket(&self, bucket: u32) -> Option<*mut Bucket> {
        const { assert!(size_of::<Bucket>() == WAYS * size_of::<FlowEntry>()) };
        // All `WAYS` entries of a bucket are there: the table has so many for each word of tags.
        self.entries.pointer(bucket as usize * WAYS).map(<*mut FlowEntry>::cast)
    }
}

fn end(table: &FlowTable, found: &Found, rests_from: u32, ended: &RefCell<Ended>) -> bool {
    table::end_with(table, found, rests_from, |backend, flags| {
        if flags != 0 {
            ended.borrow_mut().push((backend, flags));
        }
    })
}

/// The later of two stamps.
const fn later(a: u32, b: u32) -> u32 {
    if a.wrapping_sub(b) as i32 > 0 { a } else { b }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use balancer_common::{Control, FlowState, NO_TWIN, PORT_REST};
    use bytemuck::{Pod, Zeroable as _};

    use super::*;

    const BUCKETS: usize = 4;
    /// Stamps in a unit of a timeout.
    const UNIT: u32 = 4;

    fn memory<T: Pod>(length: usize) -> SharedArray<T> {
        let file = tempfile::tempfile().unwrap();
        file.set_len((length * size_of::<T>()) as u64).unwrap();
        SharedArray::map(file.as_fd(), length).unwrap()
    }

    fn table() -> FlowTable {
        FlowTable::new([1, 2], memory(BUCKETS), memory(BUCKETS * WAYS), memory(BUCKETS * WAYS))
    }

    /// Writes an entry as the program would, and says where it is.
    fn put(table: &FlowTable, index: u32, entry: FlowEntry) -> u32 {
        let place = table.entries.pointer(index as usize).unwrap();
        // SAFETY: valid, aligned, and nobody else's.
        unsafe { place.write(entry) };
        set_tag(table, index, 0x55);
        index
    }

    fn set_tag(table: &FlowTable, index: u32, tag: u8) {
        let word = table.tags.word(index as usize / WAYS);
        let lane = (index as usize % WAYS) * 8;
        word.fetch_and(!(0xff << lane), Ordering::SeqCst);
        word.fetch_or(u64::from(tag) << lane, Ordering::SeqCst);
    }

    fn tag(table: &FlowTable, index: u32) -> u8 {
        table.tags.word(index as usize / WAYS).load(Ordering::SeqCst).to_le_bytes()[index as usize % WAYS]
    }

    fn entry(twin: u32, marks: u8, stamp: u32) -> FlowEntry {
        let control = Control::new(FlowState::Established, marks, 7);
        FlowEntry { twin, stamp, timeout: 10, backend: 3, control, ..FlowEntry::zeroed() }
    }

    /// A flow with both its entries; where the request's is.
    fn flow(table: &FlowTable, request: u32, reply: u32, stamps: [u32; 2]) -> u32 {
        put(table, reply, entry(request, flags::REPLY, stamps[1]));
        put(table, request, entry(reply, flags::ACTIVE | flags::AWAITING, stamps[0]))
    }

    fn seen(table: &FlowTable, buckets: Range<usize>) -> Vec<u32> {
        table.flows(buckets).map(|flow| flow.index()).collect()
    }

    fn change(table: &FlowTable, index: u32, state: FlowState, sequence: u16) {
        let place = table.entries.pointer(index as usize).unwrap();
        // SAFETY: as above.
        unsafe { (*place).control = Control::new(state, flags::ACTIVE, sequence) };
    }

    #[test]
    fn each_flow_is_seen_once_where_its_requests_are() {
        let table = table();
        assert_eq!(seen(&table, 0..BUCKETS), [0; 0]);
        flow(&table, 2, 31, [5, 5]);
        flow(&table, 8, 9, [5, 5]);
        flow(&table, 30, 0, [5, 5]);
        // A reply whose request is gone, and an entry that is being written.
        put(&table, 12, entry(NO_TWIN, flags::REPLY, 5));
        put(&table, 13, entry(NO_TWIN, 0, 5));
        change(&table, 13, FlowState::Busy, 1);
        assert_eq!(seen(&table, 0..BUCKETS), [2, 8, 30]);
        assert_eq!(seen(&table, 0..1), [2]);
        assert_eq!(seen(&table, 1..3), [8]);
        assert_eq!(seen(&table, 3..100), [30]);
        assert_eq!(seen(&table, 100..200), [0; 0]);
    }

    #[test]
    fn a_flow_is_shown_with_its_whole_addresses() {
        let table = table();
        let key = balancer_common::FlowKey {
            source: [10, 0, 1, 10],
            destination: [192, 0, 2, 10],
            source_port: 40_000u16.to_be_bytes(),
            destination_port: 80u16.to_be_bytes(),
            family: family::IPV4,
            ..balancer_common::FlowKey::zeroed()
        };
        let entry = FlowEntry {
            key,
            new_destination: [10, 0, 2, 11],
            new_destination_port: 8080u16.to_be_bytes(),
            ..entry(NO_TWIN, 0, 5)
        };
        put(&table, 2, entry);
        // The same numbers are the digests of an IPv6 flow.
        put(&table, 9, FlowEntry { key: balancer_common::FlowKey { family: family::IPV6, ..key }, ..entry });
        let [source, destination, new_source, new_destination] =
            ["2001:db8:1::10", "2001:db8:aa::10", "2001:db8:1::10", "2001:db8:2::11"]
                .map(|text| address::to_wire(text.parse().unwrap()));
        let place = table.addresses.pointer(9).unwrap();
        // SAFETY: valid, aligned, and nobody else's.
        unsafe { place.write(FlowAddresses { source, destination, new_source, new_destination }) };
        let shown: Vec<_> = table
            .flows(0..BUCKETS)
            .map(|flow| [flow.client(), flow.service(), flow.backend()].map(|end| end.to_string()))
            .collect();
        assert_eq!(
            shown,
            [
                ["10.0.1.10:40000", "192.0.2.10:80", "10.0.2.11:8080"],
                ["[2001:db8:1::10]:40000", "[2001:db8:aa::10]:80", "[2001:db8:2::11]:8080"],
            ]
        );
    }

    #[test]
    fn a_removed_flow_is_gone_with_both_entries_and_counted_once() {
        let table = table();
        flow(&table, 2, 31, [5, 5]);
        flow(&table, 8, 9, [5, 5]);
        let flow = table.flows(0..BUCKETS).next().unwrap();
        assert_eq!(table.remove(&flow, 9), Some(vec![(3, flags::ACTIVE | flags::AWAITING)]));
        assert_eq!(seen(&table, 0..BUCKETS), [8]);
        assert!(table.found(31).is_none());
        assert_eq!([2, 31, 8, 9].map(|index| tag(&table, index)), [0, 0, 0x55, 0x55]);
        assert_eq!(table.remove(&flow, 9), None);
        assert!(table.again(&flow).is_none());
    }

    #[test]
    fn a_flow_that_changed_since_it_was_looked_at_stays() {
        let table = table();
        flow(&table, 2, 31, [5, 5]);
        let old = table.flows(0..BUCKETS).next().unwrap();
        change(&table, 2, FlowState::HalfOpen, 7);
        assert_eq!(table.remove(&old, 9), None);
        let now = table.again(&old).unwrap();
        assert_eq!(now.entry.control.state(), FlowState::HalfOpen);
        // And one that took its place is another flow.
        change(&table, 2, FlowState::HalfOpen, 8);
        assert!(table.again(&old).is_none());
        assert_eq!(table.remove(&now, 9), None);
        assert_eq!(seen(&table, 0..BUCKETS), [2]);
    }

    #[test]
    fn the_last_packet_of_either_direction_counts() {
        let table = table();
        for (stamps, expected) in [([9, 5], 9), ([5, 9], 9), ([u32::MAX, 3], 3)] {
            flow(&table, 2, 31, stamps);
            let flow = table.flows(0..BUCKETS).next().unwrap();
            assert_eq!(table.last_used(&flow), expected, "{stamps:?}");
        }
        // The reply's entry has gone to another flow.
        put(&table, 31, entry(8, flags::REPLY, 99));
        let flow = table.flows(0..BUCKETS).next().unwrap();
        assert_eq!(table.last_used(&flow), u32::MAX);
    }

    #[test]
    fn the_sweep_frees_flows_of_which_neither_direction_was_used() {
        let table = table();
        let now = 1_000;
        let silent = now - 10 * UNIT - 1;
        flow(&table, 2, 31, [silent, silent]);
        flow(&table, 8, 9, [silent, now - 1]);
        flow(&table, 16, 17, [now - 1, silent]);
        put(&table, 24, entry(NO_TWIN, flags::REPLY, silent));
        // From the middle, and round.
        let sweep = table.sweep(2, 2, now, |_| false);
        assert_eq!(sweep, Sweep { ended: vec![(3, flags::ACTIVE | flags::AWAITING)], next: 0 });
        assert_eq!(seen(&table, 0..BUCKETS), [8, 16]);
        assert_eq!([2, 31, 24].map(|index| tag(&table, index)), [0; 3]);
        assert_eq!(table.sweep(0, 100, now, |_| false), Sweep { ended: vec![], next: 0 });
        assert_eq!(seen(&table, 0..BUCKETS), [8, 16]);
        // A little later, both are over.
        let sweep = table.sweep(0, 100, now + 10 * UNIT, |_| false);
        assert_eq!(sweep.ended.len(), 2);
        assert_eq!(seen(&table, 0..BUCKETS), [0; 0]);
    }

    #[test]
    fn the_sweep_frees_what_is_doomed_and_asks_once_for_each_flow() {
        let table = table();
        flow(&table, 2, 31, [5, 5]);
        flow(&table, 8, 9, [5, 5]);
        put(&table, 24, entry(NO_TWIN, flags::REPLY, 5));
        let mut asked = Vec::new();
        let sweep = table.sweep(0, BUCKETS, 5, |entry| {
            asked.push((entry.twin, entry.control.flags()));
            entry.twin == 9
        });
        assert_eq!(asked, [31, 9].map(|twin| (twin, flags::ACTIVE | flags::AWAITING)));
        assert_eq!(sweep.ended, [(3, flags::ACTIVE | flags::AWAITING)]);
        assert_eq!(seen(&table, 0..BUCKETS), [2]);
        assert_eq!([2, 31, 8, 9, 24].map(|index| tag(&table, index)), [0x55, 0x55, 0, 0, 0x55]);
    }

    /// A flow to whose source an address of the balancer's was given: its reply's entry holds a port.
    fn translated(table: &FlowTable, request: u32, reply: u32, stamps: [u32; 2], state: FlowState) {
        flow(table, request, reply, stamps);
        let control = Control::new(state, flags::REPLY, 7);
        put(
            table,
            reply,
            FlowEntry { new_destination: [1; 4], control, ..entry(request, flags::REPLY, stamps[1]) },
        );
    }

    /// From which stamp on the port of a resting entry rests.
    fn rests_from(table: &FlowTable, index: u32) -> Option<u32> {
        let found = table.found(index)?;
        let entry = found.entry.flow();
        let is_resting = entry.holds_port() && entry.twin == NO_TWIN && entry.timeout == 0;
        is_resting.then_some(entry.stamp.wrapping_add(1))
    }

    #[test]
    fn a_port_rests_when_its_flow_has_ended() {
        let table = table();
        let now = 1_000;
        let silent = now - 10 * UNIT - 1;
        // Silent for too long; closed; doomed; killed. The replies' entries are looked at before and after.
        translated(&table, 10, 2, [silent, silent], FlowState::Established);
        translated(&table, 3, 11, [silent, silent - 1], FlowState::Closing);
        translated(&table, 20, 21, [now, now], FlowState::Established);
        translated(&table, 28, 29, [now, now], FlowState::Established);
        let sweep = table.sweep(0, BUCKETS, now, |entry| entry.twin == 21);
        assert_eq!(sweep.ended.len(), 3);
        let killed = table.flows(0..BUCKETS).next().unwrap();
        assert_eq!(table.remove(&killed, now + 5), Some(vec![(3, flags::ACTIVE | flags::AWAITING)]));
        assert_eq!(
            [2, 11, 21, 29].map(|index| rests_from(&table, index)),
            [Some(now), Some(silent), Some(now), Some(now + 5)]
        );
        assert_eq!(seen(&table, 0..BUCKETS), [0; 0]);
        // The tag is still there, so that nobody takes the place.
        assert_eq!([2, 11, 21, 29].map(|index| tag(&table, index)), [0x55; 4]);

        table.sweep(0, BUCKETS, silent + PORT_REST, |_| false);
        assert!(rests_from(&table, 11).is_none());
        table.sweep(0, BUCKETS, now + PORT_REST + 4, |_| false);
        assert_eq!(
            [2, 11, 21, 29].map(|index| rests_from(&table, index).is_some()),
            [false, false, false, true]
        );
        table.sweep(0, BUCKETS, now + PORT_REST + 5, |_| false);
        assert_eq!([2, 11, 21, 29].map(|index| tag(&table, index)), [0; 4]);
    }
}
