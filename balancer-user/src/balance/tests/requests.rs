//! Methods that compare active requests, and how long they take.

use super::{
    world::{Flows, count_of, longest_run},
    *,
};
use crate::window::Growth;

/// 1,000 ms in the program's units.
const SECOND: u64 = 1_000_000_000 >> balancer_common::EXCHANGE_SHIFT;

const FLOWS: [Flows; 3] = [
    Flows { every: 5, packets: 1, gap: 50 },
    Flows { every: 5, packets: 10, gap: 100 },
    Flows { every: 5, packets: 40, gap: 500 },
];

fn answers(world: &mut World, id: BackendId, count: u64, millis: u64) {
    let responses = &mut world.growth[usize::from(id)].responses;
    *responses = responses.plus(Responses { sum: count * millis * SECOND / 1_000, count });
}

#[test]
fn the_published_tables_come_out_of_the_live_ring() {
    let tables = [
        (Method::LeastRequest, [3, 15, 0], [1, 1, 1], [2, 2, 2, 0, 2, 0, 2, 0]),
        (Method::LeastRequest, [3, 15, 0], [2, 3, 4], [2, 2, 2, 2, 2, 2, 0, 2]),
        (Method::LeastResponseTime, [3, 7, 0], [1, 1, 1], [2, 2, 2, 0, 2, 1, 2, 0]),
        (Method::LeastResponseTime, [3, 7, 0], [2, 3, 4], [2, 2, 2, 2, 2, 1, 2, 1]),
    ];
    for (method, active, weights, expected) in tables {
        for before in [0, 30_000] {
            for per_tick in [1, 3, 8] {
                let mut world = World::new(method, &weights);
                world.pass(before, TICK);
                world.active[..3].copy_from_slice(&active);
                // 512 units are an exact number of milliseconds' parts: 2 s, 1 s, 2 s in that measure.
                for (id, time) in [(0, 1_024), (1, 512), (2, 1_024)] {
                    world.growth[id].responses = Responses { sum: 4 * time, count: 4 };
                }
                world.pass(TICK, TICK);
                let mut picks = Vec::new();
                while picks.len() < 8 {
                    picks.extend(world.flows(per_tick));
                    world.pass(TICK, TICK);
                }
                assert_eq!(picks[..8], expected, "{method} {weights:?} {per_tick} flows a tick");
            }
        }
    }
}

#[test]
fn without_any_answer_all_take_the_same_time() {
    let mut world = World::new(Method::LeastResponseTime, &[1, 1]);
    world.active[..2].copy_from_slice(&[3, 1]);
    world.tick();
    let n: Vec<f64> = world.balance.scores(world.time()).iter().map(|score| score.n).collect();
    assert_eq!(n, [3.0, 1.0]);
    assert_eq!(world.flows(4), [1, 1, 0, 1]);
}

#[test]
fn one_without_answers_has_the_mean_and_a_bad_answer_is_forgotten() {
    let mut world = World::new(Method::LeastResponseTime, &[1, 1, 1]);
    world.active[..3].copy_from_slice(&[2, 2, 2]);
    answers(&mut world, 0, 10, 100);
    answers(&mut world, 1, 1, 300);
    world.tick();
    let n = |world: &World| -> Vec<f64> {
        world.balance.scores(world.time()).iter().map(|score| score.n.round()).collect()
    };
    assert_eq!(n(&world), [200.0, 600.0, 400.0]);
    // An answer that took 100 s keeps it from flows for no longer than the window.
    answers(&mut world, 1, 1, 100_000);
    world.tick();
    assert_eq!(count_of(1, &world.flows(40)), 0);
    world.active[..3].copy_from_slice(&[2, 2, 2]);
    world.pass(13_900, TICK);
    answers(&mut world, 0, 10, 100);
    answers(&mut world, 2, 10, 100);
    world.pass(TICK, TICK);
    assert_eq!(n(&world), [200.0, 200.0, 200.0]);
    let picks = world.flows(30);
    assert_eq!([0, 1, 2].map(|id| count_of(id, &picks)), [10; 3]);
}

#[test]
fn an_answer_at_once_is_no_licence() {
    let mut world = World::new(Method::LeastResponseTime, &[1, 1]);
    answers(&mut world, 0, 10, 1);
    world.growth[1].responses = Responses { sum: 0, count: 100 };
    world.tick();
    // A microsecond against a millisecond.
    assert_eq!(count_of(0, &world.flows(64)), 1);
}

#[test]
fn identical_flows_go_to_equal_backends_in_turn() {
    for method in [Method::LeastRequest, Method::LeastResponseTime] {
        for tick in [100, 1_000] {
            for flows in FLOWS {
                let mut world = World::new(method, &[1; 3]);
                world.run(14_000, tick, flows);
                let picks = world.run(30_000, tick, flows);
                let run = longest_run(&picks);
                assert!(run <= 3, "{method} {flows:?}, a tick in {tick} ms: run of {run}");
            }
        }
    }
}

#[test]
fn a_newcomer_gets_its_share_and_no_more_until_its_history_is_full() {
    for method in [Method::LeastRequest, Method::LeastResponseTime] {
        for tick in [100, 1_000] {
            for flows in FLOWS {
                let mut world = World::new(method, &[1; 3]);
                world.run(40_000, tick, flows);
                world.weights(&[1; 4]);
                let picks = world.run(14_000, tick, flows);
                let share = count_of(3, &picks) as f64 / picks.len() as f64;
                assert!(share > 0.2 && share < 0.275, "{method} {flows:?}, a tick in {tick} ms: {share:.3}");
            }
        }
    }
}

#[test]
fn slow_start_ramps_the_share() {
    for flows in FLOWS {
        let mut world = World::new(Method::LeastRequest, &[1; 3]);
        world.balance.set_slow_start(Duration::from_secs(20));
        world.run(20_000, TICK, flows);
        world.weights(&[1; 4]);
        let mut before = 0.0;
        for quarter in 0..4 {
            let picks = world.run(5_000, TICK, flows);
            let share = count_of(3, &picks) as f64 / picks.len() as f64;
            let reached = (f64::from(quarter) + 0.5) / 4.0;
            let expected = reached / (3.0 + reached);
            assert!(
                share < expected * 1.5 + 0.01 && share >= before * 0.9,
                "{flows:?} {quarter}: {share:.3}"
            );
            before = share;
        }
        assert!(before > 0.15, "{flows:?}: {before:.3}");
    }
}
