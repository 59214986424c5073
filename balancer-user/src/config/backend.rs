use toml::de::DeValue;

use super::endpoint::Endpoint;
use super::fault::Findings;
use super::forward::Forward;
use super::health::Health;
use super::name::Name;
use super::registry::Registry;
use super::section::{Key, Once, Schema, Section, Value, read_value};
use super::service::Service;
use super::value::{self, Refused};

/// A real server behind a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    /// Its name, which no other backend of the service has.
    pub name: Name,
    /// Where it listens; no other backend of the service does there, and no service has the address.
    pub address: Endpoint,
    /// Its share of the new flows.
    pub weight: Weight,
    /// It takes flows only while no other of the service can.
    pub backup: bool,
    /// With so many active flows it takes no more; `None` = without limit.
    pub max_active: Option<u32>,
    /// How it is found out whether it serves, where that is not as for its service.
    pub health: OwnHealth,
}

/// What a backend has in place of its service's health checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnHealth {
    /// Nothing: it is checked as its service's backends are.
    None,
    /// It is not checked, and taken to serve.
    Unchecked,
    /// Checks of its own.
    Checked(Health),
}

impl Backend {
    /// How it is checked, as a backend of `service`; `None` = not at all.
    pub fn checks<'a>(&'a self, service: &'a Service) -> Option<&'a Health> {
        match &self.health {
            OwnHealth::None => service.health.as_ref(),
            OwnHealth::Unchecked => None,
            OwnHealth::Checked(health) => Some(health),
        }
    }
}

/// Share of the new flows: 1 to 100 against the other backends' weights, or 0 for none at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Weight(u8);

impl Weight {
    /// The largest weight.
    pub const MAX: u8 = 100;

    /// The weight `number`; `None` above `MAX`.
    pub const fn new(number: u8) -> Option<Weight> {
        if number <= Weight::MAX { Some(Weight(number)) } else { None }
    }

    /// The number, 0 to 100.
    pub const fn get(self) -> u8 {
        self.0
    }
}

/// 1, what a backend weighs whose weight is not given.
impl Default for Weight {
    fn default() -> Weight {
        Weight(1)
    }
}

pub(super) const BACKEND: Schema = Schema {
    title: "[[service.backend]]",
    keys: &[
        Key::new("name", "name = \"web-1\"").needed(),
        Key::new("address", "address = \"10.0.0.11:8080\"").needed(),
        Key::new("weight", "weight = 1"),
        Key::new("backup", "backup = false"),
        Key::new("max-active", "max-active = 1000"),
        Key::new("health", "health = false"),
    ],
};

/// What the backends of one service must not share.
#[derive(Default)]
pub(super) struct Siblings {
    names: Once<Name>,
    addresses: Once<Endpoint>,
    /// The address of their service, if it could be read.
    service: Option<Endpoint>,
    forward: Option<Forward>,
}

impl Siblings {
    /// None yet, of the service at this address.
    pub(super) fn of(service: Option<Endpoint>, forward: Option<Forward>) -> Siblings {
        Siblings { service, forward, ..Siblings::default() }
    }
}

impl Siblings {
    /// Where they are reached, each with its place in the file.
    pub(super) fn endpoints(&self) -> impl Iterator<Item = (Endpoint, usize)> {
        self.addresses.iter().map(|(endpoint, place)| (*endpoint, place))
    }
}

impl Backend {
    /// `None` only where a fault was found.
    pub(super) fn read(
        value: &Value<'_>,
        siblings: &mut Siblings,
        registry: &mut Registry,
        findings: &mut Findings<'_>,
    ) -> Option<Backend> {
        registry.note_backend(value.span().start);
        let section = Section::open(&BACKEND, value, findings)?;
        let name: Option<Name> = section.required("name", value::text(Name::ALLOWED, str::parse), findings);
        if let Some(name) = &name {
            let what = format!("backend name \"{name}\" of this service");
            siblings.names.claim(name.clone(), section.place_of("name"), &what, findings);
        }
        let address: Option<Endpoint> =
            section.required("address", value::text(Endpoint::ALLOWED, str::parse), findings);
        if let Some(address) = address {
            let place = section.place_of("address");
            let what = format!("backend address {address} of this service");
            siblings.addresses.claim(address, place, &what, findings);
            if let (Some(service), Some(forward)) = (siblings.service, siblings.forward) {
                if service.family() != address.family() && !forward.is_tunnel() {
                    let (own, of_service) = (address.family(), service.family());
                    let message = format!(
                        "backend address {address} is {own}, and the address of its service, {service}, is {of_service}; \
                         allowed: both of one family with `forward = \"{forward}\"`"
                    );
                    findings.add(place, message);
                }
                if service.port() != address.port() && forward.is_one_way() {
                    let message = format!(
                        "backend address {address} has another port than its service, {service}, and \
                         `forward = \"{forward}\"` changes none; allowed: port {}",
                        service.port()
                    );
                    findings.add(place, message);
                }
            }
            registry.note_backend_address(address.ip(), place);
        }
        let weights = value::integer(0..=u32::from(Weight::MAX));
        let weight = section.optional("weight", 1, weights, findings);
        let weight = weight.and_then(|number| u8::try_from(number).ok()).and_then(Weight::new);
        let backup = section.optional("backup", false, value::boolean, findings);
        let limits = value::integer(1..=u32::MAX);
        let max_active = section.optional("max-active", None, |value| limits(value).map(Some), findings);
        let health = match section.get("health") {
            Some(value) => OwnHealth::read(value, findings),
            None => Some(OwnHealth::None),
        };
        Some(Backend {
            name: name?,
            address: address?,
            weight: weight?,
            backup: backup?,
            max_active: max_active?,
            health: health?,
        })
    }
}

impl OwnHealth {
    /// `None` only where a fault was found.
    fn read(value: &Value<'_>, findings: &mut Findings<'_>) -> Option<OwnHealth> {
        if value.get_ref().as_table().is_some() {
            return Health::read(value, findings).map(OwnHealth::Checked);
        }
        let unchecked = |value: &DeValue<'_>| match value {
            DeValue::Boolean(false) => Ok(OwnHealth::Unchecked),
            _ => Err(Refused::needs(OwnHealth::ALLOWED)),
        };
        read_value("health", value, unchecked, findings)
    }

    const ALLOWED: &str = "false, for no checks, or a table as in [[service]]";
}
