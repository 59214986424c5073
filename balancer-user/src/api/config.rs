use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::{Difference, Edit};

/// What configuration is in force: for `plan`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ShowConfig {}

/// The configuration in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RunningConfig {
    /// Its generation: 1 since the daemon was started, and one more with each change.
    pub generation: u64,
    /// What made it.
    pub made_by: String,
    /// Its text, in TOML.
    pub text: String,
    /// Whether there may be IPv6 services.
    pub ipv6: bool,
    /// The earlier generations that can be gone back to.
    pub earlier: Vec<u64>,
}

/// `service add`, `service set`, `service rm`, and the same for `backend`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeConfig {
    /// What changes.
    pub edit: Edit,
    /// Whether the daemon's file changes too.
    #[serde(default)]
    pub save: bool,
    /// Whether it is only said what would change.
    #[serde(default)]
    pub dry_run: bool,
}

/// `rollback`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Rollback {
    /// The generation whose configuration is to be in force again; without it, the last one before this.
    pub to: Option<u64>,
    /// Whether the daemon's file becomes that of this generation.
    pub save: bool,
}

/// What was changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Changed {
    /// The generation that is in force now.
    pub generation: u64,
    /// What sets it apart from the one before.
    pub differences: Vec<Difference>,
    /// The file that was changed too.
    pub saved: Option<PathBuf>,
}
