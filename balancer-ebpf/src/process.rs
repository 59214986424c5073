//! The way of one packet through the balancer: forwarded at once if its flow is known, else after one was opened for it.

use balancer_common::{
    BackendId, FlowKey, MAX_PORTS, NextHop, Reason, Service, ServiceKey, TCP, Traffic, UDP, age_bucket,
    answer as answers, endpoint, family, flags, forward, option, port_bit, role,
};

use crate::{
    Environment, Packet, answer, exchange, media, open,
    parse::{Parsed, Unparsed, addresses, parse, tcp},
    rewrite::{Translation, rewrite},
    state::{self, Direction, Segment},
    table::{self, Found},
    vlan,
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
    /// Of no flow yet, but of one that can be opened now.
    Prepared,
    /// Its flow is live: opened for it, or by another CPU meanwhile.
    Known,
    /// To or from a service that keeps no flows.
    Alone,
    /// Without a flow key, for this reason: to be refused if either of its addresses is ours.
    Unusable(Reason),
    /// Refused.
    Refused(Reason),
    /// Refused, and its sender is told so, and what would have passed: the largest packet, of those that are `TooBig`.
    Rejected(Reason, u16),
    /// A fragment, not the first one, which goes where that went.
    Rest,
    /// Not ours, and neither are the fragments that follow it.
    ForeignPart,
    /// ICMP.
    Control,
    /// ARP, or ICMPv6 by which neighbours are found.
    Neighbour,
    /// Rewritten, to be wrapped for this backend; the number tells its flow from others.
    Wrap(BackendId, u16),
    /// Rewritten, to leave by the hop with this index, with its tags.
    Leave(u32),
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
            Step::Prepared => (4, 0),
            Step::Known => (5, 0),
            Step::Unusable(reason) => (6, reason as u32),
            Step::Refused(reason) => (7, reason as u32),
            Step::Rejected(reason, most) => (8, reason as u32 | (most as u32) << 16),
            Step::Rest => (9, 0),
            Step::ForeignPart => (10, 0),
            Step::Control => (11, 0),
            Step::Alone => (12, 0),
            Step::Neighbour => (13, 0),
            Step::Wrap(backend, lot) => (14, backend as u32 | (lot as u32) << 16),
            Step::Leave(hop) => (15, hop),
        };
        kind << 32 | value as u64
    }

    /// By its number.
    #[inline(always)]
    pub const fn from_number(number: u64) -> Step {
        let value = number as u32;
        let reason = match Reason::from_index(value & 0xffff) {
            Some(reason) => reason,
            None => Reason::Malformed,
        };
        match number >> 32 {
            0 => Step::Foreign,
            1 => Step::Back,
            2 => Step::Out(value as u16),
            3 => Step::Unknown(value),
            4 => Step::Prepared,
            5 => Step::Known,
            6 => Step::Unusable(reason),
            7 => Step::Refused(reason),
            8 => Step::Rejected(reason, (value >> 16) as u16),
            9 => Step::Rest,
            10 => Step::ForeignPart,
            11 => Step::Control,
            12 => Step::Alone,
            13 => Step::Neighbour,
            14 => Step::Wrap(value as BackendId, (value >> 16) as u16),
            _ => Step::Leave(value),
        }
    }
}

/// Decides about one frame, and rewrites it if it is to be forwarded.
#[inline(always)]
pub fn process<P: Packet, E: Environment>(packet: &P, environment: &E) -> Verdict {
    let mut step = environment.forward(packet, false);
    if let Step::Unknown(stale) = step {
        step = environment.ask(packet, stale);
    }
    if step == Step::Prepared {
        step = environment.open();
        if step == Step::Prepared {
            // Who was in the way has come by now, or was put out of it.
            step = environment.open();
        }
    }
    if step == Step::Known {
        step = environment.forward(packet, true);
    }
    if step == Step::Alone {
        step = environment.carry_alone(packet, false);
        if step == Step::Alone {
            step = environment.carry_alone(packet, true);
        }
    }
    if step == Step::Rest {
        step = environment.forward_rest(packet);
    }
    if step == Step::Control {
        step = environment.control(packet);
    }
    if step == Step::Neighbour {
        step = environment.tell_neighbour(packet);
    }
    if let Step::Wrap(backend, lot) = step {
        step = environment.wrap(packet, backend, lot);
    }
    if let Step::Leave(hop) = step {
        step = environment.leave(packet, hop);
    }
    match step {
        Step::Unusable(_) if !environment.is_ours(packet) => Verdict::Pass,
        Step::Foreign | Step::Rest | Step::Control | Step::Neighbour => Verdict::Pass,
        Step::ForeignPart => {
            environment.pass_part(packet);
            Verdict::Pass
        }
        Step::Back => Verdict::Transmit,
        Step::Out(port) => Verdict::Redirect(port),
        Step::Prepared => refuse(environment, Reason::FlowRaced),
        // The sender's next try opens another.
        Step::Unknown(_) | Step::Known | Step::Alone | Step::Wrap(..) | Step::Leave(_) => {
            refuse(environment, Reason::FlowPushedOut)
        }
        Step::Refused(reason) | Step::Unusable(reason) => refuse(environment, reason),
        Step::Rejected(reason, most) => {
            environment.refuse(reason);
            if environment.reject(packet, reason, most) { Verdict::Transmit } else { Verdict::Drop }
        }
    }
}

#[inline(always)]
fn refuse<E: Environment>(environment: &E, reason: Reason) -> Verdict {
    environment.refuse(reason);
    Verdict::Drop
}

/// Answers a packet that is refused for `reason`; `most` is the largest that would have passed, if it is too big.
#[inline(always)]
pub fn reject<P: Packet, E: Environment>(
    packet: &P,
    environment: &E,
    reason: Reason,
    most: u16,
) -> Option<()> {
    let refused = answer::Refused::of(packet)?;
    let error = match reason {
        Reason::TtlExceeded => answer::TIME_EXCEEDED,
        Reason::TooBig if refused.may_be_split() => return None,
        Reason::TooBig => answer::TOO_BIG,
        _ if refused.protocol == TCP => return answer::reset(packet, &refused),
        // Behind extension headers there is no answer.
        _ if refused.protocol != UDP => return None,
        _ => answer::PORT_UNREACHABLE,
    };
    if !environment.may_send_icmp(environment.now()) {
        return None;
    }
    answer::error(packet, &refused, &error, most)
}

/// Sends a packet on that has a flow. `is_first` says that the flow was opened for it just now.
#[inline(always)]
pub fn forward<P: Packet, E: Environment>(packet: &P, environment: &E, is_first: bool) -> Step {
    let parsed = match parse(packet, environment) {
        Ok(parsed) => parsed,
        Err(Unparsed::Foreign) => return Step::Foreign,
        Err(Unparsed::Rest) => return Step::Rest,
        Err(Unparsed::Control) => return Step::Control,
        Err(Unparsed::Neighbour) => return Step::Neighbour,
        Err(Unparsed::Refused(reason)) => return Step::Unusable(reason),
    };
    if !may_be_ours(environment, &parsed.key) {
        return if parsed.is_first_part { Step::ForeignPart } else { Step::Foreign };
    }
    let now = environment.now();
    let hash = table::hash(environment, &parsed.key);
    let found = table::find(environment, &parsed.key, hash);
    if !found.exists()
        || !is_its(environment, &parsed, &found)
        || starts_anew(environment, &parsed, &found, now)
    {
        return without_flow(environment, &parsed, found.index);
    }
    if is_first {
        exchange::prepare(packet, &parsed, &found);
    }
    if parsed.is_first_part {
        environment.remember_part(packet, &found);
    }
    match carry(packet, environment, &parsed, &found, is_first, now) {
        Ok(step) | Err(step) => step,
    }
}

/// Whether anybody here has, or had, a port that a packet comes from or goes to: most foreign ones need no more to be told.
#[inline(always)]
fn may_be_ours<E: Environment>(environment: &E, key: &FlowKey) -> bool {
    let is_known = |port| {
        let (word, bit) = port_bit(key.protocol, port);
        environment.port_filter(word) & bit != 0
    };
    is_known(key.destination_port) || is_known(key.source_port)
}

/// Whose business a packet is that has no flow, or whose flow, with the entry `stale`, is over.
#[inline(always)]
fn without_flow<E: Environment>(environment: &E, parsed: &Parsed, stale: u32) -> Step {
    let is_alone = match service(environment, parsed) {
        Some(service) => service.options & option::ONE_PACKET != 0,
        None => match sender(environment, parsed) {
            0 if parsed.is_first_part => return Step::ForeignPart,
            0 => return Step::Foreign,
            sender => sender & endpoint::ONE_PACKET != 0,
        },
    };
    if is_alone { Step::Alone } else { Step::Unknown(stale) }
}

/// Prepares the flow of a packet that has none, or whose flow, with the entry `stale`, is over.
#[inline(always)]
pub fn ask<P: Packet, E: Environment>(packet: &P, environment: &E, stale: u32) -> Step {
    // It was parsed before: there is a flow key.
    let Ok(parsed) = parse(packet, environment) else { return Step::Foreign };
    match first(environment, &parsed, stale, environment.now()) {
        Ok(()) => Step::Prepared,
        Err(step) => step,
    }
}

/// Opens the flow that was prepared.
#[inline(always)]
pub fn open<E: Environment>(environment: &E) -> Step {
    let refused = match open::open(environment, environment.now()) {
        Ok(step) => return step,
        Err(refused) => refused,
    };
    let Ok(opening) = open::opening(environment) else { return refused };
    match refused {
        // The other flow may be this one.
        Step::Refused(Reason::ReplyCollision) if is_known(environment, &opening.key) => Step::Known,
        Step::Refused(reason) if is_answered(&opening.service, reason) => Step::Rejected(reason, 0),
        step => step,
    }
}

/// What a packet opens that has no flow, or whose flow is over.
#[inline(always)]
fn first<E: Environment>(environment: &E, parsed: &Parsed, stale: u32, now: u32) -> Result<(), Step> {
    let Some(service) = service(environment, parsed) else {
        return stranger(environment, parsed, now);
    };
    check_packet(parsed, service.forward)?;
    if let Some(entry) = table::entry_at(environment, stale) {
        let found = Found { entry, index: stale, control: entry.control() };
        // Unless it has become another flow's since.
        if found.control.is_live() && starts_anew(environment, parsed, &found, now) {
            environment.end(&found, now);
        }
    }
    open::ask(environment, parsed, service).map_err(|step| match step {
        Step::Refused(reason) if is_answered(service, reason) => Step::Rejected(reason, 0),
        step => step,
    })
}

/// Whether a packet has a flow by now: another CPU has opened it.
#[inline(always)]
fn is_known<E: Environment>(environment: &E, key: &FlowKey) -> bool {
    table::find(environment, key, table::hash(environment, key)).exists()
}

/// What becomes of a packet that is for no service and of no flow: not ours, unless a backend sends it from its service
/// port to somewhere else, or to a port of this host that clients are given. Then it answers a flow that is forgotten: a
/// private source must not leave, and the kernel here knows nothing of it. From a data port, it is the first of its media.
#[inline(always)]
fn stranger<E: Environment>(environment: &E, parsed: &Parsed, now: u32) -> Result<(), Step> {
    let sender = sender(environment, parsed);
    if sender == 0 {
        return Err(Step::Foreign);
    }
    if is_for_host(&parsed.key, environment.roles(&parsed.destination())) {
        return Err(Step::Foreign);
    }
    if parsed.key.protocol == TCP {
        return Err(Step::Rejected(Reason::OrphanReply, 0));
    }
    if sender & endpoint::MEDIA == 0 {
        return Err(Step::Refused(Reason::OrphanReply));
    }
    check_packet(parsed, forward::NAT)?;
    Ok(media::answer(environment, parsed, sender, now)?)
}

/// Whether a packet without a flow, to an address of these roles, is for this host itself: not for a port that clients are
/// given.
#[inline(always)]
pub fn is_for_host(key: &FlowKey, roles: u32) -> bool {
    let port = u16::from_be_bytes(key.destination_port);
    let is_clients = roles & role::SNAT != 0 && port >= role::first_port(roles);
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
pub fn carry<P: Packet, E: Environment>(
    packet: &P,
    environment: &E,
    parsed: &Parsed,
    found: &Found,
    is_first: bool,
    now: u32,
) -> Result<Step, Step> {
    let entry = found.entry.flow();
    let mut direction =
        if found.control.flags() & flags::REPLY == 0 { Direction::Request } else { Direction::Reply };
    let translation = Translation::of(environment, found);
    let (backend, via, toward_client) = (entry.backend, entry.via, entry.neighbour);
    if !table::is_unchanged(found) {
        // Another CPU gave the entry to another flow while it was read: the sender's next try finds its own.
        return Err(Step::Refused(Reason::FlowChanged));
    }
    let hop = environment.next_hop(hop_index(direction, backend, via)).ok_or(Reason::NoEgress)?;
    if hop.forward != forward::NAT {
        direction = Direction::OneWay;
    }
    check_packet(parsed, hop.forward)?;
    check(environment, parsed.length, parsed.vlan, hop)?;

    let neighbour = match direction {
        Direction::Request => {
            follow_client(environment, parsed, found);
            hop.neighbour
        }
        Direction::Reply => toward_client,
        Direction::OneWay => hop.neighbour,
    };
    // What the next steps look at stays: flags and numbers of TCP.
    rewrite(parsed, &translation, hops(hop.forward), neighbour, hop.source);
    let step = match hop.forward {
        // Read late: another flow's number does no harm.
        forward::IPIP | forward::GUE => Step::Wrap(backend, entry.exchange as u16),
        // With the tags that it has, or with others.
        _ if hop.vlan == parsed.vlan => leave(environment, hop),
        _ => Step::Leave(hop.index),
    };
    if entry.stamp != now {
        found.entry.set_stamp(now);
    }
    if !parsed.is_rest && state::may_change(found.control, direction, parsed.tcp_flags, is_first) {
        environment.advance(packet, found.index, found.control, Segment::new(parsed, direction));
    }
    if exchange::may_change(found.control, direction, parsed.payload) {
        environment.follow(packet, found.index, found.control, Segment::new(parsed, direction));
    }
    count(environment, backend, direction, parsed.length);
    if found.control.flags() & flags::GROWN == 0 {
        profile(environment, found, now, parsed.length);
    }
    Ok(step)
}

/// What is taken off the TTL of packets that go to a backend like this: `forward::*`.
#[inline(always)]
pub const fn hops(forward: u8) -> u8 {
    (forward != forward::DSR) as u8
}

/// What a packet of a service or a flow must fulfil to go this way: `forward::*`.
#[inline(always)]
pub fn check_packet(parsed: &Parsed, forward: u8) -> Result<(), Step> {
    if !parsed.is_rest {
        if parsed.key.protocol == TCP && !tcp::is_possible(parsed.tcp_flags) {
            return Err(Step::Refused(Reason::Malformed));
        }
        if parsed.key.family != family::IPV4 && parsed.key.protocol == UDP && parsed.checksum() == [0; 2] {
            return Err(Step::Refused(Reason::NoChecksum));
        }
    }
    if parsed.ttl <= hops(forward) {
        return Err(Step::Rejected(Reason::TtlExceeded, 0));
    }
    Ok(())
}

/// Which next hop a packet of a flow takes.
#[inline(always)]
pub fn hop_index(direction: Direction, backend: BackendId, via: u16) -> u32 {
    match direction {
        Direction::Request | Direction::OneWay => MAX_PORTS + u32::from(backend),
        Direction::Reply => u32::from(via),
    }
}

/// How a packet leaves that is bound for this hop.
#[inline(always)]
pub fn leave<E: Environment>(environment: &E, hop: &NextHop) -> Step {
    if hop.ifindex == environment.ingress() { Step::Back } else { Step::Out(hop.port) }
}

/// What a next hop must fulfil to take a packet of this length, with these tags (`vlan::*`). If it does, the packet is bound to leave there, unless it is refused
/// for another reason.
#[inline(always)]
pub fn check<E: Environment>(environment: &E, length: u32, tags: u32, hop: &NextHop) -> Result<(), Step> {
    if hop.vlan != tags && !vlan::may_leave(environment, tags, hop) {
        return Err(Step::Refused(Reason::NoEgress));
    }
    if length <= u32::from(hop.mtu) {
        let has_way = hop.ifindex == environment.ingress() || environment.redirect(hop.port);
        return if has_way { Ok(()) } else { Err(Step::Refused(Reason::NoEgress)) };
    }
    if hop.mtu != 0 {
        return Err(Step::Rejected(Reason::TooBig, hop.mtu));
    }
    let is_silent = u32::from(hop.unusable) == Reason::NoNeighbour as u32;
    Err(Step::Refused(if is_silent { Reason::NoNeighbour } else { Reason::NoEgress }))
}

/// Whether the packet must be treated as if its flow were not there: it has expired, or it was closed and this
/// is the SYN of its successor.
#[inline(always)]
fn starts_anew<E: Environment>(environment: &E, parsed: &Parsed, found: &Found, now: u32) -> bool {
    let is_request = found.control.flags() & flags::REPLY == 0;
    let reopens = found.control.state().is_closing() && is_request && parsed.tcp_flags & tcp::ALL == tcp::SYN;
    reopens || table::is_expired(environment, found, now)
}

/// Whether a packet is of the flow whose key it has: with IPv6, another's may have the same digests.
#[inline(always)]
pub fn is_its<E: Environment>(environment: &E, parsed: &Parsed, found: &Found) -> bool {
    if parsed.key.family == family::IPV4 {
        return true;
    }
    let Some(addresses) = environment.addresses(found.index) else { return false };
    // SAFETY: valid and aligned. What another CPU writes meanwhile shows in the control word's sequence.
    (0..4).all(|word| parsed.address_word(word) == unsafe { addresses.cast::<u64>().add(word).read() })
}

/// The service that a packet is for.
#[inline(always)]
pub fn service<'a, E: Environment>(environment: &'a E, parsed: &Parsed) -> Option<&'a Service> {
    let service = environment.service(&service_key(&parsed.key))?;
    let is_it = parsed.key.family == family::IPV4 || service.address == parsed.destination();
    is_it.then_some(service)
}

/// What clients with this flow key talk to.
#[inline(always)]
pub fn service_key(key: &FlowKey) -> ServiceKey {
    ServiceKey {
        address: key.destination,
        port: key.destination_port,
        protocol: key.protocol,
        family: key.family,
    }
}

/// Who answers from where a packet comes from: of `endpoint::*`; 0 = nobody.
#[inline(always)]
pub fn sender<E: Environment>(environment: &E, parsed: &Parsed) -> u32 {
    let key = ServiceKey {
        address: parsed.key.source,
        port: parsed.key.source_port,
        protocol: parsed.key.protocol,
        family: parsed.key.family,
    };
    let sender = environment.endpoint(&key);
    let is_it = sender == 0
        || parsed.key.family == family::IPV4
        || environment.roles(&parsed.source()) & role::BACKEND != 0;
    if is_it { sender } else { 0 }
}

/// Whether a packet without a flow key can only have been meant for us.
#[inline(always)]
pub fn is_ours<P: Packet, E: Environment>(packet: &P, environment: &E) -> bool {
    let Some([source, destination]) = addresses(packet) else { return false };
    environment.roles(&destination) & role::SERVICE != 0 || environment.roles(&source) & role::BACKEND != 0
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
    let word = client | u64::from(vlan::mark(environment.ingress(), parsed.vlan)) << 48;
    if found.entry.client_side() != word {
        environment.move_client(found, word, parsed.vlan);
    }
}

/// Notes that the requests of a flow come from another side now, behind these tags: its MAC in the low 48 bits, and the
/// [`vlan::mark`].
#[inline(always)]
pub fn move_client<E: Environment>(environment: &E, found: &Found, word: u64, tags: u32) {
    let Some(port) = vlan::port(environment, tags) else { return };
    found.entry.set_client_side(word);
    if let Some((twin, _)) = table::twin(environment, found) {
        twin.set_client_side(word << 16 >> 16 | u64::from(port) << 48);
    }
}

/// Counts a packet towards the flow's backend.
#[inline(always)]
pub fn count<E: Environment>(environment: &E, backend: BackendId, direction: Direction, bytes: u32) {
    let Some(counters) = environment.counters(backend) else { return };
    // SAFETY: counters are valid, aligned, and this CPU's own.
    let counters = unsafe { &mut *counters };
    add(
        match direction {
            Direction::Request | Direction::OneWay => &mut counters.request,
            Direction::Reply => &mut counters.reply,
        },
        bytes,
    );
}

/// Counts a packet by the age of its flow, as long as that is young.
#[inline(always)]
fn profile<E: Environment>(environment: &E, found: &Found, now: u32, bytes: u32) {
    let entry = found.entry.flow();
    let age = (now as u16).wrapping_sub(entry.opened);
    // The clock of the CPU that opened the flow may be ahead by a little.
    let age = if age > u16::MAX - 16 { 0 } else { u32::from(age) };
    if age > environment.profiled_age() {
        grow(environment, found);
        return;
    }
    let Some(bucket) = age_bucket(age) else { return };
    let Some(profile) = environment.profile(entry.service) else { return };
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
pub fn add(traffic: &mut Traffic, bytes: u32) {
    traffic.packets = traffic.packets.wrapping_add(1);
    traffic.bytes = traffic.bytes.wrapping_add(u64::from(bytes));
}
