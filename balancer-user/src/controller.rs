//! One pass after the other: reads what the program counted, lets each service's `Balance` choose, and writes the
//! selection rings. It holds the numbers of services and backends in the maps.

use std::{collections::BTreeMap, net::Ipv4Addr, ops::Range, time::Duration};

use anyhow::{Context as _, Result};
use balancer_common::{
    AGES, AgeProfile, Backend, BackendCounters, BackendId, MAX_PORTS, NextHop, Reason, ResponseTimes,
    STAMP_SHIFT, Service, ServiceId, ServiceKey, TIMEOUT_SHIFT, Traffic, ability, answer, flags, option,
    role, selector,
};
use bytemuck::Zeroable as _;

use crate::{
    api::{AttachedMode, BackendState, BackendStatus, InterfaceStatus, ResponseTime, ServiceStatus, Status},
    balance::{Balance, Member, Observation, Taken},
    clock::Monotonic,
    config::{self, Config, Refusal, Requests},
    datapath::Datapath,
    method::Method,
    network::{Network, port_hop},
    responses::Histogram,
    window::{Growth as _, Window, difference},
};

/// How often a ring is planned again when flows took slots of the old one meanwhile, before it is switched anyway.
const PLAN_TRIES: usize = 4;
/// How long one walk over the flow table takes.
const SWEEP_TIME: Duration = Duration::from_secs(1);

/// The running state: the configuration in numbers, and everything that is learned from the counters.
pub struct Controller {
    datapath: Datapath,
    config: Config,
    services: Vec<LiveService>,
    /// By `BackendId`.
    backends: Vec<LiveBackend>,
    /// The cells of the counters as last read, `cpus` for each backend.
    cells: Vec<BackendCounters>,
    /// The response times as last read, `cpus` for each backend; none if no service follows exchanges.
    response_times: Vec<ResponseTimes>,
    /// The age profiles as last read, `cpus` for each service.
    profiles: Vec<AgeProfile>,
    /// The roles of addresses as written.
    roles: BTreeMap<Ipv4Addr, u32>,
    sweep_from: usize,
    swept: Monotonic,
    started: Monotonic,
    selected: Monotonic,
    interfaces: Vec<InterfaceStatus>,
}

struct LiveService {
    id: ServiceId,
    balance: Balance,
    /// The ids of its backends, in configured order.
    ids: Range<usize>,
}

/// What was counted for a backend since it was added.
#[derive(Clone, Debug, Default)]
struct LiveBackend {
    traffic: Traffic,
    opened: u64,
    closed: u64,
    asked: u64,
    answered: u64,
    is_reachable: bool,
    histogram: Option<Window<Histogram>>,
}

impl LiveBackend {
    /// Flows that are open now.
    const fn active(&self) -> u64 {
        self.opened.saturating_sub(self.closed)
    }

    /// Requests that have no answer yet.
    const fn awaiting(&self) -> u64 {
        self.asked.saturating_sub(self.answered)
    }
}

impl Controller {
    /// Writes services and backends into the maps of a freshly loaded program. Until the first `tick`, no flow is
    /// taken.
    pub fn new(mut datapath: Datapath, config: Config, now: Monotonic) -> Result<Controller> {
        let mut services = Vec::new();
        let mut backends = Vec::new();
        for (id, service) in config.services.iter().enumerate() {
            let id = ServiceId::try_from(id).context("number the services")?;
            let mut balance = Balance::new(service.method, config.daemon.window);
            balance.set_slow_start(service.slow_start);
            let live =
                LiveService { id, balance, ids: backends.len()..backends.len() + service.backends.len() };
            for backend in &service.backends {
                write_backend(&mut datapath, backends.len(), backend, id, service.protocol)?;
                let histogram = follows_exchanges(service).then(|| Window::new(now, config.daemon.window));
                backends.push(LiveBackend { histogram, ..LiveBackend::default() });
            }
            write_service(&mut datapath, id, service, &config.daemon)?;
            services.push(live);
        }
        let cells = vec![BackendCounters::default(); backends.len() * datapath.cpus()];
        let is_followed = config.services.iter().any(follows_exchanges);
        let response_times =
            if is_followed { vec![ResponseTimes::default(); cells.len()] } else { Vec::new() };
        let profiles = vec![AgeProfile::zeroed(); services.len() * datapath.cpus()];
        Ok(Controller {
            datapath,
            config,
            services,
            backends,
            cells,
            response_times,
            profiles,
            roles: BTreeMap::new(),
            sweep_from: 0,
            swept: now,
            started: now,
            selected: now,
            interfaces: Vec::new(),
        })
    }

    /// The program, to be attached.
    pub fn datapath_mut(&mut self) -> &mut Datapath {
        &mut self.datapath
    }

    /// Says how the program was attached, in the order of the configured interfaces.
    pub fn set_interfaces(&mut self, mode: AttachedMode) {
        self.interfaces = self
            .config
            .daemon
            .interfaces
            .iter()
            .map(|name| InterfaceStatus { name: name.to_string(), mode })
            .collect();
    }

    /// The addresses of the backends, each once.
    pub fn backend_addresses(&self) -> Vec<Ipv4Addr> {
        let backends = self.config.services.iter().flat_map(|service| &service.backends);
        let mut addresses: Vec<_> = backends.map(|backend| *backend.address.ip()).collect();
        addresses.sort_unstable();
        addresses.dedup();
        addresses
    }

    /// Writes the next hops: one for each interface, one for each backend. A backend that can't be reached takes no
    /// new flows.
    pub fn set_network(&mut self, now: Monotonic, network: &Network) -> Result<()> {
        self.set_roles(&network.addresses)?;
        let names: Vec<&str> = self.config.daemon.interfaces.iter().map(|name| name.as_str()).collect();
        for (port, name) in names.iter().enumerate() {
            let Some(link) = network.link(name) else { continue };
            let port = u16::try_from(port).context("number the interfaces")?;
            self.datapath.set_port(port, link.index).with_context(|| format!("set up port {name}"))?;
            self.datapath
                .set_next_hop(u32::from(port), &port_hop(link, port).unwrap_or_else(NextHop::zeroed));
        }
        let configured = self.config.services.iter().flat_map(|service| &service.backends);
        for (id, (backend, live)) in configured.zip(&mut self.backends).enumerate() {
            let hop = network.next_hop(*backend.address.ip(), &names);
            live.is_reachable = hop.mtu != 0;
            self.datapath.set_next_hop(MAX_PORTS + id as u32, &hop);
        }
        for (live, service) in self.services.iter_mut().zip(&self.config.services) {
            let members = service.backends.iter().zip(live.ids.clone()).map(|(backend, id)| Member {
                id: id as BackendId,
                identity: identity(backend),
                is_backup: backend.backup,
                max_active: backend.max_active,
                weight: match self.backends.get(id) {
                    Some(live) if live.is_reachable => backend.weight.get(),
                    _ => 0,
                },
            });
            live.balance.set_members(now, &members.collect::<Vec<_>>());
        }
        Ok(())
    }

    /// Writes what the addresses are that packets without a flow are judged by.
    fn set_roles(&mut self, local: &[Ipv4Addr]) -> Result<()> {
        let mut roles: BTreeMap<Ipv4Addr, u32> = BTreeMap::new();
        for service in &self.config.services {
            *roles.entry(*service.address.ip()).or_default() |= role::SERVICE;
            for backend in &service.backends {
                *roles.entry(*backend.address.ip()).or_default() |= role::BACKEND;
            }
        }
        for address in local {
            *roles.entry(*address).or_default() |= role::LOCAL;
        }
        for address in self.roles.keys().filter(|address| !roles.contains_key(address)) {
            self.datapath
                .set_roles(address.octets(), 0)
                .with_context(|| format!("forget address {address}"))?;
        }
        for (address, role) in roles.iter().filter(|(address, role)| self.roles.get(address) != Some(role)) {
            self.datapath
                .set_roles(address.octets(), *role)
                .with_context(|| format!("write address {address}"))?;
        }
        self.roles = roles;
        Ok(())
    }

    /// One pass: counters, windows, rings, and a slice of the flow table.
    pub fn tick(&mut self, now: Monotonic) -> Result<()> {
        let mut counted = self.cursors();
        let mut observations = self.read_counters()?;
        // A flow that took its slot in between may be counted or not: once more, and mostly it is clear.
        let again = self.cursors();
        if again != counted {
            counted = again;
            for ((_, sum), (_, more)) in observations.iter_mut().zip(self.read_counters()?) {
                sum.traffic.packets += more.traffic.packets;
                sum.traffic.bytes += more.traffic.bytes;
                sum.opened += more.opened;
                (sum.active, sum.requests) = (more.active, more.requests);
            }
        }
        self.read_response_times(now, &mut observations)?;
        let ages = self.read_profiles()?;
        for ((service, counted), ages) in self.services.iter_mut().zip(counted).zip(ages) {
            let own = observations.get(service.ids.clone()).unwrap_or_default();
            service.balance.observe(now, own);
            service.balance.observe_ages(now, &ages);
            select(&mut self.datapath, service, now, counted);
        }
        self.selected = now;
        self.sweep(now);
        Ok(())
    }

    /// How many slots of each service's ring have been taken.
    fn cursors(&self) -> Vec<u64> {
        self.services.iter().map(|service| self.datapath.ring_word(service.id).taken()).collect()
    }

    /// What the counters have grown by since they were last read, by backend.
    fn read_counters(&mut self) -> Result<Vec<(BackendId, Observation)>> {
        let cpus = self.datapath.cpus();
        let cells = self.datapath.read_counters(self.backends.len())?;
        let mut observations = Vec::with_capacity(self.backends.len());
        let of_backends = cells.chunks(cpus).zip(self.cells.chunks_mut(cpus)).zip(&mut self.backends);
        for (id, ((new, old), backend)) in of_backends.enumerate() {
            let mut observation = Observation::default();
            for (new, old) in new.iter().zip(old) {
                for grown in
                    [traffic_difference(old.request, new.request), traffic_difference(old.reply, new.reply)]
                {
                    observation.traffic.packets += grown.packets;
                    observation.traffic.bytes += grown.bytes;
                }
                observation.opened += difference(old.opened, new.opened);
                backend.closed += difference(old.closed, new.closed);
                backend.asked += difference(old.asked, new.asked);
                backend.answered += difference(old.answered, new.answered);
                *old = *new;
            }
            backend.traffic.packets = backend.traffic.packets.wrapping_add(observation.traffic.packets);
            backend.traffic.bytes = backend.traffic.bytes.wrapping_add(observation.traffic.bytes);
            backend.opened += observation.opened;
            observation.active = backend.active();
            observation.requests = backend.active();
            observations.push((id as BackendId, observation));
        }
        for (service, live) in self.config.services.iter().zip(&self.services) {
            if service.requests == Requests::Exchange {
                let own = observations.get_mut(live.ids.clone()).unwrap_or_default();
                for ((_, observation), backend) in own.iter_mut().zip(&self.backends[live.ids.clone()]) {
                    observation.requests = backend.awaiting();
                }
            }
        }
        Ok(observations)
    }

    /// Adds what the response times have grown by since they were last read.
    fn read_response_times(
        &mut self,
        now: Monotonic,
        observations: &mut [(BackendId, Observation)],
    ) -> Result<()> {
        if self.response_times.is_empty() {
            return Ok(());
        }
        let cpus = self.datapath.cpus();
        let cells = self.datapath.read_response_times(self.backends.len())?;
        let of_backends = cells.chunks(cpus).zip(self.response_times.chunks_mut(cpus));
        for (((new, old), backend), (_, observation)) in of_backends.zip(&mut self.backends).zip(observations)
        {
            let mut answers = Histogram::ZERO;
            for (new, old) in new.iter().zip(old) {
                observation.responses.sum += difference(old.sum, new.sum);
                observation.responses.count += difference(old.count, new.count);
                for ((sum, new), old) in answers.0.iter_mut().zip(new.histogram).zip(old.histogram) {
                    *sum = sum.saturating_add(u32::try_from(difference(old, new)).unwrap_or(u32::MAX));
                }
                *old = *new;
            }
            if let Some(histogram) = &mut backend.histogram {
                histogram.push(now, answers);
            }
        }
        Ok(())
    }

    /// What each service's flows have carried since this was last read, by their age.
    fn read_profiles(&mut self) -> Result<Vec<[Traffic; AGES]>> {
        let cpus = self.datapath.cpus();
        let profiles = self.datapath.read_profiles(self.services.len())?;
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

    /// Walks on over the flow table, as far as the time since the last slice asks for.
    fn sweep(&mut self, now: Monotonic) {
        let buckets = self.datapath.buckets();
        let elapsed = now.since(self.swept).min(SWEEP_TIME);
        let share = elapsed.as_secs_f64() / SWEEP_TIME.as_secs_f64();
        let count = (buckets as f64 * share).ceil() as usize;
        let sweep = self.datapath.sweep(self.sweep_from, count, stamp(now));
        for (id, ended) in sweep.ended {
            if let Some(backend) = self.backends.get_mut(usize::from(id)) {
                backend.closed += u64::from(ended & flags::ACTIVE != 0);
                backend.answered += u64::from(ended & flags::AWAITING != 0);
            }
        }
        self.sweep_from = sweep.next;
        self.swept = now;
    }

    /// All that there is to tell.
    pub fn status(&mut self, now: Monotonic) -> Result<Status> {
        let drops = self.datapath.read_drops()?;
        let services = self.services.iter().zip(&self.config.services).map(|(live, service)| ServiceStatus {
            name: service.name.to_string(),
            address: service.address.into(),
            protocol: service.protocol,
            method: service.method,
            forward: service.forward,
            backends: self.backends_status(now, live, service),
        });
        Ok(Status {
            services: services.collect(),
            interfaces: self.interfaces.clone(),
            drops: Reason::ALL
                .iter()
                .zip(drops)
                .map(|(reason, count)| (reason.name().to_owned(), count))
                .collect(),
            selection_age_ms: millis(now.since(self.selected)),
            window_ms: millis(now.since(self.started).min(self.config.daemon.window)),
        })
    }

    fn backends_status(
        &self,
        now: Monotonic,
        live: &LiveService,
        service: &config::Service,
    ) -> Vec<BackendStatus> {
        let scores = live.balance.scores(now);
        let own = self.backends.get(live.ids.clone()).unwrap_or_default();
        let each = service.backends.iter().zip(own).zip(scores);
        each.map(|((backend, counted), score)| BackendStatus {
            name: backend.name.to_string(),
            address: backend.address.into(),
            weight: backend.weight.get(),
            state: if counted.is_reachable { BackendState::Up } else { BackendState::Unreachable },
            active: counted.active(),
            awaiting: counted.histogram.as_ref().map(|_| counted.awaiting()),
            response_time: counted.histogram.as_ref().and_then(|histogram| {
                let histogram = histogram.totals(now);
                Some(ResponseTime {
                    answers: score.responses.count,
                    mean_ms: score.responses.mean()?.in_micros() as f64 / 1e6,
                    p50_ms: histogram.quantile(0.5)?,
                    p99_ms: histogram.quantile(0.99)?,
                })
            }),
            packets: counted.traffic.packets,
            bytes: counted.traffic.bytes,
            window_packets: score.window.traffic.packets,
            window_bytes: score.window.traffic.bytes,
            n: score.n,
            committed: score.committed,
            nw: score.nw,
            share: score.share,
        })
        .collect()
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

/// What tells a backend from others, on every balancer alike: its address and port.
fn identity(backend: &config::Backend) -> u64 {
    u64::from(u32::from(*backend.address.ip())) << 16 | u64::from(backend.address.port())
}

fn write_backend(
    datapath: &mut Datapath,
    id: usize,
    backend: &config::Backend,
    service: ServiceId,
    protocol: config::Protocol,
) -> Result<()> {
    let id = BackendId::try_from(id).context("number the backends")?;
    let value = Backend {
        address: backend.address.ip().octets(),
        port: backend.address.port().to_be_bytes(),
        service,
        abilities: ability::SERVE | ability::TAKE,
        ..Backend::default()
    };
    let name = &backend.name;
    datapath.set_backend(id, &value).with_context(|| format!("write backend {name} into its map"))?;
    let endpoint =
        ServiceKey { address: value.address, port: value.port, protocol: protocol.number(), reserved: 0 };
    datapath.set_endpoint(&endpoint).with_context(|| format!("write the address of backend {name}"))
}

fn write_service(
    datapath: &mut Datapath,
    id: ServiceId,
    service: &config::Service,
    daemon: &config::Daemon,
) -> Result<()> {
    let value = Service {
        id,
        idle_timeout: timeout(service.idle_timeout),
        half_open_timeout: timeout(daemon.half_open_timeout),
        closing_timeout: timeout(daemon.closing_timeout),
        answers: answers(service),
        selector: match service.method {
            Method::SourceHash => selector::SOURCE,
            Method::Maglev => selector::FLOW,
            _ => selector::NEXT,
        },
        options: if follows_exchanges(service) { option::EXCHANGES } else { 0 },
        persistence_prefix: service.persistence.map_or(0, |persistence| persistence.mask),
        persistence_timeout: service.persistence.map_or(0, |persistence| timeout(persistence.timeout)),
        ..Service::default()
    };
    let key = service.key();
    let name = &service.name;
    datapath.set_service(&key, &value).with_context(|| format!("write service {name} into its map"))
}

/// Whether the method compares what only requests and their answers show.
fn follows_exchanges(service: &config::Service) -> bool {
    service.method == Method::LeastResponseTime || service.requests == Requests::Exchange
}

/// Which refused packets the program answers.
fn answers(service: &config::Service) -> u8 {
    let bit = |refusal: Refusal, bit: u8| if refusal == Refusal::Answer { bit } else { 0 };
    bit(service.no_backend, answer::NO_BACKEND) | bit(service.unknown_flow, answer::UNKNOWN_FLOW)
}

/// A timeout as the program takes it, rounded up.
fn timeout(duration: Duration) -> u16 {
    let units = duration.as_nanos().div_ceil(1 << TIMEOUT_SHIFT);
    u16::try_from(units).unwrap_or(u16::MAX)
}

/// A moment as the program stamps it.
fn stamp(now: Monotonic) -> u32 {
    (now.since_boot().as_nanos() >> STAMP_SHIFT) as u32
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
