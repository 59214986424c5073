//! What is no plain segment, with real stacks at both ends: datagrams in fragments, a path that is narrower than its ends,
//! ping and traceroute to a service's address.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use balancer_tests::{
    Balancer, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    echo::Echo,
    eventually,
    ping::ping,
    status::{self, each},
    topology::{Family, VIP},
};

const LIMIT: Duration = Duration::from_secs(10);

/// An echo server behind a service, and who talks to it.
struct Scene {
    // The balancer goes before its namespace.
    balancer: Balancer,
    _server: Echo,
    bench: Topology,
    vip: SocketAddr,
}

impl Scene {
    fn new(family: Family, protocol: &'static str) -> Scene {
        let bench = Plan { ipv6: true, ..Plan::backends(1) }.build().unwrap();
        let backend = SocketAddr::new(family.backend(1), BACKEND_PORT);
        let server = match protocol {
            "tcp" => Echo::tcp(&bench.backends[0], backend),
            _ => Echo::udp(&bench.backends[0], backend),
        };
        let service = Service::of(family, protocol, "round-robin", &[1]);
        let balancer = Balancer::start(&bench.balancer, &config::text("", &[service])).unwrap();
        status::wait_until_up(&balancer).unwrap();
        Scene { balancer, _server: server.unwrap(), bench, vip: SocketAddr::new(family.vip(), VIP_PORT) }
    }
}

/// Datagrams of up to three frames, there and back.
#[test]
fn large_datagrams_cross_in_fragments() {
    for (family, header) in [(Family::Ipv4, 20), (Family::Ipv6, 48)] {
        let scene = Scene::new(family, "udp");
        let any = SocketAddr::new(family.client(), 0);
        let socket = scene.bench.client.run(|| Ok(UdpSocket::bind(any)?)).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.connect(scene.vip).unwrap();
        let (mut packets, mut bytes) = (0, 0);
        for length in [1473_usize, 2000, 4000, 1300, 3999] {
            let sent: Vec<u8> = (0..length).map(|place| (place % 251) as u8).collect();
            assert_eq!(socket.send(&sent).unwrap(), length);
            let mut answer = vec![0; 1 << 16];
            let received = socket.recv(&mut answer).unwrap();
            assert!(answer[..received] == sent, "{family:?}: {received} bytes of {length}");
            let data = length + 8;
            let is_whole = data + header <= 1500 || (family == Family::Ipv6 && data + 40 <= 1500);
            let parts = if is_whole { 1 } else { data.div_ceil((1500 - header) / 8 * 8) };
            let each = if is_whole && family == Family::Ipv6 { 40 } else { header };
            packets += parts as u64;
            bytes += (data + parts * each) as u64;
        }
        let status = status::read_fresh(&scene.balancer).unwrap();
        assert_eq!(status::drops(&status), [], "{family:?}");
        let counted = each(&status, |backend| (backend.packets, backend.bytes, backend.active));
        assert_eq!(counted, [(2 * packets, 2 * bytes, 1)], "{family:?}");
    }
}

/// The way to the client is narrower than the backend's own: the backend learns of it from the balancer, and large answers
/// arrive.
#[test]
fn a_narrower_path_is_found() {
    for family in [Family::Ipv4, Family::Ipv6] {
        let scene = Scene::new(family, "tcp");
        let opened = scene.bench.client.run(|| Ok(TcpStream::connect_timeout(&scene.vip, LIMIT)?));
        let mut stream = opened.unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_write_timeout(Some(LIMIT)).unwrap();
        // Both ends of the wire, after the client has said what it takes.
        scene.bench.client.ip("link set c0 mtu 1400").unwrap();
        scene.bench.balancer.ip("link set lc mtu 1400").unwrap();
        let backend = &scene.bench.backends[0];
        let route = || backend.ip(&format!("route get {}", family.client())).unwrap();
        let sent: Vec<u8> = (0..300_000_u32).map(|place| (place % 251) as u8).collect();
        // Until the balancer has noticed, too.
        let found = eventually(LIMIT, "the backend to learn of the narrower path", || {
            let mut writer = stream.try_clone().unwrap();
            let mut echoed = vec![0; sent.len()];
            std::thread::scope(|scope| {
                scope.spawn(|| writer.write_all(&sent).unwrap());
                stream.read_exact(&mut echoed).unwrap();
            });
            assert!(echoed == sent, "{family:?}");
            route().contains("mtu 1400").then_some(())
        });
        found.unwrap_or_else(|error| panic!("{family:?}: {error}: {}", route()));
        let drops = status::read_fresh(&scene.balancer).unwrap();
        assert!(matches!(status::drops(&drops)[..], [("too-big", 1..)]), "{:?}", status::drops(&drops));
    }
}

#[test]
fn a_service_answers_ping_and_moves_no_counter() {
    let scene = Scene::new(Family::Ipv4, "udp");
    for _ in 0..3 {
        ping(&scene.bench.client, VIP, LIMIT).unwrap();
    }
    let status = status::read_fresh(&scene.balancer).unwrap();
    assert_eq!(each(&status, |backend| (backend.packets, backend.active)), [(0, 0)]);
    assert_eq!(status::drops(&status), []);
}
