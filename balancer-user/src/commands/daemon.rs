//! What the verbs that ask the daemon have in common.

use std::{path::PathBuf, time::Duration};

use anyhow::Context as _;
use tokio::runtime::Runtime;

use crate::{
    api::{ANSWER_LIMIT, Verb, client},
    cli::DaemonArgs,
    config::{Config, DEFAULT_SOCKET},
};

/// A daemon that can be asked.
pub(super) struct Daemon {
    socket: PathBuf,
    runtime: Runtime,
}

impl Daemon {
    /// The one that these arguments name. Nothing is asked yet.
    ///
    /// # Errors
    ///
    /// When the configuration that is to name the socket is wrong.
    pub(super) fn find(args: &DaemonArgs) -> anyhow::Result<Daemon> {
        let socket = match (&args.socket, &args.config) {
            (Some(path), _) => path.clone(),
            (None, Some(file)) => Config::load(file)?.daemon.socket,
            (None, None) => DEFAULT_SOCKET.into(),
        };
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")?;
        Ok(Daemon { socket, runtime })
    }

    /// The body of what stands at `path`.
    ///
    /// # Errors
    ///
    /// When no daemon answers, or not within `limit`.
    pub(super) fn get(&self, path: &str, limit: Duration) -> anyhow::Result<String> {
        self.block_on(self.read(path, limit))
    }

    /// The same, for who has more to wait for.
    pub(super) async fn read(&self, path: &str, limit: Duration) -> anyhow::Result<String> {
        client::get(&self.socket, path, limit).await
    }

    /// Waits for what is ready some time.
    pub(super) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// What the controller answers.
    ///
    /// # Errors
    ///
    /// When no daemon answers, or it refuses.
    pub(super) fn ask<V: Verb>(&self, verb: &V) -> anyhow::Result<V::Answer> {
        // It says itself that it is late.
        let limit = ANSWER_LIMIT + Duration::from_secs(5);
        self.runtime.block_on(client::ask(&self.socket, verb, limit))
    }
}
