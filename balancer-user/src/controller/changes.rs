//! Changes to the configuration that are asked for. What costs time with the size of the configuration, reading, judging and
//! comparing it, is done on a thread beside the controller, which then touches only what has changed.
//!
//! One change is prepared at a time, and the next not before it is applied: so each is prepared for the configuration that it
//! is applied to, whoever asks for how many at once.

use std::{
    collections::{HashSet, VecDeque},
    path::PathBuf,
    sync::Arc,
    thread,
    time::Duration,
};

use tokio::sync::mpsc;

use super::{
    Controller,
    seats::{Front, front},
};
use crate::{
    api::{ChangeConfig, Changed, LastChange, Refusal, Reply, Rollback},
    clock::Monotonic,
    config::{CannotEdit, Config, Difference, Edit, save},
    datapath::can_turn_probes,
};

/// What the text of the running configuration is called where something is wrong with it.
const RUNNING: &str = "the running configuration";
/// Most changes that wait for another one.
const WAITING: usize = 16;
/// Of so many differences each has a line in the log.
const LOGGED: usize = 100;

/// The changes that wait, and the one that is being prepared.
pub(super) struct Changes {
    waiting: VecDeque<Wish>,
    is_preparing: bool,
    prepared: mpsc::UnboundedSender<Prepared>,
    /// Of the last one that was applied.
    last: Option<LastChange>,
}

/// What somebody wants.
enum Wish {
    Reload,
    Change(ChangeConfig, Reply<Changed>),
    Rollback(Rollback, Reply<Changed>),
}

/// A change that was judged, or nothing that would have to be applied.
pub struct Prepared(Option<Change>);

/// One configuration in place of another.
struct Change {
    what: String,
    text: String,
    config: Arc<Config>,
    differences: Vec<Difference>,
    /// The services that are the same.
    unchanged: HashSet<Front>,
    answer: Answer,
}

/// Who is told what has become of it.
enum Answer {
    Log,
    Client(Reply<Changed>, Option<Save>),
}

/// What becomes of the text of the file.
type Save = Box<dyn FnOnce(&str) -> Result<String, Refusal> + Send>;

/// What a change is prepared for.
struct Base {
    file: PathBuf,
    generation: u64,
    text: String,
    config: Arc<Config>,
    has_ipv6: bool,
}

impl Changes {
    /// None. What was prepared goes to `prepared`, and from there back to `Controller::change`.
    pub(super) const fn new(prepared: mpsc::UnboundedSender<Prepared>) -> Changes {
        Changes { waiting: VecDeque::new(), is_preparing: false, prepared, last: None }
    }

    pub(super) const fn last(&self) -> Option<&LastChange> {
        self.last.as_ref()
    }
}

impl Controller {
    /// Begins to read the file as it is now, which is then applied.
    pub fn reload(&mut self) {
        // One that has not begun yet will read what is there then.
        if !self.changes.waiting.iter().any(|wish| matches!(wish, Wish::Reload)) {
            self.wish(Wish::Reload);
        }
    }

    pub(super) fn change_config(&mut self, change: ChangeConfig, reply: Reply<Changed>) {
        self.wish(Wish::Change(change, reply));
    }

    pub(super) fn rollback(&mut self, rollback: Rollback, reply: Reply<Changed>) {
        self.wish(Wish::Rollback(rollback, reply));
    }

    fn wish(&mut self, wish: Wish) {
        if self.changes.waiting.len() >= WAITING {
            let busy = format!("{WAITING} other changes are waiting: try again in a moment");
            return wish.refuse(Refusal::Busy(busy));
        }
        self.changes.waiting.push_back(wish);
        self.prepare_next();
    }

    /// Has the next change prepared, unless another one is.
    fn prepare_next(&mut self) {
        while !self.changes.is_preparing
            && let Some(wish) = self.changes.waiting.pop_front()
        {
            // Who gave up would not expect a change any more.
            if wish.is_abandoned() {
                continue;
            }
            let base = Base {
                file: self.generations.file.clone(),
                generation: self.generation(),
                text: self.generations.history.current().text.clone(),
                config: Arc::clone(&self.generations.config),
                has_ipv6: self.datapath.has_ipv6(),
            };
            let earlier = match &wish {
                Wish::Rollback(rollback, _) => self.earlier(rollback.to),
                _ => Ok(None),
            };
            let done = Done { change: None, to: self.changes.prepared.clone() };
            let prepare = move || done.with(wish.prepare(base, earlier));
            match thread::Builder::new().name("change".to_owned()).spawn(prepare) {
                Ok(_) => {}
                // What was to be done comes back undone, and the client is told so.
                Err(error) => tracing::error!("a change is refused: start a thread for it: {error}"),
            }
            self.changes.is_preparing = true;
        }
    }

    /// Applies a change, and tells who asked for it.
    pub fn change(&mut self, now: Monotonic, prepared: Prepared) {
        self.changes.is_preparing = false;
        if let Prepared(Some(change)) = prepared {
            self.apply_change(now, change);
        }
        self.prepare_next();
    }

    /// Notes how long the last change took the controller.
    pub const fn note_change_time(&mut self, time: Duration) {
        if let Some(last) = &mut self.changes.last {
            last.took_ms = time.as_micros() as f64 / 1e3;
        }
    }

    fn apply_change(&mut self, now: Monotonic, change: Change) {
        let Change { what, text, config, differences, unchanged, answer } = change;
        if answer.is_abandoned() {
            return;
        }
        let count = differences.len();
        let done = self.take(now, (what, text, config), &differences, &unchanged);
        if let Ok(touched) = done {
            self.changes.last = Some(LastChange { generation: self.generation(), ..touched });
        }
        let changed = done.map(|_| Changed { generation: self.generation(), differences, saved: None });
        match (answer, changed) {
            (Answer::Log, Ok(_)) if count == 0 => tracing::info!("reloaded: nothing has changed"),
            (Answer::Log, Ok(_)) => tracing::info!("reloaded: {count} changes"),
            (Answer::Log, Err(refusal)) => refuse_reload(&refusal),
            (Answer::Client(reply, Some(change)), Ok(changed)) => {
                save_beside(self.generations.file.clone(), changed, reply, change);
            }
            (Answer::Client(reply, _), changed) => reply.send(changed),
        }
    }
}

/// A thread's work, which comes back to the controller however the thread ends.
struct Done {
    change: Option<Change>,
    to: mpsc::UnboundedSender<Prepared>,
}

impl Done {
    fn with(mut self, change: Option<Change>) {
        self.change = change;
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        // When the controller has gone, nobody needs it.
        let _ = self.to.send(Prepared(self.change.take()));
    }
}

impl Wish {
    fn is_abandoned(&self) -> bool {
        match self {
            Wish::Reload => false,
            Wish::Change(_, reply) | Wish::Rollback(_, reply) => reply.is_abandoned(),
        }
    }

    fn refuse(self, refusal: Refusal) {
        match self {
            Wish::Reload => refuse_reload(&refusal),
            Wish::Change(_, reply) | Wish::Rollback(_, reply) => reply.send(Err(refusal)),
        }
    }

    /// What is to be applied; `earlier` is the generation to go back to. Nothing if it is refused, or was a question only: then
    /// it is answered.
    fn prepare(self, base: Base, earlier: Result<Option<(u64, String)>, Refusal>) -> Option<Change> {
        match self {
            Wish::Reload => match base.reload() {
                Ok(change) => Some(change),
                Err(refusal) => {
                    refuse_reload(&refusal);
                    None
                }
            },
            Wish::Change(ChangeConfig { edit, save, dry_run }, reply) => {
                match base.edit(&edit) {
                    Err(refusal) => reply.send(Err(refusal)),
                    Ok(Change { differences, .. }) if dry_run => {
                        reply.send(Ok(Changed { generation: base.generation, differences, saved: None }));
                    }
                    Ok(change) => {
                        let save = save.then(|| -> Save { Box::new(move |text| edited(&edit, text)) });
                        return Some(Change { answer: Answer::Client(reply, save), ..change });
                    }
                }
                None
            }
            Wish::Rollback(rollback, reply) => match base.roll_back(earlier) {
                Err(refusal) => {
                    reply.send(Err(refusal));
                    None
                }
                Ok(change) => {
                    let text = change.text.clone();
                    let save = rollback.save.then(|| -> Save { Box::new(move |_| Ok(text)) });
                    Some(Change { answer: Answer::Client(reply, save), ..change })
                }
            },
        }
    }
}

impl Answer {
    fn is_abandoned(&self) -> bool {
        matches!(self, Answer::Client(reply, _) if reply.is_abandoned())
    }
}

impl Base {
    fn reload(&self) -> Result<Change, Refusal> {
        let (text, config) = Config::read(&self.file).map_err(|faults| Refusal::Wrong(faults.to_string()))?;
        self.change(format!("reload of {}", self.file.display()), text, config)
    }

    fn edit(&self, edit: &Edit) -> Result<Change, Refusal> {
        let text = edited(edit, &self.text)?;
        let config = parse(&text)?;
        self.change(said(edit), text, config)
    }

    fn roll_back(&self, earlier: Result<Option<(u64, String)>, Refusal>) -> Result<Change, Refusal> {
        let lost = || Refusal::Failed("the last generation is lost".to_owned());
        let (number, text) = earlier?.ok_or_else(lost)?;
        let config = parse(&text)?;
        self.change(format!("rollback to generation {number}"), text, config)
    }

    fn change(&self, what: String, text: String, config: Config) -> Result<Change, Refusal> {
        self.check_fixed(&config)?;
        let differences = self.config.differences(&config);
        let unchanged = self.config.unchanged(&config).map(front).collect();
        Ok(Change { what, text, config: Arc::new(config), differences, unchanged, answer: Answer::Log })
    }

    /// Refuses what can't change while the balancer runs.
    fn check_fixed(&self, config: &Config) -> Result<(), Refusal> {
        let fixed = self.config.daemon.fixed_changes(&config.daemon);
        if !fixed.is_empty() {
            return Err(Refusal::Wrong(format!(
                "{} can't change while the balancer runs: put it back, or restart",
                fixed.join(", ")
            )));
        }
        if let Some(why) = cannot_probe(config) {
            return Err(Refusal::Wrong(why));
        }
        let why = match (self.has_ipv6, config.ipv6()) {
            (false, Some(true)) => {
                "the balancer was started without IPv6, which can't change while it runs: take the IPv6 services and \
                 `ipv6 = true` out, or restart (`ipv6 = true` in [daemon] makes room for services to come)"
            }
            (true, Some(false)) => "`ipv6` can't change while the balancer runs: put it back, or restart",
            _ => return Ok(()),
        };
        Err(Refusal::Wrong(why.to_owned()))
    }
}

/// Why the health checks of a configuration can't be made on this kernel, if they can't.
pub fn cannot_probe(config: &Config) -> Option<String> {
    let service = config.probed_through().filter(|_| !can_turn_probes())?;
    Some(format!(
        "health checks of service {} go by `forward = \"{}\"`, which needs Linux 6.6: take its `health` out, or make it one of \
         the kind \"exec\"",
        service.name, service.forward.mode
    ))
}

fn parse(text: &str) -> Result<Config, Refusal> {
    Config::parse(RUNNING, text).map_err(|faults| Refusal::Wrong(faults.to_string()))
}

fn refuse_reload(refusal: &Refusal) {
    tracing::error!("reload refused, nothing has changed: {refusal}");
}

/// What has changed, in the log: not each of thousands.
pub(super) fn log(differences: &[Difference]) {
    differences.iter().take(LOGGED).for_each(|difference| tracing::info!("{difference}"));
    if let Some(more) = differences.len().checked_sub(LOGGED).filter(|more| *more > 0) {
        tracing::info!("and {more} more");
    }
}

/// Changes the file, and then answers; the disk may take its time, and nobody else waits for it.
fn save_beside(file: PathBuf, changed: Changed, reply: Reply<Changed>, change: Save) {
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
