//! `balancer whatif`: a service beside itself under another method.

use std::{fmt::Write as _, process::ExitCode};

use comfy_table::CellAlignment::{Left, Right};

use super::{
    daemon::Daemon,
    explain::{chosen_by, number},
    output,
};
use crate::{
    api::{Choice, Compared, Comparison, WhatIf},
    cli::WhatIfArgs,
};

/// Shows where flows would go by another method.
///
/// # Errors
///
/// When no daemon answers, or it refuses.
pub fn run(args: &WhatIfArgs) -> anyhow::Result<ExitCode> {
    let what_if = WhatIf { service: args.service.clone(), method: args.method, requests: args.requests };
    let comparison = Daemon::find(&args.daemon)?.ask(&what_if)?;
    let text = if args.json { output::json(&comparison)? } else { told(&comparison, output::on_terminal()) };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn told(comparison: &Comparison, styled: bool) -> String {
    let Comparison { service, address, today, instead, unknown, backends } = comparison;
    let by = |Choice { method, requests, unit }: &Choice| chosen_by(*method, *requests, unit.as_deref());
    let mut text = format!("{service}  {address}\ntoday    {}\ninstead  {}\n", by(today), by(instead));
    if backends.is_empty() {
        return text + "  no backends\n";
    }
    // Writing into a String can't fail.
    let _ = writeln!(text, "\n{}", table(backends, styled));
    for unknown in unknown {
        let _ = writeln!(text, "\nnot known: {unknown}");
    }
    text
}

fn table(backends: &[Compared], styled: bool) -> String {
    let header = [
        ("backend", Left),
        ("state", Left),
        ("weight", Right),
        ("today: N", Right),
        ("Nw", Right),
        ("share", Right),
        ("instead: N", Right),
        ("Nw", Right),
        ("share", Right),
    ];
    let rows = backends.iter().map(|Compared { name, state, weight, today, instead }| {
        [
            name.clone(),
            state.to_string(),
            weight.to_string(),
            format!("{:.2}", today.n),
            number(today.nw),
            format!("{:.2}%", today.share * 100.0),
            format!("{:.2}", instead.n),
            number(instead.nw),
            format!("{:.2}%", instead.share * 100.0),
        ]
    });
    output::table(header, rows, styled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        api::{BackendState, Stands},
        config::Requests,
        method::Method,
    };

    #[test]
    fn both_stand_side_by_side() {
        let choice = |method: Method, requests| Choice {
            method,
            requests,
            unit: method.unit().map(ToOwned::to_owned),
        };
        let comparison = Comparison {
            service: "web".to_owned(),
            address: ([192, 0, 2, 10], 80).into(),
            today: choice(Method::RoundRobin, None),
            instead: choice(Method::LeastResponseTime, Some(Requests::Flow)),
            unknown: vec!["how long answers take".to_owned()],
            backends: vec![Compared {
                name: "web-1".to_owned(),
                state: BackendState::Up,
                weight: 2,
                today: Stands { n: 0.0, committed: 0.0, nw: None, share: 0.5 },
                instead: Stands { n: 3.0, committed: 0.0, nw: Some(15_000.0), share: 0.333_33 },
            }],
        };
        let expected = "\
web  192.0.2.10:80
today    round-robin
instead  least-response-time  requests by flow  N in requests × ms

 backend  state  weight  today: N  Nw   share  instead: N        Nw   share
 web-1    up          2      0.00   -  50.00%        3.00  15000.00  33.33%

not known: how long answers take
";
        assert_eq!(told(&comparison, false), expected);
    }
}
