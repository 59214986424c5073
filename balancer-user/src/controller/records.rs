//! Services and backends as the program, and the next daemon, read them.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context as _, Result};
use balancer_common::{
    Backend, BackendId, STAMP_SHIFT, Service, ServiceKey, TIMEOUT_SHIFT, UDP, ability, answer, endpoint,
    forward, option, selector,
};

use super::{
    Controller,
    seats::{Duty, LiveBackend, front},
};
use crate::{
    address,
    clock::Monotonic,
    config::{self, Daemon, DataPorts, Refusal, Requests},
    method::Method,
    network::Source,
};

impl Controller {
    /// Writes the backends that have changed.
    pub(super) fn write_backends(&mut self) -> Result<()> {
        for (id, backend) in self.backends.iter_mut().enumerate() {
            let Some(backend) = backend else { continue };
            let id = BackendId::try_from(id).context("number the backends")?;
            let record = record(backend);
            if backend.record != Some(record) {
                let what = || format!("write backend {} into its map", backend.endpoint);
                self.datapath.set_backend(id, &record).with_context(what)?;
                backend.record = Some(record);
            }
        }
        Ok(())
    }

    /// Writes where backends answer from, as far as it has changed: with the backends that come and go, and where they are.
    pub(super) fn write_endpoints(&mut self) -> Result<()> {
        let mut endpoints = BTreeMap::new();
        for (id, backend) in self.backends.iter().enumerate() {
            let Some(backend) = backend else { continue };
            let id = BackendId::try_from(id).context("number the backends")?;
            // Past the balancer, answers come from the service's address.
            if backend.forward != forward::NAT {
                continue;
            }
            let from = self.datapath.key(backend.endpoint, backend.protocol);
            let who = match backend.answers_as {
                Some(_) => endpoint::ONE_PACKET | u32::from(id),
                None => endpoint::SERVER,
            };
            // Who is configured goes before who has left: without a flow, an answer is that one's.
            let has_left = matches!(backend.duty, Duty::Leave { .. });
            let of_endpoint = endpoints.entry(bytemuck::cast::<_, [u8; 8]>(from)).or_insert(who);
            if !has_left {
                *of_endpoint = who;
            }
            for port in backend.data_ports.into_iter().flat_map(DataPorts::iter) {
                let from = ServiceKey { port: port.to_be_bytes(), protocol: UDP, ..from };
                endpoints.insert(bytemuck::cast(from), endpoint::MEDIA | u32::from(id));
            }
        }
        for from in self.endpoints.keys().filter(|from| !endpoints.contains_key(*from)) {
            self.datapath
                .remove_endpoint(&bytemuck::cast(*from))
                .context("forget where a backend answers from")?;
        }
        for (from, who) in endpoints.iter().filter(|(from, who)| self.endpoints.get(*from) != Some(*who)) {
            self.datapath
                .set_endpoint(&bytemuck::cast(*from), *who)
                .context("write where a backend answers from")?;
        }
        self.endpoints = endpoints;
        Ok(())
    }

    /// Writes the services that have changed, and takes out those that are gone.
    pub(super) fn write_services(&mut self) -> Result<()> {
        let mut keys: BTreeMap<[u8; 8], [u8; 32]> = BTreeMap::new();
        for service in &self.services {
            let (address, protocol) = front(&service.config);
            let (key, value) = (self.datapath.key(address, protocol), value(&service.config, &self.daemon));
            keys.insert(bytemuck::cast(key), bytemuck::cast(Service { id: service.id, ..value }));
            for port in service.config.rtsp_nat.into_iter().flat_map(DataPorts::iter) {
                let key = ServiceKey { port: port.to_be_bytes(), protocol: UDP, ..key };
                let media = Service { id: service.id, ..media(&value) };
                keys.insert(bytemuck::cast(key), bytemuck::cast(media));
            }
        }
        for key in self.keys.keys().filter(|key| !keys.contains_key(*key)) {
            self.datapath.remove_service(&bytemuck::cast(*key)).context("take a service out of its map")?;
        }
        for (key, value) in keys.iter().filter(|(key, value)| self.keys.get(*key) != Some(*value)) {
            self.datapath
                .set_service(&bytemuck::cast(*key), &bytemuck::cast(*value))
                .context("write a service into its map")?;
        }
        self.keys = keys;
        Ok(())
    }
}

/// A backend as it is in its map.
fn record(backend: &LiveBackend) -> Backend {
    let mut abilities = ability::SERVE;
    if backend.weight() > 0 && !backend.stands_aside {
        abilities |= ability::TAKE;
    }
    abilities |= match backend.duty {
        Duty::Serve => 0,
        Duty::Drain { .. } => ability::DRAINED,
        Duty::Leave { .. } => ability::LEAVING,
    };
    if backend.health.as_ref().is_some_and(|health| !health.is_up()) {
        abilities |= ability::FAILED;
    }
    let source = backend.given_source().or(backend.tunnel_source());
    Backend {
        address: address::to_wire(backend.endpoint.ip()),
        port: backend.endpoint.port().to_be_bytes(),
        service: backend.service,
        snat_address: source.map_or([0; 16], |source| address::to_wire(source.address)),
        snat_prefix: source.map_or(0, |source| source.prefix.into()),
        abilities,
        ends: backend.ends().map_or(0, stamp),
        service_address: backend.answers_as.map_or([0; 16], |service| address::to_wire(service.ip())),
        service_port: backend.answers_as.map_or([0; 2], |service| service.port().to_be_bytes()),
        snat_ports: backend.snat_ports.0,
        tunnel_port: backend.gue_port.to_be_bytes(),
        forward: backend.forward,
        reserved: [0; 7],
    }
}

/// Where an earlier daemon had packets to a backend come from that are wrapped.
pub(super) fn tunnel_source(record: &Backend) -> Option<Source> {
    let prefix = u8::try_from(record.snat_prefix).ok()?;
    let is_tunnel = matches!(record.forward, forward::IPIP | forward::GUE);
    is_tunnel.then(|| Source { address: address::from_wire(record.snat_address), prefix })
}

/// What an earlier daemon has noted of a backend's duty.
pub(super) fn duty(record: &Backend, now: Monotonic) -> Duty {
    let until = Monotonic::from_boot(Duration::from_nanos(u64::from(record.ends) << STAMP_SHIFT));
    if record.abilities & ability::LEAVING != 0 {
        Duty::Leave { until }
    } else if record.abilities & ability::DRAINED != 0 {
        Duty::Drain { since: now, from: 0, until }
    } else {
        Duty::Serve
    }
}

/// What the program must know of a service, but for its number.
fn value(service: &config::Service, daemon: &Daemon) -> Service {
    Service {
        address: address::to_wire(service.address.ip()),
        idle_timeout: timeout(service.idle_timeout),
        half_open_timeout: timeout(daemon.half_open_timeout),
        closing_timeout: timeout(daemon.closing_timeout),
        answers: answers(service),
        selector: match service.method {
            Method::SourceHash => selector::SOURCE,
            Method::Maglev => selector::FLOW,
            _ => selector::NEXT,
        },
        options: if follows_exchanges(service) { option::EXCHANGES } else { 0 }
            | if service.rtsp_nat.is_some() { option::RTSP } else { 0 }
            | if service.one_packet { option::ONE_PACKET } else { 0 },
        persistence_prefix: service
            .persistence
            .map_or(0, |persistence| address::length_on_wire(service.address.ip(), persistence.mask)),
        persistence_timeout: service.persistence.map_or(0, |persistence| timeout(persistence.timeout)),
        forward: service.forward.mode.number(),
        ..Service::default()
    }
}

/// The service of a data port of an RTSP service.
fn media(control: &Service) -> Service {
    let idle_timeout = timeout(config::Protocol::Udp.default_idle_timeout());
    let [half_open_timeout, closing_timeout] = [control.half_open_timeout, control.closing_timeout];
    Service {
        address: control.address,
        idle_timeout,
        half_open_timeout,
        closing_timeout,
        options: option::MEDIA,
        ..Service::default()
    }
}

/// Whether the method compares what only requests and their answers show.
pub(super) fn follows_exchanges(service: &config::Service) -> bool {
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
pub(super) fn stamp(now: Monotonic) -> u32 {
    (now.since_boot().as_nanos() >> STAMP_SHIFT) as u32
}
