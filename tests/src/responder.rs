//! A UDP service whose backends say who they are, and a client that counts what comes back.

use std::{
    collections::BTreeSet,
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};

use crate::{
    Topology,
    config::{BACKEND_PORT, Service, VIP_PORT},
    topology::{CLIENT, Family, VIP},
};

/// How long a server waits before it looks whether it is to end.
const WAIT: Duration = Duration::from_millis(20);
/// How long an answer may take.
const LIMIT: Duration = Duration::from_secs(2);
/// The time between two datagrams of a stream.
const PERIOD: Duration = Duration::from_millis(1);

/// The configuration of the service that the servers of a bench provide.
pub fn service(bench: &Topology) -> Service {
    Service::new("udp", "round-robin", &vec![1; bench.backends.len()])
}

/// A server in each backend's namespace that puts its number before each datagram and sends it back.
#[derive(Debug)]
pub struct Responders {
    stopped: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Responders {
    /// Starts one on each backend of the bench.
    pub fn start(bench: &Topology) -> Result<Self> {
        Self::start_of(Family::Ipv4, bench)
    }

    /// The same at the backends' addresses of a family.
    pub fn start_of(family: Family, bench: &Topology) -> Result<Self> {
        let stopped = Arc::new(AtomicBool::new(false));
        let mut responders = Self { stopped, threads: Vec::new() };
        for (number, netns) in (1..).zip(&bench.backends) {
            let address = SocketAddr::from((family.backend(number), BACKEND_PORT));
            let socket =
                netns.run(|| UdpSocket::bind(address).with_context(|| format!("bind to {address}")))?;
            socket.set_read_timeout(Some(WAIT)).context("limit a wait")?;
            let stopped = Arc::clone(&responders.stopped);
            responders.threads.push(thread::spawn(move || {
                let mut datagram = vec![0; 1 << 16];
                while !stopped.load(Relaxed) {
                    let Some(room) = datagram.get_mut(1..) else { return };
                    let Ok((length, client)) = socket.recv_from(room) else { continue };
                    datagram[0] = number;
                    // A client that is gone is none of the server's business.
                    drop(socket.send_to(datagram.get(..=length).unwrap_or_default(), client));
                }
            }));
        }
        Ok(responders)
    }
}

impl Drop for Responders {
    fn drop(&mut self) {
        self.stopped.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            // A server that panicked has shown as a missing answer.
            drop(thread.join());
        }
    }
}

/// A socket of the client, connected to the service: one flow.
pub fn connect(bench: &Topology) -> Result<UdpSocket> {
    let socket = bench
        .client
        .run(|| UdpSocket::bind(SocketAddr::from((CLIENT, 0))).context("bind a client's socket"))?;
    socket.connect((VIP, VIP_PORT)).context("connect a client's socket")?;
    socket.set_read_timeout(Some(WAIT)).context("limit a wait")?;
    Ok(socket)
}

/// Sends one datagram on a flow; returns the number of the backend that answered.
pub fn ask(flow: &UdpSocket) -> Result<u8> {
    ask_with(flow, b"who are you?")
}

/// The same with a payload of one's own.
pub fn ask_with(flow: &UdpSocket, payload: &[u8]) -> Result<u8> {
    ask_within(flow, payload, LIMIT)
}

/// The same, where the answer may take so long.
pub fn ask_within(flow: &UdpSocket, payload: &[u8], limit: Duration) -> Result<u8> {
    flow.send(payload).context("send a datagram")?;
    let mut answer = vec![0; payload.len() + 2];
    let end = Instant::now() + limit;
    while Instant::now() < end {
        if let Ok(length) = flow.recv(&mut answer) {
            let (number, rest) =
                answer.get(..length).and_then(<[u8]>::split_first).context("an empty answer")?;
            ensure!(rest == payload, "the answer is not what was sent");
            return Ok(*number);
        }
    }
    bail!("no answer within {} ms", limit.as_millis())
}

/// One flow with a datagram every millisecond, from its start until it is asked for its result.
#[derive(Debug)]
pub struct Stream {
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Received>>>,
}

/// What a stream sent and what came back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// How many datagrams were sent.
    pub sent: u64,
    /// Which of them were not answered, by their numbers from 0.
    pub lost: Vec<u64>,
    /// How many each backend answered, in the order in which they first did.
    pub by: Vec<(u8, u64)>,
}

impl Stream {
    /// Starts a new flow, and waits until it is answered.
    pub fn start(bench: &Topology) -> Result<Self> {
        let flow = connect(bench)?;
        ask_with(&flow, &u64::MAX.to_be_bytes())?;
        let stopped = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let stopped = Arc::clone(&stopped);
            move || stream(&flow, &stopped)
        });
        Ok(Self { stopped, thread: Some(thread) })
    }

    /// Ends it, and waits for the last answers.
    pub fn finish(mut self) -> Result<Received> {
        self.stopped.store(true, Relaxed);
        let thread = self.thread.take().context("find the stream's thread")?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.stopped.store(true, Relaxed);
    }
}

fn stream(flow: &UdpSocket, stopped: &AtomicBool) -> Result<Received> {
    let mut received = Received::default();
    let mut open = BTreeSet::new();
    let started = Instant::now();
    flow.set_nonblocking(true).context("prepare a stream")?;
    let mut ended = None;
    loop {
        let now = Instant::now();
        if ended.is_none() && stopped.load(Relaxed) {
            ended = Some(now);
        }
        match ended {
            None if now >= started + PERIOD * u32::try_from(received.sent).context("count datagrams")? => {
                flow.send(&received.sent.to_be_bytes()).context("send a datagram")?;
                open.insert(received.sent);
                received.sent += 1;
            }
            Some(ended) if open.is_empty() || now > ended + LIMIT => {
                received.lost = open.into_iter().collect();
                return Ok(received);
            }
            _ => {}
        }
        let mut answer = [0; 16];
        match flow.recv(&mut answer) {
            Ok(9) => {
                let (number, sequence) =
                    (answer[0], answer.get(1..9).and_then(|bytes| bytes.try_into().ok()));
                if !open.remove(&sequence.map_or(0, u64::from_be_bytes)) {
                    bail!("a datagram was answered twice");
                }
                match received.by.iter_mut().find(|(by, _)| *by == number) {
                    Some((_, count)) => *count += 1,
                    None => received.by.push((number, 1)),
                }
            }
            Ok(length) => bail!("an answer of {length} bytes"),
            Err(_) => thread::sleep(PERIOD / 4),
        }
    }
}
