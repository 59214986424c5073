//! Asks the daemon.

use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Largest answer that is read, in bytes: twenty times what the largest configuration leads to.
const LARGEST: usize = 256 << 20;

/// The body that the daemon at `socket` answers with when asked for `path`.
///
/// # Errors
///
/// When no daemon answers there, or not with success within `limit`.
pub async fn get(socket: &Path, path: &str, limit: Duration) -> anyhow::Result<String> {
    let shown = socket.display();
    match timeout(limit, exchange(socket, path)).await {
        Ok(answer) => answer,
        Err(_) => {
            let limit = humantime::format_duration(limit);
            bail!("the balancer at {shown} gave no answer within {limit}")
        }
    }
}

async fn exchange(socket: &Path, path: &str) -> anyhow::Result<String> {
    let shown = socket.display();
    let stream = UnixStream::connect(socket).await.map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
            anyhow!("no balancer answers at {shown}: is `balancer run` running, and with this `socket`?")
        }
        ErrorKind::PermissionDenied => {
            anyhow!("{shown} belongs to the user that `balancer run` runs as: try again as that user")
        }
        _ => anyhow!(error).context(format!("connect to {shown}")),
    })?;
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.with_context(|| format!("talk to {shown}"))?;
    // Ends with the sender; its faults reach the request too.
    tokio::spawn(connection);
    let request = Request::get(path).header("host", "balancer").body(Empty::<Bytes>::new())?;
    let answer = sender.send_request(request).await.with_context(|| format!("ask {shown} for {path}"))?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), LARGEST)
        .collect()
        .await
        .map_err(|error| anyhow!(error))
        .with_context(|| format!("read the answer of {shown}"))?;
    if status != StatusCode::OK {
        bail!("the balancer at {shown} answers {path} with {status}");
    }
    String::from_utf8(body.to_bytes().to_vec()).context("read the answer as UTF-8")
}
