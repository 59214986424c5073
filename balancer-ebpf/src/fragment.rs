//! Fragments: only the first one of a datagram has ports, so where it went is remembered, and the rest follows it.
//!
//! That holds for what is not ours as well: the rest of a datagram to a port of the host itself, at a service's address,
//! must pass as its first fragment did.

use balancer_common::{FRAGMENT_TIME, Fragment, NO_TWIN, Reason};

use crate::{
    Environment, Packet,
    parse::{fragment_key, rest},
    process::{self, Step},
    table::Found,
};

/// Notes which flow the first fragment of a datagram belongs to. The packet must be as it arrived.
#[inline(always)]
pub fn remember<P: Packet, E: Environment>(packet: &P, environment: &E, entry: u32, sequence: u16) {
    let Some(key) = fragment_key(packet, environment) else { return };
    // A stamp of 0 stands for nothing.
    let now = environment.now();
    let stamp = if now == 0 { 1 } else { now };
    environment.set_fragment(&key, &Fragment { entry, stamp, sequence, reserved: [0; 3] });
}

/// Notes that the rest of a datagram is none of ours, if by its addresses it could be.
#[inline(always)]
pub fn pass<P: Packet, E: Environment>(packet: &P, environment: &E) {
    if process::is_ours(packet, environment) {
        remember(packet, environment, NO_TWIN, 0);
    }
}

/// Sends a fragment that is not the first one where that went.
#[inline(always)]
pub fn forward<P: Packet, E: Environment>(packet: &P, environment: &E) -> Step {
    let Some(key) = fragment_key(packet, environment) else { return Step::Foreign };
    let now = environment.now();
    let Fragment { entry, stamp, sequence, .. } = environment.fragment(&key);
    if stamp == 0 || now.wrapping_sub(stamp) as i32 > FRAGMENT_TIME as i32 {
        return Step::Unusable(Reason::Fragment);
    }
    if entry == NO_TWIN {
        return Step::Foreign;
    }
    let found = Found::now(environment, entry);
    if !found.exists()
        || !found.control.is_live()
        || found.control.sequence() != sequence
        || found.entry.flow().key.family != key.family
    {
        return Step::Unusable(Reason::Fragment);
    }
    let Some(parsed) = rest(packet, found.entry.flow().key) else { return Step::Foreign };
    if !process::is_its(environment, &parsed, &found) {
        return Step::Unusable(Reason::Fragment);
    }
    match process::carry(packet, environment, &parsed, &found, false, now) {
        Ok(step) | Err(step) => step,
    }
}
