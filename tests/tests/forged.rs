//! Somebody who knows a connection's addresses and ports, but not its sequence numbers, sends segments in its ends' names.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddrV4, TcpStream},
    time::{Duration, Instant},
};

use balancer_tests::{
    Balancer, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    connection::{Listeners, connect_from},
    eventually,
    packet::{self, Path, Segment},
    socket::FrameSocket,
    status::{self, each},
    topology::{BALANCER_BACKEND_SIDE, BALANCER_CLIENT_SIDE, CLIENT, VIP, backend_address, mac},
};

const LIMIT: Duration = Duration::from_secs(5);
/// After so long a flow that has closed is forgotten, with the timeout of the test.
const PAST_CLOSING: Duration = Duration::from_millis(2_500);
const PORT: u16 = 40_500;
const FIN_ACK: u8 = Segment::FIN | Segment::ACK;
const RST_ACK: u8 = Segment::RST | Segment::ACK;
const SYN_ACK: u8 = Segment::SYN | Segment::ACK;

/// A connection to the first of two backends, and the wires of the clients and of the second backend.
struct Scene {
    balancer: Balancer,
    client: TcpStream,
    server: TcpStream,
    wires: [FrameSocket; 2],
    _listeners: Listeners,
    _bench: Topology,
}

/// In whose name a segment is forged, and on which side it comes in.
#[derive(Clone, Copy, Debug)]
enum As {
    Client,
    Backend,
    BackendFromClients,
}

impl Scene {
    fn new(daemon: &str) -> Scene {
        let bench = Plan::backends(2).build().unwrap();
        let places = (1..)
            .zip(&bench.backends)
            .map(|(number, netns)| (netns, SocketAddrV4::new(backend_address(number), BACKEND_PORT)));
        let listeners = Listeners::open(places).unwrap();
        let service = Service::new("tcp", "round-robin", &[1, 1]);
        let balancer = Balancer::start(&bench.balancer, &config::text(daemon, &[service])).unwrap();
        status::wait_until_up(&balancer).unwrap();
        let from = SocketAddrV4::new(CLIENT, PORT);
        let (client, _) = connect_from(&bench.client, from, SocketAddrV4::new(VIP, VIP_PORT)).unwrap();
        let (backend, server) = listeners.accept().unwrap();
        assert_eq!(backend, 1);
        let wires = [(&bench.client, "c0"), (&bench.backends[1], "e0")]
            .map(|(netns, device)| FrameSocket::open(netns, device).unwrap());
        let scene = Scene { balancer, client, server, wires, _listeners: listeners, _bench: bench };
        scene.exchange();
        scene
    }

    fn exchange(&self) {
        for (mut from, mut to) in [(&self.client, &self.server), (&self.server, &self.client)] {
            from.write_all(b"a line").unwrap();
            let mut line = [0; 6];
            to.read_exact(&mut line).unwrap();
            assert_eq!(&line, b"a line");
        }
    }

    /// Sends a segment in somebody's name, and waits until the balancer has seen it.
    fn forge(&self, who: As, flags: u8, sequence: u32) {
        let before = self.seen();
        let backend = (backend_address(1), BACKEND_PORT);
        let (wire, to, from, path) = match who {
            As::Client => (0, BALANCER_CLIENT_SIDE, CLIENT, Path::new((CLIENT, PORT), (VIP, VIP_PORT))),
            As::Backend => (1, BALANCER_BACKEND_SIDE, backend_address(2), Path::new(backend, (CLIENT, PORT))),
            As::BackendFromClients => (0, BALANCER_CLIENT_SIDE, CLIENT, Path::new(backend, (CLIENT, PORT))),
        };
        let packet = path.tcp(Segment { flags, sequence, acknowledgement: !sequence }, &[]).unwrap();
        self.wires[wire].send(&packet::ethernet(mac(to), mac(from), &packet)).unwrap();
        status::wait(&self.balancer, "the segment", |status| seen(status) > before).unwrap();
    }

    fn seen(&self) -> u64 {
        seen(&status::read_fresh(&self.balancer).unwrap())
    }
}

fn seen(status: &balancer_user::api::Status) -> u64 {
    each(status, |backend| backend.packets).iter().sum::<u64>() + status.drops.values().sum::<u64>()
}

/// Active flows of each backend, and how many flows are established.
fn alive(status: &balancer_user::api::Status) -> (Vec<u64>, u64) {
    (each(status, |backend| backend.active), status.flows.now.established)
}

const EVERYBODY: [As; 3] = [As::Client, As::Backend, As::BackendFromClients];
const SEQUENCES: [u32; 3] = [0, 1 << 31, 0xdead_beef];

/// Segments that open, answer or go on, and one FIN: the connection is where it was, and counts as before.
#[test]
fn a_connection_does_not_care_for_what_others_say_in_its_name() {
    let scene = Scene::new("");
    for who in EVERYBODY {
        for flags in [Segment::SYN, SYN_ACK, Segment::ACK] {
            SEQUENCES.into_iter().for_each(|sequence| scene.forge(who, flags, sequence));
            let status = status::read_fresh(&scene.balancer).unwrap();
            assert_eq!(alive(&status), (vec![1, 0], 1), "{who:?} {flags:#x}");
            scene.exchange();
        }
    }
    SEQUENCES.into_iter().for_each(|sequence| scene.forge(As::Client, FIN_ACK, sequence));
    scene.exchange();
    let status = status::read_fresh(&scene.balancer).unwrap();
    assert_eq!((alive(&status), status::drops(&status)), ((vec![1, 0], 1), vec![]));
}

/// A RST closes the connection's entry, and whoever it was forged for takes it back by going on: for longer than closed
/// flows are remembered.
#[test]
fn a_forged_reset_is_taken_back_by_who_goes_on() {
    let scene = Scene::new("closing-timeout = \"2s\"");
    for who in EVERYBODY {
        for flags in [Segment::RST, RST_ACK] {
            SEQUENCES.into_iter().for_each(|sequence| scene.forge(who, flags, sequence));
            let is = |wanted: u64| move |status: &balancer_user::api::Status| alive(status).0 == [wanted, 0];
            status::wait(&scene.balancer, "the forged end", is(0)).unwrap();
            scene.exchange();
            status::wait(&scene.balancer, "the end taken back", is(1)).unwrap();
        }
    }
    let taken_back = Instant::now();
    eventually(LIMIT, "time to pass", || (taken_back.elapsed() > PAST_CLOSING).then_some(())).unwrap();
    scene.exchange();
    let status =
        status::wait(&scene.balancer, "one flow", |status| alive(status) == (vec![1, 0], 1)).unwrap();
    assert_eq!(status::drops(&status), []);
}
