//! Media of RTSP services: UDP flows from and to the servers' data ports, which follow their client's control connection.

use balancer_common::{
    BackendId, ClientKey, FlowKey, Reason, ServiceId, ServiceKey, TCP, client, endpoint, flags,
};

use crate::{
    Environment,
    open::{self, Choice, Opening},
    parse::Parsed,
    source::{Source, reply_key},
    table::{self, Found},
};

/// Who the control connection of a client is remembered for.
#[inline(always)]
pub const fn client(service: ServiceId, address: [u8; 4]) -> ClientKey {
    ClientKey { address, service, kind: client::CONTROL }
}

/// Whom a client's media flow leads to: the backend that has its control connection, at the same data port.
#[inline(always)]
pub fn choose<E: Environment>(
    environment: &E,
    key: &FlowKey,
    service: ServiceId,
    now: u32,
) -> Result<Choice, Reason> {
    let control = control(environment, service, key.source, now);
    if !control.exists() {
        return Err(Reason::NoControlConnection);
    }
    choice(environment, key, control.entry.flow().backend, now)
}

/// What a packet opens that a backend sends from a data port: the same as if its client had sent the first one.
#[inline(always)]
pub fn answer<'a, E: Environment>(
    environment: &'a E,
    parsed: &Parsed,
    sender: u32,
    now: u32,
) -> Result<Opening<'a>, Reason> {
    let reply = &parsed.key;
    let id = (sender & !endpoint::MEDIA) as BackendId;
    let backend = environment.backend(id).ok_or(Reason::NoControlConnection)?;
    let control = control(environment, backend.service, reply.destination, now);
    if !control.exists() || control.entry.flow().backend != id {
        return Err(Reason::NoControlConnection);
    }
    let request = control.entry.flow();
    let (vip, neighbour, ingress) = (request.key.destination, request.neighbour, request.via);
    let (twin, _) = table::twin(environment, &control).ok_or(Reason::NoControlConnection)?;
    let key = FlowKey {
        source: reply.destination,
        destination: vip,
        source_port: reply.destination_port,
        destination_port: reply.source_port,
        ..*reply
    };
    let data_port =
        ServiceKey { address: vip, port: key.destination_port, protocol: key.protocol, reserved: 0 };
    let service = environment.service(&data_port).ok_or(Reason::NoControlConnection)?;
    let choice = choice(environment, &key, id, now)?;
    Ok(Opening { key, service, choice, neighbour, ingress, port: twin.flow().via })
}

#[inline(always)]
fn choice<E: Environment>(environment: &E, key: &FlowKey, id: BackendId, now: u32) -> Result<Choice, Reason> {
    let mut backend = environment.backend(id).ok_or(Reason::NoControlConnection)?;
    backend.port = key.destination_port;
    let is_free = open::is_free(environment, &reply_key(key, &backend, Source::of(key)), now);
    if is_free { Ok(Choice::plain(id)) } else { Err(Reason::ReplyCollision) }
}

/// The live control connection of a client: the entry of its request direction.
#[inline(always)]
fn control<E: Environment>(environment: &E, service: ServiceId, address: [u8; 4], now: u32) -> Found {
    let remembered = environment.remembered(&client(service, address));
    let Some(entry) = table::entry_at(environment, remembered.entry) else { return Found::NOTHING };
    let found = Found { entry, index: remembered.entry, control: entry.control() };
    let flow = entry.flow();
    let is_it = remembered.stamp != 0
        && found.control.is_live()
        && !found.control.state().is_closing()
        && found.control.flags() & flags::REPLY == 0
        && flow.key.protocol == TCP
        && flow.key.source == address
        && flow.service == service
        && !table::is_expired(environment, &found, now);
    if is_it { found } else { Found::NOTHING }
}
