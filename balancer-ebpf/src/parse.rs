//! From a frame to its flow key. Nothing is believed that was not compared with the frame's end.

use core::ptr;

use balancer_common::{FlowKey, Reason, TCP, UDP};
use network_types::{
    eth::{EthHdr, EtherType},
    ip::Ipv4Hdr,
    tcp::TcpHdr,
    udp::UdpHdr,
};

use crate::Packet;

/// A TCP segment or UDP datagram, and where its headers lie in the frame.
pub struct Parsed {
    /// The Ethernet header.
    pub ethernet: *mut EthHdr,
    /// The IPv4 header, without options.
    pub ip: *mut Ipv4Hdr,
    /// Offset of the TCP or UDP header in the frame.
    pub l4: usize,
    /// Source and destination port.
    pub ports: *mut [u8; 4],
    /// The TCP or UDP checksum.
    pub checksum: *mut [u8; 2],
    /// Addresses, ports and protocol.
    pub key: FlowKey,
    /// IP total length, in bytes.
    pub length: u16,
    /// Bytes that the application sent.
    pub payload: u16,
    /// Time to live as it arrived.
    pub ttl: u8,
    /// TCP flags (`tcp::*`); 0 for UDP.
    pub tcp_flags: u8,
    /// It is the first fragment of a larger datagram.
    pub fragmented: bool,
}

/// Why a frame has no flow key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unparsed {
    /// Nothing that a service could be meant by: the kernel's business.
    Foreign,
    /// IPv4 between these two, but broken: to be dropped if either address is ours.
    Refused {
        /// What is wrong.
        reason: Reason,
        /// Source address.
        source: [u8; 4],
        /// Destination address.
        destination: [u8; 4],
    },
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

const TCP_LAYOUT: L4 = L4 { header: TcpHdr::LEN, checksum: core::mem::offset_of!(TcpHdr, check) };
const UDP_LAYOUT: L4 = L4 { header: UdpHdr::LEN, checksum: core::mem::offset_of!(UdpHdr, check) };

const MORE_FRAGMENTS: u16 = 0x2000;
const FRAGMENT_OFFSET: u16 = 0x1fff;

/// Finds the flow key of a frame.
#[inline(always)]
pub fn parse<P: Packet>(packet: &P) -> Result<Parsed, Unparsed> {
    let ethernet: *mut EthHdr = packet.at(0).ok_or(Unparsed::Foreign)?;
    // SAFETY: `at` checked that the header lies in the frame.
    let EthHdr { dst_addr, src_addr, ether_type } = unsafe { ptr::read_unaligned(ethernet) };
    // A group is nobody's address, and nobody that replies could be sent to.
    let is_group = (dst_addr[0] | src_addr[0]) & 1 == 1;
    if ether_type != EtherType::Ipv4 as u16 || is_group {
        return Err(Unparsed::Foreign);
    }
    parse_ipv4(packet, ethernet, EthHdr::LEN)
}

#[inline(always)]
fn parse_ipv4<P: Packet>(packet: &P, ethernet: *mut EthHdr, l3: usize) -> Result<Parsed, Unparsed> {
    let ip: *mut Ipv4Hdr = packet.at(l3).ok_or(Unparsed::Foreign)?;
    // SAFETY: `at` checked that the header lies in the frame.
    let header = unsafe { ptr::read_unaligned(ip) };
    let (source, destination) = (header.src_addr, header.dst_addr);
    let malformed = Unparsed::Refused { reason: Reason::Malformed, source, destination };

    let header_length = usize::from(header.vihl & 0x0f) * 4;
    let length = u16::from_be_bytes(header.tot_len);
    if header.vihl >> 4 != 4
        || header_length < Ipv4Hdr::LEN
        || usize::from(length) < header_length
        || !packet.has(l3 + usize::from(length))
    {
        return Err(malformed);
    }
    let fragment = u16::from_be_bytes(header.frags);
    let layout = match header.proto {
        TCP => TCP_LAYOUT,
        UDP => UDP_LAYOUT,
        _ => return Err(Unparsed::Foreign),
    };
    if fragment & FRAGMENT_OFFSET != 0 {
        return Err(Unparsed::Refused { reason: Reason::Fragment, source, destination });
    }
    let fragmented = fragment & MORE_FRAGMENTS != 0;

    let l4 = l3 + header_length;
    let segment = usize::from(length) - header_length;
    if segment < layout.header {
        return Err(malformed);
    }
    let mut header_end = layout.header;
    let ports: *mut [u8; 4] = packet.at(l4).ok_or(malformed)?;
    let checksum: *mut [u8; 2] = packet.at(l4 + layout.checksum).ok_or(malformed)?;
    let mut tcp_flags = 0;
    if header.proto == TCP {
        let offset_and_flags: *mut [u8; 2] = packet.at(l4 + TCP_DATA_OFFSET).ok_or(malformed)?;
        // SAFETY: `at` checked that both bytes lie in the frame.
        let [offset, flags] = unsafe { ptr::read_unaligned(offset_and_flags) };
        let tcp_header = usize::from(offset >> 4) * 4;
        if tcp_header < TcpHdr::LEN || (tcp_header > segment && !fragmented) {
            return Err(malformed);
        }
        header_end = tcp_header;
        tcp_flags = flags;
    } else {
        let udp_length: *mut [u8; 2] = packet.at(l4 + core::mem::offset_of!(UdpHdr, len)).ok_or(malformed)?;
        // SAFETY: `at` checked that both bytes lie in the frame.
        let udp_length = usize::from(u16::from_be_bytes(unsafe { ptr::read_unaligned(udp_length) }));
        if udp_length < UdpHdr::LEN || (udp_length > segment && !fragmented) {
            return Err(malformed);
        }
    }
    // SAFETY: `at` checked that the four bytes lie in the frame.
    let [s0, s1, d0, d1] = unsafe { ptr::read_unaligned(ports) };
    let key = FlowKey {
        source,
        destination,
        source_port: [s0, s1],
        destination_port: [d0, d1],
        protocol: header.proto,
        reserved: [0; 3],
    };
    // A first fragment may hold less than the header, but is refused anyway.
    let payload = segment.wrapping_sub(header_end) as u16;
    let ttl = header.ttl;
    Ok(Parsed { ethernet, ip, l4, ports, checksum, key, length, payload, ttl, tcp_flags, fragmented })
}

/// Offset of the byte that holds the data offset; the flags follow it.
const TCP_DATA_OFFSET: usize = 12;
