//! The running configuration, generation by generation: each change is applied whole, and is one more.

use std::{collections::HashSet, path::PathBuf, sync::Arc};

use super::{Controller, changes, seats::Front};
use crate::{
    api::{LastChange, Refusal, RunningConfig},
    clock::Monotonic,
    config::{Config, Difference},
    history::History,
};

/// Where the configuration comes from, and what has become of it.
pub(super) struct Generations {
    pub(super) file: PathBuf,
    pub(super) history: History,
    /// That of the current generation, as it was read.
    pub(super) config: Arc<Config>,
    /// Whether all of it is in force: not after the kernel has refused a change half way.
    is_in_force: bool,
}

impl Generations {
    pub(super) fn new(file: PathBuf, text: String, config: Config) -> Generations {
        let what = format!("start with {}", file.display());
        let (history, config) = (History::new(what, text), Arc::new(config));
        Generations { file, history, config, is_in_force: true }
    }
}

impl Controller {
    /// The number of the configuration in force: one more with each change.
    pub fn generation(&self) -> u64 {
        self.generations.history.current().number
    }

    /// Makes a configuration the one in force: what made it, its text, and itself. Of its services, those at `unchanged` are as
    /// in the one before.
    pub(super) fn take(
        &mut self,
        now: Monotonic,
        (what, text, config): (String, String, Arc<Config>),
        differences: &[Difference],
        unchanged: &HashSet<Front>,
    ) -> Result<LastChange, Refusal> {
        let failed = |error: anyhow::Error| Refusal::Failed(format!("{error:#}"));
        let is_same = differences.is_empty() && self.daemon == config.daemon;
        let nothing = HashSet::new();
        let unchanged = if self.generations.is_in_force { unchanged } else { &nothing };
        let touched = self.apply(now, &config, unchanged);
        self.generations.is_in_force = touched.is_ok();
        let touched = touched.map_err(failed)?;
        self.generations.config = config;
        if is_same {
            self.generations.history.rewrite(text);
            return Ok(touched);
        }
        self.generations.history.push(what, text);
        let generation = self.generations.history.current();
        tracing::info!("generation {}: {}", generation.number, generation.what);
        changes::log(differences);
        self.tick(now).map_err(failed)?;
        Ok(touched)
    }

    pub(super) fn show_config(&self) -> RunningConfig {
        let history = &self.generations.history;
        let current = history.current();
        RunningConfig {
            generation: current.number,
            made_by: current.what.clone(),
            text: current.text.clone(),
            ipv6: self.datapath.has_ipv6(),
            earlier: history.numbers().collect(),
        }
    }

    /// The number and text of an earlier generation; without a number, of the last one before this.
    pub(super) fn earlier(&self, number: Option<u64>) -> Result<Option<(u64, String)>, Refusal> {
        let history = &self.generations.history;
        if let Some(earlier) = history.earlier(number) {
            return Ok(Some((earlier.number, earlier.text.clone())));
        }
        let known: Vec<String> = history.numbers().map(|number| number.to_string()).collect();
        Err(match number {
            _ if known.is_empty() => Refusal::Wrong(
                "there is no earlier generation: nothing has changed since the balancer was started"
                    .to_owned(),
            ),
            Some(number) => Refusal::Unknown { what: "earlier generation", name: number.to_string(), known },
            None => Refusal::Failed("the last generation is lost".to_owned()),
        })
    }
}
