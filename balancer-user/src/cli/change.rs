//! What may be said to the verbs that change what runs: `service`, `backend` and `rollback`.

use std::{str::FromStr, time::Duration};

use clap::{Args, Subcommand};

use super::DaemonArgs;

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

#[cfg(test)]
mod tests {
    use super::*;

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
}
