//! `cargo xtask`: everything that is done to this repository, one module for each command.

mod bench;
mod build;
mod command;
mod end_to_end;
mod interop;
mod linker;
mod lint;
mod packages;
mod play;
mod setup;
mod superuser;
mod test;
mod toolchain;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

/// Builds, tests, demonstrates and measures the balancer.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Find or install what the build needs: an eBPF toolchain, bpf-linker, bpffs
    Setup,
    /// Build the XDP program, then the `balancer` binary that carries it
    Build(build::Options),
    /// Check formatting, and run clippy for the host and for the bpf target
    Lint,
    /// Set up, build, lint, and run every test; the end-to-end tests run as root
    Test(test::Options),
    /// Watch it balance: a client, the balancer and backends in network namespaces, as root
    Demo(play::Options),
    /// Change, kill and cut off a balancer at random, under a load whose every byte is compared, as root
    Soak(play::Options),
    /// Send packets through the tunnels and VLAN devices of Debian's kernel, in a virtual machine
    Interop,
    /// Measure: each measurement says what it needs
    #[command(subcommand)]
    Bench(bench::Bench),
}

fn main() -> ExitCode {
    match run(Cli::parse().verb) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The chain of causes, without a backtrace: what failed is another program.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(verb: Verb) -> Result<()> {
    let workspace = Workspace::locate()?;
    match verb {
        Verb::Setup => setup::run(&workspace).map(drop),
        Verb::Build(options) => build::run(&workspace, &options).map(drop),
        Verb::Lint => lint::run(&workspace),
        Verb::Test(options) => test::run(&workspace, &options),
        Verb::Demo(options) => play::run(&workspace, "demo", &options),
        Verb::Soak(options) => play::run(&workspace, "soak", &options),
        Verb::Interop => interop::run(&workspace),
        Verb::Bench(bench) => bench::run(&workspace, &bench),
    }
}
