use std::collections::VecDeque;
use std::io;
use std::os::unix::net::UnixListener as StdListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, header::CONTENT_TYPE};
use axum::routing::{get, post};
use axum::{Json, Router};
use hyper::server::conn::http1;
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::sleep;

use super::model::Status;
use super::openapi::openapi;
use super::refusal::Refusal;
use super::socket::SocketFile;
use super::verb::{Ask, EachVerb, LARGEST_REQUEST, OPENAPI_PATH, STATUS_PATH, Verb, verbs};
use crate::clock::Monotonic;

/// Most clients that are connected.
const MOST_CLIENTS: usize = 64;
/// How long nobody is accepted after the kernel has refused to.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What the controller tells without being asked.
#[derive(Clone, Debug)]
pub struct Published {
    /// The last status; its selection age goes for nothing here.
    pub status: Arc<Status>,
    /// When the selection rings were last judged.
    pub selected: Monotonic,
}

#[derive(Clone)]
struct Daemon {
    published: watch::Receiver<Published>,
    ask: Ask,
}

/// A server that has its socket and does not answer yet. The socket's file goes with it.
pub struct Server {
    listener: UnixListener,
    file: SocketFile,
}

impl Server {
    /// Takes the socket at `path`, which members of `group` may use too. Must be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// When another daemon answers there, something else than a socket is there, there is no such group, or the kernel refuses.
    pub async fn bind(path: &Path, group: Option<&str>) -> anyhow::Result<Server> {
        let (listener, file) = SocketFile::listen(path, group).await?;
        Ok(Server { listener, file })
    }

    /// The socket, to be used on another thread, and its file.
    pub(super) fn into_parts(self) -> io::Result<(StdListener, SocketFile)> {
        Ok((self.listener.into_std()?, self.file))
    }

    pub(super) const fn from_parts(listener: UnixListener, file: SocketFile) -> Server {
        Server { listener, file }
    }

    /// Answers, until `stop` is ready: `status` with what was last published, all else by asking the controller.
    ///
    /// # Errors
    ///
    /// When the socket fails.
    pub async fn serve(
        self,
        published: watch::Receiver<Published>,
        ask: Ask,
        stop: impl Future<Output = ()>,
    ) -> anyhow::Result<()> {
        let Server { listener, file: _file } = self;
        let description = Bytes::from(openapi().to_string());
        let describe = move || async move { ([(CONTENT_TYPE, "application/json")], description) };
        let router = Router::new().route(STATUS_PATH, get(answer_status)).route(OPENAPI_PATH, get(describe));
        let router =
            verbs(router).layer(DefaultBodyLimit::max(LARGEST_REQUEST)).with_state(Daemon { published, ask });
        tokio::pin!(stop);
        let mut clients = Clients::default();
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => clients.serve(stream, router.clone()),
                    Err(error) => {
                        tracing::warn!("accept a client of the control socket: {error}");
                        // As when there are too many open files: it may pass, and not at once.
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
                Some(_) = clients.tasks.join_next() => {}
                () = &mut stop => return Ok(()),
            }
        }
    }
}

/// Who is connected: `MOST_CLIENTS` at most.
#[derive(Default)]
struct Clients {
    tasks: JoinSet<()>,
    /// In the order in which they came.
    order: VecDeque<AbortHandle>,
}

impl Clients {
    /// Serves another one, until it has gone. When there are too many, the one that has been there longest gives way: so those
    /// that connect and stay keep nobody out.
    fn serve(&mut self, stream: UnixStream, router: Router) {
        self.order.retain(|client| !client.is_finished());
        if self.order.len() >= MOST_CLIENTS
            && let Some(oldest) = self.order.pop_front()
        {
            oldest.abort();
        }
        self.order.push_back(self.tasks.spawn(async move {
            let service = TowerToHyperService::new(router);
            // What goes wrong with a client is the client's business.
            drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
        }));
    }
}

impl EachVerb for Router<Daemon> {
    fn verb<V: Verb>(self) -> Self {
        self.route(V::PATH, post(answer::<V>))
    }
}

async fn answer_status(State(daemon): State<Daemon>) -> Json<Status> {
    // The lock is held for the copy of a pointer only.
    let Published { status, selected } = daemon.published.borrow().clone();
    let age = Monotonic::now().since(selected).as_millis();
    let selection_age_ms = u64::try_from(age).unwrap_or(u64::MAX);
    Json(Status { selection_age_ms, ..Status::clone(&status) })
}

async fn answer<V: Verb>(
    State(daemon): State<Daemon>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<V::Answer>, Refusal> {
    let body = body.map_err(|error| unread(&error))?;
    daemon.ask.ask(read::<V>(&body)?).await.map(Json)
}

/// Why a body could not be read whole.
fn unread(error: &BytesRejection) -> Refusal {
    if error.status() == StatusCode::PAYLOAD_TOO_LARGE {
        return Refusal::TooLarge(LARGEST_REQUEST);
    }
    Refusal::Wrong("the request ends before its body does, or is no HTTP".to_owned())
}

/// The request in a body; an empty one asks for all defaults.
fn read<V: Verb>(body: &[u8]) -> Result<V, Refusal> {
    let body = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(body).map_err(|error| Refusal::Wrong(format!("understand the request: {error}")))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{ErrorKind::WouldBlock, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream as StdStream;
    use std::path::PathBuf;

    use tempfile::TempDir;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::{mpsc, oneshot};

    use super::super::client::{self, WrongCall};
    use super::super::flows::{CountFlows, FlowCount, FlowFilter, KillFlows};
    use super::super::model::tests::example;
    use super::super::verb::{Command, commands};
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn directory() -> TempDir {
        tempfile::tempdir().expect("a directory")
    }

    /// As if the last tick had been a while ago.
    fn publication(status: Status) -> Published {
        let selected = Monotonic::now().since_boot() - Duration::from_millis(1234);
        Published { status: Arc::new(status), selected: Monotonic::from_boot(selected) }
    }

    /// A server in a new directory, and what arrives at the controller.
    struct Running {
        _directory: TempDir,
        socket: PathBuf,
        received: mpsc::Receiver<Command>,
        _publish: watch::Sender<Published>,
    }

    impl Running {
        async fn start(limit: Duration) -> Running {
            let directory = directory();
            let socket = directory.path().join("b.sock");
            let server = Server::bind(&socket, None).await.expect("bound");
            let (publish, published) = watch::channel(publication(Status::default()));
            let (ask, received) = commands(limit);
            tokio::spawn(server.serve(published, ask, std::future::pending()));
            Running { _directory: directory, socket, received, _publish: publish }
        }

        /// Posts what no client of ours would send; the status line and the body of the answer.
        async fn post(&self, path: &str, body: &str) -> (String, String) {
            let mut stream = tokio::net::UnixStream::connect(&self.socket).await.expect("connected");
            let length = body.len();
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
            );
            stream.write_all((head + body).as_bytes()).await.expect("sent");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.expect("an answer");
            let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
            (head.lines().next().expect("a status").to_owned(), body.to_owned())
        }
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("it is there").permissions().mode() & 0o7777
    }

    #[tokio::test]
    async fn answers_with_what_was_last_published_and_leaves_nothing_behind() {
        let directory = directory();
        let socket = directory.path().join("made/on/demand/b.sock");
        let (publish, published) = watch::channel(publication(Status::default()));
        let (ask, _commands) = commands(LIMIT);
        let (stop, stopped) = oneshot::channel::<()>();
        let server = Server::bind(&socket, None).await.expect("bound");
        assert_eq!(mode(&socket), 0o600);
        assert_eq!(mode(socket.parent().expect("a parent")) & 0o022, 0);
        let serving = tokio::spawn(server.serve(published, ask, async { drop(stopped.await) }));

        // A client that asks and never reads delays nobody.
        let mut slow = StdStream::connect(&socket).expect("connected");
        write!(slow, "GET {STATUS_PATH} HTTP/1.1\r\nhost: x\r\n\r\n").expect("sent");

        for status in [Status::default(), example()] {
            publish.send_replace(publication(status.clone()));
            let body = client::get(&socket, STATUS_PATH, LIMIT).await.expect("an answer");
            let answer: Status = serde_json::from_str(&body).expect("a status");
            let age = answer.selection_age_ms;
            assert!((1234..11_234).contains(&age), "an age that grows until it is asked for: {age}");
            let expected = Status { selection_age_ms: answer.selection_age_ms, ..status };
            assert_eq!(body, serde_json::to_string(&expected).expect("a document"));
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
        let first = Server::bind(&socket, None).await.expect("nobody answers on it");

        let error = Server::bind(&socket, None).await.err().expect("the first one answers").to_string();
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
        let error = Server::bind(&socket, None).await.err().expect("a file is there").to_string();
        assert!(error.contains("is not a socket"), "{error}");
        assert_eq!(fs::read_to_string(&socket).expect("still there"), "precious");
    }

    #[tokio::test]
    async fn does_not_remove_the_socket_of_a_successor() {
        let directory = directory();
        let socket = directory.path().join("b.sock");
        let server = Server::bind(&socket, None).await.expect("bound");
        fs::rename(&socket, directory.path().join("old")).expect("renamed");
        let _successor = Server::bind(&socket, None).await.expect("bound");
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

    #[tokio::test]
    async fn a_verb_is_carried_to_the_controller_and_its_answer_back() {
        let mut running = Running::start(LIMIT).await;
        let filter = FlowFilter { service: Some("web".to_owned()), ..FlowFilter::default() };
        let verb = CountFlows { filter };
        let controller = async {
            let Some(Command::CountFlows(verb, reply)) = running.received.recv().await else {
                panic!("another command")
            };
            assert!(!reply.is_abandoned());
            reply.send(Ok(FlowCount { flows: 7, established: 7, ..FlowCount::default() }));
            let Some(Command::CountFlows(_, reply)) = running.received.recv().await else {
                panic!("another command")
            };
            let known = vec!["web".to_owned(), "dns".to_owned()];
            reply.send(Err(Refusal::Unknown { what: "service", name: "wep".to_owned(), known }));
            verb
        };
        let client = async {
            let count = client::ask(&running.socket, &verb, LIMIT).await.expect("an answer");
            assert_eq!(count, FlowCount { flows: 7, established: 7, ..FlowCount::default() });
            client::ask(&running.socket, &verb, LIMIT).await.expect_err("a refusal")
        };
        let (received, error) = tokio::join!(controller, client);
        assert_eq!(received, verb);
        assert_eq!(error.to_string(), "there is no service \"wep\"; there are: web, dns");
        assert!(error.is::<WrongCall>());
    }

    #[tokio::test]
    async fn a_request_that_is_wrong_does_not_reach_the_controller() {
        let mut running = Running::start(LIMIT).await;
        for (path, body, status, expected) in [
            ("/v1/flows/kill", "{", "422 Unprocessable Entity", "EOF while parsing"),
            (
                "/v1/flows/kill",
                r#"{"servcie": "web"}"#,
                "422 Unprocessable Entity",
                "unknown field `servcie`",
            ),
            ("/v1/flows/list", r#"{"filter": {"client": "web"}}"#, "422 Unprocessable Entity", "no network"),
            ("/v1/flows/list", r#"{"limit": -1}"#, "422 Unprocessable Entity", "invalid value: integer `-1`"),
            ("/v1/status", "{}", "405 Method Not Allowed", ""),
            ("/v1/flows", "{}", "404 Not Found", ""),
        ] {
            let (line, answer) = running.post(path, body).await;
            assert_eq!(line, format!("HTTP/1.1 {status}"), "{path} {body}");
            assert!(answer.contains(expected), "{answer}");
        }
        let (line, answer) = running.post("/v1/flows/kill", &" ".repeat(LARGEST_REQUEST + 1)).await;
        assert_eq!(line, "HTTP/1.1 413 Payload Too Large");
        assert_eq!(answer, r#"{"error":"the request is larger than 65536 bytes"}"#);
        for broken in ["content-length: 9\r\n\r\n{}", "transfer-encoding: chunked\r\n\r\nx\r\n{}"] {
            let mut stream = tokio::net::UnixStream::connect(&running.socket).await.expect("connected");
            let head = "POST /v1/flows/kill HTTP/1.1\r\nhost: x\r\nconnection: close\r\n";
            stream.write_all(format!("{head}{broken}").as_bytes()).await.expect("sent");
            stream.shutdown().await.expect("no more");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.expect("an answer");
            assert!(
                answer.starts_with("HTTP/1.1 422 ") && answer.contains("before its body does"),
                "{answer}"
            );
        }
        assert!(running.received.try_recv().is_err());
    }

    #[tokio::test]
    async fn of_too_many_clients_the_oldest_gives_way() {
        let running = Running::start(LIMIT).await;
        let mut clients = Vec::new();
        for _ in 0..MOST_CLIENTS + 3 {
            clients.push(tokio::net::UnixStream::connect(&running.socket).await.expect("connected"));
        }
        // Whoever comes last is served, and is one more.
        client::get(&running.socket, STATUS_PATH, LIMIT).await.expect("an answer");
        for (number, client) in clients.iter_mut().enumerate() {
            let mut byte = [0; 1];
            if number < 4 {
                assert_eq!(client.read(&mut byte).await.expect("the end"), 0, "{number}");
            } else {
                assert!(
                    client.try_read(&mut byte).is_err_and(|error| error.kind() == WouldBlock),
                    "{number}"
                );
            }
        }
    }

    #[tokio::test]
    async fn a_controller_that_is_busy_is_said_to_be() {
        let mut running = Running::start(Duration::from_millis(50)).await;
        let verb = KillFlows { all: true, ..KillFlows::default() };
        let late = "the controller gave no answer within 50ms: try again; what was to be changed may have been changed";
        let mut refusals = Vec::new();
        for _ in 0..17 {
            let error = client::ask(&running.socket, &verb, LIMIT).await.expect_err("nobody answers");
            assert!(!error.is::<WrongCall>());
            refusals.push(error.to_string());
        }
        let full = "16 other requests are waiting to be answered: try again in a moment";
        assert_eq!(refusals[..16], vec![late; 16]);
        assert_eq!(refusals[16], full);
        let (line, _) = running.post("/v1/flows/kill", "").await;
        assert_eq!(line, "HTTP/1.1 503 Service Unavailable");
        // Whoever asked has gone: nothing is killed any more.
        for _ in 0..16 {
            match running.received.recv().await {
                Some(Command::KillFlows(_, reply)) => assert!(reply.is_abandoned()),
                other => panic!("{other:?}"),
            }
        }
        assert!(running.received.try_recv().is_err());
        running.received.close();
        let error = client::ask(&running.socket, &verb, LIMIT).await.expect_err("nobody answers");
        assert_eq!(error.to_string(), "the balancer is about to stop");
    }
}
