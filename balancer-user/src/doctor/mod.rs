//! Whether a host is fit to balance, or to be a backend: what was found, and what to do about it. The judgement is a function of
//! values; `read`, `netlink` and `ethtool` get them.

mod backend;
mod configured;
mod device;
mod ethtool;
mod forwarding;
mod generic;
mod ports;
mod read;

use std::fmt;

use serde::Serialize;

pub use backend::Serving;
pub use forwarding::without_forwarding;
pub use ports::shared_ports;
pub use read::{WAYS, backend, balancer, offloads};

/// How bad something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// As it should be.
    Fine,
    /// May be meant so, or matters only sometimes.
    Warning,
    /// Something will not work.
    Failure,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// What it is about: an interface, a setting, an address.
    pub about: String,
    /// What it is.
    pub what: String,
    /// What to do about it; nothing where all is fine.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub advice: String,
}

impl Finding {
    fn fine(about: impl Into<String>, what: impl Into<String>) -> Finding {
        Finding { level: Level::Fine, about: about.into(), what: what.into(), advice: String::new() }
    }

    fn warning(about: impl Into<String>, what: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { level: Level::Warning, about: about.into(), what: what.into(), advice: advice.into() }
    }

    fn failure(about: impl Into<String>, what: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { level: Level::Failure, ..Finding::warning(about, what, advice) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.about, self.what)?;
        if self.advice.is_empty() { Ok(()) } else { write!(f, ": {}", self.advice) }
    }
}

/// Whether this kernel takes the program, from what came of loading it.
pub fn loaded(result: anyhow::Result<()>) -> Finding {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let kernel = kernel.trim();
    match result {
        Ok(()) => Finding::fine("kernel", format!("Linux {kernel} takes the program")),
        Err(error) => {
            Finding::failure("kernel", format!("Linux {kernel} does not take the program: {error:#}"), "")
        }
    }
}
