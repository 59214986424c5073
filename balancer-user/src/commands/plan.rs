//! `balancer plan`: what a reload of a configuration would change.

use std::{fmt::Write as _, process::ExitCode};

use serde::Serialize;

use super::{daemon::Daemon, output};
use crate::{
    api::{RunningConfig, ShowConfig},
    cli::{DaemonArgs, PlanArgs},
    config::{Config, Difference},
};

/// What a reload would change.
#[derive(Debug, Serialize)]
struct Plan {
    /// The generation in force.
    generation: u64,
    /// What made it.
    made_by: String,
    /// The earlier ones that can be gone back to.
    earlier: Vec<u64>,
    /// Keys of `[daemon]` for which the reload would be refused.
    refused: Vec<String>,
    /// What would change.
    differences: Vec<Difference>,
}

/// Shows what a reload of the file would change.
///
/// # Errors
///
/// When the file is wrong, or no daemon answers.
pub fn run(args: &PlanArgs) -> anyhow::Result<ExitCode> {
    let planned = Config::load(&args.config)?;
    let socket = args.socket.clone().unwrap_or_else(|| planned.daemon.socket.clone());
    let daemon = Daemon::find(&DaemonArgs { socket: Some(socket), config: None })?;
    let RunningConfig { generation, made_by, text, ipv6, earlier } = daemon.ask(&ShowConfig {})?;
    let running = Config::parse("the running configuration", &text)?;
    let refused = running.daemon.fixed_changes(&planned.daemon);
    let mut refused: Vec<String> = refused.into_iter().map(|key| key.trim_matches('`').to_owned()).collect();
    refused.extend(planned.ipv6().filter(|wanted| *wanted != ipv6).map(|_| "ipv6".to_owned()));
    let differences = running.differences(&planned);
    let plan = Plan { generation, made_by, earlier, refused, differences };
    let text = if args.json { output::json(&plan)? } else { told(&plan) };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn told(Plan { generation, made_by, earlier, refused, differences }: &Plan) -> String {
    // Writing into a String can't fail.
    let mut out = String::new();
    let _ = writeln!(out, "generation {generation} is in force ({made_by})");
    if !earlier.is_empty() {
        let numbers: Vec<String> = earlier.iter().map(ToString::to_string).collect();
        let _ = writeln!(out, "earlier ones to go back to: {}", numbers.join(", "));
    }
    for key in refused {
        let _ = writeln!(out, "! `{key}` can't change while the balancer runs: a reload would be refused");
    }
    for difference in differences {
        let _ = writeln!(out, "{difference}");
    }
    if differences.is_empty() && refused.is_empty() {
        out.push_str("a reload would change nothing\n");
    }
    out
}
