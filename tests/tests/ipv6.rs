//! IPv6 from end to end where it is more than another address in the same test (those of `traffic` run over both families):
//! what operators see and say, translated sources, what outlives a daemon, refusals, and the ways to backends.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    collections::BTreeMap,
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use balancer_common::FIRST_SNAT_PORT;
use balancer_tests::{
    Balancer, Capture, Netns, Plan, Process, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    echo::Echo,
    eventually,
    nginx::Nginx,
    operator,
    packet::Segment,
    process::{Place, balancer_binary},
    status::{self, each},
    topology::{BALANCER_BACKEND_SIDE6, CLIENT6, Family, VIP, VIP6, backend_address, backend_address6, mac},
    veth::{self, End},
};
use balancer_user::api::{BackendState, FlowCount, FlowList, Status};

const LIMIT: Duration = Duration::from_secs(12);
const VIP_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V6(VIP6), VIP_PORT);
/// A second address of the client's device, in the same network of 64 bits.
const SECOND_CLIENT: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 0x20);
/// A client on the backends' network.
const NEIGHBOUR: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 0x150);

fn bench(backends: u8) -> Topology {
    let bench = Plan { ipv6: true, ..Plan::backends(backends) }.build().unwrap();
    // Deprecated: nobody uses it who does not ask for it.
    bench.client.ip(&format!("address add {SECOND_CLIENT}/64 dev c0 nodad preferred_lft 0")).unwrap();
    bench
}

fn tcp(weights: &[u8], more: &'static str) -> Service {
    Service { more, ..Service::of(Family::Ipv6, "tcp", "round-robin", weights) }
}

fn udp(weights: &[u8], more: &'static str) -> Service {
    Service { more, ..Service::of(Family::Ipv6, "udp", "round-robin", weights) }
}

/// Servers on every backend that echo what they get, over TCP and UDP and both families, and a balancer before them.
struct Scene {
    // The balancer goes before its namespace.
    balancer: Option<Balancer>,
    _servers: Vec<Echo>,
    bench: Topology,
}

impl Scene {
    fn new(daemon: &str, services: &[Service]) -> Scene {
        let bench = bench(services.iter().map(|service| service.backends.len()).max().unwrap() as u8);
        let servers = (1..).zip(&bench.backends).flat_map(|(number, netns)| {
            [Family::Ipv4, Family::Ipv6].into_iter().flat_map(move |family| {
                let address = SocketAddr::new(family.backend(number), BACKEND_PORT);
                [Echo::tcp(netns, address).unwrap(), Echo::udp(netns, address).unwrap()]
            })
        });
        let servers = servers.collect();
        let balancer = Balancer::start(&bench.balancer, &config::text(daemon, services)).unwrap();
        status::wait_until_up(&balancer).unwrap();
        Scene { balancer: Some(balancer), _servers: servers, bench }
    }

    fn balancer(&self) -> &Balancer {
        self.balancer.as_ref().unwrap()
    }

    fn crash(&mut self) -> Place {
        self.balancer.take().unwrap().crash()
    }

    fn connect(&self, address: impl Into<SocketAddr>) -> TcpStream {
        let address = address.into();
        let opened = self.bench.client.run(|| Ok(TcpStream::connect_timeout(&address, LIMIT)?));
        let mut stream = opened.unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        talk(&mut stream, b"hello");
        stream
    }

    /// A UDP conversation from this address, which has had an answer.
    fn converse(&self, client: impl Into<IpAddr>, port: u16) -> UdpSocket {
        let client = SocketAddr::new(client.into(), port);
        let socket = self.bench.client.run(|| Ok(UdpSocket::bind(client)?)).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.connect(VIP_ADDRESS).unwrap();
        socket.send(b"hello").unwrap();
        let mut answer = [0; 8];
        assert_eq!(socket.recv(&mut answer).unwrap(), 5);
        socket
    }

    fn wait(&self, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
        status::wait(self.balancer(), what, wanted).unwrap()
    }

    /// What a verb prints as JSON.
    fn read<T: serde::de::DeserializeOwned>(&self, words: &str) -> T {
        let words: Vec<&str> = words.split(' ').chain(["--json"]).collect();
        serde_json::from_str(&self.balancer().call(&words).unwrap()).unwrap()
    }

    /// Which backend each client's flow went to.
    fn served(&self) -> BTreeMap<SocketAddr, String> {
        let list: FlowList = self.read("flows list");
        list.flows.into_iter().map(|flow| (flow.client, flow.backend)).collect()
    }
}

/// Sends bytes, and gets the same ones back.
#[track_caller]
fn talk(stream: &mut TcpStream, bytes: &[u8]) {
    stream.write_all(bytes).unwrap();
    let mut echoed = vec![0; bytes.len()];
    stream.read_exact(&mut echoed).unwrap();
    assert_eq!(echoed, bytes);
}

/// Waits until a connection is reset; it goes on until then.
#[track_caller]
fn wait_for_reset(stream: &mut TcpStream) {
    let end = eventually(LIMIT, "the connection's reset", || {
        stream.write_all(b"x").and_then(|()| stream.read_exact(&mut [0; 1])).err()
    });
    assert_eq!(end.unwrap().kind(), ErrorKind::ConnectionReset);
}

fn actives(status: &Status) -> Vec<u64> {
    each(status, |backend| backend.active)
}

#[test]
fn operators_see_whole_addresses_and_ask_by_them() {
    let scene = Scene::new("", &[tcp(&[1, 1], ""), udp(&[1, 1], "")]);
    let mut stream = scene.connect(VIP_ADDRESS);
    let client = stream.local_addr().unwrap();
    let _conversation = scene.converse(SECOND_CLIENT, 41_000);

    let text = scene.balancer().call(&["status"]).unwrap();
    for part in [
        "[2001:db8:aa::10]:80/tcp",
        "[2001:db8:aa::10]:80/udp",
        "[2001:db8:2::11]:8080",
        "[2001:db8:2::12]:8080",
    ] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    let status = status::read(scene.balancer()).unwrap();
    assert_eq!(status.services[0].address, VIP_ADDRESS);
    assert_eq!(status.services[0].backends[1].address, (backend_address6(2), BACKEND_PORT).into());

    let list: FlowList = scene.read("flows list --service tcp6");
    let [flow] = &list.flows[..] else { panic!("{list:?}") };
    assert_eq!((flow.client, flow.service_address), (client, VIP_ADDRESS));
    assert_eq!((flow.service.as_str(), flow.backend.as_str()), ("tcp6", "b1"));
    assert_eq!(flow.backend_address, (backend_address6(1), BACKEND_PORT).into());
    let text = scene.balancer().call(&["flows", "list"]).unwrap();
    for part in [client.to_string().as_str(), "[2001:db8:1::20]:41000", "[2001:db8:2::11]:8080"] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    for (clients, count) in [
        ("2001:db8:1::/64", 2),
        ("2001:db8:1::20", 1),
        ("2001:db8:1::20/123", 1),
        ("2001:db8:1::30", 0),
        ("2001:db8:1:8000::/49", 0),
        ("::/0", 2),
        ("0.0.0.0/0", 0),
    ] {
        let counted: FlowCount = scene.read(&format!("flows count --client {clients}"));
        assert_eq!(counted.flows, count, "{clients}");
    }
    let text = scene.balancer().call(&["explain", "tcp6"]).unwrap();
    assert!(text.starts_with("tcp6  [2001:db8:aa::10]:80  round-robin\n"), "{text}");

    // The killed connection's next segment is one of no flow.
    scene.balancer().call(&["flows", "kill", "--client", "2001:db8:1::10"]).unwrap();
    wait_for_reset(&mut stream);
    let left: FlowCount = scene.read("flows count");
    assert_eq!(left.flows, 1);
    let status = status::read_fresh(scene.balancer()).unwrap();
    assert_eq!(status::drops(&status), [("unknown-flow", 1)]);
}

#[test]
fn both_families_are_served_side_by_side() {
    let scene = Scene::new("", &[tcp(&[1, 1], ""), Service::new("tcp", "round-robin", &[1, 1])]);
    let mut streams: Vec<TcpStream> =
        (0..4).flat_map(|_| [scene.connect(VIP_ADDRESS), scene.connect((VIP, VIP_PORT))]).collect();
    let status = scene.wait("eight connections", |status| actives(status) == [2; 4]);
    assert_eq!(status::drops(&status), []);
    streams.iter_mut().for_each(|stream| talk(stream, &[7; 3000]));
    let counted = |clients: &str| scene.read::<FlowCount>(&format!("flows count --client {clients}")).flows;
    assert_eq!((counted("::/0"), counted("0.0.0.0/0")), (4, 4));
    drop(streams);
    scene.wait("their end", |status| actives(status) == [0; 4]);
}

#[test]
fn clients_of_one_network_are_remembered_together_and_hashes_keep_a_client() {
    let scene = Scene::new("", &[udp(&[1, 1, 1], "persistence = { mask = 64, timeout = \"1m\" }")]);
    let _remembered: Vec<_> = (0..3)
        .flat_map(|turn| {
            [scene.converse(CLIENT6, 41_000 + turn), scene.converse(SECOND_CLIENT, 41_000 + turn)]
        })
        .collect();
    let served = scene.served();
    assert_eq!(served.len(), 6);
    assert!(served.values().all(|backend| *backend == "b1"), "{served:?}");

    // By the whole address, each has a turn of its own.
    let scene = Scene::new("", &[udp(&[1, 1, 1], "persistence = {}")]);
    let _remembered: Vec<_> = (0..3)
        .flat_map(|turn| {
            [scene.converse(CLIENT6, 41_000 + turn), scene.converse(SECOND_CLIENT, 41_000 + turn)]
        })
        .collect();
    for (client, backend) in scene.served() {
        let expected = if client.ip() == CLIENT6 { "b1" } else { "b2" };
        assert_eq!(backend, expected, "{client}");
    }

    let scene = Scene::new("", &[Service { method: "source-hash", ..udp(&[1, 1, 1], "") }]);
    let clients: Vec<Ipv6Addr> =
        (0..24).map(|host| Ipv6Addr::from_bits(CLIENT6.to_bits() + 0x100 + host)).collect();
    let lines: String =
        clients.iter().map(|client| format!("address add {client}/64 dev c0 nodad\n")).collect();
    scene.bench.client.ip_batch(&lines).unwrap();
    let _flows: Vec<_> = clients
        .iter()
        .flat_map(|client| [scene.converse(*client, 41_000), scene.converse(*client, 41_001)])
        .collect();
    let served = scene.served();
    let mut shares: BTreeMap<&str, usize> = BTreeMap::new();
    for client in &clients {
        let [first, second] =
            [41_000, 41_001].map(|port| served[&SocketAddr::from((*client, port))].as_str());
        assert_eq!(first, second, "{client}");
        *shares.entry(first).or_default() += 1;
    }
    assert_eq!(shares.len(), 3, "{shares:?}");
}

/// A web server on each backend, which answers with its name: b1, b2, ….
fn web_servers(bench: &Topology) -> Vec<Nginx> {
    let numbered = (1..).zip(&bench.backends);
    let start = |(number, netns)| {
        Nginx::start(netns, (backend_address6(number), BACKEND_PORT), &format!("b{number}")).unwrap()
    };
    numbered.map(start).collect()
}

/// Asks for a page so often: how often each answered.
fn curl(netns: &Netns, times: usize) -> BTreeMap<String, usize> {
    let always = ["--silent", "--show-error", "--fail", "--max-time", "5"];
    let url = format!("http://{VIP_ADDRESS}/name");
    let mut census = BTreeMap::new();
    for _ in 0..times {
        let answer = netns.output("curl", &[&always[..], &[&url]].concat()).unwrap();
        *census.entry(answer).or_default() += 1;
    }
    census
}

/// Backends that call their own service, and a neighbour of theirs, are given an address and port of the balancer's; nobody
/// else is.
#[test]
fn near_clients_are_given_a_source() {
    for weights in [&[1, 1, 1][..], &[1]] {
        let bench = bench(weights.len() as u8);
        let _servers = web_servers(&bench);
        let balancer = Balancer::start(&bench.balancer, &config::text("", &[tcp(weights, "")])).unwrap();
        status::wait_until_up(&balancer).unwrap();
        let neighbour = Netns::new("neighbour").unwrap();
        veth::pair(
            End { netns: &bench.switch, device: "np", mac: None },
            End { netns: &neighbour, device: "n0", mac: Some([2, 0, 10, 0, 2, 150]) },
            1500,
        )
        .unwrap();
        bench.switch.ip("link set np master br0").unwrap();
        neighbour.set_sysctl("net/ipv6/conf/n0/disable_ipv6", "0").unwrap();
        let lines =
            format!("address add {NEIGHBOUR}/64 dev n0 nodad\nroute add ::/0 via {BALANCER_BACKEND_SIDE6}\n");
        neighbour.ip_batch(&lines).unwrap();
        veth::finish_checksums(&neighbour, "n0").unwrap();

        let share = 30 / weights.len();
        let expected: BTreeMap<_, _> =
            (1..=weights.len()).map(|number| (format!("b{number}"), share)).collect();
        for (caller, is_near) in
            [(bench.backend(1).unwrap(), true), (&neighbour, true), (&bench.client, false)]
        {
            let wire = Capture::start(&bench.switch, "lkp").unwrap();
            assert_eq!(curl(caller, 30), expected, "{}", caller.name());
            let sent = wire.finish().unwrap();
            let requests = || sent.iter().filter(|packet| packet.destination.port() == BACKEND_PORT);
            assert_eq!(requests().filter(|packet| packet.flags == Segment::SYN).count(), 30);
            for packet in requests() {
                let is_given =
                    packet.source.ip() == BALANCER_BACKEND_SIDE6 && packet.source.port() >= FIRST_SNAT_PORT;
                assert_eq!(is_given, is_near, "{}: {packet:?}", caller.name());
                assert!(is_near || packet.source.ip() == CLIENT6, "{packet:?}");
            }
        }
        let ended =
            status::wait(&balancer, "no connection left", |status| actives(status).iter().sum::<u64>() == 0);
        assert_eq!(status::drops(&ended.unwrap()), []);
    }
}

#[test]
fn connections_and_counts_outlive_a_daemon() {
    let mut scene = Scene::new("", &[tcp(&[1, 1, 1], "")]);
    let mut streams: Vec<TcpStream> = (0..6).map(|_| scene.connect(VIP_ADDRESS)).collect();
    let before = scene.wait("six connections", |status| actives(status) == [2; 3]);
    let shown = scene.served();
    let program = |scene: &Scene| operator::xdp(&scene.bench.balancer, "lc").unwrap().unwrap().program;

    let place = scene.crash();
    streams.iter_mut().for_each(|stream| talk(stream, b"without a daemon"));
    scene.balancer = Some(Balancer::start_in(place, &scene.bench.balancer).unwrap());
    let after = status::read_fresh(scene.balancer()).unwrap();
    assert_eq!(actives(&after), [2; 3]);
    let [before, counted] = [&before, &after].map(|status| each(status, |backend| backend.packets));
    assert!(before.iter().zip(&counted).all(|(before, after)| before < after), "{before:?}, {counted:?}");
    assert_eq!(scene.served(), shown);
    streams.iter_mut().for_each(|stream| talk(stream, &[7; 3000]));

    // The same file again changes nothing.
    let id = program(&scene);
    for _ in 0..5 {
        scene.balancer().reload(&config::text("", &[tcp(&[1, 1, 1], "")])).unwrap();
        streams.iter_mut().for_each(|stream| talk(stream, b"on and on"));
    }
    assert_eq!((program(&scene), actives(&status::read_fresh(scene.balancer()).unwrap())), (id, vec![2; 3]));

    // A backend that leaves drains; what it had is reset at its deadline, and nothing of the others.
    let mut left = tcp(&[1, 1, 1], "drain-timeout = \"2s\"");
    left.backends.remove(0);
    scene.balancer().reload(&config::text("", &[left])).unwrap();
    let leaving = [BackendState::Up, BackendState::Up, BackendState::Leaving];
    scene.wait("its leave", |status| each(status, |backend| backend.state) == leaving);
    let mut of_first = Vec::new();
    for stream in streams.drain(..) {
        let backend = &shown[&stream.local_addr().unwrap()];
        if backend == "b1" { of_first.push(stream) } else { drop(stream) }
    }
    assert_eq!(of_first.len(), 2);
    of_first.iter_mut().for_each(wait_for_reset);
    scene.wait("it gone", |status| each(status, |backend| backend.state) == [BackendState::Up; 2]);

    // A daemon whose file has no IPv6 any more takes the table as it is.
    let _last = scene.connect(VIP_ADDRESS);
    let place = scene.crash();
    place.write_config(&config::text("", &[Service::new("tcp", "round-robin", &[1, 1, 1])])).unwrap();
    scene.balancer = Some(Balancer::start_in(place, &scene.bench.balancer).unwrap());
    scene.balancer().reload(&config::text("", &[tcp(&[1, 1, 1], "")])).unwrap();
    scene.wait("the service", |status| status.services[0].name == "tcp6");
    scene.connect(VIP_ADDRESS);
}

/// A daemon without IPv6 stays one until it begins afresh, and says so; one that was told has room for it.
#[test]
fn ipv6_must_be_there_from_the_start() {
    let ipv4 = || Service::new("tcp", "round-robin", &[1]);
    let mut scene = Scene::new("", &[ipv4()]);
    let mut stream = scene.connect((VIP, VIP_PORT));
    scene.balancer().reload(&config::text("", &[ipv4(), tcp(&[1], "")])).unwrap();
    let refusal = eventually(LIMIT, "the refusal in the log", || {
        let log = scene.balancer().log();
        log.lines().find(|line| line.contains("reload refused")).map(str::to_owned)
    });
    let refusal = refusal.unwrap();
    for part in ["nothing has changed", "started without IPv6", "`ipv6 = true` in [daemon]"] {
        assert!(refusal.contains(part), "{refusal}");
    }
    // So is each other way to have one, and those that only say what would be say so.
    let add = "service add six address=[2001:db8:aa::10]:80 protocol=tcp method=maglev";
    for words in [add.to_owned(), format!("{add} --dry-run")] {
        let words: Vec<&str> = words.split(' ').collect();
        let said = format!("{:#}", scene.balancer().call(&words).unwrap_err());
        assert!(said.contains("started without IPv6"), "{said}");
    }
    let config = scene.balancer().place().config();
    let plan = scene.balancer().call(&["plan", "-c", config.to_str().unwrap()]).unwrap();
    assert!(
        plan.contains("`ipv6` can't change while the balancer runs: a reload would be refused"),
        "{plan}"
    );
    assert_eq!(status::read_fresh(scene.balancer()).unwrap().services.len(), 1);

    let place = scene.crash();
    place.write_config(&config::text("", &[ipv4(), tcp(&[1], "")])).unwrap();
    let said = operator::refused(&scene.bench.balancer, &place.config()).unwrap();
    for part in ["`ipv6` can't change without loss", "--fresh"] {
        assert!(said.contains(part), "{said}");
    }
    talk(&mut stream, b"the old program goes on");
    let mut command = scene.bench.balancer.command(balancer_binary().unwrap());
    let mut fresh = Process::spawn(command.args(["run", "--fresh", "-c"]).arg(place.config())).unwrap();
    let log = eventually(LIMIT, "the fresh start", || {
        let log = fresh.log();
        (log.contains("balancing on") || fresh.ended().unwrap().is_some()).then_some(log)
    });
    assert!(log.as_ref().unwrap().contains("balancing on"), "{log:?}");
    scene.connect(VIP_ADDRESS);
    fresh.kill();

    let scene = Scene::new("ipv6 = true", &[ipv4()]);
    scene.balancer().reload(&config::text("ipv6 = true", &[ipv4(), tcp(&[1], "")])).unwrap();
    scene.wait("the new service", |status| each(status, |backend| backend.state) == [BackendState::Up; 2]);
    scene.connect(VIP_ADDRESS);
    let words = "backend add b2 --service tcp6 address=[2001:db8:2::99]:8080".split(' ').collect::<Vec<_>>();
    scene.balancer().call(&words).unwrap();
    let status = status::read_fresh(scene.balancer()).unwrap();
    assert_eq!(status.services[1].backends[1].address, "[2001:db8:2::99]:8080".parse().unwrap());
    scene.balancer().reload(&config::text("ipv6 = false", &[ipv4()])).unwrap();
    eventually(LIMIT, "the refusal in the log", || {
        scene.balancer().log().contains("`ipv6` can't change while the balancer runs").then_some(())
    })
    .unwrap();
}

/// The sender gets to know at once, not after a time-out.
#[test]
fn without_a_backend_clients_are_refused_at_once() {
    let scene = Scene::new("", &[tcp(&[0, 0], ""), udp(&[0, 0], "")]);
    let refused =
        scene.bench.client.run(|| Ok(TcpStream::connect_timeout(&VIP_ADDRESS, LIMIT).unwrap_err().kind()));
    assert_eq!(refused.unwrap(), ErrorKind::ConnectionRefused);
    let socket = scene.bench.client.run(|| Ok(UdpSocket::bind((CLIENT6, 41_000))?)).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket.connect(VIP_ADDRESS).unwrap();
    socket.send(b"is anybody there?").unwrap();
    assert_eq!(socket.recv(&mut [0; 8]).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    let status = status::read_fresh(scene.balancer()).unwrap();
    assert_eq!(status::drops(&status), [("no-backend", 2)]);
}

/// Checks go to IPv6 backends as to others, and say what they found.
#[test]
fn backends_are_checked_over_ipv6() {
    let bench = bench(2);
    let _server = Echo::tcp(bench.backend(1).unwrap(), (backend_address6(1), BACKEND_PORT)).unwrap();
    let checked = |kind: &str, port: u16| {
        let health = format!(
            "health = {{ kind = \"{kind}\", interval = \"200ms\", timeout = \"150ms\", rise = 1, fall = 2 }}"
        );
        let address = SocketAddr::from((VIP6, port));
        Service { name: kind.to_owned(), address, ..tcp(&[1, 1], Box::leak(health.into_boxed_str())) }
    };
    let services = [checked("tcp", 80), checked("ping", 81)];
    let balancer = Balancer::start(&bench.balancer, &config::text("", &services)).unwrap();
    // Nobody listens on the second, which is there all the same.
    let expected = [BackendState::Up, BackendState::Down, BackendState::Up, BackendState::Up];
    status::wait(&balancer, "the checks", |status| each(status, |backend| backend.state) == expected)
        .unwrap();
}

/// Neighbours are found by their solicitation, found again when they were forgotten, and gateways may be link-local.
#[test]
fn the_ways_to_backends_are_found_and_followed() {
    let bench = bench(2);
    let [first, second] = [1, 2].map(|number| bench.backend(number).unwrap());
    let behind: Ipv6Addr = "2001:db8:3::11".parse().unwrap();
    first.ip(&format!("address add {behind}/128 dev lo nodad")).unwrap();
    // A link-local address as it is made of the MAC (RFC 4291, appendix A).
    let [a, b, c, d, e, f] = mac(backend_address(1));
    let link_local = Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f]);
    bench.balancer.ip(&format!("route add {behind}/128 via {link_local} dev lk")).unwrap();
    first.ip("address add 10.0.3.11/32 dev lo").unwrap();
    bench.balancer.ip(&format!("route add 10.0.3.11/32 via inet6 {link_local} dev lk")).unwrap();

    let near = SocketAddr::from((backend_address6(2), BACKEND_PORT));
    let far = SocketAddr::from((behind, BACKEND_PORT));
    let far4 = SocketAddr::from(([10, 0, 3, 11], BACKEND_PORT));
    let _servers =
        [Echo::tcp(second, near).unwrap(), Echo::tcp(first, far).unwrap(), Echo::tcp(first, far4).unwrap()];
    let service = Service { backends: vec![(near, 1), (far, 1)], ..tcp(&[], "") };
    let service4 = Service { backends: vec![(far4, 1)], ..Service::new("tcp", "round-robin", &[]) };
    let balancer = Balancer::start(&bench.balancer, &config::text("", &[service, service4])).unwrap();
    status::wait_until_up(&balancer).unwrap();
    let scene = Scene { balancer: Some(balancer), _servers: Vec::new(), bench };
    let mut streams: Vec<TcpStream> = (0..4).map(|_| scene.connect(VIP_ADDRESS)).collect();
    streams.extend((0..2).map(|_| scene.connect((VIP, VIP_PORT))));
    scene.wait("a turn each", |status| actives(status) == [2; 3]);

    scene.bench.balancer.ip("neigh flush dev lk").unwrap();
    streams.iter_mut().for_each(|stream| talk(stream, &[7; 3000]));
    scene.wait("all found again", |status| each(status, |backend| backend.state) == [BackendState::Up; 3]);

    // Another MAC for the same neighbour: flows follow it.
    let other = [2, 0, 0, 0, 0xee, 1];
    scene.bench.backend(2).unwrap().ip(&format!("link set e0 address {}", veth::mac_text(other))).unwrap();
    scene.bench.balancer.ip("neigh flush dev lk").unwrap();
    streams.iter_mut().for_each(|stream| talk(stream, b"where you are now"));
}
