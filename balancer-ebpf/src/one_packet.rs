//! Services that keep no flows: each datagram is scheduled by itself.
//!
//! A request takes the next slot, and leaves with its backend's address and port in place of the service's. What comes from
//! that address and port leaves with the service's: nobody knows which request it answers, so a backend's endpoint belongs to
//! one such service alone. Where to is not learned from requests, since who forges one would then have somebody else's answers
//! sent astray: the kernel's routes and neighbours say it, with one lookup for each answer. (So the kernel must be allowed to
//! forward what the backends' interface receives.) What a client on a backend's own network asks is answered past this host,
//! from the backend's own address: such clients can be served one way only.

use balancer_common::{Backend, BackendId, FlowKey, MAX_PORTS, NextHop, Reason, Service, ServiceId, role};

use crate::{
    Environment, Packet, open,
    parse::{Parsed, parse},
    process::{self, Step},
    rewrite::{Translation, rewrite},
    source::Source,
    state::Direction,
};

/// Sends a datagram on that is to such a service, or from one of its backends, and of no flow.
#[inline(always)]
pub fn carry<P: Packet, E: Environment>(packet: &P, environment: &E) -> Step {
    // It was parsed before: there is a key.
    let Ok(parsed) = parse(packet) else { return Step::Foreign };
    let carried = match environment.service(&process::service_key(&parsed)) {
        Some(service) => match request(environment, &parsed, service) {
            Err(reason) if process::is_answered(service, reason) => return Step::Rejected(reason),
            carried => carried,
        },
        None => {
            let roles = environment.roles(parsed.key.destination);
            if process::is_for_host(&parsed.key, roles) {
                return Step::Foreign;
            }
            reply(environment, &parsed, roles)
        }
    };
    match carried {
        Ok(hop) if hop.ifindex == environment.ingress() => Step::Back,
        Ok(hop) => Step::Out(hop.port),
        Err(reason) => Step::Refused(reason),
    }
}

#[inline(always)]
fn request<E: Environment>(environment: &E, parsed: &Parsed, service: &Service) -> Result<NextHop, Reason> {
    process::check_packet(parsed)?;
    let key = &parsed.key;
    open::check_client(key.source, environment.roles(key.source))?;
    let (id, backend) = choose(environment, service, key)?;
    let hop = environment.next_hop(MAX_PORTS + u32::from(id)).ok_or(Reason::NoEgress)?;
    process::check(environment, parsed, &hop)?;
    count(environment, (service.id, id), Direction::Request, parsed.length);
    let to = Source { address: backend.address, port: backend.port };
    rewrite(parsed, &Translation::new(key, Source::of(key), to), hop.neighbour, hop.source);
    Ok(hop)
}

/// Takes slots until one names another host than the client: a frame from an address to the same address reaches nobody.
#[inline(always)]
fn choose<E: Environment>(
    environment: &E,
    service: &Service,
    key: &FlowKey,
) -> Result<(BackendId, Backend), Reason> {
    for attempt in 0..open::TRIES {
        let id = open::next(environment, service, key, attempt)?;
        let backend = environment.backend(id).ok_or(Reason::NoBackend)?;
        if backend.address != key.source {
            return Ok((id, backend));
        }
    }
    Err(Reason::ReplyCollision)
}

#[inline(always)]
fn reply<E: Environment>(environment: &E, parsed: &Parsed, roles: u32) -> Result<NextHop, Reason> {
    process::check_packet(parsed)?;
    let key = &parsed.key;
    let id = environment.endpoint(&process::sender_key(parsed)) as BackendId;
    let backend = environment.backend(id).ok_or(Reason::OrphanReply)?;
    let from = environment.next_hop(MAX_PORTS + u32::from(id)).ok_or(Reason::OrphanReply)?;
    // Only there the backend is: what claims to come from it elsewhere would leave in the service's name. And no client has
    // an address of a service or of this host.
    let is_its = from.ifindex == environment.ingress() && backend.service_address != [0; 4];
    if !is_its || roles & (role::SERVICE | role::LOCAL) != 0 {
        return Err(Reason::OrphanReply);
    }
    let way = environment.way(backend.service_address, key.destination)?;
    let port = environment.port(way.ifindex).ok_or(Reason::NoEgress)?;
    let hop = environment.next_hop(u32::from(port)).ok_or(Reason::NoEgress)?;
    process::check(environment, parsed, &hop)?;
    count(environment, (backend.service, id), Direction::Reply, parsed.length);
    let source = Source { address: backend.service_address, port: backend.service_port };
    let client = Source { address: key.destination, port: key.destination_port };
    rewrite(parsed, &Translation::new(key, source, client), way.neighbour, hop.source);
    Ok(hop)
}

/// Counts a datagram: each request is a flow of its own, which ends at once; its answer is as young.
#[inline(always)]
fn count<E: Environment>(
    environment: &E,
    (service, backend): (ServiceId, BackendId),
    direction: Direction,
    bytes: u16,
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
