//! Why the next flows go where they go, and what another method would make of it.

use super::*;
use crate::balance::{Pick, Takes};

fn explained(world: &World, picks: usize) -> Explained {
    world.balance.explain(world.time(), world.taken, picks)
}

fn ids(picks: &[Pick]) -> Vec<BackendId> {
    picks.iter().map(|pick| pick.backend.unwrap()).collect()
}

/// The backends that have carried 3, 5 and 2 packets, as in the published table.
fn published(weights: [u8; 3]) -> World {
    let mut world = World::new(Method::LeastPackets, &weights);
    bring_in(&mut world, &[3, 5, 2]);
    world.weights(&weights);
    world
}

#[test]
fn the_published_table_is_explained_pick_by_pick() {
    let world = published([1, 1, 1]);
    let Explained { backends, last, picks } = explained(&world, 4);
    assert_eq!(last, Some(2));
    let seen: Vec<_> = backends
        .iter()
        .map(|stance| (stance.score.n, stance.compared, stance.nw, stance.takes, stance.is_tied))
        .collect();
    assert_eq!(
        seen,
        [
            (3.0, 3.0, Some(30_000.0), Takes::Yes, false),
            (5.0, 5.0, Some(50_000.0), Takes::Yes, false),
            (2.0, 2.0, Some(20_000.0), Takes::Yes, false),
        ]
    );
    let pick = |backend, nw, second, margin, tied: &[BackendId]| Pick {
        backend: Some(backend),
        nw: Some(nw),
        second: Some(second),
        margin: Some(margin),
        tied: tied.to_vec(),
    };
    assert_eq!(
        picks,
        [
            pick(2, 20_000.0, 0, 10_000.0, &[]),
            pick(0, 30_000.0, 2, 0.0, &[2]),
            pick(2, 30_000.0, 0, 10_000.0, &[]),
            pick(0, 40_000.0, 2, 0.0, &[2]),
        ]
    );
    // With weights 2, 3 and 4: 15000, 16666.67 and 5000.
    let picks = explained(&published([2, 3, 4]), 5).picks;
    assert_eq!(ids(&picks), [2, 2, 2, 2, 0]);
    let margins: Vec<_> = picks.iter().map(|pick| pick.margin.unwrap()).collect();
    assert_eq!(margins, [10_000.0, 7_500.0, 5_000.0, 2_500.0, 0.0]);
}

#[test]
fn flows_since_the_last_tick_are_pending() {
    let mut world = published([1, 1, 1]);
    let before = explained(&world, 8);
    assert_eq!([world.take(), world.take(), world.take()], [2, 0, 2]);
    let after = explained(&world, 5);
    assert_eq!(after.picks, before.picks[3..]);
    assert_eq!(after.last, Some(2));
    let seen: Vec<_> =
        after.backends.iter().map(|stance| (stance.score.n, stance.pending, stance.compared)).collect();
    assert_eq!(seen, [(3.0, 1.0, 4.0), (5.0, 0.0, 5.0), (2.0, 2.0, 4.0)]);
    assert_eq!(after.backends.iter().map(|stance| stance.is_tied).collect::<Vec<_>>(), [true, false, true]);
}

/// What is picked is the lowest, each time, whether the ring is new or goes on.
#[test]
fn nobody_is_ever_below_the_one_that_is_picked() {
    for method in [Method::LeastPackets, Method::LeastBandwidth, Method::LeastRequest] {
        let mut world = World::new(method, &[3, 1, 2, 0, 5]);
        let mut number: u64 = 1;
        for _ in 0..200 {
            world.pass(TICK, TICK);
            // Arrivals and old flows' packets without a pattern.
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            world.count((number >> 33) as BackendId % 5, (number >> 40) % 20, 0);
            for _ in 0..(number >> 60) % 4 {
                let told = explained(&world, 10).picks;
                assert_eq!(told.len(), 10);
                assert!(told.iter().all(|pick| pick.margin.unwrap() >= 0.0), "{method} {told:?}");
                assert_eq!(told[0].backend, Some(world.flow()), "{method}");
            }
        }
    }
}

#[test]
fn those_that_cannot_be_picked_are_told_from_those_that_can() {
    let mut world = World::new(Method::LeastRequest, &[1; 4]);
    let members = [
        Member { max_active: Some(2), ..member(0, 1) },
        member(1, 0),
        Member { max_active: Some(1), ..member(2, 1) },
        Member { is_backup: true, ..member(3, 1) },
    ];
    world.active[2] = 1;
    world.balance.set_members(world.time(), &members);
    world.tick();
    let takes = |told: &Explained| told.backends.iter().map(|stance| stance.takes).collect::<Vec<_>>();
    let told = explained(&world, 4);
    assert_eq!(takes(&told), [Takes::Yes, Takes::No, Takes::Full, Takes::Standby]);
    // Two have room on the first, then it is the backup's turn.
    assert_eq!(ids(&told.picks), [0, 0, 3, 3]);
    assert_eq!(told.picks[0].second, None);
    assert_eq!(told.picks[0].margin, None);
    world.take();
    world.take();
    assert_eq!(takes(&explained(&world, 0)), [Takes::Full, Takes::No, Takes::Full, Takes::Yes]);
}

#[test]
fn where_nothing_is_compared_there_are_no_margins() {
    let mut world = World::new(Method::RoundRobin, &[2, 1]);
    world.flows(1);
    let told = explained(&world, 4);
    assert_eq!(ids(&told.picks), world.slots[1..5]);
    assert!(told.picks.iter().all(|pick| pick.nw.is_none() && pick.second.is_none() && pick.tied.is_empty()));
    assert!(told.backends.iter().all(|stance| stance.nw.is_none() && !stance.is_tied));

    let world = World::new(Method::Maglev, &[2, 1]);
    let told = explained(&world, 4);
    assert_eq!(told.picks, []);
    let shares: Vec<_> = told.backends.iter().map(|stance| (stance.score.share * 3.0).round()).collect();
    assert_eq!(shares, [2.0, 1.0]);
    assert_eq!(World::new(Method::LeastPackets, &[]).balance.explain(world.time(), 0, 5).picks, []);
}

/// Another method, by the same counters.
#[test]
fn another_method_scores_what_was_counted() {
    let world = published([1, 1, 1]);
    let shares = |method| {
        let mut other = world.balance.clone().with_method(world.time(), method);
        other.set_requests(1, 3);
        if let Some(plan) = other.plan(world.time(), Taken { counted: world.taken, now: world.taken }) {
            other.install(plan);
        }
        let scores = other.scores(world.time());
        scores.iter().map(|score| (score.n, (score.share * 63.0).round())).collect::<Vec<_>>()
    };
    // 63 slots: whoever has more already takes so much less.
    assert_eq!(shares(Method::LeastPackets), [(3.0, 22.0), (5.0, 19.0), (2.0, 22.0)]);
    // 125,000 bytes a packet, in 14 s.
    assert_eq!(shares(Method::LeastBandwidth), [(0.21, 22.0), (0.36, 19.0), (0.14, 22.0)]);
    assert_eq!(shares(Method::RoundRobin), [(0.0, 21.0), (0.0, 21.0), (0.0, 21.0)]);
    let requests = shares(Method::LeastRequest);
    assert_eq!(requests.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [3.0, 3.0, 2.0]);
}
