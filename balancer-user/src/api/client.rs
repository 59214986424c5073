//! Asks the daemon.

use std::fmt;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::refusal::Refused;
use super::verb::{LARGEST_REQUEST, Verb};

/// Largest answer that is read, in bytes: twenty times what the largest configuration leads to.
const LARGEST: usize = 256 << 20;

/// What the call asks for is wrong, and would be at every other time: exit code 2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongCall(pub String);

impl fmt::Display for WrongCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongCall {}

/// The body that the daemon at `socket` answers with when asked for `path`.
///
/// # Errors
///
/// When no daemon answers there, or not with success within `limit`.
pub async fn get(socket: &Path, path: &str, limit: Duration) -> anyhow::Result<String> {
    within(socket, limit, exchange(socket, Method::GET, path, Bytes::new())).await
}

/// What the daemon's controller answers.
///
/// # Errors
///
/// `WrongCall` when what is asked for is wrong; any other when no daemon answers there, or not with success within
/// `limit`.
pub async fn ask<V: Verb>(socket: &Path, verb: &V, limit: Duration) -> anyhow::Result<V::Answer> {
    let request = serde_json::to_vec(verb).context("write the request")?;
    if request.len() > LARGEST_REQUEST {
        return Err(WrongCall("a name is too long".to_owned()).into());
    }
    let answer = within(socket, limit, exchange(socket, Method::POST, V::PATH, request.into())).await?;
    understand(&answer)
}

/// Reads the body of an answer.
///
/// # Errors
///
/// When it says something else.
pub fn understand<T: serde::de::DeserializeOwned>(body: &str) -> anyhow::Result<T> {
    serde_json::from_str(body).context("understand the daemon's answer (is it of another version?)")
}

async fn within(
    socket: &Path,
    limit: Duration,
    exchange: impl Future<Output = anyhow::Result<String>>,
) -> anyhow::Result<String> {
    match timeout(limit, exchange).await {
        Ok(answer) => answer,
        Err(_) => {
            let limit = humantime::format_duration(limit);
            bail!("the balancer at {} gave no answer within {limit}", socket.display())
        }
    }
}

async fn exchange(socket: &Path, method: Method, path: &str, body: Bytes) -> anyhow::Result<String> {
    let shown = socket.display();
    let stream = UnixStream::connect(socket).await.map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
            anyhow!("no balancer answers at {shown}: is `balancer run` running, and with this `socket`?")
        }
        ErrorKind::PermissionDenied => {
            anyhow!(
                "{shown} belongs to the user that `balancer run` runs as: try again as that user (`socket-group` lets others)"
            )
        }
        _ => anyhow!(error).context(format!("connect to {shown}")),
    })?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.with_context(|| format!("talk to {shown}"))?;
    // Ends with the sender; its faults reach the request too.
    tokio::spawn(connection);
    let request =
        Request::builder().method(method).uri(path).header("host", "balancer").body(Full::new(body))?;
    let answer = sender.send_request(request).await.with_context(|| format!("ask {shown} for {path}"))?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), LARGEST)
        .collect()
        .await
        .map_err(|error| anyhow!(error))
        .with_context(|| format!("read the answer of {shown}"))?;
    let body = String::from_utf8(body.to_bytes().to_vec()).context("read the answer as UTF-8")?;
    if status == StatusCode::OK {
        return Ok(body);
    }
    let Ok(Refused { error }) = serde_json::from_str(&body) else {
        bail!("the balancer at {shown} answers {path} with {status}");
    };
    Err(if status.is_client_error() { WrongCall(error).into() } else { anyhow!(error) })
}
