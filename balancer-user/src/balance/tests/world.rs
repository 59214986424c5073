use std::collections::BTreeMap;

use balancer_common::{STAMP_SHIFT, age_bucket};

use crate::balance::*;

pub const SPAN: Duration = Duration::from_secs(14);
pub const TICK: u64 = 100;

/// How far apart flows may come.
const STEP: u64 = 5;
/// Bytes of each packet.
const PACKET: u64 = 125_000;

/// A service as the data plane and the controller play it: flows take slots and are counted at once, or later.
pub struct World {
    pub balance: Balance,
    pub now: u64,
    pub slots: Vec<BackendId>,
    pub taken: u64,
    pub growth: Vec<Observation>,
    /// Open flows of each backend: those of `run` end with their last packet, others when told.
    pub active: Vec<u64>,
    ends: BTreeMap<u64, Vec<BackendId>>,
    ages: [Traffic; AGES],
    /// Whether the balance is told of them.
    pub tells_ages: bool,
    /// By when they are sent, the packets that flows have yet to send: to which backend, and when the flow opened.
    later: BTreeMap<u64, Vec<(BackendId, u64)>>,
}

/// Flows that are all the same.
#[derive(Clone, Copy, Debug)]
pub struct Flows {
    /// Milliseconds from one flow to the next.
    pub every: u64,
    /// Packets of each.
    pub packets: u64,
    /// Milliseconds from one packet to the next.
    pub gap: u64,
}

impl World {
    pub fn new(method: Method, weights: &[u8]) -> World {
        let balance = Balance::new(method, SPAN);
        let growth = vec![Observation::default(); 16];
        let mut world = World {
            balance,
            now: 0,
            slots: Vec::new(),
            taken: 0,
            growth,
            active: vec![0; 64],
            ends: BTreeMap::new(),
            ages: [Traffic::default(); AGES],
            tells_ages: true,
            later: BTreeMap::new(),
        };
        world.weights(weights);
        world
    }

    pub fn time(&self) -> Monotonic {
        Monotonic::from_boot(Duration::from_millis(1_000 + self.now))
    }

    pub fn weights(&mut self, weights: &[u8]) {
        let members: Vec<Member> = weights.iter().zip(0..).map(|(weight, id)| member(id, *weight)).collect();
        self.balance.set_members(self.time(), &members);
        self.tick();
    }

    pub fn tick(&mut self) {
        for (growth, active) in self.growth.iter_mut().zip(&self.active) {
            (growth.active, growth.requests) = (*active, *active);
        }
        let observations: Vec<_> = (0..).zip(self.growth.drain(..)).collect();
        self.growth = vec![Observation::default(); observations.len()];
        self.balance.observe(self.time(), &observations);
        let ages = std::mem::replace(&mut self.ages, [Traffic::default(); AGES]);
        if self.tells_ages {
            self.balance.observe_ages(self.time(), &ages);
        }
        if let Some(plan) = self.balance.plan(self.time(), Taken { counted: self.taken, now: self.taken }) {
            self.slots = plan.slots.clone();
            self.taken = 0;
            self.balance.install(plan);
        }
    }

    /// Ticks until `millis` have passed.
    pub fn pass(&mut self, millis: u64, tick: u64) {
        for _ in 0..millis / tick {
            self.now += tick;
            self.tick();
        }
    }

    /// Lets flows come and send until `millis` have passed, with a tick every so often; who took them.
    pub fn run(&mut self, millis: u64, tick: u64, flows: Flows) -> Vec<BackendId> {
        let mut picks = Vec::new();
        for _ in 0..millis / STEP {
            self.now += STEP;
            for (id, opened) in self.later.remove(&self.now).unwrap_or_default() {
                let stamp = |millis: u64| ((1_000 + millis) * 1_000_000) >> STAMP_SHIFT;
                let age = stamp(self.now) - stamp(opened);
                let ages = age_bucket(age as u32).map(|bucket| &mut self.ages[bucket]);
                for traffic in [Some(&mut self.growth[usize::from(id)].traffic), ages].into_iter().flatten() {
                    traffic.packets += 1;
                    traffic.bytes += PACKET;
                }
            }
            for id in self.ends.remove(&self.now).unwrap_or_default() {
                self.active[usize::from(id)] -= 1;
            }
            if self.now.is_multiple_of(flows.every) {
                let id = self.flow();
                picks.push(id);
                self.go_on(id, flows);
            }
            if self.now.is_multiple_of(tick) {
                self.tick();
            }
        }
        picks
    }

    /// The same, and once in three seconds ten flows at once that last for a quarter of a minute.
    pub fn run_with_bursts(&mut self, millis: u64, tick: u64, flows: Flows) -> Vec<BackendId> {
        let long = Flows { every: 0, packets: 150, gap: 100 };
        let mut picks = Vec::new();
        for step in 0..millis / 100 {
            picks.extend(self.run(100, tick, flows));
            for _ in 0..if step % 30 == 7 { 10 } else { 0 } {
                let id = self.flow();
                picks.push(id);
                self.go_on(id, long);
            }
        }
        picks
    }

    /// What a flow that has just been opened sends after its first packet.
    fn go_on(&mut self, id: BackendId, flows: Flows) {
        self.ends.entry(self.now + flows.packets * flows.gap).or_default().push(id);
        for packet in 1..flows.packets {
            self.later.entry(self.now + packet * flows.gap).or_default().push((id, self.now));
        }
    }

    /// Packets of 125,000 bytes: of flows that open with them, or of very old ones.
    pub fn count(&mut self, id: BackendId, packets: u64, opened: u64) {
        let growth = &mut self.growth[usize::from(id)];
        let age = &mut self.ages[if opened > 0 { 0 } else { AGES - 1 }];
        for traffic in [&mut growth.traffic, age] {
            traffic.packets += packets;
            traffic.bytes += packets * PACKET;
        }
        growth.opened += opened;
    }

    pub fn take(&mut self) -> BackendId {
        let id = self.slots[(self.taken % self.slots.len() as u64) as usize];
        self.taken += 1;
        id
    }

    /// A flow of one packet.
    pub fn flow(&mut self) -> BackendId {
        let id = self.take();
        self.count(id, 1, 1);
        self.active[usize::from(id)] += 1;
        id
    }

    pub fn flows(&mut self, count: usize) -> Vec<BackendId> {
        (0..count).map(|_| self.flow()).collect()
    }

    pub fn plan(&mut self, counted: u64, now: u64) -> Option<Plan> {
        self.balance.plan(self.time(), Taken { counted, now })
    }

    pub fn next(&self, length: usize) -> Vec<BackendId> {
        self.slots.iter().copied().cycle().skip(self.taken as usize).take(length).collect()
    }
}

pub fn longest_run(picks: &[BackendId]) -> usize {
    picks.chunk_by(|a, b| a == b).map(<[BackendId]>::len).max().unwrap_or(0)
}

pub fn count_of(id: BackendId, picks: &[BackendId]) -> usize {
    picks.iter().filter(|pick| **pick == id).count()
}

/// A backend without limits.
pub fn member(id: BackendId, weight: u8) -> Member {
    Member { id, identity: 0x0a00_020b_1f90 + u64::from(id), weight, is_backup: false, max_active: None }
}
