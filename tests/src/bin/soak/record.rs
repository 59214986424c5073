//! What was done to the balancer and what its clients noticed of it; and whether they may have.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

use crate::model::SERVICES;

/// How long after its cause a loss may be noticed: a segment on the way into a cut is sent again by then.
const NOTICED: Duration = Duration::from_secs(8);
/// How long packets may be lost after a link is up again.
const RESUMED: Duration = Duration::from_secs(2);
/// How long after a decision of the operator's it may not be in force everywhere.
const SETTLED: Duration = Duration::from_millis(500);

/// A time.
#[derive(Clone, Copy, Debug)]
struct Span {
    from: Instant,
    until: Instant,
}

/// What was done to a backend, or to all where `backend` is `None`.
#[derive(Clone, Copy, Debug)]
struct Deed {
    service: Option<usize>,
    backend: u8,
    span: Span,
}

/// A connection that did not come to its orderly end.
#[derive(Debug)]
pub struct Lost {
    /// The place of its service in `SERVICES`.
    pub service: usize,
    /// Who served it; `None` = it was never established.
    pub backend: Option<u8>,
    /// When it was begun.
    pub opened: Instant,
    /// When its client noticed.
    pub noticed: Instant,
    /// What was noticed.
    pub why: String,
}

/// A datagram that was not answered.
#[derive(Debug)]
pub struct Silence {
    /// The place of its service in `SERVICES`.
    pub service: usize,
    /// Who answered before, and who did next.
    pub backends: [Option<u8>; 2],
    /// When it was sent.
    pub sent: Instant,
    /// When one was answered again.
    pub noticed: Instant,
}

/// All of it.
pub struct Record {
    started: Instant,
    /// Backends whose flows were ended: drained with a deadline, or taken out.
    ended: Mutex<Vec<Deed>>,
    /// Backends that were said to be ill.
    ill: Mutex<Vec<Deed>>,
    /// When a link was down.
    cut: Mutex<Vec<Span>>,
    lost: Mutex<Vec<Lost>>,
    silences: Mutex<Vec<Silence>>,
    wrong: Mutex<Vec<String>>,
    /// Flows that were begun, by service.
    begun: [AtomicU64; SERVICES.len()],
    /// Flows that came to their end.
    done: AtomicU64,
    bytes: AtomicU64,
    datagrams: AtomicU64,
}

impl Record {
    /// Of nothing yet.
    pub fn new() -> Record {
        Record {
            started: Instant::now(),
            ended: Mutex::default(),
            ill: Mutex::default(),
            cut: Mutex::default(),
            lost: Mutex::default(),
            silences: Mutex::default(),
            wrong: Mutex::default(),
            begun: Default::default(),
            done: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            datagrams: AtomicU64::new(0),
        }
    }

    /// The flows of a backend are being ended, from now on until it is `settled`.
    pub fn ending(&self, service: usize, backend: u8) {
        let now = Instant::now();
        let span = Span { from: now, until: now + Duration::from_secs(3600) };
        held(&self.ended).push(Deed { service: Some(service), backend, span });
    }

    /// A backend takes flows again, and keeps them.
    pub fn settled(&self, service: usize, backend: u8) {
        let now = Instant::now();
        for deed in held(&self.ended).iter_mut() {
            if (deed.service, deed.backend) == (Some(service), backend) {
                deed.span.until = deed.span.until.min(now);
            }
        }
    }

    /// A backend was said to be ill by its checks since `from`.
    pub fn was_ill(&self, backend: u8, from: Instant) {
        // The verdict comes a few checks later, either way.
        let span = Span { from, until: Instant::now() + RESUMED };
        held(&self.ill).push(Deed { service: None, backend, span });
    }

    /// A link was down since `from`.
    pub fn was_cut(&self, from: Instant) {
        held(&self.cut).push(Span { from, until: Instant::now() + RESUMED });
    }

    /// A flow is begun.
    pub fn begin(&self, service: usize) {
        self.begun[service].fetch_add(1, Relaxed);
    }

    /// A flow has come to its end as its client wanted.
    pub fn done(&self) {
        self.done.fetch_add(1, Relaxed);
    }

    /// So many bytes came back, each right.
    pub fn right(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Relaxed);
    }

    /// A datagram came back, right.
    pub fn answered(&self) {
        self.datagrams.fetch_add(1, Relaxed);
    }

    /// Something came back that was not sent.
    pub fn wrong(&self, what: String) {
        held(&self.wrong).push(what);
    }

    /// A connection was lost.
    pub fn lost(&self, lost: Lost) {
        held(&self.lost).push(lost);
    }

    /// A datagram was not answered.
    pub fn silence(&self, silence: Silence) {
        held(&self.silences).push(silence);
    }

    /// Whether nothing was begun with one of the services.
    pub fn is_silent(&self) -> bool {
        self.begun.iter().any(|begun| begun.load(Relaxed) == 0)
    }

    /// What the clients saw, in two lines.
    pub fn summary(&self) -> String {
        let begun: Vec<String> = (SERVICES.iter().zip(&self.begun))
            .map(|(service, begun)| format!("{} {}", begun.load(Relaxed), service.name))
            .collect();
        format!(
            "flows: {}; {} came to their end, {} ended with their backend or were refused in a cut\n{} bytes and {} datagrams came back, {} wrong; \
             {} datagrams were lost in a cut or with their backend",
            begun.join(", "),
            self.done.load(Relaxed),
            held(&self.lost).len(),
            self.bytes.load(Relaxed),
            self.datagrams.load(Relaxed),
            held(&self.wrong).len(),
            held(&self.silences).len()
        )
    }

    /// An error unless all was right, and nothing was lost that was not to be.
    pub fn verdict(&self) -> Result<()> {
        let lost = held(&self.lost);
        let silences = held(&self.silences);
        let mut faults: Vec<String> = held(&self.wrong).clone();
        faults.extend(lost.iter().filter(|lost| !self.may_be_lost(lost)).map(|lost| {
            let Lost { service, backend, opened, noticed, why } = lost;
            format!(
                "a connection of {} with backend {backend:?} from {} to {} was lost: {why}",
                SERVICES[*service].name,
                self.at(*opened),
                self.at(*noticed)
            )
        }));
        faults.extend(silences.iter().filter(|silence| !self.may_be_silent(silence)).map(|silence| {
            let Silence { service, backends: [before, after], sent, noticed } = silence;
            format!(
                "a datagram of {} with backend {before:?}, then {after:?} sent at {} was not answered until {}",
                SERVICES[*service].name,
                self.at(*sent),
                self.at(*noticed)
            )
        }));
        if faults.is_empty() {
            return Ok(());
        }
        const SHOWN: usize = 20;
        let count = faults.len();
        faults.truncate(SHOWN);
        bail!("{count} things went wrong:\n{}", faults.join("\n"))
    }

    /// A time as the soak counts it.
    pub fn at(&self, time: Instant) -> String {
        format!("{:.3} s", time.duration_since(self.started).as_secs_f64())
    }

    fn may_be_lost(&self, lost: &Lost) -> bool {
        // While no backend can be reached, new connections are refused.
        let is_refused =
            |span: &Span| lost.backend.is_none() && (span.from..=span.until).contains(&lost.noticed);
        let is_ended = held(&self.ended).iter().any(|deed| {
            deed.service == Some(lost.service)
                && Some(deed.backend) == lost.backend
                && lost.opened <= deed.span.from + SETTLED
                && (deed.span.from..=deed.span.until + NOTICED).contains(&lost.noticed)
        });
        is_ended || held(&self.cut).iter().any(is_refused)
    }

    fn may_be_silent(&self, silence: &Silence) -> bool {
        let overlaps = |span: &Span| silence.sent <= span.until && silence.noticed >= span.from;
        let [before, after] = silence.backends;
        // What is on its way from a backend that a flow has left is not let through.
        let moved = |deed: &Deed| {
            before != after
                && Some(deed.backend) == before
                && deed.service.is_none_or(|service| service == silence.service)
                && overlaps(&Span { until: deed.span.until + NOTICED, ..deed.span })
        };
        held(&self.cut).iter().any(overlaps)
            || held(&self.ended).iter().any(moved)
            || held(&self.ill).iter().any(moved)
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
