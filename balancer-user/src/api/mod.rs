//! How the other verbs ask the daemon: HTTP over a Unix socket, requests and answers in JSON.
//!
//! The socket has a thread of its own. The status is read as it was last published; everything else goes to the controller
//! through a queue of bounded length, and is answered between two ticks; and clients are few. So none can delay the
//! controller, however slow or greedy it is.

mod backend;
pub mod client;
mod config;
mod explain;
mod flows;
mod model;
mod openapi;
mod refusal;
mod server;
mod serving;
mod socket;
mod verb;

pub use backend::{DrainBackend, Draining, EnableBackend, Enabled};
pub use config::{ChangeConfig, Changed, Rollback, RunningConfig, ShowConfig};
pub use explain::{
    Choice, Compared, Comparison, Explain, Explanation, MOST_PICKS, Pick, Standing, Stands, WhatIf,
};
pub use flows::{
    CountFlows, Flow, FlowCount, FlowFilter, FlowList, FlowState, KillFlows, Killed, LARGEST_LIST, ListFlows,
};
pub use model::{
    AttachedMode, BackendState, BackendStatus, ByState, Drain, FlowsStatus, HealthStatus, HealthVerdict,
    InterfaceState, InterfaceStatus, LastChange, ResponseTime, ServiceStatus, Status,
};
pub use openapi::openapi;
pub use refusal::Refusal;
pub use server::{Published, Server};
pub use serving::Serving;
pub use verb::{ANSWER_LIMIT, Ask, Command, OPENAPI_PATH, Reply, STATUS_PATH, Verb, commands};

#[cfg(test)]
pub(crate) use model::tests;
