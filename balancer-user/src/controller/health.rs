//! Whether backends serve, as their checks say.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use anyhow::Result;
use balancer_common::{BackendId, PROBE_MARK, ProbeWay, ability, forward};

use super::{Controller, seats::LiveBackend};
use crate::{
    address,
    clock::Monotonic,
    config::{self, Probe},
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
        let check = backend.checks(service)?.clone();
        let (front, goes_through) = (SocketAddr::from(service.address), service.forward.mode.is_one_way());
        let (service, name) = (service.name.to_string(), backend.name.to_string());
        let address = SocketAddr::from(backend.address);
        let mark = (goes_through && !matches!(check.probe, Probe::Exec { .. }))
            .then_some(PROBE_MARK | u32::from(id));
        let target = Arc::new(Target { id, service, backend: name, address, front, mark, check });
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

    /// How the checks get to those backends that hold their service's address.
    pub fn probe_ways(&self) -> BTreeMap<BackendId, ProbeWay> {
        let way = |seat: &LiveBackend| {
            let target = &seat.health.as_ref().filter(|_| seat.config.is_some())?.target;
            target.mark?;
            let source = match seat.forward {
                forward::DSR => [0; 2],
                _ => bytemuck::cast(address::to_wire(seat.tunnel_source()?.address)),
            };
            Some(ProbeWay {
                service: bytemuck::cast(address::to_wire(target.front.ip())),
                source,
                gue_port: seat.gue_port.to_be(),
                forward: seat.forward,
                ..ProbeWay::default()
            })
        };
        (0..).zip(&self.backends).filter_map(|(id, seat)| Some((id, way(seat.as_ref()?)?))).collect()
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
            let rise = target.check.rise;
            if backend.passive.as_mut().is_some_and(|passive| passive.check(outcome.is_ok(), rise)) {
                is_changed = true;
                let (name, service) = (&target.backend, &target.service);
                tracing::info!("backend {name} of {service} is back: its health checks pass");
            }
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

    /// Takes what a walk over the flow table has seen of new flows into account: backends that don't answer go out of the
    /// choice, and those that have rested come back.
    ///
    /// At most half of a service's backends are out so: what all of them do not answer may be no fault of theirs, and some
    /// answers are better than none.
    pub(super) fn judge_openings(&mut self, now: Monotonic) -> Result<()> {
        let mut is_changed = false;
        let openings: Vec<_> = self.walk.openings().collect();
        for service in self.services.iter().filter(|service| service.config.passive_health.is_some()) {
            let is_out = |id: &&BackendId| {
                let seat = self.backends.get(usize::from(**id)).and_then(Option::as_ref);
                seat.and_then(|seat| seat.passive.as_ref()).is_some_and(|passive| !passive.is_in())
            };
            let mut room = (service.ids.len() / 2).saturating_sub(service.ids.iter().filter(is_out).count());
            for id in service.ids.iter().map(|id| usize::from(*id)) {
                let Some(backend) = self.backends.get_mut(id).and_then(Option::as_mut) else { continue };
                let (name, protocol) = (backend.name(), backend.protocol);
                let Some(passive) = backend.passive.as_mut() else { continue };
                if passive.rest(now) {
                    is_changed = true;
                    tracing::info!("backend {name} of {} is back: it has rested", service.config.name);
                }
                let Some(seen) = openings.get(id).copied().flatten() else { continue };
                if passive.observe(seen) && room > 0 {
                    (room, is_changed) = (room - 1, true);
                    passive.take_out(now, protocol);
                    let reason = passive.out().map_or_else(String::new, |(_, reason)| reason.to_owned());
                    tracing::warn!("backend {name} of {} is down: {reason}", service.config.name);
                }
            }
        }
        if is_changed {
            self.set_members(now)?;
        }
        Ok(())
    }
}
