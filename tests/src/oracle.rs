//! What must become of a packet, by the RFCs and the balancer's own rules: a model in user space that shares no code with the
//! data plane, and is as plain as it is slow.
//!
//! It takes frames apart with its own hands, keeps its own flows, and computes every checksum from nothing.

use std::{collections::HashMap, net::IpAddr};

use balancer_common::Reason;

/// How packets get to a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Addresses and ports rewritten, both ways.
    Nat,
    /// MACs alone.
    Dsr,
    /// IP in IP.
    Ipip,
    /// IP in UDP, to this port.
    Gue(u16),
}

/// What clients talk to, and who answers.
#[derive(Clone, Debug)]
pub struct Service {
    /// Address, port and IP protocol number.
    pub front: (IpAddr, u16, u8),
    /// How its backends are reached.
    pub mode: Mode,
    /// They take flows in turns.
    pub backends: Vec<usize>,
}

/// A backend and the way to it.
#[derive(Clone, Copy, Debug)]
pub struct Backend {
    /// Where it listens.
    pub address: (IpAddr, u16),
    /// Its MAC.
    pub mac: [u8; 6],
    /// Where wrapped packets come from.
    pub outer: IpAddr,
    /// The largest packet of its interface, what it is wrapped in included.
    pub mtu: usize,
    /// The VLANs that it is in, the outermost first.
    pub tags: &'static [Tag],
}

/// A VLAN tag: its EtherType, and the VLAN.
pub type Tag = (u16, u16);

/// What became of a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// On to the kernel, as it came.
    Pass,
    /// Dropped, and counted under this name.
    Drop(Reason),
    /// Dropped and counted, or answered in its place: who is told how often, only the clock knows.
    Told(Reason),
    /// To a backend, as this frame.
    ToBackend(usize, Vec<u8>),
    /// To the client, as this frame, from a backend.
    ToClient(usize, Vec<u8>),
}

/// The largest packet towards clients.
const CLIENT_MTU: usize = 9000;

type Key = (IpAddr, u16, IpAddr, u16, u8);

#[derive(Clone, Copy, Debug)]
struct Flow {
    service: usize,
    backend: usize,
    is_reply: bool,
    /// The client's MAC, for replies.
    neighbour: [u8; 6],
    /// The VLANs that replies leave in.
    tags: &'static [Tag],
    /// By what the path tells it from others, as it was seen with its first packet.
    lot: Option<u16>,
}

/// The model.
pub struct Oracle {
    services: Vec<Service>,
    backends: Vec<Backend>,
    /// MACs of the balancer towards the client, and towards backends.
    macs: [[u8; 6]; 2],
    /// The VLANs that it has devices of.
    vlans: &'static [&'static [Tag]],
    taken: Vec<usize>,
    flows: HashMap<Key, Flow>,
    /// The flows of datagrams whose first fragment was seen; `None` = it was none of ours.
    parts: HashMap<(IpAddr, IpAddr, u32, u8), Option<Key>>,
}

/// A frame taken apart.
struct Packet<'a> {
    frame: &'a [u8],
    l3: usize,
    is_ipv4: bool,
    source: IpAddr,
    destination: IpAddr,
    ttl: u8,
    /// Offset of its end.
    end: usize,
    l4: usize,
    protocol: u8,
    /// Identification, and whether it is the first of several fragments, or another.
    part: Option<(u32, bool)>,
}

/// Why a frame could not be taken apart.
enum Odd<'a> {
    NotIp,
    /// An IP packet that contradicts itself: its addresses.
    Refused([IpAddr; 2], Reason),
    /// A fragment that is not the first.
    Rest(Packet<'a>),
}

fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn ipv4(bytes: &[u8], at: usize) -> IpAddr {
    <[u8; 4]>::try_from(&bytes[at..at + 4]).map_or_else(|_| unreachable!(), IpAddr::from)
}

fn ipv6(bytes: &[u8], at: usize) -> IpAddr {
    <[u8; 16]>::try_from(&bytes[at..at + 16]).map_or_else(|_| unreachable!(), IpAddr::from)
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// RFC 1071.
fn checksum(parts: &[&[u8]]) -> [u8; 2] {
    let bytes = parts.concat();
    let sum = bytes.chunks(2).fold(0u64, |sum, pair| {
        sum + (u64::from(pair[0]) << 8) + u64::from(pair.get(1).copied().unwrap_or(0))
    });
    let mut sum = sum;
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

impl<'a> Packet<'a> {
    fn of(frame: &'a [u8]) -> Result<Packet<'a>, Odd<'a>> {
        let mut l3 = 14;
        while l3 <= 18 && frame.len() >= l3 && [0x8100, 0x88a8].contains(&word(frame, l3 - 2)) {
            l3 += 4;
        }
        if frame.len() < l3 {
            return Err(Odd::NotIp);
        }
        match word(frame, l3 - 2) {
            0x0800 if frame.len() >= l3 + 20 => Self::of_ipv4(frame, l3),
            0x86dd if frame.len() >= l3 + 40 => Self::of_ipv6(frame, l3),
            _ => Err(Odd::NotIp),
        }
    }

    fn of_ipv4(frame: &'a [u8], l3: usize) -> Result<Packet<'a>, Odd<'a>> {
        let ip = &frame[l3..];
        let [source, destination] = [ipv4(ip, 12), ipv4(ip, 16)];
        let (header, total) = (usize::from(ip[0] & 15) * 4, usize::from(word(ip, 2)));
        if ip[0] >> 4 != 4 || header < 20 || total < header || total > ip.len() {
            return Err(Odd::Refused([source, destination], Reason::Malformed));
        }
        let offset = word(ip, 6);
        let part = (offset & 0x3fff != 0).then(|| (u32::from(word(ip, 4)), offset & 0x1fff == 0));
        let packet = Packet {
            frame,
            l3,
            is_ipv4: true,
            source,
            destination,
            ttl: ip[8],
            end: l3 + total,
            l4: l3 + header,
            protocol: ip[9],
            part,
        };
        match packet.part {
            Some((_, false)) if [6, 17].contains(&packet.protocol) => Err(Odd::Rest(packet)),
            Some((_, false)) => Err(Odd::NotIp),
            _ => Ok(packet),
        }
    }

    fn of_ipv6(frame: &'a [u8], l3: usize) -> Result<Packet<'a>, Odd<'a>> {
        let ip = &frame[l3..];
        let ends = [ipv6(ip, 8), ipv6(ip, 24)];
        let total = 40 + usize::from(word(ip, 4));
        if ip[0] >> 4 != 6 || total > ip.len() {
            return Err(Odd::Refused(ends, Reason::Malformed));
        }
        let (mut protocol, mut place, mut part, mut count) = (ip[6], 40, None, 0);
        loop {
            // No further into the frame than that.
            if l3 + place > 1024 && place > 40 {
                return Err(Odd::Refused(ends, Reason::ExtensionHeaders));
            }
            if ![0, 43, 44, 51, 60].contains(&protocol) {
                break;
            }
            if frame.len() < l3 + place + 4 {
                return Err(Odd::Refused(ends, Reason::Malformed));
            }
            count += 1;
            // A routing header with a segment left names somebody else first.
            if count > 10 || protocol == 43 && ip[place + 3] != 0 {
                return Err(Odd::Refused(ends, Reason::ExtensionHeaders));
            }
            let length = usize::from(ip[place + 1]);
            let size = match protocol {
                44 => 8,
                51 => (length + 2) * 4,
                _ => (length + 1) * 8,
            };
            let is_fragment = protocol == 44;
            let field = word(ip, place + 2);
            protocol = ip[place];
            if is_fragment && field & 0xfff9 != 0 {
                if frame.len() < l3 + place + 8 {
                    return Err(Odd::Refused(ends, Reason::Malformed));
                }
                let id = u32::from(word(ip, place + 4)) << 16 | u32::from(word(ip, place + 6));
                part = Some((id, field >> 3 == 0));
            }
            place += size;
            if matches!(part, Some((_, false))) {
                break;
            }
        }
        let packet = Packet {
            frame,
            l3,
            is_ipv4: false,
            source: ends[0],
            destination: ends[1],
            ttl: ip[7],
            end: l3 + total,
            l4: l3 + place,
            protocol,
            part,
        };
        match packet.part {
            Some((_, false)) => Err(Odd::Rest(packet)),
            _ if packet.l4 > packet.end => Err(Odd::Refused(ends, Reason::Malformed)),
            _ => Ok(packet),
        }
    }

    fn length(&self) -> usize {
        self.end - self.l3
    }

    /// The VLANs that it is in; a tag with a priority alone is none.
    fn tags(&self) -> Vec<Tag> {
        let tags =
            (14..self.l3).step_by(4).map(|at| (word(self.frame, at - 2), word(self.frame, at) & 0xfff));
        tags.filter(|(_, id)| *id != 0).collect()
    }

    fn key(&self) -> Key {
        let [from, to] = [0, 2].map(|at| word(self.frame, self.l4 + at));
        (self.source, from, self.destination, to, self.protocol)
    }

    fn flags(&self) -> u8 {
        if self.protocol == 6 { self.frame[self.l4 + 13] & 0x17 } else { 0 }
    }

    /// Whether the TCP or UDP header is whole, and says nothing that contradicts the packet.
    fn is_sound(&self) -> bool {
        let (space, is_first) = (self.end - self.l4, self.part.is_some());
        let least = if self.protocol == 6 { 20 } else { 8 };
        if space < least {
            return false;
        }
        let length = match self.protocol {
            6 => usize::from(self.frame[self.l4 + 12] >> 4) * 4,
            _ => usize::from(word(self.frame, self.l4 + 4)),
        };
        length >= least && (length <= space || is_first)
    }

    /// Without a checksum where one must be.
    fn lacks_checksum(&self) -> bool {
        !self.is_ipv4 && self.protocol == 17 && word(self.frame, self.l4 + 6) == 0
    }
}

impl Oracle {
    /// Of a balancer with these services and backends; `macs` are its own, towards clients and towards backends, `vlans` those
    /// that it has devices of.
    pub fn new(
        services: Vec<Service>,
        backends: Vec<Backend>,
        macs: [[u8; 6]; 2],
        vlans: &'static [&'static [Tag]],
    ) -> Oracle {
        let taken = vec![0; services.len()];
        Oracle { services, backends, macs, vlans, taken, flows: HashMap::new(), parts: HashMap::new() }
    }

    /// What must become of a frame; `seen` is what the balancer made of it, of which only what routers tell flows by is looked at.
    pub fn judge(&mut self, frame: &[u8], seen: &[u8]) -> Fate {
        if (frame[0] | frame[6]) & 1 == 1 {
            return Fate::Pass;
        }
        let packet = match Packet::of(frame) {
            Ok(packet) => packet,
            Err(Odd::NotIp) => return Fate::Pass,
            Err(Odd::Refused(ends, reason)) => return self.refuse_if_ours(ends, reason),
            Err(Odd::Rest(packet)) => return self.rest(&packet, seen),
        };
        if ![6, 17].contains(&packet.protocol) {
            return Fate::Pass;
        }
        if !packet.is_sound() {
            return self.refuse_if_ours([packet.source, packet.destination], Reason::Malformed);
        }
        let key = packet.key();
        if let Some(flow) = self.flows.get(&key).copied() {
            self.note(&packet, Some(key));
            return self.send(&packet, key, flow, seen);
        }
        let front = (packet.destination, key.3, packet.protocol);
        let Some(service) = self.services.iter().position(|service| service.front == front) else {
            return self.stranger(&packet, key);
        };
        if let Some(refused) = self.refusal(&packet, self.services[service].mode) {
            return refused;
        }
        if !self.may_be_client(packet.source) {
            return Fate::Drop(Reason::Malformed);
        }
        if packet.protocol == 6 && packet.flags() != 2 {
            return Fate::Drop(Reason::UnknownFlow);
        }
        let turns = &self.services[service].backends;
        let backend = turns[self.taken[service] % turns.len()];
        self.taken[service] += 1;
        let neighbour = frame[6..12].try_into().unwrap_or_default();
        let tags = self.way_back(&packet).unwrap_or_default();
        let flow = Flow { service, backend, is_reply: false, neighbour, tags, lot: None };
        if self.way_back(&packet).is_none() && !self.backends[backend].tags.is_empty() {
            return Fate::Drop(Reason::NoEgress);
        }
        if let Some(refused) = self.too_big(&packet, flow) {
            return refused;
        }
        self.flows.insert(key, flow);
        if self.services[service].mode == Mode::Nat {
            let (address, port) = self.backends[backend].address;
            let reply = (address, port, packet.source, key.1, packet.protocol);
            self.flows.insert(reply, Flow { is_reply: true, ..flow });
        }
        self.note(&packet, Some(key));
        self.send(&packet, key, flow, seen)
    }

    /// Remembers whose the rest of a datagram is.
    fn note(&mut self, packet: &Packet<'_>, key: Option<Key>) {
        if let Some((id, true)) = packet.part {
            let protocol = if packet.is_ipv4 { packet.protocol } else { 0 };
            self.parts.insert((packet.source, packet.destination, id, protocol), key);
        }
    }

    fn rest(&mut self, packet: &Packet<'_>, seen: &[u8]) -> Fate {
        let protocol = if packet.is_ipv4 { packet.protocol } else { 0 };
        let Some((id, _)) = packet.part else { unreachable!("it is a fragment") };
        match self.parts.get(&(packet.source, packet.destination, id, protocol)).copied() {
            None => self.refuse_if_ours([packet.source, packet.destination], Reason::Fragment),
            Some(None) => Fate::Pass,
            Some(Some(key)) => {
                let flow = self.flows[&key];
                self.send(packet, key, flow, seen)
            }
        }
    }

    /// A packet for no service and of no flow.
    fn stranger(&mut self, packet: &Packet<'_>, key: Key) -> Fate {
        let is_server = self.services.iter().filter(|service| service.mode == Mode::Nat).any(|service| {
            service.front.2 == packet.protocol
                && service.backends.iter().any(|id| self.backends[*id].address == (key.0, key.1))
        });
        if !is_server {
            let is_near = self.is_ours([packet.source, packet.destination]);
            if is_near {
                self.note(packet, None);
            }
            return Fate::Pass;
        }
        match packet.protocol {
            6 => Fate::Told(Reason::OrphanReply),
            _ => Fate::Drop(Reason::OrphanReply),
        }
    }

    fn is_ours(&self, [source, destination]: [IpAddr; 2]) -> bool {
        self.services.iter().any(|service| {
            service.front.0 == destination
                || service.mode == Mode::Nat
                    && service.backends.iter().any(|id| self.backends[*id].address.0 == source)
        })
    }

    fn refuse_if_ours(&self, ends: [IpAddr; 2], reason: Reason) -> Fate {
        if self.is_ours(ends) { Fate::Drop(reason) } else { Fate::Pass }
    }

    /// What no packet may be that is sent this way.
    fn refusal(&self, packet: &Packet<'_>, mode: Mode) -> Option<Fate> {
        let is_rest = matches!(packet.part, Some((_, false)));
        if !is_rest {
            let is_possible = [0x10, 0x02, 0x12, 0x11, 0x04, 0x14].contains(&packet.flags());
            if packet.protocol == 6 && !is_possible {
                return Some(Fate::Drop(Reason::Malformed));
            }
            if packet.lacks_checksum() {
                return Some(Fate::Drop(Reason::NoChecksum));
            }
        }
        let hops = u8::from(mode != Mode::Dsr);
        (packet.ttl <= hops).then_some(Fate::Told(Reason::TtlExceeded))
    }

    /// RFC 1122, section 3.2.1.3; RFC 4291, section 2.4; and nobody who is here.
    fn may_be_client(&self, address: IpAddr) -> bool {
        let is_service = self.services.iter().any(|service| service.front.0 == address);
        let is_unicast = match address {
            IpAddr::V4(v4) => v4.octets()[0] != 0 && !v4.is_loopback() && v4.octets()[0] < 224,
            IpAddr::V6(v6) => {
                !v6.is_multicast() && !v6.is_unicast_link_local() && v6.segments()[..4] != [0; 4]
            }
        };
        is_unicast && !is_service
    }

    fn too_big(&self, packet: &Packet<'_>, flow: Flow) -> Option<Fate> {
        let most = if flow.is_reply {
            CLIENT_MTU
        } else {
            let backend = self.backends[flow.backend];
            backend.mtu - overhead(self.services[flow.service].mode, backend.address.0)
        };
        if packet.length() <= most {
            return None;
        }
        let may_be_split = packet.is_ipv4 && packet.frame[packet.l3 + 6] & 0x40 == 0;
        Some(if may_be_split { Fate::Drop(Reason::TooBig) } else { Fate::Told(Reason::TooBig) })
    }

    /// Sends a packet of a flow on.
    fn send(&mut self, packet: &Packet<'_>, key: Key, mut flow: Flow, seen: &[u8]) -> Fate {
        let Service { front, mode, .. } = self.services[flow.service].clone();
        let mode = if flow.is_reply { Mode::Nat } else { mode };
        if let Some(refused) = self.refusal(packet, mode) {
            return refused;
        }
        let backend = self.backends[flow.backend];
        let (was, tags) = (packet.tags(), if flow.is_reply { flow.tags } else { backend.tags });
        let is_routed = self.way_back(packet).is_some();
        let l3 = if is_routed && was != tags { 14 + 4 * tags.len() } else { packet.l3 };
        if was != tags && !is_routed && !tags.is_empty() {
            return Fate::Drop(Reason::NoEgress);
        }
        if let Some(refused) = self.too_big(packet, flow) {
            return refused;
        }
        if mode == Mode::Nat && !flow.is_reply {
            self.follow(packet, key, backend);
        }
        let mut frame = packet.frame.to_vec();
        if flow.is_reply {
            frame[..6].copy_from_slice(&flow.neighbour);
            frame[6..12].copy_from_slice(&self.macs[0]);
            translate(&mut frame, packet, Some((front.0, front.1)), None);
            return Fate::ToClient(flow.backend, retagged(frame, packet, tags, is_routed));
        }
        frame[..6].copy_from_slice(&backend.mac);
        frame[6..12].copy_from_slice(&self.macs[1]);
        match mode {
            Mode::Nat => translate(&mut frame, packet, None, Some(backend.address)),
            Mode::Dsr => {}
            Mode::Ipip | Mode::Gue(_) => {
                let lot = *flow.lot.get_or_insert_with(|| lot(seen, l3, mode));
                if let Some(flow) = self.flows.get_mut(&key) {
                    flow.lot = Some(lot);
                }
                translate(&mut frame, packet, None, None);
                frame = wrap(&frame, packet, mode, backend, lot);
            }
        }
        Fate::ToBackend(flow.backend, retagged(frame, packet, tags, is_routed))
    }

    /// The VLANs in which this host sends to whoever sent a packet; `None` where it has no device in those that it came in.
    fn way_back(&self, packet: &Packet<'_>) -> Option<&'static [Tag]> {
        let tags = packet.tags();
        if tags.is_empty() { Some(&[]) } else { self.vlans.iter().find(|known| **known == tags).copied() }
    }

    /// Replies go to where the last request came from.
    fn follow(&mut self, packet: &Packet<'_>, (client, port, _, _, protocol): Key, backend: Backend) {
        let (address, own) = backend.address;
        let tags = self.way_back(packet).unwrap_or_default();
        if let Some(reply) = self.flows.get_mut(&(address, own, client, port, protocol)) {
            (reply.tags, reply.neighbour) = (tags, packet.frame[6..12].try_into().unwrap_or_default());
        }
    }
}

/// A frame with these tags in place of its own, which stay where it is in a VLAN that is only switched. The first one's priority
/// goes on (IEEE 802.1Q, 6.9).
fn retagged(frame: Vec<u8>, packet: &Packet<'_>, tags: &[Tag], is_routed: bool) -> Vec<u8> {
    if !is_routed || packet.tags() == tags {
        return frame;
    }
    let priority = if packet.l3 > 14 { u16::from(frame[14] & 0xf0) << 8 } else { 0 };
    let tags = tags.iter().flat_map(|(kind, id)| [kind.to_be_bytes(), (priority | id).to_be_bytes()]);
    let tags: Vec<u8> = tags.flatten().collect();
    [&frame[..12], &tags, &frame[packet.l3 - 2..]].concat()
}

/// Bytes that a mode puts around a packet.
fn overhead(mode: Mode, backend: IpAddr) -> usize {
    let ip = if backend.is_ipv4() { 20 } else { 40 };
    match mode {
        Mode::Nat | Mode::Dsr => 0,
        Mode::Ipip => ip,
        Mode::Gue(_) => ip + 8,
    }
}

/// TTL − 1, and a new source or destination; all sums anew.
fn translate(
    frame: &mut [u8],
    packet: &Packet<'_>,
    source: Option<(IpAddr, u16)>,
    destination: Option<(IpAddr, u16)>,
) {
    let Packet { l3, l4, end, is_ipv4, protocol, .. } = *packet;
    let is_rest = matches!(packet.part, Some((_, false)));
    let width = if is_ipv4 { 4 } else { 16 };
    let addresses = l3 + if is_ipv4 { 12 } else { 8 };
    let before = frame[addresses..addresses + 2 * width].to_vec();
    let ports_before = if is_rest { vec![] } else { frame[l4..l4 + 4].to_vec() };
    for (place, end) in [(0, source), (1, destination)] {
        let Some((address, port)) = end else { continue };
        frame[addresses + place * width..][..width].copy_from_slice(&octets(address));
        if !is_rest {
            frame[l4 + place * 2..][..2].copy_from_slice(&port.to_be_bytes());
        }
    }
    if is_ipv4 {
        frame[l3 + 8] -= 1;
        // A sum that was wrong stays wrong: a router changes it by what it changes.
        let header = l3..l3 + usize::from(frame[l3] & 15) * 4;
        let (old, new) = (&packet.frame[header.clone()], frame[header].to_vec());
        let sum = corrected([old[10], old[11]], &blank(old, 10), &blank(&new, 10));
        frame[l3 + 10..l3 + 12].copy_from_slice(&sum);
    } else {
        frame[l3 + 7] -= 1;
    }
    if is_rest || source.or(destination).is_none() {
        return;
    }
    let place = l4 + if protocol == 6 { 16 } else { 6 };
    let old = [frame[place], frame[place + 1]];
    if protocol == 17 && old == [0, 0] {
        return;
    }
    debug_assert!(place + 2 <= end, "it is sound");
    let after = [&frame[addresses..addresses + 2 * width], &frame[l4..l4 + 4]].concat();
    let mut sum = corrected(old, &[before, ports_before].concat(), &after);
    if protocol == 17 && sum == [0, 0] {
        sum = [0xff, 0xff];
    }
    frame[place..place + 2].copy_from_slice(&sum);
}

/// The bytes with a word of zeros at `at`.
fn blank(bytes: &[u8], at: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + 2].fill(0);
    bytes
}

/// A checksum after what it covers has changed (RFC 1624, equation 3), word by word.
fn corrected(sum: [u8; 2], before: &[u8], after: &[u8]) -> [u8; 2] {
    let mut total = u64::from(!u16::from_be_bytes(sum));
    for (old, new) in before.chunks(2).zip(after.chunks(2)) {
        if old != new {
            total += u64::from(!u16::from_be_bytes([old[0], old[1]]));
            total += u64::from(u16::from_be_bytes([new[0], new[1]]));
        }
    }
    while total > 0xffff {
        total = (total & 0xffff) + (total >> 16);
    }
    (!(total as u16)).to_be_bytes()
}

/// What tells a flow from others, in a wrapped frame.
fn lot(seen: &[u8], l3: usize, mode: Mode) -> u16 {
    match (seen.get(l3).map(|first| first >> 4), mode) {
        (Some(6), _) if seen.len() > l3 + 4 => word(seen, l3 + 2),
        (Some(4), Mode::Gue(_)) if seen.len() > l3 + 22 => word(seen, l3 + 20),
        _ => 0,
    }
}

/// Puts a tunnel's headers around a frame's packet, which has been routed (RFC 2003, RFC 2473, RFC 4213, RFC 6040, GUE variant 1).
fn wrap(frame: &[u8], packet: &Packet<'_>, mode: Mode, backend: Backend, lot: u16) -> Vec<u8> {
    let inner = &frame[packet.l3..packet.end];
    let class = if packet.is_ipv4 { inner[1] } else { inner[0] << 4 | inner[1] >> 4 };
    let (protocol, content) = match mode {
        Mode::Gue(port) => {
            let fields = [0xc000 | lot & 0x3fff, port, inner.len() as u16 + 8, 0].map(u16::to_be_bytes);
            (17, [&fields.concat(), inner].concat())
        }
        _ => (if packet.is_ipv4 { 4 } else { 41 }, inner.to_vec()),
    };
    let (ether_type, header) = match backend.address.0 {
        IpAddr::V4(destination) => {
            let length = (content.len() as u16 + 20).to_be_bytes();
            let start = [0x45, class, length[0], length[1], 0, 0, 0x40, 0, 64, protocol];
            let ends = [octets(backend.outer), destination.octets().to_vec()].concat();
            let sum = checksum(&[&start, &ends]);
            (0x0800u16, [&start[..], &sum, &ends].concat())
        }
        IpAddr::V6(destination) => {
            let first = 6 << 28 | u32::from(class) << 20 | u32::from(lot);
            let length = (content.len() as u16).to_be_bytes();
            let fields = [&first.to_be_bytes()[..], &length, &[protocol, 64]].concat();
            (0x86dd, [fields, octets(backend.outer), destination.octets().to_vec()].concat())
        }
    };
    let behind = &frame[packet.end..];
    [&frame[..packet.l3 - 2], &ether_type.to_be_bytes(), &header, &content, behind].concat()
}
