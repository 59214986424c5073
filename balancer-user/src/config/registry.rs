use std::collections::HashMap;
use std::net::IpAddr;

use super::backend::Backend;
use super::daemon::Daemon;
use super::endpoint::Endpoint;
use super::fault::Findings;
use super::name::Name;
use super::section::{Once, Section};
use super::service::{DataPorts, Protocol};

/// Most data ports of all RTSP services together.
pub const MOST_DATA_PORTS: u32 = 8192;
/// Most data ports of all their backends together.
pub const MOST_DATA_SOURCES: u32 = 65_536;

/// What must be judged across services.
#[derive(Default)]
pub(super) struct Registry {
    names: Once<Name>,
    keys: Once<(Endpoint, Protocol)>,
    /// Where the addresses of IPv6 services stand.
    ipv6: Vec<usize>,
    addresses: HashMap<IpAddr, usize>,
    /// Addresses and ports that media come from.
    data_sources: Once<(IpAddr, u16)>,
    /// How many data ports there are, of services and of backends, and where the last were added.
    data_ports: [(u32, usize); 2],
    /// Places of all services, good or bad.
    services: Vec<usize>,
    /// Places of all backends, good or bad.
    backends: Vec<usize>,
    backend_addresses: Vec<(IpAddr, usize)>,
    /// Where UDP services reach their backends: the places of those, and whether the service keeps no flows.
    endpoints: HashMap<Endpoint, Vec<(usize, bool)>>,
}

impl Registry {
    /// Notes a service, good or bad, with what could be read of it.
    pub(super) fn note_service(
        &mut self,
        section: &Section<'_>,
        name: Option<&Name>,
        address: Option<Endpoint>,
        protocol: Option<Protocol>,
        findings: &mut Findings<'_>,
    ) {
        self.services.push(section.place());
        if let Some(name) = name {
            let what = format!("service name \"{name}\"");
            self.names.claim(name.clone(), section.place_of("name"), &what, findings);
        }
        let Some(address) = address else { return };
        let place = section.place_of("address");
        if address.is_ipv6() {
            self.ipv6.push(place);
        }
        self.addresses.entry(address.ip()).or_insert(place);
        if let Some(protocol) = protocol {
            let what = format!("service address {address} with {protocol}");
            self.keys.claim((address, protocol), place, &what, findings);
        }
    }

    /// Notes the UDP ports of an RTSP service at `address` and of its backends.
    pub(super) fn note_data_ports(
        &mut self,
        place: usize,
        address: Endpoint,
        ports: DataPorts,
        backends: &[Backend],
        findings: &mut Findings<'_>,
    ) {
        let count = ports.iter().count() as u32;
        for (sum, more) in
            self.data_ports.iter_mut().zip([count, count.saturating_mul(backends.len() as u32)])
        {
            *sum = (sum.0.saturating_add(more), place);
        }
        for port in ports.iter() {
            let endpoint = address.with_port(port);
            let what = format!("service address {endpoint} with udp, a data port of {ports},");
            // One fault says it for the whole range.
            if !self.keys.claim((endpoint, Protocol::Udp), place, &what, findings) {
                break;
            }
        }
        for backend in backends {
            for port in ports.iter() {
                let source = backend.address.ip();
                let what = format!("backend address {source} with data port {port}");
                if !self.data_sources.claim((source, port), place, &what, findings) {
                    break;
                }
            }
        }
    }

    /// Notes a backend, good or bad, whose section stands at `place`.
    pub(super) fn note_backend(&mut self, place: usize) {
        self.backends.push(place);
    }

    /// Notes the address of a backend.
    pub(super) fn note_backend_address(&mut self, address: IpAddr, place: usize) {
        self.backend_addresses.push((address, place));
    }

    /// Notes where a UDP service reaches its backends, with their places.
    pub(super) fn note_endpoints(
        &mut self,
        endpoints: impl Iterator<Item = (Endpoint, usize)>,
        is_one_packet: bool,
    ) {
        for (endpoint, place) in endpoints {
            self.endpoints.entry(endpoint).or_default().push((place, is_one_packet));
        }
    }

    /// Reports the backends of UDP services whose answers could be taken for those of another service, or for media.
    fn judge_endpoints(&self, findings: &mut Findings<'_>) {
        const ONCE: &str = "allowed: once, since with `one-packet` nothing else tells whose an answer is";
        for (endpoint, uses) in &self.endpoints {
            let what = format!("backend address {endpoint} over udp stands");
            let is_one_packet = uses.iter().any(|(_, is_one_packet)| *is_one_packet);
            // In the order of the file.
            if let ([(first, _), others @ ..], true) = (&uses[..], is_one_packet) {
                for (place, _) in others {
                    let line = findings.line_of(*first);
                    findings.add(*place, format!("{what} on line {line} already; {ONCE}"));
                }
            }
            if let Some(ports) = self.data_sources.place_of(&(endpoint.ip(), endpoint.port())) {
                let line = findings.line_of(ports);
                for (place, _) in uses {
                    let allowed = "allowed: a port that no media come from";
                    findings.add(
                        *place,
                        format!("{what} among the data ports on line {line} already; {allowed}"),
                    );
                }
            }
        }
    }

    /// Reports what only the whole file shows. `daemon` is `None` when it has faults of its own.
    pub(super) fn judge(&self, daemon: Option<&Daemon>, findings: &mut Findings<'_>) {
        for &(address, place) in &self.backend_addresses {
            if let Some(&service) = self.addresses.get(&address) {
                let line = findings.line_of(service);
                let message = format!(
                    "backend address {address} is that of the service on line {line}; \
                     allowed: an address that no service has"
                );
                findings.add(place, message);
            }
        }
        self.judge_endpoints(findings);
        for ((count, place), (what, most)) in self
            .data_ports
            .into_iter()
            .zip([("data ports of services", MOST_DATA_PORTS), ("data ports of backends", MOST_DATA_SOURCES)])
        {
            if count > most {
                findings.add(place, format!("{count} {what} in this file; allowed: {most}"));
            }
        }
        let Some(daemon) = daemon else { return };
        for place in self.ipv6.iter().filter(|_| daemon.ipv6 == Some(false)) {
            let message = "an IPv6 service with `ipv6 = false` in [daemon]; allowed: without, or with true";
            findings.add(*place, message.to_owned());
        }
        for (places, key, most) in [
            (&self.services, "max-services", daemon.max_services),
            (&self.backends, "max-backends", daemon.max_backends),
        ] {
            if let Some(&first_too_many) = places.get(most as usize) {
                let what = key.trim_start_matches("max-");
                let message = format!("{} {what} in this file; allowed: `{key}`, {most}", places.len());
                findings.add(first_too_many, message);
            }
        }
    }
}
