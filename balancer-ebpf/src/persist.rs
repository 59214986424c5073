//! Clients that keep their backend over several flows.

use balancer_common::{
    Address, BackendId, ClientKey, Remembered, STAMP_SHIFT, Service, TIMEOUT_SHIFT, ability, client, option,
};

use crate::{Environment, media, open::Opening};

/// A number that no backend has.
pub const NOBODY: BackendId = BackendId::MAX;

/// The backend that the client had, if it is remembered and the backend may take it; else a number that no backend has.
#[inline(always)]
pub fn recall<E: Environment>(
    environment: &E,
    Opening { client, service, .. }: &Opening,
    now: u32,
) -> BackendId {
    if service.persistence_timeout == 0 {
        return NOBODY;
    }
    let Remembered { stamp, backend: id, .. } = environment.remembered(&client_key(service, client));
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
    Opening { client, service, choice, .. }: &Opening,
    entry: u32,
    now: u32,
) {
    // A stamp of 0 stands for nothing.
    let stamp = if now == 0 { 1 } else { now };
    let value = Remembered { stamp, entry, backend: choice.id, reserved: [0; 3] };
    if service.persistence_timeout != 0 {
        environment.remember(&client_key(service, client), &value);
    }
    if service.options & option::RTSP != 0 {
        environment.remember(&media::client(service.id, client), &value);
    }
}

#[inline(always)]
fn client_key(service: &Service, client: &Address) -> ClientKey {
    let address = leading(client, u32::from(service.persistence_prefix));
    ClientKey { address, service: service.id, kind: client::BACKEND, reserved: [0; 4] }
}

/// The first `prefix` bits of an address, of 128 or all; the others are 0.
#[inline(always)]
pub fn leading(address: &Address, prefix: u32) -> Address {
    let [high, low]: [u64; 2] = bytemuck::cast(*address);
    let [first, second] = match prefix {
        0..64 => [!(u64::MAX >> prefix), 0],
        64..128 => [u64::MAX, !(u64::MAX >> (prefix - 64))],
        _ => [u64::MAX; 2],
    };
    bytemuck::cast([high & first.to_be(), low & second.to_be()])
}
