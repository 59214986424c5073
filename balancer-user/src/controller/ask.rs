//! What the control socket asks of the controller.

use std::collections::BTreeSet;

use balancer_common::{BackendId, ServiceId};

use super::{Controller, seats::LiveService};
use crate::api::{Command, Refusal};

impl Controller {
    /// Answers, or begins the search that leads to the answer: `search` goes on with it. Does nothing when nobody waits for
    /// the answer any more: who gave up, or was told that it comes too late, would not expect a change then.
    pub fn answer(&mut self, command: Command) {
        if command.is_abandoned() {
            return;
        }
        match command {
            Command::ListFlows(list, reply) => self.flows_list(list, reply),
            Command::CountFlows(count, reply) => self.flows_count(count, reply),
            Command::KillFlows(kill, reply) => self.flows_kill(kill, reply),
            Command::Explain(explain, reply) => reply.send(self.explain(&explain)),
            Command::WhatIf(what_if, reply) => reply.send(self.what_if(&what_if)),
        }
    }

    /// The service of this name.
    pub(super) fn service_named(&self, name: &str) -> Result<&LiveService, Refusal> {
        self.services.iter().find(|live| live.config.name.as_str() == name).ok_or_else(|| Refusal::Unknown {
            what: "service",
            name: name.to_owned(),
            known: self.services.iter().map(|live| live.config.name.to_string()).collect(),
        })
    }

    /// The backends of this name, of this service or of all, in ascending order.
    pub(super) fn backends_named(
        &self,
        service: Option<ServiceId>,
        name: &str,
    ) -> Result<Vec<BackendId>, Refusal> {
        let mut known = BTreeSet::new();
        let mut ids = Vec::new();
        for (id, backend) in (0..).zip(&self.backends) {
            let Some(backend) = backend else { continue };
            if service.is_none_or(|service| service == backend.service) {
                let own = backend.name();
                if own == name {
                    ids.push(id);
                }
                known.insert(own);
            }
        }
        if !ids.is_empty() {
            return Ok(ids);
        }
        Err(Refusal::Unknown { what: "backend", name: name.to_owned(), known: known.into_iter().collect() })
    }
}
