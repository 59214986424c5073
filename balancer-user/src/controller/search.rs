//! Searches through the flow table for those who ask about flows. A search goes slice by slice, between the ticks, so that
//! no tick waits for it however many flows there are. One is finished after the other.

use std::{collections::VecDeque, ops::Range, time::Duration};

use balancer_common::{BackendId, Phase, STAMP_SHIFT, ServiceId, TCP, WAYS, flags};

use super::{Controller, records::stamp, seats::LiveBackend, status::millis};
use crate::{
    api::{
        self, CountFlows, FlowCount, FlowFilter, FlowList, FlowState, KillFlows, Killed, LARGEST_LIST,
        ListFlows, Refusal, Reply,
    },
    clock::Monotonic,
    config::Protocol,
    datapath::{Ended, Flow},
    prefix::Prefix,
};

/// How many buckets of the flow table are looked at in one go: 4 MiB of it, a millisecond or two.
const SLICE: usize = 8192;
/// Most searches that are under way or waiting.
const MOST: usize = 16;
/// How often a flow that changes while it is killed is tried again.
const TRIES: usize = 8;

/// What is under way.
#[derive(Default)]
pub(super) struct Searches(VecDeque<Search>);

struct Search {
    /// Where the next slice begins.
    bucket: usize,
    wanted: Wanted,
    task: Task,
}

/// What is done with the flows, and what has come of it so far.
enum Task {
    List { list: ListFlows, found: FlowList, reply: Reply<FlowList> },
    Count { count: FlowCount, reply: Reply<FlowCount> },
    Kill { killed: u64, reply: Reply<Killed> },
}

/// Which flows are meant.
#[derive(Debug)]
struct Wanted {
    service: Option<ServiceId>,
    /// In ascending order.
    backends: Option<Vec<BackendId>>,
    client: Option<Prefix>,
    state: Option<FlowState>,
}

impl Wanted {
    fn has(&self, flow: &Flow) -> bool {
        let entry = &flow.entry;
        self.service.is_none_or(|service| service == entry.service)
            && self.backends.as_ref().is_none_or(|backends| backends.binary_search(&entry.backend).is_ok())
            && self.client.is_none_or(|client| client.contains(flow.client().ip()))
            && self.state.is_none_or(|state| state_of(flow) == Some(state))
    }
}

impl Task {
    fn is_abandoned(&self) -> bool {
        match self {
            Task::List { reply, .. } => reply.is_abandoned(),
            Task::Count { reply, .. } => reply.is_abandoned(),
            Task::Kill { reply, .. } => reply.is_abandoned(),
        }
    }

    fn finish(self) {
        match self {
            Task::List { found, reply, .. } => reply.send(Ok(found)),
            Task::Count { count, reply } => reply.send(Ok(count)),
            Task::Kill { killed, reply } => reply.send(Ok(Killed { killed })),
        }
    }

    fn refuse(self, refusal: Refusal) {
        match self {
            Task::List { reply, .. } => reply.send(Err(refusal)),
            Task::Count { reply, .. } => reply.send(Err(refusal)),
            Task::Kill { reply, .. } => reply.send(Err(refusal)),
        }
    }
}

impl Controller {
    /// `flows list`
    pub(super) fn flows_list(&mut self, list: ListFlows, reply: Reply<FlowList>) {
        if !(1..=LARGEST_LIST).contains(&list.limit) {
            let why = format!("`limit` is {}; allowed: 1 to {LARGEST_LIST}", list.limit);
            return reply.send(Err(Refusal::Wrong(why)));
        }
        let found = FlowList { more: list.count_more.then_some(0), ..FlowList::default() };
        self.begin(&list.filter.clone(), list.from as usize / WAYS, Task::List { list, found, reply });
    }

    /// `flows count`
    pub(super) fn flows_count(&mut self, asked: CountFlows, reply: Reply<FlowCount>) {
        self.begin(&asked.filter, 0, Task::Count { count: FlowCount::default(), reply });
    }

    /// `flows kill`
    pub(super) fn flows_kill(&mut self, kill: KillFlows, reply: Reply<Killed>) {
        match (kill.filter.is_empty(), kill.all) {
            (true, false) => reply.send(Err(Refusal::Wrong("say which flows, or set `all`".to_owned()))),
            (false, true) => reply.send(Err(Refusal::Wrong("either a filter or `all`, not both".to_owned()))),
            _ => self.begin(&kill.filter, 0, Task::Kill { killed: 0, reply }),
        }
    }

    /// Whether there is a search to go on with.
    pub fn is_searching(&self) -> bool {
        !self.searches.0.is_empty()
    }

    /// Goes on for one slice.
    pub fn search(&mut self, now: Monotonic) {
        let Some(mut search) = self.searches.0.pop_front() else { return };
        if search.task.is_abandoned() {
            return;
        }
        let end = (search.bucket + SLICE).min(self.datapath.flows().bucket_count());
        let slice = search.bucket..end;
        let is_done = match &mut search.task {
            Task::List { list, found, .. } => self.list(now, slice, &search.wanted, list, found),
            Task::Count { count, .. } => {
                self.count(slice, &search.wanted, count);
                false
            }
            Task::Kill { killed, .. } => {
                *killed += self.kill(now, slice, &search.wanted);
                false
            }
        };
        search.bucket += SLICE;
        if is_done || search.bucket >= self.datapath.flows().bucket_count() {
            search.task.finish();
        } else {
            self.searches.0.push_front(search);
        }
    }

    fn begin(&mut self, filter: &FlowFilter, bucket: usize, task: Task) {
        match self.wanted(filter) {
            Err(refusal) => task.refuse(refusal),
            Ok(_) if self.searches.0.len() >= MOST => {
                let why = format!("{MOST} other requests go through the flow table: try again in a moment");
                task.refuse(Refusal::Busy(why));
            }
            Ok(wanted) => self.searches.0.push_back(Search { bucket, wanted, task }),
        }
    }

    fn wanted(&self, filter: &FlowFilter) -> Result<Wanted, Refusal> {
        let FlowFilter { service, backend, client, state } = filter;
        let service =
            service.as_deref().map(|name| self.service_named(name)).transpose()?.map(|live| live.id);
        let backends = backend.as_deref().map(|name| self.backends_named(service, name)).transpose()?;
        Ok(Wanted { service, backends, client: *client, state: *state })
    }

    /// Whether no more is to be found.
    fn list(
        &self,
        now: Monotonic,
        slice: Range<usize>,
        wanted: &Wanted,
        list: &ListFlows,
        found: &mut FlowList,
    ) -> bool {
        let flows = self.datapath.flows().flows(slice);
        for flow in flows.filter(|flow| flow.index() >= list.from && wanted.has(flow)) {
            if found.flows.len() < list.limit as usize {
                found.flows.push(self.shown(now, &flow));
                continue;
            }
            found.next.get_or_insert(flow.index());
            match &mut found.more {
                Some(more) => *more += 1,
                None => return true,
            }
        }
        false
    }

    fn count(&self, slice: Range<usize>, wanted: &Wanted, count: &mut FlowCount) {
        for flow in self.datapath.flows().flows(slice).filter(|flow| wanted.has(flow)) {
            count.flows += 1;
            match state_of(&flow) {
                Some(FlowState::HalfOpen) => count.half_open += 1,
                Some(FlowState::Established) => count.established += 1,
                Some(FlowState::Closing) => count.closing += 1,
                None => {}
            }
        }
    }

    /// How many were killed.
    fn kill(&mut self, now: Monotonic, slice: Range<usize>, wanted: &Wanted) -> u64 {
        let flows = self.datapath.flows();
        let (mut killed, mut ended) = (0, Ended::new());
        for flow in flows.flows(slice) {
            let mut seen = Some(flow);
            for _ in 0..TRIES {
                let Some(flow) = seen.filter(|flow| wanted.has(flow)) else { break };
                if let Some(more) = flows.remove(&flow, stamp(now)) {
                    killed += 1;
                    ended.extend(more);
                    break;
                }
                // A packet has changed its state meanwhile, or it has gone.
                seen = flows.again(&flow);
            }
        }
        self.count_ended(&ended);
        killed
    }

    fn shown(&self, now: Monotonic, flow: &Flow) -> api::Flow {
        let entry = &flow.entry;
        let now = stamp(now);
        let service_address = flow.service();
        let service = self.services.iter().find(|live| live.id == entry.service);
        let backend = self.backends.get(usize::from(entry.backend)).and_then(Option::as_ref);
        let backend_address = backend.map_or_else(|| flow.backend(), |backend| backend.endpoint);
        api::Flow {
            client: flow.client(),
            // What has left the configuration has no name any more.
            service: service.map_or_else(|| service_address.to_string(), |live| live.config.name.to_string()),
            service_address,
            backend: backend.map_or_else(|| backend_address.to_string(), LiveBackend::name),
            backend_address,
            protocol: if entry.key.protocol == TCP { Protocol::Tcp } else { Protocol::Udp },
            state: state_of(flow).unwrap_or(FlowState::Closing),
            age_ms: age(flow, now).map(stamps_to_millis),
            idle_ms: stamps_to_millis(since(now, self.datapath.flows().last_used(flow))),
        }
    }
}

const fn state_of(flow: &Flow) -> Option<FlowState> {
    match flow.entry.control.state().phase() {
        Some(Phase::HalfOpen) => Some(FlowState::HalfOpen),
        Some(Phase::Established) => Some(FlowState::Established),
        Some(Phase::Closing) => Some(FlowState::Closing),
        None => None,
    }
}

/// How many stamps ago; the clock of the CPU that wrote `stamp` may be ahead by a little.
const fn since(now: u32, stamp: u32) -> u32 {
    let since = now.wrapping_sub(stamp);
    if since as i32 > 0 { since } else { 0 }
}

/// For how many stamps the flow has been there, as long as that is known.
///
/// The entry has the low half of the stamp of its opening alone. Until it is `GROWN`, no packet has come at an age that
/// would not fit into that half: so the age at the last packet is known, and the silence after it too.
fn age(flow: &Flow, now: u32) -> Option<u32> {
    let entry = &flow.entry;
    if entry.control.flags() & flags::GROWN != 0 {
        return None;
    }
    // Clocks of CPUs differ by a stamp: less than nothing is nothing.
    let at_last_packet = (entry.stamp as u16).wrapping_sub(entry.opened);
    let at_last_packet = if at_last_packet > u16::MAX - 16 { 0 } else { u32::from(at_last_packet) };
    Some(since(now, entry.stamp).saturating_add(at_last_packet))
}

fn stamps_to_millis(stamps: u32) -> u64 {
    millis(Duration::from_nanos(u64::from(stamps) << STAMP_SHIFT))
}
