//! `cargo xtask demo`: builds all, then runs the demonstration of the `tests` package as root.

use std::ffi::OsString;

use anyhow::Result;

use crate::{build, command, end_to_end, setup, test, workspace::Workspace};

/// `cargo xtask demo`'s options.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Options {
    /// What the demonstration is told; `--help` lists it
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
    arguments: Vec<OsString>,
}

/// Builds and demonstrates.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    setup::run(workspace)?;
    test::require_tools("demo")?;
    let binary = build::run(workspace, &build::Options { release: false })?;
    let mut demo = end_to_end::cargo(workspace, "run", binary, &[])?;
    command::run(demo.args(["--quiet", "--bin", "demo", "--"]).args(&options.arguments))
}
