//! `cargo xtask setup`: what the build and the tests need. Costs nothing when all of it is there.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result};

use crate::{command, linker, superuser, toolchain::Toolchain, workspace::Workspace};

const BPFFS: &str = "/sys/fs/bpf";

/// What the eBPF build is done with.
pub struct Tools {
    /// The compiler.
    pub toolchain: Toolchain,
    /// bpf-linker's path.
    pub linker: PathBuf,
}

/// Finds or installs everything, and mounts bpffs.
pub fn run(workspace: &Workspace) -> Result<Tools> {
    let tools = build_tools(workspace)?;
    mount_bpffs()?;
    println!(
        "setup: {} (LLVM {}), {}, bpffs on {BPFFS}",
        tools.toolchain.name,
        tools.toolchain.llvm,
        tools.linker.display()
    );
    Ok(tools)
}

/// Finds or installs what a build needs.
pub fn build_tools(workspace: &Workspace) -> Result<Tools> {
    let toolchain = Toolchain::find_or_install()?;
    let linker = linker::find_or_install(workspace, &toolchain)?;
    Ok(Tools { toolchain, linker })
}

fn mount_bpffs() -> Result<()> {
    let mounts = fs::read_to_string("/proc/mounts").context("read /proc/mounts")?;
    let is_mounted = |line: &str| line.split(' ').skip(1).take(2).eq([BPFFS, "bpf"]);
    if mounts.lines().any(is_mounted) {
        return Ok(());
    }
    println!("setup: mounting bpffs on {BPFFS}");
    command::run(superuser::command("mount")?.args(["-t", "bpf", "bpf", BPFFS]))
        .context("mount bpffs: run `sudo mount -t bpf bpf /sys/fs/bpf`")
}
