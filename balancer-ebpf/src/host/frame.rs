//! Frames, and what the RFCs say of them: written without the data plane's code, to judge it by.

use std::{cell::Cell, thread_local, vec, vec::Vec};

use balancer_common::{Address, TCP, UDP, family, mapped};

pub const FIN: u8 = 0x01;
pub const SYN: u8 = 0x02;
pub const RST: u8 = 0x04;
pub const PSH: u8 = 0x08;
pub const ACK: u8 = 0x10;

/// An address and a port. Where IPv6 is tested, the four bytes are the last ones of an address of 2001:db8::/96.
pub type Endpoint = ([u8; 4], u16);

thread_local! {
    /// The family of what this test builds.
    pub static FAMILY: Cell<u8> = const { Cell::new(family::IPV4) };
}

/// The whole address.
pub fn address([a, b, c, d]: [u8; 4]) -> Address {
    match FAMILY.get() {
        family::IPV4 => mapped([a, b, c, d]),
        _ => [0x20, 0x01, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, a, b, c, d],
    }
}

/// The bytes of an address in a packet.
fn on_wire(address: [u8; 4]) -> Vec<u8> {
    let whole = self::address(address);
    if FAMILY.get() == family::IPV4 { address.to_vec() } else { whole.to_vec() }
}

/// Bytes of an IP header without options.
pub fn ip_header() -> usize {
    if FAMILY.get() == family::IPV4 { 20 } else { 40 }
}

/// An Ethernet frame with an IP packet of TCP or UDP.
#[derive(Clone, Debug)]
pub struct Frame {
    pub to: [u8; 6],
    pub from: [u8; 6],
    pub source: Endpoint,
    pub destination: Endpoint,
    pub ttl: u8,
    /// TCP: sequence and acknowledgement number.
    pub sequence: [u32; 2],
    /// VLAN tags, with the EtherTypes in front of them.
    pub tags: Vec<[u8; 4]>,
    /// IPv4 options: a multiple of 4 bytes, at most 40.
    pub options: Vec<u8>,
    /// IPv6 extension headers: the number of each, and what follows its first byte.
    pub extensions: Vec<(u8, Vec<u8>)>,
    pub l4: L4,
    pub payload: Vec<u8>,
}

/// What is in the packet.
#[derive(Clone, Debug)]
pub enum L4 {
    Tcp {
        flags: u8,
        /// A multiple of 4 bytes, at most 40.
        options: Vec<u8>,
    },
    Udp {
        /// Whether the sender made a checksum.
        is_summed: bool,
    },
}

impl Frame {
    /// A TCP segment without data.
    pub fn tcp(source: Endpoint, destination: Endpoint, flags: u8) -> Frame {
        Frame {
            to: [2, 0, 0, 0, 0, 1],
            from: [2, 0, 0, 0, 0, 2],
            source,
            destination,
            ttl: 64,
            sequence: [1, 2],
            tags: vec![],
            options: vec![],
            extensions: vec![],
            l4: L4::Tcp { flags, options: vec![] },
            payload: vec![],
        }
    }

    /// A UDP datagram.
    pub fn udp(source: Endpoint, destination: Endpoint, payload: &[u8]) -> Frame {
        let l4 = L4::Udp { is_summed: true };
        Frame { l4, payload: payload.to_vec(), ..Frame::tcp(source, destination, 0) }
    }

    /// Its bytes, with right checksums.
    pub fn bytes(&self) -> Vec<u8> {
        let (protocol, mut segment) = match &self.l4 {
            L4::Tcp { flags, options } => {
                let offset = (5 + options.len() / 4) as u8;
                let [sequence, acknowledged] = self.sequence.map(u32::to_be_bytes);
                let rest = [offset << 4, *flags, 0xfa, 0xf0, 0, 0, 0, 0];
                (TCP, [&sequence[..], &acknowledged, &rest, options].concat())
            }
            L4::Udp { .. } => (UDP, [(self.payload.len() as u16 + 8).to_be_bytes(), [0, 0]].concat()),
        };
        segment =
            [&self.source.1.to_be_bytes()[..], &self.destination.1.to_be_bytes(), &segment, &self.payload]
                .concat();
        let (ether_type, ip) = match FAMILY.get() {
            family::IPV4 => ([0x08, 0x00], self.ipv4(protocol, segment.len())),
            _ => ([0x86, 0xdd], self.ipv6(protocol, segment.len())),
        };
        let mut frame = [&self.to[..], &self.from, &self.tags.concat(), &ether_type, &ip, &segment].concat();
        if !matches!(self.l4, L4::Udp { is_summed: false }) {
            let place = l4_checksum_at(&frame);
            frame[place] = 0xff;
        }
        sum_anew(&mut frame);
        frame
    }

    fn ipv4(&self, protocol: u8, segment: usize) -> Vec<u8> {
        let [high, low] = ((20 + self.options.len() + segment) as u16).to_be_bytes();
        let first = 0x45 + (self.options.len() / 4) as u8;
        let fixed = [first, 0, high, low, 0x12, 0x34, 0, 0, self.ttl, protocol, 0, 0];
        [&fixed[..], &self.source.0, &self.destination.0, &self.options].concat()
    }

    fn ipv6(&self, protocol: u8, segment: usize) -> Vec<u8> {
        let mut chain = Vec::new();
        let mut next = protocol;
        for (number, rest) in self.extensions.iter().rev() {
            chain = [&[next][..], rest, &chain].concat();
            next = *number;
        }
        let [high, low] = ((chain.len() + segment) as u16).to_be_bytes();
        let fixed = [0x60, 0x12, 0x34, 0x56, high, low, next, self.ttl];
        [&fixed[..], &on_wire(self.source.0), &on_wire(self.destination.0), &chain].concat()
    }
}

/// The Internet checksum (RFC 1071, section 1) over big-endian words.
pub fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    // At most 32,767 words of 16 bits: no overflow.
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Where the IP header of a frame starts.
pub fn l3_at(frame: &[u8]) -> usize {
    let mut place = 12;
    while [[0x81, 0x00], [0x88, 0xa8]].contains(&[frame[place], frame[place + 1]]) {
        place += 4;
    }
    place + 2
}

/// The TCP or UDP header of a frame: which of both it is, and where it starts.
fn upper(frame: &[u8]) -> (u8, usize) {
    let l3 = l3_at(frame);
    if frame[l3] >> 4 == 4 {
        return (frame[l3 + 9], l3 + usize::from(frame[l3] & 15) * 4);
    }
    let (mut next, mut place) = (frame[l3 + 6], l3 + 40);
    while ![TCP, UDP].contains(&next) {
        let length = usize::from(frame[place + 1]);
        let size = match next {
            44 => 8,
            51 => (length + 2) * 4,
            _ => (length + 1) * 8,
        };
        (next, place) = (frame[place], place + size);
    }
    (next, place)
}

/// Where the TCP or UDP header of a frame starts.
pub fn l4_at(frame: &[u8]) -> usize {
    upper(frame).1
}

/// Where the TCP or UDP checksum of a frame lies.
pub fn l4_checksum_at(frame: &[u8]) -> usize {
    let (protocol, l4) = upper(frame);
    l4 + if protocol == TCP { 16 } else { 6 }
}

/// Computes both checksums of a frame from nothing. A UDP checksum of 0 stays (RFC 768).
pub fn sum_anew(frame: &mut [u8]) {
    let (l3, (protocol, l4), place) = (l3_at(frame), upper(frame), l4_checksum_at(frame));
    let word = |frame: &[u8], at: usize| usize::from(u16::from_be_bytes([frame[at], frame[at + 1]]));
    let is_ipv4 = frame[l3] >> 4 == 4;
    if is_ipv4 {
        frame[l3 + 10..l3 + 12].fill(0);
        let header = checksum(&frame[l3..l4]);
        frame[l3 + 10..l3 + 12].copy_from_slice(&header.to_be_bytes());
    }
    if protocol == UDP && frame[place..place + 2] == [0, 0] {
        return;
    }
    let end = match (protocol, is_ipv4) {
        (UDP, _) => l4 + word(frame, l4 + 4),
        (_, true) => l3 + word(frame, l3 + 2),
        (_, false) => l3 + 40 + word(frame, l3 + 4),
    };
    frame[place..place + 2].fill(0);
    let length = ((end - l4) as u16).to_be_bytes();
    let addresses = if is_ipv4 { l3 + 12..l3 + 20 } else { l3 + 8..l3 + 40 };
    let pseudo = [&frame[addresses], &[0, protocol], &length, &frame[l4..end]].concat();
    let sum = match (checksum(&pseudo), protocol) {
        (0, UDP) => 0xffff,
        (sum, _) => sum,
    };
    frame[place..place + 2].copy_from_slice(&sum.to_be_bytes());
}

/// The frame that a router that translates addresses makes of `input`: new MACs, endpoints and TTL, and nothing
/// else but the checksums that follow.
pub fn translated(
    input: &[u8],
    to: [u8; 6],
    from: [u8; 6],
    source: Endpoint,
    destination: Endpoint,
) -> Vec<u8> {
    let mut frame = input.to_vec();
    let (l3, l4) = (l3_at(&frame), l4_at(&frame));
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    let (ttl, addresses) = if frame[l3] >> 4 == 4 { (8, 12) } else { (7, 8) };
    frame[l3 + ttl] -= 1;
    let ends = [on_wire(source.0), on_wire(destination.0)].concat();
    frame[l3 + addresses..][..ends.len()].copy_from_slice(&ends);
    frame[l4..l4 + 2].copy_from_slice(&source.1.to_be_bytes());
    frame[l4 + 2..l4 + 4].copy_from_slice(&destination.1.to_be_bytes());
    sum_anew(&mut frame);
    frame
}

/// Bytes from their hexadecimal notation.
pub fn hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// A frame of the bench's client around a packet in hexadecimal notation.
pub fn from_client(packet: &str) -> Vec<u8> {
    [&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0][..], &hex(packet)].concat()
}
