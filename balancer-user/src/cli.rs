//! The command line: what may be said, and which verb does it.

mod change;
mod flows;

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

pub use self::change::{Assignment, BackendArgs, BackendVerb, ChangeArgs, RollbackArgs, ServiceVerb};
pub use self::flows::{FilterArgs, FlowsVerb};
use crate::api::MOST_PICKS;
use crate::commands;
use crate::config::{Forward, InterfaceName, Requests, XdpMode};
use crate::doctor;
use crate::method::Method;
use crate::prefix::Prefix;

const EXAMPLES: &str = "\
Examples:
  balancer check -c /etc/balancer.toml      is this configuration fine?
  balancer run -c /etc/balancer.toml        balance until SIGINT or SIGTERM
  balancer status web                       who serves \"web\", and how loaded are they?
  balancer flows list --service web         who is connected to \"web\", and to whom?
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
    #[command(after_help = "Examples:\n  balancer check -c /etc/balancer.toml\n  \
        balancer check --schema > balancer.schema.json\n\n\
        Needs no privileges and no running balancer. `run` gives the same verdict.")]
    Check(CheckArgs),
    /// Show the services, their backends and loads
    #[command(after_help = "Examples:\n  balancer status\n  balancer status web\n  \
        balancer status --json | jq '.services[].backends[] | {name, share}'")]
    Status(StatusArgs),
    /// Watch the services, their backends and loads, live
    #[command(after_help = "Examples:\n  balancer top\n  balancer top web --interval 200ms\n\n\
        Keys: arrows, page up and down, home and end move; space halts; q or Esc ends it. Packets and bits per second are \
        those of the last interval, N and Nw those of the window.")]
    Top(TopArgs),
    /// Show why the next flows of a service go where they go
    #[command(
        after_help = "Examples:\n  balancer explain web\n  balancer explain web --picks 100 --json\n\n\
        Compared is N + committed + lacking + pending: what was measured, what recent flows have yet to bring within the \
        window, what a newcomer counts for the history that it lacks, and flows since the last tick. The lowest \
        Nw = compared × 10000 / weight is picked; among equals, the next after the last pick. A client that the service remembers \
        (`persistence`) goes to its backend, whatever is picked here."
    )]
    Explain(ExplainArgs),
    /// Show where a service's flows would go by another method, by the counters as they are
    #[command(after_help = "Examples:\n  balancer whatif web --method least-request\n  \
        balancer whatif web --method least-response-time --requests exchange\n\n\
        Nothing changes.")]
    Whatif(WhatIfArgs),
    /// List, count or kill flows: the TCP connections and UDP conversations that are remembered
    #[command(subcommand)]
    Flows(FlowsVerb),
    /// Add, change or remove services, while the balancer runs
    #[command(subcommand)]
    Service(ServiceVerb),
    /// Add, change or remove backends, take one out of the choice, or put it in again
    #[command(subcommand)]
    Backend(BackendVerb),
    /// Show what a reload of a configuration would change
    #[command(after_help = "Example:\n  balancer plan -c /etc/balancer.toml\n\nNothing changes.")]
    Plan(PlanArgs),
    /// Put an earlier configuration in force again
    #[command(after_help = "Examples:\n  balancer rollback             the last one before this\n  \
        balancer rollback --to 3      that of generation 3; `balancer plan` says which there are\n\n\
        It is a generation of its own: rolling back again goes back to where it came from. A restart begins with the file.")]
    Rollback(RollbackArgs),
    /// Play a table of loads and print which backend each request goes to
    #[command(after_help = "Example:\n  balancer simulate tests/vectors/selection-tables.json")]
    Simulate(SimulateArgs),
    /// Say whether this host is fit to balance, or to be a backend, and what to do about what is not
    #[command(
        after_help = "Examples:\n  balancer doctor                          every interface that is up\n  \
        balancer doctor -c /etc/balancer.toml    what this configuration needs\n  \
        balancer doctor eth0 --backend-of 192.0.2.10 --forward ipip --client 198.51.100.7\n                                           \
        on a backend that holds the service's address\n\n\
        Attaches nothing and changes nothing. Exit codes: 0 nothing would fail (there may be warnings), 1 something would."
    )]
    Doctor(DoctorArgs),
    /// On a backend: take off what packets to it are wrapped in, until SIGINT or SIGTERM
    #[command(after_help = "Examples:\n  balancer decap eth0 --from 10.0.0.1\n  \
        balancer decap eth0 --from 10.254.0.0/16 --from 2001:db8::/64 --gue-port 6080\n\n\
        For services with `forward = \"ipip\"` or \"gue\", where the kernel has no device for that. The service's address must \
        be on this host, best on `lo`. SIGUSR1 logs how many packets were unwrapped; the end prints it.")]
    Decap(DecapArgs),
    /// Print what the control socket can be asked, as an OpenAPI document
    #[command(after_help = "Example:\n  balancer api > balancer.openapi.json\n\n\
        Needs no running balancer, which answers with the same at /v1/openapi.json:\n  \
        curl --unix-socket /run/balancer/balancer.sock http://balancer/v1/openapi.json")]
    Api,
    /// Take program, links and pins off: the host is as before
    #[command(
        after_help = "Examples:\n  balancer detach\n  balancer detach eth0 --pin-path /sys/fs/bpf/other"
    )]
    Detach(DetachArgs),
}

/// What is unwrapped.
#[derive(Debug, Args)]
pub struct DecapArgs {
    /// The interface that wrapped packets come in by
    pub interface: InterfaceName,
    /// The UDP port that GUE arrives at
    #[arg(long, value_name = "PORT", default_value = "6080", value_parser = clap::value_parser!(u16).range(1..))]
    pub gue_port: u16,
    /// A network or address that may send wrapped packets: the balancers, or their `tunnel-source`; more than once for more
    /// [default: anyone]
    #[arg(long, value_name = "NETWORK")]
    pub from: Vec<Prefix>,
    /// How the program is attached: native, generic, or auto, which tries both
    #[arg(long, value_enum, default_value = "auto")]
    pub xdp_mode: XdpMode,
}

/// What is examined.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// The interfaces [default: those of the configuration, or all that are up]
    #[arg(value_name = "IFACE", conflicts_with = "config")]
    pub interfaces: Vec<InterfaceName>,
    /// Whether this host can run this configuration
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Whether this host is fit as a backend of the service with this address
    #[arg(long, value_name = "ADDRESS", conflicts_with = "config")]
    pub backend_of: Option<IpAddr>,
    /// How that service's packets come: dsr, ipip or gue
    #[arg(long, value_name = "MODE", default_value = "dsr", requires = "backend_of", value_parser = one_way)]
    pub forward: Forward,
    /// The UDP port that GUE arrives at
    #[arg(long, value_name = "PORT", default_value = "6080", requires = "backend_of", value_parser = clap::value_parser!(u16).range(1..))]
    pub gue_port: u16,
    /// A client, to whom the way back is looked up [default: one on the internet]
    #[arg(long, value_name = "ADDRESS", requires = "backend_of")]
    pub client: Option<IpAddr>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn one_way(text: &str) -> Result<Forward, &'static str> {
    let found = doctor::WAYS.into_iter().find(|mode| mode.to_string() == text);
    found.ok_or("allowed: dsr, ipip, gue")
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

/// What `check` is asked.
#[derive(Debug, Args)]
#[group(required = true)]
struct CheckArgs {
    /// The configuration, a TOML file
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print the JSON Schema of configurations instead, for editors
    #[arg(long, conflicts_with = "config")]
    schema: bool,
}

/// What `status` is asked.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Show this service alone
    pub service: Option<String>,
    /// Print the daemon's answer as JSON
    #[arg(long)]
    pub json: bool,
    /// Who is asked.
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// What `top` shows.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Show this service alone
    pub service: Option<String>,
    /// How often the daemon is asked; it has something new five times a second
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = humantime::parse_duration)]
    pub interval: Duration,
    /// Who is asked.
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// Which daemon is asked.
#[derive(Debug, Args)]
pub struct DaemonArgs {
    /// The daemon's control socket [default: /run/balancer/balancer.sock]
    #[arg(long, value_name = "PATH", conflicts_with = "config")]
    pub socket: Option<PathBuf>,
    /// Take the socket's path from this configuration
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// What `explain` is asked.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The service
    pub service: String,
    /// How many of the next picks
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u32).range(0..=i64::from(MOST_PICKS)))]
    pub picks: u32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Who is asked.
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// What `whatif` is asked.
#[derive(Debug, Args)]
pub struct WhatIfArgs {
    /// The service
    pub service: String,
    /// The other method
    #[arg(long)]
    pub method: Method,
    /// What counts as an active request, for least-request and least-response-time [default: as the service has it]
    #[arg(long)]
    pub requests: Option<Requests>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Who is asked.
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// What `plan` is asked.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// The configuration, a TOML file; its `socket` is where the daemon is asked
    #[arg(short, long = "config", value_name = "FILE")]
    pub config: PathBuf,
    /// The daemon's control socket, if it is another one
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
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
            Verb::Check(CheckArgs { config: Some(config), .. }) => commands::check::run(&config),
            Verb::Check(CheckArgs { config: None, .. }) => commands::check::schema(),
            Verb::Status(args) => commands::status::run(&args),
            Verb::Top(args) => commands::top::run(&args),
            Verb::Service(verb) => commands::change::service(verb),
            Verb::Backend(verb) => commands::backend::run(verb),
            Verb::Plan(args) => commands::plan::run(&args),
            Verb::Rollback(args) => commands::change::rollback(&args),
            Verb::Explain(args) => commands::explain::run(&args),
            Verb::Whatif(args) => commands::whatif::run(&args),
            Verb::Flows(verb) => commands::flows::run(&verb),
            Verb::Simulate(SimulateArgs { file, json }) => commands::simulate::run(&file, json),
            Verb::Doctor(args) => commands::doctor::run(&args),
            Verb::Decap(args) => commands::decap::run(&args),
            Verb::Api => commands::api::run(),
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
            ("check --schema", None),
            ("api", None),
            ("api --json", Some(ErrorKind::UnknownArgument)),
            ("check", Some(ErrorKind::MissingRequiredArgument)),
            ("check --schema -c f", Some(ErrorKind::ArgumentConflict)),
            ("status", None),
            ("status web --json --socket /s", None),
            ("status -c f", None),
            ("top web --interval 200ms --socket /s", None),
            ("top --interval 2", Some(ErrorKind::ValueValidation)),
            ("top --json", Some(ErrorKind::UnknownArgument)),
            ("explain web --picks 0 --json", None),
            ("whatif web --method maglev -c f", None),
            ("whatif web --method least-request --requests exchange --socket /s --json", None),
            ("flows list", None),
            (
                "flows list --service web --backend b --client 192.0.2.0/24 --state half-open --limit 5 --json",
                None,
            ),
            ("flows count --socket /s", None),
            ("flows kill --client 192.0.2.7 -c f", None),
            ("flows kill --all", None),
            ("simulate f --json", None),
            ("backend drain web-1 --service web --deadline 10m --json", None),
            ("backend enable web-1", None),
            ("backend add web-3 --service web address=10.0.0.13:8080 weight=2 --save", None),
            ("backend set web-3 weight=", None),
            ("backend set web-3", Some(ErrorKind::MissingRequiredArgument)),
            ("backend set web-3 weight", Some(ErrorKind::ValueValidation)),
            ("backend rm web-3 --dry-run --json", None),
            ("backend rm web-3 --dry-run --save", Some(ErrorKind::ArgumentConflict)),
            ("service add api", None),
            ("service set web method=maglev -c f", None),
            ("service rm web --socket /s", None),
            ("plan -c f --socket /s --json", None),
            ("plan", Some(ErrorKind::MissingRequiredArgument)),
            ("rollback --to 3 --save", None),
            ("rollback 3", Some(ErrorKind::UnknownArgument)),
            ("backend drain web-1 --deadline 10", Some(ErrorKind::ValueValidation)),
            ("backend drain", Some(ErrorKind::MissingRequiredArgument)),
            ("doctor", None),
            ("doctor eth0 eth1 --json", None),
            ("doctor -c f", None),
            ("doctor eth0 --backend-of 192.0.2.10 --forward gue --gue-port 6081 --client 198.51.100.7", None),
            ("doctor --backend-of 2001:db8::10", None),
            ("doctor eth0 -c f", Some(ErrorKind::ArgumentConflict)),
            ("doctor --backend-of 192.0.2.10 -c f", Some(ErrorKind::ArgumentConflict)),
            ("doctor --backend-of 192.0.2.10 --forward nat", Some(ErrorKind::ValueValidation)),
            ("doctor --backend-of web", Some(ErrorKind::ValueValidation)),
            ("doctor --client 198.51.100.7", Some(ErrorKind::MissingRequiredArgument)),
            ("decap eth0", None),
            ("decap eth0 --gue-port 6081 --from 10.0.0.1 --from 2001:db8::/32 --xdp-mode generic", None),
            ("decap", Some(ErrorKind::MissingRequiredArgument)),
            ("decap eth0 --gue-port 0", Some(ErrorKind::ValueValidation)),
            ("decap eth0 --from 10.0.0.1/8", Some(ErrorKind::ValueValidation)),
            ("decap eth0 --xdp-mode fast", Some(ErrorKind::InvalidValue)),
            ("detach", None),
            ("detach eth0 eth1 --pin-path /p", None),
            ("", Some(ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand)),
            ("run", Some(ErrorKind::MissingRequiredArgument)),
            ("check f", Some(ErrorKind::UnknownArgument)),
            ("status --socket /s -c f", Some(ErrorKind::ArgumentConflict)),
            ("detach --pin-path /p -c f", Some(ErrorKind::ArgumentConflict)),
            ("detach a/b", Some(ErrorKind::ValueValidation)),
            ("explain", Some(ErrorKind::MissingRequiredArgument)),
            ("explain web --picks 101", Some(ErrorKind::ValueValidation)),
            ("whatif web", Some(ErrorKind::MissingRequiredArgument)),
            ("whatif web --method least", Some(ErrorKind::ValueValidation)),
            ("whatif web --method least-request --requests all", Some(ErrorKind::InvalidValue)),
            ("flows", Some(ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand)),
            ("flows list --limit 0", Some(ErrorKind::ValueValidation)),
            ("flows list --client 192.0.2.7/24", Some(ErrorKind::ValueValidation)),
            ("flows list --state open", Some(ErrorKind::InvalidValue)),
            ("flows kill", Some(ErrorKind::MissingRequiredArgument)),
            ("flows kill --json", Some(ErrorKind::MissingRequiredArgument)),
            ("flows kill --all --service web", Some(ErrorKind::ArgumentConflict)),
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
