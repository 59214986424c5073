use bytemuck::{Pod, Zeroable};

use crate::UDP;

/// Index of a service in `RINGS` and `RING_WORDS`.
pub type ServiceId = u16;
/// Index of a backend in `BACKENDS` and `COUNTERS`.
pub type BackendId = u16;

/// An address: IPv6, or IPv4 as ::ffff:a.b.c.d (RFC 4291, section 2.5.5.2); network order.
pub type Address = [u8; 16];

/// An IPv4 address as `Address`.
#[inline(always)]
pub const fn mapped([a, b, c, d]: [u8; 4]) -> Address {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d]
}

/// The IPv4 address in an `Address` that is one; of others, the last four bytes.
#[inline(always)]
pub const fn unmapped(address: &Address) -> [u8; 4] {
    let [.., a, b, c, d] = *address;
    [a, b, c, d]
}

/// What a client talks to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct ServiceKey {
    /// Virtual address, network order; of IPv6, its digest: the whole address is in what the key leads to.
    pub address: [u8; 4],
    /// Port, network order.
    pub port: [u8; 2],
    /// IP protocol number: `TCP` or `UDP`.
    pub protocol: u8,
    /// `family::*`.
    pub family: u8,
}

const _: () = assert!(size_of::<ServiceKey>() == 8);

/// What the program must know of a service to open a flow. Times are in units of 2^`TIMEOUT_SHIFT` ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct Service {
    /// Its virtual address.
    pub address: Address,
    /// Index of its ring.
    pub id: ServiceId,
    /// How long an established flow may be silent.
    pub idle_timeout: u16,
    /// How long a TCP flow may take from its SYN to the end of the handshake.
    pub half_open_timeout: u16,
    /// How long a TCP flow is remembered after both FINs, or a RST.
    pub closing_timeout: u16,
    /// How a slot of the ring is chosen: `selector::*`.
    pub selector: u8,
    /// Which refused packets are answered instead of only dropped: bits `answer::*`.
    pub answers: u8,
    /// What else it wants: bits `option::*`.
    pub options: u8,
    /// How many leading bits of a client's address its backend is remembered by, of 128 in either family.
    pub persistence_prefix: u8,
    /// For how long a client without new flows is remembered; 0 = not at all.
    pub persistence_timeout: u16,
    /// How packets get to its backends: `forward::*`.
    pub forward: u8,
    /// Always 0.
    pub reserved: u8,
}

const _: () = assert!(size_of::<Service>() == 32);

/// Bits of `Service::options`.
pub mod option {
    /// Requests and their answers are followed (`flags::FOLLOWED`).
    pub const EXCHANGES: u8 = 1;
    /// UDP: each datagram is scheduled by itself, and no flow is kept.
    pub const ONE_PACKET: u8 = 2;
    /// TCP: media belong to its connections, so its clients' connections are remembered.
    pub const RTSP: u8 = 4;
    /// UDP, a data port of an RTSP service: flows follow their client's control connection.
    pub const MEDIA: u8 = 8;
}

/// How a new flow chooses its slot: values of `Service::selector`.
pub mod selector {
    /// The next one.
    pub const NEXT: u8 = 0;
    /// By a hash of the client's address: the ring is a Maglev table.
    pub const SOURCE: u8 = 1;
    /// By a hash of addresses, ports and protocol: the ring is a Maglev table.
    pub const FLOW: u8 = 2;
}

/// Refused packets that get an answer, a RST or an ICMP port unreachable: bits of `Service::answers`.
pub mod answer {
    /// A TCP segment, not a SYN, of no flow.
    pub const UNKNOWN_FLOW: u8 = 1;
    /// A new flow while no backend may take one.
    pub const NO_BACKEND: u8 = 2;
}

/// A real server, as the program needs it to open a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct Backend {
    /// Address.
    pub address: Address,
    /// The source that clients are given whose replies would not cross the balancer; `::` = none. Of tunnels, what packets
    /// are wrapped in comes from there.
    pub snat_address: Address,
    /// Port, network order.
    pub port: [u8; 2],
    /// The service that it belongs to.
    pub service: ServiceId,
    /// The network whose clients are given that source: how many leading bits of `address` they share, of 128 in either
    /// family (an IPv4 network's length + 96); 0 = all clients are. Of tunnels: how many leading bits of `snat_address` stay
    /// as they are; in the others each flow has its own.
    pub snat_prefix: u32,
    /// What it may do: bits `ability::*`; 0 = the slot is not in use.
    pub abilities: u32,
    /// `DRAINED` or `LEAVING`: when the flows that are left are ended, in units of 2^`STAMP_SHIFT` ns.
    pub ends: u32,
    /// Of a service that keeps no flows: its port, network order, which the backend's answers leave with; else 0.
    pub service_port: [u8; 2],
    /// The first and the last of the ports that clients are given together with `snat_address`.
    pub snat_ports: [u16; 2],
    /// GUE: the UDP port that it unwraps at, network order.
    pub tunnel_port: [u8; 2],
    /// How packets get to it: `forward::*`, the same as in its hop.
    pub forward: u8,
    /// Always 0.
    pub reserved: [u8; 7],
    /// The address that goes with `service_port`.
    pub service_address: Address,
}

const _: () = assert!(size_of::<Backend>() == 80);

/// The first of the ports that clients are given together with `Backend::snat_address`, unless the configuration says
/// otherwise; the last is 65535. Linux takes none of them for its own connections, unless it is told to
/// (`ip_local_port_range`).
pub const FIRST_SNAT_PORT: u16 = 61_000;

/// How packets get to a backend: values of `Backend::forward`, `Service::forward` and `NextHop::forward`. In all but the first,
/// its replies go to the client past the balancer.
pub mod forward {
    /// Addresses and ports are rewritten, and back again in the replies.
    pub const NAT: u8 = 0;
    /// The frame gets the backend's MAC, and nothing else changes.
    pub const DSR: u8 = 1;
    /// Wrapped in IPv4 or IPv6 (RFC 2003, RFC 2473, RFC 4213).
    pub const IPIP: u8 = 2;
    /// Wrapped in UDP (GUE, draft-ietf-intarea-gue-09, variant 1).
    pub const GUE: u8 = 3;
}

/// Bits of `Backend::abilities`.
pub mod ability {
    /// Flows may lead to it.
    pub const SERVE: u32 = 1;
    /// It may take new flows of clients that it served before.
    pub const TAKE: u32 = 2;
    /// The operator drains it. For the controller alone, whose next life reads it.
    pub const DRAINED: u32 = 4;
    /// It is not configured any more. For the controller alone, as well.
    pub const LEAVING: u32 = 8;
    /// Its health checks have failed, or none has been made yet. For the controller alone, as well.
    pub const FAILED: u32 = 16;
}

/// A client that a service remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct ClientKey {
    /// The leading bits of its address.
    pub address: Address,
    /// The service.
    pub service: ServiceId,
    /// What is remembered: `client::*`.
    pub kind: u16,
    /// Always 0.
    pub reserved: [u8; 4],
}

const _: () = assert!(size_of::<ClientKey>() == 24);

/// Values of `ClientKey::kind`.
pub mod client {
    /// The backend that the client had last, for `persistence`.
    pub const BACKEND: u16 = 0;
    /// The client's newest control connection, for its media.
    pub const CONTROL: u16 = 1;
}

/// What a service remembers of a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct Remembered {
    /// When its last flow was opened, in units of 2^`STAMP_SHIFT` ns.
    pub stamp: u32,
    /// Where in the flow table the entry of that flow's request direction was: bucket × `WAYS` + way.
    pub entry: u32,
    /// The backend that it had.
    pub backend: BackendId,
    /// Always 0.
    pub reserved: [u16; 3],
}

const _: () = assert!(size_of::<Remembered>() == 16);

/// Values in `ENDPOINTS`.
pub mod endpoint {
    /// Backends answer from there.
    pub const SERVER: u32 = 1;
    /// The backend whose id is in the low half sends media from there.
    pub const MEDIA: u32 = 1 << 16;
    /// The backend whose id is in the low half, of a service that keeps no flows, answers from there.
    pub const ONE_PACKET: u32 = 1 << 17;
}

/// By what a daemon knows whether it understands the maps that an earlier one has left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Layout {
    /// `LAYOUT_VERSION` of the build that made the maps; 0 = they were not finished.
    pub version: u64,
    /// The secret of the flow hash, without which no flow is found.
    pub seed: [u64; 2],
}

const _: () = assert!(size_of::<Layout>() == 24);

/// Grows with each change of what the maps that outlive a daemon hold.
pub const LAYOUT_VERSION: u64 = 10;

/// A bit for each port of TCP, and then of UDP, that a service or the endpoint of a backend has, or has had: flows may outlive
/// them. A packet from none of these ports and to none is nobody's here.
pub type PortFilter = [u64; PORT_FILTER_WORDS];

/// How many words that are.
pub const PORT_FILTER_WORDS: usize = 2 * (1 << 16) / 64;

/// Which word of `PortFilter` a port (network order) of this protocol is in, and its bit there.
#[inline(always)]
pub const fn port_bit(protocol: u8, port: [u8; 2]) -> (usize, u64) {
    // As it lies in memory: kernels before 6.6 don't know how large a number is whose bytes were swapped.
    let place = ((protocol == UDP) as usize) << 16 | u16::from_le_bytes(port) as usize;
    (place / 64, 1 << (place % 64))
}

/// Roles of an address in `ADDRESSES`: bits of the low half of its value.
pub mod role {
    /// Clients send to it.
    pub const SERVICE: u32 = 1;
    /// A backend sends from it.
    pub const BACKEND: u32 = 2;
    /// It is on an interface of this host.
    pub const LOCAL: u32 = 4;
    /// Who asks for its MAC is told that of the interface that asks.
    pub const ADVERTISED: u32 = 16;
    /// Clients are given it as their source, with ports from that in the high half on, which are none of the host's.
    pub const SNAT: u32 = 8;

    /// The roles of an address that clients are given with ports from this one on.
    #[inline(always)]
    pub const fn with_ports_from(first: u16) -> u32 {
        SNAT | (first as u32) << 16
    }

    /// The first of the ports that clients are given with an address of these roles.
    #[inline(always)]
    pub const fn first_port(roles: u32) -> u16 {
        (roles >> 16) as u16
    }
}
