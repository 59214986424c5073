//! How large packets may be that go to backends in tunnels: routers on the way say so to this host (RFC 1191, RFC 8201), and
//! nobody else can tell the clients, whose packets those are that do not fit.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::fd::{AsRawFd as _, OwnedFd},
    time::Duration,
};

use anyhow::{Context as _, Result};
use balancer_common::UDP;
use nix::{
    errno::Errno,
    sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, socket},
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::mpsc,
};

use crate::clock::Monotonic;

/// How long it is believed: then the path may be wider again (RFC 1191, section 6.3).
const BELIEVED: Duration = Duration::from_secs(600);
/// Less than this is believed of nobody: what every host must take (RFC 791; RFC 8200), and a forger could slow down most.
const LEAST_IPV4: u16 = 576;
const LEAST_IPV6: u16 = 1280;
/// Most that wait to be heard; routers say it again.
const WAITING: usize = 64;
/// As much of a message as is looked at.
const LOOKED_AT: usize = 256;

/// IPv4: destination unreachable, since it must not be split.
const UNREACHABLE: [u8; 2] = [3, 4];
/// IPv6.
const TOO_BIG: [u8; 2] = [2, 0];
/// Bytes of an ICMP header; what a message quotes follows it.
const ICMP: usize = 8;

/// What a router has said of a packet that was too large for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    /// Where the packet came from.
    pub source: IpAddr,
    /// Where it was to go.
    pub destination: IpAddr,
    /// Its IP protocol.
    pub protocol: u8,
    /// Of UDP, where it was to go.
    pub port: u16,
    /// What would have fit.
    pub mtu: u16,
}

impl Told {
    /// From a packet with an ICMP message; from an ICMPv6 message alone, as raw sockets give them.
    fn read(bytes: &[u8], is_ipv6: bool) -> Option<Told> {
        let word =
            |bytes: &[u8], at: usize| Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
        if is_ipv6 {
            let (header, quoted) = bytes.split_at_checked(ICMP)?;
            let mtu = u32::from_be_bytes(header.get(4..8)?.try_into().ok()?);
            let address =
                |at: usize| Some(Ipv6Addr::from(<[u8; 16]>::try_from(quoted.get(at..at + 16)?).ok()?));
            let protocol = *quoted.get(6)?;
            let is_it = header.starts_with(&TOO_BIG) && quoted.first()? >> 4 == 6;
            return is_it.then_some(Told {
                source: address(8)?.into(),
                destination: address(24)?.into(),
                protocol,
                port: if protocol == UDP { word(quoted, 42)? } else { 0 },
                mtu: u16::try_from(mtu).unwrap_or(u16::MAX).max(LEAST_IPV6),
            });
        }
        let icmp = bytes.get(usize::from(bytes.first()? & 15) * 4..)?;
        let (header, quoted) = icmp.split_at_checked(ICMP)?;
        let first = *quoted.first()?;
        let address = |at: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(quoted.get(at..at + 4)?).ok()?));
        let protocol = *quoted.get(9)?;
        let is_it = header.starts_with(&UNREACHABLE) && first >> 4 == 4;
        is_it.then_some(Told {
            source: address(12)?.into(),
            destination: address(16)?.into(),
            protocol,
            port: if protocol == UDP { word(quoted, usize::from(first & 15) * 4 + 2)? } else { 0 },
            mtu: word(header, 6)?.max(LEAST_IPV4),
        })
    }
}

/// Listens to what routers tell this host, for which it takes CAP_NET_RAW now and nothing later; without that, nothing is
/// heard. Must be called within a tokio runtime.
///
/// # Errors
///
/// When the kernel refuses.
pub fn listen() -> Result<mpsc::Receiver<Told>> {
    let (tell, told) = mpsc::channel(WAITING);
    for is_ipv6 in [false, true] {
        if let Some(socket) = open(is_ipv6).context("open a socket for what routers say")? {
            // SAFETY: the socket owns its descriptor and always gives the same one, as long as it lives.
            let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) };
            tokio::spawn(hear(socket.context("listen to routers")?, is_ipv6, tell.clone()));
        }
    }
    Ok(told)
}

async fn hear(socket: AsyncFd<OwnedFd>, is_ipv6: bool, tell: mpsc::Sender<Told>) {
    let mut buffer = [0; LOOKED_AT];
    while let Ok(mut ready) = socket.readable().await {
        let received = ready.try_io(|socket| {
            recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()).map_err(io::Error::from)
        });
        if let Ok(Ok(length)) = received
            && let Some(told) = buffer.get(..length).and_then(|bytes| Told::read(bytes, is_ipv6))
            && let Err(mpsc::error::TrySendError::Closed(_)) = tell.try_send(told)
        {
            return;
        }
    }
}

/// A socket that receives these messages alone; `None` where this process may not have one.
fn open(is_ipv6: bool) -> io::Result<Option<OwnedFd>> {
    let (family, protocol) = match is_ipv6 {
        false => (AddressFamily::Inet, SockProtocol::Icmp),
        true => (AddressFamily::Inet6, SockProtocol::IcmpV6),
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = match socket(family, SockType::Raw, flags, protocol) {
        Err(Errno::EPERM | Errno::EAFNOSUPPORT) => return Ok(None),
        socket => socket?,
    };
    // A bit for each type: those that are set are kept away. Linux reads as many bytes as it knows.
    let mut kept_away = [u32::MAX; 8];
    let wanted = if is_ipv6 { TOO_BIG } else { UNREACHABLE };
    kept_away[0] &= !(1 << wanted[0]);
    // SOL_RAW, ICMP_FILTER (linux/icmp.h); SOL_ICMPV6, ICMPV6_FILTER (linux/icmpv6.h).
    let (level, option, length) =
        if is_ipv6 { (libc::IPPROTO_ICMPV6, 1, 32) } else { (libc::IPPROTO_RAW, 1, 4) };
    // SAFETY: the kernel reads `length` bytes, which `kept_away` has.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const kept_away).cast(), length) };
    if result == 0 { Ok(Some(socket)) } else { Err(io::Error::last_os_error()) }
}

/// What is believed of the ways to backends, by their addresses.
#[derive(Debug, Default)]
pub struct PathMtus(HashMap<IpAddr, (u16, Monotonic)>);

impl PathMtus {
    /// The largest packet that gets to `address`, as far as anybody has said.
    pub fn of(&self, address: IpAddr) -> u16 {
        self.0.get(&address).map_or(u16::MAX, |(mtu, _)| *mtu)
    }

    /// Believes it from now on; whether that is news.
    pub fn learn(&mut self, now: Monotonic, address: IpAddr, mtu: u16) -> bool {
        let is_news = mtu < self.of(address);
        if is_news {
            self.0.insert(address, (mtu, now.plus(BELIEVED)));
        }
        is_news
    }

    /// Forgets what has been believed for long enough: of which addresses.
    pub fn expire(&mut self, now: Monotonic) -> Vec<IpAddr> {
        let is_old = |until: &Monotonic| *until <= now;
        let old = self.0.iter().filter(|(_, (_, until))| is_old(until));
        let old: Vec<IpAddr> = old.map(|(address, _)| *address).collect();
        self.0.retain(|_, (_, until)| !is_old(until));
        old
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a router has said of a packet in GUE, and one in IP.
    fn message(is_ipv6: bool, protocol: u8, mtu: u16) -> Vec<u8> {
        let [m0, m1] = mtu.to_be_bytes();
        let udp = [0xc1, 0x23, 0x17, 0xc0, 0, 40, 0, 0];
        if is_ipv6 {
            let ends = [Ipv6Addr::from([0x20; 16]).octets(), Ipv6Addr::from([0x21; 16]).octets()].concat();
            let header = [0x60, 0, 0, 0, 0, 48, protocol, 64];
            return [&[2, 0, 0, 0, 0, 0, m0, m1][..], &header, &ends, &udp].concat();
        }
        // The message's own header has options.
        let outside = [&[0x46][..], &[0; 23]].concat();
        let quoted = [0x45, 0, 5, 0xdc, 0, 0, 0x40, 0, 63, protocol, 0, 0, 10, 0, 2, 1, 10, 0, 7, 11];
        [&outside[..], &[3, 4, 0, 0, 0, 0, m0, m1], &quoted, &udp].concat()
    }

    #[test]
    fn what_routers_say_is_read_and_nothing_less() {
        for (is_ipv6, protocol, port) in [(false, 4, 0), (false, 17, 6080), (true, 41, 0), (true, 17, 6080)] {
            let whole = message(is_ipv6, protocol, 1400);
            let told = Told::read(&whole, is_ipv6).unwrap();
            let (source, destination) = match is_ipv6 {
                false => ([10, 0, 2, 1].into(), [10, 0, 7, 11].into()),
                true => ([0x20; 16].into(), [0x21; 16].into()),
            };
            assert_eq!(told, Told { source, destination, protocol, port, mtu: 1400 });
            let needed = whole.len() - if protocol == 17 { 4 } else { 8 };
            for length in 0..needed {
                assert_eq!(Told::read(&whole[..length], is_ipv6), None, "{is_ipv6} {length}");
            }
            assert!(Told::read(&whole[..needed], is_ipv6).is_some());
            let mut other = whole.clone();
            other[if is_ipv6 { 0 } else { 24 }] += 1;
            assert_eq!(Told::read(&other, is_ipv6), None, "another message");
        }
        assert_eq!(Told::read(&message(false, 4, 0), false).unwrap().mtu, 576);
        assert_eq!(Told::read(&message(true, 4, 68), true).unwrap().mtu, 1280);
    }

    #[test]
    fn the_narrowest_is_believed_for_ten_minutes() {
        let (one, other): (IpAddr, IpAddr) = ([10, 0, 7, 11].into(), [10, 0, 7, 12].into());
        let start = Monotonic::now();
        let after = |seconds| start.plus(Duration::from_secs(seconds));
        let mut paths = PathMtus::default();
        assert!(paths.learn(start, one, 1400));
        assert!(!paths.learn(after(100), one, 1450), "said of a packet that went before");
        assert!(!paths.learn(after(100), one, 1400));
        assert_eq!([paths.of(one), paths.of(other)], [1400, u16::MAX]);
        assert!(paths.learn(after(300), one, 1300));
        assert_eq!(paths.expire(after(899)), [] as [IpAddr; 0]);
        assert_eq!(paths.of(one), 1300);
        assert_eq!(paths.expire(after(900)), [one]);
        assert_eq!(paths.of(one), u16::MAX);
    }
}
