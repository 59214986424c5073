//! The way of one packet through the balancer: forwarded at once if its flow is known, else after one was opened for it.

use balancer_common::{
    BackendId, FIRST_SNAT_PORT, FlowKey, MAX_PORTS, NextHop, Reason, Service, ServiceId, ServiceKey, TCP,
    Traffic, age_bucket, answer as answers, endpoint, flags, option, role,
};
use network_types::{eth::EthHdr, ip::Ipv4Hdr};

use crate::{
    Environment, Packet, answer, exchange, media,
    open::{self, Opening},
    packet,
    parse::{Parsed, Unparsed, parse, tcp},
    rewrite::{Translation, rewrite},
    state::{self, Direction, Segment},
    table::{self, Found},
};

/// What becomes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Not ours: on to the kernel, untouched.
    Pass,
    /// Refused, and counted under its reason.
    Drop,
    /// Back out of the interface that it came in by.
    Transmit,
    /// Out of the interface of this port.
    Redirect(u16),
}

/// What a step on a packet's way comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Not ours.
    Foreign,
    /// Rewritten, to go back out of the interface that it came in by.
    Back,
    /// Rewritten, to leave by this port.
    Out(u16),
    /// For a service, and of no flow yet, or of one that is over: the index of its entry, or `NO_TWIN`.
    Unknown(u32),
    /// Its flow is live: opened for it, or by another CPU meanwhile.
    Known,
    /// To or from a service that keeps no flows.
    Alone,
    /// Refused.
    Refused(Reason),
    /// Refused, and its sender is told so.
    Rejected(Reason),
}

impl From<Reason> for Step {
    fn from(reason: Reason) -> Step {
        Step::Refused(reason)
    }
}

impl Step {
    /// As one number: what a function of the kernel's program returns.
    #[inline(always)]
    pub const fn to_number(self) -> u64 {
        let (kind, value) = match self {
            Step::Foreign => (0, 0),
            Step::Back => (1, 0),
            Step::Out(port) => (2, port as u32),
            Step::Unknown(index) => (3, index),
            Step::Known => (4, 0),
            Step::Refused(reason) => (5, reason as u32),
            Step::Rejected(reason) => (6, reason as u32),
            Step::Alone => (7, 0),
        };
        kind << 32 | value as u64
    }

    /// By its number.
    #[inline(always)]
    pub const fn from_number(number: u64) -> Step {
        let value = number as u32;
        let reason = match Reason::from_index(value) {
            Some(reason) => reason,
            None => Reason::Malformed,
        };
        match number >> 32 {
            0 => Step::Foreign,
            1 => Step::Back,
            2 => Step::Out(value as u16),
            3 => Step::Unknown(value),
            4 => Step::Known,
            5 => Step::Refused(reason),
            6 => Step::Rejected(reason),
            _ => Step::Alone,
        }
    }
}

/// Decides about one frame, and rewrites it if it is to be forwarded.
#[inline(always)]
pub fn process<P: Packet, E: Environment>(packet: &P, environment: &E) -> Verdict {
    let mut step = environment.forward(packet, false);
    if let Step::Unknown(stale) = step {
        step = environment.open(packet, stale);
    }
    if step == Step::Known {
        step = environment.forward(packet, true);
    }
    if step == Step::Alone {
        step = environment.carry_alone(packet);
    }
    match step {
        Step::Foreign => Verdict::Pass,
        Step::Back => Verdict::Transmit,
        Step::Out(port) => Verdict::Redirect(port),
        // The sender's next try opens another.
        Step::Unknown(_) | Step::Known | Step::Alone => refuse(environment, Reason::FlowPushedOut),
        Step::Refused(reason) => refuse(environment, reason),
        Step::Rejected(reason) => {
            environment.refuse(reason);
            if environment.reject(packet) { Verdict::Transmit } else { Verdict::Drop }
        }
    }
}

#[inline(always)]
fn refuse<E: Environment>(environment: &E, reason: Reason) -> Verdict {
    environment.refuse(reason);
    Verdict::Drop
}

/// Answers a refused packet, by its protocol.
#[inline(always)]
pub fn reject<P: Packet, E: Environment>(packet: &P, environment: &E) -> Option<()> {
    let ip: Ipv4Hdr = packet::read(packet, EthHdr::LEN)?;
    match ip.proto {
        TCP => answer::reset(packet),
        _ if environment.may_send_icmp(environment.now()) => answer::port_unreachable(packet),
        _ => None,
    }
}

/// Sends a packet on that has a flow. `is_first` says that the flow was opened for it just now.
#[inline(always)]
pub fn forward<P: Packet, E: Environment>(packet: &P, environment: &E, is_first: bool) -> Step {
    let parsed = match parse(packet) {
        Ok(parsed) => parsed,
        Err(Unparsed::Foreign) => return Step::Foreign,
        Err(Unparsed::Refused { reason, source, destination }) => {
            return refuse_if_ours(environment, reason, source, destination);
        }
    };
    let now = environment.now();
    let hash = table::hash(environment, &parsed.key);
    let found = table::find(environment, &parsed.key, hash);
    if !found.exists() || starts_anew(environment, &parsed, &found, now) {
        return without_flow(environment, &parsed, found.index);
    }
    if is_first {
        exchange::prepare(packet, &parsed, &found);
    }
    match carry(packet, environment, &parsed, &found, is_first, now) {
        Ok(hop) if hop.ifindex == environment.ingress() => Step::Back,
        Ok(hop) => Step::Out(hop.port),
        Err(reason) => Step::Refused(reason),
    }
}

/// Whose business a packet is that has no flow, or whose flow, with the entry `stale`, is over.
#[inline(always)]
fn without_flow<E: Environment>(environment: &E, parsed: &Parsed, stale: u32) -> Step {
    let is_alone = match environment.service(&service_key(parsed)) {
        Some(service) => service.options & option::ONE_PACKET != 0,
        None => match environment.endpoint(&sender_key(parsed)) {
            0 => return Step::Foreign,
            sender => sender & endpoint::ONE_PACKET != 0,
        },
    };
    if is_alone { Step::Alone } else { Step::Unknown(stale) }
}

/// Opens a flow for a packet that has none, or whose flow, with the entry `stale`, is over.
#[inline(always)]
pub fn open<P: Packet, E: Environment>(packet: &P, environment: &E, stale: u32) -> Step {
    // It was parsed before: there is a flow key.
    let Ok(parsed) = parse(packet) else { return Step::Foreign };
    let now = environment.now();
    let opening = match first(environment, &parsed, stale, now) {
        Ok(opening) => opening,
        Err(step) => return step,
    };
    match open::open(environment, &opening, now) {
        Ok(()) => Step::Known,
        Err(reason) => Step::Refused(reason),
    }
}

/// What a packet opens that has no flow, or whose flow is over.
#[inline(always)]
fn first<'a, E: Environment>(
    environment: &'a E,
    parsed: &Parsed,
    stale: u32,
    now: u32,
) -> Result<Opening<'a>, Step> {
    let Some(service) = environment.service(&service_key(parsed)) else {
        return stranger(environment, parsed, now);
    };
    check_packet(parsed)?;
    if let Some(entry) = table::entry_at(environment, stale) {
        let found = Found { entry, index: stale, control: entry.control() };
        // Unless it has become another flow's since.
        if found.control.is_live() && starts_anew(environment, parsed, &found, now) {
            environment.end(&found, now);
        }
    }
    open::ask(environment, parsed, service, now).map_err(|reason| {
        // The other flow may be this one.
        if matches!(reason, Reason::ReplyCollision) && is_known(environment, parsed) {
            return Step::Known;
        }
        if is_answered(service, reason) { Step::Rejected(reason) } else { Step::Refused(reason) }
    })
}

/// Whether a packet has a flow by now: another CPU has opened it.
#[inline(always)]
fn is_known<E: Environment>(environment: &E, parsed: &Parsed) -> bool {
    table::find(environment, &parsed.key, table::hash(environment, &parsed.key)).exists()
}

/// What becomes of a packet that is for no service and of no flow: not ours, unless a backend sends it from its service
/// port to somewhere else, or to a port of this host that clients are given. Then it answers a flow that is forgotten: a
/// private source must not leave, and the kernel here knows nothing of it. From a data port, it is the first of its media.
#[inline(always)]
fn stranger<'a, E: Environment>(environment: &'a E, parsed: &Parsed, now: u32) -> Result<Opening<'a>, Step> {
    let sender = environment.endpoint(&sender_key(parsed));
    if sender == 0 {
        return Err(Step::Foreign);
    }
    if is_for_host(&parsed.key, environment.roles(parsed.key.destination)) {
        return Err(Step::Foreign);
    }
    if parsed.key.protocol == TCP {
        return Err(Step::Rejected(Reason::OrphanReply));
    }
    if sender & endpoint::MEDIA == 0 {
        return Err(Step::Refused(Reason::OrphanReply));
    }
    check_packet(parsed)?;
    Ok(media::answer(environment, parsed, sender, now)?)
}

/// Whether a packet without a flow, to an address of these roles, is for this host itself: not for a port that clients are
/// given.
#[inline(always)]
pub fn is_for_host(key: &FlowKey, roles: u32) -> bool {
    let is_clients = roles & role::SNAT != 0 && u16::from_be_bytes(key.destination_port) >= FIRST_SNAT_PORT;
    roles & role::LOCAL != 0 && !is_clients
}

/// Whether the service wants the senders of packets refused for this reason to be told.
#[inline(always)]
pub fn is_answered(service: &Service, reason: Reason) -> bool {
    let wanted = match reason {
        Reason::UnknownFlow => answers::UNKNOWN_FLOW,
        Reason::NoBackend => answers::NO_BACKEND,
        _ => 0,
    };
    service.answers & wanted != 0
}

/// Sends a packet of a flow on.
#[inline(always)]
fn carry<P: Packet, E: Environment>(
    packet: &P,
    environment: &E,
    parsed: &Parsed,
    found: &Found,
    is_first: bool,
    now: u32,
) -> Result<NextHop, Reason> {
    check_packet(parsed)?;
    let entry = found.entry.flow();
    let direction =
        if found.control.flags() & flags::REPLY == 0 { Direction::Request } else { Direction::Reply };
    let translation = Translation::of(entry);
    let (backend, via, toward_client) = (entry.backend, entry.via, entry.neighbour);
    let (service, opened) = (entry.service, entry.opened);
    if !table::is_unchanged(found) {
        // Another CPU gave the entry to another flow while it was read: the sender's next try finds its own.
        return Err(Reason::FlowChanged);
    }
    let hop_index = match direction {
        Direction::Request => MAX_PORTS + u32::from(backend),
        Direction::Reply => u32::from(via),
    };
    let hop = environment.next_hop(hop_index).ok_or(Reason::NoEgress)?;
    check(environment, parsed, &hop)?;

    let neighbour = match direction {
        Direction::Request => {
            follow_client(environment, parsed, found);
            hop.neighbour
        }
        Direction::Reply => toward_client,
    };
    if entry.stamp != now {
        found.entry.set_stamp(now);
    }
    if state::may_change(found.control, direction, parsed.tcp_flags, is_first) {
        environment.advance(packet, found.index, found.control, Segment::new(parsed, direction));
    }
    if exchange::may_change(found.control, direction, parsed.payload) {
        environment.follow(packet, found.index, found.control, Segment::new(parsed, direction));
    }
    count(environment, backend, direction, parsed.length);
    if found.control.flags() & flags::GROWN == 0 {
        profile(environment, found, service, (now as u16).wrapping_sub(opened), parsed.length);
    }
    rewrite(parsed, &translation, neighbour, hop.source);
    Ok(hop)
}

/// What a packet of a service or a flow must fulfil whatever becomes of it.
#[inline(always)]
pub fn check_packet(parsed: &Parsed) -> Result<(), Reason> {
    if parsed.fragmented {
        return Err(Reason::Fragment);
    }
    if parsed.key.protocol == TCP && !tcp::is_possible(parsed.tcp_flags) {
        return Err(Reason::Malformed);
    }
    if parsed.ttl <= 1 {
        return Err(Reason::TtlExceeded);
    }
    Ok(())
}

/// What a next hop must fulfil to take the packet. If it does, the packet is bound to leave there, unless it is refused
/// for another reason.
#[inline(always)]
pub fn check<E: Environment>(environment: &E, parsed: &Parsed, hop: &NextHop) -> Result<(), Reason> {
    if parsed.length <= hop.mtu {
        let has_way = hop.ifindex == environment.ingress() || environment.redirect(hop.port);
        return if has_way { Ok(()) } else { Err(Reason::NoEgress) };
    }
    if hop.mtu != 0 {
        return Err(Reason::TooBig);
    }
    Err(if hop.unusable == Reason::NoNeighbour as u32 { Reason::NoNeighbour } else { Reason::NoEgress })
}

/// Whether the packet must be treated as if its flow were not there: it has expired, or it was closed and this
/// is the SYN of its successor.
#[inline(always)]
fn starts_anew<E: Environment>(environment: &E, parsed: &Parsed, found: &Found, now: u32) -> bool {
    let is_request = found.control.flags() & flags::REPLY == 0;
    let reopens = found.control.state().is_closing() && is_request && parsed.tcp_flags & tcp::ALL == tcp::SYN;
    reopens || table::is_expired(environment, found, now)
}

/// The service that a packet is to, if there is one.
#[inline(always)]
pub fn service_key(parsed: &Parsed) -> ServiceKey {
    ServiceKey {
        address: parsed.key.destination,
        port: parsed.key.destination_port,
        protocol: parsed.key.protocol,
        reserved: 0,
    }
}

/// The endpoint that a packet is from, if it is a backend's.
#[inline(always)]
pub fn sender_key(parsed: &Parsed) -> ServiceKey {
    ServiceKey {
        address: parsed.key.source,
        port: parsed.key.source_port,
        protocol: parsed.key.protocol,
        reserved: 0,
    }
}

/// A packet without a flow key is dropped only where it can only have been meant for us.
#[inline(always)]
fn refuse_if_ours<E: Environment>(
    environment: &E,
    reason: Reason,
    source: [u8; 4],
    destination: [u8; 4],
) -> Step {
    let is_ours =
        environment.roles(destination) & role::SERVICE != 0 || environment.roles(source) & role::BACKEND != 0;
    if is_ours { Step::Refused(reason) } else { Step::Foreign }
}

/// Sends replies where the last request came from.
#[inline(always)]
fn follow_client<E: Environment>(environment: &E, parsed: &Parsed, found: &Found) {
    // SAFETY: `parse` checked that the Ethernet header lies in the frame. The machines that this runs on are little-endian.
    let client = unsafe {
        let source = &raw const (*parsed.ethernet).src_addr;
        u64::from(source.cast::<u32>().read_unaligned())
            | u64::from(source.cast::<u16>().add(2).read_unaligned()) << 32
    };
    let word = client | u64::from(environment.ingress() as u16) << 48;
    if found.entry.client_side() == word {
        return;
    }
    let Some(port) = environment.port(environment.ingress()) else { return };
    found.entry.set_client_side(word);
    if let Some((twin, _)) = table::twin(environment, found) {
        twin.set_client_side(client | u64::from(port) << 48);
    }
}

/// Counts a packet towards the flow's backend.
#[inline(always)]
pub fn count<E: Environment>(environment: &E, backend: BackendId, direction: Direction, bytes: u16) {
    let Some(counters) = environment.counters(backend) else { return };
    // SAFETY: counters are valid, aligned, and this CPU's own.
    let counters = unsafe { &mut *counters };
    add(
        match direction {
            Direction::Request => &mut counters.request,
            Direction::Reply => &mut counters.reply,
        },
        bytes,
    );
}

/// Counts a packet by the age of its flow, as long as that is young.
#[inline(always)]
fn profile<E: Environment>(environment: &E, found: &Found, service: ServiceId, age: u16, bytes: u16) {
    // The clock of the CPU that opened the flow may be ahead by a little.
    let age = if age > u16::MAX - 16 { 0 } else { u32::from(age) };
    if age > environment.profiled_age() {
        grow(environment, found);
        return;
    }
    let Some(bucket) = age_bucket(age) else { return };
    let Some(profile) = environment.profile(service) else { return };
    // SAFETY: profiles are valid, aligned, and this CPU's own.
    if let Some(traffic) = unsafe { (*profile).ages.get_mut(bucket) } {
        add(traffic, bytes);
    }
}

/// Marks both entries of a flow that is past the ages that are profiled.
#[inline(always)]
fn grow<E: Environment>(environment: &E, found: &Found) {
    found.entry.mark(found.control.sequence(), flags::GROWN, 0);
    if let Some((twin, sequence)) = table::twin(environment, found) {
        twin.mark(sequence, flags::GROWN, 0);
    }
}

/// Adds a packet.
#[inline(always)]
pub fn add(traffic: &mut Traffic, bytes: u16) {
    traffic.packets = traffic.packets.wrapping_add(1);
    traffic.bytes = traffic.bytes.wrapping_add(u64::from(bytes));
}
