//! The results: a table for each measure, a row for each scene, a column for each method.

use balancer_user::method::Method;

use super::{
    Job,
    choice::Kind,
    play::{Scene, Weights},
    rivals,
    verdict::Verdict,
    workload::Workload,
};
use crate::results::{Cell, Machine, Results, Target};

/// What the deviation of three equal backends is to come to, by packets, and how much more may be noise.
const DEVIATIONS: [(Workload, f64); 3] =
    [(Workload::Exp, 0.007), (Workload::Heavy, 0.033), (Workload::Mix, 0.049)];
const NOISE: f64 = 1.2;

/// What a verdict says by a measure.
type Measure = (&'static str, fn(&Verdict) -> Cell);

/// The measures.
const MEASURES: [Measure; 4] = [
    ("deviation", |verdict| verdict.deviation.into()),
    ("worst overload", |verdict| verdict.overload.into()),
    ("longest run, median of the seeds", |verdict| verdict.typical.into()),
    ("longest run of all", |verdict| verdict.run.into()),
];

/// The scene of a row.
pub fn title(scene: &Scene) -> String {
    let backends = scene.weights.list().len();
    let count = if scene.returns { format!("{}+1", backends - 1) } else { backends.to_string() };
    let weights = match scene.weights {
        Weights::Equal(_) => "",
        Weights::Rising => ", weights 1, 2, 3, 4",
    };
    let measure = if scene.measure == Method::LeastBandwidth { ", by bytes" } else { "" };
    format!("{}, {count} backends{weights}{measure}", scene.workload.name())
}

/// All of it, from the jobs of each scene in groups of so many methods, this balancer's first.
pub fn results(machine: Machine, jobs: &[Job], methods: usize) -> Results {
    let mut results = Results::new("balance", machine);
    for (name, cell) in MEASURES {
        let columns: Vec<&str> = [name].into_iter().chain(Kind::ALL.map(Kind::name)).collect();
        let table = results.table(&columns);
        for scene in jobs.chunks(methods) {
            let Some(first) = scene.first() else { continue };
            let cells = scene.iter().map(|job| cell(&Verdict::of(&job.runs)));
            table.row([title(&first.scene).into()].into_iter().chain(cells));
        }
    }
    for note in rivals::notes(jobs, methods) {
        results.note(note);
    }
    results.targets(jobs.chunks(methods).flat_map(targets));
    results
}

/// What a scene is judged by: its jobs, this balancer's first.
fn targets(jobs: &[Job]) -> Vec<Target> {
    let Some((own, others)) = jobs.split_first() else { return Vec::new() };
    let deviation = |job: &Job| Verdict::of(&job.runs).deviation;
    let (scene, name) = (&own.scene, title(&own.scene));
    let mut targets = Vec::new();
    if scene.weights == Weights::Equal(3) && !scene.returns && scene.measure == Method::LeastPackets {
        let wanted = DEVIATIONS.into_iter().find(|(workload, _)| *workload == scene.workload);
        targets.extend(wanted.map(|(_, most)| {
            Target::at_most(format!("{name}: deviation"), Some(deviation(own)), most * NOISE)
        }));
    }
    if matches!(scene.workload, Workload::Heavy | Workload::Mix) {
        let best = others.iter().min_by(|a, b| deviation(a).total_cmp(&deviation(b)));
        targets.extend(best.map(|best| {
            let ratio = Some(deviation(best) / deviation(own));
            Target::at_least(
                format!("{name}: deviation of the best other ({}) ÷ the balancer's", best.kind.name()),
                ratio,
                1.0,
            )
        }));
    }
    targets
}
