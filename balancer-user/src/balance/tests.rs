mod explain;
mod herd;
mod limits;
mod newcomer;
mod requests;
mod speed;
mod world;

use self::world::{SPAN, TICK, World, count_of, longest_run, member};
use super::*;

/// Methods whose flows take the slots one after the other, and that do not depend on who is active.
const ONE_BY_ONE: [Method; 3] = [Method::LeastPackets, Method::LeastBandwidth, Method::RoundRobin];

/// Brings the loads in as an operator can: with everybody else at weight 0.
fn bring_in(world: &mut World, loads: &[u64]) {
    for (index, load) in loads.iter().enumerate() {
        let weights: Vec<u8> = (0..loads.len()).map(|other| u8::from(other == index)).collect();
        world.weights(&weights);
        for _ in 0..*load {
            assert_eq!(usize::from(world.flow()), index);
            world.pass(TICK, TICK);
        }
    }
}

#[test]
fn the_published_tables_come_out_of_the_live_ring() {
    let tables = [
        (Method::LeastPackets, [3, 5, 2], [1, 1, 1], [2, 0, 2, 0, 2, 0, 1, 2]),
        (Method::LeastBandwidth, [3, 5, 2], [1, 1, 1], [2, 0, 2, 0, 2, 0, 1, 2]),
        (Method::LeastPackets, [3, 5, 2], [2, 3, 4], [2, 2, 2, 2, 0, 2, 1, 2]),
        (Method::LeastBandwidth, [3, 5, 2], [2, 3, 4], [2, 2, 2, 2, 0, 2, 1, 2]),
    ];
    for (method, loads, weights, expected) in tables {
        // Just started, or up for longer than the window with these or other weights.
        for (before, initial) in [(0, weights), (30_000, weights), (30_000, [0, 0, 0]), (30_000, [1, 0, 0])] {
            for per_tick in [1, 3, 8] {
                let mut world = World::new(method, &initial);
                world.pass(before, TICK);
                bring_in(&mut world, &loads);
                world.weights(&weights);
                let mut picks = Vec::new();
                while picks.len() < 8 {
                    picks.extend(world.flows(per_tick));
                    world.pass(TICK, TICK);
                }
                assert_eq!(picks[..8], expected, "{method} {weights:?} {initial:?} {per_tick} flows a tick");
            }
        }
    }
}

#[test]
fn thirty_flows_on_five_idle_backends_are_six_each() {
    let mut world = World::new(Method::LeastPackets, &[1; 5]);
    let picks = world.flows(30);
    for id in 0..5 {
        assert_eq!(count_of(id, &picks), 6);
    }
}

#[test]
fn equal_backends_are_never_herded() {
    for (tick, per_tick) in [(100, 1), (100, 20), (1_000, 2), (1_000, 200), (1_000, 3_000)] {
        for method in [Method::LeastPackets, Method::LeastBandwidth, Method::RoundRobin] {
            let mut world = World::new(method, &[1; 3]);
            let mut picks = Vec::new();
            for _ in 0..60_000 / tick {
                picks.extend(world.flows(per_tick));
                world.pass(tick, tick);
            }
            assert!(longest_run(&picks) <= 3, "{method} {tick} {per_tick}: {}", longest_run(&picks));
            let counts = [0, 1, 2].map(|id| count_of(id, &picks));
            let spread = counts.iter().max().unwrap() - counts.iter().min().unwrap();
            assert!(spread <= 3, "{method} {tick} {per_tick}: {counts:?}");
        }
    }
}

#[test]
fn the_last_pick_is_the_last_slot_really_taken() {
    let mut world = World::new(Method::LeastBandwidth, &[1; 4]);
    assert_eq!(world.next(5), [0, 1, 2, 3, 0]);
    // Taken, but carrying nothing: only the rotation moves.
    assert_eq!([world.take(), world.take()], [0, 1]);
    world.tick();
    assert_eq!(world.next(4), [2, 3, 0, 1]);
    assert_eq!(world.plan(0, 0), None);
}

#[test]
fn picks_that_are_not_counted_yet_are_charged() {
    let mut world = World::new(Method::LeastPackets, &[1; 3]);
    for id in [1, 2, 2] {
        world.count(id, 5, 1);
    }
    world.tick();
    // 0, 5 and 10 packets at five a flow.
    assert_eq!(world.next(6), [0, 1, 0, 1, 2, 0]);
    let late = world.plan(0, 3).unwrap();
    assert_eq!(late.slots[..4], [1, 2, 0, 1]);
    let counted = world.plan(2, 2).unwrap();
    assert_eq!(counted.slots[..4], [0, 1, 0, 1]);

    // Sixteen slots for 0 and then both in turn, gone round four times: 160 flows against 16 + 96.
    let mut world = World::new(Method::LeastPackets, &[1; 2]);
    world.count(1, 16, 16);
    world.tick();
    assert_eq!((count_of(0, &world.slots), count_of(1, &world.slots)), (40, 24));
    let late = world.plan(0, 4 * 64).unwrap();
    assert_eq!((&late.slots[..48], late.slots[48]), (&[1; 48][..], 0));
}

#[test]
fn a_ring_that_goes_on_rightly_is_left_alone() {
    let mut world = World::new(Method::LeastPackets, &[0, 1]);
    assert_eq!(world.slots, [1]);
    world.flows(1_000);
    world.tick();
    assert_eq!((world.slots.len(), world.taken), (1, 1_000));
    world.weights(&[1, 1]);
    assert_eq!(world.next(3), [0, 0, 0]);

    let mut world = World::new(Method::RoundRobin, &[3, 2]);
    for _ in 0..10 {
        world.flows(7);
        world.tick();
    }
    assert_eq!(world.taken, 70);
}

#[test]
fn an_answered_question_is_not_asked_again_until_something_changes() {
    let mut world = World::new(Method::LeastPackets, &[1, 1]);
    world.count(0, 5, 1);
    world.tick();
    assert_eq!(world.next(2), [1, 0]);
    world.tick();
    assert!(world.balance.asked.as_ref().is_some_and(|asked| asked.is_answered));
    assert_eq!(world.plan(0, 0), None);
    assert_eq!(world.plan(0, 1), None);
    world.pass(SPAN.as_millis() as u64, TICK);
    assert_eq!(world.next(2), [0, 1]);
    // Another backend that stands where the old one stood.
    let time = world.time();
    world.tick();
    world.balance.set_members(time, &[0, 9].map(|id| member(id, 1)));
    assert_eq!(world.plan(0, 0).unwrap().slots[..2], [0, 9]);
}

#[test]
fn a_ring_of_another_daemon_is_taken_over() {
    for method in ONE_BY_ONE {
        let mut balance = Balance::new(method, SPAN);
        let now = Monotonic::from_boot(SPAN);
        balance.set_members(now, &[0, 1, 2].map(|id| member(id, 1)));
        balance.adopt(vec![7, 0, 1, 7]);
        // The slots 7, 0, 1, 7 and 7 were taken: of those that are here, 1 was last.
        let plan = balance.plan(now, Taken { counted: 5, now: 5 }).unwrap();
        assert_eq!(plan.slots[..4], [2, 0, 1, 2], "{method}");
    }
}

#[test]
fn nobody_to_pick_is_an_empty_ring() {
    for method in ONE_BY_ONE {
        let mut world = World::new(method, &[]);
        assert_eq!((world.slots.len(), world.plan(0, 0)), (0, None));
        world.weights(&[1, 1]);
        assert!(world.slots.len() >= 64);
        world.weights(&[0, 0]);
        assert_eq!((world.slots.len(), world.plan(0, 0)), (0, None));
        world.weights(&[0, 9]);
        assert_eq!(world.slots, [1]);
    }
}

/// The new ring may be shorter than the one in use, and begin with what is due there too.
#[test]
fn no_slot_is_left_to_a_backend_that_takes_no_flows_any_more() {
    for method in [Method::LeastPackets, Method::RoundRobin] {
        for (taken, weights) in [(0, [1, 0, 0]), (0, [1, 1, 0]), (1, [0, 1, 0]), (2, [1, 0, 1])] {
            let mut world = World::new(method, &[1, 1, 1]);
            world.flows(taken);
            world.weights(&weights);
            let strays = world.slots.iter().filter(|id| weights[usize::from(**id)] == 0).count();
            assert_eq!(strays, 0, "{method}, {weights:?} after {taken}: {:?}", world.slots);
        }
    }
}

#[test]
fn the_ring_holds_what_may_arrive_before_the_next_tick() {
    let mut world = World::new(Method::LeastPackets, &[1; 3]);
    for (arrivals, length) in [(1, 66), (16, 66), (100, 513), (1_000, 4095), (50_000, 4095)] {
        world.flows(arrivals);
        // Something that the ring did not foresee.
        world.count(1, 3 * arrivals as u64, 0);
        world.tick();
        assert_eq!(world.slots.len(), length, "{arrivals} arrivals");
    }
    for _ in 0..200 {
        world.tick();
    }
    world.count(0, 1_000_000, 1);
    world.tick();
    assert_eq!(world.slots.len(), 66);
    // A multiple of the weights' sum where that is short, else just long enough.
    for (weights, length) in [(&[2, 4, 40], 69), (&[100, 99, 1], 64)] {
        let mut world = World::new(Method::LeastPackets, weights);
        world.tick();
        assert_eq!(world.slots.len(), length);
    }
}

#[test]
fn round_robin_is_exact_however_the_ring_is_cut() {
    // A short cycle, one that fills the ring, and one that is longer than the ring.
    for weights in [vec![5, 1, 1], vec![100, 99, 98, 3], vec![100; 16], (41..=100).collect::<Vec<u8>>()] {
        let mut world = World::new(Method::RoundRobin, &weights);
        world.growth = vec![Observation::default(); weights.len()];
        let expected = cycle(&weights, 0);
        let mut picks = Vec::new();
        for count in [1, 2, 50, 7, 1_000, 3_000, 13].into_iter().cycle().take(21) {
            picks.extend(world.flows(count));
            world.tick();
        }
        assert!(
            picks.iter().map(|pick| usize::from(*pick)).eq(expected
                .iter()
                .copied()
                .cycle()
                .take(picks.len()))
        );
    }
}

#[test]
fn rotation_survives_changes_of_the_members() {
    for method in ONE_BY_ONE {
        let mut world = World::new(method, &[1; 4]);
        for _ in 0..3 {
            world.take();
        }
        let time = world.time();
        let members = |ids: &[BackendId]| -> Vec<Member> { ids.iter().map(|id| member(*id, 1)).collect() };
        // 2 was last and stays; a new one comes before it.
        world.balance.set_members(time, &members(&[0, 9, 1, 2, 3]));
        let plan = world.plan(3, 3).unwrap();
        assert_eq!(plan.slots[..6], [3, 0, 9, 1, 2, 3], "{method}");
        world.balance.install(plan);
        // Nothing taken since: 2 is still the last, and goes.
        world.balance.set_members(time, &members(&[0, 9, 1, 3]));
        assert_eq!(world.plan(0, 0).unwrap().slots[..4], [3, 0, 9, 1], "{method}");
        // 3 and 0 taken, and 0 goes with the next change.
        world.balance.set_members(time, &members(&[9, 1, 3]));
        assert_eq!(world.plan(2, 2).unwrap().slots[..3], [9, 1, 3], "{method}");
    }
}

#[test]
fn a_plan_made_anew_after_a_failed_exchange_starts_after_what_was_taken() {
    for method in ONE_BY_ONE {
        let mut world = World::new(method, &[1; 3]);
        let time = world.time();
        let members: Vec<_> = (0..4).map(|id| member(id, 1)).collect();
        world.balance.set_members(time, &members);
        assert_eq!(world.plan(0, 1).unwrap().slots[..4], [1, 2, 3, 0]);
        let plan = world.plan(0, 2).unwrap();
        assert_eq!(plan.slots[..2], [2, 3], "{method}");
        world.balance.install(plan);
        assert_eq!(world.plan(0, 0), None);
    }
}

#[test]
fn windows_of_those_that_stay_are_kept() {
    let mut world = World::new(Method::LeastPackets, &[1; 3]);
    world.count(0, 7, 1);
    world.count(2, 4, 1);
    world.tick();
    let time = world.time();
    world.balance.set_members(time, &[member(2, 3), member(0, 1)]);
    let scores = world.balance.scores(time);
    let seen: Vec<_> = scores.iter().map(|score| (score.id, score.n, score.nw)).collect();
    assert_eq!(seen, [(2, 4.0, Some(13_333.33)), (0, 7.0, Some(70_000.0))]);
}

#[test]
fn scores_show_load_share_and_window() {
    let mut world = World::new(Method::LeastBandwidth, &[2, 0, 1]);
    for (id, packets) in [(0, 28), (1, 14), (2, 14)] {
        world.count(id, packets, 2);
    }
    world.tick();
    let scores = world.balance.scores(world.time());
    // 28 × 125,000 bytes in 14 s are 2 Mbit/s.
    let seen: Vec<_> = scores.iter().map(|score| (score.n, score.nw, score.newcomer)).collect();
    assert_eq!(seen, [(2.0, Some(10_000.0), false), (1.0, None, false), (1.0, Some(10_000.0), false)]);
    assert_eq!(scores[1].window, Totals { traffic: Traffic { packets: 14, bytes: 1_750_000 }, opened: 2 });
    assert_eq!(scores[1].share, 0.0);
    assert!((scores[0].share - 2.0 / 3.0).abs() < 0.02, "{}", scores[0].share);
    assert!((scores.iter().map(|score| score.share).sum::<f64>() - 1.0).abs() < 1e-9);
}
