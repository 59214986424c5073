//! The command line: what may be said, and which verb does it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use clap::{ArgGroup, Args, Parser, Subcommand};

use crate::api::{FlowState, MOST_PICKS};
use crate::commands;
use crate::config::{InterfaceName, Requests, XdpMode};
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

/// What `rollback` is asked.
#[derive(Debug, Args)]
pub struct RollbackArgs {
    /// The number of the generation [default: the last one before this]
    #[arg(long, value_name = "N")]
    pub to: Option<u64>,
    /// Write it to the daemon's file as well
    #[arg(long)]
    pub save: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Who is asked.
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// What is done with a service.
#[derive(Debug, Subcommand)]
pub enum ServiceVerb {
    /// Add a service, without backends yet
    #[command(after_help = "Example:\n  \
        balancer service add api address=192.0.2.11:80 protocol=tcp method=least-request --save")]
    Add {
        /// Its name
        name: String,
        /// Its keys, as in the file
        #[arg(value_name = "KEY=VALUE")]
        keys: Vec<Assignment>,
        /// How it is done.
        #[command(flatten)]
        how: ChangeArgs,
    },
    /// Change keys of a service; its flows go on
    #[command(after_help = "Examples:\n  balancer service set web method=least-request slow-start=30s\n  \
        balancer service set web 'health={ kind = \"http\", path = \"/healthz\" }' --save\n  \
        balancer service set web health=          without it, as if it had never been written")]
    Set {
        /// Its name
        name: String,
        /// The keys that change, as in the file; nothing after the `=` takes a key out
        #[arg(value_name = "KEY=VALUE", required = true)]
        keys: Vec<Assignment>,
        /// How it is done.
        #[command(flatten)]
        how: ChangeArgs,
    },
    /// Remove a service; its flows go on until its drain-timeout
    #[command(after_help = "Example:\n  balancer service rm api")]
    Rm {
        /// Its name
        name: String,
        /// How it is done.
        #[command(flatten)]
        how: ChangeArgs,
    },
}

/// How the running configuration is changed.
#[derive(Debug, Args)]
pub struct ChangeArgs {
    /// Write it to the daemon's file as well, whose comments stay
    #[arg(long)]
    pub save: bool,
    /// Only say what would change
    #[arg(long, conflicts_with = "save")]
    pub dry_run: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Who is asked.
    #[command(flatten)]
    pub daemon: DaemonArgs,
}

/// A key and its value as in the file: TOML, or else a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    /// The key.
    pub key: String,
    /// Its value; null = none.
    pub value: serde_json::Value,
}

impl FromStr for Assignment {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Assignment, &'static str> {
        let (key, value) = text.split_once('=').ok_or("not of the form KEY=VALUE")?;
        let (key, value) = (key.trim().to_owned(), value.trim());
        if value.is_empty() {
            return Ok(Assignment { key, value: serde_json::Value::Null });
        }
        let read = toml::from_str::<serde_json::Map<_, _>>(&format!("value = {value}"));
        let read = read.ok().and_then(|mut read| read.remove("value").filter(|_| read.is_empty()));
        Ok(Assignment { key, value: read.unwrap_or_else(|| value.into()) })
    }
}

/// What is done with a backend.
#[derive(Debug, Subcommand)]
pub enum BackendVerb {
    /// Add a backend to a service
    #[command(
        after_help = "Example:\n  balancer backend add web-3 --service web address=10.0.0.13:8080 weight=2 --save"
    )]
    Add {
        /// Which one.
        #[command(flatten)]
        which: BackendArgs,
        /// Its keys, as in the file
        #[arg(value_name = "KEY=VALUE")]
        keys: Vec<Assignment>,
        /// How it is done.
        #[command(flatten)]
        how: ChangeArgs,
    },
    /// Change keys of a backend; its flows go on
    #[command(
        after_help = "Examples:\n  balancer backend set web-1 weight=3\n  balancer backend set web-1 weight=0 --save\n  \
        balancer backend set web-1 max-active=       without a limit"
    )]
    Set {
        /// Which one.
        #[command(flatten)]
        which: BackendArgs,
        /// The keys that change, as in the file; nothing after the `=` takes a key out
        #[arg(value_name = "KEY=VALUE", required = true)]
        keys: Vec<Assignment>,
        /// How it is done.
        #[command(flatten)]
        how: ChangeArgs,
    },
    /// Remove a backend; its flows go on until the drain-timeout
    #[command(after_help = "Example:\n  balancer backend rm web-1 --save")]
    Rm {
        /// Which one.
        #[command(flatten)]
        which: BackendArgs,
        /// How it is done.
        #[command(flatten)]
        how: ChangeArgs,
    },
    /// Give it no new flows, and end the others at a deadline; say how many are left. Survives a restart of the daemon
    #[command(after_help = "Examples:\n  balancer backend drain web-1 --deadline 10m\n  \
        balancer backend drain web-1                 how many flows are left?\n\n\
        Flows go on until they end or the deadline comes. Then a TCP connection's next segment is answered with a RST, and \
        a client's next datagram goes to another backend.")]
    Drain {
        /// Which one.
        #[command(flatten)]
        which: BackendArgs,
        /// When the flows that are left are ended, from now on [default: as said before, or the service's drain-timeout]
        #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
        deadline: Option<Duration>,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Who is asked.
        #[command(flatten)]
        daemon: DaemonArgs,
    },
    /// Let a backend that was drained take new flows again
    #[command(after_help = "Example:\n  balancer backend enable web-1")]
    Enable {
        /// Which one.
        #[command(flatten)]
        which: BackendArgs,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Who is asked.
        #[command(flatten)]
        daemon: DaemonArgs,
    },
}

/// Which backend is meant.
#[derive(Debug, Args)]
pub struct BackendArgs {
    /// Its name
    #[arg(value_name = "NAME")]
    pub backend: String,
    /// The service that it belongs to, where several have one of this name
    #[arg(long, value_name = "NAME")]
    pub service: Option<String>,
}

/// What is done with flows.
#[derive(Debug, Subcommand)]
pub enum FlowsVerb {
    /// Show flows, one a line: client, service, backend, protocol, state, age, idle time
    #[command(after_help = "Examples:\n  balancer flows list --client 203.0.113.0/24\n  \
        balancer flows list --service web --state half-open --json | jq '.flows[].client'\n\n\
        The age shows as long as it is known: \"-\" for a flow that is older than the window and was used since.\n\
        Packets and bytes are not kept for each flow; `balancer status` has each backend's.")]
    List {
        /// Which ones.
        #[command(flatten)]
        filter: FilterArgs,
        /// Most flows to show
        #[arg(long, value_name = "N", default_value = "100", value_parser = clap::value_parser!(u64).range(1..))]
        limit: u64,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Who is asked.
        #[command(flatten)]
        daemon: DaemonArgs,
    },
    /// Count flows, by their state
    #[command(after_help = "Example:\n  balancer flows count --service web --backend web-1\n\n\
        Those that are half open or established are what `balancer status` shows as active.")]
    Count {
        /// Which ones.
        #[command(flatten)]
        filter: FilterArgs,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Who is asked.
        #[command(flatten)]
        daemon: DaemonArgs,
    },
    /// Forget flows: their connections end, the next ones are scheduled anew
    #[command(
        group(ArgGroup::new("which").args(["service", "backend", "client", "state", "all"]).multiple(true).required(true)),
        after_help = "Examples:\n  balancer flows kill --client 203.0.113.7\n  balancer flows kill --backend web-1 --state established\n\n\
        Nobody is told at once: the next TCP segment, from either end, is answered with a RST (not to clients of a \
        service with unknown-flow = \"drop\"); the next datagram of a client opens a new flow."
    )]
    Kill {
        /// Which ones.
        #[command(flatten)]
        filter: FilterArgs,
        /// Every flow of every service
        #[arg(long, conflicts_with_all = ["service", "backend", "client", "state"])]
        all: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Who is asked.
        #[command(flatten)]
        daemon: DaemonArgs,
    },
}

/// Which flows are meant: those that are all of this.
#[derive(Debug, Args)]
pub struct FilterArgs {
    /// Flows of this service
    #[arg(long, value_name = "NAME")]
    pub service: Option<String>,
    /// Flows that this backend serves
    #[arg(long, value_name = "NAME")]
    pub backend: Option<String>,
    /// Flows of clients in this network, or of one client: 192.0.2.0/24, 192.0.2.7
    #[arg(long, value_name = "PREFIX")]
    pub client: Option<Prefix>,
    /// Flows in this state
    #[arg(long)]
    pub state: Option<FlowState>,
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
            Verb::Service(verb) => commands::change::service(verb),
            Verb::Backend(verb) => commands::backend::run(verb),
            Verb::Plan(args) => commands::plan::run(&args),
            Verb::Rollback(args) => commands::change::rollback(&args),
            Verb::Explain(args) => commands::explain::run(&args),
            Verb::Whatif(args) => commands::whatif::run(&args),
            Verb::Flows(verb) => commands::flows::run(&verb),
            Verb::Simulate(SimulateArgs { file, json }) => commands::simulate::run(&file, json),
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
    fn values_are_toml_or_else_text() {
        use serde_json::json;
        for (text, key, value) in [
            ("weight=2", "weight", json!(2)),
            ("backup = true", "backup", json!(true)),
            ("address=10.0.0.1:80", "address", json!("10.0.0.1:80")),
            ("name=\"5\"", "name", json!("5")),
            ("slow-start=30s", "slow-start", json!("30s")),
            ("health={ kind = \"tcp\", rise = 1 }", "health", json!({"kind": "tcp", "rise": 1})),
            ("max-active=", "max-active", json!(null)),
            ("method=a=b", "method", json!("a=b")),
            ("method=1\nother = 2", "method", json!("1\nother = 2")),
        ] {
            assert_eq!(text.parse(), Ok(Assignment { key: key.to_owned(), value }), "{text}");
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
