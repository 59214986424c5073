//! RTSP through the balancer: the media follow their control connection.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use balancer_tests::{
    Balancer, Capture, Plan,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    rtsp::{RtspClient, RtspServer},
    status::{self, each},
    topology::{CLIENT, VIP, backend_address},
};

const DATA_PORTS: [u16; 2] = [6970, 6979];
const LIMIT: Duration = Duration::from_secs(40);

fn service() -> Service {
    Service {
        more: "rtsp-nat = { data-ports = \"6970-6979\" }",
        ..Service::new("tcp", "round-robin", &[1, 1])
    }
}

#[test]
fn media_follow_their_control_connection() {
    let bench = Plan::backends(2).build().unwrap();
    let address = |number| SocketAddr::from((backend_address(number), BACKEND_PORT));
    let _servers: Vec<RtspServer> = (1..)
        .zip(&bench.backends)
        .map(|(number, netns)| RtspServer::start(netns, address(number), DATA_PORTS).unwrap())
        .collect();
    let balancer = Balancer::start(&bench.balancer, &config::text("", &[service()])).unwrap();
    status::wait_until_up(&balancer).unwrap();
    let capture = Capture::start(&bench.client, "c0").unwrap();

    let vip = SocketAddr::from((VIP, VIP_PORT));
    for number in 1..=2 {
        let before = each(&status::read_fresh(&balancer).unwrap(), |backend| backend.packets);
        let client = RtspClient::start(&bench.client, vip, 3).unwrap();
        // 3 seconds of 8,000 samples of two bytes.
        let received = client.received(LIMIT).unwrap();
        assert!(received > 40_000, "{received} bytes");
        let status = status::wait(&balancer, "the connection's end", |status| {
            each(status, |backend| backend.active) == [0, 0]
        });
        let after = each(&status.unwrap(), |backend| backend.packets);
        let grown: Vec<u64> = after.iter().zip(&before).map(|(after, before)| after - before).collect();
        // A packet of media every 128 ms, and the few of the connection itself.
        assert!(grown[number - 1] > 35, "{grown:?}");
        assert_eq!(grown[2 - number], 0, "all of it is with one backend");
    }
    let media: Vec<_> = capture
        .packets()
        .into_iter()
        .filter(|packet| (DATA_PORTS[0]..=DATA_PORTS[1]).contains(&packet.source.port()))
        .collect();
    assert!(media.len() > 40, "{}", media.len());
    assert!(media.iter().all(|packet| packet.source.ip() == VIP && packet.destination.ip() == CLIENT));
    assert_eq!(status::drops(&status::read_fresh(&balancer).unwrap()), []);
}

#[test]
fn media_without_a_control_connection_are_refused_by_name() {
    let bench = Plan::backends(2).build().unwrap();
    let balancer = Balancer::start(&bench.balancer, &config::text("", &[service()])).unwrap();
    status::wait_until_up(&balancer).unwrap();
    let socket = bench.client.run(|| Ok(UdpSocket::bind(SocketAddr::from((CLIENT, 5000)))?)).unwrap();
    socket.send_to(b"hello?", (VIP, DATA_PORTS[0])).unwrap();
    let from = SocketAddr::from((backend_address(1), DATA_PORTS[0]));
    let media = bench.backends[0].run(|| Ok(UdpSocket::bind(from)?)).unwrap();
    media.send_to(b"tone", (CLIENT, 5000)).unwrap();
    let status = status::wait(&balancer, "two refusals", |status| {
        status::drops(status) == [("no-control-connection", 2)]
    });
    assert_eq!(each(&status.unwrap(), |backend| (backend.active, backend.packets)), [(0, 0); 2]);
}
