//! The load: connections and conversations of very unequal lengths, each chunk of which has its place in its bytes.

use std::{
    io,
    net::{SocketAddr, TcpListener, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use balancer_tests::{
    Topology,
    topology::{CLIENT, VIP, backend_address},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::{Notify, Semaphore},
    time::{interval, sleep, timeout},
};

use crate::{
    model::SERVICES,
    record::{Lost, Record, Silence},
};

/// A new flow of each service every so often.
const FLOW_EVERY: Duration = Duration::from_millis(50);
/// How many flows there are at a time; beyond that none is begun.
const AT_ONCE: usize = 1024;
/// How long anything may take: a segment that was lost into a cut is sent again by then, several times.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long an answer may take before the datagram is sent again.
const ANSWER: Duration = Duration::from_secs(1);
/// Largest chunk of a connection, in bytes.
const CHUNK: usize = 20_000;

/// The backends' servers, on a thread of their own: each says its number first, and then sends back what it gets.
pub struct Servers {
    stop: Arc<Notify>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Servers {
    /// Starts one for each service on each backend.
    pub fn start(bench: &Topology) -> Result<Servers> {
        let mut listeners = Vec::new();
        let mut sockets = Vec::new();
        for (number, netns) in (1..).zip(&bench.backends) {
            for service in &SERVICES {
                let address = SocketAddr::from((backend_address(number), service.backend_port));
                netns.run(|| {
                    if service.protocol == "tcp" {
                        let listener = TcpListener::bind(address).context("listen")?;
                        listener.set_nonblocking(true).context("prepare a listener")?;
                        listeners.push((number, listener));
                    } else {
                        let socket = UdpSocket::bind(address).context("bind a socket")?;
                        socket.set_nonblocking(true).context("prepare a socket")?;
                        sockets.push((number, socket));
                    }
                    Ok(())
                })?;
            }
        }
        let stop = Arc::new(Notify::new());
        let stopped = Arc::clone(&stop);
        let runtime = runtime()?;
        let thread = thread::spawn(move || {
            runtime.block_on(async {
                for (number, listener) in listeners {
                    tokio::spawn(serve_tcp(number, listener));
                }
                for (number, socket) in sockets {
                    tokio::spawn(serve_udp(number, socket));
                }
                stopped.notified().await;
            });
        });
        Ok(Servers { stop, thread: Some(thread) })
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.stop.notify_one();
        // A server that panicked has shown as a lost flow.
        drop(self.thread.take().map(thread::JoinHandle::join));
    }
}

async fn serve_tcp(number: u8, listener: TcpListener) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        tokio::spawn(echo(number, stream));
    }
}

async fn echo(number: u8, mut stream: TcpStream) -> io::Result<()> {
    stream.write_all(&[number]).await?;
    let mut bytes = vec![0; CHUNK];
    loop {
        match stream.read(&mut bytes).await? {
            0 => return Ok(()),
            length => stream.write_all(bytes.get(..length).unwrap_or_default()).await?,
        }
    }
}

async fn serve_udp(number: u8, socket: UdpSocket) -> io::Result<()> {
    let socket = tokio::net::UdpSocket::from_std(socket)?;
    let mut datagram = vec![0; 2048];
    loop {
        let Ok((length, client)) = socket.recv_from(datagram.get_mut(1..).unwrap_or_default()).await else {
            continue;
        };
        if let Some(first) = datagram.first_mut() {
            *first = number;
        }
        // A client that is gone is none of the server's business.
        drop(socket.send_to(datagram.get(..=length).unwrap_or_default(), client).await);
    }
}

/// The clients.
pub struct Load {
    record: Arc<Record>,
    seed: u64,
    stopped: AtomicBool,
}

/// Why a flow did not come to its end.
enum Trouble {
    Lost(String),
    Wrong(String),
}

impl Load {
    /// Clients that do the same for the same seed.
    pub fn new(record: Arc<Record>, seed: u64) -> Load {
        Load { record, seed, stopped: AtomicBool::new(false) }
    }

    /// Begins nothing more; what was begun comes to its end soon.
    pub fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }

    /// Sends load, from the namespace of the calling thread, until it is stopped; waits for the last answers.
    pub fn drive(self: &Arc<Load>) -> Result<()> {
        runtime()?.block_on(async {
            let under_way = Arc::new(Semaphore::new(AT_ONCE));
            let mut every = interval(FLOW_EVERY);
            let mut number = 0;
            while !self.stopped.load(Relaxed) {
                every.tick().await;
                for (service, of) in SERVICES.iter().enumerate() {
                    let Ok(permit) = Arc::clone(&under_way).try_acquire_owned() else { continue };
                    let load = Arc::clone(self);
                    number += 1;
                    let random = fastrand::Rng::with_seed(self.seed.wrapping_add(number));
                    self.record.begin(service);
                    tokio::spawn(async move {
                        if of.protocol == "tcp" {
                            load.connection(service, random).await;
                        } else {
                            load.conversation(service, random).await;
                        }
                        drop(permit);
                    });
                }
            }
            let all = u32::try_from(AT_ONCE).context("count what is under way")?;
            match timeout(PATIENCE * 2, under_way.acquire_many(all)).await {
                Ok(_) => Ok(()),
                Err(_) => bail!("flows go on {} s after the end of the load", PATIENCE.as_secs() * 2),
            }
        })
    }

    /// Whether a flow is over that was to live until `end`.
    fn is_over(&self, end: Instant) -> bool {
        Instant::now() >= end || self.stopped.load(Relaxed)
    }

    async fn connection(&self, service: usize, mut random: fastrand::Rng) {
        let opened = Instant::now();
        let mut backend = None;
        match self.exchange(service, &mut backend, &mut random).await {
            Ok(()) => self.record.done(),
            Err(Trouble::Wrong(what)) => self.record.wrong(what),
            Err(Trouble::Lost(why)) => {
                self.record.lost(Lost { service, backend, opened, noticed: Instant::now(), why });
            }
        }
    }

    async fn exchange(
        &self,
        service: usize,
        backend: &mut Option<u8>,
        random: &mut fastrand::Rng,
    ) -> Result<(), Trouble> {
        let end = Instant::now() + lifetime(random);
        let mut stream = patient("the connection", TcpStream::connect((VIP, SERVICES[service].port))).await?;
        *backend = Some(patient("the greeting", stream.read_u8()).await?);
        let mut place = random.usize(..1 << 30);
        while !self.is_over(end) {
            let sent = pattern(place, random.usize(1..=CHUNK));
            let mut received = vec![0; sent.len()];
            let (mut reader, mut writer) = stream.split();
            let both = async { tokio::try_join!(writer.write_all(&sent), reader.read_exact(&mut received)) };
            patient("an answer", both).await?;
            if received != sent {
                let differing = sent.iter().zip(&received).position(|(sent, received)| sent != received);
                let name = SERVICES[service].name;
                return Err(Trouble::Wrong(format!(
                    "a connection of {name} got other bytes than it sent, from {differing:?} of {} on",
                    sent.len()
                )));
            }
            self.record.right(received.len());
            place += sent.len();
            sleep(Duration::from_millis(random.u64(..500))).await;
        }
        if random.u8(..4) == 0 {
            // Ended by a RST: whoever has it half-way is none the wiser.
            let _ = stream.set_zero_linger();
            return Ok(());
        }
        patient("the end", stream.shutdown()).await?;
        let mut rest = Vec::new();
        patient("the other's end", stream.read_to_end(&mut rest)).await?;
        if !rest.is_empty() {
            return Err(Trouble::Wrong(format!("{} bytes came back that nobody sent", rest.len())));
        }
        Ok(())
    }

    async fn conversation(&self, service: usize, mut random: fastrand::Rng) {
        let name = SERVICES[service].name;
        match self.converse(service, &mut random).await {
            Ok(()) => self.record.done(),
            Err(Trouble::Wrong(what)) => self.record.wrong(what),
            Err(Trouble::Lost(why)) => self.record.wrong(format!("a conversation of {name} ended: {why}")),
        }
    }

    async fn converse(&self, service: usize, random: &mut fastrand::Rng) -> Result<(), Trouble> {
        let end = Instant::now() + lifetime(random);
        let socket = patient("a socket", tokio::net::UdpSocket::bind((CLIENT, 0))).await?;
        patient("a peer", socket.connect((VIP, SERVICES[service].port))).await?;
        let mut backend = None;
        let mut sequence: u64 = 0;
        let mut received = vec![0; 2048];
        while !self.is_over(end) {
            sequence += 1;
            let rest = pattern(sequence as usize, random.usize(..1_200));
            let sent = Instant::now();
            let mut attempt: u64 = 0;
            let (number, answered) = loop {
                attempt += 1;
                if sent.elapsed() > PATIENCE {
                    let at = self.record.at(sent);
                    return Err(Trouble::Lost(format!("no answer from {at} on, by {backend:?} before")));
                }
                let datagram = [&sequence.to_be_bytes(), &attempt.to_be_bytes(), &rest[..]].concat();
                // What was said of a datagram before this one is no news.
                if socket.send(&datagram).await.is_err() {
                    sleep(ANSWER).await;
                    continue;
                }
                let answer = self.answer(&socket, &mut received, sequence, &rest);
                match timeout(ANSWER, answer).await {
                    Ok(answer) => break answer?,
                    Err(_) => continue,
                }
            };
            if answered > 1 {
                let backends = [backend, Some(number)];
                self.record.silence(Silence { service, backends, sent, noticed: Instant::now() });
            }
            backend = Some(number);
            self.record.answered();
            sleep(Duration::from_millis(random.u64(..100))).await;
        }
        Ok(())
    }

    /// The answer to the datagram with this number: who gave it, and to which attempt.
    async fn answer(
        &self,
        socket: &tokio::net::UdpSocket,
        received: &mut [u8],
        sequence: u64,
        rest: &[u8],
    ) -> Result<(u8, u64), Trouble> {
        loop {
            let Ok(length) = socket.recv(received).await else {
                // As when a backend's port was said to be unreachable.
                sleep(ANSWER / 100).await;
                continue;
            };
            let number = |from: usize| {
                let bytes = received.get(from..from + 8).and_then(|bytes| bytes.try_into().ok());
                bytes.map_or(0, u64::from_be_bytes)
            };
            let (of, attempt) = (number(1), number(9));
            // One that was sent again is answered twice.
            if of < sequence && length >= 17 {
                continue;
            }
            if of != sequence || received.get(17..length) != Some(rest) {
                return Err(Trouble::Wrong(format!("an answer of {length} bytes to datagram {of}")));
            }
            return Ok((received.first().copied().unwrap_or_default(), attempt));
        }
    }
}

/// What `work` results in, unless it fails or takes too long; then `what` is missing.
async fn patient<T>(what: &str, work: impl Future<Output = io::Result<T>>) -> Result<T, Trouble> {
    match timeout(PATIENCE, work).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(Trouble::Lost(format!("wait for {what}: {error}"))),
        Err(_) => Err(Trouble::Lost(format!("{what} did not come within {} s", PATIENCE.as_secs()))),
    }
}

/// How long a flow is to live: mostly short, sometimes long.
fn lifetime(random: &mut fastrand::Rng) -> Duration {
    let scale = [10, 10, 100, 100, 1_000, 1_000, 3_000, 15_000][random.usize(..8)];
    Duration::from_millis(random.u64(..scale))
}

/// Bytes that differ with their place: what is swapped, repeated or left out shows.
fn pattern(place: usize, length: usize) -> Vec<u8> {
    (place..place + length).map(|place| (place.wrapping_mul(2_654_435_761) >> 9) as u8).collect()
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")
}
