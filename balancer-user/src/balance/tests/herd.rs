//! No backend is ever given a stream of flows that others should share.

use super::{
    world::{Flows, count_of, longest_run},
    *,
};

/// 200 flows a second: of one packet, of ten in a quarter of a second, of 3 s, and longer than the window.
const FLOWS: [Flows; 4] = [
    Flows { every: 5, packets: 1, gap: 5 },
    Flows { every: 5, packets: 10, gap: 25 },
    Flows { every: 5, packets: 30, gap: 100 },
    Flows { every: 5, packets: 40, gap: 500 },
];

#[test]
fn identical_flows_go_to_equal_backends_in_turn() {
    for tick in [100, 1_000] {
        for flows in FLOWS {
            let mut world = World::new(Method::LeastPackets, &[1; 3]);
            world.run(14_000, tick, flows);
            let picks = world.run(30_000, tick, flows);
            let run = longest_run(&picks);
            assert!(run <= 3, "{flows:?}, a tick in {tick} ms: run of {run}");
            for id in 0..3 {
                let share = count_of(id, &picks) as f64 / picks.len() as f64;
                assert!((share * 3.0 - 1.0).abs() < 0.01, "{flows:?}, a tick in {tick} ms: {share:.4}");
            }
        }
    }
}

/// Flows that live longer than the window come back in waves, if a controller lets them.
#[test]
fn corrections_do_not_echo() {
    for (tick, flows) in [(1_000, FLOWS[1]), (100, FLOWS[3])] {
        let mut world = World::new(Method::LeastPackets, &[1; 3]);
        world.run(180_000, tick, flows);
        let run = longest_run(&world.run(20_000, tick, flows));
        assert!(run <= 3, "{flows:?}, a tick in {tick} ms: run of {run}");
    }
}

#[test]
fn one_that_flaps_does_not_disturb_the_others() {
    for flows in FLOWS {
        let mut world = World::new(Method::LeastPackets, &[1; 4]);
        world.run(20_000, TICK, flows);
        let mut picks = Vec::new();
        for _ in 0..20 {
            for weight in [0, 1] {
                world.weights(&[1, 1, 1, weight]);
                picks.extend(world.run(3_000, TICK, flows));
            }
        }
        assert!(count_of(3, &picks) > picks.len() / 20, "{flows:?}: {}", count_of(3, &picks));
        picks.retain(|pick| *pick != 3);
        let run = longest_run(&picks);
        assert!(run <= 3, "{flows:?}: run of {run}");
        for id in 0..3 {
            let share = count_of(id, &picks) as f64 / picks.len() as f64;
            assert!((share * 3.0 - 1.0).abs() < 0.01, "{flows:?}: {share:.4}");
        }
    }
}

/// What a flow brings is learned as a mean, so beside bursts of long flows what is committed swings, most of all while little has
/// been learned: the choice must not swing with it.
#[test]
fn bursts_of_long_flows_are_spread_from_the_start() {
    for (tick, longest) in [(100, 3), (1_000, 10)] {
        let mut world = World::new(Method::LeastPackets, &[1; 3]);
        for second in 0..60 {
            let run = longest_run(&world.run_with_bursts(1_000, tick, FLOWS[0]));
            assert!(run <= longest, "a tick in {tick} ms, second {second}: run of {run}");
            let loads: Vec<f64> = world.balance.scores(world.time()).iter().map(|score| score.n).collect();
            let mean = loads.iter().sum::<f64>() / 3.0;
            let worst = loads.iter().fold(0.0, |worst: f64, load| worst.max((load / mean - 1.0).abs()));
            assert!(worst < 0.1, "a tick in {tick} ms, second {second}: {loads:?}");
        }
    }
}

#[test]
fn what_is_committed_is_what_recent_flows_have_yet_to_bring() {
    // Ten flows a second, each 31 packets in 3 s.
    let flows = Flows { every: 100, packets: 31, gap: 100 };
    let mut world = World::new(Method::LeastPackets, &[1]);
    world.run(40_000, TICK, flows);
    let score = world.balance.scores(world.time())[0];
    // Those of the last 3 s have half of their 30 later packets to send, on average, which weigh a quarter more.
    assert_eq!(score.n, 140.0 * 31.0);
    assert!((score.committed / (10.0 * 3.0 * 15.0 * 1.25) - 1.0).abs() < 0.1, "{}", score.committed);
    assert!((score.nw.unwrap() - (score.n + score.committed) * 10_000.0).abs() < 100.0, "{score:?}");

    // One packet each: nothing to come, ever.
    let mut world = World::new(Method::LeastPackets, &[1, 2]);
    for _ in 0..50 {
        world.run(500, TICK, FLOWS[0]);
        assert!(world.balance.scores(world.time()).iter().all(|score| score.committed == 0.0));
        assert_eq!(world.balance.charge(world.time(), &[]), Load::ONE);
    }
}

#[test]
fn in_the_first_window_a_pick_is_charged_the_mean_at_least() {
    let mut world = World::new(Method::LeastPackets, &[1; 3]);
    world.run(1_000, 1_000, FLOWS[1]);
    // 200 flows, of which the last 45 have more to send; by age, only their first packets are known yet.
    let totals = world.balance.totals(world.time());
    let packets: u64 = totals.iter().map(|totals| totals.traffic.packets).sum();
    assert_eq!(world.balance.charge(world.time(), &totals), Load::mean(packets, 200));
    assert!(packets > 8 * 200);
}
