//! What the demonstration prints: the live table, and the summary at the end.

use std::io::{self, IsTerminal as _};

use super::{
    Method, Options,
    load::Load,
    status::{Backend, Status},
};

/// The table that is printed each second: over the last one on a terminal, below it elsewhere.
pub struct Live {
    seconds: u32,
    lines: usize,
}

impl Live {
    /// A table that was not shown yet.
    pub fn new() -> Self {
        Self { seconds: 0, lines: 0 }
    }

    /// Prints the table.
    pub fn show(&mut self, status: &Status, load: &Load) {
        self.seconds += 1;
        let mut lines = vec![
            format!("second {}: {}", self.seconds, load.progress()),
            format!(
                "{:8} {:8} {:>6} {:>6} {:>9} {:>8} {:>12} {:>16} {:>6} {:>7}",
                "service", "backend", "weight", "active", "packets", "Mbit/s", "N", "Nw", "flows", "share"
            ),
        ];
        for (service, flows) in status.services.iter().zip(load.flows()) {
            for (backend, flows) in service.backends.iter().zip(flows) {
                lines.push(format!(
                    "{:8} {:8} {:>6} {:>6} {:>9} {:>8.2} {:>12.2} {:>16} {:>6} {:>6.1}%",
                    service.name,
                    backend.name,
                    backend.weight,
                    backend.active,
                    backend.packets,
                    backend.window_bytes as f64 * 8.0 / 1000.0 / status.window_ms.max(1) as f64,
                    backend.n,
                    backend.nw.map_or_else(|| "-".to_owned(), |nw| format!("{nw:.2}")),
                    flows,
                    backend.share * 100.0
                ));
            }
        }
        if io::stdout().is_terminal() && self.lines > 0 {
            // Up to the last table's first line, and nothing of it left.
            print!("\x1b[{}A\x1b[J", self.lines);
        }
        self.lines = lines.len();
        println!("{}", lines.join("\n"));
    }
}

/// Prints each backend's load beside the ideal, which is its weight's share.
pub fn summary(status: &Status, load: &Load, options: &Options) {
    let (what, by): (_, fn(&Backend, u64) -> u64) = match options.method {
        Method::LeastPackets => ("packets", |backend, _| backend.packets),
        Method::LeastBandwidth => ("bytes", |backend, _| backend.bytes),
        Method::RoundRobin => ("flows", |_, flows| flows),
    };
    println!("\nsummary: {}; the ideal is the share of the weights", load.progress());
    for (service, flows) in status.services.iter().zip(load.flows()) {
        let rows: Vec<_> = service
            .backends
            .iter()
            .zip(flows)
            .map(|(backend, flows)| (backend, by(backend, flows)))
            .collect();
        let total: u64 = rows.iter().map(|(_, load)| load).sum();
        let weights: u64 = rows.iter().map(|(backend, _)| u64::from(backend.weight)).sum();
        println!(
            "{:8} {:>6} {what:>12} {:>8} {:>8} {:>10}",
            service.name, "weight", "share", "ideal", "off by"
        );
        for (backend, load) in rows {
            let share = percent(load, total);
            let ideal = percent(backend.weight.into(), weights);
            println!(
                "{:8} {:>6} {load:>12} {share:>7.1}% {ideal:>7.1}% {:>+10.1}",
                backend.name,
                backend.weight,
                share - ideal
            );
        }
    }
}

fn percent(part: u64, whole: u64) -> f64 {
    part as f64 * 100.0 / whole.max(1) as f64
}
