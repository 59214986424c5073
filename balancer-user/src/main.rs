//! The `balancer` binary.

use std::io::{self, Write};
use std::process::ExitCode;

use balancer_user::api::client::WrongCall;
use balancer_user::cli::Cli;
use balancer_user::config::Faults;
use clap::Parser;

fn main() -> ExitCode {
    Cli::parse().execute().unwrap_or_else(|error| {
        let mut out = io::stderr().lock();
        // Where not even this can be written, the exit code is left.
        match error.downcast_ref::<Faults>() {
            Some(faults) => {
                let _ = writeln!(out, "{faults}");
                ExitCode::from(2)
            }
            None => {
                let _ = writeln!(out, "balancer: {error:#}");
                if error.is::<WrongCall>() { ExitCode::from(2) } else { ExitCode::FAILURE }
            }
        }
    })
}
