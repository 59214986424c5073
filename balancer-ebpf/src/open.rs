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
    parse::{Parsed, tcp},
    persist,
    table::{self, Found},
};

/// How many slots a flow tries when its reply would look like that of another flow.
const TRIES: usize = 4;

/// Opens a flow for its first packet.
#[inline(always)]
pub fn open<E: Environment>(
    environment: &E,
    parsed: &Parsed,
    hash: table::Hash,
    service: &Service,
    client: [u8; 6],
    now: u32,
) -> Result<(), Reason> {
    let key = &parsed.key;
    // No client has such an address, and the reply to a service's address, translated, would be another request.
    if !is_unicast(key.source) || environment.roles(key.source) & role::SERVICE != 0 {
        return Err(Reason::Malformed);
    }
    if key.protocol == TCP && !may_open(service, parsed.tcp_flags & tcp::ALL) {
        return Err(Reason::UnknownFlow);
    }
    let ingress = environment.ingress();
    let port = environment.port(ingress).ok_or(Reason::NoEgress)?;
    let (id, backend) = choose(environment, key, service, now)?;
    check_hop(environment, parsed, id)?;
    let [request, reply] = entries(parsed, service, id, &backend, client, (ingress, port), now);

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
    persist::note(environment, service, key, id, now);
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

/// Takes slots until one names a backend from which the reply can be told from that of any other flow.
#[inline(always)]
fn choose<E: Environment>(
    environment: &E,
    key: &FlowKey,
    service: &Service,
    now: u32,
) -> Result<(BackendId, Backend), Reason> {
    let recalled = persist::recall(environment, service, key, now);
    for attempt in 0..TRIES {
        let id = if attempt == 0 && recalled != BackendId::MAX {
            recalled
        } else {
            next(environment, service, key, attempt)?
        };
        let backend = environment.backend(id).ok_or(Reason::NoBackend)?;
        let reply = reply_key(key, &backend);
        // A frame from an address to the same address reaches nobody.
        if backend.address == key.source {
            continue;
        }
        let other = table::find(environment, &reply, table::hash(environment, &reply));
        if !other.exists() {
            return Ok((id, backend));
        }
        let is_over = other.control.state() as u8 == FlowState::Closing as u8
            || table::is_expired(environment, &other, now);
        if is_over {
            table::release(environment, &other);
            return Ok((id, backend));
        }
    }
    Err(Reason::ReplyCollision)
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

#[inline(always)]
fn reply_key(key: &FlowKey, backend: &Backend) -> FlowKey {
    FlowKey {
        source: backend.address,
        destination: key.source,
        source_port: backend.port,
        destination_port: key.source_port,
        ..*key
    }
}

/// The entries of both directions of a `nat` flow. Each names no twin yet.
#[inline(always)]
fn entries(
    parsed: &Parsed,
    service: &Service,
    id: BackendId,
    backend: &Backend,
    client: [u8; 6],
    (ingress, port): (u32, u16),
    now: u32,
) -> [FlowEntry; 2] {
    let key = parsed.key;
    let timeout = if key.protocol == TCP { service.half_open_timeout } else { service.idle_timeout };
    let followed = if service.options & option::EXCHANGES != 0 { flags::FOLLOWED } else { 0 };
    let to_backend = Delta::default().address(key.destination, backend.address);
    let to_client = Delta::default().address(backend.address, key.destination);
    let request = FlowEntry {
        key,
        new_source: key.source,
        new_destination: backend.address,
        new_source_port: key.source_port,
        new_destination_port: backend.port,
        ip_delta: to_backend.and(Delta::TTL).fold(),
        l4_delta: to_backend.word(key.destination_port, backend.port).fold(),
        neighbour: client,
        via: ingress as u16,
        backend: id,
        opened: now as u16,
        service: service.id,
        timeout,
        twin: NO_TWIN,
        stamp: now,
        control: Control::new(FlowState::HalfOpen, flags::ACTIVE | followed, 0),
        exchange: 0,
    };
    let reply = FlowEntry {
        key: reply_key(&key, backend),
        new_source: key.destination,
        new_destination: key.source,
        new_source_port: key.destination_port,
        new_destination_port: key.source_port,
        ip_delta: to_client.and(Delta::TTL).fold(),
        l4_delta: to_client.word(backend.port, key.destination_port).fold(),
        via: port,
        control: Control::new(FlowState::HalfOpen, flags::REPLY | followed, 0),
        ..request
    };
    [request, reply]
}
