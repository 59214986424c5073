use std::{fmt, fs, process::Command, thread, time::Duration};

use anyhow::{Context as _, Result};
use balancer_tests::cpu;
use serde::{Deserialize, Serialize};

/// Others may use so many percent of the CPUs.
const QUIET: u64 = 10;
/// For how long that is looked at.
const LOOK: Duration = Duration::from_millis(500);

/// Where and when something was measured.
#[derive(Serialize, Deserialize)]
pub struct Machine {
    processor: String,
    /// How many CPUs may be used.
    cpus: usize,
    kernel: String,
    date: String,
    commit: String,
    /// How many percent of the CPUs others used, before it began.
    busy: u64,
}

impl Machine {
    /// This one, before the measurement; warns where others are at work on it.
    pub fn here() -> Result<Machine> {
        let processor = fs::read_to_string("/proc/cpuinfo").context("read /proc/cpuinfo")?;
        let processor = processor.lines().find_map(|line| line.strip_prefix("model name"));
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").context("read the kernel's release")?;
        let ask = |program: &str, arguments: &[&str]| {
            let output = Command::new(program).args(arguments).output();
            output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
        };
        let before = cpu::times()?;
        thread::sleep(LOOK);
        let (all, busy) = cpu::times()?.since(&before);
        let busy = (100 * busy).checked_div(all).unwrap_or(0);
        if busy > QUIET {
            eprintln!(
                "others use {busy} % of this machine's CPUs: times will spread; measure on a quiet machine"
            );
        }
        Ok(Machine {
            processor: processor.unwrap_or_default().trim_start_matches(['\t', ' ', ':']).to_owned(),
            cpus: cpu::usable()?.len(),
            kernel: kernel.trim().to_owned(),
            date: ask("date", &["-u", "+%Y-%m-%d"]),
            commit: ask("git", &["describe", "--always", "--dirty"]),
            busy,
        })
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { processor, cpus, kernel, date, commit, busy } = self;
        let commit = if commit.is_empty() { "unknown" } else { commit };
        write!(
            out,
            "{cpus} CPUs of {processor}, Linux {kernel}, {date}, commit {commit}, others used {busy} % of the CPUs"
        )
    }
}
