//! A service's address that no host has: the balancer itself says where it is.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use balancer_tests::{
    Balancer, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    echo::Echo,
    eventually, status,
    topology::{BALANCER_CLIENT_SIDE, Family, VIP, VIP6, mac},
    veth,
};

const LIMIT: Duration = Duration::from_secs(10);
const FAMILIES: [Family; 2] = [Family::Ipv4, Family::Ipv6];

/// The bench, where the client is on the network of the services' addresses and asks for them itself.
fn bench() -> Topology {
    let bench = Plan { ipv6: true, ..Plan::backends(1) }.build().unwrap();
    bench
        .client
        .ip_batch(
            "route del 192.0.2.0/24\nroute del 2001:db8:aa::/64\n\
             address add 192.0.2.200/24 dev c0\naddress add 2001:db8:aa::200/64 dev c0 nodad\n",
        )
        .unwrap();
    // Replies go to a network that is reached without a gateway.
    bench.balancer.ip_batch("route add 192.0.2.0/24 dev lc\nroute add 2001:db8:aa::/64 dev lc\n").unwrap();
    bench
}

fn services(more: &'static str) -> String {
    let services = FAMILIES.map(|family| Service { more, ..Service::of(family, "tcp", "round-robin", &[1]) });
    config::text("", &services)
}

fn servers(bench: &Topology) -> Vec<Echo> {
    let start = |family: Family| {
        Echo::tcp(bench.backend(1).unwrap(), SocketAddr::new(family.backend(1), BACKEND_PORT)).unwrap()
    };
    FAMILIES.map(start).into()
}

fn start(bench: &Topology, config: &str) -> Balancer {
    let balancer = Balancer::start(&bench.balancer, config).unwrap();
    status::wait_until_up(&balancer).unwrap();
    balancer
}

/// What the client has noted of a service's address.
fn neighbour(bench: &Topology, family: Family) -> String {
    bench.client.ip(&format!("neigh show {} dev c0", family.vip())).unwrap()
}

#[test]
fn who_asks_for_the_address_is_told() {
    let bench = bench();
    let _servers = servers(&bench);
    let balancer = start(&bench, &services("advertise = \"arp\""));
    for family in FAMILIES {
        let address = SocketAddr::new(family.vip(), VIP_PORT);
        let mut stream = bench.client.run(|| Ok(TcpStream::connect_timeout(&address, LIMIT)?)).unwrap();
        stream.write_all(b"hello").unwrap();
        let mut answer = [0; 5];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"hello");
        let own = veth::mac_text(mac(BALANCER_CLIENT_SIDE));
        assert!(neighbour(&bench, family).contains(&own), "{}", neighbour(&bench, family));
    }
    assert_eq!(status::drops(&status::read(&balancer).unwrap()), []);
    // Without it, nobody is told any more.
    balancer.reload(&services("")).unwrap();
    for family in FAMILIES {
        let gone = format!("neigh del {} dev c0", family.vip());
        eventually(LIMIT, "an address that nobody has", || {
            bench.client.ip(&gone).ok();
            let address = SocketAddr::new(family.vip(), VIP_PORT);
            let tried = bench.client.run(|| Ok(TcpStream::connect_timeout(&address, LIMIT)));
            tried.unwrap().is_err().then_some(())
        })
        .unwrap();
    }
}

/// A neighbour that believes the address to be elsewhere learns better when the balancer starts, and when its device comes up
/// again.
#[test]
fn the_addresses_are_announced() {
    let bench = bench();
    let _servers = servers(&bench);
    let mislead = || {
        for address in [VIP.to_string(), VIP6.to_string()] {
            let words = format!("neigh replace {address} lladdr 02:00:00:00:00:99 nud stale dev c0");
            bench.client.ip(&words).unwrap();
        }
    };
    let is_learned = || {
        let own = veth::mac_text(mac(BALANCER_CLIENT_SIDE));
        eventually(LIMIT, "the announcements", || {
            FAMILIES.iter().all(|family| neighbour(&bench, *family).contains(&own)).then_some(())
        })
        .unwrap();
    };
    mislead();
    let _balancer = start(&bench, &services("advertise = \"arp\""));
    is_learned();
    bench.balancer.ip("link set lc down").unwrap();
    mislead();
    bench.balancer.ip("link set lc up").unwrap();
    is_learned();
}
