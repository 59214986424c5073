//! Who asks for the MAC of an advertised address.

use std::vec::Vec;

use balancer_common::{ICMPV6, family, role};

use super::{
    bed::{Bed, VIP},
    frame::{FAMILY, address, checksum, hex},
};
use crate::Verdict;

/// A host on the balancer's network, and its MAC.
const ASKER: [u8; 4] = [10, 0, 1, 77];
const ASKER_MAC: [u8; 6] = [2, 0, 0, 0, 7, 7];

fn bed() -> Bed {
    let mut bed = Bed::new(1);
    bed.kernel.roles.insert(address(VIP.0), role::SERVICE | role::ADVERTISED);
    bed
}

fn arp(operation: u8, from: ([u8; 6], [u8; 4]), to: ([u8; 6], [u8; 4])) -> Vec<u8> {
    [&[0, 1, 8, 0, 6, 4, 0, operation][..], &from.0, &from.1, &to.0, &to.1].concat()
}

fn frame(to: [u8; 6], from: [u8; 6], tags: &[u8], kind: [u8; 2], packet: &[u8]) -> Vec<u8> {
    [&to[..], &from, tags, &kind, packet].concat()
}

#[test]
fn an_arp_request_is_answered_with_the_mac_of_its_interface() {
    let bed = bed();
    let request = arp(1, (ASKER_MAC, ASKER), ([0; 6], VIP.0));
    for (ingress, own) in [(1, Bed::CLIENT_SIDE), (2, Bed::BACKEND_SIDE), (3, Bed::THIRD_SIDE)] {
        for tags in ["", "8100000a", "88a8000581000007"].map(hex) {
            for to in [[0xff; 6], own] {
                // Padding stays.
                let input = [frame(to, ASKER_MAC, &tags, [8, 6], &request), Vec::from([0; 18])].concat();
                let reply = arp(2, (own, VIP.0), (ASKER_MAC, ASKER));
                let expected = [frame(ASKER_MAC, own, &tags, [8, 6], &reply), Vec::from([0; 18])].concat();
                assert_eq!(bed.run(ingress, &input), (Verdict::Transmit, expected));
            }
        }
    }
    assert_eq!((bed.traffic(), bed.kernel.dropped()), ([0; 4], 0));
}

#[test]
fn other_arp_passes() {
    let bed = bed();
    let broadcast = |packet: &[u8]| frame([0xff; 6], ASKER_MAC, &[], [8, 6], packet);
    for packet in [
        // An answer, an address that nobody advertises, an announcement of the address by somebody else.
        arp(2, (ASKER_MAC, ASKER), ([0; 6], VIP.0)),
        arp(1, (ASKER_MAC, ASKER), ([0; 6], Bed::VIPS[1].0)),
        arp(1, (ASKER_MAC, VIP.0), ([0; 6], VIP.0)),
        // Cut off, and of another hardware.
        arp(1, (ASKER_MAC, ASKER), ([0; 6], VIP.0))[..27].to_vec(),
        [&[0, 6][..], &arp(1, (ASKER_MAC, ASKER), ([0; 6], VIP.0))[2..]].concat(),
    ] {
        bed.passed(1, &broadcast(&packet));
    }
    // Somebody asks whether the address is free (RFC 5227).
    let probe = broadcast(&arp(1, (ASKER_MAC, [0; 4]), ([0; 6], VIP.0)));
    let reply = arp(2, (Bed::CLIENT_SIDE, VIP.0), (ASKER_MAC, [0; 4]));
    let expected = frame(ASKER_MAC, Bed::CLIENT_SIDE, &[], [8, 6], &reply);
    assert_eq!(bed.run(1, &probe), (Verdict::Transmit, expected));
}

/// An IPv6 packet with this ICMPv6 message, whose checksum is made.
fn icmp(source: [u8; 16], destination: [u8; 16], ttl: u8, mut message: Vec<u8>) -> Vec<u8> {
    let length = message.len() as u8;
    let pseudo = [&source[..], &destination, &[0, length, 0, ICMPV6], &message].concat();
    let sum = checksum(&pseudo);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    [&[0x60, 0, 0, 0, 0, length, ICMPV6, ttl][..], &source, &destination, &message].concat()
}

#[test]
fn a_solicitation_is_answered_with_an_advertisement() {
    FAMILY.set(family::IPV6);
    let bed = bed();
    let (vip, asker) = (address(VIP.0), address(ASKER));
    let mut group = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0, 0, 0];
    group[13..].copy_from_slice(&vip[13..]);
    let group_mac = [0x33, 0x33, 0xff, vip[13], vip[14], vip[15]];
    let all = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    let solicitation =
        |target: [u8; 16], option: &[u8]| [&[135, 0, 0, 0, 0, 0, 0, 0][..], &target, option].concat();
    let advertisement =
        |flags: u8| [&[136, 0, 0, 0, flags, 0, 0, 0][..], &vip, &[2, 1], &Bed::CLIENT_SIDE].concat();
    let option = [&[1, 1][..], &ASKER_MAC].concat();
    let ethernet = |to, from, packet: &[u8]| frame(to, from, &[], [0x86, 0xdd], packet);
    for (to, mac) in [(group, group_mac), (vip, Bed::CLIENT_SIDE)] {
        let input = ethernet(mac, ASKER_MAC, &icmp(asker, to, 255, solicitation(vip, &option)));
        let expected = ethernet(ASKER_MAC, Bed::CLIENT_SIDE, &icmp(vip, asker, 255, advertisement(0x60)));
        assert_eq!(bed.run(1, &input), (Verdict::Transmit, expected));
    }
    // Somebody wants to take the address: all are told.
    let input = ethernet(group_mac, ASKER_MAC, &icmp([0; 16], group, 255, solicitation(vip, &[])));
    let expected =
        ethernet([0x33, 0x33, 0, 0, 0, 1], Bed::CLIENT_SIDE, &icmp(vip, all, 255, advertisement(0x20)));
    assert_eq!(bed.run(1, &input), (Verdict::Transmit, expected));
    for packet in [
        icmp(asker, group, 254, solicitation(vip, &option)),
        icmp(asker, group, 255, solicitation(address(Bed::VIPS[1].0), &option)),
        icmp(vip, group, 255, solicitation(vip, &option)),
        icmp(asker, group, 255, advertisement(0)),
    ] {
        bed.passed(1, &ethernet(group_mac, ASKER_MAC, &packet));
    }
    // Its target would lie behind the packet's end (RFC 4861, section 7.1.1).
    for length in [0, 8, 23] {
        let mut packet = icmp(asker, group, 255, solicitation(vip, &option));
        packet[5] = length;
        bed.passed(1, &ethernet(group_mac, ASKER_MAC, &packet));
    }
    assert_eq!(bed.kernel.dropped(), 0);
}
