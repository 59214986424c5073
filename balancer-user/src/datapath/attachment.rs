//! Attaching the program to interfaces, by links that are pinned.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, anyhow};
use aya::programs::{
    ProgramError, Xdp, XdpMode,
    links::{FdLink, PinnedLink},
    xdp::{XdpError, XdpLink, XdpLinkId},
};
use balancer_common::names;

use super::{Datapath, object};

/// Why an interface did not take the program.
#[derive(Debug)]
pub enum AttachError {
    /// The kernel's answer.
    Kernel(io::Error),
    /// Anything else.
    Other(anyhow::Error),
}

impl AttachError {
    /// Whether generic mode may be tried instead: not where another program is in the way, nor where the
    /// interface is gone or the privilege is missing.
    pub fn allows_generic(&self) -> bool {
        match self {
            AttachError::Kernel(error) => !matches!(
                error.raw_os_error(),
                Some(libc::EBUSY | libc::EEXIST | libc::EPERM | libc::EACCES | libc::ENODEV)
            ),
            AttachError::Other(_) => false,
        }
    }
}

impl std::fmt::Display for AttachError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            AttachError::Kernel(error) => write!(f, "{error}"),
            AttachError::Other(error) => write!(f, "{error:#}"),
        }
    }
}

impl std::error::Error for AttachError {}

/// The program on one interface. Dropped, it is taken off unless it was pinned.
pub enum Attached {
    /// The link lives as long as this value does.
    Held(FdLink),
    /// The link lives on at its pin.
    Pinned(PinnedLink),
    /// As `Pinned`, by an earlier process.
    Replaced(FdLink),
}

impl Datapath {
    fn program(&mut self) -> Result<&mut Xdp> {
        Ok(self
            .ebpf
            .program_mut(names::PROGRAM)
            .ok_or_else(|| anyhow!("the program `{}` is gone", names::PROGRAM))?
            .try_into()?)
    }

    /// The id of the program.
    pub fn program_id(&mut self) -> Result<u32> {
        Ok(self.program()?.info().context("ask for the program's id")?.id())
    }

    /// Attaches the program to an interface that has none (Linux 5.9).
    pub fn attach(&mut self, ifindex: u32, is_generic: bool) -> Result<Attached, AttachError> {
        let program = self.program().map_err(AttachError::Other)?;
        attach(program, ifindex, is_generic).map(Attached::Held)
    }

    /// Puts this program in the place of the one behind a pinned link, without a gap.
    pub fn replace(&mut self, pin: &Path) -> Result<Attached> {
        let old = PinnedLink::from_pin(pin).with_context(|| format!("open {}", pin.display()))?;
        let link: FdLink = old.into();
        let link = XdpLink::try_from(link).with_context(|| format!("{} is no XDP link", pin.display()))?;
        let program = self.program()?;
        let id = program
            .attach_to_link(link)
            .with_context(|| format!("replace the program behind {}", pin.display()))?;
        take_link(program, id).map(Attached::Replaced)
    }
}

/// Attaches a program to an interface that has none (Linux 5.9).
pub(super) fn attach(program: &mut Xdp, ifindex: u32, is_generic: bool) -> Result<FdLink, AttachError> {
    let mode = if is_generic { XdpMode::Skb } else { XdpMode::Driver };
    let id = program.attach_to_if_index(ifindex, mode).map_err(into_attach_error)?;
    take_link(program, id).map_err(AttachError::Other)
}

fn take_link(program: &mut Xdp, id: XdpLinkId) -> Result<FdLink> {
    let link = program.take_link(id)?;
    FdLink::try_from(link)
        .map_err(|_| anyhow!("this kernel has no links for XDP: Linux 5.9 or newer is needed"))
}

fn into_attach_error(error: ProgramError) -> AttachError {
    match error {
        ProgramError::SyscallError(error) => AttachError::Kernel(error.io_error),
        // Where a driver answers EINVAL, aya asks again by netlink.
        ProgramError::XdpError(XdpError::NetlinkError(error)) => match error.raw_os_error() {
            Some(code) => AttachError::Kernel(io::Error::from_raw_os_error(code)),
            None => AttachError::Other(error.into()),
        },
        other => AttachError::Other(other.into()),
    }
}

impl Attached {
    /// Pins the link below `pin_path`, so that it outlives the process. What is pinned already stays so.
    pub fn pin(self, pin_path: &Path, interface: &str) -> Result<Attached> {
        let Attached::Held(link) = self else { return Ok(self) };
        let directory = links_directory(pin_path);
        fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
        let pin = directory.join(pin_name(interface));
        // A pin of an interface that is gone leads nowhere.
        match fs::remove_file(&pin) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("remove {}", pin.display()));
            }
            _ => {}
        }
        link.pin(&pin).with_context(|| format!("pin at {}", pin.display())).map(Attached::Pinned)
    }
}

/// The links that an earlier balancer has pinned.
#[derive(Debug, Default)]
pub struct PinnedLinks(BTreeMap<String, Pin>);

/// A pinned link.
#[derive(Debug)]
pub struct Pin {
    /// Where it is pinned.
    pub path: PathBuf,
    /// The id of the program behind it.
    pub program: u32,
}

impl PinnedLinks {
    /// Reads the links below `pin_path`; none if there is no such directory.
    pub fn read(pin_path: &Path) -> Result<PinnedLinks> {
        let directory = links_directory(pin_path);
        let entries = match fs::read_dir(&directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(PinnedLinks::default()),
            entries => entries.with_context(|| format!("read {}", directory.display()))?,
        };
        let mut links = BTreeMap::new();
        for entry in entries {
            let path = entry.with_context(|| format!("read {}", directory.display()))?.path();
            let link = PinnedLink::from_pin(&path).with_context(|| format!("open {}", path.display()))?;
            let link: FdLink = link.into();
            let program = link.info().with_context(|| format!("look at {}", path.display()))?.program_id();
            let name = interface_name(&path.file_name().unwrap_or_default().to_string_lossy());
            links.insert(name, Pin { path, program });
        }
        Ok(PinnedLinks(links))
    }

    /// The link of an interface.
    pub fn get(&self, interface: &str) -> Option<&Pin> {
        self.0.get(interface)
    }

    /// Takes the link of an interface out.
    pub fn take(&mut self, interface: &str) -> Option<Pin> {
        self.0.remove(interface)
    }

    /// Whether this is the program behind any of them.
    pub fn contain(&self, program: u32) -> bool {
        self.0.values().any(|pin| pin.program == program)
    }

    /// The names of the interfaces.
    pub fn names(&self) -> Vec<String> {
        self.0.keys().cloned().collect()
    }
}

/// Takes the program off the interfaces whose links are pinned below `pin_path`, and removes the pins; of `interfaces`
/// only, or of all when that is empty. Returns whose were removed. `pin_path` itself stays: it is locked.
pub fn detach_pins(pin_path: &Path, interfaces: &[String]) -> Result<Vec<String>> {
    let mut removed = Vec::new();
    for (name, pin) in PinnedLinks::read(pin_path)?.0 {
        if interfaces.is_empty() || interfaces.contains(&name) {
            object::detach(&pin.path).with_context(|| format!("detach {}", pin.path.display()))?;
            fs::remove_file(&pin.path).with_context(|| format!("remove {}", pin.path.display()))?;
            removed.push(name);
        }
    }
    let directory = links_directory(pin_path);
    match fs::remove_dir(&directory) {
        Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => {
            Err(error).with_context(|| format!("remove {}", directory.display()))
        }
        _ => Ok(removed),
    }
}

pub(super) fn links_directory(pin_path: &Path) -> PathBuf {
    pin_path.join("links")
}

/// What an interface's pin is called. A BPF file system refuses dots, which VLAN interfaces have in their names.
fn pin_name(interface: &str) -> String {
    interface.replace('%', "%25").replace('.', "%2e")
}

fn interface_name(pin: &str) -> String {
    pin.replace("%2e", ".").replace("%25", "%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_are_named_without_dots_and_lead_back() {
        for (interface, pin) in [("eth0", "eth0"), ("eth0.7", "eth0%2e7"), ("a%2e.%", "a%252e%2e%25")] {
            assert_eq!(pin_name(interface), pin);
            assert_eq!(interface_name(pin), interface);
        }
    }

    #[test]
    fn generic_mode_is_no_way_round_another_program_or_a_missing_privilege() {
        for (code, is_allowed) in [
            (libc::EOPNOTSUPP, true),
            (libc::ERANGE, true),
            (libc::ENOSPC, true),
            (libc::ENOMEM, true),
            (libc::EINVAL, true),
            (libc::EBUSY, false),
            (libc::EEXIST, false),
            (libc::EPERM, false),
            (libc::ENODEV, false),
        ] {
            let error = AttachError::Kernel(io::Error::from_raw_os_error(code));
            assert_eq!(error.allows_generic(), is_allowed, "{error}");
        }
    }
}
