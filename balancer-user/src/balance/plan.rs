use balancer_common::BackendId;

/// How many slots of the installed ring flows have taken since it was installed (`RingWord::taken`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// As read before the counters: these flows are in what was observed.
    pub counted: u64,
    /// As read now, or as a failed exchange returned it: those beyond `counted` are pending.
    pub now: u64,
}

/// A ring to be installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The backend of each future flow, at most `RING_SLOTS`; empty = no backend may take a flow.
    pub slots: Vec<BackendId>,
    /// Whoever took the last slot before this plan.
    last: Option<BackendId>,
    /// Where in the round-robin cycle the plan starts.
    turn: usize,
}

impl Plan {
    pub(super) const fn new(slots: Vec<BackendId>, last: Option<BackendId>, turn: usize) -> Plan {
        Plan { slots, last, turn }
    }

    /// Whoever took the last slot and is still a member; those that are gone leave the turn to whoever was before them.
    pub(super) fn last_pick(&self, taken: u64, is_member: impl Fn(BackendId) -> bool) -> Option<BackendId> {
        let length = self.slots.len() as u64;
        let back = (0..taken.min(length)).map(|back| (taken - 1 - back) % length);
        let picks = back.filter_map(|slot| self.slots.get(slot as usize).copied());
        picks.chain(self.last).find(|id| is_member(*id))
    }

    /// If whoever was last before this plan does not stay, the nearest before it in `order` that does.
    pub(super) fn replace_last(&mut self, order: &[BackendId], stays: impl Fn(BackendId) -> bool) {
        if let Some(place) = order.iter().position(|id| Some(*id) == self.last) {
            let (until, after) = order.split_at(place + 1);
            self.last = until.iter().rev().chain(after.iter().rev()).copied().find(|id| stays(*id));
        }
    }

    /// Whether flows would take the same slots, in the same order, if this ring stayed.
    pub(super) fn goes_on_as(&self, next: &Plan, taken: u64) -> bool {
        // Two rings that agree so far agree for ever (Fine and Wilf). The shorter one's slots alone say
        // nothing about what else is in the longer one, such as backends that are gone.
        let enough = self.slots.len() + next.slots.len();
        self.slots.is_empty() == next.slots.is_empty()
            && self.upcoming(taken).take(enough).eq(next.upcoming(0).take(enough))
    }

    /// The slots that flows will take next, for ever.
    pub(super) fn upcoming(&self, taken: u64) -> impl Iterator<Item = BackendId> {
        let cursor = taken.checked_rem(self.slots.len() as u64).unwrap_or(0);
        self.slots.iter().copied().cycle().skip(cursor as usize)
    }

    /// How many of each backend's slots were taken by flows that are not in the counters yet.
    pub(super) fn pending(&self, taken: Taken) -> impl Iterator<Item = (BackendId, u64)> {
        let pending = taken.now.saturating_sub(taken.counted);
        let length = self.slots.len() as u64;
        let rounds = pending.checked_div(length).unwrap_or(0);
        let rest = pending.checked_rem(length).unwrap_or(0);
        let whole = self.slots.iter().map(move |id| (*id, rounds)).filter(|(_, rounds)| *rounds > 0);
        whole.chain(self.upcoming(taken.counted).take(rest as usize).map(|id| (id, 1)))
    }

    /// Where in the round-robin cycle the next flow is.
    pub(super) fn turn_after(&self, taken: u64) -> usize {
        // A ring that is no whole number of cycles starts again at its own first slot when it goes round.
        self.turn + taken.checked_rem(self.slots.len() as u64).unwrap_or(0) as usize
    }
}
