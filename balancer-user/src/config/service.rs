use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::backend::{Backend, OwnHealth, Siblings};
use super::endpoint::Endpoint;
use super::fault::Findings;
use super::forward::{Forward, Forwarding, MODES, Snat, refuse_unseen};
use super::health::{Health, PassiveHealth, Probe};
use super::name::Name;
use super::registry::Registry;
use super::section::{self, Key, Schema, Section, Value};
use super::value::{self, Refused};
use crate::address;
use crate::method::Method;

/// What clients talk to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Its name, which no other service has.
    pub name: Name,
    /// The virtual address and port.
    pub address: Endpoint,
    /// The protocol; no other service has the same address, port and protocol.
    pub protocol: Protocol,
    /// How the backend of a new flow is chosen.
    pub method: Method,
    /// What counts as an active request, for the methods that compare those.
    pub requests: Requests,
    /// Whether the balancer tells whoever asks at which MAC the address is.
    pub advertise: bool,
    /// How packets get to the backends.
    pub forward: Forwarding,
    /// How long an established flow may be silent.
    pub idle_timeout: Duration,
    /// How long flows may stay on a backend that takes no more, or can't be reached.
    pub drain_timeout: Duration,
    /// For how long a client's next flows go to the backend that it had; `None` = not at all.
    pub persistence: Option<Persistence>,
    /// Whether each datagram is scheduled by itself, and no flow is kept.
    pub one_packet: bool,
    /// The servers' UDP ports from which and to which media flow that belong to a TCP connection of the service.
    pub rtsp_nat: Option<DataPorts>,
    /// Over what time the share of a backend that is new among others grows from nothing to its weight.
    pub slow_start: Duration,
    /// How it is found out whether a backend serves; `None` = it is taken to.
    pub health: Option<Health>,
    /// When new flows that get no answer take a backend out; `None` = never.
    pub passive_health: Option<PassiveHealth>,
    /// What becomes of a new flow while no backend may take one.
    pub no_backend: Refusal,
    /// What becomes of a TCP segment, not a SYN, that belongs to no flow.
    pub unknown_flow: Refusal,
    /// The servers, in the order of the file; there may be none, and their weights may all be 0.
    pub backends: Vec<Backend>,
}

/// The protocol of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// RFC 9293.
    Tcp,
    /// RFC 768.
    Udp,
}

impl Protocol {
    /// IP protocol number.
    pub const fn number(self) -> u8 {
        match self {
            Protocol::Tcp => balancer_common::TCP,
            Protocol::Udp => balancer_common::UDP,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        }
    }

    /// How long a flow may be silent unless the service says otherwise.
    pub const fn default_idle_timeout(self) -> Duration {
        match self {
            Protocol::Tcp => Duration::from_secs(2 * 3600),
            Protocol::Udp => Duration::from_secs(120),
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What counts as an active request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Requests {
    /// Each open TCP connection, half-open ones too, and each live UDP flow.
    Flow,
    /// Each flow whose client has sent payload that the backend has not answered with payload yet.
    Exchange,
}

/// By what a client is known again, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Persistence {
    /// How many leading bits of its address count: at most 32 for IPv4, 128 for IPv6; 0 = all clients are one.
    pub mask: u8,
    /// After this time without a new flow it is forgotten.
    pub timeout: Duration,
}

/// The UDP ports that the servers of an RTSP service send media from: at most `DataPorts::MOST`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataPorts {
    first: u16,
    last: u16,
}

impl DataPorts {
    /// Most ports of one service.
    pub const MOST: u16 = 1024;
    const ALLOWED: &str = "a range of 1 to 1024 ports in quotes, \"6970-6999\"";

    /// Each of them.
    pub fn iter(self) -> impl Iterator<Item = u16> {
        self.first..=self.last
    }
}

impl FromStr for DataPorts {
    type Err = Refused;

    fn from_str(text: &str) -> Result<DataPorts, Refused> {
        value::ports(text)
            .map(|[first, last]| DataPorts { first, last })
            .filter(|ports| ports.last - ports.first < DataPorts::MOST)
            .ok_or_else(|| Refused::needs(DataPorts::ALLOWED))
    }
}

impl fmt::Display for DataPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// What the sender of a refused packet gets to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A RST, or for UDP an ICMP port unreachable.
    Answer,
    /// Nothing.
    Drop,
}

const METHODS: &[&str] = &[
    "least-packets",
    "least-bandwidth",
    "least-request",
    "least-response-time",
    "round-robin",
    "source-hash",
    "maglev",
];

pub(super) const SERVICE: Schema = Schema {
    title: "[[service]]",
    keys: &[
        Key::new("name", "name = \"web\"").needed(),
        Key::new("address", "address = \"192.0.2.10:80\"").needed(),
        Key::new("protocol", "protocol = \"tcp\"").needed().of(&["tcp", "udp"]),
        Key::new("method", "method = \"least-packets\"").needed().of(METHODS),
        Key::new("requests", "requests = \"flow\"").of(&["flow", "exchange"]),
        Key::new("advertise", "advertise = \"none\"").of(&["none", "arp"]),
        Key::new("forward", "forward = \"nat\"").of(MODES),
        Key::new("snat", "snat = \"auto\"").of(&["auto", "always", "never"]),
        Key::new("snat-addresses", "snat-addresses = [\"10.0.0.1\"]"),
        Key::new("snat-ports", "snat-ports = \"61000-65535\""),
        Key::new("gue-port", "gue-port = 6080"),
        Key::new("tunnel-source", "tunnel-source = \"10.254.0.0/16\""),
        Key::new("idle-timeout", "idle-timeout = \"2h\""),
        Key::new("drain-timeout", "drain-timeout = \"60s\""),
        Key::new("persistence", "persistence = { mask = 32, timeout = \"2m\" }"),
        Key::new("one-packet", "one-packet = false"),
        Key::new("rtsp-nat", "rtsp-nat = { data-ports = \"6970-6999\" }"),
        Key::new("slow-start", "slow-start = \"30s\""),
        Key::new("health", "health = { kind = \"tcp\" }"),
        Key::new("passive-health", "passive-health = { failures = 10, timeout = \"3s\", rest = \"30s\" }"),
        Key::new("no-backend", "no-backend = \"reject\"").of(&["reject", "drop"]),
        Key::new("unknown-flow", "unknown-flow = \"reset\"").of(&["reset", "drop"]),
        Key::new("backend", "[[service.backend]]"),
    ],
};

pub(super) const PERSISTENCE: Schema = Schema {
    title: "persistence",
    keys: &[Key::new("mask", "mask = 32"), Key::new("timeout", "timeout = \"2m\"")],
};
pub(super) const RTSP_NAT: Schema =
    Schema { title: "rtsp-nat", keys: &[Key::new("data-ports", "data-ports = \"6970-6999\"").needed()] };

/// How long flows may stay on a backend that takes no more, unless the service says otherwise.
pub const DEFAULT_DRAIN_TIMEOUT: Duration = Duration::from_secs(60);

impl Service {
    /// `None` only where a fault was found.
    pub(super) fn read(
        value: &Value<'_>,
        registry: &mut Registry,
        findings: &mut Findings<'_>,
    ) -> Option<Service> {
        let section = Section::open(&SERVICE, value, findings)?;
        let name: Option<Name> = section.required("name", value::text(Name::ALLOWED, str::parse), findings);
        let address: Option<Endpoint> =
            section.required("address", value::text(Endpoint::ALLOWED, str::parse), findings);
        let protocols = [Protocol::Tcp, Protocol::Udp].map(|protocol| (protocol.name(), protocol));
        let protocol = section.required("protocol", value::choice(&protocols), findings);
        let methods = Method::ALL.map(|method| (method.name(), method));
        let method = section.required("method", value::choice(&methods), findings);
        let requests = read_requests(&section, method, findings);
        let advertise = [("none", false), ("arp", true)];
        let advertise = section.optional("advertise", false, value::choice(&advertise), findings);
        let mode = Forward::read(&section, findings);
        let forward = Forwarding::read(&section, mode, address, findings);
        let snat = forward.as_ref().map(|forward| forward.snat);
        if let Some(mode) = mode {
            refuse_unseen(&section, mode, method, findings);
        }
        let idle_timeouts = value::duration(Duration::from_secs(1)..=Duration::from_secs(4 * 3600));
        let idle_timeout =
            section.optional("idle-timeout", None, |value| idle_timeouts(value).map(Some), findings);
        let drain_timeouts = value::duration(Duration::ZERO..=Duration::from_secs(24 * 3600));
        let drain_timeout =
            section.optional("drain-timeout", DEFAULT_DRAIN_TIMEOUT, drain_timeouts, findings);
        let persistence = match section.get("persistence") {
            Some(value) => Persistence::read(value, address, findings).map(Some),
            None => Some(None),
        };
        let rtsp_nat = match section.get("rtsp-nat") {
            Some(value) => read_rtsp_nat(value, protocol, findings).map(Some),
            None => Some(None),
        };
        let one_packet = read_one_packet(&section, (protocol, method, snat), findings);
        let slow_starts = value::duration(Duration::ZERO..=Duration::from_secs(3600));
        let slow_start = section.optional("slow-start", Duration::ZERO, slow_starts, findings);
        let health = match section.get("health") {
            Some(value) => Health::read(value, findings).map(Some),
            None => Some(None),
        };
        let passive_health = match section.get("passive-health") {
            Some(value) => PassiveHealth::read(value, findings).map(Some),
            None => Some(None),
        };
        let refusal = |answer: &'static str| [(answer, Refusal::Answer), ("drop", Refusal::Drop)];
        let no_backend =
            section.optional("no-backend", Refusal::Answer, value::choice(&refusal("reject")), findings);
        let unknown_flow =
            section.optional("unknown-flow", Refusal::Answer, value::choice(&refusal("reset")), findings);

        registry.note_service(&section, name.as_ref(), address, protocol, findings);
        let items = match section.get("backend") {
            Some(value) => section::list(value, "[[service.backend]]", findings)?,
            None => &[],
        };
        let mut siblings = Siblings::of(address, mode);
        let mut backends = Vec::with_capacity(items.len());
        for item in items {
            backends.extend(Backend::read(item, &mut siblings, registry, findings));
        }
        if protocol == Some(Protocol::Udp) {
            registry.note_endpoints(siblings.endpoints(), one_packet == Some(true));
        }
        if one_packet == Some(true) {
            refuse_limits(items, findings);
        }
        if let (Some(Some(ports)), Some(address)) = (rtsp_nat, address) {
            registry.note_data_ports(section.place_of("rtsp-nat"), address, ports, &backends, findings);
        }

        if let (Some(health), Some(address)) = (&health, address) {
            refuse_mixed_checks(health.as_ref(), address, &backends, items, findings);
        }

        let protocol = protocol?;
        Some(Service {
            name: name?,
            address: address?,
            protocol,
            method: method?,
            requests: requests?,
            advertise: advertise?,
            forward: forward?,
            idle_timeout: idle_timeout?.unwrap_or(protocol.default_idle_timeout()),
            drain_timeout: drain_timeout?,
            persistence: persistence?,
            one_packet: one_packet?,
            rtsp_nat: rtsp_nat?,
            slow_start: slow_start?,
            health: health?,
            passive_health: passive_health?,
            no_backend: no_backend?,
            unknown_flow: unknown_flow?,
            backends,
        })
    }
}

/// `requests`, which means something to the methods that compare active requests alone.
fn read_requests(
    section: &Section<'_>,
    method: Option<Method>,
    findings: &mut Findings<'_>,
) -> Option<Requests> {
    let choices = [("flow", Requests::Flow), ("exchange", Requests::Exchange)];
    let requests = section.optional("requests", Requests::Flow, value::choice(&choices), findings);
    if let (Some(value), Some(method)) = (section.get("requests"), method)
        && !method.counts_requests()
    {
        let message = format!(
            "`requests` means nothing to the method \"{method}\"; allowed: with \"least-request\" and \"least-response-time\""
        );
        findings.add(value.span().start, message);
    }
    requests
}

/// `one-packet`, which belongs to UDP services, and goes with nothing that is about flows.
fn read_one_packet(
    section: &Section<'_>,
    (protocol, method, snat): (Option<Protocol>, Option<Method>, Option<Snat>),
    findings: &mut Findings<'_>,
) -> Option<bool> {
    let one_packet = section.optional("one-packet", false, value::boolean, findings)?;
    if !one_packet {
        return Some(false);
    }
    let place = section.place_of("one-packet");
    if protocol == Some(Protocol::Tcp) {
        findings.add(place, "`one-packet` of a service over tcp; allowed: over udp".to_owned());
    }
    if let Some(method) = method.filter(|method| method.counts_requests()) {
        let message = format!(
            "`one-packet` leaves the method \"{method}\" no flow to count; allowed: with a method that counts none"
        );
        findings.add(place, message);
    }
    if snat == Some(Snat::Always) {
        let message = "`snat` is \"always\", and `one-packet` keeps no flow to translate answers back by; \
                       allowed: \"auto\", \"never\"";
        findings.add(section.place_of("snat"), message.to_owned());
    }
    for key in ["idle-timeout", "passive-health", "persistence"] {
        if section.get(key).is_some() {
            let message =
                format!("`{key}` is about flows, and `one-packet` keeps none; allowed: one of the two");
            findings.add(section.place_of(key), message);
        }
    }
    Some(true)
}

/// Checks of backends whose address is of another family than their service's: what is sent to the one can't be turned to
/// the other.
fn refuse_mixed_checks(
    health: Option<&Health>,
    service: Endpoint,
    backends: &[Backend],
    items: &[Value<'_>],
    findings: &mut Findings<'_>,
) {
    // Of those that are good all are there, and the others have their faults already.
    for (backend, item) in backends.iter().zip(items).filter(|_| backends.len() == items.len()) {
        let check = match &backend.health {
            OwnHealth::None => health,
            OwnHealth::Unchecked => None,
            OwnHealth::Checked(own) => Some(own),
        };
        let is_sent = check.is_some_and(|check| !matches!(check.probe, Probe::Exec { .. }));
        if is_sent && backend.address.family() != service.family() {
            let message = format!(
                "health checks of an {} service can't go through to an {} backend; allowed: `health = false`, or of \
                 the kind \"exec\"",
                service.family(),
                backend.address.family()
            );
            findings.add(item.span().start, message);
        }
    }
}

/// `max-active` of the backends of a service without flows.
fn refuse_limits(backends: &[Value<'_>], findings: &mut Findings<'_>) {
    let limits = backends.iter().filter_map(|backend| backend.get_ref().as_table()?.get("max-active"));
    for limit in limits {
        let message = "`max-active` is about flows, and `one-packet` keeps none; allowed: one of the two";
        findings.add(limit.span().start, message.to_owned());
    }
}

/// `rtsp-nat`, which belongs to TCP services.
fn read_rtsp_nat(
    value: &Value<'_>,
    protocol: Option<Protocol>,
    findings: &mut Findings<'_>,
) -> Option<DataPorts> {
    let section = Section::open(&RTSP_NAT, value, findings)?;
    let ports = section.required("data-ports", value::text(DataPorts::ALLOWED, str::parse), findings);
    if protocol == Some(Protocol::Udp) {
        let message =
            "`rtsp-nat` of a service over udp; allowed: over tcp, where the control connections are";
        findings.add(section.place(), message.to_owned());
        return None;
    }
    ports
}

impl Persistence {
    /// Of the service at `address`, if that could be read.
    fn read(
        value: &Value<'_>,
        address: Option<Endpoint>,
        findings: &mut Findings<'_>,
    ) -> Option<Persistence> {
        let section = Section::open(&PERSISTENCE, value, findings)?;
        let whole = address.map_or(128, |address| u32::from(address::width(address.ip())));
        let mask = section.optional("mask", whole, value::integer(0..=whole), findings);
        let timeouts = value::duration(Duration::from_secs(1)..=Duration::from_secs(4 * 3600));
        let timeout = section.optional("timeout", Duration::from_secs(120), timeouts, findings);
        Some(Persistence { mask: u8::try_from(mask?).ok()?, timeout: timeout? })
    }
}
