//! A flow table with many flows, with `--long` a million: it is walked through while the ticks go on.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    env,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use balancer_tests::{
    Balancer, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    packet::{self, Path},
    socket::FrameSocket,
    status,
    topology::{BALANCER_CLIENT_SIDE, CLIENT, VIP, backend_address, mac},
};
use balancer_user::api::{CountFlows, FlowCount, KillFlows, STATUS_PATH, Status, Verb, client};
use tokio::runtime::Runtime;

/// Flows of each client.
const PORTS: u16 = 50_000;
const TICK: Duration = Duration::from_millis(100);
/// Frames in one system call: what a veth's queue holds.
const BATCH: usize = 64;
/// How long the table may take to fill.
const PATIENCE: Duration = Duration::from_secs(120);
const LIMIT: Duration = Duration::from_secs(30);

/// Somebody who asks over the control socket.
struct Operator {
    socket: PathBuf,
    runtime: Runtime,
}

impl Operator {
    fn new(balancer: &Balancer) -> Operator {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Operator { socket: balancer.place().socket(), runtime }
    }

    fn ask<V: Verb>(&self, verb: &V) -> V::Answer {
        self.runtime.block_on(client::ask(&self.socket, verb, LIMIT)).unwrap()
    }

    fn status(&self) -> Status {
        let body = self.runtime.block_on(client::get(&self.socket, STATUS_PATH, LIMIT)).unwrap();
        serde_json::from_str(&body).unwrap()
    }
}

/// How many clients there are.
fn clients() -> u32 {
    if env::var_os("BALANCER_TEST_LONG").is_some() { 20 } else { 4 }
}

/// How many flows they have.
fn flows() -> u64 {
    u64::from(clients()) * u64::from(PORTS)
}

/// Clients that don't exist.
fn client_address(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(Ipv4Addr::new(10, 9, 0, 0).to_bits() + number)
}

/// Sends a datagram of each flow until all are open: frames may be lost on the way.
fn fill(bench: &Topology, balancer: &Balancer) {
    let socket = FrameSocket::open(&bench.client, "c0").unwrap();
    let begun = Instant::now();
    let open = || status::each(&status::read_fresh(balancer).unwrap(), |backend| backend.active)[0];
    while open() < flows() {
        for number in 0..clients() {
            let frame = |port: u16| {
                let path = Path::new((client_address(number), 1024 + port), (VIP, VIP_PORT));
                packet::ethernet(mac(BALANCER_CLIENT_SIDE), mac(CLIENT), &path.udp(b"x").unwrap())
            };
            let frames: Vec<Vec<u8>> = (0..PORTS).map(frame).collect();
            for batch in frames.chunks(BATCH) {
                socket.send_all(batch).unwrap();
                thread::yield_now();
            }
        }
        assert!(begun.elapsed() < PATIENCE, "only {} flows", open());
    }
    println!("{} flows after {:.1?}", open(), begun.elapsed());
}

/// What whoever asks for the status all the time gets to see while `work` is done: the oldest selection, and the longest
/// time to an answer. All is done by one thread of the daemon: what delays a tick delays an answer.
fn watched<T>(balancer: &Balancer, work: impl FnOnce() -> T) -> (T, Duration, Duration) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let operator = Operator::new(balancer);
            let (mut oldest, mut slowest) = (Duration::ZERO, Duration::ZERO);
            while !done.load(Relaxed) {
                let asked = Instant::now();
                let age = operator.status().selection_age_ms;
                slowest = slowest.max(asked.elapsed());
                oldest = oldest.max(Duration::from_millis(age));
            }
            (oldest, slowest)
        });
        let result = work();
        done.store(true, Relaxed);
        let (oldest, slowest) = watcher.join().unwrap();
        (result, oldest, slowest)
    })
}

#[test]
fn ticks_go_on_while_many_flows_are_walked_through() {
    let bench = Plan::backends(1).build().unwrap();
    let service = Service { more: "idle-timeout = \"4h\"", ..Service::new("udp", "least-packets", &[1]) };
    let config = config::text(&format!("max-flows = {}", flows() + flows() / 10), &[service]);
    let balancer = Balancer::start(&bench.balancer, &config).unwrap();
    status::wait_until_up(&balancer).unwrap();
    // Somebody must be there, or each datagram is answered with an error; nobody needs to read.
    let address = SocketAddr::from((backend_address(1), BACKEND_PORT));
    let _socket = bench.backends[0].run(|| Ok(UdpSocket::bind(address)?)).unwrap();
    let operator = Operator::new(&balancer);
    fill(&bench, &balancer);
    let active = || status::each(&status::read_fresh(&balancer).unwrap(), |backend| backend.active);
    assert_eq!(active(), [flows()]);

    let assert_steady = |what: &str, (oldest, slowest): (Duration, Duration), took: Duration| {
        println!("{what}: {took:.1?}; the oldest selection {oldest:.0?}, the slowest answer {slowest:.0?}");
        assert!(oldest < 3 * TICK && slowest < 3 * TICK, "{what}: {oldest:?}, {slowest:?}");
    };
    for _ in 0..3 {
        let begun = Instant::now();
        let (count, oldest, slowest) = watched(&balancer, || operator.ask(&CountFlows::default()));
        assert_eq!(count, FlowCount { flows: flows(), half_open: flows(), ..FlowCount::default() });
        assert_steady("count", (oldest, slowest), begun.elapsed());
    }
    let begun = Instant::now();
    let kill = KillFlows { all: true, ..KillFlows::default() };
    let (killed, oldest, slowest) = watched(&balancer, || operator.ask(&kill));
    assert_eq!(killed.killed, flows());
    assert_steady("kill", (oldest, slowest), begun.elapsed());
    assert_eq!(operator.ask(&CountFlows::default()), FlowCount::default());
    assert_eq!(active(), [0]);
}
