//! Flows live and die right: real sockets that close, crash, come again from the same port, fall silent.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpStream, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use balancer_tests::{
    Balancer, Capture, Netns, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    connection::{Listeners, connect_from, reset, vanish},
    eventually,
    packet::Segment,
    responder::{Responders, ask_within},
    status::{self, each},
    topology::{CLIENT, VIP, backend_address},
};
use balancer_user::api::Status;

const LIMIT: Duration = Duration::from_secs(5);
/// What a handshake takes at most when no SYN is lost: the kernel sends a lost one again after a second.
const AT_ONCE: Duration = Duration::from_millis(200);
const FIRST_PORT: u16 = 40_500;
/// Timeouts that a test can wait for.
const SHORT: &str = "half-open-timeout = \"2s\"\nclosing-timeout = \"2s\"";
const SHORT_IDLE: &str = "idle-timeout = \"2s\"";
/// After so long they are over, as coarse as the program's clock is.
const PAST_SHORT: Duration = Duration::from_millis(2_500);

fn vip() -> SocketAddrV4 {
    SocketAddrV4::new(VIP, VIP_PORT)
}

fn backend(number: u8) -> SocketAddrV4 {
    SocketAddrV4::new(backend_address(number), BACKEND_PORT)
}

fn service(protocol: &'static str, weights: &[u8], more: &'static str) -> Service {
    Service { more, ..Service::new(protocol, "round-robin", weights) }
}

/// A connection, seen from both ends.
struct Connection {
    client: TcpStream,
    server: TcpStream,
    /// Whose server it is: 1, 2, ….
    backend: u8,
    /// How long the client's handshake took.
    took: Duration,
}

/// A balancer, and TCP listeners on all backends.
struct Scene {
    // The balancer goes before its namespace.
    balancer: Option<Balancer>,
    daemon: &'static str,
    listeners: Listeners,
    bench: Topology,
}

impl Scene {
    fn new(daemon: &'static str, service: Service) -> Scene {
        let bench = Plan::backends(service.backends.len() as u8).build().unwrap();
        let places = (1..).zip(&bench.backends).map(|(number, netns)| (netns, backend(number)));
        let listeners = Listeners::open(places).unwrap();
        let balancer = start(&bench, daemon, &[service]);
        Scene { balancer: Some(balancer), daemon, listeners, bench }
    }

    fn balancer(&self) -> &Balancer {
        self.balancer.as_ref().unwrap()
    }

    /// Connects from this port, and says something in both directions.
    fn connect(&self, port: u16) -> Connection {
        let (client, took) =
            connect_from(&self.bench.client, SocketAddrV4::new(CLIENT, port), vip()).unwrap();
        let (backend, server) = self.listeners.accept().unwrap();
        assert_eq!(server.peer_addr().unwrap(), SocketAddrV4::new(CLIENT, port).into());
        let connection = Connection { client, server, backend, took };
        connection.exchange();
        connection
    }

    fn reload(&self, service: Service) {
        let weights: Vec<u8> = service.backends.iter().map(|(_, weight)| *weight).collect();
        self.balancer().reload(&config::text(self.daemon, &[service])).unwrap();
        // Those that were taken out come last, with weight 0.
        self.wait("the new weights", |status| {
            let now = each(status, |backend| backend.weight);
            now.starts_with(&weights) && now.iter().skip(weights.len()).all(|weight| *weight == 0)
        });
    }

    fn wait(&self, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
        status::wait(self.balancer(), what, wanted).unwrap()
    }

    fn wait_for_active(&self, wanted: &[u64]) {
        self.wait(&format!("{wanted:?} active"), |status| each(status, |backend| backend.active) == wanted);
    }

    fn assert_nothing_refused(&self) {
        assert_eq!(status::drops(&status::read_fresh(self.balancer()).unwrap()), []);
    }
}

fn start(bench: &Topology, daemon: &str, services: &[Service]) -> Balancer {
    let balancer = Balancer::start(&bench.balancer, &config::text(daemon, services)).unwrap();
    status::wait_until_up(&balancer).unwrap();
    balancer
}

/// Waits until so much time has passed since `start`.
fn wait_until(start: Instant, time: Duration) {
    eventually(time + LIMIT, "time to pass", || (start.elapsed() > time).then_some(())).unwrap();
}

impl Connection {
    fn exchange(&self) {
        pass(&self.client, &self.server, b"request");
        pass(&self.server, &self.client, b"answer");
    }

    /// Ends it in this way; when this returns, all that is sent has been sent.
    fn end(self, end: End, bench: &Topology) {
        let Connection { client, server, backend, .. } = self;
        match end {
            End::Fins => {
                // The server first: so the client's port is free at once.
                drop(server);
                assert_eq!(read_end(&client), Ok(0));
                drop(client);
            }
            End::ClientReset => {
                reset(client).unwrap();
                assert_eq!(read_end(&server), Err(ErrorKind::ConnectionReset));
            }
            End::BackendReset => {
                reset(server).unwrap();
                assert_eq!(read_end(&client), Err(ErrorKind::ConnectionReset));
            }
            End::ClientFinLost => {
                drop(server);
                assert_eq!(read_end(&client), Ok(0));
                vanish(client).unwrap();
            }
            End::BackendFinLost => {
                lose(bench.backend(backend).unwrap(), "tcp flags & fin == fin");
                client.shutdown(Shutdown::Write).unwrap();
                assert_eq!(read_end(&server), Ok(0));
                drop(server);
                vanish(client).unwrap();
            }
            End::ClientCrash => {
                vanish(client).unwrap();
                // It outlives this: as far as it knows, all is well.
                std::mem::forget(server);
            }
        }
    }
}

fn read_end(mut stream: &TcpStream) -> Result<usize, ErrorKind> {
    stream.read(&mut [0; 16]).map_err(|error| error.kind())
}

#[track_caller]
fn pass(mut from: &TcpStream, mut to: &TcpStream, bytes: &[u8]) {
    from.write_all(bytes).unwrap();
    let mut arrived = vec![0; bytes.len()];
    to.read_exact(&mut arrived).unwrap();
    assert_eq!(arrived, bytes);
}

/// How a connection ends, of which its client's next one knows nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Fins,
    ClientReset,
    BackendReset,
    ClientFinLost,
    BackendFinLost,
    ClientCrash,
}

const ENDS: [End; 6] = [
    End::Fins,
    End::ClientReset,
    End::BackendReset,
    End::ClientFinLost,
    End::BackendFinLost,
    End::ClientCrash,
];

/// Loses what a namespace sends, where it fits this description of nftables.
fn lose(netns: &Netns, what: &str) {
    let lines = format!(
        "add table ip lose\nadd chain ip lose out {{ type filter hook output priority 0; }}\nadd rule ip lose out {what} drop\n"
    );
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), lines).unwrap();
    netns.output("nft", &["-f", file.path().to_str().unwrap()]).unwrap();
}

/// TCP segments that a namespace's kernel has sent again, SYNs too.
fn sent_again(netns: &Netns) -> u64 {
    let snmp = netns.run(|| Ok(fs::read_to_string("/proc/thread-self/net/snmp")?)).unwrap();
    let mut tcp = snmp.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let (names, values) = (tcp.next().unwrap().split(' '), tcp.next().unwrap().split(' '));
    names.zip(values).find(|(name, _)| *name == "RetransSegs").unwrap().1.parse().unwrap()
}

/// When the client comes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// With the default timeouts, while the closed flow is remembered.
    AtOnce,
    /// When the flow's timeout is over, and nobody has taken it out of the table.
    PastTimeout,
    /// When it has been taken out.
    Forgotten,
}

/// A client connects, the connection ends, its backend takes no more, and the client comes again from the same port: to
/// the other backend, at once.
fn comes_again(when: When, is_removed: bool) {
    let (daemon, more) = if when == When::AtOnce { ("", "") } else { (SHORT, SHORT_IDLE) };
    let mut scene = Scene::new(daemon, service("tcp", &[1, 0], more));
    let connections = ENDS.map(|end| {
        let port = FIRST_PORT + end as u16;
        let connection = scene.connect(port);
        assert_eq!((connection.backend, connection.took < AT_ONCE), (1, true), "{:?}", connection.took);
        (port, end, connection)
    });
    let mut others = service("tcp", &[0, 1], more);
    if is_removed {
        others.backends.remove(0);
    }
    if when == When::AtOnce {
        scene.wait_for_active(&[6, 0]);
        scene.reload(others);
        for (port, end, connection) in connections {
            connection.exchange();
            connection.end(end, &scene.bench);
            assert_comes(&scene, port, end);
        }
        scene.assert_nothing_refused();
        return;
    }
    let ports = connections.map(|(port, end, connection)| {
        connection.end(end, &scene.bench);
        (port, end)
    });
    scene.reload(others);
    let ended = Instant::now();
    match when {
        When::AtOnce => unreachable!(),
        When::PastTimeout => {
            // Without a daemon, nobody walks over the table.
            let place = scene.balancer.take().unwrap().crash();
            wait_until(ended, PAST_SHORT);
            ports.iter().for_each(|(port, end)| assert_comes(&scene, *port, *end));
            scene.balancer = Some(Balancer::start_in(place, &scene.bench.balancer).unwrap());
        }
        When::Forgotten => {
            scene.wait("the flows' end", |status| {
                let now = status.flows.now;
                each(status, |backend| backend.active) == [0, 0] && now.closing + now.established == 0
            });
            ports.iter().for_each(|(port, end)| assert_comes(&scene, *port, *end));
        }
    }
    scene.assert_nothing_refused();
}

/// Connects from the port once more, with backend 2.
fn assert_comes(scene: &Scene, port: u16, end: End) {
    let before = sent_again(&scene.bench.client);
    let connection = scene.connect(port);
    assert_eq!(connection.backend, 2, "{end:?}");
    assert!(connection.took < AT_ONCE, "{end:?}: {:?}", connection.took);
    // To a connection that may be alive, the SYN goes first: its end says what it knows, and the client tries again.
    let may_be_alive = matches!(end, End::ClientFinLost | End::BackendFinLost | End::ClientCrash);
    if !may_be_alive {
        assert_eq!(sent_again(&scene.bench.client) - before, 0, "{end:?}");
    }
}

#[test]
fn a_port_that_is_used_again_at_once_is_scheduled_anew() {
    comes_again(When::AtOnce, false);
    comes_again(When::AtOnce, true);
}

#[test]
fn a_port_that_is_used_again_after_the_timeout_is_scheduled_anew() {
    comes_again(When::PastTimeout, false);
    comes_again(When::PastTimeout, true);
}

#[test]
fn a_port_whose_flow_is_forgotten_is_scheduled_anew() {
    comes_again(When::Forgotten, false);
    comes_again(When::Forgotten, true);
}

/// Thousands of connections from few ports, whatever their ends: each is scheduled, and no SYN is lost.
#[test]
fn two_thousand_connections_come_from_fifty_ports() {
    const CONNECTIONS: u16 = 2_000;
    const PORTS: u16 = 50;
    let scene = Scene::new("", service("tcp", &[1, 1, 1], ""));
    let before = sent_again(&scene.bench.client);
    let mut reached = Vec::new();
    let mut longest = Duration::ZERO;
    for number in 0..CONNECTIONS {
        let connection = scene.connect(FIRST_PORT + number % PORTS);
        longest = longest.max(connection.took);
        reached.push(connection.backend);
        // Each port sees each end in turn.
        let end = [End::Fins, End::ClientReset, End::BackendReset][usize::from(number / PORTS % 3)];
        connection.end(end, &scene.bench);
    }
    assert!(longest < AT_ONCE, "{longest:?}");
    assert_eq!(sent_again(&scene.bench.client) - before, 0, "segments were lost");
    let in_turn: Vec<u8> = (1..=3).cycle().take(CONNECTIONS.into()).collect();
    assert_eq!(reached, in_turn);
    scene.wait_for_active(&[0, 0, 0]);
    scene.assert_nothing_refused();
}

/// Bytes that differ with their place.
fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|place| (place.wrapping_mul(2_654_435_761) >> 7) as u8).collect()
}

/// One end has finished, and the other goes on: for longer than closed flows are remembered, and byte for byte.
#[test]
fn a_half_closed_connection_goes_on_the_other_way() {
    let scene = Scene::new(SHORT, service("tcp", &[1, 1], ""));
    let first = scene.connect(FIRST_PORT);
    let second = scene.connect(FIRST_PORT + 1);
    assert_eq!([first.backend, second.backend], [1, 2]);
    let bytes = pattern(2 << 20);
    // In one the client finishes first, in the other the server.
    let pairs = [(&first.client, &first.server), (&second.server, &second.client)];
    for (mut from, to) in pairs {
        from.write_all(b"all that there is to ask").unwrap();
        from.shutdown(Shutdown::Write).unwrap();
        let mut asked = Vec::new();
        let mut to = to;
        to.read_to_end(&mut asked).unwrap();
        assert_eq!(asked, b"all that there is to ask");
    }
    let half_closed = Instant::now();
    scene.wait_for_active(&[1, 1]);
    wait_until(half_closed, PAST_SHORT);
    for (mut to, mut from) in pairs {
        thread::scope(|scope| {
            scope.spawn(|| from.write_all(&bytes).unwrap());
            let mut arrived = vec![0; bytes.len()];
            to.read_exact(&mut arrived).unwrap();
            assert!(arrived == bytes, "the bytes differ");
        });
    }
    let status = status::read_fresh(scene.balancer()).unwrap();
    assert_eq!(each(&status, |backend| backend.active), [1, 1]);
    assert!(each(&status, |backend| backend.bytes).iter().all(|count| *count > 2 << 20), "{status:?}");
    // The second FIN ends each.
    drop(first);
    drop(second);
    scene.wait_for_active(&[0, 0]);
    scene.assert_nothing_refused();
}

/// While the answers are lost: the client's SYNs, one after the other, are one flow with one backend.
#[test]
fn a_syn_that_is_sent_again_keeps_its_backend() {
    let scene = Scene::new("", service("tcp", &[1, 1], ""));
    let first = scene.bench.backend(1).unwrap();
    let captures = [1, 2].map(|number| Capture::start(scene.bench.backend(number).unwrap(), "e0").unwrap());
    let syns = |capture: &Capture| {
        let is_ours = |packet: &balancer_tests::capture::Packet| {
            packet.flags == Segment::SYN && packet.macs[0] != [0xff; 6]
        };
        capture
            .packets()
            .into_iter()
            .filter(is_ours)
            .filter(|packet| packet.destination.ip() == backend_address(1))
            .count()
    };
    lose(first, "tcp flags & (syn | ack) == syn | ack");
    let connection = thread::scope(|scope| {
        let connecting = scope.spawn(|| scene.connect(FIRST_PORT));
        eventually(LIMIT, "the third SYN", || (syns(&captures[0]) >= 3).then_some(())).unwrap();
        let status = status::read_fresh(scene.balancer()).unwrap();
        assert_eq!(each(&status, |backend| (backend.active, backend.packets)), [(1, 3), (0, 0)]);
        first.output("nft", &["flush ruleset"]).unwrap();
        connecting.join().unwrap()
    });
    assert_eq!(connection.backend, 1);
    assert!(connection.took > Duration::from_secs(1), "{:?}", connection.took);
    let other = scene.connect(FIRST_PORT + 1);
    assert_eq!(other.backend, 2, "one slot was taken");
    scene.wait_for_active(&[1, 1]);
    let stray = captures[1].packets().into_iter().find(|packet| packet.source.port() == FIRST_PORT);
    // The switch floods what it has not learned yet.
    assert!(stray.is_none_or(|packet| packet.destination.ip() == backend_address(1)));
    scene.assert_nothing_refused();
}

/// A connection lasts as long as one of its directions speaks; after its timeout, whoever speaks is told.
#[test]
fn a_connection_that_was_silent_for_too_long_is_reset_whoever_speaks() {
    let scene = Scene::new("", service("tcp", &[1, 1], SHORT_IDLE));
    let by_client = scene.connect(FIRST_PORT);
    let by_server = scene.connect(FIRST_PORT + 1);
    let start = Instant::now();
    // Twice as long as the timeout, with silences just within it.
    for rest in [1_500, 3_000, 4_500] {
        wait_until(start, Duration::from_millis(rest));
        pass(&by_client.client, &by_client.server, b"still there");
        pass(&by_server.server, &by_server.client, b"still here");
    }
    scene.assert_nothing_refused();
    scene.wait_for_active(&[0, 0]);
    let speak = |mut stream: &TcpStream| {
        stream.write_all(b"hello?").unwrap();
        read_end(stream)
    };
    assert_eq!(speak(&by_client.client), Err(ErrorKind::ConnectionReset));
    assert_eq!(speak(&by_server.server), Err(ErrorKind::ConnectionReset));
    let status = status::read_fresh(scene.balancer()).unwrap();
    assert_eq!(status::drops(&status), [("orphan-reply", 1), ("unknown-flow", 1)]);
}

/// Where a hash says who has a connection, a segment from the middle of it finds its way without a flow.
#[test]
fn the_middle_of_a_connection_goes_where_its_hash_says() {
    let scene = Scene::new("", Service::new("tcp", "maglev", &[1, 1, 1]));
    let connections: Vec<Connection> = (0..40).map(|number| scene.connect(FIRST_PORT + number)).collect();
    let mut active = [0; 3];
    connections.iter().for_each(|connection| active[usize::from(connection.backend) - 1] += 1);
    assert!(active.iter().all(|count| *count > 0), "{active:?}");
    scene.wait_for_active(&active);
    scene.balancer().call(&["flows", "kill", "--service", "tcp"]).unwrap();
    scene.wait_for_active(&[0, 0, 0]);
    connections.iter().for_each(Connection::exchange);
    scene.wait_for_active(&active);
    scene.wait("proven", |status| status.flows.now.established == 40);
    connections.into_iter().for_each(|connection| connection.end(End::Fins, &scene.bench));
    scene.wait_for_active(&[0, 0, 0]);
    scene.assert_nothing_refused();
}

/// A UDP socket on the client.
fn udp_socket(bench: &Topology) -> UdpSocket {
    let socket = bench.client.run(|| Ok(UdpSocket::bind((CLIENT, FIRST_PORT))?)).unwrap();
    socket.connect(vip()).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    socket
}

fn ask(socket: &UdpSocket) -> u8 {
    ask_within(socket, b"who are you?", LIMIT).unwrap()
}

#[test]
fn a_datagram_after_the_timeout_is_scheduled_anew() {
    let bench = Plan::backends(2).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    let balancer = start(&bench, "", &[service("udp", &[1, 1], SHORT_IDLE)]);
    let socket = udp_socket(&bench);
    let wait_for_active = |wanted: [u64; 2]| {
        status::wait(&balancer, "the active count", |status| each(status, |backend| backend.active) == wanted)
    };
    let start = Instant::now();
    for pause in [0, 1_500, 3_000] {
        wait_until(start, Duration::from_millis(pause));
        assert_eq!(ask(&socket), 1, "after {pause} ms");
    }
    wait_for_active([1, 0]).unwrap();
    wait_for_active([0, 0]).unwrap();
    assert_eq!(ask(&socket), 2);
    let asked = Instant::now();
    wait_for_active([0, 1]).unwrap();
    // Without a daemon too.
    let place = balancer.crash();
    wait_until(asked, PAST_SHORT);
    assert_eq!(ask(&socket), 1);
    let balancer = Balancer::start_in(place, &bench.balancer).unwrap();
    let status = status::read_fresh(&balancer).unwrap();
    assert_eq!(each(&status, |backend| backend.active), [1, 0]);
    assert_eq!(status::drops(&status), []);
}

/// A client that never pauses: its flow leaves a backend that is gone, with and without answers, and a backend that comes
/// is found by the next datagram.
#[test]
fn a_conversation_that_never_pauses_leaves_a_backend_that_is_gone() {
    for is_answered in [true, false] {
        let bench = Plan::backends(2).build().unwrap();
        let _responders = is_answered.then(|| Responders::start(&bench).unwrap());
        // Somebody must be there, or the backends answer with errors.
        let bind =
            |number| bench.backends[usize::from(number) - 1].run(|| Ok(UdpSocket::bind(backend(number))?));
        let _mute = (!is_answered).then(|| [1, 2].map(|number| bind(number).unwrap()));
        let captures = [1, 2].map(|number| Capture::start(bench.backend(number).unwrap(), "e0").unwrap());
        let arrived = || {
            [1, 2].map(|number| {
                let packets = captures[usize::from(number) - 1].packets();
                packets.iter().filter(|packet| packet.destination == backend(number).into()).count()
            })
        };
        const MORE: &str = "drain-timeout = \"1s\"\nno-backend = \"drop\"";
        let services = |backends: &[u8]| {
            let all = service("udp", &[1, 1], MORE);
            let chosen = backends.iter().map(|number| (backend(*number).into(), 1)).collect();
            config::text("", &[Service { backends: chosen, ..all }])
        };
        let balancer = Balancer::start(&bench.balancer, &services(&[1, 2])).unwrap();
        status::wait_until_up(&balancer).unwrap();
        let socket = udp_socket(&bench);
        // Sends on until so many have arrived.
        let send_until = |what: &str, wanted: &dyn Fn([usize; 2]) -> bool| {
            eventually(LIMIT, what, || {
                _ = socket.send(b"abc");
                wanted(arrived()).then(Instant::now)
            })
            .unwrap()
        };
        send_until("the first backend's", &|[first, second]| first > 5 && second == 0);
        balancer.reload(&services(&[2])).unwrap();
        let reloaded = Instant::now();
        let moved = send_until("the second backend's", &|[_, second]| second > 5);
        assert!(moved - reloaded < Duration::from_secs(4), "{:?}", moved - reloaded);
        let first = arrived()[0];
        send_until("more", &|[_, second]| second > 20);
        assert_eq!(arrived()[0], first, "nothing goes to the backend that is gone");

        balancer.reload(&services(&[])).unwrap();
        // Refused, at the latest when the drain is over.
        eventually(LIMIT, "a refusal", || {
            _ = socket.send(b"abc");
            let status = status::read(&balancer).unwrap();
            status.drops.get("no-backend").is_some_and(|count| *count > 3).then_some(())
        })
        .unwrap();
        let [first, second] = arrived();
        balancer.reload(&services(&[1])).unwrap();
        let reloaded = Instant::now();
        let back = send_until("the backend that is back", &|[now, _]| now > first);
        assert!(back - reloaded < Duration::from_secs(1), "{:?}", back - reloaded);
        assert_eq!(arrived()[1], second);
        let status = status::read_fresh(&balancer).unwrap();
        // And what was answered just when its flow ended.
        let refused = status::drops(&status);
        assert!(
            refused.iter().all(|(name, _)| *name == "no-backend" || is_answered && *name == "orphan-reply")
        );
    }
}

/// A flow's backend is gone, and its number is given to a backend of another service: nothing of the flow goes there.
#[test]
fn a_flow_never_leads_to_who_has_its_backends_number_now() {
    let bench = Plan::backends(4).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    let text = |one: &[u8], two: &[u8]| {
        let of = |name: &str, port: u16, backends: &[u8]| Service {
            name: name.to_owned(),
            address: SocketAddrV4::new(VIP, port).into(),
            backends: backends.iter().map(|number| (backend(*number).into(), 1)).collect(),
            ..service("udp", &[], "drain-timeout = \"0s\"")
        };
        config::text("", &[of("one", VIP_PORT, one), of("two", 81, two)])
    };
    let balancer = Balancer::start(&bench.balancer, &text(&[1, 2], &[3])).unwrap();
    status::wait_until_up(&balancer).unwrap();
    let [first, second] = [FIRST_PORT, FIRST_PORT + 1].map(|port| {
        let socket = bench.client.run(|| Ok(UdpSocket::bind((CLIENT, port))?)).unwrap();
        socket.connect(vip()).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        socket
    });
    assert_eq!([ask(&first), ask(&second)], [1, 2]);
    // Its flow is still in the table, and nobody walks over that.
    let place = balancer.crash();
    place.write_config(&text(&[1], &[3])).unwrap();
    let balancer = Balancer::start_in(place, &bench.balancer).unwrap();
    balancer.reload(&text(&[1], &[3, 4])).unwrap();
    status::wait(&balancer, "the fourth backend", |status| {
        status.services[1].backends.len() == 2 && status.services[1].backends[1].share > 0.0
    })
    .unwrap();
    // Its own backend is still there, but for the time that draining may take.
    eventually(LIMIT, "the flow's end", || {
        let reached = [ask(&first), ask(&second)];
        assert!(reached[0] == 1 && reached[1] <= 2, "{reached:?}");
        (reached == [1, 1]).then_some(())
    })
    .unwrap();
    // The backend is back: nothing changes for who has another one by now.
    balancer.reload(&text(&[1, 2], &[3, 4])).unwrap();
    status::wait_until_up(&balancer).unwrap();
    assert_eq!([ask(&first), ask(&second)], [1, 1]);
    let status = status::read_fresh(&balancer).unwrap();
    assert_eq!(status::drops(&status), []);
}

/// A backend's address changes under its name: its conversation does not go to the new host in silence.
#[test]
fn a_backend_with_another_address_is_another_backend() {
    let scene = Scene::new("", service("tcp", &[1], "drain-timeout = \"2s\""));
    // The second namespace is not a backend yet.
    let connection = scene.connect(FIRST_PORT);
    assert_eq!(connection.backend, 1);
    let same = service("tcp", &[1], "drain-timeout = \"2s\"");
    scene.reload(Service { backends: Vec::new(), ..same.clone() });
    scene.reload(same.clone());
    connection.exchange();
    let moved = SocketAddrV4::new(Ipv4Addr::new(10, 0, 2, 99), BACKEND_PORT);
    let captured = Capture::start(&scene.bench.switch, "lkp").unwrap();
    scene
        .balancer()
        .reload(&config::text("", &[Service { backends: vec![(moved.into(), 1)], ..same }]))
        .unwrap();
    scene.wait("two backends", |status| each(status, |backend| backend.weight) == [1, 0]);
    connection.exchange();
    // Its time is over: it is told.
    scene.wait("one backend", |status| each(status, |backend| backend.weight) == [1]);
    (&connection.client).write_all(b"x").unwrap();
    assert_eq!(read_end(&connection.client), Err(ErrorKind::ConnectionReset));
    assert!(captured.finish().unwrap().iter().all(|packet| packet.destination.ip() != *moved.ip()));
}
