//! `balancer status`: asks the daemon, and shows what it says.

use std::env;
use std::fmt::Write;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use comfy_table::{Attribute, Cell, CellAlignment, Table, presets};

use super::output::print;
use crate::api::{BackendStatus, STATUS_PATH, ServiceStatus, Status, client};
use crate::cli::StatusArgs;
use crate::config::{Config, DEFAULT_SOCKET};

/// Longest time that the daemon may take to answer.
const LIMIT: Duration = Duration::from_secs(5);

/// Shows the status of all services, or of one.
///
/// # Errors
///
/// When no daemon answers, the service is not there, or the configuration that is to name the socket is
/// wrong.
pub fn run(args: &StatusArgs) -> anyhow::Result<ExitCode> {
    let socket = socket(args)?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start tokio")?;
    let body = runtime.block_on(client::get(&socket, STATUS_PATH, LIMIT))?;
    let output = match (&args.service, args.json) {
        (None, true) => body + "\n",
        (None, false) => table(&read(&body)?, true, on_terminal()),
        (Some(name), json) => {
            let status = only(read(&body)?, name)?;
            if json { serde_json::to_string(&status)? + "\n" } else { table(&status, false, on_terminal()) }
        }
    };
    print(&output)?;
    Ok(ExitCode::SUCCESS)
}

fn socket(args: &StatusArgs) -> anyhow::Result<PathBuf> {
    match (&args.socket, &args.config) {
        (Some(path), _) => Ok(path.clone()),
        (None, Some(file)) => Ok(Config::load(file)?.daemon.socket),
        (None, None) => Ok(DEFAULT_SOCKET.into()),
    }
}

fn read(body: &str) -> anyhow::Result<Status> {
    serde_json::from_str(body).context("understand the daemon's answer (is it of another version?)")
}

/// The status with no other service than `name`.
fn only(mut status: Status, name: &str) -> anyhow::Result<Status> {
    let names: Vec<_> = status.services.iter().map(|service| service.name.clone()).collect();
    status.services.retain(|service| service.name == name);
    if status.services.is_empty() {
        bail!("there is no service {name:?}; there are: {}", names.join(", "));
    }
    Ok(status)
}

fn on_terminal() -> bool {
    io::stdout().is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
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
        }
        out.push('\n');
    }
    if all {
        let interfaces = status.interfaces.iter().map(|port| format!("{} ({})", port.name, port.mode));
        let drops = status.drops.iter().filter(|&(_, &count)| count > 0);
        let _ = writeln!(out, "interfaces     {}", listed(interfaces));
        let _ = writeln!(
            out,
            "drops          {}",
            listed(drops.map(|(reason, count)| format!("{reason} {count}")))
        );
    }
    let _ = writeln!(out, "selection age  {} ms", status.selection_age_ms);
    out
}

fn listed(items: impl Iterator<Item = String>) -> String {
    let items: Vec<_> = items.collect();
    if items.is_empty() { "none".to_owned() } else { items.join(", ") }
}

fn backend_table(backends: &[BackendStatus], window_ms: u64, styled: bool) -> String {
    const HEADER: [(&str, CellAlignment); 12] = [
        ("backend", CellAlignment::Left),
        ("address", CellAlignment::Left),
        ("weight", CellAlignment::Right),
        ("state", CellAlignment::Left),
        ("active", CellAlignment::Right),
        ("packets", CellAlignment::Right),
        ("bytes", CellAlignment::Right),
        ("Mbit/s", CellAlignment::Right),
        ("N", CellAlignment::Right),
        ("committed", CellAlignment::Right),
        ("Nw", CellAlignment::Right),
        ("share", CellAlignment::Right),
    ];
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if !styled {
        table.force_no_tty();
    }
    table.set_header(HEADER.map(|(title, _)| Cell::new(title).add_attribute(Attribute::Bold)));
    for backend in backends {
        table.add_row([
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
        ]);
    }
    for (column, (_, alignment)) in table.column_iter_mut().zip(HEADER) {
        column.set_cell_alignment(alignment);
    }
    table.trim_fmt()
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

interfaces     eth0 (generic)
drops          malformed 7
selection age  12 ms
";
        assert_eq!(table(&status, true, false), expected);

        status.services[0].backends.clear();
        status.drops.clear();
        let expected = "\
web  192.0.2.10:80/tcp  least-packets  nat
  no backends

interfaces     eth0 (generic)
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
    }

    #[test]
    fn no_window_no_rate() {
        assert_eq!(megabits_per_second(1_000_000, 0), 0.0);
        assert_eq!(megabits_per_second(1_250_000, 1000), 10.0);
    }
}
