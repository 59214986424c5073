//! What changes around a running daemon: links, routes, MTUs, and interfaces that are renamed or deleted.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use balancer_tests::{
    Balancer, Netns, Plan, Topology,
    config::{self, Service},
    eventually,
    operator::{pinned_link, xdp},
    responder::{self, Responders, ask, ask_with, ask_within, connect},
    status,
    topology::{self, backend_address},
    veth::{self, End},
    xdp::PassProgram,
};
use balancer_user::api::{BackendState, InterfaceState, Status};

/// How soon a change of the network must be followed.
const FOLLOWED: Duration = Duration::from_secs(2);

fn start(bench: &Topology) -> Balancer {
    let balancer = Balancer::start(&bench.balancer, &config::text("", &[responder::service(bench)])).unwrap();
    status::wait_until_up(&balancer).unwrap();
    balancer
}

fn states(status: &Status) -> Vec<BackendState> {
    status::each(status, |backend| backend.state)
}

/// Waits until the backends are in these states, no longer than a change may take to be followed.
#[track_caller]
fn assert_soon(balancer: &Balancer, wanted: &[BackendState]) {
    let began = Instant::now();
    let what = format!("the states {wanted:?}");
    status::wait(balancer, &what, |status| states(status) == wanted).unwrap();
    assert!(began.elapsed() <= FOLLOWED, "{what} after {:?}", began.elapsed());
}

/// How often a packet was refused for this reason.
fn refused(balancer: &Balancer, reason: &str) -> u64 {
    status::read_fresh(balancer).unwrap().drops[reason]
}

/// Sends until the counter of a reason grows: a datagram may arrive before its refusal is decided.
#[track_caller]
fn assert_refused(balancer: &Balancer, reason: &str, flow: &UdpSocket, payload: &[u8]) {
    let before = refused(balancer, reason);
    flow.send(payload).unwrap();
    let counted = || status::read(balancer).is_ok_and(|status| status.drops[reason] > before);
    eventually(FOLLOWED, &format!("a packet refused as {reason}"), || counted().then_some(())).unwrap();
}

const UP: BackendState = BackendState::Up;
const UNREACHABLE: BackendState = BackendState::Unreachable;

#[test]
fn an_interface_goes_down_and_up() {
    let bench = Plan::backends(2).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    let balancer = start(&bench);
    let flow = connect(&bench).unwrap();
    let answered_by = ask(&flow).unwrap();

    bench.balancer.ip("link set lk down").unwrap();
    assert_soon(&balancer, &[UNREACHABLE; 2]);
    assert_refused(&balancer, "no-egress", &flow, b"the way of this flow is gone");
    assert_refused(&balancer, "no-backend", &connect(&bench).unwrap(), b"no backend is left");

    bench.balancer.ip("link set lk up").unwrap();
    assert_soon(&balancer, &[UP; 2]);
    assert_eq!(ask(&flow).unwrap(), answered_by, "the flow has kept its backend");
    ask(&connect(&bench).unwrap()).unwrap();
}

#[test]
fn a_route_to_one_backend_changes() {
    let bench = Plan::backends(2).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    let balancer = start(&bench);
    let to_first = |verb: &str, way: &str| {
        bench.balancer.ip(&format!("route {verb} {way} {}/32", backend_address(1))).unwrap();
    };

    to_first("add", "blackhole");
    assert_soon(&balancer, &[UNREACHABLE, UP]);
    for _ in 0..4 {
        assert_eq!(ask(&connect(&bench).unwrap()).unwrap(), 2, "the one that can be reached takes all");
    }
    to_first("del", "blackhole");
    assert_soon(&balancer, &[UP; 2]);

    // Another way: through backend 2, which routes.
    bench.backend(2).unwrap().set_sysctl("net/ipv4/ip_forward", "1").unwrap();
    bench.backend(2).unwrap().set_sysctl("net/ipv4/conf/all/send_redirects", "0").unwrap();
    bench.backend(2).unwrap().set_sysctl("net/ipv4/conf/e0/send_redirects", "0").unwrap();
    bench.balancer.ip(&format!("route add {}/32 via {}", backend_address(1), backend_address(2))).unwrap();
    let ttl = Ttl::watch(bench.backend(1).unwrap());
    let through = eventually(FOLLOWED, "a packet by the new way", || {
        let mut answers = [0; 2].map(|_| ask(&connect(&bench).unwrap()).unwrap());
        answers.sort_unstable();
        assert_eq!(answers, [1, 2]);
        ttl.lowest().filter(|ttl| *ttl == 62)
    });
    through.unwrap();
}

/// The lowest TTL among the UDP packets that have arrived at a backend.
struct Ttl {
    capture: balancer_tests::Capture,
}

impl Ttl {
    fn watch(netns: &Netns) -> Self {
        Self { capture: balancer_tests::Capture::start(netns, "e0").unwrap() }
    }

    fn lowest(&self) -> Option<u8> {
        self.capture.packets().iter().map(|packet| packet.ttl).min()
    }
}

#[test]
fn the_mtu_towards_the_backends_changes() {
    let bench = Plan::backends(1).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    let balancer = start(&bench);
    let flow = connect(&bench).unwrap();
    let large = [7; 1300];
    assert_eq!(ask_with(&flow, &large).unwrap(), 1);

    bench.balancer.ip("link set lk mtu 1000").unwrap();
    let is_refused = || {
        // Once it has been told of the smaller MTU, the client's kernel says so here.
        drop(flow.send(&large));
        refused(&balancer, "too-big") > 0
    };
    eventually(FOLLOWED, "the smaller MTU", || is_refused().then_some(())).unwrap();
    let other = connect(&bench).unwrap();
    assert_eq!(ask_with(&other, &[8; 900]).unwrap(), 1, "what fits goes through");

    bench.balancer.ip("link set lk mtu 1500").unwrap();
    let flow = connect(&bench).unwrap();
    let is_answered = || ask_within(&flow, &large, Duration::from_millis(100)).is_ok();
    eventually(FOLLOWED, "the larger MTU", || is_answered().then_some(())).unwrap();
}

/// How many log lines contain this.
fn lines(balancer: &Balancer, part: &str) -> usize {
    balancer.log().lines().filter(|line| line.contains(part)).count()
}

#[track_caller]
fn assert_said_once(balancer: &Balancer, part: &str) {
    eventually(FOLLOWED, part, || (lines(balancer, part) > 0).then_some(())).unwrap_or_else(|error| {
        panic!("{error:#}; the balancer printed:\n{}", balancer.log());
    });
    // Further changes of the network are no reason to say it again.
    status::read_fresh(balancer).unwrap();
    assert_eq!(lines(balancer, part), 1, "{}", balancer.log());
}

#[test]
fn an_interface_is_renamed_and_called_as_before() {
    let bench = Plan::backends(1).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    let mut balancer = start(&bench);
    let flow = connect(&bench).unwrap();
    ask(&flow).unwrap();

    bench.balancer.ip("link set lk down").unwrap();
    bench
        .balancer
        .ip_batch("link set lk name lk9\nlink set lk9 up\nlink add other type veth peer far\n")
        .unwrap();
    assert_soon(&balancer, &[UNREACHABLE]);
    assert_said_once(&balancer, "interface lk is called lk9 now");
    assert_refused(&balancer, "no-egress", &flow, b"no configured interface leads there");

    bench.balancer.ip_batch("link set lk9 down\nlink set lk9 name lk\nlink set lk up\n").unwrap();
    assert_soon(&balancer, &[UP]);
    assert_said_once(&balancer, "interface lk is there, with the XDP program");
    ask(&flow).unwrap();
    assert_eq!(balancer.process().ended().unwrap(), None);
}

/// The link to the backends as the bench has it: what was lost with it comes again.
fn link_backends(bench: &Topology) -> PassProgram {
    let mac = Some(topology::mac(topology::BALANCER_BACKEND_SIDE));
    veth::pair(
        End { netns: &bench.switch, device: "lkp", mac: None },
        End { netns: &bench.balancer, device: "lk", mac },
        1500,
    )
    .unwrap();
    bench.switch.ip("link set lkp master br0").unwrap();
    bench.balancer.ip(&format!("address add {}/24 dev lk", topology::BALANCER_BACKEND_SIDE)).unwrap();
    PassProgram::attach(&bench.switch, "lkp").unwrap()
}

fn interfaces(balancer: &Balancer) -> Vec<InterfaceState> {
    status::read(balancer).unwrap().interfaces.iter().map(|interface| interface.state).collect()
}

#[track_caller]
fn assert_interfaces_soon(balancer: &Balancer, wanted: [InterfaceState; 2]) {
    let look = || (interfaces(balancer) == wanted).then_some(());
    eventually(FOLLOWED, &format!("the interfaces {wanted:?}"), look).unwrap_or_else(|error| {
        panic!("{error:#}: {:?}; the balancer printed:\n{}", interfaces(balancer), balancer.log());
    });
}

#[test]
fn an_interface_is_deleted_and_made_anew() {
    let bench = Plan::backends(1).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    let mut balancer = start(&bench);
    let flow = connect(&bench).unwrap();
    ask(&flow).unwrap();

    // More than once: nothing of what is gone is in the way.
    let mut passes = Vec::new();
    for round in 1..=2 {
        bench.balancer.ip("link del lk").unwrap();
        assert_soon(&balancer, &[UNREACHABLE]);
        assert_interfaces_soon(&balancer, [InterfaceState::Up, InterfaceState::Missing]);
        assert_refused(&balancer, "no-egress", &flow, b"there is no interface");
        assert_refused(&balancer, "no-backend", &connect(&bench).unwrap(), b"no backend is left");
        assert_eq!(lines(&balancer, "interface lk is gone: nothing comes in or leaves by it"), round);

        passes.push(link_backends(&bench));
        let made = Instant::now();
        assert_interfaces_soon(&balancer, [InterfaceState::Up; 2]);
        let answered = || ask_within(&flow, b"again", Duration::from_millis(100)).ok();
        assert_eq!(eventually(FOLLOWED, "an answer to the same flow", answered).unwrap(), 1);
        assert!(made.elapsed() < FOLLOWED, "{:?}", made.elapsed());
        assert_soon(&balancer, &[UP]);
        ask(&connect(&bench).unwrap()).unwrap();
        assert_eq!(lines(&balancer, "interface lk is there, with the XDP program"), round);
    }
    assert_eq!(balancer.process().ended().unwrap(), None);

    // And it stays as it is with the next daemon, without a packet lost.
    let program = xdp(&bench.balancer, "lk").unwrap().unwrap();
    let pin = balancer.place().pins().join("links/lk");
    assert_eq!(u64::from(pinned_link(&pin).unwrap().1), program.program);
    let place = balancer.crash();
    ask(&flow).unwrap();
    let balancer = Balancer::start_in(place, &bench.balancer).unwrap();
    assert_eq!(interfaces(&balancer), [InterfaceState::Up; 2]);
    ask(&flow).unwrap();
}

#[test]
fn an_optional_interface_appears_after_the_start() {
    let bench = Plan::backends(1).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    bench.balancer.ip("link del lk").unwrap();
    let text = config::text("", &[responder::service(&bench)])
        .replace("\"lk\"", "{ name = \"lk\", optional = true }");
    let balancer = Balancer::start(&bench.balancer, &text).unwrap();
    assert_eq!(interfaces(&balancer), [InterfaceState::Up, InterfaceState::Missing]);
    assert_soon(&balancer, &[UNREACHABLE]);
    let said = balancer.call(&["status"]).unwrap();
    assert!(said.contains("interfaces     lc (native, up), lk (native, missing)\n"), "{said}");
    assert_refused(&balancer, "no-backend", &connect(&bench).unwrap(), b"no backend yet");

    let _pass = link_backends(&bench);
    assert_interfaces_soon(&balancer, [InterfaceState::Up; 2]);
    assert_soon(&balancer, &[UP]);
    ask(&connect(&bench).unwrap()).unwrap();
    bench.balancer.ip("link set lk down").unwrap();
    assert_interfaces_soon(&balancer, [InterfaceState::Up, InterfaceState::Down]);
    bench.balancer.ip("link set lk up").unwrap();
    assert_interfaces_soon(&balancer, [InterfaceState::Up; 2]);

    // One that carries somebody else's program is left alone, and said to be, once; it is ours as soon as it is free.
    bench.balancer.ip("link del lk").unwrap();
    assert_interfaces_soon(&balancer, [InterfaceState::Up, InterfaceState::Missing]);
    bench.balancer.ip("link add tmp type veth peer far").unwrap();
    let foreign = PassProgram::attach(&bench.balancer, "tmp").unwrap();
    bench.balancer.ip("link set tmp name lk").unwrap();
    assert_interfaces_soon(&balancer, [InterfaceState::Up, InterfaceState::Refused]);
    assert_said_once(&balancer, "it carries another XDP program");
    drop(foreign);
    assert_interfaces_soon(&balancer, [InterfaceState::Up, InterfaceState::Down]);
}

/// All that leads to thousands of backends changes at once, and is followed as soon as for a few.
#[test]
fn thousands_of_backends_are_followed_as_soon_as_a_few() {
    const BACKENDS: u32 = 400;
    let bench = Plan::backends(1).build().unwrap();
    let gateway = backend_address(1);
    let route = || bench.balancer.ip(&format!("route add 10.7.0.0/16 via {gateway}")).unwrap();
    route();
    let address = |number: u32| Ipv4Addr::from_bits(Ipv4Addr::new(10, 7, 0, 0).to_bits() + number);
    let backends = (0..BACKENDS).map(|number| (SocketAddr::from((address(number), 8080)), 1)).collect();
    let service = Service { backends, ..Service::new("udp", "round-robin", &[]) };
    let balancer = Balancer::start(&bench.balancer, &config::text("", &[service])).unwrap();
    let all = |state: BackendState, since: Instant| {
        let what = format!("{BACKENDS} backends {state}");
        let is_so = |status: &Status| states(status).iter().all(|other| *other == state);
        status::wait(&balancer, &what, is_so).unwrap();
        println!("{what} after {:?}", since.elapsed());
        assert!(since.elapsed() <= FOLLOWED, "{what} after {:?}", since.elapsed());
    };
    status::wait_until_up(&balancer).unwrap();
    let since = Instant::now();
    bench.balancer.ip("link set lk down").unwrap();
    all(UNREACHABLE, since);
    let since = Instant::now();
    bench.balancer.ip("link set lk up").unwrap();
    route();
    all(UP, since);
}
