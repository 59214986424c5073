//! Opening a flow: the next slot of the service's ring, and the two entries that all later packets find.

use balancer_common::{
    Backend, BackendId, Control, FlowEntry, FlowKey, FlowState, MAX_PORTS, NO_TWIN, Reason, RingWord,
    Service, TCP, flags, option, role, selector,
};
use bytemuck::Zeroable as _;

use crate::{
    Environment,
    answer::is_unicast,
    checksum::Delta,
    media,
    parse::{Parsed, tcp},
    persist,
    source::{self, Source, reply_key},
    table::{self, Found},
};

/// How many slots a flow tries when its reply would look like that of another flow.
const TRIES: usize = 4;

/// Whom a new flow leads to.
pub struct Choice {
    id: BackendId,
    backend: Backend,
    /// Where its packets come from, as the backend sees them.
    source: Source,
    /// What is left of a flow that had the same replies.
    over: Found,
    /// No other flow has these replies.
    pub is_free: bool,
}

/// A flow that is to be.
pub struct Opening {
    /// Its requests, as they arrive.
    pub key: FlowKey,
    /// What its client talks to.
    pub service: Service,
    /// Whom it leads to.
    pub choice: Choice,
    /// MAC that its requests come from.
    pub neighbour: [u8; 6],
    /// The interface that they come in by: the low 16 bits of its index.
    pub ingress: u16,
    /// The port of that interface.
    pub port: u16,
}

/// What a client's first packet opens.
#[inline(always)]
pub fn ask<E: Environment>(
    environment: &E,
    parsed: &Parsed,
    service: &Service,
    neighbour: [u8; 6],
    now: u32,
) -> Result<Opening, Reason> {
    let key = &parsed.key;
    let roles = environment.roles(key.source);
    // No client has such an address. The reply to a service's address, translated, would be another request, and the
    // reply to this host's would look like that to a connection of its own.
    if !is_unicast(key.source) || roles & (role::SERVICE | role::LOCAL) != 0 {
        return Err(Reason::Malformed);
    }
    if key.protocol == TCP && !may_open(service, parsed.tcp_flags & tcp::ALL) {
        return Err(Reason::UnknownFlow);
    }
    let ingress = environment.ingress();
    let port = environment.port(ingress).ok_or(Reason::NoEgress)?;
    let choice = if service.options & option::MEDIA != 0 {
        media::choose(environment, key, service.id, now)?
    } else {
        choose(environment, key, service, roles & role::BACKEND != 0, now)?
    };
    check_hop(environment, parsed, choice.id)?;
    Ok(Opening { key: *key, service: *service, choice, neighbour, ingress: ingress as u16, port })
}

/// Makes the two entries of a flow.
#[inline(always)]
pub fn open<E: Environment>(environment: &E, opening: &Opening, now: u32) -> Result<(), Reason> {
    let Opening { key, service, choice, .. } = opening;
    let id = choice.id;
    if choice.over.exists() {
        table::release(environment, &choice.over);
    }
    let hash = table::hash(environment, key);
    let [request, reply] = entries(opening, now);

    // The reply's entry goes first: the request's names its twin from the start, and only a flow that has both
    // is ever active.
    let reply_hash = table::hash(environment, &reply.key);
    let twin = table::insert(environment, reply_hash, &reply, NO_TWIN).ok_or(Reason::FlowTableFull)?;
    let entry = table::entry_at(environment, twin).ok_or(Reason::FlowTableFull)?;
    let reply = Found { entry, index: twin, control: entry.control() };
    let request = FlowEntry { twin, ..request };
    let Some(index) = table::insert(environment, hash, &request, twin) else {
        table::release(environment, &reply);
        return Err(Reason::FlowTableFull);
    };
    // Another CPU may have given the reply's place to another flow, which has a twin of its own.
    if table::is_unchanged(&reply) {
        reply.entry.set_twin(index);
    }
    if service.options & option::MEDIA != 0 {
        // Part of its control connection, which is counted.
        return Ok(());
    }
    persist::note(environment, service, key, (id, index), now);
    if let Some(counters) = environment.counters(id) {
        // SAFETY: counters are valid, aligned, and this CPU's own.
        unsafe { (*counters).opened = (*counters).opened.wrapping_add(1) };
    }
    Ok(())
}

/// Whether a TCP segment may open a flow: a SYN, or where a hash says which backend has it, also what belongs into the
/// middle of a connection. Such a flow is half open until the backend has shown that it knows of it.
#[inline(always)]
fn may_open(service: &Service, tcp_flags: u8) -> bool {
    tcp_flags == tcp::SYN || (service.selector != selector::NEXT && tcp_flags & !tcp::FIN == tcp::ACK)
}

/// Takes slots until one names a backend from which the reply can be told from that of any other flow, and finds its
/// way back through here: with the client's own source, or with one that is ours.
#[inline(always)]
fn choose<E: Environment>(
    environment: &E,
    key: &FlowKey,
    service: &Service,
    is_backend: bool,
    now: u32,
) -> Result<Choice, Reason> {
    let own = Source::of(key);
    let recalled = persist::recall(environment, service, key, now);
    for attempt in 0..TRIES {
        let id = if attempt == 0 && recalled != BackendId::MAX {
            recalled
        } else {
            next(environment, service, key, attempt)?
        };
        let backend = environment.backend(id).ok_or(Reason::NoBackend)?;
        let can_translate = backend.snat_address != [0; 4];
        let must_translate = can_translate && (is_backend || source::is_near(key, &backend));
        // A frame from an address to the same address reaches nobody.
        if !must_translate && backend.address != key.source {
            let choice = with_source(environment, key, id, &backend, own, now);
            if choice.is_free {
                return Ok(choice);
            }
        }
        if can_translate {
            let (source, over) = source::give(environment, key, &backend, now)?;
            return Ok(Choice { id, backend, source, over, is_free: true });
        }
    }
    Err(Reason::ReplyCollision)
}

/// A backend for a flow whose packets come to it from this source.
#[inline(always)]
pub fn with_source<E: Environment>(
    environment: &E,
    key: &FlowKey,
    id: BackendId,
    backend: &Backend,
    source: Source,
    now: u32,
) -> Choice {
    let reply = reply_key(key, backend, source);
    let over = table::find(environment, &reply, table::hash(environment, &reply));
    let is_free = !over.exists() || is_over(environment, &over, now);
    Choice { id, backend: *backend, source, over, is_free }
}

/// Whether a flow has ended, so that another may have its place.
#[inline(always)]
fn is_over<E: Environment>(environment: &E, found: &Found, now: u32) -> bool {
    found.control.state() as u8 == FlowState::Closing as u8 || table::is_expired(environment, found, now)
}

/// Takes the next slot; whose it is.
#[inline(always)]
fn next<E: Environment>(
    environment: &E,
    service: &Service,
    key: &FlowKey,
    attempt: usize,
) -> Result<BackendId, Reason> {
    let word = environment.take(service.id);
    let slot = slot(word, key, service.selector, attempt).ok_or(Reason::NoBackend)?;
    environment.slot(service.id, word.half(), slot).ok_or(Reason::NoBackend)
}

/// The slot that the flow takes; `None` when the ring is empty.
#[inline(always)]
fn slot(word: RingWord, key: &FlowKey, selector: u8, attempt: usize) -> Option<usize> {
    let hashed = match selector {
        selector::SOURCE => FlowKey { source: key.source, ..FlowKey::zeroed() },
        selector::FLOW => *key,
        _ => return word.slot(),
    };
    match word.length() as u64 {
        0 => None,
        length => {
            Some(((table::mix(&hashed, SHARED_SEED) >> 32).wrapping_add(attempt as u64) % length) as usize)
        }
    }
}

/// The seed of the hash that chooses slots: the same everywhere, so that balancers with the same backends agree.
const SHARED_SEED: [u64; 2] = [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344];

/// Refuses a flow whose first packet could not be sent on.
#[inline(always)]
fn check_hop<E: Environment>(environment: &E, parsed: &Parsed, id: BackendId) -> Result<(), Reason> {
    let hop = environment.next_hop(MAX_PORTS + u32::from(id)).ok_or(Reason::NoEgress)?;
    crate::process::check(parsed, &hop)
}

/// The entries of both directions of a `nat` flow. Each names no twin yet.
#[inline(always)]
fn entries(opening: &Opening, now: u32) -> [FlowEntry; 2] {
    let Opening { key, service, choice: Choice { id, backend, source, .. }, .. } = *opening;
    let timeout = if key.protocol == TCP { service.half_open_timeout } else { service.idle_timeout };
    let active = if service.options & option::MEDIA != 0 { 0 } else { flags::ACTIVE };
    let followed = if service.options & option::EXCHANGES != 0 { flags::FOLLOWED } else { 0 };
    let to_backend =
        Delta::default().address(key.source, source.address).address(key.destination, backend.address);
    let to_client =
        Delta::default().address(backend.address, key.destination).address(source.address, key.source);
    let request = FlowEntry {
        key,
        new_source: source.address,
        new_destination: backend.address,
        new_source_port: source.port,
        new_destination_port: backend.port,
        ip_delta: to_backend.and(Delta::TTL).fold(),
        l4_delta: to_backend
            .word(key.source_port, source.port)
            .word(key.destination_port, backend.port)
            .fold(),
        neighbour: opening.neighbour,
        via: opening.ingress,
        backend: id,
        opened: now as u16,
        service: service.id,
        timeout,
        twin: NO_TWIN,
        stamp: now,
        control: Control::new(FlowState::HalfOpen, active | followed, 0),
        exchange: 0,
    };
    let reply = FlowEntry {
        key: reply_key(&key, &backend, source),
        new_source: key.destination,
        new_destination: key.source,
        new_source_port: key.destination_port,
        new_destination_port: key.source_port,
        ip_delta: to_client.and(Delta::TTL).fold(),
        l4_delta: to_client
            .word(backend.port, key.destination_port)
            .word(source.port, key.source_port)
            .fold(),
        via: opening.port,
        control: Control::new(FlowState::HalfOpen, flags::REPLY | followed, 0),
        ..request
    };
    [request, reply]
}
