//! Tunnels: packets that go to their backend inside of another, whose replies go to the client past the balancer.
//!
//! Outside stands what the path needs: from this host to the backend, the class and congestion marks of the packet within
//! (RFC 6040), and what routers tell flows by, the same for all packets of one flow: the UDP source port of GUE, the flow label of
//! IPv6 (RFC 6438), the free bits of the source address. The packet within is as a router would have passed it on.

use balancer_common::{
    Address, Backend, BackendId, MAX_PORTS, NextHop, Reason, UDP, family, forward, mapped,
};
use network_types::{
    ip::{Ipv4Hdr, Ipv6Hdr},
    udp::UdpHdr,
};

use crate::{
    Environment, Packet,
    answer::LINK,
    checksum::Sum,
    packet::{read, write},
    parse::{Network, ether_type, network},
    persist::leading,
    process::Step,
};

/// The TTL, or hop limit, that it sets out with.
const TTL: u8 = 64;
const DONT_FRAGMENT: [u8; 2] = [0x40, 0];
/// IP protocol numbers of what may be inside.
pub const IPV4_WITHIN: u8 = 4;
/// The same of IPv6.
pub const IPV6_WITHIN: u8 = 41;
/// GUE's source ports are those that nobody listens at (RFC 6335).
const FIRST_PORT: u16 = 0xc000;

/// Wraps a packet for a backend, whose MACs it has already; `lot` tells its flow from others.
#[inline(always)]
pub fn wrap<P: Packet, E: Environment>(packet: &P, environment: &E, id: BackendId, lot: u16) -> Step {
    let Some(backend) = environment.backend(id) else { return Step::Refused(Reason::NoBackend) };
    let Some(hop) = environment.next_hop(MAX_PORTS + u32::from(id)) else {
        return Step::Refused(Reason::NoEgress);
    };
    match put_around(packet, backend, hop, lot) {
        Some(()) => Step::Leave(hop.index),
        None => Step::Refused(Reason::NoHeadroom),
    }
}

/// `None` where there is no room for it.
#[inline(always)]
fn put_around<P: Packet>(packet: &P, backend: &Backend, hop: &NextHop, lot: u16) -> Option<()> {
    let inner = network(packet)?;
    let Network { l3, .. } = inner;
    let (class, length) = class_and_length(packet, inner)?;
    let link: [u8; LINK] = read(packet, 0)?;
    let is_ipv4 = backend.address[..12] == mapped([0; 4])[..12];
    let (outer, header) = if is_ipv4 { (family::IPV4, Ipv4Hdr::LEN) } else { (family::IPV6, Ipv6Hdr::LEN) };
    let is_gue = hop.forward == forward::GUE;
    let udp = if is_gue { UdpHdr::LEN } else { 0 };
    if !packet.shift(-((header + udp) as i32)) {
        return None;
    }
    write(packet, 0, link)?;
    write(packet, l3 - 2, ether_type(outer))?;
    let protocol = match inner.family {
        _ if is_gue => UDP,
        family::IPV4 => IPV4_WITHIN,
        _ => IPV6_WITHIN,
    };
    let source = source(backend, lot);
    let payload = udp as u16 + length;
    if is_ipv4 {
        let ([.., s0, s1, s2, s3], [.., d0, d1, d2, d3]) = (source, backend.address);
        let [l0, l1] = (Ipv4Hdr::LEN as u16 + payload).to_be_bytes();
        let [f0, f1] = DONT_FRAGMENT;
        let mut outer =
            [0x45, class, l0, l1, 0, 0, f0, f1, TTL, protocol, 0, 0, s0, s1, s2, s3, d0, d1, d2, d3];
        [outer[10], outer[11]] = Sum::default().and(outer).checksum();
        write(packet, l3, outer)?;
    } else {
        let [l0, l1] = payload.to_be_bytes();
        let [label0, label1] = lot.to_be_bytes();
        write(packet, l3, [0x60 | class >> 4, class << 4, label0, label1, l0, l1, protocol, TTL])?;
        write(packet, l3 + 8, source)?;
        write(packet, l3 + 24, backend.address)?;
    }
    if is_gue {
        let [s0, s1] = (FIRST_PORT | lot).to_be_bytes();
        let [d0, d1] = backend.tunnel_port;
        let [l0, l1] = payload.to_be_bytes();
        // No checksum: what is within has its own (RFC 6935, RFC 6936).
        write(packet, l3 + header, [s0, s1, d0, d1, l0, l1, 0, 0])?;
    }
    Some(())
}

/// Type of service, or traffic class, and total length of a packet.
#[inline(always)]
fn class_and_length<P: Packet>(packet: &P, Network { l3, family }: Network) -> Option<(u8, u16)> {
    let [first, second, l0, l1, p0, p1]: [u8; 6] = read(packet, l3)?;
    if family == family::IPV4 {
        return Some((second, u16::from_be_bytes([l0, l1])));
    }
    let length = (Ipv6Hdr::LEN as u16).wrapping_add(u16::from_be_bytes([p0, p1]));
    Some((first << 4 | second >> 4, length))
}

/// Where a backend sees what is wrapped come from: the free bits of its source are the flow's.
#[inline(always)]
fn source(backend: &Backend, lot: u16) -> Address {
    let [high, low]: [u64; 2] = bytemuck::cast(backend.snat_address);
    let [_, fixed]: [u64; 2] = bytemuck::cast(leading(&[0xff; 16], backend.snat_prefix));
    bytemuck::cast([high, low & fixed | u64::from(lot).to_be() & !fixed])
}
