//! Doing what only root may do: directly as root, else through sudo.

use std::{env, ffi::OsString, path::PathBuf, process::Command};

use anyhow::{Context as _, Result, bail};

use crate::command;

/// What a program run by root still needs from the caller's environment: sudo empties it.
const KEPT: [&str; 5] = ["HOME", "CARGO_HOME", "RUSTUP_HOME", "CARGO_TARGET_DIR", "RUST_BACKTRACE"];

/// The words to put in front of a command line so that root runs it: none when we are root. `environment` is what
/// the command gets besides the variables that are always kept.
pub fn prefix(environment: &[(&str, OsString)]) -> Result<Vec<OsString>> {
    if nix::unistd::geteuid().is_root() {
        return Ok(Vec::new());
    }
    if command::find("sudo").is_none() {
        bail!("this needs root and there is no sudo: run the same command as root");
    }
    let mut words = vec![OsString::from("sudo"), OsString::from("env")];
    let kept = KEPT.iter().filter_map(|name| Some((*name, env::var_os(name)?)));
    let path = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths(env::split_paths(&path).chain(command::ADMINISTRATION.map(PathBuf::from)))
        .context("a directory in PATH can't be written there")?;
    for (name, value) in kept.chain([("PATH", path)]).chain(environment.iter().cloned()) {
        let mut word = OsString::from(name);
        word.push("=");
        word.push(value);
        words.push(word);
    }
    Ok(words)
}

/// A command that runs `program` as root.
pub fn command(program: &str) -> Result<Command> {
    let mut words = prefix(&[])?.into_iter().chain([OsString::from(program)]);
    let mut command = Command::new(words.next().unwrap_or_default());
    command.args(words);
    Ok(command)
}
