//! What clients' own flows say of a backend: whether new ones are answered.

use balancer_common::{FlowEntry, FlowState, TCP, flags};

use crate::{clock::Monotonic, config::PassiveHealth};

/// What has become of a new flow, as far as it says something of its backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// The backend has answered: TCP with a SYN-ACK, whatever its client made of that.
    Answered,
    /// It has not answered yet.
    Silent,
    /// It has answered a SYN with a RST.
    Refused,
}

impl Opening {
    /// Of a flow, as its request direction's entry is; `None` where that says nothing, as when the client has reset the
    /// connection before an answer. `expected` is asked what the other direction's entry waits for
    /// (`FlowEntry::exchange`).
    pub fn of(entry: &FlowEntry, expected: impl FnOnce() -> u32) -> Option<Opening> {
        let was_answered = entry.control.flags() & flags::ANSWERED != 0;
        // Once a connection was reset in its handshake, only that tells of a SYN-ACK.
        let is_answered = |expected: u32| (was_answered || expected != 0).then_some(Opening::Answered);
        match entry.control.state() {
            FlowState::Free | FlowState::Busy | FlowState::Opening => None,
            FlowState::Established | FlowState::Closing => Some(Opening::Answered),
            FlowState::HalfOpen if entry.key.protocol == TCP && was_answered => Some(Opening::Answered),
            FlowState::HalfOpen | FlowState::OneWay => Some(Opening::Silent),
            FlowState::BackendReset => is_answered(expected()).or(Some(Opening::Refused)),
            FlowState::ClientReset | FlowState::BothReset => is_answered(expected()),
        }
    }
}

/// What the new flows of one backend have come to, by one walk over the flow table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Openings {
    /// Those that have waited for an answer for too long.
    pub silent: u32,
    /// Those that were answered with a RST.
    pub refused: u32,
    /// Whether any was answered.
    pub is_answered: bool,
}

/// The judgement of one backend by its clients' flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passive {
    settings: PassiveHealth,
    /// Since the last answer.
    silent: u32,
    refused: u32,
    out: Option<Out>,
}

/// A backend that is out of the choice.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Out {
    since: Monotonic,
    reason: String,
    /// Health checks that have passed since, one after the other.
    passed: u32,
}

impl Passive {
    /// Of a backend of which nothing is known.
    pub const fn new(settings: PassiveHealth) -> Passive {
        Passive { settings, silent: 0, refused: 0, out: None }
    }

    /// The same with other settings.
    pub fn with(self, settings: PassiveHealth) -> Passive {
        Passive { settings, ..self }
    }

    /// When it is judged.
    pub const fn settings(&self) -> PassiveHealth {
        self.settings
    }

    /// Takes what a walk has seen into account; whether so many have failed, one after the other, that the backend is to be
    /// taken out.
    pub fn observe(&mut self, seen: Openings) -> bool {
        if seen.is_answered {
            (self.silent, self.refused) = (0, 0);
        } else {
            self.silent = self.silent.saturating_add(seen.silent);
            self.refused = self.refused.saturating_add(seen.refused);
        }
        self.out.is_none() && self.silent.saturating_add(self.refused) >= self.settings.failures
    }

    /// Takes the backend out, whose flows are of this protocol.
    pub fn take_out(&mut self, now: Monotonic, protocol: u8) {
        let what = if protocol == TCP { "SYN" } else { "UDP flow" };
        let many = |count: u32| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let reason = match (self.silent, self.refused) {
            (silent, 0) => format!("passive: {} without answer", many(silent)),
            (0, refused) => format!("passive: {} answered with a reset", many(refused)),
            (silent, refused) => {
                format!("passive: {} without answer, {refused} answered with a reset", many(silent))
            }
        };
        self.out = Some(Out { since: now, reason, passed: 0 });
    }

    /// Whether the backend may be in the choice.
    pub const fn is_in(&self) -> bool {
        self.out.is_none()
    }

    /// Since when it is out, and why, if it is.
    pub fn out(&self) -> Option<(Monotonic, &str)> {
        self.out.as_ref().map(|out| (out.since, out.reason.as_str()))
    }

    /// Takes a health check into account: `rise` that have passed, one after the other, bring it back. Whether this one has.
    pub fn check(&mut self, is_passed: bool, rise: u32) -> bool {
        let Some(out) = &mut self.out else { return false };
        out.passed = if is_passed { out.passed + 1 } else { 0 };
        let is_back = out.passed >= rise;
        if is_back {
            self.come_back();
        }
        is_back
    }

    /// Whether it has rested long enough; then it is back.
    pub fn rest(&mut self, now: Monotonic) -> bool {
        let is_over = self.out.as_ref().is_some_and(|out| now.since(out.since) >= self.settings.rest);
        if is_over {
            self.come_back();
        }
        is_over
    }

    fn come_back(&mut self) {
        (self.silent, self.refused, self.out) = (0, 0, None);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use balancer_common::{Control, FlowKey, UDP};
    use bytemuck::Zeroable as _;

    use super::*;

    const fn at(second: u64) -> Monotonic {
        Monotonic::from_boot(Duration::from_secs(second))
    }

    fn passive(failures: u32) -> Passive {
        let [timeout, rest] = [3, 30].map(Duration::from_secs);
        Passive::new(PassiveHealth { failures, timeout, rest })
    }

    fn failed(silent: u32, refused: u32) -> Openings {
        Openings { silent, refused, is_answered: false }
    }

    #[test]
    fn a_flow_says_whether_its_backend_has_answered() {
        use FlowState::{BackendReset, BothReset, ClientReset, Closing, Established, HalfOpen, OneWay};
        let answered = Some(Opening::Answered);
        for (protocol, state, marks, expected, opening) in [
            (TCP, HalfOpen, 0, 0, Some(Opening::Silent)),
            // A flood of SYNs is answered, though nobody completes a handshake.
            (TCP, HalfOpen, flags::ANSWERED, 7, answered),
            (TCP, Established, flags::ANSWERED, 7, answered),
            (TCP, Closing, 0, 0, answered),
            (TCP, BackendReset, 0, 0, Some(Opening::Refused)),
            // Reset after its SYN-ACK, as when the client's ACK was wrong.
            (TCP, BackendReset, 0, 7, answered),
            (TCP, BackendReset, flags::ANSWERED, 0, answered),
            (TCP, ClientReset, 0, 7, answered),
            (TCP, ClientReset, 0, 0, None),
            (TCP, BothReset, 0, 0, None),
            (UDP, HalfOpen, 0, 0, Some(Opening::Silent)),
            (UDP, OneWay, 0, 0, Some(Opening::Silent)),
            (UDP, Established, 0, 0, answered),
        ] {
            let key = FlowKey { protocol, ..FlowKey::zeroed() };
            let entry = FlowEntry { key, control: Control::new(state, marks, 1), ..FlowEntry::zeroed() };
            assert_eq!(Opening::of(&entry, || expected), opening, "{protocol} {state:?} {marks} {expected}");
        }
    }

    #[test]
    fn only_failures_without_an_answer_in_between_take_a_backend_out() {
        let mut judged = passive(10);
        for _ in 0..100 {
            assert!(!judged.observe(failed(6, 3)));
            assert!(!judged.observe(Openings { silent: 500, refused: 500, is_answered: true }));
        }
        assert!(!judged.observe(failed(6, 3)));
        assert!(judged.observe(failed(0, 1)));
        judged.take_out(at(5), TCP);
        assert!(!judged.observe(failed(9, 9)), "it is out already");
        let reason = "passive: 6 SYNs without answer, 4 answered with a reset";
        assert_eq!((judged.is_in(), judged.out()), (false, Some((at(5), reason))));
    }

    #[test]
    fn it_is_back_after_its_rest_or_by_its_checks() {
        for (protocol, seen, reason) in [
            (TCP, failed(1, 0), "passive: 1 SYN without answer"),
            (TCP, failed(0, 2), "passive: 2 SYNs answered with a reset"),
            (UDP, failed(12, 0), "passive: 12 UDP flows without answer"),
        ] {
            let mut judged = passive(1);
            assert!(judged.observe(seen));
            judged.take_out(at(5), protocol);
            assert_eq!(judged.out(), Some((at(5), reason)));
            assert!(!judged.rest(at(34)));
            assert!(judged.rest(at(35)) && judged.is_in());
            assert!(!judged.rest(at(36)), "only once");
            // Nothing of what it went for counts any more.
            assert!(!judged.observe(failed(0, 0)));
            assert!(judged.observe(seen));
            judged.take_out(at(50), protocol);
            let back = [true, false, true, true].map(|is_passed| judged.check(is_passed, 2));
            assert_eq!((back, judged.is_in()), ([false, false, false, true], true));
            assert!(!judged.check(true, 2));
        }
    }
}
