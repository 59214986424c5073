//! What `balancer status --json` says, as far as the demonstration shows it.

use anyhow::{Context as _, Result};
use balancer_tests::Balancer;
use serde::Deserialize;

/// The daemon's answer.
#[derive(Deserialize)]
pub struct Status {
    /// The services, as in the configuration.
    pub services: Vec<Service>,
    /// What time the window's figures cover.
    pub window_ms: u64,
}

/// One service.
#[derive(Deserialize)]
pub struct Service {
    /// Its name.
    pub name: String,
    /// Its backends, as in the configuration.
    pub backends: Vec<Backend>,
}

/// One backend of a service.
#[derive(Deserialize)]
pub struct Backend {
    /// Its name.
    pub name: String,
    /// Its weight.
    pub weight: u8,
    /// Live flows.
    pub active: u64,
    /// Packets in both directions since the daemon's start.
    pub packets: u64,
    /// Bytes in both directions since the daemon's start.
    pub bytes: u64,
    /// Bytes within the window.
    pub window_bytes: u64,
    /// The load by the service's method.
    pub n: f64,
    /// The load that is compared; none with weight 0.
    pub nw: Option<f64>,
    /// The share of the new flows that it is meant to get next, from 0 to 1.
    pub share: f64,
}

impl Status {
    /// Asks the daemon.
    pub fn read(balancer: &Balancer) -> Result<Self> {
        serde_json::from_value(balancer.status()?).context("understand the balancer's status")
    }
}
