use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::model::Drain;

/// `backend drain`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DrainBackend {
    /// Its name.
    pub backend: String,
    /// The name of its service, where several have a backend of this name.
    #[serde(default)]
    pub service: Option<String>,
    /// In how many milliseconds the flows that are left are ended. Left out: what was said before, or else the
    /// service's `drain-timeout`.
    #[serde(default)]
    pub deadline_ms: Option<u64>,
}

/// How far the draining of a backend has come.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Draining {
    /// The name of its service.
    pub service: String,
    /// Its name.
    pub backend: String,
    /// Flows that are left.
    pub remaining: u64,
    /// Until when, and how fast they go.
    #[serde(flatten)]
    pub drain: Drain,
}

/// `backend enable`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EnableBackend {
    /// Its name.
    pub backend: String,
    /// The name of its service, where several have a backend of this name.
    #[serde(default)]
    pub service: Option<String>,
}

/// A backend that takes new flows again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Enabled {
    /// The name of its service.
    pub service: String,
    /// Its name.
    pub backend: String,
}
