//! A connection, and what may be said on it.

use std::{io, net::SocketAddr};

use nix::sys::socket::{setsockopt, sockopt};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
};

use super::{Limit, Outcome, said, shown};

/// Largest segment, in bytes, of what may be wrapped on its way: with that it fits into any link.
const SEGMENT: u32 = 1160;

pub(super) async fn probe(
    address: SocketAddr,
    send: Option<&[u8]>,
    receive: Option<&[u8]>,
    mark: Option<u32>,
    limit: Limit,
) -> Outcome {
    let stream = connect(address, mark, limit).await?;
    limit.wait("answer", exchange(stream, send.unwrap_or_default(), receive.unwrap_or_default())).await?
}

pub(super) async fn connect(
    address: SocketAddr,
    mark: Option<u32>,
    limit: Limit,
) -> Result<TcpStream, String> {
    let connect = async {
        let socket = match address {
            SocketAddr::V4(_) => TcpSocket::new_v4(),
            SocketAddr::V6(_) => TcpSocket::new_v6(),
        }?;
        super::mark(&socket, mark)?;
        if mark.is_some() {
            setsockopt(&socket, sockopt::TcpMaxSeg, &SEGMENT)?;
        }
        socket.connect(address).await
    };
    limit.wait("connection", connect).await?.map_err(|error: io::Error| said(&error))
}

/// Sends, and reads as many bytes as the answer must begin with.
async fn exchange(mut stream: impl AsyncRead + AsyncWrite + Unpin, send: &[u8], receive: &[u8]) -> Outcome {
    if !send.is_empty() {
        stream.write_all(send).await.map_err(|error| said(&error))?;
    }
    let mut answer = Vec::with_capacity(receive.len());
    while answer.len() < receive.len() {
        let mut room = (&mut stream).take((receive.len() - answer.len()) as u64);
        if room.read_buf(&mut answer).await.map_err(|error| said(&error))? == 0 {
            return Err(format!("the connection was closed after {}", shown(&answer)));
        }
        if !receive.starts_with(&answer) {
            return Err(format!("the answer begins with {}", shown(&answer)));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What becomes of an exchange when the server answers in these parts, and then closes the connection.
    async fn outcome(send: &str, receive: &str, answers: &[&str]) -> (Outcome, String) {
        let (client, mut server) = tokio::io::duplex(4096);
        let serve = async {
            for answer in answers {
                // A client that has heard enough is gone.
                drop(server.write_all(answer.as_bytes()).await);
                tokio::task::yield_now().await;
            }
            drop(server.shutdown().await);
            let mut asked = String::new();
            server.read_to_string(&mut asked).await.unwrap();
            asked
        };
        tokio::join!(exchange(client, send.as_bytes(), receive.as_bytes()), serve)
    }

    #[tokio::test]
    async fn the_answer_must_begin_with_what_is_expected() {
        for (send, receive, answers, expected) in [
            ("", "", &[][..], Ok(())),
            ("PING\r\n", "", &[], Ok(())),
            ("PING\r\n", "+PONG", &["+PONG\r\n"], Ok(())),
            ("PING\r\n", "+PONG", &["+P", "ON", "G"], Ok(())),
            ("", "220 ", &["220 mail ready\r\n"], Ok(())),
            ("PING\r\n", "+PONG", &["-ERR no\r\n"], Err("the answer begins with \"-ERR \"")),
            ("PING\r\n", "+PONG", &["+P", "AN"], Err("the answer begins with \"+PAN\"")),
            ("PING\r\n", "+PONG", &["+P"], Err("the connection was closed after \"+P\"")),
            ("PING\r\n", "+PONG", &[], Err("the connection was closed after \"\"")),
        ] {
            let (outcome, asked) = outcome(send, receive, answers).await;
            assert_eq!(outcome, expected.map_err(str::to_owned), "{answers:?}");
            assert_eq!(asked, send);
        }
    }
}
