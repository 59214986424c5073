//! An ICMP echo request (RFC 792).

use std::{
    io,
    net::{Ipv4Addr, UdpSocket as StdSocket},
    sync::atomic::{AtomicU32, Ordering},
};

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use tokio::net::UdpSocket;

use super::{Limit, Outcome, said};

const ECHO_REPLY: u8 = 0;
const ECHO_REQUEST: u8 = 8;
/// Type, code, checksum, identifier, sequence number.
const HEADER: usize = 8;

pub(super) async fn probe(address: Ipv4Addr, limit: Limit) -> Outcome {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    // By it an answer is known again: what else is in it may be the kernel's.
    let token = u64::from(std::process::id()) << 32 | u64::from(COUNT.fetch_add(1, Ordering::Relaxed));
    let exchange = async {
        let socket = open()?;
        socket.connect((address, 0)).await?;
        socket.send(&request(token)).await?;
        let mut bytes = [0; 1500];
        loop {
            let length = socket.recv(&mut bytes).await?;
            if is_reply(&bytes[..length], token) {
                return Ok(());
            }
        }
    };
    limit.wait("answer", exchange).await?.map_err(|error: io::Error| said(&error))
}

/// A socket for echo requests; where the kernel has none for this group of users (`ping_group_range`), a raw one.
fn open() -> io::Result<UdpSocket> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let open = |kind| socket(AddressFamily::Inet, kind, flags, SockProtocol::Icmp);
    let socket = open(SockType::Datagram).or_else(|_| open(SockType::Raw))?;
    UdpSocket::from_std(StdSocket::from(socket))
}

fn request(token: u64) -> [u8; HEADER + 8] {
    let mut message = [0; HEADER + 8];
    message[0] = ECHO_REQUEST;
    let [.., high, low] = std::process::id().to_be_bytes();
    (message[4], message[5]) = (high, low);
    message[6..HEADER].copy_from_slice(&(token as u16).to_be_bytes());
    message[HEADER..].copy_from_slice(&token.to_be_bytes());
    let sum = checksum(&message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    message
}

/// Whether the answer to the request with this token came; a raw socket gets it with its IP header.
fn is_reply(bytes: &[u8], token: u64) -> bool {
    let message = match bytes.first() {
        Some(first) if first >> 4 == 4 => bytes.get(usize::from(first & 15) * 4..).unwrap_or_default(),
        _ => bytes,
    };
    message.first() == Some(&ECHO_REPLY) && message.get(HEADER..) == Some(&token.to_be_bytes())
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
        let request = request(0x0102_0304_0506_0708);
        assert_eq!((request[0], request[1], &request[6..8]), (8, 0, &[7, 8][..]));
        assert_eq!(checksum(&request), 0, "a sum over all of it, its own included");
        let mut reply = request.to_vec();
        reply[0] = ECHO_REPLY;
        assert!(is_reply(&reply, 0x0102_0304_0506_0708));
        assert!(!is_reply(&reply, 0x0102_0304_0506_0709));
        assert!(!is_reply(&request, 0x0102_0304_0506_0708));
        let raw = [&[0x46; 24][..], &reply].concat();
        assert!(is_reply(&raw, 0x0102_0304_0506_0708));
        assert!(!is_reply(&raw[..20], 0x0102_0304_0506_0708));
        assert!(!is_reply(&[], 0));
    }
}
