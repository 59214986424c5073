//! What is measured.

use balancer_common::Reason;
use balancer_tests::{
    packet::Segment,
    program::{VIP_PORT, verdict},
};

use super::frame::{DATAGRAM, Family, IPV4, Shape, TRANSMISSION, Transport, Way};

/// How many flows there are at most.
pub const MANY: u32 = 1 << 20;
/// How many flows there are, where their number matters.
const FLOWS: [u32; 3] = [1, 1 << 16, MANY];

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
        let Shape { family, transport, way, .. } = self.shape;
        let [family, transport] = [family.name, transport.name];
        let way = if way == Way::Request { "request" } else { "reply" };
        match self.kind {
            Kind::Limit => "limit: fixed rewrite, no lookup".to_owned(),
            Kind::Hit => format!("{family} {transport} {way}"),
            Kind::Young => format!("{family} {transport} {way}, flow younger than 14 s"),
            Kind::Foreign => format!("{family} {transport}, foreign (PASS)"),
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
    // A line for each family.
    cases.extend(of_family(IPV4));
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
    cases.push(Case { kind: Kind::Young, shape: request(TRANSMISSION), flows: 1 });
    for transport in [TRANSMISSION, DATAGRAM] {
        let shape = opening(family, transport);
        cases.push(Case { kind: Kind::NewWarm, shape, flows: 1 });
        cases.push(Case { kind: Kind::New, shape, flows: MANY });
    }
    cases.push(Case { kind: Kind::Flood, shape: opening(family, TRANSMISSION), flows: 1 << 18 });
    let foreign = Shape { service_port: VIP_PORT + 1, ..request(TRANSMISSION) };
    cases.extend([1, MANY].map(|flows| Case { kind: Kind::Foreign, shape: foreign, flows }));
    let fragment = Shape { is_fragment: true, ..request(DATAGRAM) };
    cases.push(Case { kind: Kind::Refused(Reason::Fragment), shape: fragment, flows: 1 });
    cases
}

/// A packet of a flow both of whose ends talk.
pub fn established(family: Family, transport: Transport, way: Way) -> Shape {
    let flags = if transport == TRANSMISSION { Segment::ACK } else { 0 };
    Shape { family, transport, way, flags, numbers: (1, 1), service_port: VIP_PORT, is_fragment: false }
}

/// The first packet of a flow.
pub fn opening(family: Family, transport: Transport) -> Shape {
    let flags = if transport == TRANSMISSION { Segment::SYN } else { 0 };
    Shape { flags, numbers: (0, 0), ..established(family, transport, Way::Request) }
}

/// The packets after which a flow's both ends talk, one after the other.
pub fn handshake(family: Family, transport: Transport) -> [Shape; 3] {
    let flags = if transport == TRANSMISSION { Segment::SYN | Segment::ACK } else { 0 };
    let answer = Shape { flags, numbers: (0, 1), ..established(family, transport, Way::Reply) };
    [opening(family, transport), answer, established(family, transport, Way::Request)]
}
