//! Services that keep no flows: each datagram is scheduled by itself.
//!
//! A request takes the next slot, and leaves with its backend's address and port in place of the service's. What comes from
//! that address and port leaves with the service's: nobody knows which request it answers, so a backend's endpoint belongs to
//! one such service alone. Where to is not learned from requests, since who forges one would then have somebody else's answers
//! sent astray: the kernel's routes and neighbours say it, with one lookup for each answer. (So the kernel must be allowed to
//! forward what the backends' interface receives.) What a client on a backend's own network asks is answered past this host,
//! from the backend's own address: such clients can be served one way only.

use balancer_common::{Backend, BackendId, MAX_PORTS, Reason, Service, ServiceId, forward, role, vlan};

use crate::{
    Environment, Packet,
    answer::is_unicast,
    open::{self, Opening, opening},
    parse::{Parsed, parse},
    process::{self, Step},
    rewrite::{Translation, rewrite},
    rounds::Rounds,
    state::Direction,
};

/// Sends a datagram on that is of no flow, and to such a service, or as an answer from one of its backends. `Alone` says that
/// it is no request.
#[inline(always)]
pub fn carry<P: Packet, E: Environment>(packet: &P, environment: &E, is_answer: bool) -> Step {
    // It was parsed before: there is a key.
    let Ok(parsed) = parse(packet, environment) else { return Step::Foreign };
    // What follows it would not know where it went.
    if parsed.is_first_part {
        return Step::Refused(Reason::Fragment);
    }
    let carried = if is_answer { reply(environment, &parsed) } else { request(environment, &parsed) };
    match carried {
        Ok(step) | Err(step) => step,
    }
}

#[inline(always)]
fn request<E: Environment>(environment: &E, parsed: &Parsed) -> Result<Step, Step> {
    let Some(service) = process::service(environment, parsed) else { return Err(Step::Alone) };
    forward_request(environment, parsed, service).map_err(|step| match step {
        Step::Refused(reason) if process::is_answered(service, reason) => Step::Rejected(reason, 0),
        step => step,
    })
}

#[inline(always)]
fn forward_request<E: Environment>(
    environment: &E,
    parsed: &Parsed,
    service: &Service,
) -> Result<Step, Step> {
    process::check_packet(parsed, forward::NAT)?;
    let opening = opening(environment)?;
    opening.client = parsed.source();
    opening.key = parsed.key;
    opening.service = *service;
    open::check_client(&opening.client, environment.roles(&opening.client))?;
    let (id, backend) = choose(environment, opening)?;
    let hop = environment.next_hop(MAX_PORTS + u32::from(id)).ok_or(Reason::NoEgress)?;
    process::check(environment, parsed.length, parsed.vlan, hop)?;
    count(environment, (service.id, id), Direction::Request, parsed.length);
    let translation = Translation::to(parsed, &backend.address, backend.port);
    rewrite(parsed, &translation, 1, hop.neighbour, hop.source);
    Ok(Step::Leave(hop.index))
}

/// Takes slots until one names another host than the client: a frame from an address to the same address reaches nobody.
#[inline(always)]
fn choose<'a, E: Environment>(
    environment: &'a E,
    opening: &Opening,
) -> Result<(BackendId, &'a Backend), Reason> {
    for attempt in Rounds::new(open::TRIES) {
        let id = open::next(environment, opening, attempt);
        let backend = environment.backend(id).ok_or(Reason::NoBackend)?;
        if backend.address != opening.client {
            return Ok((id, backend));
        }
    }
    Err(Reason::ReplyCollision)
}

#[inline(always)]
fn reply<E: Environment>(environment: &E, parsed: &Parsed) -> Result<Step, Step> {
    let client = parsed.destination();
    let roles = environment.roles(&client);
    if process::is_for_host(&parsed.key, roles) {
        return Err(Step::Foreign);
    }
    process::check_packet(parsed, forward::NAT)?;
    let id = process::sender(environment, parsed) as BackendId;
    let backend = environment.backend(id).ok_or(Reason::OrphanReply)?;
    let from = environment.next_hop(MAX_PORTS + u32::from(id)).ok_or(Reason::OrphanReply)?;
    // Only there the backend is: what claims to come from it elsewhere would leave in the service's name. And no client has
    // an address of a service or of this host, of a group, or of one link alone.
    let is_its = from.ifindex == environment.ingress()
        && backend.service_port != [0; 2]
        && backend.address == parsed.source();
    if !is_its || !is_unicast(&client) || roles & (role::SERVICE | role::LOCAL) != 0 {
        return Err(Step::Refused(Reason::OrphanReply));
    }
    let way = environment.way(parsed.key.family, &backend.service_address, &client)?;
    let port = environment.port(way.ifindex, vlan::NONE).ok_or(Reason::NoEgress)?;
    let hop = environment.next_hop(port.into()).ok_or(Reason::NoEgress)?;
    process::check(environment, parsed.length, parsed.vlan, hop)?;
    count(environment, (backend.service, id), Direction::Reply, parsed.length);
    let translation = Translation::from(parsed, &backend.service_address, backend.service_port);
    rewrite(parsed, &translation, 1, way.neighbour, hop.source);
    Ok(Step::Leave(hop.index))
}

/// Counts a datagram: each request is a flow of its own, which ends at once; its answer is as young.
#[inline(always)]
fn count<E: Environment>(
    environment: &E,
    (service, backend): (ServiceId, BackendId),
    direction: Direction,
    bytes: u32,
) {
    process::count(environment, backend, direction, bytes);
    if direction == Direction::Request
        && let Some(counters) = environment.counters(backend)
    {
        // SAFETY: counters are valid, aligned, and this CPU's own.
        let counters = unsafe { &mut *counters };
        counters.opened = counters.opened.wrapping_add(1);
        counters.closed = counters.closed.wrapping_add(1);
    }
    if let Some(profile) = environment.profile(service) {
        // SAFETY: profiles are valid, aligned, and this CPU's own.
        process::add(unsafe { &mut (*profile).ages[0] }, bytes);
    }
}
