use std::time::Duration;

use super::{Backend, Balance, Measure};
use crate::{
    clock::Monotonic,
    load::Load,
    openings::{Cell, nanos},
    window::Totals,
};

/// A weight that is not ramped counts this much for each unit; the parts in which slow start raises it.
pub(super) const FULL: u32 = 256;

/// How a backend stands in the choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Standing {
    /// N, as counted.
    pub measured: Load,
    /// What its recent flows have yet to bring within the window.
    pub committed: Load,
    /// Both together, and what a newcomer's history lacks.
    pub compared: Load,
    /// What a pick adds.
    pub charge: Load,
    /// Reached by slow start: 1 to `FULL`.
    pub ramp: u32,
    /// Its weight × `ramp`.
    pub weight: u32,
    /// Whether it is new among others that are not.
    pub newcomer: bool,
}

impl Balance {
    /// How each backend stands.
    pub(super) fn standings(&self, now: Monotonic, totals: &[Totals]) -> Vec<Standing> {
        let is_traffic = self.measure.is_traffic();
        let each = self.flows.as_ref().filter(|_| is_traffic).map(|flows| flows.committed(now));
        let traffic_charge = if is_traffic { self.charge(now, totals) } else { Load::ONE };
        let times = self.times(now);
        let plain = |(place, (backend, totals)): (usize, (&Backend, &Totals))| {
            let charge = times.get(place).copied().unwrap_or(traffic_charge);
            let measured = match self.measure {
                Measure::Requests | Measure::ResponseTime => charge.times(backend.requests),
                _ => Load::units(self.measure.of(totals.traffic)),
            };
            let committed = each.as_ref().map_or(0, |each| backend.opened.weighed(each));
            let committed = Load::micros(committed);
            let ramp = self.ramp(backend, now);
            Standing {
                measured,
                committed,
                compared: measured.plus(committed),
                charge,
                ramp,
                weight: u32::from(backend.member.weight) * ramp,
                newcomer: false,
            }
        };
        let mut standings: Vec<_> = self.backends.iter().zip(totals).enumerate().map(plain).collect();
        self.fill_up(now, traffic_charge, &mut standings);
        standings
    }

    /// `least-response-time`: the mean time of each backend's answers, in milliseconds. One without any has the mean of
    /// the others; without any at all, all have 1. Nothing for other methods.
    fn times(&self, now: Monotonic) -> Vec<Load> {
        if self.measure != Measure::ResponseTime {
            return Vec::new();
        }
        let own: Vec<_> = self.backends.iter().map(|backend| backend.responses.totals(now).mean()).collect();
        let known = own.iter().flatten();
        let mean = Load::mean_for(1, known.map(|time| (*time, 1))).unwrap_or(Load::ONE);
        own.into_iter().map(|time| time.unwrap_or(mean)).collect()
    }

    /// Adds to a newcomer's load what its history lacks.
    ///
    /// The settled carry m for each unit of weight, mean(N / weight). Of that, what they took since the newcomer came
    /// is t: what each of their flows opened since then counts by its age, brought and committed. The rest, m − t, is
    /// from before, and the newcomer can't have it: so it counts as if it had. That leaves it below the others just as
    /// long as it has taken fewer flows than they have: it gets its share, and can't take the stream. Slow start
    /// scales m by the fraction reached now, and each opening in t by the one reached then, so that the share follows
    /// the fraction.
    ///
    /// For flows that end within the window, m − t is 0 when the newcomer's history is full. Where flows live longer it
    /// is not: then it fades over the length of another window, for the newcomer to catch up in.
    ///
    /// Active requests end by themselves, and the newcomer's count like any: t is what it has itself.
    fn fill_up(&self, now: Monotonic, charge: Load, standings: &mut [Standing]) {
        let is_new = |backend: &Backend| backend.member.weight > 0 && !self.lacking(backend, now).is_zero();
        let (Some(flows), true) = (&self.flows, self.backends.iter().any(is_new)) else { return };
        // Who was there before the first of them came: for the whole window, or since the daemon was started.
        let first = self.backends.iter().filter(|backend| is_new(backend)).map(|backend| backend.since).min();
        let is_settled = |backend: &Backend| {
            backend.member.weight > 0
                && !is_new(backend)
                && (now.since(backend.since) >= self.span || Some(backend.since) < first)
        };
        let settled: Vec<_> =
            self.backends.iter().zip(&*standings).filter(|(backend, _)| is_settled(backend)).collect();
        let loads: Vec<_> =
            settled.iter().map(|(backend, standing)| (standing.compared, backend.member.weight)).collect();
        // Flows that the settled opened in each cell for each unit of weight, in millionths: their sum.
        let mut openings = vec![0u128; flows.openings().cells().len()];
        for (backend, _) in &settled {
            for (sum, count) in openings.iter_mut().zip(backend.opened.counts()) {
                *sum += u128::from(count) * 1_000_000 / u128::from(backend.member.weight);
            }
        }
        let middle = |cell: &Cell| Monotonic::from_boot(Duration::from_nanos(cell.from.midpoint(cell.until)));
        for (backend, standing) in self.backends.iter().zip(standings).filter(|(backend, _)| is_new(backend))
        {
            let Some(mean) = Load::mean_for(backend.member.weight, loads.iter().copied()) else { continue };
            let mean = mean.share(standing.ramp.into(), FULL.into());
            let fading = |lacking: Load| lacking.share(nanos(self.lacking(backend, now)), nanos(self.span));
            standing.newcomer = true;
            if !self.measure.is_traffic() {
                standing.compared = standing.compared.plus(fading(mean.less(standing.measured)));
                continue;
            }
            let since = flows.openings().cells().map(middle).zip(&openings);
            let taken = since.filter(|(when, _)| *when > backend.since && now.since(*when) < self.span);
            let taken: u128 = taken
                .map(|(when, opened)| {
                    let each = flows.counted(nanos(now.since(when)), charge);
                    (opened * u128::from(each)).saturating_mul(self.ramp(backend, when).into())
                })
                .fold(0, u128::saturating_add);
            // Millionths of flows × millionths of load.
            let parts = 1_000_000 * u128::from(FULL) * loads.len() as u128;
            let taken = Load::micros(taken / parts).times(backend.member.weight.into());
            // What it still carries from before makes up for some of it.
            let before = backend.window.totals_until(backend.since, now).traffic;
            let taken = taken.plus(Load::units(self.measure.of(before)));
            standing.compared = standing.compared.plus(fading(mean.less(taken)));
        }
    }

    /// How much of what a newcomer lacks still counts, as a part of the span: zero for those that are none.
    ///
    /// All until its history and its slow start are full; it fades over the span after that.
    fn lacking(&self, backend: &Backend, now: Monotonic) -> Duration {
        if !backend.is_late {
            return Duration::ZERO;
        }
        let full = self.span.max(self.slow_start);
        let over = now.since(backend.since).saturating_sub(full);
        self.span.saturating_sub(over)
    }

    /// What slow start has reached of a backend's weight: 1 to `FULL`.
    fn ramp(&self, backend: &Backend, now: Monotonic) -> u32 {
        let elapsed = now.since(backend.since);
        if !backend.is_late || elapsed >= self.slow_start {
            return FULL;
        }
        let reached =
            u128::from(nanos(elapsed)) * u128::from(FULL) / u128::from(nanos(self.slow_start)).max(1);
        // Below `FULL`.
        (reached as u32).max(1)
    }
}
