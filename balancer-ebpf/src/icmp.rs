//! ICMP and ICMPv6 (RFC 792, RFC 4443): echo to a service's address, and errors about packets of flows.
//!
//! An error quotes the packet that it is about as that was on the wire where it failed: behind this balancer, on either
//! side. By the quote's addresses and ports, the other way round, its flow is found; the error goes to who sent the packet,
//! and what it quotes is turned back into what that sent. It is nobody's load.

use balancer_common::{
    Address, BackendId, FlowKey, Reason, ServiceKey, TCP, UDP, family, flags, forward, mapped, role, unmapped,
};
use network_types::ip::{Ipv4Hdr, Ipv6Hdr};

use crate::{
    Environment, Packet,
    answer::{is_unicast, turn_around},
    checksum::{Delta, update},
    packet::{read, write},
    parse::{Network, Part, Upper, link, network},
    process::{self, Step, check, hop_index},
    source::short,
    state::Direction,
    table::{self, Found},
};

/// Bytes in front of what an error quotes.
const HEADER: usize = 8;
/// Offset of the checksum.
const CHECKSUM: usize = 2;
/// What we send ourselves starts with this TTL.
const TTL: u8 = 64;

/// Where a packet comes from and goes to.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct Ends {
    source: Address,
    destination: Address,
}

/// The addresses that are dealt with: too many for the stack.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub struct Addresses {
    /// Of the message.
    message: Ends,
    /// Of the packet that it quotes.
    quoted: Ends,
    /// What the message is to have.
    new: Ends,
    /// What the quoted packet is to have.
    new_quoted: Ends,
}

/// An ICMP message, as far as it concerns us.
struct Message<'a> {
    ends: &'a mut Addresses,
    network: Network,
    /// Offset of the ICMP header.
    icmp: usize,
    /// Offset of the packet's end.
    end: usize,
    ttl: u8,
}

/// What becomes of an ICMP packet.
#[inline(always)]
pub fn control<P: Packet, E: Environment>(packet: &P, environment: &E) -> Step {
    let Some(mut message) = message(packet, environment) else { return Step::Foreign };
    if message.icmp + HEADER > message.end {
        return Step::Unusable(Reason::Malformed);
    }
    let Some([kind, code]) = read::<P, [u8; 2]>(packet, message.icmp) else { return Step::Foreign };
    let step = match (message.network.family, kind, code) {
        (family::IPV4, 8, 0) => echo(packet, environment, &mut message, 0),
        (family::IPV6, 128, 0) => echo(packet, environment, &mut message, 129),
        (family::IPV4, 3 | 11 | 12, _) | (family::IPV6, 1..=4, _) => error(packet, environment, &mut message),
        (family::IPV6, 135, 0) => Some(Step::Neighbour),
        // Among them the rest of neighbour discovery, which the kernel answers.
        _ => None,
    };
    step.unwrap_or(Step::Foreign)
}

#[inline(always)]
fn message<'a, P: Packet, E: Environment>(packet: &P, environment: &'a E) -> Option<Message<'a>> {
    let network = network(packet)?;
    let Network { l3, family } = network;
    // SAFETY: valid, aligned, and this CPU's own; nobody else holds on to it.
    let ends = unsafe { &mut *environment.icmp_addresses()? };
    let (icmp, length, ttl) = if family == family::IPV4 {
        let ip: Ipv4Hdr = read(packet, l3)?;
        ends.message = Ends { source: mapped(ip.src_addr), destination: mapped(ip.dst_addr) };
        let header = usize::from(ip.vihl & 0x0f) * 4;
        (l3 + header, usize::from(u16::from_be_bytes(ip.tot_len)), ip.ttl)
    } else {
        let [_, _, _, _, l0, l1, next, ttl]: [u8; 8] = read(packet, l3)?;
        ends.message = Ends { source: read(packet, l3 + 8)?, destination: read(packet, l3 + 24)? };
        let upper = Upper { l4: l3 + Ipv6Hdr::LEN, protocol: next, fragment: 0, part: Part::Whole };
        let upper = environment.upper(packet, upper).ok()?;
        (upper.l4, Ipv6Hdr::LEN + usize::from(u16::from_be_bytes([l0, l1])), ttl)
    };
    Some(Message { ends, network, icmp, end: l3 + length, ttl })
}

/// Answers an echo request to a service's address.
#[inline(always)]
fn echo<P: Packet, E: Environment>(
    packet: &P,
    environment: &E,
    message: &mut Message<'_>,
    reply: u8,
) -> Option<Step> {
    let Message { ends, network: Network { l3, family }, icmp, .. } = message;
    let Ends { source, destination } = &ends.message;
    let is_ours = environment.roles(destination) & role::SERVICE != 0;
    if !is_ours || !is_unicast(source) || source == destination {
        return None;
    }
    ends.new = Ends { source: *destination, destination: *source };
    let [kind, code, c0, c1]: [u8; 4] = read(packet, *icmp)?;
    let [c0, c1] = update([c0, c1], Delta::default().word([kind, code], [reply, code]).fold());
    write(packet, *icmp, [reply, code, c0, c1])?;
    put_addresses(packet, Network { l3: *l3, family: *family }, &ends.new)?;
    // The sum is the same for addresses that have changed places.
    if *family == family::IPV4 {
        let [ttl, protocol, c0, c1]: [u8; 4] = read(packet, *l3 + IPV4_TTL)?;
        let [c0, c1] = update([c0, c1], Delta::default().word([ttl, protocol], [TTL, protocol]).fold());
        write(packet, *l3 + IPV4_TTL, [TTL, protocol, c0, c1])?;
    } else {
        write(packet, *l3 + IPV6_HOP_LIMIT, [TTL])?;
    }
    turn_around(packet)?;
    Some(Step::Back)
}

/// Offset of the TTL in an IPv4 header; protocol and checksum follow it.
const IPV4_TTL: usize = 8;
const IPV6_HOP_LIMIT: usize = 7;

/// The packet that an error quotes.
struct Quote {
    /// Offset of its IP header.
    l3: usize,
    /// Offset of its TCP or UDP header.
    l4: usize,
    protocol: u8,
    source_port: [u8; 2],
    destination_port: [u8; 2],
}

#[inline(always)]
fn quote<P: Packet, E: Environment>(packet: &P, environment: &E, message: &mut Message<'_>) -> Option<Quote> {
    let l3 = message.icmp + HEADER;
    let (l4, protocol) = if message.network.family == family::IPV4 {
        let ip: Ipv4Hdr = read(packet, l3)?;
        let header = usize::from(ip.vihl & 0x0f) * 4;
        let is_whole =
            ip.vihl >> 4 == 4 && header >= Ipv4Hdr::LEN && ip.frags[0] & 0x1f == 0 && ip.frags[1] == 0;
        if !is_whole {
            return None;
        }
        message.ends.quoted = Ends { source: mapped(ip.src_addr), destination: mapped(ip.dst_addr) };
        (l3 + header, ip.proto)
    } else {
        let [version, _, _, _, _, _, next, _]: [u8; 8] = read(packet, l3)?;
        let mut upper = Upper { l4: l3 + Ipv6Hdr::LEN, protocol: next, fragment: 0, part: Part::Whole };
        if !matches!(next, TCP | UDP) {
            upper = environment.upper(packet, upper).ok()?;
        }
        if version >> 4 != 6 || upper.part == Part::Rest {
            return None;
        }
        message.ends.quoted = Ends { source: read(packet, l3 + 8)?, destination: read(packet, l3 + 24)? };
        (upper.l4, upper.protocol)
    };
    if !matches!(protocol, TCP | UDP) || l4 + 8 > message.end {
        return None;
    }
    let [s0, s1, d0, d1]: [u8; 4] = read(packet, l4)?;
    let (source_port, destination_port) = ([s0, s1], [d0, d1]);
    Some(Quote { l3, l4, protocol, source_port, destination_port })
}

/// Sends an error on to who has sent the packet that it quotes.
#[inline(always)]
fn error<P: Packet, E: Environment>(packet: &P, environment: &E, message: &mut Message<'_>) -> Option<Step> {
    let quote = quote(packet, environment, message)?;
    let family = message.network.family;
    let key = FlowKey {
        source: short(environment, family, &message.ends.quoted.destination),
        destination: short(environment, family, &message.ends.quoted.source),
        source_port: quote.destination_port,
        destination_port: quote.source_port,
        protocol: quote.protocol,
        family,
        reserved: [0; 2],
    };
    let found = table::find(environment, &key, table::hash(environment, &key));
    if !found.exists() || !is_about(environment, &found, &message.ends.quoted) {
        let is_ours = is_ours(environment, message, &key);
        return is_ours.then_some(Step::Refused(Reason::UnknownIcmp));
    }
    if message.ttl <= 1 {
        return Some(Step::Refused(Reason::TtlExceeded));
    }
    Some(match pass_on(packet, environment, message, &quote, &found) {
        Some(step) => step,
        None => Step::Refused(Reason::Malformed),
    })
}

/// Whether a flow is the one that the quoted packet was of: with IPv6, another's key may have the same digests.
#[inline(always)]
fn is_about<E: Environment>(environment: &E, found: &Found, quoted: &Ends) -> bool {
    if found.entry.flow().key.family == family::IPV4 {
        return true;
    }
    let Some(addresses) = environment.addresses(found.index) else { return false };
    // SAFETY: valid and aligned. What another CPU writes meanwhile shows in the control word's sequence.
    let addresses = unsafe { &*addresses };
    addresses.source == quoted.destination && addresses.destination == quoted.source
}

/// Whether an error of no known flow can only have been meant for one: it is about a packet that a service has sent, or that
/// a backend has got, and not from this host.
#[inline(always)]
fn is_ours<E: Environment>(environment: &E, message: &Message<'_>, key: &FlowKey) -> bool {
    let roles = environment.roles(&message.ends.message.destination);
    let port =
        ServiceKey { address: key.source, port: key.source_port, protocol: key.protocol, family: key.family };
    (roles & role::SERVICE != 0 && environment.service(&process::service_key(key)).is_some())
        || (roles & role::LOCAL == 0 && environment.endpoint(&port) != 0)
}

#[inline(always)]
fn pass_on<P: Packet, E: Environment>(
    packet: &P,
    environment: &E,
    message: &mut Message<'_>,
    quote: &Quote,
    found: &Found,
) -> Option<Step> {
    let entry = found.entry.flow();
    let is_reply = found.control.flags() & flags::REPLY != 0;
    let direction = if is_reply { Direction::Reply } else { Direction::Request };
    let (backend, toward_client) = (entry.backend, entry.neighbour);
    let ports = [entry.new_destination_port, entry.new_source_port];
    let lot = entry.exchange as u16;
    let ends = &mut *message.ends;
    ends.new = Ends { source: mapped(entry.new_source), destination: mapped(entry.new_destination) };
    if message.network.family != family::IPV4 {
        // SAFETY: valid and aligned. What another CPU writes meanwhile shows in the control word's sequence.
        let addresses = unsafe { &*environment.addresses(found.index)? };
        ends.new = Ends { source: addresses.new_source, destination: addresses.new_destination };
    }
    ends.new_quoted = Ends { source: ends.new.destination, destination: ends.new.source };
    // A router on the way stays who it is towards the backend. Towards the client, it is the service: no private address
    // leaves.
    if !is_reply && ends.message.source != ends.quoted.destination {
        ends.new.source = ends.message.source;
    }
    let hop = environment.next_hop(hop_index(direction, backend, entry.via))?;
    if !table::is_unchanged(found) {
        return Some(Step::Refused(Reason::FlowChanged));
    }
    let length = (message.end - message.network.l3) as u32;
    if let Err(step) = check(environment, length, link(packet)?.vlan, hop) {
        // No error is answered with an error.
        return Some(match step {
            Step::Rejected(reason, _) => Step::Refused(reason),
            step => step,
        });
    }
    if hop.forward != forward::NAT {
        return Some(environment.pass_one_way(packet, backend, lot));
    }
    let within = rewrite_quote(packet, message, quote, ports)?;
    rewrite_message(packet, message, within)?;
    write(packet, 0, if is_reply { toward_client } else { hop.neighbour })?;
    write(packet, 6, hop.source)?;
    Some(Step::Leave(hop.index))
}

/// Sends an error about what a backend sent past the balancer on to it, as its requests go: as it is.
#[inline(always)]
pub fn pass_one_way<P: Packet, E: Environment>(
    packet: &P,
    environment: &E,
    backend: BackendId,
    lot: u16,
) -> Step {
    let Some(hop) = environment.next_hop(hop_index(Direction::OneWay, backend, 0)) else {
        return Step::Refused(Reason::NoEgress);
    };
    if write(packet, 0, hop.neighbour).is_none() || write(packet, 6, hop.source).is_none() {
        return Step::Refused(Reason::Malformed);
    }
    if hop.forward == forward::DSR {
        return Step::Leave(hop.index);
    }
    match network(packet) {
        Some(network) if lower_ttl(packet, network, Delta::default()).is_some() => Step::Wrap(backend, lot),
        _ => Step::Refused(Reason::Malformed),
    }
}

/// Gives a quoted packet these ends; what that adds to the sum around it.
#[inline(always)]
fn rewrite_quote<P: Packet>(
    packet: &P,
    message: &Message<'_>,
    quote: &Quote,
    [source_port, destination_port]: [[u8; 2]; 2],
) -> Option<Delta> {
    let network = Network { l3: quote.l3, family: message.network.family };
    let addresses = change(&message.ends.quoted, &message.ends.new_quoted);
    let ports =
        Delta::default().word(quote.source_port, source_port).word(quote.destination_port, destination_port);
    let mut all = addresses.and(ports);
    put_addresses(packet, network, &message.ends.new_quoted)?;
    if network.family == family::IPV4 {
        let old = read(packet, quote.l3 + 10)?;
        let new = update(old, addresses.fold());
        write(packet, quote.l3 + 10, new)?;
        all = all.word(old, new);
    }
    let [s0, s1] = source_port;
    let [d0, d1] = destination_port;
    write(packet, quote.l4, [s0, s1, d0, d1])?;
    let place = quote.l4 + if quote.protocol == TCP { 16 } else { 6 };
    // Of a TCP header, often only the first eight bytes are quoted.
    if place + 2 <= message.end
        && let Some(old) = read::<P, [u8; 2]>(packet, place)
        && (quote.protocol == TCP || old != [0; 2])
    {
        let mut new = update(old, addresses.and(ports).fold());
        if quote.protocol == UDP && new == [0; 2] {
            new = [0xff; 2];
        }
        write(packet, place, new)?;
        all = all.word(old, new);
    }
    Some(all)
}

/// Gives an error these ends, and TTL − 1; `within` is what the changes of what it quotes add to its sum.
#[inline(always)]
fn rewrite_message<P: Packet>(packet: &P, message: &Message<'_>, within: Delta) -> Option<()> {
    let Network { family, .. } = message.network;
    let addresses = change(&message.ends.message, &message.ends.new);
    let sum = read(packet, message.icmp + CHECKSUM)?;
    let delta = if family == family::IPV4 { within } else { within.and(addresses) };
    write(packet, message.icmp + CHECKSUM, update(sum, delta.fold()))?;
    put_addresses(packet, message.network, &message.ends.new)?;
    lower_ttl(packet, message.network, addresses)
}

/// TTL − 1, and the header's sum after that and these changes.
#[inline(always)]
fn lower_ttl<P: Packet>(packet: &P, Network { l3, family }: Network, changes: Delta) -> Option<()> {
    if family == family::IPV4 {
        let [ttl, protocol, c0, c1]: [u8; 4] = read(packet, l3 + IPV4_TTL)?;
        let [c0, c1] = update([c0, c1], changes.and(Delta::TTL).fold());
        return write(packet, l3 + IPV4_TTL, [ttl - 1, protocol, c0, c1]);
    }
    let [ttl]: [u8; 1] = read(packet, l3 + IPV6_HOP_LIMIT)?;
    write(packet, l3 + IPV6_HOP_LIMIT, [ttl - 1])
}

#[inline(always)]
fn change(old: &Ends, new: &Ends) -> Delta {
    Delta::default().address(&old.source, &new.source).address(&old.destination, &new.destination)
}

#[inline(always)]
fn put_addresses<P: Packet>(packet: &P, Network { l3, family }: Network, ends: &Ends) -> Option<()> {
    if family == family::IPV4 {
        let [[a, b, c, d], [e, f, g, h]] = [unmapped(&ends.source), unmapped(&ends.destination)];
        return write(packet, l3 + 12, [a, b, c, d, e, f, g, h]);
    }
    write(packet, l3 + 8, ends.source)?;
    write(packet, l3 + 24, ends.destination)
}
