//! Addresses of either family, as people write them and as the program has them.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use balancer_common::{Address, family, mapped};

/// As the program has it.
pub const fn to_wire(address: IpAddr) -> Address {
    match address {
        IpAddr::V4(address) => mapped(address.octets()),
        IpAddr::V6(address) => address.octets(),
    }
}

/// As people write it.
pub const fn from_wire(address: Address) -> IpAddr {
    Ipv6Addr::from_octets(address).to_canonical()
}

/// The same with a port, in network order.
pub const fn socket_from_wire(address: Address, port: [u8; 2]) -> SocketAddr {
    SocketAddr::new(from_wire(address), u16::from_be_bytes(port))
}

/// `family::*`.
pub const fn family_of(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => family::IPV4,
        IpAddr::V6(_) => family::IPV6,
    }
}

/// How many bits an address of this family has.
pub const fn width(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    }
}

/// The length of a prefix of `address` among all 128 bits that the program has of it.
pub const fn length_on_wire(address: IpAddr, length: u8) -> u8 {
    128 - width(address) + length
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_comes_back_as_it_was() {
        for (text, family, bits, wire) in [
            ("192.0.2.10", 4, 32, "00000000000000000000ffffc000020a"),
            ("2001:db8:aa::10", 6, 128, "20010db800aa00000000000000000010"),
            ("::1", 6, 128, "00000000000000000000000000000001"),
        ] {
            let address: IpAddr = text.parse().unwrap();
            let hex: String = to_wire(address).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(hex, wire);
            assert_eq!(from_wire(to_wire(address)), address);
            assert_eq!((family_of(address), width(address)), (family, bits), "{text}");
            assert_eq!(length_on_wire(address, bits), 128, "{text}");
        }
        assert_eq!(length_on_wire("10.0.0.0".parse().unwrap(), 24), 120);
        assert_eq!(length_on_wire("2001:db8::".parse().unwrap(), 64), 64);
    }
}
