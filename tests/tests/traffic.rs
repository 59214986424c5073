//! Real programs talk through the balancer: every byte arrives, and the balancer counts exactly what was on the wire.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    collections::HashMap,
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use balancer_common::{TCP, UDP};
use balancer_tests::{
    Balancer, Capture, Plan, Topology,
    capture::{Packet, total},
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    echo::Echo,
    eventually,
    nginx::Nginx,
    packet::Segment,
    ping, status,
    topology::{BALANCER_BACKEND_SIDE, BALANCER_CLIENT_SIDE, CLIENT, Family, VIP, backend_address, mac},
};
use balancer_user::api::{AttachedMode, BackendStatus};

const LIMIT: Duration = Duration::from_secs(5);
/// One TTL less than senders begin with.
const LOWERED: u8 = 63;

/// Starts the balancer and waits until every backend can be reached.
fn start(bench: &Topology, daemon: &str, services: &[Service]) -> Balancer {
    let balancer = Balancer::start(&bench.balancer, &config::text(daemon, services)).unwrap();
    status::wait_until_up(&balancer).unwrap();
    balancer
}

fn backend(number: u8) -> SocketAddr {
    backend_of(Family::Ipv4, number)
}

fn backend_of(family: Family, number: u8) -> SocketAddr {
    SocketAddr::new(family.backend(number), BACKEND_PORT)
}

/// The bench with addresses of a family.
fn bench_of(family: Family) -> Topology {
    Plan { ipv6: family == Family::Ipv6, ..Plan::default() }.build().unwrap()
}

/// A UDP socket on the client; its own port makes it a flow of its own.
fn client_socket(bench: &Topology, port: u16) -> UdpSocket {
    client_socket_of(Family::Ipv4, bench, port)
}

fn client_socket_of(family: Family, bench: &Topology, port: u16) -> UdpSocket {
    let socket = bench.client.run(|| Ok(UdpSocket::bind((family.client(), port))?)).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}

/// Everything that the balancer has to do with, captured outside it: requests where they arrive, and replies both where
/// they leave the backend and where they arrive at the client.
struct Watch {
    family: Family,
    requests: Vec<Capture>,
    replies: Vec<Capture>,
    client: Capture,
}

impl Watch {
    fn start(bench: &Topology) -> Watch {
        Watch::of(Family::Ipv4, bench)
    }

    fn of(family: Family, bench: &Topology) -> Watch {
        let requests = bench.backends.iter().map(|netns| Capture::start(netns, "e0").unwrap());
        let replies = (1..=bench.backends.len())
            .map(|number| Capture::start(&bench.switch, &format!("p{number}")).unwrap());
        Watch {
            family,
            requests: requests.collect(),
            replies: replies.collect(),
            client: Capture::start(&bench.client, "c0").unwrap(),
        }
    }

    /// Packets and bytes of each backend so far, both directions together.
    fn traffic(&self) -> Vec<(u64, u64)> {
        let sums = self.requests.iter().zip(&self.replies).zip(1..).map(|((requests, replies), number)| {
            let own = backend_of(self.family, number);
            let to = total(requests.packets().iter().filter(|packet| packet.destination == own));
            let from = total(replies.packets().iter().filter(|packet| packet.source == own));
            (to.0 + from.0, to.1 + from.1)
        });
        sums.collect()
    }

    /// Waits until every connection has ended and the balancer has counted, for each backend, exactly what was captured.
    fn assert_counted(&self, balancer: &Balancer) {
        let counted = || status::traffic(&status::read_fresh(balancer).unwrap().services[0]);
        let agreed = eventually(LIMIT, "the counters equal to what was captured", || {
            (counted() == self.traffic()).then_some(())
        });
        assert!(agreed.is_ok(), "counted {:?}, captured {:?}", counted(), self.traffic());
        assert_eq!(counted(), self.traffic());
    }

    /// Ends all captures and checks each packet: addresses, MACs, TTL, and that every reply came through. Returns what
    /// each backend received.
    fn assert_translated(self) -> Vec<Vec<Packet>> {
        let family = self.family;
        let arrived: Vec<Packet> = self.client.finish().unwrap();
        for packet in &arrived {
            assert_eq!(packet.source, SocketAddr::new(family.vip(), VIP_PORT), "{packet:?}");
            assert_eq!(packet.macs, [mac(CLIENT), mac(BALANCER_CLIENT_SIDE)], "{packet:?}");
            assert_eq!(packet.ttl, LOWERED, "{packet:?}");
        }
        let sent = self.replies.into_iter().map(|capture| capture.finish().unwrap());
        assert_eq!(total(&arrived), total(&sent.collect::<Vec<_>>().concat()), "replies at the client");
        let requests = self.requests.into_iter().zip(1..).map(|(capture, number)| {
            let mut packets = capture.finish().unwrap();
            // The switch floods what it has not learned yet.
            packets.retain(|packet| packet.macs[0] == mac(backend_address(number)));
            for packet in &packets {
                assert_eq!(packet.destination, backend_of(family, number), "{packet:?}");
                assert_eq!(packet.source.ip(), family.client(), "{packet:?}");
                assert_eq!(packet.macs[1], mac(BALANCER_BACKEND_SIDE), "{packet:?}");
                assert_eq!(packet.ttl, LOWERED, "{packet:?}");
            }
            packets
        });
        requests.collect()
    }
}

/// The kernel of the balancer's namespace has forwarded nothing, and could not have.
fn assert_kernel_forwards_nothing(bench: &Topology) {
    let read = |path: &str| bench.balancer.run(|| Ok(fs::read_to_string(path)?)).unwrap();
    assert_eq!(read("/proc/sys/net/ipv4/ip_forward").trim(), "0");
    let snmp = read("/proc/thread-self/net/snmp");
    let mut ip = snmp.lines().filter_map(|line| line.strip_prefix("Ip: "));
    let (names, values) = (ip.next().unwrap().split(' '), ip.next().unwrap().split(' '));
    let forwarded = names.zip(values).find(|(name, _)| *name == "ForwDatagrams");
    assert_eq!(forwarded, Some(("ForwDatagrams", "0")));
    assert_eq!(read("/proc/sys/net/ipv6/conf/all/forwarding").trim(), "0");
    let snmp = read("/proc/thread-self/net/snmp6");
    let forwarded = snmp.lines().find_map(|line| line.strip_prefix("Ip6OutForwDatagrams"));
    assert_eq!(forwarded.map(str::trim), Some("0"));
}

/// Bytes that differ with their place: a swapped, repeated or truncated segment shows.
fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|place| (place.wrapping_mul(2_654_435_761) >> 7) as u8).collect()
}

/// Runs curl on the client; a failed request fails the test.
fn curl(bench: &Topology, arguments: &[&str]) -> String {
    let always = ["--silent", "--show-error", "--fail", "--max-time", "8"];
    bench.client.output("curl", &[&always, arguments].concat()).unwrap()
}

fn web(family: Family, mode: AttachedMode, connections: usize) {
    let bench = bench_of(family);
    let vip = SocketAddr::new(family.vip(), VIP_PORT);
    let servers: Vec<Nginx> = (1..)
        .zip(&bench.backends)
        .map(|(number, netns)| {
            Nginx::start(netns, backend_of(family, number), &format!("b{number}")).unwrap()
        })
        .collect();
    let service = Service::of(family, "tcp", "least-packets", &[1, 1, 1]);
    let balancer = start(&bench, &format!("xdp-mode = \"{mode}\""), &[service]);
    let attached = status::read(&balancer).unwrap().interfaces;
    assert!(attached.len() == 2 && attached.iter().all(|interface| interface.mode == mode), "{attached:?}");
    let watch = Watch::of(family, &bench);

    // Short connections, each with the name of whom it reached and the port that it came from.
    let mut reached: HashMap<u16, String> = HashMap::new();
    for _ in 0..connections {
        let answer = curl(&bench, &["--write-out", " %{local_port}", &format!("http://{vip}/name")]);
        let (name, port) = answer.split_once(' ').unwrap();
        assert!(reached.insert(port.parse().unwrap(), name.to_owned()).is_none(), "a port twice");
    }
    // A long download and a long upload: every byte.
    let content = pattern(20 << 20);
    for server in &servers {
        fs::write(server.file("down"), &content).unwrap();
    }
    let received = servers[0].directory().join("received");
    curl(&bench, &["--output", received.to_str().unwrap(), &format!("http://{vip}/files/down")]);
    assert!(fs::read(&received).unwrap() == content, "the downloaded bytes differ");
    let content = pattern(5 << 20);
    let sent = servers[0].directory().join("sent");
    fs::write(&sent, &content).unwrap();
    curl(&bench, &["--upload-file", sent.to_str().unwrap(), &format!("http://{vip}/files/up")]);
    let stored: Vec<_> = servers.iter().filter_map(|server| fs::read(server.file("up")).ok()).collect();
    assert!(stored == [content], "the uploaded bytes differ");

    let status = status::wait(&balancer, "no connection left", |status| {
        status::each(status, |backend| backend.active) == [0, 0, 0]
    });
    assert_eq!(status::drops(&status.unwrap()), []);
    watch.assert_counted(&balancer);
    let requests = watch.assert_translated();
    for (number, packets) in (1..).zip(&requests) {
        let opened = packets.iter().filter(|packet| packet.flags == Segment::SYN);
        let answered = opened.filter_map(|packet| reached.remove(&packet.source.port()));
        assert!(answered.into_iter().all(|name| name == format!("b{number}")), "answered by another");
    }
    assert_eq!(reached, HashMap::new(), "connections that no backend received");
    assert_kernel_forwards_nothing(&bench);
}

#[test]
fn a_web_server_behind_the_balancer_serves_every_byte() {
    web(Family::Ipv4, AttachedMode::Native, 100);
}

#[test]
fn generic_mode_carries_the_same() {
    web(Family::Ipv4, AttachedMode::Generic, 30);
}

#[test]
fn a_web_server_serves_every_byte_over_ipv6() {
    web(Family::Ipv6, AttachedMode::Native, 100);
}

#[test]
fn generic_mode_carries_the_same_over_ipv6() {
    web(Family::Ipv6, AttachedMode::Generic, 30);
}

#[test]
fn datagrams_come_back_byte_for_byte_from_the_virtual_address() {
    // An IPv4 header and that of UDP; then the longest datagram that fits.
    datagrams(Family::Ipv4, 20 + 8);
}

#[test]
fn datagrams_come_back_byte_for_byte_over_ipv6() {
    datagrams(Family::Ipv6, 40 + 8);
}

fn datagrams(family: Family, headers: usize) {
    let bench = bench_of(family);
    let _servers: Vec<Echo> = (1..)
        .zip(&bench.backends)
        .map(|(number, netns)| Echo::udp(netns, backend_of(family, number)).unwrap())
        .collect();
    let balancer = start(&bench, "", &[Service::of(family, "udp", "round-robin", &[1, 1, 1])]);
    let watch = Watch::of(family, &bench);
    let vip = SocketAddr::new(family.vip(), VIP_PORT);
    let lengths = [0, 1, 2, 3, 17, 18, 19, 100, 511, 1000, 1499 - headers, 1500 - headers];
    let mut buffer = vec![0; 2000];
    for conversation in 0..6 {
        let socket = client_socket_of(family, &bench, 40_000 + conversation as u16);
        for length in lengths {
            let datagram: Vec<u8> = pattern(length + conversation).split_off(conversation);
            socket.send_to(&datagram, vip).unwrap();
            let (length, source) = socket.recv_from(&mut buffer).unwrap();
            assert_eq!(source, vip);
            assert!(buffer[..length] == datagram, "the bytes differ");
        }
    }
    watch.assert_counted(&balancer);
    let one = lengths.iter().map(|length| 2 * (length + headers) as u64).sum::<u64>();
    let expected = [(2 * 2 * lengths.len() as u64, 2 * one); 3];
    assert_eq!(status::traffic(&status::read(&balancer).unwrap().services[0]), expected);
    let requests = watch.assert_translated();
    assert!(requests.concat().iter().all(|packet| packet.protocol == UDP));
    assert_kernel_forwards_nothing(&bench);
}

/// Conversations of unlike lengths and sizes, the long ones such that turns alone give them all to one backend: what the
/// method measures ends up even.
#[test]
fn each_method_spreads_what_it_measures() {
    const GROUPS: u64 = 40;
    // Of a long conversation, both ways; the others are one datagram of 100 bytes each way.
    const LONG: (u64, u64) = (8, 1200);
    for method in ["round-robin", "least-packets", "least-bandwidth"] {
        let bench = Plan::default().build().unwrap();
        let _servers: Vec<Echo> = (1..)
            .zip(&bench.backends)
            .map(|(number, netns)| Echo::udp(netns, backend(number)).unwrap())
            .collect();
        let balancer = start(&bench, "tick = \"10ms\"", &[Service::new("udp", method, &[1, 1, 1])]);
        let mut buffer = vec![0; 2000];
        let mut port = 40_000;
        let mut last = None;
        for group in 1..=GROUPS {
            for (datagrams, length) in [LONG, (1, 100), (1, 100)] {
                let socket = client_socket(&bench, port);
                port += 1;
                for _ in 0..datagrams {
                    socket.send_to(&vec![7; length as usize], (VIP, VIP_PORT)).unwrap();
                    socket.recv_from(&mut buffer).unwrap();
                }
            }
            let sent = group * 2 * (LONG.0 + 2);
            let status = status::wait(&balancer, "all counted", |status| {
                status::each(status, |backend| backend.packets).iter().sum::<u64>() == sent
            });
            last = Some(status.unwrap());
        }
        let status = last.unwrap();
        let spread = |figure: fn(&BackendStatus) -> u64| {
            let figures = status::each(&status, figure);
            figures.iter().max().unwrap() - figures.iter().min().unwrap()
        };
        let flows = status::each(&status, |backend| backend.active);
        assert_eq!(flows.iter().sum::<u64>(), 3 * GROUPS, "{method}");
        match method {
            "round-robin" => {
                assert_eq!(flows, [GROUPS; 3]);
                assert_eq!(spread(|backend| backend.packets), GROUPS * 2 * (LONG.0 - 1), "turns alone");
            }
            "least-packets" => {
                let spread = spread(|backend| backend.packets);
                assert!(spread <= 2 * 2 * LONG.0, "{method}: {:?}", status::traffic(&status.services[0]));
            }
            _ => {
                let spread = spread(|backend| backend.bytes);
                let long = 2 * LONG.0 * (LONG.1 + 28);
                assert!(spread <= 2 * long, "{method}: {:?}", status::traffic(&status.services[0]));
            }
        }
    }
}

#[test]
fn active_counts_rise_with_connections_and_fall_to_zero() {
    let bench = Plan::default().build().unwrap();
    let _servers: Vec<Echo> = (1..)
        .zip(&bench.backends)
        .map(|(number, netns)| Echo::tcp(netns, backend(number)).unwrap())
        .collect();
    let balancer = start(&bench, "", &[Service::new("tcp", "round-robin", &[1, 1, 1])]);
    let active = |wanted: [u64; 3]| {
        status::wait(&balancer, &format!("{wanted:?} active flows"), |status| {
            status::each(status, |backend| backend.active) == wanted
        })
        .unwrap();
    };
    let connect = || {
        let mut stream = bench.client.run(|| Ok(TcpStream::connect((VIP, VIP_PORT))?)).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(b"hello").unwrap();
        let mut answer = [0; 5];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer, *b"hello");
        stream
    };
    active([0, 0, 0]);
    let mut streams: Vec<TcpStream> = (0..12).map(|_| connect()).collect();
    active([4, 4, 4]);
    // The first six of the turns: two of each backend.
    streams.drain(..6);
    active([2, 2, 2]);
    streams.push(connect());
    active([3, 2, 2]);
    drop(streams);
    active([0, 0, 0]);
}

#[test]
fn a_silent_udp_flow_is_no_longer_active_after_its_timeout() {
    let bench = Plan::backends(1).build().unwrap();
    let _server = Echo::udp(bench.backend(1).unwrap(), backend(1)).unwrap();
    let service = Service { more: "idle-timeout = \"1s\"", ..Service::new("udp", "least-packets", &[1]) };
    let balancer = start(&bench, "", &[service]);
    let socket = client_socket(&bench, 40_000);
    let active = |wanted: u64| {
        status::wait(&balancer, "the active count", |status| {
            status::each(status, |backend| backend.active) == [wanted]
        })
        .unwrap();
    };
    let exchange = || {
        socket.send_to(b"hello", (VIP, VIP_PORT)).unwrap();
        socket.recv_from(&mut [0; 8]).unwrap();
        Instant::now()
    };
    let first = exchange();
    active(1);
    // Traffic keeps it.
    while first.elapsed() < Duration::from_millis(2500) {
        exchange();
        assert_eq!(status::each(&status::read(&balancer).unwrap(), |backend| backend.active), [1]);
    }
    let last = exchange();
    active(0);
    assert!(last.elapsed() >= Duration::from_secs(1), "gone after {:?}", last.elapsed());
    // And the next datagram opens a flow again.
    exchange();
    active(1);
}

#[test]
fn what_is_not_for_the_service_reaches_the_host() {
    let bench = Plan::backends(1).build().unwrap();
    let _server = Nginx::start(bench.backend(1).unwrap(), backend(1), "b1").unwrap();
    // The virtual address is the host's own.
    let address = SocketAddr::from((BALANCER_CLIENT_SIDE, VIP_PORT));
    let balancer = start(&bench, "", &[Service { address, ..Service::new("tcp", "least-packets", &[1]) }]);
    let listener = bench.balancer.run(|| Ok(TcpListener::bind((BALANCER_CLIENT_SIDE, 22))?)).unwrap();
    thread::scope(|scope| {
        let host = scope.spawn(|| {
            let (mut stream, peer) = listener.accept().unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            stream.write_all(b"SSH-2.0-host\r\n").unwrap();
            let mut sent = Vec::new();
            stream.read_to_end(&mut sent).unwrap();
            (sent, peer.ip())
        });
        let mut stream = bench
            .client
            .run(|| Ok(TcpStream::connect_timeout(&(BALANCER_CLIENT_SIDE, 22).into(), LIMIT)?))
            .unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut greeting = [0; 14];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(greeting, *b"SSH-2.0-host\r\n");
        let mine = pattern(100_000);
        stream.write_all(&mine).unwrap();
        drop(stream);
        let (sent, peer) = host.join().unwrap();
        assert!(sent == mine, "the host received other bytes");
        assert_eq!(peer, CLIENT);
    });
    ping::ping(&bench.client, BALANCER_CLIENT_SIDE, LIMIT).unwrap();
    assert_eq!(status::traffic(&status::read_fresh(&balancer).unwrap().services[0]), [(0, 0)]);
    assert_eq!(curl(&bench, &[&format!("http://{BALANCER_CLIENT_SIDE}/name")]), "b1");
    let status = status::read_fresh(&balancer).unwrap();
    assert!(status::traffic(&status.services[0])[0].0 >= 8, "the balanced connection was not counted");
    assert_eq!(status::drops(&status), []);
}

/// A connection that goes on while `disturb` happens; how long its longest silence was.
fn longest_silence(bench: &Topology, disturb: impl FnOnce(&AtomicU64)) -> Duration {
    let exchanges = AtomicU64::new(0);
    let stopped = AtomicBool::new(false);
    thread::scope(|scope| {
        let client = scope.spawn(|| {
            let mut stream = bench.client.run(|| Ok(TcpStream::connect((VIP, VIP_PORT))?)).unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            let mut longest = Duration::ZERO;
            let mut number = 0u64;
            while !stopped.load(Relaxed) {
                let begun = Instant::now();
                stream.write_all(&number.to_be_bytes()).unwrap();
                let mut answer = [0; 8];
                stream.read_exact(&mut answer).unwrap();
                assert_eq!(u64::from_be_bytes(answer), number);
                longest = longest.max(begun.elapsed());
                number += 1;
                exchanges.store(number, Relaxed);
                thread::sleep(Duration::from_millis(2));
            }
            longest
        });
        wait_for_more(&exchanges);
        disturb(&exchanges);
        wait_for_more(&exchanges);
        stopped.store(true, Relaxed);
        client.join().unwrap()
    })
}

fn wait_for_more(exchanges: &AtomicU64) {
    let wanted = exchanges.load(Relaxed) + 50;
    eventually(LIMIT, "more exchanges", || (exchanges.load(Relaxed) >= wanted).then_some(())).unwrap();
}

#[test]
fn a_connection_survives_that_the_kernel_forgets_its_neighbours() {
    let bench = Plan::backends(1).build().unwrap();
    let _server = Echo::tcp(bench.backend(1).unwrap(), backend(1)).unwrap();
    let _balancer = start(&bench, "", &[Service::new("tcp", "least-packets", &[1])]);
    let silence = longest_silence(&bench, |exchanges| {
        for _ in 0..3 {
            bench.balancer.ip("neigh flush dev lk").unwrap();
            wait_for_more(exchanges);
        }
    });
    assert!(silence < Duration::from_secs(1), "silent for {silence:?}");
}

/// As when an address moves to another machine: the new owner of the address announces it, and the flows follow.
#[test]
fn a_connection_survives_a_change_of_its_backends_mac() {
    let bench = Plan::backends(1).build().unwrap();
    let netns = bench.backend(1).unwrap();
    let _server = Echo::tcp(netns, backend(1)).unwrap();
    netns.set_sysctl("net/ipv4/conf/e0/arp_notify", "1").unwrap();
    let _balancer = start(&bench, "", &[Service::new("tcp", "least-packets", &[1])]);
    let capture = Capture::start(netns, "e0").unwrap();
    let silence = longest_silence(&bench, |exchanges| {
        for last in 1..=3 {
            netns.ip(&format!("link set dev e0 address 02:00:00:00:99:{last:02x}")).unwrap();
            wait_for_more(exchanges);
        }
    });
    assert!(silence < Duration::from_secs(1), "silent for {silence:?}");
    let mut macs: Vec<[u8; 6]> = capture.finish().unwrap().iter().map(|packet| packet.macs[0]).collect();
    macs.dedup();
    let moved = |last| [2, 0, 0, 0, 0x99, last];
    assert_eq!(macs, [mac(backend_address(1)), moved(1), moved(2), moved(3)]);
}

#[test]
fn jumbo_frames_are_carried_whole() {
    let bench = Plan { mtu: 9000, ..Plan::backends(2) }.build().unwrap();
    let servers: Vec<Nginx> = (1..)
        .zip(&bench.backends)
        .map(|(number, netns)| Nginx::start(netns, backend(number), &format!("b{number}")).unwrap())
        .collect();
    let balancer = start(&bench, "xdp-mode = \"native\"", &[Service::new("tcp", "round-robin", &[1, 1])]);
    let watch = Watch::start(&bench);
    let content = pattern(100_000);
    let sent = servers[0].directory().join("sent");
    fs::write(&sent, &content).unwrap();
    let received = servers[0].directory().join("received");
    for name in ["one", "two"] {
        let url = format!("http://{VIP}/files/{name}");
        curl(&bench, &["--upload-file", sent.to_str().unwrap(), &url]);
        let stored: Vec<_> = servers.iter().filter_map(|server| fs::read(server.file(name)).ok()).collect();
        assert!(stored == [content.as_slice()], "the uploaded bytes differ");
    }
    for (server, name) in servers.iter().zip(["one", "two"]) {
        assert!(server.file(name).exists(), "not one upload to each");
        fs::write(server.file("down"), &content).unwrap();
    }
    curl(&bench, &["--output", received.to_str().unwrap(), &format!("http://{VIP}/files/down")]);
    assert!(fs::read(&received).unwrap() == content, "the downloaded bytes differ");

    watch.assert_counted(&balancer);
    let requests = watch.assert_translated();
    let longest = requests.concat().iter().map(|packet| packet.length).max();
    // Beyond one page, and so in several buffers.
    assert_eq!(longest, Some(9000), "no frame was as long as the MTU allows");
    assert!(requests.concat().iter().all(|packet| packet.protocol == TCP));
    assert_eq!(status::drops(&status::read_fresh(&balancer).unwrap()), []);
    assert_kernel_forwards_nothing(&bench);
}

/// Nothing but the service's own protocol and port is touched.
#[test]
fn a_datagram_to_the_port_of_a_tcp_service_reaches_the_host() {
    let bench = Plan::backends(1).build().unwrap();
    let address = SocketAddr::from((BALANCER_CLIENT_SIDE, VIP_PORT));
    let balancer = start(&bench, "", &[Service { address, ..Service::new("tcp", "least-packets", &[1]) }]);
    let host = bench.balancer.run(|| Ok(UdpSocket::bind((BALANCER_CLIENT_SIDE, VIP_PORT))?)).unwrap();
    host.set_read_timeout(Some(LIMIT)).unwrap();
    let client = client_socket(&bench, 40_000);
    client.send_to(b"for the host", (BALANCER_CLIENT_SIDE, VIP_PORT)).unwrap();
    let mut buffer = [0; 32];
    let (length, source) = host.recv_from(&mut buffer).unwrap();
    assert_eq!(buffer[..length], *b"for the host");
    assert_eq!(source, client.local_addr().unwrap());
    assert_eq!(status::traffic(&status::read_fresh(&balancer).unwrap().services[0]), [(0, 0)]);
}
