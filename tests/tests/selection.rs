//! Who gets the next flow: the published tables and the rules beside them, read from the backends' own devices.
//!
//! Each flow here is one datagram that nobody answers, so that one flow is one packet, and one packet one unit of load.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    collections::{BTreeMap, HashMap},
    thread,
    time::{Duration, Instant},
};

use aya::maps::{Map, MapData, PerCpuArray, PerCpuValues};
use balancer_common::{ResponseTimes, names, response_bucket};
use balancer_tests::{
    Balancer, Capture, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    eventually,
    packet::{self, Path},
    socket::FrameSocket,
    status,
    topology::{BALANCER_CLIENT_SIDE, CLIENT, VIP, backend_address, mac},
};
use balancer_user::api::{BackendState, BackendStatus, Status};
use serde::Deserialize;

const LIMIT: Duration = Duration::from_secs(20);
/// What a datagram carries beside its 28 bytes of headers.
const PAYLOAD: [u8; 100] = [0; 100];
const FIRST_PORT: u16 = 10_000;

/// A balancer with one UDP service whose backends say nothing.
struct Scene {
    // The balancer goes before its namespace.
    balancer: Balancer,
    client: FrameSocket,
    backends: Vec<Capture>,
    next_port: u16,
    bench: Topology,
}

impl Scene {
    fn new(method: &'static str, weights: &[u8]) -> Scene {
        Scene::with(method, weights, "")
    }

    /// The same, whose service has further lines.
    fn with(method: &'static str, weights: &[u8], more: &'static str) -> Scene {
        let bench = Plan::backends(weights.len() as u8).build().unwrap();
        let text = config::text("", &[Service { more, ..Service::new("udp", method, weights) }]);
        let balancer = Balancer::start(&bench.balancer, &text).unwrap();
        status::wait_until_up(&balancer).unwrap();
        Scene {
            balancer,
            client: FrameSocket::open(&bench.client, "c0").unwrap(),
            backends: bench.backends.iter().map(|netns| Capture::start(netns, "e0").unwrap()).collect(),
            next_port: FIRST_PORT,
            bench,
        }
    }

    /// Sends the first and only datagram of a new flow.
    fn send(&mut self) {
        let packet = Path::new((CLIENT, self.next_port), (VIP, VIP_PORT)).udp(&PAYLOAD).unwrap();
        let frame = packet::ethernet(mac(BALANCER_CLIENT_SIDE), mac(CLIENT), &packet);
        self.client.send(&frame).unwrap();
        self.next_port += 1;
    }

    /// Sends so many flows as fast as possible, and returns who got them: 1, 2, …, in the order of sending.
    fn send_at_once(&mut self, flows: usize) -> Vec<usize> {
        let first = self.next_port;
        (0..flows).for_each(|_| self.send());
        self.picks_since(first)
    }

    /// Waits until every flow from the one with this port on has arrived, and returns who got them.
    fn picks_since(&self, first: u16) -> Vec<usize> {
        let ports = first..self.next_port;
        let arrived = || {
            let mut arrived: BTreeMap<u16, usize> = BTreeMap::new();
            for (number, capture) in (1..).zip(&self.backends) {
                let own = backend_address(number as u8);
                // The switch floods what it has not learned yet.
                let packets = capture.packets();
                for packet in packets.iter().filter(|packet| packet.macs[0] == mac(own)) {
                    assert_eq!(packet.destination, (own, BACKEND_PORT).into());
                    if ports.contains(&packet.source.port()) {
                        assert_eq!(arrived.insert(packet.source.port(), number), None, "arrived twice");
                    }
                }
            }
            arrived
        };
        let all = eventually(LIMIT, "the arrival of every datagram", || {
            Some(arrived()).filter(|arrived| arrived.len() == ports.len())
        });
        all.unwrap_or_else(|error| panic!("{error}: {:?}", arrived())).into_values().collect()
    }

    /// Has the controller plan with these backends only: to the others there is no route, and so they take no new flows,
    /// exactly as with weight 0.
    fn only(&self, numbers: &[u8]) {
        let all = 1..=self.backends.len() as u8;
        let change = all.clone().map(|number| {
            let address = backend_address(number);
            // The first word twice: what is not there can't be deleted.
            let open =
                format!("route replace unreachable {address}/32\nroute del unreachable {address}/32\n");
            if numbers.contains(&number) { open } else { format!("route replace unreachable {address}/32\n") }
        });
        self.bench.balancer.ip_batch(&change.collect::<String>()).unwrap();
        let wanted: Vec<BackendState> = all
            .map(|number| match numbers.contains(&number) {
                true => BackendState::Up,
                false => BackendState::Unreachable,
            })
            .collect();
        self.wait("the routes' effect", |status| {
            status::each(status, |backend| backend.state) == wanted
                && status::each(status, |backend| backend.share > 0.0)
                    == wanted.iter().map(|state| *state == BackendState::Up).collect::<Vec<_>>()
        });
    }

    fn wait(&self, what: &str, wanted: impl Fn(&Status) -> bool) -> Vec<BackendStatus> {
        status::wait(&self.balancer, what, wanted).unwrap().services.remove(0).backends
    }

    /// Waits until the windows hold these packets, and checks their bytes.
    fn wait_for_window(&self, packets: &[u64]) -> Vec<BackendStatus> {
        let backends = self.wait("the packets in the window", |status| {
            status::each(status, |backend| backend.window_packets) == packets
        });
        let bytes: Vec<u64> = backends.iter().map(|backend| backend.window_bytes).collect();
        assert_eq!(bytes, packets.iter().map(|packets| packets * 128).collect::<Vec<_>>());
        backends
    }

    /// Lets each backend have given one answer in so many milliseconds, exactly: real ones never tie.
    fn answer_in(&self, millis: &[u64]) {
        let pin = self.balancer.place().pins().join("maps").join(names::RESPONSE_TIMES);
        let map = Map::PerCpuArray(MapData::from_pin(pin).unwrap());
        let mut map: PerCpuArray<MapData, [u64; 32]> = PerCpuArray::try_from(map).unwrap();
        for (id, millis) in (0..).zip(millis) {
            // Units of 1,024 ns.
            let time = millis * 1_000;
            let mut times = ResponseTimes { sum: time, count: 1, ..ResponseTimes::default() };
            times.histogram[response_bucket(time as u32)] = 1;
            let mut values = vec![[0; 32]; aya::util::nr_cpus().unwrap()];
            values[0] = bytemuck::cast(times);
            map.set(id, PerCpuValues::try_from(values).unwrap(), 0).unwrap();
        }
    }

    /// But for the backends' errors, where no flow is kept that they could be about: nothing listens there.
    fn assert_nothing_refused(&self) {
        let status = status::read_fresh(&self.balancer).unwrap();
        let drops = status::drops(&status).into_iter().filter(|(name, _)| *name != "unknown-icmp");
        assert_eq!(drops.collect::<Vec<_>>(), []);
    }
}

#[derive(Deserialize)]
struct Tables {
    cases: Vec<Table>,
}

#[derive(Deserialize)]
struct Table {
    name: String,
    method: String,
    services: Vec<Load>,
    adds: Vec<u64>,
    expect: Vec<Row>,
}

#[derive(Deserialize)]
struct Load {
    name: String,
    load: u64,
    weight: Option<u8>,
    step: u64,
}

/// How the loads of a table are brought in, and where they show.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// So many packets in the window.
    Packets,
    /// So many bytes.
    Bytes,
    /// So many open flows.
    Flows,
    /// So many open flows that take so long to be answered.
    FlowsAndTimes,
}

#[derive(Deserialize)]
struct Row {
    pick: String,
    before: f64,
    after: f64,
}

impl Table {
    fn read(name: &str) -> Table {
        let tables: Tables = serde_json::from_str(include_str!("../vectors/selection-tables.json")).unwrap();
        let table = tables.cases.into_iter().find(|table| table.name == name).unwrap();
        assert!(table.expect.len() == 8 && table.adds == [1; 8], "another table than was published");
        assert!(table.services.iter().all(|service| service.load % service.step == 0));
        table
    }

    fn picks(&self) -> Vec<usize> {
        let number = |row: &Row| self.services.iter().position(|service| service.name == row.pick);
        self.expect.iter().map(|row| number(row).unwrap() + 1).collect()
    }

    /// How many flows bring the loads in.
    fn loads(&self) -> Vec<u64> {
        self.services.iter().map(|service| service.load / service.step).collect()
    }

    fn kind(&self) -> Kind {
        match &*self.method {
            "least-packets" => Kind::Packets,
            "least-bandwidth" => Kind::Bytes,
            "least-request" => Kind::Flows,
            "least-response-time" => Kind::FlowsAndTimes,
            other => panic!("no table of {other} was published"),
        }
    }

    /// A balancer with this table's loads in its windows, brought there by real packets.
    fn scene(&self, more: &'static str) -> Scene {
        let method = match self.kind() {
            Kind::Packets => "least-packets",
            Kind::Bytes => "least-bandwidth",
            Kind::Flows => "least-request",
            Kind::FlowsAndTimes => "least-response-time",
        };
        let weights: Vec<u8> = self.services.iter().map(|service| service.weight.unwrap_or(1)).collect();
        let mut scene = Scene::with(method, &weights, more);
        for (number, load) in (1..).zip(self.loads()) {
            scene.only(&[number]);
            let picks = scene.send_at_once(load as usize);
            assert!(picks.iter().all(|pick| *pick == usize::from(number)), "{picks:?} with {number} alone");
        }
        let all: Vec<u8> = (1..).take(weights.len()).collect();
        scene.only(&all);
        self.wait_for_loads(&scene, &self.loads());
        scene
    }

    fn wait_for_loads(&self, scene: &Scene, loads: &[u64]) -> Vec<BackendStatus> {
        if matches!(self.kind(), Kind::Packets | Kind::Bytes) {
            return scene.wait_for_window(loads);
        }
        if self.kind() == Kind::FlowsAndTimes {
            let times: Vec<u64> = self.services.iter().map(|service| service.step).collect();
            scene.answer_in(&times);
            scene.wait("the answers", |status| {
                let means = status::each(status, |backend| backend.response_time.map(|time| time.mean_ms));
                means == times.iter().map(|time| Some(*time as f64 * 1.024)).collect::<Vec<_>>()
            });
        }
        scene.wait("the open flows", |status| status::each(status, |backend| backend.active) == loads)
    }

    /// N, or Nw where there are weights: what the table shows.
    fn shown(&self, backends: &[BackendStatus], number: usize) -> f64 {
        let backend = &backends[number - 1];
        if self.services[0].weight.is_some() { backend.nw.unwrap() } else { backend.n }
    }
}

/// All requests of the table between two ticks or with any number of ticks between them: the ring is a schedule.
fn play_at_once(name: &str) {
    play_at_once_with(name, "");
}

fn play_at_once_with(name: &str, more: &'static str) {
    let table = Table::read(name);
    let mut scene = table.scene(more);
    assert_eq!(scene.send_at_once(8), table.picks(), "{name}");
    let mut loads = table.loads();
    table.picks().iter().for_each(|pick| loads[pick - 1] += 1);
    table.wait_for_loads(&scene, &loads);
    scene.assert_nothing_refused();
}

/// The table row by row, each with the counted load of the row before.
fn play_row_by_row(name: &str) {
    play_row_by_row_with(name, "");
}

fn play_row_by_row_with(name: &str, more: &'static str) {
    let table = Table::read(name);
    let shows_n = matches!(table.kind(), Kind::Packets | Kind::Flows);
    let mut scene = table.scene(more);
    let mut loads = table.loads();
    let mut backends = table.wait_for_loads(&scene, &loads);
    for (row, pick) in table.expect.iter().zip(table.picks()) {
        if shows_n {
            assert_eq!(table.shown(&backends, pick), row.before, "{name}: before {loads:?}");
        }
        assert_eq!(scene.send_at_once(1), [pick], "{name}: after {loads:?}");
        loads[pick - 1] += 1;
        backends = table.wait_for_loads(&scene, &loads);
        if shows_n {
            assert_eq!(table.shown(&backends, pick), row.after, "{name}: after {loads:?}");
        }
    }
    scene.assert_nothing_refused();
}

#[test]
fn the_table_of_least_packets_at_once() {
    play_at_once("least-packets");
}

#[test]
fn the_table_of_least_packets_row_by_row() {
    play_row_by_row("least-packets");
}

#[test]
fn the_weighted_table_of_least_packets_at_once() {
    play_at_once("least-packets-weighted-formula");
}

#[test]
fn the_weighted_table_of_least_packets_row_by_row() {
    play_row_by_row("least-packets-weighted-formula");
}

#[test]
fn the_table_of_least_bandwidth_at_once() {
    play_at_once("least-bandwidth");
}

#[test]
fn the_table_of_least_bandwidth_row_by_row() {
    play_row_by_row("least-bandwidth");
}

#[test]
fn the_weighted_table_of_least_bandwidth_at_once() {
    play_at_once("least-bandwidth-weighted-formula");
}

#[test]
fn the_weighted_table_of_least_bandwidth_row_by_row() {
    play_row_by_row("least-bandwidth-weighted-formula");
}

#[test]
fn the_table_of_least_request_at_once() {
    play_at_once("least-request");
}

#[test]
fn the_table_of_least_request_row_by_row() {
    play_row_by_row("least-request");
}

#[test]
fn the_weighted_table_of_least_request_at_once() {
    play_at_once("least-request-weighted");
}

#[test]
fn the_weighted_table_of_least_request_row_by_row() {
    play_row_by_row("least-request-weighted");
}

#[test]
fn the_table_of_least_response_time_at_once() {
    play_at_once("least-response-time");
}

#[test]
fn the_table_of_least_response_time_row_by_row() {
    play_row_by_row("least-response-time");
}

#[test]
fn the_weighted_table_of_least_response_time_at_once() {
    play_at_once("least-response-time-weighted");
}

#[test]
fn the_weighted_table_of_least_response_time_row_by_row() {
    play_row_by_row("least-response-time-weighted");
}

/// Makes a service one without flows.
const ONE_PACKET: &str = "one-packet = true";

const TABLES_WITHOUT_FLOWS: [&str; 4] = [
    "least-packets",
    "least-packets-weighted-formula",
    "least-bandwidth",
    "least-bandwidth-weighted-formula",
];

#[test]
fn the_tables_at_once_without_flows() {
    TABLES_WITHOUT_FLOWS.iter().for_each(|name| play_at_once_with(name, ONE_PACKET));
}

#[test]
fn the_tables_row_by_row_without_flows() {
    TABLES_WITHOUT_FLOWS.iter().for_each(|name| play_row_by_row_with(name, ONE_PACKET));
}

#[test]
fn weighted_turns_without_flows() {
    let mut scene = Scene::with("round-robin", &[2, 3, 4], ONE_PACKET);
    assert_eq!(scene.send_at_once(27), [3, 2, 1, 3, 2, 3, 1, 2, 3].repeat(3));
    scene.wait_for_window(&[6, 9, 12]);
    let mut scene = Scene::with("least-packets", &[2, 3, 4], ONE_PACKET);
    assert_eq!(scene.send_at_once(18), [1, 2, 3, 3, 2, 3, 1, 2, 3].repeat(2));
    scene.wait_for_window(&[4, 6, 8]);
}

#[test]
fn thirty_flows_on_five_idle_backends_are_six_each_in_turn() {
    let mut scene = Scene::new("least-packets", &[1; 5]);
    let in_turn: Vec<usize> = [1, 2, 3, 4, 5].repeat(6);
    assert_eq!(scene.send_at_once(30), in_turn);
    scene.wait_for_window(&[6; 5]);
}

/// With nothing to compare, turns, whatever the weights; then the weights decide. Worked out by hand:
/// Nw = N × 10000 / weight after each pick, ties going to the next after the last pick.
#[test]
fn idle_backends_take_turns_whatever_their_weights() {
    let mut scene = Scene::new("least-packets", &[2, 3, 4]);
    // 1 2 3 all idle; then Nw = 5000 3333 2500, 5000 3333 5000, 5000 6667 5000 (a tie after 2: 3), 5000 6667 7500,
    // 10000 6667 7500, 10000 10000 7500, and 10000 for all.
    let cycle = [1, 2, 3, 3, 2, 3, 1, 2, 3];
    assert_eq!(scene.send_at_once(18), cycle.repeat(2));
    scene.wait_for_window(&[4, 6, 8]);
}

/// Weighted turns, mixed: never two of the same in a row with weights 2, 3 and 4, and the same again with every start.
#[test]
fn weighted_turns_are_smooth_and_always_the_same() {
    let cycle = [3, 2, 1, 3, 2, 3, 1, 2, 3];
    for _ in 0..2 {
        let mut scene = Scene::new("round-robin", &[2, 3, 4]);
        assert_eq!(scene.send_at_once(27), cycle.repeat(3));
        // Ticks in between change nothing.
        let mut load = [6, 9, 12];
        for pick in cycle {
            assert_eq!(scene.send_at_once(1), [pick]);
            load[pick - 1] += 1;
            scene.wait_for_window(&load);
        }
    }
}

#[test]
fn a_backend_without_weight_gets_no_flow() {
    let mut scene = Scene::new("least-packets", &[0, 100, 100]);
    let picks = scene.send_at_once(200);
    // In turn, but for a flow that opens while the counters are read: it may be counted twice until the next tick.
    let longest = picks.chunk_by(|a, b| a == b).map(<[usize]>::len).max();
    assert!(longest <= Some(3), "a run of {longest:?}");
    let [none, second, third] = [1, 2, 3].map(|number| picks.iter().filter(|pick| **pick == number).count());
    assert!(none == 0 && second.abs_diff(third) <= 4, "{none}, {second}, {third}");
    scene.wait_for_window(&[0, second as u64, third as u64]);
}

/// A stream of new flows, many between two ticks: no backend gets a run of them.
#[test]
fn no_backend_gets_a_herd() {
    let mut scene = Scene::new("least-packets", &[1; 3]);
    let first = scene.next_port;
    let start = Instant::now();
    for flow in 0..600 {
        thread::sleep((start + Duration::from_millis(5) * flow).saturating_duration_since(Instant::now()));
        scene.send();
    }
    let picks = scene.picks_since(first);
    let longest = picks.chunk_by(|a, b| a == b).map(<[usize]>::len).max();
    assert!(longest <= Some(3), "a run of {longest:?}");
    let mut counts: HashMap<usize, usize> = HashMap::new();
    picks.iter().for_each(|pick| *counts.entry(*pick).or_default() += 1);
    assert_eq!(counts, HashMap::from([(1, 200), (2, 200), (3, 200)]));
    scene.assert_nothing_refused();
}
