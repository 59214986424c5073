//! This balancer itself, driven as the controller drives it.

use std::time::Duration;

use balancer_common::{AGES, BackendId, RING_SLOTS, RingWord, Traffic};
use balancer_user::{
    balance::{Balance, Member, Observation, Taken},
    clock::Monotonic,
    method::Method,
};

use super::{Choice, Live};
use crate::balance::play::SPAN;

pub struct Balancer {
    balance: Balance,
    learns: bool,
    slots: Vec<BackendId>,
    word: RingWord,
    counted: u64,
}

impl Balancer {
    pub fn new(method: Method, learns: bool) -> Balancer {
        let balance = Balance::new(method, Duration::from_nanos(SPAN));
        Balancer { balance, learns, slots: Vec::new(), word: RingWord::new(0, 0), counted: 0 }
    }
}

impl Choice for Balancer {
    fn set_weights(&mut self, now: u64, weights: &[u8]) {
        let member = |(id, weight): (BackendId, &u8)| Member {
            id,
            identity: u64::from(id),
            weight: *weight,
            is_backup: false,
            max_active: None,
        };
        let members: Vec<_> = (0..).zip(weights).map(member).collect();
        self.balance.set_members(time(now), &members);
        self.counted = self.word.taken();
        self.plan(now);
    }

    fn choose(&mut self, _: &[Live]) -> usize {
        let slot = self.word.slot();
        self.word.0 = self.word.0.wrapping_add(RingWord::TAKE);
        slot.and_then(|slot| self.slots.get(slot)).map_or(0, |id| usize::from(*id))
    }

    fn observe(&mut self, now: u64, growth: &[Observation], ages: &[Traffic; AGES]) {
        self.counted = self.word.taken();
        let growth: Vec<_> = (0..).zip(growth.iter().copied()).collect();
        self.balance.observe(time(now), &growth);
        if self.learns {
            self.balance.observe_ages(time(now), ages);
        }
    }

    fn plan(&mut self, now: u64) {
        let taken = Taken { counted: self.counted, now: self.word.taken() };
        if let Some(plan) = self.balance.plan(time(now), taken) {
            self.slots.clone_from(&plan.slots);
            self.word = RingWord::new(1 - self.word.half(), plan.slots.len().min(RING_SLOTS));
            self.balance.install(plan);
        }
    }
}

fn time(now: u64) -> Monotonic {
    Monotonic::from_boot(Duration::from_nanos(now))
}
