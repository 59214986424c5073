//! `cargo xtask bench` runs this.

mod balance;
mod controller;
mod live;
mod packet;
mod results;
mod stack;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;

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
    /// How many packets a second cross the program between two devices
    Live(live::Options),
    /// The same beside nftables, and the full stack beside HAProxy and nginx as well
    Rivals(live::RivalOptions),
    /// What the controller's work costs: ticks, walks over the flow table, reloads, memory
    Controller(controller::Options),
    /// Print results that were written as JSON, as Markdown
    Print {
        /// What `--json` has written
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().bench {
        Bench::Balance(options) => balance::run(&options),
        Bench::Packet(options) => packet::run(&options),
        Bench::Live(options) => live::run(&options),
        Bench::Rivals(options) => live::run_rivals(&options),
        Bench::Controller(options) => controller::run(&options),
        Bench::Print { files } => print(&files),
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

fn print(files: &[PathBuf]) -> Result<bool> {
    for file in files {
        println!("{}", results::Results::read(file)?);
    }
    Ok(true)
}
