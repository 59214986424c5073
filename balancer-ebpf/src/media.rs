//! Media of RTSP services: UDP flows from and to the servers' data ports, which follow their client's control connection.

use balancer_common::{
    Address, BackendId, ClientKey, FlowKey, Reason, ServiceId, TCP, client, endpoint, flags,
};

use crate::{
    Environment,
    open::{Choice, Opening, opening},
    parse::Parsed,
    process::service_key,
    source::{Source, reply_key},
    table::{self, Found},
};

/// Who the control connection of a client is remembered for.
#[inline(always)]
pub const fn client(service: ServiceId, address: &Address) -> ClientKey {
    ClientKey { address: *address, service, kind: client::CONTROL, reserved: [0; 4] }
}

/// Whom a client's media flow leads to: the backend that has its control connection, at the same data port.
#[inline(always)]
pub fn choose<E: Environment>(environment: &E, opening: &Opening, now: u32) -> Result<Choice, Reason> {
    let control = control(environment, opening.service.id, opening, now);
    if !control.exists() {
        return Err(Reason::NoControlConnection);
    }
    choice(environment, &opening.key, control.entry.flow().backend, now)
}

/// Prepares what a packet opens that a backend sends from a data port: the same as if its client had sent the first one.
#[inline(always)]
pub fn answer<E: Environment>(environment: &E, parsed: &Parsed, sender: u32, now: u32) -> Result<(), Reason> {
    let opening = opening(environment)?;
    let reply = &parsed.key;
    let id = (sender & !endpoint::MEDIA) as BackendId;
    let backend = environment.backend(id).ok_or(Reason::NoControlConnection)?;
    opening.client = parsed.destination();
    opening.key = FlowKey {
        source: reply.destination,
        source_port: reply.destination_port,
        destination_port: reply.source_port,
        ..*reply
    };
    let control = control(environment, backend.service, opening, now);
    if !control.exists() || control.entry.flow().backend != id {
        return Err(Reason::NoControlConnection);
    }
    let request = control.entry.flow();
    let (twin, _) = table::twin(environment, &control).ok_or(Reason::NoControlConnection)?;
    opening.key.destination = request.key.destination;
    opening.neighbour = request.neighbour;
    opening.ingress = request.via;
    opening.port = twin.flow().via;
    let service = environment.service(&service_key(&opening.key)).ok_or(Reason::NoControlConnection)?;
    opening.service = *service;
    leave_other(environment, &opening.key, id, now);
    opening.choice = choice(environment, &opening.key, id, now)?;
    Ok(())
}

/// Ends what is left of media between the same ports that another backend had: the control connection has moved since.
#[inline(always)]
fn leave_other<E: Environment>(environment: &E, key: &FlowKey, id: BackendId, now: u32) {
    let former = table::find(environment, key, table::hash(environment, key));
    if former.exists() && former.entry.flow().backend != id {
        environment.end(&former, now);
    }
}

#[inline(always)]
fn choice<E: Environment>(environment: &E, key: &FlowKey, id: BackendId, now: u32) -> Result<Choice, Reason> {
    let backend = environment.backend(id).ok_or(Reason::NoControlConnection)?;
    let reply = reply_key(environment, key, backend, key.destination_port, Source::of(key));
    if environment.is_free(&reply, now) { Ok(Choice::plain(id)) } else { Err(Reason::ReplyCollision) }
}

/// The live control connection of the client whose flow is being opened: the entry of its request direction.
#[inline(always)]
fn control<E: Environment>(environment: &E, service: ServiceId, opening: &Opening, now: u32) -> Found {
    let remembered = environment.remembered(&client(service, &opening.client));
    let Some(entry) = table::entry_at(environment, remembered.entry) else { return Found::NOTHING };
    let found = Found { entry, index: remembered.entry, control: entry.control() };
    let flow = entry.flow();
    let is_it = remembered.stamp != 0
        && found.control.is_live()
        && !found.control.state().is_closing()
        && found.control.flags() & flags::REPLY == 0
        && flow.key.protocol == TCP
        && flow.key.source == opening.key.source
        && flow.service == service
        && !table::is_expired(environment, &found, now);
    if is_it { found } else { Found::NOTHING }
}
