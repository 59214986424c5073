use bytemuck::{Pod, Zeroable};

use crate::{Address, BackendId, ServiceId};

/// Entries in a bucket of the flow table.
pub const WAYS: usize = 8;
/// A stamp is the coarse monotonic clock in nanoseconds, shifted right by this: 67 ms, wrapping after 9 years.
pub const STAMP_SHIFT: u32 = 26;
/// A timeout is in nanoseconds shifted right by this: 268 ms, at most 4.8 hours.
pub const TIMEOUT_SHIFT: u32 = 28;
/// The time of a request is the precise monotonic clock in nanoseconds, shifted right by this: 1 µs, wrapping after
/// 73 minutes.
pub const EXCHANGE_SHIFT: u32 = 10;
/// How long the port of a translated source rests after the end of its flow, in units of 2^`STAMP_SHIFT` ns: 60 s, and
/// what the coarseness of the stamps may take from them.
pub const PORT_REST: u32 = (60_000_000_000_u64 >> STAMP_SHIFT) as u32 + 2;
/// The `twin` of an entry that has none.
pub const NO_TWIN: u32 = u32::MAX;

/// By what a packet is told from those of other flows, as it arrives (before any rewriting).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct FlowKey {
    /// Source address, network order; of IPv6, its digest.
    pub source: [u8; 4],
    /// Destination address, network order; of IPv6, its digest.
    pub destination: [u8; 4],
    /// Source port, network order.
    pub source_port: [u8; 2],
    /// Destination port, network order.
    pub destination_port: [u8; 2],
    /// IP protocol number.
    pub protocol: u8,
    /// `family::*`.
    pub family: u8,
    /// Always 0.
    pub reserved: [u8; 2],
}

const _: () = assert!(size_of::<FlowKey>() == 16);

/// Values of `FlowKey::family` and `ServiceKey::family`: IP versions.
pub mod family {
    /// RFC 791.
    pub const IPV4: u8 = 4;
    /// RFC 8200.
    pub const IPV6: u8 = 6;
}

/// The life of a flow. Both entries of a flow go through it together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FlowState {
    /// Nothing here.
    Free = 0,
    /// Claimed by a CPU that is writing it: not to be read.
    Busy = 1,
    /// The first packet was seen; nothing proves yet that both ends want to talk.
    HalfOpen = 2,
    /// TCP: the handshake is complete. UDP: the backend has answered. Where replies go past the balancer: the client has sent
    /// two segments after its SYN, or a second datagram.
    Established = 3,
    /// TCP: FIN both ways. A new SYN opens a new flow. Or a port that rests.
    Closing = 4,
    /// Written, but not yet a flow: another CPU may be opening the same one.
    Opening = 5,
    /// UDP: the client has sent more than one datagram, and the backend has not answered.
    OneWay = 6,
    /// TCP: the client has sent a RST, and nothing since; so a new SYN opens a new flow. What comes from it all the same shows
    /// that the RST was somebody else's, and that the flow goes on.
    ClientReset = 7,
    /// The same of the backend.
    BackendReset = 8,
    /// The same of both.
    BothReset = 9,
}

/// How far a live flow is in its life, as far as it is counted and shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// TCP: the handshake is not complete. UDP: there was no answer.
    HalfOpen = 0,
    /// Both ends talk.
    Established = 1,
    /// It has ended, and is remembered for a while.
    Closing = 2,
}

impl Phase {
    /// Every phase, in the order of its number.
    pub const ALL: [Phase; 3] = [Phase::HalfOpen, Phase::Established, Phase::Closing];
}

impl FlowState {
    /// The phase of a live flow; `None` where there is none.
    pub const fn phase(self) -> Option<Phase> {
        match self {
            FlowState::Free | FlowState::Busy | FlowState::Opening => None,
            FlowState::HalfOpen | FlowState::OneWay => Some(Phase::HalfOpen),
            FlowState::Established => Some(Phase::Established),
            FlowState::Closing | FlowState::ClientReset | FlowState::BackendReset | FlowState::BothReset => {
                Some(Phase::Closing)
            }
        }
    }

    /// Whether a flow in this state has ended: a new SYN opens another.
    pub const fn is_closing(self) -> bool {
        matches!(self.phase(), Some(Phase::Closing))
    }
}

/// Bits of `Control::flags`.
pub mod flags {
    /// The client has sent its FIN.
    pub const FIN_REQUEST: u8 = 1;
    /// The backend has sent its FIN.
    pub const FIN_REPLY: u8 = 2;
    /// TCP: the backend has answered: with a SYN-ACK, or within a connection that the flow was opened in the middle of. Where
    /// replies go past the balancer: the client has gone on after its SYN. After a RST: the flow was established before.
    pub const ANSWERED: u8 = 4;
    /// The entry is that of the reply direction.
    pub const REPLY: u8 = 8;
    /// The flow is in its backend's active count; only ever set on the request direction's entry, and
    /// cleared by whoever counts the flow as closed.
    pub const ACTIVE: u8 = 16;
    /// The client has sent payload that the backend has not answered with payload yet.
    pub const AWAITING: u8 = 32;
    /// The service wants exchanges followed: `AWAITING` is kept.
    pub const FOLLOWED: u8 = 64;
    /// The flow is past the ages that its service's profile knows.
    pub const GROWN: u8 = 128;
}

/// The word by which an entry is claimed, published and changed, always by compare-and-exchange.
///
/// Bits 0 to 7 are the state, bits 8 to 15 the flags, bits 16 to 31 a sequence number that grows each time
/// the entry is given to another flow: a reader that finds it unchanged has read one flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct Control(pub u32);

impl Control {
    /// A word of these three parts.
    pub const fn new(state: FlowState, flags: u8, sequence: u16) -> Control {
        Control(state as u32 | ((flags as u32) << 8) | ((sequence as u32) << 16))
    }

    /// The state; a number that no state has reads as `Busy`.
    pub const fn state(self) -> FlowState {
        match self.0 as u8 {
            0 => FlowState::Free,
            2 => FlowState::HalfOpen,
            3 => FlowState::Established,
            4 => FlowState::Closing,
            5 => FlowState::Opening,
            6 => FlowState::OneWay,
            7 => FlowState::ClientReset,
            8 => FlowState::BackendReset,
            9 => FlowState::BothReset,
            _ => FlowState::Busy,
        }
    }

    /// The flags: `flags::*`.
    pub const fn flags(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// The sequence number.
    pub const fn sequence(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// Whether the entry holds a flow.
    pub const fn is_live(self) -> bool {
        self.state().phase().is_some()
    }
}

/// One direction of a flow: how its packets are found, and all that rewriting them needs. One cache line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct FlowEntry {
    /// The packet as it arrives.
    pub key: FlowKey,
    /// Source address that it leaves with, network order.
    pub new_source: [u8; 4],
    /// Destination address that it leaves with, network order.
    pub new_destination: [u8; 4],
    /// Source port that it leaves with, network order.
    pub new_source_port: [u8; 2],
    /// Destination port that it leaves with, network order.
    pub new_destination_port: [u8; 2],
    /// What the rewrite adds to the IP header's sum, TTL included (RFC 1624); bytes as on the wire.
    pub ip_delta: u16,
    /// What the rewrite adds to the TCP or UDP sum (RFC 1624); bytes as on the wire.
    pub l4_delta: u16,
    /// MAC of the client's side. Replies: where they are sent. Requests: where the last one came from.
    pub neighbour: [u8; 6],
    /// Replies: the port they leave by. Requests: the low 16 bits of the index of the interface that the
    /// last one came in by.
    pub via: u16,
    /// Who serves the flow.
    pub backend: BackendId,
    /// When the flow was opened, in units of 2^`STAMP_SHIFT` ns, low half; means nothing once it is `GROWN`.
    pub opened: u16,
    /// The service that the client talks to.
    pub service: ServiceId,
    /// After how much silence the flow ends in its present state, in units of 2^`TIMEOUT_SHIFT` ns.
    pub timeout: u16,
    /// The entry of the other direction: bucket × `WAYS` + way, or `NO_TWIN`, where replies go past the balancer.
    pub twin: u32,
    /// When the last packet of this direction came, in units of 2^`STAMP_SHIFT` ns.
    pub stamp: u32,
    /// State, flags and sequence.
    pub control: Control,
    /// Numbers to compare with. Requests: while `AWAITING`, the sequence number that the answer starts with, at least; else
    /// the one that the next request starts with, at least (where the service wants exchanges followed). Replies: in
    /// `HalfOpen`, what the client must acknowledge of the SYN-ACK, 0 before there was one; while `AWAITING`, when the request
    /// came, in units of 2^`EXCHANGE_SHIFT` ns. Requests whose replies go past the balancer: 16 bits by which the path's
    /// routers tell this flow from others, once its packets are wrapped.
    pub exchange: u32,
}

const _: () = assert!(size_of::<FlowEntry>() == 64);

impl FlowEntry {
    /// Whether this direction has been silent for longer than its timeout at the stamp `now`.
    pub const fn is_expired(&self, now: u32) -> bool {
        self.expired_before(now, 0)
    }

    /// Whether that came about longer ago than a port rests.
    pub const fn has_rested(&self, now: u32) -> bool {
        self.expired_before(now, PORT_REST)
    }

    const fn expired_before(&self, now: u32, time: u32) -> bool {
        // A stamp of a packet seen just after `now` was read must not count as nine years of silence.
        let silence = now.wrapping_sub(self.stamp);
        silence as i32 > 0 && silence > ((self.timeout as u32) << (TIMEOUT_SHIFT - STAMP_SHIFT)) + time
    }

    /// Whether it is the reply direction of a flow to whose source the balancer gave an address and port of its own.
    pub fn holds_port(&self) -> bool {
        let [to, client] = [
            (self.key.destination, self.key.destination_port),
            (self.new_destination, self.new_destination_port),
        ];
        self.control.flags() & flags::REPLY != 0 && to != client
    }
}

/// By what the fragments of one datagram are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct FragmentKey {
    /// Source address, network order; of IPv6, its digest.
    pub source: [u8; 4],
    /// Destination address, network order; of IPv6, its digest.
    pub destination: [u8; 4],
    /// Identification, network order; of IPv4, in the last two bytes.
    pub identification: [u8; 4],
    /// IPv4: protocol number. IPv6: 0.
    pub protocol: u8,
    /// `family::*`.
    pub family: u8,
    /// Always 0.
    pub reserved: [u8; 2],
}

const _: () = assert!(size_of::<FragmentKey>() == 16);

/// Where the rest of a datagram goes whose first fragment was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct Fragment {
    /// The flow's entry, bucket × `WAYS` + way; `NO_TWIN` = the first fragment was none of ours.
    pub entry: u32,
    /// When the first fragment came, in units of 2^`STAMP_SHIFT` ns.
    pub stamp: u32,
    /// The sequence number that the entry had.
    pub sequence: u16,
    /// Always 0.
    pub reserved: [u16; 3],
}

const _: () = assert!(size_of::<Fragment>() == 16);

/// How long a first fragment is remembered, in units of 2^`STAMP_SHIFT` ns: 30 s, as long as Linux waits for the rest.
pub const FRAGMENT_TIME: u32 = (30_000_000_000_u64 >> STAMP_SHIFT) as u32;

/// The addresses of one direction of an IPv6 flow, whose entry has but digests of them: the second cache line of such a
/// flow, at the same place of its own array. Whoever has claimed the entry writes both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct FlowAddresses {
    /// Source address, as the packet arrives.
    pub source: Address,
    /// Destination address, as the packet arrives.
    pub destination: Address,
    /// Source address that it leaves with.
    pub new_source: Address,
    /// Destination address that it leaves with.
    pub new_destination: Address,
}

const _: () = assert!(size_of::<FlowAddresses>() == 64);

/// Buckets of a table that `flows` flows fit into, come and go as they may: each has two entries, and 55 % of the ways are
/// in use then. (One entry in ten million finds both its buckets full.)
pub const fn flow_buckets(flows: u32) -> u32 {
    let entries = flows as u64 * 2 * 100 / 55;
    // The flow hash knows no more.
    let buckets = entries / WAYS as u64 + 1;
    if buckets < 1 << 28 { buckets as u32 } else { 1 << 28 }
}

/// What one element of `FLOWS` holds.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Bucket {
    /// The entries, in the order of their tags.
    pub entries: [FlowEntry; WAYS],
}

const _: () = assert!(size_of::<Bucket>() == 512);
const _: () = assert!(WAYS == size_of::<u64>());
