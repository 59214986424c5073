//! Health checks of services whose backends hold the service's address go the way of the service's own packets: they find out
//! what clients would.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{net::SocketAddr, time::Duration};

use balancer_tests::{
    Balancer,
    detour::Detour,
    echo::Echo,
    nginx::Nginx,
    status::{self, each},
    topology::Family,
};
use balancer_user::api::{BackendState, HealthVerdict, Status};
use nix::sys::signal::Signal;

const LIMIT: Duration = Duration::from_secs(10);
const TIMES: &str = "interval = \"200ms\", timeout = \"150ms\", rise = 1, fall = 2";

/// The ways, the families, and the kinds of checks, each with a port of its own.
fn cases() -> Vec<(&'static str, Family, &'static str, u16)> {
    let mut cases = Vec::new();
    for mode in ["dsr", "ipip", "gue"] {
        for family in [Family::Ipv4, Family::Ipv6] {
            for kind in ["tcp", "http", "udp", "ping"] {
                cases.push((mode, family, kind, 80 + cases.len() as u16));
            }
        }
    }
    cases
}

fn text() -> String {
    let mut text = "[daemon]\ninterfaces = [\"lc\", \"lk\"]\nwindow = \"5m\"\n".to_owned();
    for (mode, family, kind, port) in cases() {
        let digit = if family == Family::Ipv4 { 4 } else { 6 };
        let protocol = if kind == "udp" { "udp" } else { "tcp" };
        let more = match kind {
            "tcp" | "udp" => ", send = \"ping\", receive = \"ping\"",
            "http" => ", path = \"/name\"",
            _ => "",
        };
        let (address, backend) =
            (SocketAddr::new(family.vip(), port), SocketAddr::new(family.backend(1), port));
        text += &format!(
            "\n[[service]]\nname = \"{mode}-{kind}-{digit}\"\naddress = \"{address}\"\nprotocol = \"{protocol}\"\n\
             method = \"round-robin\"\nforward = \"{mode}\"\nhealth = {{ kind = \"{kind}\", {TIMES}{more} }}\n\
             [[service.backend]]\nname = \"b1\"\naddress = \"{backend}\"\n"
        );
    }
    text
}

fn verdicts(status: &Status) -> Vec<(&str, HealthVerdict)> {
    let of =
        |service: &balancer_user::api::ServiceStatus| service.backends[0].health.as_ref().unwrap().verdict;
    status.services.iter().map(|service| (service.name.as_str(), of(service))).collect()
}

/// Waits until those services are up whose names this says, and the others down.
#[track_caller]
fn wait(balancer: &Balancer, what: &str, is_up: impl Fn(&str) -> bool) {
    let expected = |name: &str| if is_up(name) { HealthVerdict::Up } else { HealthVerdict::Down };
    let is_so = |status: &Status| verdicts(status).iter().all(|(name, verdict)| *verdict == expected(name));
    let seen = status::wait(balancer, what, is_so);
    if let Err(error) = seen {
        let status = status::read(balancer).unwrap();
        let wrong = status.services.iter().filter(|service| {
            service.backends[0].health.as_ref().unwrap().verdict != expected(&service.name)
        });
        let wrong: Vec<_> = wrong.map(|service| (&service.name, &service.backends[0].health)).collect();
        panic!("{what}: {error:.100}: {wrong:#?}");
    }
}

/// Each server listens at the service's address only: asked at the backend's own, it would not answer.
#[test]
fn checks_find_what_clients_would() {
    let detour = Detour::new(1);
    let backend = detour.bench.backend(1).unwrap();
    let mut decaps = detour.unwrap(&["--from", "10.0.2.1", "--from", "2001:db8:2::1"]);
    let mut webs = Vec::new();
    let mut echoes = Vec::new();
    for (mode, family, kind, port) in cases() {
        let address = SocketAddr::new(family.vip(), port);
        match kind {
            "http" => webs.push(Nginx::start(backend, address, "b1").unwrap()),
            "tcp" => echoes.push((mode, Echo::tcp(backend, address).unwrap())),
            "udp" => echoes.push((mode, Echo::udp(backend, address).unwrap())),
            _ => {}
        }
    }
    let balancer = Balancer::start(&detour.bench.balancer, &text()).unwrap();
    wait(&balancer, "all up", |_| true);

    // One way's servers end.
    echoes.retain(|(mode, _)| *mode != "gue");
    wait(&balancer, "no servers behind GUE", has_server);

    // Nobody unwraps any more.
    for decap in &mut decaps {
        decap.signal(Signal::SIGTERM).unwrap();
        assert!(decap.wait(LIMIT).unwrap().success());
    }
    wait(&balancer, "tunnels that nobody unwraps", |name| name.starts_with("dsr"));

    let _decaps = detour.unwrap(&[]);
    wait(&balancer, "unwrapped again", has_server);

    // The address is taken off.
    backend.ip("address del 192.0.2.10/32 dev lo").unwrap();
    wait(&balancer, "the address is gone", |name| name.ends_with('6') && has_server(name));

    let status = status::read_fresh(&balancer).unwrap();
    assert_eq!(each(&status, |backend| (backend.packets, backend.bytes, backend.active)), [(0, 0, 0); 24]);
    assert!(each(&status, |backend| backend.state).contains(&BackendState::Down));
    assert_eq!(status::drops(&status), []);
    assert_eq!((status.flows.now.half_open, status.flows.now.established), (0, 0));
    drop(webs);
}

/// Those whose servers have not ended.
fn has_server(name: &str) -> bool {
    !name.starts_with("gue-tcp") && !name.starts_with("gue-udp")
}
