use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;

use toml::de::DeValue;

use super::fault::Findings;
use super::name::{InterfaceName, Name};
use super::section::{self, Key, Once, Schema, Section, Value, read_value};
use super::value::{self, Refused};

/// How the daemon itself runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Daemon {
    /// Where packets come in and leave: at least one, at most `MAX_INTERFACES`, each once.
    pub interfaces: Vec<InterfaceName>,
    /// Those of them that may be missing at the start, and appear later.
    pub optional: Vec<InterfaceName>,
    /// How the program is attached, to all interfaces alike.
    pub xdp_mode: XdpMode,
    /// Absolute path of the control socket.
    pub socket: PathBuf,
    /// The group that may use the control socket too; `None`: the daemon's user alone.
    pub socket_group: Option<Name>,
    /// Absolute path of the directory of the pins; `None`: nothing is pinned.
    pub pin_path: Option<PathBuf>,
    /// Whether there may be IPv6 services; `None`: if there is one at the start.
    pub ipv6: Option<bool>,
    /// Time between two passes of the controller.
    pub tick: Duration,
    /// Over what time loads are measured: at least two ticks.
    pub window: Duration,
    /// Most flows that are remembered.
    pub max_flows: u32,
    /// Most services.
    pub max_services: u32,
    /// Most backends of all services together.
    pub max_backends: u32,
    /// How long a TCP flow may take from its SYN to the end of the handshake.
    pub half_open_timeout: Duration,
    /// How long a TCP flow is remembered after both FINs, or a RST.
    pub closing_timeout: Duration,
}

/// How the XDP program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum XdpMode {
    /// Native where all interfaces can, else generic.
    Auto,
    /// In the drivers.
    Native,
    /// In the kernel's receive path: every interface can, at less speed.
    Generic,
}

pub(super) const DAEMON: Schema = Schema {
    title: "[daemon]",
    keys: &[
        Key::new("interfaces", "interfaces = [\"eth0\"]").needed(),
        Key::new("xdp-mode", "xdp-mode = \"auto\"").of(&["auto", "native", "generic"]),
        Key::new("socket", "socket = \"/run/balancer/balancer.sock\""),
        Key::new("socket-group", "socket-group = \"adm\""),
        Key::new("pin-path", "pin-path = \"/sys/fs/bpf/balancer\""),
        Key::new("ipv6", "ipv6 = true"),
        Key::new("tick", "tick = \"100ms\""),
        Key::new("window", "window = \"14s\""),
        Key::new("max-flows", "max-flows = 262144"),
        Key::new("max-services", "max-services = 256"),
        Key::new("max-backends", "max-backends = 4096"),
        Key::new("half-open-timeout", "half-open-timeout = \"30s\""),
        Key::new("closing-timeout", "closing-timeout = \"30s\""),
    ],
};

pub(super) const INTERFACE: Schema = Schema {
    title: "an interface",
    keys: &[Key::new("name", "name = \"eth0\"").needed(), Key::new("optional", "optional = false")],
};

/// Where the control socket is unless the configuration says otherwise.
pub const DEFAULT_SOCKET: &str = "/run/balancer/balancer.sock";
/// Where the pins are unless the configuration says otherwise.
pub const DEFAULT_PIN_PATH: &str = "/sys/fs/bpf/balancer";

/// Most interfaces, as the XDP program has room for.
const MAX_INTERFACES: usize = balancer_common::MAX_INTERFACES as usize;
/// Longest path of a Unix socket, in bytes (`sun_path`, with its closing 0).
const LONGEST_SOCKET: usize = 107;
const HOUR: Duration = Duration::from_secs(3600);

impl Daemon {
    /// The keys in which `other` differs that can't change while the daemon runs.
    pub fn fixed_changes(&self, other: &Daemon) -> Vec<&'static str> {
        let keys = [
            ("`interfaces`", self.interfaces != other.interfaces),
            ("`xdp-mode`", self.xdp_mode != other.xdp_mode),
            ("`socket`", self.socket != other.socket),
            ("`socket-group`", self.socket_group != other.socket_group),
            ("`pin-path`", self.pin_path != other.pin_path),
            ("`tick`", self.tick != other.tick),
            ("`window`", self.window != other.window),
            ("`max-flows`", self.max_flows != other.max_flows),
            ("`max-services`", self.max_services != other.max_services),
            ("`max-backends`", self.max_backends != other.max_backends),
        ];
        keys.into_iter().filter(|(_, is_changed)| *is_changed).map(|(key, _)| key).collect()
    }

    /// `None` only where a fault was found.
    pub(super) fn read(value: &Value<'_>, findings: &mut Findings<'_>) -> Option<Daemon> {
        let section = Section::open(&DAEMON, value, findings)?;
        let seconds = Duration::from_secs;
        let modes = [("auto", XdpMode::Auto), ("native", XdpMode::Native), ("generic", XdpMode::Generic)];
        let interfaces = read_interfaces(&section, findings);
        let xdp_mode = section.optional("xdp-mode", XdpMode::Auto, value::choice(&modes), findings);
        let socket = section.optional("socket", DEFAULT_SOCKET.into(), socket_path, findings);
        let groups = value::text(Name::ALLOWED, str::parse);
        let socket_group = section.optional("socket-group", None, |value| groups(value).map(Some), findings);
        let pins = section.optional("pin-path", Some(DEFAULT_PIN_PATH.into()), pin_path, findings);
        let ipv6 = section.optional("ipv6", None, |value| value::boolean(value).map(Some), findings);
        let ticks = value::duration(Duration::from_millis(10)..=seconds(10));
        let tick = section.optional("tick", Duration::from_millis(100), ticks, findings);
        let windows = value::duration(seconds(1)..=seconds(300));
        let window = section.optional("window", seconds(14), windows, findings);
        let flows = value::integer(1024..=4_194_304);
        let max_flows = section.optional("max-flows", 262_144, flows, findings);
        let max_services = section.optional("max-services", 256, value::integer(1..=4096), findings);
        let max_backends = section.optional("max-backends", 4096, value::integer(1..=32_768), findings);
        if let (Some(tick), Some(window)) = (tick, window)
            && window < tick * 2
        {
            let place = section.place_of(if section.get("window").is_some() { "window" } else { "tick" });
            let [tick, window] = [tick, window].map(humantime::format_duration);
            let message =
                format!("`window` is \"{window}\" with a `tick` of \"{tick}\"; allowed: 2 ticks or more");
            findings.add(place, message);
        }
        let timeouts = || value::duration(seconds(1)..=HOUR);
        let half_open_timeout = section.optional("half-open-timeout", seconds(30), timeouts(), findings);
        let closing_timeout = section.optional("closing-timeout", seconds(30), timeouts(), findings);

        let daemon = Daemon {
            optional: interfaces
                .iter()
                .flatten()
                .filter(|(_, optional)| *optional)
                .map(|(name, _)| name.clone())
                .collect(),
            interfaces: interfaces?.into_iter().map(|(name, _)| name).collect(),
            xdp_mode: xdp_mode?,
            socket: socket?,
            socket_group: socket_group?,
            pin_path: pins?,
            ipv6: ipv6?,
            tick: tick?,
            window: window?,
            max_flows: max_flows?,
            max_services: max_services?,
            max_backends: max_backends?,
            half_open_timeout: half_open_timeout?,
            closing_timeout: closing_timeout?,
        };
        Some(daemon)
    }
}

/// Each with whether it is optional.
fn read_interfaces(section: &Section<'_>, findings: &mut Findings<'_>) -> Option<Vec<(InterfaceName, bool)>> {
    let Some(value) = section.get("interfaces") else {
        section.report_missing("interfaces", findings);
        return None;
    };
    let items = section::list(value, "`interfaces`", findings)?;
    if items.is_empty() {
        findings.add(value.span().start, "`interfaces` is empty; allowed: 1 to 64 interfaces".to_owned());
    }
    if let Some(first_too_many) = items.get(MAX_INTERFACES) {
        let message = format!("`interfaces` has {} elements; allowed: 1 to {MAX_INTERFACES}", items.len());
        findings.add(first_too_many.span().start, message);
    }
    let mut names = Once::default();
    let mut interfaces = Vec::new();
    for item in items {
        if let Some((name, optional)) = read_interface(item, findings) {
            names.claim(name.clone(), item.span().start, &format!("interface \"{name}\""), findings);
            interfaces.push((name, optional));
        }
    }
    Some(interfaces)
}

/// `"eth0"` or `{ name = "eth0", optional = true }`.
fn read_interface(item: &Value<'_>, findings: &mut Findings<'_>) -> Option<(InterfaceName, bool)> {
    let name = || value::text(InterfaceName::ALLOWED, str::parse);
    if !item.get_ref().is_table() {
        return Some((read_value("interfaces", item, name(), findings)?, false));
    }
    let section = Section::open(&INTERFACE, item, findings)?;
    let optional = section.optional("optional", false, value::boolean, findings);
    Some((section.required("name", name(), findings)?, optional?))
}

fn socket_path(value: &DeValue<'_>) -> Result<PathBuf, Refused> {
    let path = value::absolute_path(value)?;
    if path.as_os_str().len() > LONGEST_SOCKET || path.file_name().is_none() {
        return Err(Refused::needs(format!("an absolute path of a file, at most {LONGEST_SOCKET} bytes")));
    }
    Ok(path)
}

/// `""` stands for no pins.
fn pin_path(value: &DeValue<'_>) -> Result<Option<PathBuf>, Refused> {
    if value.as_str() == Some("") {
        return Ok(None);
    }
    value::absolute_path(value)
        .map(Some)
        .map_err(|_| Refused::needs("an absolute path in quotes, or \"\" for no pins"))
}
