//! Debian packages.

use std::process::{Command, Stdio};

use anyhow::{Result, bail};

use crate::{command, superuser};

/// A program, and the Debian package that brings it.
pub struct Tool {
    /// The program's file name.
    pub program: &'static str,
    /// The package's name.
    pub package: &'static str,
}

/// Whether this machine has apt.
pub fn available() -> bool {
    command::find("apt-get").is_some()
}

/// Installs the packages of those `tools` that are missing.
pub fn require(step: &str, tools: &[Tool]) -> Result<()> {
    let missing: Vec<&Tool> = tools.iter().filter(|tool| command::find(tool.program).is_none()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let packages: Vec<&str> = missing.iter().map(|tool| tool.package).collect();
    println!("{step}: installing {}", packages.join(" "));
    if !available() {
        let programs: Vec<&str> = missing.iter().map(|tool| tool.program).collect();
        bail!("missing: {}; install what is called {} on Debian", programs.join(", "), packages.join(" "));
    }
    install(&packages)
}

/// Installs those of `packages` that are missing and bring no program of their own that would tell.
pub fn require_all(step: &str, packages: &[&str]) -> Result<()> {
    let missing: Vec<&str> = packages.iter().copied().filter(|package| !is_installed(package)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    println!("{step}: installing {}", missing.join(" "));
    if !available() {
        bail!("install what is called {} on Debian", missing.join(" "));
    }
    install(&missing)
}

fn is_installed(package: &str) -> bool {
    let query =
        Command::new("dpkg-query").args(["--show", "--showformat=${db:Status-Status}", package]).output();
    query.is_ok_and(|answer| answer.stdout == b"installed")
}

/// Installs `packages`; tries once more with fresh package lists. Nothing that is installed is ever removed for it.
pub fn install(packages: &[&str]) -> Result<()> {
    if apt(&[&["install", "--yes", "--no-install-recommends", "--no-remove"], packages].concat()).is_ok() {
        return Ok(());
    }
    refresh();
    apt(&[&["install", "--yes", "--no-install-recommends", "--no-remove"], packages].concat()).or_else(|_| {
        bail!(
            "apt could not install: {0}; see why with `sudo apt-get install --no-install-recommends --no-remove {0}`",
            packages.join(" ")
        )
    })
}

/// Fetches the package lists. A source that does not answer is no error: another may carry what is needed.
pub fn refresh() {
    // What is still missing afterwards is reported by whoever needs it.
    drop(apt(&["update"]));
}

fn apt(arguments: &[&str]) -> Result<()> {
    let mut command = superuser::command("env")?;
    command
        .args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet=2"])
        .args(["-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20"])
        .args(["-o", "DPkg::Lock::Timeout=120"])
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command::run(&mut command)
}
