//! What may be said to `balancer flows`.

use clap::{ArgGroup, Args, Subcommand};

use super::DaemonArgs;
use crate::{api::FlowState, prefix::Prefix};

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
