use std::net::SocketAddr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::model::{BackendState, four_decimals, two_decimals, two_decimals_if_any};
use crate::{balance::Takes, config::Requests, method::Method};

/// Most picks that are explained at once.
pub const MOST_PICKS: u32 = 100;

/// `explain`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Explain {
    /// The name of the service.
    pub service: String,
    /// How many of the next picks: 0 to `MOST_PICKS`.
    #[serde(default = "ten")]
    pub picks: u32,
}

const fn ten() -> u32 {
    10
}

/// Why the next flows of a service go where they go.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Explanation {
    /// The name of the service.
    pub service: String,
    /// What clients talk to.
    pub address: SocketAddr,
    /// How the backend of a new flow is chosen.
    pub method: Method,
    /// What counts as a request, for methods that compare those.
    pub requests: Option<Requests>,
    /// What N is counted in; `None` for a method that compares nothing.
    pub unit: Option<String>,
    /// How each backend stands before the next pick, in configured order.
    pub backends: Vec<Standing>,
    /// Whoever was picked last: among equals it is the turn of the next after it.
    pub last: Option<String>,
    /// The next picks; none where a hash picks.
    pub picks: Vec<Pick>,
}

/// How one backend stands before the next pick. Loads are in the method's unit, to two decimals.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Standing {
    /// Its name.
    pub name: String,
    /// Whether it can be reached, and is not drained.
    pub state: BackendState,
    /// Its weight now: 0 unless it is `up`.
    pub weight: u8,
    /// Whether it can be picked.
    pub takes: Takes,
    /// Fraction of its weight that slow start has reached.
    #[serde(serialize_with = "two_decimals")]
    pub ramp: f64,
    /// N, as measured.
    #[serde(serialize_with = "two_decimals")]
    pub n: f64,
    /// What its recent flows have yet to bring within the window.
    #[serde(serialize_with = "two_decimals")]
    pub committed: f64,
    /// What a newcomer counts for the history that it lacks.
    #[serde(serialize_with = "two_decimals")]
    pub lacking: f64,
    /// What the flows count that have been sent to it since the counters were read.
    #[serde(serialize_with = "two_decimals")]
    pub pending: f64,
    /// All of that together.
    #[serde(serialize_with = "two_decimals")]
    pub compared: f64,
    /// Compared × 10000 / weight, that reached by slow start; `None` where nothing is compared, and for weight 0.
    #[serde(serialize_with = "two_decimals_if_any")]
    pub nw: Option<f64>,
    /// Whether its Nw is the lowest, and another's as well.
    pub tied: bool,
    /// Its share of the selection ring or of the hash table, 0 to 1.
    #[serde(serialize_with = "four_decimals")]
    pub share: f64,
}

/// One pick.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Pick {
    /// Who is picked; `None`: nobody, since all are full.
    pub backend: Option<String>,
    /// Its Nw before it is; `None` where nothing is compared.
    #[serde(serialize_with = "two_decimals_if_any")]
    pub nw: Option<f64>,
    /// Who has the lowest Nw besides, and comes next in turn.
    pub second: Option<String>,
    /// How much higher that one's Nw is: 0 in a tie. Below 0 where the arrivals of a tick go round a ring that is too
    /// short for them.
    #[serde(serialize_with = "two_decimals_if_any")]
    pub margin: Option<f64>,
    /// Whose Nw is the same.
    pub tied: Vec<String>,
}

/// `whatif`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WhatIf {
    /// The name of the service.
    pub service: String,
    /// The other method.
    pub method: Method,
    /// What counts as a request, for methods that compare those; as the service has it unless said.
    #[serde(default)]
    pub requests: Option<Requests>,
}

/// A service beside itself under another method, by the same counters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Comparison {
    /// The name of the service.
    pub service: String,
    /// What clients talk to.
    pub address: SocketAddr,
    /// As it runs.
    pub today: Choice,
    /// As it would.
    pub instead: Choice,
    /// What is not known of the other method while it does not run.
    pub unknown: Vec<String>,
    /// The backends, in configured order.
    pub backends: Vec<Compared>,
}

/// How flows are chosen for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Choice {
    /// The method.
    pub method: Method,
    /// What counts as a request, for methods that compare those.
    pub requests: Option<Requests>,
    /// What N is counted in; `None` for a method that compares nothing.
    pub unit: Option<String>,
}

/// One backend under both.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Compared {
    /// Its name.
    pub name: String,
    /// Whether it can be reached, and is not drained.
    pub state: BackendState,
    /// Its weight now: 0 unless it is `up`.
    pub weight: u8,
    /// As it stands.
    pub today: Stands,
    /// As it would.
    pub instead: Stands,
}

/// Where a backend stands under one method.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Stands {
    /// N, as measured.
    #[serde(serialize_with = "two_decimals")]
    pub n: f64,
    /// What its recent flows have yet to bring within the window.
    #[serde(serialize_with = "two_decimals")]
    pub committed: f64,
    /// What is compared; `None` where nothing is, and for weight 0.
    #[serde(serialize_with = "two_decimals_if_any")]
    pub nw: Option<f64>,
    /// Its share of the next flows, 0 to 1.
    #[serde(serialize_with = "four_decimals")]
    pub share: f64,
}
