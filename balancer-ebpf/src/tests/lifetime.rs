//! How long a flow lives, and what comes after it.

use std::vec;

use balancer_common::{FlowState::Established, Reason};

use super::{
    bed::{Bed, CLIENT, FIN_ACK, SYN_ACK, UNIT, VIP, answer, datagram, to_client, to_vip},
    frame::{ACK, Frame, PSH, RST, SYN},
};
use crate::Verdict;

/// One way of keeping a flow alive, and how long it lasts.
struct Life {
    what: &'static str,
    /// The packets that bring the flow into its state: (from the client, flags), flags 0 for UDP.
    packets: &'static [(bool, u8)],
    /// A packet of each direction that leaves it there.
    request: u8,
    reply: u8,
    timeout: u16,
}

const LIVES: [Life; 5] = [
    Life {
        what: "half open",
        packets: &[(true, SYN)],
        request: SYN,
        reply: SYN_ACK,
        timeout: Bed::TCP_SERVICE.half_open_timeout,
    },
    Life {
        what: "established",
        packets: &[(true, SYN), (false, SYN_ACK), (true, ACK)],
        request: ACK,
        reply: ACK,
        timeout: Bed::TCP_SERVICE.idle_timeout,
    },
    Life {
        what: "closing after two FINs",
        packets: &[(true, SYN), (false, SYN_ACK), (true, FIN_ACK), (false, FIN_ACK)],
        request: ACK,
        reply: ACK,
        timeout: Bed::TCP_SERVICE.closing_timeout,
    },
    Life {
        what: "closing after a reset",
        packets: &[(true, SYN), (false, RST | ACK)],
        request: ACK,
        reply: RST,
        timeout: Bed::TCP_SERVICE.closing_timeout,
    },
    Life {
        what: "UDP",
        packets: &[(true, 0), (false, 0)],
        request: 0,
        reply: 0,
        timeout: Bed::UDP_SERVICE.idle_timeout,
    },
];

impl Life {
    fn send(&self, bed: &Bed, is_request: bool, flags: u8) {
        match (is_request, flags) {
            (true, 0) => assert_eq!(bed.request(&datagram()), 0, "{}", self.what),
            (false, 0) => bed.reply(&answer(0), VIP),
            (true, flags) => assert_eq!(bed.request(&to_vip(flags)), 0, "{}", self.what),
            (false, flags) => bed.reply(&to_client(0, flags), VIP),
        }
    }
}

both! {
/// Timeouts are judged at lookup, to the stamp, refreshed by either direction, and across the wrap of the clock.
fn a_flow_lives_exactly_as_long_as_its_timeout() {
    for life in LIVES {
        for start in [1_000, 0, u32::MAX, u32::MAX - u32::from(life.timeout) * UNIT, 1 << 31] {
            for refreshes_by_request in [true, false] {
                for probes_by_request in [true, false] {
                    lives(&life, start, refreshes_by_request, probes_by_request);
                }
            }
        }
    }
}
}

fn lives(life: &Life, start: u32, refreshes_by_request: bool, probes_by_request: bool) {
    let bed = Bed::new(2);
    bed.kernel.now.set(start);
    for (is_request, flags) in life.packets {
        life.send(&bed, *is_request, *flags);
    }
    let packet = |is_request| if is_request { life.request } else { life.reply };
    let timeout = u32::from(life.timeout) * UNIT;
    // Three times, just within the timeout: only one direction speaks.
    for _ in 0..3 {
        bed.wait(timeout);
        life.send(&bed, refreshes_by_request, packet(refreshes_by_request));
    }
    bed.wait(timeout);
    life.send(&bed, probes_by_request, packet(probes_by_request));
    bed.wait(timeout + 1);
    let flags = packet(probes_by_request);
    let slots = |bed: &Bed| (bed.kernel.taken(0), bed.kernel.taken(1));
    let before = slots(&bed);
    match (probes_by_request, flags) {
        (true, 0) => assert_eq!(bed.request(&datagram()), 1, "a new flow, the next slot"),
        (true, SYN) => assert_eq!(bed.request(&to_vip(SYN)), 1, "a new flow, the next slot"),
        (true, flags) => {
            let (verdict, _) = bed.run(1, &to_vip(flags).bytes());
            assert_eq!(
                (verdict, bed.kernel.drops()),
                (Verdict::Drop, vec![(Reason::UnknownFlow, 1)]),
                "{}",
                life.what
            );
            assert_eq!((slots(&bed), bed.kernel.memory.live().count()), (before, 0), "{}", life.what);
        }
        (false, 0) => bed.passed(2, &answer(0).bytes()),
        (false, flags) => bed.passed(2, &to_client(0, flags).bytes()),
    }
    bed.kernel.assert_active_is_exact();
}

both! {
/// A UDP flow has one timeout, answered or not.
fn an_unanswered_udp_flow_lives_as_long_as_an_answered_one() {
    let bed = Bed::new(2);
    assert_eq!(bed.request(&datagram()), 0);
    bed.wait(u32::from(Bed::UDP_SERVICE.idle_timeout) * UNIT);
    assert_eq!(bed.request(&datagram()), 0);
    bed.wait(u32::from(Bed::UDP_SERVICE.idle_timeout) * UNIT + 1);
    assert_eq!(bed.request(&datagram()), 1);
    assert_eq!(bed.flows(), (2, 1));
}
}

both! {
/// A stamp that another CPU wrote just after this one read the clock is no nine years of silence.
fn a_stamp_from_just_after_now_is_fresh() {
    let bed = Bed::new(2);
    bed.establish(CLIENT);
    bed.wait(u32::MAX);
    assert_eq!(bed.request(&to_vip(ACK)), 0);
    bed.reply(&to_client(0, ACK), VIP);
}
}

both! {
fn a_syn_on_a_closed_flow_takes_the_next_slot() {
    type Close = fn(&Bed);
    let closings: [(&str, Close); 4] = [
        ("a reset by the client", |bed| {
            bed.request(&to_vip(RST));
            bed.reply(&to_client(0, ACK), VIP);
        }),
        ("a reset by the backend", |bed| {
            bed.reply(&to_client(0, RST | ACK), VIP);
            bed.request(&to_vip(ACK));
        }),
        ("FINs, the client first", |bed| {
            bed.request(&to_vip(FIN_ACK));
            bed.reply(&to_client(0, FIN_ACK), VIP);
            bed.request(&to_vip(ACK));
        }),
        ("FINs, the backend first", |bed| {
            bed.reply(&to_client(0, FIN_ACK), VIP);
            bed.request(&to_vip(FIN_ACK));
        }),
    ];
    for (what, close) in closings {
        let bed = Bed::new(2);
        bed.establish(CLIENT);
        assert_eq!(bed.request(&to_vip(SYN)), 0, "{what}: a live flow keeps its backend");
        close(&bed);
        // What is no SYN stayed with the old flow.
        assert_eq!(bed.flows(), (1, 1), "{what}");
        assert_eq!(bed.request(&to_vip(SYN)), 1, "{what}");
        assert_eq!(bed.flows(), (2, 1), "{what}");
        assert_eq!(bed.kernel.memory.live().count(), 2, "{what}: the old entries went");
        bed.passed(2, &to_client(0, ACK).bytes());
        bed.reply(&to_client(1, SYN_ACK), VIP);
        // The same backend again, whose old reply path is the new one's.
        bed.reply(&to_client(1, RST), VIP);
        bed.set_ring(&[1]);
        assert_eq!(bed.request(&to_vip(SYN)), 1, "{what}");
        bed.kernel.assert_active_is_exact();
        bed.kernel.memory.assert_consistent();
    }
}
}

both! {
/// A RST that somebody else has sent in the name of an end ends nothing for long: that end goes on.
fn a_forged_reset_does_not_end_a_flow() {
    type Send = fn(&Bed, u8);
    let by_client: Send = |bed, flags| assert_eq!(bed.request(&to_vip(flags)), 0);
    let by_backend: Send = |bed, flags| bed.reply(&to_client(0, flags), VIP);
    for (who, other) in [(by_client, by_backend), (by_backend, by_client)] {
        let bed = Bed::new(2);
        bed.establish(CLIENT);
        let counts = |bed: &Bed| {
            bed.kernel.assert_active_is_exact();
            (bed.flows(), bed.kernel.total(|counters| counters.reopened), bed.kernel.memory.active())
        };
        who(&bed, RST);
        // What the other end had under way says nothing.
        other(&bed, ACK);
        other(&bed, PSH | ACK);
        assert_eq!(counts(&bed), ((1, 1), 0, 0));
        who(&bed, ACK);
        assert_eq!(counts(&bed), ((1, 1), 1, 1), "counted again");
        who(&bed, ACK);
        other(&bed, ACK);
        assert_eq!(counts(&bed), ((1, 1), 1, 1), "and once");
        assert_eq!(bed.request(&to_vip(SYN)), 0, "a live flow keeps its backend");
        for (index, entry) in bed.kernel.memory.live() {
            assert_eq!((entry.control.state(), entry.timeout), (Established, Bed::TCP_SERVICE.idle_timeout));
            assert!(bed.kernel.memory.is_protected(index));
        }
        // Its own ends it, and each of the two.
        who(&bed, RST);
        other(&bed, RST);
        who(&bed, ACK);
        assert_eq!(counts(&bed), ((1, 2), 1, 0));
        other(&bed, ACK);
        assert_eq!(counts(&bed), ((1, 2), 2, 1));
        who(&bed, FIN_ACK);
        other(&bed, FIN_ACK);
        who(&bed, ACK);
        assert_eq!(counts(&bed), ((1, 3), 2, 0), "two FINs are final");
    }
}
}

both! {
/// Only who has received the SYN-ACK completes the handshake: others don't know its number.
fn a_handshake_is_completed_by_who_has_seen_the_answer() {
    for first in [500, 0, u32::MAX - 1, u32::MAX, 1 << 31] {
        let bed = Bed::new(1);
        let is_established = |bed: &Bed| {
            let states = bed.kernel.memory.live().map(|(index, entry)| {
                let is_it = entry.control.state() == Established;
                assert_eq!(bed.kernel.memory.is_protected(index), is_it);
                is_it
            });
            states.fold(None, |all, one| Some(one && all != Some(false))).unwrap()
        };
        let from_client = |flags, acknowledged| {
            bed.request(&Frame { sequence: [100, acknowledged], ..to_vip(flags) });
        };
        from_client(SYN, 0);
        from_client(ACK, first.wrapping_add(1));
        assert!(!is_established(&bed), "{first}: before there was an answer");
        for sequence in [first.wrapping_add(1_000_000), first] {
            // The last one counts: the backend may have made another.
            bed.reply(&Frame { sequence: [sequence, 101], ..to_client(0, SYN_ACK) }, VIP);
        }
        for wrong in [first.wrapping_sub(1), first.wrapping_add(1 << 16).wrapping_add(1), first ^ (1 << 31)] {
            from_client(ACK, wrong);
            from_client(ACK | PSH, wrong);
            from_client(FIN_ACK, wrong);
            assert!(!is_established(&bed), "{first}: {wrong} is not what was sent");
        }
        from_client(ACK, first.wrapping_add(1));
        assert!(is_established(&bed), "{first}");
        // From here on, numbers are the ends' business.
        from_client(ACK, 7);
        bed.reply(&to_client(0, FIN_ACK), VIP);
        from_client(FIN_ACK, 7);
        assert_eq!(bed.flows(), (1, 1));
    }
}
}
