//! The life of a flow, as a function of its control word.

use std::vec::Vec;

use balancer_common::{
    Control, FlowState,
    FlowState::{Closing, Established, HalfOpen, OneWay},
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
    let rows: [Row; 26] = [
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
        (HalfOpen, ACTIVE, Reply, RST | ACK, Closing, 0),
        (Established, ACTIVE, Reply, ACK, Established, ACTIVE),
        (HalfOpen, ACTIVE | ANSWERED, Reply, ACK, HalfOpen, ACTIVE | ANSWERED),
        (HalfOpen, ACTIVE | ANSWERED, Request, FIN_ACK, Established, ACTIVE | ANSWERED | FIN_REQUEST),
        (HalfOpen, REPLY | ANSWERED, Request, ACK, Established, REPLY | ANSWERED),
        // The end, from either side.
        (Established, ACTIVE | ANSWERED, Request, FIN_ACK, Established, ACTIVE | ANSWERED | FIN_REQUEST),
        (Established, ACTIVE | FIN_REQUEST, Request, FIN_ACK, Established, ACTIVE | FIN_REQUEST),
        (Established, ACTIVE | FIN_REQUEST, Reply, FIN_ACK, Closing, BOTH),
        (Established, ACTIVE | FIN_REPLY, Request, FIN_ACK, Closing, BOTH),
        (Established, ACTIVE, Reply, RST, Closing, 0),
        (HalfOpen, ACTIVE, Reply, RST | ACK, Closing, 0),
        (HalfOpen, ACTIVE, Request, RST, Closing, 0),
        // Nothing brings a closed flow back, nor a live one to its beginning.
        (Closing, BOTH, Request, SYN, Closing, BOTH),
        (Closing, BOTH | ANSWERED, Request, ACK, Closing, BOTH | ANSWERED),
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
    let states = [HalfOpen, Established, Closing, OneWay];
    let controls =
        states.into_iter().flat_map(|state| (0..32).map(move |marks| Control::new(state, marks, 9)));
    let controls = controls.filter(|control| match control.state() {
        Closing => control.flags() & ACTIVE == 0,
        _ => control.flags() & BOTH != BOTH,
    });
    controls.flat_map(|control| {
        [Request, Reply].into_iter().flat_map(move |direction| {
            let segments = (0..=u8::MAX).map(move |packet| (control, direction, TCP, packet));
            // Parsing gives datagrams no flags.
            let segments = segments.filter(move |_| control.state() != OneWay);
            segments.chain([(control, direction, UDP, 0)])
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
    assert!(skipped > 2000, "{skipped}: a question that is always yes is none");
}

#[test]
fn the_invariants_hold_for_every_flow_and_packet() {
    for (control, direction, protocol, packet) in all_questions() {
        let next = after(control, direction, protocol, packet);
        let what = (control, direction, protocol, packet);
        let kept = |marks: u8| control.flags() & marks & !next.flags() == 0;
        let added = next.flags() & !control.flags();
        assert!(kept(FIN_REQUEST | FIN_REPLY | ANSWERED | REPLY), "{what:x?}: only ACTIVE goes");
        assert_eq!(added & (ACTIVE | REPLY), 0, "{what:x?}: ACTIVE never comes back");
        assert_eq!(next.sequence(), control.sequence(), "{what:x?}");
        let progress = |state| {
            [HalfOpen, OneWay, Established, Closing].iter().position(|other| *other == state).unwrap()
        };
        assert!(progress(next.state()) >= progress(control.state()), "{what:x?}: no way back");
        if control.flags() & ACTIVE != 0 && next.flags() & ACTIVE == 0 {
            assert_eq!(next.state(), Closing, "{what:x?}: what is not active any more is closing");
        }
        if next.state() == Closing && next != control && control.state() != Closing {
            assert_eq!(next.flags() & ACTIVE, 0, "{what:x?}: what closes is not active");
        }
        assert_eq!(after(next, direction, protocol, packet), next, "{what:x?}: a copy changes nothing");
        // Both entries of a flow make the same of a packet.
        let other = Control::new(control.state(), control.flags() ^ REPLY, 9);
        let other = after(other, direction, protocol, packet);
        assert_eq!((other.state(), other.flags() ^ REPLY), (next.state(), next.flags()), "{what:x?}");
    }
}

proptest! {
    #![proptest_config(cases(2_000))]

    /// Two CPUs may apply packets to the two entries in different orders: flags and the end are the same, and only
    /// the moment of being established may differ, until the client's next segment.
    #[test]
    fn both_entries_come_to_the_same_end(
        packets in vec((prop::bool::ANY, prop::sample::select(&[SYN, SYN_ACK, ACK, FIN_ACK, RST, RST | ACK][..])), 0..12)
            .prop_flat_map(|packets| (Just(packets.clone()), Just(packets).prop_shuffle())),
        is_tcp: bool,
    ) {
        let protocol = if is_tcp { TCP } else { UDP };
        let run = |packets: &[(bool, u8)], marks| {
            let mut states = std::vec![Control::new(HalfOpen, marks, 3)];
            for (is_request, packet) in packets {
                let (direction, packet) = (if *is_request { Request } else { Reply }, if is_tcp { *packet } else { 0 });
                states.push(after(states[states.len() - 1], direction, protocol, packet));
            }
            states
        };
        let (one, other) = (run(&packets.0, ACTIVE), run(&packets.1, REPLY));
        let (last, other_last) = (one[one.len() - 1], other[other.len() - 1]);
        // Of a flow that has ended, nobody asks whether it was answered.
        let over = if last.state() == Closing { ANSWERED } else { 0 };
        prop_assert_eq!(last.flags() & !ACTIVE | over, other_last.flags() & !REPLY | over);
        prop_assert_eq!(last.state() == Closing, other_last.state() == Closing);
        let next = |control| after(control, Request, protocol, if is_tcp { ACK } else { 0 }).state();
        prop_assert_eq!(next(last), next(other_last));

        let active: Vec<bool> = one.iter().map(|control| control.flags() & ACTIVE != 0).collect();
        prop_assert!(active.windows(2).all(|pair| pair[0] || !pair[1]), "the active count is left once");
        prop_assert_eq!(last.flags() & ACTIVE == 0, last.state() == Closing);
    }
}
