use super::*;

/// How long a thousand busy services take: `cargo test --release -p balancer-user --lib a_thousand -- --nocapture`.
#[test]
fn a_thousand_services_are_planned() {
    let weights = [1, 2, 3, 1, 2, 3, 1, 2, 3, 4];
    let (services, rounds) = if cfg!(debug_assertions) { (50, 1) } else { (1_000, 20) };
    let mut worlds: Vec<World> = (0..services).map(|_| World::new(Method::LeastPackets, &weights)).collect();
    for world in &mut worlds {
        for _ in 0..14 {
            world.flows(3);
            world.pass(1_000, 1_000);
        }
    }
    let mut fastest = Duration::MAX;
    for _ in 0..rounds {
        let start = std::time::Instant::now();
        let slots: usize =
            worlds.iter_mut().filter_map(|world| world.plan(0, 2)).map(|plan| plan.slots.len()).sum();
        fastest = fastest.min(start.elapsed());
        assert_eq!(slots, services * 66);
    }
    println!("{services} services in {fastest:?}");
}
