//! Which CPU a thread runs on: a veth handles a frame where it was sent.

use anyhow::{Context as _, Result, ensure};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

/// The numbers of the CPUs that the calling thread may use.
pub fn usable() -> Result<Vec<usize>> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).context("ask for the CPUs that may be used")?;
    Ok((0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false)).collect())
}

/// How many CPUs there are, whatever the calling thread may use.
pub fn online() -> Result<usize> {
    let count =
        nix::unistd::sysconf(nix::unistd::SysconfVar::_NPROCESSORS_ONLN).context("ask for the CPUs")?;
    usize::try_from(count.unwrap_or(1)).context("count the CPUs")
}

/// Keeps the calling thread on one CPU.
pub fn pin(cpu: usize) -> Result<()> {
    let mut one = CpuSet::new();
    one.set(cpu).context("name a CPU")?;
    sched_setaffinity(Pid::from_raw(0), &one).context("keep a thread on one CPU")
}

/// Two of the CPUs that may be used; fails where there is only one.
pub fn two() -> Result<[usize; 2]> {
    let usable = usable()?;
    ensure!(usable.len() > 1, "this test needs two CPUs (or a wider affinity)");
    Ok([usable[0], usable[1]])
}

/// What the kernel has counted of the CPUs' time since boot, in ticks.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    all: u64,
    idle: u64,
}

impl Times {
    /// How much time has passed since, on all CPUs together, and how much of it they were busy.
    pub fn since(&self, before: &Times) -> (u64, u64) {
        let all = self.all.saturating_sub(before.all);
        (all, all.saturating_sub(self.idle.saturating_sub(before.idle)))
    }
}

/// Reads the time of all CPUs.
pub fn times() -> Result<Times> {
    let stat = std::fs::read_to_string("/proc/stat").context("read /proc/stat")?;
    let line = stat
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("cpu "))
        .context("find all CPUs in /proc/stat")?;
    // user, nice, system, idle, waiting, interrupts, soft interrupts, stolen; guests are in the first two.
    let times: Vec<u64> = line.split_whitespace().take(8).filter_map(|field| field.parse().ok()).collect();
    ensure!(times.len() == 8, "/proc/stat is not as expected: {line}");
    Ok(Times { all: times.iter().sum(), idle: times[3] + times[4] })
}
