//! `balancer service`, `balancer backend add`, `set` and `rm`, `balancer rollback`: changes to the running configuration.

use std::{fmt::Write as _, process::ExitCode};

use super::{daemon::Daemon, output};
use crate::{
    api::{ChangeConfig, Changed, Rollback},
    cli::{Assignment, ChangeArgs, RollbackArgs, ServiceVerb},
    config::{Action, Edit},
};

/// Adds, changes or removes a service.
///
/// # Errors
///
/// When no daemon answers, or it refuses.
pub fn service(verb: ServiceVerb) -> anyhow::Result<ExitCode> {
    match verb {
        ServiceVerb::Add { name, keys, how } => run(Action::Add, Some(name), None, keys, &how),
        ServiceVerb::Set { name, keys, how } => run(Action::Set, Some(name), None, keys, &how),
        ServiceVerb::Rm { name, how } => run(Action::Remove, Some(name), None, Vec::new(), &how),
    }
}

/// Changes a service, or a backend.
pub(super) fn run(
    action: Action,
    service: Option<String>,
    backend: Option<String>,
    keys: Vec<Assignment>,
    how: &ChangeArgs,
) -> anyhow::Result<ExitCode> {
    let keys = keys.into_iter().map(|Assignment { key, value }| (key, value)).collect();
    let edit = Edit { action, service, backend, keys };
    let change = ChangeConfig { edit, save: how.save, dry_run: how.dry_run };
    let changed = Daemon::find(&how.daemon)?.ask(&change)?;
    show(&changed, how.dry_run, how.json)
}

/// Puts an earlier configuration in force again.
///
/// # Errors
///
/// When no daemon answers, or it refuses.
pub fn rollback(args: &RollbackArgs) -> anyhow::Result<ExitCode> {
    let changed = Daemon::find(&args.daemon)?.ask(&Rollback { to: args.to, save: args.save })?;
    show(&changed, false, args.json)
}

fn show(changed: &Changed, dry_run: bool, json: bool) -> anyhow::Result<ExitCode> {
    let text = if json { output::json(changed)? } else { told(changed, dry_run) };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn told(Changed { generation, differences, saved }: &Changed, dry_run: bool) -> String {
    let mut out = String::new();
    for difference in differences {
        // Writing into a String can't fail.
        let _ = writeln!(out, "{difference}");
    }
    if differences.is_empty() {
        out.push_str("no change\n");
    }
    if !dry_run {
        let saved = saved.as_ref().map_or(String::new(), |file| format!(", saved to {}", file.display()));
        let _ = writeln!(out, "generation {generation} is in force{saved}");
    }
    out
}
