//! `cargo xtask bench`: builds and runs the measurements that the `tests` package holds.

use std::ffi::OsString;

use anyhow::Result;

use crate::{build, command, setup, workspace::Workspace};

/// What is measured.
#[derive(clap::Subcommand)]
pub enum Bench {
    /// How evenly each method loads the backends, in simulation: the selection core beside other methods
    #[command(disable_help_flag = true)]
    Balance {
        /// What the simulation is told; `--help` lists it
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
        arguments: Vec<OsString>,
    },
}

/// Builds and measures.
pub fn run(workspace: &Workspace, bench: &Bench) -> Result<()> {
    let Bench::Balance { arguments } = bench;
    // It is linked with user space, which carries an XDP program; none is loaded, so an old one will do.
    if !workspace.ebpf_object().exists() {
        build::program(workspace, &setup::build_tools(workspace)?)?;
    }
    let mut run = workspace.cargo("run");
    run.args(["--package", "balancer-tests", "--release", "--quiet", "--bin", "bench", "--", "balance"]);
    command::run(run.args(arguments))
}
