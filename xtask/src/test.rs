//! `cargo xtask test`: every test there is.

use std::ffi::OsString;

use anyhow::{Result, bail};

use crate::{
    build, command, lint,
    packages::{self, Tool},
    setup, superuser,
    workspace::Workspace,
};

/// What the end-to-end tests call.
const TOOLS: [Tool; 1] = [Tool { program: "ip", package: "iproute2" }];

/// `cargo xtask test`'s options.
#[derive(clap::Args)]
pub struct Options {
    /// Give the tests that load, wait or repeat their full length
    #[arg(long)]
    long: bool,
    /// Run only the tests whose name contains this; skips the lints
    filter: Option<String>,
}

/// Sets up, builds, lints and tests.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let tools = setup::run(workspace)?;
    packages::require("test", &TOOLS)?;
    build::program(workspace, &tools)?;
    let binary = build::binary(workspace, &build::Options { release: false })?;
    if options.filter.is_none() {
        lint::run(workspace)?;
    }

    println!("test: on the host");
    let host =
        command::run(workspace.cargo("test").args(["--quiet", "--no-fail-fast"]).args(&options.filter));

    println!("test: end to end, in network namespaces, as root");
    let mut environment = vec![
        ("BALANCER_BIN", binary.into_os_string()),
        ("BALANCER_EBPF_OBJECT", workspace.ebpf_object().into_os_string()),
    ];
    if options.long {
        environment.push(("BALANCER_TEST_LONG", OsString::from("1")));
    }
    let mut end_to_end = workspace.cargo("test");
    end_to_end.args(["--package", "balancer-tests", "--no-fail-fast"]).envs(environment.iter().cloned());
    // Cargo builds as the caller; root only runs what was built.
    let runner = superuser::prefix(&environment)?;
    if !runner.is_empty() {
        end_to_end.arg("--config").arg(format!("target.'cfg(target_os = \"linux\")'.runner = {runner:?}"));
    }
    let end_to_end = command::run(end_to_end.args(&options.filter));

    match (host, end_to_end) {
        (Ok(()), Ok(())) => Ok(()),
        (Err(error), Ok(())) | (Ok(()), Err(error)) => Err(error),
        (Err(host), Err(end_to_end)) => bail!("{host}; {end_to_end}"),
    }
}
