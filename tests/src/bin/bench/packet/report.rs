//! The results, for people and as JSON.

use std::{fs, process::Command};

use anyhow::Result;
use serde::Serialize;

use super::case::Case;

/// Samples of one case that are further apart than this (the tenth part that is longest against the tenth part that is
/// shortest) say nothing.
const SPREAD: f64 = 3.0;

/// What was measured of one case.
pub struct Samples {
    object: String,
    case: Case,
    /// The floor's time, and the case's right after it, in nanoseconds.
    pairs: Vec<(f64, f64)>,
}

impl Samples {
    pub fn new(object: &str, case: Case) -> Samples {
        Samples { object: object.to_owned(), case, pairs: Vec::new() }
    }

    pub fn add(&mut self, floor: f64, time: f64) {
        self.pairs.push((floor, time));
    }
}

/// All that was measured.
#[derive(Serialize)]
pub struct Report {
    machine: Machine,
    /// The shortest, middle and longest time of the floor, in nanoseconds.
    floor: Spread,
    /// The same of a load from the flow table's memory.
    pub miss: Spread,
    pub rows: Vec<Row>,
    #[serde(skip)]
    pub misses: Vec<f64>,
}

/// Where and when it was measured.
#[derive(Serialize)]
pub struct Machine {
    processor: String,
    kernel: String,
    date: String,
    commit: String,
    /// Processes that were waiting for a CPU on the average of the last minute, by the end.
    load: f64,
}

/// A distribution.
#[derive(Clone, Copy, Serialize)]
pub struct Spread {
    pub least: f64,
    /// A tenth is below.
    pub low: f64,
    pub median: f64,
    /// A tenth is above.
    pub high: f64,
}

/// The result of one case.
#[derive(Serialize)]
pub struct Row {
    pub object: String,
    pub case: String,
    pub flows: u32,
    /// Nanoseconds for a packet, the harness's included.
    pub time: Spread,
    /// The same, divided by the floor's right before it.
    pub ratio: Spread,
    /// The runs disagree so much that the ratio can't be stood behind.
    pub disagrees: bool,
    #[serde(skip)]
    pub what: Case,
    /// The times, round by round.
    #[serde(skip)]
    pub times: Vec<f64>,
}

impl Report {
    pub fn new(samples: Vec<Samples>, misses: Vec<f64>) -> Result<Report> {
        let floors: Vec<f64> =
            samples.iter().flat_map(|samples| samples.pairs.iter().map(|(floor, _)| *floor)).collect();
        let rows = samples.into_iter().map(|samples| {
            let times: Vec<f64> = samples.pairs.iter().map(|(_, time)| *time).collect();
            let ratios: Vec<f64> = samples.pairs.iter().map(|(floor, time)| time / floor).collect();
            let ratio = Spread::of(&ratios);
            Row {
                object: samples.object,
                case: samples.case.name(),
                flows: samples.case.flows,
                time: Spread::of(&times),
                ratio,
                disagrees: ratio.high > ratio.low * SPREAD,
                what: samples.case,
                times,
            }
        });
        let rows = rows.collect();
        Ok(Report {
            machine: Machine::here()?,
            floor: Spread::of(&floors),
            miss: Spread::of(&misses),
            rows,
            misses,
        })
    }

    /// Prints a Markdown table.
    pub fn print(&self) {
        println!("{}", self.machine.line());
        println!(
            "Floor: {:.1} ns at least, {:.1} in the middle; a load from the flow table's memory: {:.0}, {:.0}.\n",
            self.floor.least, self.floor.median, self.miss.least, self.miss.median
        );
        println!("| case | flows | build | ns, least | ns, median | × floor, median | 10 % to 90 % |");
        println!("| --- | ---: | --- | ---: | ---: | ---: | ---: |");
        let mut rows: Vec<&Row> = self.rows.iter().collect();
        rows.sort_by_key(|row| self.rows.iter().position(|other| other.what == row.what));
        for row in rows {
            let Spread { low, median, high, .. } = row.ratio;
            let ratio = if row.disagrees { "?".to_owned() } else { format!("{median:.2}") };
            println!(
                "| {} | {} | {} | {:.1} | {:.1} | {ratio} | {low:.1}–{high:.1} |",
                row.case, row.flows, row.object, row.time.least, row.time.median
            );
        }
        if self.rows.iter().any(|row| row.disagrees) {
            println!("\n? = the runs disagree by more than {SPREAD} ×: measure again on a quiet machine.");
        }
    }
}

impl Spread {
    pub fn of(values: &[f64]) -> Spread {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |part: f64| {
            let place = part * (sorted.len().max(1) - 1) as f64;
            sorted.get(place.round() as usize).copied().unwrap_or(f64::NAN)
        };
        Spread { least: at(0.0), low: at(0.1), median: at(0.5), high: at(0.9) }
    }
}

impl Machine {
    /// All of it, for people.
    pub fn line(&self) -> String {
        let Machine { processor, kernel, date, commit, load } = self;
        format!("{processor}, Linux {kernel}, {date}, commit {commit}, load {load}")
    }

    pub fn here() -> Result<Machine> {
        let processor = fs::read_to_string("/proc/cpuinfo")?;
        let processor =
            processor.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let ask = |program: &str, arguments: &[&str]| {
            let output = Command::new(program).args(arguments).output();
            output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
        };
        Ok(Machine {
            processor: processor.trim_start_matches(['\t', ' ', ':']).to_owned(),
            kernel: read("/proc/sys/kernel/osrelease"),
            date: ask("date", &["-u", "+%Y-%m-%d"]),
            commit: ask("git", &["describe", "--always", "--dirty"]),
            load: read("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0),
        })
    }
}
