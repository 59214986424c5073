//! The results, for people and as JSON.

use balancer_user::method::Method;
use serde::Serialize;

use super::{
    choice::Kind,
    play::{Scene, Weights},
    verdict::Verdict,
};

/// What one method did in one scene.
#[derive(Serialize)]
pub struct Row {
    workload: &'static str,
    backends: usize,
    weights: &'static str,
    measure: &'static str,
    /// Whether a backend comes back after the warm-up.
    returns: bool,
    method: &'static str,
    deviation: f64,
    overload: f64,
    typical: u64,
    run: u64,
}

impl Row {
    pub fn new(scene: &Scene, kind: Kind, runs: &[Verdict]) -> Row {
        let verdict = Verdict::of(runs);
        Row {
            workload: scene.workload.name(),
            backends: scene.weights.list().len(),
            weights: match scene.weights {
                Weights::Equal(_) => "equal",
                Weights::Rising => "1, 2, 3, 4",
            },
            measure: if scene.measure == Method::LeastBandwidth { "bytes" } else { "packets" },
            returns: scene.returns,
            method: kind.name(),
            deviation: verdict.deviation,
            overload: verdict.overload,
            typical: verdict.typical,
            run: verdict.run,
        }
    }

    /// The scene.
    pub fn title(&self) -> String {
        let Row { workload, backends, weights, measure, .. } = self;
        let count = if self.returns { format!("{}+1", backends - 1) } else { backends.to_string() };
        format!("{workload}, {count} backends, weights {weights}, {measure}")
    }
}

/// Prints the rows, in groups of so many methods for one scene. The smallest deviation is marked.
pub fn print(rows: &[Row], methods: usize) {
    for scene in rows.chunks(methods) {
        let Some(first) = scene.first() else { continue };
        println!("{}", first.title());
        println!("    {:<18} {:>9} {:>9} {:>6} {:>8}", "method", "deviation", "overload", "run", "longest");
        let best = scene.iter().map(|row| row.deviation).fold(f64::INFINITY, f64::min);
        for row in scene {
            let mark = if row.deviation <= best { '*' } else { ' ' };
            let Row { method, deviation, overload, typical, run, .. } = row;
            println!("  {mark} {method:<18} {deviation:>9.4} {overload:>9.3} {typical:>6} {run:>8}");
        }
        println!();
    }
}
