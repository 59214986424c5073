//! `cargo xtask demo` and `cargo xtask soak`: builds all, then runs the binary of that name of the `tests` package, as root.

use std::ffi::OsString;

use anyhow::Result;

use crate::{build, command, end_to_end, setup, test, workspace::Workspace};

/// What `cargo xtask demo` or `cargo xtask soak` is told.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Options {
    /// Passed on; `--help` lists what there is
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
    arguments: Vec<OsString>,
}

/// Builds, and runs the binary called `name`.
pub fn run(workspace: &Workspace, name: &'static str, options: &Options) -> Result<()> {
    setup::run(workspace)?;
    test::require_tools(name)?;
    let binary = build::run(workspace, &build::Options { release: false })?;
    let mut play = end_to_end::cargo(workspace, "run", binary, &[])?;
    command::run(play.args(["--quiet", "--bin", name, "--"]).args(&options.arguments))
}
