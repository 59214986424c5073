//! `balancer status`: asks the daemon, and shows what it says.

use std::fmt::Write;
use std::process::ExitCode;
use std::time::Duration;

use comfy_table::CellAlignment::{Left, Right};

use super::{daemon::Daemon, output};
use crate::api::client::{WrongCall, understand};
use crate::api::{
    BackendState, BackendStatus, ByState, FlowsStatus, Refusal, STATUS_PATH, ServiceStatus, Status,
};
use crate::cli::StatusArgs;

/// Longest time that the daemon may take to answer.
const LIMIT: Duration = Duration::from_secs(5);

/// Shows the status of all services, or of one.
///
/// # Errors
///
/// When no daemon answers, the service is not there, or the configuration that is to name the socket is
/// wrong.
pub fn run(args: &StatusArgs) -> anyhow::Result<ExitCode> {
    let body = Daemon::find(&args.daemon)?.get(STATUS_PATH, LIMIT)?;
    let text = match (&args.service, args.json) {
        (None, true) => body + "\n",
        (None, false) => table(&understand(&body)?, true, output::on_terminal()),
        (Some(name), json) => {
            let status = only(understand(&body)?, name)?;
            if json { output::json(&status)? } else { table(&status, false, output::on_terminal()) }
        }
    };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// The status with no other service than `name`.
pub(super) fn only(mut status: Status, name: &str) -> anyhow::Result<Status> {
    let known = status.services.iter().map(|service| service.name.clone()).collect();
    status.services.retain(|service| service.name == name);
    if status.services.is_empty() {
        let refusal = Refusal::Unknown { what: "service", name: name.to_owned(), known };
        return Err(WrongCall(refusal.to_string()).into());
    }
    Ok(status)
}

/// The services, each with a table of its backends; with `all`, also what concerns no single service.
fn table(status: &Status, all: bool, styled: bool) -> String {
    let mut out = String::new();
    for service in &status.services {
        let ServiceStatus { name, address, protocol, method, forward, backends } = service;
        // Writing into a String can't fail.
        let _ = writeln!(out, "{name}  {address}/{protocol}  {method}  {forward}");
        if backends.is_empty() {
            out.push_str("  no backends\n");
        } else {
            let _ = writeln!(out, "{}", backend_table(backends, status.window_ms, styled));
            for backend in backends.iter().filter(|backend| backend.state != BackendState::Up) {
                let since = humantime::format_duration(Duration::from_secs(backend.since_s as u64));
                let why = backend.reason.as_ref().map_or(String::new(), |why| format!(": {why}"));
                let _ = writeln!(out, " {} {} for {since}{why}", backend.name, backend.state);
            }
        }
        out.push('\n');
    }
    if all {
        let interfaces =
            status.interfaces.iter().map(|port| format!("{} ({}, {})", port.name, port.mode, port.state));
        let FlowsStatus { room, now, evicted } = &status.flows;
        let drops = status.drops.iter().filter(|&(_, &count)| count > 0);
        let _ = writeln!(out, "generation     {}", status.generation);
        let _ = writeln!(out, "interfaces     {}", listed(interfaces));
        let _ = writeln!(out, "flows          {} of {room}", listed_by_state(now));
        let _ = writeln!(out, "evicted        {}", listed_by_state(evicted));
        let _ = writeln!(
            out,
            "drops          {}",
            listed(drops.map(|(reason, count)| format!("{reason} {count}")))
        );
    }
    let _ = writeln!(out, "selection age  {} ms", status.selection_age_ms);
    out
}

pub(super) fn listed_by_state(ByState { half_open, established, closing }: &ByState) -> String {
    let states = [("half open", half_open), ("established", established), ("closing", closing)];
    let items = states.into_iter().filter(|(_, count)| **count > 0);
    listed(items.map(|(state, count)| format!("{count} {state}")))
}

pub(super) fn listed(items: impl Iterator<Item = String>) -> String {
    let items: Vec<_> = items.collect();
    if items.is_empty() { "none".to_owned() } else { items.join(", ") }
}

fn backend_table(backends: &[BackendStatus], window_ms: u64, styled: bool) -> String {
    let header = [
        ("backend", Left),
        ("address", Left),
        ("weight", Right),
        ("state", Left),
        ("active", Right),
        ("packets", Right),
        ("bytes", Right),
        ("Mbit/s", Right),
        ("N", Right),
        ("committed", Right),
        ("Nw", Right),
        ("share", Right),
    ];
    let rows = backends.iter().map(|backend| {
        [
            backend.name.clone(),
            backend.address.to_string(),
            backend.weight.to_string(),
            backend.state.to_string(),
            backend.active.to_string(),
            backend.packets.to_string(),
            backend.bytes.to_string(),
            format!("{:.2}", megabits_per_second(backend.window_bytes, window_ms)),
            format!("{:.2}", backend.n),
            format!("{:.2}", backend.committed),
            backend.nw.map_or("-".to_owned(), |nw| format!("{nw:.2}")),
            format!("{:.2}%", backend.share * 100.0),
        ]
    });
    output::table(header, rows, styled)
}

fn megabits_per_second(bytes: u64, milliseconds: u64) -> f64 {
    if milliseconds == 0 {
        return 0.0;
    }
    bytes as f64 * 8.0 / 1000.0 / milliseconds as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tests::example;

    #[test]
    fn the_table() {
        let mut status = example();
        let expected = "\
web  192.0.2.10:80/tcp  least-packets  nat
 backend  address         weight  state        active  packets      bytes  Mbit/s      N  committed         Nw   share
 web-11   10.0.0.11:8080       2  up                3     1000  150000000   10.00  46.67       1.23  233333.33  33.33%
 web-12   10.0.0.12:8080       0  unreachable       3     1000  150000000   10.00  46.67       1.23          -   0.00%
 web-12 unreachable for 12s: its link-layer address is not known

generation     3
interfaces     eth0 (generic, up)
flows          5 half open, 6 established, 7 closing of 1024
evicted        8 half open, 1 closing
drops          malformed 7
selection age  12 ms
";
        assert_eq!(table(&status, true, false), expected);

        status.services[0].backends.clear();
        status.drops.clear();
        (status.flows.now, status.flows.evicted) = Default::default();
        let expected = "\
web  192.0.2.10:80/tcp  least-packets  nat
  no backends

generation     3
interfaces     eth0 (generic, up)
flows          none of 1024
evicted        none
drops          none
selection age  12 ms
";
        assert_eq!(table(&status, true, false), expected);
    }

    #[test]
    fn one_service_or_none() {
        assert_eq!(only(example(), "web").expect("it is there"), example());
        let error = only(example(), "wep").expect_err("no such service");
        assert_eq!(error.to_string(), "there is no service \"wep\"; there are: web");
        assert!(error.is::<WrongCall>());
    }

    #[test]
    fn no_window_no_rate() {
        assert_eq!(megabits_per_second(1_000_000, 0), 0.0);
        assert_eq!(megabits_per_second(1_250_000, 1000), 10.0);
    }
}
