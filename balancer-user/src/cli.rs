//! The command line: what may be said, and which verb does it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::commands;
use crate::config::InterfaceName;

const EXAMPLES: &str = "\
Examples:
  balancer check -c /etc/balancer.toml      is this configuration fine?
  balancer run -c /etc/balancer.toml        balance until SIGINT or SIGTERM
  balancer status web                       who serves \"web\", and how loaded are they?
  balancer detach                           take everything off again

Exit codes: 0 fine, 1 failed, 2 the call or the configuration is wrong.";

/// An XDP layer-4 load balancer that chooses by measured load.
#[derive(Debug, Parser)]
#[command(name = "balancer", version, after_help = EXAMPLES)]
pub struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Load, attach and balance, in the foreground, until SIGINT or SIGTERM
    #[command(after_help = "Example:\n  balancer run -c /etc/balancer.toml")]
    Run(RunArgs),
    /// Say whether a configuration is fine, or everything that is wrong with it
    #[command(after_help = "Example:\n  balancer check -c /etc/balancer.toml\n\n\
        Needs no privileges and no running balancer. `run` gives the same verdict.")]
    Check(ConfigFile),
    /// Show the services, their backends and loads
    #[command(after_help = "Examples:\n  balancer status\n  balancer status web\n  \
        balancer status --json | jq '.services[].backends[] | {name, share}'")]
    Status(StatusArgs),
    /// Play a table of loads and print which backend each request goes to
    #[command(after_help = "Example:\n  balancer simulate tests/vectors/selection-tables.json")]
    Simulate(SimulateArgs),
    /// Take program, links and pins off: the host is as before
    #[command(
        after_help = "Examples:\n  balancer detach\n  balancer detach eth0 --pin-path /sys/fs/bpf/other"
    )]
    Detach(DetachArgs),
}

/// How to run.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The configuration, a TOML file
    #[arg(short, long = "config", value_name = "FILE")]
    pub config: PathBuf,
    /// Begin with empty maps, whatever an earlier daemon has left: live flows are lost
    #[arg(long)]
    pub fresh: bool,
}

#[derive(Debug, Args)]
struct ConfigFile {
    /// The configuration, a TOML file
    #[arg(short, long = "config", value_name = "FILE")]
    config: PathBuf,
}

/// What `status` is asked.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Show this service alone
    pub service: Option<String>,
    /// Print the daemon's answer as JSON
    #[arg(long)]
    pub json: bool,
    /// The daemon's control socket [default: /run/balancer/balancer.sock]
    #[arg(long, value_name = "PATH", conflicts_with = "config")]
    pub socket: Option<PathBuf>,
    /// Take the socket's path from this configuration
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct SimulateArgs {
    /// The tables, in JSON
    file: PathBuf,
    /// Print the picks as JSON
    #[arg(long)]
    json: bool,
}

/// What `detach` takes off.
#[derive(Debug, Args)]
pub struct DetachArgs {
    /// Only from these interfaces [default: from all]
    #[arg(value_name = "IFACE")]
    pub interfaces: Vec<InterfaceName>,
    /// Where the pins are [default: /sys/fs/bpf/balancer]
    #[arg(long, value_name = "PATH", conflicts_with = "config")]
    pub pin_path: Option<PathBuf>,
    /// Take the path of the pins from this configuration
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

impl Cli {
    /// Does what was asked.
    ///
    /// # Errors
    ///
    /// [`Faults`](crate::config::Faults) when a configuration is wrong; anything else is a failure.
    pub fn execute(self) -> anyhow::Result<ExitCode> {
        match self.verb {
            Verb::Run(args) => commands::run::run(&args),
            Verb::Check(ConfigFile { config }) => commands::check::run(&config),
            Verb::Status(args) => commands::status::run(&args),
            Verb::Simulate(SimulateArgs { file, json }) => commands::simulate::run(&file, json),
            Verb::Detach(args) => commands::detach::run(&args),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use clap::error::ErrorKind;

    use super::*;
    use crate::config::{DEFAULT_PIN_PATH, DEFAULT_SOCKET};

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn calls() {
        for (call, refused) in [
            ("run -c f", None),
            ("run -c f --fresh", None),
            ("check --config f", None),
            ("status", None),
            ("status web --json --socket /s", None),
            ("status -c f", None),
            ("simulate f --json", None),
            ("detach", None),
            ("detach eth0 eth1 --pin-path /p", None),
            ("", Some(ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand)),
            ("run", Some(ErrorKind::MissingRequiredArgument)),
            ("check f", Some(ErrorKind::UnknownArgument)),
            ("status --socket /s -c f", Some(ErrorKind::ArgumentConflict)),
            ("detach --pin-path /p -c f", Some(ErrorKind::ArgumentConflict)),
            ("detach a/b", Some(ErrorKind::ValueValidation)),
            ("statsu", Some(ErrorKind::InvalidSubcommand)),
        ] {
            let words = std::iter::once("balancer").chain(call.split_whitespace());
            assert_eq!(Cli::try_parse_from(words).err().map(|error| error.kind()), refused, "{call}");
        }
    }

    #[test]
    fn help_tells_the_real_defaults() {
        let help = |verb: &str| {
            let mut command = Cli::command();
            command.find_subcommand_mut(verb).expect("the verb").render_long_help().to_string()
        };
        assert!(help("status").contains(DEFAULT_SOCKET));
        assert!(help("detach").contains(DEFAULT_PIN_PATH));
    }
}
