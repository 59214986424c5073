//! Generic netlink, as far as it is asked here: what a device can do for XDP, and where the kernel unwraps UDP.

use std::{io, os::fd::AsRawFd as _};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket,
};
use rtnetlink::packet_core::NlasIterator;

/// Message types (linux/netlink.h).
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
/// Both headers: `struct nlmsghdr`, `struct genlmsghdr`.
const HEADER: usize = 16;
const HEADERS: usize = HEADER + 4;

/// linux/genetlink.h: the family that knows the others.
const CONTROLLER: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

/// linux/netdev.h.
const NETDEV_CMD_DEV_GET: u8 = 1;
const NETDEV_A_DEV_IFINDEX: u16 = 1;
const NETDEV_A_DEV_XDP_FEATURES: u16 = 3;
const XDP_BASIC: u64 = 1;
const XDP_REDIRECT: u64 = 2;
const XDP_RX_SG: u64 = 0x20;

/// linux/fou.h.
const FOU_CMD_GET: u8 = 3;
const FOU_ATTR_PORT: u16 = 1;
const FOU_ATTR_AF: u16 = 2;
const FOU_ATTR_TYPE: u16 = 4;
const FOU_ENCAP_GUE: u8 = 2;

/// What a driver can do for XDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XdpAbilities {
    /// Take programs, natively.
    pub native: bool,
    /// Send what a program redirects elsewhere.
    pub redirect: bool,
    /// Give programs packets of several buffers, and so take them with a large MTU.
    pub many_buffers: bool,
}

/// A UDP port at which the kernel unwraps GUE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuePort {
    /// The port.
    pub port: u16,
    /// Whether of IPv6.
    pub is_ipv6: bool,
}

/// What the driver of the interface can do; `None` where the kernel does not say (before Linux 6.3).
pub fn xdp_abilities(ifindex: u32) -> Option<XdpAbilities> {
    let request = attribute(NETDEV_A_DEV_IFINDEX, &ifindex.to_ne_bytes());
    let answers = ask("netdev", NETDEV_CMD_DEV_GET, &request, NLM_F_ACK).ok()?;
    let features = value(answers.first()?, NETDEV_A_DEV_XDP_FEATURES)?;
    let features = u64::from_ne_bytes(features.try_into().ok()?);
    let has = |feature| features & feature != 0;
    Some(XdpAbilities { native: has(XDP_BASIC), redirect: has(XDP_REDIRECT), many_buffers: has(XDP_RX_SG) })
}

/// The ports at which the kernel unwraps GUE (`ip fou show`).
pub fn gue_ports() -> Vec<GuePort> {
    let answers = ask("fou", FOU_CMD_GET, &[], NLM_F_DUMP).unwrap_or_default();
    let port = |answer: &Vec<u8>| {
        let kind = value(answer, FOU_ATTR_TYPE)?;
        let family = value(answer, FOU_ATTR_AF)?;
        let port = u16::from_be_bytes(value(answer, FOU_ATTR_PORT)?.try_into().ok()?);
        let is_ipv6 = i32::from(*family.first()?) == libc::AF_INET6;
        (kind == [FOU_ENCAP_GUE]).then_some(GuePort { port, is_ipv6 })
    };
    answers.iter().filter_map(port).collect()
}

/// The attributes of each answer of a family.
fn ask(family: &str, command: u8, attributes: &[u8], flags: u16) -> io::Result<Vec<Vec<u8>>> {
    let name = [family.as_bytes(), &[0]].concat();
    let asked = attribute(CTRL_ATTR_FAMILY_NAME, &name);
    let answers = exchange(CONTROLLER, CTRL_CMD_GETFAMILY, &asked, NLM_F_ACK)?;
    let id = answers.first().and_then(|answer| value(answer, CTRL_ATTR_FAMILY_ID));
    let id = id.and_then(|id| id.try_into().ok()).ok_or(io::ErrorKind::NotFound)?;
    exchange(u16::from_ne_bytes(id), command, attributes, flags)
}

fn exchange(family: u16, command: u8, attributes: &[u8], flags: u16) -> io::Result<Vec<Vec<u8>>> {
    let socket =
        socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkGeneric)?;
    let length = u32::try_from(HEADERS + attributes.len()).map_err(io::Error::other)?;
    let mut message = Vec::new();
    message.extend_from_slice(&length.to_ne_bytes());
    message.extend_from_slice(&family.to_ne_bytes());
    message.extend_from_slice(&(NLM_F_REQUEST | flags).to_ne_bytes());
    // Sequence number and port.
    message.extend_from_slice(&[0; 8]);
    message.extend_from_slice(&[command, 1, 0, 0]);
    message.extend_from_slice(attributes);
    sendto(socket.as_raw_fd(), &message, &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
    let mut answers = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let received = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        if messages(&buffer[..received], &mut answers)? {
            return Ok(answers);
        }
    }
}

/// Adds the attributes of the answers that came together; whether they were the last.
fn messages(mut bytes: &[u8], answers: &mut Vec<Vec<u8>>) -> io::Result<bool> {
    let broken = || io::Error::from(io::ErrorKind::InvalidData);
    while let Some((header, _)) = bytes.split_first_chunk::<HEADER>() {
        let [a, b, c, d, kind, more, ..] = *header;
        let length = u32::from_ne_bytes([a, b, c, d]) as usize;
        let message = bytes.get(..length).filter(|_| length >= HEADER).ok_or_else(broken)?;
        match u16::from_ne_bytes([kind, more]) {
            NLMSG_DONE => return Ok(true),
            NLMSG_ERROR => {
                let code = message.get(HEADER..).and_then(|rest| rest.first_chunk()).ok_or_else(broken)?;
                return match i32::from_ne_bytes(*code) {
                    0 => Ok(true),
                    code => Err(io::Error::from_raw_os_error(code.saturating_neg())),
                };
            }
            _ => answers.push(message.get(HEADERS..).ok_or_else(broken)?.to_vec()),
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut attribute = Vec::new();
    attribute.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
    attribute.extend_from_slice(&kind.to_ne_bytes());
    attribute.extend_from_slice(value);
    attribute.resize(attribute.len().next_multiple_of(4), 0);
    attribute
}

fn value(attributes: &[u8], wanted: u16) -> Option<Vec<u8>> {
    let found = NlasIterator::new(attributes).flatten().find(|attribute| attribute.kind() == wanted)?;
    Some(found.value().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_ends_with_its_last_message_or_an_error() {
        let message = |kind: u16, rest: &[u8]| {
            let mut bytes = ((HEADER + rest.len()) as u32).to_ne_bytes().to_vec();
            bytes.extend_from_slice(&kind.to_ne_bytes());
            bytes.resize(HEADER, 0);
            bytes.extend_from_slice(rest);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes
        };
        let port = [attribute(FOU_ATTR_PORT, &[0x17, 0xc0]), attribute(FOU_ATTR_TYPE, &[2])].concat();
        let answer = message(30, &[&[0; 4][..], &port].concat());
        let mut answers = Vec::new();
        assert!(!messages(&answer, &mut answers).unwrap());
        assert!(messages(&[answer, message(NLMSG_DONE, &[0; 4])].concat(), &mut answers).unwrap());
        assert_eq!(answers, [port.clone(), port.clone()]);
        assert_eq!(value(&port, FOU_ATTR_PORT), Some(vec![0x17, 0xc0]));
        assert_eq!(value(&port, FOU_ATTR_AF), None);
        assert!(messages(&message(NLMSG_ERROR, &[0; 4]), &mut answers).unwrap());
        let refused = messages(&message(NLMSG_ERROR, &(-libc::EPERM).to_ne_bytes()), &mut answers);
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert!(messages(&[3; 40], &mut answers).is_err());
    }

    #[test]
    fn the_loopback_device_takes_no_program_natively() {
        assert!(xdp_abilities(1).is_none_or(|abilities| !abilities.native));
        assert_eq!(ask("nobody", 1, &[], NLM_F_ACK).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    }
}
