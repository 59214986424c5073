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
