use super::Outcome;
use crate::{clock::Monotonic, config::Health};

/// What a backend's checks have come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It has not been checked yet: the first check decides.
    Unknown,
    /// It serves.
    Up,
    /// It does not.
    Down,
}

/// The judgement of one backend, check by check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judge {
    verdict: Verdict,
    since: Monotonic,
    reason: String,
    /// Of the last checks: how many passed or failed, one after the other. One of the two is 0.
    passed: u32,
    failed: u32,
    last_failure: Option<String>,
}

impl Judge {
    /// Of a backend of which nothing is known.
    pub fn unknown(now: Monotonic) -> Judge {
        Judge::begin(now, Verdict::Unknown, "not checked yet")
    }

    /// Of a backend that served before it was checked.
    pub fn up(now: Monotonic) -> Judge {
        Judge::begin(now, Verdict::Up, "it served before")
    }

    /// Of a backend that was down before this daemon was started.
    pub fn down(now: Monotonic) -> Judge {
        Judge::begin(now, Verdict::Down, "it was down before the balancer was started")
    }

    fn begin(now: Monotonic, verdict: Verdict, reason: &str) -> Judge {
        let reason = reason.to_owned();
        Judge { verdict, since: now, reason, passed: 0, failed: 0, last_failure: None }
    }

    /// Takes one more check into account; whether the verdict is another one now.
    ///
    /// `rise` good checks one after the other bring a backend up, `fall` bad ones take it down; the first one ever decides
    /// alone.
    pub fn judge(&mut self, now: Monotonic, outcome: &Outcome, check: &Health) -> bool {
        match outcome {
            Ok(()) => (self.passed, self.failed) = (self.passed.saturating_add(1), 0),
            Err(why) => {
                (self.passed, self.failed) = (0, self.failed.saturating_add(1));
                self.last_failure = Some(why.clone());
            }
        }
        let (verdict, count) = match (self.verdict, outcome) {
            (Verdict::Unknown, Ok(())) => (Verdict::Up, 1),
            (Verdict::Unknown, Err(_)) => (Verdict::Down, 1),
            (Verdict::Down, Ok(())) if self.passed >= check.rise => (Verdict::Up, self.passed),
            (Verdict::Up, Err(_)) if self.failed >= check.fall => (Verdict::Down, self.failed),
            _ => return false,
        };
        let checks = if count == 1 { "1 check".to_owned() } else { format!("{count} checks") };
        self.reason = match outcome {
            Ok(()) => format!("{checks} passed"),
            Err(why) => format!("{checks} failed: {why}"),
        };
        (self.verdict, self.since) = (verdict, now);
        true
    }

    /// What the checks have come to.
    pub const fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// Since when.
    pub const fn since(&self) -> Monotonic {
        self.since
    }

    /// Why.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// How many of the last checks passed, and how many failed, one after the other; one of the two is 0.
    pub const fn run(&self) -> (u32, u32) {
        (self.passed, self.failed)
    }

    /// Why the last check failed that did.
    pub fn last_failure(&self) -> Option<&str> {
        self.last_failure.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::Probe;

    fn check(rise: u32, fall: u32) -> Health {
        let [interval, timeout] = [Duration::from_secs(5), Duration::from_secs(2)];
        Health { probe: Probe::Ping, port: None, interval, timeout, rise, fall }
    }

    /// Plays checks, `+` passed and `-` failed, and writes down the verdict after each: `?`, `u` or `d`.
    fn played(mut judge: Judge, check: &Health, checks: &str) -> (String, Judge) {
        let mut verdicts = String::new();
        for (second, outcome) in (1..).zip(checks.chars()) {
            let outcome = if outcome == '+' { Ok(()) } else { Err("refused".to_owned()) };
            let before = judge.verdict();
            let is_changed = judge.judge(at(second), &outcome, check);
            assert_eq!(is_changed, judge.verdict() != before);
            verdicts.push(match judge.verdict() {
                Verdict::Unknown => '?',
                Verdict::Up => 'u',
                Verdict::Down => 'd',
            });
        }
        (verdicts, judge)
    }

    const fn at(second: u64) -> Monotonic {
        Monotonic::from_boot(Duration::from_secs(second))
    }

    #[test]
    fn only_consecutive_checks_turn_the_verdict() {
        for (judge, rise, fall, checks, expected) in [
            // The first one decides alone, either way.
            (Judge::unknown(at(0)), 2, 3, "+", "u"),
            (Judge::unknown(at(0)), 2, 3, "-", "d"),
            (Judge::unknown(at(0)), 2, 3, "-+-++", "ddddu"),
            // One failure among ten is nothing, two of three times either.
            (Judge::up(at(0)), 2, 3, "+++++-++++", "uuuuuuuuuu"),
            (Judge::up(at(0)), 2, 3, "--+--+---", "uuuuuuuud"),
            (Judge::up(at(0)), 1, 1, "-+-+", "dudu"),
            (Judge::down(at(0)), 2, 3, "+-+-++--+---++", "ddddduuuuuuddu"),
        ] {
            assert_eq!(played(judge, &check(rise, fall), checks).0, expected, "{checks}");
        }
    }

    #[test]
    fn a_verdict_has_its_time_and_its_reason() {
        let (_, judge) = played(Judge::unknown(at(0)), &check(2, 3), "");
        assert_eq!((judge.since(), judge.reason(), judge.run()), (at(0), "not checked yet", (0, 0)));
        let (_, judge) = played(judge, &check(2, 3), "+---");
        assert_eq!((judge.since(), judge.reason(), judge.run()), (at(4), "3 checks failed: refused", (0, 3)));
        let (_, judge) = played(judge, &check(2, 3), "-++++");
        assert_eq!((judge.since(), judge.reason(), judge.run()), (at(3), "2 checks passed", (4, 0)));
        assert_eq!(judge.last_failure(), Some("refused"));
    }
}
