//! The XDP program frame by frame: verdict, exact bytes, exact counters.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::net::{Ipv4Addr, SocketAddr};

use balancer_common::{MAX_PORTS, NextHop, Reason, Traffic, mapped};
use balancer_tests::{
    packet::{Path, Segment, ethernet, hex, to_hex},
    program::{
        BACKEND_PORT, BACKEND_SIDE, CLIENT, CLIENT_SIDE, Program, VIP, VIP_PORT, backend_address,
        backend_mac, verdict,
    },
};
use balancer_user::address::to_wire;

const CLIENT_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 10);

fn to_vip(port: u16) -> Path {
    Path::new((CLIENT_ADDRESS, port), (VIP, VIP_PORT))
}

fn to_client(port: u16) -> Path {
    Path::new((backend_address(0), BACKEND_PORT), (CLIENT_ADDRESS, port))
}

fn tcp(path: Path, flags: u8) -> Vec<u8> {
    path.tcp(Segment::flags(flags), &[]).unwrap()
}

/// Asserts that a frame leaves as `packet` towards the backend.
#[track_caller]
fn assert_sent(result: (u32, Vec<u8>), to: [u8; 6], from: [u8; 6], packet: &[u8]) {
    assert_eq!(to_hex(&result.1), to_hex(&ethernet(to, from, packet)));
    assert!([verdict::TX, verdict::REDIRECT].contains(&result.0), "verdict {}", result.0);
}

/// The published packets: what goes in, what the first backend must receive.
#[test]
fn known_packets_leave_with_known_bytes() {
    let rows = [
        (
            "UDP without a checksum keeps none",
            "4500001e1234000040119b870a00010ac000020a9c400050000a00006869",
            "4500001e123400003f1152870a00010a0a00020b9c401f90000a00006869",
        ),
        (
            "a UDP sum that becomes 0 is sent as ffff",
            "4500001e1234000040119b870a00010ac000020a9c400050000a69402cf5",
            "4500001e123400003f1152870a00010a0a00020b9c401f90000affff2cf5",
        ),
        (
            "an IP header sum that becomes 0 stays 0",
            "4500001e64bb0000401149000a00010ac000020a9c400050000a00006869",
            "4500001e64bb00003f1100000a00010a0a00020b9c401f90000a00006869",
        ),
        (
            "IPv4 options stay, and the ports are found behind them",
            "4600002c12340000400606800a00010ac000020a940400009c42005000000001000000005002faf04b4a0000",
            "4600002c123400003f06bd7f0a00010a0a00020b940400009c421f9000000001000000005002faf0e2090000",
        ),
        (
            "Ethernet padding is in no sum",
            "450000281234000040069b880a00010ac000020a9c41005001020304000000005002faf047460000eeeeeeeeeeee",
            "45000028123400003f0652880a00010a0a00020b9c411f9001020304000000005002faf0de050000eeeeeeeeeeee",
        ),
    ];
    for (what, input, output) in rows {
        let mut program = Program::new(1).unwrap();
        let (input, output) = (hex(input).unwrap(), hex(output).unwrap());
        let result = program.from_client(&input).unwrap();
        assert_eq!(result.0, verdict::REDIRECT, "{what}");
        assert_eq!(to_hex(&result.1), to_hex(&ethernet(backend_mac(0), BACKEND_SIDE, &output)), "{what}");
        let counters = program.counters().unwrap()[0];
        let bytes = u64::from(u16::from_be_bytes([input[2], input[3]]));
        assert_eq!(counters.request, Traffic { packets: 1, bytes }, "{what}: bytes are the IP total length");
        assert_eq!((counters.opened, counters.closed), (1, 0), "{what}");
        assert_eq!(program.drops().unwrap(), [], "{what}");
    }
}

/// Packets that are not for a service: byte for byte as they came, and nothing counted.
#[test]
fn foreign_packets_pass_untouched() {
    let options_like_ports =
        "4600002c12340000400699330a00010ac000020a010100509c45001600000001000000005002faf04b810000";
    let other_port = Path::new((CLIENT_ADDRESS, 40_000), (VIP, 81)).udp(b"x").unwrap();
    let other_address =
        Path::new((CLIENT_ADDRESS, 40_000), (Ipv4Addr::new(192, 0, 2, 11), 80)).udp(b"x").unwrap();
    // An echo request to somebody else.
    let icmp = hex("450000241234000040019b900a00010ac000020b08002427424200016162636465666768").unwrap();
    let broken_elsewhere =
        hex("440000281234000040069c880a00010a0a0001fe9c41005001020304000000005002faf047460000").unwrap();
    let mut program = Program::new(1).unwrap();
    for packet in [hex(options_like_ports).unwrap(), other_port, other_address, icmp, broken_elsewhere] {
        let frame = ethernet(CLIENT_SIDE, CLIENT, &packet);
        assert_eq!(program.run(&frame).unwrap(), (verdict::PASS, frame.clone()), "{}", to_hex(&packet));
    }
    let to_vip = ethernet(CLIENT_SIDE, CLIENT, &to_vip(1).udp(b"x").unwrap());
    let ether_type = |bytes: [u8; 2]| [&to_vip[..12], &bytes[..], &to_vip[14..]].concat();
    let multicast = [&[0x01, 0, 0x5e, 0, 0, 1][..], &to_vip[6..]].concat();
    let from_group = [&to_vip[..6], &[0xff; 6][..], &to_vip[12..]].concat();
    let others = [ether_type([0x08, 0x06]), ether_type([0x86, 0xdd]), ether_type([0x81, 0])];
    for frame in others.into_iter().chain([multicast, from_group]) {
        assert_eq!(program.run(&frame).unwrap(), (verdict::PASS, frame.clone()), "{}", to_hex(&frame));
    }
    assert_eq!(program.counters().unwrap()[0], Default::default());
    assert_eq!(program.drops().unwrap(), []);
}

/// Each way to be refused: dropped, counted once under its name, no flow, no traffic.
#[test]
fn refused_packets_are_dropped_under_their_name() {
    let malformed = [
        ("IHL 4", "440000281234000040069c880a00010ac000020a9c41005001020304000000005002faf047460000"),
        ("IHL 15 in a frame that ends after 20 bytes", "4f0000281234000040069b880a00010ac000020a"),
        ("IP version 5", "550000281234000040069c880a00010ac000020a9c41005001020304000000005002faf047460000"),
        ("12 bytes of TCP", "450000201234000040069b900a00010ac000020a9c4800500000000100000000"),
        ("UDP length 4", "4500001c1234000040119b890a00010ac000020a9c47005000040000"),
        ("UDP length beyond the packet", "4500001c1234000040119b890a00010ac000020a9c470050000a0000"),
        (
            "total length 1500 in a frame of 54",
            "450005dc12340000400695d40a00010ac000020a9c49005000000001000000005002faf04b430000",
        ),
        (
            "total length 19",
            "450000131234000040069b880a00010ac000020a9c41005001020304000000005002faf047460000",
        ),
        (
            "data offset 15 with 20 bytes",
            "450000281234000040069b880a00010ac000020a9c4b00500000000100000000f002faf0ab400000",
        ),
        ("data offset 4", "450000281234000040069b880a00010ac000020a9c4b005000000001000000004002faf0ab400000"),
    ]
    .map(|(what, packet)| (what, Reason::Malformed, hex(packet).unwrap()));
    let flags = [
        ("SYN with FIN", Reason::Malformed, Segment::SYN | Segment::FIN),
        ("SYN with RST", Reason::Malformed, Segment::SYN | Segment::RST),
        ("no flags", Reason::Malformed, 0),
        ("FIN without ACK", Reason::Malformed, Segment::FIN),
        ("FIN with RST", Reason::Malformed, Segment::FIN | Segment::RST | Segment::ACK),
        ("ACK of no flow", Reason::UnknownFlow, Segment::ACK),
        ("FIN-ACK of no flow", Reason::UnknownFlow, Segment::FIN | Segment::ACK),
        ("RST of no flow", Reason::UnknownFlow, Segment::RST),
        ("SYN-ACK of no flow", Reason::UnknownFlow, Segment::SYN | Segment::ACK),
    ]
    .map(|(what, reason, flags)| (what, reason, tcp(to_vip(40_000), flags)));
    let rest = [hex("45000224beef00b94011ec0c0a00010ac000020a9c440050").unwrap(), vec![0; 524]].concat();
    let others = [("a later fragment", Reason::Fragment, rest)];
    for (what, reason, packet) in malformed.into_iter().chain(flags).chain(others) {
        let mut program = Program::new(1).unwrap();
        let frame = ethernet(CLIENT_SIDE, CLIENT, &packet);
        assert_eq!(program.run(&frame).unwrap(), (verdict::DROP, frame.clone()), "{what}");
        assert_eq!(program.drops().unwrap(), [(reason, 1)], "{what}");
        assert_eq!(program.counters().unwrap()[0], Default::default(), "{what}");
    }
}

/// What has no hops left, or is too big and must not be split: counted, and its sender told why.
#[test]
fn what_cannot_go_further_is_answered() {
    const ICMP: u8 = 1;
    for (what, reason, answer, packet) in [
        ("TTL 1", Reason::TtlExceeded, [11, 0], tcp(Path { ttl: 1, ..to_vip(40_000) }, Segment::SYN)),
        ("TTL 0", Reason::TtlExceeded, [11, 0], Path { ttl: 0, ..to_vip(40_000) }.udp(b"x").unwrap()),
        ("larger than the MTU", Reason::TooBig, [3, 4], to_vip(40_000).udp(&[0; 1473]).unwrap()),
    ] {
        let mut program = Program::new(1).unwrap();
        let (result, frame) = program.from_client(&packet).unwrap();
        assert_eq!(result, verdict::TX, "{what}");
        assert_eq!(to_hex(&frame[..12]), to_hex(&[CLIENT, CLIENT_SIDE].concat()), "{what}");
        assert_eq!((frame[14 + 9], &frame[14 + 20..14 + 22]), (ICMP, &answer[..]), "{what}");
        assert_eq!(program.drops().unwrap(), [(reason, 1)], "{what}");
        assert_eq!(program.counters().unwrap()[0], Default::default(), "{what}");
    }
}

/// The refusals that depend on the balancer's own state.
#[test]
fn a_flow_that_cannot_be_forwarded_is_refused_by_name() {
    let mut program = Program::new(1).unwrap();
    let syn = tcp(to_vip(40_000), Segment::SYN);
    program.set_hop(0, 0, 0);
    assert_eq!(program.from_client(&syn).unwrap().0, verdict::DROP);
    assert_eq!(program.drops().unwrap(), [(Reason::NoNeighbour, 1)]);
    program.set_ring(0, &[]).unwrap();
    assert_eq!(program.from_client(&syn).unwrap().0, verdict::DROP);
    assert_eq!(program.drops().unwrap(), [(Reason::NoBackend, 1), (Reason::NoNeighbour, 1)]);
    assert_eq!(program.counters().unwrap()[0], Default::default());
    // The next SYN finds both mended.
    program.set_ring(0, &[0]).unwrap();
    program.set_hop(0, 1, 1500);
    assert_eq!(program.from_client(&syn).unwrap().0, verdict::TX);
}

/// A way out by a port that leads nowhere: neither direction counts what the kernel would not send.
#[test]
fn what_no_port_takes_is_counted_as_refused_alone() {
    let nowhere = |hop: NextHop| NextHop { port: 9, ..hop };
    let hop = |neighbour, source| NextHop {
        neighbour,
        port: 0,
        source,
        mtu: 1500,
        ifindex: 4_000_000,
        ..NextHop::default()
    };
    let to_backend = hop(backend_mac(0), BACKEND_SIDE);
    let back = hop([0; 6], CLIENT_SIDE);
    let mut program = Program::new(1).unwrap();
    let [request, reply] = [to_vip(40_000), to_client(40_000)].map(|path| path.udp(b"x").unwrap());
    program.datapath.set_next_hop(MAX_PORTS, &nowhere(to_backend));
    let frame = ethernet(CLIENT_SIDE, CLIENT, &request);
    assert_eq!(program.run(&frame).unwrap(), (verdict::DROP, frame.clone()));
    assert_eq!(program.drops().unwrap(), [(Reason::NoEgress, 1)]);
    assert_eq!(program.counters().unwrap()[0], Default::default(), "no flow");

    program.datapath.set_next_hop(MAX_PORTS, &to_backend);
    assert_eq!(program.run(&frame).unwrap().0, verdict::REDIRECT);
    program.datapath.set_next_hop(MAX_PORTS, &nowhere(to_backend));
    program.datapath.set_next_hop(0, &nowhere(back));
    assert_eq!(program.run(&frame).unwrap(), (verdict::DROP, frame));
    assert_eq!(program.from_backend(0, &reply).unwrap().0, verdict::DROP);
    assert_eq!(program.drops().unwrap(), [(Reason::NoEgress, 3)]);
    let counted = program.counters().unwrap()[0];
    assert_eq!((counted.opened, counted.request.packets, counted.reply.packets), (1, 1, 0));
    program.datapath.set_next_hop(0, &back);
    assert_eq!(program.from_backend(0, &reply).unwrap().0, verdict::REDIRECT);
    assert_eq!(program.counters().unwrap()[0].reply.packets, 1);
}

/// Two flows whose replies could not be told apart: the second is not opened.
#[test]
fn a_reply_that_would_be_ambiguous_opens_no_flow() {
    let mut program = Program::new(1).unwrap();
    assert_eq!(program.from_client(&tcp(to_vip(40_000), Segment::SYN)).unwrap().0, verdict::REDIRECT);
    let other = SocketAddr::from(([192, 0, 2, 20], VIP_PORT));
    let key = program.datapath.key(other, balancer_common::TCP);
    let service = balancer_common::Service {
        address: to_wire(other.ip()),
        id: 0,
        idle_timeout: 100,
        half_open_timeout: 100,
        closing_timeout: 100,
        ..Default::default()
    };
    program.datapath.set_service(&key, &service).unwrap();
    let other = Path::new((CLIENT_ADDRESS, 40_000), other);
    assert_eq!(program.from_client(&tcp(other, Segment::SYN)).unwrap().0, verdict::DROP);
    assert_eq!(program.drops().unwrap(), [(Reason::ReplyCollision, 1)]);
    let counters = program.counters().unwrap()[0];
    assert_eq!((counters.opened, counters.request.packets), (1, 1));
}

/// A backend that calls its own address never gets a frame from itself.
#[test]
fn no_packet_leaves_with_its_source_as_destination() {
    let mut program = Program::new(1).unwrap();
    let path = Path::new((backend_address(0), 40_000), (VIP, VIP_PORT));
    assert_eq!(program.from_backend(0, &tcp(path, Segment::SYN)).unwrap().0, verdict::DROP);
    assert_eq!(program.drops().unwrap(), [(Reason::ReplyCollision, 1)]);
}

/// A connection from its SYN to its last FIN: every byte, the active count, both directions' traffic.
#[test]
fn a_connection_is_carried_both_ways_and_counted_once() {
    let mut program = Program::new(1).unwrap();
    let port = 40_001;
    let requests = |flags| (tcp(to_vip(port), flags), tcp(lowered(to_backend(port)), flags));
    let replies = |flags| (tcp(to_client(port), flags), tcp(lowered(to_vip(port).reversed()), flags));
    let steps = [
        (true, Segment::SYN, (1, 0)),
        (true, Segment::SYN, (1, 0)),
        (false, Segment::SYN | Segment::ACK, (1, 0)),
        (true, Segment::ACK, (1, 0)),
        (true, Segment::ACK | Segment::PSH, (1, 0)),
        (false, Segment::ACK, (1, 0)),
        (false, Segment::FIN | Segment::ACK, (1, 0)),
        (true, Segment::ACK, (1, 0)),
        (true, Segment::FIN | Segment::ACK, (1, 1)),
        (false, Segment::ACK, (1, 1)),
        (false, Segment::RST | Segment::ACK, (1, 1)),
    ];
    for (number, (is_request, flags, counts)) in steps.into_iter().enumerate() {
        if is_request {
            let (input, output) = requests(flags);
            assert_sent(program.from_client(&input).unwrap(), backend_mac(0), BACKEND_SIDE, &output);
        } else {
            let (input, output) = replies(flags);
            let result = program.from_backend(0, &input).unwrap();
            assert_sent(result, CLIENT, CLIENT_SIDE, &output);
        }
        let counters = program.counters().unwrap()[0];
        assert_eq!((counters.opened, counters.closed), counts, "after step {number}");
    }
    let counters = program.counters().unwrap()[0];
    assert_eq!(counters.request, Traffic { packets: 6, bytes: 240 });
    assert_eq!(counters.reply, Traffic { packets: 5, bytes: 200 });
    assert_eq!(program.drops().unwrap(), []);
}

/// A closed port pair that is used again is a new flow at once; a live one keeps its backend.
#[test]
fn a_syn_on_a_closed_flow_is_scheduled_anew() {
    let mut program = Program::new(2).unwrap();
    let syn = tcp(to_vip(40_500), Segment::SYN);
    let backend_of = |result: (u32, Vec<u8>)| result.1[5] - 11;
    assert_eq!(backend_of(program.from_client(&syn).unwrap()), 0);
    assert_eq!(backend_of(program.from_client(&syn).unwrap()), 0, "a retransmission stays");
    program.from_client(&tcp(to_vip(40_500), Segment::RST)).unwrap();
    assert_eq!(backend_of(program.from_client(&syn).unwrap()), 1, "the next slot");
    let counters = program.counters().unwrap();
    assert_eq!((counters[0].opened, counters[0].closed), (1, 1));
    assert_eq!((counters[1].opened, counters[1].closed), (1, 0));
    // The first flow's reply path went with it.
    let stale = to_client(40_500);
    assert_eq!(program.from_backend(0, &tcp(stale, Segment::RST)).unwrap().0, verdict::DROP);
    assert_eq!(program.drops().unwrap(), [(Reason::OrphanReply, 1)]);
}

/// Replies follow the client to the neighbour that its last request came from.
#[test]
fn replies_go_where_the_last_request_came_from() {
    let program = Program::new(1).unwrap();
    let port = 40_002;
    program.from_client(&to_vip(port).udp(b"a").unwrap()).unwrap();
    let reply = to_client(port).udp(b"b").unwrap();
    assert_eq!(program.from_backend(0, &reply).unwrap().1[..6], CLIENT);
    let moved = [2, 0, 0, 0, 1, 99];
    program.run(&ethernet(CLIENT_SIDE, moved, &to_vip(port).udp(b"a").unwrap())).unwrap();
    assert_eq!(program.from_backend(0, &reply).unwrap().1[..6], moved);
}

/// New flows go round the ring, and a switch starts the new half at its beginning.
#[test]
fn flows_take_slots_in_order_and_go_round() {
    let mut program = Program::new(3).unwrap();
    program.set_ring(1, &[2, 0, 0, 1]).unwrap();
    let mut port = 41_000;
    let mut picks = |program: &Program, count: u16| -> Vec<u8> {
        let first = port;
        port += count;
        (first..port)
            .map(|port| program.from_client(&to_vip(port).udp(b"x").unwrap()).unwrap().1[5] - 11)
            .collect()
    };
    assert_eq!(picks(&program, 6), [2, 0, 0, 1, 2, 0]);
    let word = program.datapath.ring_word(1);
    assert_eq!((word.taken(), word.length()), (6, 4));
    let replaced = program.datapath.switch_ring(1, &[1], Some(word)).unwrap();
    assert_eq!(replaced.taken(), 6);
    assert_eq!(picks(&program, 2), [1, 1]);
    let changed = program.datapath.switch_ring(1, &[0], Some(word)).unwrap_err();
    assert_eq!(changed.taken(), 2, "who plans on old figures is told so");
}

/// Every length of a frame that begins like a service's: no crash, no rewrite of what is cut off.
#[test]
fn no_truncation_is_rewritten() {
    for packet in [tcp(to_vip(40_000), Segment::SYN), to_vip(40_000).udp(&[7; 20]).unwrap()] {
        let frame = ethernet(CLIENT_SIDE, CLIENT, &packet);
        let mut program = Program::new(1).unwrap();
        for length in 14..frame.len() {
            let cut = &frame[..length];
            let (result, output) = program.run(cut).unwrap();
            assert!([verdict::PASS, verdict::DROP].contains(&result), "{length} bytes");
            assert_eq!(output, cut, "{length} bytes");
        }
        assert_eq!(program.counters().unwrap()[0], Default::default());
        // From the whole IP header on, the destination is known, and each was refused by name.
        assert_eq!(program.drops().unwrap(), [(Reason::Malformed, frame.len() as u64 - 34)]);
    }
}

/// Frames beyond the first buffer are forwarded whole, and counted by their IP length.
#[test]
fn a_frame_of_several_buffers_is_forwarded_whole() {
    let mut program = Program::new(1).unwrap();
    program.set_hop(0, 1, 9000);
    let payload: Vec<u8> = (0..8900u32).map(|byte| byte as u8).collect();
    let input = to_vip(40_003).udp(&payload).unwrap();
    let (result, output) = program.from_client(&input).unwrap();
    assert_eq!(result, verdict::TX);
    let expected = lowered(to_backend(40_003)).udp(&payload).unwrap();
    assert_eq!(output.len(), 14 + 8928);
    assert!(output == ethernet(backend_mac(0), BACKEND_SIDE, &expected), "bytes differ");
    assert_eq!(program.counters().unwrap()[0].request, Traffic { packets: 1, bytes: 8928 });
}

fn to_backend(port: u16) -> Path {
    to_client(port).reversed()
}

fn lowered(path: Path) -> Path {
    Path { ttl: path.ttl - 1, ..path }
}

/// What a flow carries counts in its service's age profile, both directions together, in the bucket of its age.
#[test]
fn packets_count_by_the_age_of_their_flow() {
    let mut program = Program::new(1).unwrap();
    program.from_client(&to_vip(40_010).udp(b"a").unwrap()).unwrap();
    program.from_backend(0, &to_client(40_010).udp(b"bc").unwrap()).unwrap();
    // Both within a stamp or two of the opening, however slow the machine is.
    let profile = program.profile(1).unwrap();
    let young = profile.ages.iter().take(40).fold(Traffic::default(), |sum, age| Traffic {
        packets: sum.packets + age.packets,
        bytes: sum.bytes + age.bytes,
    });
    assert_eq!(young, Traffic { packets: 2, bytes: 29 + 30 });
    assert!(profile.ages[0].packets >= 1, "the first packet has age 0");
    assert_eq!(program.profile(0).unwrap(), bytemuck::Zeroable::zeroed(), "the other service");
}

/// What a backend sends from its service port without a flow never leaves, except to this host itself.
#[test]
fn a_reply_of_no_flow_keeps_the_backends_address_inside() {
    let mut program = Program::new(1).unwrap();
    let datagram = to_client(40_000).udp(b"late").unwrap();
    assert_eq!(program.from_backend(0, &datagram).unwrap().0, verdict::DROP);
    assert_eq!(program.drops().unwrap(), [(Reason::OrphanReply, 1)]);
    // A RST is only dropped; any other segment is answered by a RST towards the backend.
    assert_eq!(program.from_backend(0, &tcp(to_client(40_000), Segment::RST)).unwrap().0, verdict::DROP);
    let (result, reset) = program.from_backend(0, &tcp(to_client(40_000), Segment::ACK)).unwrap();
    assert_eq!(result, verdict::TX);
    assert_eq!(to_hex(&reset[..12]), to_hex(&[backend_mac(0), BACKEND_SIDE].concat()));
    assert_eq!(to_hex(&reset[26..38]), "0a00010a0a00020b9c401f90");
    assert_eq!(reset[47], Segment::RST);
    assert_eq!(program.drops().unwrap(), [(Reason::OrphanReply, 3)]);
    // Another port of the backend, and an answer to the balancer's host, are none of its business.
    let other = Path::new((backend_address(0), 22), (CLIENT_ADDRESS, 40_000)).udp(b"x").unwrap();
    assert_eq!(program.from_backend(0, &other).unwrap().0, verdict::PASS);
    program.datapath.set_roles(mapped(CLIENT_ADDRESS.octets()), balancer_common::role::LOCAL).unwrap();
    assert_eq!(program.from_backend(0, &datagram).unwrap().0, verdict::PASS);
    assert_eq!(program.drops().unwrap(), [(Reason::OrphanReply, 3)]);
}

/// Addresses that no client has open no flow.
#[test]
fn an_impossible_source_opens_no_flow() {
    for source in
        [Ipv4Addr::UNSPECIFIED, Ipv4Addr::LOCALHOST, Ipv4Addr::new(224, 0, 0, 1), Ipv4Addr::BROADCAST, VIP]
    {
        let mut program = Program::new(1).unwrap();
        let path = Path::new((source, 40_000), (VIP, VIP_PORT));
        for packet in [tcp(path, Segment::SYN), tcp(path, Segment::ACK), path.udp(b"x").unwrap()] {
            let frame = ethernet(CLIENT_SIDE, CLIENT, &packet);
            assert_eq!(program.run(&frame).unwrap(), (verdict::DROP, frame.clone()), "{source}");
        }
        assert_eq!(program.drops().unwrap(), [(Reason::Malformed, 3)], "{source}");
        assert_eq!(program.counters().unwrap()[0], Default::default());
    }
}
