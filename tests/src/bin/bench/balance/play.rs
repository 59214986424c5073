//! The simulation: flows arrive, are given to backends and send; the counters are read every tick.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use balancer_common::{AGES, STAMP_SHIFT, Traffic, age_bucket};
use balancer_user::{balance::Observation, method::Method};

use super::{
    choice::{Choice, Kind, Live},
    verdict::{Judge, Verdict},
    workload::{Flow, SECOND, Workload},
};

/// Length of the window.
pub const SPAN: u64 = 14 * SECOND;
/// Time from one reading of the counters to the next.
pub const TICK: u64 = SECOND / 10;
/// Time from the reading to the new ring: flows that open in it are pending.
const READING: u64 = SECOND / 1_000;
/// When the backend that was down comes back.
pub const WARM_UP: u64 = 60 * SECOND;
/// How long a flow that ended is remembered as such.
const INACTIVE: u64 = 120 * SECOND;
/// Ticks that the calendar of packets holds: no gap between two packets is longer.
const CALENDAR: usize = 64;

/// One run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scene {
    pub workload: Workload,
    pub weights: Weights,
    pub measure: Method,
    /// Whether the last backend is down during the warm-up, and comes back empty.
    pub returns: bool,
}

/// How many backends, and their weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    Equal(usize),
    /// 1, 2, 3, 4.
    Rising,
}

impl Weights {
    pub fn list(self) -> Vec<u8> {
        match self {
            Weights::Equal(count) => vec![1; count],
            Weights::Rising => vec![1, 2, 3, 4],
        }
    }
}

/// How many methods are played.
const KINDS: usize = Kind::ALL.len();

/// A flow under way.
struct Sender {
    flow: Flow,
    /// Whose it is with each method.
    backends: [u8; KINDS],
    next: u64,
    left: u64,
}

/// What differs from method to method.
struct Player {
    choice: Box<dyn Choice>,
    judge: Judge,
    live: Vec<Live>,
    growth: Vec<Observation>,
}

/// The flows, and what they send, which is the same with each method: so they are played only once for all.
struct World {
    players: [Player; KINDS],
    /// Which open flow ends when, and whose it is with each method.
    ends: BinaryHeap<Reverse<(u64, [u8; KINDS])>>,
    /// The same of when those that have ended are forgotten, in order.
    ended: VecDeque<(u64, [u8; KINDS])>,
    calendar: Vec<Vec<Sender>>,
    ages: [Traffic; AGES],
}

/// Plays a scene for `seconds` with each method, and judges what comes after the warm-up (steady scenes: a minute after it).
pub fn play(scene: &Scene, seed: u64, seconds: u64) -> [Verdict; KINDS] {
    let weights = scene.weights.list();
    let count = weights.len();
    let from = WARM_UP + if scene.returns { 0 } else { 60 * SECOND };
    let end = seconds * SECOND;
    let player = |kind: Kind| Player {
        choice: kind.start(scene.measure, seed),
        judge: Judge::new(&weights, scene.measure, WARM_UP, from),
        live: vec![Live::default(); count],
        growth: vec![Observation::default(); count],
    };
    let mut world = World {
        players: Kind::ALL.map(player),
        ends: BinaryHeap::new(),
        ended: VecDeque::new(),
        calendar: (0..CALENDAR).map(|_| Vec::new()).collect(),
        ages: [Traffic::default(); AGES],
    };
    let mut first = weights.clone();
    if let (Some(last), true) = (first.last_mut(), scene.returns) {
        *last = 0;
    }
    world.set_weights(0, &first);
    let mut flows = scene.workload.flows(seed, count, end).peekable();
    for now in (TICK..=end).step_by(TICK as usize) {
        while let Some(flow) = flows.next_if(|flow| flow.at <= now) {
            world.open(flow);
        }
        world.send(now);
        for player in &mut world.players {
            player.judge.count(now, &player.growth);
            player.choice.observe(now, &player.growth, &world.ages);
            player.growth.fill(Observation::default());
        }
        world.ages.fill(Traffic::default());
        while let Some(flow) = flows.next_if(|flow| flow.at <= now + READING) {
            world.open(flow);
        }
        if now == WARM_UP && scene.returns {
            world.set_weights(now, &weights);
        }
        world.players.iter_mut().for_each(|player| player.choice.plan(now));
    }
    world.players.each_ref().map(|player| player.judge.verdict())
}

impl Player {
    /// Opens a flow; its backend.
    fn open(&mut self, flow: &Flow) -> u8 {
        let backend = self.choice.choose(&self.live);
        self.judge.pick(flow.at, backend);
        self.live[backend].active += 1;
        self.growth[backend].opened += 1;
        // There are a hundred at most.
        backend as u8
    }
}

impl World {
    fn set_weights(&mut self, now: u64, weights: &[u8]) {
        self.players.iter_mut().for_each(|player| player.choice.set_weights(now, weights));
    }

    fn open(&mut self, flow: Flow) {
        self.end(flow.at);
        let backends = self.players.each_mut().map(|player| player.open(&flow));
        self.ends.push(Reverse((flow.end, backends)));
        self.queue(Sender { flow, backends, next: flow.at, left: flow.packets });
    }

    /// Ends and forgets what has ended by now.
    fn end(&mut self, now: u64) {
        while let Some(Reverse((when, backends))) = self.ends.peek().copied()
            && when <= now
        {
            self.ends.pop();
            self.ended.push_back((when + INACTIVE, backends));
            for (player, backend) in self.players.iter_mut().zip(backends) {
                let live = &mut player.live[usize::from(backend)];
                live.active -= 1;
                live.inactive += 1;
            }
        }
        while let Some((when, backends)) = self.ended.front().copied()
            && when <= now
        {
            self.ended.pop_front();
            for (player, backend) in self.players.iter_mut().zip(backends) {
                player.live[usize::from(backend)].inactive -= 1;
            }
        }
    }

    fn queue(&mut self, sender: Sender) {
        let tick = sender.next.div_ceil(TICK) as usize;
        self.calendar[tick % CALENDAR].push(sender);
    }

    /// All packets of the tick that ends now.
    fn send(&mut self, now: u64) {
        let tick = (now / TICK) as usize % CALENDAR;
        let stamp = |time: u64| (time >> STAMP_SHIFT) as u32;
        for mut sender in std::mem::take(&mut self.calendar[tick]) {
            let mut sent = Traffic::default();
            while sender.left > 0 && sender.next <= now {
                let packet = Traffic { packets: 1, bytes: sender.flow.size };
                add(&mut sent, packet);
                if let Some(bucket) = age_bucket(stamp(sender.next) - stamp(sender.flow.at)) {
                    add(&mut self.ages[bucket], packet);
                }
                sender.next += sender.flow.gap;
                sender.left -= 1;
            }
            for (player, backend) in self.players.iter_mut().zip(sender.backends) {
                add(&mut player.growth[usize::from(backend)].traffic, sent);
            }
            if sender.left > 0 {
                self.queue(sender);
            }
        }
    }
}

fn add(sum: &mut Traffic, more: Traffic) {
    sum.packets += more.packets;
    sum.bytes += more.bytes;
}
