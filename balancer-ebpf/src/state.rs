//! The life of a flow: what a packet makes of its state.

use balancer_common::{Control, FlowState, ServiceKey, TCP, flags};

use crate::{
    Environment, Packet, packet,
    parse::{Parsed, tcp},
    table::{self, Entry, Found},
};

/// Which way a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the service.
    Request,
    /// From the backend to the client.
    Reply,
}

/// What a flow's life and its exchanges depend on in a packet.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Which way it goes.
    pub direction: Direction,
    /// IP protocol number.
    pub protocol: u8,
    /// TCP flags (`tcp::*`); 0 for UDP.
    pub tcp_flags: u8,
    /// Bytes that the application sent.
    pub payload: u16,
    /// Offset of its TCP or UDP header in the frame.
    pub l4: u16,
}

/// Offset of the sequence number in a TCP header; the acknowledgement number follows it.
const TCP_SEQUENCE: usize = 4;

impl Segment {
    /// What a parsed packet is.
    #[inline(always)]
    pub const fn new(parsed: &Parsed, direction: Direction) -> Segment {
        Segment {
            direction,
            protocol: parsed.key.protocol,
            tcp_flags: parsed.tcp_flags,
            payload: parsed.payload,
            l4: parsed.l4 as u16,
        }
    }

    /// Sequence and acknowledgement number of a TCP segment; of a datagram, 0.
    #[inline(always)]
    pub fn numbers<P: Packet>(self, packet: &P) -> (u32, u32) {
        if self.protocol != TCP {
            return (0, 0);
        }
        // Bounded for the verifier: headers are shorter.
        let place = usize::from(self.l4 & 0x7ff) + TCP_SEQUENCE;
        let [s0, s1, s2, s3, a0, a1, a2, a3]: [u8; 8] = packet::read(packet, place).unwrap_or_default();
        (u32::from_be_bytes([s0, s1, s2, s3]), u32::from_be_bytes([a0, a1, a2, a3]))
    }

    /// As one number: what a function of the kernel's program takes.
    #[inline(always)]
    pub const fn to_number(self) -> u64 {
        let is_reply = match self.direction {
            Direction::Request => 0,
            Direction::Reply => 1,
        };
        (self.l4 as u64) << 48
            | (self.payload as u64) << 32
            | (self.tcp_flags as u64) << 16
            | (self.protocol as u64) << 8
            | is_reply
    }

    /// By its number.
    #[inline(always)]
    pub const fn from_number(number: u64) -> Segment {
        Segment {
            direction: if number & 1 == 0 { Direction::Request } else { Direction::Reply },
            protocol: (number >> 8) as u8,
            tcp_flags: (number >> 16) as u8,
            payload: (number >> 32) as u16,
            l4: (number >> 48) as u16,
        }
    }
}

/// The control word of an entry after a packet of its flow.
///
/// It is applied to both entries of the flow, on any CPU: flags are only added, and the end follows from them, so
/// both entries come to it whatever the order of the packets. An entry that has seen a stray ACK after the
/// SYN-ACK and one that has seen it before differ until the client's next segment. A flow that closes leaves
/// the active count (`flags::ACTIVE` goes); whoever writes that change counts it.
#[inline(always)]
pub fn after(control: Control, direction: Direction, protocol: u8, tcp_flags: u8) -> Control {
    let mut state = control.state();
    let mut marks = control.flags();
    if protocol == TCP {
        let (fin, established_by) = match direction {
            Direction::Request => (flags::FIN_REQUEST, tcp_flags & (tcp::SYN | tcp::ACK) == tcp::ACK),
            Direction::Reply => (flags::FIN_REPLY, false),
        };
        // A SYN-ACK; or of a flow that was opened in the middle of its connection, any segment that goes on with it.
        let answers = tcp_flags & (tcp::ACK | tcp::RST) == tcp::ACK
            && (tcp_flags & tcp::SYN != 0 || state as u8 == FlowState::HalfOpen as u8);
        if direction == Direction::Reply && answers {
            marks |= flags::ANSWERED;
        }
        if tcp_flags & tcp::FIN != 0 {
            marks |= fin;
        }
        const BOTH: u8 = flags::FIN_REQUEST | flags::FIN_REPLY;
        if tcp_flags & tcp::RST != 0 || marks & BOTH == BOTH {
            state = FlowState::Closing;
            marks &= !(flags::ACTIVE | flags::AWAITING);
        } else if state as u8 == FlowState::HalfOpen as u8 && established_by && marks & flags::ANSWERED != 0 {
            state = FlowState::Established;
        }
    } else if matches!(state, FlowState::HalfOpen | FlowState::OneWay) {
        state = match direction {
            Direction::Request => FlowState::OneWay,
            Direction::Reply => FlowState::Established,
        };
    }
    Control::new(state, marks, control.sequence())
}

/// Whether [`after`] can change anything, and is to: what the hot path asks first. The datagram that opened a flow is no
/// second one.
#[inline(always)]
pub fn may_change(control: Control, direction: Direction, tcp_flags: u8, is_first: bool) -> bool {
    let is_datagram = tcp_flags == 0;
    let is_reply = matches!(direction, Direction::Reply);
    tcp_flags & (tcp::SYN | tcp::FIN | tcp::RST) != 0
        || (control.state() as u8 == FlowState::HalfOpen as u8
            && (is_reply || tcp_flags & tcp::ACK != 0 || (is_datagram && !is_first)))
        || (control.state() as u8 == FlowState::OneWay as u8 && is_reply)
}

/// Moves both entries of a flow to the state that a packet of entry `index` brings about, whose control word was `control`.
#[inline(always)]
pub fn advance<E: Environment>(environment: &E, index: u32, control: Control, segment: Segment) {
    let Some(entry) = table::entry_at(environment, index) else { return };
    let twin = entry.flow().twin;
    advance_entry(environment, entry, index, control.sequence(), segment);
    if let Some((entry, sequence)) = table::twin(environment, &Found { entry, index, control }) {
        advance_entry(environment, entry, twin, sequence, segment);
    }
}

#[inline(always)]
fn advance_entry<E: Environment>(environment: &E, entry: Entry, index: u32, sequence: u16, segment: Segment) {
    for _ in 0..table::TRIES {
        let before = entry.control();
        if !before.is_live() || before.sequence() != sequence {
            return;
        }
        let after = after(before, segment.direction, segment.protocol, segment.tcp_flags);
        if after == before {
            return;
        }
        if entry.exchange(before, after) {
            settle(environment, entry, index, before, after);
            return;
        }
    }
}

/// Whether a flow in this state gives way to a new one only when it has been idle.
#[inline(always)]
const fn is_protected(state: FlowState) -> bool {
    matches!(state, FlowState::Established | FlowState::OneWay)
}

/// What follows from a change of state: the active count, the protection, and the timeout.
#[inline(always)]
fn settle<E: Environment>(environment: &E, entry: Entry, index: u32, before: Control, after: Control) {
    let flow = entry.flow();
    table::count_ended(environment, flow.backend, before, after);
    if before.state() as u8 == after.state() as u8 {
        return;
    }
    table::protect(environment, index, is_protected(after.state()));
    let is_request = after.flags() & flags::REPLY == 0;
    let (address, port) = if is_request {
        (flow.key.destination, flow.key.destination_port)
    } else {
        (flow.new_source, flow.new_source_port)
    };
    let key = ServiceKey { address, port, protocol: flow.key.protocol, reserved: 0 };
    let Some(service) = environment.service(&key) else { return };
    let timeout = match after.state() {
        FlowState::Closing => service.closing_timeout,
        _ => service.idle_timeout,
    };
    entry.set_timeout(timeout);
}
