//! The life of a flow, as a function of its control word.

use balancer_common::{
    Control, FlowState,
    FlowState::{BackendReset, BothReset, ClientReset, Closing, Established, HalfOpen, OneWay},
    TCP, UDP,
    flags::{ACTIVE, ANSWERED, FIN_REPLY, FIN_REQUEST, REPLY},
};
use proptest::{collection::vec, prelude::*};

use super::{
    cases,
    frame::{ACK, FIN, PSH, RST, SYN},
};
use crate::state::{
    Direction::{self, Reply, Request},
    after, may_change,
};

const SYN_ACK: u8 = SYN | ACK;
const FIN_ACK: u8 = FIN | ACK;
const BOTH: u8 = FIN_REQUEST | FIN_REPLY;

#[test]
fn a_packet_moves_a_flow_as_the_table_says() {
    type Row = (FlowState, u8, Direction, u8, FlowState, u8);
    #[rustfmt::skip]
    let rows: [Row; 44] = [
        // The handshake, and what is not one.
        (HalfOpen, ACTIVE, Request, SYN, HalfOpen, ACTIVE),
        (HalfOpen, ACTIVE, Reply, SYN_ACK, HalfOpen, ACTIVE | ANSWERED),
        (HalfOpen, ACTIVE | ANSWERED, Reply, SYN_ACK, HalfOpen, ACTIVE | ANSWERED),
        (HalfOpen, ACTIVE | ANSWERED, Request, SYN, HalfOpen, ACTIVE | ANSWERED),
        (HalfOpen, ACTIVE | ANSWERED, Request, ACK, Established, ACTIVE | ANSWERED),
        (HalfOpen, ACTIVE | ANSWERED, Request, ACK | PSH, Established, ACTIVE | ANSWERED),
        (HalfOpen, ACTIVE, Request, ACK, HalfOpen, ACTIVE),
        (HalfOpen, ACTIVE, Request, SYN_ACK, HalfOpen, ACTIVE),
        (HalfOpen, ACTIVE | ANSWERED, Request, SYN_ACK, HalfOpen, ACTIVE | ANSWERED),
        (HalfOpen, ACTIVE, Reply, ACK, HalfOpen, ACTIVE | ANSWERED),
        (Established, ACTIVE, Reply, ACK, Established, ACTIVE),
        (HalfOpen, ACTIVE | ANSWERED, Reply, ACK, HalfOpen, ACTIVE | ANSWERED),
        (HalfOpen, ACTIVE | ANSWERED, Request, FIN_ACK, Established, ACTIVE | ANSWERED | FIN_REQUEST),
        (HalfOpen, REPLY | ANSWERED, Request, ACK, Established, REPLY | ANSWERED),
        // The end, from either side.
        (Established, ACTIVE | ANSWERED, Request, FIN_ACK, Established, ACTIVE | ANSWERED | FIN_REQUEST),
        (Established, ACTIVE | FIN_REQUEST, Request, FIN_ACK, Established, ACTIVE | FIN_REQUEST),
        (Established, ACTIVE | FIN_REQUEST, Reply, FIN_ACK, Closing, BOTH),
        (Established, ACTIVE | FIN_REPLY, Request, FIN_ACK, Closing, BOTH),
        // A RST, from either side.
        (Established, ACTIVE, Reply, RST, BackendReset, 0),
        (HalfOpen, ACTIVE, Reply, RST | ACK, BackendReset, 0),
        (HalfOpen, ACTIVE, Request, RST, ClientReset, 0),
        (Established, ACTIVE | ANSWERED | FIN_REPLY, Request, RST | ACK, ClientReset, ANSWERED | FIN_REPLY),
        (ClientReset, ANSWERED, Request, RST, ClientReset, ANSWERED),
        (ClientReset, ANSWERED, Reply, RST, BothReset, ANSWERED),
        (BackendReset, ANSWERED, Request, RST, BothReset, ANSWERED),
        // What is under way from the other end says nothing; what comes from who has reset it all the same, does.
        (ClientReset, ANSWERED, Reply, ACK | PSH, ClientReset, ANSWERED),
        (BackendReset, ANSWERED, Request, ACK, BackendReset, ANSWERED),
        (ClientReset, ANSWERED, Request, ACK, Established, ACTIVE | ANSWERED),
        (ClientReset, REPLY | ANSWERED, Request, ACK, Established, REPLY | ANSWERED),
        (BackendReset, ANSWERED, Reply, ACK | PSH, Established, ACTIVE | ANSWERED),
        (BackendReset, ANSWERED, Reply, SYN_ACK, BackendReset, ANSWERED),
        (BothReset, ANSWERED, Request, ACK, BackendReset, ANSWERED),
        (BothReset, ANSWERED, Reply, ACK, ClientReset, ANSWERED),
        (HalfOpen, ACTIVE | ANSWERED, Reply, RST, BackendReset, 0),
        (ClientReset, 0, Reply, SYN_ACK, ClientReset, 0),
        (ClientReset, 0, Request, ACK, HalfOpen, ACTIVE),
        (ClientReset, ANSWERED, Request, FIN_ACK, Established, ACTIVE | ANSWERED | FIN_REQUEST),
        (ClientReset, ANSWERED | FIN_REPLY, Request, FIN_ACK, Closing, ANSWERED | BOTH),
        // Nothing brings a closed flow back, nor a live one to its beginning.
        (ClientReset, ANSWERED, Request, SYN, ClientReset, ANSWERED),
        (Closing, BOTH, Request, SYN, Closing, BOTH),
        (Closing, BOTH | ANSWERED, Request, ACK, Closing, BOTH | ANSWERED),
        (Closing, BOTH | ANSWERED, Request, RST, Closing, BOTH | ANSWERED),
        (Established, ACTIVE | ANSWERED, Request, SYN, Established, ACTIVE | ANSWERED),
        (Established, ACTIVE | ANSWERED, Request, ACK | PSH, Established, ACTIVE | ANSWERED),
    ];
    for (state, marks, direction, packet, next, next_marks) in rows {
        let control = Control::new(state, marks, 7);
        let result = after(control, direction, TCP, packet);
        assert_eq!(
            (result.state(), result.flags(), result.sequence()),
            (next, next_marks, 7),
            "{state:?} {marks:#b} {direction:?} {packet:#x}"
        );
    }
}

#[test]
fn a_second_datagram_makes_a_udp_flow_one_way_and_an_answer_establishes_it() {
    for (state, direction, next) in [
        (HalfOpen, Request, OneWay),
        (HalfOpen, Reply, Established),
        (OneWay, Request, OneWay),
        (OneWay, Reply, Established),
        (Established, Request, Established),
        (Established, Reply, Established),
    ] {
        let result = after(Control::new(state, ACTIVE, 7), direction, UDP, 0);
        assert_eq!(result, Control::new(next, ACTIVE, 7), "{state:?} {direction:?}");
    }
}

/// All that `after` can be asked about a live flow: one with both FINs is closing, a closing one is not active, and only UDP
/// goes one way.
fn all_questions() -> impl Iterator<Item = (Control, Direction, u8, u8)> {
    let states = [HalfOpen, Established, Closing, OneWay, ClientReset, BackendReset, BothReset];
    let controls =
        states.into_iter().flat_map(|state| (0..32).map(move |marks| Control::new(state, marks, 9)));
    let controls = controls.filter(|control| match control.state() {
        Closing => control.flags() & ACTIVE == 0,
        state if state.is_closing() => control.flags() & ACTIVE == 0 && control.flags() & BOTH != BOTH,
        // An established connection was answered, and a request's entry counts as long as it is open.
        Established => control.flags() & BOTH != BOTH && control.flags() & ANSWERED != 0,
        _ => control.flags() & BOTH != BOTH,
    });
    let controls = controls.filter(|control| {
        control.state().is_closing() || (control.flags() & REPLY == 0) == (control.flags() & ACTIVE != 0)
    });
    controls.flat_map(|control| {
        [Request, Reply].into_iter().flat_map(move |direction| {
            let segments = (0..=u8::MAX).map(move |packet| (control, direction, TCP, packet));
            // Parsing gives datagrams no flags.
            let segments = segments.filter(move |_| control.state() != OneWay);
            let is_reset = [ClientReset, BackendReset, BothReset].contains(&control.state());
            segments.chain((!is_reset).then_some((control, direction, UDP, 0)))
        })
    })
}

#[test]
fn the_hot_path_skips_nothing_that_changes_a_flow() {
    let mut skipped = 0;
    for (control, direction, protocol, packet) in all_questions() {
        let is_skipped = !may_change(control, direction, packet, false);
        let changes = after(control, direction, protocol, packet) != control;
        assert!(!(is_skipped && changes), "{control:x?} {direction:?} {protocol} {packet:#x}");
        // The first packet is no second one.
        let is_second = packet == 0 && direction == Request && control.state() == HalfOpen;
        assert_eq!(may_change(control, direction, packet, true), !is_skipped && !is_second);
        skipped += u32::from(is_skipped);
    }
    assert!(skipped > 1000, "{skipped}: a question that is always yes is none");
}

#[test]
fn the_invariants_hold_for_every_flow_and_packet() {
    for (control, direction, protocol, packet) in all_questions() {
        let next = after(control, direction, protocol, packet);
        let what = (control, direction, protocol, packet);
        let kept = |marks: u8| control.flags() & marks & !next.flags() == 0;
        let added = next.flags() & !control.flags();
        // Only ACTIVE goes; and with a RST, what tells that a handshake was under way.
        let is_reset = control.state() == HalfOpen && packet & RST != 0;
        assert!(kept(FIN_REQUEST | FIN_REPLY | REPLY) && (kept(ANSWERED) || is_reset), "{what:x?}");
        assert_eq!(added & REPLY, 0, "{what:x?}");
        assert_eq!(next.sequence(), control.sequence(), "{what:x?}");
        let is_active = next.flags() & (ACTIVE | REPLY) == ACTIVE;
        let is_open = !next.state().is_closing() && next.flags() & REPLY == 0;
        assert_eq!(is_active, is_open, "{what:x?}: the request's entry counts as long as it is open");
        // No way back but from a RST that was nobody's.
        let progress = |state| match state {
            HalfOpen => 0,
            OneWay => 1,
            Established => 2,
            _ => 3,
        };
        let comes_back = progress(next.state()) < progress(control.state());
        let is_taken_back =
            matches!((control.state(), direction), (ClientReset, Request) | (BackendReset, Reply))
                && packet & (SYN | RST | ACK) == ACK;
        assert!(!comes_back || is_taken_back, "{what:x?}: no way back");
        assert_eq!(after(next, direction, protocol, packet), next, "{what:x?}: a copy changes nothing");
        // Both entries of a flow make the same of a packet.
        let other = Control::new(control.state(), control.flags() ^ REPLY, 9);
        let other = after(other, direction, protocol, packet);
        let marks = |control: Control| control.flags() & !(REPLY | ACTIVE);
        assert_eq!((other.state(), marks(other)), (next.state(), marks(next)), "{what:x?}");
    }
}

proptest! {
    #![proptest_config(cases(2_000))]

    /// Two CPUs may apply the packets of the two directions to the two entries in different orders: flags and the end are
    /// the same, and only the moment of being established may differ, until the client's next segment.
    #[test]
    fn both_entries_come_to_the_same_end(
        directions in [0, 1].map(|_| vec(prop::sample::select(&[SYN, SYN_ACK, ACK, FIN_ACK, RST, RST | ACK][..]), 0..6)),
        orders in [0, 1].map(|_| vec(any::<bool>(), 12)),
        is_tcp: bool,
    ) {
        let protocol = if is_tcp { TCP } else { UDP };
        let run = |order: &[bool], marks| {
            let mut states = std::vec![Control::new(HalfOpen, marks, 3)];
            let mut left = directions.each_ref().map(|packets| packets.iter());
            for is_reply in order.iter().copied().chain([false, true].repeat(12)) {
                let direction = if is_reply { Reply } else { Request };
                let Some(packet) = left[usize::from(is_reply)].next() else { continue };
                let packet = if is_tcp { *packet } else { 0 };
                states.push(after(states[states.len() - 1], direction, protocol, packet));
            }
            states
        };
        let (one, other) = (run(&orders[0], ACTIVE), run(&orders[1], REPLY));
        let (last, other_last) = (one[one.len() - 1], other[other.len() - 1]);
        // Of a flow that has ended, nobody asks whether it was answered; where it did not end after all, that comes out with the
        // next answer.
        let has_reset = directions.iter().flatten().any(|packet| packet & RST != 0);
        let over = if last.state().is_closing() || has_reset { ANSWERED } else { 0 };
        prop_assert_eq!(last.flags() & !ACTIVE | over, other_last.flags() & !REPLY | over);
        let end = |control: Control| Some(control.state()).filter(|state| state.is_closing());
        prop_assert_eq!(end(last), end(other_last));
        let next = |control| after(control, Request, protocol, if is_tcp { ACK } else { 0 }).state();
        prop_assert!(over != 0 || next(last) == next(other_last));
        prop_assert_eq!(last.flags() & ACTIVE == 0, last.state().is_closing());
    }
}
