//! The contract between the XDP program and the controller: the names of the BPF maps, their keys and
//! values, and the reasons for which a packet is refused. Nothing else lives here.
//!
//! Addresses and ports are byte arrays in network order, everything else is in the host's order. Every
//! type is `Pod` (so it has no padding) and asserts its size; no `bool`, `enum` or `Option` crosses.
#![no_std]

mod age;
mod counters;
mod flow;
mod hop;
mod probe;
mod reason;
mod ring;
mod service;
mod tunnel;

pub use age::{AGES, AgeProfile, age_bucket, bucket_start};
pub use counters::{BackendCounters, RESPONSE_BUCKETS, ResponseTimes, Traffic, response_bucket};
pub use flow::{
    Bucket, Control, EXCHANGE_SHIFT, FRAGMENT_TIME, FlowAddresses, FlowEntry, FlowKey, FlowState, Fragment,
    FragmentKey, NO_TWIN, PORT_REST, Phase, STAMP_SHIFT, TIMEOUT_SHIFT, WAYS, family, flags, flow_buckets,
};
pub use hop::{MAX_INTERFACES, MAX_PORTS, NextHop, Unresolved, vlan};
pub use probe::{MOST_PROBES, PROBE_MARK, ProbeWay, probe_names};
pub use reason::Reason;
pub use ring::{HALVES, RING_SLOTS, Ring, RingWord};
pub use service::{
    Address, Backend, BackendId, ClientKey, FIRST_SNAT_PORT, LAYOUT_VERSION, Layout, PORT_FILTER_WORDS,
    PortFilter, Remembered, Service, ServiceId, ServiceKey, ability, answer, client, endpoint, forward,
    mapped, option, port_bit, role, selector, unmapped,
};
pub use tunnel::{MOST_OWN, MOST_TRUSTED, Tunnelled, tunnel_names};

/// IP protocol number of TCP (RFC 9293).
pub const TCP: u8 = 6;
/// IP protocol number of UDP (RFC 768).
pub const UDP: u8 = 17;

/// IP protocol number of ICMP (RFC 792).
pub const ICMP: u8 = 1;
/// IP protocol number of ICMPv6 (RFC 4443).
pub const ICMPV6: u8 = 58;

/// Names of the BPF maps and of the XDP program, as they stand in the object file.
pub mod names {
    /// The program attached to every configured interface.
    pub const PROGRAM: &str = "balancer";
    /// `Array<u64>`, memory-mapped: one tag byte for each way of a bucket, 0 = empty.
    pub const FLOW_TAGS: &str = "FLOW_TAGS";
    /// `Array<Bucket>`, memory-mapped: the flow entries.
    pub const FLOWS: &str = "FLOWS";
    /// `Array<[FlowAddresses; WAYS]>`, memory-mapped: the addresses of the entries that are of IPv6 flows. Of one element where
    /// there are none (`IPV6`).
    pub const FLOW_ADDRESSES: &str = "FLOW_ADDRESSES";
    /// `HashMap<ServiceKey, Service>`: what clients talk to. Read only when no flow matched.
    pub const SERVICES: &str = "SERVICES";
    /// `HashMap<Address, u32>`: the roles (`role::*`) of an address, for packets that have no ports.
    pub const ADDRESSES: &str = "ADDRESSES";
    /// `HashMap<ServiceKey, u32>`: the addresses and ports that backends answer from, or send media from; the value is
    /// of `endpoint::*`.
    pub const ENDPOINTS: &str = "ENDPOINTS";
    /// `Array<PortFilter>` of one, memory-mapped: what foreign packets are told by, before anything is looked up.
    pub const PORT_FILTER: &str = "PORT_FILTER";
    /// `Array<Ring>`, indexed by `ServiceId`, memory-mapped: both halves of each selection ring.
    pub const RINGS: &str = "RINGS";
    /// `Array<u64>`, indexed by `ServiceId`, memory-mapped: the `RingWord` of each ring.
    pub const RING_WORDS: &str = "RING_WORDS";
    /// `Array<Backend>`, indexed by `BackendId`. Read when a flow is opened.
    pub const BACKENDS: &str = "BACKENDS";
    /// `Array<NextHop>`, memory-mapped: `MAX_PORTS` interfaces, then one hop for each backend.
    pub const NEXT_HOPS: &str = "NEXT_HOPS";
    /// `DevMap`, indexed by port: where `XDP_REDIRECT` sends.
    pub const EGRESS: &str = "EGRESS";
    /// `HashMap<[u32; 2], u32>`: interface index and tags (`vlan::*`) to port, read when a flow is opened or its client moves.
    pub const PORTS: &str = "PORTS";
    /// `PerCpuArray<BackendCounters>`, indexed by `BackendId`.
    pub const COUNTERS: &str = "COUNTERS";
    /// `LruHashMap<ClientKey, Remembered>`: which backend a client had. Read and written when a flow is opened.
    pub const CLIENTS: &str = "CLIENTS";
    /// `LruHashMap<FragmentKey, Fragment>`: whose the rest of a datagram is. Read and written for fragments alone.
    pub const FRAGMENTS: &str = "FRAGMENTS";
    /// `PerCpuArray<ResponseTimes>`, indexed by `BackendId`.
    pub const RESPONSE_TIMES: &str = "RESPONSE_TIMES";
    /// `PerCpuArray<u64>` of one: the stamp (high half) and how many ICMP messages were sent within it.
    pub const ICMP_SENT: &str = "ICMP_SENT";
    /// `PerCpuArray<AgeProfile>`, indexed by `ServiceId`.
    pub const AGE_PROFILES: &str = "AGE_PROFILES";
    /// `PerCpuArray<u64>`, indexed by `Phase`: flows that gave way to new ones, since there was no room.
    pub const EVICTED: &str = "EVICTED";
    /// `Array<u64>` of one, memory-mapped: a neighbour without a MAC that an answer was refused for; its interface in the
    /// high half, its address in the low one, as its bytes lie in memory; 0 = none.
    pub const UNRESOLVED: &str = "UNRESOLVED";
    /// `Array<Layout>` of one.
    pub const LAYOUT: &str = "LAYOUT";
    /// `PerCpuArray<u64>`, indexed by `Reason`: refused packets.
    pub const DROPS: &str = "DROPS";
    /// `.rodata` `[u64; 2]`: the secret of the flow hash.
    pub const HASH_SEED: &str = "HASH_SEED";
    /// `.rodata` `u32`: up to which age, in units of 2^`STAMP_SHIFT` ns, packets count in `AGE_PROFILES`.
    pub const PROFILED_AGE: &str = "PROFILED_AGE";
    /// `.rodata` `u32`: 1 = log each refused packet.
    pub const LOG_REFUSALS: &str = "LOG_REFUSALS";
    /// `.rodata` `u32`: 1 = there may be IPv6 services.
    pub const IPV6: &str = "IPV6";
    /// `.rodata` `u32`: how many buckets `FLOWS` has.
    pub const BUCKETS: &str = "BUCKETS";
}
