//! Whether backends serve, as their checks say.

use std::{net::SocketAddr, sync::Arc};

use anyhow::Result;
use balancer_common::{BackendId, ability};

use super::{Controller, seats::LiveBackend};
use crate::{
    clock::Monotonic,
    config,
    health::{Judge, Report, Target, Verdict},
};

/// A backend that is checked.
pub(super) struct Checked {
    target: Arc<Target>,
    pub(super) judge: Judge,
}

impl Checked {
    /// As a backend is to be checked that has this number; `None` if it is not. What is known of its health stays known;
    /// `is_new` says that nothing is, and that it has not served until now.
    pub(super) fn of(
        now: Monotonic,
        id: BackendId,
        service: &config::Service,
        backend: &config::Backend,
        seat: &LiveBackend,
        is_new: bool,
    ) -> Option<Checked> {
        let check = service.health.clone()?;
        let (service, name) = (service.name.to_string(), backend.name.to_string());
        let address = SocketAddr::from(backend.address);
        let target = Arc::new(Target { id, service, backend: name, address, check });
        let was_down = seat.record.is_some_and(|record| record.abilities & ability::FAILED != 0);
        let judge = match &seat.health {
            _ if is_new => Judge::unknown(now),
            Some(checked) => checked.judge.clone(),
            None if was_down => Judge::down(now),
            None => Judge::up(now),
        };
        Some(Checked { target, judge })
    }

    pub(super) fn is_up(&self) -> bool {
        self.judge.verdict() == Verdict::Up
    }

    /// Since when it has been down, if it is.
    pub(super) fn down_since(&self) -> Option<Monotonic> {
        (self.judge.verdict() == Verdict::Down).then_some(self.judge.since())
    }
}

impl Controller {
    /// Who is to be checked, and how.
    pub fn targets(&self) -> Vec<Arc<Target>> {
        let configured = self.backends.iter().flatten().filter(|backend| backend.config.is_some());
        configured.filter_map(|backend| Some(Arc::clone(&backend.health.as_ref()?.target))).collect()
    }

    /// Takes what checks have found into account; the choice follows at once where a verdict has changed.
    pub fn hear(&mut self, now: Monotonic, reports: &[Report]) -> Result<()> {
        let mut is_changed = false;
        for Report { target, outcome } in reports {
            let Some(Some(backend)) = self.backends.get_mut(usize::from(target.id)) else { continue };
            // Others were asked for before the configuration changed.
            let Some(checked) = backend.health.as_mut().filter(|checked| checked.target == *target) else {
                continue;
            };
            if !checked.judge.judge(now, outcome, &target.check) {
                continue;
            }
            is_changed = true;
            let (name, service, reason) = (&target.backend, &target.service, checked.judge.reason());
            if checked.is_up() {
                tracing::info!("backend {name} of {service} is up: {reason}");
            } else {
                tracing::warn!("backend {name} of {service} is down: {reason}");
            }
        }
        if is_changed {
            self.set_members(now)?;
            self.tick(now)?;
        }
        Ok(())
    }
}
