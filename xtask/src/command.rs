//! Running other programs: each failure names the whole command line.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

/// Directories that hold administrators' programs; an ordinary user's PATH often lacks them.
pub const ADMINISTRATION: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// Runs `command` with our own standard streams; fails unless it exits with 0.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("run `{}`", line(command)))?;
    if !status.success() {
        bail!("`{}` failed ({status})", line(command));
    }
    Ok(())
}

/// Runs `command` silently and kills it after `limit`; fails unless it exits with 0 in time.
pub fn run_within(command: &mut Command, limit: Duration) -> Result<()> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("run `{}`", line(command)))?;
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().with_context(|| format!("wait for `{}`", line(command)))? {
            if !status.success() {
                bail!("`{}` failed ({status})", line(command));
            }
            return Ok(());
        }
        if Instant::now() >= end {
            child.kill().with_context(|| format!("stop `{}`", line(command)))?;
            child.wait().with_context(|| format!("wait for `{}`", line(command)))?;
            bail!("`{}` took longer than {} s", line(command), limit.as_secs());
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Runs `command` and returns what it wrote to standard output; fails unless it exits with 0.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("run `{}`", line(command)))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed ({}): {}", line(command), output.status, errors.trim());
    }
    String::from_utf8(output.stdout).with_context(|| format!("read the output of `{}`", line(command)))
}

/// Finds `program` on the PATH or among the administrators' programs.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(ADMINISTRATION.iter().map(PathBuf::from))
        .map(|directory| directory.join(program))
        .find(|candidate| is_executable(candidate))
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

fn line(command: &Command) -> String {
    let mut line = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        line.push(' ');
        line.push_str(&argument.to_string_lossy());
    }
    line
}
