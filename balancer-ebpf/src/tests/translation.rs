//! Flows whose source is translated: who gets one, every byte both ways, and the ports.

use std::{collections::HashSet, vec, vec::Vec};

use balancer_common::{FIRST_SNAT_PORT, PORT_REST, Reason, TCP, Traffic, UDP, role};
use proptest::prelude::*;

use super::{
    bed::{Bed, CLIENT, FIN_ACK, SYN_ACK, UNIT, VIP},
    cases,
    frame::{ACK, Endpoint, Frame, L4, PSH, RST, SYN, address, hex, ip_header, l4_at, translated},
};
use crate::Verdict;

/// What clients are given.
const SNAT: [u8; 4] = [10, 0, 2, 1];
/// The backends' own network.
const NEAR: u32 = 120;
const HOST: u32 = 128;
const ALL: u32 = 0;
/// On the backends' network.
const NEIGHBOUR: Endpoint = ([10, 0, 2, 50], 40_000);

/// A bed whose backends have a source for these clients.
fn bed(backends: usize, prefix: u32) -> Bed {
    with_table(backends, prefix, 64)
}

fn with_table(backends: usize, prefix: u32, buckets: u32) -> Bed {
    let mut bed = Bed::with_table(backends, buckets);
    for backend in &mut bed.kernel.backends {
        (backend.snat_address, backend.snat_prefix) = (address(SNAT), prefix);
    }
    bed.kernel.roles.insert(address(SNAT), role::LOCAL | role::with_ports_from(FIRST_SNAT_PORT));
    for backend in Bed::BACKENDS {
        for protocol in [TCP, UDP] {
            let key = bed.kernel.key(backend, protocol);
            bed.kernel.endpoints.insert(key, balancer_common::endpoint::SERVER);
        }
    }
    bed
}

fn source_of(frame: &[u8]) -> Endpoint {
    let l4 = l4_at(frame);
    // The last four bytes of the source tell in either family.
    let end = if frame[14] >> 4 == 4 { 30 } else { 38 };
    (frame[end - 4..end].try_into().unwrap(), u16::from_be_bytes([frame[l4], frame[l4 + 1]]))
}

/// Sends a request, which must reach a backend with nothing else changed than a router that translates would: whom, and
/// from where.
#[track_caller]
fn request(bed: &Bed, frame: &Frame) -> (usize, Endpoint) {
    let input = frame.bytes();
    let (verdict, output) = bed.run(1, &input);
    assert_eq!(verdict, Verdict::Redirect(1), "{:?}", bed.kernel.drops());
    let backend = Bed::BACKEND_MACS.iter().position(|mac| *mac == output[..6]).unwrap();
    let source = source_of(&output);
    let to = Bed::BACKEND_MACS[backend];
    assert_eq!(output, translated(&input, to, Bed::BACKEND_SIDE, source, Bed::BACKENDS[backend]));
    assert_ne!(source.0, Bed::BACKENDS[backend].0, "source = destination");
    (backend, source)
}

/// The same of a request whose source must be translated: whom, and the port.
#[track_caller]
fn translated_request(bed: &Bed, frame: &Frame) -> (usize, u16) {
    let (backend, (address, port)) = request(bed, frame);
    assert_eq!(address, SNAT);
    assert!(port >= FIRST_SNAT_PORT, "{port}");
    (backend, port)
}

/// Sends a backend's answer to a port that was given, which must reach the client from the service.
#[track_caller]
fn reply(bed: &Bed, frame: &Frame, client: Endpoint, vip: Endpoint) {
    let input = frame.bytes();
    let (verdict, output) = bed.run(2, &input);
    assert_eq!(verdict, Verdict::Redirect(0), "{:?}: {:?}", frame.l4, bed.kernel.drops());
    assert_eq!(output, translated(&input, Bed::CLIENT_MAC, Bed::CLIENT_SIDE, vip, client));
}

fn from_backend(backend: usize, port: u16, flags: u8) -> Frame {
    Frame::tcp(Bed::BACKENDS[backend], (SNAT, port), flags)
}

/// Opens a connection and ends it with a reset: the port that it had.
#[track_caller]
fn opened_and_reset(bed: &Bed, client: Endpoint) -> u16 {
    let (_, port) = translated_request(bed, &Frame::tcp(client, VIP, SYN));
    assert_eq!(translated_request(bed, &Frame::tcp(client, VIP, RST)).1, port);
    port
}

both! {
fn a_connection_of_a_neighbour_is_carried_both_ways() {
    let bed = bed(2, NEAR);
    let (backend, port) = translated_request(&bed, &Frame::tcp(NEIGHBOUR, VIP, SYN));
    reply(&bed, &from_backend(backend, port, SYN_ACK), NEIGHBOUR, VIP);
    let data = Frame { payload: vec![b'x'; 700], ..Frame::tcp(NEIGHBOUR, VIP, ACK | PSH) };
    assert_eq!(translated_request(&bed, &data), (backend, port));
    let data = Frame { payload: vec![b'y'; 1440], ..from_backend(backend, port, ACK | PSH) };
    reply(&bed, &data, NEIGHBOUR, VIP);
    let longest = L4::Tcp { flags: ACK, options: vec![1; 40] };
    let data = Frame { options: vec![1; 40], l4: longest, ..from_backend(backend, port, ACK) };
    reply(&bed, &data, NEIGHBOUR, VIP);
    assert_eq!(translated_request(&bed, &Frame::tcp(NEIGHBOUR, VIP, FIN_ACK)), (backend, port));
    reply(&bed, &from_backend(backend, port, FIN_ACK), NEIGHBOUR, VIP);
    assert_eq!(translated_request(&bed, &Frame::tcp(NEIGHBOUR, VIP, ACK)), (backend, port));
    let counted = bed.kernel.counted(backend);
    let (header, options) = if ip_header() == 20 { (40, 40) } else { (60, 0) };
    assert_eq!(counted.request, Traffic { packets: 4, bytes: 4 * header + 700 });
    assert_eq!(counted.reply, Traffic { packets: 4, bytes: 4 * header + 40 + options + 1440 });
    assert_eq!((bed.flows(), bed.kernel.dropped(), bed.kernel.taken(0)), ((1, 1), 0, 1));
}
}

proptest! {
    #![proptest_config(cases(400))]

    /// Sums are as right as if made anew, whatever the addresses, ports and bytes; a UDP sum of 0 stays one.
    #[test]
    fn every_byte_is_right(
        host in 2_u8..=250, port: u16, payload: Vec<u8>, is_summed: bool, is_tcp: bool, now: u32, to_zero: bool,
    ) {
        let bed = bed(1, NEAR);
        bed.kernel.now.set(now);
        let client = ([10, 0, 2, host], port);
        let l4 = if is_tcp { L4::Tcp { flags: SYN, options: vec![] } } else { L4::Udp { is_summed } };
        let mut frame = Frame { l4, ..Frame::udp(client, VIP, &payload) };
        if to_zero && is_summed && !is_tcp {
            // The last word of the payload takes what the sum lacks to 0, which goes out as ffff.
            frame.payload.truncate(frame.payload.len() & !1);
            frame.payload.extend([0, 0]);
            let (end, output) = (frame.payload.len(), bed.run(1, &frame.bytes()).1);
            frame.payload[end - 2..].copy_from_slice(&output[40..42]);
            let (_, output) = bed.run(1, &frame.bytes());
            prop_assert_eq!(&output[40..42], &[0xff, 0xff]);
        }
        let (backend, port) = translated_request(&bed, &frame);
        prop_assert_eq!(translated_request(&bed, &frame), (backend, port));
        let answer = Frame { source: Bed::BACKENDS[0], destination: (SNAT, port), ..frame };
        reply(&bed, &answer, client, VIP);
    }
}

#[test]
fn a_datagram_without_a_sum_keeps_none() {
    let bed = bed(1, ALL);
    let input = hex("4500001e1234000040119b870a00010ac000020a9c400050000a00006869");
    let (verdict, output) = bed.run(1, &[&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0][..], &input].concat());
    assert_eq!((verdict, &output[40..]), (Verdict::Redirect(1), &[0, 0, b'h', b'i'][..]));
}

both! {
/// By the network's prefix, the client's address, and whether it is translated.
fn a_client_keeps_its_source_unless_its_replies_would_pass_by() {
    let far = CLIENT;
    for (prefix, client, wanted) in [
        (NEAR, NEIGHBOUR, true),
        (NEAR, ([10, 0, 2, 255], 1), true),
        (NEAR, ([10, 0, 3, 50], 40_000), false),
        (NEAR, far, false),
        (119, ([10, 0, 3, 50], 40_000), true),
        (HOST, NEIGHBOUR, false),
        (ALL, far, true),
    ] {
        for frame in [Frame::tcp(client, VIP, SYN), Frame::udp(client, VIP, b"ask")] {
            let (_, source) = request(&bed(1, prefix), &frame);
            assert_eq!(source.0 == SNAT, wanted, "{prefix:?} {client:?}");
            assert!(wanted || source == client);
        }
        let mut without = bed(1, prefix);
        without.kernel.backends[0].snat_address = [0; 16];
        assert_eq!(request(&without, &Frame::tcp(client, VIP, SYN)).1, client, "no source to give");
    }
}

/// Also when it gets itself, and when backends are behind a gateway, each on a network of its own.
fn a_backend_that_calls_the_service_is_answered() {
    for prefix in [NEAR, HOST] {
        let bed = bed(3, prefix);
        let caller = (Bed::BACKENDS[1].0, 40_000);
        for turn in 0..3 {
            let client = (caller.0, caller.1 + turn);
            let (backend, port) = translated_request(&bed, &Frame::tcp(client, VIP, SYN));
            assert_eq!(backend, usize::from(turn), "in turns, itself too");
            reply(&bed, &from_backend(backend, port, SYN_ACK), client, VIP);
            let counted = bed.kernel.counted(backend);
            assert_eq!((counted.opened, counted.request.packets, counted.reply.packets), (1, 1, 1));
        }
        assert_eq!(bed.kernel.taken(0), 3);
    }
}

/// One client port, two services, one backend.
fn replies_that_would_look_alike_come_to_a_port_of_ours() {
    let bed = bed(2, NEAR);
    bed.set_ring(&[0]);
    let [syn, syn_ack] = [SYN, SYN_ACK].map(|flags| Frame::tcp(CLIENT, Bed::VIPS[1], flags));
    let datagram = Frame::udp(CLIENT, Bed::VIPS[1], b"x");
    for (service, second, answer) in [(0, syn, syn_ack), (1, datagram.clone(), datagram)] {
        let first = Frame { destination: VIP, ..second.clone() };
        assert_eq!(request(&bed, &first), (0, CLIENT));
        let (_, port) = translated_request(&bed, &second);
        assert_eq!(bed.kernel.taken(service), 2, "the slot is not given up");
        // Both at once, and each stays what it is.
        for _ in 0..2 {
            let to = |destination| Frame { source: Bed::BACKENDS[0], destination, ..answer.clone() };
            bed.reply(&to(CLIENT), VIP);
            reply(&bed, &to((SNAT, port)), CLIENT, Bed::VIPS[1]);
            assert_eq!(request(&bed, &first), (0, CLIENT));
            assert_eq!(translated_request(&bed, &second), (0, port));
        }
    }
    // What is over stands in nobody's way.
    request(&bed, &Frame::tcp(CLIENT, VIP, RST));
    translated_request(&bed, &Frame::tcp(CLIENT, Bed::VIPS[1], RST));
    assert_eq!(request(&bed, &Frame::tcp(CLIENT, Bed::VIPS[1], SYN)), (0, CLIENT));
}
}

/// The port that a client gets first at this moment, in a table that knows of no other.
fn first_port(now: u32, client: Endpoint) -> u16 {
    let bed = with_table(1, NEAR, 2);
    bed.kernel.now.set(now);
    translated_request(&bed, &Frame::tcp(client, VIP, SYN)).1
}

/// How a flow ends, and when that is, after which time its port has rested.
struct End {
    what: &'static str,
    packets: &'static [u8],
    timeout: u16,
    /// Whether the client itself opens the next flow from its port, at once.
    has_successor: bool,
}

const ENDS: [End; 4] = [
    End {
        what: "reset",
        packets: &[SYN, RST],
        timeout: Bed::TCP_SERVICE.closing_timeout,
        has_successor: false,
    },
    End {
        what: "half open",
        packets: &[SYN],
        timeout: Bed::TCP_SERVICE.half_open_timeout,
        has_successor: false,
    },
    End { what: "reset, then opened again", packets: &[SYN, RST], timeout: 0, has_successor: true },
    End { what: "a datagram", packets: &[0], timeout: Bed::UDP_SERVICE.idle_timeout, has_successor: false },
];

both! {
/// A port that another flow had is given again, but not before it has rested.
fn a_released_port_rests_for_a_minute() {
    for End { what, packets, timeout, has_successor } in ENDS {
        for start in [1_000, u32::MAX - 300] {
            let send = |bed: &Bed, client: Endpoint, flags: u8| match flags {
                0 => translated_request(bed, &Frame::udp(client, VIP, b"ask")).1,
                flags => translated_request(bed, &Frame::tcp(client, VIP, flags)).1,
            };
            let run = |pause: u32| {
                let bed = bed(1, NEAR);
                bed.kernel.now.set(start);
                let port = packets.iter().map(|flags| send(&bed, NEIGHBOUR, *flags)).last().unwrap();
                if has_successor {
                    assert_ne!(send(&bed, NEIGHBOUR, SYN), port, "{what}");
                }
                bed.wait(pause);
                (bed, port)
            };
            let (_, port) = run(0);
            let rested = u32::from(timeout) * UNIT + PORT_REST;
            for (pause, is_free) in
                [(1, false), (rested - u32::from(has_successor), false), (rested + 1, true)]
            {
                let (bed, _) = run(pause);
                let now = bed.kernel.now.get();
                let is_first = |client: &Endpoint| match packets[0] {
                    0 => {
                        let other = with_table(1, NEAR, 2);
                        other.kernel.now.set(now);
                        send(&other, *client, 0) == port
                    }
                    _ => first_port(now, *client) == port,
                };
                let other = (1..=u16::MAX).map(|port| ([10, 0, 2, 60], port)).find(is_first).unwrap();
                let given = send(&bed, other, packets[0]);
                assert_eq!(given == port, is_free, "{what}, after {pause} stamps");
                bed.kernel.memory.assert_consistent();
                bed.kernel.assert_active_is_exact();
            }
        }
    }
}

/// A minute is not shorter for the coarseness of the stamps.
fn a_minute_is_a_minute() {
    const MINUTE: u64 = 60_000_000_000;
    assert!(u64::from(PORT_REST - 1) << 26 >= MINUTE && u64::from(PORT_REST - 2) << 26 <= MINUTE);
}

/// What comes late to a port that rests belongs to nobody: not to who had it, and not to who comes next.
fn a_late_reply_reaches_nobody() {
    let bed = bed(1, NEAR);
    let port = opened_and_reset(&bed, NEIGHBOUR);
    let (_, next) = translated_request(&bed, &Frame::tcp(NEIGHBOUR, VIP, SYN));
    assert_ne!(next, port);
    let (verdict, output) = bed.run(2, &from_backend(0, port, ACK).bytes());
    // The backend is told, as for any other flow that is forgotten.
    assert_eq!((verdict, &output[..6]), (Verdict::Transmit, &Bed::CLIENT_MAC[..]));
    let last_bytes = |end: usize| &output[end - 4..end];
    let [source, destination] = if ip_header() == 20 { [30, 34] } else { [38, 54] }.map(last_bytes);
    assert_eq!((source, destination), (&[10, 0, 2, 1][..], &[10, 0, 2, 11][..]));
    assert_eq!(output[l4_at(&output) + 13], RST);
    assert_eq!(bed.kernel.drops(), [(Reason::OrphanReply, 1)]);
    reply(&bed, &from_backend(0, next, SYN_ACK), NEIGHBOUR, VIP);
    assert_eq!(bed.flows(), (2, 1));
}

/// To a port that clients are given the host itself never listens; its other ports are its own.
fn what_the_host_asked_for_itself_passes() {
    let mut bed = bed(1, NEAR);
    let (low, high) = (FIRST_SNAT_PORT - 1, FIRST_SNAT_PORT);
    bed.passed(2, &from_backend(0, low, ACK).bytes());
    bed.passed(2, &Frame::udp(Bed::BACKENDS[0], (SNAT, low), b"x").bytes());
    bed.refused(2, &Frame::udp(Bed::BACKENDS[0], (SNAT, high), b"x").bytes(), Reason::OrphanReply);
    bed.refused(2, &from_backend(0, u16::MAX, RST).bytes(), Reason::OrphanReply);
    let elsewhere = Frame::tcp((Bed::BACKENDS[0].0, 22), (SNAT, high), ACK);
    bed.passed(2, &elsewhere.bytes());
    // An address that no client is given.
    bed.kernel.roles.insert(address(SNAT), role::LOCAL);
    bed.passed(2, &from_backend(0, high, ACK).bytes());
}

fn a_source_that_claims_to_be_this_host_opens_no_flow() {
    let bed = bed(1, NEAR);
    for frame in [Frame::tcp((SNAT, 40_000), VIP, SYN), Frame::udp((SNAT, 40_000), VIP, b"")] {
        bed.refused(2, &frame.bytes(), Reason::Malformed);
    }
}

/// As many flows as there are ports, open and closed ones: no port twice, and then a refusal by name.
fn ports_are_given_once_and_then_refused() {
    let bed = with_table(1, NEAR, 4096);
    let mut given = HashSet::new();
    let mut clients =
        (0..).map(|number: u32| ([10, 0, 2, 51 + (number >> 15) as u8], 1 + number as u16 % 32_768));
    let refused = loop {
        let client = clients.next().unwrap();
        let frame = Frame::tcp(client, VIP, SYN);
        if bed.run(1, &frame.bytes()).0 == Verdict::Drop {
            break frame;
        }
        let (_, port) = translated_request(&bed, &frame);
        if port % 2 == 0 {
            translated_request(&bed, &Frame::tcp(client, VIP, RST));
        }
        assert!(given.insert(port), "{port} twice");
    };
    assert_eq!(bed.kernel.drops(), [(Reason::NoSourcePort, 1)]);
    // Eight tries find a free one as long as half are: fewer than one in two hundred fail.
    assert!(given.len() > 1_500, "refused after {} ports", given.len());
    bed.refused(1, &refused.bytes(), Reason::NoSourcePort);
    // Nearly all are found in the end, by other clients.
    for client in clients.take(30_000) {
        let (verdict, output) = bed.run(1, &Frame::tcp(client, VIP, SYN).bytes());
        if verdict == Verdict::Redirect(1) {
            assert!(given.insert(source_of(&output).1));
        }
    }
    assert!(given.len() > 4_500, "{} of 4,536 ports", given.len());
    assert!(given.iter().all(|port| *port >= FIRST_SNAT_PORT));
    bed.kernel.assert_active_is_exact();
    // Other backends and the other protocol have ports of their own.
    translated_request(&bed, &Frame::udp(NEIGHBOUR, VIP, b"ask"));
}

/// A client that comes again and again from one port, which closed its connections: no port twice in a minute.
fn a_client_may_use_its_own_port_again_at_once() {
    let bed = with_table(1, NEAR, 512);
    let mut given = HashSet::new();
    for _ in 0..300 {
        assert!(given.insert(opened_and_reset(&bed, NEIGHBOUR)));
        bed.wait(1);
    }
    assert_eq!((bed.flows(), bed.kernel.dropped()), ((300, 300), 0));
    let resting = bed.kernel.memory.live().filter(|(_, entry)| entry.holds_port()).count();
    assert_eq!(resting, 300);
}

/// A full table: what rests gives way to what is opened, and nothing is counted for it.
fn ports_that_rest_give_way_when_the_table_is_full() {
    let bed = with_table(1, NEAR, 1);
    for number in 0..100 {
        opened_and_reset(&bed, (NEIGHBOUR.0, NEIGHBOUR.1 + number));
        bed.kernel.memory.assert_consistent();
        bed.kernel.assert_active_is_exact();
    }
    assert_eq!((bed.flows(), bed.kernel.dropped()), ((100, 100), 0));
}
}
