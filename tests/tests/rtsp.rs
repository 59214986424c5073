//! RTSP through the balancer: the media follow their control connection.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Duration,
};

use balancer_tests::{
    Balancer, Capture, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
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
