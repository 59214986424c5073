//! The state of one service's balancing: from what was counted to the slots of its selection ring.

mod explain;
mod flows;
mod plan;
mod score;
mod standing;

use std::time::Duration;

use balancer_common::{AGES, BackendId, RING_SLOTS, Traffic};

pub use self::{
    explain::{Explained, Pick, Stance, Takes},
    plan::{Plan, Taken},
    score::Score,
};
use self::{flows::Flows, standing::Standing};
use crate::{
    clock::Monotonic,
    cost::mean_charge,
    forward::{Contender, fill},
    load::Load,
    maglev,
    method::Method,
    openings::Row,
    responses::Responses,
    rotation::{cycle, cycle_length},
    window::{Growth as _, Totals, Window},
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
    /// What tells it from others for good, also on other balancers: address and port, say. Hash methods go by it.
    pub identity: u64,
    /// 1 to 100; 0 = no new flows.
    pub weight: u8,
    /// Takes flows only while no other can.
    pub is_backup: bool,
    /// With so many active flows it takes no more.
    pub max_active: Option<u32>,
}

/// What the counters of a backend have grown by since the last observation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// Packets and bytes, both directions together.
    pub traffic: Traffic,
    /// Flows opened.
    pub opened: u64,
    /// Not a growth: flows that are open now.
    pub active: u64,
    /// Not a growth: requests that are active now, as the service counts them.
    pub requests: u64,
    /// Answers, and how long they took.
    pub responses: Responses,
}

/// In a ring that is full of those who may take a flow: nobody takes this one.
const NOBODY: BackendId = BackendId::MAX;

/// The balancing of one service.
///
/// Each tick: read `Taken::counted` from the ring word, read the counters, `observe`, `observe_ages`, `plan`. When there is a plan,
/// write it to the half not in use and exchange the word; if more slots were taken meanwhile, `plan` again with the
/// new `Taken::now`; then `install`. Without a plan the installed ring goes on: its next slots are those wanted.
#[derive(Clone, Debug)]
pub struct Balance {
    measure: Measure,
    span: Duration,
    slow_start: Duration,
    backends: Vec<Backend>,
    /// From the first `set_members` on.
    flows: Option<Flows>,
    /// One round-robin cycle, or the Maglev table, and what it was made for; empty for other methods.
    cycle: Vec<BackendId>,
    cycle_of: Vec<u8>,
    /// Whether the installed ring goes round `cycle`; if not, it was made for other backends.
    cycle_is_installed: bool,
    installed: Plan,
    /// The last question, for methods that compare loads.
    asked: Option<Asked>,
    /// Flows opened in the busiest of the recent ticks; an old peak fades.
    peak: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Measure {
    Packets,
    Bytes,
    Requests,
    ResponseTime,
    /// Nothing is compared: they take turns.
    Turns,
    /// Nothing is compared: a hash points into a table.
    Hash,
}

#[derive(Clone, Debug)]
struct Backend {
    member: Member,
    window: Window,
    responses: Window<Responses>,
    active: u64,
    requests: u64,
    /// Since when it has had a share of the new flows: added, or its weight last raised from 0.
    since: Monotonic,
    /// Whether another had had its share for the whole window by then or, where this one has come back or was added, for longer:
    /// only such a one is a newcomer.
    is_late: bool,
    /// Whether it has had a share before, or was added when another had.
    is_second: bool,
    /// Its flows, beside the service's `Openings`.
    opened: Row,
}

#[derive(Clone, Debug)]
struct Asked {
    question: Question,
    /// Whether the installed ring, going on, was the answer: asked again, nothing needs planning.
    is_answered: bool,
}

/// All that a plan by load depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Question {
    contenders: Vec<Contender>,
    last: Option<BackendId>,
    length: usize,
    taken: u64,
}

impl Balance {
    /// A service without backends, whose windows are `span` long.
    pub const fn new(method: Method, span: Duration) -> Balance {
        Balance {
            measure: Measure::by(method),
            span,
            slow_start: Duration::ZERO,
            backends: Vec::new(),
            flows: None,
            cycle: Vec::new(),
            cycle_of: Vec::new(),
            cycle_is_installed: false,
            installed: Plan::new(Vec::new(), None, 0),
            asked: None,
            peak: 0,
        }
    }

    /// The same service by another method: what its backends carry stays known.
    pub fn with_method(mut self, now: Monotonic, method: Method) -> Balance {
        let measure = Measure::by(method);
        if measure != self.measure {
            self.measure = measure;
            self.cycle_is_installed = false;
            self.asked = None;
            if let Some(flows) = &mut self.flows {
                flows.forget_profile(now, self.span);
            }
        }
        self
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
        if members.iter().eq(self.backends.iter().map(|backend| &backend.member)) {
            return;
        }
        // The turn of one that goes falls to the next after it: as if the one before it had been last.
        let order: Vec<BackendId> = self.backends.iter().map(|backend| backend.member.id).collect();
        self.installed.replace_last(&order, |id| members.iter().any(|member| member.id == id));
        let mut old = std::mem::take(&mut self.backends);
        let others = old.iter().filter(|backend| backend.member.weight > 0).map(|backend| backend.since);
        let longest = others.map(|since| now.since(since)).max().unwrap_or(Duration::ZERO);
        // While all windows are still short, those that the service began with are all alike.
        let is_late = |is_second| longest >= self.span || is_second && longest > Duration::ZERO;
        let is_added = longest > Duration::ZERO;
        let flows = self.flows.get_or_insert_with(|| Flows::new(now, self.span));
        for member in members {
            let backend = match old.iter().position(|backend| backend.member.id == member.id) {
                Some(index) => {
                    let mut backend = old.swap_remove(index);
                    if backend.member.weight == 0 {
                        (backend.since, backend.is_late) = (now, is_late(backend.is_second));
                    }
                    backend.is_second |= backend.member.weight > 0;
                    backend.member = *member;
                    backend
                }
                None => Backend {
                    member: *member,
                    window: Window::new(now, self.span),
                    responses: Window::new(now, self.span),
                    active: 0,
                    requests: 0,
                    since: now,
                    is_late: is_late(is_added),
                    is_second: is_added,
                    opened: flows.row(),
                },
            };
            self.backends.push(backend);
        }
        self.cycle_is_installed = false;
        self.asked = None;
    }

    /// Over how long the share of a newcomer is ramped, linearly, from 0 to its weight; zero = at once, the default.
    ///
    /// Newcomers are those that come, or come back from weight 0, when another has had its share for the whole window.
    pub const fn set_slow_start(&mut self, slow_start: Duration) {
        self.slow_start = slow_start;
    }

    /// Adds what the counters have grown by since the last call (the first: since the backend was added).
    ///
    /// Call it once a tick with all backends; those that are no members are ignored.
    pub fn observe(&mut self, now: Monotonic, observations: &[(BackendId, Observation)]) {
        let mut opened = vec![0u64; self.backends.len()];
        for (index, (id, observation)) in observations.iter().enumerate() {
            // Mostly they come in the members' own order.
            let place = match self.backends.get(index) {
                Some(backend) if backend.member.id == *id => Some(index),
                _ => self.position(*id),
            };
            if let Some(place) = place {
                let backend = &mut self.backends[place];
                backend.window.push(now, Totals { traffic: observation.traffic, opened: observation.opened });
                backend.responses.push(now, observation.responses);
                (backend.active, backend.requests) = (observation.active, observation.requests);
                opened[place] = opened[place].saturating_add(observation.opened);
            }
        }
        let arrived = opened.iter().copied().fold(0, u64::saturating_add);
        self.peak = arrived.max(self.peak - self.peak.div_ceil(16));
        if let Some(flows) = &mut self.flows {
            let shift = flows.opened(now, arrived);
            for (backend, opened) in self.backends.iter_mut().zip(opened) {
                backend.opened.follow(shift, opened);
            }
        }
    }

    /// Counts other active requests for a backend than were observed: for one that is played through.
    pub fn set_requests(&mut self, id: BackendId, requests: u64) {
        if let Some(backend) = self.backends.iter_mut().find(|backend| backend.member.id == id) {
            backend.requests = requests;
        }
    }

    /// Adds what the service's flows have carried since the last call, by `age_bucket` of the flow at each packet.
    ///
    /// Call it once a tick, after `observe` of what was read at the same time. Without it, picks are charged the mean, and
    /// nothing is known of what recent flows have yet to bring.
    pub fn observe_ages(&mut self, now: Monotonic, growth: &[Traffic; AGES]) {
        if let (Some(flows), true) = (&mut self.flows, self.measure.is_traffic()) {
            flows.learn(now, self.measure, growth);
        }
    }

    /// The ring that should follow after the slots taken so far; `None` if what is installed goes on like that.
    pub fn plan(&mut self, now: Monotonic, taken: Taken) -> Option<Plan> {
        let last = self.installed.last_pick(taken.now, |id| self.position(id).is_some());
        let is_cycle = matches!(self.measure, Measure::Turns | Measure::Hash);
        let plan = match self.measure {
            Measure::Turns => self.plan_turns(last, taken.now),
            Measure::Hash => self.plan_table(),
            Measure::Packets | Measure::Bytes | Measure::Requests | Measure::ResponseTime => {
                let question = self.question(now, last, taken);
                if self.asked.as_ref().is_some_and(|asked| asked.is_answered && asked.question == question) {
                    return None;
                }
                let plan = self.plan_loads(&question);
                let is_answered = self.installed.goes_on_as(&plan, taken.now);
                self.asked = Some(Asked { question, is_answered });
                plan
            }
        };
        let goes_on = match self.measure {
            // Its slots are hashed to, not taken one after the other.
            Measure::Hash => self.installed.slots == plan.slots,
            _ => self.installed.goes_on_as(&plan, taken.now),
        };
        let is_known = !is_cycle || self.cycle_is_installed;
        (!is_known || !goes_on).then_some(plan)
    }

    /// Takes note that a plan is now in the ring, with no slot taken.
    pub fn install(&mut self, plan: Plan) {
        self.installed = plan;
        self.cycle_is_installed = true;
        if let Some(asked) = &mut self.asked {
            // What the ring was made for counts from its own first slot.
            asked.question.taken = 0;
            asked.is_answered = false;
        }
    }

    fn question(&self, now: Monotonic, last: Option<BackendId>, taken: Taken) -> Question {
        let mut contenders = self.contenders(&self.standings(now, &self.totals(now)));
        self.charge_taken(&mut contenders, taken);
        let turns = match self.weights().filter(|weight| *weight > 0).count() {
            0 | 1 => 1,
            _ => cycle_length(self.weights()),
        };
        let length = if turns > self.length() { self.length() } else { self.whole(turns) };
        Question { contenders, last, length, taken: taken.now }
    }

    fn contenders(&self, standings: &[Standing]) -> Vec<Contender> {
        let each = standings.iter().zip(&self.backends);
        each.map(|(standing, backend)| Contender {
            n: standing.compared,
            weight: standing.weight,
            charge: standing.charge,
            room: backend.room(),
        })
        .collect()
    }

    /// Charges the flows that have taken slots of the installed ring and are not counted yet.
    fn charge_taken(&self, contenders: &mut [Contender], taken: Taken) {
        for (id, picks) in self.installed.pending(taken) {
            if let Some(contender) = self.position(id).and_then(|place| contenders.get_mut(place)) {
                contender.n = contender.n.plus(contender.charge.times(picks));
                contender.room = contender.room.saturating_sub(picks);
            }
        }
    }

    fn plan_loads(&self, question: &Question) -> Plan {
        let Question { contenders, last, length, .. } = question;
        let mut picks = self.picks(contenders, *last, *length);
        let mut length = *length;
        if overfills(contenders, &picks, length) {
            length = RING_SLOTS;
            picks = self.picks(contenders, *last, length);
        }
        let mut slots = self.ids(picks);
        if !slots.is_empty() {
            slots.resize(length, NOBODY);
        }
        Plan::new(slots, *last, 0)
    }

    /// The next `length` picks, as positions in configured order; fewer where all are full by then.
    fn picks(&self, contenders: &[Contender], last: Option<BackendId>, length: usize) -> Vec<usize> {
        let mut after = last.and_then(|last| self.position(last));
        let mut picks = Vec::new();
        // The backups come where no other has room left.
        for is_backup in [false, true] {
            let tier: Vec<Contender> = contenders
                .iter()
                .zip(&self.backends)
                .map(|(contender, backend)| match backend.member.is_backup == is_backup {
                    true => *contender,
                    false => Contender { weight: 0, ..*contender },
                })
                .collect();
            let more = length - picks.len();
            if more > 0 {
                picks.extend(fill(&tier, after, more));
                after = picks.last().copied().or(after);
            }
        }
        picks
    }

    fn plan_table(&mut self) -> Plan {
        let weights = self.weights_now();
        if !self.cycle_is_installed || self.cycle_of != weights {
            let candidates: Vec<_> = self
                .backends
                .iter()
                .zip(&weights)
                .map(|(backend, weight)| maglev::Candidate {
                    identity: backend.member.identity,
                    weight: *weight,
                })
                .collect();
            self.cycle = self.ids(maglev::table(&candidates));
            self.cycle_of = weights;
        }
        Plan::new(self.cycle.clone(), None, 0)
    }

    /// Whether each backend may take a flow now, in configured order: none that is full, and no backup while another can.
    pub fn takers(&self) -> impl Iterator<Item = (BackendId, bool)> {
        self.backends.iter().zip(self.weights_now()).map(|(backend, weight)| (backend.member.id, weight > 0))
    }

    /// The weights of those who may take a flow now: neither full, nor a backup while another can.
    ///
    /// For methods that do not look forward: one that fills up within a tick takes more until the next.
    fn weights_now(&self) -> Vec<u8> {
        let can = |backend: &&Backend| backend.member.weight > 0 && backend.room() > 0;
        let is_backup = !self.backends.iter().filter(can).any(|backend| !backend.member.is_backup);
        let weight = |backend: &Backend| match can(&backend) && backend.member.is_backup == is_backup {
            true => backend.member.weight,
            false => 0,
        };
        self.backends.iter().map(weight).collect()
    }

    fn plan_turns(&mut self, last: Option<BackendId>, taken: u64) -> Plan {
        let weights = self.weights_now();
        let turn = if self.cycle_is_installed && self.cycle_of == weights {
            self.installed.turn_after(taken)
        } else {
            let origin = last.and_then(|last| self.position(last)).map_or(0, |last| last + 1);
            self.cycle = self.ids(cycle(&weights, origin));
            self.cycle_of = weights;
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
        self.backends.iter().map(|backend| backend.member.weight)
    }

    fn totals(&self, now: Monotonic) -> Vec<Totals> {
        self.backends.iter().map(|backend| backend.window.totals(now)).collect()
    }

    /// What a pick is charged of traffic: what one flow brings within the window, or until that has been learned, the mean.
    ///
    /// In the first window only what young flows bring has been learned, and the larger of the two counts.
    fn charge(&self, now: Monotonic, totals: &[Totals]) -> Load {
        let learned = self.flows.as_ref().and_then(|flows| flows.charge(now));
        learned.unwrap_or_else(|| {
            let sum = totals.iter().copied().fold(Totals::ZERO, Totals::plus);
            let mean = mean_charge(self.measure.of(sum.traffic), sum.opened);
            self.flows.as_ref().map_or(mean, |flows| flows.known_charge().max(mean))
        })
    }

    fn position(&self, id: BackendId) -> Option<usize> {
        self.backends.iter().position(|backend| backend.member.id == id)
    }

    fn ids(&self, picks: Vec<usize>) -> Vec<BackendId> {
        picks
            .into_iter()
            .filter_map(|pick| self.backends.get(pick))
            .map(|backend| backend.member.id)
            .collect()
    }
}

/// Whether a ring of these picks would bring a backend more flows than it may take, if as many came before the next tick as the
/// longest ring holds: then it goes round, and brings each pick again.
fn overfills(contenders: &[Contender], picks: &[usize], length: usize) -> bool {
    if contenders.iter().all(|contender| contender.room == u64::MAX) {
        return false;
    }
    let mut counts = vec![0u64; contenders.len()];
    for pick in picks {
        counts[*pick] += 1;
    }
    let rounds = RING_SLOTS.div_ceil(length.max(1)) as u64;
    rounds > 1 && counts.iter().zip(contenders).any(|(count, contender)| count * rounds > contender.room)
}

impl Measure {
    const fn by(method: Method) -> Measure {
        match method {
            Method::LeastPackets => Measure::Packets,
            Method::LeastBandwidth => Measure::Bytes,
            Method::LeastRequest => Measure::Requests,
            Method::LeastResponseTime => Measure::ResponseTime,
            Method::RoundRobin => Measure::Turns,
            Method::SourceHash | Method::Maglev => Measure::Hash,
        }
    }

    /// Whether it is what flows carry over their lives.
    const fn is_traffic(self) -> bool {
        matches!(self, Measure::Packets | Measure::Bytes)
    }

    const fn of(self, traffic: Traffic) -> u64 {
        match self {
            Measure::Packets => traffic.packets,
            Measure::Bytes => traffic.bytes,
            Measure::Requests | Measure::ResponseTime | Measure::Turns | Measure::Hash => 0,
        }
    }
}

impl Backend {
    /// How many more flows it may take.
    fn room(&self) -> u64 {
        self.member.max_active.map_or(u64::MAX, |most| u64::from(most).saturating_sub(self.active))
    }
}

#[cfg(test)]
mod tests;
