//! Networks of addresses, as operators write them.

use std::{error::Error, fmt, net::Ipv4Addr, str::FromStr};

use serde::{Deserialize, Serialize};

/// An IPv4 network: `192.0.2.0/24`, or one address, `192.0.2.7`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Prefix {
    network: Ipv4Addr,
    length: u8,
}

impl Prefix {
    /// Whether the address is in this network.
    pub fn contains(self, address: Ipv4Addr) -> bool {
        address.to_bits() & mask(self.length) == self.network.to_bits()
    }
}

/// The first `length` bits, 0 to 32.
const fn mask(length: u8) -> u32 {
    match u32::MAX.checked_shl(32 - length as u32) {
        Some(mask) => mask,
        None => 0,
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.length {
            32 => self.network.fmt(f),
            length => write!(f, "{}/{length}", self.network),
        }
    }
}

impl FromStr for Prefix {
    type Err = NotAPrefix;

    fn from_str(text: &str) -> Result<Prefix, NotAPrefix> {
        let malformed = || NotAPrefix::Malformed(text.to_owned());
        let (address, length) = text.split_once('/').unwrap_or((text, "32"));
        let address: Ipv4Addr = address.parse().map_err(|_| malformed())?;
        let length = length.parse().ok().filter(|length| *length <= 32).ok_or_else(malformed)?;
        let network = Ipv4Addr::from_bits(address.to_bits() & mask(length));
        let prefix = Prefix { network, length };
        if network == address { Ok(prefix) } else { Err(NotAPrefix::BitsBeyond(text.to_owned(), prefix)) }
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
                write!(f, "{text:?} is no IPv4 network; allowed: \"192.0.2.0/24\", or an address")
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
            ("192.0.2.0/24", ["192.0.2.0", "192.0.2.255"], Some(["192.0.1.255", "192.0.3.0"])),
            ("192.0.2.7", ["192.0.2.7", "192.0.2.7"], Some(["192.0.2.6", "192.0.2.8"])),
            ("10.0.0.0/9", ["10.0.0.0", "10.127.255.255"], Some(["9.255.255.255", "10.128.0.0"])),
            ("0.0.0.0/0", ["0.0.0.0", "255.255.255.255"], None),
        ] {
            let prefix: Prefix = text.parse().unwrap();
            assert!(inside.iter().all(|address| prefix.contains(address.parse().unwrap())), "{text}");
            let others = outside.iter().flatten();
            assert!(others.into_iter().all(|address| !prefix.contains(address.parse().unwrap())), "{text}");
            assert_eq!(prefix.to_string(), text);
            assert_eq!(serde_json::from_value::<Prefix>(text.into()).unwrap(), prefix);
            assert_eq!(serde_json::to_value(prefix).unwrap(), text);
        }
    }

    #[test]
    fn what_is_no_network_is_said_to_be_none() {
        for text in
            ["", "192.0.2", "192.0.2.0/33", "192.0.2.0/", "192.0.2.0/x", "2001:db8::/32", "web", "1.2.3.4/-1"]
        {
            let error = text.parse::<Prefix>().unwrap_err().to_string();
            let expected = format!("{text:?} is no IPv4 network; allowed: \"192.0.2.0/24\", or an address");
            assert_eq!(error, expected);
        }
        assert_eq!(
            "192.0.2.7/24".parse::<Prefix>().unwrap_err().to_string(),
            "\"192.0.2.7/24\" is an address and not a network; did you mean \"192.0.2.0/24\"?"
        );
    }
}
