//! The demonstration's load: HTTP over TCP with answers of very unequal sizes, and UDP conversations of very unequal
//! lengths. Both are bounded in rate, in number and in time, and every byte that comes back is compared.

use std::{
    net::{SocketAddr, TcpListener, UdpSocket},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use axum::{Router, body::Bytes, extract::Path, routing::get};
use balancer_tests::{
    Topology,
    topology::{CLIENT, VIP, backend_address},
};
use http_body_util::{BodyExt as _, Empty};
use hyper::{Request, header};
use hyper_util::rt::TokioIo;
use tokio::{
    sync::{Notify, Semaphore},
    time::{Instant, interval, timeout},
};

/// A service of the demonstration.
pub struct Service {
    /// Its name in the configuration.
    pub name: &'static str,
    /// Its protocol in the configuration.
    pub protocol: &'static str,
    /// The port that clients talk to.
    pub port: u16,
    /// The port that the backends listen on.
    pub backend_port: u16,
}

/// HTTP.
pub const HTTP: Service = Service { name: "http", protocol: "tcp", port: 80, backend_port: 8080 };
/// UDP echo.
pub const ECHO: Service = Service { name: "echo", protocol: "udp", port: 7000, backend_port: 7000 };

/// The sizes of HTTP answers: mostly small, sometimes 400 times that.
const SIZES: [usize; 8] = [500, 500, 2_000, 2_000, 2_000, 10_000, 50_000, 200_000];
/// The numbers of datagrams in a UDP conversation.
const LENGTHS: [u32; 8] = [1, 1, 1, 2, 2, 5, 20, 50];
/// The sizes of those datagrams.
const DATAGRAMS: [usize; 3] = [64, 512, 1_200];
/// A new HTTP request every so often.
const REQUEST_EVERY: Duration = Duration::from_millis(10);
/// A new UDP conversation every so often.
const CONVERSATION_EVERY: Duration = Duration::from_millis(20);
/// The pause between two datagrams of a conversation.
const DATAGRAM_EVERY: Duration = Duration::from_millis(20);
/// How many requests and conversations there are at a time; beyond that none is begun.
const AT_ONCE: usize = 512;
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// What happened so far.
#[derive(Default)]
struct Counts {
    requests: AtomicU64,
    requests_failed: AtomicU64,
    datagrams: AtomicU64,
    datagrams_lost: AtomicU64,
    wrong: AtomicU64,
}

/// The load and its outcome.
pub struct Load {
    counts: Counts,
    /// What each backend served, per service: counted by the backends themselves.
    served: [Vec<AtomicU64>; 2],
    first_failure: OnceLock<String>,
    stopped: AtomicBool,
    interrupted: AtomicBool,
    ended: Notify,
}

/// The backends' servers, on a thread of their own.
pub struct Servers {
    stop: Arc<Notify>,
    thread: thread::JoinHandle<()>,
}

impl Servers {
    /// Ends them.
    pub fn stop(self) {
        self.stop.notify_one();
        // A server that panicked has shown as a failed request.
        drop(self.thread.join());
    }
}

impl Load {
    /// A load for so many backends.
    pub fn new(backends: usize) -> Self {
        let zeros = || (0..backends).map(|_| AtomicU64::new(0)).collect();
        Self {
            counts: Counts::default(),
            served: [zeros(), zeros()],
            first_failure: OnceLock::new(),
            stopped: AtomicBool::new(false),
            interrupted: AtomicBool::new(false),
            ended: Notify::new(),
        }
    }

    /// Starts both servers in each backend's namespace.
    pub fn serve(self: &Arc<Self>, bench: &Topology) -> Result<Servers> {
        let mut listeners = Vec::new();
        for (number, netns) in (1..).zip(&bench.backends) {
            let address = backend_address(number);
            listeners.push(netns.run(|| {
                let http = TcpListener::bind((address, HTTP.backend_port)).context("listen for HTTP")?;
                let echo = UdpSocket::bind((address, ECHO.backend_port)).context("listen for UDP")?;
                http.set_nonblocking(true).context("prepare the HTTP socket")?;
                echo.set_nonblocking(true).context("prepare the UDP socket")?;
                Ok((http, echo))
            })?);
        }
        let stop = Arc::new(Notify::new());
        let (load, stopped) = (Arc::clone(self), Arc::clone(&stop));
        let runtime = runtime()?;
        let thread = thread::spawn(move || {
            runtime.block_on(async {
                for (backend, (http, echo)) in listeners.into_iter().enumerate() {
                    tokio::spawn(serve_http(http, Arc::clone(&load), backend));
                    tokio::spawn(serve_echo(echo, Arc::clone(&load), backend));
                }
                stopped.notified().await;
            });
        });
        Ok(Servers { stop, thread })
    }

    /// Sends the load for `duration`, from the namespace of the calling thread, and waits for the last answers.
    pub fn drive(self: &Arc<Self>, duration: Duration) -> Result<()> {
        let driven = runtime()?.block_on(async {
            let http = begin(self, duration, REQUEST_EVERY, |load, number| async move {
                load.request(pick(&SIZES, number)).await;
            });
            let echo = begin(self, duration, CONVERSATION_EVERY, |load, number| async move {
                load.converse(pick(&LENGTHS, number), pick(&DATAGRAMS, number + 1)).await;
            });
            let (http, echo) = tokio::join!(http, echo);
            http.and(echo)
        });
        self.ended.notify_one();
        driven
    }

    /// Begins nothing more.
    pub fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }

    /// Remembers that the user wants to end it.
    pub fn interrupt(&self) {
        self.interrupted.store(true, Relaxed);
        self.stop();
    }

    /// Whether the user ended it.
    pub fn is_interrupted(&self) -> bool {
        self.interrupted.load(Relaxed)
    }

    /// Completes when the last answer has come.
    pub async fn ended(&self) {
        self.ended.notified().await;
    }

    /// The flows that each backend has served, per service.
    pub fn flows(&self) -> [Vec<u64>; 2] {
        self.served.each_ref().map(|backends| backends.iter().map(|count| count.load(Relaxed)).collect())
    }

    /// What the clients saw, in a line.
    pub fn progress(&self) -> String {
        let counts = &self.counts;
        format!(
            "{} HTTP answers right, {} failed; {} UDP echoes right, {} lost; {} answers wrong",
            counts.requests.load(Relaxed),
            counts.requests_failed.load(Relaxed),
            counts.datagrams.load(Relaxed),
            counts.datagrams_lost.load(Relaxed),
            counts.wrong.load(Relaxed)
        )
    }

    /// An error unless there were answers, all of them right.
    pub fn verdict(&self) -> Result<()> {
        let counts = &self.counts;
        ensure!(counts.wrong.load(Relaxed) == 0, "a client received wrong bytes");
        if let Some(why) = self.first_failure.get() {
            bail!("HTTP requests failed, the first one: {why}");
        }
        ensure!(counts.requests.load(Relaxed) > 0, "no HTTP request was answered");
        ensure!(counts.datagrams.load(Relaxed) > 0, "no UDP datagram was answered");
        Ok(())
    }

    async fn request(&self, size: usize) {
        match timeout(PATIENCE, fetch(size)).await {
            Ok(Ok(answer)) if answer == pattern(size) => self.counts.requests.fetch_add(1, Relaxed),
            Ok(Ok(_)) => self.counts.wrong.fetch_add(1, Relaxed),
            Ok(Err(error)) => self.failed(format!("{error:#}")),
            Err(_) => self.failed(format!("no answer within {} s", PATIENCE.as_secs())),
        };
    }

    /// Counts a failed request; the first is remembered.
    fn failed(&self, why: String) -> u64 {
        self.first_failure.get_or_init(|| why);
        self.counts.requests_failed.fetch_add(1, Relaxed)
    }

    /// A UDP conversation; a lost datagram ends it.
    async fn converse(&self, datagrams: u32, size: usize) {
        let sent = pattern(size);
        let mut received = vec![0; size + 1];
        let Ok(socket) = echo_client().await else {
            self.counts.datagrams_lost.fetch_add(1, Relaxed);
            return;
        };
        for _ in 0..datagrams {
            let answer = async {
                socket.send(&sent).await?;
                socket.recv(&mut received).await
            };
            let Ok(Ok(length)) = timeout(PATIENCE, answer).await else {
                self.counts.datagrams_lost.fetch_add(1, Relaxed);
                return;
            };
            let right = received.get(..length) == Some(&*sent);
            let count = if right { &self.counts.datagrams } else { &self.counts.wrong };
            count.fetch_add(1, Relaxed);
            tokio::time::sleep(DATAGRAM_EVERY).await;
        }
    }

    fn count(&self, service: usize, backend: usize) {
        if let Some(count) = self.served.get(service).and_then(|backends| backends.get(backend)) {
            count.fetch_add(1, Relaxed);
        }
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")
}

/// Begins a piece of `work` in every `period`, then waits for all that are under way.
async fn begin<W: Future<Output = ()> + Send + 'static>(
    load: &Arc<Load>,
    duration: Duration,
    period: Duration,
    work: impl Fn(Arc<Load>, usize) -> W,
) -> Result<()> {
    let end = Instant::now() + duration;
    let mut ticks = interval(period);
    let under_way = Arc::new(Semaphore::new(AT_ONCE));
    let mut number = 0;
    while Instant::now() < end && !load.stopped.load(Relaxed) {
        ticks.tick().await;
        let Ok(permit) = Arc::clone(&under_way).try_acquire_owned() else { continue };
        let work = work(Arc::clone(load), number);
        number += 1;
        tokio::spawn(async move {
            work.await;
            drop(permit);
        });
    }
    if load.is_interrupted() {
        return Ok(());
    }
    let all = u32::try_from(AT_ONCE).context("count what is under way")?;
    match timeout(PATIENCE * 2, under_way.acquire_many(all)).await {
        Ok(_) => Ok(()),
        Err(_) => bail!("answers are missing {} s after the last request", PATIENCE.as_secs() * 2),
    }
}

async fn serve_http(listener: TcpListener, load: Arc<Load>, backend: usize) -> Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener).context("serve HTTP")?;
    let answer = move |Path(size): Path<usize>| async move {
        load.count(0, backend);
        pattern(size)
    };
    axum::serve(listener, Router::new().route("/{size}", get(answer))).await.context("serve HTTP")
}

async fn serve_echo(socket: UdpSocket, load: Arc<Load>, backend: usize) -> Result<()> {
    let socket = tokio::net::UdpSocket::from_std(socket).context("serve UDP")?;
    let mut clients = std::collections::HashSet::new();
    let mut datagram = [0; 2048];
    loop {
        let (length, client) = socket.recv_from(&mut datagram).await.context("receive a datagram")?;
        if clients.insert(client) {
            load.count(1, backend);
        }
        socket
            .send_to(datagram.get(..length).unwrap_or_default(), client)
            .await
            .context("send a datagram")?;
    }
}

/// One request on a connection of its own, so that each is a flow.
async fn fetch(size: usize) -> Result<Bytes> {
    let stream = tokio::net::TcpStream::connect((VIP, HTTP.port)).await.context("connect")?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.context("begin HTTP")?;
    let connection = tokio::spawn(connection);
    let request = Request::get(format!("/{size}"))
        .header(header::HOST, "demo")
        .header(header::CONNECTION, "close")
        .body(Empty::<Bytes>::new())
        .context("write the request")?;
    let response = sender.send_request(request).await.context("send the request")?;
    let answer = response.into_body().collect().await.context("read the answer")?.to_bytes();
    connection.abort();
    Ok(answer)
}

async fn echo_client() -> Result<tokio::net::UdpSocket> {
    let socket = tokio::net::UdpSocket::bind((CLIENT, 0)).await.context("open a UDP socket")?;
    socket.connect(SocketAddr::from((VIP, ECHO.port))).await.context("choose the UDP peer")?;
    Ok(socket)
}

/// Bytes that differ with their place and with the size: a swapped, repeated or truncated segment shows.
fn pattern(size: usize) -> Bytes {
    let byte = |place: usize| (place.wrapping_mul(2_654_435_761) >> 7).wrapping_add(size) as u8;
    (0..size).map(byte).collect()
}

/// An item for the `number`th time, in an order that does not repeat in step with any number of backends.
fn pick<T: Copy>(items: &[T], number: usize) -> T {
    let scattered = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    items[scattered % items.len()]
}
