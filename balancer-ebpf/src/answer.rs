//! Answers that the balancer makes itself, from the packet that it refuses: a RST, an ICMP error.
//!
//! The frame becomes the answer in place and goes back out of the interface it came in by, with the tags it had, to the
//! neighbour it came from.

use balancer_common::{Address, ICMP, ICMPV6, TCP, family};
use network_types::{
    ip::{Ipv4Hdr, Ipv6Hdr},
    tcp::TcpHdr,
};

use crate::{
    Packet,
    checksum::Sum,
    packet::{read, write},
    parse::{Network, addresses, network, tcp},
};

/// The TTL of what we send.
const TTL: u8 = 64;
const DONT_FRAGMENT: [u8; 2] = [0x40, 0];
/// How much of a refused packet's payload an ICMP error quotes: its ports and, of TCP, its sequence number (RFC 792).
const QUOTED_PAYLOAD: usize = 8;
const ICMP_HEADER: usize = 8;
/// An Ethernet header with two tags; what is shorter is followed by an IP header, which is longer.
pub const LINK: usize = 22;

/// An ICMP error: its type and code in either family.
pub struct Error {
    ipv4: [u8; 2],
    ipv6: [u8; 2],
}

/// RFC 792; RFC 4443, section 3.1.
pub const PORT_UNREACHABLE: Error = Error { ipv4: [3, 3], ipv6: [1, 4] };
/// RFC 792; RFC 4443, section 3.3.
pub const TIME_EXCEEDED: Error = Error { ipv4: [11, 0], ipv6: [3, 0] };
/// RFC 1191; RFC 4443, section 3.2.
pub const TOO_BIG: Error = Error { ipv4: [3, 4], ipv6: [2, 0] };

/// A refused packet whose sender may be told.
pub struct Refused {
    /// IP protocol number.
    pub protocol: u8,
    network: Network,
    source: Address,
    destination: Address,
    /// Bytes of the IP header.
    header: usize,
    /// Bytes behind it.
    payload: usize,
    may_be_split: bool,
}

impl Refused {
    /// `None` unless the sender is one host elsewhere (RFC 1122, section 3.2.2), and the header that says so is whole. One
    /// with options is not summed up, extension headers are not followed again, and so both are not answered. Neither is a
    /// fragment of IPv4 that is not the first one.
    #[inline(always)]
    pub fn of<P: Packet>(packet: &P) -> Option<Refused> {
        let network = network(packet)?;
        let [source, destination] = addresses(packet)?;
        if !is_unicast(&source) || source == destination {
            return None;
        }
        let mut may_be_split = false;
        let (protocol, header, payload) = if network.family == family::IPV4 {
            let ip: [u8; Ipv4Hdr::LEN] = read(packet, network.l3)?;
            let [version, _, l0, l1, _, _, fragment, place, _, protocol, ..] = ip;
            let is_later_part = fragment & 0x1f | place != 0;
            if version != 0x45 || is_later_part || Sum::default().and(ip).checksum() != [0, 0] {
                return None;
            }
            may_be_split = fragment & DONT_FRAGMENT[0] == 0;
            (protocol, Ipv4Hdr::LEN, usize::from(u16::from_be_bytes([l0, l1])).wrapping_sub(Ipv4Hdr::LEN))
        } else {
            let [_, _, _, _, l0, l1, next, _]: [u8; 8] = read(packet, network.l3)?;
            (next, Ipv6Hdr::LEN, usize::from(u16::from_be_bytes([l0, l1])))
        };
        Some(Refused { protocol, network, source, destination, header, payload, may_be_split })
    }

    /// Whether routers may split it into fragments, so that its sender need not be told that it is too big.
    #[inline(always)]
    pub fn may_be_split(&self) -> bool {
        self.may_be_split
    }

    /// The sum of a pseudo-header of the answer (RFC 793, RFC 8200 section 8.1). What IPv4 addresses have in common here
    /// adds nothing.
    #[inline(always)]
    fn pseudo_sum(&self, protocol: u8, length: usize) -> Sum {
        let length = (length as u16).to_be_bytes();
        Sum::default().and(self.source).and(self.destination).and([0, protocol]).and(length)
    }

    /// Writes the answer's IP header, for so many bytes behind it; where these start.
    #[inline(always)]
    fn write_header<P: Packet>(&self, packet: &P, protocol: u8, payload: usize) -> Option<usize> {
        let l3 = self.network.l3;
        if self.network.family == family::IPV4 {
            let ([.., s0, s1, s2, s3], [.., d0, d1, d2, d3]) = (self.destination, self.source);
            let [l0, l1] = ((Ipv4Hdr::LEN + payload) as u16).to_be_bytes();
            let [f0, f1] = DONT_FRAGMENT;
            let mut header =
                [0x45, 0, l0, l1, 0, 0, f0, f1, TTL, protocol, 0, 0, s0, s1, s2, s3, d0, d1, d2, d3];
            [header[10], header[11]] = Sum::default().and(header).checksum();
            write(packet, l3, header)?;
        } else {
            let [l0, l1] = (payload as u16).to_be_bytes();
            write(packet, l3, [0x60, 0, 0, 0, l0, l1, protocol, TTL])?;
            write(packet, l3 + 8, self.destination)?;
            write(packet, l3 + 24, self.source)?;
        }
        Some(l3 + self.header)
    }
}

/// Turns a TCP segment into the RST that answers it (RFC 9293, section 3.10.7.1). `None`: it must not be answered, or
/// could not be.
#[inline(always)]
pub fn reset<P: Packet>(packet: &P, refused: &Refused) -> Option<()> {
    let l4 = refused.network.l3 + refused.header;
    let segment: [u8; TcpHdr::LEN] = read(packet, l4)?;
    let [s0, s1, d0, d1, q0, q1, q2, q3, a0, a1, a2, a3, offset, flags, ..] = segment;
    if flags & tcp::RST != 0 {
        return None;
    }
    let (sequence, acknowledgement, flags) = if flags & tcp::ACK != 0 {
        ([a0, a1, a2, a3], [0; 4], tcp::RST)
    } else {
        let payload = (refused.payload as u32).wrapping_sub(u32::from(offset >> 4) * 4);
        let controls = u32::from(flags & tcp::SYN != 0) + u32::from(flags & tcp::FIN != 0);
        let next = u32::from_be_bytes([q0, q1, q2, q3]).wrapping_add(payload).wrapping_add(controls);
        ([0; 4], next.to_be_bytes(), tcp::RST | tcp::ACK)
    };
    let [q0, q1, q2, q3] = sequence;
    let [a0, a1, a2, a3] = acknowledgement;
    let mut reset = [d0, d1, s0, s1, q0, q1, q2, q3, a0, a1, a2, a3, 5 << 4, flags, 0, 0, 0, 0, 0, 0];
    let sum = refused.pseudo_sum(TCP, TcpHdr::LEN).and(reset);
    [reset[16], reset[17]] = sum.checksum();

    turn_around(packet)?;
    if !packet.cut(l4 + TcpHdr::LEN) {
        return None;
    }
    let l4 = refused.write_header(packet, TCP, TcpHdr::LEN)?;
    write(packet, l4, reset)
}

/// Turns a packet into the ICMP error that answers it (RFC 1122, section 3.2.2; RFC 4443, section 2.4); `most` is the
/// largest packet that would have passed, where that is what it says.
#[inline(always)]
pub fn error<P: Packet>(packet: &P, refused: &Refused, error: &Error, most: u16) -> Option<()> {
    let (protocol, [kind, code]) =
        if refused.network.family == family::IPV4 { (ICMP, error.ipv4) } else { (ICMPV6, error.ipv6) };
    let l3 = refused.network.l3;
    let quoted = refused.header + QUOTED_PAYLOAD;
    let in_front = refused.header + ICMP_HEADER;
    turn_around(packet)?;
    let link: [u8; LINK] = read(packet, 0)?;
    if !packet.shift(-(in_front as i32)) || !packet.cut(l3 + in_front + quoted) {
        return None;
    }
    write(packet, 0, link)?;
    let icmp = refused.write_header(packet, protocol, ICMP_HEADER + quoted)?;
    let mut sum = match protocol {
        ICMPV6 => refused.pseudo_sum(ICMPV6, ICMP_HEADER + quoted),
        _ => Sum::default(),
    };
    let [m0, m1] = most.to_be_bytes();
    sum = sum.and([kind, code]).and([m0, m1]);
    for word in 0..MOST_QUOTED / 2 {
        if word * 2 >= quoted {
            break;
        }
        sum = sum.and(read::<P, [u8; 2]>(packet, icmp + ICMP_HEADER + word * 2)?);
    }
    let [c0, c1] = sum.checksum();
    write(packet, icmp, [kind, code, c0, c1, 0, 0, m0, m1])
}

/// The longer header, and what follows it.
const MOST_QUOTED: usize = Ipv6Hdr::LEN + QUOTED_PAYLOAD;

/// Whether an address can be that of one host that is not this one, and whose packets routers carry (RFC 1122, section
/// 3.2.1.3; RFC 4291, section 2.4).
#[inline(always)]
pub fn is_unicast(address: &Address) -> bool {
    let [high, low]: [u64; 2] = bytemuck::cast(*address);
    let low = u64::from_be(low);
    if high == 0 {
        let first = (low >> 24) as u8;
        // IPv4; `::` and `::1` are none, and neither are other addresses of this prefix.
        return low >> 32 == 0xffff && first != 0 && first != 127 && first < 224;
    }
    let [first, second, ..] = *address;
    let is_link_local = first == 0xfe && second & 0xc0 == 0x80;
    first != 0xff && !is_link_local
}

/// Swaps the MACs.
#[inline(always)]
pub fn turn_around<P: Packet>(packet: &P) -> Option<()> {
    let macs: [u8; 12] = read(packet, 0)?;
    let [a, b, c, d, e, f, g, h, i, j, k, l] = macs;
    write(packet, 0, [g, h, i, j, k, l, a, b, c, d, e, f])
}
