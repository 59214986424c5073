//! An ICMP echo request (RFC 792, RFC 4443).

use std::{
    io,
    net::{IpAddr, UdpSocket as StdSocket},
    sync::atomic::{AtomicU32, Ordering},
};

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use tokio::net::UdpSocket;

use super::{Limit, Outcome, said};

/// The types of a family's echo request and reply.
struct Echo {
    request: u8,
    reply: u8,
}

const ECHO: Echo = Echo { request: 8, reply: 0 };
const ECHO_V6: Echo = Echo { request: 128, reply: 129 };
/// Type, code, checksum, identifier, sequence number.
const HEADER: usize = 8;

pub(super) async fn probe(address: IpAddr, mark: Option<u32>, limit: Limit) -> Outcome {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    // By it an answer is known again: what else is in it may be the kernel's.
    let token = u64::from(std::process::id()) << 32 | u64::from(COUNT.fetch_add(1, Ordering::Relaxed));
    let echo = if address.is_ipv4() { ECHO } else { ECHO_V6 };
    let exchange = async {
        let socket = open(address)?;
        super::mark(&socket, mark)?;
        socket.connect((address, 0)).await?;
        socket.send(&request(&echo, token)).await?;
        let mut bytes = [0; 1500];
        loop {
            let length = socket.recv(&mut bytes).await?;
            if is_reply(&echo, &bytes[..length], token) {
                return Ok(());
            }
        }
    };
    limit.wait("answer", exchange).await?.map_err(|error: io::Error| said(&error))
}

/// A socket for echo requests; where the kernel has none for this group of users (`ping_group_range`), a raw one.
fn open(address: IpAddr) -> io::Result<UdpSocket> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let (family, protocol) = match address {
        IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp),
        IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6),
    };
    let open = |kind| socket(family, kind, flags, protocol);
    let socket = open(SockType::Datagram).or_else(|_| open(SockType::Raw))?;
    UdpSocket::from_std(StdSocket::from(socket))
}

/// Its checksum is IPv4's: IPv6's, which depends on the addresses, the kernel makes.
fn request(echo: &Echo, token: u64) -> [u8; HEADER + 8] {
    let mut message = [0; HEADER + 8];
    message[0] = echo.request;
    let [.., high, low] = std::process::id().to_be_bytes();
    (message[4], message[5]) = (high, low);
    message[6..HEADER].copy_from_slice(&(token as u16).to_be_bytes());
    message[HEADER..].copy_from_slice(&token.to_be_bytes());
    let sum = checksum(&message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    message
}

/// Whether the answer to the request with this token came; a raw socket of IPv4 gets it with its IP header.
fn is_reply(echo: &Echo, bytes: &[u8], token: u64) -> bool {
    let message = match bytes.first() {
        Some(first) if first >> 4 == 4 => bytes.get(usize::from(first & 15) * 4..).unwrap_or_default(),
        _ => bytes,
    };
    message.first() == Some(&echo.reply) && message.get(HEADER..) == Some(&token.to_be_bytes())
}

/// RFC 1071, over an even number of bytes.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.as_chunks::<2>().0.iter().map(|word| u32::from(u16::from_be_bytes(*word)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_and_its_replies() {
        let token = 0x0102_0304_0506_0708;
        for echo in [ECHO, ECHO_V6] {
            let request = request(&echo, token);
            assert_eq!((request[0], request[1], &request[6..8]), (echo.request, 0, &[7, 8][..]));
            assert_eq!(checksum(&request), 0, "a sum over all of it, its own included");
            let mut reply = request.to_vec();
            reply[0] = echo.reply;
            assert!(is_reply(&echo, &reply, token));
            assert!(!is_reply(&echo, &reply, token + 1));
            assert!(!is_reply(&echo, &request, token));
            let raw = [&[0x46; 24][..], &reply].concat();
            assert!(is_reply(&echo, &raw, token));
            assert!(!is_reply(&echo, &raw[..20], token));
            assert!(!is_reply(&echo, &[], 0));
        }
    }
}
