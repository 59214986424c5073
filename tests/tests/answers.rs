//! Answers that the program makes itself: a RST, an ICMP port unreachable, byte for byte.
#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

use std::net::Ipv4Addr;

use balancer_common::{Reason, answer, selector};
use balancer_tests::{
    packet::{Path, Segment, ethernet, to_hex},
    program::{BACKEND_SIDE, CLIENT, CLIENT_SIDE, Program, VIP, VIP_PORT, backend_mac, verdict},
};
use etherparse::{Icmpv4Type, IpNumber, NetSlice, SlicedPacket, TransportSlice, icmpv4};

const CLIENT_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 10);
const PATH: ((Ipv4Addr, u16), (Ipv4Addr, u16)) = ((CLIENT_ADDRESS, 40_000), (VIP, VIP_PORT));

fn answering() -> Program {
    let mut program = Program::new(2).unwrap();
    program.change_services(|service| service.answers = answer::UNKNOWN_FLOW | answer::NO_BACKEND).unwrap();
    program
}

/// The headers of an answer, after the MACs, addresses, TTL and both sums have been checked.
fn check_answer(frame: &[u8], protocol: IpNumber) -> SlicedPacket<'_> {
    assert_eq!(to_hex(&frame[..12]), to_hex(&[CLIENT, CLIENT_SIDE].concat()), "back to the neighbour");
    let packet = SlicedPacket::from_ethernet(frame).unwrap();
    let Some(NetSlice::Ipv4(ip)) = &packet.net else { panic!("no IPv4 in {}", to_hex(frame)) };
    let header = ip.header().to_header();
    assert_eq!((header.source, header.destination), (VIP.octets(), CLIENT_ADDRESS.octets()));
    assert_eq!((header.time_to_live, header.protocol), (64, protocol));
    assert_eq!(header.header_checksum, header.calc_header_checksum(), "the IP header's sum");
    assert_eq!(usize::from(header.total_len), frame.len() - 14, "nothing behind it");
    packet
}

/// Who sends a segment of no flow is told so, with the numbers that make the sender believe it (RFC 9293).
#[test]
fn a_segment_of_no_flow_is_reset() {
    let segment = |flags, sequence, acknowledgement| Segment { flags, sequence, acknowledgement };
    // Segment and payload in; the RST's sequence number.
    let rows = [
        (segment(Segment::ACK, 7, 1_000_000), 0, 1_000_000),
        (segment(Segment::ACK | Segment::PSH, 7, 0xffff_fff0), 100, 0xffff_fff0),
        (segment(Segment::FIN | Segment::ACK, 9, 77), 0, 77),
        (segment(Segment::SYN | Segment::ACK, 9, 78), 0, 78),
    ];
    for (segment, payload, sequence) in rows {
        let mut program = answering();
        let packet = Path::new(PATH.0, PATH.1).tcp(segment, &vec![0x55; payload]).unwrap();
        let (result, frame) = program.from_client(&packet).unwrap();
        assert_eq!(result, verdict::TX, "{segment:?}");
        let sliced = check_answer(&frame, IpNumber::TCP);
        let Some(TransportSlice::Tcp(tcp)) = &sliced.transport else { panic!("no TCP") };
        let header = tcp.to_header();
        assert_eq!((header.source_port, header.destination_port), (VIP_PORT, 40_000));
        assert!(header.rst && !header.syn && !header.fin && !header.psh);
        assert_eq!((header.sequence_number, header.ack), (sequence, false));
        let sum = header.calc_checksum_ipv4_raw(VIP.octets(), CLIENT_ADDRESS.octets(), &[]).unwrap();
        assert_eq!(header.checksum, sum, "the TCP sum");
        assert_eq!(frame.len(), 54);
        assert_eq!(program.drops().unwrap(), [(Reason::UnknownFlow, 1)], "and counted");
    }
}

/// With no backend, a SYN is answered by a RST that acknowledges it, its data too.
#[test]
fn without_a_backend_a_connection_is_refused() {
    for (payload, acknowledgement) in [(0, 1001), (100, 1101)] {
        let mut program = answering();
        program.set_ring(0, &[]).unwrap();
        let syn = Segment { flags: Segment::SYN, sequence: 1000, acknowledgement: 0 };
        let packet = Path::new(PATH.0, PATH.1).tcp(syn, &vec![1; payload]).unwrap();
        let (result, frame) = program.from_client(&packet).unwrap();
        assert_eq!(result, verdict::TX);
        let sliced = check_answer(&frame, IpNumber::TCP);
        let Some(TransportSlice::Tcp(tcp)) = &sliced.transport else { panic!("no TCP") };
        let header = tcp.to_header();
        assert!(header.rst && header.ack);
        assert_eq!((header.sequence_number, header.acknowledgment_number), (0, acknowledgement));
        assert_eq!(program.drops().unwrap(), [(Reason::NoBackend, 1)]);
        assert_eq!(program.counters().unwrap()[0], Default::default(), "no flow");
    }
}

/// With no backend, a datagram is answered by a port unreachable that quotes its header and eight bytes.
#[test]
fn without_a_backend_a_datagram_is_unreachable() {
    let mut program = answering();
    program.set_ring(1, &[]).unwrap();
    let packet = Path::new(PATH.0, PATH.1).udp(&[9; 300]).unwrap();
    let (result, frame) = program.from_client(&packet).unwrap();
    assert_eq!(result, verdict::TX);
    let sliced = check_answer(&frame, IpNumber::ICMP);
    let Some(TransportSlice::Icmpv4(icmp)) = &sliced.transport else { panic!("no ICMP") };
    assert_eq!(icmp.icmp_type(), Icmpv4Type::DestinationUnreachable(icmpv4::DestUnreachableHeader::Port));
    assert_eq!(icmp.checksum(), icmp.header().icmp_type.calc_checksum(icmp.payload()), "the ICMP sum");
    assert_eq!(to_hex(icmp.payload()), to_hex(&packet[..28]));
    assert_eq!(program.drops().unwrap(), [(Reason::NoBackend, 1)]);
}

/// What must not be answered is only dropped: a RST, and senders that are not one host elsewhere.
#[test]
fn some_senders_get_no_answer() {
    let mut program = answering();
    let reset = Path::new(PATH.0, PATH.1).tcp(Segment::flags(Segment::RST), &[]).unwrap();
    let from = |source: Ipv4Addr| {
        Path::new((source, 40_000), PATH.1).tcp(Segment::flags(Segment::ACK), &[]).unwrap()
    };
    let packets = [
        reset,
        from(Ipv4Addr::new(224, 0, 0, 1)),
        from(Ipv4Addr::BROADCAST),
        from(Ipv4Addr::LOCALHOST),
        from(Ipv4Addr::UNSPECIFIED),
    ];
    for packet in &packets {
        let frame = ethernet(CLIENT_SIDE, CLIENT, packet);
        assert_eq!(program.run(&frame).unwrap(), (verdict::DROP, frame.clone()), "{}", to_hex(packet));
    }
    // Addresses that no client has are malformed before anything else.
    let impossible = packets.len() as u64 - 1;
    assert_eq!(program.drops().unwrap(), [(Reason::Malformed, impossible), (Reason::UnknownFlow, 1)]);
    // A damaged header may name somebody else.
    let mut damaged = Path::new(PATH.0, PATH.1).tcp(Segment::flags(Segment::ACK), &[]).unwrap();
    damaged[15] ^= 1;
    assert_eq!(program.from_client(&damaged).unwrap().0, verdict::DROP);
    assert_eq!(program.drops().unwrap(), [(Reason::Malformed, impossible), (Reason::UnknownFlow, 2)]);
}

/// A flood of refused datagrams gets no flood of answers.
#[test]
fn icmp_answers_are_limited() {
    let mut program = answering();
    program.set_ring(1, &[]).unwrap();
    let packet = Path::new(PATH.0, PATH.1).udp(b"x").unwrap();
    let verdicts: Vec<u32> = (0..2000).map(|_| program.from_client(&packet).unwrap().0).collect();
    let answered = verdicts.iter().filter(|result| **result == verdict::TX).count();
    assert!((64..2000).contains(&answered), "{answered} of 2000 in one go");
    assert_eq!(program.drops().unwrap(), [(Reason::NoBackend, 2000)], "all are counted");
}

/// Hash selectors: the same client, or the same flow, gets the same slot, whatever came in between.
#[test]
fn a_hash_chooses_the_slot() {
    let mut program = Program::new(8).unwrap();
    let ring: Vec<u16> = (0..4093).map(|slot| slot % 8).collect();
    program.set_ring(1, &ring).unwrap();
    let pick = |program: &Program, client: Ipv4Addr, port: u16| {
        let packet = Path::new((client, port), PATH.1).udp(b"x").unwrap();
        let frame = program.run(&ethernet(CLIENT_SIDE, CLIENT, &packet)).unwrap().1;
        assert_eq!(frame[6..12], BACKEND_SIDE);
        (0..8).find(|id| backend_mac(*id) == frame[..6]).unwrap()
    };
    for (chosen, by_port) in [(selector::SOURCE, false), (selector::FLOW, true)] {
        program.change_services(|service| service.selector = chosen).unwrap();
        let base = if by_port { 20_000 } else { 30_000 };
        let mut spread = [0; 8];
        let mut ports_differ = 0;
        for host in 0..200 {
            let client = Ipv4Addr::new(10, 9, 0, host);
            let first = pick(&program, client, base);
            let second = pick(&program, client, base + 1);
            spread[usize::from(first)] += 1;
            ports_differ += usize::from(first != second);
        }
        assert_eq!(ports_differ > 0, by_port, "{ports_differ} of 200 clients have two backends");
        assert!(spread.iter().all(|count| (8..=50).contains(count)), "{spread:?}");
    }
}
