//! From a frame to its flow key. Nothing is believed that was not compared with the frame's end.

use core::{mem::offset_of, ptr};

use balancer_common::{Address, FlowKey, FragmentKey, ICMP, ICMPV6, Reason, TCP, UDP, family, mapped, vlan};
use network_types::{
    eth::{EthHdr, EtherType},
    ip::{Ipv4Hdr, Ipv6Hdr},
    tcp::TcpHdr,
    udp::UdpHdr,
};

use crate::{Environment, Packet, packet::read, rounds::Rounds, table};

/// A TCP segment or UDP datagram, and where its headers lie in the frame.
pub struct Parsed {
    /// The Ethernet header.
    pub ethernet: *mut EthHdr,
    /// The IP header, without options or extension headers: 20 bytes, of IPv6 40 (`key.family` tells which).
    pub ip: *mut u8,
    /// Offset of the TCP or UDP header in the frame.
    pub l4: usize,
    /// Source and destination port.
    pub ports: *mut [u8; 4],
    /// The TCP or UDP checksum.
    pub checksum: *mut [u8; 2],
    /// Addresses, ports and protocol.
    pub key: FlowKey,
    /// IP total length, in bytes; of IPv6, the header's 40 included.
    pub length: u32,
    /// The frame's VLAN tags (`vlan::*`), also those with a priority alone.
    pub vlan: u32,
    /// Bytes that the application sent.
    pub payload: u16,
    /// Time to live, or hop limit, as it arrived.
    pub ttl: u8,
    /// TCP flags (`tcp::*`); 0 for UDP.
    pub tcp_flags: u8,
    /// It is the first fragment of a larger datagram.
    pub is_first_part: bool,
    /// It is another one: ports, checksum, payload and TCP flags mean nothing.
    pub is_rest: bool,
}

impl Parsed {
    /// Source address.
    #[inline(always)]
    pub fn source(&self) -> Address {
        if self.key.family == family::IPV4 {
            return mapped(self.key.source);
        }
        // SAFETY: of IPv6, `parse` checked that the whole header lies in the frame.
        unsafe { (*self.ip.cast::<Ipv6Hdr>()).src_addr }
    }

    /// Destination address.
    #[inline(always)]
    pub fn destination(&self) -> Address {
        if self.key.family == family::IPV4 {
            return mapped(self.key.destination);
        }
        // SAFETY: as above.
        unsafe { (*self.ip.cast::<Ipv6Hdr>()).dst_addr }
    }

    /// One of the four words that the addresses of an IPv6 packet are.
    #[inline(always)]
    pub fn address_word(&self, word: usize) -> u64 {
        const { assert!(offset_of!(Ipv6Hdr, dst_addr) == offset_of!(Ipv6Hdr, src_addr) + 16) };
        // SAFETY: of IPv6, `parse` checked that the whole header lies in the frame.
        unsafe { self.ip.add(offset_of!(Ipv6Hdr, src_addr)).cast::<u64>().add(word & 3).read_unaligned() }
    }

    /// The TCP or UDP checksum, as it lies in the frame.
    #[inline(always)]
    pub fn checksum(&self) -> [u8; 2] {
        // SAFETY: `parse` checked that both bytes lie in the frame.
        unsafe { ptr::read_unaligned(self.checksum) }
    }
}

/// Why a frame has no flow key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unparsed {
    /// Nothing that a service could be meant by: the kernel's business.
    Foreign,
    /// A fragment, not the first one, of a datagram that may be a flow's.
    Rest,
    /// ICMP or ICMPv6.
    Control,
    /// ARP, or ICMPv6 to a group: it may ask for a neighbour.
    Neighbour,
    /// An IP packet, but of no use for this reason: to be dropped if either of its addresses is ours.
    Refused(Reason),
}

/// The TCP flags (RFC 9293) that matter to a flow's life.
pub mod tcp {
    /// No more data from the sender.
    pub const FIN: u8 = 0x01;
    /// Synchronize sequence numbers.
    pub const SYN: u8 = 0x02;
    /// Reset the connection.
    pub const RST: u8 = 0x04;
    /// The acknowledgement number counts.
    pub const ACK: u8 = 0x10;
    /// All of them.
    pub const ALL: u8 = FIN | SYN | RST | ACK;

    /// Whether any TCP sends this combination of flags.
    #[inline(always)]
    pub const fn is_possible(flags: u8) -> bool {
        const SYN_ACK: u8 = SYN | ACK;
        const RST_ACK: u8 = RST | ACK;
        const FIN_ACK: u8 = FIN | ACK;
        matches!(flags & ALL, ACK | SYN | SYN_ACK | FIN_ACK | RST | RST_ACK)
    }
}

/// A minimum size and a place, in which TCP and UDP differ.
struct L4 {
    header: usize,
    checksum: usize,
}

const TCP_LAYOUT: L4 = L4 { header: TcpHdr::LEN, checksum: offset_of!(TcpHdr, check) };
const UDP_LAYOUT: L4 = L4 { header: UdpHdr::LEN, checksum: offset_of!(UdpHdr, check) };
/// Offset of the byte that holds a TCP header's length; the flags follow it.
const TCP_DATA_OFFSET: usize = 12;

const MORE_FRAGMENTS: u16 = 0x2000;
const FRAGMENT_OFFSET: u16 = 0x1fff;

/// Bytes of an IEEE 802.1Q tag.
pub const TAG: usize = 4;
/// Offset of the EtherType.
pub const ETHER_TYPE: usize = 12;
/// EtherTypes that stand in front of a tag (IEEE 802.1Q, 802.1ad), as they lie in the frame.
pub const TAGGED: [[u8; 2]; 2] = [[0x81, 0x00], [0x88, 0xa8]];

/// Where the IP header of a frame is, and of which family the frame says that it is.
#[derive(Clone, Copy)]
pub struct Network {
    /// Offset of the header in the frame: 14, and 4 for each of at most two VLAN tags.
    pub l3: usize,
    /// `family::*`.
    pub family: u8,
}

/// What Ethernet says of a frame.
pub struct Link {
    /// Offset of what is behind its header and tags, at most two.
    pub l3: usize,
    /// The EtherType of that, as it lies in the frame.
    pub ether_type: [u8; 2],
    /// The tags (`vlan::*`), also those with a priority alone.
    pub vlan: u32,
}

/// Looks behind the tags of a frame.
#[inline(always)]
pub fn link<P: Packet>(packet: &P) -> Option<Link> {
    let untagged = Link { l3: EthHdr::LEN, ether_type: read(packet, ETHER_TYPE)?, vlan: vlan::NONE };
    // Written out: most frames have no tag.
    if !TAGGED.contains(&untagged.ether_type) {
        return Some(untagged);
    }
    let tagged = behind_tag(packet, untagged)?;
    if TAGGED.contains(&tagged.ether_type) { behind_tag(packet, tagged) } else { Some(tagged) }
}

#[inline(always)]
fn behind_tag<P: Packet>(packet: &P, Link { l3, ether_type, vlan }: Link) -> Option<Link> {
    let [priority, id, e0, e1]: [u8; TAG] = read(packet, l3)?;
    // No branches: the verifier follows all that comes behind once for each way.
    let is_service = u32::from(ether_type[1] >> 7);
    let tag = is_service << 12 | u32::from(priority & 0x0f) << 8 | u32::from(id);
    Some(Link { l3: l3 + TAG, ether_type: [e0, e1], vlan: vlan << vlan::BITS | tag })
}

/// The IP packet of a frame. `None` where there is none.
#[inline(always)]
pub fn network<P: Packet>(packet: &P) -> Option<Network> {
    match link(packet)? {
        Link { l3, ether_type: IPV4, .. } => Some(Network { l3, family: family::IPV4 }),
        Link { l3, ether_type: IPV6, .. } => Some(Network { l3, family: family::IPV6 }),
        _ => None,
    }
}

const IPV4: [u8; 2] = (EtherType::Ipv4 as u16).to_ne_bytes();
/// The EtherType of IPv6, as it lies in the frame.
pub const IPV6: [u8; 2] = (EtherType::Ipv6 as u16).to_ne_bytes();
/// The same of ARP.
pub const ARP: [u8; 2] = (EtherType::Arp as u16).to_ne_bytes();

/// The EtherType of a family, as it lies in the frame.
#[inline(always)]
pub const fn ether_type(family: u8) -> [u8; 2] {
    if family == family::IPV4 { IPV4 } else { IPV6 }
}

/// Source and destination address of an IP packet.
#[inline(always)]
pub fn addresses<P: Packet>(packet: &P) -> Option<[Address; 2]> {
    let Network { l3, family } = network(packet)?;
    if family == family::IPV4 {
        let ip: Ipv4Hdr = read(packet, l3)?;
        return Some([mapped(ip.src_addr), mapped(ip.dst_addr)]);
    }
    let ip: Ipv6Hdr = read(packet, l3)?;
    Some([ip.src_addr, ip.dst_addr])
}

/// What the fragments of one datagram have in common (RFC 791, RFC 8200 section 4.5). `None` for what is no fragment.
#[inline(always)]
pub fn fragment_key<P: Packet, E: Environment>(packet: &P, environment: &E) -> Option<FragmentKey> {
    let Network { l3, family } = network(packet)?;
    if family == family::IPV4 {
        let ip: Ipv4Hdr = read(packet, l3)?;
        return Some(FragmentKey {
            source: ip.src_addr,
            destination: ip.dst_addr,
            identification: [0, 0, ip.id[0], ip.id[1]],
            protocol: ip.proto,
            family,
            reserved: [0; 2],
        });
    }
    let next: [u8; 1] = read(packet, l3 + offset_of!(Ipv6Hdr, next_hdr))?;
    let start = Upper { l4: l3 + Ipv6Hdr::LEN, protocol: next[0], fragment: 0, part: Part::Whole };
    let upper = environment.upper(packet, start).ok()?;
    if upper.fragment == 0 {
        return None;
    }
    let [source, destination] = addresses(packet)?;
    Some(FragmentKey {
        source: table::digest(&source, environment.seed()),
        destination: table::digest(&destination, environment.seed()),
        identification: read(packet, upper.fragment + 4)?,
        protocol: 0,
        family,
        reserved: [0; 2],
    })
}

/// A fragment that is not the first one, of which only the IP header can be looked at; `key` is that of its flow.
#[inline(always)]
pub fn rest<P: Packet>(packet: &P, key: FlowKey) -> Option<Parsed> {
    let Link { l3, ether_type, vlan } = link(packet)?;
    let family = match ether_type {
        IPV4 => family::IPV4,
        IPV6 => family::IPV6,
        _ => return None,
    };
    let (ip, length, ttl) = if family == family::IPV4 {
        let ip: *mut Ipv4Hdr = packet.at(l3)?;
        // SAFETY: `at` checked that the header lies in the frame.
        let (length, ttl) = unsafe { ((*ip).tot_len, (*ip).ttl) };
        (ip.cast::<u8>(), u32::from(u16::from_be_bytes(length)), ttl)
    } else {
        let ip: *mut Ipv6Hdr = packet.at(l3)?;
        // SAFETY: as above.
        let (length, ttl) = unsafe { ((*ip).payload_len, (*ip).hop_limit) };
        (ip.cast::<u8>(), Ipv6Hdr::LEN as u32 + u32::from(u16::from_be_bytes(length)), ttl)
    };
    Some(Parsed {
        ethernet: packet.at(0)?,
        ip,
        l4: 0,
        ports: ptr::null_mut(),
        checksum: ptr::null_mut(),
        // By the frame's own, the verifier knows how long the header is.
        key: FlowKey { family, ..key },
        length,
        vlan,
        payload: 0,
        ttl,
        tcp_flags: 0,
        is_first_part: false,
        is_rest: true,
    })
}

/// What the IP header says of the rest.
struct Datagram {
    ip: *mut u8,
    /// Offset of what follows all IP headers.
    l4: usize,
    /// Offset of its end.
    end: usize,
    source: [u8; 4],
    destination: [u8; 4],
    length: u32,
    protocol: u8,
    ttl: u8,
    is_first_part: bool,
}

/// Finds the flow key of a frame.
#[inline(always)]
pub fn parse<P: Packet, E: Environment>(packet: &P, environment: &E) -> Result<Parsed, Unparsed> {
    let ethernet: *mut EthHdr = packet.at(0).ok_or(Unparsed::Foreign)?;
    // SAFETY: `at` checked that the header lies in the frame.
    let EthHdr { dst_addr, src_addr, .. } = unsafe { ptr::read_unaligned(ethernet) };
    // A group is nobody's address, and nobody that replies could be sent to.
    let is_group = (dst_addr[0] | src_addr[0]) & 1 == 1;
    let Link { l3, ether_type, vlan } = link(packet).ok_or(Unparsed::Foreign)?;
    if is_group {
        return Err(if may_ask(packet, l3, ether_type) { Unparsed::Neighbour } else { Unparsed::Foreign });
    }
    let (family, datagram) = match ether_type {
        IPV4 => (family::IPV4, ipv4(packet, l3)?),
        IPV6 if environment.has_ipv6() => (family::IPV6, ipv6(packet, environment, l3)?),
        ARP => return Err(Unparsed::Neighbour),
        _ => return Err(Unparsed::Foreign),
    };
    segment(packet, ethernet, (family, vlan), &datagram)
}

/// Whether what is sent to a group may ask for a neighbour.
#[inline(always)]
fn may_ask<P: Packet>(packet: &P, l3: usize, ether_type: [u8; 2]) -> bool {
    let next = read(packet, l3 + offset_of!(Ipv6Hdr, next_hdr));
    ether_type == ARP || (ether_type == IPV6 && next == Some([ICMPV6]))
}

const MALFORMED: Unparsed = Unparsed::Refused(Reason::Malformed);

#[inline(always)]
fn ipv4<P: Packet>(packet: &P, l3: usize) -> Result<Datagram, Unparsed> {
    let ip: *mut Ipv4Hdr = packet.at(l3).ok_or(Unparsed::Foreign)?;
    // SAFETY: `at` checked that the header lies in the frame.
    let header = unsafe { ptr::read_unaligned(ip) };
    let header_length = usize::from(header.vihl & 0x0f) * 4;
    let length = u16::from_be_bytes(header.tot_len);
    let end = l3 + usize::from(length);
    if header.vihl >> 4 != 4
        || header_length < Ipv4Hdr::LEN
        || usize::from(length) < header_length
        || !packet.has(end)
    {
        return Err(MALFORMED);
    }
    let fragment = u16::from_be_bytes(header.frags);
    if fragment & FRAGMENT_OFFSET != 0 {
        return Err(if matches!(header.proto, TCP | UDP) { Unparsed::Rest } else { Unparsed::Foreign });
    }
    Ok(Datagram {
        ip: ip.cast(),
        l4: l3 + header_length,
        end,
        source: header.src_addr,
        destination: header.dst_addr,
        length: u32::from(length),
        protocol: header.proto,
        ttl: header.ttl,
        is_first_part: fragment & MORE_FRAGMENTS != 0,
    })
}

#[inline(always)]
fn ipv6<P: Packet, E: Environment>(packet: &P, environment: &E, l3: usize) -> Result<Datagram, Unparsed> {
    let ip: *mut Ipv6Hdr = packet.at(l3).ok_or(Unparsed::Foreign)?;
    // SAFETY: `at` checked that the header lies in the frame.
    let (version, length, next, ttl) =
        unsafe { ((*ip).vcf[0] >> 4, (*ip).payload_len, (*ip).next_hdr, (*ip).hop_limit) };
    let length = Ipv6Hdr::LEN + usize::from(u16::from_be_bytes(length));
    let end = l3 + length;
    if version != 6 || !packet.has(end) {
        return Err(MALFORMED);
    }
    let mut upper = Upper { l4: l3 + Ipv6Hdr::LEN, protocol: next, fragment: 0, part: Part::Whole };
    if !matches!(next, TCP | UDP) {
        upper = environment.upper(packet, upper)?;
    }
    if upper.l4 > end {
        return Err(MALFORMED);
    }
    if upper.part == Part::Rest {
        return Err(Unparsed::Rest);
    }
    // SAFETY: as above.
    let (source, destination) = unsafe { (&(*ip).src_addr, &(*ip).dst_addr) };
    Ok(Datagram {
        ip: ip.cast(),
        l4: upper.l4,
        end,
        source: table::digest(source, environment.seed()),
        destination: table::digest(destination, environment.seed()),
        length: length as u32,
        protocol: upper.protocol,
        ttl,
        is_first_part: upper.part == Part::First,
    })
}

/// What follows the headers of IPv6.
#[derive(Clone, Copy)]
pub struct Upper {
    /// Where it starts in the frame.
    pub l4: usize,
    /// What it is: a protocol number.
    pub protocol: u8,
    /// Where the fragment header is, if there is one.
    pub fragment: usize,
    /// Which part of a datagram this packet is.
    pub part: Part,
}

/// A packet as a part of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Part {
    /// It is all of it.
    Whole = 0,
    /// It is the first of more.
    First = 1,
    /// It is another one.
    Rest = 2,
}

impl Upper {
    /// As one number: what a function of the kernel's program takes and returns; of a failure, of bit 32 on.
    #[inline(always)]
    pub fn to_number(found: Result<Upper, Unparsed>) -> u64 {
        match found {
            Ok(Upper { l4, protocol, fragment, part }) => {
                let [l4, fragment] = [l4, fragment].map(|place| place as u64 & 0xfff);
                fragment << 28 | l4 << 16 | u64::from(protocol) << 8 | part as u64
            }
            Err(Unparsed::Refused(reason)) => 2 << 40 | reason as u64,
            Err(_) => 1 << 40,
        }
    }

    /// By its number.
    #[inline(always)]
    pub fn from_number(number: u64) -> Result<Upper, Unparsed> {
        let part = match number as u8 {
            0 => Part::Whole,
            1 => Part::First,
            _ => Part::Rest,
        };
        match number >> 40 {
            // Bounded for the verifier.
            0 => Ok(Upper {
                l4: (number >> 16 & 0x7ff) as usize,
                protocol: (number >> 8) as u8,
                fragment: (number >> 28 & 0x7ff) as usize,
                part,
            }),
            1 => Err(Unparsed::Foreign),
            _ => Err(Unparsed::Refused(Reason::from_index(number as u32).unwrap_or(Reason::Malformed))),
        }
    }
}

/// Extension headers (RFC 8200, section 4; RFC 4302).
mod extension {
    pub const HOP_BY_HOP: u8 = 0;
    pub const ROUTING: u8 = 43;
    pub const FRAGMENT: u8 = 44;
    pub const AUTHENTICATION: u8 = 51;
    pub const DESTINATION: u8 = 60;
}

/// How many extension headers are followed.
const MOST_EXTENSIONS: usize = 10;
/// How far from its start the headers of a frame may reach.
const MOST_HEADERS: usize = 1 << 10;

/// Follows the chain of extension headers that begins at `upper`.
#[inline(always)]
pub fn upper<P: Packet>(packet: &P, mut upper: Upper) -> Result<Upper, Unparsed> {
    for _ in Rounds::new(MOST_EXTENSIONS + 1) {
        if upper.l4 > MOST_HEADERS {
            break;
        }
        let is_extension = matches!(
            upper.protocol,
            extension::HOP_BY_HOP
                | extension::ROUTING
                | extension::FRAGMENT
                | extension::AUTHENTICATION
                | extension::DESTINATION
        );
        if !is_extension {
            return Ok(upper);
        }
        let [next, length, third, fourth]: [u8; 4] = read(packet, upper.l4).ok_or(MALFORMED)?;
        let mut size = (usize::from(length) + 1) * 8;
        match upper.protocol {
            extension::ROUTING if fourth != 0 => break,
            extension::AUTHENTICATION => size = (usize::from(length) + 2) * 4,
            extension::FRAGMENT => {
                let place = u16::from_be_bytes([third, fourth]);
                size = 8;
                upper.fragment = upper.l4;
                if place >> 3 != 0 {
                    return Ok(Upper { protocol: next, l4: upper.l4 + size, part: Part::Rest, ..upper });
                }
                if place & 1 != 0 {
                    upper.part = Part::First;
                }
            }
            _ => {}
        }
        upper.protocol = next;
        upper.l4 += size;
    }
    Err(Unparsed::Refused(Reason::ExtensionHeaders))
}

#[inline(always)]
fn segment<P: Packet>(
    packet: &P,
    ethernet: *mut EthHdr,
    (family, vlan): (u8, u32),
    datagram: &Datagram,
) -> Result<Parsed, Unparsed> {
    let Datagram { ip, l4, end, source, destination, length, protocol, ttl, is_first_part } = *datagram;
    let layout = match protocol {
        TCP => TCP_LAYOUT,
        UDP => UDP_LAYOUT,
        ICMP if family == family::IPV4 && !is_first_part => return Err(Unparsed::Control),
        ICMPV6 if family != family::IPV4 && !is_first_part => return Err(Unparsed::Control),
        _ => return Err(Unparsed::Foreign),
    };
    let segment = end - l4;
    if segment < layout.header {
        return Err(MALFORMED);
    }
    let mut header_end = layout.header;
    let ports: *mut [u8; 4] = packet.at(l4).ok_or(MALFORMED)?;
    let checksum: *mut [u8; 2] = packet.at(l4 + layout.checksum).ok_or(MALFORMED)?;
    let mut tcp_flags = 0;
    if protocol == TCP {
        let [offset, flags]: [u8; 2] = read(packet, l4 + TCP_DATA_OFFSET).ok_or(MALFORMED)?;
        let tcp_header = usize::from(offset >> 4) * 4;
        if tcp_header < TcpHdr::LEN || (tcp_header > segment && !is_first_part) {
            return Err(MALFORMED);
        }
        header_end = tcp_header;
        tcp_flags = flags;
    } else {
        let udp_length = read(packet, l4 + offset_of!(UdpHdr, len)).ok_or(MALFORMED)?;
        let udp_length = usize::from(u16::from_be_bytes(udp_length));
        if udp_length < UdpHdr::LEN || (udp_length > segment && !is_first_part) {
            return Err(MALFORMED);
        }
    }
    // SAFETY: `at` checked that the four bytes lie in the frame.
    let [s0, s1, d0, d1] = unsafe { ptr::read_unaligned(ports) };
    let key = FlowKey {
        source,
        destination,
        source_port: [s0, s1],
        destination_port: [d0, d1],
        protocol,
        family,
        reserved: [0; 2],
    };
    // A first fragment may hold less than the header.
    let payload = segment.saturating_sub(header_end) as u16;
    Ok(Parsed {
        ethernet,
        ip,
        l4,
        ports,
        checksum,
        key,
        length,
        vlan,
        payload,
        ttl,
        tcp_flags,
        is_first_part,
        is_rest: false,
    })
}
