//! Tells neighbours on which interface the advertised addresses are now, before they ask: ARP announcements (RFC 5227, section 3)
//! and unsolicited neighbour advertisements (RFC 4861, section 7.2.6).

use std::{
    collections::BTreeSet,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsRawFd as _, OwnedFd},
};

use anyhow::{Context as _, Result};
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::network::Link;

const BROADCAST: [u8; 6] = [0xff; 6];
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const ALL_NODES_MAC: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
const ARP: u16 = 0x0806;
const IPV6: u16 = 0x86dd;

/// Who has said which addresses are where.
pub struct Announcer {
    /// `None` where this process may not have one.
    socket: Option<OwnedFd>,
    /// What was said: address, interface, MAC.
    said: BTreeSet<(IpAddr, u32, [u8; 6])>,
}

impl Announcer {
    /// Opens its socket, for which it takes CAP_NET_RAW now and nothing later; without that, nothing is announced.
    pub fn open() -> Result<Announcer> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = match socket(AddressFamily::Packet, SockType::Raw, flags, None) {
            Err(Errno::EPERM | Errno::EAFNOSUPPORT) => None,
            socket => Some(socket.context("open a socket for announcements")?),
        };
        Ok(Announcer { socket, said: BTreeSet::new() })
    }

    /// Says, once each, that these addresses are on these interfaces, of which those that are down are left out and spoken on
    /// when they come up.
    pub fn announce(&mut self, addresses: &BTreeSet<IpAddr>, links: &[&Link]) {
        let up = links.iter().filter(|link| link.is_up);
        let places = up.filter_map(|link| Some((link.index, link.mac?)));
        let wanted: BTreeSet<_> = places
            .flat_map(|(index, mac)| addresses.iter().map(move |address| (*address, index, mac)))
            .collect();
        for (address, index, mac) in wanted.difference(&self.said) {
            if let Err(error) = self.send(*index, &frame(*address, *mac)) {
                tracing::warn!("announce {address} on interface {index}: {error}");
            }
        }
        self.said = wanted;
    }

    fn send(&self, ifindex: u32, frame: &[u8]) -> io::Result<()> {
        let Some(socket) = &self.socket else {
            return Err(io::Error::other("this process was started without CAP_NET_RAW"));
        };
        // SAFETY: integers and an array of them, for which all zeros is a value.
        let mut to: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        to.sll_family = libc::AF_PACKET as u16;
        to.sll_ifindex = ifindex as i32;
        // SAFETY: pointers and lengths are those of `frame` and `to`.
        let sent = unsafe {
            libc::sendto(
                socket.as_raw_fd(),
                frame.as_ptr().cast(),
                frame.len(),
                0,
                (&raw const to).cast(),
                size_of_val(&to) as libc::socklen_t,
            )
        };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// The frame that says that `address` is at `mac`.
fn frame(address: IpAddr, mac: [u8; 6]) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => arp(address, mac),
        IpAddr::V6(address) => advertisement(address, mac),
    }
}

fn arp(address: Ipv4Addr, mac: [u8; 6]) -> Vec<u8> {
    const REQUEST: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 1];
    let own = address.octets();
    let ethernet = [&BROADCAST[..], &mac, &ARP.to_be_bytes()].concat();
    [&ethernet[..], &REQUEST, &mac, &own, &[0; 6], &own].concat()
}

fn advertisement(address: Ipv6Addr, mac: [u8; 6]) -> Vec<u8> {
    const LENGTH: u8 = 32;
    let [own, all] = [address.octets(), ALL_NODES.octets()];
    let message = |sum: [u8; 2]| {
        // It overrides what was known.
        [&[136, 0][..], &sum, &[0x20, 0, 0, 0], &own, &[2, 1], &mac].concat()
    };
    let pseudo = [&own[..], &all, &[0, 0, 0, LENGTH, 0, 0, 0, balancer_common::ICMPV6]].concat();
    let mut sum: u32 = [pseudo, message([0; 2])]
        .concat()
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    let ethernet = [&ALL_NODES_MAC[..], &mac, &IPV6.to_be_bytes()].concat();
    let ip = [&[0x60, 0, 0, 0, 0, LENGTH, balancer_common::ICMPV6, 255][..], &own, &all].concat();
    [ethernet, ip, message((!(sum as u16)).to_be_bytes())].concat()
}
