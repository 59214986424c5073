use std::time::Duration;

use balancer_common::{AGES, Traffic};

use super::Measure;
use crate::{
    clock::Monotonic,
    curve::Curve,
    load::Load,
    openings::{Cell, Openings, Row, Shift, nanos},
    profile::Profile,
};

/// What is known of a service's flows: when they were opened, and what one brings by each age.
#[derive(Clone, Debug)]
pub(super) struct Flows {
    openings: Openings,
    profile: Profile,
    curve: Option<Curve>,
    /// Opened since the profile was told last.
    untold: u64,
}

impl Flows {
    pub(super) fn new(now: Monotonic, span: Duration) -> Flows {
        Flows {
            openings: Openings::new(now, Profile::reach(span)),
            profile: Profile::new(now, span),
            curve: None,
            untold: 0,
        }
    }

    /// Flows were opened since the last call; every backend's row follows.
    pub(super) fn opened(&mut self, now: Monotonic, opened: u64) -> Shift {
        self.untold = self.untold.saturating_add(opened);
        self.openings.push(now, opened)
    }

    pub(super) fn row(&self) -> Row {
        self.openings.row()
    }

    pub(super) const fn openings(&self) -> &Openings {
        &self.openings
    }

    pub(super) fn learn(&mut self, now: Monotonic, measure: Measure, growth: &[Traffic; AGES]) {
        let opened = std::mem::take(&mut self.untold);
        let [youngest, ..] = growth;
        let brought = growth.iter().map(|traffic| measure.of(*traffic));
        self.profile.observe(now, brought, youngest.packets, opened, &self.openings);
        self.curve = self.profile.curve();
    }

    /// What a pick is charged, once all of it has been learned: at least one unit.
    pub(super) fn charge(&self, now: Monotonic) -> Option<Load> {
        let is_known = self.curve.is_some() && self.profile.is_full(now);
        is_known.then(|| self.known_charge())
    }

    /// As far as it has been learned.
    pub(super) fn known_charge(&self) -> Load {
        self.curve.as_ref().map_or(Load::ONE, Curve::charge).max(Load::ONE)
    }

    /// For each cell, oldest first: what one of its flows has yet to bring within the window, in millionths.
    pub(super) fn committed(&self, now: Monotonic) -> Vec<u64> {
        self.by_cell(now, 0, Curve::committed)
    }

    /// The same, with what it has brought; `unknown` while nothing has been learned.
    pub(super) fn counted(&self, now: Monotonic, unknown: Load) -> Vec<u64> {
        let unknown = u64::try_from(unknown.in_micros()).unwrap_or(u64::MAX);
        self.by_cell(now, unknown, |curve, age| curve.by(age).saturating_add(curve.committed(age)))
    }

    fn by_cell(&self, now: Monotonic, unknown: u64, of: impl Fn(&Curve, u64) -> u64) -> Vec<u64> {
        let Some(curve) = &self.curve else { return vec![unknown; self.openings.cells().len()] };
        let age = |cell: &Cell| nanos(now.since(cell.from)).midpoint(nanos(now.since(cell.until)));
        self.openings.cells().map(|cell| of(curve, age(cell))).collect()
    }
}

/// The same for all flows in `row` together, given what each brings.
pub(super) fn committed(row: &Row, each: &[u64]) -> Load {
    let cells = row.counts().zip(each).map(|(count, each)| u128::from(count) * u128::from(*each));
    Load::micros(cells.fold(0, u128::saturating_add))
}
