use bytemuck::{Pod, Zeroable};

/// Most interfaces that one balancer serves; the first entries of `NEXT_HOPS` are theirs.
pub const MAX_PORTS: u32 = 64;

/// Where a frame leaves: kept by the controller from netlink, read for each packet.
///
/// Entry `port` (below `MAX_PORTS`) describes an interface of the balancer itself and serves replies,
/// whose destination MAC is the flow's; entry `MAX_PORTS + backend` leads to that backend. The three
/// 64-bit words are written one by one, each atomically.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct NextHop {
    /// MAC of the neighbour: the backend itself or its gateway.
    pub neighbour: [u8; 6],
    /// Index into `EGRESS`.
    pub port: u16,
    /// MAC of the interface that the frame leaves by.
    pub source: [u8; 6],
    /// Largest IP packet that can go this way, in bytes: what it is wrapped in is taken off; 0 = this hop can't be used now.
    pub mtu: u16,
    /// Kernel index of that interface: equal to the ingress one, the frame is sent back with `XDP_TX`.
    pub ifindex: u32,
    /// Why the hop can't be used while `mtu` is 0: a `Reason`.
    pub unusable: u16,
    /// How packets get from here to the backend: `forward::*`.
    pub forward: u8,
    /// Always 0.
    pub reserved: u8,
}

const _: () = assert!(size_of::<NextHop>() == 24);

/// A neighbour whose MAC was not known when an answer was to be sent: its interface's index, which is written last (0 = there
/// is none), and its `Address`.
pub type Unresolved = [u64; 3];
