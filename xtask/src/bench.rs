//! `cargo xtask bench`: builds and runs the measurements that the `tests` package holds.

use std::{ffi::OsString, path::PathBuf};

use anyhow::Result;

use crate::{build, command, end_to_end, setup, workspace::Workspace};

/// What is measured.
#[derive(clap::Subcommand)]
pub enum Bench {
    /// How evenly each method loads the backends, in simulation: the selection core beside other methods
    #[command(disable_help_flag = true)]
    Balance(Options),
    /// What a packet costs in the XDP program, beside the least that any program takes; as root
    #[command(disable_help_flag = true)]
    Packet(Options),
}

/// What a measurement is told.
#[derive(clap::Args)]
pub struct Options {
    /// Options of the measurement; `--help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
    arguments: Vec<OsString>,
}

/// Builds and measures.
pub fn run(workspace: &Workspace, bench: &Bench) -> Result<()> {
    match bench {
        Bench::Balance(options) => balance(workspace, options),
        Bench::Packet(options) => in_the_kernel(workspace, "packet", options),
    }
}

fn balance(workspace: &Workspace, options: &Options) -> Result<()> {
    // It is linked with user space, which carries an XDP program; none is loaded, so an old one will do.
    if !workspace.ebpf_object().exists() {
        build::program(workspace, &setup::build_tools(workspace)?)?;
    }
    let mut run = workspace.cargo("run");
    run.args(["--package", "balancer-tests"]);
    command::run(run.args(BENCH).arg("balance").args(&options.arguments))
}

fn in_the_kernel(workspace: &Workspace, name: &str, options: &Options) -> Result<()> {
    let tools = setup::build_tools(workspace)?;
    build::program(workspace, &tools)?;
    build::harness(workspace, &tools)?;
    // None of these runs the binary.
    let mut run = end_to_end::cargo(workspace, "run", PathBuf::new(), &[])?;
    command::run(run.args(BENCH).arg(name).args(&options.arguments))
}

const BENCH: [&str; 5] = ["--release", "--quiet", "--bin", "bench", "--"];
