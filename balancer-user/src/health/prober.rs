//! Makes the checks: all backends' at once, as far as there is room, and each backend's one after the other.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::Arc,
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, Result};
use balancer_common::BackendId;
use tokio::{
    sync::{Semaphore, mpsc, watch},
    task::{AbortHandle, JoinSet},
    time::sleep,
};

use super::{Limit, Outcome, exec, http, ping, rounds::Rounds, tcp, udp};
use crate::{
    capabilities,
    clock::Monotonic,
    config::{Health, Probe},
};

/// Most checks that are under way, but for programs: each has a socket, and a process may have 1,024 files unless it asks
/// for more.
const MOST_SOCKETS: usize = 512;
/// Most programs that run.
const MOST_PROGRAMS: usize = 64;
/// Reports that wait for the controller.
const WAITING: usize = 256;

/// Who is checked, and how.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// The backend's number.
    pub id: BackendId,
    /// The name of its service.
    pub service: String,
    /// Its name.
    pub backend: String,
    /// Where it serves.
    pub address: SocketAddr,
    /// What clients talk to.
    pub front: SocketAddr,
    /// The mark by which the packets of its checks go the way of its service's (`SO_MARK`); `None`: they go to its own address.
    pub mark: Option<u32>,
    /// How it is checked.
    pub check: Health,
}

/// What a check has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Who was checked, and how.
    pub target: Arc<Target>,
    /// What was found.
    pub outcome: Outcome,
}

/// The thread that makes the checks. With this value they end, and the programs that still run for them.
pub struct Prober {
    targets: Option<watch::Sender<Vec<Arc<Target>>>>,
    thread: Option<JoinHandle<()>>,
}

impl Prober {
    /// Starts it; nothing is checked yet. What checks find comes out of the receiver.
    ///
    /// # Errors
    ///
    /// When the kernel refuses a thread.
    pub fn start() -> Result<(Prober, mpsc::Receiver<Report>)> {
        let (targets, wanted) = watch::channel(Vec::new());
        let (reports, received) = mpsc::channel(WAITING);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("start an event loop for health checks")?;
        let thread = thread::Builder::new()
            .name("health".to_owned())
            .spawn(move || match capabilities::keep_those_of_the_prober() {
                Ok(()) => runtime.block_on(check_all(wanted, reports)),
                Err(error) => tracing::error!("{error:#}"),
            })
            .context("start a thread for health checks")?;
        Ok((Prober { targets: Some(targets), thread: Some(thread) }, received))
    }

    /// Says who is checked from now on. The checks of those that stay go on as if nothing had been said.
    pub fn check(&self, targets: Vec<Arc<Target>>) {
        if let Some(wanted) = &self.targets {
            wanted.send_if_modified(|wanted| {
                let is_changed = *wanted != targets;
                *wanted = targets;
                is_changed
            });
        }
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        self.targets = None;
        // A panic has been printed.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

async fn check_all(mut targets: watch::Receiver<Vec<Arc<Target>>>, reports: mpsc::Sender<Report>) {
    let room =
        Arc::new(Room { sockets: Semaphore::new(MOST_SOCKETS), programs: Semaphore::new(MOST_PROGRAMS) });
    let mut tasks = JoinSet::new();
    let mut running: HashMap<Arc<Target>, AbortHandle> = HashMap::new();
    loop {
        let mut before = std::mem::take(&mut running);
        let wanted = targets.borrow_and_update().clone();
        for target in wanted {
            let task = before.remove(&target).unwrap_or_else(|| {
                tasks.spawn(check(Arc::clone(&target), reports.clone(), Arc::clone(&room)))
            });
            running.insert(target, task);
        }
        before.into_values().for_each(|task| task.abort());
        tokio::select! {
            changed = targets.changed() => if changed.is_err() { return },
            // Forgets those that have ended.
            Some(_) = tasks.join_next() => {}
        }
    }
}

struct Room {
    sockets: Semaphore,
    programs: Semaphore,
}

/// Checks one backend, time after time, as long as somebody wants to know.
async fn check(target: Arc<Target>, reports: mpsc::Sender<Report>, room: Arc<Room>) {
    let who = (&target.service, &target.backend, target.address);
    let rounds = Rounds::new(Monotonic::now(), target.check.interval, &who);
    let mut next = rounds.first();
    loop {
        sleep(next.since(Monotonic::now())).await;
        let room = match target.check.probe {
            Probe::Exec { .. } => &room.programs,
            _ => &room.sockets,
        };
        let Ok(permit) = room.acquire().await else { return };
        let begun = Monotonic::now();
        let outcome = probe(&target).await;
        drop(permit);
        let report = Report { target: Arc::clone(&target), outcome };
        if reports.send(report).await.is_err() {
            return;
        }
        next = rounds.after(begun);
    }
}

async fn probe(target: &Target) -> Outcome {
    let Target { service, backend, address, front, mark, check, .. } = target;
    let address = SocketAddr::new(address.ip(), check.port.unwrap_or(address.port()));
    let limit = Limit::of(check.timeout);
    match &check.probe {
        Probe::Tcp { send, receive } => {
            let [send, receive] = [send, receive].map(|bytes| bytes.as_ref().map(|bytes| &bytes.0[..]));
            tcp::probe(address, send, receive, *mark, limit).await
        }
        Probe::Udp { send, receive } => udp::probe(address, &send.0, &receive.0, *mark, limit).await,
        Probe::Http { tls, path, host, expect } => {
            let front = SocketAddr::new(front.ip(), address.port()).to_string();
            let host = host.as_deref().or(mark.map(|_| &*front));
            http::probe(address, *tls, &http::Get { path, host, expect }, *mark, limit).await
        }
        Probe::Ping => ping::probe(address.ip(), *mark, limit).await,
        Probe::Exec { command } => {
            exec::probe(command, &exec::Subject { service, backend, address, front: *front }, limit).await
        }
    }
}
