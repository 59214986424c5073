//! What the daemon can be asked, and how: the one table of verbs, paths and documents.
//!
//! | verb | method | path | document | answer |
//! | --- | --- | --- | --- | --- |
//! | `status` | GET | `/v1/status` | none | `Status` |
//! | `api` | GET | `/v1/openapi.json` | none | an OpenAPI document |
//! | `flows list` | POST | `/v1/flows/list` | `ListFlows` | `FlowList` |
//! | `flows count` | POST | `/v1/flows/count` | `CountFlows` | `FlowCount` |
//! | `flows kill` | POST | `/v1/flows/kill` | `KillFlows` | `Killed` |
//! | `backend drain` | POST | `/v1/backend/drain` | `DrainBackend` | `Draining` |
//! | `backend enable` | POST | `/v1/backend/enable` | `EnableBackend` | `Enabled` |
//! | `service`, `backend` `add`, `set`, `rm` | POST | `/v1/config/change` | `ChangeConfig` | `Changed` |
//! | `plan` | POST | `/v1/config/show` | `ShowConfig` | `RunningConfig` |
//! | `rollback` | POST | `/v1/config/rollback` | `Rollback` | `Changed` |
//! | `explain` | POST | `/v1/explain` | `Explain` | `Explanation` |
//! | `whatif` | POST | `/v1/whatif` | `WhatIf` | `Comparison` |
//!
//! `status` is answered from what was last published, and what there is to ask is always the same; all others are `Verb`s, which go to the controller as a `Command`.
//! A new verb is a document, a `Verb` for it, a variant of `Command`, and a line of `verbs`; the compiler asks for what is
//! missing then. `api` needs no daemon. Documents are JSON, of `LARGEST_REQUEST` bytes at most; what is left out of them has its default.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Serialize, de::DeserializeOwned};
use tokio::sync::{mpsc, oneshot};

use super::{
    backend::{DrainBackend, Draining, EnableBackend, Enabled},
    config::{ChangeConfig, Changed, Rollback, RunningConfig, ShowConfig},
    explain::{Comparison, Explain, Explanation, WhatIf},
    flows::{CountFlows, FlowCount, FlowList, KillFlows, Killed, ListFlows},
    refusal::Refusal,
};

/// Where the daemon answers with its `Status`.
pub const STATUS_PATH: &str = "/v1/status";
/// Where it answers with the description of all this (`openapi`).
pub const OPENAPI_PATH: &str = "/v1/openapi.json";
/// Largest request, in bytes.
pub const LARGEST_REQUEST: usize = 64 << 10;
/// How long the server waits for the controller's answer.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Most commands that wait for the controller.
const WAITING: usize = 16;

/// What the controller is asked for, as the document that is posted.
pub trait Verb: Serialize + DeserializeOwned + JsonSchema + Send + Sync + 'static {
    /// What it answers with.
    type Answer: Serialize + DeserializeOwned + JsonSchema + Send + 'static;
    /// Where it is posted.
    const PATH: &'static str;
    /// As the controller gets it.
    fn command(self, reply: Reply<Self::Answer>) -> Command;
}

/// What the controller is asked, with where its answer goes. It is answered between two ticks.
#[derive(Debug)]
pub enum Command {
    /// `flows list`
    ListFlows(ListFlows, Reply<FlowList>),
    /// `flows count`
    CountFlows(CountFlows, Reply<FlowCount>),
    /// `flows kill`
    KillFlows(KillFlows, Reply<Killed>),
    /// `backend drain`
    DrainBackend(DrainBackend, Reply<Draining>),
    /// `backend enable`
    EnableBackend(EnableBackend, Reply<Enabled>),
    /// `plan`
    ShowConfig(ShowConfig, Reply<RunningConfig>),
    /// `service` and `backend`, `add`, `set` and `rm`
    ChangeConfig(ChangeConfig, Reply<Changed>),
    /// `rollback`
    Rollback(Rollback, Reply<Changed>),
    /// `explain`
    Explain(Explain, Reply<Explanation>),
    /// `whatif`
    WhatIf(WhatIf, Reply<Comparison>),
}

impl Command {
    /// Whether nobody waits for the answer any more: what has not been begun need not be done.
    pub fn is_abandoned(&self) -> bool {
        match self {
            Command::ListFlows(_, reply) => reply.is_abandoned(),
            Command::CountFlows(_, reply) => reply.is_abandoned(),
            Command::KillFlows(_, reply) => reply.is_abandoned(),
            Command::DrainBackend(_, reply) => reply.is_abandoned(),
            Command::EnableBackend(_, reply) => reply.is_abandoned(),
            Command::ShowConfig(_, reply) => reply.is_abandoned(),
            Command::ChangeConfig(_, reply) => reply.is_abandoned(),
            Command::Rollback(_, reply) => reply.is_abandoned(),
            Command::Explain(_, reply) => reply.is_abandoned(),
            Command::WhatIf(_, reply) => reply.is_abandoned(),
        }
    }
}

/// Does something for every verb: the server, that it has a route.
pub(super) trait EachVerb {
    fn verb<V: Verb>(self) -> Self;
}

/// Every verb, once.
pub(super) fn verbs<E: EachVerb>(each: E) -> E {
    each.verb::<ListFlows>()
        .verb::<CountFlows>()
        .verb::<KillFlows>()
        .verb::<DrainBackend>()
        .verb::<EnableBackend>()
        .verb::<ShowConfig>()
        .verb::<ChangeConfig>()
        .verb::<Rollback>()
        .verb::<Explain>()
        .verb::<WhatIf>()
}

impl Verb for ListFlows {
    type Answer = FlowList;
    const PATH: &'static str = "/v1/flows/list";
    fn command(self, reply: Reply<FlowList>) -> Command {
        Command::ListFlows(self, reply)
    }
}

impl Verb for CountFlows {
    type Answer = FlowCount;
    const PATH: &'static str = "/v1/flows/count";
    fn command(self, reply: Reply<FlowCount>) -> Command {
        Command::CountFlows(self, reply)
    }
}

impl Verb for KillFlows {
    type Answer = Killed;
    const PATH: &'static str = "/v1/flows/kill";
    fn command(self, reply: Reply<Killed>) -> Command {
        Command::KillFlows(self, reply)
    }
}

impl Verb for DrainBackend {
    type Answer = Draining;
    const PATH: &'static str = "/v1/backend/drain";
    fn command(self, reply: Reply<Draining>) -> Command {
        Command::DrainBackend(self, reply)
    }
}

impl Verb for EnableBackend {
    type Answer = Enabled;
    const PATH: &'static str = "/v1/backend/enable";
    fn command(self, reply: Reply<Enabled>) -> Command {
        Command::EnableBackend(self, reply)
    }
}

impl Verb for ShowConfig {
    type Answer = RunningConfig;
    const PATH: &'static str = "/v1/config/show";
    fn command(self, reply: Reply<RunningConfig>) -> Command {
        Command::ShowConfig(self, reply)
    }
}

impl Verb for ChangeConfig {
    type Answer = Changed;
    const PATH: &'static str = "/v1/config/change";
    fn command(self, reply: Reply<Changed>) -> Command {
        Command::ChangeConfig(self, reply)
    }
}

impl Verb for Rollback {
    type Answer = Changed;
    const PATH: &'static str = "/v1/config/rollback";
    fn command(self, reply: Reply<Changed>) -> Command {
        Command::Rollback(self, reply)
    }
}

impl Verb for Explain {
    type Answer = Explanation;
    const PATH: &'static str = "/v1/explain";
    fn command(self, reply: Reply<Explanation>) -> Command {
        Command::Explain(self, reply)
    }
}

impl Verb for WhatIf {
    type Answer = Comparison;
    const PATH: &'static str = "/v1/whatif";
    fn command(self, reply: Reply<Comparison>) -> Command {
        Command::WhatIf(self, reply)
    }
}

/// Where an answer goes.
#[derive(Debug)]
pub struct Reply<Answer>(oneshot::Sender<Result<Answer, Refusal>>);

impl<Answer> Reply<Answer> {
    /// Answers. Nobody may be waiting any more; that is no fault of the controller's.
    pub fn send(self, answer: Result<Answer, Refusal>) {
        drop(self.0.send(answer));
    }

    /// Whether nobody waits any more.
    pub fn is_abandoned(&self) -> bool {
        self.0.is_closed()
    }
}

/// The way to the controller.
#[derive(Clone, Debug)]
pub struct Ask {
    commands: mpsc::Sender<Command>,
    limit: Duration,
}

/// The two ends of the way to the controller, whose answers are waited for as long as `limit`.
pub fn commands(limit: Duration) -> (Ask, mpsc::Receiver<Command>) {
    let (commands, received) = mpsc::channel(WAITING);
    (Ask { commands, limit }, received)
}

impl Ask {
    /// Asks the controller.
    pub(super) async fn ask<V: Verb>(&self, verb: V) -> Result<V::Answer, Refusal> {
        let (reply, answer) = oneshot::channel();
        match self.commands.try_send(verb.command(Reply(reply))) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                return Err(Refusal::Busy(format!(
                    "{WAITING} other requests are waiting to be answered: try again in a moment"
                )));
            }
            Err(mpsc::error::TrySendError::Closed(_)) => return Err(stopping()),
        }
        match tokio::time::timeout(self.limit, answer).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(stopping()),
            Err(_) => Err(Refusal::Busy(format!(
                "the controller gave no answer within {}: try again; what was to be changed may have been changed",
                humantime::format_duration(self.limit)
            ))),
        }
    }
}

fn stopping() -> Refusal {
    Refusal::Busy("the balancer is about to stop".to_owned())
}
