//! `balancer explain` and `balancer whatif`: what they say is what happens, or would.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use balancer_tests::{
    Balancer, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    echo::Echo,
    eventually,
    operator::{self, Ended},
    packet::{self, Path},
    socket::FrameSocket,
    status,
    topology::{BALANCER_CLIENT_SIDE, CLIENT, VIP, backend_address, mac},
};
use balancer_user::{
    api::{Comparison, Explanation, FlowList, Stands},
    balance::Takes,
    config::Requests,
    method::Method,
};

const LIMIT: Duration = Duration::from_secs(10);

struct Bed {
    balancer: Balancer,
    _servers: Vec<Echo>,
    bench: Topology,
}

impl Bed {
    fn start(daemon: &str, services: &[Service]) -> Bed {
        let bench = Plan::default().build().unwrap();
        let address = |number| SocketAddr::from((backend_address(number), BACKEND_PORT));
        let numbered = (1..).zip(&bench.backends);
        let servers = numbered.map(|(number, netns)| Echo::tcp(netns, address(number)).unwrap()).collect();
        let balancer = Balancer::start(&bench.balancer, &config::text(daemon, services)).unwrap();
        status::wait_until_up(&balancer).unwrap();
        Bed { balancer, _servers: servers, bench }
    }

    fn call(&self, words: &str) -> Ended {
        let socket = self.balancer.place().socket();
        let words = words.split(' ').chain(["--socket", socket.to_str().unwrap()]);
        operator::balancer(words).unwrap()
    }

    fn read<T: serde::de::DeserializeOwned>(&self, words: &str) -> T {
        let ended = self.call(&format!("{words} --json"));
        assert_eq!(ended.code, 0, "{words}: {}", ended.text);
        serde_json::from_str(&ended.text).unwrap_or_else(|error| panic!("{words}: {error}: {}", ended.text))
    }

    /// Sends one datagram from each of these ports.
    fn send(&self, ports: impl IntoIterator<Item = u16>) {
        let socket = FrameSocket::open(&self.bench.client, "c0").unwrap();
        for port in ports {
            let packet = Path::new((CLIENT, port), (VIP, VIP_PORT)).udp(b"x").unwrap();
            socket.send(&packet::ethernet(mac(BALANCER_CLIENT_SIDE), mac(CLIENT), &packet)).unwrap();
        }
    }

    /// Who serves the flow from each port.
    fn served(&self, ports: std::ops::Range<u16>) -> BTreeMap<u16, String> {
        let list: FlowList = self.read("flows list --service udp --limit 1000");
        let flows = list.flows.into_iter().map(|flow| (flow.client.port(), flow.backend));
        flows.filter(|(port, _)| ports.contains(port)).collect()
    }
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() < 0.03
}

/// The picks that are foretold are those of the next flows, and each follows from the table.
#[test]
fn what_is_explained_is_what_happens() {
    let service = Service::new("udp", "least-packets", &[1, 2, 1]);
    // Longer than what is done between two ticks takes.
    let bed = Bed::start("tick = \"3s\"", &[service]);
    bed.send((10_000..10_004).chain([10_000; 4]).chain([10_002; 2]));
    let explanation = eventually(LIMIT, "all packets counted", || {
        let explanation: Explanation = bed.read("explain udp");
        let packets: f64 = explanation.backends.iter().map(|backend| backend.n).sum();
        (packets == 10.0).then_some(explanation)
    });
    let Explanation { method, unit, backends, last, picks, .. } = explanation.unwrap();
    assert_eq!((method, unit.as_deref()), (Method::LeastPackets, Some("packets")));
    let served: Vec<String> = bed.served(10_000..10_004).into_values().collect();
    let mut carried: BTreeMap<&str, f64> = BTreeMap::new();
    for (backend, packets) in served.iter().zip([5.0, 1.0, 3.0, 1.0]) {
        *carried.entry(backend).or_default() += packets;
    }
    assert_eq!(last.as_ref(), served.last());
    for (backend, weight) in backends.iter().zip([1, 2, 1]) {
        assert_eq!(
            (backend.n, backend.weight, backend.takes),
            (carried[backend.name.as_str()], weight, Takes::Yes)
        );
        let sum = backend.n + backend.committed + backend.lacking + backend.pending;
        assert!(near(backend.compared, sum), "{backend:?}");
        let nw = backend.compared * 10_000.0 / f64::from(weight);
        assert!((backend.nw.unwrap() - nw).abs() <= 50.0, "rounded to two decimals: {backend:?}");
    }
    assert_eq!(picks.len(), 10);
    let lowest = backends.iter().map(|backend| backend.nw.unwrap()).fold(f64::MAX, f64::min);
    assert_eq!(picks[0].nw, Some(lowest));
    assert!(picks.iter().all(|pick| pick.margin.unwrap() >= 0.0 && pick.second.is_some()), "{picks:?}");
    assert!(picks.iter().all(|pick| (pick.margin == Some(0.0)) != pick.tied.is_empty()), "{picks:?}");

    bed.send(20_000..20_010);
    let served = eventually(LIMIT, "ten more flows", || {
        Some(bed.served(20_000..20_010)).filter(|served| served.len() == 10)
    });
    let foretold: Vec<String> = picks.iter().map(|pick| pick.backend.clone().unwrap()).collect();
    assert_eq!(served.unwrap().into_values().collect::<Vec<_>>(), foretold);
    // Until the next tick they are what is pending.
    let next: Explanation = bed.read("explain udp --picks 1");
    assert_eq!(next.last.as_ref(), foretold.last());
    for (after, before) in next.backends.iter().zip(&backends) {
        let taken = foretold.iter().filter(|name| **name == after.name).count();
        assert_eq!(after.n, before.n, "no tick was in between");
        assert_eq!(after.pending > before.pending, taken > 0, "{after:?}");
    }

    let text = bed.call("explain udp --picks 2").text;
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0].join(" "), "udp 192.0.2.10:80 least-packets N in packets", "{text}");
    assert_eq!(
        rows[1].join(" "),
        "backend state weight takes N committed lacking pending compared Nw share",
        "{text}"
    );
    assert_eq!(rows[2][..4], ["b1", "up", "1", "yes"], "{text}");
    assert_eq!(rows[rows.len() - 3].join(" "), "pick backend Nw second margin tied with", "{text}");
}

#[test]
fn another_method_is_played_through_and_changes_nothing() {
    let more = "requests = \"exchange\"";
    let tcp = Service::new("tcp", "least-request", &[1, 1, 1]);
    let followed = Service {
        name: "followed".to_owned(),
        address: SocketAddr::from((VIP, 81)),
        more,
        ..Service::new("tcp", "least-request", &[1, 1, 1])
    };
    let bed = Bed::start("", &[tcp, followed]);
    let connect = || {
        let mut stream = bed.bench.client.run(|| Ok(TcpStream::connect((VIP, VIP_PORT))?)).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(b"hello").unwrap();
        stream.read_exact(&mut [0; 5]).unwrap();
        stream
    };
    let mut streams: Vec<TcpStream> = (0..6).map(|_| connect()).collect();
    // The two of the first backend end.
    drop([streams.remove(3), streams.remove(0)]);
    status::wait(&bed.balancer, "the end of a connection", |status| {
        status::each(status, |backend| backend.active)[..3] == [0, 2, 2]
    })
    .unwrap();
    let status = status::read_fresh(&bed.balancer).unwrap();
    let method = |comparison: &Comparison| (comparison.today.method, comparison.instead.method);
    let shares = |of: fn(&balancer_user::api::Compared) -> Stands, comparison: &Comparison| {
        comparison.backends.iter().map(|backend| of(backend).share).collect::<Vec<_>>()
    };

    let turns: Comparison = bed.read("whatif tcp --method round-robin");
    assert_eq!(method(&turns), (Method::LeastRequest, Method::RoundRobin));
    assert_eq!((turns.today.requests, turns.instead.requests), (Some(Requests::Flow), None));
    let active: Vec<f64> = turns.backends.iter().map(|backend| backend.today.n).collect();
    assert_eq!(active, [0.0, 2.0, 2.0]);
    let nws: Vec<_> = turns.backends.iter().map(|backend| (backend.today.nw, backend.instead.nw)).collect();
    assert_eq!(nws, [(Some(0.0), None), (Some(20_000.0), None), (Some(20_000.0), None)]);
    assert_eq!(shares(|backend| backend.instead, &turns), [0.3333; 3]);
    let today = shares(|backend| backend.today, &turns);
    assert!(today[0] > today[1] && today[0] > today[2], "{today:?}");

    let packets: Comparison = bed.read("whatif tcp --method least-packets");
    let counted: Vec<f64> = packets.backends.iter().map(|backend| backend.instead.n).collect();
    let window = |status: &balancer_user::api::Status| {
        status::each(status, |backend| backend.window_packets as f64)[..3].to_vec()
    };
    assert_eq!(counted, window(&status));
    assert_eq!(packets.unknown.len(), 1);

    let untimed: Comparison = bed.read("whatif tcp --method least-response-time");
    assert!(untimed.unknown[0].contains("not timed"), "{:?}", untimed.unknown);
    assert_eq!(untimed.backends[1].instead.n, 2.0, "as many requests, one millisecond each");
    let timed: Comparison = bed.read("whatif followed --method least-response-time --requests exchange");
    assert_eq!(timed.unknown, [""; 0]);
    let source: Comparison = bed.read("whatif tcp --method source-hash");
    let table = shares(|backend| backend.instead, &source);
    assert!(table.iter().all(|share| (0.33..0.34).contains(share)), "{table:?}");

    let after = status::read_fresh(&bed.balancer).unwrap();
    assert_eq!(after.services[0].method, Method::LeastRequest);
    assert_eq!(status::each(&after, |backend| backend.share), status::each(&status, |backend| backend.share));

    let text = bed.call("whatif tcp --method maglev").text;
    let lines: Vec<String> =
        text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(
        lines[..5],
        [
            "tcp 192.0.2.10:80",
            "today least-request requests by flow N in requests",
            "instead maglev",
            "",
            "backend state weight today: N Nw share instead: N Nw share",
        ],
        "{text}"
    );
    for (words, code, expected) in [
        ("explain wep", 2, "balancer: there is no service \"wep\"; there are: tcp, followed\n"),
        (
            "whatif wep --method maglev",
            2,
            "balancer: there is no service \"wep\"; there are: tcp, followed\n",
        ),
        (
            "whatif tcp --method maglev --requests flow",
            2,
            "balancer: `requests` means nothing to the method \"maglev\"",
        ),
        (
            "whatif tcp --method least-request --requests exchange",
            2,
            "balancer: requests and their answers are not followed for \"tcp\"",
        ),
        (
            "whatif tcp --method least",
            2,
            "error: invalid value 'least' for '--method <METHOD>': unknown method `least`",
        ),
        ("explain tcp --picks 101", 2, "error: invalid value '101' for '--picks <N>'"),
    ] {
        let ended = bed.call(words);
        assert_eq!(ended.code, code, "{words}: {}", ended.text);
        assert!(ended.text.starts_with(expected), "{words}: {}", ended.text);
    }
}
