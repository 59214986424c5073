//! What the controller has to tell.

use std::{collections::HashMap, time::Duration};

use anyhow::Result;
use balancer_common::{BackendId, Reason, ServiceId};

use super::{
    Controller,
    health::Checked,
    obstacle::obstacle,
    seats::{Duty, LiveBackend, LiveService},
};
use crate::{
    api::{
        BackendState, BackendStatus, ByState, Drain, FlowsStatus, HealthStatus, HealthVerdict, ResponseTime,
        ServiceStatus, Status,
    },
    balance::Score,
    clock::Monotonic,
    health::{Judge, Verdict},
};

impl Controller {
    /// All that there is to tell.
    pub fn status(&mut self, now: Monotonic) -> Result<Status> {
        let drops = self.datapath.read_drops()?;
        let evicted = self.datapath.read_evicted()?;
        let leaving = self.leaving();
        let backends: Vec<_> =
            self.services.iter().map(|live| self.backends_status(now, live, &leaving)).collect();
        let mut services = Vec::with_capacity(backends.len());
        for (live, statuses) in self.services.iter().zip(backends) {
            let mut backends = Vec::with_capacity(statuses.len());
            for (id, mut status) in statuses {
                if let Some(Some(backend)) = self.backends.get_mut(usize::from(id)) {
                    status.since_s = now.since(backend.shown_since(now, status.state)).as_secs_f64();
                }
                backends.push(status);
            }
            services.push(ServiceStatus {
                name: live.config.name.to_string(),
                address: live.config.address.into(),
                protocol: live.config.protocol,
                method: live.config.method,
                forward: live.config.forward.mode,
                backends,
            });
        }
        Ok(Status {
            services,
            generation: self.generation(),
            last_change: self.changes.last().copied(),
            missed_ticks: self.missed_ticks,
            interfaces: self.interfaces.clone(),
            flows: FlowsStatus {
                room: self.daemon.max_flows.into(),
                now: by_state(self.walk.seen),
                evicted: by_state(evicted),
            },
            drops: Reason::ALL
                .iter()
                .zip(drops)
                .map(|(reason, count)| (reason.name().to_owned(), count))
                .collect(),
            selection_age_ms: millis(now.since(self.selected)),
            uptime_ms: millis(now.since(self.started)),
            window_ms: millis(now.since(self.started).min(self.daemon.window)),
        })
    }

    /// Who has left the configuration and still has flows, by service.
    fn leaving(&self) -> Vec<(ServiceId, BackendId)> {
        let seats = (0..).zip(&self.backends).filter_map(|(id, seat)| Some((id, seat.as_ref()?)));
        let leaving = seats.filter(|(_, seat)| matches!(seat.duty, Duty::Leave { .. }));
        leaving.map(|(id, seat)| (seat.service, id)).collect()
    }

    /// A service's backends in configured order, then those of all that are `leaving` which were its own.
    fn backends_status(
        &self,
        now: Monotonic,
        live: &LiveService,
        leaving: &[(ServiceId, BackendId)],
    ) -> Vec<(BackendId, BackendStatus)> {
        let scores = live.balance.scores(now);
        let scores: HashMap<BackendId, &Score> = scores.iter().map(|score| (score.id, score)).collect();
        let configured = live.ids.iter().map(|id| (*id, scores.get(id).copied()));
        let leaving = leaving.iter().filter(|(service, _)| *service == live.id);
        let all = configured.chain(leaving.map(|(_, id)| (*id, None)));
        all.filter_map(|(id, score)| Some((id, self.backend_status(now, id, score)?))).collect()
    }

    fn backend_status(&self, now: Monotonic, id: BackendId, score: Option<&Score>) -> Option<BackendStatus> {
        let backend = self.backends.get(usize::from(id))?.as_ref()?;
        let config = backend.config.as_ref();
        let response_time = |histogram: &crate::window::Window<crate::responses::Histogram>| {
            let (histogram, responses) = (histogram.totals(now), score?.responses);
            Some(ResponseTime {
                answers: responses.count,
                mean_ms: responses.mean()?.in_micros() as f64 / 1e6,
                p50_ms: histogram.quantile(0.5)?,
                p99_ms: histogram.quantile(0.99)?,
            })
        };
        let window = score.map(|score| score.window.traffic).unwrap_or_default();
        Some(BackendStatus {
            name: backend.name(),
            address: backend.endpoint,
            weight: config.map_or(0, |config| config.weight.get()),
            state: state(backend, score),
            since_s: 0.0,
            reason: self.reason(backend, score),
            health: backend.health.as_ref().map(|health| health_status(&health.judge, now)),
            active: backend.active(),
            awaiting: backend.histogram.as_ref().map(|_| backend.awaiting()),
            response_time: backend.histogram.as_ref().and_then(response_time),
            drain: drain(backend, now),
            packets: backend.traffic.packets,
            bytes: backend.traffic.bytes,
            window_packets: window.packets,
            window_bytes: window.bytes,
            n: score.map_or(0.0, |score| score.n),
            committed: score.map_or(0.0, |score| score.committed),
            nw: score.and_then(|score| score.nw),
            share: score.map_or(0.0, |score| score.share),
        })
    }
}

impl Controller {
    /// Why it is in that state, where there is more to say than the state's name says.
    fn reason(&self, backend: &LiveBackend, score: Option<&Score>) -> Option<String> {
        let checks = backend.health.as_ref().map(|health| health.judge.reason().to_owned());
        match state(backend, score) {
            BackendState::Leaving | BackendState::Draining | BackendState::Disabled => None,
            BackendState::Unreachable => {
                let names: Vec<&str> = self.daemon.interfaces.iter().map(|name| name.as_str()).collect();
                Some(obstacle(&self.network, backend.endpoint.ip(), backend.forward, &names))
            }
            BackendState::Starting if backend.health.as_ref().is_none_or(Checked::is_up) => Some(format!(
                "slow start: {:.0}% of its weight",
                score.map_or(1.0, |score| score.ramp) * 100.0
            )),
            BackendState::Down
                if backend.health.as_ref().is_none_or(|health| health.judge.verdict() != Verdict::Down) =>
            {
                backend.passive.as_ref()?.out().map(|(_, reason)| reason.to_owned())
            }
            BackendState::Starting | BackendState::Down | BackendState::Up => checks,
        }
    }

    /// How many flows of a backend are left, and how far its draining has come.
    pub(super) fn draining(&self, now: Monotonic, id: BackendId) -> Option<(u64, Drain)> {
        let backend = self.backends.get(usize::from(id))?.as_ref()?;
        Some((backend.active(), drain(backend, now)?))
    }
}

impl LiveBackend {
    /// Since when it has been in the state that it is shown in now.
    fn shown_since(&mut self, now: Monotonic, state: BackendState) -> Monotonic {
        let since = self.shown.filter(|(before, _)| *before == state).map_or(now, |(_, since)| since);
        self.shown = Some((state, since));
        since
    }
}

/// What the operator wants comes before what is possible, and both before what is on its way.
pub(super) fn state(backend: &LiveBackend, score: Option<&Score>) -> BackendState {
    let is_disabled = backend.config.as_ref().is_some_and(|config| config.weight.get() == 0);
    let verdict = backend.health.as_ref().map(|health| health.judge.verdict());
    match (backend.duty, verdict) {
        (Duty::Leave { .. }, _) => BackendState::Leaving,
        (Duty::Drain { .. }, _) => BackendState::Draining,
        (Duty::Serve, _) if is_disabled => BackendState::Disabled,
        (Duty::Serve, _) if backend.unreachable_since.is_some() => BackendState::Unreachable,
        (Duty::Serve, Some(Verdict::Down)) => BackendState::Down,
        (Duty::Serve, _) if backend.passive.as_ref().is_some_and(|passive| !passive.is_in()) => {
            BackendState::Down
        }
        (Duty::Serve, Some(Verdict::Unknown)) => BackendState::Starting,
        (Duty::Serve, _) if score.is_some_and(|score| score.ramp < 1.0) => BackendState::Starting,
        (Duty::Serve, _) => BackendState::Up,
    }
}

fn health_status(judge: &Judge, now: Monotonic) -> HealthStatus {
    let (passed, failed) = judge.run();
    HealthStatus {
        verdict: match judge.verdict() {
            Verdict::Unknown => HealthVerdict::Unknown,
            Verdict::Up => HealthVerdict::Up,
            Verdict::Down => HealthVerdict::Down,
        },
        since_s: now.since(judge.since()).as_secs_f64(),
        reason: judge.reason().to_owned(),
        passed,
        failed,
        last_failure: judge.last_failure().map(ToOwned::to_owned),
    }
}

fn by_state([half_open, established, closing]: [u64; 3]) -> ByState {
    ByState { half_open, established, closing }
}

/// How far a drain has come.
fn drain(backend: &LiveBackend, now: Monotonic) -> Option<Drain> {
    let until = backend.ends()?;
    let remaining = backend.active();
    let per_second = match backend.duty {
        Duty::Drain { since, from, .. } => {
            let elapsed = now.since(since).as_secs_f64();
            from.saturating_sub(remaining) as f64 / elapsed.max(1.0)
        }
        _ => 0.0,
    };
    let left = until.since(now).as_secs_f64();
    let estimate = (per_second > 0.0).then(|| (remaining as f64 / per_second).min(left));
    Some(Drain {
        deadline_s: left,
        flows_per_s: per_second,
        estimate_s: if remaining == 0 { Some(0.0) } else { estimate },
    })
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
