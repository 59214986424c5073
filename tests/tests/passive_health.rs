//! Backends that are taken out because clients' new flows are not answered; and those that are not, though much goes wrong.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    io,
    net::{SocketAddr, SocketAddrV4, TcpStream},
    thread,
    time::{Duration, Instant},
};

use balancer_tests::{
    Balancer, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    echo::Echo,
    eventually,
    packet::{self, Path, Segment},
    responder::{self, Responders},
    socket::FrameSocket,
    status::{self, each},
    topology::{BALANCER_CLIENT_SIDE, CLIENT, VIP, backend_address, mac},
};
use balancer_user::api::{
    BackendState::{self, Down, Up},
    Status,
};

/// How long a client waits: a SYN is sent again after a second, and then after two more.
const PATIENCE: Duration = Duration::from_secs(10);

const PASSIVE: &str = "passive-health = { failures = 8, timeout = \"1s\", rest = \"3s\" }";

/// Echo servers on backends 1 to `serving` of `backends`, and a balancer that judges them by their flows.
struct Scene {
    // The balancer goes before its namespace.
    balancer: Balancer,
    _echoes: Vec<Echo>,
    bench: Topology,
}

impl Scene {
    fn tcp(serving: u8, backends: u8, method: &'static str) -> Scene {
        let bench = Plan::backends(backends).build().unwrap();
        let address = |number| SocketAddr::from((backend_address(number), BACKEND_PORT));
        let echoes = (1..=serving)
            .map(|number| Echo::tcp(bench.backend(number).unwrap(), address(number)).unwrap())
            .collect();
        let service =
            Service { more: PASSIVE, ..Service::new("tcp", method, &vec![1; usize::from(backends)]) };
        let balancer = Balancer::start(&bench.balancer, &config::text("", &[service])).unwrap();
        status::wait_until_up(&balancer).unwrap();
        Scene { balancer, _echoes: echoes, bench }
    }

    /// Has backend `number` lose whatever comes for its service.
    fn blackhole(&self, number: u8, protocol: &str) {
        let netns = self.bench.backend(number).unwrap();
        netns.output("nft", &["add table ip hole"]).unwrap();
        netns.output("nft", &["add chain ip hole in { type filter hook input priority 0; }"]).unwrap();
        netns.output("nft", &[&format!("add rule ip hole in {protocol} dport {BACKEND_PORT} drop")]).unwrap();
    }

    fn heal(&self, number: u8) {
        self.bench.backend(number).unwrap().output("nft", &["delete table ip hole"]).unwrap();
    }

    /// Connections that are begun at once: how each came to its end.
    fn connect(&self, count: usize) -> Vec<Result<TcpStream, io::ErrorKind>> {
        let address = SocketAddrV4::new(VIP, VIP_PORT).into();
        let connect =
            || self.bench.client.run(|| Ok(TcpStream::connect_timeout(&address, PATIENCE))).unwrap();
        thread::scope(|scope| {
            let clients: Vec<_> = (0..count).map(|_| scope.spawn(connect)).collect();
            clients.into_iter().map(|client| client.join().unwrap().map_err(|error| error.kind())).collect()
        })
    }

    /// Waits until the backends are in these states, and have their shares of the flows by them.
    fn wait(&self, expected: &[BackendState]) -> Status {
        let what = format!("the states {expected:?}");
        let is_so = |status: &Status| {
            let seen = each(status, |backend| (backend.state, backend.share > 0.0));
            seen.iter().map(|(state, _)| state).eq(expected)
                && seen.iter().all(|(state, has)| *has == (*state == Up))
        };
        status::wait(&self.balancer, &what, is_so).unwrap()
    }
}

fn reason(status: &Status, number: usize) -> &str {
    status.services[0].backends[number - 1].reason.as_deref().unwrap_or_default()
}

#[test]
fn a_backend_that_answers_no_syn_is_out_and_its_clients_go_elsewhere() {
    let scene = Scene::tcp(4, 4, "round-robin");
    scene.blackhole(2, "tcp");
    let begun = Instant::now();
    // A quarter of them meet silence. Each gets through all the same: with its next SYN after the backend has gone.
    let outcomes = scene.connect(40);
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    println!("all 40 connected after {:?}", begun.elapsed());
    let status = scene.wait(&[Up, Down, Up, Up]);
    assert_eq!(reason(&status, 2), "passive: 10 SYNs without answer");
    drop(outcomes);
    assert!(scene.connect(12).iter().all(Result::is_ok));

    // After its rest it is asked again, and taken out again; healed, it stays.
    scene.wait(&[Up, Up, Up, Up]);
    assert!(scene.balancer.log().contains("backend b2 of tcp is back: it has rested"));
    let outcomes = scene.connect(40);
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    scene.wait(&[Up, Down, Up, Up]);
    scene.heal(2);
    scene.wait(&[Up, Up, Up, Up]);
    let outcomes = scene.connect(40);
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    let status = status::read_fresh(&scene.balancer).unwrap();
    assert_eq!(each(&status, |backend| backend.active > 0), [true; 4]);
}

#[test]
fn a_backend_that_resets_is_out_and_at_most_half_of_them_are() {
    // Nobody listens on three of four.
    let scene = Scene::tcp(1, 4, "round-robin");
    let refused = scene.connect(40).iter().filter(|outcome| outcome.is_err()).count();
    assert_eq!(refused, 30);
    let status = scene.wait(&[Up, Down, Down, Up]);
    assert_eq!(reason(&status, 2), "passive: 10 SYNs answered with a reset");
    // The two that are left: every other one is refused.
    let refused = scene.connect(20).iter().filter(|outcome| outcome.is_err()).count();
    assert_eq!(refused, 10);
    assert_eq!(each(&status::read_fresh(&scene.balancer).unwrap(), |backend| backend.state)[3], Up);
}

/// Whoever floods with SYNs gets an answer to each: that nobody completes a handshake is not the backend's fault. Neither is
/// that of clients who reset, or acknowledge what was never sent.
#[test]
fn a_flood_takes_nobody_out() {
    let scene = Scene::tcp(2, 2, "round-robin");
    let socket = FrameSocket::open(&scene.bench.client, "c0").unwrap();
    let send = |port: u16, segment: Segment| {
        let packet = Path::new((CLIENT, port), (VIP, VIP_PORT)).tcp(segment, b"").unwrap();
        socket.send(&packet::ethernet(mac(BALANCER_CLIENT_SIDE), mac(CLIENT), &packet)).unwrap();
    };
    // The client's kernel, which knows of no such connection, would reset each: as spoofed clients would not.
    scene.bench.client.output("nft", &["add table ip mute"]).unwrap();
    let chain = "add chain ip mute out { type filter hook output priority 0; }";
    scene.bench.client.output("nft", &[chain]).unwrap();
    let rule = "add rule ip mute out tcp flags & rst == rst drop";
    scene.bench.client.output("nft", &[rule]).unwrap();
    for port in 20_000..20_400 {
        send(port, Segment::flags(Segment::SYN));
        if port % 4 == 0 {
            send(port, Segment { acknowledgement: 77, ..Segment::flags(Segment::ACK) });
        }
    }
    // Two walks over the flow table after all of them were to be answered.
    status::wait(&scene.balancer, "the flood", |status| status.flows.now.half_open >= 300).unwrap();
    let until = Instant::now() + Duration::from_millis(3_500);
    while Instant::now() < until {
        let status = status::read(&scene.balancer).unwrap();
        assert_eq!(each(&status, |backend| backend.state), [Up, Up], "{status:#?}");
    }
    assert!(!scene.balancer.log().contains("passive"), "{}", scene.balancer.log());
}

#[test]
fn udp_that_is_not_answered_takes_a_backend_out_where_the_service_wants_it() {
    let bench = Plan::backends(2).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    let judged = Service { more: PASSIVE, ..responder::service(&bench) };
    let balancer =
        Balancer::start(&bench.balancer, &config::text("", &[responder::service(&bench)])).unwrap();
    let scene = Scene { balancer, _echoes: Vec::new(), bench };
    scene.wait(&[Up, Up]);
    scene.blackhole(1, "udp");
    let flows = || -> Vec<_> { (0..24).map(|_| responder::connect(&scene.bench).unwrap()).collect() };
    let ask =
        |flows: &[std::net::UdpSocket]| flows.iter().map(|flow| flow.send(b"?").unwrap()).sum::<usize>();
    // Not asked for: silence is no fault over UDP.
    let silent = flows();
    ask(&silent);
    let until = Instant::now() + Duration::from_millis(3_500);
    while Instant::now() < until {
        scene.wait(&[Up, Up]);
    }
    scene.balancer.reload(&config::text("", &[judged])).unwrap();
    let asked = flows();
    ask(&asked);
    let status = scene.wait(&[Down, Up]);
    assert_eq!(reason(&status, 1), "passive: 12 UDP flows without answer");
    // The flows that it had are scheduled anew.
    for flow in &asked {
        let answer = || responder::ask_within(flow, b"?", Duration::from_millis(100)).ok();
        assert_eq!(eventually(PATIENCE, "an answer", answer).unwrap(), 2);
    }
}
