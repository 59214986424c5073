//! A GET request, over TLS or not, whose answer must come in whole.

use std::{io, net::SocketAddr, pin::pin};

use futures_util::future::{Either, select};
use http_body_util::{BodyExt as _, Empty};
use hyper::{
    Request,
    body::Bytes,
    client::conn::http1,
    header::{CONNECTION, HOST, USER_AGENT},
};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use super::{Limit, Outcome, tcp, tls};
use crate::config::Statuses;

const CLOSED: &str = "the connection was closed before the end of the answer";
/// More of an answer is not waited for.
const ENOUGH: usize = 64 << 10;

/// What is asked for.
pub(super) struct Get<'a> {
    pub(super) path: &'a str,
    /// Under which name, and what TLS asks for a certificate of.
    pub(super) host: Option<&'a str>,
    pub(super) expect: &'a Statuses,
}

pub(super) async fn probe(
    address: SocketAddr,
    tls: bool,
    get: &Get<'_>,
    mark: Option<u32>,
    limit: Limit,
) -> Outcome {
    let stream = tcp::connect(address, mark, limit).await?;
    let host = get.host.map_or_else(|| address.to_string(), ToOwned::to_owned);
    if tls {
        let stream = limit.wait("TLS connection", tls::connect(stream, &host)).await??;
        limit.wait("answer", exchange(stream, &host, get)).await?
    } else {
        limit.wait("answer", exchange(stream, &host, get)).await?
    }
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    host: &str,
    get: &Get<'_>,
) -> Outcome {
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| said(&error))?;
    let request = Request::get(get.path)
        .header(HOST, host)
        .header(USER_AGENT, "balancer")
        .header(CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .map_err(|error| error.to_string())?;
    let exchange = async {
        let mut answer = sender.send_request(request).await.map_err(|error| said(&error))?;
        if !get.expect.contain(answer.status().as_u16()) {
            return Err(format!("the answer is {}, not one of {}", answer.status(), get.expect));
        }
        let mut length = 0;
        while let Some(frame) = answer.frame().await {
            length += frame.map_err(|error| said(&error))?.data_ref().map_or(0, Bytes::len);
            if length > ENOUGH {
                break;
            }
        }
        Ok(())
    };
    // The connection may end before all that came in by it was read.
    match select(pin!(exchange), pin!(connection)).await {
        Either::Left((outcome, _)) => outcome,
        Either::Right((_, exchange)) => exchange.await,
    }
}

fn said(error: &hyper::Error) -> String {
    if error.is_incomplete_message() {
        return CLOSED.to_owned();
    }
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    match innermost.downcast_ref::<io::Error>() {
        Some(error) if error.kind() == io::ErrorKind::UnexpectedEof => CLOSED.to_owned(),
        Some(error) => super::said(error),
        None if error.is_parse() => format!("no HTTP: {innermost}"),
        None => innermost.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// What becomes of a request when the server answers with this, and then closes the connection.
    async fn outcome(expect: &str, answer: &str) -> (Outcome, String) {
        let (client, mut server) = tokio::io::duplex(1 << 20);
        let serve = async {
            let mut asked = vec![0; 1024];
            let length = server.read(&mut asked).await.unwrap();
            server.write_all(answer.as_bytes()).await.unwrap();
            drop(server);
            String::from_utf8_lossy(&asked[..length]).into_owned()
        };
        let expect = expect.parse().unwrap();
        let get = Get { path: "/healthz?a=b", host: None, expect: &expect };
        tokio::join!(exchange(client, "10.0.0.1:80", &get), serve)
    }

    #[tokio::test]
    async fn a_whole_answer_with_an_expected_status_is_good() {
        let long = format!("HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n{}", "x".repeat(ENOUGH + 1));
        for (expect, answer, expected) in [
            ("200-299", "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", Ok(())),
            ("200-299", "HTTP/1.1 204 No Content\r\n\r\n", Ok(())),
            ("200,301-308", "HTTP/1.0 302 Found\r\nlocation: /x\r\n\r\n", Ok(())),
            ("200", "HTTP/1.0 200 OK\r\n\r\nas long as it goes", Ok(())),
            ("200", "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", Ok(())),
            ("200", &long, Ok(())),
            (
                "200-299",
                "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
                Err("the answer is 404 Not Found, not one of 200-299"),
            ),
            (
                "200,204",
                "HTTP/1.1 500 Internal Server Error\r\n\r\n",
                Err("the answer is 500 Internal Server Error, not one of 200,204"),
            ),
            // Half an answer, in its head or in its body.
            ("200", "", Err(CLOSED)),
            ("200", "HTTP/1.1 200 OK\r\ncontent-le", Err(CLOSED)),
            ("200", "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nok", Err(CLOSED)),
            ("200", "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n", Err(CLOSED)),
            ("200", "SSH-2.0-OpenSSH_9.2\r\n", Err("no HTTP: invalid HTTP version parsed")),
        ] {
            let (outcome, asked) = outcome(expect, answer).await;
            assert_eq!(outcome, expected.map_err(str::to_owned), "{answer}");
            let expected = "GET /healthz?a=b HTTP/1.1\r\nhost: 10.0.0.1:80\r\nuser-agent: balancer\r\nconnection: close\r\n\r\n";
            assert_eq!(asked, expected);
        }
    }
}
