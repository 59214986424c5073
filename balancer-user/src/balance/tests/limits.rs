//! Who may take a flow at all, and tables that hashes point into.

use super::{
    world::{count_of, member},
    *,
};

fn with(world: &mut World, members: &[Member]) {
    world.balance.set_members(world.time(), members);
    world.tick();
}

const METHODS: [Method; 7] = Method::ALL;

#[test]
fn a_backup_takes_flows_only_while_no_other_can() {
    for method in METHODS {
        let mut world = World::new(method, &[]);
        let backup = Member { is_backup: true, ..member(2, 1) };
        with(&mut world, &[member(0, 1), member(1, 1), backup]);
        assert_eq!(count_of(2, &world.slots), 0, "{method}");
        with(&mut world, &[member(0, 0), member(1, 1), backup]);
        assert_eq!(count_of(1, &world.slots), world.slots.len(), "{method}");
        with(&mut world, &[member(0, 0), member(1, 0), backup]);
        assert_eq!(count_of(2, &world.slots), world.slots.len(), "{method}");
        assert!(!world.slots.is_empty());
        with(&mut world, &[member(0, 0), member(1, 1), backup]);
        assert_eq!(count_of(1, &world.slots), world.slots.len(), "{method}");
    }
}

#[test]
fn one_that_is_full_takes_no_more() {
    for method in METHODS {
        let mut world = World::new(method, &[]);
        let limited = Member { max_active: Some(10), ..member(0, 1) };
        with(&mut world, &[limited, member(1, 1)]);
        world.active[0] = 10;
        world.tick();
        assert_eq!(count_of(1, &world.slots), world.slots.len(), "{method}");
        world.active[0] = 4;
        world.tick();
        let slots = count_of(0, &world.slots);
        let counts = matches!(
            method,
            Method::LeastPackets | Method::LeastBandwidth | Method::LeastRequest | Method::LeastResponseTime
        );
        assert!(if counts { slots == 6 } else { slots > 6 }, "{method}: {slots}");
    }
}

#[test]
fn when_all_are_full_backups_come_and_then_nobody() {
    for method in [Method::LeastPackets, Method::LeastRequest] {
        let mut world = World::new(method, &[]);
        let limited = |id, is_backup| Member { max_active: Some(3), is_backup, ..member(id, 1) };
        with(&mut world, &[limited(0, false), limited(1, true)]);
        assert_eq!(world.slots[..3], [0; 3]);
        assert_eq!(world.slots[3..6], [1; 3]);
        // So long that a burst does not come round to them again before they are seen to be full.
        assert!(world.slots[6..].iter().all(|id| *id == NOBODY) && world.slots.len() == RING_SLOTS);
        // Flows that are not counted yet have taken their slots.
        let plan = world.plan(0, 2).unwrap();
        assert_eq!(plan.slots[..4], [0, 1, 1, 1]);
        world.active[..2].copy_from_slice(&[3, 3]);
        world.tick();
        assert_eq!(world.slots, [0; 0], "{method}");
    }
}

#[test]
fn a_limit_that_is_far_makes_no_ring_longer() {
    for (most, length) in [(2_048, 64), (2_047, RING_SLOTS)] {
        let mut world = World::new(Method::LeastRequest, &[]);
        with(&mut world, &[Member { max_active: Some(most), ..member(0, 1) }, member(1, 1)]);
        // 32 of 64 slots, which come 64 times if as many flows come as a ring can hold.
        assert_eq!(world.slots.len(), length, "{most}");
    }
}

#[test]
fn hashes_point_into_a_table_that_moves_only_with_its_members() {
    for method in [Method::SourceHash, Method::Maglev] {
        let mut world = World::new(method, &[1, 1, 2]);
        let before = world.slots.clone();
        assert_eq!(before.len(), maglev::SLOTS);
        let share = count_of(2, &before) as f64 / before.len() as f64;
        assert!((share - 0.5).abs() < 0.01, "{share}");
        world.count(0, 1_000, 10);
        world.pass(5_000, TICK);
        assert_eq!(world.plan(7, 9), None, "loads change nothing");
        assert_eq!(world.slots, before);
        world.weights(&[1, 0, 2]);
        let moved = before.iter().zip(&world.slots).filter(|(old, new)| **old != 1 && old != new).count();
        assert!(moved * 3 <= 2 * before.len(), "{moved}");
        assert_eq!(count_of(1, &world.slots), 0);
        world.weights(&[1, 1, 2]);
        assert_eq!(world.slots, before, "the same members, the same table");
    }
}
