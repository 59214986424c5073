//! The ways to a backend whose replies go past the balancer: every byte that leaves, and the life of a flow of which only
//! requests are seen.

use std::{vec, vec::Vec};

use balancer_common::{BackendId, FlowState, NO_TWIN, Reason, Traffic, UDP, family, forward, mapped};
use proptest::prelude::*;

use super::{
    bed::{Bed, CLIENT, FIN_ACK, SYN_ACK, UNIT, VIP, datagram, to_vip},
    cases,
    frame::{
        ACK, Endpoint, FAMILY, Frame, L4, PSH, RST, SYN, checksum, ip_header, l3_at, l4_checksum_at, sum_anew,
    },
};
use crate::Verdict;

/// Addresses of the balancer and of a backend on the path of wrapped packets, in each family.
const PATH4: [[u8; 16]; 2] = [mapped([10, 0, 2, 1]), mapped([10, 0, 2, 11])];
const PATH6: [[u8; 16]; 2] = [
    [0x20, 1, 0xd, 0xb8, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    [0x20, 1, 0xd, 0xb8, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x11],
];
const PATHS: [(u8, [[u8; 16]; 2]); 2] = [(family::IPV4, PATH4), (family::IPV6, PATH6)];
const GUE_PORT: u16 = 6080;

/// A bed whose only backend is reached by this way, and along this path.
fn bed(mode: u8, path: [[u8; 16]; 2]) -> Bed {
    let mut bed = Bed::new(1);
    let backend = &mut bed.kernel.backends[0];
    if mode != forward::DSR {
        [backend.snat_address, backend.address] = path;
        backend.snat_prefix = 128;
    }
    backend.tunnel_port = GUE_PORT.to_be_bytes();
    bed.set_mode(mode);
    // Nobody answers from there.
    bed.kernel.roles.retain(|address, _| *address != super::frame::address(Bed::BACKENDS[0].0));
    bed
}

fn dsr() -> Bed {
    bed(forward::DSR, PATH4)
}

/// The frame with the backend's MAC.
fn handed_on(input: &[u8]) -> Vec<u8> {
    [&Bed::BACKEND_MACS[0][..], &Bed::BACKEND_SIDE, &input[12..]].concat()
}

/// The IP packet of a frame, without the padding behind it, as a router passes it on.
fn routed(frame: &[u8]) -> Vec<u8> {
    let mut packet = frame[l3_at(frame)..].to_vec();
    if packet[0] >> 4 == 4 {
        packet.truncate(usize::from(u16::from_be_bytes([packet[2], packet[3]])));
        packet[8] -= 1;
        packet[10..12].fill(0);
        let sum = checksum(&packet[..usize::from(packet[0] & 15) * 4]);
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
    } else {
        packet.truncate(40 + usize::from(u16::from_be_bytes([packet[4], packet[5]])));
        packet[7] -= 1;
    }
    packet
}

/// What a tunnel's entry makes of a frame (RFC 2003, RFC 2473, RFC 6040; GUE variant 1); `lot` tells its flow from others.
fn wrapped(input: &[u8], mode: u8, path: [[u8; 16]; 2], lot: u16) -> Vec<u8> {
    let l3 = l3_at(input);
    let inner = routed(input);
    let is_ipv4 = inner[0] >> 4 == 4;
    let class = if is_ipv4 { inner[1] } else { inner[0] << 4 | inner[1] >> 4 };
    let mut content = inner.clone();
    let mut protocol = if is_ipv4 { 4 } else { 41 };
    if mode == forward::GUE {
        let length = inner.len() as u16 + 8;
        let udp = [0xc000 | lot & 0x3fff, GUE_PORT, length, 0].map(u16::to_be_bytes);
        content = [&udp.concat()[..], &inner].concat();
        protocol = UDP;
    }
    let [source, destination] = path;
    let length = content.len() as u16;
    let (kind, header) = if source[..12] == mapped([0; 4])[..12] {
        let [high, low] = (length + 20).to_be_bytes();
        let fixed = [0x45, class, high, low, 0, 0, 0x40, 0, 64, protocol, 0, 0];
        let mut header = [&fixed[..], &source[12..], &destination[12..]].concat();
        let sum = checksum(&header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        ([8, 0], header)
    } else {
        let word = 6 << 28 | u32::from(class) << 20 | u32::from(lot);
        let rest = [&length.to_be_bytes()[..], &[protocol, 64]].concat();
        ([0x86, 0xdd], [&word.to_be_bytes()[..], &rest, &source, &destination].concat())
    };
    [&Bed::BACKEND_MACS[0][..], &Bed::BACKEND_SIDE, &input[12..l3 - 2], &kind, &header, &content].concat()
}

/// What tells the flow of the only entry from others.
fn lot(bed: &Bed) -> u16 {
    let (_, entry) = bed.kernel.memory.live().next().unwrap();
    entry.exchange as u16
}

/// Segments and datagrams of all kinds, in the order in which one flow could send them.
fn packets() -> Vec<Frame> {
    let tcp = |flags, length| Frame { payload: vec![7; length], ..Frame::tcp(CLIENT, VIP, flags) };
    let tagged = |tags: &[[u8; 4]], frame: Frame| Frame { tags: tags.to_vec(), ..frame };
    let long = L4::Tcp { flags: ACK, options: vec![1; 40] };
    let mut frames = vec![
        tcp(SYN, 0),
        tcp(ACK, 0),
        tcp(ACK | PSH, 1000),
        Frame { l4: long, options: vec![1; 40], ..tcp(ACK, 3) },
        tagged(&[[0x81, 0, 0, 10]], tcp(ACK, 1)),
        tagged(&[[0x88, 0xa8, 0, 5], [0x81, 0, 0, 7]], tcp(ACK, 1)),
        tcp(FIN_ACK, 0),
        datagram(),
        datagram(),
    ];
    if FAMILY.get() == family::IPV4 {
        frames.push(Frame { l4: L4::Udp { is_summed: false }, ..datagram() });
    }
    frames
}

/// The same with the traffic class, or type of service, of congestion experienced.
fn marked(frame: &Frame) -> Vec<u8> {
    let mut bytes = frame.bytes();
    let l3 = l3_at(&bytes);
    if ip_header() == 20 {
        bytes[l3 + 1] = 0xb7;
        sum_anew(&mut bytes);
    } else {
        (bytes[l3], bytes[l3 + 1]) = (0x6b, 0x72);
    }
    bytes
}

both! {
    fn a_frame_of_dsr_gets_two_macs_and_no_other_byte_changes() {
        let bed = dsr();
        let mut bytes = [0; 2];
        for frame in packets() {
            for ttl in [1, 64] {
                let input = marked(&Frame { ttl, ..frame.clone() });
                assert_eq!(bed.run(1, &input), (Verdict::Redirect(1), handed_on(&input)), "{frame:?}");
                let length = (routed(&marked(&frame)).len()) as u64;
                bytes[0] += 1;
                bytes[1] += length;
            }
        }
        let counted = bed.kernel.counted(0);
        assert_eq!(counted.request, Traffic { packets: bytes[0], bytes: bytes[1] });
        assert_eq!((counted.reply, bed.kernel.drops()), (Traffic::default(), vec![]));
        // A checksum of ffff is as good as 0000, but is not ours to change.
        let mut input = datagram().bytes();
        let place = l4_checksum_at(&input);
        input[place..place + 2].fill(0xff);
        assert_eq!(bed.run(1, &input), (Verdict::Redirect(1), handed_on(&input)));
    }

    fn every_packet_is_wrapped_whole() {
        for mode in [forward::IPIP, forward::GUE] {
            for (family, path) in PATHS {
                let bed = bed(mode, path);
                let mut lots = Vec::new();
                for frame in packets() {
                    let input = marked(&frame);
                    let (verdict, output) = bed.run(1, &input);
                    let lot = bed.kernel.memory.live().map(|(_, entry)| entry).find_map(|entry| {
                        let is_its = entry.key.protocol == if matches!(frame.l4, L4::Udp { .. }) { 17 } else { 6 };
                        is_its.then_some(entry.exchange as u16)
                    });
                    let expected = wrapped(&input, mode, path, lot.unwrap());
                    assert_eq!((verdict, output), (Verdict::Redirect(1), expected), "{mode} {family} {frame:?}");
                    lots.push(lot.unwrap());
                }
                lots.dedup();
                assert_eq!(lots.len(), 2, "one for each of the two flows");
                assert_eq!(bed.kernel.drops(), []);
            }
        }
    }

    /// Padding below 60 bytes is neither wrapped about nor counted.
    fn padding_is_no_part_of_a_wrapped_packet() {
        for (_, path) in PATHS {
            let bed = bed(forward::GUE, path);
            let frame = Frame::udp(CLIENT, VIP, b"");
            let mut padded = frame.bytes();
            padded.extend([0xee; 18]);
            let (_, output) = bed.run(1, &padded);
            let whole = wrapped(&frame.bytes(), forward::GUE, path, lot(&bed));
            assert_eq!(output[..whole.len()], whole);
            assert_eq!(output[whole.len()..], [0xee; 18], "what was behind is behind still");
            assert_eq!(bed.kernel.counted(0).request, Traffic { packets: 1, bytes: ip_header() as u64 + 8 });
        }
    }

    /// Each flow has its own outer source, label and port, and keeps them.
    fn flows_are_spread_over_the_free_bits_of_the_source() {
        let path = [mapped([10, 254, 0, 0]), PATH4[1]];
        let mut bed = bed(forward::GUE, path);
        bed.kernel.backends[0].snat_prefix = 112;
        let mut seen = Vec::new();
        for port in 1..=200 {
            let input = Frame::udp((CLIENT.0, port), VIP, b"x").bytes();
            let (_, first) = bed.run(1, &input);
            assert_eq!(bed.run(1, &input).1, first);
            assert_eq!(first[26..28], [10, 254]);
            seen.push((first[28..30].to_vec(), first[34..36].to_vec()));
        }
        seen.sort();
        seen.dedup();
        assert!(seen.len() > 190, "{} of 200 flows are told apart", seen.len());
    }

    fn what_does_not_fit_is_refused_with_the_size_that_does() {
        for mode in [forward::IPIP, forward::GUE, forward::DSR] {
            let mut bed = bed(mode, PATH4);
            bed.kernel.backend_hop(0).mtu = 1472;
            let sized = |length: usize| Frame { payload: vec![1; length - ip_header() - 20], ..to_vip(ACK) };
            bed.run(1, &to_vip(SYN).bytes());
            assert_eq!(bed.run(1, &sized(1472).bytes()).0, Verdict::Redirect(1));
            bed.refused(1, &sized(1473).bytes(), Reason::TooBig);
            bed.kernel.sends_icmp.set(true);
            let mut whole = sized(1473).bytes();
            if ip_header() == 20 {
                whole[20] = 0x40;
                sum_anew(&mut whole);
            }
            let (verdict, answer) = bed.run(1, &whole);
            assert_eq!(verdict, Verdict::Transmit);
            let icmp = 14 + ip_header();
            let expected: &[u8] = if ip_header() == 20 { &[3, 4] } else { &[2, 0] };
            assert_eq!((&answer[icmp..icmp + 2], &answer[icmp + 6..icmp + 8]), (expected, &1472u16.to_be_bytes()[..]));
        }
    }

    fn a_tunnel_is_a_hop_and_dsr_is_none() {
        for mode in [forward::IPIP, forward::GUE] {
            let bed = bed(mode, PATH6);
            for frame in [to_vip(SYN), datagram()] {
                let taken = bed.kernel.taken(0);
                bed.refused(1, &Frame { ttl: 1, ..frame }.bytes(), Reason::TtlExceeded);
                assert_eq!(bed.kernel.taken(0), taken, "no slot is spent on it");
            }
        }
        let bed = dsr();
        bed.refused(1, &Frame { ttl: 0, ..to_vip(SYN) }.bytes(), Reason::TtlExceeded);
    }

    fn where_there_is_no_room_in_front_the_packet_is_refused() {
        let mut bed = bed(forward::IPIP, PATH4);
        bed.kernel.headroom.set(19);
        let (verdict, _) = bed.run(1, &datagram().bytes());
        assert_eq!((verdict, bed.kernel.drops()), (Verdict::Drop, vec![(Reason::NoHeadroom, 1)]));
        bed.kernel.headroom.set(20);
        assert_eq!(bed.run(1, &datagram().bytes()).0, Verdict::Redirect(1));
        bed.kernel.backends[0].address = PATH6[1];
        let (verdict, _) = bed.run(1, &datagram().bytes());
        assert_eq!((verdict, bed.kernel.drops()), (Verdict::Drop, vec![(Reason::NoHeadroom, 2)]));
    }

    /// One entry, which lives by what the client sends.
    fn a_connection_of_which_only_requests_are_seen() {
        let bed = dsr();
        let send = |flags| {
            let input = to_vip(flags).bytes();
            assert_eq!(bed.run(1, &input), (Verdict::Redirect(1), handed_on(&input)));
            let live = Vec::from_iter(bed.kernel.memory.live());
            let [(_, entry)] = live[..] else { panic!("{} entries", live.len()) };
            assert_eq!(entry.twin, NO_TWIN);
            bed.kernel.assert_active_is_exact();
            (entry.control.state(), u32::from(entry.timeout))
        };
        let service = Bed::TCP_SERVICE;
        let [half_open, idle, closing] =
            [service.half_open_timeout, service.idle_timeout, service.closing_timeout].map(u32::from);
        assert_eq!(send(SYN), (FlowState::HalfOpen, half_open));
        assert_eq!(send(SYN), (FlowState::HalfOpen, half_open));
        assert_eq!(send(ACK), (FlowState::HalfOpen, half_open));
        assert_eq!(send(ACK | PSH), (FlowState::Established, idle));
        assert_eq!(bed.flows(), (1, 0));
        assert_eq!(send(FIN_ACK), (FlowState::Closing, closing));
        assert_eq!(bed.flows(), (1, 1));
        // Half a connection goes on, to the same backend.
        assert_eq!(send(ACK), (FlowState::Closing, closing));
        // The next connection from the same port.
        assert_eq!(send(SYN), (FlowState::HalfOpen, half_open));
        assert_eq!(bed.flows(), (2, 1));
        assert_eq!(send(RST), (FlowState::ClientReset, closing));
        assert_eq!(bed.flows(), (2, 2));
        bed.wait(closing * UNIT + 1);
        assert_eq!(bed.run(1, &to_vip(ACK).bytes()).0, Verdict::Drop);
        assert_eq!(bed.kernel.drops(), [(Reason::UnknownFlow, 1)]);
    }

    fn a_conversation_of_which_only_requests_are_seen() {
        let bed = dsr();
        let states: Vec<FlowState> = (0..3)
            .map(|_| {
                assert_eq!(bed.run(1, &datagram().bytes()).0, Verdict::Redirect(1));
                bed.kernel.memory.live().next().unwrap().1.control.state()
            })
            .collect();
        assert_eq!(states, [FlowState::HalfOpen, FlowState::Established, FlowState::Established]);
        assert_eq!(bed.flows(), (1, 0));
    }

    /// What a backend sends from the service's address is not ours, wherever it goes.
    fn answers_that_come_by_here_all_the_same_pass() {
        let bed = dsr();
        bed.run(1, &to_vip(SYN).bytes());
        bed.passed(2, &Frame::tcp(VIP, CLIENT, SYN_ACK).bytes());
        bed.passed(2, &Frame::tcp(Bed::BACKENDS[0], CLIENT, SYN_ACK).bytes());
    }

    /// A client whose port two services see, with the same backend, is two flows that nothing mixes up.
    fn one_port_of_a_client_with_two_services() {
        let bed = dsr();
        for vip in Bed::VIPS {
            let input = Frame::tcp(CLIENT, vip, SYN).bytes();
            assert_eq!(bed.run(1, &input), (Verdict::Redirect(1), handed_on(&input)));
        }
        assert_eq!((bed.flows(), bed.kernel.drops()), ((2, 0), vec![]));
    }

    /// As after a reload that changes the way, until the flows of the old one have ended.
    fn a_service_may_have_backends_of_two_ways_while_one_leaves() {
        let mut bed = Bed::new(2);
        bed.kernel.backends[1].forward = forward::DSR;
        bed.kernel.backend_hop(1).forward = forward::DSR;
        let mut ways = Vec::new();
        for port in 1..=4 {
            let client: Endpoint = (CLIENT.0, port);
            let input = Frame::tcp(client, VIP, SYN).bytes();
            let (verdict, output) = bed.run(1, &input);
            assert_eq!(verdict, Verdict::Redirect(1));
            ways.push(output[14..] == input[14..]);
        }
        assert_eq!(ways, [false, true, false, true]);
        assert_eq!(bed.kernel.memory.live().count(), 6);
    }
}

/// An error that a router sends to the service's address about a backend's answer goes to that backend, as its requests do.
#[test]
fn an_error_about_an_answer_that_went_past_goes_to_its_backend() {
    for (mode, path) in [(forward::DSR, PATH4), (forward::IPIP, PATH4), (forward::GUE, PATH6)] {
        let bed = bed(mode, path);
        bed.run(1, &datagram().bytes());
        // Fragmentation needed, by a router at 10.0.1.254; it quotes an answer.
        let quoted = &Frame::udp(VIP, CLIENT, b"answer").bytes()[14..42];
        let mut icmp = [&[3, 4, 0, 0, 0, 0, 5, 0x78][..], quoted].concat();
        let sum = checksum(&icmp);
        icmp[2..4].copy_from_slice(&sum.to_be_bytes());
        let [high, low] = (icmp.len() as u16 + 20).to_be_bytes();
        let mut ip = [&[0x45, 0, high, low, 0, 1, 0, 0, 64, 1, 0, 0, 10, 0, 1, 254][..], &VIP.0].concat();
        let sum = checksum(&ip);
        ip[10..12].copy_from_slice(&sum.to_be_bytes());
        let input = [&datagram().bytes()[..14], &ip, &icmp].concat();
        let expected = match mode {
            forward::DSR => handed_on(&input),
            _ => wrapped(&input, mode, path, lot(&bed)),
        };
        assert_eq!(bed.run(1, &input), (Verdict::Redirect(1), expected));
        assert_eq!(bed.kernel.counted(0).request.packets, 1, "it is nobody's load");
    }
}

proptest! {
    #![proptest_config(cases(600))]

    /// Any packet, by any way, along any path.
    #[test]
    fn every_byte_is_right(
        mode in prop::sample::select(vec![forward::DSR, forward::IPIP, forward::GUE]),
        path in 0..2usize, is_ipv6: bool, is_tcp: bool, class: u8, ttl in 2u8..,
        payload in prop::collection::vec(any::<u8>(), 0..1300),
        tags in 0..3usize, port in 1u16.., address in 1u8..255, id: BackendId,
    ) {
        FAMILY.set(if is_ipv6 { family::IPV6 } else { family::IPV4 });
        let (_, path) = PATHS[path];
        let bed = bed(mode, path);
        let client = ([10, 0, 1, address], port);
        let tags = [[0x88, 0xa8, 0, 5], [0x81, 0, 0, id as u8]][2 - tags..].to_vec();
        let frame = if is_tcp { Frame::tcp(client, VIP, SYN) } else { Frame::udp(client, VIP, b"") };
        let mut input = Frame { ttl, tags, payload, ..frame }.bytes();
        let l3 = l3_at(&input);
        if is_ipv6 {
            (input[l3], input[l3 + 1]) = (0x60 | class >> 4, class << 4);
        } else {
            input[l3 + 1] = class;
            sum_anew(&mut input);
        }
        let (verdict, output) = bed.run(1, &input);
        prop_assert_eq!(verdict, Verdict::Redirect(1));
        let expected = match mode {
            forward::DSR => handed_on(&input),
            _ => wrapped(&input, mode, path, lot(&bed)),
        };
        prop_assert_eq!(output, expected);
        let length = routed(&input).len() as u64;
        prop_assert_eq!(bed.kernel.counted(0).request, Traffic { packets: 1, bytes: length });
    }
}
