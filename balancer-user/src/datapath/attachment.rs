//! Attaching the program to interfaces, by links that are pinned.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, anyhow};
use aya::programs::{
    ProgramError, Xdp, XdpMode,
    links::{FdLink, PinnedLink},
    xdp::{XdpLink, XdpLinkId},
};
use balancer_common::names;

use super::Datapath;

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
}

impl Datapath {
    fn program(&mut self) -> Result<&mut Xdp> {
        Ok(self
            .ebpf
            .program_mut(names::PROGRAM)
            .ok_or_else(|| anyhow!("the program `{}` is gone", names::PROGRAM))?
            .try_into()?)
    }

    /// Attaches the program to an interface that has none (Linux 5.9).
    pub fn attach(&mut self, ifindex: u32, is_generic: bool) -> Result<Attached, AttachError> {
        let mode = if is_generic { XdpMode::Skb } else { XdpMode::Driver };
        let program = self.program().map_err(AttachError::Other)?;
        let id = program.attach_to_if_index(ifindex, mode).map_err(into_attach_error)?;
        take_link(program, id).map(Attached::Held).map_err(AttachError::Other)
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
        take_link(program, id).map(Attached::Held)
    }
}

fn take_link(program: &mut Xdp, id: XdpLinkId) -> Result<FdLink> {
    let link = program.take_link(id)?;
    FdLink::try_from(link)
        .map_err(|_| anyhow!("this kernel has no links for XDP: Linux 5.9 or newer is needed"))
}

fn into_attach_error(error: ProgramError) -> AttachError {
    match error {
        ProgramError::SyscallError(error) => AttachError::Kernel(error.io_error),
        other => AttachError::Other(other.into()),
    }
}

impl Attached {
    /// Pins the link, so that it outlives the process.
    pub fn pin(self, pin: &Path) -> Result<Attached> {
        match self {
            Attached::Held(link) => Ok(Attached::Pinned(
                link.pin(pin).with_context(|| format!("pin the link at {}", pin.display()))?,
            )),
            pinned => Ok(pinned),
        }
    }
}

/// Removes the pinned links below `pin_path`, and with them the program from its interfaces; of `interfaces` only,
/// or of all when that is empty. Returns what was removed, by interface name.
pub fn detach_pins(pin_path: &Path, interfaces: &[String]) -> Result<Vec<String>> {
    let mut removed = Vec::new();
    for (name, pin) in pinned_links(pin_path)? {
        if !interfaces.is_empty() && !interfaces.contains(&name) {
            continue;
        }
        let link = PinnedLink::from_pin(&pin).with_context(|| format!("open {}", pin.display()))?;
        link.unpin().with_context(|| format!("remove {}", pin.display()))?;
        removed.push(name);
    }
    for directory in [links_directory(pin_path), pin_path.to_owned()] {
        match fs::remove_dir(&directory) {
            Ok(()) => {}
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => {}
            Err(error) => return Err(error).with_context(|| format!("remove {}", directory.display())),
        }
    }
    Ok(removed)
}

/// Where the link of an interface is pinned.
pub fn link_pin(pin_path: &Path, interface: &str) -> PathBuf {
    links_directory(pin_path).join(interface)
}

/// The directory of the pinned links.
pub fn links_directory(pin_path: &Path) -> PathBuf {
    pin_path.join("links")
}

/// The pinned links below `pin_path`, with the names of their interfaces.
pub fn pinned_links(pin_path: &Path) -> Result<Vec<(String, PathBuf)>> {
    let directory = links_directory(pin_path);
    let entries = match fs::read_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("read {}", directory.display()))?,
    };
    let mut links = Vec::new();
    for entry in entries {
        let entry = entry.with_context(|| format!("read {}", directory.display()))?;
        links.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
    }
    links.sort();
    Ok(links)
}
