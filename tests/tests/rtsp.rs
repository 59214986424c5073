//! RTSP through the balancer: the media follow their control connection.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    time::Duration,
};

use balancer_tests::{
    Balancer, Capture, Netns, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    eventually,
    rtsp::{RtspClient, RtspServer, Transport},
    status::{self, each},
    topology::Family,
};

const DATA_PORTS: [u16; 2] = [6970, 6979];
const LIMIT: Duration = Duration::from_secs(40);

const FAMILIES: [Family; 2] = [Family::Ipv4, Family::Ipv6];

fn service(family: Family) -> Service {
    Service {
        more: "rtsp-nat = { data-ports = \"6970-6979\" }",
        ..Service::of(family, "tcp", "round-robin", &[1, 1])
    }
}

/// A bench whose client has a second address, which nobody uses who does not ask for it.
fn bench(family: Family) -> (Topology, IpAddr) {
    let bench = Plan { ipv6: family == Family::Ipv6, ..Plan::backends(2) }.build().unwrap();
    let (address, options) = match family {
        Family::Ipv4 => ("10.0.1.20/32", "scope global"),
        Family::Ipv6 => ("2001:db8:1::20/128", "nodad preferred_lft 0"),
    };
    bench.client.ip(&format!("address add {address} dev c0 {options}")).unwrap();
    let second = address.split('/').next().unwrap().parse().unwrap();
    (bench, second)
}

fn start(bench: &Topology, family: Family) -> Balancer {
    let balancer = Balancer::start(&bench.balancer, &config::text("", &[service(family)])).unwrap();
    status::wait_until_up(&balancer).unwrap();
    balancer
}

#[test]
fn media_follow_their_control_connection() {
    FAMILIES.into_iter().for_each(media_follow);
}

fn media_follow(family: Family) {
    let (bench, stranger) = bench(family);
    let address = |number| SocketAddr::from((family.backend(number), BACKEND_PORT));
    let _servers: Vec<RtspServer> = (1..)
        .zip(&bench.backends)
        .map(|(number, netns)| RtspServer::start(netns, address(number), DATA_PORTS).unwrap())
        .collect();
    let balancer = start(&bench, family);
    let capture = Capture::start(&bench.client, "c0").unwrap();
    let stranger = bench.client.run(|| Ok(UdpSocket::bind((stranger, 0))?)).unwrap();

    let vip = SocketAddr::from((family.vip(), VIP_PORT));
    for number in 1..=2 {
        let before = each(&status::read_fresh(&balancer).unwrap(), |backend| backend.packets);
        let client = RtspClient::start(&bench.client, vip, 3).unwrap();
        status::wait(&balancer, "the connection", |status| {
            each(status, |backend| backend.active).iter().sum::<u64>() == 1
        })
        .unwrap();
        // Somebody else's control connection opens no way for these.
        stranger.send_to(b"hello?", (family.vip(), DATA_PORTS[0])).unwrap();
        // 3 seconds of 8,000 samples of two bytes.
        let received = client.received(LIMIT).unwrap();
        assert!(received > 40_000, "{received} bytes");
        let status = status::wait(&balancer, "the connection's end", |status| {
            each(status, |backend| backend.active) == [0, 0]
        });
        let after = each(&status.unwrap(), |backend| backend.packets);
        let grown: Vec<u64> = after.iter().zip(&before).map(|(after, before)| after - before).collect();
        // A packet of media every 128 ms, and the few of the connection itself.
        assert!(grown[number - 1] > 35, "{family:?}: {grown:?}");
        assert_eq!(grown[2 - number], 0, "{family:?}: all of it is with one backend");
    }
    let media: Vec<_> = capture
        .packets()
        .into_iter()
        .filter(|packet| (DATA_PORTS[0]..=DATA_PORTS[1]).contains(&packet.source.port()))
        .collect();
    assert!(media.len() > 40, "{family:?}: {}", media.len());
    let ends = (family.vip(), family.client());
    assert!(media.iter().all(|packet| (packet.source.ip(), packet.destination.ip()) == ends));
    let drops = status::read_fresh(&balancer).unwrap();
    assert_eq!(status::drops(&drops), [("no-control-connection", 2)], "{family:?}");
}

#[test]
fn media_without_a_control_connection_are_refused_by_name() {
    for family in FAMILIES {
        let (bench, _) = bench(family);
        let balancer = start(&bench, family);
        let client = SocketAddr::from((family.client(), 5000));
        let socket = bench.client.run(|| Ok(UdpSocket::bind(client)?)).unwrap();
        socket.send_to(b"hello?", (family.vip(), DATA_PORTS[0])).unwrap();
        let from = SocketAddr::from((family.backend(1), DATA_PORTS[0]));
        let media = bench.backends[0].run(|| Ok(UdpSocket::bind(from)?)).unwrap();
        media.send_to(b"tone", client).unwrap();
        let status = status::wait(&balancer, "two refusals", |status| {
            status::drops(status) == [("no-control-connection", 2)]
        });
        assert_eq!(each(&status.unwrap(), |backend| (backend.active, backend.packets)), [(0, 0); 2]);
    }
}

/// Two clients at one address, one after the other, and one whose media go within its control connection.
#[test]
fn clients_at_one_address_get_their_media() {
    let family = Family::Ipv4;
    let (bench, _) = bench(family);
    let address = |number| SocketAddr::from((family.backend(number), BACKEND_PORT));
    let _servers: Vec<RtspServer> = (1..)
        .zip(&bench.backends)
        .map(|(number, netns)| RtspServer::start(netns, address(number), DATA_PORTS).unwrap())
        .collect();
    let balancer = start(&bench, family);
    let vip = SocketAddr::from((family.vip(), VIP_PORT));
    let active = |wanted: [u64; 2]| {
        status::wait(&balancer, "the connections", |status| each(status, |backend| backend.active) == wanted)
            .unwrap()
    };
    let clients = [(Transport::Udp, [1, 0]), (Transport::Tcp, [1, 1]), (Transport::Udp, [2, 1])].map(
        |(transport, now)| {
            let client = RtspClient::start_with(&bench.client, vip, 4, transport).unwrap();
            active(now);
            client
        },
    );
    for client in clients {
        let received = client.received(LIMIT).unwrap();
        assert!(received > 40_000, "{received} bytes");
    }
    let status = active([0, 0]);
    assert_eq!(status::drops(&status), []);
}

/// A player that always uses the same port, and whose next control connection is scheduled to the other server while its last media
/// are still remembered: whoever speaks.
#[test]
fn media_move_with_a_player_that_uses_its_port_again() {
    for family in FAMILIES {
        let (bench, _) = bench(family);
        let listeners: Vec<TcpListener> = (1..)
            .zip(&bench.backends)
            .map(|(number, netns)| {
                let address = SocketAddr::from((family.backend(number), BACKEND_PORT));
                netns.run(|| Ok(TcpListener::bind(address)?)).unwrap()
            })
            .collect();
        let bound = |netns: &Netns, address: IpAddr, port: u16| {
            let socket = netns.run(|| Ok(UdpSocket::bind((address, port))?)).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            socket
        };
        let servers: Vec<[UdpSocket; 2]> = (1..)
            .zip(&bench.backends)
            .map(|(number, netns)| DATA_PORTS.map(|port| bound(netns, family.backend(number), port)))
            .collect();
        let balancer = start(&bench, family);
        let ports = [5000, 5001];
        let [heard, sung] = ports.map(|port| bound(&bench.client, family.client(), port));
        let vip = |port| SocketAddr::from((family.vip(), port));
        for turn in 0..4 {
            let control = bench.client.run(|| Ok(TcpStream::connect(vip(VIP_PORT))?)).unwrap();
            let number = turn % 2;
            let accepted = listeners[number].accept().unwrap();
            // What the server sends arrives at once.
            let mut datagram = [0; 8];
            servers[number][0].send_to(b"tone", (family.client(), ports[0])).unwrap();
            let received = heard.recv_from(&mut datagram).unwrap();
            assert_eq!(
                (received, &datagram[..4]),
                ((4, vip(DATA_PORTS[0])), &b"tone"[..]),
                "{family:?} {turn}"
            );
            // What the player alone sends, soon.
            eventually(LIMIT, "the player's song at the server", || {
                sung.send_to(b"song", vip(DATA_PORTS[1])).unwrap();
                let (_, from) = servers[number][1].recv_from(&mut datagram).ok()?;
                assert_eq!(from, SocketAddr::from((family.client(), ports[1])));
                Some(())
            })
            .unwrap();
            drop((control, accepted));
            status::wait(&balancer, "its end", |status| each(status, |backend| backend.active) == [0, 0])
                .unwrap();
        }
        assert_eq!(status::drops(&status::read_fresh(&balancer).unwrap()), [], "{family:?}");
    }
}
