//! Services that keep no flows: real sockets, forged frames, routes that come and go.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket},
    time::{Duration, Instant},
};

use balancer_tests::{
    Balancer, Capture, Netns, Plan, Topology,
    capture::Packet,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    eventually,
    packet::{self, Path, to_hex},
    responder::{Responders, ask_with, ask_within},
    socket::FrameSocket,
    status::{self, each},
    topology::{BALANCER_BACKEND_SIDE, BALANCER_CLIENT_SIDE, CLIENT, Family, VIP, backend_address, mac},
    veth::{self, End},
};
use balancer_user::api::Status;

const LIMIT: Duration = Duration::from_secs(20);
const ONE_PACKET: &str = "one-packet = true";
const CLIENT_PORT: u16 = 40_000;

fn backend(number: u8) -> SocketAddrV4 {
    SocketAddrV4::new(backend_address(number), BACKEND_PORT)
}

fn service(method: &'static str, weights: &[u8], more: &'static str) -> Service {
    service_of(Family::Ipv4, method, weights, more)
}

fn service_of(family: Family, method: &'static str, weights: &[u8], more: &'static str) -> Service {
    Service { more, ..Service::of(family, "udp", method, weights) }
}

/// A bench whose kernel says where answers go.
fn bench(backends: u8) -> Topology {
    Plan { forwarding: true, ipv6: true, ..Plan::backends(backends) }.build().unwrap()
}

fn start(bench: &Topology, services: &[Service]) -> Balancer {
    let balancer = Balancer::start(&bench.balancer, &config::text("", services)).unwrap();
    status::wait_until_up(&balancer).unwrap();
    balancer
}

/// A UDP socket that talks to the service of its family alone.
fn socket(netns: &Netns, address: impl Into<IpAddr>, port: u16) -> UdpSocket {
    let address = address.into();
    let socket = netns.run(|| Ok(UdpSocket::bind((address, port))?)).unwrap();
    let family = if address.is_ipv4() { Family::Ipv4 } else { Family::Ipv6 };
    socket.connect((family.vip(), VIP_PORT)).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    socket
}

/// Asks once; who answered. The first answers to a client may be lost, while its MAC is asked for.
fn ask(socket: &UdpSocket) -> u8 {
    ask_with(socket, b"who are you?").unwrap()
}

fn ask_until_answered(socket: &UdpSocket) -> u8 {
    let answered = eventually(LIMIT, "an answer", || {
        ask_within(socket, b"are you there?", Duration::from_millis(100)).ok()
    });
    answered.unwrap()
}

/// Has the balancer's kernel know the client, as after a first answer.
fn introduce(bench: &Topology) {
    for family in Family::ALL {
        let (client, mac) = (family.client(), veth::mac_text(mac(CLIENT)));
        bench.balancer.ip(&format!("neigh replace {client} lladdr {mac} dev lc nud reachable")).unwrap();
    }
}

fn drops(balancer: &Balancer) -> Vec<(String, u64)> {
    let status = status::read_fresh(balancer).unwrap();
    status::drops(&status).iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
}

/// One socket's datagrams go to all backends in turn, every answer is from the service, and packets and bytes count exactly.
#[test]
fn one_sockets_datagrams_are_spread_and_answered() {
    Family::ALL.into_iter().for_each(are_spread_and_answered);
}

fn are_spread_and_answered(family: Family) {
    let bench = bench(3);
    let _responders = Responders::start_of(family, &bench).unwrap();
    let balancer = start(&bench, &[service_of(family, "round-robin", &[1, 1, 1], ONE_PACKET)]);
    introduce(&bench);
    let client = Capture::start(&bench.client, "c0").unwrap();
    let socket = socket(&bench.client, family.client(), CLIENT_PORT);
    let answers: Vec<u8> = (0..300).map(|_| ask(&socket)).collect();
    assert_eq!(answers, [1, 2, 3].repeat(100));
    let status = status::read_fresh(&balancer).unwrap();
    let counted = each(&status, |backend| (backend.active, backend.packets, backend.bytes));
    // 12 bytes to it and 13 back, with the headers.
    let headers = if family == Family::Ipv4 { 28 } else { 48 };
    assert_eq!(counted, [(0, 200, 100 * (12 + 13 + 2 * headers)); 3]);
    let now = status.flows.now;
    assert_eq!(now.half_open + now.established + now.closing, 0);
    assert_eq!(status::drops(&status), []);
    let arrived = client.finish().unwrap();
    assert_eq!(arrived.len(), 300);
    for packet in arrived {
        assert_eq!((packet.source, packet.ttl), (SocketAddr::new(family.vip(), VIP_PORT), 63));
        assert_eq!(packet.macs, [mac(CLIENT), mac(BALANCER_CLIENT_SIDE)]);
    }
    let flows = balancer.call(&["flows", "count"]).unwrap();
    assert!(flows.contains('0') && !flows.contains("300"), "{flows}");
}

/// What no longer takes datagrams gets none from the next switch of the ring on, and without any backend they are refused.
#[test]
fn the_next_datagram_leaves_a_backend_that_is_gone() {
    let bench = bench(2);
    let _responders = Responders::start(&bench).unwrap();
    let balancer = start(&bench, &[service("round-robin", &[1, 1], ONE_PACKET)]);
    introduce(&bench);
    let socket = socket(&bench.client, CLIENT, CLIENT_PORT);
    assert_eq!([ask(&socket), ask(&socket)], [1, 2]);
    let with = |numbers: &[u8]| {
        let backends = numbers.iter().map(|number| (backend(*number).into(), 1)).collect();
        config::text("", &[Service { backends, ..service("round-robin", &[], ONE_PACKET) }])
    };
    let shares = |wanted: &[bool]| {
        status::wait(&balancer, "the shares", |status| {
            each(status, |backend| backend.share > 0.0).iter().filter(|has| **has).count()
                == wanted.iter().filter(|has| **has).count()
        })
        .unwrap();
    };
    balancer.reload(&with(&[2])).unwrap();
    shares(&[true]);
    status::wait(&balancer, "only the second", |status| {
        each(status, |backend| backend.weight).iter().sum::<u8>() == 1
    })
    .unwrap();
    assert_eq!([(); 6].map(|()| ask(&socket)), [2; 6]);
    balancer.reload(&with(&[])).unwrap();
    status::wait(&balancer, "none", |status| {
        each(status, |backend| backend.share).iter().all(|share| *share == 0.0)
    })
    .unwrap();
    socket.send(b"anybody?").unwrap();
    let refused = eventually(LIMIT, "an ICMP error", || {
        socket.recv(&mut [0; 8]).err().filter(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
    });
    refused.unwrap();
    balancer.reload(&with(&[1])).unwrap();
    let back = Instant::now();
    assert_eq!(ask_until_answered(&socket), 1);
    assert!(back.elapsed() < Duration::from_secs(1), "{:?}", back.elapsed());
}

/// A client's backend by its address, without a flow.
#[test]
fn a_hash_keeps_a_client_where_it_is() {
    let bench = bench(3);
    let _responders = Responders::start(&bench).unwrap();
    let balancer = start(&bench, &[service("source-hash", &[1, 1, 1], ONE_PACKET)]);
    introduce(&bench);
    let answers: Vec<u8> =
        (0..30).map(|port| ask(&socket(&bench.client, CLIENT, CLIENT_PORT + port))).collect();
    assert!(answers.iter().all(|number| *number == answers[0]), "{answers:?}");
    assert_eq!(drops(&balancer), []);
}

/// The kernel does not know the client's MAC: the answer is refused by name, the MAC is asked for, and the next one arrives.
#[test]
fn a_client_that_the_kernel_does_not_know_is_found() {
    Family::ALL.into_iter().for_each(an_unknown_client_is_found);
}

fn an_unknown_client_is_found(family: Family) {
    let bench = bench(1);
    let _responders = Responders::start_of(family, &bench).unwrap();
    let balancer = start(&bench, &[service_of(family, "round-robin", &[1], ONE_PACKET)]);
    // The client need not ask, by which the balancer's kernel would learn of it.
    let (gateway, own) = (family.balancer_client_side(), veth::mac_text(mac(BALANCER_CLIENT_SIDE)));
    bench.client.ip(&format!("neigh replace {gateway} lladdr {own} dev c0 nud permanent")).unwrap();
    let socket = socket(&bench.client, family.client(), CLIENT_PORT);
    for _ in 0..2 {
        bench.balancer.ip("neigh flush dev lc").unwrap();
        let before = status::read_fresh(&balancer).unwrap().drops["no-neighbour"];
        let start = Instant::now();
        assert_eq!(ask_until_answered(&socket), 1);
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        let refused = status::read_fresh(&balancer).unwrap().drops["no-neighbour"] - before;
        assert!((1..=20).contains(&refused), "{refused}");
    }
    let names: Vec<String> = drops(&balancer).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["no-neighbour"]);
}

/// A client behind a router is answered through the router, whoever's MAC its datagram came from; with its route, it goes.
#[test]
fn answers_follow_the_kernels_routes() {
    let bench = bench(1);
    let _responders = Responders::start(&bench).unwrap();
    let balancer = start(&bench, &[service("round-robin", &[1], ONE_PACKET)]);
    let far = Ipv4Addr::new(203, 0, 113, 7);
    let wire = FrameSocket::open(&bench.client, "c0").unwrap();
    let send = |from: [u8; 6]| {
        let packet = Path::new((far, 4_000), (VIP, VIP_PORT)).udp(b"ask").unwrap();
        wire.send(&packet::ethernet(mac(BALANCER_CLIENT_SIDE), from, &packet)).unwrap();
    };
    // No route: refused, not sent where the datagram came from.
    send(mac(CLIENT));
    let refused = |wanted: u64| {
        status::wait(&balancer, "a refusal", |status| status.drops["no-egress"] == wanted).unwrap();
    };
    refused(1);
    introduce(&bench);
    bench.balancer.ip(&format!("route add 203.0.113.0/24 via {CLIENT}")).unwrap();
    // A forged source MAC has nobody's answers sent there.
    send([2, 0, 0, 0, 0, 99]);
    let answer = wire
        .receive(LIMIT, |frame| {
            (frame.get(26..34) == Some(&[VIP.octets(), far.octets()].concat())).then(|| frame.to_vec())
        })
        .unwrap()
        .expect("no answer");
    assert_eq!(to_hex(&answer[..12]), to_hex(&[mac(CLIENT), mac(BALANCER_CLIENT_SIDE)].concat()));
    bench.balancer.ip("route replace blackhole 203.0.113.0/24").unwrap();
    send(mac(CLIENT));
    refused(2);
    // The way leads out of an interface that the balancer is not on.
    let other = Netns::new("other").unwrap();
    veth::pair(
        End { netns: &bench.balancer, device: "lo2", mac: None },
        End { netns: &other, device: "o0", mac: None },
        1500,
    )
    .unwrap();
    bench
        .balancer
        .ip_batch(
            "address add 10.0.9.1/24 dev lo2\nneigh replace 10.0.9.2 lladdr 02:00:00:00:09:02 dev lo2 nud permanent\n\
             route del blackhole 203.0.113.0/24\nroute add 203.0.113.0/24 via 10.0.9.2\n",
        )
        .unwrap();
    send(mac(CLIENT));
    refused(3);
}

/// Where the kernel may not forward, requests go on, answers are refused by name, and the log says what to do.
#[test]
fn without_forwarding_the_log_says_what_to_do() {
    Family::ALL.into_iter().for_each(the_log_says_what_to_do);
}

fn the_log_says_what_to_do(family: Family) {
    let bench = Plan { ipv6: true, ..Plan::backends(1) }.build().unwrap();
    let _responders = Responders::start_of(family, &bench).unwrap();
    let balancer = start(&bench, &[service_of(family, "round-robin", &[1], ONE_PACKET)]);
    let log = balancer.log();
    let (name, other) = if family == Family::Ipv4 { ("ipv4", "ipv6") } else { ("ipv6", "ipv4") };
    assert!(log.contains(&format!("set net.{name}.conf.lk.forwarding to 1")), "{log}");
    assert!(!log.contains(&format!("net.{other}.")), "{log}");
    let socket = socket(&bench.client, family.client(), CLIENT_PORT);
    assert!(ask_within(&socket, b"x", Duration::from_millis(100)).is_err());
    assert_eq!(drops(&balancer), [("no-egress".to_owned(), 1)]);
    let status = status::read_fresh(&balancer).unwrap();
    let headers = if family == Family::Ipv4 { 28 } else { 48 };
    assert_eq!(each(&status, |backend| (backend.packets, backend.bytes)), [(1, headers + 1)]);
    bench.balancer.set_sysctl(&format!("net/{name}/conf/lk/forwarding"), "1").unwrap();
    introduce(&bench);
    assert_eq!(ask(&socket), 1);
}

/// A service that had flows loses them when it is to keep none, and the other way round.
#[test]
fn a_reload_changes_between_flows_and_none() {
    let bench = bench(2);
    let _responders = Responders::start(&bench).unwrap();
    let balancer = start(&bench, &[service("round-robin", &[1, 1], "")]);
    introduce(&bench);
    let socket = socket(&bench.client, CLIENT, CLIENT_PORT);
    assert_eq!([(); 3].map(|()| ask(&socket)), [1, 1, 1]);
    let reload = |more| balancer.reload(&config::text("", &[service("round-robin", &[1, 1], more)])).unwrap();
    reload(ONE_PACKET);
    eventually(LIMIT, "the flow's end", || {
        let answers = [(); 4].map(|()| ask_within(&socket, b"x", Duration::from_millis(200)).ok());
        ([Some(1), Some(2)].iter().all(|number| answers.contains(number))).then_some(())
    })
    .unwrap();
    let none = |status: &Status| {
        status.flows.now.established + status.flows.now.half_open == 0
            && each(status, |backend| backend.active) == [0, 0]
    };
    status::wait(&balancer, "no flow left", none).unwrap();
    reload("");
    // An answer that was under way then belongs to no flow.
    eventually(LIMIT, "a flow", || {
        let answers = [(); 4].map(|()| ask_within(&socket, b"x", Duration::from_millis(500)).ok());
        answers.iter().all(|number| number.is_some() && *number == answers[0]).then_some(())
    })
    .unwrap();
    status::wait(&balancer, "one flow", |status| {
        each(status, |backend| backend.active).iter().sum::<u64>() == 1
    })
    .unwrap();
}

/// A crash and a new daemon: no datagram is lost, and the answers of a backend that has left are still the service's.
#[test]
fn datagrams_go_on_over_a_crash() {
    Family::ALL.into_iter().for_each(go_on_over_a_crash);
}

fn go_on_over_a_crash(family: Family) {
    let bench = bench(2);
    let _responders = Responders::start_of(family, &bench).unwrap();
    let balancer = start(&bench, &[service_of(family, "round-robin", &[1, 1], ONE_PACKET)]);
    introduce(&bench);
    let socket = socket(&bench.client, family.client(), CLIENT_PORT);
    assert_eq!([ask(&socket), ask(&socket)], [1, 2]);
    let place = balancer.crash();
    assert_eq!([(); 4].map(|()| ask(&socket)), [1, 2, 1, 2]);
    let balancer = Balancer::start_in(place, &bench.balancer).unwrap();
    let mut answers = [(); 4].map(|()| ask(&socket));
    answers.sort_unstable();
    assert_eq!(answers, [1, 1, 2, 2]);
    let status = status::read_fresh(&balancer).unwrap();
    assert_eq!(each(&status, |backend| (backend.active, backend.packets)), [(0, 10), (0, 10)]);
    assert_eq!(status::drops(&status), []);
}

/// Frames that somebody forges, on either side: nothing leaves in the service's name that no backend has sent.
#[test]
fn nobody_else_speaks_for_the_service() {
    Family::ALL.into_iter().for_each(nobody_else_speaks);
}

fn nobody_else_speaks(family: Family) {
    let bench = bench(2);
    let balancer = start(&bench, &[service_of(family, "round-robin", &[1, 1], ONE_PACKET)]);
    introduce(&bench);
    let clients = FrameSocket::open(&bench.client, "c0").unwrap();
    let backends = FrameSocket::open(&bench.backends[0], "e0").unwrap();
    let host_address = family.balancer_backend_side();
    let (vip, victim) = ((family.vip(), VIP_PORT), (family.client(), CLIENT_PORT));
    let own = (family.backend(1), BACKEND_PORT);
    let mut wanted = 0;
    let mut refused = |socket: &FrameSocket, frame: &[u8], name: &str| {
        socket.send(frame).unwrap();
        wanted += 1;
        let status =
            status::wait(&balancer, name, |status| status.drops.values().sum::<u64>() == wanted).unwrap();
        assert!(status.drops[name] > 0, "{:?}", status.drops);
    };
    let from_clients = |packet: Vec<u8>| packet::ethernet(mac(BALANCER_CLIENT_SIDE), mac(CLIENT), &packet);
    let from_backends =
        |packet: Vec<u8>| packet::ethernet(mac(BALANCER_BACKEND_SIDE), mac(backend_address(1)), &packet);
    let udp = |from: (IpAddr, u16), to: (IpAddr, u16)| Path::new(from, to).udp(b"forged").unwrap();
    // In a backend's name from the clients' side.
    refused(&clients, &from_clients(udp(own, victim)), "orphan-reply");
    // To the service's address where nothing is served; and as a service's, or this host's.
    refused(&backends, &from_backends(udp(own, (vip.0, 9))), "orphan-reply");
    refused(&clients, &from_clients(udp(vip, vip)), "malformed");
    refused(&clients, &from_clients(udp((host_address, 7), vip)), "malformed");
    // From and to groups, nobody, and who is known on one link alone.
    let nobody = match family {
        Family::Ipv4 => ["224.0.0.5", "255.255.255.255", "0.0.0.0"],
        Family::Ipv6 => ["ff02::5", "fe80::7", "::"],
    };
    for nobody in nobody.map(|text| text.parse().unwrap()) {
        refused(&clients, &from_clients(udp((nobody, 7), vip)), "malformed");
        refused(&backends, &from_backends(udp(own, (nobody, 9))), "orphan-reply");
    }
    let mut fragment = udp(own, victim);
    if family == Family::Ipv6 {
        fragment = packet::extended(&fragment, &[(44, &[0, 0, 1, 0, 0, 0, 7])]).unwrap();
    } else {
        let sum = u16::from_be_bytes([fragment[10], fragment[11]]);
        // More fragments, in place of none at all (RFC 1624).
        assert_eq!(fragment[6..8], [0x40, 0]);
        fragment[6] = 0x20;
        let sum = u32::from(!sum) + u32::from(!0x4000_u16) + 0x2000;
        let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
        fragment[10..12].copy_from_slice(&sum.to_be_bytes());
    }
    refused(&backends, &from_backends(fragment), "fragment");
    let heard = |limit: Duration| {
        let is_from_vip = |packet: &[u8]| {
            let frame = packet::ethernet([0; 6], [0; 6], packet);
            Packet::parse(&frame).filter(|packet| packet.source.ip() == vip.0).is_some()
        };
        clients.receive_packet(limit, is_from_vip).unwrap()
    };
    assert_eq!(heard(Duration::ZERO).map(|packet| to_hex(&packet)), None);
    let status = status::read_fresh(&balancer).unwrap();
    assert_eq!(each(&status, |backend| (backend.packets, backend.active)), [(0, 0); 2]);
    // The host's own questions to a backend are answered to the host.
    let host = bench.balancer.run(|| Ok(UdpSocket::bind((host_address, 50_000))?)).unwrap();
    host.set_read_timeout(Some(LIMIT)).unwrap();
    backends.send(&from_backends(udp(own, (host_address, 50_000)))).unwrap();
    let (length, from) = host.recv_from(&mut [0; 16]).unwrap();
    assert_eq!((length, from), (6, SocketAddr::from(own)));
    // And what a backend really sends arrives.
    backends.send(&from_backends(udp(own, victim))).unwrap();
    let arrived = heard(LIMIT).unwrap();
    let arrived = Packet::parse(&packet::ethernet([0; 6], [0; 6], &arrived)).unwrap();
    assert_eq!((arrived.source, arrived.destination), (vip.into(), victim.into()));
}
