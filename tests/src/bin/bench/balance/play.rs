//! The simulation: flows arrive, are given to backends and send; the counters are read every tick.

use std::{cmp::Reverse, collections::BinaryHeap};

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

/// A flow under way.
struct Sender {
    flow: Flow,
    backend: usize,
    next: u64,
    left: u64,
}

struct World {
    choice: Box<dyn Choice>,
    judge: Judge,
    live: Vec<Live>,
    /// What ends, or is forgotten, when.
    ends: BinaryHeap<Reverse<(u64, usize, bool)>>,
    calendar: Vec<Vec<Sender>>,
    growth: Vec<Observation>,
    ages: [Traffic; AGES],
}

/// Plays a scene for `seconds` and judges what comes after the warm-up (steady scenes: a minute after it).
pub fn play(scene: &Scene, kind: Kind, seed: u64, seconds: u64) -> Verdict {
    let weights = scene.weights.list();
    let count = weights.len();
    let from = WARM_UP + if scene.returns { 0 } else { 60 * SECOND };
    let end = seconds * SECOND;
    let mut world = World {
        choice: kind.start(scene.measure, seed),
        judge: Judge::new(&weights, scene.measure, WARM_UP, from),
        live: vec![Live::default(); count],
        ends: BinaryHeap::new(),
        calendar: (0..CALENDAR).map(|_| Vec::new()).collect(),
        growth: vec![Observation::default(); count],
        ages: [Traffic::default(); AGES],
    };
    let mut first = weights.clone();
    if let (Some(last), true) = (first.last_mut(), scene.returns) {
        *last = 0;
    }
    world.choice.set_weights(0, &first);
    let mut flows = scene.workload.flows(seed, count, end).peekable();
    for now in (TICK..=end).step_by(TICK as usize) {
        while let Some(flow) = flows.next_if(|flow| flow.at <= now) {
            world.open(flow);
        }
        world.send(now);
        world.judge.count(now, &world.growth);
        world.choice.observe(now, &world.growth, &world.ages);
        world.growth.fill(Observation::default());
        world.ages.fill(Traffic::default());
        while let Some(flow) = flows.next_if(|flow| flow.at <= now + READING) {
            world.open(flow);
        }
        if now == WARM_UP && scene.returns {
            world.choice.set_weights(now, &weights);
        }
        world.choice.plan(now);
    }
    world.judge.verdict()
}

impl World {
    fn open(&mut self, flow: Flow) {
        while let Some(Reverse((when, backend, was_open))) = self.ends.peek().copied() {
            if when > flow.at {
                break;
            }
            self.ends.pop();
            if was_open {
                self.live[backend].active -= 1;
                self.live[backend].inactive += 1;
                self.ends.push(Reverse((when + INACTIVE, backend, false)));
            } else {
                self.live[backend].inactive -= 1;
            }
        }
        let backend = self.choice.choose(&self.live);
        self.judge.pick(flow.at, backend);
        self.live[backend].active += 1;
        self.ends.push(Reverse((flow.end, backend, true)));
        self.growth[backend].opened += 1;
        self.queue(Sender { flow, backend, next: flow.at, left: flow.packets });
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
            while sender.left > 0 && sender.next <= now {
                let packet = Traffic { packets: 1, bytes: sender.flow.size };
                add(&mut self.growth[sender.backend].traffic, packet);
                if let Some(bucket) = age_bucket(stamp(sender.next) - stamp(sender.flow.at)) {
                    add(&mut self.ages[bucket], packet);
                }
                sender.next += sender.flow.gap;
                sender.left -= 1;
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
