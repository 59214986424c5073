/// Why the program refused a packet. The number is the index into `DROPS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Reason {
    /// Truncated, a length that contradicts another, impossible TCP flags, or a source address that no client has.
    Malformed = 0,
    /// A fragment to a service address or from a backend whose datagram's first one has not been seen, or not lately; or of
    /// a service that keeps no flows.
    Fragment = 1,
    /// TTL 1 or 0 where the packet would have to be routed on.
    TtlExceeded = 2,
    /// A TCP segment, not a SYN, that belongs to no flow.
    UnknownFlow = 3,
    /// A new flow of a service none of whose backends may take one.
    NoBackend = 4,
    /// The link-layer address towards the backend is not known yet.
    NoNeighbour = 5,
    /// The frame would have to leave by an interface that is not configured, or there is no route; or it came in a VLAN that
    /// this host has no device of, and would have to leave in one that it has.
    NoEgress = 6,
    /// Larger than the MTU of the interface it would leave by, or than routers on the way to its backend take.
    TooBig = 7,
    /// No room for a new flow beside flows in use.
    FlowTableFull = 8,
    /// The reply of the new flow could not be told from that of another flow, on any backend.
    ReplyCollision = 9,
    /// From a backend's service port, to somewhere else than this host, and of no flow: it would leave with the
    /// backend's own address.
    OrphanReply = 10,
    /// The source of the new flow must be translated, and no port was found that no other flow has, or had a short
    /// while ago.
    NoSourcePort = 11,
    /// Media of an RTSP service whose client has no live control connection with the backend.
    NoControlConnection = 12,
    /// Another CPU was opening the same flow, or another one with the same replies, and was faster.
    FlowRaced = 13,
    /// The flow has given way to another one while its packet was on its way.
    FlowChanged = 14,
    /// The flow that was opened for the packet has given way to another one at once.
    FlowPushedOut = 15,
    /// IPv6: more extension headers than are followed, or one that says where else the packet must go first.
    ExtensionHeaders = 16,
    /// UDP over IPv6 without a checksum (RFC 8200, section 8.1).
    NoChecksum = 17,
    /// An ICMP error about a packet of a service, or to a backend, of which no flow is known.
    UnknownIcmp = 18,
    /// In front of the frame there is no room for what it would have to be wrapped in: the driver leaves too little.
    NoHeadroom = 19,
}

impl Reason {
    /// Every reason, in the order of its number.
    pub const ALL: [Reason; 20] = [
        Reason::Malformed,
        Reason::Fragment,
        Reason::TtlExceeded,
        Reason::UnknownFlow,
        Reason::NoBackend,
        Reason::NoNeighbour,
        Reason::NoEgress,
        Reason::TooBig,
        Reason::FlowTableFull,
        Reason::ReplyCollision,
        Reason::OrphanReply,
        Reason::NoSourcePort,
        Reason::NoControlConnection,
        Reason::FlowRaced,
        Reason::FlowChanged,
        Reason::FlowPushedOut,
        Reason::ExtensionHeaders,
        Reason::NoChecksum,
        Reason::UnknownIcmp,
        Reason::NoHeadroom,
    ];

    /// The name that operators see.
    pub const fn name(self) -> &'static str {
        match self {
            Reason::Malformed => "malformed",
            Reason::Fragment => "fragment",
            Reason::TtlExceeded => "ttl-exceeded",
            Reason::UnknownFlow => "unknown-flow",
            Reason::NoBackend => "no-backend",
            Reason::NoNeighbour => "no-neighbour",
            Reason::NoEgress => "no-egress",
            Reason::TooBig => "too-big",
            Reason::FlowTableFull => "flow-table-full",
            Reason::ReplyCollision => "reply-collision",
            Reason::OrphanReply => "orphan-reply",
            Reason::NoSourcePort => "no-source-port",
            Reason::NoControlConnection => "no-control-connection",
            Reason::FlowRaced => "flow-raced",
            Reason::FlowChanged => "flow-changed",
            Reason::FlowPushedOut => "flow-pushed-out",
            Reason::ExtensionHeaders => "extension-headers",
            Reason::NoChecksum => "no-checksum",
            Reason::UnknownIcmp => "unknown-icmp",
            Reason::NoHeadroom => "no-headroom",
        }
    }

    /// The reason with this number, `None` for a number that no reason has.
    pub const fn from_index(index: u32) -> Option<Reason> {
        if (index as usize) < Reason::ALL.len() { Some(Reason::ALL[index as usize]) } else { None }
    }
}

const _: () = {
    let mut index = 0;
    while index < Reason::ALL.len() {
        assert!(Reason::ALL[index] as usize == index);
        index += 1;
    }
};
