//! What a service manager gets to know, and what privileges are left to the daemon.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    fs,
    os::unix::net::UnixDatagram,
    time::{Duration, Instant},
};

use balancer_tests::{
    Plan, Process, config, eventually,
    process::{Place, balancer_binary},
    responder::{self, Responders, ask, connect},
};
use nix::sys::signal::Signal;

const LIMIT: Duration = Duration::from_secs(20);
const CAP_NET_ADMIN: u64 = 1 << 12;
const CAP_NET_RAW: u64 = 1 << 13;
const CAP_BPF: u64 = 1 << 39;

#[test]
fn it_hears_of_the_start_of_life_and_of_the_end() {
    let bench = Plan::backends(1).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    let place = Place::new().unwrap();
    place.write_config(&config::text("", &[responder::service(&bench)])).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(LIMIT)).unwrap();
    let hear = || {
        let mut bytes = [0; 256];
        let length = manager.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    };

    let mut command = bench.balancer.command(balancer_binary().unwrap());
    command.args(["run", "-c"]).arg(place.config());
    command.env("NOTIFY_SOCKET", &path).env("WATCHDOG_USEC", "900000");
    let mut process = Process::spawn(&mut command).unwrap();
    assert_eq!(hear(), "READY=1\n", "{}", process.log());
    // Who was told so can rely on it.
    let flow = connect(&bench).unwrap();
    eventually(LIMIT, "an answer", || ask(&flow).ok()).unwrap();
    let begun = Instant::now();
    for _ in 0..4 {
        assert_eq!(hear(), "WATCHDOG=1\n");
    }
    // Every 300 ms, with the next tick.
    assert!(begun.elapsed() > Duration::from_millis(800), "{:?}", begun.elapsed());

    // The thread that steers can't do more than it must, that which checks health neither, and that which clients talk to nothing.
    let tasks = fs::read_dir(format!("/proc/{}/task", process.id())).unwrap();
    let mut threads: Vec<(String, u64)> = tasks
        .map(|task| {
            let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap();
            let field = |name: &str| {
                status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned()
            };
            let permitted = u64::from_str_radix(&field("CapPrm:"), 16).unwrap();
            assert_eq!(u64::from_str_radix(&field("CapEff:"), 16).unwrap(), permitted);
            (field("Name:"), permitted)
        })
        .collect();
    threads.sort();
    let expected = [("api", 0), ("balancer", CAP_NET_ADMIN | CAP_BPF), ("health", CAP_NET_RAW)];
    assert_eq!(threads, expected.map(|(name, permitted)| (name.to_owned(), permitted)));

    process.signal(Signal::SIGTERM).unwrap();
    let last = std::iter::repeat_with(hear).find(|said| said != "WATCHDOG=1\n");
    assert_eq!(last.as_deref(), Some("STOPPING=1\n"));
    assert!(process.wait(LIMIT).unwrap().success());
}

#[test]
fn one_that_has_gone_is_no_reason_to_go_too() {
    let bench = Plan::backends(1).build().unwrap();
    let place = Place::new().unwrap();
    place.write_config(&config::text("", &[responder::service(&bench)])).unwrap();
    let mut command = bench.balancer.command(balancer_binary().unwrap());
    command.args(["run", "-c"]).arg(place.config()).env("NOTIFY_SOCKET", "@balancer-test-nobody-listens");
    let process = Process::spawn(&mut command).unwrap();
    for part in ["balancing on", "reach the service manager at @balancer-test-nobody-listens: "] {
        let said = eventually(LIMIT, part, || process.log().contains(part).then_some(()));
        said.unwrap_or_else(|error| panic!("{error}: {}", process.log()));
    }
}
