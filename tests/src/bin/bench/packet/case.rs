//! What is measured.

use balancer_common::Reason;
use balancer_tests::{
    packet::Segment,
    program::{VIP_PORT, verdict},
};

use super::frame::{DATAGRAM, Family, Given, IPV4, IPV6, Mode, Part, Shape, TRANSMISSION, Transport, Way};

/// How many flows there are at most.
pub const MANY: u32 = 1 << 20;
/// How many flows there are, where their number matters.
const FLOWS: [u32; 3] = [1, 1 << 16, MANY];
/// As many flows as one backend's ports for translated sources allow, with room to find one in few tries.
pub const SOURCES: u32 = 1 << 14;

/// One row of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Case {
    pub kind: Kind,
    pub shape: Shape,
    /// How many flows the packets are of.
    pub flows: u32,
}

/// What becomes of the packets, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The harness's own rewriter, to compare with.
    Limit,
    /// Packets of flows that have grown out of the age profile, among many.
    Hit,
    /// The same of a young flow, whose packets count by its age as well.
    Young,
    /// Packets that are none of ours.
    Foreign,
    /// The rest of a datagram whose first fragment was sent on.
    Fragment,
    /// Packets that are refused.
    Refused(Reason),
    /// First packets, with room for all, among many flows.
    New,
    /// The same in a small table that fits into the cache.
    NewWarm,
    /// The same in a table of the default size that is full of half-open flows, which give way.
    Flood,
}

impl Case {
    /// What it is called.
    pub fn name(&self) -> String {
        let Shape { family, transport, way, mode, .. } = self.shape;
        let [family, transport] = [family.name, transport.name];
        let way = if way == Way::Request { "request" } else { "reply" };
        match self.kind {
            Kind::Limit => "limit: fixed rewrite, no lookup".to_owned(),
            Kind::Hit if mode == Mode::Nat => format!("{family} {transport} {way}"),
            Kind::Hit => format!("{family} {transport} {way}, {}", mode.name()),
            Kind::Young => format!("{family} {transport} {way}, flow younger than 14 s"),
            Kind::Foreign => format!("{family} {transport}, foreign (PASS)"),
            Kind::Fragment => format!("{family} {transport}, later fragment"),
            Kind::Refused(reason) => format!("{family}, refused: {}", reason.name()),
            Kind::New => format!("{family} {transport}, new flow"),
            Kind::NewWarm => format!("{family} {transport}, new flow, small table"),
            Kind::Flood => format!("{family} {transport}, new flow, full table"),
        }
    }

    /// The verdict that it must come to.
    pub fn verdict(&self) -> u32 {
        match self.kind {
            Kind::Foreign => verdict::PASS,
            Kind::Refused(_) => verdict::DROP,
            _ => verdict::TX,
        }
    }
}

/// Every case.
pub fn all() -> Vec<Case> {
    let mut cases =
        vec![Case { kind: Kind::Limit, shape: established(IPV4, TRANSMISSION, Way::Request), flows: 1 }];
    cases.extend([IPV4, IPV6].into_iter().flat_map(of_family));
    cases
}

fn of_family(family: Family) -> Vec<Case> {
    let mut cases = Vec::new();
    for transport in [TRANSMISSION, DATAGRAM] {
        for way in [Way::Request, Way::Reply] {
            let shape = established(family, transport, way);
            cases.extend(FLOWS.map(|flows| Case { kind: Kind::Hit, shape, flows }));
        }
    }
    let request = |transport| established(family, transport, Way::Request);
    // The reply goes to the port that its flow was given, which the harness is told for one flow only; datagrams need none.
    for (transport, way, flows) in [
        (TRANSMISSION, Way::Request, 1),
        (TRANSMISSION, Way::Reply, 1),
        (DATAGRAM, Way::Request, 1),
        (DATAGRAM, Way::Request, SOURCES),
    ] {
        let shape = Shape { mode: Mode::FullNat, ..established(family, transport, way) };
        cases.push(Case { kind: Kind::Hit, shape, flows });
    }
    for mode in [Mode::Dsr, Mode::Ipip, Mode::Gue] {
        let shape = Shape { mode, ..request(TRANSMISSION) };
        cases.extend(FLOWS.map(|flows| Case { kind: Kind::Hit, shape, flows }));
    }
    cases.push(Case { kind: Kind::Young, shape: request(TRANSMISSION), flows: 1 });
    for transport in [TRANSMISSION, DATAGRAM] {
        let shape = opening(family, transport);
        cases.push(Case { kind: Kind::NewWarm, shape, flows: 1 });
        cases.push(Case { kind: Kind::New, shape, flows: MANY });
    }
    cases.push(Case { kind: Kind::Flood, shape: opening(family, TRANSMISSION), flows: 1 << 18 });
    let foreign = Shape { service_port: VIP_PORT + 1, ..request(TRANSMISSION) };
    cases.extend([1, MANY].map(|flows| Case { kind: Kind::Foreign, shape: foreign, flows }));
    let part = |part| Shape { part, ..request(DATAGRAM) };
    cases.push(Case { kind: Kind::Fragment, shape: part(Part::Later), flows: 1 });
    cases.push(Case { kind: Kind::Refused(Reason::Fragment), shape: part(Part::Stray), flows: 1 });
    cases
}

/// A packet of a flow both of whose ends talk.
pub fn established(family: Family, transport: Transport, way: Way) -> Shape {
    let flags = if transport == TRANSMISSION { Segment::ACK } else { 0 };
    Shape {
        family,
        mode: Mode::Nat,
        transport,
        way,
        flags,
        numbers: (1, 1),
        service_port: VIP_PORT,
        part: Part::Whole,
        given: Given::default(),
    }
}

/// The first packet of a flow.
pub fn opening(family: Family, transport: Transport) -> Shape {
    let flags = if transport == TRANSMISSION { Segment::SYN } else { 0 };
    Shape { flags, numbers: (0, 0), ..established(family, transport, Way::Request) }
}

/// What answers it.
pub fn answer(family: Family, transport: Transport) -> Shape {
    let flags = if transport == TRANSMISSION { Segment::SYN | Segment::ACK } else { 0 };
    Shape { flags, numbers: (0, 1), ..established(family, transport, Way::Reply) }
}

/// The packets after which a flow's both ends talk, one after the other.
pub fn handshake(family: Family, transport: Transport) -> [Shape; 3] {
    [opening(family, transport), answer(family, transport), established(family, transport, Way::Request)]
}
