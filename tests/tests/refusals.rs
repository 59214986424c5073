//! Every reason for which the balancer refuses a packet, brought about by a real frame: counted once, under its own
//! name, and nothing arrives anywhere.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use balancer_tests::{
    Balancer, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    echo::Echo,
    packet::{self, Path, Segment, hex, to_hex},
    socket::FrameSocket,
    status,
    topology::{BALANCER_BACKEND_SIDE, BALANCER_CLIENT_SIDE, CLIENT, VIP, backend_address, mac},
};
use balancer_user::api::BackendState;

/// IP protocol number.
const ICMP: u8 = 1;
const LIMIT: Duration = Duration::from_secs(5);
/// The MTU of the balancer's device towards the backends: less than that of all others.
const SMALL_MTU: usize = 1000;
/// The UDP service whose datagrams show that all before them have been dealt with.
const MARKER_PORT: u16 = 7000;

fn backend(number: u8) -> SocketAddr {
    SocketAddr::from((backend_address(number), BACKEND_PORT))
}

/// From the client to a port of the virtual address.
fn to_vip(client_port: u16, port: u16) -> Path {
    Path::new((CLIENT, client_port), (VIP, port))
}

fn tcp(path: Path, flags: u8) -> Vec<u8> {
    path.tcp(Segment::flags(flags), &[]).unwrap()
}

/// Refuses flows without a word where no backend is.
const SILENT: &str = "no-backend = \"drop\"";

/// A balancer with services of one backend each, whose backends say nothing of their own accord.
struct Scene {
    // The balancer goes before its namespace.
    balancer: Balancer,
    client: FrameSocket,
    backends: Vec<FrameSocket>,
    drops: BTreeMap<String, u64>,
    markers: u16,
    /// Somebody must be there, or the backends answer datagrams with errors; nobody needs to read.
    _listeners: Vec<UdpSocket>,
    bench: Topology,
}

impl Scene {
    fn new(services: Vec<Service>) -> Scene {
        let bench = Plan::default().build().unwrap();
        bench.balancer.ip(&format!("link set lk mtu {SMALL_MTU}")).unwrap();
        let marker = Service {
            name: "marker".to_owned(),
            address: SocketAddr::from((VIP, MARKER_PORT)),
            ..udp_service(MARKER_PORT, &[1])
        };
        let text = config::text("", &[services, vec![marker]].concat());
        let balancer = Balancer::start(&bench.balancer, &text).unwrap();
        let drops = status::wait_until_up(&balancer).unwrap().drops;
        assert!(drops.values().all(|count| *count == 0), "{drops:?}");
        Scene {
            balancer,
            client: FrameSocket::open(&bench.client, "c0").unwrap(),
            backends: bench.backends.iter().map(|netns| FrameSocket::open(netns, "e0").unwrap()).collect(),
            drops,
            markers: 0,
            _listeners: (1..)
                .zip(&bench.backends)
                .map(|(number, netns)| netns.run(|| Ok(UdpSocket::bind(backend(number))?)).unwrap())
                .collect(),
            bench,
        }
    }

    /// Sends a packet that is forwarded: it arrives at this backend as the next and only one.
    fn forwarded(&self, packet: &[u8], number: u8) {
        self.send(packet);
        let arrived = self.next_at(number);
        assert_eq!(arrived[16..20], backend_address(number).octets(), "{}", to_hex(&arrived));
    }

    /// Sends a packet from the client that must be refused.
    fn refused(&mut self, reason: &str, what: &str, packet: &[u8]) {
        self.send(packet);
        self.assert_refused(reason, what);
    }

    /// Sends a packet from a backend that must be refused.
    fn reply_refused(&mut self, reason: &str, what: &str, number: u8, packet: &[u8]) {
        let from = mac(backend_address(number));
        let frame = packet::ethernet(mac(BALANCER_BACKEND_SIDE), from, packet);
        self.backends[usize::from(number) - 1].send(&frame).unwrap();
        self.assert_refused(reason, what);
    }

    fn send(&self, packet: &[u8]) {
        self.client.send(&packet::ethernet(mac(BALANCER_CLIENT_SIDE), mac(CLIENT), packet)).unwrap();
    }

    fn assert_refused(&mut self, reason: &str, what: &str) {
        *self.drops.get_mut(reason).unwrap() += 1;
        let counted = status::wait(&self.balancer, &format!("{what} counted as {reason}"), |status| {
            status.drops.values().sum::<u64>() == self.drops.values().sum::<u64>()
        });
        assert_eq!(counted.unwrap().drops, self.drops, "{what}");
        // What was forwarded instead would arrive before this.
        self.markers += 1;
        self.send(&to_vip(20_000 + self.markers, MARKER_PORT).udp(b"marker").unwrap());
        let arrived = self.next_at(1);
        assert_eq!(arrived[28..], *b"marker", "{what} arrived: {}", to_hex(&arrived));
        // Some senders are told, by ICMP.
        let is_told = ["ttl-exceeded", "too-big"].contains(&reason);
        for socket in self.backends.iter().chain([&self.client]) {
            let arrived =
                socket.receive_packet(Duration::ZERO, |packet| !is_told || packet[9] != ICMP).unwrap();
            assert_eq!(arrived.map(|packet| to_hex(&packet)), None, "{what}");
        }
    }

    /// The next packet that arrives at a backend.
    fn next_at(&self, number: u8) -> Vec<u8> {
        let socket = &self.backends[usize::from(number) - 1];
        socket.receive_packet(LIMIT, |packet| packet[9] != ICMP).unwrap().expect("nothing arrived")
    }

    fn wait_for_state(&self, service: &str, state: BackendState) {
        status::wait(&self.balancer, &format!("{service} {state}"), |status| {
            status::service(status, service).is_ok_and(|service| service.backends[0].state == state)
        })
        .unwrap();
    }
}

/// A UDP service at this port, called `udp-PORT`, with backends 1, 2, … of these weights.
fn udp_service(port: u16, weights: &[u8]) -> Service {
    let address = SocketAddr::from((VIP, port));
    Service {
        name: format!("udp-{port}"),
        address,
        more: SILENT,
        ..Service::new("udp", "round-robin", weights)
    }
}

/// The same with this backend alone.
fn udp_service_of(port: u16, number: u8) -> Service {
    Service { backends: vec![(backend(number), 1)], ..udp_service(port, &[]) }
}

#[test]
fn what_no_flow_could_carry_is_refused_by_name() {
    let silent = Service { more: "unknown-flow = \"drop\"", ..Service::new("tcp", "round-robin", &[1]) };
    let mut scene = Scene::new(vec![silent, Service::new("udp", "round-robin", &[1])]);
    for (what, packet) in [
        ("12 bytes of TCP", "450000201234000040069b900a00010ac000020a9c4800500000000100000000"),
        ("UDP length 4", "4500001c1234000040119b890a00010ac000020a9c47005000040000"),
        (
            "total length 1500 in 54 bytes",
            "450005dc12340000400695d40a00010ac000020a9c49005000000001000000005002faf04b430000",
        ),
        (
            "data offset 15 in 20 bytes",
            "450000281234000040069b880a00010ac000020a9c4b00500000000100000000f002faf0ab400000",
        ),
    ] {
        scene.refused("malformed", what, &hex(packet).unwrap());
    }
    let syn_fin = tcp(to_vip(40_000, VIP_PORT), Segment::SYN | Segment::FIN);
    scene.refused("malformed", "SYN with FIN", &syn_fin);

    let rest = [hex("45000224beef00b94011ec0c0a00010ac000020a9c440050").unwrap(), vec![0; 524]];
    scene.refused("fragment", "a later fragment", &rest.concat());
    let from_backend = hex("45000018beef00b94011a4180a00020b0a00010a00000000").unwrap();
    scene.reply_refused("fragment", "a backend's later fragment", 1, &from_backend);

    for ttl in [0, 1] {
        let path = Path { ttl, ..to_vip(40_001, VIP_PORT) };
        scene.refused("ttl-exceeded", "a datagram at its end", &path.udp(b"x").unwrap());
        scene.refused("ttl-exceeded", "a SYN at its end", &tcp(path, Segment::SYN));
    }
    for (what, flags) in [
        ("ACK", Segment::ACK),
        ("FIN-ACK", Segment::FIN | Segment::ACK),
        ("RST", Segment::RST),
        ("SYN-ACK", Segment::SYN | Segment::ACK),
    ] {
        scene.refused("unknown-flow", what, &tcp(to_vip(40_002, VIP_PORT), flags));
    }
    // None of them opened a flow.
    let status = status::read_fresh(&scene.balancer).unwrap();
    for service in ["tcp", "udp"] {
        let service = status::service(&status, service).unwrap();
        assert_eq!((service.backends[0].active, service.backends[0].packets), (0, 0));
    }
    // A flow's own packets are refused as others are, and the flow goes on.
    let path = to_vip(40_003, VIP_PORT);
    let reply = |ttl| Path { ttl, ..Path::new((backend(1).ip(), BACKEND_PORT), (CLIENT, 40_003)) };
    scene.forwarded(&path.udp(b"x").unwrap(), 1);
    scene.refused(
        "ttl-exceeded",
        "a flow's datagram at its end",
        &Path { ttl: 1, ..path }.udp(b"x").unwrap(),
    );
    scene.reply_refused("ttl-exceeded", "a reply at its end", 1, &reply(1).udp(b"x").unwrap());
    scene.forwarded(&Path { ttl: 2, ..path }.udp(b"x").unwrap(), 1);
    let status = status::read_fresh(&scene.balancer).unwrap();
    let udp = &status::service(&status, "udp").unwrap().backends[0];
    assert_eq!((udp.active, udp.packets, udp.bytes), (1, 2, 2 * 29));
}

#[test]
fn a_flow_without_a_backend_is_refused_by_name() {
    let mut scene = Scene::new(vec![udp_service(81, &[]), udp_service(82, &[0, 0]), udp_service_of(83, 1)]);
    scene.refused("no-backend", "a service without backends", &to_vip(40_000, 81).udp(b"x").unwrap());
    scene.refused("no-backend", "backends without weight", &to_vip(40_000, 82).udp(b"x").unwrap());
    scene.forwarded(&to_vip(40_000, 83).udp(b"x").unwrap(), 1);
}

/// An open flow whose backend can't be reached any more, in each way; and new flows then find no backend.
#[test]
fn a_flow_whose_way_is_gone_is_refused_by_name() {
    let mut scene = Scene::new(vec![udp_service_of(83, 3), udp_service_of(84, 2)]);
    let (to_third, to_second) = (to_vip(40_000, 83), to_vip(40_000, 84));
    scene.forwarded(&to_third.udp(b"x").unwrap(), 3);
    scene.forwarded(&to_second.udp(b"x").unwrap(), 2);

    // Nobody answers for its address any more.
    let (address, netns) = (backend_address(3), &scene.bench.backends[2]);
    netns.ip(&format!("address del {address}/24 dev e0")).unwrap();
    scene.bench.balancer.ip(&format!("neigh del {address} dev lk")).unwrap();
    scene.wait_for_state("udp-83", BackendState::Unreachable);
    scene.refused("no-neighbour", "a flow of a backend that is gone", &to_third.udp(b"x").unwrap());
    scene.refused("no-backend", "a new flow to it", &to_vip(40_001, 83).udp(b"x").unwrap());

    // The way to it leads out of a device that the balancer is not on.
    let address = backend_address(2);
    scene
        .bench
        .balancer
        .ip_batch(&format!(
            "link add other type veth peer other-end\nlink set other up\nlink set other-end up\n\
             address add 10.0.3.1/24 dev other\nroute add {address}/32 via 10.0.3.2\n"
        ))
        .unwrap();
    scene.wait_for_state("udp-84", BackendState::Unreachable);
    scene.refused("no-egress", "a flow that would leave elsewhere", &to_second.udp(b"x").unwrap());
    scene.bench.balancer.ip(&format!("route replace unreachable {address}/32")).unwrap();
    scene.bench.balancer.ip("link del other").unwrap();
    scene.refused("no-egress", "a flow without a route", &to_second.udp(b"x").unwrap());
    scene.bench.balancer.ip(&format!("route del unreachable {address}/32")).unwrap();
    scene.wait_for_state("udp-84", BackendState::Up);
    scene.forwarded(&to_second.udp(b"x").unwrap(), 2);
}

#[test]
fn what_does_not_fit_the_way_out_is_refused_by_name() {
    let mut scene = Scene::new(vec![Service::new("udp", "round-robin", &[1])]);
    let datagram = |port: u16, length: usize| to_vip(port, VIP_PORT).udp(&vec![0; length - 28]).unwrap();
    scene.refused("too-big", "a flow's first datagram", &datagram(40_000, SMALL_MTU + 1));
    scene.forwarded(&datagram(40_001, SMALL_MTU), 1);
    scene.refused("too-big", "a flow's later datagram", &datagram(40_001, SMALL_MTU + 1));
    let status = status::read_fresh(&scene.balancer).unwrap();
    let udp = &status::service(&status, "udp").unwrap().backends[0];
    assert_eq!((udp.active, udp.packets, udp.bytes), (1, 1, SMALL_MTU as u64));
}

/// One client port to two services with the same server: the replies would look alike.
#[test]
fn a_flow_whose_replies_would_be_anothers_is_refused_by_name() {
    let untranslated = |port| Service { more: "snat = \"never\"", ..udp_service_of(port, 1) };
    let mut scene = Scene::new(vec![untranslated(86), untranslated(87)]);
    scene.forwarded(&to_vip(40_000, 86).udp(b"x").unwrap(), 1);
    scene.refused("reply-collision", "the second flow", &to_vip(40_000, 87).udp(b"x").unwrap());
    scene.forwarded(&to_vip(40_001, 87).udp(b"x").unwrap(), 1);
    scene.forwarded(&to_vip(40_000, 86).udp(b"x").unwrap(), 1);
}

/// Flows that are all in use fill a small table: the first that finds no room is refused, and no other is touched.
#[test]
fn a_flow_that_finds_the_table_full_is_refused_by_name() {
    const FLOWS: u16 = 1024;
    let bench = Plan::backends(1).build().unwrap();
    let _server = Echo::udp(bench.backend(1).unwrap(), backend(1)).unwrap();
    let service = Service::new("udp", "round-robin", &[1]);
    let text = config::text(&format!("max-flows = {FLOWS}"), &[service]);
    let balancer = Balancer::start(&bench.balancer, &text).unwrap();
    status::wait_until_up(&balancer).unwrap();
    let client = FrameSocket::open(&bench.client, "c0").unwrap();
    let is_answered = |port: u16, limit: Duration| {
        let packet = to_vip(port, VIP_PORT).udp(b"x").unwrap();
        client.send(&packet::ethernet(mac(BALANCER_CLIENT_SIDE), mac(CLIENT), &packet)).unwrap();
        let answer = client.receive_packet(limit, |packet| packet.get(22..24) == Some(&port.to_be_bytes()));
        answer.unwrap().is_some()
    };
    let first: u16 = 10_000;
    let refused = (first..).take(16 * usize::from(FLOWS)).find(|port| {
        // The answer is awaited, so that each flow is in use before the next one comes.
        !is_answered(*port, Duration::from_millis(500))
    });
    let refused = refused.expect("a table with room for sixteen times its size");
    let opened = u64::from(refused - first);
    let status = status::read_fresh(&balancer).unwrap();
    assert_eq!(status::drops(&status), [("flow-table-full", 1)], "after {opened} flows");
    assert_eq!(status::each(&status, |backend| (backend.active, backend.packets)), [(opened, 2 * opened)]);
    assert!(opened >= u64::from(FLOWS), "full after {opened} flows");
    for port in (first..refused).step_by(50) {
        assert!(is_answered(port, LIMIT), "the flow of port {port} was pushed out");
    }
    assert_eq!(status::drops(&status::read_fresh(&balancer).unwrap()), [("flow-table-full", 1)]);
}

/// The answers to what is refused are such that the client's own kernel believes them.
#[test]
fn a_client_is_told_at_once_that_there_is_no_backend() {
    let bench = Plan::backends(1).build().unwrap();
    let services = ["tcp", "udp"].map(|protocol| Service::new(protocol, "least-packets", &[0]));
    let balancer = Balancer::start(&bench.balancer, &config::text("", &services)).unwrap();
    let vip = SocketAddr::from((VIP, VIP_PORT));
    let refused = bench.client.run(|| Ok(TcpStream::connect_timeout(&vip, LIMIT))).unwrap();
    assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    let socket = bench.client.run(|| Ok(UdpSocket::bind((CLIENT, 0))?)).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket.connect(vip).unwrap();
    socket.send(b"x").unwrap();
    assert_eq!(socket.recv(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    assert_eq!(status::drops(&status::read_fresh(&balancer).unwrap()), [("no-backend", 2)]);
}
