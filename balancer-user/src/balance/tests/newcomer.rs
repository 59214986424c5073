//! Backends that come to others which have been there for long.

use super::{
    world::{Flows, count_of},
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
fn what_a_newcomer_can_not_know_is_filled_up_with_the_mean() {
    let mut world = World::new(Method::LeastPackets, &[1, 2]);
    world.pass(14_000, TICK);
    world.count(0, 100, 1);
    world.count(1, 400, 1);
    world.weights(&[1, 2, 3]);
    let newcomer = |world: &World| {
        let score = world.balance.scores(world.time())[2];
        (score.n, score.nw, score.newcomer)
    };
    // Mean of 100 / 1 and 400 / 2 is 150 a unit of weight.
    assert_eq!(newcomer(&world), (0.0, Some(1_500_000.0), true));
    world.pass(7_000, TICK);
    assert_eq!(newcomer(&world), (0.0, Some(1_500_000.0), true));
    // Two flows of the first, which a flow of (500 + 20) / 4 each would have been: the newcomer could have had two.
    world.count(0, 20, 2);
    world.tick();
    let mean = (120.0 + 200.0) / 2.0;
    assert_eq!(newcomer(&world), (0.0, Some((mean - 130.0) * 10_000.0), true));
    // Its own load is its own.
    world.count(2, 30, 0);
    world.tick();
    assert_eq!(newcomer(&world), (30.0, Some((mean - 130.0 + 10.0) * 10_000.0), true));
}

#[test]
fn what_is_filled_up_fades_over_a_second_window() {
    let mut world = World::new(Method::LeastPackets, &[1, 1]);
    world.pass(14_000, TICK);
    world.weights(&[1, 1, 1]);
    world.pass(13_900, TICK);
    let newcomer = |world: &World| {
        let score = world.balance.scores(world.time())[2];
        (score.nw, score.newcomer)
    };
    // Old flows of the others carry 1,000 packets.
    for (passed, lacking) in [(100, 1_000.0), (7_000, 500.0), (6_900, 100.0 / 14.0)] {
        for id in [0, 1] {
            let missing = 1_000 - world.balance.scores(world.time())[0].n as u64;
            world.count(id, missing, 0);
        }
        world.pass(passed, TICK);
        let (nw, is_new) = newcomer(&world);
        assert!(is_new && (nw.unwrap() / 10_000.0 - lacking).abs() < 0.1, "{nw:?} is not {lacking}");
    }
    world.pass(100, TICK);
    assert_eq!(newcomer(&world), (Some(0.0), false));
}

#[test]
fn nobody_is_a_newcomer_while_all_are_new() {
    let mut world = World::new(Method::LeastPackets, &[1, 1, 1]);
    world.count(0, 500, 1);
    world.pass(5_000, TICK);
    let scores = world.balance.scores(world.time());
    assert!(scores.iter().all(|score| !score.newcomer));
    assert_eq!(scores[1].nw, Some(0.0));
}

#[test]
fn a_weight_that_comes_back_from_zero_makes_a_newcomer() {
    let mut world = World::new(Method::LeastPackets, &[1, 1, 0]);
    world.pass(20_000, TICK);
    world.count(0, 40, 1);
    world.count(1, 20, 1);
    world.weights(&[1, 0, 1]);
    let flags = |world: &World| -> Vec<bool> {
        world.balance.scores(world.time()).iter().map(|score| score.newcomer).collect()
    };
    assert_eq!(flags(&world), [false, false, true]);
    world.weights(&[1, 5, 1]);
    assert_eq!(flags(&world), [false, true, true]);
    // Another weight is no return.
    world.pass(28_000, TICK);
    world.weights(&[9, 9, 9]);
    assert_eq!(flags(&world), [false, false, false]);
}

/// Added, removed and added again, or not reachable at first, while nobody's window is full.
#[test]
fn one_that_is_added_to_others_is_a_newcomer_however_young_they_are() {
    let flags = |world: &World| -> Vec<bool> {
        world.balance.scores(world.time()).iter().map(|score| score.newcomer).collect()
    };
    for flows in FLOWS {
        for before in [&[1, 1][..], &[1, 1, 0]] {
            let mut world = World::new(Method::LeastPackets, &[1, 1]);
            world.run(4_000, TICK, flows);
            world.weights(before);
            world.run(1_000, TICK, flows);
            world.weights(&[1; 3]);
            assert_eq!(flags(&world), [false, false, true]);
            let picks = world.run(14_000, TICK, flows);
            let share = count_of(2, &picks) as f64 / picks.len() as f64;
            assert!(share > 0.8 / 3.0 && share < 1.15 / 3.0, "{flows:?}: {share:.3}");
            assert!(longest_run(&picks) <= 6, "{flows:?}: {}", longest_run(&picks));
        }
    }
}

/// Down and up again while nobody's window is full.
#[test]
fn one_that_returns_among_others_that_stayed_is_a_newcomer_however_young_they_are() {
    let flags = |world: &World| -> Vec<bool> {
        world.balance.scores(world.time()).iter().map(|score| score.newcomer).collect()
    };
    for flows in FLOWS {
        let mut world = World::new(Method::LeastPackets, &[1; 3]);
        world.run(4_000, TICK, flows);
        world.weights(&[1, 1, 0]);
        world.run(3_000, TICK, flows);
        world.weights(&[1; 3]);
        assert_eq!(flags(&world), [false, false, true]);
        let picks = world.run(14_000, TICK, flows);
        let share = count_of(2, &picks) as f64 / picks.len() as f64;
        // Less where its flows of before are still there.
        assert!(share > 0.8 / 3.0 && share < 1.15 / 3.0, "{flows:?}: {share:.3}");
        assert!(longest_run(&picks) <= 6, "{flows:?}: {}", longest_run(&picks));
    }
    // All of them at once, or for the first time: nobody.
    let mut world = World::new(Method::LeastPackets, &[1, 1, 0]);
    world.pass(4_000, TICK);
    world.weights(&[0, 0, 0]);
    world.pass(1_000, TICK);
    world.weights(&[1, 1, 0]);
    assert_eq!(flags(&world), [false; 3]);
    world.pass(1_000, TICK);
    world.weights(&[1, 1, 1]);
    assert_eq!(flags(&world), [false; 3], "the third has never served before");
}

#[test]
fn a_newcomer_gets_its_share_and_no_more_until_its_history_is_full() {
    for tick in [100, 1_000] {
        for flows in FLOWS {
            let mut world = World::new(Method::LeastPackets, &[1; 3]);
            world.run(40_000, tick, flows);
            world.weights(&[1; 4]);
            let picks = world.run(14_000, tick, flows);
            let share = count_of(3, &picks) as f64 / picks.len() as f64;
            assert!(share > 0.25 * 0.9 && share < 0.25 * 1.1, "{flows:?}, a tick in {tick} ms: {share:.3}");
            for id in 0..3 {
                let other = count_of(id, &picks) as f64 / picks.len() as f64;
                assert!((other * 3.0 / (1.0 - share) - 1.0).abs() < 0.02, "{flows:?}: {other:.3}");
            }
        }
    }
}

/// Also beside bursts of flows that outlive the window.
#[test]
fn no_method_floods_a_newcomer() {
    use Method::{LeastBandwidth, LeastPackets, LeastRequest, LeastResponseTime};
    for method in [LeastPackets, LeastBandwidth, LeastRequest, LeastResponseTime] {
        for tick in [100, 1_000] {
            for flows in FLOWS {
                let mut world = World::new(method, &[1; 3]);
                world.run_with_bursts(40_000, tick, flows);
                world.weights(&[1; 4]);
                let picks = world.run_with_bursts(14_000, tick, flows);
                let share = count_of(3, &picks) as f64 / picks.len() as f64;
                let what = format!("{method}, {flows:?}, a tick in {tick} ms: {share:.3}");
                assert!(share > 0.15 && share < 0.25 * 1.1, "{what}");
            }
        }
    }
}

#[test]
fn without_ages_a_newcomer_gets_its_share_by_the_mean() {
    let mut world = World::new(Method::LeastPackets, &[1; 3]);
    world.tells_ages = false;
    world.run(20_000, TICK, FLOWS[1]);
    world.weights(&[1; 4]);
    let picks = world.run(14_000, TICK, FLOWS[1]);
    let share = count_of(3, &picks) as f64 / picks.len() as f64;
    assert!(share > 0.2 && share < 0.3, "{share:.3}");
}

#[test]
fn slow_start_ramps_the_share_linearly() {
    for slow_start in [10, 30] {
        for flows in &FLOWS[..3] {
            let mut world = World::new(Method::LeastPackets, &[1, 2, 1]);
            world.balance.set_slow_start(Duration::from_secs(slow_start));
            world.run(20_000, TICK, *flows);
            let ramps = |world: &World| -> Vec<f64> {
                world.balance.scores(world.time()).iter().map(|score| score.ramp).collect()
            };
            assert_eq!(ramps(&world), [1.0; 3], "those that were there from the start are not ramped");
            world.weights(&[1, 2, 1, 4]);
            for tenth in 0..10 {
                let picks = world.run(slow_start * 100, TICK, *flows);
                let reached = (f64::from(tenth) + 0.5) / 10.0;
                let expected = 4.0 * reached / (4.0 + 4.0 * reached);
                let share = count_of(3, &picks) as f64 / picks.len() as f64;
                let off = (share / expected - 1.0).abs();
                // In the first tenth a few flows more or fewer are many.
                let limit = if tenth == 0 { 0.5 } else { 0.15 };
                assert!(
                    off < limit,
                    "{flows:?}, {slow_start} s, tenth {tenth}: {share:.3} is not {expected:.3}"
                );
                let twice = count_of(1, &picks) as f64 / count_of(0, &picks) as f64;
                assert!((twice / 2.0 - 1.0).abs() < 0.1, "{flows:?}: 1 takes {twice} times what 0 does");
            }
            let ramp = ramps(&world);
            assert_eq!((ramp[..3].to_vec(), ramp[3] > 0.99), (vec![1.0; 3], true));
        }
    }
}
