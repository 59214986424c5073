//! Two CPUs that take turns, a look into the flow table at a time: in every order that chance finds, a flow that both open at
//! once is one flow.

use std::{collections::HashSet, sync::Arc, thread, vec::Vec};

use balancer_common::{BackendCounters, BackendId, FlowKey, FlowState, flags, forward};
use proptest::{collection::vec as sequence, prelude::*};

use super::{
    bed::{Bed, CLIENT, FIN_ACK, VIP, to_client, to_vip},
    buffer::Memory,
    cases,
    frame::{ACK, Frame, RST, SYN},
};
use crate::{Verdict, host::turns::Turns};

/// Runs this work of two CPUs, which have these beds, in turns.
fn in_turns<T: Send>(
    schedule: Vec<bool>,
    beds: [Bed; 2],
    work: impl Fn(usize, &Bed) -> T + Sync,
) -> [(T, Bed); 2] {
    let turns = Turns::new(schedule);
    let run = |cpu: usize, mut bed: Bed| {
        bed.kernel.turns = Some((Arc::clone(&turns), cpu));
        let result = turns.run(cpu, || work(cpu, &bed));
        bed.kernel.turns = None;
        (result, bed)
    };
    let [bed, other_bed] = beds;
    thread::scope(|scope| {
        let other = scope.spawn(|| run(1, other_bed));
        [run(0, bed), other.join().unwrap()]
    })
}

/// Two CPUs with a table of so many buckets; each gets one frame. Returns what they sent on, and their beds.
fn both_at_once(
    schedule: Vec<bool>,
    buckets: u32,
    mode: u8,
    rings: [&[BackendId]; 2],
    frames: [Frame; 2],
) -> ([Option<Vec<u8>>; 2], [Bed; 2]) {
    let memory = Memory::new(buckets, [3, 4]);
    let beds = rings.map(|ring| {
        let mut bed = Bed::with_memory(3, Arc::clone(&memory));
        bed.set_mode(mode);
        bed.set_ring(ring);
        bed
    });
    let [(one, bed), (other, other_bed)] = in_turns(schedule, beds, |cpu, bed| {
        let (verdict, frame) = bed.run(1, &frames[cpu].bytes());
        (verdict == Verdict::Redirect(1)).then_some(frame)
    });
    memory.assert_consistent();
    let keys = HashSet::<FlowKey>::from_iter(memory.live().map(|(_, entry)| entry.key));
    let ways = if mode == forward::NAT { 2 } else { 1 };
    assert_eq!((keys.len(), memory.live().count()), (ways, ways), "one flow, both ways if there are two");
    let beds = [bed, other_bed];
    assert_eq!(sum(&beds, |bed| bed.flows().0) - sum(&beds, |bed| bed.flows().1), 1);
    assert_eq!(memory.active(), 1);
    ([one, other], beds)
}

fn sum(beds: &[Bed; 2], of: fn(&Bed) -> u64) -> u64 {
    beds.iter().map(of).sum()
}

/// What the two CPUs choose from.
const RINGS: [[&[BackendId]; 2]; 3] = [[&[0, 1, 2], &[1, 2, 0]], [&[0], &[0]], [&[1], &[0]]];

proptest! {
    #![proptest_config(cases(3_000))]

    /// The first packet of a flow and its copy: both go to one backend, whichever it is.
    #[test]
    fn a_flow_that_two_cpus_open_at_once_is_one_flow(
        schedule in sequence(any::<bool>(), 0..100),
        buckets in 1..5_u32,
        is_tcp: bool,
        mode in prop::sample::select(&[forward::NAT, forward::DSR][..]),
        rings in prop::sample::select(&RINGS[..]),
    ) {
        let client = ([10, 0, 1, 10], 40_000);
        let frame = if is_tcp { to_vip(SYN) } else { Frame::udp(client, VIP, b"ask") };
        let (sent, beds) = both_at_once(schedule, buckets, mode, rings, [frame.clone(), frame]);
        prop_assert!(sent[0].is_some(), "{:?}", beds.map(|bed| bed.kernel.drops()));
        prop_assert_eq!(&sent[0], &sent[1], "one backend for one flow");
        prop_assert_eq!(sum(&beds, |bed| bed.flows().0), 1, "counted once");
    }

    /// Two flows whose replies would look alike, on the only backend: one of them is refused.
    #[test]
    fn two_flows_with_the_same_replies_are_not_both_opened(
        schedule in sequence(any::<bool>(), 0..100),
        buckets in 1..5_u32,
    ) {
        let client = ([10, 0, 1, 10], 40_000);
        let frames = Bed::VIPS.map(|vip| Frame::udp(client, vip, b"ask"));
        let (sent, beds) = both_at_once(schedule, buckets, forward::NAT, [&[0], &[0]], frames);
        prop_assert_eq!(sent.iter().flatten().count(), 1);
        prop_assert_eq!(sum(&beds, |bed| bed.kernel.dropped()), 1);
    }

    /// Whatever the two ends of a connection, and who speaks in their names, send at once: the entries have the protection
    /// and the timeout of their states, the connection counts as active as long as it is open, and with the ends' next
    /// segments both entries agree.
    #[test]
    fn two_cpus_follow_one_connection(
        schedule in sequence(any::<bool>(), 0..200),
        segments in [0, 1].map(|_| sequence((any::<bool>(), prop::sample::select(&[ACK, RST, FIN_ACK][..])), 1..4)),
    ) {
        let memory = Memory::new(8, [3, 4]);
        let beds = [0, 1].map(|_| Bed::with_memory(1, Arc::clone(&memory)));
        beds[0].establish(CLIENT);
        let send = |bed: &Bed, is_reply: bool, flags: u8| {
            if is_reply { bed.run(2, &to_client(0, flags).bytes()) } else { bed.run(1, &to_vip(flags).bytes()) }
        };
        let beds = in_turns(schedule, beds, |cpu, bed| {
            for (is_reply, flags) in &segments[cpu] {
                send(bed, *is_reply, *flags);
            }
        });
        let beds = beds.map(|(_, bed)| bed);
        let count = |of: fn(BackendCounters) -> u64| beds.iter().map(|bed| bed.kernel.total(of)).sum::<u64>();
        for round in 0..3 {
            let states = Vec::from_iter(memory.live().map(|(index, entry)| {
                let state = entry.control.state();
                assert_eq!(memory.is_protected(index), state == FlowState::Established, "{state:?}");
                let timeouts = [Bed::TCP_SERVICE.idle_timeout, Bed::TCP_SERVICE.closing_timeout];
                assert_eq!(entry.timeout, timeouts[usize::from(state.is_closing())], "{state:?}");
                if entry.control.flags() & flags::REPLY == 0 {
                    let is_active = entry.control.flags() & flags::ACTIVE != 0;
                    assert_eq!(is_active, !state.is_closing(), "{state:?}");
                }
                state
            }));
            assert_eq!(states.len(), 2);
            assert!(round == 0 || states[0] == states[1], "{states:?}");
            let active = count(|counters| counters.opened + counters.reopened) - count(|counters| counters.closed);
            assert_eq!(active, memory.active());
            for is_reply in [false, true] {
                send(&beds[0], is_reply, ACK);
            }
        }
    }
}
