//! The way of one packet through the balancer.

use balancer_common::{
    BackendId, Control, FIRST_SNAT_PORT, FlowState, MAX_PORTS, NextHop, Reason, Service, ServiceId,
    ServiceKey, TCP, Traffic, age_bucket, answer as answers, endpoint, flags, role,
};
use network_types::{eth::EthHdr, ip::Ipv4Hdr};

use crate::{
    Environment, Packet, answer, exchange, media,
    open::{self, Opening},
    packet,
    parse::{Parsed, Unparsed, parse, tcp},
    rewrite::{Translation, rewrite},
    state::{self, Direction},
    table::{self, Entry, Found},
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

/// Why a frame is not forwarded.
enum Stop {
    Foreign,
    /// A flow was opened for it: it has yet to go its way.
    Opened,
    Refused(Reason),
    /// Refused, and its sender is told so.
    Rejected(Reason),
}

impl From<Reason> for Stop {
    fn from(reason: Reason) -> Stop {
        Stop::Refused(reason)
    }
}

/// Decides about one frame, and rewrites it if it is to be forwarded.
///
/// The first packet of a flow goes through it twice: once to open the flow, once like all that follow. In the kernel
/// there are 512 bytes of stack, which opening a flow and carrying a packet need each for itself.
#[inline(always)]
pub fn process<P: Packet, E: Environment>(packet: &P, environment: &E) -> Verdict {
    let mut is_first = false;
    loop {
        return match forward(packet, environment, is_first) {
            Ok(hop) if hop.ifindex == environment.ingress() => Verdict::Transmit,
            Ok(hop) => Verdict::Redirect(hop.port),
            Err(Stop::Opened) => {
                is_first = true;
                continue;
            }
            Err(Stop::Foreign) => Verdict::Pass,
            Err(Stop::Refused(reason)) => {
                environment.refuse(reason);
                Verdict::Drop
            }
            Err(Stop::Rejected(reason)) => {
                environment.refuse(reason);
                match reject(packet, environment) {
                    Some(()) => Verdict::Transmit,
                    None => Verdict::Drop,
                }
            }
        };
    }
}

/// Answers a refused packet, by its protocol.
#[inline(always)]
fn reject<P: Packet, E: Environment>(packet: &P, environment: &E) -> Option<()> {
    let ip: Ipv4Hdr = packet::read(packet, EthHdr::LEN)?;
    match ip.proto {
        TCP => answer::reset(packet),
        _ if environment.may_send_icmp(environment.now()) => answer::port_unreachable(packet),
        _ => None,
    }
}

/// Sends a packet on that has a flow, or opens one for it. `is_first` says that one was just opened.
#[inline(always)]
fn forward<P: Packet, E: Environment>(packet: &P, environment: &E, is_first: bool) -> Result<NextHop, Stop> {
    let parsed = match parse(packet) {
        Ok(parsed) => parsed,
        Err(Unparsed::Foreign) => return Err(Stop::Foreign),
        Err(Unparsed::Refused { reason, source, destination }) => {
            return Err(refuse_if_ours(environment, reason, source, destination));
        }
    };
    let now = environment.now();
    let hash = table::hash(environment, &parsed.key);
    let found = table::find(environment, &parsed.key, hash);
    if !found.exists() || starts_anew(environment, &parsed, &found, now) {
        let opening = first(environment, &parsed, &found, is_first, now)?;
        return Err(match open::open(environment, &opening, now) {
            Ok(()) => Stop::Opened,
            Err(reason) => reason.into(),
        });
    }
    if is_first {
        exchange::prepare(packet, &parsed, &found);
    }
    carry(packet, environment, &parsed, &found, now)
}

/// What a packet opens that has no flow, or whose flow is over.
#[inline(always)]
fn first<E: Environment>(
    environment: &E,
    parsed: &Parsed,
    found: &Found,
    is_first: bool,
    now: u32,
) -> Result<Opening, Stop> {
    if is_first {
        // Another CPU has pushed it out already: the sender's next try opens another.
        return Err(Reason::FlowTableFull.into());
    }
    let Some(service) = environment.service(&service_key(parsed)) else {
        return stranger(environment, parsed, now);
    };
    check_packet(parsed)?;
    if found.exists() {
        table::end(environment, found, now);
    }
    // SAFETY: `parse` checked that the Ethernet header lies in the frame.
    let client = unsafe { (*parsed.ethernet).src_addr };
    open::ask(environment, parsed, &service, client, now).map_err(|reason| {
        if is_answered(&service, reason) { Stop::Rejected(reason) } else { Stop::Refused(reason) }
    })
}

/// What becomes of a packet that is for no service and of no flow: not ours, unless a backend sends it from its service
/// port to somewhere else, or to a port of this host that clients are given. Then it answers a flow that is forgotten: a
/// private source must not leave, and the kernel here knows nothing of it. From a data port, it is the first of its media.
#[inline(always)]
fn stranger<E: Environment>(environment: &E, parsed: &Parsed, now: u32) -> Result<Opening, Stop> {
    let from = ServiceKey {
        address: parsed.key.source,
        port: parsed.key.source_port,
        protocol: parsed.key.protocol,
        reserved: 0,
    };
    let sender = environment.endpoint(&from);
    if sender == 0 {
        return Err(Stop::Foreign);
    }
    let roles = environment.roles(parsed.key.destination);
    let is_clients =
        roles & role::SNAT != 0 && u16::from_be_bytes(parsed.key.destination_port) >= FIRST_SNAT_PORT;
    if roles & role::LOCAL != 0 && !is_clients {
        return Err(Stop::Foreign);
    }
    if parsed.key.protocol == TCP {
        return Err(Stop::Rejected(Reason::OrphanReply));
    }
    if sender & endpoint::MEDIA == 0 {
        return Err(Stop::Refused(Reason::OrphanReply));
    }
    check_packet(parsed)?;
    Ok(media::answer(environment, parsed, sender, now)?)
}

/// Whether the service wants the senders of packets refused for this reason to be told.
#[inline(always)]
fn is_answered(service: &Service, reason: Reason) -> bool {
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
    now: u32,
) -> Result<NextHop, Stop> {
    check_packet(parsed)?;
    let entry = found.entry.flow();
    let direction =
        if found.control.flags() & flags::REPLY == 0 { Direction::Request } else { Direction::Reply };
    let translation = Translation::of(entry);
    let (backend, via, toward_client) = (entry.backend, entry.via, entry.neighbour);
    let (service, opened) = (entry.service, entry.opened);
    if !table::is_unchanged(found) {
        // Another CPU gave the entry to another flow while it was read: the sender's next try finds its own.
        return Err(Reason::FlowTableFull.into());
    }
    let hop_index = match direction {
        Direction::Request => MAX_PORTS + u32::from(backend),
        Direction::Reply => u32::from(via),
    };
    let hop = environment.next_hop(hop_index).ok_or(Reason::NoEgress)?;
    check(parsed, &hop)?;

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
    if state::may_change(found.control, direction, parsed.tcp_flags) {
        advance(environment, parsed, found, direction);
    }
    if exchange::may_change(found.control, direction, parsed.payload) {
        exchange::follow(packet, environment, parsed, found, direction);
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
fn check_packet(parsed: &Parsed) -> Result<(), Reason> {
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

/// What a next hop must fulfil to take the packet.
#[inline(always)]
pub fn check(parsed: &Parsed, hop: &NextHop) -> Result<(), Reason> {
    if parsed.length <= hop.mtu {
        return Ok(());
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
    let reopens = found.control.state() as u8 == FlowState::Closing as u8
        && is_request
        && parsed.tcp_flags & tcp::ALL == tcp::SYN;
    reopens || table::is_expired(environment, found, now)
}

#[inline(always)]
fn service_key(parsed: &Parsed) -> ServiceKey {
    ServiceKey {
        address: parsed.key.destination,
        port: parsed.key.destination_port,
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
) -> Stop {
    let is_ours =
        environment.roles(destination) & role::SERVICE != 0 || environment.roles(source) & role::BACKEND != 0;
    if is_ours { Stop::Refused(reason) } else { Stop::Foreign }
}

/// Sends replies where the last request came from.
#[inline(always)]
fn follow_client<E: Environment>(environment: &E, parsed: &Parsed, found: &Found) {
    // SAFETY: `parse` checked that the Ethernet header lies in the frame.
    let client = unsafe { (*parsed.ethernet).src_addr };
    let entry = found.entry.flow();
    let ingress = environment.ingress() as u16;
    if entry.neighbour == client && entry.via == ingress {
        return;
    }
    let Some(port) = environment.port(environment.ingress()) else { return };
    found.entry.set_client_side(client, ingress);
    if let Some((twin, _)) = table::twin(environment, found) {
        twin.set_client_side(client, port);
    }
}

/// Moves both entries of a flow to the state that the packet brings about.
#[inline(always)]
fn advance<E: Environment>(environment: &E, parsed: &Parsed, found: &Found, direction: Direction) {
    let twin = found.entry.flow().twin;
    advance_entry(environment, parsed, found.entry, found.index, direction, found.control.sequence());
    if let Some((entry, sequence)) = table::twin(environment, found) {
        advance_entry(environment, parsed, entry, twin, direction, sequence);
    }
}

#[inline(always)]
fn advance_entry<E: Environment>(
    environment: &E,
    parsed: &Parsed,
    entry: Entry,
    index: u32,
    direction: Direction,
    sequence: u16,
) {
    for _ in 0..table::TRIES {
        let before = entry.control();
        if !before.is_live() || before.sequence() != sequence {
            return;
        }
        let after = state::after(before, direction, parsed.key.protocol, parsed.tcp_flags);
        if after == before {
            return;
        }
        if entry.exchange(before, after) {
            settle(environment, entry, index, before, after);
            return;
        }
    }
}

/// What follows from a change of state: the active count, the protection, and the timeout.
#[inline(always)]
fn settle<E: Environment>(environment: &E, entry: Entry, index: u32, before: Control, after: Control) {
    let flow = entry.flow();
    table::count_ended(environment, flow.backend, before, after);
    if before.state() as u8 == after.state() as u8 {
        return;
    }
    table::protect(environment, index, after.state() as u8 == FlowState::Established as u8);
    let is_request = after.flags() & flags::REPLY == 0;
    let (address, port) = if is_request {
        (flow.key.destination, flow.key.destination_port)
    } else {
        (flow.new_source, flow.new_source_port)
    };
    let key = ServiceKey { address, port, protocol: flow.key.protocol, reserved: 0 };
    let Some(service) = environment.service(&key) else { return };
    let timeout = match after.state() {
        FlowState::Closing => service.closing_timeout,
        _ => service.idle_timeout,
    };
    entry.set_timeout(timeout);
}

/// Counts a packet towards the flow's backend.
#[inline(always)]
fn count<E: Environment>(environment: &E, backend: BackendId, direction: Direction, bytes: u16) {
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

#[inline(always)]
fn add(traffic: &mut Traffic, bytes: u16) {
    traffic.packets = traffic.packets.wrapping_add(1);
    traffic.bytes = traffic.bytes.wrapping_add(u64::from(bytes));
}
