//! ICMP echo, without the `ping` program.

use std::{
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use anyhow::{Context as _, Result};
use etherparse::{IcmpEchoHeader, Icmpv4Header, Icmpv4Type};
use nix::sys::{
    socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, recv, sendto, setsockopt,
        socket, sockopt::ReceiveTimeout,
    },
    time::TimeVal,
};

use crate::Netns;

const PAYLOAD: &[u8] = b"balancer";

/// Sends one echo request from `netns` and waits for its answer; fails when none comes within `limit`.
pub fn ping(netns: &Netns, destination: Ipv4Addr, limit: Duration) -> Result<()> {
    let echo = IcmpEchoHeader { id: std::process::id() as u16, seq: 1 };
    let mut request = Icmpv4Header::with_checksum(Icmpv4Type::EchoRequest(echo), PAYLOAD).to_bytes().to_vec();
    request.extend_from_slice(PAYLOAD);
    netns
        .run(move || {
            let socket =
                socket(AddressFamily::Inet, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::Icmp)
                    .context("open an ICMP socket (needs root)")?;
            let seconds = i64::try_from(limit.as_secs()).context("convert the time limit")?;
            setsockopt(&socket, ReceiveTimeout, &TimeVal::new(seconds, i64::from(limit.subsec_micros())))
                .context("set the time limit")?;
            sendto(
                std::os::fd::AsRawFd::as_raw_fd(&socket),
                &request,
                &SockaddrIn::from(std::net::SocketAddrV4::new(destination, 0)),
                MsgFlags::empty(),
            )
            .context("send the echo request")?;
            let mut answer = [0; 256];
            loop {
                let length = recv(std::os::fd::AsRawFd::as_raw_fd(&socket), &mut answer, MsgFlags::empty())
                    .context("wait for the echo reply")?;
                if is_answer(answer.get(..length).unwrap_or_default(), destination, echo) {
                    return Ok(());
                }
            }
        })
        .with_context(|| format!("ping {destination}"))
}

fn is_answer(packet: &[u8], from: Ipv4Addr, echo: IcmpEchoHeader) -> bool {
    let Ok((ip, rest)) = etherparse::Ipv4Header::from_slice(packet) else { return false };
    let Ok((icmp, payload)) = Icmpv4Header::from_slice(rest) else { return false };
    IpAddr::from(ip.source) == IpAddr::from(from)
        && icmp.icmp_type == Icmpv4Type::EchoReply(echo)
        && payload == PAYLOAD
}
