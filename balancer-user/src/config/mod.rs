//! The configuration file: TOML in, types out in which an invalid configuration can't be written down.
//!
//! A file is judged whole: [`Config::parse`] gives every fault it has, each with its line and column, in
//! the order of the file. What this build can't do yet is a fault as well, and never ignored.

mod backend;
mod daemon;
mod difference;
mod edit;
mod endpoint;
mod fault;
mod file;
mod forward;
mod health;
mod name;
mod registry;
mod schema;
mod section;
mod service;
mod suggest;
#[cfg(test)]
mod tests;
mod value;

use std::path::Path;

use toml::de::DeTable;

pub use backend::{Backend, OwnHealth, Weight};
pub use daemon::{DEFAULT_PIN_PATH, DEFAULT_SOCKET, Daemon, XdpMode};
pub use difference::{Change, Difference};
pub use edit::{Action, CannotEdit, Edit};
pub use endpoint::Endpoint;
pub use fault::{Fault, Faults, Position};
pub use file::save;
pub use forward::{Forward, Forwarding, Snat, SnatPorts};
pub use health::{Bytes, Health, PassiveHealth, Probe, Statuses};
pub use name::{InterfaceName, Name};
pub use registry::{MOST_DATA_PORTS, MOST_DATA_SOURCES};
pub use schema::json_schema;
pub use service::{DEFAULT_DRAIN_TIMEOUT, DataPorts, Persistence, Protocol, Refusal, Requests, Service};
pub use value::Refused;

use fault::Findings;
use registry::Registry;
use section::{Key, Schema, Section};

const FILE: Schema = Schema {
    title: "this file",
    keys: &[Key::new("daemon", "[daemon]").needed(), Key::new("service", "[[service]]")],
};

/// A whole configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// How the daemon itself runs.
    pub daemon: Daemon,
    /// What it balances, in the order of the file. No two have the same name, or the same address, port
    /// and protocol.
    pub services: Vec<Service>,
}

impl Config {
    /// Whether the program must know IPv6; `None`: that is all the same.
    pub fn ipv6(&self) -> Option<bool> {
        let is_needed = self.services.iter().any(|service| service.address.is_ipv6());
        self.daemon.ipv6.or(is_needed.then_some(true))
    }

    /// Reads and judges the file at `path`.
    ///
    /// # Errors
    ///
    /// Every fault of the file; or the one reason why it can't be read.
    pub fn load(path: &Path) -> Result<Config, Faults> {
        Config::read(path).map(|(_, config)| config)
    }

    /// The same, with the text of the file.
    ///
    /// # Errors
    ///
    /// As `load`.
    pub fn read(path: &Path) -> Result<(String, Config), Faults> {
        let name = path.display().to_string();
        let text = file::read(path, &name)?;
        let config = Config::parse(&name, &text)?;
        Ok((text, config))
    }

    /// Judges `text`; `file_name` only stands in the faults.
    ///
    /// # Errors
    ///
    /// Every fault of the text, in the order of their places.
    pub fn parse(file_name: &str, text: &str) -> Result<Config, Faults> {
        // A byte order mark is no character of the first line.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let mut findings = Findings::new(file_name, text);
        let config = read(text, &mut findings);
        let faults = findings.finish();
        match config {
            Some(config) if faults.is_empty() => Ok(config),
            _ => Err(faults),
        }
    }

    /// A service whose health checks go through to backends that hold its address, if there is one.
    pub fn probed_through(&self) -> Option<&Service> {
        let is_probed = |service: &&Service, backend: &Backend| {
            backend.checks(service).is_some_and(|check| !matches!(check.probe, Probe::Exec { .. }))
        };
        let one_way = self.services.iter().filter(|service| service.forward.mode.is_one_way());
        one_way.into_iter().find(|service| service.backends.iter().any(|backend| is_probed(service, backend)))
    }

    /// How many backends all services have together.
    pub fn backend_count(&self) -> usize {
        self.services.iter().map(|service| service.backends.len()).sum()
    }
}

/// `None` only where a fault was found.
fn read(text: &str, findings: &mut Findings<'_>) -> Option<Config> {
    if text.trim().is_empty() {
        findings.add(0, "the file is empty; needed: [daemon] with `interfaces`".to_owned());
        return None;
    }
    let (root, mut errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        // Further errors on a line are mostly echoes of the first, and what a broken text seems to
        // configure would only lead to faults that aren't there.
        let place = |error: &toml::de::Error| error.span().map_or(0, |span| span.start);
        errors.sort_by_key(place);
        errors.dedup_by_key(|error| findings.line_of(place(error)));
        for error in errors {
            findings.add(place(&error), error.message().to_owned());
        }
        return None;
    }

    let file = Section::of_file(&FILE, root.get_ref(), findings);
    let daemon = match file.get("daemon") {
        Some(value) => Daemon::read(value, findings),
        None => {
            file.report_missing("daemon", findings);
            None
        }
    };
    let mut registry = Registry::default();
    let services = match file.get("service") {
        Some(value) => section::list(value, "[[service]]", findings)
            .unwrap_or_default()
            .iter()
            .filter_map(|item| Service::read(item, &mut registry, findings))
            .collect(),
        None => Vec::new(),
    };
    registry.judge(daemon.as_ref(), findings);
    Some(Config { daemon: daemon?, services })
}
