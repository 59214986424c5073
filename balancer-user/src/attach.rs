//! Which interface gets the program, in which mode, and how: anew, or in the place of an earlier balancer's.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::{
    api::AttachedMode,
    config::{Daemon, XdpMode},
    datapath::{Attached, Datapath, PinnedLinks},
    network::{Network, XdpAttachment},
};

/// The configured interfaces as they were found: each exists, and none carries somebody else's program.
pub struct Interfaces {
    found: Vec<Interface>,
    /// Pins of interfaces that are not configured any more.
    stale: Vec<String>,
}

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
    _held: Vec<Attached>,
}

impl Interfaces {
    /// Looks at the configured interfaces; touches nothing.
    ///
    /// # Errors
    ///
    /// An interface that does not exist, or has no Ethernet address, or carries an XDP program that is not ours.
    pub fn examine(daemon: &Daemon, network: &Network) -> Result<Interfaces> {
        let mut pins = daemon.pin_path.as_deref().map_or(Ok(PinnedLinks::default()), PinnedLinks::read)?;
        let mut found = Vec::new();
        for name in &daemon.interfaces {
            let Some(link) = network.link(name.as_str()) else {
                let others: Vec<&str> = network.links.iter().map(|link| link.name.as_str()).collect();
                bail!("there is no interface {name}; there are: {}", others.join(", "));
            };
            if link.mac.is_none() {
                bail!("interface {name} has no Ethernet address, so it can't carry balanced packets");
            }
            let pin = pins.take(name.as_str());
            let own = match (link.xdp, pin) {
                (Some(attachment), Some(pin)) if pin.program == attachment.program => {
                    Some((pin.path, attachment))
                }
                (Some(attachment), _) => bail!(
                    "interface {name} carries another XDP program (id {}); see what it is with `bpftool prog show id {}`, \
                     and take it off with its own tool or `ip link set dev {name} xdp off`",
                    attachment.program,
                    attachment.program
                ),
                (None, Some(pin)) => {
                    // The interface was deleted and made anew: the link leads nowhere.
                    pins.put_back(name.as_str(), pin);
                    None
                }
                (None, None) => None,
            };
            found.push(Interface { name: name.to_string(), index: link.index, own });
        }
        Ok(Interfaces { found, stale: pins.names() })
    }

    /// Their names, for a log line.
    pub fn names(&self) -> String {
        self.found.iter().map(|interface| interface.name.as_str()).collect::<Vec<_>>().join(", ")
    }
}

/// Puts the program on all interfaces, natively or, where that is refused and allowed, generically on all.
///
/// # Errors
///
/// What the kernel refused, and why. Nothing stays attached that was not before.
pub fn attach(datapath: &mut Datapath, interfaces: &Interfaces, daemon: &Daemon) -> Result<Attachments> {
    let mode = mode_in_place(interfaces, daemon.xdp_mode);
    let is_generic = match mode {
        Some(mode) => mode == AttachedMode::Generic,
        None => daemon.xdp_mode == XdpMode::Generic,
    };
    if !interfaces.stale.is_empty()
        && let Some(pins) = &daemon.pin_path
    {
        crate::datapath::detach_pins(pins, &interfaces.stale)?;
    }
    let held = match attach_all(datapath, interfaces, is_generic, daemon.pin_path.as_deref()) {
        Ok(held) => return Ok(Attachments { mode: mode_of(is_generic), _held: held }),
        Err(refused) if !is_generic && daemon.xdp_mode == XdpMode::Auto && refused.allows_generic => {
            tracing::warn!("{:#}; falling back to generic mode on all interfaces", refused.error);
            attach_all(datapath, interfaces, true, daemon.pin_path.as_deref())
        }
        Err(refused) => Err(refused),
    };
    match held {
        Ok(held) => Ok(Attachments { mode: AttachedMode::Generic, _held: held }),
        Err(refused) => Err(refused.error),
    }
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
    (is_wanted && modes.all(|mode| mode == first)).then(|| mode_of(first))
}

fn mode_of(is_generic: bool) -> AttachedMode {
    if is_generic { AttachedMode::Generic } else { AttachedMode::Native }
}

fn attach_all(
    datapath: &mut Datapath,
    interfaces: &Interfaces,
    is_generic: bool,
    pin_path: Option<&Path>,
) -> Result<Vec<Attached>, Refused> {
    let mut held = Vec::new();
    for interface in &interfaces.found {
        let name = &interface.name;
        if let Some((pin, own)) = &interface.own {
            if own.is_generic == is_generic {
                held.push(datapath.replace(pin)?);
                continue;
            }
            if let Some(pins) = pin_path {
                crate::datapath::detach_pins(pins, std::slice::from_ref(name))?;
            }
        }
        let attached = datapath.attach(interface.index, is_generic).map_err(|error| Refused {
            allows_generic: error.allows_generic(),
            error: anyhow!("{error}")
                .context(format!("attach the XDP program to {name} in {} mode", mode_of(is_generic))),
        })?;
        held.push(attached);
    }
    let Some(pins) = pin_path else { return Ok(held) };
    // Only what is attached everywhere is pinned.
    let pinned = held.into_iter().zip(&interfaces.found).map(|(attached, interface)| {
        attached.pin(pins, &interface.name).with_context(|| format!("pin the link of {}", interface.name))
    });
    match pinned.collect() {
        Ok(pinned) => Ok(pinned),
        Err(error) => {
            let names: Vec<String> =
                interfaces.found.iter().map(|interface| interface.name.clone()).collect();
            crate::datapath::detach_pins(pins, &names)?;
            Err(error.into())
        }
    }
}
