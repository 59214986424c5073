//! The XDP program with IPv6, frame by frame: verdict, exact bytes, exact counters.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::net::{Ipv6Addr, SocketAddr};

use balancer_common::{Reason, Traffic, answer, role};
use balancer_tests::{
    packet::{Path, Segment, ethernet, extended, hex, to_hex},
    program::{BACKEND_PORT, BACKEND_SIDE, CLIENT, CLIENT_SIDE, Program, VIP_PORT, backend_mac, verdict},
    topology::{CLIENT6, Family, VIP6, backend_address6},
};
use etherparse::{
    Icmpv6Type, NetSlice, SlicedPacket, TransportSlice,
    icmpv6::{DestUnreachableCode, TimeExceededCode},
};

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const DESTINATION: u8 = 60;

/// An extension header of eight bytes whose options are padding.
const PADDED: &[u8] = &[0, 0, 1, 4, 0, 0, 0, 0];

fn program() -> Program {
    Program::of(Family::Ipv6, 1).unwrap()
}

fn to_vip(port: u16) -> Path {
    Path::new((CLIENT6, port), (VIP6, VIP_PORT))
}

fn to_backend(port: u16) -> Path {
    Path { ttl: 63, ..Path::new((CLIENT6, port), (backend_address6(1), BACKEND_PORT)) }
}

fn from_backend(port: u16) -> Path {
    Path { ttl: 64, ..to_backend(port).reversed() }
}

fn from_vip(port: u16) -> Path {
    Path { ttl: 63, ..to_vip(port).reversed() }
}

fn tcp(path: Path, flags: u8) -> Vec<u8> {
    path.tcp(Segment::flags(flags), &[]).unwrap()
}

/// What was counted so far: packets and bytes of requests, flows opened and closed, refusals.
type Counted = (Traffic, [u64; 2], Vec<(Reason, u64)>);

fn counted(program: &mut Program) -> Counted {
    let counters = program.counters().unwrap()[0];
    (counters.request, [counters.opened, counters.closed], program.drops().unwrap())
}

/// Asserts that a frame leaves as `packet` towards the backend, and that nothing else was counted.
#[track_caller]
fn assert_opens(program: &mut Program, input: &[u8], output: &[u8], what: &str) {
    let (before, [opened, closed], refused) = counted(program);
    let result = program.from_client(input).unwrap();
    assert_eq!(to_hex(&result.1), to_hex(&ethernet(backend_mac(0), BACKEND_SIDE, output)), "{what}");
    assert_eq!(result.0, verdict::REDIRECT, "{what}");
    // The payload length, and the header's 40.
    let bytes = before.bytes + 40 + u64::from(u16::from_be_bytes([input[4], input[5]]));
    let expected = (Traffic { packets: before.packets + 1, bytes }, [opened + 1, closed], refused);
    assert_eq!(counted(program), expected, "{what}");
}

/// Asserts that a packet is dropped as it came, counted once more under this name, and opens nothing.
#[track_caller]
fn assert_refused(program: &mut Program, packet: &[u8], reason: Reason, what: &str) {
    let (traffic, flows, mut refused) = counted(program);
    let frame = ethernet(CLIENT_SIDE, CLIENT, packet);
    assert_eq!(program.run(&frame).unwrap(), (verdict::DROP, frame.clone()), "{what}");
    match refused.iter_mut().find(|(counted, _)| *counted == reason) {
        Some((_, count)) => *count += 1,
        None => refused.push((reason, 1)),
    }
    refused.sort_by_key(|(reason, _)| *reason as u32);
    assert_eq!(counted(program), (traffic, flows, refused), "{what}");
    assert_eq!(program.datapath.flows().flows(0..usize::MAX).count() as u64, flows[0], "{what}");
}

/// Asserts that a packet is the kernel's business.
#[track_caller]
fn assert_passes(program: &mut Program, packet: &[u8], what: &str) {
    let frame = ethernet(CLIENT_SIDE, CLIENT, packet);
    assert_eq!(program.run(&frame).unwrap(), (verdict::PASS, frame.clone()), "{what}");
    assert_eq!(program.counters().unwrap()[0], Default::default(), "{what}");
    assert_eq!(program.drops().unwrap(), [], "{what}");
}

/// The published packet: what goes in, what the first backend must receive.
#[test]
fn a_known_packet_with_hop_by_hop_options_leaves_with_known_bytes() {
    let input = hex("60000000001c004020010db800010000000000000000001020010db800aa0000000000000000001006000104000000009c4a005000000001000000005002faf0bc190000").unwrap();
    let output = hex("60000000001c003f20010db800010000000000000000001020010db800020000000000000000001106000104000000009c4a1f9000000001000000005002faf09d800000").unwrap();
    assert_opens(&mut program(), &input, &output, "hop-by-hop options");
}

/// Each kind of extension header, alone and chained, TCP and UDP behind it: it stays as it is.
#[test]
fn extension_headers_stay() {
    // Of 24 bytes; its length is counted in 4-byte units, less two.
    let authentication: &[u8] = &[&[0, 4, 0, 0][..], &[0xa5; 20]].concat();
    // Its second byte is no length, and its offset and M are 0 (RFC 6946).
    let atomic: &[u8] = &[0, 0xff, 0, 0, 1, 2, 3, 4];
    let long: &[u8] = &[&[0, 3, 1, 28][..], &[0; 28]].concat();
    let visited: &[u8] = &[&[0, 2, 4, 0, 0, 0, 0, 0][..], &[0x20; 16]].concat();
    type Row<'a> = (&'a str, Vec<(u8, &'a [u8])>);
    let rows: [Row<'_>; 8] = [
        ("no extension header", vec![]),
        ("hop-by-hop options", vec![(HOP_BY_HOP, PADDED)]),
        ("destination options of 32 bytes", vec![(DESTINATION, long)]),
        ("a routing header that was followed", vec![(ROUTING, visited)]),
        ("an authentication header", vec![(AUTHENTICATION, authentication)]),
        ("an atomic fragment", vec![(FRAGMENT, atomic)]),
        ("eight destination options", vec![(DESTINATION, PADDED); 8]),
        (
            "one of each",
            vec![
                (HOP_BY_HOP, PADDED),
                (DESTINATION, PADDED),
                (ROUTING, visited),
                (FRAGMENT, atomic),
                (AUTHENTICATION, authentication),
                (DESTINATION, PADDED),
            ],
        ),
    ];
    let mut program = program();
    for (port, (what, headers)) in (40_000..).zip(rows) {
        let (inward, outward) = (to_vip(port), to_backend(port));
        for (input, output) in [
            (tcp(inward, Segment::SYN), tcp(outward, Segment::SYN)),
            (inward.udp(b"hello").unwrap(), outward.udp(b"hello").unwrap()),
        ] {
            let [input, output] = [input, output].map(|packet| extended(&packet, &headers).unwrap());
            assert_opens(&mut program, &input, &output, what);
        }
    }
}

#[test]
fn refused_packets_are_dropped_under_their_name() {
    let syn = tcp(to_vip(40_000), Segment::SYN);
    let datagram = to_vip(40_000).udp(b"hello").unwrap();
    let with = |headers: &[(u8, &[u8])]| extended(&syn, headers).unwrap();
    let cut = |packet: &[u8], length: usize| packet[..length].to_vec();
    let changed = |packet: &[u8], at: usize, to: &[u8]| {
        let mut packet = packet.to_vec();
        packet[at..at + to.len()].copy_from_slice(to);
        packet
    };
    let unvisited: &[u8] = &[&[0, 2, 4, 1, 0, 0, 0, 0][..], &[0x20; 16]].concat();
    let rest: &[u8] = &[0, 0, 5, 0xa9, 1, 2, 3, 4];
    // What follows looks like the ports of a SYN.
    let later = extended(&changed(&syn, 40, &[0x9c, 0x4a, 0, 0x50]), &[(FRAGMENT, rest)]).unwrap();
    let malformed = [
        ("a frame that ends in the TCP header", cut(&syn, 59)),
        ("a payload length beyond the frame", changed(&syn, 4, &[0, 21])),
        ("a payload length of 19", changed(&syn, 4, &[0, 19])),
        ("data offset 4", changed(&syn, 52, &[0x40])),
        ("data offset 15 with 20 bytes", changed(&syn, 52, &[0xf0])),
        ("UDP length 7", changed(&datagram, 44, &[0, 7])),
        ("UDP length beyond the packet", changed(&datagram, 44, &[0, 14])),
        ("an extension header longer than the packet", with(&[(DESTINATION, &[0, 9, 1, 4, 0, 0, 0, 0])])),
        ("SYN with FIN", tcp(to_vip(40_000), Segment::SYN | Segment::FIN)),
    ];
    let mut program = program();
    for (what, packet) in malformed {
        assert_refused(&mut program, &packet, Reason::Malformed, what);
    }
    for (what, reason, packet) in [
        ("eleven extension headers", Reason::ExtensionHeaders, with(&[(DESTINATION, PADDED); 11])),
        ("a routing header that leads elsewhere", Reason::ExtensionHeaders, with(&[(ROUTING, unvisited)])),
        ("a later fragment", Reason::Fragment, later),
        ("UDP without a checksum", Reason::NoChecksum, changed(&datagram, 46, &[0, 0])),
        ("an ACK of no flow", Reason::UnknownFlow, tcp(to_vip(40_000), Segment::ACK)),
    ] {
        assert_refused(&mut program, &packet, reason, what);
    }
    // IP version 4 under the EtherType of IPv6.
    let mut frame = ethernet(CLIENT_SIDE, CLIENT, &syn);
    frame[14] = 0x40;
    let refused = |program: &mut Program| {
        let refused = program.drops().unwrap();
        refused.into_iter().find(|(reason, _)| *reason == Reason::Malformed).unwrap().1
    };
    let before = refused(&mut program);
    assert_eq!(program.run(&frame).unwrap(), (verdict::DROP, frame.clone()));
    assert_eq!(refused(&mut program), before + 1);
    // And the largest that fits.
    let largest = [0x33; 1452];
    let [input, output] = [to_vip(1), to_backend(1)].map(|path| path.udp(&largest).unwrap());
    assert_opens(&mut program, &input, &output, "as large as the MTU");
}

/// What has no hops left or is too big: counted, and its sender told why (RFC 4443, sections 3.2 and 3.3).
#[test]
fn what_cannot_go_further_is_answered() {
    let mut program = program();
    let exceeded = Icmpv6Type::TimeExceeded(TimeExceededCode::HopLimitExceeded);
    let too_big = Icmpv6Type::PacketTooBig { mtu: 1500 };
    for (what, answer, packet) in [
        ("hop limit 1", exceeded, tcp(Path { ttl: 1, ..to_vip(40_000) }, Segment::SYN)),
        ("hop limit 0", exceeded, Path { ttl: 0, ..to_vip(40_000) }.udp(b"x").unwrap()),
        ("larger than the MTU", too_big, to_vip(40_000).udp(&[0; 1453]).unwrap()),
    ] {
        let (result, frame) = program.from_client(&packet).unwrap();
        assert_eq!(result, verdict::TX, "{what}");
        let sliced = check_answer(&frame);
        let Some(TransportSlice::Icmpv6(icmp)) = &sliced.transport else {
            panic!("no ICMPv6 in {}", to_hex(&frame))
        };
        assert_eq!(icmp.icmp_type(), answer, "{what}");
        assert!(icmp.is_checksum_valid(VIP6.octets(), CLIENT6.octets()), "{what}: the ICMPv6 sum");
        assert!(packet.starts_with(icmp.payload()) && icmp.payload().len() >= 48, "{what}");
    }
    assert_eq!(program.drops().unwrap(), [(Reason::TtlExceeded, 2), (Reason::TooBig, 1)]);
    assert_eq!(program.counters().unwrap()[0], Default::default());
}

/// Packets that are not for a service: byte for byte as they came, and nothing counted.
#[test]
fn foreign_packets_pass_untouched() {
    let mut program = program();
    let syn = tcp(to_vip(40_000), Segment::SYN);
    let mut no_next = syn.clone();
    no_next[6] = 59;
    let other_port = Path::new((CLIENT6, 40_000), (VIP6, 81)).udp(b"x").unwrap();
    let other_address = Path::new((CLIENT6, 40_000), (backend_address6(9), VIP_PORT)).udp(b"x").unwrap();
    let link_local: Ipv6Addr = "fe80::1".parse().unwrap();
    let neighbours = Path::new((link_local, 1), (VIP6, 2)).udp(b"x").unwrap();
    for (what, packet) in [
        ("no next header", no_next.clone()),
        ("no next header behind options", extended(&no_next, &[(DESTINATION, PADDED)]).unwrap()),
        ("another port", other_port),
        ("another address", other_address),
        ("another port from the link", neighbours),
        (
            "the same as IPv4",
            Path::new(([10, 0, 1, 10], 40_000), ([192, 0, 2, 10], VIP_PORT)).udp(b"x").unwrap(),
        ),
    ] {
        assert_passes(&mut program, &packet, what);
    }
    // Neighbour solicitation: to a group, and to the address itself.
    let solicitation = hex("6000000000203afffe80000000000000000000000000000120010db800aa00000000000000000010870000000000000020010db800aa000000000000000000100101020000000101").unwrap();
    let frame = ethernet([0x33, 0x33, 0xff, 0, 0, 0x10], CLIENT, &solicitation);
    assert_eq!(program.run(&frame).unwrap(), (verdict::PASS, frame.clone()));
    assert_passes(&mut program, &solicitation, "a neighbour solicitation");
    // A program without IPv6 leaves all of it to the kernel.
    let mut without = Program::new(1).unwrap();
    assert_passes(&mut without, &syn, "IPv6 where there is none");
}

/// One datagram in 65,536 has a sum of 0 afterwards, which over IPv6 too is written ffff.
#[test]
fn a_udp_sum_that_becomes_0_is_sent_as_ffff() {
    let sum = |packet: &[u8]| u16::from_be_bytes([packet[46], packet[47]]);
    let zero = (0..=u16::MAX).find(|word| {
        let packet = to_backend(40_000).udp(&word.to_be_bytes()).unwrap();
        sum(&packet) == 0xffff
    });
    let payload = zero.expect("one of all words").to_be_bytes();
    let [input, output] = [to_vip(40_000), to_backend(40_000)].map(|path| path.udp(&payload).unwrap());
    assert_opens(&mut program(), &input, &output, "a sum of 0");
}

/// A connection from its SYN to its last FIN: every byte, the active count, both directions' traffic.
#[test]
fn a_connection_is_carried_both_ways_and_counted_once() {
    let mut program = program();
    let port = 40_001;
    let steps = [
        (true, Segment::SYN, (1, 0)),
        (true, Segment::SYN, (1, 0)),
        (false, Segment::SYN | Segment::ACK, (1, 0)),
        (true, Segment::ACK, (1, 0)),
        (true, Segment::ACK | Segment::PSH, (1, 0)),
        (false, Segment::ACK, (1, 0)),
        (false, Segment::FIN | Segment::ACK, (1, 0)),
        (true, Segment::FIN | Segment::ACK, (1, 1)),
        (false, Segment::ACK, (1, 1)),
    ];
    for (number, (is_request, flags, counts)) in steps.into_iter().enumerate() {
        let (numbers, payload) = (Segment { flags, sequence: 7, acknowledgement: 8 }, [number as u8; 5]);
        let payload = if flags & (Segment::PSH | Segment::FIN) != 0 { &payload[..] } else { &[] };
        let bytes = |path: Path| path.tcp(numbers, payload).unwrap();
        let (result, [to, from], output) = if is_request {
            let result = program.from_client(&bytes(to_vip(port))).unwrap();
            (result, [backend_mac(0), BACKEND_SIDE], bytes(to_backend(port)))
        } else {
            let result = program.from_backend(0, &bytes(from_backend(port))).unwrap();
            (result, [CLIENT, CLIENT_SIDE], bytes(from_vip(port)))
        };
        assert_eq!(to_hex(&result.1), to_hex(&ethernet(to, from, &output)), "step {number}");
        assert!([verdict::TX, verdict::REDIRECT].contains(&result.0), "step {number}: verdict {}", result.0);
        let counters = program.counters().unwrap()[0];
        assert_eq!((counters.opened, counters.closed), counts, "after step {number}");
    }
    let counters = program.counters().unwrap()[0];
    assert_eq!(counters.request, Traffic { packets: 5, bytes: 5 * 60 + 2 * 5 });
    assert_eq!(counters.reply, Traffic { packets: 4, bytes: 4 * 60 + 5 });
    assert_eq!(program.drops().unwrap(), []);
}

/// What the controller reads of a flow: its whole addresses.
#[test]
fn a_flow_is_shown_with_its_whole_addresses() {
    let program = program();
    program.from_client(&tcp(to_vip(40_000), Segment::SYN)).unwrap();
    program.from_client(&to_vip(40_001).udp(b"hello").unwrap()).unwrap();
    let flows = program.datapath.flows().flows(0..usize::MAX);
    let mut shown: Vec<_> = flows.map(|flow| [flow.client(), flow.service(), flow.backend()]).collect();
    shown.sort_unstable();
    let expected = [40_000, 40_001].map(|port| {
        [
            SocketAddr::from((CLIENT6, port)),
            SocketAddr::from((VIP6, VIP_PORT)),
            SocketAddr::from((backend_address6(1), BACKEND_PORT)),
        ]
    });
    assert_eq!(shown, expected);
}

/// Packets from a backend's port that belong to no flow never leave; from its other ports, they are the kernel's.
#[test]
fn orphaned_replies_are_dropped() {
    let mut program = program();
    let reply = from_backend(40_000).udp(b"an answer to nobody").unwrap();
    assert_eq!(program.from_backend(0, &reply).unwrap().0, verdict::DROP);
    assert_eq!(program.drops().unwrap(), [(Reason::OrphanReply, 1)]);
    // Of TCP, its sender is told.
    let segment = Segment { flags: Segment::SYN | Segment::ACK, sequence: 7, acknowledgement: 1 };
    let segment = from_backend(40_000).tcp(segment, &[]).unwrap();
    let (result, frame) = program.from_backend(0, &segment).unwrap();
    assert_eq!(result, verdict::TX);
    let reset = Segment { flags: Segment::RST, sequence: 1, acknowledgement: 0 };
    let reset = from_backend(40_000).reversed().tcp(reset, &[]).unwrap();
    let window = 14 + 40 + 14;
    assert_eq!(to_hex(&frame[..window]), to_hex(&ethernet(backend_mac(0), BACKEND_SIDE, &reset)[..window]));
    assert_eq!(program.drops().unwrap(), [(Reason::OrphanReply, 2)]);
    let other = Path::new((backend_address6(1), 22), (CLIENT6, 40_000)).udp(b"x").unwrap();
    assert_eq!(program.from_backend(0, &other).unwrap().0, verdict::PASS);
    program.datapath.set_roles(CLIENT6.octets(), role::LOCAL).unwrap();
    assert_eq!(program.from_backend(0, &reply).unwrap().0, verdict::PASS, "the host's own connection");
    assert_eq!(program.drops().unwrap(), [(Reason::OrphanReply, 2)]);
}

/// Addresses that no client has open no flow.
#[test]
fn an_impossible_source_opens_no_flow() {
    let multicast: Ipv6Addr = "ff02::1".parse().unwrap();
    let mut program = program();
    for source in [Ipv6Addr::UNSPECIFIED, Ipv6Addr::LOCALHOST, multicast, VIP6] {
        let path = Path::new((source, 40_000), (VIP6, VIP_PORT));
        assert_refused(&mut program, &tcp(path, Segment::SYN), Reason::Malformed, &source.to_string());
        assert_refused(&mut program, &path.udp(b"x").unwrap(), Reason::Malformed, &source.to_string());
    }
}

fn answering() -> Program {
    let mut program = program();
    program.change_services(|service| service.answers = answer::UNKNOWN_FLOW | answer::NO_BACKEND).unwrap();
    program
}

/// The parts of an answer, after the MACs and addresses have been checked.
fn check_answer(frame: &[u8]) -> SlicedPacket<'_> {
    assert_eq!(to_hex(&frame[..12]), to_hex(&[CLIENT, CLIENT_SIDE].concat()), "back to the neighbour");
    let packet = SlicedPacket::from_ethernet(frame).unwrap();
    let Some(NetSlice::Ipv6(ip)) = &packet.net else { panic!("no IPv6 in {}", to_hex(frame)) };
    let header = ip.header().to_header();
    assert_eq!((header.source, header.destination), (VIP6.octets(), CLIENT6.octets()));
    assert_eq!(header.hop_limit, 64);
    assert_eq!(usize::from(header.payload_length), frame.len() - 14 - 40, "nothing behind it");
    packet
}

#[test]
fn a_segment_of_no_flow_is_reset() {
    let mut program = answering();
    for (flags, acknowledgement, payload) in [
        (Segment::ACK, 1_000_000, 0),
        (Segment::ACK | Segment::PSH, 0xffff_fff0, 100),
        (Segment::FIN | Segment::ACK, 77, 0),
    ] {
        let (.., before) = counted(&mut program);
        let before = before.first().map_or(0, |(_, count)| *count);
        let segment = Segment { flags, sequence: 7, acknowledgement };
        let packet = to_vip(40_000).tcp(segment, &vec![0x55; payload]).unwrap();
        let (result, frame) = program.from_client(&packet).unwrap();
        assert_eq!(result, verdict::TX, "{segment:?}");
        let sliced = check_answer(&frame);
        let Some(TransportSlice::Tcp(tcp)) = &sliced.transport else {
            panic!("no TCP in {}", to_hex(&frame))
        };
        let header = tcp.to_header();
        assert_eq!((header.source_port, header.destination_port), (VIP_PORT, 40_000));
        assert!(header.rst && !header.syn && !header.fin && !header.psh);
        assert_eq!((header.sequence_number, header.ack), (acknowledgement, false));
        let sum = header.calc_checksum_ipv6_raw(VIP6.octets(), CLIENT6.octets(), &[]).unwrap();
        assert_eq!(header.checksum, sum, "the TCP sum");
        assert_eq!(frame.len(), 14 + 40 + 20);
        // Behind extension headers nothing is answered.
        let extended = extended(&packet, &[(DESTINATION, PADDED)]).unwrap();
        let frame = ethernet(CLIENT_SIDE, CLIENT, &extended);
        assert_eq!(program.run(&frame).unwrap(), (verdict::DROP, frame.clone()));
        assert_eq!(program.drops().unwrap(), [(Reason::UnknownFlow, before + 2)], "and counted");
        assert_eq!(program.counters().unwrap()[0], Default::default());
    }
}

#[test]
fn without_a_backend_a_connection_is_refused_and_a_datagram_unreachable() {
    let mut program = answering();
    for service in 0..2 {
        program.set_ring(service, &[]).unwrap();
    }
    let syn =
        to_vip(40_000).tcp(Segment { flags: Segment::SYN, sequence: 9, acknowledgement: 0 }, &[]).unwrap();
    let (result, frame) = program.from_client(&syn).unwrap();
    assert_eq!(result, verdict::TX);
    let sliced = check_answer(&frame);
    let Some(TransportSlice::Tcp(tcp)) = &sliced.transport else { panic!("no TCP") };
    let header = tcp.to_header();
    assert!(header.rst && header.ack && !header.syn);
    assert_eq!((header.sequence_number, header.acknowledgment_number), (0, 10));
    assert_eq!(header.checksum, header.calc_checksum_ipv6_raw(VIP6.octets(), CLIENT6.octets(), &[]).unwrap());

    let datagram = to_vip(40_000).udp(b"who is there?").unwrap();
    let (result, frame) = program.from_client(&datagram).unwrap();
    assert_eq!(result, verdict::TX);
    let sliced = check_answer(&frame);
    let Some(TransportSlice::Icmpv6(icmp)) = &sliced.transport else { panic!("no ICMPv6") };
    assert_eq!(icmp.icmp_type(), Icmpv6Type::DestinationUnreachable(DestUnreachableCode::Port));
    assert!(icmp.is_checksum_valid(VIP6.octets(), CLIENT6.octets()), "the ICMPv6 sum");
    // As much of the datagram as there is, unchanged (RFC 4443, section 3.1).
    assert!(datagram.starts_with(icmp.payload()) && icmp.payload().len() >= 48, "{}", to_hex(icmp.payload()));
    assert_eq!(program.drops().unwrap(), [(Reason::NoBackend, 2)]);
    assert_eq!(program.counters().unwrap()[0], Default::default());
}
