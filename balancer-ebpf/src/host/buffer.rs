//! The surroundings of the data plane, in plain memory: a frame, the flow table, and all other maps.

use std::{
    boxed::Box,
    cell::{Cell, RefCell, UnsafeCell},
    collections::{HashMap, HashSet},
    sync::Arc,
    vec,
    vec::Vec,
};

use balancer_common::{
    Address, AgeProfile, Backend, BackendCounters, BackendId, Bucket, ClientKey, Control, FlowAddresses,
    FlowEntry, FlowKey, Fragment, FragmentKey, MAX_PORTS, NO_TWIN, NextHop, Phase, Reason, Remembered,
    ResponseTimes, RingWord, Service, ServiceId, ServiceKey, TCP, UDP, WAYS, flags, port_bit,
};
use bytemuck::Zeroable;

use super::{
    frame::{self, Endpoint, FAMILY},
    turns::Turns,
};
use crate::{
    Environment, FlowMemory, Packet, Way, enter, icmp,
    open::{Choice, Opening},
    packet::Wire,
    source,
    table::{self, Found},
};

/// Bytes before a frame in its allocation, which it can grow into.
const HEADROOM: usize = 64;
/// Bytes that follow a frame in its allocation, and are none of the data plane's business.
const BEYOND: usize = 64;

/// A frame that hands out pointers into its first buffer only, and notices what is written past the end.
pub struct Buffer {
    bytes: Box<[Cell<u8>]>,
    /// Where the frame starts, where its first buffer ends, and where it ends itself.
    start: Cell<usize>,
    first_end: Cell<usize>,
    end: Cell<usize>,
    /// Where it ended at first: what lies behind must stay as it is.
    original_end: Cell<usize>,
    beyond: u8,
    /// How many bytes it may grow in front.
    pub headroom: Cell<usize>,
}

impl Buffer {
    /// A frame of one buffer.
    pub fn new(frame: &[u8]) -> Buffer {
        Buffer::fragmented(frame, frame.len(), 0xa5)
    }

    /// A frame of which only `first` bytes can be reached, with `beyond` in the bytes after its end: who reads
    /// those behaves differently with another value.
    pub fn fragmented(frame: &[u8], first: usize, beyond: u8) -> Buffer {
        assert!(first <= frame.len());
        let before = [beyond; HEADROOM].into_iter();
        let bytes = before.chain(frame.iter().copied()).chain([beyond; BEYOND]).map(Cell::new).collect();
        let end = HEADROOM + frame.len();
        Buffer {
            bytes,
            start: Cell::new(HEADROOM),
            first_end: Cell::new(HEADROOM + first),
            end: Cell::new(end),
            original_end: Cell::new(end),
            beyond,
            headroom: Cell::new(HEADROOM),
        }
    }

    /// The frame as it is now.
    #[track_caller]
    pub fn bytes(&self) -> Vec<u8> {
        let behind = &self.bytes[self.original_end.get()..];
        assert!(behind.iter().all(|byte| byte.get() == self.beyond), "written past the end");
        self.bytes[self.start.get()..self.end.get()].iter().map(Cell::get).collect()
    }

    /// Where the frame starts: the addresses that parsing gives are measured from here.
    pub fn start(&self) -> usize {
        self.bytes.as_ptr().addr() + self.start.get()
    }
}

impl Packet for Buffer {
    fn at<T: Wire>(&self, offset: usize) -> Option<*mut T> {
        let place = self.start.get().checked_add(offset)?;
        let is_inside = place.checked_add(size_of::<T>())? <= self.first_end.get();
        // SAFETY: `place` is within the allocation, as just checked; the cells allow writing through it.
        is_inside.then(|| unsafe { self.bytes.as_ptr().add(place) }.cast_mut().cast())
    }

    fn shift(&self, bytes: i32) -> bool {
        let Some(start) = self.start.get().checked_add_signed(bytes as isize) else { return false };
        if start > self.first_end.get() || start + self.headroom.get() < HEADROOM {
            return false;
        }
        self.start.set(start);
        true
    }

    fn cut(&self, length: usize) -> bool {
        let end = self.start.get() + length;
        if end > self.end.get() {
            // It grows, as far as there is room, and if it is of one buffer.
            if end + BEYOND / 2 > self.bytes.len() || self.first_end != self.end {
                return false;
            }
            self.first_end.set(end);
            self.original_end.set(self.original_end.get().max(end));
        }
        self.end.set(end);
        self.first_end.set(self.first_end.get().min(end));
        true
    }

    fn has(&self, length: usize) -> bool {
        self.start.get() + length <= self.end.get()
    }
}

/// A flow table that several threads can work on, as CPUs do.
pub struct Memory {
    seed: [u64; 2],
    tags: Box<[UnsafeCell<u64>]>,
    buckets: Box<[UnsafeCell<Bucket>]>,
    addresses: Box<[UnsafeCell<FlowAddresses>]>,
}

// SAFETY: the data plane reaches it through raw pointers, and its protocol for doing so from several CPUs is what
// the tests are about.
unsafe impl Sync for Memory {}

impl Memory {
    /// An empty table.
    pub fn new(buckets: u32, seed: [u64; 2]) -> Arc<Memory> {
        let bucket = Bucket { entries: [FlowEntry::zeroed(); WAYS] };
        Arc::new(Memory {
            seed,
            tags: (0..buckets).map(|_| UnsafeCell::new(0)).collect(),
            buckets: (0..buckets).map(|_| UnsafeCell::new(bucket)).collect(),
            addresses: (0..buckets as usize * WAYS)
                .map(|_| UnsafeCell::new(FlowAddresses::zeroed()))
                .collect(),
        })
    }

    /// How many entries it has room for.
    pub fn entries(&self) -> u32 {
        (self.buckets.len() * WAYS) as u32
    }

    /// A copy of an entry.
    pub fn entry(&self, index: u32) -> FlowEntry {
        // SAFETY: valid and aligned; `Pod` types have no invalid values.
        unsafe { self.place(index).read_volatile() }
    }

    /// Writes an entry.
    pub fn put(&self, index: u32, entry: &FlowEntry) -> Found {
        // SAFETY: valid and aligned, and nobody else's.
        unsafe { self.place(index).write(*entry) };
        Found::at(self, index, entry.control)
    }

    /// Writes an entry's control word, as another CPU would.
    pub fn set_control(&self, index: u32, control: Control) {
        // SAFETY: valid and aligned, and no other thread uses a table that tests change by hand.
        unsafe { (&raw mut (*self.place(index)).control).write(control) };
    }

    /// Has another flow in the places of all that are there, as another CPU would.
    pub fn replace_all(&self) {
        for (index, entry) in Vec::from_iter(self.live()) {
            let Control(word) = entry.control;
            self.set_control(index, Control(word.wrapping_add(1 << 16)));
            // SAFETY: as above.
            unsafe { (&raw mut (*self.place(index)).key.source).write([203, 0, 113, 9]) };
        }
    }

    /// Gives the IPv6 flow of an entry another source.
    pub fn change_source(&self, index: u32, source: Address) {
        // SAFETY: valid, aligned, and nobody else's.
        unsafe { (*self.addresses[index as usize].get()).source = source };
    }

    /// Makes one entry the twin of another.
    pub fn set_twin(&self, index: u32, twin: u32) {
        // SAFETY: as above; written whole, as `open` does.
        unsafe { (&raw mut (*self.place(index)).twin).write_volatile(twin) };
    }

    fn place(&self, index: u32) -> *mut FlowEntry {
        let bucket = self.buckets[index as usize / WAYS].get();
        // SAFETY: one of the eight entries of the bucket.
        unsafe { (&raw mut (*bucket).entries).cast::<FlowEntry>().add(index as usize % WAYS) }
    }

    /// The tag of an entry, without the bit that protects it.
    pub fn tag(&self, index: u32) -> u8 {
        self.tag_byte(index) & 0x7f
    }

    /// Whether an entry is protected.
    pub fn is_protected(&self, index: u32) -> bool {
        self.tag_byte(index) & 0x80 != 0
    }

    fn tag_byte(&self, index: u32) -> u8 {
        // SAFETY: valid and aligned.
        let word = unsafe { self.tags(index / WAYS as u32).unwrap().read_volatile() };
        word.to_le_bytes()[(index % WAYS as u32) as usize]
    }

    /// All entries that hold a flow, with their indices.
    pub fn live(&self) -> impl Iterator<Item = (u32, FlowEntry)> {
        (0..self.entries())
            .map(|index| (index, self.entry(index)))
            .filter(|(_, entry)| entry.control.is_live())
    }

    /// How many flows count as active.
    pub fn active(&self) -> u64 {
        self.live().filter(|(_, entry)| entry.control.flags() & flags::ACTIVE != 0).count() as u64
    }

    /// Asserts what holds whenever no CPU is at work: nothing is claimed, and only live entries have tags.
    #[track_caller]
    pub fn assert_consistent(&self) {
        for index in 0..self.entries() {
            let entry = self.entry(index);
            if entry.control.is_live() {
                let hash = table::hash(self, &entry.key);
                assert_eq!(self.tag(index), hash.tag, "tag of live entry {index}");
                assert!(hash.buckets.contains(&(index / WAYS as u32)), "bucket of entry {index}");
            } else {
                assert_eq!(entry.control.0 as u8, 0, "entry {index} is still claimed");
                assert_eq!(self.tag(index), 0, "tag of free entry {index}");
            }
        }
    }
}

impl FlowMemory for Memory {
    fn seed(&self) -> [u64; 2] {
        self.seed
    }

    fn buckets(&self) -> u32 {
        self.buckets.len() as u32
    }

    fn tags(&self, bucket: u32) -> Option<*mut u64> {
        self.tags.get(bucket as usize).map(UnsafeCell::get)
    }

    fn bucket(&self, bucket: u32) -> Option<*mut Bucket> {
        self.buckets.get(bucket as usize).map(UnsafeCell::get)
    }
}

/// Puts an entry into the table alone, in the state and with the flags of its control word; `None` when there is no room.
pub fn insert(kernel: &Kernel, entry: &FlowEntry) -> Option<u32> {
    let index = enter::reserve(kernel, &entry.key, entry.stamp);
    if index == NO_TWIN {
        return None;
    }
    let place = table::entry_at(kernel, index).unwrap();
    place.write(entry);
    let reserved = place.control();
    let live = Control::new(entry.control.state(), entry.control.flags(), reserved.sequence());
    assert!(place.exchange(reserved, live), "a reserved entry was changed");
    Some(index)
}

/// Before which look into the flow table something happens to it, and what.
pub type Interruption = (u32, fn(&Memory));

/// One CPU of the kernel: maps that no other CPU sees but for the flow table, and a clock that is set by hand.
pub struct Kernel {
    pub memory: Arc<Memory>,
    pub now: Cell<u32>,
    pub ingress: Cell<u32>,
    pub ports: HashMap<(u32, u32), u16>,
    pub services: HashMap<ServiceKey, Service>,
    pub roles: HashMap<Address, u32>,
    /// What backends answer from.
    pub endpoints: HashMap<ServiceKey, u32>,
    /// The ports that they have, or have had: protocol and port.
    pub known: RefCell<HashSet<(u8, [u8; 2])>>,
    /// By service: how many slots were taken, and the slots.
    pub rings: RefCell<HashMap<ServiceId, (RingWord, Vec<BackendId>)>>,
    pub backends: Vec<Backend>,
    pub hops: HashMap<u32, NextHop>,
    /// Up to which age packets count in the profiles.
    pub profiled_age: u32,
    profiles: Vec<UnsafeCell<AgeProfile>>,
    /// Flows that gave way, by `Phase`.
    pub evicted: [Cell<u64>; 3],
    /// The clients that services remember.
    pub clients: RefCell<HashMap<ClientKey, Remembered>>,
    opening: UnsafeCell<Opening>,
    icmp: UnsafeCell<icmp::Addresses>,
    /// How many bytes of room frames have in front.
    pub headroom: Cell<usize>,
    /// Whether it may send ICMP errors now.
    pub sends_icmp: Cell<bool>,
    fragments: RefCell<HashMap<FragmentKey, Fragment>>,
    /// The precise clock.
    pub precise: Cell<u32>,
    times: Vec<UnsafeCell<ResponseTimes>>,
    counters: Vec<UnsafeCell<BackendCounters>>,
    drops: [Cell<u64>; Reason::ALL.len()],
    /// The kernel's ways, by destination.
    pub ways: HashMap<Address, Result<Way, Reason>>,
    /// Which of two CPUs this is, if they take turns.
    pub turns: Option<(Arc<Turns>, usize)>,
    /// How often it has looked into the flow table, and what another CPU does there before which look.
    pub looks: Cell<u32>,
    pub interruption: Cell<Option<Interruption>>,
}

impl Kernel {
    /// A kernel with this flow table, this many backends' counters, and nothing else.
    pub fn new(memory: Arc<Memory>, backends: usize) -> Kernel {
        Kernel {
            memory,
            now: Cell::new(0),
            ingress: Cell::new(0),
            ports: HashMap::new(),
            services: HashMap::new(),
            roles: HashMap::new(),
            endpoints: HashMap::new(),
            known: RefCell::default(),
            rings: RefCell::default(),
            backends: vec![Backend::default(); backends],
            hops: HashMap::new(),
            profiled_age: 1_000,
            profiles: (0..2).map(|_| UnsafeCell::new(AgeProfile::zeroed())).collect(),
            evicted: Default::default(),
            clients: RefCell::default(),
            icmp: UnsafeCell::default(),
            sends_icmp: Cell::new(false),
            headroom: Cell::new(HEADROOM),
            fragments: RefCell::default(),
            opening: UnsafeCell::new(Opening {
                client: [0; 16],
                key: FlowKey::zeroed(),
                service: Service::default(),
                neighbour: [0; 6],
                ingress: 0,
                port: 0,
                choice: Choice::plain(0),
                is_backend: false,
                length: 0,
                vlan: 0,
                reply: FlowKey::zeroed(),
            }),
            precise: Cell::new(0),
            times: (0..backends).map(|_| UnsafeCell::default()).collect(),
            counters: (0..backends).map(|_| UnsafeCell::default()).collect(),
            drops: Default::default(),
            ways: HashMap::new(),
            turns: None,
            looks: Cell::new(0),
            interruption: Cell::new(None),
        }
    }

    /// Gives a service the slots of its ring.
    pub fn set_ring(&self, service: ServiceId, slots: &[BackendId]) {
        self.rings.borrow_mut().insert(service, (RingWord::new(0, slots.len()), slots.to_vec()));
    }

    /// How many slots of a service's ring were taken.
    pub fn taken(&self, service: ServiceId) -> u64 {
        self.rings.borrow()[&service].0.taken()
    }

    /// The key of what is at an endpoint.
    pub fn key(&self, (short, port): Endpoint, protocol: u8) -> ServiceKey {
        let address = self.short(short);
        ServiceKey { address, port: port.to_be_bytes(), protocol, family: FAMILY.get() }
    }

    /// An address as keys have it.
    pub fn short(&self, address: [u8; 4]) -> [u8; 4] {
        source::short(self, FAMILY.get(), &frame::address(address))
    }

    /// Has packets leave by a hop.
    pub fn set_hop(&mut self, index: u32, hop: NextHop) {
        self.hops.insert(index, NextHop { index, ..hop });
    }

    /// The hop to a backend.
    pub fn backend_hop(&mut self, backend: BackendId) -> &mut NextHop {
        self.hops.get_mut(&(MAX_PORTS + u32::from(backend))).unwrap()
    }

    /// The counters of a backend.
    pub fn counted(&self, backend: usize) -> BackendCounters {
        // SAFETY: no pointer to it outlives a call into the data plane.
        unsafe { *self.counters[backend].get() }
    }

    /// The age profile of a service.
    pub fn profiled(&self, service: usize) -> AgeProfile {
        // SAFETY: as above.
        unsafe { *self.profiles[service].get() }
    }

    /// How long a backend took to answer.
    pub fn response_times(&self, backend: usize) -> ResponseTimes {
        // SAFETY: as above.
        unsafe { *self.times[backend].get() }
    }

    /// The sum of a counter over all backends.
    pub fn total(&self, counter: impl Fn(BackendCounters) -> u64) -> u64 {
        (0..self.counters.len()).map(|backend| counter(self.counted(backend))).sum()
    }

    /// The refusals that were counted.
    pub fn drops(&self) -> Vec<(Reason, u64)> {
        let counts = Reason::ALL.map(|reason| (reason, self.drops[reason as usize].get()));
        counts.into_iter().filter(|(_, count)| *count != 0).collect()
    }

    /// How many refusals were counted.
    pub fn dropped(&self) -> u64 {
        self.drops.iter().map(Cell::get).sum()
    }

    /// Lets the other CPU go on here, if they take turns and it is its turn.
    fn take_turn(&self) {
        let looks = self.looks.get() + 1;
        self.looks.set(looks);
        if let Some((look, interruption)) = self.interruption.take() {
            if look == looks {
                interruption(&self.memory);
            } else {
                self.interruption.set(Some((look, interruption)));
            }
        }
        if let Some((turns, cpu)) = &self.turns {
            turns.step(*cpu);
        }
    }

    /// Asserts that the flows that count as active are those opened and not closed.
    #[track_caller]
    pub fn assert_active_is_exact(&self) {
        let balance = self.total(|counters| counters.opened + counters.reopened)
            - self.total(|counters| counters.closed);
        assert_eq!(balance, self.memory.active(), "opened + reopened - closed = active flows");
    }
}

impl FlowMemory for Kernel {
    fn seed(&self) -> [u64; 2] {
        self.memory.seed()
    }

    fn buckets(&self) -> u32 {
        self.memory.buckets()
    }

    fn tags(&self, bucket: u32) -> Option<*mut u64> {
        self.take_turn();
        self.memory.tags(bucket)
    }

    fn bucket(&self, bucket: u32) -> Option<*mut Bucket> {
        self.take_turn();
        self.memory.bucket(bucket)
    }
}

impl Environment for Kernel {
    fn now(&self) -> u32 {
        self.now.get()
    }

    fn ingress(&self) -> u32 {
        self.ingress.get()
    }

    fn port(&self, ifindex: u32, vlan: u32) -> Option<u16> {
        self.ports.get(&(ifindex, vlan)).copied()
    }

    fn service(&self, key: &ServiceKey) -> Option<&Service> {
        self.services.get(key)
    }

    fn port_filter(&self, word: usize) -> u64 {
        let mut known = self.known.borrow_mut();
        known.extend(self.services.keys().chain(self.endpoints.keys()).map(|key| (key.protocol, key.port)));
        known.extend(
            self.backends.iter().flat_map(|backend| [TCP, UDP].map(|protocol| (protocol, backend.port))),
        );
        let places = known.iter().map(|(protocol, port)| port_bit(*protocol, *port));
        places.filter(|(place, _)| *place == word).fold(0, |bits, (_, bit)| bits | bit)
    }

    fn endpoint(&self, key: &ServiceKey) -> u32 {
        self.endpoints.get(key).copied().unwrap_or(0)
    }

    fn has_ipv6(&self) -> bool {
        true
    }

    fn addresses(&self, index: u32) -> Option<*mut FlowAddresses> {
        self.take_turn();
        self.memory.addresses.get(index as usize).map(UnsafeCell::get)
    }

    fn opening(&self) -> Option<*mut Opening> {
        Some(self.opening.get())
    }

    fn roles(&self, address: &Address) -> u32 {
        self.roles.get(address).copied().unwrap_or(0)
    }

    fn take(&self, service: ServiceId) -> RingWord {
        let mut rings = self.rings.borrow_mut();
        let Some((word, _)) = rings.get_mut(&service) else { return RingWord::new(0, 0) };
        let taken = *word;
        word.0 = word.0.wrapping_add(RingWord::TAKE);
        taken
    }

    fn slot(&self, service: ServiceId, _half: usize, slot: usize) -> Option<BackendId> {
        self.rings.borrow().get(&service)?.1.get(slot).copied()
    }

    fn may_send_icmp(&self, _now: u32) -> bool {
        self.sends_icmp.get()
    }

    fn fragment(&self, key: &FragmentKey) -> Fragment {
        self.fragments.borrow().get(key).copied().unwrap_or_default()
    }

    fn set_fragment(&self, key: &FragmentKey, value: &Fragment) {
        self.fragments.borrow_mut().insert(*key, *value);
    }

    fn icmp_addresses(&self) -> Option<*mut icmp::Addresses> {
        Some(self.icmp.get())
    }

    fn backend(&self, id: BackendId) -> Option<&Backend> {
        self.backends.get(usize::from(id))
    }

    fn remembered(&self, client: &ClientKey) -> Remembered {
        self.clients.borrow().get(client).copied().unwrap_or_default()
    }

    fn remember(&self, client: &ClientKey, value: &Remembered) {
        self.clients.borrow_mut().insert(*client, *value);
    }

    fn next_hop(&self, index: u32) -> Option<&NextHop> {
        self.hops.get(&index)
    }

    fn counters(&self, id: BackendId) -> Option<*mut BackendCounters> {
        self.counters.get(usize::from(id)).map(UnsafeCell::get)
    }

    fn redirect(&self, port: u16) -> bool {
        self.ports.values().any(|other| *other == port)
    }

    fn way(&self, family: u8, _source: &Address, destination: &Address) -> Result<Way, Reason> {
        assert_eq!(family, FAMILY.get());
        self.ways.get(destination).copied().unwrap_or(Err(Reason::NoEgress))
    }

    fn precise(&self) -> u32 {
        self.precise.get()
    }

    fn response_times(&self, id: BackendId) -> Option<*mut ResponseTimes> {
        self.times.get(usize::from(id)).map(UnsafeCell::get)
    }

    fn profile(&self, service: ServiceId) -> Option<*mut AgeProfile> {
        self.profiles.get(usize::from(service)).map(UnsafeCell::get)
    }

    fn profiled_age(&self) -> u32 {
        self.profiled_age
    }

    fn evicted(&self, phase: Phase) {
        let count = &self.evicted[phase as usize];
        count.set(count.get() + 1);
    }

    fn refuse(&self, reason: Reason) {
        let count = &self.drops[reason as usize];
        count.set(count.get() + 1);
    }
}
