//! Odd segments, by whom nothing is opened that should not be: crafted on both sides, while no kernel answers.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{net::Ipv4Addr, time::Duration};

use balancer_tests::{
    Balancer, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    packet::{self, Path, Segment, to_hex},
    socket::FrameSocket,
    status::{self, each},
    topology::{BALANCER_BACKEND_SIDE, BALANCER_CLIENT_SIDE, CLIENT, VIP, backend_address, mac},
    veth::mac_text,
};
use balancer_user::api::Status;

const LIMIT: Duration = Duration::from_secs(5);
/// An address that the client's kernel knows nothing of: it does not answer for it.
const SOMEBODY: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 77);
const SYN_ACK: u8 = Segment::SYN | Segment::ACK;
/// Both bits of explicit congestion notification in a SYN (RFC 3168).
const ECN: u8 = 0xc0;

/// A balancer between a client and two backends that say nothing of their own accord.
struct Scene {
    balancer: Balancer,
    client: FrameSocket,
    backends: Vec<FrameSocket>,
    _bench: Topology,
}

impl Scene {
    fn new() -> Scene {
        let bench = Plan::backends(2).build().unwrap();
        let mut backends = Vec::new();
        for (number, netns) in (1..).zip(&bench.backends) {
            let address = backend_address(number);
            let neighbour =
                format!("neigh replace {address} lladdr {} dev lk nud permanent", mac_text(mac(address)));
            bench.balancer.ip(&neighbour).unwrap();
            netns.ip(&format!("address del {address}/24 dev e0")).unwrap();
            backends.push(FrameSocket::open(netns, "e0").unwrap());
        }
        let service = Service { more: "snat = \"never\"", ..Service::new("tcp", "round-robin", &[1, 1]) };
        let balancer = Balancer::start(&bench.balancer, &config::text("", &[service])).unwrap();
        status::wait_until_up(&balancer).unwrap();
        Scene { balancer, client: FrameSocket::open(&bench.client, "c0").unwrap(), backends, _bench: bench }
    }

    /// Sends a packet from the client.
    fn ask(&self, packet: &[u8]) {
        self.client.send(&packet::ethernet(mac(BALANCER_CLIENT_SIDE), mac(CLIENT), packet)).unwrap();
    }

    /// Sends a packet from the client that arrives at a backend, from `SOMEBODY`, with these bytes from the flags on.
    #[track_caller]
    fn carried(&self, number: u8, packet: &[u8]) {
        self.ask(packet);
        let arrived = self.at_backend(number).expect("nothing arrived");
        assert_eq!(arrived[12..16], SOMEBODY.octets());
        assert_eq!(arrived[16..20], backend_address(number).octets(), "{}", to_hex(&arrived));
        assert_eq!(arrived[20..24], [&packet[20..22], &BACKEND_PORT.to_be_bytes()].concat());
        assert_eq!(to_hex(&arrived[24..36]), to_hex(&packet[24..36]), "numbers, flags, window");
        assert_eq!(to_hex(&arrived[38..]), to_hex(&packet[38..]), "the rest");
    }

    /// Sends a segment from a backend that arrives at the client, from the service.
    #[track_caller]
    fn answered(&self, number: u8, port: u16, segment: Segment) {
        let path = Path::new((backend_address(number), BACKEND_PORT), (SOMEBODY, port));
        let packet = path.tcp(segment, &[]).unwrap();
        let frame = packet::ethernet(mac(BALANCER_BACKEND_SIDE), mac(backend_address(number)), &packet);
        self.backends[usize::from(number) - 1].send(&frame).unwrap();
        let arrived =
            self.client.receive_packet(LIMIT, |packet| packet[16..20] == SOMEBODY.octets()).unwrap();
        let arrived = arrived.expect("nothing arrived");
        assert_eq!(arrived[12..16], VIP.octets());
        assert_eq!(arrived[20..24], [VIP_PORT.to_be_bytes(), port.to_be_bytes()].concat());
        assert_eq!(to_hex(&arrived[24..36]), to_hex(&packet[24..36]), "numbers, flags, window");
    }

    /// The next packet from `SOMEBODY` that arrives at a backend.
    fn at_backend(&self, number: u8) -> Option<Vec<u8>> {
        let socket = &self.backends[usize::from(number) - 1];
        let own = backend_address(number).octets();
        socket
            .receive_packet(LIMIT, |packet| packet[12..16] == SOMEBODY.octets() && packet[16..20] == own)
            .unwrap()
    }

    fn wait(&self, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
        status::wait(&self.balancer, what, wanted).unwrap()
    }

    /// Active flows and packets of each backend.
    fn counts(&self) -> Vec<(u64, u64)> {
        each(&status::read_fresh(&self.balancer).unwrap(), |backend| (backend.active, backend.packets))
    }
}

fn path(port: u16) -> Path {
    Path::new((SOMEBODY, port), (VIP, VIP_PORT))
}

fn segment(flags: u8, sequence: u32, acknowledgement: u32) -> Segment {
    Segment { flags, sequence, acknowledgement }
}

fn tcp(port: u16, segment: Segment) -> Vec<u8> {
    path(port).tcp(segment, &[]).unwrap()
}

/// A segment with exactly these flags, also such as no TCP sends. Its sum is wrong then: that is for the ends to judge.
fn raw(port: u16, flags: u8) -> Vec<u8> {
    let mut packet = tcp(port, Segment::flags(Segment::ACK));
    packet[33] = flags;
    packet
}

#[test]
fn a_simultaneous_open_is_one_flow() {
    let scene = Scene::new();
    scene.carried(1, &tcp(40_000, segment(Segment::SYN, 100, 0)));
    scene.answered(1, 40_000, segment(Segment::SYN, 500, 0));
    scene.carried(1, &tcp(40_000, segment(SYN_ACK, 100, 501)));
    scene.answered(1, 40_000, segment(SYN_ACK, 500, 101));
    scene.carried(1, &tcp(40_000, segment(Segment::ACK, 101, 501)));
    scene.answered(1, 40_000, segment(Segment::ACK, 501, 101));
    assert_eq!(scene.counts(), [(1, 6), (0, 0)]);
    scene.wait("established", |status| (status.flows.now.half_open, status.flows.now.established) == (0, 1));
    // And it ends as others do.
    scene.carried(1, &tcp(40_000, segment(Segment::FIN | Segment::ACK, 101, 501)));
    scene.answered(1, 40_000, segment(Segment::FIN | Segment::ACK, 501, 102));
    assert_eq!(scene.counts(), [(0, 8), (0, 0)]);
    scene.carried(2, &tcp(40_001, segment(Segment::SYN, 1, 0)));
}

#[test]
fn a_syn_opens_a_flow_whatever_it_carries_beside() {
    let scene = Scene::new();
    let data: Vec<u8> = (0..100).collect();
    let with_data = path(40_000).tcp(segment(Segment::SYN, 7, 0), &data).unwrap();
    assert_eq!(with_data.len(), 140);
    scene.carried(1, &with_data);
    scene.carried(2, &raw(40_001, Segment::SYN | ECN));
    scene.carried(1, &raw(40_002, Segment::SYN | Segment::PSH));
    // Once more each: the same flow.
    scene.carried(1, &with_data);
    scene.carried(2, &raw(40_001, Segment::SYN | ECN));
    assert_eq!(scene.counts(), [(2, 3), (1, 2)]);
}

/// To a port without a flow: contradictory flags are malformed, and nobody answers.
#[test]
fn contradictory_flags_open_nothing() {
    let scene = Scene::new();
    const FIN: u8 = Segment::FIN;
    const SYN: u8 = Segment::SYN;
    const RST: u8 = Segment::RST;
    const ACK: u8 = Segment::ACK;
    let odd =
        [0, 0x20, Segment::PSH, FIN, SYN | FIN, SYN | RST, FIN | RST, SYN | RST | ACK, SYN | FIN | ACK, 0xff];
    for flags in odd {
        scene.ask(&raw(40_000, flags));
    }
    let status = scene.wait("all of them", |status| status.drops.values().sum::<u64>() == odd.len() as u64);
    assert_eq!(status::drops(&status), [("malformed", odd.len() as u64)]);
    assert_eq!(scene.counts(), [(0, 0), (0, 0)]);
    // The next that arrives is what was sent last, and at the first backend: no slot was taken.
    scene.carried(1, &tcp(40_000, segment(SYN, 1, 0)));
    let answer = scene.client.receive_packet(Duration::ZERO, |packet| packet[16..20] == SOMEBODY.octets());
    assert_eq!(answer.unwrap(), None);
}

/// On a live connection they change nothing either, from whichever end they seem to come.
#[test]
fn odd_segments_do_not_disturb_a_connection() {
    let scene = Scene::new();
    scene.carried(1, &tcp(40_000, segment(Segment::SYN, 100, 0)));
    scene.answered(1, 40_000, segment(SYN_ACK, 500, 101));
    scene.carried(1, &tcp(40_000, segment(Segment::ACK, 101, 501)));
    for flags in [0, 0xff, Segment::SYN | Segment::FIN, Segment::SYN | Segment::RST, Segment::FIN] {
        scene.ask(&raw(40_000, flags));
    }
    let status = scene.wait("five refused", |status| status.drops["malformed"] == 5);
    assert_eq!(each(&status, |backend| backend.active), [1, 0]);
    // A SYN, and a SYN-ACK from the wrong side: carried to where the connection is, which knows what to say.
    scene.carried(1, &tcp(40_000, segment(Segment::SYN, 9_000, 0)));
    scene.answered(1, 40_000, segment(Segment::ACK, 501, 101));
    scene.carried(1, &tcp(40_000, segment(SYN_ACK, 9_000, 1)));
    scene.carried(1, &tcp(40_000, segment(Segment::ACK, 101, 501)));
    assert_eq!(scene.counts(), [(1, 7), (0, 0)]);
    // A RST of nobody knows whom, and the connection goes on: it was none.
    scene.carried(1, &tcp(40_000, segment(Segment::RST, 1, 0)));
    assert_eq!(scene.counts()[0].0, 0);
    scene.carried(1, &tcp(40_000, segment(Segment::ACK, 101, 501)));
    assert_eq!(scene.counts(), [(1, 9), (0, 0)]);
    scene.wait("established", |status| status.flows.now.established == 1);
    assert_eq!(status::drops(&status::read_fresh(&scene.balancer).unwrap()), [("malformed", 5)]);
}
