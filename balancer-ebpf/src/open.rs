//! Opening a flow: the next slot of the service's ring, and the two entries that all later packets find.

use balancer_common::{
    Backend, BackendId, Control, FlowEntry, FlowKey, MAX_PORTS, NO_TWIN, Reason, RingWord, Service, TCP,
    flags, option, role, selector,
};
use bytemuck::Zeroable as _;

use crate::{
    Environment,
    answer::is_unicast,
    checksum::Delta,
    enter::{self, Entered},
    media,
    parse::{Parsed, tcp},
    persist,
    source::{self, Source, reply_key},
    table::{self, Found},
};

/// How many slots a flow tries when its reply would look like that of another flow.
pub const TRIES: usize = 4;

/// Whom a new flow leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The backend.
    pub id: BackendId,
    /// The port, network order, that its packets come from with the backend's `snat_address`; 0 = they keep their source.
    pub port: [u8; 2],
}

impl Choice {
    /// A backend that sees the client's own source.
    #[inline(always)]
    pub const fn plain(id: BackendId) -> Choice {
        Choice { id, port: [0; 2] }
    }
}

/// A flow that is to be.
pub struct Opening<'a> {
    /// Its requests, as they arrive.
    pub key: FlowKey,
    /// What its client talks to.
    pub service: &'a Service,
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
pub fn ask<'a, E: Environment>(
    environment: &E,
    parsed: &Parsed,
    service: &'a Service,
    now: u32,
) -> Result<Opening<'a>, Reason> {
    let key = &parsed.key;
    let roles = environment.roles(key.source);
    check_client(key.source, roles)?;
    if key.protocol == TCP && !may_open(service, parsed.tcp_flags & tcp::ALL) {
        return Err(Reason::UnknownFlow);
    }
    let ingress = environment.ingress();
    let port = environment.port(ingress).ok_or(Reason::NoEgress)?;
    let choice = environment.choose(service, key, roles & role::BACKEND != 0, now)?;
    check_hop(environment, parsed, choice.id)?;
    // SAFETY: `parse` checked that the Ethernet header lies in the frame.
    let neighbour = unsafe { (*parsed.ethernet).src_addr };
    Ok(Opening { key: *key, service, choice, neighbour, ingress: ingress as u16, port })
}

/// Whether a client can have this address, of these roles.
#[inline(always)]
pub fn check_client(address: [u8; 4], roles: u32) -> Result<(), Reason> {
    // The reply to a service's address, translated, would be another request, and the reply to this host's would look
    // like that to a connection of its own.
    if is_unicast(address) && roles & (role::SERVICE | role::LOCAL) == 0 {
        Ok(())
    } else {
        Err(Reason::Malformed)
    }
}

/// Brings a flow into the table.
#[inline(always)]
pub fn open<E: Environment>(environment: &E, opening: &Opening<'_>, now: u32) -> Result<(), Reason> {
    let Opening { key, service, choice, .. } = opening;
    let is_media = service.options & option::MEDIA != 0;
    let mut backend = environment.backend(choice.id).ok_or(Reason::NoBackend)?;
    if is_media {
        backend.port = key.destination_port;
    }
    let mut source = Source::of(key);
    if choice.port != [0; 2] {
        source = Source { address: backend.snat_address, port: choice.port };
    }
    let reply_key = reply_key(key, &backend, source);
    let [mut request, mut reply] = environment.claim_free([key, &reply_key]);
    if reply == NO_TWIN {
        reply = environment.reserve(&reply_key, now);
    }
    if request == NO_TWIN && reply != NO_TWIN {
        request = environment.reserve(key, now);
    }
    if request == NO_TWIN || reply == NO_TWIN {
        // One may have been claimed.
        enter::withdraw(environment, request);
        enter::withdraw(environment, reply);
        return Err(Reason::FlowTableFull);
    }
    let entries = entries(opening, &backend, source, now);
    let followed = if service.options & option::EXCHANGES != 0 { flags::FOLLOWED } else { 0 };
    // Media are part of their control connection, which is counted.
    let active = if is_media { 0 } else { flags::ACTIVE };
    enter::announce(environment, reply, &FlowEntry { twin: request, ..entries[1] }, flags::REPLY | followed);
    enter::announce(environment, request, &FlowEntry { twin: reply, ..entries[0] }, active | followed);
    match environment.enter(request) {
        Entered::New if !is_media => persist::note(environment, service, key, (choice.id, request), now),
        Entered::New | Entered::Joined => {}
        Entered::Lost => return Err(Reason::FlowRaced),
    }
    Ok(())
}

/// Whether a TCP segment may open a flow: a SYN, or where a hash says which backend has it, also what belongs into the
/// middle of a connection. Such a flow is half open until the backend has shown that it knows of it.
#[inline(always)]
fn may_open(service: &Service, tcp_flags: u8) -> bool {
    tcp_flags == tcp::SYN || (service.selector != selector::NEXT && tcp_flags & !tcp::FIN == tcp::ACK)
}

/// Whom a new flow of a service leads to. What had the same replies and is over, goes.
#[inline(always)]
pub fn choose<E: Environment>(
    environment: &E,
    service: &Service,
    key: &FlowKey,
    is_backend: bool,
    now: u32,
) -> Result<Choice, Reason> {
    if service.options & option::MEDIA != 0 {
        return media::choose(environment, key, service.id, now);
    }
    take(environment, service, key, is_backend, now)
}

/// Takes slots until one names a backend from which the reply can be told from that of any other flow, and finds its
/// way back through here: with the client's own source, or with one that is ours.
#[inline(always)]
fn take<E: Environment>(
    environment: &E,
    service: &Service,
    key: &FlowKey,
    is_backend: bool,
    now: u32,
) -> Result<Choice, Reason> {
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
        if !must_translate
            && backend.address != key.source
            && is_free(environment, &reply_key(key, &backend, Source::of(key)), now)
        {
            return Ok(Choice::plain(id));
        }
        if can_translate {
            return Ok(Choice { id, port: source::give(environment, key, &backend, now)? });
        }
    }
    Err(Reason::ReplyCollision)
}

/// Whether no other flow has these replies. What is left of one that is over, goes.
#[inline(always)]
pub fn is_free<E: Environment>(environment: &E, reply: &FlowKey, now: u32) -> bool {
    let other = table::find(environment, reply, table::hash(environment, reply));
    if other.exists() && is_over(environment, &other, now) {
        table::release(environment, &other);
        return true;
    }
    !other.exists()
}

/// Whether a flow has ended, so that another may have its place.
#[inline(always)]
fn is_over<E: Environment>(environment: &E, found: &Found, now: u32) -> bool {
    found.control.state().is_closing() || table::is_expired(environment, found, now)
}

/// Takes the next slot; whose it is.
#[inline(always)]
pub fn next<E: Environment>(
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
    crate::process::check(environment, parsed, &hop)
}

/// The entries of both directions of a `nat` flow. Each names no twin yet.
#[inline(always)]
fn entries(opening: &Opening<'_>, backend: &Backend, source: Source, now: u32) -> [FlowEntry; 2] {
    let Opening { key, service, choice: Choice { id, .. }, .. } = *opening;
    let timeout = if key.protocol == TCP { service.half_open_timeout } else { service.idle_timeout };
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
        control: Control::default(),
        exchange: 0,
    };
    let reply = FlowEntry {
        key: reply_key(&key, backend, source),
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
        ..request
    };
    [request, reply]
}
