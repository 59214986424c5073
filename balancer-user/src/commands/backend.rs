//! `balancer backend`: what an operator wants of one backend.

use std::{process::ExitCode, time::Duration};

use super::{change, daemon::Daemon, output};
use crate::{
    api::{Drain, DrainBackend, Draining, EnableBackend},
    cli::BackendVerb,
    config::Action,
};

/// Adds, changes, removes, drains or enables a backend.
///
/// # Errors
///
/// When no daemon answers, or it refuses.
pub fn run(verb: BackendVerb) -> anyhow::Result<ExitCode> {
    let text = match verb {
        BackendVerb::Add { which, keys, how } => {
            return change::run(Action::Add, which.service, Some(which.backend), keys, &how);
        }
        BackendVerb::Set { which, keys, how } => {
            return change::run(Action::Set, which.service, Some(which.backend), keys, &how);
        }
        BackendVerb::Rm { which, how } => {
            return change::run(Action::Remove, which.service, Some(which.backend), Vec::new(), &how);
        }
        BackendVerb::Drain { which, deadline, json, daemon } => {
            let (backend, service) = (which.backend.clone(), which.service.clone());
            let deadline_ms = deadline.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
            let draining = Daemon::find(&daemon)?.ask(&DrainBackend { backend, service, deadline_ms })?;
            if json { output::json(&draining)? } else { told(&draining) }
        }
        BackendVerb::Enable { which, json, daemon } => {
            let (backend, service) = (which.backend.clone(), which.service.clone());
            let enabled = Daemon::find(&daemon)?.ask(&EnableBackend { backend, service })?;
            if json {
                output::json(&enabled)?
            } else {
                format!("{} of {} takes new flows\n", enabled.backend, enabled.service)
            }
        }
    };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn told(Draining { service, backend, remaining, drain }: &Draining) -> String {
    let Drain { deadline_s, flows_per_s, estimate_s } = *drain;
    let flows = if *remaining == 1 { "1 flow".to_owned() } else { format!("{remaining} flows") };
    let time =
        |seconds: f64| humantime::format_duration(Duration::from_secs(seconds.max(0.0).round() as u64));
    let rest = match (remaining, estimate_s) {
        (0, _) => String::new(),
        (_, Some(estimate)) => format!(
            ", {flows_per_s:.2} end a second: none in about {}; the deadline is in {}",
            time(estimate),
            time(deadline_s)
        ),
        (_, None) => format!(", none has ended yet; the deadline is in {}", time(deadline_s)),
    };
    format!("{backend} of {service} is draining: {flows} left{rest}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_far_it_has_come() {
        let told = |remaining, flows_per_s, estimate_s| {
            let drain = Drain { deadline_s: 599.6, flows_per_s, estimate_s };
            told(&Draining { service: "web".to_owned(), backend: "web-1".to_owned(), remaining, drain })
        };
        assert_eq!(told(0, 0.0, Some(0.0)), "web-1 of web is draining: 0 flows left\n");
        assert_eq!(
            told(1, 0.0, None),
            "web-1 of web is draining: 1 flow left, none has ended yet; the deadline is in 10m\n"
        );
        assert_eq!(
            told(30, 0.254, Some(118.2)),
            "web-1 of web is draining: 30 flows left, 0.25 end a second: none in about 1m 58s; the deadline is in 10m\n"
        );
    }
}
