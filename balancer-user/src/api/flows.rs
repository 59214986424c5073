use std::net::SocketAddr;

use clap::ValueEnum;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{config::Protocol, prefix::Prefix};

/// Most flows in one answer: what more there are is asked for again, from `FlowList::next` on.
pub const LARGEST_LIST: u32 = 1000;

/// Which flows are meant: those that are all of this. Without any of it, all flows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct FlowFilter {
    /// The name of the service.
    pub service: Option<String>,
    /// The name of the backend; without a service, the backend of this name of any.
    pub backend: Option<String>,
    /// Where the client is.
    pub client: Option<Prefix>,
    /// How far the flow is.
    pub state: Option<FlowState>,
}

impl FlowFilter {
    /// Whether it leaves nothing out.
    pub fn is_empty(&self) -> bool {
        *self == FlowFilter::default()
    }
}

/// How far a flow is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum FlowState {
    /// TCP: the handshake is under way. UDP: the backend has not answered yet.
    HalfOpen,
    /// Both ends have talked.
    Established,
    /// TCP: both ends have finished, or one has reset the connection. Not among the active ones.
    Closing,
}

impl FlowState {
    /// The name, as in JSON and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            FlowState::HalfOpen => "half-open",
            FlowState::Established => "established",
            FlowState::Closing => "closing",
        }
    }
}

/// `flows list`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ListFlows {
    /// Which flows.
    pub filter: FlowFilter,
    /// How many at most: 1 to `LARGEST_LIST`.
    pub limit: u32,
    /// Where in the table to begin: 0, or what an earlier answer said.
    pub from: u32,
    /// Whether to count those beyond the limit.
    pub count_more: bool,
}

impl Default for ListFlows {
    fn default() -> ListFlows {
        ListFlows { filter: FlowFilter::default(), limit: 100, from: 0, count_more: true }
    }
}

/// The flows that were asked for, in the table's order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlowList {
    /// At most as many as asked for.
    pub flows: Vec<Flow>,
    /// How many more there are; `None` if they were not to be counted.
    pub more: Option<u64>,
    /// Where the next one is in the table; `None` when there is no more.
    pub next: Option<u32>,
}

/// One flow. Packets and bytes are counted for each backend, and not for each flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Flow {
    /// Where the client talks from.
    pub client: SocketAddr,
    /// The name of the service.
    pub service: String,
    /// What the client talks to.
    pub service_address: SocketAddr,
    /// The name of the backend.
    pub backend: String,
    /// Who serves it.
    pub backend_address: SocketAddr,
    /// Its protocol.
    pub protocol: Protocol,
    /// How far it is.
    pub state: FlowState,
    /// How long ago it was opened, in milliseconds, to 67 ms. `None` for one that has sent packets later than a window
    /// after it was opened: then that is no longer known.
    pub age_ms: Option<u64>,
    /// How long ago its last packet came, from either end, in milliseconds, to 67 ms.
    pub idle_ms: u64,
}

/// `flows count`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CountFlows {
    /// Which flows.
    pub filter: FlowFilter,
}

/// How many flows there are. Those that are half open or established are the active ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FlowCount {
    /// All of them.
    pub flows: u64,
    /// Of them, those in `FlowState::HalfOpen`.
    pub half_open: u64,
    /// Of them, those in `FlowState::Established`.
    pub established: u64,
    /// Of them, those in `FlowState::Closing`.
    pub closing: u64,
}

/// `flows kill`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KillFlows {
    /// Which flows.
    pub filter: FlowFilter,
    /// Must be set where the filter leaves nothing out, and not where it does.
    pub all: bool,
}

/// How many flows were taken out of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Killed {
    /// So many.
    pub killed: u64,
}
