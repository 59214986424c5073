//! Opening a flow: the next slot of the service's ring, and the two entries that all later packets find.

use crate::{
    Environment,
    answer::is_unicast,
    checksum::Delta,
    enter::{self, Entered},
    media,
    parse::{Parsed, tcp},
    persist::{self, NOBODY},
    process::Step,
    rounds::Rounds,
    source::{self, Source, reply_key, short},
    table::{self, Found},
    vlan,
};
use balancer_common::{
    Address, BackendId, Control, FlowEntry, FlowKey, MAX_PORTS, NO_TWIN, Reason, Service, TCP, family, flags,
    forward, option, role, selector,
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

/// A flow that is to be: what the steps of its opening tell each other.
#[repr(C)]
pub struct Opening {
    /// Who opens it.
    pub client: Address,
    /// Its requests, as they arrive.
    pub key: FlowKey,
    /// What its client talks to.
    pub service: Service,
    /// MAC that its requests come from.
    pub neighbour: [u8; 6],
    /// The [`vlan::mark`] of where they come in.
    pub ingress: u16,
    /// The port that leads back there.
    pub port: u16,
    /// Whom it leads to; nobody yet while that is to be chosen.
    pub choice: Choice,
    /// Whether it comes from a host that is a backend.
    pub is_backend: bool,
    /// IP total length of its first packet.
    pub length: u32,
    /// The tags that it comes with: `vlan::*`.
    pub vlan: u32,
    /// Its replies, as they arrive.
    pub reply: FlowKey,
}

/// This CPU's opening.
#[expect(clippy::mut_from_ref, reason = "it is a place of this CPU's, as a map lookup finds it")]
#[inline(always)]
pub fn opening<E: Environment>(environment: &E) -> Result<&mut Opening, Reason> {
    let place = environment.opening().ok_or(Reason::NoBackend)?;
    // SAFETY: valid, aligned, and this CPU's own; no step holds on to it while another runs.
    Ok(unsafe { &mut *place })
}

/// Prepares what a client's first packet opens.
#[inline(always)]
pub fn ask<E: Environment>(environment: &E, parsed: &Parsed, service: &Service) -> Result<(), Step> {
    let opening = opening(environment)?;
    opening.client = parsed.source();
    opening.key = parsed.key;
    opening.service = *service;
    let roles = environment.roles(&opening.client);
    check_client(&opening.client, roles)?;
    if parsed.key.protocol == TCP && !may_open(service, parsed.tcp_flags & tcp::ALL) {
        return Err(Step::Refused(Reason::UnknownFlow));
    }
    opening.ingress = vlan::mark(environment.ingress(), parsed.vlan);
    opening.port = vlan::port(environment, parsed.vlan).ok_or(Reason::NoEgress)?;
    // SAFETY: `parse` checked that the Ethernet header lies in the frame.
    opening.neighbour = unsafe { (*parsed.ethernet).src_addr };
    opening.choice = Choice::plain(NOBODY);
    opening.is_backend = roles & role::BACKEND != 0;
    opening.length = parsed.length;
    opening.vlan = parsed.vlan;
    Ok(())
}

/// Whether a client can have this address, of these roles.
#[inline(always)]
pub fn check_client(address: &Address, roles: u32) -> Result<(), Reason> {
    // The reply to a service's address, translated, would be another request, and the reply to this host's would look
    // like that to a connection of its own.
    if is_unicast(address) && roles & (role::SERVICE | role::LOCAL) == 0 {
        Ok(())
    } else {
        Err(Reason::Malformed)
    }
}

/// Chooses whom the flow that was prepared leads to, and brings it into the table. If another CPU is in the way, it stays
/// prepared, for another try.
#[inline(always)]
pub fn open<E: Environment>(environment: &E, now: u32) -> Result<Step, Step> {
    let opening = opening(environment)?;
    if opening.choice.id == NOBODY {
        opening.choice = environment.choose(now)?;
        check_hop(environment, opening)?;
    }
    let Opening { key, service, choice, .. } = opening;
    let is_media = service.options & option::MEDIA != 0;
    let backend = environment.backend(choice.id).ok_or(Reason::NoBackend)?;
    let port = if is_media { key.destination_port } else { backend.port };
    let mut source = Source::of(key);
    if choice.port != [0; 2] {
        source = Source { address: short(environment, key.family, &backend.snat_address), port: choice.port };
    }
    let is_one_way = backend.forward != forward::NAT;
    opening.reply = if is_one_way { turned(key) } else { reply_key(environment, key, backend, port, source) };
    let [mut request, mut reply] =
        if is_one_way { [NO_TWIN; 2] } else { environment.claim_free([&opening.key, &opening.reply]) };
    if reply == NO_TWIN && !is_one_way {
        reply = environment.reserve(&opening.reply, now);
    }
    if request == NO_TWIN && (reply != NO_TWIN || is_one_way) {
        request = environment.reserve(&opening.key, now);
    }
    if request == NO_TWIN || (reply == NO_TWIN && !is_one_way) {
        // One may have been claimed.
        enter::withdraw(environment, request);
        enter::withdraw(environment, reply);
        return Err(Step::Refused(Reason::FlowTableFull));
    }
    let followed = if opening.service.options & option::EXCHANGES != 0 { flags::FOLLOWED } else { 0 };
    // Media are part of their control connection, which is counted.
    let active = if is_media { 0 } else { flags::ACTIVE };
    if !is_one_way {
        environment.announce([reply, request], flags::REPLY | followed, now);
    }
    environment.announce([request, reply], active | followed, now);
    match environment.enter(request) {
        Entered::New if !is_media => persist::note(environment, opening, request, now),
        Entered::New | Entered::Joined => {}
        Entered::Lost => return Ok(Step::Prepared),
    }
    Ok(Step::Known)
}

/// Whether a TCP segment may open a flow: a SYN, or where a hash says which backend has it, also what belongs into the
/// middle of a connection. Such a flow is half open until the backend has shown that it knows of it.
#[inline(always)]
fn may_open(service: &Service, tcp_flags: u8) -> bool {
    tcp_flags == tcp::SYN || (service.selector != selector::NEXT && tcp_flags & !tcp::FIN == tcp::ACK)
}

/// Whom the flow that is being opened leads to. What had the same replies and is over, goes.
#[inline(always)]
pub fn choose<E: Environment>(environment: &E, now: u32) -> Result<Choice, Reason> {
    let opening: &Opening = opening(environment)?;
    if opening.service.options & option::MEDIA != 0 {
        return media::choose(environment, opening, now);
    }
    take(environment, opening, now)
}

/// Takes slots until one names a backend from which the reply can be told from that of any other flow, and finds its
/// way back through here: with the client's own source, or with one that is ours.
#[inline(always)]
fn take<E: Environment>(environment: &E, opening: &Opening, now: u32) -> Result<Choice, Reason> {
    let Opening { client, key, is_backend, .. } = opening;
    let recalled = persist::recall(environment, opening, now);
    for attempt in Rounds::new(TRIES) {
        let id =
            if attempt == 0 && recalled != NOBODY { recalled } else { next(environment, opening, attempt) };
        let backend = environment.backend(id).ok_or(Reason::NoBackend)?;
        let is_one_way = backend.forward != forward::NAT;
        let can_translate = !is_one_way && backend.snat_address != [0; 16];
        let must_translate = can_translate && (*is_backend || source::is_near(client, backend));
        let reply = reply_key(environment, key, backend, backend.port, Source::of(key));
        // A frame from an address to the same address reaches nobody.
        let is_told_apart = is_one_way || environment.is_free(&reply, now);
        if !must_translate && backend.address != *client && is_told_apart {
            return Ok(Choice::plain(id));
        }
        if can_translate {
            return Ok(Choice { id, port: source::give(environment, key, backend, now)? });
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

/// Takes the next slot; whose it is, or `NOBODY`.
#[inline(always)]
pub fn next<E: Environment>(environment: &E, opening: &Opening, attempt: usize) -> BackendId {
    let word = environment.take(opening.service.id);
    let length = word.length() as u64;
    if length == 0 {
        return NOBODY;
    }
    let lot = match opening.service.selector {
        selector::NEXT => word.taken(),
        selector => hashed(opening, selector).wrapping_add(attempt as u64),
    };
    environment.slot(opening.service.id, word.half(), (lot % length) as usize).unwrap_or(NOBODY)
}

/// What a hash makes of the client's address, or of the flow. Of the whole address: its digest in the key is another on
/// each balancer.
#[inline(always)]
fn hashed(opening: &Opening, selector: u8) -> u64 {
    let source = u32::from_ne_bytes(table::digest(&opening.client, SHARED_SEED));
    let ports: u32 = bytemuck::cast([opening.key.source_port, opening.key.destination_port]);
    let ports = if selector == selector::SOURCE { 0 } else { ports };
    table::mix([source.into(), ports.into()], SHARED_SEED) >> 32
}

/// The seed of the hash that chooses slots: the same everywhere, so that balancers with the same backends agree.
const SHARED_SEED: [u64; 2] = [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7344];

/// Refuses a flow whose first packet could not be sent on.
#[inline(always)]
fn check_hop<E: Environment>(environment: &E, opening: &Opening) -> Result<(), Step> {
    let hop = environment.next_hop(MAX_PORTS + u32::from(opening.choice.id)).ok_or(Reason::NoEgress)?;
    // Not even into a VLAN of the same number: its replies would not find back.
    if !vlan::may_leave(environment, opening.vlan, hop) {
        return Err(Step::Refused(Reason::NoEgress));
    }
    crate::process::check(environment, opening.length, opening.vlan, hop)
}

/// The key of what is sent back, as it is without translation.
#[inline(always)]
const fn turned(key: &FlowKey) -> FlowKey {
    FlowKey {
        source: key.destination,
        destination: key.source,
        source_port: key.destination_port,
        destination_port: key.source_port,
        ..*key
    }
}

/// Writes the entry `index` of a flow, of its replies if `marks` say so, and lets others that open see it.
#[inline(always)]
pub fn announce<E: Environment>(environment: &E, [index, twin]: [u32; 2], marks: u8, now: u32) {
    let Ok(opening) = opening(environment) else { return };
    let opening: &Opening = opening;
    let Opening { client, service, choice, .. } = opening;
    let Some(backend) = environment.backend(choice.id) else { return };
    let is_one_way = backend.forward != forward::NAT;
    let from = if choice.port == [0; 2] { client } else { &backend.snat_address };
    let to = if is_one_way { &service.address } else { &backend.address };
    let is_reply = marks & flags::REPLY != 0;
    let (key, twin_key, ends) = if is_reply {
        (&opening.reply, &opening.key, [to, from, &service.address, client])
    } else {
        (&opening.key, &opening.reply, [client, &service.address, from, to])
    };
    if key.family != family::IPV4 {
        enter::set_addresses(environment, index, ends);
    }
    let [source, destination, new_source, new_destination] = ends;
    let addresses = Delta::default().address(source, new_source).address(destination, new_destination);
    let ports = Delta::default()
        .word(key.source_port, twin_key.destination_port)
        .word(key.destination_port, twin_key.source_port);
    let hops = if backend.forward == forward::DSR { Delta::default() } else { Delta::TTL };
    let (mut ip_delta, mut l4_delta, mut lot) = (addresses.and(hops), addresses.and(ports), 0);
    if is_one_way {
        // Not even the sum of what stays as it is: that changes a checksum of ffff.
        (ip_delta, l4_delta) = (hops, Delta::default());
        lot = table::mix(bytemuck::cast(*key), SHARED_SEED) as u32 & 0xffff;
    }
    let entry = FlowEntry {
        key: *key,
        new_source: twin_key.destination,
        new_destination: twin_key.source,
        new_source_port: twin_key.destination_port,
        new_destination_port: twin_key.source_port,
        ip_delta: ip_delta.fold(),
        l4_delta: l4_delta.fold(),
        neighbour: opening.neighbour,
        via: if is_reply { opening.port } else { opening.ingress },
        backend: choice.id,
        opened: now as u16,
        service: service.id,
        timeout: if key.protocol == TCP { service.half_open_timeout } else { service.idle_timeout },
        twin,
        stamp: now,
        control: Control::default(),
        exchange: lot,
    };
    enter::announce(environment, index, &entry, marks);
}
