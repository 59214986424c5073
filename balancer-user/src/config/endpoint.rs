use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4, SocketAddrV6};
use std::ops::Deref;
use std::str::FromStr;

use super::value::Refused;

/// An address that packets can be sent to, with a port: unicast and on the network, never port 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint(SocketAddrV4);

impl Endpoint {
    pub(super) const ALLOWED: &str = "a unicast IPv4 address with a port, \"A.B.C.D:port\"";
}

impl Endpoint {
    /// The same address with another port, which is not 0.
    pub(super) fn with_port(self, port: u16) -> Endpoint {
        Endpoint(SocketAddrV4::new(*self.0.ip(), port))
    }
}

impl Deref for Endpoint {
    type Target = SocketAddrV4;

    fn deref(&self) -> &SocketAddrV4 {
        &self.0
    }
}

impl From<Endpoint> for SocketAddrV4 {
    fn from(endpoint: Endpoint) -> SocketAddrV4 {
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
        let bare = text.trim_matches(['[', ']']);
        if text.parse::<SocketAddrV6>().is_ok() || bare.parse::<std::net::Ipv6Addr>().is_ok() {
            return Err(because("IPv6, which is not supported yet"));
        }
        let Some((address, port)) = text.rsplit_once(':') else {
            return Err(because("without a port"));
        };
        let address: Ipv4Addr = address.parse().map_err(|_| because("not an IPv4 address and port"))?;
        if let Some(class) = unusable(address) {
            return Err(because(class));
        }
        match port.bytes().all(|byte| byte.is_ascii_digit()).then(|| port.parse()) {
            Some(Ok(port @ 1..)) => Ok(Endpoint(SocketAddrV4::new(address, port))),
            _ => Err(Refused::because("not a port", "a port from 1 to 65535")),
        }
    }
}

/// Why no host on a network has this address.
fn unusable(address: Ipv4Addr) -> Option<&'static str> {
    match address.octets() {
        [0, ..] => Some("an address of \"this network\" (0.0.0.0/8)"),
        [127, ..] => Some("a loopback address"),
        [224..=239, ..] => Some("a multicast address"),
        [255, 255, 255, 255] => Some("the broadcast address"),
        [240..=255, ..] => Some("a reserved address (240.0.0.0/4)"),
        _ => None,
    }
}
