//! Datagrams in fragments.

use std::vec::Vec;

use balancer_common::{FRAGMENT_TIME, Reason, family};

use super::{
    bed::{Bed, CLIENT, VIP, answer, datagram},
    frame::{
        Endpoint, FAMILY, Frame, address, checksum, from_client, hex, ip_header, l3_at, sum_anew, translated,
    },
};
use crate::Verdict;

/// Bytes of the first part's payload, a multiple of 8.
const FIRST: usize = 64;

/// The parts of a datagram: the first, whose UDP header and checksum are as if it were all, and another.
fn parts(frame: Frame) -> [Vec<u8>; 2] {
    let payload = Vec::from_iter((0..FIRST as u8 - 8).cycle().take(FIRST - 8));
    let frame = Frame { payload, ..frame };
    if FAMILY.get() == family::IPV4 {
        let part = |field: [u8; 2]| {
            let mut bytes = frame.bytes();
            bytes[20..22].copy_from_slice(&field);
            sum_anew(&mut bytes);
            bytes
        };
        return [part([0x20, 0]), part([0, FIRST as u8 / 8])];
    }
    let part = |field: [u8; 2]| {
        let header = (44, Vec::from_iter([0, field[0], field[1], 0xbe, 0xef, 0, 1]));
        Frame { extensions: Vec::from_iter([header]), ..frame.clone() }.bytes()
    };
    [part([0, 1]), part([0, FIRST as u8])]
}

/// A part that is not the first as it must leave: nothing behind the IP header has changed.
fn moved(input: &[u8], to: [u8; 6], from: [u8; 6], source: Endpoint, destination: Endpoint) -> Vec<u8> {
    let mut frame = input.to_vec();
    let l3 = l3_at(&frame);
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    if FAMILY.get() == family::IPV4 {
        frame[l3 + 8] -= 1;
        frame[l3 + 12..l3 + 16].copy_from_slice(&source.0);
        frame[l3 + 16..l3 + 20].copy_from_slice(&destination.0);
        frame[l3 + 10..l3 + 12].fill(0);
        let sum = checksum(&frame[l3..l3 + 20]);
        frame[l3 + 10..l3 + 12].copy_from_slice(&sum.to_be_bytes());
    } else {
        frame[l3 + 7] -= 1;
        frame[l3 + 8..l3 + 24].copy_from_slice(&address(source.0));
        frame[l3 + 24..l3 + 40].copy_from_slice(&address(destination.0));
    }
    frame
}

both! {
    fn the_rest_follows_the_first_both_ways() {
        let bed = Bed::new(3);
        let [first, rest] = parts(datagram());
        let (to, from, backend) = (Bed::BACKEND_MACS[0], Bed::BACKEND_SIDE, Bed::BACKENDS[0]);
        let expected = translated(&first, to, from, CLIENT, backend);
        assert_eq!(bed.run(1, &first), (Verdict::Redirect(1), expected));
        for _ in 0..2 {
            let expected = moved(&rest, to, from, CLIENT, backend);
            assert_eq!(bed.run(1, &rest), (Verdict::Redirect(1), expected));
        }
        let [first, rest] = parts(answer(0));
        let expected = translated(&first, Bed::CLIENT_MAC, Bed::CLIENT_SIDE, VIP, CLIENT);
        assert_eq!(bed.run(2, &first), (Verdict::Redirect(0), expected));
        let expected = moved(&rest, Bed::CLIENT_MAC, Bed::CLIENT_SIDE, VIP, CLIENT);
        assert_eq!(bed.run(2, &rest), (Verdict::Redirect(0), expected));
        let length = (rest.len() - 14) as u64;
        assert_eq!((bed.traffic(), bed.flows()), ([3, 3 * length, 2, 2 * length], (1, 0)));
        assert_eq!(bed.kernel.drops(), []);
    }

    fn the_rest_is_refused_without_the_first() {
        let bed = Bed::new(1);
        let [first, rest] = parts(datagram());
        bed.refused(1, &rest, Reason::Fragment);
        bed.run(1, &first);
        bed.wait(FRAGMENT_TIME);
        assert_eq!(bed.run(1, &rest).0, Verdict::Redirect(1));
        bed.wait(1);
        bed.refused(1, &rest, Reason::Fragment);
        // Nor does it follow when the place of the flow is another's.
        bed.run(1, &first);
        bed.kernel.memory.replace_all();
        let (verdict, output) = bed.run(1, &rest);
        assert_eq!((verdict, output), (Verdict::Drop, rest));
    }

    /// To a port of the host itself at a service's address: none of it is ours.
    fn the_rest_of_what_passes_passes() {
        let bed = Bed::new(1);
        let [first, rest] = parts(Frame::udp(CLIENT, (VIP.0, 53), b""));
        bed.passed(1, &first);
        bed.passed(1, &rest);
    }

    fn a_part_that_may_not_go_on_is_refused() {
        let mut bed = Bed::new(1);
        let [first, rest] = parts(datagram());
        bed.run(1, &first);
        let mut last = rest.clone();
        last[if ip_header() == 20 { 22 } else { 21 }] = 1;
        bed.refused(1, &last, Reason::TtlExceeded);
        bed.kernel.backend_hop(0).mtu = (rest.len() - 15) as u16;
        bed.refused(1, &rest, Reason::TooBig);
    }
}

/// What is said of a datagram is said of its first part alone (RFC 1122, section 3.2.2).
#[test]
fn a_later_part_is_not_answered() {
    let mut bed = Bed::new(1);
    bed.kernel.sends_icmp.set(true);
    let [first, mut rest] = parts(datagram());
    bed.run(1, &first);
    // No router may split it.
    rest[20] |= 0x40;
    sum_anew_header(&mut rest);
    let mut last = rest.clone();
    last[22] = 1;
    sum_anew_header(&mut last);
    bed.refused(1, &last, Reason::TtlExceeded);
    bed.kernel.backend_hop(0).mtu = (rest.len() - 15) as u16;
    bed.refused(1, &rest, Reason::TooBig);
}

/// The checksum of an IPv4 header without tags and options.
fn sum_anew_header(frame: &mut [u8]) {
    frame[24..26].fill(0);
    let sum = checksum(&frame[14..34]);
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
}

/// What lies behind the packet's end is no fragment header.
#[test]
fn a_fragment_header_in_the_padding_is_none() {
    FAMILY.set(family::IPV6);
    let bed = Bed::new(1);
    let [first, rest] = parts(datagram());
    bed.run(1, &first);
    for length in 0..8 {
        let mut short = rest.clone();
        short[19] = length;
        short[18] = 0;
        bed.refused(1, &short, Reason::Malformed);
    }
}

/// Published: a payload that looks like the ports of another flow.
#[test]
fn known_fragments_leave_with_known_bytes() {
    let bed = Bed::new(1);
    let tail = |length: usize| Vec::from_iter((0..=255).cycle().take(length));
    let rows = [
        (
            "450005dcbeef20004011c90d0a00010ac000020a9c43005007d8295f",
            "450005dcbeef20003f11800d0a00010a0a00020b9c431f9007d8c01e",
            1472,
        ),
        (
            "45000224beef00b94011ec0c0a00010ac000020a9c440050",
            "45000224beef00b93f11a30c0a00010a0a00020b9c440050",
            524,
        ),
    ];
    for (input, output, length) in rows {
        let (verdict, bytes) = bed.run(1, &[from_client(input), tail(length)].concat());
        assert_eq!(
            (verdict, &bytes[14..]),
            (Verdict::Redirect(1), &[hex(output), tail(length)].concat()[..])
        );
    }
    assert_eq!((bed.flows(), bed.traffic()), ((1, 0), [2, 2048, 0, 0]));
}
