//! Who may take new flows: backends whose weight is 0, that come back from down, or of which none is left.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    env,
    io::ErrorKind,
    net::{SocketAddr, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use balancer_tests::{
    Balancer, Capture, Netns, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    echo::Echo,
    operator,
    responder::{self, Responders},
    status::{self, each},
    topology::{CLIENT, VIP, backend_address},
};
use balancer_user::api::BackendState::{self, Down, Up};

const LIMIT: Duration = Duration::from_secs(12);
/// Where the health of a backend is asked for.
const HEALTH_PORT: u16 = 9000;
const HEALTH: &str = "slow-start = \"2s\"\nidle-timeout = \"3s\"\n\
     health = { kind = \"tcp\", port = 9000, interval = \"200ms\", timeout = \"150ms\", rise = 2, fall = 2 }";

/// A backend that says its number before each datagram it sends back, and answers health checks. It dies with this value.
struct Server {
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    _health: Echo,
}

impl Server {
    fn start(netns: &Netns, number: u8) -> Server {
        let address = |port| SocketAddr::from((backend_address(number), port));
        let socket = netns.run(|| Ok(UdpSocket::bind(address(BACKEND_PORT))?)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let stopped = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let stopped = Arc::clone(&stopped);
            move || {
                let mut datagram = [0; 64];
                while !stopped.load(Relaxed) {
                    let Ok((length, client)) = socket.recv_from(&mut datagram[1..]) else { continue };
                    datagram[0] = number;
                    drop(socket.send_to(&datagram[..=length], client));
                }
            }
        });
        Server { stopped, thread: Some(thread), _health: Echo::tcp(netns, address(HEALTH_PORT)).unwrap() }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopped.store(true, Relaxed);
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// New flows at a steady rate, from its start on: when each was begun, and who answered.
struct Flows {
    stopped: Arc<AtomicBool>,
    thread: JoinHandle<Vec<(Instant, Option<u8>)>>,
}

impl Flows {
    /// Between two flows: 200 a second.
    const PERIOD: Duration = Duration::from_millis(5);

    fn start(bench: &Topology) -> Flows {
        let sockets = bench.client.run(|| Ok(std::fs::File::open("/proc/thread-self/ns/net")?)).unwrap();
        let stopped = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let stopped = Arc::clone(&stopped);
            move || {
                nix::sched::setns(sockets, nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
                let (begun, mut flows) = (Instant::now(), Vec::new());
                while !stopped.load(Relaxed) {
                    let due = begun + Flows::PERIOD * flows.len() as u32;
                    thread::sleep(due.saturating_duration_since(Instant::now()));
                    // A port that no flow has which is still remembered.
                    let flow = UdpSocket::bind((CLIENT, 10_000 + (flows.len() % 20_000) as u16)).unwrap();
                    flow.connect((VIP, VIP_PORT)).unwrap();
                    flow.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
                    let (now, mut answer) = (Instant::now(), [0; 8]);
                    // Who is not there is said so at once: its kernel refuses.
                    let by = flow.send(b"?").and_then(|_| flow.recv(&mut answer)).ok().map(|_| answer[0]);
                    flows.push((now, by));
                }
                flows
            }
        });
        Flows { stopped, thread }
    }

    fn finish(self) -> Vec<(Instant, Option<u8>)> {
        self.stopped.store(true, Relaxed);
        self.thread.join().unwrap()
    }
}

fn wait_for(balancer: &Balancer, expected: &[BackendState]) {
    let what = format!("the states {expected:?}");
    status::wait(balancer, &what, |status| each(status, |backend| backend.state) == expected).unwrap();
}

/// What one death came to: when the backend died, when it was down, when it lived again, and when it was up.
type Death = [Instant; 4];

/// A backend that dies under 200 new flows a second and comes back, over and over.
#[test]
fn a_backend_that_dies_and_comes_back_costs_little_and_is_not_flooded() {
    const BACKENDS: u8 = 3;
    let is_long = env::var_os("BALANCER_TEST_LONG").is_some();
    let deaths: Vec<u64> = if is_long { vec![5, 14, 20, 60] } else { vec![3] };
    // Then it flaps: three seconds down, three up, for two minutes.
    let flaps = if is_long { 20 } else { 2 };
    let bench = Plan::backends(BACKENDS).build().unwrap();
    // Who is not there says so to each.
    bench.backend(1).unwrap().set_sysctl("net/ipv4/icmp_ratelimit", "0").unwrap();
    let start = |number: u8| Server::start(bench.backend(number).unwrap(), number);
    let _others = [2, 3].map(start);
    let mut first = start(1);
    let service = Service { more: HEALTH, ..Service::new("udp", "least-packets", &[1; 3]) };
    let window = if is_long { 14 } else { 5 };
    let text = config::text("", &[service]).replace("window = \"5m\"", &format!("window = \"{window}s\""));
    let balancer = Balancer::start(&bench.balancer, &text).unwrap();
    wait_for(&balancer, &[Up; 3]);
    let flows = Flows::start(&bench);
    let state = |wanted: &[BackendState]| {
        let what = format!("one of {wanted:?}");
        let is_so =
            |status: &balancer_user::api::Status| wanted.contains(&status.services[0].backends[0].state);
        status::wait(&balancer, &what, is_so).unwrap();
        Instant::now()
    };
    let rest = |since: Instant, seconds: u64| {
        thread::sleep((since + Duration::from_secs(seconds)).saturating_duration_since(Instant::now()));
    };
    // Who comes back is a newcomer among those that have been there for a whole window.
    rest(Instant::now(), window + 1);
    let mut log: Vec<Death> = Vec::new();
    for (index, seconds) in deaths.iter().chain(&vec![3; flaps]).enumerate() {
        let died = Instant::now();
        drop(first);
        let down = state(&[Down]);
        rest(died, *seconds);
        let lives = Instant::now();
        first = start(1);
        log.push([died, down, lives, state(&[BackendState::Starting, Up])]);
        // Long enough for its share to have grown; a flap does not wait so long.
        rest(lives, if index < deaths.len() { 6 } else { 3 });
    }
    drop(first);
    let flows = flows.finish();

    let between = |from: Instant, until: Instant| {
        flows.iter().filter(move |(begun, _)| (from..until).contains(begun)).map(|(_, by)| *by)
    };
    let failed = |from, until| between(from, until).filter(Option::is_none).count();
    let second = Duration::from_secs(1);
    for (index, [died, down, lives, up]) in log.iter().enumerate() {
        // Its share of what comes until it is known to be down; nothing after that, however little it has carried.
        let unknown = (*down - *died).as_secs_f64();
        let most = unknown * 200.0 / f64::from(BACKENDS) * 1.3 + 5.0;
        let lost = failed(*died, *lives);
        assert!((lost as f64) < most, "{lost} lost in the {unknown} s until it was down");
        let settled = *down + Duration::from_millis(250);
        assert_eq!(failed(settled, *lives), 0, "lost although it was known to be down");
        assert!(unknown < 1.5, "down after {unknown} s");

        let share = |from: Instant, until: Instant| {
            let (all, own) =
                (between(from, until).count(), between(from, until).filter(|by| *by == Some(1)).count());
            own as f64 / all.max(1) as f64
        };
        let at_first = share(*up, *up + second);
        println!("death {index}: {lost} lost, down after {unknown:.1} s; then a share of {at_first:.2}");
        assert!(at_first < 1.0 / 3.0 + 0.05, "a share of {at_first} in the first second");
        if index < deaths.len() {
            let then = share(*up + 3 * second, *up + 5 * second);
            assert!((0.23..0.43).contains(&then), "a share of {then} then");
        }
    }
    let lost = flows.iter().filter(|(_, by)| by.is_none()).count();
    println!("{} flows, {} deaths, {lost} flows lost", flows.len(), log.len());
}

/// Weight 0 takes no new flow and keeps the old ones; all of them 0 is nobody, and not all alike.
#[test]
fn weights_of_zero_keep_their_flows_and_get_no_more() {
    let bench = Plan::backends(3).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    let text = |weights: &[u8]| config::text("", &[Service::new("udp", "least-packets", weights)]);
    let balancer = Balancer::start(&bench.balancer, &text(&[1, 0, 0])).unwrap();
    status::wait(&balancer, "a backend", |status| status.services[0].backends[0].share == 1.0).unwrap();
    let old = responder::connect(&bench).unwrap();
    assert_eq!(responder::ask(&old).unwrap(), 1);
    let reload = |weights: [u8; 3], shares: [bool; 3]| {
        balancer.reload(&text(&weights)).unwrap();
        status::wait(&balancer, "the shares", |status| each(status, |backend| backend.share > 0.0) == shares)
            .unwrap();
    };
    reload([0, 100, 100], [false, true, true]);
    let mut by = [0; 4];
    // Kept, so that no later flow comes from one of these ports.
    let flows: Vec<_> = (0..200).map(|_| responder::connect(&bench).unwrap()).collect();
    for flow in &flows {
        by[usize::from(responder::ask(flow).unwrap())] += 1;
    }
    assert_eq!(by[1], 0);
    assert_eq!(by.iter().sum::<u32>(), 200);
    assert_eq!(responder::ask(&old).unwrap(), 1);

    reload([0, 0, 0], [false; 3]);
    for _ in 0..10 {
        let flow = responder::connect(&bench).unwrap();
        flow.set_read_timeout(Some(LIMIT)).unwrap();
        flow.send(b"?").unwrap();
        assert_eq!(flow.recv(&mut [0; 8]).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert_eq!(responder::ask(&old).unwrap(), 1);
    }
    assert_eq!(status::drops(&status::read_fresh(&balancer).unwrap()), [("no-backend", 10)]);
    reload([0, 1, 0], [false, true, false]);
    assert_eq!(responder::ask(&responder::connect(&bench).unwrap()).unwrap(), 2);

    for (weight, written) in [("-1", "-1"), ("65536", "65536"), ("1.5", "1.5"), ("101", "101")] {
        balancer.place().write_config(&text(&[7, 1, 1]).replace("= 7", &format!("= {weight}"))).unwrap();
        let path = balancer.place().config();
        let said = operator::balancer(["check", "-c", path.to_str().unwrap()]).unwrap();
        let expected = format!(":18:10: `weight` is {written}; allowed: an integer from 0 to 100");
        assert!(said.code == 2 && said.text.contains(&expected), "{said:?}");
    }
}

/// With nobody left there is the configured answer and nothing else: no packet for the service leaves by any way, though
/// the host itself would forward it.
#[test]
fn nothing_leaves_for_who_is_not_there() {
    const CLIENTS: u16 = 40;
    let bench = Plan { forwarding: true, ..Plan::backends(4) }.build().unwrap();
    bench.balancer.ip(&format!("route add default via {}", backend_address(1))).unwrap();
    let start = |number: u8| Some(Server::start(bench.backend(number).unwrap(), number));
    let mut servers = [1, 2, 3, 4].map(start);
    let vip = |port: u16| SocketAddr::from((VIP, port));
    let more = "no-backend = \"reject\"\n\
        health = { kind = \"tcp\", port = 9000, interval = \"200ms\", timeout = \"150ms\", rise = 1, fall = 1 }";
    let hashed = Service { more, ..Service::new("udp", "source-hash", &[1; 4]) };
    let flows = Service { name: "flows".to_owned(), method: "maglev", address: vip(81), ..hashed.clone() };
    let tcp = Service { more, ..Service::new("tcp", "round-robin", &[1; 4]) };
    let empty = Service { name: "empty".to_owned(), backends: Vec::new(), address: vip(82), ..tcp.clone() };
    let silent = Service {
        name: "silent".to_owned(),
        address: vip(83),
        more: "no-backend = \"drop\"",
        ..Service::new("tcp", "round-robin", &[0; 4])
    };
    let services = [hashed, flows, tcp, empty, silent];
    let balancer = Balancer::start(&bench.balancer, &config::text("", &services)).unwrap();
    let states = |of_each: [BackendState; 4]| {
        let all = [of_each; 3].concat();
        status::wait(&balancer, "the states", |status| each(status, |backend| backend.state)[..12] == all)
            .unwrap()
    };
    states([Up; 4]);
    let leaks = bench.backends.iter().map(|netns| Capture::start(netns, "e0").unwrap());
    let leaks: Vec<Capture> = leaks.collect();

    // The same ports before and after, by the hash of the whole flow.
    let ask = |port: u16| {
        let flow = bench.client.run(|| Ok(UdpSocket::bind((CLIENT, port))?)).unwrap();
        flow.connect(vip(81)).unwrap();
        flow.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        responder::ask_within(&flow, b"?", Duration::from_secs(2)).ok()
    };
    let all = |()| -> Vec<Option<u8>> { (20_000..20_000 + CLIENTS).map(ask).collect() };
    let before = all(());
    assert!((1..=4).all(|number| before.contains(&Some(number))), "{before:?}");
    balancer.call(&["flows", "kill", "--all"]).unwrap();
    servers[0] = None;
    servers[2] = None;
    states([Down, Up, Down, Up]);
    let after = all(());
    for (before, after) in before.iter().zip(&after) {
        let is_gone = [Some(1), Some(3)].contains(before);
        assert!([Some(2), Some(4)].contains(after), "{after:?}");
        assert!(is_gone || after == before, "{before:?} moved to {after:?}");
    }

    balancer.call(&["flows", "kill", "--all"]).unwrap();
    servers[1] = None;
    servers[3] = None;
    states([Down; 4]);
    let refusals = |count: u64| {
        let drops = status::read_fresh(&balancer).unwrap();
        assert_eq!(status::drops(&drops), [("no-backend", count)]);
    };
    for port in 20_000..20_000 + CLIENTS {
        let flow = bench.client.run(|| Ok(UdpSocket::bind((CLIENT, port))?)).unwrap();
        flow.connect(vip(81)).unwrap();
        flow.set_read_timeout(Some(LIMIT)).unwrap();
        flow.send(b"?").unwrap();
        assert_eq!(flow.recv(&mut [0; 8]).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
    refusals(u64::from(CLIENTS));
    let connect = |port: u16, limit: Duration| {
        let connect = || Ok(TcpStream::connect_timeout(&vip(port), limit));
        bench.client.run(connect).unwrap().map_err(|error| error.kind())
    };
    for port in [VIP_PORT, 82] {
        assert_eq!(connect(port, LIMIT).err(), Some(ErrorKind::ConnectionRefused), "{port}");
    }
    // Who is told nothing waits.
    assert_eq!(connect(83, Duration::from_millis(500)).err(), Some(ErrorKind::TimedOut));
    refusals(u64::from(CLIENTS) + 3);

    servers[1] = start(2);
    states([Down, Up, Down, Down]);
    assert_eq!(ask(30_000), Some(2));
    for leak in leaks {
        let packets = leak.finish().unwrap();
        let leaked = packets.iter().filter(|packet| packet.destination.ip() == VIP);
        assert_eq!(leaked.count(), 0, "{packets:?}");
    }
}
