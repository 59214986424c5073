//! The client's loads.

use std::{
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use balancer_tests::{
    Netns, cpu, eventually, process,
    topology::{VIP, backend_address},
};

use super::subject::{PORTS, PORTS_BEHIND, Servers, Subject};

/// Connections at once.
const AT_ONCE: &str = "16";
/// How long anything may take beyond its load.
const LIMIT: Duration = Duration::from_secs(20);
/// Datagrams there and back.
const ROUND_TRIPS: usize = 2_000;
/// The kernel counts CPU time in hundredths of a second.
const TICK: f64 = 1e4;

/// Who asks.
pub struct Client<'a> {
    netns: &'a Netns,
}

/// What came of a load of web requests.
pub struct Load {
    /// Requests a second.
    pub rate: f64,
    /// Median, in milliseconds.
    pub latency: f64,
    /// CPU time of the machine for a request, in microseconds.
    pub time: f64,
}

impl<'a> Client<'a> {
    pub fn new(servers: &'a Servers) -> Client<'a> {
        Client { netns: &servers.bench.client }
    }

    /// Waits until all answers.
    pub fn wait(&self, subject: Subject) -> Result<()> {
        let [web, throughput, datagrams] = [0, 1, 2].map(|which| address(subject, which));
        self.netns.run(|| {
            for address in [web, throughput] {
                eventually(LIMIT, "a connection", || TcpStream::connect_timeout(&address, LIMIT).ok())?;
            }
            if subject.carries_datagrams() {
                eventually(LIMIT, "an answer", || exchange(datagrams, 1).ok())?;
            }
            Ok(())
        })
    }

    /// A request on each connection.
    pub fn connections(&self, subject: Subject, time: Duration) -> Result<Load> {
        self.load(subject, time, &["-H", "Connection: close"])
    }

    /// All requests on the same connections.
    pub fn requests(&self, subject: Subject, time: Duration) -> Result<Load> {
        self.load(subject, time, &[])
    }

    fn load(&self, subject: Subject, time: Duration, more: &[&str]) -> Result<Load> {
        let url = format!("http://{}/name", address(subject, 0));
        let seconds = format!("{}s", time.as_secs());
        let mut command = self.netns.command("wrk");
        command.args(["-t1", "-c", AT_ONCE, "-d", &seconds, "--latency"]).args(more).arg(&url);
        let before = cpu::times()?;
        let text = process::output(&mut command, time + LIMIT)?;
        let (_, busy) = cpu::times()?.since(&before);
        for complaint in ["Socket errors", "Non-2xx"] {
            ensure!(!text.contains(complaint), "requests failed:\n{text}");
        }
        let requests: f64 = word_before(&text, " requests in").context("read how many requests wrk made")?;
        let rate = text.lines().find_map(|line| line.strip_prefix("Requests/sec:"));
        let rate = rate.and_then(|rate| rate.trim().parse().ok()).context("read how many a second")?;
        let latency = text.lines().find_map(|line| line.trim().strip_prefix("50%"));
        let latency = latency.and_then(milliseconds).context("read the median latency")?;
        Ok(Load { rate, latency, time: busy as f64 * TICK / requests })
    }

    /// What one TCP connection carries to the first server, in Gbit/s.
    pub fn gigabits(&self, subject: Subject, time: Duration) -> Result<f64> {
        let address = address(subject, 1);
        let mut command = self.netns.command("iperf3");
        let (ip, port, seconds) =
            (address.ip().to_string(), address.port().to_string(), time.as_secs().to_string());
        command.args(["-c", &ip, "-p", &port, "-t", &seconds, "-J"]);
        let text = process::output(&mut command, time + LIMIT)?;
        let answer: serde_json::Value = serde_json::from_str(&text).context("read iperf3's answer")?;
        let bits = answer["end"]["sum_received"]["bits_per_second"].as_f64();
        Ok(bits.with_context(|| format!("iperf3 says nothing of what was received: {text}"))? / 1e9)
    }

    /// The median time that a datagram takes to the first server and back, in microseconds.
    pub fn round_trip(&self, subject: Subject) -> Result<f64> {
        let address = address(subject, 2);
        let mut times = self.netns.run(|| exchange(address, ROUND_TRIPS))?;
        times.sort_unstable();
        let median = times.get(times.len() / 2).context("no datagram came back")?;
        Ok(median.as_secs_f64() * 1e6)
    }
}

/// Where the client finds web servers (0), throughput (1) and datagrams (2).
fn address(subject: Subject, which: usize) -> SocketAddr {
    if subject == Subject::Direct {
        (IpAddr::from(backend_address(1)), PORTS_BEHIND[which]).into()
    } else {
        (IpAddr::from(VIP), PORTS[which]).into()
    }
}

fn exchange(address: SocketAddr, count: usize) -> Result<Vec<Duration>> {
    let socket = UdpSocket::bind("0.0.0.0:0").context("open a socket")?;
    socket.connect(address).context("connect a socket")?;
    socket.set_read_timeout(Some(Duration::from_secs(1))).context("limit a wait")?;
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        socket.send(&[7; 64]).context("send a datagram")?;
        let received = socket.recv(&mut [0; 100]).context("receive a datagram")?;
        ensure!(received == 64, "{received} bytes came back instead of 64");
        times.push(start.elapsed());
    }
    Ok(times)
}

fn word_before(text: &str, what: &str) -> Option<f64> {
    text.split_once(what)?.0.split_whitespace().last()?.parse().ok()
}

/// A time as wrk writes it, in milliseconds.
fn milliseconds(text: &str) -> Option<f64> {
    let text = text.trim();
    [("us", 1e-3), ("ms", 1.0), ("s", 1e3)]
        .into_iter()
        .find_map(|(unit, factor)| Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * factor))
}
