use std::time::Duration;

use balancer_common::{AGES, Traffic};

use super::Measure;
use crate::{
    clock::Monotonic,
    curve::Curve,
    load::Load,
    openings::{CellWeights, Openings, Row, Shift},
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

    /// What flows bring is to be learned anew, in another unit.
    pub(super) fn forget_profile(&mut self, now: Monotonic, span: Duration) {
        (self.profile, self.curve, self.untold) = (Profile::new(now, span), None, 0);
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

    /// What a flow of each cell has yet to bring within the window, in millionths.
    pub(super) fn committed(&self, now: Monotonic) -> CellWeights {
        self.openings.weights(now, |age| self.curve.as_ref().map_or(0, |curve| curve.committed(age)))
    }

    /// The same, with what it has brought; for a flow of any age. `unknown` while nothing has been learned.
    pub(super) fn counted(&self, age: u64, unknown: Load) -> u64 {
        match &self.curve {
            Some(curve) => curve.by(age).saturating_add(curve.committed(age)),
            None => u64::try_from(unknown.in_micros()).unwrap_or(u64::MAX),
        }
    }
}
