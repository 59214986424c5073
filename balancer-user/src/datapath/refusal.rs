//! What the kernel's refusal to create the maps or to load the program means, and what to do about it.

use std::{error::Error, fs, io};

use anyhow::anyhow;
use aya::{EbpfError, programs::ProgramError};

/// How many lines of the verifier's log an error shows.
const VERIFIER_LOG_TAIL: usize = 20;

/// The numbers of capabilities (linux/capability.h).
const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;

/// Without CAP_NET_ADMIN a process with CAP_SYS_ADMIN can still load and attach, but not have the kernel find the
/// backends' MACs: it would run, and no backend would ever be reached.
pub(super) fn require_net_admin() -> anyhow::Result<()> {
    let privileges = Privileges::read();
    anyhow::ensure!(privileges.has(CAP_NET_ADMIN), not_permitted(&privileges));
    Ok(())
}

pub(super) fn explain_load(error: EbpfError) -> anyhow::Error {
    let mut source: Option<&(dyn Error + 'static)> = Some(&error);
    let mut code = None;
    while let Some(inner) = source {
        if let Some(io) = inner.downcast_ref::<io::Error>() {
            code = io.raw_os_error();
        }
        source = inner.source();
    }
    explain(anyhow::Error::new(error), code).context("create the BPF maps")
}

pub(super) fn explain_program(error: ProgramError) -> anyhow::Error {
    match error {
        ProgramError::LoadError { io_error, verifier_log } => {
            let code = io_error.raw_os_error();
            let log = verifier_log.to_string();
            let lines: Vec<&str> = log.lines().collect();
            let tail = lines.get(lines.len().saturating_sub(VERIFIER_LOG_TAIL)..).unwrap_or_default();
            let message = if tail.is_empty() {
                anyhow!("the kernel answered: {io_error}")
            } else {
                anyhow!("the kernel answered: {io_error}; the verifier's log ends:\n  {}", tail.join("\n  "))
            };
            explain(message, code).context("load the XDP program")
        }
        other => anyhow::Error::new(other).context("load the XDP program"),
    }
}

fn explain(error: anyhow::Error, code: Option<i32>) -> anyhow::Error {
    match code {
        Some(libc::EPERM | libc::EACCES) => error.context(not_permitted(&Privileges::read())),
        Some(libc::ENOMEM) => error
            .context("not enough memory: lower max-flows, or raise the memory limit of the control group"),
        Some(libc::ENOSYS) => error.context("this kernel has no bpf(2): Linux 5.18 or newer is needed"),
        _ => error,
    }
}

fn not_permitted(privileges: &Privileges) -> String {
    let lack = lack(privileges);
    format!("not permitted: {lack}; run as root, or with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN")
}

/// What this process may do, as /proc tells it.
struct Privileges {
    /// The effective capabilities, a bit each.
    effective: u64,
    /// Whether they hold in a user namespace only.
    is_confined: bool,
}

impl Privileges {
    fn read() -> Privileges {
        // What can't be read is taken as allowed, so that nothing is called missing which is there.
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let digits = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap_or_default();
        let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        Privileges {
            effective: u64::from_str_radix(digits.trim(), 16).unwrap_or(u64::MAX),
            is_confined: !map.is_empty() && map.split_whitespace().ne(["0", "0", "4294967295"]),
        }
    }

    fn has(&self, capability: u32) -> bool {
        self.effective & (1 << capability) != 0
    }

    /// The capabilities that are needed and not there.
    fn missing(&self) -> Vec<&'static str> {
        // CAP_SYS_ADMIN stands in for what was split from it in Linux 5.8.
        let is_admin = self.has(CAP_SYS_ADMIN);
        let needed = [
            ("CAP_BPF", is_admin || self.has(CAP_BPF)),
            ("CAP_PERFMON", is_admin || self.has(CAP_PERFMON)),
            ("CAP_NET_ADMIN", self.has(CAP_NET_ADMIN)),
        ];
        needed.into_iter().filter(|(_, is_there)| !is_there).map(|(name, _)| name).collect()
    }
}

fn lack(privileges: &Privileges) -> String {
    match privileges.missing().as_slice() {
        [] if privileges.is_confined => {
            "the capabilities of a user namespace (`unshare -U`, a rootless container) do not count"
                .to_owned()
        }
        // Kernels before 5.11 charge maps against the limit of locked memory.
        [] => "the kernel is locked down, or `ulimit -l` is too low on a kernel before 5.11".to_owned(),
        [one] => format!("{one} is missing"),
        [rest @ .., last] => format!("{} and {last} are missing", rest.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let all: u64 = (1 << CAP_NET_ADMIN) | (1 << CAP_PERFMON) | (1 << CAP_BPF);
        let root_before_5_8: u64 = (1 << CAP_NET_ADMIN) | (1 << CAP_SYS_ADMIN);
        for (effective, is_confined, expected) in [
            (0, false, "CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN are missing"),
            (all & !(1 << CAP_BPF), false, "CAP_BPF is missing"),
            (all & !(1 << CAP_PERFMON), false, "CAP_PERFMON is missing"),
            (1 << CAP_SYS_ADMIN, true, "CAP_NET_ADMIN is missing"),
            (all, true, "the capabilities of a user namespace"),
            (root_before_5_8, false, "the kernel is locked down"),
        ] {
            let text = lack(&Privileges { effective, is_confined });
            assert!(text.starts_with(expected), "{text}");
        }
    }
}
