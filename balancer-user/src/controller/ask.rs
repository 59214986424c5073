//! What the control socket asks of the controller.

use std::{collections::BTreeSet, time::Duration};

use balancer_common::{BackendId, ServiceId};

use super::{Controller, seats::LiveService};
use crate::api::{Command, DrainBackend, Draining, EnableBackend, Enabled, Refusal};

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
            Command::DrainBackend(drain, reply) => reply.send(self.drain_backend(&drain)),
            Command::EnableBackend(enable, reply) => reply.send(self.enable_backend(&enable)),
            Command::Explain(explain, reply) => reply.send(self.explain(&explain)),
            Command::ShowConfig(_, reply) => reply.send(Ok(self.show_config())),
            Command::ChangeConfig(change, reply) => self.change_config(change, reply),
            Command::Rollback(rollback, reply) => self.rollback(rollback, reply),
            Command::WhatIf(what_if, reply) => reply.send(self.what_if(&what_if)),
        }
    }

    fn drain_backend(&mut self, drain: &DrainBackend) -> Result<Draining, Refusal> {
        let id = self.backend_named(drain.service.as_deref(), &drain.backend)?;
        let deadline = drain.deadline_ms.map(Duration::from_millis);
        let longest = Duration::from_secs(30 * 24 * 3600);
        if deadline.is_some_and(|deadline| deadline > longest) {
            return Err(Refusal::Wrong("the deadline is in more than 30 days".to_owned()));
        }
        self.drain(self.selected, id, deadline).map_err(failed)?;
        let (service, backend) = self.names(id);
        let status = self.draining(self.selected, id);
        let (remaining, drain) = status.ok_or_else(|| Refusal::Failed("it has gone".to_owned()))?;
        Ok(Draining { service, backend, remaining, drain })
    }

    fn enable_backend(&mut self, enable: &EnableBackend) -> Result<Enabled, Refusal> {
        let id = self.backend_named(enable.service.as_deref(), &enable.backend)?;
        self.enable(self.selected, id).map_err(failed)?;
        let (service, backend) = self.names(id);
        Ok(Enabled { service, backend })
    }

    /// The one configured backend of this name.
    fn backend_named(&self, service: Option<&str>, name: &str) -> Result<BackendId, Refusal> {
        let service = service.map(|name| self.service_named(name)).transpose()?.map(|live| live.id);
        let is_configured = |id: &BackendId| {
            self.backends
                .get(usize::from(*id))
                .is_some_and(|seat| seat.as_ref().is_some_and(|seat| seat.config.is_some()))
        };
        let mut ids = self.backends_named(service, name)?;
        ids.retain(is_configured);
        match ids[..] {
            [id] => Ok(id),
            [] => Err(Refusal::Wrong(format!(
                "backend {name:?} is not configured any more: it goes with its last flow"
            ))),
            _ => Err(Refusal::Wrong(format!(
                "several services have a backend {name:?}: say which with --service"
            ))),
        }
    }

    /// The names of a backend's service and of itself.
    fn names(&self, id: BackendId) -> (String, String) {
        let Some(Some(backend)) = self.backends.get(usize::from(id)) else { return Default::default() };
        let service = self.services.iter().find(|live| live.id == backend.service);
        (service.map(|live| live.config.name.to_string()).unwrap_or_default(), backend.name())
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

fn failed(error: anyhow::Error) -> Refusal {
    Refusal::Failed(format!("{error:#}"))
}
