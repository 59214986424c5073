//! `balancer flows`: what is listed, counted and killed, and what becomes of the connections.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use balancer_tests::{
    Balancer, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    echo::Echo,
    eventually,
    operator::{self, Ended},
    packet::{self, Path, Segment},
    socket::FrameSocket,
    status,
    topology::{BALANCER_CLIENT_SIDE, CLIENT, VIP, backend_address, mac},
};
use balancer_user::{
    api::{Flow, FlowCount, FlowList, FlowState, Killed},
    config::Protocol,
};

const LIMIT: Duration = Duration::from_secs(5);
const VIP_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(VIP), VIP_PORT);
/// A client that answers nothing.
const SILENT: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 77);
const SECOND_CLIENT: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 11);

/// Echo servers on every backend, and a balancer with a TCP and a UDP service in front of them.
struct Bed {
    balancer: Balancer,
    _servers: Vec<Echo>,
    bench: Topology,
}

impl Bed {
    fn start(backends: u8) -> Bed {
        let bench = Plan::backends(backends).build().unwrap();
        let address = |number| SocketAddr::from((backend_address(number), BACKEND_PORT));
        let numbered = || (1..).zip(&bench.backends);
        let tcp = numbered().map(|(number, netns)| Echo::tcp(netns, address(number)).unwrap());
        let udp = numbered().map(|(number, netns)| Echo::udp(netns, address(number)).unwrap());
        let servers = tcp.chain(udp).collect();
        let weights = vec![1; backends.into()];
        let services = ["tcp", "udp"].map(|protocol| Service::new(protocol, "round-robin", &weights));
        let balancer = Balancer::start(&bench.balancer, &config::text("", &services)).unwrap();
        status::wait_until_up(&balancer).unwrap();
        Bed { balancer, _servers: servers, bench }
    }

    fn connect(&self) -> TcpStream {
        let mut stream = self.bench.client.run(|| Ok(TcpStream::connect(VIP_ADDRESS)?)).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        talk(&mut stream).unwrap();
        stream
    }

    /// A UDP conversation that has had an answer.
    fn converse(&self, client: Ipv4Addr, port: u16) -> UdpSocket {
        let socket = self.bench.client.run(|| Ok(UdpSocket::bind((client, port))?)).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.send_to(b"hello", VIP_ADDRESS).unwrap();
        socket.recv_from(&mut [0; 8]).unwrap();
        socket
    }

    /// A SYN whose SYN-ACK nobody answers.
    fn half_open(&self, port: u16) {
        let packet = Path::new((SILENT, port), (VIP, VIP_PORT)).tcp(Segment::flags(Segment::SYN), &[]);
        let frame = packet::ethernet(mac(BALANCER_CLIENT_SIDE), mac(CLIENT), &packet.unwrap());
        FrameSocket::open(&self.bench.client, "c0").unwrap().send(&frame).unwrap();
    }

    /// Calls a verb of the command line.
    fn call(&self, words: &str) -> Ended {
        let socket = self.balancer.place().socket();
        let words = words.split(' ').chain(["--socket", socket.to_str().unwrap()]);
        operator::balancer(words).unwrap()
    }

    /// What a verb that works prints as JSON.
    fn read<T: serde::de::DeserializeOwned>(&self, words: &str) -> T {
        let ended = self.call(&format!("{words} --json"));
        assert_eq!(ended.code, 0, "{words}: {}", ended.text);
        serde_json::from_str(&ended.text).unwrap_or_else(|error| panic!("{words}: {error}: {}", ended.text))
    }

    fn list(&self, filter: &str) -> FlowList {
        self.read(format!("flows list {filter}").trim_end())
    }

    fn count(&self, filter: &str) -> FlowCount {
        self.read(format!("flows count {filter}").trim_end())
    }

    fn active(&self) -> Vec<u64> {
        status::each(&status::read_fresh(&self.balancer).unwrap(), |backend| backend.active)
    }
}

fn talk(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(b"hello")?;
    let mut answer = [0; 5];
    stream.read_exact(&mut answer)?;
    assert_eq!(answer, *b"hello");
    Ok(())
}

fn states(half_open: u64, established: u64, closing: u64) -> FlowCount {
    FlowCount { flows: half_open + established + closing, half_open, established, closing }
}

#[test]
fn flows_are_listed_as_they_are() {
    let bed = Bed::start(2);
    assert_eq!(bed.list(""), FlowList { more: Some(0), ..FlowList::default() });
    assert_eq!(bed.call("flows list").text, "no flows\n");
    let begun = Instant::now();
    // Each service gives its flows to b1 and b2 in turn.
    let streams: Vec<TcpStream> = (0..3).map(|_| bed.connect()).collect();
    let closed = bed.connect();
    let closed_from = closed.local_addr().unwrap();
    drop(closed);
    bed.half_open(50_000);
    let _conversations = [bed.converse(CLIENT, 41_000), bed.converse(CLIENT, 41_001)];
    eventually(LIMIT, "the closed connection forgotten by both ends", || {
        (bed.count("--state closing").flows == 1 && bed.count("").flows == 7).then_some(())
    })
    .unwrap();

    let flow = |client: SocketAddr, protocol: Protocol, number: u8, state| {
        let backend = (format!("b{number}"), (backend_address(number), BACKEND_PORT).into());
        (client, (protocol.to_string(), VIP_ADDRESS, backend, protocol, state))
    };
    let (tcp, udp) = (Protocol::Tcp, Protocol::Udp);
    let expected: BTreeMap<_, _> = [
        flow(streams[0].local_addr().unwrap(), tcp, 1, FlowState::Established),
        flow(streams[1].local_addr().unwrap(), tcp, 2, FlowState::Established),
        flow(streams[2].local_addr().unwrap(), tcp, 1, FlowState::Established),
        flow(closed_from, tcp, 2, FlowState::Closing),
        flow((SILENT, 50_000).into(), tcp, 1, FlowState::HalfOpen),
        flow((CLIENT, 41_000).into(), udp, 1, FlowState::Established),
        flow((CLIENT, 41_001).into(), udp, 2, FlowState::Established),
    ]
    .into();
    let FlowList { flows, more, next } = bed.list("");
    assert_eq!((flows.len(), more, next), (7, Some(0), None));
    let elapsed = begun.elapsed().as_millis() as u64;
    // Stamps are 67 ms wide, at both ends.
    for Flow { age_ms, idle_ms, .. } in &flows {
        let age = age_ms.expect("none is old");
        assert!(*idle_ms <= age + 134 && age <= elapsed + 134, "{idle_ms} {age} {elapsed}");
    }
    let listed: BTreeMap<_, _> = flows
        .into_iter()
        .map(|flow| {
            let backend = (flow.backend, flow.backend_address);
            (flow.client, (flow.service, flow.service_address, backend, flow.protocol, flow.state))
        })
        .collect();
    assert_eq!(listed, expected);

    // What is counted is what is active.
    let active = bed.active();
    assert_eq!(active, [3, 1, 1, 1]);
    assert_eq!(bed.count(""), states(1, 5, 1));
    for (filter, expected) in [
        ("--service tcp", states(1, 3, 1)),
        ("--service udp", states(0, 2, 0)),
        ("--backend b1", states(1, 3, 0)),
        ("--backend b2 --service tcp", states(0, 1, 1)),
        ("--client 10.0.1.77", states(1, 0, 0)),
        ("--client 10.0.1.0/26", states(0, 5, 1)),
        ("--client 192.0.2.0/24", states(0, 0, 0)),
        ("--state half-open", states(1, 0, 0)),
        ("--service udp --state established --backend b2 --client 10.0.1.10", states(0, 1, 0)),
    ] {
        assert_eq!(bed.count(filter), expected, "{filter}");
        assert_eq!(bed.list(filter).flows.len() as u64, expected.flows, "{filter}");
    }
    for (service, active) in ["tcp", "udp"].iter().zip(active.chunks(2)) {
        for (number, active) in (1..).zip(active) {
            let count = bed.count(&format!("--service {service} --backend b{number}"));
            assert_eq!(count.half_open + count.established, *active, "{service} b{number}");
        }
    }

    // For people: one line for each, and how many more.
    let text = bed.call("flows list --service tcp --state half-open").text;
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows.len(), 2, "{text}");
    assert_eq!(rows[0], ["client", "service", "backend", "protocol", "state", "age", "idle"]);
    assert_eq!(
        rows[1][..7],
        ["10.0.1.77:50000", "tcp", "192.0.2.10:80", "b1", "10.0.2.11:8080", "tcp", "half-open"]
    );
    let text = bed.call("flows list --limit 3").text;
    assert_eq!(text.lines().count(), 5, "{text}");
    assert!(text.ends_with("and 4 more: --limit 7\n"), "{text}");
    let text = bed.call("flows count").text;
    let words: Vec<&str> = text.split_whitespace().collect();
    assert_eq!(
        words,
        ["state", "flows", "half-open", "1", "established", "5", "closing", "1", "all", "7"],
        "{text}"
    );
}

#[test]
fn killed_connections_are_reset_and_the_others_go_on() {
    let bed = Bed::start(3);
    let mut streams: Vec<TcpStream> = (0..6).map(|_| bed.connect()).collect();
    assert_eq!(bed.active(), [2, 2, 2, 0, 0, 0]);
    let killed: Killed = bed.read("flows kill --service tcp --backend b2 --state established");
    assert_eq!(killed, Killed { killed: 2 });
    assert_eq!(bed.active(), [2, 0, 2, 0, 0, 0]);
    assert_eq!(bed.count(""), states(0, 4, 0));
    assert_eq!(bed.list("--backend b2").flows, []);

    // The killed ones are told at their next segment; b2 had the second and the fifth turn.
    for (turn, stream) in streams.iter_mut().enumerate() {
        let went = talk(stream);
        if turn % 3 == 1 {
            assert_eq!(went.unwrap_err().kind(), ErrorKind::ConnectionReset, "connection {turn}");
        } else {
            went.unwrap_or_else(|error| panic!("connection {turn}: {error}"));
        }
    }
    let status = status::read_fresh(&bed.balancer).unwrap();
    assert_eq!(status::drops(&status), [("unknown-flow", 2)]);
    assert_eq!(bed.active(), [2, 0, 2, 0, 0, 0], "counted once");
    // New ones are taken as ever, b2's too.
    streams.extend((0..3).map(|_| bed.connect()));
    assert_eq!(bed.active(), [3, 1, 3, 0, 0, 0]);

    assert_eq!(bed.call("flows kill --client 10.0.1.11").text, "killed 0 flows\n");
    assert_eq!(bed.call("flows kill --backend b2").text, "killed 1 flow\n");
    assert_eq!(bed.call("flows kill --all").text, "killed 6 flows\n");
    assert_eq!((bed.active(), bed.count("")), (vec![0; 6], states(0, 0, 0)));
}

/// Connections come and go while all of them are killed, again and again: nobody is counted twice, and nothing stays behind.
#[test]
fn kills_amid_a_stream_of_connections_leave_nothing_behind() {
    let bed = Bed::start(2);
    let stopped = AtomicBool::new(false);
    let client = || -> u64 {
        let mut went_well = 0;
        while !stopped.load(Relaxed) {
            let stream = bed.bench.client.run(|| Ok(TcpStream::connect_timeout(&VIP_ADDRESS, LIMIT)?));
            let Ok(mut stream) = stream else { continue };
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            went_well += u64::from((0..3).all(|_| talk(&mut stream).is_ok()));
        }
        went_well
    };
    let mut killed = 0;
    let went_well: u64 = thread::scope(|scope| {
        let clients = [(); 4].map(|()| scope.spawn(client));
        for _ in 0..20 {
            killed += bed.read::<Killed>("flows kill --all").killed;
        }
        stopped.store(true, Relaxed);
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    });
    assert!(went_well > 50 && killed > 50, "{went_well} went well, {killed} were killed");
    let status = status::wait(&bed.balancer, "their end", |status| {
        status::each(status, |backend| backend.active) == [0; 4] && status.flows.now.established == 0
    });
    let drops =
        status.unwrap().drops.into_iter().filter(|(name, count)| *count > 0 && name != "unknown-flow");
    assert_eq!(drops.filter(|(name, _)| name != "orphan-reply").collect::<Vec<_>>(), []);
    let _streams: Vec<TcpStream> = (0..4).map(|_| bed.connect()).collect();
    assert_eq!(bed.active(), [2, 2, 0, 0]);
}

/// A killed conversation is scheduled anew, and only that of the client that was meant.
#[test]
fn a_killed_conversation_begins_again() {
    let bed = Bed::start(3);
    bed.bench.client.ip(&format!("address add {SECOND_CLIENT}/24 dev c0")).unwrap();
    let first = bed.converse(CLIENT, 41_000);
    let second = bed.converse(SECOND_CLIENT, 41_000);
    assert_eq!(bed.active(), [0, 0, 0, 1, 1, 0]);
    let killed: Killed = bed.read("flows kill --client 10.0.1.11/32");
    assert_eq!(killed, Killed { killed: 1 });
    assert_eq!(bed.active(), [0, 0, 0, 1, 0, 0]);
    for socket in [&first, &second] {
        socket.send_to(b"more", VIP_ADDRESS).unwrap();
        let mut answer = [0; 8];
        assert_eq!(socket.recv_from(&mut answer).unwrap(), (4, VIP_ADDRESS));
    }
    assert_eq!(bed.active(), [0, 0, 0, 1, 0, 1]);
    assert_eq!(bed.count(""), states(0, 2, 0));
}

/// More than one answer of the daemon holds.
#[test]
fn a_long_list_has_each_flow_once() {
    const FLOWS: u16 = 2500;
    let bed = Bed::start(1);
    let socket = FrameSocket::open(&bed.bench.client, "c0").unwrap();
    let frames: Vec<Vec<u8>> = (0..FLOWS)
        .map(|number| {
            let packet = Path::new((SILENT, 10_000 + number), (VIP, VIP_PORT)).udp(b"x").unwrap();
            packet::ethernet(mac(BALANCER_CLIENT_SIDE), mac(CLIENT), &packet)
        })
        .collect();
    // A veth's queue loses what is too much at once: what is there already counts once.
    eventually(LIMIT, "all flows opened", || {
        socket.send_all(&frames).unwrap();
        (bed.count("").flows == u64::from(FLOWS)).then_some(())
    })
    .unwrap();
    for (limit, more) in [(2500, 0), (3000, 0), (2001, 499), (2000, 500), (1000, 1500), (1, 2499)] {
        let list = bed.list(&format!("--limit {limit}"));
        let mut clients: Vec<_> = list.flows.iter().map(|flow| flow.client).collect();
        clients.sort_unstable();
        clients.dedup();
        let expected = (limit.min(FLOWS.into()), Some(more), more > 0);
        assert_eq!((clients.len() as u64, list.more, list.next.is_some()), expected, "limit {limit}");
    }
    assert_eq!(bed.list("").flows.len(), 100);
}

#[test]
fn a_wrong_call_is_told_so() {
    let bed = Bed::start(2);
    for (words, code, expected) in [
        ("flows list --service wep", 2, "balancer: there is no service \"wep\"; there are: tcp, udp\n"),
        ("flows count --backend b3", 2, "balancer: there is no backend \"b3\"; there are: b1, b2\n"),
        (
            "flows kill --service udp --backend x",
            2,
            "balancer: there is no backend \"x\"; there are: b1, b2\n",
        ),
        ("status wep", 2, "balancer: there is no service \"wep\"; there are: tcp, udp\n"),
        ("flows kill", 2, "error: the following required arguments were not provided:\n"),
        ("flows kill --all --state closing", 2, "error: the argument '--all' cannot be used with"),
        ("flows list --state open", 2, "error: invalid value 'open' for '--state <STATE>'\n"),
        (
            "flows list --client 10.0.1.10/24",
            2,
            "error: invalid value '10.0.1.10/24' for '--client <PREFIX>': ",
        ),
        ("flows list --service tcp", 0, "no flows\n"),
    ] {
        let ended = bed.call(words);
        assert_eq!(ended.code, code, "{words}: {}", ended.text);
        assert!(ended.text.starts_with(expected), "{words}: {}", ended.text);
    }
    let ended = operator::balancer(["flows", "count", "--socket", "/nowhere/b.sock"]).unwrap();
    let expected = "balancer: no balancer answers at /nowhere/b.sock: is `balancer run` running, and with this `socket`?\n";
    assert_eq!((ended.code, ended.text.as_str()), (1, expected));
}
