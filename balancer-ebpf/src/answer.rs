//! Answers that the balancer makes itself, from the packet that it refuses: a RST, an ICMP error.
//!
//! The frame becomes the answer in place and goes back out of the interface it came in by, to the neighbour it came
//! from.

use balancer_common::{ICMP, TCP};
use network_types::{eth::EthHdr, ip::Ipv4Hdr, tcp::TcpHdr};

use crate::{
    Packet,
    checksum::Sum,
    packet::{read, write},
    parse::tcp,
};

/// Where the IP header of a parsed packet lies.
const L3: usize = EthHdr::LEN;
/// The TTL of what we send.
const TTL: u8 = 64;
const DONT_FRAGMENT: [u8; 2] = [0x40, 0];
/// ICMP type 3, destination unreachable, and its code 3, port unreachable (RFC 792).
const UNREACHABLE: u8 = 3;
const PORT: u8 = 3;
/// How much of a refused packet's payload an ICMP error quotes (RFC 792).
const QUOTED_PAYLOAD: usize = 8;
const ICMP_HEADER: usize = 8;

/// Turns a TCP segment into the RST that answers it (RFC 9293, section 3.10.7.1). `None`: it must not be answered, or
/// could not be.
#[inline(always)]
pub fn reset<P: Packet>(packet: &P) -> Option<()> {
    let ip: Ipv4Hdr = read(packet, L3)?;
    let header = usize::from(ip.vihl & 0x0f) * 4;
    let segment: [u8; TcpHdr::LEN] = read(packet, L3 + header)?;
    let [s0, s1, d0, d1, q0, q1, q2, q3, a0, a1, a2, a3, offset, flags, ..] = segment;
    if flags & tcp::RST != 0 || !is_answerable(&ip) {
        return None;
    }
    let (sequence, acknowledgement, flags) = if flags & tcp::ACK != 0 {
        ([a0, a1, a2, a3], [0; 4], tcp::RST)
    } else {
        let total = u32::from(u16::from_be_bytes(ip.tot_len));
        let payload = total.wrapping_sub(header as u32).wrapping_sub(u32::from(offset >> 4) * 4);
        let controls = u32::from(flags & tcp::SYN != 0) + u32::from(flags & tcp::FIN != 0);
        let next = u32::from_be_bytes([q0, q1, q2, q3]).wrapping_add(payload).wrapping_add(controls);
        ([0; 4], next.to_be_bytes(), tcp::RST | tcp::ACK)
    };
    let [q0, q1, q2, q3] = sequence;
    let [a0, a1, a2, a3] = acknowledgement;
    let mut reset = [d0, d1, s0, s1, q0, q1, q2, q3, a0, a1, a2, a3, 5 << 4, flags, 0, 0, 0, 0, 0, 0];
    let sum = Sum::default().and(ip.dst_addr).and(ip.src_addr).and([0, TCP, 0, TcpHdr::LEN as u8]).and(reset);
    [reset[16], reset[17]] = sum.checksum();

    turn_around(packet)?;
    if !packet.reshape(0, L3 + Ipv4Hdr::LEN + TcpHdr::LEN) {
        return None;
    }
    write(packet, L3, ip_header(TCP, ip.dst_addr, ip.src_addr, TcpHdr::LEN))?;
    write(packet, L3 + Ipv4Hdr::LEN, reset)
}

/// Turns a packet into the ICMP port unreachable that answers it (RFC 1122, section 4.1.3.1).
#[inline(always)]
pub fn port_unreachable<P: Packet>(packet: &P) -> Option<()> {
    let ip: Ipv4Hdr = read(packet, L3)?;
    if !is_answerable(&ip) {
        return None;
    }
    turn_around(packet)?;
    let ethernet: [u8; EthHdr::LEN] = read(packet, 0)?;
    let quoted = usize::from(ip.vihl & 0x0f) * 4 + QUOTED_PAYLOAD;
    let in_front = Ipv4Hdr::LEN + ICMP_HEADER;
    if !packet.reshape(-(in_front as i32), L3 + in_front + quoted) {
        return None;
    }
    write(packet, 0, ethernet)?;
    write(packet, L3, ip_header(ICMP, ip.dst_addr, ip.src_addr, ICMP_HEADER + quoted))?;
    let mut sum = Sum::default().and([UNREACHABLE, PORT]);
    for word in 0..MOST_QUOTED / 2 {
        if word * 2 >= quoted {
            break;
        }
        sum = sum.and(read::<P, [u8; 2]>(packet, L3 + in_front + word * 2)?);
    }
    let [c0, c1] = sum.checksum();
    write(packet, L3 + Ipv4Hdr::LEN, [UNREACHABLE, PORT, c0, c1, 0, 0, 0, 0])
}

/// The longest IP header, and what follows it.
const MOST_QUOTED: usize = 60 + QUOTED_PAYLOAD;

/// Whether the sender of a packet may be answered: it is one host elsewhere (RFC 1122, section 3.2.2), and the header
/// that says so is whole. A header with options is not summed up, and so not answered.
#[inline(always)]
fn is_answerable(ip: &Ipv4Hdr) -> bool {
    // SAFETY: the header consists of bytes alone.
    let header: [u8; Ipv4Hdr::LEN] = unsafe { core::mem::transmute(*ip) };
    is_unicast(ip.src_addr)
        && ip.src_addr != ip.dst_addr
        && ip.vihl == 0x45
        && Sum::default().and(header).checksum() == [0, 0]
}

/// Whether an address can be that of one host that is not this one (RFC 1122, section 3.2.1.3).
#[inline(always)]
pub fn is_unicast(address: [u8; 4]) -> bool {
    let [first, ..] = address;
    first != 0 && first != 127 && first < 224
}

/// Swaps the MACs.
#[inline(always)]
fn turn_around<P: Packet>(packet: &P) -> Option<()> {
    let macs: [u8; 12] = read(packet, 0)?;
    let [a, b, c, d, e, f, g, h, i, j, k, l] = macs;
    write(packet, 0, [g, h, i, j, k, l, a, b, c, d, e, f])
}

/// An IPv4 header without options for `payload` bytes.
#[inline(always)]
fn ip_header(
    protocol: u8,
    [s0, s1, s2, s3]: [u8; 4],
    [d0, d1, d2, d3]: [u8; 4],
    payload: usize,
) -> [u8; Ipv4Hdr::LEN] {
    let [l0, l1] = ((Ipv4Hdr::LEN + payload) as u16).to_be_bytes();
    let [f0, f1] = DONT_FRAGMENT;
    let mut header = [0x45, 0, l0, l1, 0, 0, f0, f1, TTL, protocol, 0, 0, s0, s1, s2, s3, d0, d1, d2, d3];
    [header[10], header[11]] = Sum::default().and(header).checksum();
    header
}
