//! Who has which number in the maps: services and backends come, stay over a restart, drain and go. A number is given to
//! another backend only when no flow is left that could lead to the former.

use std::{
    collections::{HashMap, HashSet},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use balancer_common::{
    AgeProfile, BackendCounters, BackendId, NextHop, Reason, ResponseTimes, Service, ServiceId, ServiceKey,
    Traffic, UDP, ability, forward, option,
};
use balancer_ebpf::wrap::{IPV4_WITHIN, IPV6_WITHIN};
use bytemuck::Zeroable as _;

use super::{Controller, health::Checked, records};
use crate::{
    address,
    api::{BackendState, LastChange},
    balance::Balance,
    clock::Monotonic,
    config::{self, Config, DataPorts, Forwarding, Requests, Snat, SnatPorts},
    health::Passive,
    maglev,
    network::{Network, Source},
    path_mtu::Told,
    responses::Histogram,
    window::Window,
};

/// A configured service.
pub(super) struct LiveService {
    pub(super) id: ServiceId,
    pub(super) config: config::Service,
    pub(super) balance: Balance,
    /// The ids of its backends, in configured order.
    pub(super) ids: Vec<BackendId>,
}

/// What a backend is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Duty {
    /// It takes new flows, if its weight and the way to it allow.
    Serve,
    /// The operator drains it: no new flows, and the end of the others at this moment.
    Drain { since: Monotonic, from: u64, until: Monotonic },
    /// It is not configured any more: as above, and then it goes.
    Leave { until: Monotonic },
}

/// A backend that has a number, and what was counted for it.
pub(super) struct LiveBackend {
    pub(super) service: ServiceId,
    pub(super) protocol: u8,
    pub(super) endpoint: SocketAddr,
    /// `None` when it has left the configuration.
    pub(super) config: Option<config::Backend>,
    pub(super) requests: Requests,
    pub(super) data_ports: Option<DataPorts>,
    /// What its answers leave as, if its service keeps no flows.
    pub(super) answers_as: Option<SocketAddr>,
    /// How packets get to it: `forward::*`.
    pub(super) forward: u8,
    pub(super) snat: Snat,
    /// The source that clients are given, if it is not this host's own towards the backend; or of tunnels, where packets come
    /// from.
    pub(super) own_source: Option<Source>,
    pub(super) snat_ports: SnatPorts,
    pub(super) gue_port: u16,
    pub(super) drain_timeout: Duration,
    pub(super) duty: Duty,
    /// Whether it is full, or a backup that is not needed: then not even the clients that it served before come to it.
    pub(super) stands_aside: bool,
    pub(super) hop: Option<NextHop>,
    pub(super) source: Option<Source>,
    pub(super) unreachable_since: Option<Monotonic>,
    /// `None` where its service has no health checks.
    pub(super) health: Option<Checked>,
    /// `None` where its service is not judged by its flows.
    pub(super) passive: Option<Passive>,
    /// As it was last shown, and since when.
    pub(super) shown: Option<(BackendState, Monotonic)>,
    pub(super) traffic: Traffic,
    pub(super) opened: u64,
    pub(super) closed: u64,
    pub(super) asked: u64,
    pub(super) answered: u64,
    pub(super) histogram: Option<Window<Histogram>>,
    /// As it is in the map.
    pub(super) record: Option<balancer_common::Backend>,
}

impl LiveBackend {
    fn new(service: ServiceId, protocol: u8, endpoint: SocketAddr, forward: u8, duty: Duty) -> LiveBackend {
        LiveBackend {
            service,
            protocol,
            endpoint,
            config: None,
            requests: Requests::Flow,
            data_ports: None,
            answers_as: None,
            forward,
            snat: Snat::Never,
            own_source: None,
            snat_ports: SnatPorts::default(),
            gue_port: 0,
            drain_timeout: config::DEFAULT_DRAIN_TIMEOUT,
            duty,
            stands_aside: false,
            hop: None,
            source: None,
            unreachable_since: None,
            health: None,
            passive: None,
            shown: None,
            traffic: Traffic::default(),
            opened: 0,
            closed: 0,
            asked: 0,
            answered: 0,
            histogram: None,
            record: None,
        }
    }

    /// What people call it: its address when it has left the configuration.
    pub(super) fn name(&self) -> String {
        self.config.as_ref().map_or_else(|| self.endpoint.to_string(), |config| config.name.to_string())
    }

    /// Flows that are open now.
    pub(super) const fn active(&self) -> u64 {
        self.opened.saturating_sub(self.closed)
    }

    /// Requests that have no answer yet.
    pub(super) const fn awaiting(&self) -> u64 {
        self.asked.saturating_sub(self.answered)
    }

    /// Requests that are active now.
    pub(super) const fn requests_by(&self, requests: Requests) -> u64 {
        match requests {
            Requests::Flow => self.active(),
            Requests::Exchange => self.awaiting(),
        }
    }

    /// Adds what the counters have grown by.
    pub(super) const fn count(&mut self, traffic: Traffic, counted: &BackendCounters) {
        self.traffic.packets = self.traffic.packets.wrapping_add(traffic.packets);
        self.traffic.bytes = self.traffic.bytes.wrapping_add(traffic.bytes);
        self.opened += counted.opened + counted.reopened;
        self.closed += counted.closed;
        self.asked += counted.asked;
        self.answered += counted.answered;
    }

    /// What tells it from others, on every balancer alike: its address and port.
    pub(super) fn identity(&self) -> u64 {
        maglev::identity(self.endpoint)
    }

    /// Its share of the new flows: none if it takes none now.
    pub(super) fn weight(&self) -> u8 {
        let is_healthy = self.health.as_ref().is_none_or(Checked::is_up)
            && self.passive.as_ref().is_none_or(Passive::is_in);
        let takes = self.duty == Duty::Serve && self.unreachable_since.is_none() && is_healthy;
        self.config.as_ref().filter(|_| takes).map_or(0, |config| config.weight.get())
    }

    /// The source that clients are given whose replies would not come through here, and whose network they are on.
    pub(super) fn given_source(&self) -> Option<Source> {
        if self.forward != forward::NAT {
            return None;
        }
        match self.snat {
            Snat::Auto => self.source,
            Snat::Always => Some(Source { prefix: 0, ..self.own_source.or(self.source)? }),
            Snat::Never => None,
        }
    }

    /// Where its packets come from when they are wrapped.
    pub(super) fn tunnel_source(&self) -> Option<Source> {
        let is_tunnel = matches!(self.forward, forward::IPIP | forward::GUE);
        let whole = |source: Source| Source { prefix: 128, ..source };
        self.own_source.or_else(|| self.source.map(whole)).filter(|_| is_tunnel)
    }

    /// Whether a packet that a router tells of was for it, in its tunnel.
    pub(super) fn has_sent(&self, told: &Told) -> bool {
        let is_wrapped = match self.forward {
            forward::IPIP => matches!(told.protocol, IPV4_WITHIN | IPV6_WITHIN),
            forward::GUE => told.protocol == UDP && told.port == self.gue_port,
            _ => false,
        };
        is_wrapped
            && told.destination == self.endpoint.ip()
            && self.tunnel_source().is_some_and(|source| source.covers(told.source))
    }

    /// The way to it through this network, which it may itself be packed for, and on which packets of `path` bytes are taken;
    /// `ports` are the configured interfaces' names.
    pub(super) fn hop_through(&self, network: &Network, ports: &[&str], path: u16) -> NextHop {
        let address = self.endpoint.ip();
        let forward = self.forward;
        let unusable = NextHop { unusable: Reason::NoEgress as u16, forward, ..NextHop::zeroed() };
        match forward {
            // Behind a gateway, that would get what is addressed to the service.
            forward::DSR if !network.is_on_link(address) => unusable,
            forward::IPIP | forward::GUE if self.tunnel_source().is_none() => unusable,
            _ => {
                let hop = network.next_hop(address, ports);
                let mtu = hop.mtu.min(path).saturating_sub(overhead(forward, address));
                NextHop { mtu, forward, ..hop }
            }
        }
    }

    /// When the flows that are left are ended, if the time has been set.
    pub(super) const fn ends(&self) -> Option<Monotonic> {
        match self.duty {
            Duty::Serve => None,
            Duty::Drain { until, .. } | Duty::Leave { until } => Some(until),
        }
    }
}

/// How many bytes packets to a backend are wrapped in.
pub(crate) const fn overhead(forward: u8, backend: IpAddr) -> u16 {
    let ip = if backend.is_ipv4() { 20 } else { 40 };
    match forward {
        forward::IPIP => ip,
        forward::GUE => ip + 8,
        _ => 0,
    }
}

/// What a backend is to packets without a flow.
#[derive(PartialEq, Eq)]
struct Presence {
    endpoint: SocketAddr,
    protocol: u8,
    forward: u8,
    answers_as: Option<SocketAddr>,
    data_ports: Option<DataPorts>,
    given_source: Option<Source>,
    snat_ports: SnatPorts,
    is_leaving: bool,
}

/// What clients talk to: address, port and IP protocol number.
pub(super) type Front = (SocketAddr, u8);

/// What the clients of a service talk to.
pub(super) fn front(service: &config::Service) -> Front {
    (*service.address, service.protocol.number())
}

/// Which numbers the services and backends of a configuration get.
type Seating = Vec<(ServiceId, Vec<BackendId>)>;

impl Controller {
    /// Takes over the numbers, flows and counters that an earlier daemon left. Returns its services.
    pub(super) fn take_over(&mut self, now: Monotonic) -> Result<Vec<(Front, ServiceId)>> {
        if !self.datapath.is_adopted() {
            return Ok(Vec::new());
        }
        let services = self.datapath.services()?;
        self.keys =
            services.iter().map(|(key, service)| (bytemuck::cast(*key), bytemuck::cast(*service))).collect();
        let services: Vec<_> =
            services.into_iter().filter(|(_, service)| service.options & option::MEDIA == 0).collect();
        let mut highest = None;
        for id in 0..self.datapath.sizes().backends {
            let id = BackendId::try_from(id).context("number the backends")?;
            let record = self.datapath.backend(id)?;
            let mut seat = None;
            if record.abilities & ability::SERVE != 0 {
                let endpoint = address::socket_from_wire(record.address, record.port);
                let duty = records::duty(&record, now);
                let of = services.iter().find(|(_, service)| service.id == record.service);
                let protocol = of.map_or(0, |(key, _)| key.protocol);
                let backend = LiveBackend::new(record.service, protocol, endpoint, record.forward, duty);
                let service = address::socket_from_wire(record.service_address, record.service_port);
                let answers_as = Some(service).filter(|service| service.port() != 0);
                seat = Some(LiveBackend {
                    record: Some(record),
                    answers_as,
                    own_source: records::tunnel_source(&record),
                    gue_port: u16::from_be_bytes(record.tunnel_port),
                    ..backend
                });
                highest = Some(usize::from(id));
            }
            self.backends.push(seat);
        }
        self.backends.truncate(highest.map_or(0, |highest| highest + 1));
        self.make_room(services.iter().map(|(_, service)| usize::from(service.id) + 1).max().unwrap_or(0));
        // What was counted before counts, but is nobody's load now.
        self.read_counters()?;
        self.read_profiles()?;
        self.count_flows(now)?;
        let front = |key: ServiceKey, service: &Service| {
            (address::socket_from_wire(service.address, key.port), key.protocol)
        };
        Ok(services.into_iter().map(|(key, service)| (front(key, &service), service.id)).collect())
    }

    /// Applies a configuration; `left` are the services that the program knows, and those at `unchanged` stay as they are.
    pub(super) fn apply_after(
        &mut self,
        now: Monotonic,
        config: &Config,
        left: Vec<(Front, ServiceId)>,
        unchanged: &HashSet<Front>,
    ) -> Result<LastChange> {
        let seating = self.seat(config, &left, unchanged)?;
        self.daemon = config.daemon.clone();
        let before = std::mem::take(&mut self.services);
        let mut before: HashMap<ServiceId, LiveService> =
            before.into_iter().map(|live| (live.id, live)).collect();
        let known: HashSet<ServiceId> = left.iter().map(|(_, id)| *id).collect();
        self.make_room(seating.iter().map(|(id, _)| usize::from(*id) + 1).max().unwrap_or(0));
        let mut touched = LastChange::default();
        let mut is_seated = vec![false; self.backends.len()];
        let mut seated = Vec::new();
        // Whether another address is a service's or a backend's, or is so otherwise.
        let mut is_moved = unchanged.is_empty();
        let mut presences = Vec::new();
        for (service, (id, ids)) in config.services.iter().zip(seating) {
            for place in ids.iter().map(|id| usize::from(*id)) {
                is_seated.resize(is_seated.len().max(place + 1), false);
                is_seated[place] = true;
            }
            let old = before.remove(&id);
            let old = match old {
                Some(old) if unchanged.contains(&front(service)) => {
                    self.services.push(old);
                    continue;
                }
                old => old,
            };
            touched.services += 1;
            touched.backends += ids.len() as u64;
            is_moved |= old.as_ref().is_none_or(|old| old.config.advertise != service.advertise);
            for (position, id_of) in ids.iter().enumerate() {
                presences.push(self.presence(*id_of));
                self.seat_backend(now, id, service, position, *id_of);
            }
            seated.extend_from_slice(&ids);
            let mut balance = match old {
                Some(old) => old.balance.with_method(now, service.method),
                None => {
                    let mut balance = Balance::new(service.method, config.daemon.window);
                    if known.contains(&id) {
                        balance.adopt(self.datapath.slots(id));
                    } else {
                        // What a service that had this number left in the ring is not for this one's flows.
                        let _ = self.datapath.switch_ring(id, &[], None);
                    }
                    balance
                }
            };
            balance.set_slow_start(service.slow_start);
            self.services.push(LiveService { id, config: service.clone(), balance, ids });
        }
        touched.services += before.len() as u64;
        is_moved |= !before.is_empty();
        for (id, backend) in (0..).zip(&mut self.backends) {
            let Some(backend) = backend else { continue };
            if !is_seated.get(id).is_some_and(|is_seated| *is_seated)
                && !matches!(backend.duty, Duty::Leave { .. })
            {
                touched.backends += 1;
                is_moved = true;
                backend.config = None;
                // An earlier daemon's may not have been known: its service's is as good.
                if let Some(service) = self.services.iter().find(|service| service.id == backend.service) {
                    backend.drain_timeout = service.config.drain_timeout;
                }
                backend.duty = Duty::Leave { until: now.plus(backend.drain_timeout) };
            }
        }
        self.cells.resize(self.backends.len() * self.datapath.cpus(), BackendCounters::default());
        let is_followed = self.services.iter().any(|service| records::follows_exchanges(&service.config));
        let times = if is_followed { self.cells.len() } else { 0 };
        self.response_times.resize(times, ResponseTimes::default());
        if touched != LastChange::default() {
            self.set_hops(now, &seated);
            is_moved |= seated.iter().map(|id| self.presence(*id)).ne(presences);
            if is_moved {
                self.set_roles()?;
            }
            self.set_members(now)?;
            if is_moved {
                self.write_endpoints()?;
            }
        }
        self.write_services()?;
        Ok(touched)
    }

    fn presence(&self, id: BackendId) -> Option<Presence> {
        let seat = self.backends.get(usize::from(id))?.as_ref()?;
        Some(Presence {
            endpoint: seat.endpoint,
            protocol: seat.protocol,
            forward: seat.forward,
            answers_as: seat.answers_as,
            data_ports: seat.data_ports,
            given_source: seat.given_source(),
            snat_ports: seat.snat_ports,
            is_leaving: matches!(seat.duty, Duty::Leave { .. }),
        })
    }

    /// Room for what is read of so many services.
    fn make_room(&mut self, services: usize) {
        let cpus = self.datapath.cpus();
        self.cells.resize(self.backends.len() * cpus, BackendCounters::default());
        let profiles = self.profiles.len().max(services * cpus);
        self.profiles.resize_with(profiles, AgeProfile::zeroed);
    }

    /// Finds a number for each service and backend: its own, or a free one. Changes nothing.
    fn seat(
        &self,
        config: &Config,
        left: &[(Front, ServiceId)],
        unchanged: &HashSet<Front>,
    ) -> Result<Seating> {
        self.tell_apart(config)?;
        let sizes = self.datapath.sizes();
        let known: HashMap<Front, ServiceId> = left.iter().copied().collect();
        let mut services: Vec<Option<ServiceId>> =
            config.services.iter().map(|service| known.get(&front(service)).copied()).collect();
        // A service's number is in use as long as one of its backends is there, also when it has gone itself.
        let mut taken: HashSet<ServiceId> = left.iter().map(|(_, id)| *id).collect();
        taken.extend(self.backends.iter().flatten().map(|backend| backend.service));
        let mut free = (0..sizes.services).filter_map(|id| ServiceId::try_from(id).ok());
        for id in services.iter_mut().filter(|id| id.is_none()) {
            *id = free.find(|id| !taken.contains(id));
            if id.is_none() {
                bail!(
                    "no room for another service while others drain: wait, or raise `max-services` ({})",
                    sizes.services
                );
            }
        }
        let mut free = (0..sizes.backends as usize)
            .filter(|id| self.backends.get(*id).is_none_or(Option::is_none))
            .filter_map(|id| BackendId::try_from(id).ok());
        // Flows of another mode can't be led on in this one.
        let mut own: HashMap<(ServiceId, SocketAddr, u8), BackendId> = HashMap::new();
        let unchanged: HashMap<ServiceId, &LiveService> = self
            .services
            .iter()
            .filter(|live| unchanged.contains(&front(&live.config)))
            .map(|live| (live.id, live))
            .collect();
        for (id, seat) in (0..).zip(&self.backends) {
            let Some(seat) = seat.as_ref().filter(|seat| !unchanged.contains_key(&seat.service)) else {
                continue;
            };
            own.entry((seat.service, seat.endpoint, seat.forward)).or_insert(id);
        }
        let mut seating = Seating::new();
        for (service, id) in config.services.iter().zip(services.into_iter().flatten()) {
            if let Some(live) = unchanged.get(&id) {
                seating.push((id, live.ids.clone()));
                continue;
            }
            let mut ids = Vec::with_capacity(service.backends.len());
            for backend in &service.backends {
                let key = (id, backend.address.into(), service.forward.mode.number());
                let seat = own.get(&key).copied().or_else(|| free.next());
                let Some(seat) = seat else {
                    bail!(
                        "no room for another backend while others drain: wait, or raise `max-backends` ({})",
                        sizes.backends
                    );
                };
                ids.push(seat);
            }
            seating.push((id, ids));
        }
        Ok(seating)
    }

    /// Refuses addresses that are one to the program, which finds services, and where media come from, by their digests.
    fn tell_apart(&self, config: &Config) -> Result<()> {
        let backends = config.services.iter().filter(|service| service.rtsp_nat.is_some());
        let backends = backends.flat_map(|service| &service.backends).map(|backend| backend.address.ip());
        let services = config.services.iter().map(|service| service.address.ip());
        let mut seen: HashMap<_, IpAddr> = HashMap::new();
        for address in services.chain(backends) {
            let other = *seen.entry(self.datapath.key((address, 0).into(), 0)).or_insert(address);
            if other != address {
                bail!(
                    "{other} and {address} can't be told apart by the numbers that this table has drawn: \
                     start with `balancer run --fresh`, which draws others, and live flows are lost"
                );
            }
        }
        Ok(())
    }

    fn seat_backend(
        &mut self,
        now: Monotonic,
        service_id: ServiceId,
        service: &config::Service,
        position: usize,
        id: BackendId,
    ) {
        let Some(backend) = service.backends.get(position) else { return };
        let place = usize::from(id);
        if self.backends.len() <= place {
            self.backends.resize_with(place + 1, || None);
        }
        let protocol = service.protocol.number();
        let endpoint = backend.address.into();
        let is_new = !self.backends[place]
            .as_ref()
            .is_some_and(|seat| matches!(seat.duty, Duty::Serve | Duty::Drain { .. }));
        let Forwarding { mode, snat, ref snat_addresses, snat_ports, gue_port, tunnel_source } =
            service.forward;
        let seat = self.backends[place].get_or_insert_with(|| {
            LiveBackend::new(service_id, protocol, endpoint, mode.number(), Duty::Serve)
        });
        seat.health = Checked::of(now, id, service, backend, seat, is_new);
        let known = seat.passive.take().filter(|_| !is_new);
        seat.passive = service.passive_health.map(|settings| match known {
            Some(passive) => passive.with(settings),
            None => Passive::new(settings),
        });
        seat.config = Some(backend.clone());
        seat.protocol = protocol;
        seat.requests = service.requests;
        seat.data_ports = service.rtsp_nat;
        seat.answers_as = service.one_packet.then(|| service.address.into());
        seat.snat = snat;
        seat.snat_ports = snat_ports;
        seat.gue_port = gue_port;
        let given = position.checked_rem(snat_addresses.len()).and_then(|place| snat_addresses.get(place));
        seat.own_source = match tunnel_source {
            Some(network) => Source::spread_over(network, endpoint.ip()),
            None => given.map(|address| Source { address: *address, prefix: 0 }),
        };
        seat.drain_timeout = service.drain_timeout;
        if matches!(seat.duty, Duty::Leave { .. }) {
            seat.duty = Duty::Serve;
        }
        let window = self.daemon.window;
        match records::follows_exchanges(service) {
            true => _ = seat.histogram.get_or_insert_with(|| Window::new(now, window)),
            false => seat.histogram = None,
        }
    }

    /// The operator's wish: no new flows for a backend, and the end of the others after `deadline` (none: what was wished
    /// before, or else its service's `drain-timeout`).
    pub fn drain(&mut self, now: Monotonic, id: BackendId, deadline: Option<Duration>) -> Result<()> {
        let Some(Some(backend)) = self.backends.get_mut(usize::from(id)) else { return Ok(()) };
        let wished = deadline.map(|deadline| now.plus(deadline));
        let (since, from, until) = match backend.duty {
            Duty::Drain { since, from, until } => (since, from, wished.unwrap_or(until)),
            _ => (now, backend.active(), wished.unwrap_or(now.plus(backend.drain_timeout))),
        };
        backend.duty = Duty::Drain { since, from, until };
        self.set_members(now)?;
        self.tick(now)
    }

    /// The operator's wish: a backend that was drained takes new flows again.
    pub fn enable(&mut self, now: Monotonic, id: BackendId) -> Result<()> {
        let Some(Some(backend)) = self.backends.get_mut(usize::from(id)) else { return Ok(()) };
        backend.duty = Duty::Serve;
        self.set_members(now)?;
        self.tick(now)
    }
}
