//! The other end of the tunnels, on a backend: what was wrapped goes on to the kernel as if it had come so.

use core::mem::offset_of;

use balancer_common::{Address, Tunnelled, UDP, family, mapped};
use network_types::{
    ip::{Ipv4Hdr, Ipv6Hdr},
    udp::UdpHdr,
};

use crate::{
    Packet,
    packet::{read, write},
    parse::{Network, ether_type, network},
    wrap::{IPV4_WITHIN, IPV6_WITHIN},
};

/// Whom packets are unwrapped for.
pub trait Receiver {
    /// Whether an address is this host's.
    fn is_own(&self, address: &Address) -> bool;
    /// Whether an address may send wrapped packets.
    fn is_trusted(&self, address: &Address) -> bool;
    /// The UDP port of GUE, network order.
    fn gue_port(&self) -> [u8; 2];
}

/// What stands outside.
struct Outer {
    network: Network,
    source: Address,
    destination: Address,
    /// Offset of what follows the IP header.
    l4: usize,
    /// Offset of its end.
    end: usize,
    protocol: u8,
}

/// Takes off what a packet is wrapped in. `None`: it is not wrapped, or not for this host, and stays as it is.
#[inline(always)]
pub fn unwrap<P: Packet, R: Receiver>(packet: &P, receiver: &R) -> Option<Tunnelled> {
    let outer = outer(packet)?;
    let (kind, start, version) = match outer.protocol {
        IPV4_WITHIN => (Tunnelled::Ipip, outer.l4, 4),
        IPV6_WITHIN => (Tunnelled::Ipip, outer.l4, 6),
        UDP => {
            let port: [u8; 2] = read(packet, outer.l4 + offset_of!(UdpHdr, dst))?;
            if port != receiver.gue_port() {
                return None;
            }
            (Tunnelled::Gue, outer.l4 + UdpHdr::LEN, 0)
        }
        _ => return None,
    };
    if !receiver.is_own(&outer.destination) {
        return None;
    }
    if !receiver.is_trusted(&outer.source) {
        return Some(Tunnelled::Untrusted);
    }
    let Some(family) = within(packet, &outer, start, version) else { return Some(Tunnelled::Malformed) };
    match take_off(packet, outer.network, start, family) {
        Some(()) => Some(kind),
        None => Some(Tunnelled::Malformed),
    }
}

#[inline(always)]
fn outer<P: Packet>(packet: &P) -> Option<Outer> {
    let network = network(packet)?;
    let Network { l3, family } = network;
    if family == family::IPV4 {
        let ip: Ipv4Hdr = read(packet, l3)?;
        let header = usize::from(ip.vihl & 0x0f) * 4;
        // The kernel puts fragments together; what comes of them passes here no more.
        let is_whole = ip.frags[0] & 0x3f == 0 && ip.frags[1] == 0;
        if ip.vihl >> 4 != 4 || header < Ipv4Hdr::LEN || !is_whole {
            return None;
        }
        return Some(Outer {
            network,
            source: mapped(ip.src_addr),
            destination: mapped(ip.dst_addr),
            l4: l3 + header,
            end: l3 + usize::from(u16::from_be_bytes(ip.tot_len)),
            protocol: ip.proto,
        });
    }
    let [first, _, _, _, l0, l1, protocol, _]: [u8; 8] = read(packet, l3)?;
    if first >> 4 != 6 {
        return None;
    }
    let l4 = l3 + Ipv6Hdr::LEN;
    Some(Outer {
        network,
        source: read(packet, l3 + 8)?,
        destination: read(packet, l3 + 24)?,
        l4,
        end: l4 + usize::from(u16::from_be_bytes([l0, l1])),
        protocol,
    })
}

/// The family of the packet that begins at `start`, of IP version `version` if that is not 0. `None` unless it is whole.
#[inline(always)]
fn within<P: Packet>(packet: &P, outer: &Outer, start: usize, version: u8) -> Option<u8> {
    let [first, _, l0, l1, p0, p1]: [u8; 6] = read(packet, start)?;
    let (family, header, length) = match first >> 4 {
        4 => (family::IPV4, usize::from(first & 0x0f) * 4, usize::from(u16::from_be_bytes([l0, l1]))),
        6 => (family::IPV6, Ipv6Hdr::LEN, Ipv6Hdr::LEN + usize::from(u16::from_be_bytes([p0, p1]))),
        _ => return None,
    };
    let is_it = version == 0 || version == first >> 4;
    let is_whole = header >= Ipv4Hdr::LEN
        && length >= header
        && start + length <= outer.end
        && packet.has(start + length);
    (is_it && is_whole).then_some(family)
}

/// Moves MACs and tags to what begins at `start`.
#[inline(always)]
fn take_off<P: Packet>(packet: &P, Network { l3, .. }: Network, start: usize, family: u8) -> Option<()> {
    let macs: [u8; 12] = read(packet, 0)?;
    // Two tags, if there are.
    let [first, second]: [[u8; 4]; 2] = [read(packet, 12)?, read(packet, 16)?];
    if !packet.shift((start - l3) as i32) {
        return None;
    }
    write(packet, 0, macs)?;
    if l3 >= 18 {
        write(packet, 12, first)?;
    }
    if l3 >= 22 {
        write(packet, 16, second)?;
    }
    write(packet, l3 - 2, ether_type(family))
}
