//! Who has a service's address? ARP requests (RFC 826) and neighbour solicitations (RFC 4861) for those that the balancer
//! advertises are answered with the MAC of the interface that they come in by.

use balancer_common::{Address, ICMPV6, mapped, role};
use network_types::ip::Ipv6Hdr;

use crate::{
    Environment, Packet,
    checksum::Sum,
    packet::{read, write},
    parse::{ARP, IPV6, Link, link},
    process::Step,
    vlan,
};

/// An ARP request between Ethernet and IPv4, up to its operation.
const ARP_REQUEST: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// Neighbour discovery is not routed.
const HOP_LIMIT: u8 = 255;
/// Its target included, but no options.
const SOLICITATION_LENGTH: u16 = 24;
const ADVERTISEMENT_LENGTH: usize = 32;
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;
const ALL_NODES: Address = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
const ALL_NODES_MAC: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];

/// What becomes of a packet by which neighbours are found.
#[inline(always)]
pub fn tell<P: Packet, E: Environment>(packet: &P, environment: &E) -> Step {
    let told = match link(packet) {
        Some(link) if link.ether_type == ARP => arp(packet, environment, &link),
        Some(link) if link.ether_type == IPV6 => solicitation(packet, environment, &link),
        _ => None,
    };
    if told.is_some() { Step::Back } else { Step::Foreign }
}

#[inline(always)]
fn arp<P: Packet, E: Environment>(packet: &P, environment: &E, link: &Link) -> Option<()> {
    let l3 = link.l3;
    let head: [u8; 8] = read(packet, l3)?;
    let [m0, m1, m2, m3, m4, m5, s0, s1, s2, s3]: [u8; 10] = read(packet, l3 + 8)?;
    let target: [u8; 4] = read(packet, l3 + 24)?;
    // Who announces the address, or asks for its own, gets no answer.
    if head != ARP_REQUEST || target == [s0, s1, s2, s3] {
        return None;
    }
    let own = own_mac(environment, link, &mapped(target))?;
    let [o0, o1, o2, o3, o4, o5] = own;
    let [t0, t1, t2, t3] = target;
    write(packet, l3 + 6, [0, 2, o0, o1, o2, o3, o4, o5])?;
    write(packet, l3 + 14, [t0, t1, t2, t3, m0, m1, m2, m3, m4, m5, s0, s1, s2, s3])?;
    write(packet, 0, [m0, m1, m2, m3, m4, m5, o0, o1, o2, o3, o4, o5])
}

#[inline(always)]
fn solicitation<P: Packet, E: Environment>(packet: &P, environment: &E, link: &Link) -> Option<()> {
    let l3 = link.l3;
    let [_, _, _, _, l0, l1, next, ttl]: [u8; 8] = read(packet, l3)?;
    let length = u16::from_be_bytes([l0, l1]);
    let icmp = l3 + Ipv6Hdr::LEN;
    let [kind, code]: [u8; 2] = read(packet, icmp)?;
    if length < SOLICITATION_LENGTH || next != ICMPV6 || ttl != HOP_LIMIT || kind != SOLICITATION || code != 0
    {
        return None;
    }
    let asker: Address = read(packet, l3 + 8)?;
    let target: Address = read(packet, icmp + 8)?;
    if asker == target {
        return None;
    }
    let own = own_mac(environment, link, &target)?;
    let [o0, o1, o2, o3, o4, o5] = own;
    let sender: [u8; 6] = read(packet, 6)?;
    // Who asks without an address wants to take this one: all are told that it is taken (RFC 4862, section 5.4).
    let is_nobody = asker == [0; 16];
    let (to, mac, flags) =
        if is_nobody { (ALL_NODES, ALL_NODES_MAC, OVERRIDE) } else { (asker, sender, SOLICITED | OVERRIDE) };
    if !packet.cut(icmp + ADVERTISEMENT_LENGTH) {
        return None;
    }
    let length = ADVERTISEMENT_LENGTH as u8;
    let option = [2, 1, o0, o1, o2, o3, o4, o5];
    let sum = Sum::default().and(target).and(to).and([0, length, 0, ICMPV6]);
    let [c0, c1] = sum.and([ADVERTISEMENT, 0, flags, 0]).and(target).and(option).checksum();
    let [m0, m1, m2, m3, m4, m5] = mac;
    write(packet, 0, [m0, m1, m2, m3, m4, m5, o0, o1, o2, o3, o4, o5])?;
    write(packet, l3, [0x60, 0, 0, 0, 0, length, ICMPV6, HOP_LIMIT])?;
    write(packet, l3 + 8, target)?;
    write(packet, l3 + 24, to)?;
    write(packet, icmp, [ADVERTISEMENT, 0, c0, c1, flags, 0, 0, 0])?;
    write(packet, icmp + 8, target)?;
    write(packet, icmp + 24, option)
}

/// The MAC to be told of an address, if it is advertised: that of this interface.
#[inline(always)]
fn own_mac<E: Environment>(environment: &E, link: &Link, address: &Address) -> Option<[u8; 6]> {
    if environment.roles(address) & role::ADVERTISED == 0 {
        return None;
    }
    let port = vlan::port(environment, link.vlan)?;
    Some(environment.next_hop(u32::from(port))?.source)
}
