//! `cargo xtask lint`: formatting, and clippy for the host and for the bpf target.

use anyhow::Result;

use crate::{
    build, command,
    setup::{self, Tools},
    workspace::Workspace,
};

const DENY: [&str; 3] = ["--", "-D", "warnings"];

/// Builds what the host's code embeds, and checks all.
pub fn run(workspace: &Workspace) -> Result<()> {
    let tools = setup::build_tools(workspace)?;
    build::program(workspace, &tools)?;
    check(workspace, &tools)
}

/// Runs every lint; stops at the first that fails.
pub fn check(workspace: &Workspace, tools: &Tools) -> Result<()> {
    println!("lint: rustfmt");
    command::run(workspace.cargo("fmt").args(["--all", "--check"]))?;
    println!("lint: clippy, host");
    command::run(workspace.cargo("clippy").args(["--workspace", "--all-targets", "--quiet"]).args(DENY))?;
    if !tools.toolchain.has_clippy() {
        tools.toolchain.add_clippy();
    }
    program(workspace, tools, &build::PROGRAM, "XDP program")?;
    program(workspace, tools, &build::DECAP, "XDP program of backends")?;
    program(workspace, tools, &build::PROBE, "programs of health checks")?;
    program(workspace, tools, &build::HARNESS, "harness")
}

fn program(workspace: &Workspace, tools: &Tools, what: &[&str], name: &str) -> Result<()> {
    if !tools.toolchain.has_clippy() {
        println!("lint: clippy, {name} (as host code: {} has no clippy)", tools.toolchain.name);
        let mut clippy = workspace.cargo("clippy");
        // The program's features are unstable ones; the same source, checked by the host's compiler.
        clippy.env("RUSTC_BOOTSTRAP", "1").args(what).args(["--quiet", "--target-dir"]);
        return command::run(clippy.arg(workspace.bpf_target()).args(DENY));
    }
    println!("lint: clippy, {name} (bpf target, {})", tools.toolchain.name);
    let mut clippy = tools.toolchain.cargo(workspace, "clippy");
    clippy.args(what).args(build::BPF_TARGET).args(["--release", "--quiet", "--target-dir"]);
    clippy.arg(workspace.bpf_target()).args(DENY);
    clippy.env("CARGO_ENCODED_RUSTFLAGS", build::rustflags(tools)).env("CARGO_PROFILE_RELEASE_LTO", "off");
    build::run_quietly(&mut clippy)
}
