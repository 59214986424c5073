//! What sets one configuration apart from another, key by key, in the words of the file.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    net::IpAddr,
    time::Duration,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    Backend, Config, Forwarding, Health, Name, OwnHealth, PassiveHealth, Persistence, Probe, Refusal,
    Requests, Service, Snat,
};

/// One thing that sets a new configuration apart from an old one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Difference {
    /// What becomes of it.
    pub what: Change,
    /// The service.
    pub service: String,
    /// Its backend, if it is one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub backend: Option<String>,
    /// The key that changes.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub key: Option<String>,
    /// What it was; `None` = not there.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub from: Option<String>,
    /// What it becomes; `None` = not there.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub to: Option<String>,
}

/// What becomes of a service or backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// It comes.
    Added,
    /// It goes: its flows drain.
    Removed,
    /// A key of it has another value.
    Changed,
    /// It stands elsewhere in the order, by which ties are broken.
    Moved,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { what, service, backend, key, from, to } = self;
        let sign = match what {
            Change::Added => '+',
            Change::Removed => '-',
            Change::Changed | Change::Moved => '~',
        };
        write!(f, "{sign} ")?;
        match backend {
            Some(backend) => write!(f, "backend {backend} of {service}")?,
            None => write!(f, "service {service}")?,
        }
        let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "nothing".to_owned());
        match (what, key) {
            (Change::Changed, Some(key)) => write!(f, ": {key} {} → {}", shown(from), shown(to)),
            (Change::Moved, _) => f.write_str(": its place in the order"),
            _ => Ok(()),
        }
    }
}

impl Config {
    /// What sets a new configuration apart from this one: services in the order of the new one, those that go first.
    /// `[daemon]` is not looked at.
    pub fn differences(&self, new: &Config) -> Vec<Difference> {
        let of = |service: &Service, what| Difference {
            what,
            service: service.name.to_string(),
            backend: None,
            key: None,
            from: None,
            to: None,
        };
        let mut differences = Vec::new();
        let stay: HashSet<&Name> = new.services.iter().map(|new| &new.name).collect();
        for old in self.services.iter().filter(|old| !stay.contains(&old.name)) {
            differences.push(of(old, Change::Removed));
        }
        let before: HashMap<&Name, &Service> = self.services.iter().map(|old| (&old.name, old)).collect();
        for new in &new.services {
            let Some(old) = before.get(&new.name) else {
                differences.push(of(new, Change::Added));
                let added = |backend: &Backend| Difference {
                    backend: Some(backend.name.to_string()),
                    ..of(new, Change::Added)
                };
                differences.extend(new.backends.iter().map(added));
                continue;
            };
            if *old != new {
                differences.extend(changes(&of(new, Change::Changed), old.written(), new.written()));
                differences.extend(backends(&of(new, Change::Changed), old, new));
            }
        }
        differences
    }

    /// The services of a new configuration that are the same in this one, backends and all.
    pub fn unchanged<'new>(&self, new: &'new Config) -> impl Iterator<Item = &'new Service> {
        let before: HashMap<&Name, &Service> = self.services.iter().map(|old| (&old.name, old)).collect();
        new.services.iter().filter(move |new| before.get(&new.name) == Some(new))
    }
}

fn backends(of: &Difference, old: &Service, new: &Service) -> Vec<Difference> {
    let of =
        |backend: &Backend, what| Difference { what, backend: Some(backend.name.to_string()), ..of.clone() };
    let mut differences = Vec::new();
    let gone = |old: &&Backend| !new.backends.iter().any(|new| new.name == old.name);
    differences.extend(old.backends.iter().filter(gone).map(|backend| of(backend, Change::Removed)));
    // The order of those that stay.
    let mut before = old.backends.iter().filter(|backend| !gone(backend));
    for new in &new.backends {
        match old.backends.iter().find(|old| old.name == new.name) {
            None => differences.push(of(new, Change::Added)),
            Some(old) => {
                differences.extend(changes(&of(new, Change::Changed), old.written(), new.written()));
                if before.next().is_some_and(|before| before.name != new.name) {
                    differences.push(of(new, Change::Moved));
                }
            }
        }
    }
    differences
}

type Written = Vec<(&'static str, Option<String>)>;

fn changes(of: &Difference, old: Written, new: Written) -> Vec<Difference> {
    let pairs = old.into_iter().zip(new).filter(|(old, new)| old != new);
    pairs
        .map(|((key, from), (_, to))| Difference { key: Some(key.to_owned()), from, to, ..of.clone() })
        .collect()
}

impl Service {
    /// Each key with its value, as the file would say it; those that are not there have none.
    fn written(&self) -> Written {
        let Service {
            name: _,
            address,
            protocol,
            method,
            requests,
            advertise,
            forward: Forwarding { mode, snat, snat_addresses, snat_ports, gue_port, tunnel_source },
            idle_timeout,
            drain_timeout,
            persistence,
            one_packet,
            rtsp_nat,
            slow_start,
            health,
            passive_health,
            no_backend,
            unknown_flow,
            backends: _,
        } = self;
        let requests = match requests {
            Requests::Flow => "flow",
            Requests::Exchange => "exchange",
        };
        let snat = match snat {
            Snat::Auto => "auto",
            Snat::Always => "always",
            Snat::Never => "never",
        };
        let refusal = |refusal: &Refusal, answer: &str| match refusal {
            Refusal::Answer => answer.to_owned(),
            Refusal::Drop => "drop".to_owned(),
        };
        let persistence = persistence.map(|Persistence { mask, timeout }| {
            format!("{{ mask = {mask}, timeout = \"{}\" }}", time(timeout))
        });
        let passive_health = passive_health.map(|PassiveHealth { failures, timeout, rest }| {
            let [timeout, rest] = [timeout, rest].map(time);
            format!("{{ failures = {failures}, timeout = \"{timeout}\", rest = \"{rest}\" }}")
        });
        vec![
            ("address", Some(address.to_string())),
            ("protocol", Some(protocol.to_string())),
            ("method", Some(method.to_string())),
            ("requests", Some(requests.to_owned())),
            ("advertise", Some(if *advertise { "arp" } else { "none" }.to_owned())),
            ("forward", Some(mode.to_string())),
            ("snat", Some(snat.to_owned())),
            ("snat-addresses", (!snat_addresses.is_empty()).then(|| addresses(snat_addresses))),
            ("snat-ports", Some(snat_ports.to_string())),
            ("gue-port", Some(gue_port.to_string())),
            ("tunnel-source", tunnel_source.map(|network| network.to_string())),
            ("idle-timeout", Some(time(*idle_timeout))),
            ("drain-timeout", Some(time(*drain_timeout))),
            ("persistence", persistence),
            ("one-packet", Some(one_packet.to_string())),
            ("rtsp-nat", rtsp_nat.map(|ports| format!("{{ data-ports = \"{ports}\" }}"))),
            ("slow-start", Some(time(*slow_start))),
            ("health", health.as_ref().map(ToString::to_string)),
            ("passive-health", passive_health),
            ("no-backend", Some(refusal(no_backend, "reject"))),
            ("unknown-flow", Some(refusal(unknown_flow, "reset"))),
        ]
    }
}

impl Backend {
    fn written(&self) -> Written {
        let Backend { name: _, address, weight, backup, max_active, health } = self;
        let health = match health {
            OwnHealth::None => None,
            OwnHealth::Unchecked => Some("false".to_owned()),
            OwnHealth::Checked(health) => Some(health.to_string()),
        };
        vec![
            ("address", Some(address.to_string())),
            ("weight", Some(weight.get().to_string())),
            ("backup", Some(backup.to_string())),
            ("max-active", max_active.map(|most| most.to_string())),
            ("health", health),
        ]
    }
}

/// As the file would say it, with all that is left out there.
impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Health { probe, port, interval, timeout, rise, fall } = self;
        let bytes = |bytes: &super::Bytes| format!("\"{}\"", bytes.0.escape_ascii());
        match probe {
            Probe::Tcp { send, receive } => {
                f.write_str("{ kind = \"tcp\"")?;
                for (key, value) in [("send", send), ("receive", receive)] {
                    if let Some(value) = value {
                        write!(f, ", {key} = {}", bytes(value))?;
                    }
                }
            }
            Probe::Udp { send, receive } => {
                write!(f, "{{ kind = \"udp\", send = {}, receive = {}", bytes(send), bytes(receive))?;
            }
            Probe::Http { tls, path, host, expect } => {
                let kind = if *tls { "https" } else { "http" };
                write!(f, "{{ kind = \"{kind}\", path = \"{path}\", expect = \"{expect}\"")?;
                if let Some(host) = host {
                    write!(f, ", host = \"{host}\"")?;
                }
            }
            Probe::Ping => f.write_str("{ kind = \"ping\"")?,
            Probe::Exec { command } => write!(f, "{{ kind = \"exec\", command = {command:?}")?,
        }
        if let Some(port) = port {
            write!(f, ", port = {port}")?;
        }
        let [interval, timeout] = [interval, timeout].map(|duration| time(*duration));
        write!(f, ", interval = \"{interval}\", timeout = \"{timeout}\", rise = {rise}, fall = {fall} }}")
    }
}

/// As the file would say them.
fn addresses(addresses: &[IpAddr]) -> String {
    let addresses: Vec<_> = addresses.iter().map(|address| format!("\"{address}\"")).collect();
    format!("[{}]", addresses.join(", "))
}

fn time(duration: Duration) -> String {
    humantime::format_duration(duration).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(services: &str) -> Config {
        Config::parse("f", &format!("[daemon]\ninterfaces = [\"eth0\"]\n{services}")).unwrap()
    }

    fn service(name: &str, port: u16, more: &str, backends: &[(&str, &str)]) -> String {
        let mut text = format!(
            "[[service]]\nname = \"{name}\"\naddress = \"192.0.2.10:{port}\"\nprotocol = \"tcp\"\nmethod = \"maglev\"\n{more}\n"
        );
        for (name, more) in backends {
            let last = name.bytes().next().unwrap();
            text +=
                &format!("[[service.backend]]\nname = \"{name}\"\naddress = \"10.0.0.{last}:80\"\n{more}\n");
        }
        text
    }

    #[test]
    fn each_key_and_each_backend_that_differs() {
        let old = service("web", 80, "", &[("a", ""), ("b", "weight = 2"), ("c", "")])
            + &service("old", 81, "", &[("a", "")]);
        let more = "slow-start = \"90s\"\npersistence = {}\npassive-health = {}\nhealth = { kind = \"tcp\", port = 9000, send = \"x\\r\\n\" }";
        let new = service("web", 80, more, &[("c", ""), ("b", "max-active = 5\nhealth = false"), ("d", "")])
            + &service("new", 82, "", &[("a", "")]);
        let said: Vec<String> =
            config(&old).differences(&config(&new)).iter().map(ToString::to_string).collect();
        let expected = [
            "- service old",
            "~ service web: persistence nothing → { mask = 32, timeout = \"2m\" }",
            "~ service web: slow-start 0s → 1m 30s",
            "~ service web: health nothing → { kind = \"tcp\", send = \"x\\r\\n\", port = 9000, interval = \"5s\", \
             timeout = \"2s\", rise = 2, fall = 3 }",
            "~ service web: passive-health nothing → { failures = 10, timeout = \"3s\", rest = \"30s\" }",
            "- backend a of web",
            "~ backend c of web: its place in the order",
            "~ backend b of web: weight 2 → 1",
            "~ backend b of web: max-active nothing → 5",
            "~ backend b of web: health nothing → false",
            "~ backend b of web: its place in the order",
            "+ backend d of web",
            "+ service new",
            "+ backend a of new",
        ];
        assert_eq!(said, expected);
        assert_eq!(config(&old).differences(&config(&old)), []);
        // What is written out and what is left out is the same.
        let written = service("web", 80, "slow-start = \"0s\"\nsnat = \"auto\"", &[("a", "weight = 1")]);
        assert_eq!(config(&service("web", 80, "", &[("a", "")])).differences(&config(&written)), []);
    }
}
