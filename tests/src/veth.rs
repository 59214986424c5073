//! Pairs of virtual Ethernet devices.

use std::{ffi::c_char, io, mem, os::fd::AsRawFd as _};

use anyhow::{Context as _, Result};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::Netns;

const ETHTOOL_STXCSUM: u32 = 0x17;
const ETHTOOL_SFLAGS: u32 = 0x26;
const ETH_FLAG_RXVLAN: u32 = 1 << 8;
const ETHTOOL_SGRO: u32 = 0x2c;

/// One end of a pair: where it is and what it is called there.
#[derive(Clone, Copy, Debug)]
pub struct End<'a> {
    /// The namespace it lives in.
    pub netns: &'a Netns,
    /// Its name there, at most 15 bytes.
    pub device: &'a str,
    /// Its address on the wire, if it has to be known.
    pub mac: Option<[u8; 6]>,
}

/// Makes a pair, both ends up, each with one queue in each direction (native XDP needs the ends to agree).
pub fn pair(a: End<'_>, b: End<'_>, mtu: u32) -> Result<()> {
    pair_with_queues(a, b, mtu, 1)
}

/// The same with so many queues in each direction: as many CPUs can receive at once.
pub fn pair_with_queues(a: End<'_>, b: End<'_>, mtu: u32, queues: u8) -> Result<()> {
    let words = |end: End<'_>| {
        let address = end.mac.map(|mac| format!("address {} ", mac_text(mac))).unwrap_or_default();
        let netns = end.netns.path();
        let (device, netns) = (end.device, netns.display());
        format!("name {device} {address}mtu {mtu} numtxqueues {queues} numrxqueues {queues} netns {netns}")
    };
    a.netns
        .ip(&format!("link add {} type veth peer {}", words(a), words(b)))
        .with_context(|| format!("make the pair {} and {}", a.device, b.device))?;
    for end in [a, b] {
        end.netns.ip(&format!("link set {} up", end.device))?;
    }
    Ok(())
}

/// Makes `device` compute checksums itself. With the usual offload a veth sends frames whose checksum nobody has
/// finished, and XDP forwards them as they are.
pub fn finish_checksums(netns: &Netns, device: &str) -> Result<()> {
    leave_checksums(netns, device, false)
}

/// Whether `device` leaves checksums unfinished.
pub fn leave_checksums(netns: &Netns, device: &str, is_left: bool) -> Result<()> {
    set(netns, device, ETHTOOL_STXCSUM, u32::from(is_left))
        .with_context(|| format!("change the transmit checksum offload of {device}"))
}

/// Whether `device` takes VLAN tags off frames; that it puts them on ends with it.
pub fn strip_tags(netns: &Netns, device: &str, is_stripped: bool) -> Result<()> {
    set(netns, device, ETHTOOL_SFLAGS, if is_stripped { ETH_FLAG_RXVLAN } else { 0 })
        .with_context(|| format!("change the VLAN offloads of {device}"))
}

/// Makes `device` receive segments as they were on the wire. A veth with an XDP program joins those of one connection,
/// and then neither their number nor their lengths are what was sent.
pub fn keep_frames_apart(netns: &Netns, device: &str) -> Result<()> {
    set(netns, device, ETHTOOL_SGRO, 0).with_context(|| format!("turn receive offload of {device} off"))
}

fn set(netns: &Netns, device: &str, command: u32, data: u32) -> Result<()> {
    #[repr(C)]
    struct Value {
        command: u32,
        data: u32,
    }
    let mut value = Value { command, data };
    // SAFETY: `ifreq` is a plain C structure, for which all zeros is a value.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    anyhow::ensure!(device.len() < request.ifr_name.len(), "{device} is too long for a device's name");
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as c_char;
    }
    request.ifr_ifru.ifru_data = (&raw mut value).cast();
    let address = (&raw mut request) as usize;
    netns.run(move || {
        let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)
            .context("open a socket")?;
        // SAFETY: `address` is that of `request` above, which outlives `run` and points to `value`, which does too;
        // the kernel reads both.
        match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, address) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error().into()),
        }
    })
}

/// A MAC address as `ip` writes it.
pub fn mac_text(mac: [u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
