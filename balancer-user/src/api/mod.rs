//! How the other verbs ask the daemon: HTTP over a Unix socket, answers in JSON.
//!
//! The server only reads the last published status, so no client can delay the controller.

pub mod client;
mod model;
mod server;
mod socket;

pub use model::{
    AttachedMode, BackendState, BackendStatus, Drain, InterfaceStatus, ResponseTime, STATUS_PATH,
    ServiceStatus, Status,
};
pub use server::Server;

#[cfg(test)]
pub(crate) use model::tests;
