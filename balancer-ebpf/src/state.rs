//! The life of a flow: what a packet makes of its state.

use balancer_common::{Control, FlowState, NO_TWIN, ServiceKey, TCP, flags};

use crate::{
    Environment, Packet, packet,
    parse::{Parsed, tcp},
    rounds::Rounds,
    table::{self, Entry, Found},
};

/// Which way a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the service.
    Request,
    /// From the backend to the client.
    Reply,
    /// From the client to the service, whose replies go to the client past the balancer.
    OneWay,
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
        let direction = match self.direction {
            Direction::Request => 0,
            Direction::Reply => 1,
            Direction::OneWay => 2,
        };
        (self.l4 as u64) << 48
            | (self.payload as u64) << 32
            | (self.tcp_flags as u64) << 16
            | (self.protocol as u64) << 8
            | direction
    }

    /// By its number.
    #[inline(always)]
    pub const fn from_number(number: u64) -> Segment {
        Segment {
            direction: match number & 3 {
                0 => Direction::Request,
                1 => Direction::Reply,
                _ => Direction::OneWay,
            },
            protocol: (number >> 8) as u8,
            tcp_flags: (number >> 16) as u8,
            payload: (number >> 32) as u16,
            l4: (number >> 48) as u16,
        }
    }
}

/// The control word of an entry after a packet of its flow.
///
/// It is applied to both entries of the flow, on any CPU: each direction adds its own flags, and takes back its own RST only,
/// and the end follows from these, so both entries come to it whatever the order of packets of unlike directions. An entry
/// that has seen a stray ACK after the SYN-ACK and one that has seen it before differ until the client's next segment. A
/// flow that closes leaves the active count (`flags::ACTIVE` goes), and one that was not closed after all comes back to it;
/// whoever writes that change counts it.
#[inline(always)]
pub fn after(control: Control, direction: Direction, protocol: u8, tcp_flags: u8) -> Control {
    after_with(control, direction, protocol, tcp_flags, 0)
}

/// The same, where these RSTs (`BY_CLIENT`, `BY_BACKEND`) are known to be taken back.
#[inline(always)]
fn after_with(
    control: Control,
    direction: Direction,
    protocol: u8,
    tcp_flags: u8,
    taken_back: u8,
) -> Control {
    let (state, marks) = if protocol == TCP {
        after_segment(control, direction, tcp_flags, taken_back)
    } else {
        (after_datagram(control.state(), direction), control.flags())
    };
    Control::new(state, marks, control.sequence())
}

#[inline(always)]
const fn after_datagram(state: FlowState, direction: Direction) -> FlowState {
    match (state, direction) {
        (FlowState::HalfOpen, Direction::Request) => FlowState::OneWay,
        (FlowState::HalfOpen | FlowState::OneWay, Direction::Reply) => FlowState::Established,
        // There is no answer to be seen.
        (FlowState::HalfOpen, Direction::OneWay) => FlowState::Established,
        _ => state,
    }
}

#[inline(always)]
const fn after_segment(
    control: Control,
    direction: Direction,
    tcp_flags: u8,
    taken_back: u8,
) -> (FlowState, u8) {
    const BOTH: u8 = flags::FIN_REQUEST | flags::FIN_REPLY;
    let before = control.state();
    let mut marks = control.flags();
    let is_reply = matches!(direction, Direction::Reply);
    let goes_on = tcp_flags & (tcp::ACK | tcp::RST) == tcp::ACK;
    let is_syn = tcp_flags & tcp::SYN != 0;
    if tcp_flags & tcp::FIN != 0 {
        marks |= match direction {
            Direction::Request => flags::FIN_REQUEST,
            Direction::Reply => flags::FIN_REPLY,
            // That of the other end is not seen.
            Direction::OneWay => BOTH,
        };
    }
    let mut resets = resets(before) & !taken_back;
    let own = by(direction);
    if tcp_flags & tcp::RST != 0 {
        resets |= own;
        // So that it tells afterwards whether the flow was established.
        if matches!(before, FlowState::HalfOpen) {
            marks &= !flags::ANSWERED;
        }
    } else if goes_on && !is_syn {
        // Who has reset a connection sends nothing more of it.
        resets &= !own;
    }
    let state = if marks & BOTH == BOTH || matches!(before, FlowState::Closing) {
        FlowState::Closing
    } else if resets != 0 {
        match resets {
            BY_CLIENT => FlowState::ClientReset,
            BY_BACKEND => FlowState::BackendReset,
            _ => FlowState::BothReset,
        }
    } else if matches!(before, FlowState::Established)
        || marks & flags::ANSWERED != 0 && (before.is_closing() || (!is_reply && goes_on && !is_syn))
    {
        FlowState::Established
    } else {
        FlowState::HalfOpen
    };
    // A SYN-ACK; or of a flow that was opened in the middle of its connection, any segment that goes on with it.
    let shows_backend = match direction {
        Direction::Request => false,
        Direction::Reply => true,
        Direction::OneWay => !is_syn,
    };
    if shows_backend && goes_on && matches!(state, FlowState::HalfOpen) {
        marks |= flags::ANSWERED;
    }
    if state.is_closing() {
        marks &= !(flags::ACTIVE | flags::AWAITING);
    } else if before.is_closing() && marks & flags::REPLY == 0 {
        marks |= flags::ACTIVE;
    }
    (state, marks)
}

const BY_CLIENT: u8 = 1;
const BY_BACKEND: u8 = 2;

/// Who sends in this direction.
#[inline(always)]
const fn by(direction: Direction) -> u8 {
    match direction {
        Direction::Request | Direction::OneWay => BY_CLIENT,
        Direction::Reply => BY_BACKEND,
    }
}

/// Who has sent a RST, and nothing since.
#[inline(always)]
const fn resets(state: FlowState) -> u8 {
    match state {
        FlowState::ClientReset => BY_CLIENT,
        FlowState::BackendReset => BY_BACKEND,
        FlowState::BothReset => BY_CLIENT | BY_BACKEND,
        _ => 0,
    }
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
        || control.state() as u8 >= FlowState::ClientReset as u8
}

/// Moves both entries of a flow to the state that a packet of entry `index` brings about, whose control word was `control`.
///
/// What a direction has reset and taken back is known first in the entry of its own packets. The other entry may have been
/// told of both by two CPUs, and in the wrong order, so it follows.
#[inline(always)]
pub fn advance<P: Packet, E: Environment>(
    packet: &P,
    environment: &E,
    index: u32,
    control: Control,
    segment: Segment,
) {
    let Some(entry) = table::entry_at(environment, index) else { return };
    let (mut other_index, mut other_sequence, mut taken_back) = (NO_TWIN, 0, 0);
    if let Some((other, sequence)) = table::twin(environment, &Found { entry, index, control }) {
        if control.state() as u8 == FlowState::HalfOpen as u8
            && segment.protocol == TCP
            && !shakes_hands(packet, entry, other, segment)
        {
            return;
        }
        (other_index, other_sequence) = (entry.flow().twin, sequence);
        taken_back = !(resets(other.control().state()) | by(segment.direction));
    }
    let (mut index, mut sequence) = (index, control.sequence());
    for _ in Rounds::new(2) {
        let Some(entry) = table::entry_at(environment, index) else { return };
        advance_entry(environment, (entry, index), sequence, segment, taken_back);
        (index, sequence, taken_back) = (other_index, other_sequence, 0);
    }
}

/// Notes what a SYN-ACK asks the client to acknowledge, or says whether the client does: who only claims to be there can't
/// know it. Without a SYN-ACK there is nothing to be known. Of several SYNs the last says where the requests start.
#[inline(always)]
fn shakes_hands<P: Packet>(packet: &P, entry: Entry, other: Entry, segment: Segment) -> bool {
    let (sequence, acknowledged) = segment.numbers(packet);
    match (segment.direction, segment.tcp_flags & (tcp::SYN | tcp::ACK | tcp::RST)) {
        (Direction::Reply, SYN_ACK) => {
            // Never 0, which stands for none: one less in that case.
            entry.set_exchange(sequence.saturating_add(1));
            true
        }
        (Direction::Request, tcp::SYN) => {
            entry.set_exchange(sequence);
            true
        }
        (Direction::Request, tcp::ACK) => {
            let expected = other.flow().exchange;
            expected == 0 || acknowledged.wrapping_sub(expected) < SENT_EARLY
        }
        _ => true,
    }
}

const SYN_ACK: u8 = tcp::SYN | tcp::ACK;

/// How many bytes a backend may have sent before the handshake is complete, at most (RFC 7413).
const SENT_EARLY: u32 = 1 << 16;

#[inline(always)]
fn advance_entry<E: Environment>(
    environment: &E,
    (entry, index): (Entry, u32),
    sequence: u16,
    segment: Segment,
    taken_back: u8,
) {
    for _ in Rounds::new(table::TRIES) {
        let before = entry.control();
        if !before.is_live() || before.sequence() != sequence {
            return;
        }
        let after = after_with(before, segment.direction, segment.protocol, segment.tcp_flags, taken_back);
        if after == before {
            return;
        }
        if entry.exchange(before, after) {
            table::count_change(environment, entry.flow().backend, before, after);
            if before.state() as u8 != after.state() as u8 {
                settle(environment, entry, index, after);
            }
            return;
        }
    }
}

/// What goes with a state: which of three timeouts (half open, idle, closing), and whether a flow gives way to a new one
/// only when it has been idle.
const fn company(state: FlowState) -> (u64, bool) {
    match state {
        FlowState::Free | FlowState::Busy | FlowState::Opening | FlowState::HalfOpen => (0, false),
        FlowState::Established | FlowState::OneWay => (1, true),
        FlowState::Closing | FlowState::ClientReset | FlowState::BackendReset | FlowState::BothReset => {
            (2, false)
        }
    }
}

/// The same for all states, 4 bits each, the timeout in the lower three: no branch that the verifier would have to follow.
const COMPANIES: u64 = {
    let mut companies = 0;
    let mut number = 0;
    while number < 16 {
        let (timeout, is_protected) = company(Control(number).state());
        companies |= (timeout | (is_protected as u64) << 3) << (number * 4);
        number += 1;
    }
    companies
};

/// Gives an entry the protection and the timeout of its state. Another CPU may change that meanwhile, and be done with it
/// before this one: so until it stays as it is.
#[inline(always)]
fn settle<E: Environment>(environment: &E, entry: Entry, index: u32, control: Control) {
    let flow = entry.flow();
    let is_request = control.flags() & flags::REPLY == 0;
    let (address, port) = if is_request {
        (flow.key.destination, flow.key.destination_port)
    } else {
        (flow.new_source, flow.new_source_port)
    };
    let key = ServiceKey { address, port, protocol: flow.key.protocol, family: flow.key.family };
    // Without the service, which is no more, things stay as they are.
    let mut timeouts = u64::from(flow.timeout) * 0x1_0001_0001;
    if let Some(service) = environment.service(&key) {
        timeouts = u64::from(service.half_open_timeout)
            | u64::from(service.idle_timeout) << 16
            | u64::from(service.closing_timeout) << 32;
    }
    let mut now = control;
    for _ in Rounds::new(table::TRIES) {
        let company = COMPANIES >> (u64::from(now.0 & 15) * 4);
        table::protect(environment, index, company & 8 != 0);
        if entry.control().sequence() == control.sequence() {
            entry.set_timeout((timeouts >> ((company & 3) * 16)) as u16);
        }
        let before = now;
        now = entry.control();
        if now.0 as u8 == before.0 as u8 {
            return;
        }
    }
}
