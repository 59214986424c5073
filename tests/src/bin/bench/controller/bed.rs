//! A controller with its maps, and the flows that it hears of.

use std::{
    fmt::{self, Write as _},
    fs,
    net::{IpAddr, Ipv4Addr},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use balancer_tests::{
    harness::{Harness, Subject},
    packet::{self, Path},
    program::{BACKEND_SIDE, CLIENT, CLIENT_SIDE, INGRESS, VIP, VIP_PORT, backend_mac, verdict},
};
use balancer_user::{
    clock::Monotonic,
    config::Config,
    controller::{Controller, Prepared},
    datapath::{Datapath, Sizes},
    network::{Link, Neighbour, Network, Route},
    profile::Profile,
};
use tempfile::TempDir;
use tokio::sync::mpsc;

use crate::packet::{
    case,
    frame::{DATAGRAM, IPV4},
};

/// From one tick to the next, by the controller's clock.
pub const PERIOD: Duration = Duration::from_millis(100);
/// After so much, a tick walks over the whole flow table.
pub const WALK: Duration = Duration::from_secs(1);
/// After so much, over next to nothing of it.
pub const MOMENT: Duration = Duration::from_nanos(1);
/// Ticks until the windows are full.
const WINDOW: u32 = 150;

/// How much is configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub services: u16,
    /// Of each service.
    pub backends: u16,
}

impl Size {
    /// Backends of all services.
    pub fn total(self) -> u32 {
        u32::from(self.services) * u32::from(self.backends)
    }

    /// The configuration; the last backend's weight may be another.
    fn text(self, flows: u32, is_changed: bool) -> String {
        let Size { services, backends } = self;
        let mut text = format!(
            "[daemon]\ninterfaces = [\"lo\"]\npin-path = \"\"\nmax-flows = {flows}\nmax-services = {services}\nmax-backends = {}\n",
            self.total() + 16
        );
        for service in 0..services {
            // Writing to a string does not fail.
            let _ = write!(
                text,
                "\n[[service]]\nname = \"s{service}\"\naddress = \"{VIP}:{}\"\nprotocol = \"udp\"\nmethod = \"least-packets\"\n\
                 idle-timeout = \"4h\"\n",
                VIP_PORT + service
            );
            for backend in 0..backends {
                let weight =
                    if is_changed && service + 1 == services && backend + 1 == backends { 2 } else { 1 };
                let endpoint = address(backend);
                let _ = write!(
                    text,
                    "\n[[service.backend]]\nname = \"b{backend}\"\naddress = \"{endpoint}:{}\"\nweight = {weight}\n",
                    8080 + service
                );
            }
        }
        text
    }
}

impl fmt::Display for Size {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} services with {} backends each", self.services, self.backends)
    }
}

/// The address of a backend of any service.
fn address(backend: u16) -> Ipv4Addr {
    Ipv4Addr::from_bits(Ipv4Addr::new(10, 7, 0, 1).to_bits() + u32::from(backend))
}

/// A controller, and what it is told.
pub struct Bed {
    controller: Controller,
    prepared: mpsc::UnboundedReceiver<Prepared>,
    size: Size,
    now: Monotonic,
    /// The configuration, as it is and with one weight changed.
    texts: [String; 2],
    /// Which of them is in force.
    text: usize,
    directory: TempDir,
    arrived: u32,
}

impl Bed {
    /// Loads the program and has it configured; nothing is attached.
    pub fn new(size: Size, flows: u32) -> Result<Bed> {
        let texts = [false, true].map(|is_changed| size.text(flows, is_changed));
        let directory = TempDir::with_prefix("balancer-bench-").context("make a directory")?;
        let file = directory.path().join("balancer.toml");
        let config = super::parse(&texts[0])?;
        let datapath = Datapath::load(sizes(&config), false, None)?;
        let (prepare, prepared) = mpsc::unbounded_channel();
        let now = Monotonic::now();
        let mut controller = Controller::new(datapath, (file, texts[0].clone()), config, prepare, now)?;
        controller.set_network(now, &network(size))?;
        controller.tick(now)?;
        Ok(Bed { controller, prepared, size, now, texts, text: 0, directory, arrived: 0 })
    }

    /// Ticks until windows are as full as they get.
    pub fn warm_up(&mut self) -> Result<()> {
        for _ in 0..WINDOW {
            self.arrive(1)?;
            self.tick(PERIOD)?;
        }
        Ok(())
    }

    /// Has the program open so many new flows for each service.
    pub fn arrive(&mut self, flows: u32) -> Result<()> {
        for service in 0..self.size.services {
            for _ in 0..flows {
                self.arrived += 1;
                let client =
                    Ipv4Addr::from_bits(Ipv4Addr::new(10, 9, 0, 0).to_bits() + self.arrived % (1 << 16));
                let port = 1024 + (self.arrived >> 16) as u16;
                let packet = Path::new((client, port), (VIP, VIP_PORT + service)).udp(b"x")?;
                let frame = packet::ethernet(CLIENT_SIDE, CLIENT, &packet);
                let (verdict, _) = self.controller.datapath_mut().test_run(&frame, INGRESS)?;
                ensure!(verdict == verdict::TX, "a new flow of service {service} ends as verdict {verdict}");
            }
        }
        Ok(())
    }

    /// One tick, so much later by its clock; what it took, in milliseconds.
    pub fn tick(&mut self, later: Duration) -> Result<f64> {
        self.now = self.now.plus(later);
        let start = Instant::now();
        self.controller.tick(self.now)?;
        Ok(milliseconds(start))
    }

    /// Reloads the file, with one weight changed or as it was; what reading and judging took, and applying, in milliseconds.
    pub fn reload(&mut self, is_changed: bool) -> Result<[f64; 2]> {
        let text = if is_changed { 1 - self.text } else { self.text };
        self.text = text;
        let file = self.directory.path().join("balancer.toml");
        fs::write(&file, &self.texts[text]).with_context(|| format!("write {}", file.display()))?;
        let before = self.controller.generation();
        let start = Instant::now();
        self.controller.reload();
        let prepared = self.prepared.blocking_recv().context("the controller has gone")?;
        let read = milliseconds(start);
        let start = Instant::now();
        self.controller.change(self.now, prepared);
        let applied = milliseconds(start);
        let changes = self.controller.generation() - before;
        ensure!(
            changes == u64::from(is_changed),
            "{changes} generations instead of {}",
            u64::from(is_changed)
        );
        Ok([read, applied])
    }

    /// Opens so many flows of the first service at once.
    pub fn fill(&mut self, harness: &mut Harness, flows: u32) -> Result<()> {
        let packets = case::opening(IPV4, DATAGRAM).packets(0, flows, None)?;
        harness.make(&packets)?;
        let datapath = self.controller.datapath_mut();
        harness.call(&Subject::Loaded(datapath.loaded_program()?))?;
        harness.run(flows, packets.length as usize)?;
        let backends = self.size.total() as usize;
        let opened: u64 = datapath.read_counters(backends)?.iter().map(|counters| counters.opened).sum();
        ensure!(opened == u64::from(flows), "{opened} flows instead of {flows}");
        let buckets = datapath.flows().bucket_count();
        let found = datapath.flows().flows(0..buckets).count();
        ensure!(found == flows as usize, "{found} flows in the table instead of {flows}");
        Ok(())
    }
}

fn sizes(config: &Config) -> Sizes {
    Sizes {
        flows: config.daemon.max_flows,
        services: config.daemon.max_services,
        backends: config.daemon.max_backends,
        ipv6: Some(false),
        profiled_age: Profile::reach(config.daemon.window),
    }
}

/// All backends on the network of the one interface.
fn network(size: Size) -> Network {
    let mut network = Network {
        links: vec![Link {
            index: INGRESS,
            name: "lo".to_owned(),
            mac: Some(BACKEND_SIDE),
            mtu: 1500,
            is_up: true,
            xdp: None,
            vlan: None,
        }],
        ..Network::default()
    };
    for backend in (0..size.backends).map(|backend| IpAddr::from(address(backend))) {
        network.routes.insert(backend, Route { ifindex: INGRESS, neighbour: backend, source: None });
        let neighbour = Neighbour { mac: Some(backend_mac(0)), is_confirmed: true };
        network.neighbours.insert((INGRESS, backend), neighbour);
    }
    network
}

fn milliseconds(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}
