//! The state of one service's balancing: from what was counted to the slots of its selection ring.

mod plan;

use std::{error::Error, fmt, time::Duration};

use balancer_common::{BackendId, RING_SLOTS, Traffic};

pub use self::plan::{Plan, Taken};
use crate::{
    clock::Monotonic,
    cost::FlowCost,
    load::Load,
    method::Method,
    rotation::{cycle, cycle_length},
    schedule::{Candidate, fill},
    window::{Totals, Window},
};

/// A ring is never shorter than this where more than one backend may be picked: arrivals come in bursts.
const SHORTEST: u64 = 64;
/// How many times the recent arrivals of a tick a ring holds.
const HEADROOM: u64 = 4;

/// A backend of the service, as configured and as its health and the operator leave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its index in the maps: must not be given to another backend without a `set_members` in between that lacks it.
    pub id: BackendId,
    /// 1 to 100; 0 = no new flows.
    pub weight: u8,
}

/// What the counters of a backend have grown by since the last observation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// Packets and bytes, both directions together.
    pub traffic: Traffic,
    /// Flows opened.
    pub opened: u64,
}

/// Where a backend stands, for people to see.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// Whose score it is.
    pub id: BackendId,
    /// Its weight.
    pub weight: u8,
    /// N as measured, in the method's unit (`least-bandwidth`: Mbit/s), two decimals; 0 for `round-robin`.
    pub n: f64,
    /// N × 10000 / weight of the N that is compared (a newcomer's may be above the measured one), two decimals; `None`
    /// for weight 0.
    pub nw: Option<f64>,
    /// Fraction of the installed ring's slots.
    pub share: f64,
    /// What was counted in the window.
    pub window: Totals,
    /// Whether it is new among others that are not: N is filled up with what they carry.
    pub newcomer: bool,
}

/// The balancing of one service.
///
/// Each tick: read `Taken::counted` from the ring word, read the counters, `observe`, `plan`. When there is a plan,
/// write it to the half not in use and exchange the word; if more slots were taken meanwhile, `plan` again with the
/// new `Taken::now`; then `install`. Without a plan the installed ring goes on: its next slots are those wanted.
#[derive(Clone, Debug)]
pub struct Balance {
    measure: Measure,
    span: Duration,
    backends: Vec<Backend>,
    /// One round-robin cycle; empty for other methods.
    cycle: Vec<BackendId>,
    /// Whether the installed ring goes round `cycle`; if not, it was made for other backends.
    cycle_is_installed: bool,
    installed: Plan,
    /// The question to which the installed ring, going on, was the answer: asked again, nothing needs planning.
    answered: Option<Question>,
    /// Flows opened in the busiest of the recent ticks; an old peak fades.
    peak: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Measure {
    Packets,
    Bytes,
    Nothing,
}

#[derive(Clone, Debug)]
struct Backend {
    id: BackendId,
    weight: u8,
    window: Window,
    /// Since when it has had a share of the new flows: added, or its weight last raised from 0.
    since: Monotonic,
}

/// All that a plan by load depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Question {
    candidates: Vec<Candidate>,
    last: Option<BackendId>,
    length: usize,
    taken: u64,
}

/// N of each backend, measured and compared.
struct Loads {
    measured: Load,
    compared: Load,
    newcomer: bool,
}

impl Balance {
    /// A service without backends, whose windows are `span` long.
    ///
    /// # Errors
    ///
    /// `NotLive` if the method is not one of `Method::LIVE`: nothing counts what it compares.
    pub const fn new(method: Method, span: Duration) -> Result<Balance, NotLive> {
        let measure = match method {
            Method::LeastPackets => Measure::Packets,
            Method::LeastBandwidth => Measure::Bytes,
            Method::RoundRobin => Measure::Nothing,
            Method::LeastRequest | Method::LeastResponseTime => return Err(NotLive(method)),
        };
        Ok(Balance {
            measure,
            span,
            backends: Vec::new(),
            cycle: Vec::new(),
            cycle_is_installed: false,
            installed: Plan::new(Vec::new(), None, 0),
            answered: None,
            peak: 0,
        })
    }

    /// Takes over a ring that another daemon installed, as its slots stand there.
    pub fn adopt(&mut self, slots: Vec<BackendId>) {
        self.install(Plan::new(slots, None, 0));
        self.cycle_is_installed = false;
    }

    /// Sets the backends, in configured order. Windows, rotation and history of those that stay go on.
    ///
    /// A backend whose weight comes back from 0 has lost its history as one that is added: its window says little of
    /// what its share would have brought. Its packets of old flows still count.
    pub fn set_members(&mut self, now: Monotonic, members: &[Member]) {
        if members.iter().copied().eq(self.backends.iter().map(|backend| backend.member())) {
            return;
        }
        // The turn of one that goes falls to the next after it: as if the one before it had been last.
        let order: Vec<BackendId> = self.backends.iter().map(|backend| backend.id).collect();
        self.installed.replace_last(&order, |id| members.iter().any(|member| member.id == id));
        let mut old = std::mem::take(&mut self.backends);
        for member in members {
            let backend = match old.iter().position(|backend| backend.id == member.id) {
                Some(index) => {
                    let mut backend = old.swap_remove(index);
                    if backend.weight == 0 {
                        backend.since = now;
                    }
                    backend.weight = member.weight;
                    backend
                }
                None => Backend {
                    id: member.id,
                    weight: member.weight,
                    window: Window::new(now, self.span),
                    since: now,
                },
            };
            self.backends.push(backend);
        }
        self.cycle_is_installed = false;
        self.answered = None;
    }

    /// Adds what the counters have grown by since the last call (the first: since the backend was added).
    ///
    /// Call it once a tick with all backends; those that are no members are ignored.
    pub fn observe(&mut self, now: Monotonic, observations: &[(BackendId, Observation)]) {
        let mut arrived = 0u64;
        for (index, (id, observation)) in observations.iter().enumerate() {
            // Mostly they come in the members' own order.
            let place = match self.backends.get(index) {
                Some(backend) if backend.id == *id => Some(index),
                _ => self.position(*id),
            };
            if let Some(backend) = place.and_then(|place| self.backends.get_mut(place)) {
                backend.window.push(now, observation.traffic, observation.opened);
                arrived = arrived.saturating_add(observation.opened);
            }
        }
        self.peak = arrived.max(self.peak - self.peak.div_ceil(16));
    }

    /// The ring that should follow after the slots taken so far; `None` if what is installed goes on like that.
    pub fn plan(&mut self, now: Monotonic, taken: Taken) -> Option<Plan> {
        let last = self.installed.last_pick(taken.now, |id| self.position(id).is_some());
        let plan = match self.measure {
            Measure::Nothing => self.plan_turns(last, taken.now),
            Measure::Packets | Measure::Bytes => {
                let question = self.question(now, last, taken);
                if self.answered.as_ref() == Some(&question) {
                    return None;
                }
                let plan = self.plan_loads(question.clone());
                self.answered = self.installed.goes_on_as(&plan, taken.now).then_some(question);
                plan
            }
        };
        let is_known = self.measure != Measure::Nothing || self.cycle_is_installed;
        (!is_known || !self.installed.goes_on_as(&plan, taken.now)).then_some(plan)
    }

    /// Takes note that a plan is now in the ring, with no slot taken.
    pub fn install(&mut self, plan: Plan) {
        self.installed = plan;
        self.cycle_is_installed = true;
        self.answered = None;
    }

    /// Where each backend stands, in configured order.
    pub fn scores(&self, now: Monotonic) -> Vec<Score> {
        let slots = &self.installed.slots;
        let micros = u64::try_from(self.span.as_micros()).unwrap_or(u64::MAX);
        let shown = |load: Load| match self.measure {
            Measure::Bytes => load.megabits_over(micros),
            Measure::Packets | Measure::Nothing => load,
        };
        let totals = self.totals(now);
        let score = |((backend, loads), window): ((&Backend, Loads), &Totals)| Score {
            id: backend.id,
            weight: backend.weight,
            n: shown(loads.measured).shown(),
            nw: shown(loads.compared).shown_weighted(backend.weight),
            share: slots.iter().filter(|slot| **slot == backend.id).count() as f64
                / slots.len().max(1) as f64,
            window: *window,
            newcomer: loads.newcomer,
        };
        let loads = self.loads(now, &totals, self.cost(&totals).charge());
        self.backends.iter().zip(loads).zip(&totals).map(score).collect()
    }

    fn question(&self, now: Monotonic, last: Option<BackendId>, taken: Taken) -> Question {
        let totals = self.totals(now);
        let cost = self.cost(&totals).charge();
        let mut candidates: Vec<Candidate> = self
            .backends
            .iter()
            .zip(self.loads(now, &totals, cost))
            .map(|(backend, loads)| Candidate { n: loads.compared, weight: backend.weight, charge: cost })
            .collect();
        for (id, picks) in self.installed.pending(taken) {
            if let Some(candidate) = self.position(id).and_then(|place| candidates.get_mut(place)) {
                candidate.n = candidate.n.plus(cost.times(picks));
            }
        }
        let turns = match self.weights().filter(|weight| *weight > 0).count() {
            0 | 1 => 1,
            _ => cycle_length(self.weights()),
        };
        let length = if turns > self.length() { self.length() } else { self.whole(turns) };
        Question { candidates, last, length, taken: taken.now }
    }

    fn plan_loads(&self, question: Question) -> Plan {
        let Question { candidates, last, length, .. } = question;
        let picks = fill(candidates, last.and_then(|last| self.position(last)), length);
        Plan::new(self.ids(picks), last, 0)
    }

    fn plan_turns(&mut self, last: Option<BackendId>, taken: u64) -> Plan {
        let turn = if self.cycle_is_installed {
            self.installed.turn_after(taken)
        } else {
            let weights: Vec<u8> = self.weights().collect();
            let origin = last.and_then(|last| self.position(last)).map_or(0, |last| last + 1);
            self.cycle = self.ids(cycle(&weights, origin));
            0
        };
        let turn = turn.checked_rem(self.cycle.len()).unwrap_or(0);
        let length = self.whole(self.cycle.len());
        let slots = self.cycle.iter().copied().cycle().skip(turn).take(length).collect();
        Plan::new(slots, last, turn)
    }

    /// Long enough for what can arrive before the next tick, in steps, so that it seldom changes.
    fn length(&self) -> usize {
        let wanted = self.peak.saturating_mul(HEADROOM).clamp(SHORTEST, RING_SLOTS as u64);
        // At most `RING_SLOTS`.
        wanted.next_power_of_two() as usize
    }

    /// A length of whole cycles of `turns`, so that a ring that goes round keeps the shares; one that is too long is cut.
    fn whole(&self, turns: usize) -> usize {
        match turns {
            0 | 1 => turns,
            _ => {
                self.length().next_multiple_of(turns).min((RING_SLOTS / turns).max(1) * turns).min(RING_SLOTS)
            }
        }
    }

    fn weights(&self) -> impl Iterator<Item = u8> + Clone {
        self.backends.iter().map(|backend| backend.weight)
    }

    fn totals(&self, now: Monotonic) -> Vec<Totals> {
        self.backends.iter().map(|backend| backend.window.totals(now)).collect()
    }

    /// N of each backend: what was counted, and for a newcomer also what its window can't know of.
    ///
    /// A newcomer is one whose history is shorter than the window while that of others is full. It starts at the mean
    /// of their N / weight (× its own weight), and that fades as its history grows; in its place come its own flows,
    /// each with what it is expected to bring. So the newcomer stays at the mean as long as it takes its share, falls
    /// below if it does not get one, and can't take the stream because its flows are young. (Were the mean a fixed
    /// lower bound, one of the others would nearly always be below it: the newcomer would get nothing
    /// until its history is full, and then everything.)
    fn loads(&self, now: Monotonic, totals: &[Totals], cost: Load) -> Vec<Loads> {
        let measured = |totals: &Totals| Load::units(self.measure.of(totals.traffic));
        let known = |backend: &Backend| now.since(backend.since).min(self.span);
        let settled: Vec<_> = self
            .backends
            .iter()
            .zip(totals)
            .filter(|(backend, _)| backend.weight > 0 && known(backend) == self.span)
            .map(|(backend, totals)| (measured(totals), backend.weight))
            .collect();
        let load = |(backend, totals): (&Backend, &Totals)| {
            let measured = measured(totals);
            let unknown = self.span - known(backend);
            let is_new = backend.weight > 0 && !unknown.is_zero();
            match is_new.then(|| Load::mean_for(backend.weight, settled.iter().copied())).flatten() {
                Some(mean) => {
                    let expected = measured.max(cost.times(totals.opened));
                    let compared = expected.plus(mean.share(millis(unknown), millis(self.span)));
                    Loads { measured, compared, newcomer: true }
                }
                None => Loads { measured, compared: measured, newcomer: false },
            }
        };
        self.backends.iter().zip(totals).map(load).collect()
    }

    fn cost(&self, totals: &[Totals]) -> FlowCost {
        let sum = totals.iter().copied().fold(Totals::ZERO, Totals::plus);
        FlowCost::mean(self.measure.of(sum.traffic), sum.opened)
    }

    fn position(&self, id: BackendId) -> Option<usize> {
        self.backends.iter().position(|backend| backend.id == id)
    }

    fn ids(&self, picks: Vec<usize>) -> Vec<BackendId> {
        picks.into_iter().filter_map(|pick| self.backends.get(pick)).map(|backend| backend.id).collect()
    }
}

impl Measure {
    const fn of(self, traffic: Traffic) -> u64 {
        match self {
            Measure::Packets => traffic.packets,
            Measure::Bytes => traffic.bytes,
            Measure::Nothing => 0,
        }
    }
}

impl Backend {
    const fn member(&self) -> Member {
        Member { id: self.id, weight: self.weight }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The method compares what nothing counts yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotLive(pub Method);

impl fmt::Display for NotLive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the method `{}` is not built yet", self.0)
    }
}

impl Error for NotLive {}

#[cfg(test)]
mod tests;
