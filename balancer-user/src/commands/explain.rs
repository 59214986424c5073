//! `balancer explain`: the table behind the next picks.

use std::{fmt::Write as _, process::ExitCode};

use clap::ValueEnum as _;
use comfy_table::CellAlignment::{Left, Right};

use super::{daemon::Daemon, output};
use crate::{
    api::{Explain, Explanation, Pick, Standing},
    balance::Takes,
    cli::ExplainArgs,
    config::Requests,
    method::Method,
};

/// Shows why the next flows go where they go.
///
/// # Errors
///
/// When no daemon answers, or it refuses.
pub fn run(args: &ExplainArgs) -> anyhow::Result<ExitCode> {
    let explain = Explain { service: args.service.clone(), picks: args.picks };
    let explanation = Daemon::find(&args.daemon)?.ask(&explain)?;
    let text =
        if args.json { output::json(&explanation)? } else { told(&explanation, output::on_terminal()) };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn told(explanation: &Explanation, styled: bool) -> String {
    let Explanation { service, address, method, requests, unit, backends, last, picks } = explanation;
    let mut text = format!("{service}  {address}  {}\n", chosen_by(*method, *requests, unit.as_deref()));
    if backends.is_empty() {
        return text + "  no backends\n";
    }
    // Writing into a String can't fail.
    let _ = writeln!(text, "{}", backend_table(backends, styled));
    if let Some(last) = last {
        let _ = writeln!(text, "\nlast pick  {last}");
    }
    if method.is_hash() {
        text.push_str("\nA hash picks: each backend gets its share of the table.\n");
    } else if !picks.is_empty() {
        let _ = writeln!(text, "\n{}", pick_table(picks, styled));
    }
    text
}

/// How a method reads above a table.
pub(super) fn chosen_by(method: Method, requests: Option<Requests>, unit: Option<&str>) -> String {
    let mut text = method.to_string();
    if let Some(value) = requests.as_ref().and_then(Requests::to_possible_value) {
        text += &format!("  requests by {}", value.get_name());
    }
    if let Some(unit) = unit {
        text += &format!("  N in {unit}");
    }
    text
}

fn backend_table(backends: &[Standing], styled: bool) -> String {
    let header = [
        ("backend", Left),
        ("state", Left),
        ("weight", Right),
        ("takes", Left),
        ("N", Right),
        ("committed", Right),
        ("lacking", Right),
        ("pending", Right),
        ("compared", Right),
        ("Nw", Right),
        ("", Left),
        ("share", Right),
    ];
    let rows = backends.iter().map(|standing| {
        let Standing {
            name,
            state,
            weight,
            takes,
            ramp,
            n,
            committed,
            lacking,
            pending,
            compared,
            nw,
            tied,
            share,
        } = standing;
        // A weight that is still ramped is one that is not reached yet.
        let weight = if *ramp < 1.0 {
            format!("{:.2} of {weight}", f64::from(*weight) * ramp)
        } else {
            weight.to_string()
        };
        [
            name.clone(),
            state.to_string(),
            weight,
            shown_takes(*takes).to_owned(),
            format!("{n:.2}"),
            format!("{committed:.2}"),
            format!("{lacking:.2}"),
            format!("{pending:.2}"),
            format!("{compared:.2}"),
            number(*nw),
            if *tied { "tie" } else { "" }.to_owned(),
            format!("{:.2}%", share * 100.0),
        ]
    });
    output::table(header, rows, styled)
}

fn pick_table(picks: &[Pick], styled: bool) -> String {
    let header = [
        ("pick", Right),
        ("backend", Left),
        ("Nw", Right),
        ("second", Left),
        ("margin", Right),
        ("tied with", Left),
    ];
    let rows = (1..).zip(picks).map(|(number_of, pick): (u32, &Pick)| {
        let Pick { backend, nw, second, margin, tied } = pick;
        [
            number_of.to_string(),
            backend.clone().unwrap_or_else(|| "nobody".to_owned()),
            number(*nw),
            second.clone().unwrap_or_else(|| "-".to_owned()),
            number(*margin),
            tied.join(", "),
        ]
    });
    output::table(header, rows, styled)
}

pub(super) fn number(number: Option<f64>) -> String {
    number.map_or_else(|| "-".to_owned(), |number| format!("{number:.2}"))
}

const fn shown_takes(takes: Takes) -> &'static str {
    match takes {
        Takes::Yes => "yes",
        Takes::No => "no",
        Takes::Full => "full",
        Takes::Standby => "standby",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::BackendState;

    fn standing(name: &str, takes: Takes, n: f64, nw: Option<f64>) -> Standing {
        Standing {
            name: name.to_owned(),
            state: if takes == Takes::No { BackendState::Draining } else { BackendState::Up },
            weight: if takes == Takes::No { 0 } else { 2 },
            takes,
            ramp: if takes == Takes::Yes { 0.5 } else { 1.0 },
            n,
            committed: 0.5,
            lacking: 1.0,
            pending: 2.0,
            compared: n + 3.5,
            nw,
            tied: takes == Takes::Yes,
            share: 0.25,
        }
    }

    fn explanation(method: Method) -> Explanation {
        Explanation {
            service: "web".to_owned(),
            address: ([192, 0, 2, 10], 80).into(),
            method,
            requests: method.counts_requests().then_some(Requests::Exchange),
            unit: method.unit().map(ToOwned::to_owned),
            backends: vec![
                standing("web-1", Takes::Yes, 3.0, Some(65_000.0)),
                standing("web-2", Takes::No, 1.0, None),
            ],
            last: Some("web-2".to_owned()),
            picks: vec![
                Pick {
                    backend: Some("web-1".to_owned()),
                    nw: Some(65_000.0),
                    second: Some("web-3".to_owned()),
                    margin: Some(0.0),
                    tied: vec!["web-3".to_owned(), "web-4".to_owned()],
                },
                Pick { backend: None, nw: None, second: None, margin: None, tied: vec![] },
            ],
        }
    }

    #[test]
    fn the_table_and_the_picks() {
        let expected = "\
web  192.0.2.10:80  least-request  requests by exchange  N in requests
 backend  state        weight  takes     N  committed  lacking  pending  compared        Nw        share
 web-1    up        1.00 of 2  yes    3.00       0.50     1.00     2.00      6.50  65000.00  tie  25.00%
 web-2    draining          0  no     1.00       0.50     1.00     2.00      4.50         -       25.00%

last pick  web-2

 pick  backend        Nw  second  margin  tied with
    1  web-1    65000.00  web-3     0.00  web-3, web-4
    2  nobody          -  -            -
";
        assert_eq!(told(&explanation(Method::LeastRequest), false), expected);
    }

    #[test]
    fn a_hash_has_shares_and_no_picks() {
        let mut explanation = explanation(Method::Maglev);
        explanation.picks.clear();
        let text = told(&explanation, false);
        assert!(text.starts_with("web  192.0.2.10:80  maglev\n"), "{text}");
        assert!(text.ends_with("A hash picks: each backend gets its share of the table.\n"), "{text}");
        explanation.backends.clear();
        assert_eq!(told(&explanation, false), "web  192.0.2.10:80  maglev\n  no backends\n");
    }
}
