//! Which interface gets the program, in which mode, and how: anew, or in the place of an earlier balancer's.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::{
    api::{AttachedMode, InterfaceState, InterfaceStatus},
    config::{Daemon, InterfaceName, XdpMode},
    datapath::{AttachError, Attached, Datapath, PinnedLinks, detach_pins},
    network::{Link, Network, XdpAttachment},
};

/// The configured interfaces as they were found: each exists unless it is optional, and none carries somebody else's
/// program.
pub struct Interfaces {
    found: Vec<Interface>,
    /// Optional ones that are not there.
    missing: Vec<String>,
    /// Pins of interfaces that are not configured any more.
    stale: Vec<String>,
}

#[derive(Clone)]
struct Interface {
    name: String,
    index: u32,
    /// The link of an earlier balancer, and how its program is attached.
    own: Option<(PathBuf, XdpAttachment)>,
}

/// The program on its interfaces, as long as this value lives, and longer if it is pinned.
pub struct Attachments {
    /// One mode for all: what is redirected to an interface that can't transmit is lost by the kernel.
    pub mode: AttachedMode,
    program: u32,
    pin_path: Option<PathBuf>,
    /// In configured order.
    interfaces: Vec<Carrier>,
    _held: Vec<Attached>,
}

/// A configured interface, and what has become of it.
struct Carrier {
    name: String,
    /// Of the interface that carries the program, or carried it last; 0 = none has yet.
    index: u32,
    state: State,
    is_up: bool,
    /// The link, where it was attached while the balancer ran.
    attached: Option<Attached>,
}

/// What has become of an interface that the program was attached to.
#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Attached,
    Renamed(String),
    Missing,
    /// Another interface has its name, and does not take the program: why.
    Refused(String),
    /// Somebody took the program off.
    Detached,
}

impl Interfaces {
    /// Looks at the configured interfaces; touches nothing.
    ///
    /// # Errors
    ///
    /// An interface that does not exist, or has no Ethernet address, or carries an XDP program that is not ours.
    pub fn examine(daemon: &Daemon, network: &Network) -> Result<Interfaces> {
        let mut pins = daemon.pin_path.as_deref().map_or(Ok(PinnedLinks::default()), PinnedLinks::read)?;
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        for name in &daemon.interfaces {
            let Some(link) = network.link(name.as_str()) else {
                if daemon.optional.contains(name) {
                    missing.push(name.to_string());
                    continue;
                }
                let others: Vec<&str> = network.links.iter().map(|link| link.name.as_str()).collect();
                bail!("there is no interface {name}; there are: {}", others.join(", "));
            };
            if link.mac.is_none() {
                bail!("interface {name} has no Ethernet address, so it can't carry balanced packets");
            }
            let own = occupant(link, &pins)?;
            pins.take(name.as_str());
            found.push(Interface { name: name.to_string(), index: link.index, own });
        }
        Ok(Interfaces { found, missing, stale: pins.names() })
    }

    /// Their names, for a log line.
    pub fn names(&self) -> String {
        let missing = self.missing.iter().map(|name| format!("{name} (not there yet)"));
        let all: Vec<_> = self.found.iter().map(|interface| interface.name.clone()).chain(missing).collect();
        all.join(", ")
    }
}

/// Another program than an earlier balancer's is on an interface.
#[derive(Debug)]
pub struct Foreign {
    /// Which, and where.
    pub what: String,
    /// What to do about it.
    pub advice: String,
}

impl std::fmt::Display for Foreign {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}; {}", self.what, self.advice)
    }
}

impl std::error::Error for Foreign {}

/// The link of an earlier balancer that holds the program on an interface, and how that is attached; `None` if there is no program.
///
/// # Errors
///
/// When it is another program, that none of these pins holds there.
pub fn occupant(link: &Link, pins: &PinnedLinks) -> Result<Option<(PathBuf, XdpAttachment)>, Foreign> {
    let name = &link.name;
    // A pin without a program: the interface was deleted and made anew, and the link leads nowhere.
    let Some(attachment) = link.xdp else { return Ok(None) };
    let id = attachment.program;
    if let Some(pin) = pins.get(name).filter(|pin| pin.program == id) {
        return Ok(Some((pin.path.clone(), attachment)));
    }
    Err(if pins.contain(id) {
        Foreign {
            what: format!(
                "interface {name} carries an earlier balancer's program (id {id}) that is pinned under another name, as \
                 after a rename"
            ),
            advice: "take it off with `balancer detach`".to_owned(),
        }
    } else {
        Foreign {
            what: format!("interface {name} carries another XDP program (id {id})"),
            advice: format!(
                "see what it is with `bpftool prog show id {id}`, and take it off with its own tool (another balancer's: \
                 `balancer detach --pin-path PATH`), or with `ip link set dev {name} xdp off` where no link holds it \
                 (`bpftool link`)"
            ),
        }
    })
}

/// Puts the program on all interfaces, natively or, where that is refused and allowed, generically on all. Then the
/// interfaces that are not configured any more lose theirs.
///
/// # Errors
///
/// What the kernel refused, and why. Nothing stays attached that was not before.
pub fn attach(datapath: &mut Datapath, interfaces: &Interfaces, daemon: &Daemon) -> Result<Attachments> {
    let pins = daemon.pin_path.as_deref();
    let mode = mode_in_place(interfaces, daemon.xdp_mode).unwrap_or(match daemon.xdp_mode {
        XdpMode::Generic => AttachedMode::Generic,
        XdpMode::Auto | XdpMode::Native => AttachedMode::Native,
    });
    let (mode, held) = match attach_all(datapath, interfaces, mode, pins) {
        Ok(held) => (mode, held),
        Err(refused)
            if mode == AttachedMode::Native && daemon.xdp_mode == XdpMode::Auto && refused.allows_generic =>
        {
            tracing::warn!("{:#}; falling back to generic mode on all interfaces", refused.error);
            let held = attach_all(datapath, interfaces, AttachedMode::Generic, pins);
            (AttachedMode::Generic, held.map_err(|refused| refused.error)?)
        }
        Err(refused) => return Err(refused.error),
    };
    if let Some(pins) = pins
        && !interfaces.stale.is_empty()
    {
        detach_pins(pins, &interfaces.stale)?;
    }
    let carrier = |name: &InterfaceName| {
        let found = interfaces.found.iter().find(|interface| interface.name == name.as_str());
        Carrier {
            name: name.to_string(),
            index: found.map_or(0, |interface| interface.index),
            state: if found.is_some() { State::Attached } else { State::Missing },
            is_up: true,
            attached: None,
        }
    };
    Ok(Attachments {
        mode,
        program: datapath.program_id()?,
        pin_path: daemon.pin_path.clone(),
        interfaces: daemon.interfaces.iter().map(carrier).collect(),
        _held: held,
    })
}

struct Refused {
    error: anyhow::Error,
    allows_generic: bool,
}

impl From<anyhow::Error> for Refused {
    fn from(error: anyhow::Error) -> Refused {
        Refused { error, allows_generic: false }
    }
}

/// The mode that an earlier balancer's programs run in, if they can simply be replaced: all in one that is wanted.
fn mode_in_place(interfaces: &Interfaces, wanted: XdpMode) -> Option<AttachedMode> {
    let mut modes =
        interfaces.found.iter().filter_map(|interface| interface.own.as_ref()).map(|(_, own)| own.is_generic);
    let first = modes.next()?;
    let is_wanted = match wanted {
        XdpMode::Auto => true,
        XdpMode::Native => !first,
        XdpMode::Generic => first,
    };
    (is_wanted && modes.all(|mode| mode == first)).then_some(if first {
        AttachedMode::Generic
    } else {
        AttachedMode::Native
    })
}

fn attach_all(
    datapath: &mut Datapath,
    interfaces: &Interfaces,
    mode: AttachedMode,
    pin_path: Option<&Path>,
) -> Result<Vec<Attached>, Refused> {
    let is_generic = mode == AttachedMode::Generic;
    let can_replace = |interface: &&Interface| {
        interface.own.as_ref().is_some_and(|(_, attachment)| attachment.is_generic == is_generic)
    };
    // What may be refused comes first: until then, an earlier balancer's program goes on elsewhere.
    let (to_replace, to_attach): (Vec<_>, Vec<_>) = interfaces.found.iter().partition(can_replace);
    let mut held = Vec::new();
    for Interface { name, index, own } in &to_attach {
        if own.is_some()
            && let Some(pins) = pin_path
        {
            // It runs in the other mode, and an interface has one mode at a time.
            detach_pins(pins, std::slice::from_ref(name))?;
        }
        held.push(datapath.attach(*index, is_generic).map_err(|error| refusal(error, name, mode))?);
    }
    let Some(pins) = pin_path else { return Ok(held) };
    let pinned = held.into_iter().zip(&to_attach).map(|(attached, Interface { name, .. })| {
        attached.pin(pins, name).with_context(|| format!("pin the link of {name}"))
    });
    let own = to_replace.iter().filter_map(|interface| interface.own.as_ref());
    let replaced = own.map(|(pin, _)| datapath.replace(pin));
    let all: Result<Vec<Attached>> = pinned.chain(replaced).collect();
    if all.is_err() {
        let names: Vec<String> = to_attach.iter().map(|interface| interface.name.clone()).collect();
        if !names.is_empty() {
            detach_pins(pins, &names)?;
        }
    }
    Ok(all?)
}

fn refusal(error: AttachError, name: &str, mode: AttachedMode) -> Refused {
    let allows_generic = error.allows_generic();
    let hint = match (&error, mode) {
        (AttachError::Kernel(error), AttachedMode::Native) => match error.raw_os_error() {
            Some(libc::EOPNOTSUPP) => " (its driver has no native XDP)",
            Some(libc::ERANGE | libc::EINVAL) => " (its MTU or its offloads do not go with native XDP)",
            Some(libc::ENOSPC) => " (it has too few queues for native XDP)",
            _ => "",
        },
        _ => "",
    };
    let error = anyhow!("{error}{hint}").context(format!("attach the XDP program to {name} in {mode} mode"));
    Refused { error, allows_generic }
}

impl Attachments {
    /// Attaches the program to interfaces that have appeared, and returns whether there were any; says in the log, once for each
    /// change, what has become of them.
    pub fn watch(&mut self, datapath: &mut Datapath, network: &Network) -> bool {
        let mut is_attached = false;
        let is_generic = self.mode == AttachedMode::Generic;
        for carrier in &mut self.interfaces {
            let link = network.link(&carrier.name);
            let now = match state_of(carrier, self.program, network) {
                Seen::Attached => State::Attached,
                Seen::Renamed(other) => State::Renamed(other),
                Seen::Missing => State::Missing,
                Seen::Detached => State::Detached,
                Seen::Anew(index) => {
                    let pins = self.pin_path.as_deref();
                    match attach_anew(datapath, &carrier.name, link, is_generic, pins) {
                        Ok(attached) => {
                            (carrier.index, carrier.attached) = (index, Some(attached));
                            is_attached = true;
                            State::Attached
                        }
                        Err(error) => State::Refused(format!("{error:#}")),
                    }
                }
            };
            carrier.is_up = link.is_some_and(|link| link.is_up);
            if now != carrier.state {
                say(&carrier.name, &now);
                carrier.state = now;
            }
        }
        is_attached
    }

    /// What has become of the interfaces, in configured order.
    pub fn status(&self) -> Vec<InterfaceStatus> {
        let of = |carrier: &Carrier| InterfaceStatus {
            name: carrier.name.clone(),
            mode: self.mode,
            state: match carrier.state {
                State::Attached if carrier.is_up => InterfaceState::Up,
                State::Attached => InterfaceState::Down,
                State::Missing => InterfaceState::Missing,
                State::Renamed(_) => InterfaceState::Renamed,
                State::Detached => InterfaceState::Detached,
                State::Refused(_) => InterfaceState::Refused,
            },
        };
        self.interfaces.iter().map(of).collect()
    }
}

fn say(name: &str, state: &State) {
    match state {
        State::Attached => tracing::info!("interface {name} is there, with the XDP program"),
        State::Renamed(other) => tracing::warn!(
            "interface {name} is called {other} now: nothing leaves by it until it is called {name} again"
        ),
        State::Missing => tracing::warn!("interface {name} is gone: nothing comes in or leaves by it"),
        State::Refused(why) => {
            tracing::warn!("interface {name} has appeared, and nothing comes in or leaves by it: {why}");
        }
        State::Detached => {
            tracing::warn!("somebody took the XDP program off interface {name}: restart the balancer");
        }
    }
}

/// Attaches the program to an interface that has appeared, in the mode of the others, and pins the link if they are.
fn attach_anew(
    datapath: &mut Datapath,
    name: &str,
    link: Option<&Link>,
    is_generic: bool,
    pin_path: Option<&Path>,
) -> Result<Attached> {
    let link = link.context("it is gone again")?;
    if link.mac.is_none() {
        bail!("it has no Ethernet address, so it can't carry balanced packets");
    }
    if let Some(XdpAttachment { program, .. }) = link.xdp {
        bail!("it carries another XDP program (id {program}): take that off");
    }
    let mode = if is_generic { AttachedMode::Generic } else { AttachedMode::Native };
    let attached =
        datapath.attach(link.index, is_generic).map_err(|error| refusal(error, name, mode).error)?;
    let Some(pins) = pin_path else { return Ok(attached) };
    attached.pin(pins, name).with_context(|| format!("pin the link of {name}"))
}

/// What the kernel's tables say of a configured interface.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Attached,
    Renamed(String),
    Missing,
    Detached,
    /// There is one with this index that has never carried the program.
    Anew(u32),
}

fn state_of(carrier: &Carrier, program: u32, network: &Network) -> Seen {
    match network.links.iter().find(|link| link.index == carrier.index) {
        Some(link) if link.xdp.is_none_or(|attachment| attachment.program != program) => Seen::Detached,
        Some(link) if link.name != carrier.name => Seen::Renamed(link.name.clone()),
        Some(_) => Seen::Attached,
        None => network.link(&carrier.name).map_or(Seen::Missing, |link| Seen::Anew(link.index)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_become_of_an_interface() {
        let carrier = Carrier {
            name: "eth0".to_owned(),
            index: 5,
            state: State::Attached,
            is_up: true,
            attached: None,
        };
        let link = |index, name: &str, program: Option<u32>| Link {
            index,
            name: name.to_owned(),
            mac: None,
            mtu: 1500,
            is_up: true,
            xdp: program.map(|program| XdpAttachment { is_generic: false, program }),
            vlan: None,
        };
        for (links, expected) in [
            (vec![link(5, "eth0", Some(7))], Seen::Attached),
            (vec![link(5, "eth9", Some(7)), link(6, "eth0", None)], Seen::Renamed("eth9".to_owned())),
            (vec![link(6, "eth1", None)], Seen::Missing),
            (vec![link(6, "eth0", None)], Seen::Anew(6)),
            (vec![link(5, "eth0", None)], Seen::Detached),
            (vec![link(5, "eth0", Some(8))], Seen::Detached),
        ] {
            let network = Network { links, ..Network::default() };
            assert_eq!(state_of(&carrier, 7, &network), expected, "{:?}", network.links);
        }
    }
}
