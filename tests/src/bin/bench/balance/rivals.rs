//! Where another method loads the backends more evenly than this balancer, and why.

use super::{Job, choice::Kind, play::Scene, table::title, verdict::Verdict, workload::Workload};

/// What is no more than this part better is as good.
const NOISE: f64 = 0.05;

/// The list, from the jobs of each scene in groups of so many methods, this balancer's first.
pub fn notes(jobs: &[Job], methods: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for scene in jobs.chunks(methods) {
        let Some((own, others)) = scene.split_first() else { continue };
        let deviation = Verdict::of(&own.runs).deviation;
        for other in others {
            let verdict = Verdict::of(&other.runs);
            if verdict.deviation < deviation * (1.0 - NOISE) {
                let why = reason(&own.scene, other.kind).unwrap_or("not explained");
                let (title, name) = (title(&own.scene), other.kind.name());
                lines.push(format!(
                    "- {title}: {name}, {:.4} against {deviation:.4}: {why}",
                    verdict.deviation
                ));
            }
        }
    }
    let head = format!("More even than the balancer by more than {:.0} %:", NOISE * 100.0);
    if lines.is_empty() { vec![head + " nothing."] } else { vec![head, lines.join("\n")] }
}

/// Why the method can be more even there, where that is understood.
fn reason(scene: &Scene, kind: Kind) -> Option<&'static str> {
    let counts_flows = matches!(kind, Kind::LeastConnections | Kind::TwoChoices);
    let reason = match scene.workload {
        Workload::Exp | Workload::Heavy | Workload::Mix if scene.returns && counts_flows => {
            "a backend that comes back gets nearly all new flows until it has as many as the others, where the balancer \
             gives it no more than its share until its window is full"
        }
        Workload::Exp if counts_flows => {
            "flows are alike and outlive the window, so how many are open says what is to come, exactly, where the balancer \
             knows what a flow brings on average"
        }
        Workload::One | Workload::Short if kind != Kind::Random => {
            "flows are alike and short, so what counts or deals them out is even by itself. What leaves the balancer's \
             window in one tick it makes up for in the next, so that a run comes back once in each window"
        }
        _ => return None,
    };
    Some(reason)
}
