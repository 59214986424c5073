//! The life of a flow: what a packet makes of its state.

use balancer_common::{Control, FlowState, TCP, flags};

use crate::parse::tcp;

/// Which way a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the service.
    Request,
    /// From the backend to the client.
    Reply,
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
    } else if direction == Direction::Reply && state as u8 == FlowState::HalfOpen as u8 {
        state = FlowState::Established;
    }
    Control::new(state, marks, control.sequence())
}

/// Whether [`after`] can change anything: what the hot path asks first.
#[inline(always)]
pub fn may_change(control: Control, direction: Direction, tcp_flags: u8) -> bool {
    tcp_flags & (tcp::SYN | tcp::FIN | tcp::RST) != 0
        || (control.state() as u8 == FlowState::HalfOpen as u8
            && (direction == Direction::Reply || tcp_flags & tcp::ACK != 0))
}
