//! Clients that keep their backend over several flows.

use balancer_common::{
    BackendId, ClientKey, FlowKey, Remembered, STAMP_SHIFT, Service, TIMEOUT_SHIFT, ability, client, option,
};

use crate::{Environment, media};

/// A number that no backend has.
const NOBODY: BackendId = BackendId::MAX;

/// The backend that the client had, if it is remembered and the backend may take it; else a number that no backend has.
#[inline(always)]
pub fn recall<E: Environment>(environment: &E, service: &Service, key: &FlowKey, now: u32) -> BackendId {
    if service.persistence_timeout == 0 {
        return NOBODY;
    }
    let Remembered { stamp, backend: id, .. } = environment.remembered(&client_key(service, key));
    let silence = now.wrapping_sub(stamp) as i32;
    let limit = u32::from(service.persistence_timeout) << (TIMEOUT_SHIFT - STAMP_SHIFT);
    if stamp == 0 || silence > limit as i32 {
        return NOBODY;
    }
    match environment.backend(id) {
        // Its number may have been given to a backend of another service since.
        Some(backend) if backend.service == service.id && backend.abilities & ability::TAKE != 0 => id,
        _ => NOBODY,
    }
}

/// Notes the backend of a client's newest flow, and where the flow is.
#[inline(always)]
pub fn note<E: Environment>(
    environment: &E,
    service: &Service,
    key: &FlowKey,
    (backend, entry): (BackendId, u32),
    now: u32,
) {
    // A stamp of 0 stands for nothing.
    let stamp = if now == 0 { 1 } else { now };
    let value = Remembered { stamp, entry, backend, reserved: [0; 3] };
    if service.persistence_timeout != 0 {
        environment.remember(&client_key(service, key), &value);
    }
    if service.options & option::RTSP != 0 {
        environment.remember(&media::client(service.id, key.source), &value);
    }
}

#[inline(always)]
fn client_key(service: &Service, key: &FlowKey) -> ClientKey {
    let prefix = u32::from(service.persistence_prefix & 63);
    let mask = if prefix >= 32 { u32::MAX } else { !(u32::MAX >> prefix) };
    let address = (u32::from_be_bytes(key.source) & mask).to_be_bytes();
    ClientKey { address, service: service.id, kind: client::BACKEND }
}
