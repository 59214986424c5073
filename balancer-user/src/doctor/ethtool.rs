//! What a driver says of itself (SIOCETHTOOL), as `ethtool` shows it.

use std::{ffi::c_char, io, mem, os::fd::AsRawFd as _};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

/// Values of linux/ethtool.h.
mod command {
    pub const DRIVER: u32 = 0x03;
    pub const TX_CHECKSUM: u32 = 0x16;
    pub const FLAGS: u32 = 0x25;
    pub const GRO: u32 = 0x2b;
}
const FLAG_RXVLAN: u32 = 1 << 8;
const FLAG_LRO: u32 = 1 << 15;

/// Of a device that can't be asked all is off, and the driver's name empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// The driver's name.
    pub driver: String,
    /// Tags are taken off frames before XDP sees them.
    pub rxvlan: bool,
    /// Segments are joined by the kernel.
    pub gro: bool,
    /// Segments are joined by the NIC.
    pub lro: bool,
    /// Sums of packets of the host's own are left to the device.
    pub tx_checksum: bool,
}

/// `struct ethtool_drvinfo`, up to the driver's name and with room for the rest.
#[repr(C)]
struct DriverInfo {
    command: u32,
    driver: [u8; 32],
    rest: [u8; 160],
}

/// `struct ethtool_value`.
#[repr(C)]
struct Value {
    command: u32,
    data: u32,
}

impl Offloads {
    /// Of the device with this name in the caller's network namespace.
    pub fn read(device: &str) -> Offloads {
        let value = |command| {
            let mut value = Value { command, data: 0 };
            ask(device, &mut value).map_or(0, |()| value.data)
        };
        let mut info = DriverInfo { command: command::DRIVER, driver: [0; 32], rest: [0; 160] };
        let driver = ask(device, &mut info).map(|()| {
            info.driver.iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte)).collect()
        });
        let flags = value(command::FLAGS);
        Offloads {
            driver: driver.unwrap_or_default(),
            rxvlan: flags & FLAG_RXVLAN != 0,
            gro: value(command::GRO) != 0,
            lro: flags & FLAG_LRO != 0,
            tx_checksum: value(command::TX_CHECKSUM) != 0,
        }
    }
}

/// Has the kernel fill in `request`, which begins with a command for which it is large enough.
fn ask<T>(device: &str, request: &mut T) -> io::Result<()> {
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: `ifreq` is a plain C structure, for which all zeros is a value.
    let mut interface: libc::ifreq = unsafe { mem::zeroed() };
    if device.len() >= interface.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in interface.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as c_char;
    }
    interface.ifr_ifru.ifru_data = (&raw mut *request).cast();
    // SAFETY: the kernel reads `interface`, and reads and writes `request`, as much as its command says; both outlive the call.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut interface) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_device_is_asked() {
        let seen = Offloads::read("lo");
        assert!(seen.tx_checksum && !seen.rxvlan && !seen.lro, "{seen:?}");
        assert_eq!(Offloads::read("no-such-device-here"), Offloads::default());
    }
}
