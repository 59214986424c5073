//! What outlives a daemon, and a changed configuration: flows, counters, and who drains.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    fs,
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use balancer_tests::{
    Balancer, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    echo::Echo,
    eventually, operator,
    status::{self, each},
    topology::{VIP, backend_address},
};
use balancer_user::api::{BackendState, Status};

const LIMIT: Duration = Duration::from_secs(12);

/// Backends that echo what they get over TCP, and a balancer before them.
struct Scene {
    // The balancer goes before its namespace.
    balancer: Option<Balancer>,
    _echoes: Vec<Echo>,
    bench: Topology,
}

fn service(weights: &[u8], more: &'static str) -> Service {
    Service { more, ..Service::new("tcp", "round-robin", weights) }
}

impl Scene {
    fn new(daemon: &str, service: Service) -> Scene {
        let bench = Plan::backends(service.backends.len() as u8).build().unwrap();
        let echo = |(number, netns)| {
            Echo::tcp(netns, SocketAddr::from((backend_address(number), BACKEND_PORT))).unwrap()
        };
        let echoes = (1..).zip(&bench.backends).map(echo).collect();
        let balancer = Balancer::start(&bench.balancer, &config::text(daemon, &[service])).unwrap();
        status::wait_until_up(&balancer).unwrap();
        Scene { balancer: Some(balancer), _echoes: echoes, bench }
    }

    fn balancer(&self) -> &Balancer {
        self.balancer.as_ref().unwrap()
    }

    fn connect(&self) -> TcpStream {
        let address = SocketAddr::from((VIP, VIP_PORT));
        let stream = self.bench.client.run(|| Ok(TcpStream::connect_timeout(&address, LIMIT)?)).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// Ends the daemon hard, and starts another one with a configuration.
    fn crash_and_start(&mut self, daemon: &str, service: Service) -> Status {
        let place = self.balancer.take().unwrap().crash();
        place.write_config(&config::text(daemon, &[service])).unwrap();
        self.balancer = Some(Balancer::start_in(place, &self.bench.balancer).unwrap());
        status::read_fresh(self.balancer()).unwrap()
    }

    fn wait(&self, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
        status::wait(self.balancer(), what, wanted).unwrap()
    }
}

/// Sends bytes, and gets the same ones back.
#[track_caller]
fn exchange(stream: &mut TcpStream, bytes: &[u8]) {
    stream.write_all(bytes).unwrap();
    let mut echoed = vec![0; bytes.len()];
    stream.read_exact(&mut echoed).unwrap();
    assert_eq!(echoed, bytes);
}

/// Waits until a connection is reset; it goes on until then.
#[track_caller]
fn wait_for_reset(stream: &mut TcpStream) -> Duration {
    let start = Instant::now();
    let end = eventually(LIMIT, "the connection's reset", || {
        let mut byte = [0; 1];
        match stream.write_all(b"x").and_then(|()| stream.read_exact(&mut byte)) {
            Ok(()) => None,
            Err(error) => Some(error.kind()),
        }
    });
    assert_eq!(end.unwrap(), ErrorKind::ConnectionReset);
    start.elapsed()
}

fn actives(status: &Status) -> Vec<u64> {
    each(status, |backend| backend.active)
}

#[test]
fn connections_and_counts_go_on_after_a_crash() {
    let mut scene = Scene::new("", service(&[1, 1, 1], ""));
    let mut streams: Vec<TcpStream> = (0..6).map(|_| scene.connect()).collect();
    streams.iter_mut().for_each(|stream| exchange(stream, b"before"));
    let before = scene.wait("six connections", |status| actives(status) == [2, 2, 2]);
    let packets = each(&before, |backend| backend.packets);

    let after = scene.crash_and_start("", service(&[1, 1, 1], ""));
    assert_eq!(actives(&after), [2, 2, 2]);
    let counted = each(&after, |backend| backend.packets);
    assert!(
        counted.iter().zip(&packets).all(|(after, before)| after >= before),
        "{counted:?} after {packets:?}"
    );
    streams.iter_mut().for_each(|stream| exchange(stream, &[7; 3_000]));
    drop(streams);
    scene.wait("their end", |status| actives(status) == [0, 0, 0]);
    // The turn goes on too.
    let mut streams: Vec<TcpStream> = (0..3).map(|_| scene.connect()).collect();
    streams.iter_mut().for_each(|stream| exchange(stream, b"after"));
    scene.wait("three new ones", |status| actives(status) == [1, 1, 1]);
}

#[test]
fn pins_that_somebody_removes_are_made_again_and_keep_others_out() {
    let mut scene = Scene::new("", service(&[1, 1], ""));
    let mut kept = scene.connect();
    exchange(&mut kept, b"before");
    let pins = scene.balancer().place().pins().to_owned();
    let names = |directory: &str| -> Vec<_> {
        let entries = fs::read_dir(pins.join(directory)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
        names.sort_unstable();
        names
    };
    let before = [names("maps"), names("links")];
    assert_eq!((before[0].len() > 10, before[1].len()), (true, 2), "{before:?}");

    fs::remove_dir_all(&pins).unwrap();
    let made =
        eventually(LIMIT, "the pins again", || ([names("maps"), names("links")] == before).then_some(()));
    made.unwrap_or_else(|error| panic!("{error}: {}", scene.balancer().log()));
    let count = before.iter().map(Vec::len).sum::<usize>();
    let said = format!("somebody has removed {count} pins below {}: they are there again", pins.display());
    assert!(scene.balancer().log().contains(&said), "{}", scene.balancer().log());

    // The new directory is claimed as well.
    let text = operator::refused(&scene.bench.balancer, &scene.balancer().place().config()).unwrap();
    let holder = format!("process {} holds", scene.balancer().id());
    assert!(text.contains(&holder), "{text}");

    scene.crash_and_start("", service(&[1, 1], ""));
    exchange(&mut kept, b"after");
}

/// Some of them are of no use: what they say of each other is not true any more.
#[test]
fn where_a_map_is_missing_a_start_is_refused_until_begun_afresh() {
    let mut scene = Scene::new("", service(&[1], ""));
    let place = scene.balancer.take().unwrap().crash();
    fs::remove_file(place.pins().join("maps/FLOWS")).unwrap();
    let text = operator::refused(&scene.bench.balancer, &place.config()).unwrap();
    assert!(
        text.contains("the map FLOWS is missing below") && text.contains("`balancer run --fresh`"),
        "{text}"
    );
}

#[test]
fn a_backend_that_left_the_configuration_drains_and_goes() {
    let mut scene = Scene::new("", service(&[1, 1], "drain-timeout = \"3s\""));
    let mut streams: Vec<TcpStream> = (0..2).map(|_| scene.connect()).collect();
    scene.wait("two connections", |status| actives(status) == [1, 1]);
    let mut left = service(&[1, 1], "drain-timeout = \"3s\"");
    left.backends.remove(0);
    let status = scene.crash_and_start("", left);
    assert_eq!(each(&status, |backend| backend.state), [BackendState::Up, BackendState::Leaving]);
    assert_eq!(actives(&status), [1, 1]);
    streams.iter_mut().for_each(|stream| exchange(stream, b"still there"));
    let mut new: Vec<TcpStream> = (0..4).map(|_| scene.connect()).collect();
    new.iter_mut().for_each(|stream| exchange(stream, b"elsewhere"));
    scene.wait("no new flow where none should be", |status| actives(status) == [5, 1]);
    // Round robin: the first connection is with the first backend.
    wait_for_reset(&mut streams[0]);
    exchange(&mut streams[1], b"not disturbed");
    scene.wait("its number to be free", |status| each(status, |backend| backend.state) == [BackendState::Up]);
    new.iter_mut().for_each(|stream| exchange(stream, b"not disturbed"));
}

#[test]
fn what_the_maps_cannot_hold_is_refused_until_begun_afresh() {
    let mut scene = Scene::new("max-flows = 2048", service(&[1], ""));
    let mut stream = scene.connect();
    exchange(&mut stream, b"before");
    let place = scene.balancer.take().unwrap().crash();
    place.write_config(&config::text("max-flows = 4096", &[service(&[1], "")])).unwrap();
    let said = operator::refused(&scene.bench.balancer, &place.config()).unwrap();
    for part in ["`max-flows` can't change without loss", "--fresh"] {
        assert!(said.contains(part), "{said}");
    }
    // The old program goes on as it was.
    exchange(&mut stream, b"go on");
    let binary = balancer_tests::process::balancer_binary().unwrap();
    let mut command = scene.bench.balancer.command(binary);
    command.args(["run", "--fresh", "-c"]).arg(place.config());
    let mut fresh = balancer_tests::Process::spawn(&mut command).unwrap();
    let log = eventually(LIMIT, "the fresh start", || {
        let log = fresh.log();
        (log.contains("balancing on") || fresh.ended().unwrap().is_some()).then_some(log)
    });
    assert!(log.as_ref().unwrap().contains("balancing on"), "{log:?}");
    wait_for_reset(&mut stream);
    let mut stream = scene.connect();
    exchange(&mut stream, b"anew");
    fresh.kill();
}

#[test]
fn a_reload_changes_what_the_file_changes_and_nothing_else() {
    let scene = Scene::new("", service(&[1, 1, 1], ""));
    let reload = |service: Service| scene.balancer().reload(&config::text("", &[service])).unwrap();
    let program = || operator::xdp(&scene.bench.balancer, "lc").unwrap().unwrap().program;
    let mut streams: Vec<TcpStream> = (0..3).map(|_| scene.connect()).collect();
    let before = scene.wait("three connections", |status| actives(status) == [1, 1, 1]);
    let id = program();
    for _ in 0..20 {
        reload(service(&[1, 1, 1], ""));
        streams.iter_mut().for_each(|stream| exchange(stream, b"on and on"));
    }
    let after = status::read_fresh(scene.balancer()).unwrap();
    assert_eq!((program(), actives(&after)), (id, vec![1, 1, 1]));
    assert!(after.window_ms > before.window_ms, "the window goes on");
    assert!(after.services[0].backends[0].window_packets >= 40, "{after:?}");

    // Weight 0: what is there goes on, nothing new comes.
    reload(service(&[0, 1, 1], ""));
    scene.wait("the weight", |status| each(status, |backend| backend.weight) == [0, 1, 1]);
    let mut more: Vec<TcpStream> = (0..4).map(|_| scene.connect()).collect();
    more.iter_mut().chain(&mut streams).for_each(|stream| exchange(stream, b"on"));
    scene.wait("the others' flows", |status| actives(status) == [1, 3, 3]);

    // What is no configuration changes nothing.
    scene.balancer().reload("[daemon]\ninterfaces = [\"lc\", \"lk\"]\ntock = \"1s\"\n").unwrap();
    let said = eventually(LIMIT, "the refusal in the log", || {
        let log = scene.balancer().log();
        log.contains("unknown key `tock`").then_some(log)
    });
    let said = said.unwrap();
    assert!(said.contains("reload refused, nothing has changed"), "{said}");
    scene.balancer().reload(&config::text("max-flows = 2048", &[service(&[1, 1, 1], "")])).unwrap();
    let said = eventually(LIMIT, "the second refusal in the log", || {
        let log = scene.balancer().log();
        log.contains("`max-flows`").then_some(log)
    });
    assert!(said.unwrap().contains("can't change while the balancer runs"));
    assert_eq!(each(&status::read_fresh(scene.balancer()).unwrap(), |backend| backend.weight), [0, 1, 1]);

    // The second goes, and its flows with the drain timeout; the first comes back.
    let mut without = service(&[1, 1, 1], "drain-timeout = \"1s\"");
    without.backends.remove(1);
    reload(without);
    let gone = [BackendState::Up, BackendState::Up, BackendState::Leaving];
    scene.wait("the second to leave", |status| each(status, |backend| backend.state) == gone);
    wait_for_reset(&mut streams[1]);
    scene.wait("its number to be free", |status| actives(status).len() == 2);
    exchange(&mut streams[0], b"on");
    exchange(&mut streams[2], b"on");
    reload(service(&[1, 1, 1], ""));
    scene.wait("three again", |status| {
        each(status, |backend| (backend.state, backend.share > 0.0)) == [(BackendState::Up, true); 3]
    });
    let mut again: Vec<TcpStream> = (0..3).map(|_| scene.connect()).collect();
    again.iter_mut().for_each(|stream| exchange(stream, b"round"));
}

/// What `backend drain` says, as JSON.
fn drain(scene: &Scene, words: &[&str]) -> serde_json::Value {
    let words = [&["backend", "drain"], words, &["--json"]].concat();
    serde_json::from_str(&scene.balancer().call(&words).unwrap()).unwrap()
}

#[test]
fn a_drained_backend_keeps_its_flows_until_the_deadline_also_over_a_crash() {
    let same = || service(&[1, 1], "persistence = { mask = 32, timeout = \"1m\" }");
    let mut scene = Scene::new("", same());
    let mut first = scene.connect();
    exchange(&mut first, b"with the first backend");
    let said = drain(&scene, &["b1", "--deadline", "10m"]);
    assert_eq!((said["service"].as_str(), said["backend"].as_str()), (Some("tcp"), Some("b1")));
    assert_eq!(said["remaining"], 1);
    let left = said["deadline_s"].as_f64().unwrap();
    assert!((599.0..=600.0).contains(&left), "{said}");
    // Persistence does not override it.
    let mut second = scene.connect();
    exchange(&mut second, b"with the second");
    let states = [BackendState::Draining, BackendState::Up];
    scene.wait("the drain", |status| {
        each(status, |backend| backend.state) == states && actives(status) == [1, 1]
    });
    exchange(&mut first, b"goes on");

    let after = scene.crash_and_start("", same());
    assert_eq!(each(&after, |backend| backend.state), states);
    let said = drain(&scene, &["b1"]);
    let left = said["deadline_s"].as_f64().unwrap();
    assert!(said["remaining"] == 1 && (500.0..600.0).contains(&left), "{said}");
    exchange(&mut first, b"still");
    let mut third = scene.connect();
    exchange(&mut third, b"with the second too");
    scene.wait("the third elsewhere", |status| actives(status) == [1, 2]);

    // Enabled again, and drained with an end.
    let said = scene.balancer().call(&["backend", "enable", "b1", "--service", "tcp"]).unwrap();
    assert_eq!(said, "b1 of tcp takes new flows\n");
    scene.wait("it to be up", |status| each(status, |backend| backend.state)[0] == BackendState::Up);
    let text = scene.balancer().call(&["backend", "drain", "b1", "--deadline", "2s"]).unwrap();
    assert_eq!(text, "b1 of tcp is draining: 1 flow left, none has ended yet; the deadline is in 2s\n");
    let time = wait_for_reset(&mut first);
    assert!(time > Duration::from_millis(1_500) && time < Duration::from_millis(4_000), "{time:?}");
    exchange(&mut second, b"not disturbed");
    scene.wait("its end", |status| actives(status) == [0, 2]);

    for (words, expected) in [
        (&["backend", "drain", "b3"][..], "there is no backend \"b3\""),
        (&["backend", "enable", "b1", "--service", "web"], "there is no service \"web\""),
    ] {
        let error = format!("{:#}", scene.balancer().call(words).unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
}

/// One that can't be reached is down after three seconds: UDP is scheduled anew then, connections are kept for the
/// `drain-timeout`.
#[test]
fn connections_to_a_backend_that_is_down_end_with_the_drain_timeout() {
    let scene = Scene::new("", service(&[1, 1], "drain-timeout = \"5s\""));
    let mut first = scene.connect();
    exchange(&mut first, b"with the first backend");
    let route = |verb: &str| {
        scene.bench.balancer.ip(&format!("route {verb} unreachable {}/32", backend_address(1))).unwrap();
    };
    route("add");
    scene.wait("it to be gone", |status| {
        each(status, |backend| backend.state)[0] == BackendState::Unreachable
    });
    // Back in time: nothing is lost.
    route("del");
    scene.wait("it to be back", |status| each(status, |backend| backend.state)[0] == BackendState::Up);
    exchange(&mut first, b"goes on");
    route("add");
    let time = wait_for_reset(&mut first);
    assert!(time > Duration::from_secs(4), "{time:?}");
}

/// A service that gets the number of one that has gone gets nothing of its ring.
#[test]
fn a_new_service_begins_with_an_empty_ring() {
    let only_one = "max-services = 1";
    let scene = Scene::new(only_one, service(&[1, 1], ""));
    // Kept: what it said at its end, to a flow that was killed, would be refused too.
    let _silent = scene.connect();
    scene.balancer().reload(&config::text(only_one, &[])).unwrap();
    scene.wait("no service", |status| status.services.is_empty());
    scene.balancer().call(&["flows", "kill", "--all"]).unwrap();
    // Another service, and nobody to serve it: refused until the backends of the first have gone with their last flow.
    let address = SocketAddr::from((VIP, 81));
    let method = "least-packets";
    let other = Service { address, method, backends: Vec::new(), ..service(&[], "") };
    let other = config::text(only_one, &[other]);
    eventually(LIMIT, "the other service", || {
        scene.balancer().reload(&other).unwrap();
        let status = status::read_fresh(scene.balancer()).unwrap();
        (status.services.len() == 1).then_some(())
    })
    .unwrap();
    assert!(scene.balancer().log().contains("no room for another service while others drain"));
    let refused = scene.bench.client.run(|| Ok(TcpStream::connect_timeout(&address, LIMIT))).unwrap();
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::ConnectionRefused);
    assert_eq!(status::drops(&status::read_fresh(scene.balancer()).unwrap()), [("no-backend", 1)]);
}
