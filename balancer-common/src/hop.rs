use bytemuck::{Pod, Zeroable};

/// Most interfaces that one balancer serves: ports below are theirs.
pub const MAX_INTERFACES: u32 = 64;

/// Most ports of one balancer: its interfaces, and the VLANs that it has devices of on them. The first entries of `NEXT_HOPS`
/// are theirs.
pub const MAX_PORTS: u32 = 1024;

/// The VLAN tags of a frame as one number (IEEE 802.1Q, 802.1ad): 13 bits for each of at most two, the outer one above the
/// inner; a tag's VLAN id, and above it 1 if it is a service tag.
pub mod vlan {
    /// No tag, or one with a priority alone.
    pub const NONE: u32 = 0;
    /// How many bits a tag takes.
    pub const BITS: u32 = 13;
    /// A tag.
    pub const TAG: u32 = (1 << BITS) - 1;
    /// In a tag: it is a service tag (EtherType 88a8, not 8100).
    pub const SERVICE: u32 = 1 << 12;
    /// In a tag: the VLAN.
    pub const ID: u32 = SERVICE - 1;

    /// The same without tags that have a priority alone.
    pub const fn normal(tags: u32) -> u32 {
        let inner = if tags & ID == 0 { tags >> BITS } else { tags };
        if inner >> BITS & ID == 0 { inner & TAG } else { inner }
    }
}

/// Where a frame leaves: kept by the controller from netlink, read for each packet.
///
/// Entry `port` (below `MAX_PORTS`) describes an interface or a VLAN of the balancer itself and serves replies,
/// whose destination MAC is the flow's; entry `MAX_PORTS + backend` leads to that backend. The four
/// 64-bit words are written one by one, each atomically.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct NextHop {
    /// MAC of the neighbour: the backend itself or its gateway.
    pub neighbour: [u8; 6],
    /// Index into `EGRESS`: the port of the interface itself.
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
    /// The tags that the frame leaves with: `vlan::*`.
    pub vlan: u32,
    /// Its own index, by which the program's steps tell each other of it.
    pub index: u32,
}

const _: () = assert!(size_of::<NextHop>() == 32);

/// A neighbour whose MAC was not known when an answer was to be sent: its interface's index, which is written last (0 = there
/// is none), and its `Address`.
pub type Unresolved = [u64; 3];
