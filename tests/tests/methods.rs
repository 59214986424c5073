//! Methods that look at requests or at hashes, and who may take a flow at all: from real sockets.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use balancer_tests::{
    Balancer, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    responder::{self, Responders},
    status::{self, each},
    topology::{CLIENT, VIP, backend_address},
};
use balancer_user::api::Status;

const LIMIT: Duration = Duration::from_secs(5);

/// A balancer before UDP backends that say who they are.
struct Scene {
    // The balancer goes before its namespace.
    balancer: Balancer,
    _responders: Responders,
    bench: Topology,
}

impl Scene {
    fn new(
        method: &'static str,
        more: &'static str,
        weights: &[u8],
        edit: impl Fn(String) -> String,
    ) -> Scene {
        let bench = Plan::backends(weights.len() as u8).build().unwrap();
        bench.client.ip("address add 10.0.1.128/25 dev c0").unwrap();
        let responders = Responders::start(&bench).unwrap();
        let service = Service { more, ..Service::new("udp", method, weights) };
        let balancer = Balancer::start(&bench.balancer, &edit(config::text("", &[service]))).unwrap();
        status::wait_until_up(&balancer).unwrap();
        Scene { balancer, _responders: responders, bench }
    }

    /// A flow from this address; the socket, and the number of its backend.
    fn flow(&self, address: Ipv4Addr) -> (UdpSocket, u8) {
        let socket = self.bench.client.run(|| Ok(UdpSocket::bind(SocketAddr::from((address, 0)))?)).unwrap();
        socket.connect((VIP, VIP_PORT)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let backend = responder::ask(&socket).unwrap();
        (socket, backend)
    }

    fn flows(&self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.flow(CLIENT).1).collect()
    }

    fn wait(&self, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
        status::wait(&self.balancer, what, wanted).unwrap()
    }

    /// Makes it so that backends can or can't be reached.
    fn reach(&self, number: u8, can: bool) {
        let address = backend_address(number);
        let change = if can { "route del unreachable" } else { "route add unreachable" };
        self.bench.balancer.ip(&format!("{change} {address}/32")).unwrap();
        self.wait("the route's effect", |status| {
            each(status, |backend| backend.state == balancer_user::api::BackendState::Up)
                [usize::from(number) - 1]
                == can
        });
    }
}

fn as_it_is(text: String) -> String {
    text
}

#[test]
fn a_client_keeps_its_backend_until_that_takes_none() {
    let scene = Scene::new("round-robin", "persistence = { mask = 32, timeout = \"1m\" }", &[1; 3], as_it_is);
    let (_, own) = scene.flow(CLIENT);
    assert_eq!(scene.flows(20), vec![own; 20]);
    // Another client has the next one, and that one has it for good as well.
    let other = Ipv4Addr::new(10, 0, 1, 128);
    let (_, others) = scene.flow(other);
    assert_ne!(others, own);
    assert_eq!((0..5).map(|_| scene.flow(other).1).collect::<Vec<_>>(), [others; 5]);
    scene.reach(own, false);
    let (_, new) = scene.flow(CLIENT);
    assert_ne!(new, own);
    scene.reach(own, true);
    assert_eq!(scene.flows(5), [new; 5]);
}

/// What is remembered of a client fills nobody up, and keeps no backup at work.
#[test]
fn a_client_does_not_keep_a_backend_that_is_full_or_a_backup() {
    let edit = |text: String| {
        text.replace("name = \"b1\"", "name = \"b1\"\nmax-active = 3")
            .replace("name = \"b3\"", "name = \"b3\"\nbackup = true")
    };
    let persistence = "persistence = { mask = 32, timeout = \"1m\" }\nidle-timeout = \"1m\"";
    let scene = Scene::new("round-robin", persistence, &[1, 1, 1], edit);
    assert_eq!(scene.flows(3), [1; 3]);
    let may_take = |number: usize, may: bool| {
        scene.wait("the ring", |status| each(status, |backend| backend.share > 0.0)[number - 1] == may);
    };
    may_take(1, false);
    assert_eq!(scene.flows(4), [2; 4]);
    scene.reach(2, false);
    assert_eq!(scene.flows(4), [3; 4]);
    scene.reach(2, true);
    may_take(3, false);
    assert_eq!(scene.flows(4), [2; 4]);
    assert_eq!(status::drops(&status::read_fresh(&scene.balancer).unwrap()), []);
}

/// A client that is remembered leaves a backend that drains, also for the backup when no other is left; its old flows stay where
/// they are, and it comes back from the backup when it may, but not from one that has served it in between.
#[test]
fn a_client_leaves_a_backend_that_drains_and_its_flows_stay() {
    let edit = |text: String| text.replace("name = \"b3\"", "name = \"b3\"\nbackup = true");
    let persistence = "persistence = { mask = 32, timeout = \"1m\" }";
    let scene = Scene::new("round-robin", persistence, &[1, 1, 1], edit);
    let (old, first) = scene.flow(CLIENT);
    assert_eq!((first, scene.flows(4)), (1, vec![1; 4]));
    let drain = |number: u8, verb: &str| {
        scene.balancer.call(&["backend", verb, &format!("b{number}")]).unwrap();
    };
    let share = |wanted: [bool; 3]| {
        scene.wait("the ring", |status| each(status, |backend| backend.share > 0.0) == wanted);
    };
    drain(1, "drain");
    share([false, true, false]);
    let (second, number) = scene.flow(CLIENT);
    assert_eq!((number, scene.flows(4)), (2, vec![2; 4]));
    drain(2, "drain");
    share([false, false, true]);
    assert_eq!(scene.flows(4), [3; 4]);
    assert_eq!([&old, &second].map(|flow| responder::ask(flow).unwrap()), [1, 2]);
    drain(1, "enable");
    share([true, false, false]);
    assert_eq!(scene.flows(4), [1; 4]);
    drain(2, "enable");
    share([true, true, false]);
    assert_eq!(scene.flows(4), [1; 4]);
    assert_eq!([&old, &second].map(|flow| responder::ask(flow).unwrap()), [1, 2]);
    assert_eq!(status::drops(&status::read_fresh(&scene.balancer).unwrap()), []);
}

#[test]
fn a_backup_comes_when_no_other_can_and_goes_again() {
    let edit = |text: String| text.replace("name = \"b3\"", "name = \"b3\"\nbackup = true");
    let scene = Scene::new("least-packets", "", &[1; 3], edit);
    let mut picks = scene.flows(12);
    picks.sort_unstable();
    assert_eq!(picks, [[1; 6], [2; 6]].concat());
    scene.reach(1, false);
    assert_eq!(scene.flows(6), [2; 6]);
    scene.reach(2, false);
    assert_eq!(scene.flows(6), [3; 6]);
    scene.reach(1, true);
    assert_eq!(scene.flows(6), [1; 6]);
}

#[test]
fn a_full_backend_takes_no_more_and_then_nobody_does() {
    let edit = |text: String| text.replace("weight = 1", "weight = 1\nmax-active = 3");
    let scene = Scene::new("least-request", "idle-timeout = \"2s\"", &[1; 2], edit);
    let picks = scene.flows(6);
    assert_eq!([1, 2].map(|number| picks.iter().filter(|pick| **pick == number).count()), [3, 3]);
    let refused = scene.bench.client.run(|| Ok(UdpSocket::bind(SocketAddr::from((CLIENT, 0)))?)).unwrap();
    refused.connect((VIP, VIP_PORT)).unwrap();
    refused.set_read_timeout(Some(LIMIT)).unwrap();
    refused.send(b"is there room?").unwrap();
    let error = refused.recv(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{error}");
    let status = status::read_fresh(&scene.balancer).unwrap();
    assert_eq!(status::drops(&status), [("no-backend", 1)]);
    scene.wait("the flows' end", |status| each(status, |backend| backend.active) == [0, 0]);
    scene.wait("room", |status| each(status, |backend| backend.share > 0.0) == [true, true]);
    scene.flow(CLIENT);
}

/// A burst of more flows than the ring is long, from two threads, between two looks of the controller.
#[test]
fn a_burst_does_not_overfill_a_backend() {
    let edit = |text: String| {
        text.replace("[daemon]", "[daemon]\ntick = \"1s\"")
            .replace("weight = 1", "weight = 1\nmax-active = 3")
    };
    let scene = Scene::new("least-request", "no-backend = \"drop\"", &[1; 2], edit);
    let burst = |first: u16| -> Vec<UdpSocket> {
        (first..first + 200)
            .map(|port| {
                let bind = || Ok(UdpSocket::bind(SocketAddr::from((CLIENT, port)))?);
                let socket = scene.bench.client.run(bind).unwrap();
                socket.connect((VIP, VIP_PORT)).unwrap();
                socket
            })
            .collect()
    };
    let sockets = [burst(20_000), burst(30_000)];
    thread::scope(|scope| {
        for sockets in &sockets {
            scope.spawn(|| sockets.iter().for_each(|socket| _ = socket.send(b"me").unwrap()));
        }
    });
    let status = scene.wait("all of them", |status| {
        let drops: u64 = status::drops(status).iter().map(|(_, count)| count).sum();
        each(status, |backend| backend.active).iter().sum::<u64>() + drops == 400
    });
    assert_eq!(each(&status, |backend| backend.active), [3, 3]);
    assert_eq!(status::drops(&status), [("no-backend", 394)]);
}

#[test]
fn the_source_decides_and_few_flows_move_when_a_backend_goes() {
    let scene = Scene::new("source-hash", "", &[1; 3], as_it_is);
    let clients: Vec<Ipv4Addr> = (129..189).map(|last| Ipv4Addr::new(10, 0, 1, last)).collect();
    let all: String = clients.iter().map(|client| format!("address add {client}/32 dev c0\n")).collect();
    scene.bench.client.ip_batch(&all).unwrap();
    let picks = || -> BTreeMap<Ipv4Addr, u8> {
        clients.iter().map(|client| (*client, scene.flow(*client).1)).collect()
    };
    let before = picks();
    assert_eq!(picks(), before, "another port of the same client");
    for number in 1..=3 {
        let count = before.values().filter(|pick| **pick == number).count();
        assert!((10..=32).contains(&count), "{number} has {count}: {before:?}");
    }
    scene.reach(2, false);
    let after = picks();
    let moved = before.iter().filter(|(client, pick)| **pick != 2 && after[client] != **pick).count();
    assert!(moved * 3 <= 2 * clients.len(), "{moved} moved");
    assert!(after.values().all(|pick| *pick != 2));
    scene.reach(2, true);
    assert_eq!(picks(), before);
}

#[test]
fn the_flow_decides_with_maglev() {
    let scene = Scene::new("maglev", "", &[1, 1, 2], as_it_is);
    let picks = scene.flows(120);
    let counts = [1, 2, 3].map(|number| picks.iter().filter(|pick| **pick == number).count());
    assert!(counts[0] > 15 && counts[1] > 15 && counts[2] > 40, "{counts:?}");
    // The same flow stays where it is.
    let (socket, own) = scene.flow(CLIENT);
    assert!((0..10).all(|_| responder::ask(&socket).unwrap() == own));
}

/// A TCP server that answers each byte after a while.
struct Slow {
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Slow {
    fn start(bench: &Topology, number: u8, delay: Duration) -> Slow {
        let address = SocketAddr::from((backend_address(number), BACKEND_PORT));
        let listener =
            bench.backends[usize::from(number) - 1].run(|| Ok(TcpListener::bind(address)?)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let stopped = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let stopped = Arc::clone(&stopped);
            move || {
                thread::scope(|scope| {
                    while !stopped.load(Relaxed) {
                        match listener.accept() {
                            Ok((stream, _)) => drop(scope.spawn(|| answer(stream, delay, &stopped))),
                            Err(_) => thread::sleep(Duration::from_millis(1)),
                        }
                    }
                });
            }
        });
        Slow { stopped, thread: Some(thread) }
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.stopped.store(true, Relaxed);
        drop(self.thread.take().map(JoinHandle::join));
    }
}

fn answer(mut stream: TcpStream, delay: Duration, stopped: &AtomicBool) {
    drop(
        stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(Duration::from_millis(20)))),
    );
    let mut byte = [0; 1];
    while !stopped.load(Relaxed) {
        match stream.read(&mut byte) {
            Ok(0) => return,
            Ok(_) => {
                thread::sleep(delay);
                drop(stream.write_all(&byte));
            }
            Err(_) => {}
        }
    }
}

/// A balancer before TCP backends that take so many milliseconds to answer.
fn slow_scene(method: &'static str, more: &'static str, delays: &[u64]) -> (Balancer, Vec<Slow>, Topology) {
    let bench = Plan::backends(delays.len() as u8).build().unwrap();
    let slow =
        (1..).zip(delays).map(|(number, delay)| Slow::start(&bench, number, Duration::from_millis(*delay)));
    let slow = slow.collect();
    let service = Service { more, ..Service::new("tcp", method, &vec![1; delays.len()]) };
    let balancer = Balancer::start(&bench.balancer, &config::text("", &[service])).unwrap();
    status::wait_until_up(&balancer).unwrap();
    (balancer, slow, bench)
}

fn connect(bench: &Topology) -> TcpStream {
    let stream = bench
        .client
        .run(|| Ok(TcpStream::connect_timeout(&SocketAddr::from((VIP, VIP_PORT)), LIMIT)?))
        .unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

fn ask(stream: &mut TcpStream) {
    stream.write_all(b"x").unwrap();
    stream.read_exact(&mut [0; 1]).unwrap();
}

/// What is measured is the servers' own delay, from their first byte to ours; and new flows follow it.
#[test]
fn response_times_are_measured_and_followed() {
    let (balancer, _slow, bench) = slow_scene("least-response-time", "", &[40, 10]);
    let mut streams: Vec<TcpStream> = (0..2).map(|_| connect(&bench)).collect();
    for _ in 0..5 {
        streams.iter_mut().for_each(ask);
    }
    let status = status::wait(&balancer, "ten answers", |status| {
        each(status, |backend| backend.response_time.map_or(0, |time| time.answers)) == [5, 5]
    });
    let times = each(&status.unwrap(), |backend| backend.response_time.unwrap());
    for (time, delay) in times.iter().zip([40.0, 10.0]) {
        assert!(time.mean_ms >= delay && time.mean_ms < delay * 1.8, "{time:?}");
        assert!(time.p50_ms > delay / 2.1 && time.p99_ms < delay * 4.0, "{time:?}");
    }
    // Active × time is to be equal: of ten connections, two are with the slow one.
    let mut more: Vec<TcpStream> = (0..8).map(|_| connect(&bench)).collect();
    let status = status::wait(&balancer, "ten connections", |status| {
        each(status, |backend| backend.active).iter().sum::<u64>() == 10
    });
    let active = each(&status.unwrap(), |backend| backend.active);
    assert!(active[0] <= 3 && active[1] >= 7, "{active:?}");
    more.iter_mut().for_each(ask);
}

/// Connections that are kept and say nothing weigh nothing; a question without an answer does.
#[test]
fn exchanges_count_while_the_client_waits() {
    let (balancer, _slow, bench) = slow_scene("least-request", "requests = \"exchange\"", &[1_500, 1_500]);
    let mut streams: Vec<TcpStream> = (0..2).map(|_| connect(&bench)).collect();
    streams[0].write_all(b"x").unwrap();
    let waiting = |numbers: [u64; 2]| {
        move |status: &Status| each(status, |backend| backend.awaiting) == numbers.map(Some)
    };
    let status = status::wait(&balancer, "one that waits", waiting([1, 0])).unwrap();
    assert_eq!(each(&status, |backend| (backend.active, backend.n)), [(1, 1.0), (1, 0.0)]);
    // The next ones are charged as if they asked at once: the one that waits is behind by one.
    let more: Vec<TcpStream> = (0..3).map(|_| connect(&bench)).collect();
    status::wait(&balancer, "the others", |status| {
        each(status, |backend| backend.active).iter().sum::<u64>() == 5
    })
    .unwrap();
    streams[0].read_exact(&mut [0; 1]).unwrap();
    let status = status::wait(&balancer, "nobody who waits", waiting([0, 0])).unwrap();
    assert_eq!(each(&status, |backend| backend.n), [0.0, 0.0]);
    drop((more, streams));
    status::wait(&balancer, "the end", |status| each(status, |backend| backend.active) == [0, 0]).unwrap();
}
