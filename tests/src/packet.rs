//! Frames, built and taken apart.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result};
use etherparse::{IpHeaders, PacketBuilder, PacketBuilderStep};

/// The EtherType of IPv4.
pub const IPV4: u16 = 0x0800;
/// The EtherType of IPv6.
pub const IPV6: u16 = 0x86dd;

/// Bytes from their hexadecimal notation; white space is skipped.
pub fn hex(text: &str) -> Result<Vec<u8>> {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    anyhow::ensure!(digits.len().is_multiple_of(2), "an odd number of hexadecimal digits");
    let byte = |pair: &[u8]| {
        let pair = std::str::from_utf8(pair).context("read hexadecimal digits")?;
        u8::from_str_radix(pair, 16).with_context(|| format!("read {pair} as hexadecimal"))
    };
    digits.chunks(2).map(byte).collect()
}

/// Bytes in hexadecimal notation.
pub fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An Ethernet frame around `packet`, whose first half-byte (IP's version) gives the EtherType.
pub fn ethernet(destination: [u8; 6], source: [u8; 6], packet: &[u8]) -> Vec<u8> {
    let ether_type = if packet.first().is_some_and(|byte| byte >> 4 == 6) { IPV6 } else { IPV4 };
    [&destination[..], &source[..], &ether_type.to_be_bytes()[..], packet].concat()
}

/// Puts 802.1Q tags (or 802.1ad, by its EtherType) into a frame, the outermost first, as (EtherType, tag) pairs.
pub fn tagged(frame: &[u8], tags: &[(u16, u16)]) -> Result<Vec<u8>> {
    let (addresses, rest) = frame.split_at_checked(12).context("split a frame that has no header")?;
    let tags = tags.iter().flat_map(|(kind, tag)| [kind.to_be_bytes(), tag.to_be_bytes()]).flatten();
    Ok(addresses.iter().copied().chain(tags).chain(rest.iter().copied()).collect())
}

/// Puts extension headers behind the header of an IPv6 packet, as (protocol number, bytes) pairs; the first byte of each is
/// overwritten with the number of what follows it.
pub fn extended(packet: &[u8], headers: &[(u8, &[u8])]) -> Result<Vec<u8>> {
    const NEXT: usize = 6;
    let (header, rest) = packet.split_at_checked(40).context("split a packet without an IPv6 header")?;
    let mut extended = header.to_vec();
    let mut next = NEXT;
    let last = extended[next];
    for (number, bytes) in headers {
        extended[next] = *number;
        next = extended.len();
        extended.extend_from_slice(bytes);
    }
    extended[next] = last;
    extended.extend_from_slice(rest);
    let length = u16::try_from(extended.len() - 40).context("reckon an IPv6 packet's length")?;
    extended[4..6].copy_from_slice(&length.to_be_bytes());
    Ok(extended)
}

/// Where a packet comes from and goes to.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// Source address and port.
    pub source: SocketAddr,
    /// Destination address and port, of the same family.
    pub destination: SocketAddr,
    /// Time to live, or hop limit.
    pub ttl: u8,
}

impl Path {
    /// A path with a TTL of 64.
    pub fn new(source: impl Into<SocketAddr>, destination: impl Into<SocketAddr>) -> Self {
        Self { source: source.into(), destination: destination.into(), ttl: 64 }
    }

    /// The way back.
    pub fn reversed(self) -> Self {
        Self { source: self.destination, destination: self.source, ..self }
    }

    fn ip(&self) -> Result<PacketBuilderStep<IpHeaders>> {
        match (self.source.ip(), self.destination.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                Ok(PacketBuilder::ipv4(source.octets(), destination.octets(), self.ttl))
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                Ok(PacketBuilder::ipv6(source.octets(), destination.octets(), self.ttl))
            }
            _ => anyhow::bail!("a path from {} to {}", self.source, self.destination),
        }
    }

    /// An IP packet with a UDP datagram.
    pub fn udp(&self, payload: &[u8]) -> Result<Vec<u8>> {
        let builder = self.ip()?.udp(self.source.port(), self.destination.port());
        let mut packet = Vec::with_capacity(builder.size(payload.len()));
        builder.write(&mut packet, payload).context("build a UDP packet")?;
        Ok(packet)
    }

    /// An IP packet with a TCP segment.
    pub fn tcp(&self, segment: Segment, payload: &[u8]) -> Result<Vec<u8>> {
        let (source, destination) = (self.source.port(), self.destination.port());
        let mut builder = self.ip()?.tcp(source, destination, segment.sequence, 64_000);
        if segment.flags & Segment::FIN != 0 {
            builder = builder.fin();
        }
        if segment.flags & Segment::SYN != 0 {
            builder = builder.syn();
        }
        if segment.flags & Segment::RST != 0 {
            builder = builder.rst();
        }
        if segment.flags & Segment::PSH != 0 {
            builder = builder.psh();
        }
        if segment.flags & Segment::ACK != 0 {
            builder = builder.ack(segment.acknowledgement);
        }
        let mut packet = Vec::with_capacity(builder.size(payload.len()));
        builder.write(&mut packet, payload).context("build a TCP packet")?;
        Ok(packet)
    }
}

/// What is special about one TCP segment.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// The flags, as in the header's byte 13.
    pub flags: u8,
    /// The sequence number.
    pub sequence: u32,
    /// The acknowledgement number; it counts with [`Segment::ACK`] only.
    pub acknowledgement: u32,
}

impl Segment {
    /// No more data from the sender.
    pub const FIN: u8 = 0x01;
    /// Opens a connection.
    pub const SYN: u8 = 0x02;
    /// Ends a connection at once.
    pub const RST: u8 = 0x04;
    /// Data for the application.
    pub const PSH: u8 = 0x08;
    /// The acknowledgement number counts.
    pub const ACK: u8 = 0x10;

    /// A segment with these flags, numbered 0, that acknowledges its peer's SYN of that number.
    pub fn flags(flags: u8) -> Self {
        Self { flags, sequence: 0, acknowledgement: 1 }
    }
}
