//! Whether backends serve: probes that find it out, what clients' flows say of it, and the judgement of both.
//!
//! Probes run on a thread of their own, so that no server, handshake or program can delay the controller. They know nothing
//! of what follows from them: each outcome goes to the controller as a `Report`, and `Judge` is a function of values.

mod exec;
mod http;
mod judge;
mod passive;
mod ping;
mod prober;
mod rounds;
mod tcp;
mod tls;
mod udp;

use std::{io, os::fd::AsFd, time::Duration};

use nix::{
    errno::Errno,
    sys::socket::{setsockopt, sockopt},
};
use tokio::time::{Instant, timeout_at};

pub use self::{
    judge::{Judge, Verdict},
    passive::{Opening, Openings, Passive},
    prober::{Prober, Report, Target},
};

/// What one check has found: nothing to complain of, or why it failed.
pub type Outcome = Result<(), String>;

/// By when a check must be done.
#[derive(Clone, Copy)]
struct Limit {
    until: Instant,
    time: Duration,
}

impl Limit {
    fn of(time: Duration) -> Limit {
        Limit { until: Instant::now() + time, time }
    }

    /// What `work` results in, unless it takes too long; `missing` is what there is none of then.
    async fn wait<T>(self, missing: &str, work: impl Future<Output = T>) -> Result<T, String> {
        timeout_at(self.until, work).await.map_err(|_| self.exceeded(missing))
    }

    fn exceeded(self, missing: &str) -> String {
        format!("no {missing} within {}", humantime::format_duration(self.time))
    }
}

/// Gives a socket the mark by which its packets go a service's way, if it is to have one.
fn mark(socket: &impl AsFd, mark: Option<u32>) -> io::Result<()> {
    if let Some(mark) = mark {
        setsockopt(socket, sockopt::Mark, &mark)?;
    }
    Ok(())
}

/// An error of the kernel's, in its words and without its number.
fn said(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(code) => Errno::from_raw(code).desc().to_lowercase(),
        None => error.to_string(),
    }
}

/// What came, for people to read: at most 40 bytes of it.
fn shown(bytes: &[u8]) -> String {
    const MOST: usize = 40;
    let more = if bytes.len() > MOST { "…" } else { "" };
    format!("\"{}{more}\"", bytes[..bytes.len().min(MOST)].escape_ascii())
}
