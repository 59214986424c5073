//! Sums that are changed incrementally against sums that are computed anew.

use std::{vec, vec::Vec};

use balancer_common::{FlowEntry, FlowKey, UDP};
use bytemuck::Zeroable;
use proptest::{collection::vec as bytes, prelude::*};

use super::{
    bed::Bed,
    buffer::Buffer,
    cases,
    frame::{ACK, Endpoint, FAMILY, Frame, L4, SYN, address, l4_checksum_at, sum_anew, translated},
};
use crate::{
    checksum::{Delta, update},
    enter,
    parse::parse,
    rewrite::{Translation, rewrite},
};

const TO: [u8; 6] = [2, 0, 0, 0, 0, 11];
const FROM: [u8; 6] = [2, 0, 0, 0, 0, 10];

/// What a flow entry with these endpoints holds, from the parsed frame's.
fn entry(frame: &Frame, source: Endpoint, destination: Endpoint) -> FlowEntry {
    let addresses = Delta::default()
        .address(&address(frame.source.0), &address(source.0))
        .address(&address(frame.destination.0), &address(destination.0));
    let ports = Delta::default()
        .word(frame.source.1.to_be_bytes(), source.1.to_be_bytes())
        .word(frame.destination.1.to_be_bytes(), destination.1.to_be_bytes());
    FlowEntry {
        key: FlowKey { family: FAMILY.get(), ..FlowKey::zeroed() },
        new_source: source.0,
        new_destination: destination.0,
        new_source_port: source.1.to_be_bytes(),
        new_destination_port: destination.1.to_be_bytes(),
        ip_delta: addresses.and(Delta::TTL).fold(),
        l4_delta: addresses.and(ports).fold(),
        ..FlowEntry::zeroed()
    }
}

/// Rewrites a frame as a flow of this entry does.
fn rewritten(input: &[u8], entry: &FlowEntry) -> Vec<u8> {
    let bed = Bed::new(1);
    let found = bed.kernel.memory.put(0, entry);
    let ends =
        [entry.key.source, entry.key.destination, entry.new_source, entry.new_destination].map(address);
    enter::set_addresses(&bed.kernel, 0, ends.each_ref());
    let buffer = Buffer::new(input);
    let parsed = parse(&buffer, &bed.kernel).unwrap_or_else(|_| panic!("not a frame: {input:02x?}"));
    rewrite(&parsed, &Translation::of(&bed.kernel, &found), 1, TO, FROM);
    buffer.bytes()
}

pub fn endpoints() -> impl Strategy<Value = Endpoint> {
    // Words of all zeros and all ones are where one's-complement sums go wrong.
    let octet = prop_oneof![Just(0_u8), Just(0xff), any::<u8>()];
    ([octet.clone(), octet.clone(), octet.clone(), octet], prop_oneof![Just(0), Just(0xffff), any::<u16>()])
}

pub fn frames() -> impl Strategy<Value = Frame> {
    let words = |most: usize| bytes(any::<[u8; 4]>(), 0..=most).prop_map(|words| words.concat());
    let tcp = (any::<u8>(), words(10)).prop_map(|(flags, options)| L4::Tcp { flags, options });
    let udp = prop::bool::weighted(0.8).prop_map(|is_summed| L4::Udp { is_summed });
    let l4 = prop_oneof![tcp, udp];
    let payload = bytes(any::<u8>(), 0..24);
    (endpoints(), endpoints(), 2_u8.., prop_oneof![3 => Just(vec![]), 1 => words(10)], l4, payload).prop_map(
        |(source, destination, ttl, options, l4, payload)| Frame {
            ttl,
            options,
            l4,
            payload,
            ..Frame::tcp(source, destination, 0)
        },
    )
}

proptest! {
    #![proptest_config(cases(20_000))]

    /// Header, TCP and UDP sums after any translation are those of the packet that leaves.
    #[test]
    fn an_incremental_sum_equals_a_full_one(frame in frames(), source in endpoints(), destination in endpoints()) {
        let input = frame.bytes();
        let output = rewritten(&input, &entry(&frame, source, destination));
        let expected = translated(&input, TO, FROM, source, destination);
        prop_assert_eq!(&output, &expected);
        prop_assert_eq!(output[l4_checksum_at(&output)..][..2] == [0, 0] && output[23] == UDP,
            matches!(frame.l4, L4::Udp { is_summed: false }));
    }

}

proptest! {
    #![proptest_config(cases(2_000))]

    /// There and back again is the packet as it was, but for the TTL.
    #[test]
    fn the_way_back_undoes_the_translation(frame in frames(), source in endpoints(), destination in endpoints()) {
        prop_assume!(frame.ttl > 2);
        let there = rewritten(&frame.bytes(), &entry(&frame, source, destination));
        let moved = Frame { source, destination, ..frame.clone() };
        let back = rewritten(&there, &entry(&moved, frame.source, frame.destination));
        let expected = Frame { to: TO, from: FROM, ttl: frame.ttl - 2, ..frame };
        prop_assert_eq!(back, expected.bytes());
    }

    /// Reading all words in the other byte order gives the same sum in that order (RFC 1071, section 2B).
    #[test]
    fn byte_order_does_not_matter(sum: [u8; 2], old: [u8; 2], new: [u8; 2], from: [u8; 16], to: [u8; 16]) {
        fn swap<const N: usize>(mut bytes: [u8; N]) -> [u8; N] {
            bytes.chunks_mut(2).for_each(<[u8]>::reverse);
            bytes
        }
        let here = update(sum, Delta::default().word(old, new).address(&from, &to).fold());
        let there = Delta::default().word(swap(old), swap(new)).address(&swap(from), &swap(to)).fold();
        prop_assert_eq!(swap(update(swap(sum), there)), here);
    }

    /// A folded delta is what its parts are, in any order.
    #[test]
    fn deltas_add_up(sum: [u8; 2], words: [([u8; 2], [u8; 2]); 4]) {
        let parts = words.map(|(old, new)| Delta::default().word(old, new));
        let together = parts.into_iter().fold(Delta::default(), Delta::and).fold();
        let one_by_one = parts.into_iter().rev().fold(sum, |sum, part| update(sum, part.fold()));
        prop_assert_eq!(update(sum, together), one_by_one);
    }
}

/// One's-complement addition as arithmetic modulo 0xffff, where 0 comes out only of 0 + 0.
fn updated(old: u16, delta: u16) -> u16 {
    match u32::from(!old) + u32::from(delta) {
        0 => 0xffff,
        sum => !(((sum - 1) % 0xffff + 1) as u16),
    }
}

#[test]
fn every_old_sum_is_updated_exactly() {
    for delta in [0, 1, 0x00ff, 0xff00, 0x7fff, 0x8000, 0xfeff, 0xfffe, 0xffff] {
        for old in 0..=u16::MAX {
            let new = u16::from_ne_bytes(update(old.to_ne_bytes(), delta));
            assert_eq!(new, updated(old, delta), "{old:04x} + {delta:04x}");
        }
    }
}

/// Carries out of 32 bits are added back in, not lost.
#[test]
fn the_largest_changes_are_folded_exactly() {
    let widest = Delta::default().address(&[0; 16], &[0xff; 16]);
    for word in [0, 1, 2, 0xfffe, 0xffff_u16] {
        for parts in 1..=2 {
            let addresses = [widest; 2].into_iter().take(parts).fold(Delta::default(), Delta::and);
            let delta = addresses.word(0xffff_u16.to_ne_bytes(), word.to_ne_bytes()).fold();
            // Each 0xffff is a zero of one's-complement arithmetic.
            let expected = if word == 0 { 0xffff } else { word };
            assert_eq!(delta, expected, "{parts} addresses and {word:04x}");
        }
    }
}

/// Over all old sums that a datagram can have: UDP's 0 stays, and a computed 0 is sent as ffff, but for TCP.
#[test]
fn zero_means_none_for_udp_alone() {
    let (source, destination) = (([10, 0, 1, 10], 40_000), ([192, 0, 2, 10], 80));
    let backend = ([10, 0, 2, 11], 8080);
    for frame in [Frame::udp(source, destination, &[0, 0]), Frame::tcp(source, destination, 0x10)] {
        let entry = entry(&frame, source, backend);
        let delta = u16::from_be_bytes(entry.l4_delta.to_ne_bytes());
        let mut input = frame.bytes();
        let (is_udp, place) = (input[23] == UDP, l4_checksum_at(&input));
        let mut zeros = 0;
        for old in 0..=u16::MAX {
            input[place..place + 2].copy_from_slice(&old.to_be_bytes());
            let output = rewritten(&input, &entry);
            let new = u16::from_be_bytes([output[place], output[place + 1]]);
            let expected = match (updated(old, delta), is_udp) {
                (_, true) if old == 0 => 0,
                (0, true) => 0xffff,
                (sum, _) => sum,
            };
            assert_eq!(new, expected, "old sum {old:04x}, UDP: {is_udp}");
            zeros += u32::from(new == 0);
        }
        assert_eq!(zeros, 1, "UDP: that of 0; TCP: the one that becomes 0");
    }
}

/// The sum of the IPv4 header may become 0, and 0 is right there.
#[test]
fn an_ip_header_sum_may_become_zero() {
    let source = ([10, 0, 1, 10], 40_000);
    let frame = Frame::udp(source, ([192, 0, 2, 10], 80), b"hi");
    let mut input = frame.bytes();
    input[18..20].copy_from_slice(&[0x64, 0xbb]);
    sum_anew(&mut input);
    assert_eq!(input[24..26], [0x49, 0x00]);
    let output = rewritten(&input, &entry(&frame, source, ([10, 0, 2, 11], 8080)));
    assert_eq!(output[24..26], [0, 0]);
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
