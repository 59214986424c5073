//! What the data plane needs of its surroundings: the maps, the clock, the counters.

use balancer_common::{
    Address, AgeProfile, Backend, BackendCounters, BackendId, Bucket, ClientKey, Control, FlowAddresses,
    FlowKey, Fragment, FragmentKey, NextHop, Phase, Reason, Remembered, ResponseTimes, RingWord, Service,
    ServiceId, ServiceKey,
};

use crate::{
    Packet,
    enter::{self, Entered},
    exchange, fragment, icmp, neighbour, one_packet,
    open::{self, Choice, Opening},
    parse::{self, Unparsed, Upper},
    process::{self, Step},
    state::{self, Segment},
    table::{self, Found},
    vlan, wrap,
};

/// The memory of the flow table.
pub trait FlowMemory {
    /// The secret that the flow hash is keyed with.
    fn seed(&self) -> [u64; 2];
    /// How many buckets there are.
    fn buckets(&self) -> u32;
    /// The tag word of a bucket, valid and aligned; `None` past the last one.
    fn tags(&self, bucket: u32) -> Option<*mut u64>;
    /// The entries of a bucket, valid and aligned; `None` past the last one.
    fn bucket(&self, bucket: u32) -> Option<*mut Bucket>;
}

/// Where the kernel would send a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Kernel index of the interface that it leaves by.
    pub ifindex: u32,
    /// MAC of the neighbour that it goes to.
    pub neighbour: [u8; 6],
}

/// Everything else.
pub trait Environment: FlowMemory + Sized {
    /// The coarse monotonic clock in units of 2^`STAMP_SHIFT` ns.
    fn now(&self) -> u32;
    /// Whether there may be IPv6 services.
    fn has_ipv6(&self) -> bool;
    /// The addresses of the IPv6 flow's entry with this index, valid and aligned.
    fn addresses(&self, index: u32) -> Option<*mut FlowAddresses>;
    /// A place of this CPU's for the addresses of an ICMP message, valid and aligned.
    fn icmp_addresses(&self) -> Option<*mut icmp::Addresses>;
    /// What this CPU is opening, valid and aligned.
    fn opening(&self) -> Option<*mut Opening>;
    /// Kernel index of the interface that the packet came in by.
    fn ingress(&self) -> u32;
    /// The port of an interface, or of a VLAN (`vlan::*`) on it.
    fn port(&self, ifindex: u32, vlan: u32) -> Option<u16>;
    /// A word of `PortFilter`.
    fn port_filter(&self, word: usize) -> u64;
    /// The service that clients reach at `key`.
    fn service(&self, key: &ServiceKey) -> Option<&Service>;
    /// Who answers from `key`: of `endpoint::*`; 0 = nobody.
    fn endpoint(&self, key: &ServiceKey) -> u32;
    /// The roles of an address: `role::*`, 0 for an address that is none of ours.
    fn roles(&self, address: &Address) -> u32;
    /// The ring of a service after one more flow has come for it: the word before, whose cursor is that flow's.
    fn take(&self, service: ServiceId) -> RingWord;
    /// The backend in a slot of a half of a service's ring.
    fn slot(&self, service: ServiceId, half: usize, slot: usize) -> Option<BackendId>;
    /// The backend in this slot.
    fn backend(&self, id: BackendId) -> Option<&Backend>;
    /// What a service remembers of a client; nothing but zeros if it does not.
    fn remembered(&self, client: &ClientKey) -> Remembered;
    /// Has a service remember a client.
    fn remember(&self, client: &ClientKey, value: &Remembered);
    /// Where the rest of a datagram goes; nothing but zeros if that is not known.
    fn fragment(&self, key: &FragmentKey) -> Fragment;
    /// Notes where it goes.
    fn set_fragment(&self, key: &FragmentKey, value: &Fragment);
    /// The next hop with this index.
    fn next_hop(&self, index: u32) -> Option<&NextHop>;
    /// Binds the frame to leave by a port, if its verdict is to be `Redirect`; false when nothing leaves by it.
    fn redirect(&self, port: u16) -> bool;
    /// The kernel's way for a datagram of this family that came in here, by its routes and neighbours.
    fn way(&self, family: u8, source: &Address, destination: &Address) -> Result<Way, Reason>;
    /// This CPU's counters of a backend, valid and aligned.
    fn counters(&self, id: BackendId) -> Option<*mut BackendCounters>;
    /// The precise monotonic clock in units of 2^`EXCHANGE_SHIFT` ns.
    fn precise(&self) -> u32;
    /// This CPU's response times of a backend, valid and aligned.
    fn response_times(&self, id: BackendId) -> Option<*mut ResponseTimes>;
    /// This CPU's age profile of a service, valid and aligned.
    fn profile(&self, service: ServiceId) -> Option<*mut AgeProfile>;
    /// Up to which age, in stamps, packets count in the profile.
    fn profiled_age(&self) -> u32;
    /// Whether one more ICMP message may be sent at this stamp.
    fn may_send_icmp(&self, now: u32) -> bool;
    /// Counts a flow in this phase that gave way to a new one.
    fn evicted(&self, phase: Phase);
    /// Counts a refused packet.
    fn refuse(&self, reason: Reason);

    // What follows are the steps of a packet's way. In the kernel each is a function of its own, so that the verifier follows
    // it once and not wherever it is called, and its part of the 512 bytes of stack is needed only meanwhile.

    /// [`parse::upper`].
    #[inline(always)]
    fn upper<P: Packet>(&self, packet: &P, upper: Upper) -> Result<Upper, Unparsed> {
        parse::upper(packet, upper)
    }
    /// [`process::forward`].
    #[inline(always)]
    fn forward<P: Packet>(&self, packet: &P, is_first: bool) -> Step {
        process::forward(packet, self, is_first)
    }
    /// [`fragment::remember`].
    #[inline(always)]
    fn remember_part<P: Packet>(&self, packet: &P, found: &Found) {
        fragment::remember(packet, self, found.index, found.control.sequence());
    }
    /// [`fragment::pass`].
    #[inline(always)]
    fn pass_part<P: Packet>(&self, packet: &P) {
        fragment::pass(packet, self);
    }
    /// [`fragment::forward`].
    #[inline(always)]
    fn forward_rest<P: Packet>(&self, packet: &P) -> Step {
        fragment::forward(packet, self)
    }
    /// [`icmp::control`].
    #[inline(always)]
    fn control<P: Packet>(&self, packet: &P) -> Step {
        icmp::control(packet, self)
    }
    /// [`process::is_ours`].
    #[inline(always)]
    fn is_ours<P: Packet>(&self, packet: &P) -> bool {
        process::is_ours(packet, self)
    }
    /// [`process::ask`].
    #[inline(always)]
    fn ask<P: Packet>(&self, packet: &P, stale: u32) -> Step {
        process::ask(packet, self, stale)
    }
    /// [`process::open`].
    #[inline(always)]
    fn open(&self) -> Step {
        process::open(self)
    }
    /// [`icmp::pass_one_way`].
    #[inline(always)]
    fn pass_one_way<P: Packet>(&self, packet: &P, backend: BackendId, lot: u16) -> Step {
        icmp::pass_one_way(packet, self, backend, lot)
    }
    /// [`neighbour::tell`].
    #[inline(always)]
    fn tell_neighbour<P: Packet>(&self, packet: &P) -> Step {
        neighbour::tell(packet, self)
    }
    /// [`vlan::leave`].
    #[inline(always)]
    fn leave<P: Packet>(&self, packet: &P, hop: u32) -> Step {
        vlan::leave(packet, self, hop)
    }
    /// [`vlan::is_known`].
    #[inline(always)]
    fn knows_vlan(&self, tags: u32) -> bool {
        vlan::is_known(self, tags)
    }
    /// [`wrap::wrap`].
    #[inline(always)]
    fn wrap<P: Packet>(&self, packet: &P, backend: BackendId, lot: u16) -> Step {
        wrap::wrap(packet, self, backend, lot)
    }
    /// [`one_packet::carry`].
    #[inline(always)]
    fn carry_alone<P: Packet>(&self, packet: &P, is_answer: bool) -> Step {
        one_packet::carry(packet, self, is_answer)
    }
    /// [`open::choose`].
    #[inline(always)]
    fn choose(&self, now: u32) -> Result<Choice, Reason> {
        open::choose(self, now)
    }
    /// [`open::is_free`].
    #[inline(always)]
    fn is_free(&self, reply: &FlowKey, now: u32) -> bool {
        open::is_free(self, reply, now)
    }
    /// [`enter::reserve`].
    #[inline(always)]
    fn reserve(&self, key: &FlowKey, now: u32) -> u32 {
        enter::reserve(self, key, now)
    }
    /// [`enter::claim_free`].
    #[inline(always)]
    fn claim_free(&self, keys: [&FlowKey; 2]) -> [u32; 2] {
        enter::claim_free(self, keys)
    }
    /// [`open::announce`].
    #[inline(always)]
    fn announce(&self, entries: [u32; 2], marks: u8, now: u32) {
        open::announce(self, entries, marks, now);
    }
    /// [`enter::enter`].
    #[inline(always)]
    fn enter(&self, request: u32) -> Entered {
        enter::enter(self, request)
    }
    /// [`table::release`].
    #[inline(always)]
    fn release(&self, found: &Found) {
        table::release(self, found);
    }
    /// [`table::end`].
    #[inline(always)]
    fn end(&self, found: &Found, now: u32) {
        table::end(self, found, now);
    }
    /// [`process::move_client`].
    #[inline(always)]
    fn move_client(&self, found: &Found, word: u64, tags: u32) {
        process::move_client(self, found, word, tags);
    }
    /// [`state::advance`].
    #[inline(always)]
    fn advance<P: Packet>(&self, packet: &P, index: u32, control: Control, segment: Segment) {
        state::advance(packet, self, index, control, segment);
    }
    /// [`exchange::follow`].
    #[inline(always)]
    fn follow<P: Packet>(&self, packet: &P, index: u32, control: Control, segment: Segment) {
        exchange::follow(packet, self, index, control, segment);
    }
    /// [`process::reject`]; whether `packet` is the answer now.
    #[inline(always)]
    fn reject<P: Packet>(&self, packet: &P, reason: Reason, most: u16) -> bool {
        process::reject(packet, self, reason, most).is_some()
    }
}
