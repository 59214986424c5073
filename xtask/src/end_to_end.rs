//! Running what the `tests` package holds against the built balancer: built by the caller, run by root.

use std::{ffi::OsString, path::PathBuf, process::Command};

use anyhow::Result;

use crate::{superuser, workspace::Workspace};

/// `cargo VERB --package balancer-tests`. What is built is told where the balancer, its XDP program and the harness are.
pub fn cargo(
    workspace: &Workspace,
    verb: &str,
    binary: PathBuf,
    more: &[(&'static str, OsString)],
) -> Result<Command> {
    let mut environment = vec![
        ("BALANCER_BIN", binary.into_os_string()),
        ("BALANCER_EBPF_OBJECT", workspace.ebpf_object().into_os_string()),
        ("BALANCER_HARNESS_OBJECT", workspace.harness_object().into_os_string()),
    ];
    environment.extend_from_slice(more);
    let mut command = workspace.cargo(verb);
    command.args(["--package", "balancer-tests"]).envs(environment.iter().cloned());
    let runner = superuser::prefix(&environment)?;
    if !runner.is_empty() {
        command.arg("--config").arg(format!("target.'cfg(target_os = \"linux\")'.runner = {runner:?}"));
    }
    Ok(command)
}
