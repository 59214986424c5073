//! Two CPUs that take turns, a look into the flow table at a time: in every order that chance finds, a flow that both open at
//! once is one flow.

use std::{
    collections::HashSet,
    sync::{Arc, Condvar, Mutex},
    thread, vec,
    vec::Vec,
};

use balancer_common::{BackendId, FlowKey};
use proptest::{collection::vec as sequence, prelude::*};

use super::{
    bed::{Bed, VIP, to_vip},
    buffer::Memory,
    cases,
    frame::{Frame, SYN},
};
use crate::Verdict;

/// Whose turn it is.
pub struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Who goes on at each of the next steps; after the last, they alternate.
    schedule: vec::IntoIter<bool>,
    current: usize,
    has_ended: [bool; 2],
}

impl Turns {
    fn new(schedule: Vec<bool>) -> Arc<Turns> {
        let state = State { schedule: schedule.into_iter(), current: 0, has_ended: [false; 2] };
        Arc::new(Turns { state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Ends a step of this CPU, and waits for its next.
    pub fn step(&self, cpu: usize) {
        let mut state = self.state.lock().unwrap();
        let is_others = state.schedule.next().unwrap_or(true);
        if is_others && !state.has_ended[1 - cpu] {
            state.current = 1 - cpu;
            self.changed.notify_all();
        }
        drop(self.changed.wait_while(state, |state| state.current != cpu).unwrap());
    }

    /// Runs all of a CPU's steps.
    fn run<T>(&self, cpu: usize, work: impl FnOnce() -> T) -> T {
        struct End<'a>(&'a Turns, usize);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                let mut state = self.0.state.lock().unwrap();
                state.has_ended[self.1] = true;
                state.current = 1 - self.1;
                self.0.changed.notify_all();
            }
        }
        let _end = End(self, cpu);
        drop(self.changed.wait_while(self.state.lock().unwrap(), |state| state.current != cpu).unwrap());
        work()
    }
}

/// Two CPUs with a table of so many buckets; each gets one frame. Returns what they sent on, and their beds.
fn both_at_once(
    schedule: Vec<bool>,
    buckets: u32,
    rings: [&[BackendId]; 2],
    frames: [Frame; 2],
) -> ([Option<Vec<u8>>; 2], [Bed; 2]) {
    let memory = Memory::new(buckets, [3, 4]);
    let turns = Turns::new(schedule);
    let run = |cpu: usize| {
        let mut bed = Bed::with_memory(3, Arc::clone(&memory));
        bed.set_ring(rings[cpu]);
        bed.kernel.turns = Some((Arc::clone(&turns), cpu));
        let (verdict, frame) = turns.run(cpu, || bed.run(1, &frames[cpu].bytes()));
        bed.kernel.turns = None;
        ((verdict == Verdict::Redirect(1)).then_some(frame), bed)
    };
    let [(one, bed), (other, other_bed)] = thread::scope(|scope| {
        let other = scope.spawn(|| run(1));
        [run(0), other.join().unwrap()]
    });
    memory.assert_consistent();
    let keys = HashSet::<FlowKey>::from_iter(memory.live().map(|(_, entry)| entry.key));
    assert_eq!((keys.len(), memory.live().count()), (2, 2), "one flow, both ways");
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
        rings in prop::sample::select(&RINGS[..]),
    ) {
        let client = ([10, 0, 1, 10], 40_000);
        let frame = if is_tcp { to_vip(SYN) } else { Frame::udp(client, VIP, b"ask") };
        let (sent, beds) = both_at_once(schedule, buckets, rings, [frame.clone(), frame]);
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
        let (sent, beds) = both_at_once(schedule, buckets, [&[0], &[0]], frames);
        prop_assert_eq!(sent.iter().flatten().count(), 1);
        prop_assert_eq!(sum(&beds, |bed| bed.kernel.dropped()), 1);
    }
}
