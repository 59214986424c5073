use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use axum::extract::State;
use axum::routing::get;
use axum::{Json, Router, response::IntoResponse};
use tokio::net::UnixListener;
use tokio::sync::watch;

use super::model::{STATUS_PATH, Status};
use super::socket::SocketFile;

type Published = watch::Receiver<Arc<Status>>;

/// A server that has its socket and does not answer yet. The socket's file goes with it.
pub struct Server {
    listener: UnixListener,
    file: SocketFile,
}

impl Server {
    /// Takes the socket at `path`. Must be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// When another daemon answers there, something else than a socket is there, or the kernel refuses.
    pub async fn bind(path: &Path) -> anyhow::Result<Server> {
        let (listener, file) = SocketFile::listen(path).await?;
        Ok(Server { listener, file })
    }

    /// Answers with what was last published, until `stop` is ready.
    ///
    /// # Errors
    ///
    /// When the socket fails.
    pub async fn serve(
        self,
        status: watch::Receiver<Arc<Status>>,
        stop: impl Future<Output = ()>,
    ) -> anyhow::Result<()> {
        let Server { listener, file: _file } = self;
        let router = Router::new().route(STATUS_PATH, get(answer_status)).with_state(status);
        let serving = axum::serve(listener, router).into_future();
        tokio::select! {
            served = serving => served.context("serve the control socket"),
            () = stop => Ok(()),
        }
    }
}

async fn answer_status(State(published): State<Published>) -> impl IntoResponse {
    // The lock is held for the copy of a pointer only.
    let status = Arc::clone(&published.borrow());
    Json(status.as_ref()).into_response()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener as StdListener, UnixStream};
    use std::time::Duration;

    use tempfile::TempDir;
    use tokio::sync::oneshot;

    use super::super::client;
    use super::super::model::tests::example;
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn directory() -> TempDir {
        tempfile::tempdir().expect("a directory")
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it is there").permissions().mode() & 0o7777
    }

    #[tokio::test]
    async fn answers_with_what_was_last_published_and_leaves_nothing_behind() {
        let directory = directory();
        let socket = directory.path().join("made/on/demand/b.sock");
        let (publish, published) = watch::channel(Arc::new(Status::default()));
        let (stop, stopped) = oneshot::channel::<()>();
        let server = Server::bind(&socket).await.expect("bound");
        assert_eq!(mode(&socket), 0o600);
        assert_eq!(mode(socket.parent().expect("a parent")) & 0o022, 0);
        let serving = tokio::spawn(server.serve(published, async { drop(stopped.await) }));

        // A client that asks and never reads delays nobody.
        let mut slow = UnixStream::connect(&socket).expect("connected");
        write!(slow, "GET {STATUS_PATH} HTTP/1.1\r\nhost: x\r\n\r\n").expect("sent");

        for status in [Status::default(), example()] {
            publish.send_replace(Arc::new(status.clone()));
            let body = client::get(&socket, STATUS_PATH, LIMIT).await.expect("an answer");
            assert_eq!(body, serde_json::to_string(&status).expect("a document"));
        }
        let error = client::get(&socket, "/v2/status", LIMIT).await.expect_err("no such path");
        assert!(error.to_string().contains("404"), "{error}");

        stop.send(()).expect("still serving");
        serving.await.expect("no panic").expect("no fault");
        assert!(!socket.exists());
    }

    #[tokio::test]
    async fn takes_the_place_of_a_socket_only_when_nobody_answers() {
        let directory = directory();
        let socket = directory.path().join("b.sock");
        drop(StdListener::bind(&socket).expect("bound"));
        assert!(socket.exists(), "std leaves the file behind: a stale socket");
        let first = Server::bind(&socket).await.expect("nobody answers on it");

        let error = Server::bind(&socket).await.err().expect("the first one answers").to_string();
        assert_eq!(
            error,
            format!(
                "another balancer answers on {}: stop it, or configure another `socket`",
                socket.display()
            )
        );
        assert!(socket.exists());
        drop(first);
        assert!(!socket.exists());

        fs::write(&socket, "precious").expect("written");
        let error = Server::bind(&socket).await.err().expect("a file is there").to_string();
        assert!(error.contains("is not a socket"), "{error}");
        assert_eq!(fs::read_to_string(&socket).expect("still there"), "precious");
    }

    #[tokio::test]
    async fn does_not_remove_the_socket_of_a_successor() {
        let directory = directory();
        let socket = directory.path().join("b.sock");
        let server = Server::bind(&socket).await.expect("bound");
        fs::rename(&socket, directory.path().join("old")).expect("renamed");
        let _successor = Server::bind(&socket).await.expect("bound");
        drop(server);
        assert!(socket.exists());
    }

    #[tokio::test]
    async fn the_client_says_what_is_wrong() {
        let directory = directory();
        let socket = directory.path().join("b.sock");
        let said = async |limit| {
            let error = client::get(&socket, STATUS_PATH, limit).await.expect_err("no daemon");
            format!("{error:#}").replace(&directory.path().display().to_string(), "DIR")
        };
        let nobody = "no balancer answers at DIR/b.sock: is `balancer run` running, and with this `socket`?";
        assert_eq!(said(LIMIT).await, nobody);

        let deaf = StdListener::bind(&socket).expect("bound");
        let kept = tokio::time::timeout(LIMIT, said(Duration::from_millis(50))).await;
        let expected = "the balancer at DIR/b.sock gave no answer within 50ms";
        assert_eq!(kept.expect("the limit is kept"), expected);
        drop(deaf);
        assert_eq!(said(LIMIT).await, nobody);
    }
}
