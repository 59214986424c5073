//! Requests and their answers: when a client waits for its backend, and for how long.
//!
//! An exchange begins with the first payload that the client sends while none is under way, and ends with the first
//! payload that the backend sends after it. What was sent before, and is sent again, begins and ends nothing: the sequence
//! numbers tell. Both entries of a flow carry the mark; a request is counted by whoever sets it in the request's entry, an
//! answer by whoever takes it from the reply's.

use balancer_common::{BackendId, Control, ResponseTimes, TCP, flags, response_bucket};

use crate::{
    Environment, Packet, packet,
    parse::Parsed,
    state::Direction,
    table::{self, Entry, Found},
};

/// Offset of the sequence number in a TCP header; the acknowledgement number follows it.
const TCP_SEQUENCE: usize = 4;

/// Whether a packet may begin or end an exchange: what the hot path asks first.
#[inline(always)]
pub fn may_change(control: Control, direction: Direction, payload: u16) -> bool {
    const BOTH: u8 = flags::FOLLOWED | flags::AWAITING;
    let wanted = match direction {
        Direction::Request => flags::FOLLOWED,
        Direction::Reply => BOTH,
    };
    control.flags() & BOTH == wanted && payload > 0
}

/// Notes where the requests of a new flow start.
#[inline(always)]
pub fn prepare<P: Packet>(packet: &P, parsed: &Parsed, found: &Found) {
    if found.control.flags() & flags::FOLLOWED != 0
        && let Some((sequence, _)) = sequences(packet, parsed)
    {
        found.entry.set_exchange(sequence);
    }
}

/// Begins or ends an exchange, if the packet is not an old one again.
#[inline(always)]
pub fn follow<P: Packet, E: Environment>(
    packet: &P,
    environment: &E,
    parsed: &Parsed,
    found: &Found,
    direction: Direction,
) {
    let Some((twin, sequence)) = table::twin(environment, found) else { return };
    let request = match direction {
        Direction::Request => found.entry,
        Direction::Reply => twin,
    };
    // Of a datagram nothing tells whether it is an old one.
    let (start, acknowledged) = sequences(packet, parsed).unwrap_or_default();
    let end = start.wrapping_add(u32::from(parsed.payload));
    let is_old = end.wrapping_sub(request.flow().exchange) as i32 <= 0;
    if parsed.key.protocol == TCP && is_old {
        return;
    }
    let own = found.control.sequence();
    let backend = found.entry.flow().backend;
    match direction {
        Direction::Request => begin(environment, backend, (found.entry, own), (twin, sequence), acknowledged),
        Direction::Reply => {
            end_exchange(environment, backend, (twin, sequence), (found.entry, own), acknowledged)
        }
    }
}

#[inline(always)]
fn begin<E: Environment>(
    environment: &E,
    backend: BackendId,
    (request, sequence): (Entry, u16),
    (reply, reply_sequence): (Entry, u16),
    expected: u32,
) {
    let now = environment.precise();
    if !request.mark(sequence, flags::AWAITING, 0) {
        return;
    }
    request.set_exchange(expected);
    reply.set_exchange(now);
    reply.mark(reply_sequence, flags::AWAITING, 0);
    if let Some(counters) = environment.counters(backend) {
        // SAFETY: counters are valid, aligned, and this CPU's own.
        unsafe { (*counters).asked = (*counters).asked.wrapping_add(1) };
    }
}

#[inline(always)]
fn end_exchange<E: Environment>(
    environment: &E,
    backend: BackendId,
    (request, sequence): (Entry, u16),
    (reply, reply_sequence): (Entry, u16),
    acknowledged: u32,
) {
    let time = environment.precise().wrapping_sub(reply.flow().exchange);
    // The reply's mark goes first: until the request's is gone too, no other exchange begins.
    if !reply.mark(reply_sequence, 0, flags::AWAITING) {
        return;
    }
    request.set_exchange(acknowledged);
    if !request.mark(sequence, 0, flags::AWAITING) {
        return;
    }
    if let Some(counters) = environment.counters(backend) {
        // SAFETY: counters are valid, aligned, and this CPU's own.
        unsafe { (*counters).answered = (*counters).answered.wrapping_add(1) };
    }
    if let Some(times) = environment.response_times(backend) {
        // SAFETY: valid, aligned, and this CPU's own.
        add(unsafe { &mut *times }, time);
    }
}

#[inline(always)]
fn add(times: &mut ResponseTimes, time: u32) {
    times.sum = times.sum.wrapping_add(u64::from(time));
    times.count = times.count.wrapping_add(1);
    if let Some(bucket) = times.histogram.get_mut(response_bucket(time)) {
        *bucket = bucket.wrapping_add(1);
    }
}

/// Sequence and acknowledgement number of a TCP segment.
#[inline(always)]
fn sequences<P: Packet>(packet: &P, parsed: &Parsed) -> Option<(u32, u32)> {
    if parsed.key.protocol != TCP {
        return None;
    }
    let [s0, s1, s2, s3, a0, a1, a2, a3]: [u8; 8] = packet::read(packet, parsed.l4 + TCP_SEQUENCE)?;
    Some((u32::from_be_bytes([s0, s1, s2, s3]), u32::from_be_bytes([a0, a1, a2, a3])))
}
