//! The walk over the flow table, a slice with each tick: what is silent for too long is freed, what leads to a backend that
//! is gone is ended, what counts as active is counted anew, and what is not answered is told from what is.

use std::time::Duration;

use anyhow::Result;
use balancer_common::{BackendId, Control, FlowEntry, FlowState, ServiceId, TCP, flags};

use super::{
    Controller,
    health::Checked,
    media::Controls,
    records::stamp,
    seats::{Duty, LiveBackend, LiveService},
};
use crate::{
    clock::Monotonic,
    datapath::{Ended, FlowTable},
    health::{Opening, Openings},
};

/// How long one walk over the flow table takes.
const SWEEP_TIME: Duration = Duration::from_secs(1);
/// After how long a backend that can't be reached counts as down: its link-layer address may only be asked for again.
const DOWN_AFTER: Duration = Duration::from_secs(3);

/// A walk, as far as it has come.
pub(super) struct Walk {
    next: usize,
    /// Buckets that are left of it.
    left: usize,
    at: Monotonic,
    /// When this walk began, and when the one before.
    begun: [Monotonic; 2],
    /// By `BackendId`.
    census: Vec<Census>,
    /// Flows by state, by `Phase`: of this walk so far, and of the last whole one.
    states: [u64; 3],
    pub(super) seen: [u64; 3],
    controls: Controls,
    /// Whether it is over, and its census not yet made use of.
    is_over: bool,
}

/// What a walk saw of one backend's flows, and what the counters said when it began.
#[derive(Clone, Copy, Debug, Default)]
struct Census {
    flows: u64,
    active: u64,
    awaiting: u64,
    opened: u64,
    closed: u64,
    asked: u64,
    answered: u64,
    /// Of those that were to be answered by now; `None` where nobody wants to know.
    openings: Option<Openings>,
    /// Flows that were opened after the first of these and before the second were to be answered by now: stamps.
    due: [u32; 2],
    protocol: u8,
    /// Whether a RST may also answer what was no SYN.
    is_hashed: bool,
}

/// Which flows of a backend are ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Doom {
    None,
    /// Those that lose nothing by being scheduled anew: UDP, and half-open connections.
    Light,
    All,
}

impl Walk {
    /// What the new flows of each backend have come to, by `BackendId`.
    pub(super) fn openings(&self) -> impl Iterator<Item = Option<Openings>> {
        self.census.iter().map(|census| census.openings)
    }

    pub(super) fn new(now: Monotonic) -> Walk {
        Walk {
            next: 0,
            left: 0,
            at: now,
            begun: [now; 2],
            census: Vec::new(),
            states: [0; 3],
            seen: [0; 3],
            controls: Controls::default(),
            is_over: false,
        }
    }
}

impl Census {
    /// Before a walk that begins at the first of these times; the one before began at the second.
    fn of(backend: Option<&LiveBackend>, begun: [Monotonic; 2], hashed: &[ServiceId]) -> Census {
        backend.map_or_else(Census::default, |backend| {
            let timeout = backend.passive.as_ref().map(|passive| passive.settings().timeout);
            Census {
                opened: backend.opened,
                closed: backend.closed,
                asked: backend.asked,
                answered: backend.answered,
                openings: timeout.map(|_| Openings::default()),
                due: begun.map(|begun| stamp(begun.minus(timeout.unwrap_or_default()))),
                protocol: backend.protocol,
                is_hashed: hashed.contains(&backend.service),
                ..Census::default()
            }
        })
    }

    fn add(&mut self, control: Control) {
        self.flows += 1;
        self.active += u64::from(control.flags() & flags::ACTIVE != 0);
        self.awaiting += u64::from(control.flags() & flags::AWAITING != 0);
    }

    /// Looks whether a flow that was to be answered by now was; of those that were not, each once.
    fn judge(&mut self, entry: &FlowEntry, flows: &FlowTable, now: u32) {
        let Some(openings) = &mut self.openings else { return };
        // How old it is is not known any more: it was judged when it was.
        if entry.control.flags() & flags::GROWN != 0 {
            return;
        }
        let is_after = |stamp| is_opened_after(entry, stamp);
        let [due, judged] = self.due;
        // Of those that are not yet due, this is the last that is seen.
        let is_due = is_after(judged) && (!is_after(due) || entry.is_expired(now));
        match Opening::of(entry, || flows.expected(entry)) {
            Some(Opening::Answered) => openings.is_answered |= is_after(judged),
            Some(Opening::Silent) => openings.silent += u32::from(is_due),
            Some(Opening::Refused) => openings.refused += u32::from(is_due && !self.is_hashed),
            None => {}
        }
    }
}

impl Controller {
    /// Walks on over the flow table, as far as the time since the last slice asks for. Called after the counters were read.
    pub(super) fn sweep(&mut self, now: Monotonic) -> Result<()> {
        if self.walk.is_over {
            self.compare();
            self.judge_openings(now)?;
            self.free_seats()?;
            self.walk.is_over = false;
        }
        if self.walk.left == 0 {
            self.begin_walk(now);
        }
        let elapsed = now.since(self.walk.at).min(SWEEP_TIME);
        self.walk.at = now;
        let share = elapsed.as_secs_f64() / SWEEP_TIME.as_secs_f64();
        let count = (self.datapath.flows().bucket_count() as f64 * share).ceil() as usize;
        self.walk_on(now, count);
        Ok(())
    }

    /// Walks over all of it at once: for a start, before anything waits for a tick.
    pub(super) fn count_flows(&mut self, now: Monotonic) -> Result<()> {
        self.begin_walk(now);
        self.walk_on(now, self.datapath.flows().bucket_count());
        // The counters were not read since, and nothing bounds what changed: what was seen is taken.
        for (backend, census) in self.backends.iter_mut().zip(&self.walk.census) {
            if let Some(backend) = backend {
                backend.closed = backend.opened.saturating_sub(census.active);
                backend.answered = backend.asked.saturating_sub(census.awaiting);
                if let Duty::Drain { from, .. } = &mut backend.duty {
                    *from = census.active;
                }
            }
        }
        self.walk.is_over = false;
        Ok(())
    }

    fn begin_walk(&mut self, now: Monotonic) {
        let [before, _] = self.walk.begun;
        self.walk.begun = [now, before];
        self.walk.next = 0;
        self.walk.states = [0; 3];
        self.walk.left = self.datapath.flows().bucket_count();
        let is_hashed = |service: &&LiveService| service.config.method.is_hash();
        let hashed: Vec<_> = self.services.iter().filter(is_hashed).map(|service| service.id).collect();
        let has_media = |service: &&LiveService| service.config.rtsp_nat.is_some();
        self.walk.controls.begin(self.services.iter().filter(has_media).map(|service| service.id));
        let census = |backend: &Option<LiveBackend>| Census::of(backend.as_ref(), self.walk.begun, &hashed);
        self.walk.census = self.backends.iter().map(census).collect();
    }

    fn walk_on(&mut self, now: Monotonic, count: usize) {
        let dooms: Vec<Doom> = self
            .backends
            .iter()
            .map(|backend| backend.as_ref().map_or(Doom::All, |backend| doom(backend, now)))
            .collect();
        let Walk { next, left, census, states, controls, .. } = &mut self.walk;
        let count = count.min(*left);
        let flows = self.datapath.flows();
        let sweep = flows.sweep(*next, count, stamp(now), |entry| {
            let id = usize::from(entry.backend);
            if let Some(phase) = entry.control.state().phase() {
                states[phase as usize] += 1;
            }
            if let Some(census) = census.get_mut(id) {
                census.add(entry.control);
                // Media are answered otherwise than their control connection.
                if entry.key.protocol == census.protocol {
                    census.judge(entry, flows, stamp(now));
                }
            }
            if controls.have_left(entry) {
                return true;
            }
            match dooms.get(id) {
                Some(Doom::All) | None => true,
                Some(Doom::Light) => is_light(entry),
                Some(Doom::None) => false,
            }
        });
        *next = sweep.next;
        *left -= count;
        if *left == 0 {
            self.walk.seen = self.walk.states;
            self.walk.is_over = true;
        }
        self.count_ended(&sweep.ended);
    }

    /// Counts what ended with flows that were taken out of the table here and not by the program.
    pub(super) fn count_ended(&mut self, ended: &Ended) {
        for (id, ended) in ended {
            if let Some(Some(backend)) = self.backends.get_mut(usize::from(*id)) {
                backend.closed += u64::from(ended & flags::ACTIVE != 0);
                backend.answered += u64::from(ended & flags::AWAITING != 0);
            }
        }
    }

    /// Puts the counts right where a whole walk has seen what they can't explain.
    ///
    /// A flow that was there all the time was seen; one that was opened or closed meanwhile may have been. So the true
    /// count when the walk began, less those closed since, is the least that was seen, and with those opened since, the
    /// most.
    fn compare(&mut self) {
        for (backend, census) in self.backends.iter_mut().zip(&self.walk.census) {
            let Some(backend) = backend else { continue };
            let active = [census.opened, census.closed, backend.opened, backend.closed];
            backend.closed = corrected(active, census.active);
            let awaiting = [census.asked, census.answered, backend.asked, backend.answered];
            backend.answered = corrected(awaiting, census.awaiting);
        }
    }

    /// Gives the numbers of backends back that have left, and of whose flows a whole walk has seen none.
    fn free_seats(&mut self) -> Result<()> {
        let mut is_changed = false;
        for (id, (seat, census)) in self.backends.iter_mut().zip(&self.walk.census).enumerate() {
            let is_free = seat.as_ref().is_some_and(|backend| {
                matches!(backend.duty, Duty::Leave { .. })
                    && census.flows == 0
                    && census.opened == backend.opened
            });
            if is_free {
                *seat = None;
                is_changed = true;
                self.datapath.set_backend(id as BackendId, &balancer_common::Backend::default())?;
            }
        }
        if is_changed {
            self.set_roles()?;
            self.write_endpoints()?;
        }
        Ok(())
    }
}

/// The count of what has ended, such that what is left agrees with what was seen of it.
fn corrected([begun_before, ended_before, begun, ended]: [u64; 4], seen: u64) -> u64 {
    let before = begun_before.saturating_sub(ended_before);
    let least = before.saturating_sub(ended - ended_before.min(ended));
    let most = before + (begun - begun_before.min(begun));
    if seen < least {
        ended + (least - seen)
    } else if seen > most {
        ended.saturating_sub(seen - most)
    } else {
        ended
    }
}

/// Whether a flow was opened after this stamp. The lower half of the stamp that it keeps of that comes round every 73 minutes,
/// so one that has been silent since is told by its last packet.
const fn is_opened_after(entry: &FlowEntry, stamp: u32) -> bool {
    entry.opened.wrapping_sub(stamp as u16) as i16 > 0 && entry.stamp.wrapping_sub(stamp) as i32 > 0
}

fn is_light(entry: &FlowEntry) -> bool {
    entry.key.protocol != TCP || entry.control.state() == FlowState::HalfOpen
}

fn doom(backend: &LiveBackend, now: Monotonic) -> Doom {
    // A service that keeps no flows has none: these are from before it was so configured.
    if backend.answers_as.is_some() || backend.ends().is_some_and(|until| now >= until) {
        return Doom::All;
    }
    let gone = |since: Option<Monotonic>, down_after| match since.map(|since| now.since(since)) {
        Some(time) if time >= down_after && time >= backend.drain_timeout => Doom::All,
        Some(time) if time >= down_after => Doom::Light,
        _ => Doom::None,
    };
    let failed_since = backend.health.as_ref().and_then(Checked::down_since);
    // Connections may go on where new ones are not answered.
    let is_out = backend.passive.as_ref().is_some_and(|passive| !passive.is_in());
    let out = if is_out { Doom::Light } else { Doom::None };
    gone(backend.unreachable_since, DOWN_AFTER).max(gone(failed_since, Duration::ZERO)).max(out)
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable as _;

    use super::*;

    #[test]
    fn a_flow_that_has_long_been_silent_is_not_taken_for_a_new_one() {
        let minutes =
            |minutes: u32| minutes * 60 * 1_000_000_000u64.div_ceil(1 << balancer_common::STAMP_SHIFT) as u32;
        let opened = u32::MAX - 1_000;
        let entry = FlowEntry { opened: opened as u16, stamp: opened.wrapping_add(9), ..FlowEntry::zeroed() };
        for silent in [1, 30, 40, 60, 80, 120, 1_000] {
            assert!(!is_opened_after(&entry, opened.wrapping_add(minutes(silent))), "{silent}");
        }
        assert!(!is_opened_after(&entry, opened));
        assert!(is_opened_after(&entry, opened - 1));
        assert!(is_opened_after(&entry, opened - minutes(30)));
    }

    #[test]
    fn a_count_is_put_right_only_where_nothing_explains_it() {
        // 10 begun and 4 ended before; 13 and 6 since: 4 to 9 can have been seen.
        let counts = [10, 4, 13, 6];
        for (seen, ended) in [(4, 6), (6, 6), (9, 6), (3, 7), (0, 10), (10, 5), (15, 0), (99, 0)] {
            assert_eq!(corrected(counts, seen), ended, "{seen}");
        }
        assert_eq!(corrected([5, 5, 5, 5], 0), 5);
        assert_eq!(corrected([0, 3, 0, 3], 0), 3, "more ended than begun is nothing left, not less");
    }
}
