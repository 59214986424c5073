//! One pass after the other: reads what the program counted, lets each service's `Balance` choose, and writes the
//! selection rings. It holds the numbers of services and backends in the maps.

mod ask;
mod changes;
mod explain;
mod generations;
mod health;
mod media;
mod obstacle;
mod ports;
mod records;
mod search;
mod seats;
mod status;
mod sweep;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    net::IpAddr,
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, Result};
use balancer_common::{
    AGES, AgeProfile, BackendCounters, BackendId, MAX_PORTS, ResponseTimes, Traffic, forward, role,
};
use tokio::sync::mpsc;

pub use self::changes::{Prepared, cannot_probe};
pub(crate) use self::seats::overhead;
use self::{
    changes::Changes,
    generations::Generations,
    ports::Ports,
    search::Searches,
    seats::{Front, LiveBackend, LiveService, front},
    sweep::Walk,
};
use crate::{
    address,
    api::{InterfaceStatus, LastChange},
    balance::{Member, Observation, Taken},
    clock::Monotonic,
    config::{Config, Daemon},
    datapath::Datapath,
    network::Network,
    path_mtu::{PathMtus, Told},
    responses::Histogram,
    window::{Growth as _, difference},
};

/// How often a ring is planned again when flows took slots of the old one meanwhile, before it is switched anyway.
const PLAN_TRIES: usize = 4;

/// The running state: the configuration in numbers, and everything that is learned from the counters.
pub struct Controller {
    datapath: Datapath,
    daemon: Daemon,
    /// In configured order.
    services: Vec<LiveService>,
    /// By `BackendId`; `None` = the slot is free.
    backends: Vec<Option<LiveBackend>>,
    /// The cells of the counters as last read, `cpus` for each backend.
    cells: Vec<BackendCounters>,
    /// The response times as last read, `cpus` for each backend; none if no service follows exchanges.
    response_times: Vec<ResponseTimes>,
    /// The age profiles as last read, `cpus` for each service.
    profiles: Vec<AgeProfile>,
    network: Network,
    path_mtus: PathMtus,
    ports: Ports,
    /// The roles of addresses, and the endpoints of backends, as written.
    roles: BTreeMap<IpAddr, u32>,
    endpoints: BTreeMap<[u8; 8], u32>,
    /// The services, and the data ports of those that have some, as written.
    keys: BTreeMap<[u8; 8], [u8; 32]>,
    walk: Walk,
    started: Monotonic,
    selected: Monotonic,
    interfaces: Vec<InterfaceStatus>,
    searches: Searches,
    generations: Generations,
    changes: Changes,
    /// When the last tick was due, and how many were not made in time.
    ticked: Option<Monotonic>,
    missed_ticks: u64,
}

impl Controller {
    /// Takes over what an earlier daemon left in the maps, if anything, and applies a configuration, the text of which is from
    /// `file`. Until the first `tick` of a controller that took over nothing, no flow is taken. Changes that have been prepared
    /// go to `prepared`.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, or there is no room beside what is still draining.
    pub fn new(
        datapath: Datapath,
        (file, text): (PathBuf, String),
        config: Config,
        prepared: mpsc::UnboundedSender<Prepared>,
        now: Monotonic,
    ) -> Result<Controller> {
        let walk = Walk::new(now);
        let mut controller = Controller {
            ports: Ports::adopt(&datapath),
            datapath,
            daemon: config.daemon.clone(),
            services: Vec::new(),
            backends: Vec::new(),
            cells: Vec::new(),
            response_times: Vec::new(),
            profiles: Vec::new(),
            network: Network::default(),
            path_mtus: PathMtus::default(),
            roles: BTreeMap::new(),
            endpoints: BTreeMap::new(),
            keys: BTreeMap::new(),
            walk,
            started: now,
            selected: now,
            interfaces: Vec::new(),
            searches: Searches::default(),
            generations: Generations::new(file, text, config.clone()),
            changes: Changes::new(prepared),
            ticked: None,
            missed_ticks: 0,
        };
        let left = controller.take_over(now)?;
        controller.apply_after(now, &config, left, &HashSet::new())?;
        Ok(controller)
    }

    /// Changes the running services and backends to those of a configuration. What is not changed by it goes on: flows,
    /// windows, rotation; the services at `unchanged` are not even looked at. A backend that is not in it any more keeps its flows
    /// until its `drain-timeout`.
    ///
    /// # Errors
    ///
    /// When there is no room beside what is still draining: then nothing was changed. When the kernel refuses.
    fn apply(&mut self, now: Monotonic, config: &Config, unchanged: &HashSet<Front>) -> Result<LastChange> {
        let left = self.services.iter().map(|service| (front(&service.config), service.id)).collect();
        self.apply_after(now, config, left, unchanged)
    }

    /// How the daemon itself runs.
    pub const fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// When the selection rings were last judged, and written where they had to change.
    pub const fn selected(&self) -> Monotonic {
        self.selected
    }

    /// The program, to be attached.
    pub fn datapath_mut(&mut self) -> &mut Datapath {
        &mut self.datapath
    }

    /// Says what has become of the configured interfaces.
    pub fn set_interfaces(&mut self, interfaces: Vec<InterfaceStatus>) {
        self.interfaces = interfaces;
    }

    /// The addresses of the backends, each once.
    pub fn backend_addresses(&self) -> Vec<IpAddr> {
        let mut addresses: Vec<_> =
            self.backends.iter().flatten().map(|backend| backend.endpoint.ip()).collect();
        addresses.sort_unstable();
        addresses.dedup();
        addresses
    }

    /// The services as they are configured.
    pub fn configured(&self) -> impl Iterator<Item = &crate::config::Service> {
        self.services.iter().map(|service| &service.config)
    }

    /// The addresses whose MAC whoever asks is told.
    pub fn advertised(&self) -> BTreeSet<IpAddr> {
        let services = self.services.iter().filter(|service| service.config.advertise);
        services.map(|service| service.config.address.ip()).collect()
    }

    /// A neighbour that the kernel must be asked to find, for the answers that have been refused since: its interface and
    /// address.
    pub fn take_unresolved(&self) -> Option<(u32, IpAddr)> {
        self.datapath.take_unresolved()
    }

    /// Writes the next hops: one for each interface and VLAN, one for each backend. A backend that can't be reached takes no
    /// new flows.
    pub fn set_network(&mut self, now: Monotonic, network: &Network) -> Result<()> {
        self.network = network.clone();
        let names: Vec<&str> = self.daemon.interfaces.iter().map(|name| name.as_str()).collect();
        self.ports.write(&mut self.datapath, network, &names)?;
        let all: Vec<BackendId> = (0..).take(self.backends.len()).collect();
        self.set_hops(now, &all);
        self.set_roles()?;
        self.set_members(now)
    }

    /// Writes how these backends are reached.
    fn set_hops(&mut self, now: Monotonic, ids: &[BackendId]) {
        let names: Vec<&str> = self.daemon.interfaces.iter().map(|name| name.as_str()).collect();
        for id in ids {
            let Some(Some(backend)) = self.backends.get_mut(usize::from(*id)) else { continue };
            let id = u32::from(*id);
            backend.source = self.network.source(backend.endpoint.ip());
            let path = self.path_mtus.of(backend.endpoint.ip());
            let hop = backend.hop_through(&self.network, &names, path);
            if backend.hop != Some(hop) {
                self.datapath.set_next_hop(MAX_PORTS + id, &hop);
                backend.hop = Some(hop);
            }
            backend.unreachable_since = (hop.mtu == 0).then(|| backend.unreachable_since.unwrap_or(now));
        }
    }

    /// Believes a router that a packet to a backend, in a tunnel, was too large for it.
    pub fn narrow(&mut self, now: Monotonic, told: &Told) {
        let address = told.destination;
        let is_ours = self.backends.iter().flatten().any(|backend| backend.has_sent(told));
        if is_ours && self.path_mtus.learn(now, address, told.mtu) {
            tracing::info!("packets to {address} may have {} bytes, a router on the way says", told.mtu);
            self.set_hops_to(now, &[address]);
        }
    }

    /// Writes how the backends at these addresses are reached.
    fn set_hops_to(&mut self, now: Monotonic, addresses: &[IpAddr]) {
        let is_one = |backend: &Option<LiveBackend>| {
            backend.as_ref().is_some_and(|backend| addresses.contains(&backend.endpoint.ip()))
        };
        let ids: Vec<BackendId> =
            (0..).zip(&self.backends).filter(|(_, backend)| is_one(backend)).map(|(id, _)| id).collect();
        self.set_hops(now, &ids);
    }

    /// Tells each service's `Balance` who may take flows, and the program as well.
    fn set_members(&mut self, now: Monotonic) -> Result<()> {
        for service in &mut self.services {
            let mut members = Vec::with_capacity(service.ids.len());
            for id in &service.ids {
                let Some(Some(backend)) = self.backends.get(usize::from(*id)) else { continue };
                members.push(Member {
                    id: *id,
                    identity: backend.identity(),
                    weight: backend.weight(),
                    is_backup: backend.config.as_ref().is_some_and(|config| config.backup),
                    max_active: backend.config.as_ref().and_then(|config| config.max_active),
                });
            }
            service.balance.set_members(now, &members);
        }
        self.write_backends()
    }

    /// Writes what the addresses are that packets without a flow are judged by.
    fn set_roles(&mut self) -> Result<()> {
        let mut roles: BTreeMap<IpAddr, u32> = BTreeMap::new();
        for service in &self.services {
            let advertised = if service.config.advertise { role::ADVERTISED } else { 0 };
            *roles.entry(service.config.address.ip()).or_default() |= role::SERVICE | advertised;
        }
        for backend in self.backends.iter().flatten() {
            // Past the balancer, answers come from the service's address.
            if backend.forward == forward::NAT {
                *roles.entry(backend.endpoint.ip()).or_default() |= role::BACKEND;
            }
            if let Some(source) = backend.given_source() {
                let [first, _] = backend.snat_ports.0;
                let of_address = roles.entry(source.address).or_default();
                // Of several services, the widest range.
                let before =
                    if *of_address & role::SNAT == 0 { u16::MAX } else { role::first_port(*of_address) };
                *of_address = *of_address & 0xffff | role::with_ports_from(first.min(before));
            }
        }
        for local in &self.network.addresses {
            *roles.entry(local.address).or_default() |= role::LOCAL;
        }
        for address in self.roles.keys().filter(|address| !roles.contains_key(address)) {
            self.datapath
                .set_roles(address::to_wire(*address), 0)
                .with_context(|| format!("forget address {address}"))?;
        }
        for (address, role) in roles.iter().filter(|(address, role)| self.roles.get(address) != Some(role)) {
            self.datapath
                .set_roles(address::to_wire(*address), *role)
                .with_context(|| format!("write address {address}"))?;
        }
        self.roles = roles;
        Ok(())
    }

    /// The pass that is due with every `tick` of the configuration.
    pub fn tick_in_time(&mut self, now: Monotonic) -> Result<()> {
        let period = self.daemon.tick.max(Duration::from_millis(1));
        if let Some(before) = self.ticked.replace(now) {
            let due = now.since(before).as_nanos() / period.as_nanos();
            self.missed_ticks += u64::try_from(due.saturating_sub(1)).unwrap_or(u64::MAX);
        }
        self.tick(now)
    }

    /// One pass: counters, windows, rings, and a slice of the flow table.
    pub fn tick(&mut self, now: Monotonic) -> Result<()> {
        let wider = self.path_mtus.expire(now);
        if !wider.is_empty() {
            self.set_hops_to(now, &wider);
        }
        let mut counted = self.cursors();
        let mut observations = self.read_counters()?;
        // A flow that took its slot in between may be counted or not: once more, and mostly it is clear.
        let again = self.cursors();
        if again != counted {
            counted = again;
            for (sum, more) in observations.iter_mut().zip(self.read_counters()?) {
                sum.traffic.packets += more.traffic.packets;
                sum.traffic.bytes += more.traffic.bytes;
                sum.opened += more.opened;
                (sum.active, sum.requests) = (more.active, more.requests);
            }
        }
        self.read_response_times(now, &mut observations)?;
        let ages = self.read_profiles()?;
        for (service, counted) in self.services.iter_mut().zip(counted) {
            let of = |id: &BackendId| Some((*id, *observations.get(usize::from(*id))?));
            let own: Vec<_> = service.ids.iter().filter_map(of).collect();
            service.balance.observe(now, &own);
            if let Some(ages) = ages.get(usize::from(service.id)) {
                service.balance.observe_ages(now, ages);
            }
            select(&mut self.datapath, service, now, counted);
        }
        self.note_takers()?;
        self.selected = now;
        self.sweep(now)
    }

    /// Tells the program which backends may not even take flows of clients that they served before.
    fn note_takers(&mut self) -> Result<()> {
        let mut is_changed = false;
        let keep_clients = self.services.iter().filter(|service| service.config.persistence.is_some());
        for (id, takes) in keep_clients.flat_map(|service| service.balance.takers()) {
            if let Some(Some(backend)) = self.backends.get_mut(usize::from(id)) {
                is_changed |= std::mem::replace(&mut backend.stands_aside, !takes) == takes;
            }
        }
        if is_changed { self.write_backends() } else { Ok(()) }
    }

    /// How many slots of each service's ring have been taken.
    fn cursors(&self) -> Vec<u64> {
        self.services.iter().map(|service| self.datapath.ring_word(service.id).taken()).collect()
    }

    /// What the counters have grown by since they were last read, by backend.
    fn read_counters(&mut self) -> Result<Vec<Observation>> {
        let cpus = self.datapath.cpus();
        let cells = self.datapath.read_counters(self.backends.len())?;
        let mut observations = Vec::with_capacity(self.backends.len());
        let of_backends = cells.chunks(cpus).zip(self.cells.chunks_mut(cpus)).zip(&mut self.backends);
        for ((new, old), backend) in of_backends {
            let mut observation = Observation::default();
            let mut counted = BackendCounters::default();
            for (new, old) in new.iter().zip(old) {
                for grown in
                    [traffic_difference(old.request, new.request), traffic_difference(old.reply, new.reply)]
                {
                    observation.traffic.packets += grown.packets;
                    observation.traffic.bytes += grown.bytes;
                }
                counted.opened += difference(old.opened, new.opened);
                counted.closed += difference(old.closed, new.closed);
                counted.asked += difference(old.asked, new.asked);
                counted.answered += difference(old.answered, new.answered);
                counted.reopened += difference(old.reopened, new.reopened);
                *old = *new;
            }
            observation.opened = counted.opened;
            if let Some(backend) = backend {
                backend.count(observation.traffic, &counted);
                observation.active = backend.active();
                observation.requests = backend.requests_by(backend.requests);
            }
            observations.push(observation);
        }
        Ok(observations)
    }

    /// Adds what the response times have grown by since they were last read.
    fn read_response_times(&mut self, now: Monotonic, observations: &mut [Observation]) -> Result<()> {
        if self.response_times.is_empty() {
            return Ok(());
        }
        let cpus = self.datapath.cpus();
        let cells = self.datapath.read_response_times(self.backends.len())?;
        let of_backends = cells.chunks(cpus).zip(self.response_times.chunks_mut(cpus));
        for (((new, old), backend), observation) in of_backends.zip(&mut self.backends).zip(observations) {
            let mut answers = Histogram::ZERO;
            for (new, old) in new.iter().zip(old) {
                observation.responses.sum += difference(old.sum, new.sum);
                observation.responses.count += difference(old.count, new.count);
                for ((sum, new), old) in answers.0.iter_mut().zip(new.histogram).zip(old.histogram) {
                    *sum = sum.saturating_add(u32::try_from(difference(old, new)).unwrap_or(u32::MAX));
                }
                *old = *new;
            }
            if let Some(histogram) = backend.as_mut().and_then(|backend| backend.histogram.as_mut()) {
                histogram.push(now, answers);
            }
        }
        Ok(())
    }

    /// What each service's flows have carried since this was last read, by their age; by `ServiceId`.
    fn read_profiles(&mut self) -> Result<Vec<[Traffic; AGES]>> {
        let cpus = self.datapath.cpus();
        let profiles = self.datapath.read_profiles(self.profiles.len() / cpus)?;
        let of_services = profiles.chunks(cpus).zip(self.profiles.chunks_mut(cpus));
        let grown = of_services.map(|(new, old)| {
            let mut growth = [Traffic::default(); AGES];
            for (new, old) in new.iter().zip(old) {
                for ((sum, new), old) in growth.iter_mut().zip(new.ages).zip(&mut old.ages) {
                    let grown = traffic_difference(*old, new);
                    sum.packets += grown.packets;
                    sum.bytes += grown.bytes;
                    *old = new;
                }
            }
            growth
        });
        Ok(grown.collect())
    }
}

/// What a pair of ever-growing cells has grown by.
fn traffic_difference(old: Traffic, new: Traffic) -> Traffic {
    Traffic { packets: difference(old.packets, new.packets), bytes: difference(old.bytes, new.bytes) }
}

/// Plans a service's ring and switches to it, unless what is in it goes on rightly.
fn select(datapath: &mut Datapath, service: &mut LiveService, now: Monotonic, counted: u64) {
    for attempt in 1..=PLAN_TRIES {
        let word = datapath.ring_word(service.id);
        let Some(plan) = service.balance.plan(now, Taken { counted, now: word.taken() }) else { return };
        let expected = (attempt < PLAN_TRIES).then_some(word);
        if datapath.switch_ring(service.id, &plan.slots, expected).is_ok() {
            service.balance.install(plan);
            return;
        }
    }
}
