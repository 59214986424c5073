use super::{world::Flows, *};

/// How long a tick of a thousand busy services takes, apart from reading and writing maps:
/// `cargo test --release -p balancer-user --lib a_thousand -- --nocapture`.
#[test]
fn a_thousand_services_are_planned() {
    let weights = [1, 2, 3, 1, 2, 3, 1, 2, 3, 4];
    let (services, rounds) = if cfg!(debug_assertions) { (10, 1) } else { (1_000, 50) };
    let mut worlds: Vec<World> = (0..services).map(|_| World::new(Method::LeastPackets, &weights)).collect();
    for world in &mut worlds {
        world.run(15_000, TICK, Flows { every: 50, packets: 20, gap: 200 });
    }
    let (mut fastest, mut fastest_plan) = (Duration::MAX, Duration::MAX);
    for _ in 0..rounds {
        let growth = |id| {
            (
                id,
                Observation {
                    traffic: Traffic { packets: 20, bytes: 9_000 },
                    opened: 1,
                    ..Observation::default()
                },
            )
        };
        let growth: Vec<_> = (0..10).map(growth).collect();
        let start = std::time::Instant::now();
        for world in &mut worlds {
            world.now += TICK;
            world.balance.observe(world.time(), &growth);
            world.balance.observe_ages(world.time(), &[Traffic { packets: 4, bytes: 2_000 }; AGES]);
        }
        let observed = start.elapsed();
        let slots: usize =
            worlds.iter_mut().filter_map(|world| world.plan(0, 2)).map(|plan| plan.slots.len()).sum();
        fastest = fastest.min(start.elapsed());
        fastest_plan = fastest_plan.min(start.elapsed() - observed);
        assert!(slots >= services * 66, "{slots}");
    }
    println!("{services} services in {fastest:?}, of that planning {fastest_plan:?}");
}
