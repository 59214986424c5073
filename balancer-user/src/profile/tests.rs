use balancer_common::{STAMP_SHIFT, age_bucket};

use super::*;
use crate::load::Load;

const SPAN: Duration = Duration::from_secs(14);
const MILLI: u64 = 1_000_000;

/// A profile that watches flows, in milliseconds.
struct World {
    profile: Profile,
    openings: Openings,
    now: u64,
    tick: u64,
    /// Packets to come: when, and when their flow opened.
    packets: Vec<(u64, u64)>,
    opened: Vec<u64>,
}

impl World {
    fn new(tick: u64) -> World {
        let start = moment(0);
        World {
            profile: Profile::new(start, SPAN),
            openings: Openings::new(start, Profile::reach(SPAN)),
            now: 0,
            tick,
            packets: Vec::new(),
            opened: Vec::new(),
        }
    }

    /// A flow that opens at `at` and sends `packets`, one every `gap`.
    fn flow(&mut self, at: u64, packets: u64, gap: u64) {
        self.opened.push(at);
        self.packets.extend((0..packets).map(|packet| (at + packet * gap, at)));
    }

    fn pass(&mut self, millis: u64) {
        for _ in 0..millis / self.tick {
            self.now += self.tick;
            let now = self.now;
            let opened = self.opened.extract_if(.., |at| *at <= now).count() as u64;
            let mut ages = [0; AGES];
            for (sent, opened) in self.packets.extract_if(.., |(sent, _)| *sent <= now) {
                if let Some(bucket) = age_bucket(stamp(sent) - stamp(opened)) {
                    ages[bucket] += 1;
                }
            }
            self.openings.push(moment(now), opened);
            self.profile.observe(moment(now), ages, ages[0], opened, &self.openings);
        }
    }

    /// Packets by an age.
    fn by(&self, age: u64) -> f64 {
        self.profile.curve().map_or(0.0, |curve| curve.by(age * MILLI) as f64 / MICRO as f64)
    }
}

fn moment(millis: u64) -> Monotonic {
    Monotonic::from_boot(Duration::from_millis(1_000 + millis))
}

fn stamp(millis: u64) -> u32 {
    (((1_000 + millis) * MILLI) >> STAMP_SHIFT) as u32
}

#[test]
fn flows_of_one_packet_bring_exactly_one() {
    for tick in [20, 100, 1_000] {
        let mut world = World::new(tick);
        assert!(world.profile.curve().is_none());
        for flow in 0..4_000 {
            world.flow(flow * 13 + 1, 1, 1);
        }
        while world.now < 60_000 {
            world.pass(1_000);
            let curve = world.profile.curve().unwrap();
            assert_eq!((curve.charge(), curve.committed(0)), (Load::ONE, 0), "a tick in {tick} ms");
        }
    }
}

#[test]
fn steady_flows_are_learned_at_every_age() {
    // Ten packets a second for 20 s and for 2 s: 10 a + ½ by the age a, as packet 0 comes at once.
    for (tick, every, packets) in [(100, 50, 200), (1_000, 50, 200), (100, 47, 21), (100, 1_300, 200)] {
        let mut world = World::new(tick);
        for flow in 0..60_000 / every {
            world.flow(flow * every + flow * 7 % 31, packets, 100);
        }
        world.pass(60_000);
        for age in [200, 500, 1_000, 3_000, 8_000, 14_000u64] {
            let expected = (age as f64 / 100.0 + 0.5).min(packets as f64);
            let off = (world.by(age) - expected).abs();
            assert!(
                off < 0.6 + 0.02 * expected,
                "a tick in {tick} ms, {packets} packets: {} by {age} ms",
                world.by(age)
            );
        }
    }
}

#[test]
fn a_single_flow_is_learned_and_kept_while_nothing_follows() {
    let mut world = World::new(100);
    world.flow(12_345, 50, 100);
    world.pass(20_000);
    for _ in 0..10 {
        assert!((world.by(14_000) - 50.0).abs() < 2.5, "{} after {} ms", world.by(14_000), world.now);
        world.pass(60_000);
    }
}

#[test]
fn what_is_learned_follows_a_change_within_two_windows() {
    let mut world = World::new(100);
    for flow in 0..600 {
        world.flow(flow * 50, if flow < 300 { 10 } else { 40 }, 20);
    }
    world.pass(14_900);
    assert!((world.by(14_000) - 10.0).abs() < 0.2, "{}", world.by(14_000));
    for flow in 600..1_300 {
        world.flow(flow * 50, 40, 20);
    }
    world.pass(35_000);
    assert!((world.by(14_000) - 40.0).abs() < 0.8, "{}", world.by(14_000));
}

#[test]
fn what_is_old_is_forgotten_little_by_little() {
    let mut world = World::new(100);
    for flow in 0..800 {
        world.flow(flow * 50, 10, 20);
    }
    world.flow(20_010, 2_000, 1);
    world.pass(32_000);
    let before = world.by(14_000);
    assert!(before > 13.0, "{before}");
    let mut last = before;
    while world.now < 60_000 {
        world.pass(100);
        let by = world.by(14_000);
        assert!((last - by).abs() < 0.5, "from {last} to {by} at {} ms", world.now);
        last = by;
    }
    assert!((last - 10.0).abs() < 0.2, "{last}");
}

#[test]
fn flows_from_before_the_start_teach_nothing() {
    let mut world = World::new(100);
    // Flows that another daemon opened, 5 to 9 s old: 8,000 packets a tick.
    let mut ages = [0; AGES];
    for age in 75..135 {
        ages[age_bucket(age).unwrap()] += 800;
    }
    for flow in 0..40 {
        world.flow(200 + flow * 100, 3, 50);
    }
    for tick in 1..50 {
        world.now = tick * 100;
        let opened = world.opened.extract_if(.., |at| *at <= world.now).count() as u64;
        world.openings.push(moment(world.now), opened);
        ages[0] = opened;
        world.profile.observe(moment(world.now), ages, opened, opened, &world.openings);
    }
    assert_eq!(world.by(14_000), 1.0);
}

#[test]
fn a_few_flows_between_two_readings_do_not_blur_the_count() {
    let openings = Openings::new(moment(0), Profile::reach(SPAN));
    let mut profile = Profile::new(moment(0), SPAN);
    // Read between a flow's opening and its packet, or the other way round.
    for (tick, (opened, first)) in (1..).zip([(50, 48), (50, 52), (50, 53)]) {
        let mut ages = [0; AGES];
        ages[0] = first * 28;
        profile.observe(moment(tick * 100), ages, first, opened, &openings);
        assert_eq!(profile.curve().unwrap().charge(), Load::units(28));
    }
    // Twice as many are no coincidence.
    let mut ages = [0; AGES];
    ages[0] = 400;
    profile.observe(moment(400), ages, 400, 50, &openings);
    assert!(profile.curve().unwrap().charge() > Load::units(28 - 7));
}

#[test]
fn late_ticks_teach_nothing_about_ages() {
    let mut world = World::new(100);
    for flow in 0..300 {
        world.flow(flow * 100, 20, 100);
    }
    world.pass(16_000);
    let before = world.by(14_000);
    let openings = world.openings.clone();
    world.profile.observe(moment(world.now + 9_000), [0; AGES], 0, 0, &openings);
    assert_eq!(world.by(14_000), before);
}

#[test]
fn load_that_no_known_flow_explains_counts_as_if_by_one() {
    let mut world = World::new(100);
    world.pass(5_000);
    world.flow(5_050, 1, 1);
    world.pass(100);
    let mut ages = [0; AGES];
    ages[10] = 50;
    let openings = world.openings.clone();
    world.profile.observe(moment(world.now + 100), ages, 0, 0, &openings);
    assert_eq!(world.by(14_000), 51.0);
}
