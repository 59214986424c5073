//! What `balancer status --json` says, as values.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use balancer_user::api::{BackendState, BackendStatus, ServiceStatus, Status};

use crate::{Balancer, eventually};

/// How long a status may take to show what has happened, on a busy machine.
pub const LIMIT: Duration = Duration::from_secs(20);

/// Asks the daemon.
pub fn read(balancer: &Balancer) -> Result<Status> {
    serde_json::from_value(balancer.status()?).context("understand the balancer's status")
}

/// Asks until `wanted` holds, and returns that status.
pub fn wait(balancer: &Balancer, what: &str, wanted: impl Fn(&Status) -> bool) -> Result<Status> {
    let mut last = None;
    let found = eventually(LIMIT, what, || {
        let status = read(balancer);
        let is_wanted = status.as_ref().is_ok_and(&wanted);
        last = Some(status);
        if is_wanted { last.take() } else { None }
    });
    found.with_context(|| format!("last: {last:#?}\nthe balancer printed:\n{}", balancer.log()))?
}

/// A status that was published after this call began: two publications later, since one may be under way. They are told
/// apart by the time that the window covers, and so it must not be full yet.
pub fn read_fresh(balancer: &Balancer) -> Result<Status> {
    let mut status = read(balancer)?;
    for _ in 0..2 {
        let old = status.window_ms;
        status = wait(balancer, "another status", |status| status.window_ms != old)?;
    }
    Ok(status)
}

/// The service of this name.
pub fn service<'a>(status: &'a Status, name: &str) -> Result<&'a ServiceStatus> {
    match status.services.iter().find(|service| service.name == name) {
        Some(service) => Ok(service),
        None => bail!("the status shows no service {name}"),
    }
}

/// Packets and bytes of each backend of a service.
pub fn traffic(service: &ServiceStatus) -> Vec<(u64, u64)> {
    service.backends.iter().map(|backend| (backend.packets, backend.bytes)).collect()
}

/// One figure of each backend of all services.
pub fn each<T>(status: &Status, figure: impl Fn(&BackendStatus) -> T) -> Vec<T> {
    status.services.iter().flat_map(|service| &service.backends).map(figure).collect()
}

/// The reasons for which packets were refused, with how often; those that never occurred are left out.
pub fn drops(status: &Status) -> Vec<(&str, u64)> {
    status
        .drops
        .iter()
        .filter(|(_, count)| **count != 0)
        .map(|(name, count)| (name.as_str(), *count))
        .collect()
}

/// Waits until every backend of every service can be reached, also where its weight is 0.
pub fn wait_until_up(balancer: &Balancer) -> Result<Status> {
    wait(balancer, "every backend up", |status| {
        each(status, |backend| backend.state)
            .iter()
            .all(|state| matches!(state, BackendState::Up | BackendState::Disabled))
    })
}
