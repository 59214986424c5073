//! A configuration of a thousand services with ten backends each: a change touches what is different, and delays no tick.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{fmt::Write as _, time::Duration};

use balancer_tests::{Balancer, Plan, status};
use balancer_user::api::{LastChange, Status};

const LIMIT: Duration = Duration::from_secs(60);
const SERVICES: u16 = 1000;

/// Without optimisation, a tick over so many takes longer than the usual 100 ms.
const DAEMON: &str = "[daemon]\ninterfaces = [\"lc\", \"lk\"]\ntick = \"2s\"\nwindow = \"5m\"\nmax-flows = 1024\nmax-services = 1000\n\
                      max-backends = 12000\n";

fn text(weight: impl Fn(u16, u16) -> u8) -> String {
    let mut text = DAEMON.to_owned();
    for service in 0..SERVICES {
        let port = 1000 + service;
        let method = ["least-packets", "round-robin"][usize::from(service % 2)];
        write!(
            text,
            "\n[[service]]\nname = \"s{service}\"\naddress = \"192.0.2.10:{port}\"\nprotocol = \"udp\"\nmethod = \"{method}\"\n"
        )
        .unwrap();
        for backend in 0..10 {
            let weight = weight(service, backend);
            let address = format!("10.7.{}.{}:{port}", service % 50, backend + 1);
            write!(
                text,
                "\n[[service.backend]]\nname = \"b{backend}\"\naddress = \"{address}\"\nweight = {weight}\n"
            )
            .unwrap();
        }
    }
    text
}

/// What the last change has come to, once one after the first `count` lines about reloads is in the log.
fn after(balancer: &Balancer, line: &str, count: usize) -> LastChange {
    let seen = || (balancer.log().matches(line).count() > count).then_some(());
    balancer_tests::eventually(LIMIT, line, seen).unwrap();
    let status = status::read_fresh(balancer).unwrap();
    assert_eq!(status.missed_ticks, 0, "{:?}", status.last_change);
    status.last_change.expect("a change")
}

fn touched(change: LastChange) -> (u64, u64, u64) {
    (change.generation, change.services, change.backends)
}

fn weights(status: &Status, service: usize) -> Vec<u8> {
    status.services[service].backends.iter().map(|backend| backend.weight).collect()
}

#[test]
fn a_change_touches_what_is_different_and_no_tick_is_missed() {
    let bench = Plan::backends(0).build().unwrap();
    bench
        .balancer
        .ip_batch("neigh add 10.0.2.2 lladdr 02:00:00:00:00:02 dev lk\nroute add 10.7.0.0/16 via 10.0.2.2\n")
        .unwrap();
    let balancer = Balancer::start(&bench.balancer, &text(|_, _| 1)).unwrap();
    let before = status::read_fresh(&balancer).unwrap();
    assert_eq!((before.services.len(), before.last_change), (usize::from(SERVICES), None));

    for count in 0..2 {
        balancer.hang_up().unwrap();
        let change = after(&balancer, "reloaded: nothing has changed", count);
        assert_eq!(touched(change), (1, 0, 0));
    }
    // One backend's weight: its service is looked through, and no other.
    balancer.reload(&text(|service, backend| 1 + u8::from(service == 500 && backend == 3))).unwrap();
    assert_eq!(touched(after(&balancer, "reloaded: 1 changes", 0)), (2, 1, 10));
    let status = status::read_fresh(&balancer).unwrap();
    assert_eq!(weights(&status, 500), [1, 1, 1, 2, 1, 1, 1, 1, 1, 1]);
    assert!(status.services[500].backends[3].share > 0.15, "{:?}", status.services[500].backends[3]);
    // A verb goes by what is in force.
    balancer.call(&["backend", "set", "b4", "--service", "s501", "weight=0"]).unwrap();
    assert_eq!(touched(after(&balancer, "generation 3: backend set b4", 0)), (3, 1, 10));
    // The file takes the verb's change back, and makes two of its own.
    balancer.reload(&text(|service, backend| 1 + u8::from(service < 2 && backend == 9))).unwrap();
    assert_eq!(touched(after(&balancer, "reloaded: 4 changes", 0)), (4, 4, 40));
    // A backend goes: it leaves, and the others stay.
    balancer.call(&["backend", "rm", "b0", "--service", "s7"]).unwrap();
    assert_eq!(touched(after(&balancer, "generation 5: backend rm b0", 0)), (5, 1, 10));
    let status = status::read_fresh(&balancer).unwrap();
    assert_eq!(weights(&status, 1), [1, 1, 1, 1, 1, 1, 1, 1, 1, 2]);
    assert_eq!(status.services[501].backends[4].weight, 1);
}
