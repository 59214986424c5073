use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use balancer_common::{FIRST_SNAT_PORT, forward};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::endpoint::{self, Endpoint};
use super::fault::Findings;
use super::section::{self, Section};
use super::value::{self, Refused};
use crate::address;
use crate::method::Method;
use crate::prefix::Prefix;

/// How packets get to the backends of a service, and what of them changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forwarding {
    /// The way.
    pub mode: Forward,
    /// Whose source is translated as well, so that replies come back through here.
    pub snat: Snat,
    /// The sources that are given, one to each backend in turn; without any, this host's own towards the backend.
    pub snat_addresses: Vec<IpAddr>,
    /// The ports that are given with them.
    pub snat_ports: SnatPorts,
    /// `gue`: the UDP port that backends unwrap at.
    pub gue_port: u16,
    /// `ipip`, `gue`: where wrapped packets come from, another address of this network for each flow; `None` = this host's own
    /// towards the backend.
    pub tunnel_source: Option<Prefix>,
}

/// The way that packets go to the backends of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Forward {
    /// Destination rewritten; replies come back through the balancer, which rewrites their source.
    Nat,
    /// Source rewritten as well, whoever the client is.
    FullNat,
    /// Only the MACs change; the backend has the service's address itself, and answers clients directly.
    Dsr,
    /// Wrapped in IP; the same otherwise.
    Ipip,
    /// Wrapped in UDP; the same otherwise.
    Gue,
}

impl Forward {
    /// Every one.
    pub const ALL: [Forward; 5] = [Forward::Nat, Forward::FullNat, Forward::Dsr, Forward::Ipip, Forward::Gue];

    /// As the program knows it: `forward::*`.
    pub const fn number(self) -> u8 {
        match self {
            Forward::Nat | Forward::FullNat => forward::NAT,
            Forward::Dsr => forward::DSR,
            Forward::Ipip => forward::IPIP,
            Forward::Gue => forward::GUE,
        }
    }

    /// Whether replies go to the client past the balancer.
    pub const fn is_one_way(self) -> bool {
        self.number() != forward::NAT
    }

    /// Whether packets are wrapped in others.
    pub const fn is_tunnel(self) -> bool {
        matches!(self, Forward::Ipip | Forward::Gue)
    }

    const fn name(self) -> &'static str {
        match self {
            Forward::Nat => "nat",
            Forward::FullNat => "full-nat",
            Forward::Dsr => "dsr",
            Forward::Ipip => "ipip",
            Forward::Gue => "gue",
        }
    }
}

impl Forward {
    /// Of a service.
    pub(super) fn read(section: &Section<'_>, findings: &mut Findings<'_>) -> Option<Forward> {
        let modes = Forward::ALL.map(|mode| (mode.name(), mode));
        section.optional("forward", Forward::Nat, value::choice(&modes), findings)
    }
}

impl fmt::Display for Forward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Whose source becomes an address and port of this host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Snat {
    /// Clients on the backend's own network and backends, whose replies would not come through here; and whoever's
    /// replies could not be told from those of another flow.
    Auto,
    /// Every client.
    Always,
    /// Nobody.
    Never,
}

/// The ports that clients are given with a source of this host's, first and last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnatPorts(pub [u16; 2]);

impl SnatPorts {
    const ALLOWED: &str = "a range of ports from 1024 on in quotes, \"61000-65535\"";
}

impl Default for SnatPorts {
    fn default() -> SnatPorts {
        SnatPorts([FIRST_SNAT_PORT, u16::MAX])
    }
}

impl FromStr for SnatPorts {
    type Err = Refused;

    fn from_str(text: &str) -> Result<SnatPorts, Refused> {
        let ports = value::ports(text).filter(|[first, _]| *first >= 1024);
        ports.map(SnatPorts).ok_or_else(|| Refused::needs(SnatPorts::ALLOWED))
    }
}

impl fmt::Display for SnatPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, last] = self.0;
        write!(f, "{first}-{last}")
    }
}

/// The names of the modes, in the order of `Forward::ALL`.
pub(super) const MODES: &[&str] = &["nat", "full-nat", "dsr", "ipip", "gue"];
/// IANA's port of GUE.
const GUE_PORT: u32 = 6080;
const TUNNEL_SOURCE: &str = "an address or network in quotes, \"10.254.0.0/16\"";

impl Forwarding {
    /// Of a service at `address`, with this mode, if these could be read.
    pub(super) fn read(
        section: &Section<'_>,
        mode: Option<Forward>,
        address: Option<Endpoint>,
        findings: &mut Findings<'_>,
    ) -> Option<Forwarding> {
        let snats = [("auto", Snat::Auto), ("always", Snat::Always), ("never", Snat::Never)];
        let snat = section.optional("snat", Snat::Auto, value::choice(&snats), findings);
        let snat_addresses = match section.get("snat-addresses") {
            Some(_) => read_addresses(section, address, findings),
            None => Some(Vec::new()),
        };
        let ranges = value::text(SnatPorts::ALLOWED, str::parse);
        let snat_ports = section.optional("snat-ports", SnatPorts::default(), ranges, findings);
        let gue_port = section.optional("gue-port", GUE_PORT, value::integer(1..=65_535), findings);
        let networks = value::text(TUNNEL_SOURCE, |text| {
            text.parse::<Prefix>().map_err(|fault| Refused::because(fault.to_string(), TUNNEL_SOURCE))
        });
        let tunnel_source =
            section.optional("tunnel-source", None, |value| networks(value).map(Some), findings);
        let mode = mode?;
        refuse_strangers(section, mode, findings);
        Some(Forwarding {
            mode,
            snat: if mode == Forward::FullNat { Snat::Always } else { snat? },
            snat_addresses: snat_addresses?,
            snat_ports: snat_ports?,
            gue_port: u16::try_from(gue_port?).ok()?,
            tunnel_source: tunnel_source?,
        })
    }
}

/// Reports keys that mean nothing to the mode.
fn refuse_strangers(section: &Section<'_>, mode: Forward, findings: &mut Findings<'_>) {
    let of_keys: [(&str, &[Forward]); 5] = [
        ("snat", &[Forward::Nat]),
        ("snat-addresses", &[Forward::FullNat]),
        ("snat-ports", &[Forward::FullNat]),
        ("gue-port", &[Forward::Gue]),
        ("tunnel-source", &[Forward::Ipip, Forward::Gue]),
    ];
    for (key, modes) in of_keys {
        let Some(value) = section.get(key).filter(|_| !modes.contains(&mode)) else { continue };
        let allowed: Vec<_> = modes.iter().map(|mode| format!("\"{mode}\"")).collect();
        let message = format!(
            "`{key}` means nothing to `forward = \"{mode}\"`; allowed: with {}",
            allowed.join(" and ")
        );
        findings.add(value.span().start, message);
    }
}

/// Reports what needs to see replies, which in this mode go past the balancer.
pub(super) fn refuse_unseen(
    section: &Section<'_>,
    mode: Forward,
    method: Option<Method>,
    findings: &mut Findings<'_>,
) {
    if !mode.is_one_way() {
        return;
    }
    let needs_replies = method == Some(Method::LeastResponseTime);
    let keys = ["requests", "rtsp-nat", "one-packet", "passive-health"]
        .into_iter()
        .chain(needs_replies.then_some("method"));
    for key in keys {
        let Some(value) = section.get(key) else { continue };
        let is_off =
            matches!(value.get_ref().as_bool(), Some(false)) || value.get_ref().as_str() == Some("flow");
        if !is_off {
            let what =
                if key == "method" { "the method \"least-response-time\"" } else { &format!("`{key}`") };
            let message = format!(
                "{what} needs replies to be seen, and with `forward = \"{mode}\"` they go past the balancer; \
                 allowed: with \"nat\" and \"full-nat\""
            );
            findings.add(value.span().start, message);
        }
    }
}

/// `snat-addresses`, which are of the service's family.
fn read_addresses(
    section: &Section<'_>,
    service: Option<Endpoint>,
    findings: &mut Findings<'_>,
) -> Option<Vec<IpAddr>> {
    const ALLOWED: &str = "a list of unicast addresses of the service's family, [\"192.0.2.1\"]";
    let list = section::list(section.get("snat-addresses")?, "`snat-addresses`", findings)?;
    if list.is_empty() {
        findings.add(
            section.place_of("snat-addresses"),
            format!("`snat-addresses` is empty; allowed: {ALLOWED}"),
        );
        return None;
    }
    let read = |text: &str| {
        let address: IpAddr = text.parse().map_err(|_| Refused::needs(ALLOWED))?;
        match endpoint::unusable(address) {
            Some(why) => Err(Refused::because(why, ALLOWED)),
            None if service.is_some_and(|of| address::width(of.ip()) != address::width(address)) => {
                Err(Refused::because("of another family than the service", ALLOWED))
            }
            None => Ok(address),
        }
    };
    let addresses: Vec<_> = list
        .iter()
        .filter_map(|value| {
            section::read_value("snat-addresses", value, value::text(ALLOWED, read), findings)
        })
        .collect();
    (addresses.len() == list.len()).then_some(addresses)
}
