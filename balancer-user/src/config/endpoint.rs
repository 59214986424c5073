use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Deref;
use std::str::FromStr;

use super::value::Refused;

/// An address that packets can be sent to, with a port: unicast and on the network, never port 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint(SocketAddr);

impl Endpoint {
    pub(super) const ALLOWED: &str = "a unicast address with a port, \"A.B.C.D:port\" or \"[A:B::C]:port\"";
}

impl Endpoint {
    /// The same address with another port, which is not 0.
    pub(super) fn with_port(self, port: u16) -> Endpoint {
        Endpoint(SocketAddr::new(self.0.ip(), port))
    }

    /// What its address is written in.
    pub(super) const fn family(self) -> &'static str {
        match self.0 {
            SocketAddr::V4(_) => "IPv4",
            SocketAddr::V6(_) => "IPv6",
        }
    }
}

impl Deref for Endpoint {
    type Target = SocketAddr;

    fn deref(&self) -> &SocketAddr {
        &self.0
    }
}

impl From<Endpoint> for SocketAddr {
    fn from(endpoint: Endpoint) -> SocketAddr {
        endpoint.0
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Endpoint {
    type Err = Refused;

    fn from_str(text: &str) -> Result<Endpoint, Refused> {
        let because = |why: &str| Refused::because(why, Endpoint::ALLOWED);
        let (address, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (address, port) = rest.split_once(']').ok_or_else(|| because("without a closing ]"))?;
                let port = port.strip_prefix(':').ok_or_else(|| because("without a port"))?;
                (IpAddr::V6(ipv6(address).map_err(because)?), port)
            }
            None if text.parse::<Ipv6Addr>().is_ok() => {
                return Err(because("IPv6 without brackets and a port"));
            }
            None => {
                let (address, port) = text.rsplit_once(':').ok_or_else(|| because("without a port"))?;
                let address: Ipv4Addr = address.parse().map_err(|_| because("not an address and port"))?;
                (IpAddr::V4(address), port)
            }
        };
        if let Some(class) = unusable(address) {
            return Err(because(class));
        }
        match port.bytes().all(|byte| byte.is_ascii_digit()).then(|| port.parse()) {
            Some(Ok(port @ 1..)) => Ok(Endpoint(SocketAddr::new(address, port))),
            _ => Err(Refused::because("not a port", "a port from 1 to 65535")),
        }
    }
}

/// What stands between the brackets; or why it is none.
fn ipv6(text: &str) -> Result<Ipv6Addr, &'static str> {
    if text.contains('%') {
        return Err("an address with a zone");
    }
    text.parse().map_err(|_| "not an address and port")
}

/// Why no host on a network has this address, or why it is not enough to find one.
pub(super) fn unusable(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(address) => unusable_ipv4(address),
        IpAddr::V6(address) => unusable_ipv6(address),
    }
}

fn unusable_ipv4(address: Ipv4Addr) -> Option<&'static str> {
    match address.octets() {
        [0, ..] => Some("an address of \"this network\" (0.0.0.0/8)"),
        [127, ..] => Some("a loopback address"),
        [224..=239, ..] => Some("a multicast address"),
        [255, 255, 255, 255] => Some("the broadcast address"),
        [240..=255, ..] => Some("a reserved address (240.0.0.0/4)"),
        _ => None,
    }
}

fn unusable_ipv6(address: Ipv6Addr) -> Option<&'static str> {
    match address.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0] => Some("the unspecified address"),
        [0, 0, 0, 0, 0, 0, 0, 1] => Some("a loopback address"),
        [0, 0, 0, 0, 0, 0xffff, ..] => Some("an IPv4 address written as IPv6: write it as \"A.B.C.D:port\""),
        [0, 0, 0, 0, 0, 0, ..] => Some("a reserved address (::/96)"),
        [0xfe80..=0xfebf, ..] => {
            Some("a link-local address, which needs a zone to say on which link, and can have none here")
        }
        [0xff00..=0xffff, ..] => Some("a multicast address"),
        _ => None,
    }
}
