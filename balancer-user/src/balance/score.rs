use balancer_common::BackendId;

use super::{Balance, Measure, standing::FULL};
use crate::{clock::Monotonic, load::Load, responses::Responses, window::Totals};

/// Where a backend stands, for people to see.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// Whose score it is.
    pub id: BackendId,
    /// Its weight.
    pub weight: u8,
    /// N as measured, in the method's unit (`least-bandwidth`: Mbit/s; `least-response-time`: requests × milliseconds), two
    /// decimals; 0 for methods that measure nothing.
    pub n: f64,
    /// What its recent flows have yet to bring within the window, in the same unit, two decimals.
    pub committed: f64,
    /// What is compared: (N + committed) × 10000 / weight, two decimals; a newcomer's N is filled up, and while
    /// its share is ramped it is compared by the weight reached so far. `None` for weight 0.
    pub nw: Option<f64>,
    /// Fraction of its weight that slow start has reached: 1 but for a newcomer.
    pub ramp: f64,
    /// Fraction of the installed ring's slots.
    pub share: f64,
    /// What was counted in the window.
    pub window: Totals,
    /// The answers in the window, if the service follows them.
    pub responses: Responses,
    /// Whether it is new among others that are not: N is filled up with what they carry.
    pub newcomer: bool,
}

impl Balance {
    /// Where each backend stands, in configured order.
    pub fn scores(&self, now: Monotonic) -> Vec<Score> {
        let slots = &self.installed.slots;
        let totals = self.totals(now);
        let standings = self.standings(now, &totals);
        let each = self.backends.iter().zip(standings).zip(&totals);
        each.map(|((backend, standing), window)| Score {
            id: backend.member.id,
            weight: backend.member.weight,
            n: self.in_unit(standing.measured).shown(),
            committed: self.in_unit(standing.committed).shown(),
            nw: self.weighted(standing.compared, standing.weight),
            ramp: f64::from(standing.ramp) / f64::from(FULL),
            share: slots.iter().filter(|slot| **slot == backend.member.id).count() as f64
                / slots.len().max(1) as f64,
            window: *window,
            responses: backend.responses.totals(now),
            newcomer: standing.newcomer,
        })
        .collect()
    }

    /// A load in the unit that people see it in.
    pub(super) fn in_unit(&self, load: Load) -> Load {
        match self.measure {
            Measure::Bytes => load.megabits_over(u64::try_from(self.span.as_micros()).unwrap_or(u64::MAX)),
            _ => load,
        }
    }

    /// Nw of a load, for a weight in parts of `FULL`; `None` for weight 0.
    pub(super) fn weighted(&self, load: Load, weight: u32) -> Option<f64> {
        self.in_unit(load).times(u64::from(FULL)).shown_weighted(weight)
    }
}
