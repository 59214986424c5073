//! A datagram, and its answer.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tokio::net::UdpSocket;

use super::{Limit, Outcome, said, shown};

pub(super) async fn probe(
    address: SocketAddr,
    send: &[u8],
    receive: &[u8],
    mark: Option<u32>,
    limit: Limit,
) -> Outcome {
    let mut answer = vec![0; receive.len().max(1)];
    let any = match address {
        SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let exchange = async {
        let socket = UdpSocket::bind((any, 0)).await?;
        super::mark(&socket, mark)?;
        socket.connect(address).await?;
        socket.send(send).await?;
        socket.recv(&mut answer).await
    };
    let length = limit.wait("answer", exchange).await?.map_err(|error| match error.kind() {
        std::io::ErrorKind::ConnectionRefused => "port unreachable".to_owned(),
        _ => said(&error),
    })?;
    answer.truncate(length);
    if answer.starts_with(receive) {
        Ok(())
    } else {
        Err(format!("the answer begins with {}", shown(&answer)))
    }
}
