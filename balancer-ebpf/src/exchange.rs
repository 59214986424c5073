//! Requests and their answers: when a client waits for its backend, and for how long.
//!
//! An exchange begins with the first payload that the client sends while none is under way, and ends with the first
//! payload that the backend sends after it. What was sent before, and is sent again, begins and ends nothing: the sequence
//! numbers tell. Both entries of a flow carry the mark; a request is counted by whoever sets it in the request's entry, an
//! answer by whoever takes it from the reply's.

use balancer_common::{BackendId, Control, FlowState, ResponseTimes, TCP, flags, response_bucket};

use crate::{
    Environment, Packet,
    parse::Parsed,
    state::{Direction, Segment},
    table::{self, Entry, Found},
};

/// Whether a packet may begin or end an exchange: what the hot path asks first.
#[inline(always)]
pub fn may_change(control: Control, direction: Direction, payload: u16) -> bool {
    const BOTH: u8 = flags::FOLLOWED | flags::AWAITING;
    let wanted = match direction {
        Direction::Request | Direction::OneWay => flags::FOLLOWED,
        Direction::Reply => BOTH,
    };
    control.flags() & BOTH == wanted && payload > 0
}

/// Notes where the requests of a new flow start.
#[inline(always)]
pub fn prepare<P: Packet>(packet: &P, parsed: &Parsed, found: &Found) {
    if found.control.flags() & flags::FOLLOWED != 0 {
        found.entry.set_exchange(Segment::new(parsed, Direction::Request).numbers(packet).0);
    }
}

/// Begins or ends an exchange, if the packet of entry `index`, whose control word was `control`, is not an old one again.
#[inline(always)]
pub fn follow<P: Packet, E: Environment>(
    packet: &P,
    environment: &E,
    index: u32,
    control: Control,
    segment: Segment,
) {
    let Some(entry) = table::entry_at(environment, index) else { return };
    let Some((twin, sequence)) = table::twin(environment, &Found { entry, index, control }) else { return };
    // During the handshake, the same words are for its numbers.
    if segment.protocol == TCP && entry.control().state() as u8 == FlowState::HalfOpen as u8 {
        return;
    }
    let request = match segment.direction {
        Direction::Request | Direction::OneWay => entry,
        Direction::Reply => twin,
    };
    // Of a datagram nothing tells whether it is an old one.
    let (start, acknowledged) = segment.numbers(packet);
    let end = start.wrapping_add(u32::from(segment.payload));
    let is_old = end.wrapping_sub(request.flow().exchange) as i32 <= 0;
    if segment.protocol == TCP && is_old {
        return;
    }
    let own = control.sequence();
    let backend = entry.flow().backend;
    match segment.direction {
        Direction::Request | Direction::OneWay => {
            begin(environment, backend, (entry, own), (twin, sequence), acknowledged)
        }
        Direction::Reply => end_exchange(environment, backend, (twin, sequence), (entry, own), acknowledged),
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
