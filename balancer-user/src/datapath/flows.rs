//! The controller's part in the flow table: expiring what has been silent for too long, without a system call.

use std::sync::atomic::Ordering;

use balancer_common::{BackendId, Control, FlowEntry, FlowState, NO_TWIN, WAYS, flags};

use super::Datapath;

/// What a slice of the sweep found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sweep {
    /// For each flow that was freed: its backend, and the flags by which it still counted.
    pub ended: Vec<(BackendId, u8)>,
    /// The bucket that the next slice starts at.
    pub next: usize,
}

impl Datapath {
    /// How many buckets the flow table has.
    pub fn buckets(&self) -> usize {
        self.flow_tags.len()
    }

    /// Looks at `count` buckets from `start` on, going round at the end, and frees flows of which neither direction
    /// has been used within its timeout at the stamp `now`, and those that are `doomed`, which is asked for each flow's
    /// request direction. Empty ways cost nothing: their tags say so.
    pub fn sweep(
        &self,
        start: usize,
        count: usize,
        now: u32,
        mut doomed: impl FnMut(Control, &FlowEntry) -> bool,
    ) -> Sweep {
        let buckets = self.buckets();
        let mut sweep = Sweep { next: start % buckets, ..Sweep::default() };
        for _ in 0..count.min(buckets) {
            let tags = self.flow_tags.word(sweep.next).load(Ordering::Acquire).to_le_bytes();
            for (way, _) in tags.iter().enumerate().filter(|(_, tag)| **tag != 0) {
                self.expire(sweep.next * WAYS + way, now, &mut doomed, &mut sweep.ended);
            }
            sweep.next = (sweep.next + 1) % buckets;
        }
        sweep
    }

    fn expire(
        &self,
        index: usize,
        now: u32,
        doomed: &mut impl FnMut(Control, &FlowEntry) -> bool,
        ended: &mut Vec<(BackendId, u8)>,
    ) {
        let Some((control, entry)) = self.live_entry(index) else { return };
        let is_doomed = control.flags() & flags::REPLY == 0 && doomed(control, &entry);
        if !is_doomed && !entry.is_expired(now) {
            return;
        }
        let twin = (entry.twin != NO_TWIN)
            .then_some(entry.twin as usize)
            .filter(|twin| *twin < self.flows.len())
            .and_then(|twin| Some((twin, self.live_entry(twin)?)))
            .filter(|(_, (_, other))| other.twin as usize == index);
        if let Some((_, (_, other))) = &twin
            && !is_doomed
            && !other.is_expired(now)
        {
            return;
        }
        // The port that a reply's entry holds is not free with its flow, which ends when the request's entry is looked at.
        if entry.holds_port() && (twin.is_some() || !entry.has_rested(now)) {
            return;
        }
        self.free(index, control, &entry, ended);
        let Some((index, (control, other))) = twin else { return };
        if !other.holds_port() {
            self.free(index, control, &other, ended);
        } else if control.state() == FlowState::Closing {
            self.rest(index, control, later(entry.stamp, other.stamp));
        } else {
            self.rest(index, control, now);
        }
    }

    /// Lets the port that a reply's entry holds rest from the stamp `end` on, as the program does: the entry stays, and
    /// has expired for every packet.
    fn rest(&self, index: usize, control: Control, end: u32) {
        let word = self.flows.control(index);
        let busy = Control::new(FlowState::Busy, 0, control.sequence());
        if word.compare_exchange(control.0, busy.0, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return;
        }
        self.flow_tags.unprotect(index / WAYS, index % WAYS);
        self.flows.expire(index, end.wrapping_sub(1));
        let resting = Control::new(FlowState::Closing, flags::REPLY, control.sequence());
        word.store(resting.0, Ordering::Release);
    }

    fn live_entry(&self, index: usize) -> Option<(Control, FlowEntry)> {
        let before = Control(self.flows.control(index).load(Ordering::Acquire));
        if !before.is_live() {
            return None;
        }
        let entry = self.flows.snapshot(index);
        let after = Control(self.flows.control(index).load(Ordering::Acquire));
        (before.sequence() == after.sequence()).then_some((after, entry))
    }

    /// Frees an entry as the program does: claimed, then without a tag, then free.
    fn free(&self, index: usize, control: Control, entry: &FlowEntry, ended: &mut Vec<(BackendId, u8)>) {
        let word = self.flows.control(index);
        let busy = Control::new(FlowState::Busy, 0, control.sequence());
        if word.compare_exchange(control.0, busy.0, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return;
        }
        self.flow_tags.clear_tag(index / WAYS, index % WAYS);
        word.store(Control::new(FlowState::Free, 0, control.sequence()).0, Ordering::Release);
        if control.flags() & flags::REPLY == 0 {
            ended.push((entry.backend, control.flags() & (flags::ACTIVE | flags::AWAITING)));
        }
    }
}

/// The later of two stamps.
const fn later(a: u32, b: u32) -> u32 {
    if a.wrapping_sub(b) as i32 > 0 { a } else { b }
}
