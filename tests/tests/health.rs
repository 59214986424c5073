//! Health checks: servers that serve, and those that fail in every way there is.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddrV4, TcpListener, TcpStream, UdpSocket},
    os::unix::fs::PermissionsExt as _,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use balancer_tests::{
    Balancer, Netns, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    echo::Echo,
    eventually,
    nginx::Nginx,
    process::DEFAULT_LIMIT,
    responder,
    status::{self, each},
    topology::{VIP, backend_address},
};
use balancer_user::api::{
    BackendState::{Disabled, Down, Draining, Starting, Up},
    BackendStatus, HealthVerdict, Status,
};

const LIMIT: Duration = Duration::from_secs(12);

fn endpoint(number: u8) -> SocketAddrV4 {
    SocketAddrV4::new(backend_address(number), BACKEND_PORT)
}

fn service(protocol: &'static str, weights: &[u8], more: &'static str) -> Service {
    Service { more, ..Service::new(protocol, "round-robin", weights) }
}

/// Starts a balancer with one service, and waits for nothing.
fn start(bench: &Topology, service: Service) -> Balancer {
    Balancer::start(&bench.balancer, &config::text("", &[service])).unwrap()
}

fn states(status: &Status) -> Vec<balancer_user::api::BackendState> {
    each(status, |backend| backend.state)
}

fn wait_for(balancer: &Balancer, expected: &[balancer_user::api::BackendState]) -> Status {
    status::wait(balancer, &format!("the states {expected:?}"), |status| states(status) == expected).unwrap()
}

fn backend(status: &Status, number: usize) -> &BackendStatus {
    &status.services[0].backends[number - 1]
}

fn connect(bench: &Topology) -> std::io::Result<TcpStream> {
    let address = SocketAddrV4::new(VIP, VIP_PORT).into();
    let stream = bench.client.run(|| Ok(TcpStream::connect_timeout(&address, DEFAULT_LIMIT))).unwrap()?;
    stream.set_read_timeout(Some(DEFAULT_LIMIT)).unwrap();
    Ok(stream)
}

fn exchange(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(b"echo")?;
    stream.read_exact(&mut [0; 4])
}

/// How a server answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Manner {
    Good,
    Silent,
    NotFound,
    Broken,
    Half,
    Closing,
    /// Each tenth request fails.
    Tenth,
}

const MANNERS: [Manner; 7] = [
    Manner::Good,
    Manner::Silent,
    Manner::NotFound,
    Manner::Broken,
    Manner::Half,
    Manner::Closing,
    Manner::Tenth,
];

/// A web server that answers in the manner that it is told to.
struct Server {
    manner: Arc<AtomicU8>,
    asked: Arc<AtomicU64>,
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(netns: &Netns, address: SocketAddrV4, manner: Manner) -> Server {
        let listener = netns.run(|| Ok(TcpListener::bind(address)?)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (manner, asked) = (Arc::new(AtomicU8::new(manner as u8)), Arc::new(AtomicU64::new(0)));
        let stopped = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let (manner, asked, stopped) = (Arc::clone(&manner), Arc::clone(&asked), Arc::clone(&stopped));
            move || {
                let mut silent = Vec::new();
                while !stopped.load(Relaxed) {
                    let Ok((stream, _)) = listener.accept() else {
                        thread::sleep(Duration::from_millis(1));
                        continue;
                    };
                    let count = asked.fetch_add(1, Relaxed);
                    let manner = MANNERS[usize::from(manner.load(Relaxed))];
                    silent.extend(answer(stream, manner, count));
                }
            }
        });
        Server { manner, asked, stopped, thread: Some(thread) }
    }

    fn be(&self, manner: Manner) {
        self.manner.store(manner as u8, Relaxed);
    }
}

/// Answers; a connection that is left open is returned.
fn answer(mut stream: TcpStream, manner: Manner, count: u64) -> Option<TcpStream> {
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let mut request = [0; 1024];
    drop(stream.read(&mut request));
    let text = match manner {
        Manner::Tenth if count % 10 == 9 => "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n",
        Manner::Good | Manner::Tenth => "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok",
        Manner::NotFound => "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
        Manner::Broken => "HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n",
        Manner::Half => "HTTP/1.1 200 OK\r\ncontent-length: 200\r\n\r\nhalf",
        Manner::Closing => "",
        Manner::Silent => return Some(stream),
    };
    drop(stream.write_all(text.as_bytes()));
    None
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopped.store(true, Relaxed);
        drop(self.thread.take().map(JoinHandle::join));
    }
}

const FAST: &str = "health = { kind = \"http\", path = \"/healthz\", interval = \"300ms\", timeout = \"280ms\", rise = 2, fall = 3 }";

#[test]
fn servers_that_fail_in_every_way_are_told_from_one_that_serves() {
    let bench = Plan::backends(8).build().unwrap();
    // The eighth refuses: nobody listens there.
    let servers: Vec<Server> = (1..)
        .zip(&bench.backends)
        .take(7)
        .map(|(number, netns)| Server::start(netns, endpoint(number), MANNERS[usize::from(number) - 1]))
        .collect();
    let balancer = start(&bench, service("tcp", &[1; 8], FAST));
    let status = wait_for(&balancer, &[Up, Down, Down, Down, Down, Down, Up, Down]);
    let closed = "1 check failed: the connection was closed before the end of the answer";
    let reasons: Vec<String> = each(&status, |backend| backend.reason.clone().unwrap_or_default());
    let expected = [
        "1 check passed",
        "1 check failed: no answer within 280ms",
        "1 check failed: the answer is 404 Not Found, not one of 200-299",
        "1 check failed: the answer is 500 Internal Server Error, not one of 200-299",
        closed,
        closed,
        "1 check passed",
        "1 check failed: connection refused",
    ];
    assert_eq!(reasons, expected);
    let shares = each(&status, |backend| backend.share > 0.0);
    assert_eq!(shares, [true, false, false, false, false, false, true, false]);

    // One failure among ten takes nobody down, ever; and those that serve again come up, each of them.
    let before = servers[6].asked.load(Relaxed);
    servers.iter().take(6).for_each(|server| server.be(Manner::Good));
    let status = wait_for(&balancer, &[Up, Up, Up, Up, Up, Up, Up, Down]);
    assert_eq!(backend(&status, 2).reason.as_deref(), Some("2 checks passed"));
    eventually(LIMIT, "25 more checks of the seventh", || {
        (servers[6].asked.load(Relaxed) > before + 25).then_some(())
    })
    .unwrap();
    let status = status::read_fresh(&balancer).unwrap();
    let seventh = backend(&status, 7).health.clone().unwrap();
    assert_eq!((seventh.verdict, seventh.reason.as_str()), (HealthVerdict::Up, "1 check passed"));
    let failure = "the answer is 503 Service Unavailable, not one of 200-299";
    assert_eq!(seventh.last_failure.as_deref(), Some(failure));
    assert!(seventh.since_s > 4.0, "{seventh:?}");

    // And down, after three failures exactly.
    let log = balancer.log();
    assert!(!log.contains("b1 of tcp is down"), "{log}");
    servers[0].be(Manner::Broken);
    let status = wait_for(&balancer, &[Down, Up, Up, Up, Up, Up, Up, Down]);
    let reason = "3 checks failed: the answer is 500 Internal Server Error, not one of 200-299";
    assert_eq!(backend(&status, 1).reason.as_deref(), Some(reason));
    let log = balancer.log();
    assert!(log.contains(&format!("backend b1 of tcp is down: {reason}")), "{log}");
    let text = balancer.call(&["status", "tcp"]).unwrap();
    assert!(text.contains(" b1 down for ") && text.contains(reason), "{text}");

    // All of that was nobody's load, and no flow.
    assert_eq!(each(&status, |backend| (backend.packets, backend.active, backend.n)), [(0, 0, 0.0); 8]);
    assert_eq!((status.flows.now, status::drops(&status)), (Default::default(), vec![]));
}

/// Each kind of check, its own port, and real servers.
#[test]
fn every_kind_of_check_finds_a_server_and_its_end() {
    let bench = Plan::backends(1).build().unwrap();
    let netns = &bench.backends[0];
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    let mut openssl = Command::new("openssl");
    openssl
        .args("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=x".split(' '));
    openssl.args(["-keyout", &at("key"), "-out", &at("certificate")]);
    balancer_tests::process::output(&mut openssl, DEFAULT_LIMIT).unwrap();
    let script = directory.path().join("check");
    let flag = at("fine");
    fs::write(
        &script,
        format!("#!/bin/sh\ntest $BALANCER_ADDRESS:$BALANCER_PORT = 10.0.2.11:8080 && test -e {flag}\n"),
    )
    .unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();

    let kinds = [
        ("tcp", "kind = \"tcp\", port = 9001".to_owned()),
        ("line", "kind = \"tcp\", port = 9002, send = \"hello\", receive = \"hel\"".to_owned()),
        ("udp", "kind = \"udp\", port = 9003, send = \"hex:68656c\", receive = \"hel\"".to_owned()),
        ("http", "kind = \"http\", port = 9004, path = \"/name\", host = \"www.example.com\"".to_owned()),
        ("https", "kind = \"https\", port = 9005, path = \"/name\", expect = \"200\"".to_owned()),
        ("ping", "kind = \"ping\"".to_owned()),
        ("exec", format!("kind = \"exec\", command = [\"{}\"]", script.display())),
    ];
    let services: Vec<Service> = (1..)
        .zip(&kinds)
        .map(|(port, (name, kind))| Service {
            name: (*name).to_owned(),
            address: SocketAddrV4::new(VIP, 1000 + port).into(),
            more: Box::leak(
                format!("health = {{ {kind}, interval = \"1s\", rise = 1, fall = 2 }}").into_boxed_str(),
            ),
            ..Service::new("tcp", "round-robin", &[1])
        })
        .collect();
    let port = |port| SocketAddrV4::new(backend_address(1), port);
    let serve = || {
        fs::write(&flag, "").unwrap();
        netns.ip("link set e0 up").unwrap();
        let tls = format!("ssl; ssl_certificate {}; ssl_certificate_key {};", at("certificate"), at("key"));
        (
            [
                Echo::tcp(netns, port(9001)).unwrap(),
                Echo::tcp(netns, port(9002)).unwrap(),
                Echo::udp(netns, port(9003)).unwrap(),
            ],
            Nginx::start(netns, port(9004), "b1").unwrap(),
            Nginx::start_with(netns, port(9005), &tls, "b1").unwrap(),
        )
    };
    let servers = serve();
    let balancer = Balancer::start(&bench.balancer, &config::text("", &services)).unwrap();
    wait_for(&balancer, &[Up; 7]);
    // A check that is under way ends in another way than the next ones: two of them.
    drop(servers);
    fs::remove_file(&flag).unwrap();
    netns.set_sysctl("net/ipv4/icmp_echo_ignore_all", "1").unwrap();
    let status = wait_for(&balancer, &[Down; 7]);
    let reasons: Vec<String> = each(&status, |backend| backend.reason.clone().unwrap_or_default());
    let refused = "2 checks failed: connection refused";
    let expected = [
        refused,
        refused,
        "2 checks failed: port unreachable",
        refused,
        refused,
        "2 checks failed: no answer within 1s",
        "2 checks failed: exit code 1",
    ];
    assert_eq!(reasons, expected);
    netns.set_sysctl("net/ipv4/icmp_echo_ignore_all", "0").unwrap();
    let _servers = serve();
    let status = wait_for(&balancer, &[Up; 7]);
    assert_eq!(each(&status, |backend| (backend.packets, backend.active)), [(0, 0); 7]);
    assert_eq!((status.flows.now, status::drops(&status)), (Default::default(), vec![]));
}

#[test]
fn a_hundred_black_holes_delay_nobody() {
    let bench = Plan::backends(2).build().unwrap();
    // The first backend's host forwards nothing: what is sent through it is lost without a word.
    bench.balancer.ip(&format!("route add 10.0.3.0/24 via {}", backend_address(1))).unwrap();
    let server = Server::start(&bench.backends[1], endpoint(2), Manner::Good);
    let holes = (1..=100).map(|last| (SocketAddrV4::new([10, 0, 3, last].into(), BACKEND_PORT), 1));
    let more = "health = { kind = \"http\", interval = \"1s\", timeout = \"1s\", rise = 1, fall = 1 }";
    let backends =
        std::iter::once((endpoint(2), 1)).chain(holes).map(|(at, weight)| (at.into(), weight)).collect();
    let balancer = start(&bench, Service { backends, ..service("tcp", &[], more) });
    let expected: Vec<_> = [&[Up][..], &[Down; 100]].concat();
    let status = wait_for(&balancer, &expected);
    assert_eq!(backend(&status, 2).reason.as_deref(), Some("1 check failed: no connection within 1s"));
    for (manner, state) in
        [(Manner::Broken, Down), (Manner::Good, Up), (Manner::Silent, Down), (Manner::Good, Up)]
    {
        let (begun, asked) = (Instant::now(), server.asked.load(Relaxed));
        server.be(manner);
        status::wait(&balancer, "the one state", |status| states(status)[0] == state).unwrap();
        let checks = server.asked.load(Relaxed) - asked;
        // At once with the next check, which comes within an interval; a silent one has a timeout besides.
        assert!(
            begun.elapsed() < Duration::from_millis(2_800) && checks <= 2,
            "{:?}, {checks}",
            begun.elapsed()
        );
    }
}

#[test]
fn flows_of_a_backend_that_fails() {
    let bench = Plan::backends(2).build().unwrap();
    let checks = Server::start(&bench.backends[0], SocketAddrV4::new(backend_address(1), 9000), Manner::Good);
    let _other = Server::start(&bench.backends[1], SocketAddrV4::new(backend_address(2), 9000), Manner::Good);
    let _echoes: Vec<Echo> = (1..)
        .zip(&bench.backends)
        .map(|(number, netns)| Echo::tcp(netns, endpoint(number)).unwrap())
        .collect();
    let _responders = responder::Responders::start(&bench).unwrap();
    let more = "drain-timeout = \"3s\"\n\
                health = { kind = \"http\", port = 9000, interval = \"100ms\", rise = 2, fall = 2 }";
    let services = [service("tcp", &[1, 1], more), service("udp", &[1, 1], more)];
    let balancer = Balancer::start(&bench.balancer, &config::text("", &services)).unwrap();
    wait_for(&balancer, &[Up; 4]);
    let mut streams: Vec<TcpStream> = (0..2).map(|_| connect(&bench).unwrap()).collect();
    streams.iter_mut().for_each(|stream| exchange(stream).unwrap());
    let conversations: Vec<UdpSocket> = (0..2).map(|_| responder::connect(&bench).unwrap()).collect();
    let by: Vec<u8> = conversations.iter().map(|flow| responder::ask(flow).unwrap()).collect();
    assert_eq!(by, [1, 2]);

    // Its conversations go elsewhere at once, its connections stay.
    checks.be(Manner::Broken);
    wait_for(&balancer, &[Down, Up, Down, Up]);
    let failed = Instant::now();
    eventually(Duration::from_millis(2_000), "the conversation to move", || {
        (responder::ask(&conversations[0]).unwrap() == 2).then_some(())
    })
    .unwrap();
    exchange(&mut streams[0]).unwrap();
    // Back in time: nothing is lost.
    checks.be(Manner::Good);
    wait_for(&balancer, &[Up; 4]);
    assert!(
        failed.elapsed() < Duration::from_millis(2_900),
        "too slow to say anything: {:?}",
        failed.elapsed()
    );
    exchange(&mut streams[0]).unwrap();

    // Not back: the connection goes on until the drain timeout, and ends with a RST.
    checks.be(Manner::Broken);
    wait_for(&balancer, &[Down, Up, Down, Up]);
    let failed = Instant::now();
    let mut new: Vec<TcpStream> = (0..4).map(|_| connect(&bench).unwrap()).collect();
    new.iter_mut().for_each(|stream| exchange(stream).unwrap());
    status::wait(&balancer, "all new connections elsewhere", |status| {
        status.services[0].backends.iter().map(|backend| backend.active).eq([1, 5])
    })
    .unwrap();
    let error = eventually(LIMIT, "the reset", || exchange(&mut streams[0]).err()).unwrap();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(failed.elapsed() > Duration::from_millis(2_500), "{:?}", failed.elapsed());
    new.iter_mut().chain(&mut streams[1..]).for_each(|stream| exchange(stream).unwrap());
}

/// With nobody left, clients are told so at once, under its own name; the first flow after the recovery works.
#[test]
fn no_backend_that_serves() {
    let bench = Plan::backends(2).build().unwrap();
    let servers: Vec<Server> = (1..)
        .zip(&bench.backends)
        .map(|(number, netns)| {
            Server::start(netns, SocketAddrV4::new(backend_address(number), 9000), Manner::Broken)
        })
        .collect();
    let _echoes: Vec<Echo> = (1..)
        .zip(&bench.backends)
        .map(|(number, netns)| Echo::tcp(netns, endpoint(number)).unwrap())
        .collect();
    let _responders = responder::Responders::start(&bench).unwrap();
    let more = "health = { kind = \"http\", port = 9000, interval = \"200ms\", rise = 1, fall = 1 }";
    let services = [service("tcp", &[1, 1], more), service("udp", &[1, 1], more)];
    let balancer = Balancer::start(&bench.balancer, &config::text("", &services)).unwrap();
    wait_for(&balancer, &[Down; 4]);
    for _ in 0..3 {
        assert_eq!(connect(&bench).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
    let conversation = responder::connect(&bench).unwrap();
    let refused = eventually(LIMIT, "a refusal", || {
        conversation
            .send(b"x")
            .err()
            .or_else(|| conversation.recv(&mut [0; 10]).err())
            .filter(|error| error.kind() == ErrorKind::ConnectionRefused)
    });
    refused.unwrap();
    let status = status::read_fresh(&balancer).unwrap();
    let drops = status::drops(&status);
    assert!(drops.len() == 1 && drops[0].0 == "no-backend" && drops[0].1 >= 4, "{drops:?}");
    assert_eq!(each(&status, |backend| (backend.packets, backend.share)), [(0, 0.0); 4]);

    servers[1].be(Manner::Good);
    wait_for(&balancer, &[Down, Up, Down, Up]);
    let mut stream = connect(&bench).unwrap();
    exchange(&mut stream).unwrap();
    assert_eq!(responder::ask(&responder::connect(&bench).unwrap()).unwrap(), 2);
}

/// What the operator wants and what the checks find are two things, and both outlive reloads, crashes and each other.
#[test]
fn health_goes_on_over_reloads_and_restarts() {
    let bench = Plan::backends(2).build().unwrap();
    let checks = |number: u8, manner| {
        let address = SocketAddrV4::new(backend_address(number), 9000);
        Server::start(&bench.backends[usize::from(number) - 1], address, manner)
    };
    let (first, _second) = (checks(1, Manner::Broken), checks(2, Manner::Good));
    let _echoes: Vec<Echo> = (1..)
        .zip(&bench.backends)
        .map(|(number, netns)| Echo::tcp(netns, endpoint(number)).unwrap())
        .collect();
    let text = |weights: &[u8], interval: &str| {
        let more = format!(
            "health = {{ kind = \"http\", port = 9000, interval = \"{interval}\", timeout = \"100ms\", rise = 3, fall = 2 }}"
        );
        config::text("", &[service("tcp", weights, Box::leak(more.into_boxed_str()))])
    };
    let balancer = Balancer::start(&bench.balancer, &text(&[11, 1], "100ms")).unwrap();
    let before = wait_for(&balancer, &[Down, Up]);
    // Another weight, and the same file over and over: down since then, and no new turn for the other.
    for _ in 0..5 {
        balancer.reload(&text(&[9, 1], "100ms")).unwrap();
    }
    let status = status::wait(&balancer, "the weight", |status| backend(status, 1).weight == 9).unwrap();
    assert_eq!(states(&status), [Down, Up]);
    let [then, now] = [&before, &status].map(|status| backend(status, 1).health.clone().unwrap());
    assert!(now.since_s > then.since_s && now.reason == then.reason, "{now:?} after {then:?}");
    // The operator's wishes are shown before it, and change nothing of it.
    balancer.call(&["backend", "drain", "b1"]).unwrap();
    let status = wait_for(&balancer, &[Draining, Up]);
    assert_eq!(backend(&status, 1).health.as_ref().unwrap().verdict, HealthVerdict::Down);
    first.be(Manner::Good);
    status::wait(&balancer, "it to pass", |status| {
        states(status) == [Draining, Up]
            && backend(status, 1).health.as_ref().unwrap().verdict == HealthVerdict::Up
    })
    .unwrap();
    first.be(Manner::Broken);
    status::wait(&balancer, "it to fail", |status| {
        backend(status, 1).health.as_ref().unwrap().verdict == HealthVerdict::Down
    })
    .unwrap();
    balancer.call(&["backend", "enable", "b1"]).unwrap();
    wait_for(&balancer, &[Down, Up]);
    balancer.reload(&text(&[0, 1], "100ms")).unwrap();
    let status = wait_for(&balancer, &[Disabled, Up]);
    assert_eq!(backend(&status, 1).health.as_ref().unwrap().verdict, HealthVerdict::Down);
    balancer.reload(&text(&[2, 1], "100ms")).unwrap();
    wait_for(&balancer, &[Down, Up]);

    // The daemon dies; the program keeps to what it said. The next daemon sends nothing there before three checks have
    // passed, and the other is not asked to prove itself: here, no check is made for a while.
    let place = balancer.crash();
    let mut stream = connect(&bench).unwrap();
    exchange(&mut stream).unwrap();
    place.write_config(&text(&[2, 1], "1h")).unwrap();
    let balancer = Balancer::start_in(place, &bench.balancer).unwrap();
    let status = status::read_fresh(&balancer).unwrap();
    assert_eq!(states(&status), [Down, Up]);
    assert_eq!(backend(&status, 1).reason.as_deref(), Some("it was down before the balancer was started"));
    let mut streams: Vec<TcpStream> = (0..4).map(|_| connect(&bench).unwrap()).collect();
    streams.iter_mut().for_each(|stream| exchange(stream).unwrap());
    status::wait(&balancer, "all with the second", |status| each(status, |backend| backend.active) == [0, 5])
        .unwrap();
    first.be(Manner::Good);
    balancer.reload(&text(&[2, 1], "200ms")).unwrap();
    let status = wait_for(&balancer, &[Up, Up]);
    assert_eq!(backend(&status, 1).reason.as_deref(), Some("3 checks passed"));
    assert_eq!(backend(&status, 2).reason.as_deref(), Some("it served before"));

    // One that is removed while it is down goes, and one that is added has to pass first.
    first.be(Manner::Broken);
    wait_for(&balancer, &[Down, Up]);
    let mut without = service("tcp", &[1, 1], "");
    without.backends.remove(0);
    balancer.reload(&config::text("", &[without])).unwrap();
    status::wait(&balancer, "it to go", |status| states(status) == [Up]).unwrap();
    balancer.reload(&text(&[2, 1], "1h")).unwrap();
    let status = wait_for(&balancer, &[Starting, Up]);
    assert_eq!(backend(&status, 1).reason.as_deref(), Some("not checked yet"));
    assert_eq!(backend(&status, 1).share, 0.0);
}

/// A backend that was down gets its share when it comes back, and no more, however little it has carried.
#[test]
fn one_that_comes_back_is_not_flooded() {
    let bench = Plan::backends(3).build().unwrap();
    let checks = |number: u8| {
        let address = SocketAddrV4::new(backend_address(number), 9000);
        Server::start(&bench.backends[usize::from(number) - 1], address, Manner::Good)
    };
    let servers: Vec<Server> = (1..=3).map(checks).collect();
    let _responders = responder::Responders::start(&bench).unwrap();
    let more = "slow-start = \"2s\"\nidle-timeout = \"10s\"\n\
                health = { kind = \"http\", port = 9000, interval = \"100ms\", rise = 2, fall = 2 }";
    let service = Service { more, ..Service::new("udp", "least-packets", &[1; 3]) };
    let text = config::text("", &[service]).replace("window = \"5m\"", "window = \"4s\"");
    let balancer = Balancer::start(&bench.balancer, &text).unwrap();
    let state = |state| {
        eventually(LIMIT, "the state", || {
            (states(&status::read(&balancer).unwrap())[0] == state).then_some(())
        })
        .unwrap();
    };
    /// New flows at a steady rate, and how many each backend got.
    fn flows(bench: &Topology, time: Duration) -> [u32; 4] {
        let (begun, mut by) = (Instant::now(), [0; 4]);
        while begun.elapsed() < time {
            let flow = responder::connect(bench).unwrap();
            by[usize::from(responder::ask(&flow).unwrap())] += 1;
            thread::sleep(Duration::from_millis(4));
        }
        by
    }
    state(Up);
    // A window and more, so that whoever comes now is a newcomer.
    flows(&bench, Duration::from_secs(5));
    servers[0].be(Manner::Broken);
    state(Down);
    // Until then, a client that takes an old port again is in an old conversation.
    status::wait(&balancer, "the end of its conversations", |status| backend(status, 1).active == 0).unwrap();
    let by = flows(&bench, Duration::from_secs(5));
    assert_eq!(by[1], 0, "however low its load: {by:?}");
    servers[0].be(Manner::Good);
    state(Starting);
    let by = flows(&bench, Duration::from_secs(1));
    let all: u32 = by.iter().sum();
    assert!(by[1] > 0 && by[1] * 3 < all, "{by:?}");
    state(Up);
    let by = flows(&bench, Duration::from_secs(1));
    let all: u32 = by.iter().sum();
    assert!(by[1] * 5 > all && by[1] * 2 < all, "{by:?}");

    // Up and down again and again: whoever asks is answered.
    for manner in [Manner::Broken, Manner::Good, Manner::Broken, Manner::Good] {
        servers[0].be(manner);
        flows(&bench, Duration::from_millis(500));
    }
}

/// Each backend may be checked in its own way, or not at all.
#[test]
fn a_backend_has_health_checks_of_its_own() {
    let bench = Plan::backends(3).build().unwrap();
    // The first serves where it is asked as all are, the second where it alone is, and the third nowhere.
    let elsewhere = SocketAddrV4::new(backend_address(2), 9000);
    let _echoes = [(1, endpoint(1)), (2, elsewhere)]
        .map(|(number, address)| Echo::tcp(bench.backend(number).unwrap(), address).unwrap());
    let shared = "health = { kind = \"tcp\", interval = \"300ms\" }";
    let text = config::text("", &[service("tcp", &[1; 3], shared)]);
    let own = |number: usize, health: &str| format!("name = \"b{number}\"\nhealth = {health}");
    let with = |second: &str, third: &str| {
        let text = text.replace("name = \"b2\"", &own(2, second));
        text.replace("name = \"b3\"", &own(3, third))
    };
    let there = "{ kind = \"tcp\", port = 9000, interval = \"300ms\" }";
    let balancer = Balancer::start(&bench.balancer, &with(there, "false")).unwrap();
    let status = wait_for(&balancer, &[Up, Up, Up]);
    let checked = each(&status, |backend| backend.health.is_some());
    assert_eq!(checked, [true, true, false]);
    assert_eq!(backend(&status, 2).reason.as_deref(), Some("1 check passed"));
    assert_eq!(backend(&status, 3).reason, None);
    // As all are: neither of the two serves there.
    balancer.reload(&text).unwrap();
    wait_for(&balancer, &[Up, Down, Down]);
    balancer.call(&["backend", "set", "b3", "health=false"]).unwrap();
    balancer.call(&["backend", "set", "b2", &format!("health={there}")]).unwrap();
    wait_for(&balancer, &[Up, Up, Up]);
}
