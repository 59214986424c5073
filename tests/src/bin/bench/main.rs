//! `cargo xtask bench` runs this.

mod balance;
mod packet;

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
    /// What a packet costs in the program, beside the least that any takes
    Packet(packet::Options),
}

fn main() -> ExitCode {
    let result = match Cli::parse().bench {
        Bench::Balance(options) => balance::run(&options).map(|()| true),
        Bench::Packet(options) => packet::run(&options),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
