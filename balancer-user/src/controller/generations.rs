//! Changes to the running configuration: each is judged whole, applied whole, and one generation more.

use std::{path::PathBuf, thread};

use super::Controller;
use crate::{
    api::{ChangeConfig, Changed, Refusal, Reply, Rollback, RunningConfig},
    clock::Monotonic,
    config::{CannotEdit, Config, Difference, Edit, save},
    history::History,
};

/// What the text of the running configuration is called where something is wrong with it.
const RUNNING: &str = "the running configuration";

/// Where the configuration comes from, and what has become of it.
pub(super) struct Generations {
    file: PathBuf,
    history: History,
    /// That of the current generation, as it was read.
    config: Config,
}

impl Generations {
    pub(super) fn new(file: PathBuf, text: String, config: Config) -> Generations {
        let what = format!("start with {}", file.display());
        Generations { file, history: History::new(what, text), config }
    }
}

impl Controller {
    /// The number of the configuration in force: one more with each change.
    pub fn generation(&self) -> u64 {
        self.generations.history.current().number
    }

    /// Applies the file as it is now. Returns what has changed.
    ///
    /// # Errors
    ///
    /// When the file is wrong, or asks for what can't change while the balancer runs: then nothing has changed. When the
    /// kernel refuses.
    pub fn reload(&mut self, now: Monotonic) -> anyhow::Result<Vec<Difference>> {
        let file = self.generations.file.clone();
        let (text, config) = Config::read(&file)?;
        Ok(self.take(now, format!("reload of {}", file.display()), text, &config)?)
    }

    /// Makes a configuration the one in force.
    fn take(
        &mut self,
        now: Monotonic,
        what: String,
        text: String,
        config: &Config,
    ) -> Result<Vec<Difference>, Refusal> {
        self.check_fixed(config)?;
        let differences = self.generations.config.differences(config);
        let is_same_daemon = self.daemon == config.daemon;
        self.apply(now, config).map_err(|error| Refusal::Failed(format!("{error:#}")))?;
        self.generations.config = config.clone();
        if differences.is_empty() && is_same_daemon {
            self.generations.history.rewrite(text);
        } else {
            self.generations.history.push(what, text);
            let generation = self.generations.history.current();
            tracing::info!("generation {}: {}", generation.number, generation.what);
            differences.iter().for_each(|difference| tracing::info!("{difference}"));
        }
        self.tick(now).map_err(|error| Refusal::Failed(format!("{error:#}")))?;
        Ok(differences)
    }

    /// Refuses what can't change while the balancer runs.
    fn check_fixed(&self, config: &Config) -> Result<(), Refusal> {
        let fixed = self.daemon.fixed_changes(&config.daemon);
        if !fixed.is_empty() {
            return Err(Refusal::Wrong(format!(
                "{} can't change while the balancer runs: put it back, or restart",
                fixed.join(", ")
            )));
        }
        let why = match (self.datapath.has_ipv6(), config.ipv6()) {
            (false, Some(true)) => {
                "the balancer was started without IPv6, which can't change while it runs: take the IPv6 services and \
                 `ipv6 = true` out, or restart (`ipv6 = true` in [daemon] makes room for services to come)"
            }
            (true, Some(false)) => "`ipv6` can't change while the balancer runs: put it back, or restart",
            _ => return Ok(()),
        };
        Err(Refusal::Wrong(why.to_owned()))
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

    pub(super) fn change_config(&mut self, change: ChangeConfig, reply: Reply<Changed>) {
        let ChangeConfig { edit, save, dry_run } = change;
        match self.changed(&edit, dry_run) {
            Ok(changed) if save && !dry_run => self.save(changed, reply, move |text| edited(&edit, text)),
            changed => reply.send(changed),
        }
    }

    fn changed(&mut self, edit: &Edit, dry_run: bool) -> Result<Changed, Refusal> {
        let before = &self.generations.history.current().text;
        let text = edited(edit, before)?;
        let config = Config::parse(RUNNING, &text).map_err(|faults| Refusal::Wrong(faults.to_string()))?;
        if dry_run {
            self.check_fixed(&config)?;
            let differences = self.generations.config.differences(&config);
            return Ok(Changed { generation: self.generation(), differences, saved: None });
        }
        let differences = self.take(self.selected, said(edit), text, &config)?;
        Ok(Changed { generation: self.generation(), differences, saved: None })
    }

    pub(super) fn rollback(&mut self, rollback: &Rollback, reply: Reply<Changed>) {
        match self.rolled_back(rollback.to) {
            Ok(changed) if rollback.save => {
                let text = self.generations.history.current().text.clone();
                self.save(changed, reply, move |_| Ok(text));
            }
            changed => reply.send(changed),
        }
    }

    fn rolled_back(&mut self, to: Option<u64>) -> Result<Changed, Refusal> {
        let history = &self.generations.history;
        let Some(earlier) = history.earlier(to).cloned() else {
            let known: Vec<String> = history.numbers().map(|number| number.to_string()).collect();
            return Err(match to {
                _ if known.is_empty() => Refusal::Wrong(
                    "there is no earlier generation: nothing has changed since the balancer was started"
                        .to_owned(),
                ),
                Some(to) => Refusal::Unknown { what: "earlier generation", name: to.to_string(), known },
                None => Refusal::Failed("the last generation is lost".to_owned()),
            });
        };
        let config =
            Config::parse(RUNNING, &earlier.text).map_err(|faults| Refusal::Wrong(faults.to_string()))?;
        let what = format!("rollback to generation {}", earlier.number);
        let differences = self.take(self.selected, what, earlier.text, &config)?;
        Ok(Changed { generation: self.generation(), differences, saved: None })
    }

    /// Changes the file, and then answers; the disk may take its time, and the controller does not wait for it.
    fn save(
        &self,
        changed: Changed,
        reply: Reply<Changed>,
        change: impl FnOnce(&str) -> Result<String, Refusal> + Send + 'static,
    ) {
        let file = self.generations.file.clone();
        // Without a thread nobody answers, and that is said as well.
        let _ = thread::Builder::new().name("save".to_owned()).spawn(move || {
            let saved = save(&file, |text| change(text).map_err(|refusal| anyhow::anyhow!(refusal)));
            reply.send(match saved {
                Ok(()) => Ok(Changed { saved: Some(file), ..changed }),
                Err(error) => Err(Refusal::Failed(format!(
                    "generation {} is in force, but not saved: {error:#}",
                    changed.generation
                ))),
            });
        });
    }
}

fn edited(edit: &Edit, text: &str) -> Result<String, Refusal> {
    edit.apply(text).map_err(|error| match error {
        CannotEdit::Unknown { what, name, known } => Refusal::Unknown { what, name, known },
        CannotEdit::Because(why) => Refusal::Wrong(why),
    })
}

/// The edit as a call that would make it.
fn said(edit: &Edit) -> String {
    use crate::config::Action;
    let action = match edit.action {
        Action::Add => "add",
        Action::Set => "set",
        Action::Remove => "rm",
    };
    let (what, name) = match (&edit.backend, &edit.service) {
        (Some(backend), _) => ("backend", backend.as_str()),
        (None, service) => ("service", service.as_deref().unwrap_or_default()),
    };
    let keys: String = edit.keys.iter().map(|(key, value)| format!(" {key}={value}")).collect();
    format!("{what} {action} {name}{keys}")
}
