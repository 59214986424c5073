//! `cargo xtask bench` runs this: what is measured without packets.

mod balance;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// How evenly each method loads the backends, in simulation
    Balance(balance::Options),
}

fn main() -> ExitCode {
    let Bench::Balance(options) = Cli::parse().bench;
    match balance::run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
