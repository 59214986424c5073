//! Who changes the balancer, kills it, cuts its links and makes its backends ill: at random, and the same for the same seed.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use balancer_tests::{Balancer, Topology, echo::Echo, eventually, topology::backend_address};

use crate::{
    model::{BACKENDS, HEALTH_PORT, Model, SERVICES},
    record::Record,
};

/// How long the daemon may take to do what it was told by a signal.
const LIMIT: Duration = Duration::from_secs(10);
/// Longest time without a daemon, without a link, and with an ill backend: shorter than the `drain-timeout`, and than it takes
/// for a backend out of reach to count as down.
const LONGEST_GAP: u64 = 2_000;
/// Longest time between two deeds.
const LONGEST_PAUSE: u64 = 500;

/// What is undone later.
enum Pending {
    /// A backend that is not configured any more.
    Removed { service: usize, backend: u8 },
    /// One that drains.
    Draining { service: usize, backend: u8 },
    /// One whose checks fail.
    Ill { backend: u8, since: Instant },
}

/// The operator.
pub struct Operator<'a> {
    bench: &'a Topology,
    record: &'a Arc<Record>,
    random: fastrand::Rng,
    model: Model,
    pending: Vec<(Instant, Pending)>,
    /// What answers the health checks of each backend; `None` while it is ill.
    health: Vec<Option<Echo>>,
    deeds: BTreeMap<&'static str, u64>,
}

impl<'a> Operator<'a> {
    /// One who has done nothing yet; all backends are well.
    pub fn new(
        bench: &'a Topology,
        record: &'a Arc<Record>,
        seed: u64,
        model: Model,
    ) -> Result<Operator<'a>> {
        let random = fastrand::Rng::with_seed(seed);
        let mut operator = Operator {
            bench,
            record,
            random,
            model,
            pending: Vec::new(),
            health: Vec::new(),
            deeds: BTreeMap::new(),
        };
        for backend in 1..=BACKENDS {
            let health = operator.healthy(backend)?;
            operator.health.push(Some(health));
        }
        Ok(operator)
    }

    /// What was done, and how often.
    pub fn summary(&self) -> String {
        let deeds: Vec<String> = self.deeds.iter().map(|(deed, count)| format!("{count} {deed}")).collect();
        format!("done: {}", deeds.join(", "))
    }

    /// Works for so long; the daemon ends only where `may_end` says so.
    pub fn work(&mut self, mut balancer: Balancer, time: Duration, may_end: bool) -> Result<Balancer> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            thread::sleep(Duration::from_millis(self.random.u64(..LONGEST_PAUSE)));
            let due = self.pending.iter().position(|(due, _)| *due <= Instant::now());
            if let Some(place) = due {
                let (_, pending) = self.pending.swap_remove(place);
                self.undo(&balancer, pending)?;
                continue;
            }
            balancer = self.deed(balancer, may_end)?;
        }
        Ok(balancer)
    }

    /// Undoes all that is to be undone: the configuration is as it was at first.
    pub fn restore(&mut self, balancer: Balancer) -> Result<Balancer> {
        for (_, pending) in std::mem::take(&mut self.pending) {
            self.undo(&balancer, pending)?;
        }
        self.model = Model::new();
        self.reload(&balancer)?;
        Ok(balancer)
    }

    fn deed(&mut self, balancer: Balancer, may_end: bool) -> Result<Balancer> {
        let service = self.random.usize(..SERVICES.len());
        let backend = self.random.u8(2..=BACKENDS);
        let weight = self.random.u8(1..=5);
        // Of what was taken away, and comes back by itself, nothing more is taken.
        let has = self.model.has(service, backend) && !self.is_pending(service, backend);
        let name = SERVICES[service].name;
        match self.random.u8(..if may_end { 16 } else { 14 }) {
            0 => {
                self.count("identical reloads");
                self.reload(&balancer)?;
            }
            1 => {
                self.count("reloads of what is no configuration");
                balancer.place().write_config("[daemon]\nno-such-key = 1\n")?;
                self.hang_up(&balancer)?;
                balancer.place().write_config(&self.model.text())?;
            }
            2 | 3 if has => {
                self.count("other weights by a reload");
                self.model.set(service, backend, Some(weight));
                self.reload(&balancer)?;
            }
            4 if has => {
                self.count("other weights by a verb");
                self.model.set(service, backend, Some(weight));
                let weight = format!("weight={weight}");
                balancer.call(&["backend", "set", &named(backend), "--service", name, &weight, "--save"])?;
            }
            5 if has => {
                self.count("backends removed by a reload");
                self.record.ending(service, backend);
                self.model.set(service, backend, None);
                self.reload(&balancer)?;
                self.later(Pending::Removed { service, backend });
            }
            6 | 7 if has => {
                self.count("backends removed by a verb");
                self.record.ending(service, backend);
                self.model.set(service, backend, None);
                balancer.call(&["backend", "rm", &named(backend), "--service", name, "--save"])?;
                self.later(Pending::Removed { service, backend });
            }
            8 if has => {
                self.count("drains");
                self.record.ending(service, backend);
                let deadline = format!("{}ms", self.random.u64(500..4_000));
                balancer.call(&[
                    "backend",
                    "drain",
                    &named(backend),
                    "--service",
                    name,
                    "--deadline",
                    &deadline,
                ])?;
                self.later(Pending::Draining { service, backend });
            }
            9 | 10 if self.health[usize::from(backend) - 1].is_some() => {
                self.count("illnesses");
                self.health[usize::from(backend) - 1] = None;
                let due = Instant::now() + Duration::from_millis(self.random.u64(100..LONGEST_GAP));
                self.pending.push((due, Pending::Ill { backend, since: Instant::now() }));
            }
            11 => {
                self.count("links cut");
                self.cut()?;
            }
            12 => {
                self.count("services added and removed, and rollbacks");
                let address = format!("address={}:99", balancer_tests::topology::VIP);
                balancer.call(&[
                    "service",
                    "add",
                    "extra",
                    &address,
                    "protocol=tcp",
                    "method=round-robin",
                ])?;
                let backend = format!("address={}:99", backend_address(backend));
                balancer.call(&["backend", "add", "only", "--service", "extra", &backend])?;
                if self.random.bool() {
                    balancer.call(&["service", "rm", "extra"])?;
                } else {
                    balancer.call(&["rollback"])?;
                    balancer.call(&["service", "rm", "extra"])?;
                }
            }
            13 => {
                self.count("looks");
                for words in [
                    &["status"][..],
                    &["flows", "list", "--service", name],
                    &["flows", "count"],
                    &["explain", name],
                    &["whatif", name, "--method", "least-request"],
                ] {
                    balancer.call(words)?;
                }
            }
            14 => {
                self.count("crashes");
                let place = balancer.crash();
                thread::sleep(Duration::from_millis(self.random.u64(..LONGEST_GAP)));
                return Balancer::start_in(place, &self.bench.balancer).context("start after a crash");
            }
            15 => {
                self.count("restarts");
                let (ended, place) = balancer.stop()?;
                anyhow::ensure!(ended.success(), "the balancer ended so: {ended}");
                return Balancer::start_in(place, &self.bench.balancer).context("start again");
            }
            _ => {}
        }
        Ok(balancer)
    }

    fn undo(&mut self, balancer: &Balancer, pending: Pending) -> Result<()> {
        match pending {
            Pending::Removed { service, backend } => {
                self.model.set(service, backend, Some(1));
                let kind = &SERVICES[service];
                if self.random.bool() {
                    self.reload(balancer)?;
                } else {
                    let address = format!("address={}:{}", backend_address(backend), kind.backend_port);
                    let name = named(backend);
                    balancer.call(&["backend", "add", &name, "--service", kind.name, &address, "--save"])?;
                }
                self.record.settled(service, backend);
            }
            Pending::Draining { service, backend } => {
                let name = SERVICES[service].name;
                balancer.call(&["backend", "enable", &named(backend), "--service", name])?;
                self.record.settled(service, backend);
            }
            Pending::Ill { backend, since } => {
                let health = self.healthy(backend)?;
                self.health[usize::from(backend) - 1] = Some(health);
                self.record.was_ill(backend, since);
            }
        }
        Ok(())
    }

    fn cut(&mut self) -> Result<()> {
        let backend = format!("p{}", self.random.u8(1..=BACKENDS));
        let (netns, device) = match self.random.u8(..4) {
            0 => (&self.bench.balancer, "lc"),
            1 => (&self.bench.balancer, "lk"),
            _ => (&self.bench.switch, backend.as_str()),
        };
        let from = Instant::now();
        netns.ip(&format!("link set {device} down"))?;
        thread::sleep(Duration::from_millis(self.random.u64(50..LONGEST_GAP / 2)));
        netns.ip(&format!("link set {device} up"))?;
        self.record.was_cut(from);
        Ok(())
    }

    /// Has the daemon read what is to be, and waits until it has.
    fn reload(&self, balancer: &Balancer) -> Result<()> {
        balancer.place().write_config(&self.model.text())?;
        self.hang_up(balancer)
    }

    fn hang_up(&self, balancer: &Balancer) -> Result<()> {
        let answers = || balancer.log().matches("reload").count();
        let before = answers();
        balancer.hang_up()?;
        eventually(LIMIT, "the reload", || (answers() > before).then_some(()))
            .with_context(|| format!("the balancer printed:\n{}", balancer.log()))
    }

    fn healthy(&self, backend: u8) -> Result<Echo> {
        let address = SocketAddr::from((backend_address(backend), HEALTH_PORT));
        Echo::tcp(self.bench.backend(backend)?, address)
    }

    fn is_pending(&self, of: usize, which: u8) -> bool {
        self.pending.iter().any(|(_, pending)| match pending {
            Pending::Removed { service, backend } | Pending::Draining { service, backend } => {
                (*service, *backend) == (of, which)
            }
            Pending::Ill { .. } => false,
        })
    }

    fn later(&mut self, pending: Pending) {
        let due = Instant::now() + Duration::from_millis(self.random.u64(200..9_000));
        self.pending.push((due, pending));
    }

    fn count(&mut self, deed: &'static str) {
        *self.deeds.entry(deed).or_default() += 1;
    }
}

fn named(backend: u8) -> String {
    format!("b{backend}")
}
