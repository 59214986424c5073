//! Networks of addresses, as operators write them.

use std::{
    error::Error,
    fmt,
    net::{IpAddr, Ipv6Addr},
    str::FromStr,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::address;

/// A network of either family: `192.0.2.0/24`, `2001:db8::/32`, or one address, `192.0.2.7`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(into = "String", try_from = "String")]
#[schemars(with = "String")]
pub struct Prefix {
    network: IpAddr,
    length: u8,
}

impl Prefix {
    /// The network of the addresses whose first `length` bits are those of `address`: at most all.
    pub fn of(address: IpAddr, length: u8) -> Prefix {
        let length = length.min(address::width(address));
        Prefix { network: leading(address, length), length }
    }

    /// Its first address.
    pub const fn address(self) -> IpAddr {
        self.network
    }

    /// How many leading bits its addresses share.
    pub const fn length(self) -> u8 {
        self.length
    }

    /// Whether the address is in this network.
    pub fn contains(self, address: IpAddr) -> bool {
        // Of another family, it has another width.
        address::width(address) == address::width(self.network)
            && leading(address, self.length) == self.network
    }
}

/// The first `length` bits of an address, the others 0.
fn leading(address: IpAddr, length: u8) -> IpAddr {
    let length = address::length_on_wire(address, length);
    let mask = u128::MAX.checked_shl(128 - u32::from(length)).unwrap_or(0);
    address::from_wire((Ipv6Addr::from_octets(address::to_wire(address)).to_bits() & mask).to_be_bytes())
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.length == address::width(self.network) {
            return self.network.fmt(f);
        }
        write!(f, "{}/{}", self.network, self.length)
    }
}

impl FromStr for Prefix {
    type Err = NotAPrefix;

    fn from_str(text: &str) -> Result<Prefix, NotAPrefix> {
        let malformed = || NotAPrefix::Malformed(text.to_owned());
        let (address, length) =
            text.split_once('/').map_or((text, None), |(address, length)| (address, Some(length)));
        let address: IpAddr = address.parse().map_err(|_| malformed())?;
        if address != address.to_canonical() {
            return Err(malformed());
        }
        let width = address::width(address);
        let length = length.map_or(Ok(width), str::parse).map_err(|_| malformed())?;
        if length > width {
            return Err(malformed());
        }
        let prefix = Prefix::of(address, length);
        if prefix.network == address {
            Ok(prefix)
        } else {
            Err(NotAPrefix::BitsBeyond(text.to_owned(), prefix))
        }
    }
}

impl TryFrom<String> for Prefix {
    type Error = NotAPrefix;

    fn try_from(text: String) -> Result<Prefix, NotAPrefix> {
        text.parse()
    }
}

impl From<Prefix> for String {
    fn from(prefix: Prefix) -> String {
        prefix.to_string()
    }
}

/// Why a text is no network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotAPrefix {
    /// Not written as one.
    Malformed(String),
    /// The address has bits that the length says are not looked at; what was meant, perhaps.
    BitsBeyond(String, Prefix),
}

impl fmt::Display for NotAPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotAPrefix::Malformed(text) => {
                write!(
                    f,
                    "{text:?} is no network; allowed: \"192.0.2.0/24\", \"2001:db8::/32\", or an address"
                )
            }
            NotAPrefix::BitsBeyond(text, meant) => {
                write!(f, "{text:?} is an address and not a network; did you mean \"{meant}\"?")
            }
        }
    }
}

impl Error for NotAPrefix {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_has_the_addresses_that_begin_like_it() {
        for (text, inside, outside) in [
            ("192.0.2.0/24", ["192.0.2.0", "192.0.2.255"], ["192.0.1.255", "192.0.3.0"]),
            ("192.0.2.7", ["192.0.2.7", "192.0.2.7"], ["192.0.2.6", "192.0.2.8"]),
            ("10.0.0.0/9", ["10.0.0.0", "10.127.255.255"], ["9.255.255.255", "10.128.0.0"]),
            ("0.0.0.0/0", ["0.0.0.0", "255.255.255.255"], ["::", "2001:db8::1"]),
            ("2001:db8::/32", ["2001:db8::", "2001:db8:ffff::1"], ["2001:db7:ffff::", "32.1.13.184"]),
            ("2001:db8::7", ["2001:db8::7", "2001:db8::7"], ["2001:db8::6", "2001:db8::8"]),
            ("2001:db8::/33", ["2001:db8:7fff::", "2001:db8::"], ["2001:db8:8000::", "192.0.2.1"]),
            ("::/0", ["::1", "ffff::"], ["0.0.0.0", "255.255.255.255"]),
        ] {
            let prefix: Prefix = text.parse().unwrap();
            assert!(inside.iter().all(|address| prefix.contains(address.parse().unwrap())), "{text}");
            assert!(outside.iter().all(|address| !prefix.contains(address.parse().unwrap())), "{text}");
            assert_eq!(prefix.to_string(), text);
            assert_eq!(serde_json::from_value::<Prefix>(text.into()).unwrap(), prefix);
            assert_eq!(serde_json::to_value(prefix).unwrap(), text);
        }
    }

    #[test]
    fn what_is_no_network_is_said_to_be_none() {
        for text in [
            "",
            "192.0.2",
            "192.0.2.0/33",
            "192.0.2.0/",
            "192.0.2.0/x",
            "2001:db8::/129",
            "web",
            "1.2.3.4/-1",
            "2001:db8::/",
            "[2001:db8::]/32",
            "fe80::1%eth0",
            "::ffff:192.0.2.7",
        ] {
            let error = text.parse::<Prefix>().unwrap_err().to_string();
            let expected = format!(
                "{text:?} is no network; allowed: \"192.0.2.0/24\", \"2001:db8::/32\", or an address"
            );
            assert_eq!(error, expected);
        }
        assert_eq!(
            "192.0.2.7/24".parse::<Prefix>().unwrap_err().to_string(),
            "\"192.0.2.7/24\" is an address and not a network; did you mean \"192.0.2.0/24\"?"
        );
        assert_eq!(
            "2001:db8::7/64".parse::<Prefix>().unwrap_err().to_string(),
            "\"2001:db8::7/64\" is an address and not a network; did you mean \"2001:db8::/64\"?"
        );
    }
}
