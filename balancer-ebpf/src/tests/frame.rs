//! Frames, and what the RFCs say of them: written without the data plane's code, to judge it by.

use std::{vec, vec::Vec};

use balancer_common::{TCP, UDP};

pub const FIN: u8 = 0x01;
pub const SYN: u8 = 0x02;
pub const RST: u8 = 0x04;
pub const PSH: u8 = 0x08;
pub const ACK: u8 = 0x10;

/// An address and a port.
pub type Endpoint = ([u8; 4], u16);

/// An Ethernet frame with an IPv4 packet of TCP or UDP.
#[derive(Clone, Debug)]
pub struct Frame {
    pub to: [u8; 6],
    pub from: [u8; 6],
    pub source: Endpoint,
    pub destination: Endpoint,
    pub ttl: u8,
    /// TCP: sequence and acknowledgement number.
    pub sequence: [u32; 2],
    /// IPv4 options: a multiple of 4 bytes, at most 40.
    pub options: Vec<u8>,
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
            options: vec![],
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
        let length = (20 + self.options.len() + segment.len()) as u16;
        let [high, low] = length.to_be_bytes();
        let first = 0x45 + (self.options.len() / 4) as u8;
        let ip = [
            &[first, 0, high, low, 0x12, 0x34, 0, 0, self.ttl, protocol, 0, 0][..],
            &self.source.0,
            &self.destination.0,
            &self.options,
        ]
        .concat();
        let mut frame = [&self.to[..], &self.from, &[8, 0], &ip, &segment].concat();
        if !matches!(self.l4, L4::Udp { is_summed: false }) {
            let place = l4_checksum_at(&frame);
            frame[place] = 0xff;
        }
        sum_anew(&mut frame);
        frame
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

/// Where the TCP or UDP header of a frame starts.
pub fn l4_at(frame: &[u8]) -> usize {
    14 + usize::from(frame[14] & 15) * 4
}

/// Where the TCP or UDP checksum of a frame lies.
pub fn l4_checksum_at(frame: &[u8]) -> usize {
    l4_at(frame) + if frame[23] == TCP { 16 } else { 6 }
}

/// Computes both checksums of a frame from nothing. A UDP checksum of 0 stays (RFC 768).
pub fn sum_anew(frame: &mut [u8]) {
    let (l4, place) = (l4_at(frame), l4_checksum_at(frame));
    frame[24..26].fill(0);
    let header = checksum(&frame[14..l4]);
    frame[24..26].copy_from_slice(&header.to_be_bytes());
    if frame[23] == UDP && frame[place..place + 2] == [0, 0] {
        return;
    }
    let end = match frame[23] {
        UDP => l4 + usize::from(u16::from_be_bytes([frame[l4 + 4], frame[l4 + 5]])),
        _ => 14 + usize::from(u16::from_be_bytes([frame[16], frame[17]])),
    };
    frame[place..place + 2].fill(0);
    let length = ((end - l4) as u16).to_be_bytes();
    let pseudo = [&frame[26..34], &[0, frame[23]], &length, &frame[l4..end]].concat();
    let sum = match (checksum(&pseudo), frame[23]) {
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
    let l4 = l4_at(&frame);
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    frame[22] -= 1;
    frame[26..30].copy_from_slice(&source.0);
    frame[30..34].copy_from_slice(&destination.0);
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

/// Another implementation agrees that the frames built here are right.
#[test]
fn etherparse_takes_the_frames_for_valid() {
    use etherparse::{NetSlice, SlicedPacket, TransportSlice};

    let (source, destination) = (([10, 0, 1, 10], 40_000), ([192, 0, 2, 10], 80));
    let tcp = Frame {
        options: vec![1; 40],
        l4: L4::Tcp { flags: SYN, options: vec![1; 40] },
        payload: vec![7; 33],
        ..Frame::tcp(source, destination, SYN)
    };
    for frame in [tcp, Frame::tcp(source, destination, ACK), Frame::udp(source, destination, &[1, 2, 3])] {
        let bytes = frame.bytes();
        let packet = SlicedPacket::from_ethernet(&bytes).unwrap();
        let Some(NetSlice::Ipv4(ip)) = packet.net else { panic!("no IPv4 in {frame:?}") };
        let header = ip.header().to_header();
        assert_eq!(header.header_checksum, header.calc_header_checksum());
        assert_eq!((header.source, header.destination), (source.0, destination.0));
        match packet.transport {
            Some(TransportSlice::Tcp(tcp)) => {
                let sum = tcp.calc_checksum_ipv4(source.0, destination.0).unwrap();
                assert_eq!(
                    (tcp.checksum(), tcp.source_port(), tcp.payload()),
                    (sum, 40_000, &frame.payload[..])
                );
            }
            Some(TransportSlice::Udp(udp)) => {
                let sum =
                    udp.to_header().calc_checksum_ipv4_raw(source.0, destination.0, udp.payload()).unwrap();
                assert_eq!(
                    (udp.checksum(), udp.source_port(), udp.payload()),
                    (sum, 40_000, &frame.payload[..])
                );
            }
            other => panic!("{other:?} in {frame:?}"),
        }
    }
}
