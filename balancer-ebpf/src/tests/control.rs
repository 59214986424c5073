//! ICMP: echo, errors that are passed on, and errors of our own.

use std::{vec, vec::Vec};

use balancer_common::{ICMPV6, Reason, UDP, endpoint, family, role};

use super::{
    bed::{Bed, CLIENT, SYN_ACK, VIP, datagram, to_client, to_vip},
    frame::{ACK, Endpoint, FAMILY, Frame, address, checksum, from_client, hex, ip_header},
};
use crate::Verdict;

/// A router on the client's side.
const ROUTER: [u8; 4] = [10, 0, 1, 254];

/// An IP packet with this ICMP message, whose checksum is made.
fn message(source: [u8; 4], destination: [u8; 4], ttl: u8, mut icmp: Vec<u8>) -> Vec<u8> {
    let is_ipv4 = FAMILY.get() == family::IPV4;
    let ends = [address(source), address(destination)];
    let ends = if is_ipv4 { [source, destination].concat() } else { ends.concat() };
    icmp[2..4].fill(0);
    let [high, low] = (icmp.len() as u16).to_be_bytes();
    let pseudo = if is_ipv4 { vec![] } else { [&ends[..], &[0, 0, high, low, 0, 0, 0, ICMPV6]].concat() };
    let sum = checksum(&[pseudo, icmp.clone()].concat());
    icmp[2..4].copy_from_slice(&sum.to_be_bytes());
    if !is_ipv4 {
        return [&[0x60, 0, 0, 0, high, low, ICMPV6, ttl][..], &ends, &icmp].concat();
    }
    let [high, low] = (icmp.len() as u16 + 20).to_be_bytes();
    let mut ip = [&[0x45, 0, high, low, 0x12, 0x34, 0, 0, ttl, 1, 0, 0][..], &ends].concat();
    let sum = checksum(&ip);
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    [ip, icmp].concat()
}

fn ethernet(to: [u8; 6], from: [u8; 6], packet: &[u8]) -> Vec<u8> {
    let kind: [u8; 2] = if packet[0] >> 4 == 4 { [8, 0] } else { [0x86, 0xdd] };
    [&to[..], &from, &kind, packet].concat()
}

const HERE: [u8; 6] = [2, 0, 0, 0, 0, 1];
const THERE: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// An error that says that `quoted`, of which `length` bytes behind the IP header are shown, was too big.
fn too_big(source: [u8; 4], destination: [u8; 4], ttl: u8, quoted: &Frame, length: usize) -> Vec<u8> {
    let kind = if FAMILY.get() == family::IPV4 { [3, 4] } else { [2, 0] };
    let quoted = &quoted.bytes()[14..][..ip_header() + length];
    message(source, destination, ttl, [&kind[..], &[0, 0, 0, 0, 5, 0x78], quoted].concat())
}

both! {
    fn an_echo_request_to_a_service_is_answered() {
        let bed = Bed::new(1);
        let (request, reply) = if FAMILY.get() == family::IPV4 { (8, 0) } else { (128, 129) };
        for payload in [0, 1, 56, 1400] {
            let echo = |kind: u8| [&[kind, 0, 0, 0, 0x42, 0x42, 0, 1][..], &vec![0x61; payload]].concat();
            let input = ethernet(HERE, THERE, &message(CLIENT.0, VIP.0, 1, echo(request)));
            let expected = ethernet(THERE, HERE, &message(VIP.0, CLIENT.0, 64, echo(reply)));
            assert_eq!(bed.run(1, &input), (Verdict::Transmit, expected));
        }
        assert_eq!((bed.traffic(), bed.flows(), bed.kernel.dropped()), ([0; 4], (0, 0), 0));
        let to = |destination, kind| message(CLIENT.0, destination, 9, vec![kind, 0, 0, 0, 0, 0, 0, 1]);
        for packet in [to(Bed::BACKENDS[0].0, request), to(VIP.0, reply), to(VIP.0, 13), to(VIP.0, 135)] {
            bed.passed(1, &ethernet(HERE, THERE, &packet));
        }
        // Who asks is a group, or claims to be the service.
        for source in [[224, 0, 0, 1], VIP.0].into_iter().skip(usize::from(ip_header() != 20)) {
            bed.passed(1, &ethernet(HERE, THERE, &message(source, VIP.0, 9, echo_of(request))));
        }
    }

    /// Padding is no part of a message, whatever it looks like.
    fn an_echo_request_that_is_cut_short_is_refused() {
        let bed = Bed::new(1);
        let request = if FAMILY.get() == family::IPV4 { 8 } else { 128 };
        let whole = ethernet(HERE, THERE, &message(CLIENT.0, VIP.0, 9, echo_of(request)));
        for length in 0..8 {
            let mut input = whole.clone();
            if FAMILY.get() == family::IPV4 {
                input[17] = 20 + length;
                input[24..26].fill(0);
                let sum = checksum(&input[14..34]);
                input[24..26].copy_from_slice(&sum.to_be_bytes());
            } else {
                input[19] = length;
            }
            bed.refused(1, &input, Reason::Malformed);
        }
    }

    /// From a router on the client's side, or the client itself: to the backend, about what that has sent.
    fn an_error_about_a_reply_goes_to_its_backend() {
        let bed = Bed::new(2);
        let backend = bed.establish(CLIENT);
        bed.request(&datagram());
        let (mac, server) = (Bed::BACKEND_MACS[backend], Bed::BACKENDS[backend]);
        for router in [ROUTER, CLIENT.0] {
            for length in [8, 16, 20] {
                let sent = to_client(backend, ACK);
                let seen = Frame { source: VIP, ..sent.clone() };
                let input = ethernet(HERE, THERE, &too_big(router, VIP.0, 64, &seen, length));
                let output = too_big(router, server.0, 63, &sent, length);
                let expected = ethernet(mac, Bed::BACKEND_SIDE, &output);
                assert_eq!(bed.run(1, &input), (Verdict::Redirect(1), expected), "{length}");
            }
        }
        // The other service's flow is the first of its own.
        let other = Bed::BACKENDS[0];
        let sent = Frame::udp(other, CLIENT, b"answer");
        let seen = Frame { source: VIP, ..sent.clone() };
        let input = ethernet(HERE, THERE, &too_big(ROUTER, VIP.0, 64, &seen, 8));
        let expected = ethernet(
            Bed::BACKEND_MACS[0],
            Bed::BACKEND_SIDE,
            &too_big(ROUTER, other.0, 63, &sent, 8),
        );
        assert_eq!(bed.run(1, &input), (Verdict::Redirect(1), expected));
        assert_eq!(bed.kernel.drops(), []);
    }

    /// From a backend, or a router in front of it: to the client, from the service.
    fn an_error_about_a_request_goes_to_its_client() {
        let bed = Bed::new(1);
        bed.request(&datagram());
        for from in [Bed::BACKENDS[0].0, [10, 0, 2, 254]] {
            let sent = datagram();
            let seen = Frame { destination: Bed::BACKENDS[0], ..sent.clone() };
            let input = ethernet(HERE, THERE, &too_big(from, CLIENT.0, 64, &seen, 11));
            let expected =
                ethernet(Bed::CLIENT_MAC, Bed::CLIENT_SIDE, &too_big(VIP.0, CLIENT.0, 63, &sent, 11));
            assert_eq!(bed.run(2, &input), (Verdict::Redirect(0), expected));
        }
        // It is no answer, and no load.
        assert_eq!(bed.kernel.counted(0).reply.packets, 0);
        assert_eq!(bed.flows(), (1, 0));
    }

    fn an_error_of_no_flow_is_refused_if_it_is_about_a_service() {
        let mut bed = Bed::new(1);
        let about = |source: Endpoint, destination: Endpoint| Frame::udp(source, destination, b"x");
        let error = |to: [u8; 4], quoted: &Frame| ethernet(HERE, THERE, &too_big(ROUTER, to, 64, quoted, 8));
        let from_service = error(VIP.0, &about(VIP, CLIENT));
        bed.refused(1, &from_service, Reason::UnknownIcmp);
        // About what the host itself has sent from the same address.
        bed.passed(1, &error(VIP.0, &about((VIP.0, 53), CLIENT)));
        bed.passed(1, &error([10, 0, 1, 1], &about(([10, 0, 1, 1], 9), CLIENT)));
        let to_backend = error(CLIENT.0, &about(CLIENT, Bed::BACKENDS[0]));
        bed.passed(2, &to_backend);
        let key = bed.kernel.key(Bed::BACKENDS[0], UDP);
        bed.kernel.endpoints.insert(key, endpoint::SERVER);
        bed.refused(2, &to_backend, Reason::UnknownIcmp);
        bed.kernel.roles.insert(address(CLIENT.0), role::LOCAL);
        bed.passed(2, &to_backend);
        // Too short to say what it is about.
        bed.passed(1, &ethernet(HERE, THERE, &too_big(ROUTER, VIP.0, 64, &about(VIP, CLIENT), 7)));
    }

    fn an_error_is_routed_like_any_packet() {
        let mut bed = Bed::new(1);
        bed.request(&datagram());
        let seen = Frame::udp(VIP, CLIENT, b"answer");
        let error = |ttl| ethernet(HERE, THERE, &too_big(ROUTER, VIP.0, ttl, &seen, 8));
        bed.kernel.sends_icmp.set(true);
        bed.refused(1, &error(1), Reason::TtlExceeded);
        bed.kernel.backend_hop(0).mtu = 40;
        bed.refused(1, &error(64), Reason::TooBig);
        bed.kernel.backend_hop(0).mtu = 0;
        bed.refused(1, &error(64), Reason::NoEgress);
    }

    /// What we refuse for its TTL or its size, its sender is told.
    fn a_refused_packet_is_answered() {
        let mut bed = Bed::new(1);
        bed.kernel.sends_icmp.set(true);
        bed.establish(CLIENT);
        bed.kernel.backend_hop(0).mtu = 1400;
        let [time, size] =
            if FAMILY.get() == family::IPV4 { [[11, 0], [3, 4]] } else { [[3, 0], [2, 0]] };
        let large = Frame { payload: vec![3; 1441 - ip_header()], ..to_vip(ACK) };
        for (frame, kind, most) in [(Frame { ttl: 1, ..to_vip(ACK) }, time, 0_u16), (large, size, 1400)] {
            let mut input = frame.bytes();
            if FAMILY.get() == family::IPV4 {
                // Without permission to split it.
                input[20] = 0x40;
                input[24..26].fill(0);
                let sum = checksum(&input[14..34]);
                input[24..26].copy_from_slice(&sum.to_be_bytes());
            }
            let [high, low] = most.to_be_bytes();
            let quoted = &input[14..][..ip_header() + 8];
            let icmp = [&kind[..], &[0, 0, 0, 0, high, low], quoted].concat();
            let mut expected = message(VIP.0, CLIENT.0, 64, icmp);
            if FAMILY.get() == family::IPV4 {
                expected[4..8].copy_from_slice(&[0, 0, 0x40, 0]);
                expected[10..12].fill(0);
                let sum = checksum(&expected[..20]);
                expected[10..12].copy_from_slice(&sum.to_be_bytes());
            }
            assert_eq!(bed.run(1, &input), (Verdict::Transmit, ethernet(THERE, HERE, &expected)));
        }
        assert_eq!(bed.kernel.drops(), [(Reason::TtlExceeded, 1), (Reason::TooBig, 1)]);
        // An answer has its flow's way back, too.
        let reply = Frame { ttl: 1, ..to_client(0, SYN_ACK) }.bytes();
        assert_eq!(bed.run(2, &reply).0, Verdict::Transmit);
    }
}

fn echo_of(kind: u8) -> Vec<u8> {
    vec![kind, 0, 0, 0, 0, 0, 0, 1]
}

/// IPv4 that may be split is not answered: its sender does not look for the path's MTU.
#[test]
fn what_may_be_split_is_only_dropped() {
    let mut bed = Bed::new(1);
    bed.kernel.sends_icmp.set(true);
    bed.kernel.backend_hop(0).mtu = 1000;
    bed.refused(1, &Frame { payload: vec![0; 1200], ..datagram() }.bytes(), Reason::TooBig);
}

/// Published: a router's message about a reply, and an echo request.
#[test]
fn known_messages_leave_with_known_bytes() {
    let bed = Bed::new(1);
    bed.establish((CLIENT.0, 40_004));
    let input = "450000381234000040019a890a0001fec000020a0304168900000578450005dc123440003f0656d4c000020a0a00010a00509c4411223344";
    let output = "45000038123400003f0151890a0001fe0a00020b0304f74800000578450005dc123440003f060cd40a00020b0a00010a1f909c4411223344";
    let (verdict, bytes) = bed.run(1, &from_client(input));
    assert_eq!((verdict, &bytes[14..]), (Verdict::Redirect(1), &hex(output)[..]));
    let input = "450000241234000040019b910a00010ac000020a08002427424200016162636465666768";
    let output = "450000241234000040019b91c000020a0a00010a00002c27424200016162636465666768";
    let (verdict, bytes) = bed.run(1, &from_client(input));
    assert_eq!((verdict, &bytes[14..]), (Verdict::Transmit, &hex(output)[..]));
}
