//! Clients whose replies would not come through the balancer: backends that call a service, and their neighbours. Real
//! stacks on all sides, and every frame on the backends' wire.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    collections::{HashMap, HashSet},
    fs,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket},
    sync::atomic::{AtomicU16, Ordering::Relaxed},
    time::Duration,
};

use balancer_common::{Backend, FIRST_SNAT_PORT, STAMP_SHIFT, ability, mapped};
use balancer_tests::{
    Balancer, Capture, Netns, Plan, Topology,
    capture::{Packet, total},
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    connection::connect_from,
    echo::Echo,
    eventually,
    nginx::Nginx,
    packet::{self, Path, Segment},
    program::{self, Program},
    responder::{self, Responders},
    socket::FrameSocket,
    status,
    topology::{BALANCER_BACKEND_SIDE, CLIENT, VIP, backend_address, mac},
    veth::{self, End},
};

const LIMIT: Duration = Duration::from_secs(5);
/// A client on the backends' network.
const NEIGHBOUR: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 150);
/// A router on the backends' network, and a client behind it.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 254);
const FAR_CLIENT: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 10);
/// Another virtual address.
const VIP2: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 11);

fn start(bench: &Topology, services: &[Service]) -> Balancer {
    let balancer = Balancer::start(&bench.balancer, &config::text("", services)).unwrap();
    status::wait_until_up(&balancer).unwrap();
    balancer
}

fn backend(number: u8) -> SocketAddr {
    SocketAddr::from((backend_address(number), BACKEND_PORT))
}

/// A web server on each backend, which answers with its name: b1, b2, ….
fn servers(bench: &Topology) -> Vec<Nginx> {
    let numbered = (1..).zip(&bench.backends);
    let start = |(number, netns)| Nginx::start(netns, backend(number), &format!("b{number}")).unwrap();
    numbered.map(start).collect()
}

/// A web service with backends of these weights.
fn web(weights: &[u8], more: &'static str) -> Service {
    Service { more, ..Service::new("tcp", "round-robin", weights) }
}

/// Another host on the backends' switch, whose default route is the balancer; its device is `n0`, and finishes its sums.
fn neighbour(bench: &Topology, name: &str, address: Ipv4Addr) -> Netns {
    let netns = Netns::new(name).unwrap();
    let port = format!("{name}-p");
    veth::pair(
        End { netns: &bench.switch, device: &port, mac: None },
        End { netns: &netns, device: "n0", mac: Some(mac(address)) },
        1500,
    )
    .unwrap();
    bench.switch.ip(&format!("link set {port} master br0")).unwrap();
    let lines = format!("address add {address}/24 dev n0\nroute add default via {BALANCER_BACKEND_SIDE}\n");
    netns.ip_batch(&lines).unwrap();
    veth::finish_checksums(&netns, "n0").unwrap();
    netns
}

/// Asks for a page: the name of who answered.
fn curl(netns: &Netns) -> anyhow::Result<String> {
    let always = ["--silent", "--show-error", "--fail", "--max-time", "5"];
    netns.output("curl", &[&always[..], &[&format!("http://{VIP}/name")]].concat())
}

/// The backends' wire: all that the backends send, and all that the balancer sends there.
struct Wire {
    from_backends: Vec<Capture>,
    from_balancer: Capture,
}

impl Wire {
    fn watch(bench: &Topology) -> Wire {
        let ports = (1..=bench.backends.len()).map(|number| format!("p{number}"));
        Wire {
            from_backends: ports.map(|port| Capture::start(&bench.switch, &port).unwrap()).collect(),
            from_balancer: Capture::start(&bench.switch, "lkp").unwrap(),
        }
    }

    /// Packets and bytes of each backend so far: requests to its port, and its answers, each where they were sent.
    fn traffic(&self) -> Vec<(u64, u64)> {
        let sums = self.from_backends.iter().zip(1..).map(|(sent, number)| {
            let to = self.from_balancer.packets();
            let to = total(to.iter().filter(|packet| packet.destination == backend(number)));
            let from = total(sent.packets().iter().filter(|packet| packet.source == backend(number)));
            (to.0 + from.0, to.1 + from.1)
        });
        sums.collect()
    }

    /// Ends it: what the balancer sent to the backends' ports. No packet at all had its source as its destination, and
    /// none of a service's or of a translated source had an address that it must not have.
    fn finish(self) -> Vec<Packet> {
        let to_backends = self.from_balancer.finish().unwrap();
        let others = self.from_backends.into_iter().flat_map(|capture| capture.finish().unwrap());
        for packet in others.chain(to_backends.iter().cloned()) {
            assert_ne!(packet.source.ip(), packet.destination.ip(), "{packet:?}");
        }
        to_backends.into_iter().filter(|packet| packet.destination.port() == BACKEND_PORT).collect()
    }
}

fn is_given(source: SocketAddr) -> bool {
    source.ip() == BALANCER_BACKEND_SIDE && source.port() >= FIRST_SNAT_PORT
}

/// How often each answered.
fn census(answers: impl Iterator<Item = String>) -> Vec<(String, usize)> {
    let mut counts: HashMap<String, usize> = HashMap::new();
    for answer in answers {
        *counts.entry(answer).or_default() += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort();
    counts
}

/// A backend calls its own service thirty times, with others and alone.
fn hairpin(weights: &[u8]) {
    let bench = Plan::backends(weights.len() as u8).build().unwrap();
    let _servers = servers(&bench);
    let balancer = start(&bench, &[web(weights, "")]);
    let wire = Wire::watch(&bench);
    let share = 30 / weights.len();
    let answers = census((0..30).map(|_| curl(bench.backend(1).unwrap()).unwrap()));
    let expected: Vec<_> = (1..=weights.len()).map(|number| (format!("b{number}"), share)).collect();
    assert_eq!(answers, expected);

    // Each connection was counted on the backend that was chosen, and on no other, and each packet once.
    let ended = status::wait(&balancer, "no connection left", |status| {
        status::each(status, |backend| backend.active).iter().all(|active| *active == 0)
    });
    assert_eq!(status::drops(&ended.unwrap()), []);
    let counted = || status::traffic(&status::read_fresh(&balancer).unwrap().services[0]);
    let agreed = eventually(LIMIT, "the counters equal to what was on the wire", || {
        (counted() == wire.traffic()).then_some(())
    });
    assert!(agreed.is_ok(), "counted {:?}, captured {:?}", counted(), wire.traffic());
    let requests = wire.finish();
    let opened: Vec<_> = requests.iter().filter(|packet| packet.flags == Segment::SYN).collect();
    assert_eq!(opened.len(), 30);
    for number in 1..=weights.len() as u8 {
        let of = opened.iter().filter(|packet| packet.destination == backend(number));
        assert_eq!(of.count(), share);
    }
    assert!(requests.iter().all(|packet| is_given(packet.source)), "{requests:?}");
}

#[test]
fn a_backend_reaches_the_service_through_others() {
    hairpin(&[1, 1, 1]);
}

#[test]
fn a_backend_reaches_the_service_through_itself() {
    hairpin(&[1]);
}

/// The same over UDP, a datagram each way, whose sender is the service.
#[test]
fn a_backend_is_answered_by_the_service_over_udp() {
    let bench = Plan::default().build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    let balancer = start(&bench, &[responder::service(&bench)]);
    let wire = Wire::watch(&bench);
    let caller = bench.backend(1).unwrap();
    for turn in 0..9 {
        let socket = caller.run(|| Ok(UdpSocket::bind((backend_address(1), 0))?)).unwrap();
        socket.connect((VIP, VIP_PORT)).unwrap();
        assert_eq!(responder::ask(&socket).unwrap(), turn % 3 + 1);
    }
    let status = status::read_fresh(&balancer).unwrap();
    assert_eq!(status::each(&status, |backend| (backend.active, backend.packets)), [(3, 6); 3]);
    assert!(wire.finish().iter().all(|packet| is_given(packet.source)));
}

#[test]
fn a_neighbour_of_the_backends_is_answered_through_the_balancer() {
    let bench = Plan::default().build().unwrap();
    let _servers = servers(&bench);
    let _balancer = start(&bench, &[web(&[1, 1, 1], "")]);
    let neighbour = neighbour(&bench, "neighbour", NEIGHBOUR);
    let wire = Wire::watch(&bench);
    let arrived = Capture::start(&neighbour, "n0").unwrap();
    let answers = census((0..20).map(|_| curl(&neighbour).unwrap()));
    assert_eq!(answers.iter().map(|(_, count)| count).sum::<usize>(), 20);
    assert_eq!(answers.len(), 3, "{answers:?}");
    let requests = wire.finish();
    assert_eq!(requests.iter().filter(|packet| packet.flags == Segment::SYN).count(), 20);
    assert!(requests.iter().all(|packet| is_given(packet.source)), "{requests:?}");
    let replies = arrived.finish().unwrap();
    let to_it = replies.iter().filter(|packet| packet.destination.ip() == NEIGHBOUR);
    assert!(to_it.clone().count() > 60);
    for packet in to_it {
        assert_eq!(packet.source, SocketAddr::from((VIP, VIP_PORT)), "{packet:?}");
        assert_eq!(packet.macs[1], mac(BALANCER_BACKEND_SIDE), "{packet:?}");
    }
}

/// Also where the gateway is on the backends' network, and everything crosses one interface of the balancer.
#[test]
fn a_client_behind_a_gateway_keeps_its_address() {
    let bench = Plan::backends(2).build().unwrap();
    let _servers = servers(&bench);
    let _balancer = start(&bench, &[web(&[1, 1], "")]);
    let gateway = neighbour(&bench, "gateway", GATEWAY);
    let far = Netns::new("far client").unwrap();
    let (inside, outside) =
        (End { netns: &gateway, device: "g1", mac: None }, End { netns: &far, device: "f0", mac: None });
    veth::pair(inside, outside, 1500).unwrap();
    gateway.set_sysctl("net/ipv4/ip_forward", "1").unwrap();
    gateway.ip("address add 10.9.0.1/24 dev g1").unwrap();
    far.ip_batch(&format!("address add {FAR_CLIENT}/24 dev f0\nroute add default via 10.9.0.1\n")).unwrap();
    veth::finish_checksums(&far, "f0").unwrap();

    for (client, address) in [(&bench.client, CLIENT), (&far, FAR_CLIENT)] {
        let wire = Wire::watch(&bench);
        let answers = census((0..6).map(|_| curl(client).unwrap()));
        assert_eq!(answers, [("b1".to_owned(), 3), ("b2".to_owned(), 3)]);
        let requests = wire.finish();
        assert!(requests.iter().filter(|packet| packet.flags == Segment::SYN).count() == 6);
        assert!(requests.iter().all(|packet| packet.source.ip() == address), "{requests:?}");
    }
}

/// Two services, each at an address of its own, that one backend serves.
fn two_services(protocol: &'static str, more: &'static str) -> [Service; 2] {
    [VIP, VIP2].map(|vip| Service {
        name: format!("at-{vip}"),
        address: SocketAddr::from((vip, VIP_PORT)),
        more,
        ..Service::new(protocol, "round-robin", &[1])
    })
}

#[test]
fn one_client_port_reaches_one_backend_through_two_services_at_once() {
    let bench = Plan::backends(1).build().unwrap();
    let _echoes =
        [Echo::tcp(bench.backend(1).unwrap(), backend(1)), Echo::udp(bench.backend(1).unwrap(), backend(1))]
            .map(Result::unwrap);
    let udp =
        two_services("udp", "").map(|service| Service { name: format!("udp-{}", service.name), ..service });
    let balancer = start(&bench, &[two_services("tcp", ""), udp].concat());
    let wire = Wire::watch(&bench);
    let from = SocketAddrV4::new(CLIENT, 40_500);
    let mut streams =
        [VIP, VIP2].map(|vip| connect_from(&bench.client, from, SocketAddrV4::new(vip, VIP_PORT)).unwrap().0);
    for round in 0..5 {
        // Both have sent before either is read.
        for (number, stream) in streams.iter_mut().enumerate() {
            stream.write_all(format!("{round} to {number}").as_bytes()).unwrap();
        }
        for (number, stream) in streams.iter_mut().enumerate() {
            let mut answer = [0; 6];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!(answer, *format!("{round} to {number}").as_bytes());
        }
    }
    let socket = bench.client.run(|| Ok(UdpSocket::bind(from)?)).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    for vip in [VIP, VIP2, VIP, VIP2].map(|vip| SocketAddr::from((vip, VIP_PORT))) {
        socket.send_to(vip.to_string().as_bytes(), vip).unwrap();
        let mut answer = [0; 64];
        let (length, sender) = socket.recv_from(&mut answer).unwrap();
        assert_eq!((sender, &answer[..length]), (vip, vip.to_string().as_bytes()));
    }
    let status = status::read_fresh(&balancer).unwrap();
    assert_eq!(status::each(&status, |backend| backend.active), [1; 4]);
    assert_eq!(status::drops(&status), []);
    let requests = wire.finish();
    for protocol in [balancer_common::TCP, balancer_common::UDP] {
        let mut sources: Vec<_> = requests
            .iter()
            .filter(|packet| packet.protocol == protocol)
            .map(|packet| packet.source)
            .collect();
        sources.sort_unstable();
        sources.dedup();
        assert!(
            sources.len() == 2 && sources[0] == SocketAddr::from(from) && is_given(sources[1]),
            "{sources:?}"
        );
    }
}

#[test]
fn every_client_is_translated_where_the_service_says_always() {
    let bench = Plan::backends(2).build().unwrap();
    let _servers = servers(&bench);
    let _balancer = start(&bench, &[web(&[1, 1], "snat = \"always\"")]);
    let wire = Wire::watch(&bench);
    assert_eq!(census((0..6).map(|_| curl(&bench.client).unwrap())).len(), 2);
    let requests = wire.finish();
    assert!(requests.len() > 20 && requests.iter().all(|packet| is_given(packet.source)), "{requests:?}");
}

/// And what then is not to be had: an answer to a neighbour, to oneself, and two of one port.
#[test]
fn nobody_is_translated_where_the_service_says_never() {
    let bench = Plan::backends(1).build().unwrap();
    let _echo = Echo::udp(bench.backend(1).unwrap(), backend(1)).unwrap();
    let never = "snat = \"never\"\nno-backend = \"drop\"";
    let balancer = start(&bench, &two_services("udp", never));
    let neighbour = neighbour(&bench, "neighbour", NEIGHBOUR);
    let wire = Wire::watch(&bench);
    let socket = |netns: &Netns, address: Ipv4Addr, port: u16| {
        let socket = netns.run(|| Ok(UdpSocket::bind((address, port))?)).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket
    };
    let mut answer = [0; 8];
    let near = socket(&neighbour, NEIGHBOUR, 40_600);
    near.send_to(b"near", (VIP, VIP_PORT)).unwrap();
    // Straight from the backend, which it did not ask.
    assert_eq!(near.recv_from(&mut answer).unwrap(), (4, backend(1)));
    let far = socket(&bench.client, CLIENT, 40_500);
    far.send_to(b"far", (VIP, VIP_PORT)).unwrap();
    assert_eq!(far.recv_from(&mut answer).unwrap(), (3, SocketAddr::from((VIP, VIP_PORT))));
    let own = socket(bench.backend(1).unwrap(), backend_address(1), 40_700);
    for (socket, vip) in [(&far, VIP2), (&own, VIP)] {
        socket.send_to(b"refused", (vip, VIP_PORT)).unwrap();
    }
    status::wait(&balancer, "two refusals", |status| status::drops(status) == [("reply-collision", 2)])
        .unwrap();
    let sources: Vec<_> = wire.finish().iter().map(|packet| packet.source).collect();
    assert_eq!(sources, [SocketAddr::from((NEIGHBOUR, 40_600)), SocketAddr::from((CLIENT, 40_500))]);
}

/// Where a datagram of a new flow came from, as the backend saw it.
fn seen_as(wire: &Capture, netns: &Netns, address: Ipv4Addr) -> SocketAddr {
    // Each flow's datagrams are told from those of others by their length.
    static LENGTH: AtomicU16 = AtomicU16::new(1);
    let length = LENGTH.fetch_add(1, Relaxed);
    let socket = netns.run(|| Ok(UdpSocket::bind((address, 0))?)).unwrap();
    // Again and again: while the network changes, the backend can't be reached for a moment.
    let arrived = || {
        drop(socket.send_to(&vec![b'?'; length.into()], (VIP, VIP_PORT)));
        let is_it = |packet: &&Packet| packet.destination == backend(1) && packet.length == 28 + length;
        wire.packets().iter().find(is_it).cloned()
    };
    eventually(LIMIT, "the datagram at the backend", arrived).unwrap().source
}

/// Who is a neighbour follows from the balancer's addresses and routes as they are now.
#[test]
fn a_changed_network_changes_who_is_translated() {
    let bench = Plan::backends(1).build().unwrap();
    let _echo = Echo::udp(bench.backend(1).unwrap(), backend(1)).unwrap();
    let _balancer = start(&bench, &[Service::new("udp", "round-robin", &[1])]);
    let neighbour = neighbour(&bench, "neighbour", NEIGHBOUR);
    let wire = Capture::start(&bench.switch, "lkp").unwrap();
    let seen = || seen_as(&wire, &neighbour, NEIGHBOUR);
    let lk =
        |verb: &str, address: &str| bench.balancer.ip(&format!("address {verb} {address} dev lk")).unwrap();
    assert!(is_given(seen()));

    // A narrower network, in which the neighbour is none.
    lk("add", "10.0.2.1/25");
    lk("del", "10.0.2.1/24");
    eventually(LIMIT, "the neighbour with its own address", || (seen().ip() == NEIGHBOUR).then_some(()))
        .unwrap();
    // As wide as before, and with another address to give.
    lk("add", "10.0.2.2/24");
    eventually(LIMIT, "the neighbour translated again", || is_given(seen()).then_some(())).unwrap();
    bench.balancer.ip("route add 10.0.2.11/32 dev lk src 10.0.2.2").unwrap();
    let second = Ipv4Addr::new(10, 0, 2, 2);
    eventually(LIMIT, "the other address", || (seen().ip() == second).then_some(())).unwrap();
    // The backend behind a gateway has no neighbours that are known here; itself it is, wherever it is.
    bench.balancer.ip("route replace 10.0.2.11/32 via 10.0.2.12 dev lk").unwrap();
    bench
        .balancer
        .ip(&format!("neigh replace 10.0.2.12 lladdr {} dev lk", veth::mac_text(mac(backend_address(1)))))
        .unwrap();
    eventually(LIMIT, "the neighbour with its own address", || (seen().ip() == NEIGHBOUR).then_some(()))
        .unwrap();
    assert!(seen_as(&wire, bench.backend(1).unwrap(), backend_address(1)).port() >= FIRST_SNAT_PORT);
}

/// A line of the kernel's own counts in the balancer's namespace.
fn kernel_count(bench: &Topology, group: &str, name: &str) -> u64 {
    let text = bench.balancer.run(|| Ok(fs::read_to_string("/proc/thread-self/net/snmp")?)).unwrap();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(group)?.strip_prefix(": "));
    let (names, values) = (lines.next().unwrap().split(' '), lines.next().unwrap().split(' '));
    names.zip(values).find(|(other, _)| *other == name).unwrap().1.parse().unwrap()
}

/// What comes for a given port and belongs to no flow: the balancer's kernel, which knows nothing of it, stays out.
#[test]
fn a_late_reply_is_answered_by_the_balancer_and_not_by_its_host() {
    let bench = Plan::backends(1).build().unwrap();
    let balancer = start(&bench, &[web(&[1], ""), Service::new("udp", "round-robin", &[1])]);
    let wire = FrameSocket::open(bench.backend(1).unwrap(), "e0").unwrap();
    let send = |port: u16, is_tcp: bool| {
        let path = Path::new((backend_address(1), BACKEND_PORT), (BALANCER_BACKEND_SIDE, port));
        let segment = Segment { flags: Segment::ACK, sequence: 7, acknowledgement: 1_000 };
        let late = if is_tcp { path.tcp(segment, b"late") } else { path.udp(b"late") };
        wire.send(&packet::ethernet(mac(BALANCER_BACKEND_SIDE), mac(backend_address(1)), &late.unwrap()))
            .unwrap();
    };
    let answer = |protocol: i32| {
        wire.receive_packet(LIMIT, |packet| i32::from(packet[9]) == protocol).unwrap().expect("an answer")
    };
    let orphans = |count: u64| {
        let what = format!("{count} orphans");
        status::wait(&balancer, &what, |status| status.drops["orphan-reply"] == count).unwrap();
    };
    send(FIRST_SNAT_PORT, true);
    let reset = answer(libc::IPPROTO_TCP);
    // From the port that was answered, with the number that the segment asked for.
    assert_eq!(packet::to_hex(&reset[12..28]), "0a0002010a00020bee481f90000003e8");
    assert_eq!(reset[33], Segment::RST);
    orphans(1);
    send(u16::MAX, false);
    orphans(2);
    assert_eq!(
        (kernel_count(&bench, "Tcp", "OutRsts"), kernel_count(&bench, "Icmp", "OutDestUnreachs")),
        (0, 0)
    );
    // Its own ports are its own.
    send(FIRST_SNAT_PORT - 1, true);
    assert_eq!(answer(libc::IPPROTO_TCP)[33], Segment::RST);
    send(FIRST_SNAT_PORT - 1, false);
    answer(libc::IPPROTO_ICMP);
    assert_eq!(
        (kernel_count(&bench, "Tcp", "OutRsts"), kernel_count(&bench, "Icmp", "OutDestUnreachs")),
        (1, 1)
    );
    assert_eq!(status::drops(&status::read_fresh(&balancer).unwrap()), [("orphan-reply", 2)]);
}

/// The operator is told when the host's own connections may come from the same ports.
#[test]
fn ports_that_the_host_takes_for_itself_are_warned_of() {
    let bench = Plan::backends(1).build().unwrap();
    let warned = |more: &'static str| {
        let balancer = start(&bench, &[web(&[1], more)]);
        balancer.log().lines().filter(|line| line.contains("net.ipv4.ip_local_port_range")).count()
    };
    assert_eq!(warned(""), 0);
    bench.balancer.set_sysctl("net/ipv4/ip_local_port_range", "32768 65535").unwrap();
    assert_eq!([warned(""), warned("snat = \"never\"")], [1, 0]);
    bench.balancer.set_sysctl("net/ipv4/ip_local_reserved_ports", "61000-65535").unwrap();
    assert_eq!(warned(""), 0);
}

/// The port that the program gives to a neighbour's connection, which ends at once.
fn opened_and_reset(program: &Program, number: u32) -> u16 {
    let client = Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 0, 2, 50)) + number / 10_000);
    let path = Path::new((client, 20_000 + (number % 10_000) as u16), (program::VIP, program::VIP_PORT));
    let ports = [Segment::SYN, Segment::RST].map(|flags| {
        let (verdict, frame) = program.from_client(&path.tcp(Segment::flags(flags), &[]).unwrap()).unwrap();
        assert_eq!(verdict, program::verdict::REDIRECT);
        u16::from_be_bytes(frame[34..36].try_into().unwrap())
    });
    assert_eq!(ports[0], ports[1]);
    ports[0]
}

/// The controller's walk over the flow table frees what is over, but no port before it has rested for a minute.
#[test]
fn ports_rest_past_the_controllers_walk() {
    let mut program = Program::with_flows(1, 65_536).unwrap();
    let address = mapped(program::backend_address(0).octets());
    let backend = Backend {
        address,
        port: program::BACKEND_PORT.to_be_bytes(),
        snat_address: mapped(BALANCER_BACKEND_SIDE.octets()),
        snat_prefix: 96 + 24,
        snat_ports: [FIRST_SNAT_PORT, u16::MAX],
        abilities: ability::SERVE | ability::TAKE,
        ..Backend::default()
    };
    program.datapath.set_backend(0, &backend).unwrap();
    let given: HashSet<u16> = (0..1_000).map(|number| opened_and_reset(&program, number)).collect();
    assert_eq!(given.len(), 1_000, "no port twice");
    let mut clients = 10_000..;
    let mut again = |program: &Program| {
        let next = clients.by_ref().take(100).map(|number| opened_and_reset(program, number));
        next.filter(|port| given.contains(port)).count()
    };
    let now = || {
        let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).unwrap();
        (Duration::from(time).as_nanos() >> STAMP_SHIFT) as u32
    };
    let started = now();
    let seconds = |seconds: u64| (Duration::from_secs(seconds).as_nanos() >> STAMP_SHIFT) as u32;
    // Two walks each, since an entry may come before its twin. Closed connections are forgotten after thirty seconds.
    for (age, is_free) in [(0, false), (33, false), (50, false), (62, true)] {
        for _ in 0..2 {
            let buckets = program.datapath.flows().bucket_count();
            program.datapath.flows().sweep(0, buckets, now() + seconds(age), |_| false);
        }
        let took = now().wrapping_sub(started);
        assert!(took < seconds(9), "too slow to tell: {took} stamps");
        let again = again(&program);
        assert_eq!(again > 0, is_free, "{again} of 100 ports were given again after {age} s");
    }
}
