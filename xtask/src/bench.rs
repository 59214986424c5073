//! `cargo xtask bench`: builds and runs the measurements that the `tests` package holds.

use std::{ffi::OsString, path::PathBuf};

use anyhow::Result;

use crate::{
    build, command, end_to_end,
    packages::{self, Tool},
    setup, test,
    workspace::Workspace,
};

/// What is measured.
#[derive(clap::Subcommand)]
pub enum Bench {
    /// How evenly each method loads the backends, in simulation: the selection core beside other methods
    #[command(disable_help_flag = true)]
    Balance(Options),
    /// What a packet costs in the XDP program, beside the least that any program takes; as root
    #[command(disable_help_flag = true)]
    Packet(Options),
    /// How many packets a second cross the program between two devices in network namespaces; as root
    #[command(disable_help_flag = true)]
    Live(Options),
    /// The same, beside nftables' DNAT
    #[command(disable_help_flag = true)]
    Rivals(Options),
    /// What the controller's work costs: ticks, walks over the flow table, reloads, memory; as root
    #[command(disable_help_flag = true)]
    Controller(Options),
    /// Results that were written as JSON, as Markdown
    #[command(disable_help_flag = true)]
    Print(Options),
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
        Bench::Balance(options) => in_user_space(workspace, "balance", options),
        Bench::Print(options) => in_user_space(workspace, "print", options),
        Bench::Live(options) => on_the_road(workspace, "live", PathBuf::new(), options),
        Bench::Rivals(options) => {
            packages::require("bench", &RIVALS)?;
            // The measurement says what it leaves out.
            for package in MORE_RIVALS {
                if let Err(error) = packages::require_all("bench", &[package]) {
                    println!("bench: {error:#}");
                }
            }
            let binary = build::run(workspace, &build::Options { release: true })?;
            on_the_road(workspace, "rivals", binary, options)
        }
        Bench::Packet(options) => in_the_kernel(workspace, "packet", PathBuf::new(), options),
        Bench::Controller(options) => in_the_kernel(workspace, "controller", PathBuf::new(), options),
    }
}

fn in_user_space(workspace: &Workspace, name: &str, options: &Options) -> Result<()> {
    // It is linked with user space, which carries an XDP program; none is loaded, so an old one will do.
    if !workspace.ebpf_object().exists() {
        build::program(workspace, &setup::build_tools(workspace)?)?;
    }
    let mut run = workspace.cargo("run");
    run.args(["--package", "balancer-tests"]);
    command::run(run.args(BENCH).arg(name).args(&options.arguments))
}

/// What is measured beside the balancer, and with what.
const RIVALS: [Tool; 5] = [
    Tool { program: "nft", package: "nftables" },
    Tool { program: "ethtool", package: "ethtool" },
    Tool { program: "nginx", package: "nginx-light" },
    Tool { program: "wrk", package: "wrk" },
    Tool { program: "iperf3", package: "iperf3" },
];
/// Packages of what is measured as well, if there.
const MORE_RIVALS: [&str; 2] = ["haproxy", "libnginx-mod-stream"];

fn on_the_road(workspace: &Workspace, name: &str, binary: PathBuf, options: &Options) -> Result<()> {
    test::require_tools("bench")?;
    in_the_kernel(workspace, name, binary, options)
}

fn in_the_kernel(workspace: &Workspace, name: &str, binary: PathBuf, options: &Options) -> Result<()> {
    let tools = setup::build_tools(workspace)?;
    build::program(workspace, &tools)?;
    build::harness(workspace, &tools)?;
    let mut run = end_to_end::cargo(workspace, "run", binary, &[])?;
    command::run(run.args(BENCH).arg(name).args(&options.arguments))
}

const BENCH: [&str; 5] = ["--release", "--quiet", "--bin", "bench", "--"];
