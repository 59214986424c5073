//! What an operator does and sees: verbs of the command line, and the state of the host afterwards.

use std::{path::Path, process::Command};

use anyhow::{Context as _, Result, bail, ensure};
use aya::programs::links::{FdLink, PinnedLink};
use serde_json::Value;

use crate::{
    Netns, Process,
    process::{DEFAULT_LIMIT, balancer_binary},
};

/// How a command ended, and all that it printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The exit code.
    pub code: i32,
    /// Standard output and standard error.
    pub text: String,
}

/// Runs `command` to its end, however that is; fails when a signal ends it or it takes longer than ten seconds.
pub fn run(command: &mut Command) -> Result<Ended> {
    let mut process = Process::spawn(command)?;
    let status = process.wait(DEFAULT_LIMIT)?;
    let text = process.log();
    let code = status.code().with_context(|| format!("it was ended by a signal; it printed:\n{text}"))?;
    Ok(Ended { code, text })
}

/// Runs the `balancer` binary with these arguments, where the test is.
pub fn balancer<I, S>(arguments: I) -> Result<Ended>
where
    I: IntoIterator<Item = S>,
    S: AsRef<std::ffi::OsStr>,
{
    run(Command::new(balancer_binary()?).args(arguments))
}

/// `balancer run -c FILE` in a namespace, where it is to fail: returns what it printed with exit code 1.
pub fn refused(netns: &Netns, config: &Path) -> Result<String> {
    refused_under(netns, &[], config)
}

/// The same, started by another program: `["prlimit", "--nofile=10"]`.
pub fn refused_under(netns: &Netns, wrapper: &[&str], config: &Path) -> Result<String> {
    let binary = balancer_binary()?;
    let mut command = match wrapper {
        [] => netns.command(&binary),
        [program, arguments @ ..] => {
            let mut command = netns.command(program);
            command.args(arguments).arg(&binary);
            command
        }
    };
    let ended = run(command.arg("run").arg("-c").arg(config))?;
    ensure!(ended.code == 1, "exit code {}: {}", ended.code, ended.text);
    Ok(ended.text)
}

/// An XDP program on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Xdp {
    /// Whether it is in generic mode; else native.
    pub is_generic: bool,
    /// The program's id.
    pub program: u64,
}

/// The XDP program on a device, as `ip` shows it.
pub fn xdp(netns: &Netns, device: &str) -> Result<Option<Xdp>> {
    const NATIVE: u64 = 1;
    const GENERIC: u64 = 2;
    let text = netns.ip(&format!("-json link show dev {device}"))?;
    let links: Value = serde_json::from_str(&text).context("parse what ip printed")?;
    let Some(attached) = links.pointer("/0/xdp") else { return Ok(None) };
    let is_generic = match attached.get("mode").and_then(Value::as_u64) {
        Some(NATIVE) => false,
        Some(GENERIC) => true,
        mode => bail!("an XDP program in mode {mode:?}"),
    };
    let program = attached.pointer("/prog/id").and_then(Value::as_u64).context("find the program's id")?;
    Ok(Some(Xdp { is_generic, program }))
}

/// The ids of a pinned link and of the program behind it.
pub fn pinned_link(pin: &Path) -> Result<(u32, u32)> {
    let link = PinnedLink::from_pin(pin).with_context(|| format!("open the pin {}", pin.display()))?;
    let info = FdLink::from(link).info().context("look at the link")?;
    Ok((info.id(), info.program_id()))
}
