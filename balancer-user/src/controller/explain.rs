//! Why flows go where they go, and where they would go by another method.

use balancer_common::BackendId;

use super::{
    Controller, records,
    seats::LiveService,
    status::{self},
};
use crate::{
    api::{
        self, BackendState, Choice, Compared, Comparison, Explain, Explanation, MOST_PICKS, Refusal,
        Standing, Stands, WhatIf,
    },
    balance::{Balance, Score, Stance, Taken},
    config::Requests,
    method::Method,
};

impl Controller {
    /// `explain`
    pub(super) fn explain(&self, explain: &Explain) -> Result<Explanation, Refusal> {
        if explain.picks > MOST_PICKS {
            let why = format!("`picks` is {}; allowed: 0 to {MOST_PICKS}", explain.picks);
            return Err(Refusal::Wrong(why));
        }
        let live = self.service_named(&explain.service)?;
        let taken = self.datapath.ring_word(live.id).taken();
        let explained = live.balance.explain(self.selected, taken, explain.picks as usize);
        let picks = explained.picks.into_iter().map(|pick| api::Pick {
            backend: pick.backend.map(|id| self.name(id)),
            nw: pick.nw,
            second: pick.second.map(|id| self.name(id)),
            margin: pick.margin,
            tied: pick.tied.into_iter().map(|id| self.name(id)).collect(),
        });
        let Choice { method, requests, unit } = choice(live.config.method, live.config.requests);
        Ok(Explanation {
            service: live.config.name.to_string(),
            address: *live.config.address,
            method,
            requests,
            unit,
            backends: explained.backends.iter().map(|stance| self.standing(stance)).collect(),
            last: explained.last.map(|id| self.name(id)),
            picks: picks.collect(),
        })
    }

    fn standing(&self, stance: &Stance) -> Standing {
        let Stance { score, takes, lacking, pending, compared, nw, is_tied } = *stance;
        Standing {
            name: self.name(score.id),
            state: self.state(&score),
            weight: score.weight,
            takes,
            ramp: score.ramp,
            n: score.n,
            committed: score.committed,
            lacking,
            pending,
            compared,
            nw,
            tied: is_tied,
            share: score.share,
        }
    }

    /// `whatif`
    pub(super) fn what_if(&self, what_if: &WhatIf) -> Result<Comparison, Refusal> {
        let live = self.service_named(&what_if.service)?;
        let requests = what_if.requests.unwrap_or(live.config.requests);
        let method = what_if.method;
        if what_if.requests.is_some() && !method.counts_requests() {
            return Err(Refusal::Wrong(format!(
                "`requests` means nothing to the method \"{method}\"; allowed: with \"least-request\" and \
                 \"least-response-time\""
            )));
        }
        let is_followed = records::follows_exchanges(&live.config);
        if method.counts_requests() && requests == Requests::Exchange && !is_followed {
            return Err(Refusal::Wrong(format!(
                "requests and their answers are not followed for {:?}: they are with the method \
                 \"least-response-time\", and with `requests = \"exchange\"`",
                what_if.service
            )));
        }
        let other = self.other(live, method, requests);
        let (today, instead) = (live.balance.scores(self.selected), other.scores(self.selected));
        let backends = today.iter().zip(&instead).map(|(today, instead)| Compared {
            name: self.name(today.id),
            state: self.state(today),
            weight: today.weight,
            today: stands(live.config.method, today),
            instead: stands(method, instead),
        });
        let mut unknown = Vec::new();
        if method != live.config.method && matches!(method, Method::LeastPackets | Method::LeastBandwidth) {
            unknown.push(
                "what recent flows have yet to bring: the committed load is learned by the method that runs",
            );
        }
        if method == Method::LeastResponseTime && !is_followed {
            unknown.push("how long answers take: they are not timed for this service, and count as 1 ms");
        }
        Ok(Comparison {
            service: live.config.name.to_string(),
            address: *live.config.address,
            today: choice(live.config.method, live.config.requests),
            instead: choice(method, requests),
            unknown: unknown.into_iter().map(ToOwned::to_owned).collect(),
            backends: backends.collect(),
        })
    }

    /// The service's balance as if it ran by another method, with the ring that it would have.
    fn other(&self, live: &LiveService, method: Method, requests: Requests) -> Balance {
        let mut other = live.balance.clone().with_method(self.selected, method);
        for id in &live.ids {
            if let Some(Some(backend)) = self.backends.get(usize::from(*id)) {
                other.set_requests(*id, backend.requests_by(requests));
            }
        }
        let taken = self.datapath.ring_word(live.id).taken();
        if let Some(plan) = other.plan(self.selected, Taken { counted: taken, now: taken }) {
            other.install(plan);
        }
        other
    }

    fn name(&self, id: BackendId) -> String {
        let backend = self.backends.get(usize::from(id)).and_then(Option::as_ref);
        backend.map_or_else(|| format!("#{id}"), |backend| backend.name())
    }

    fn state(&self, score: &Score) -> BackendState {
        let backend = self.backends.get(usize::from(score.id)).and_then(Option::as_ref);
        backend.map_or(BackendState::Leaving, |backend| status::state(backend, Some(score)))
    }
}

fn choice(method: Method, requests: Requests) -> Choice {
    Choice {
        method,
        requests: method.counts_requests().then_some(requests),
        unit: method.unit().map(ToOwned::to_owned),
    }
}

fn stands(method: Method, score: &Score) -> Stands {
    let Score { n, committed, nw, share, .. } = *score;
    Stands { n, committed, nw: nw.filter(|_| method.unit().is_some()), share }
}
