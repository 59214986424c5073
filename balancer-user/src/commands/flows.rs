//! `balancer flows`: the flow table.

use std::{fmt::Write as _, process::ExitCode};

use comfy_table::CellAlignment::{Left, Right};

use super::{daemon::Daemon, output};
use crate::{
    api::{CountFlows, Flow, FlowCount, FlowFilter, FlowList, KillFlows, LARGEST_LIST, ListFlows},
    cli::{FilterArgs, FlowsVerb},
};

/// Lists, counts or kills flows.
///
/// # Errors
///
/// When no daemon answers, or it refuses.
pub fn run(verb: &FlowsVerb) -> anyhow::Result<ExitCode> {
    let text = match verb {
        FlowsVerb::List { filter, limit, json, daemon } => {
            let list = list(&Daemon::find(daemon)?, &wanted(filter), *limit)?;
            if *json { output::json(&list)? } else { listed(&list) }
        }
        FlowsVerb::Count { filter, json, daemon } => {
            let count = Daemon::find(daemon)?.ask(&CountFlows { filter: wanted(filter) })?;
            if *json { output::json(&count)? } else { counted(&count) }
        }
        FlowsVerb::Kill { filter, all, json, daemon } => {
            let killed = Daemon::find(daemon)?.ask(&KillFlows { filter: wanted(filter), all: *all })?;
            if *json { output::json(&killed)? } else { format!("killed {}\n", flows(killed.killed)) }
        }
    };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

fn wanted(FilterArgs { service, backend, client, state }: &FilterArgs) -> FlowFilter {
    FlowFilter { service: service.clone(), backend: backend.clone(), client: *client, state: *state }
}

/// As many answers of the daemon as it takes.
fn list(daemon: &Daemon, filter: &FlowFilter, limit: u64) -> anyhow::Result<FlowList> {
    let mut list = FlowList::default();
    loop {
        let left = limit - list.flows.len() as u64;
        let is_last = left <= LARGEST_LIST.into();
        let request = ListFlows {
            filter: filter.clone(),
            limit: u32::try_from(left).unwrap_or(u32::MAX).min(LARGEST_LIST),
            from: list.next.unwrap_or(0),
            count_more: is_last,
        };
        let FlowList { flows, more, next } = daemon.ask(&request)?;
        list.flows.extend(flows);
        (list.more, list.next) = (more, next);
        if is_last || next.is_none() {
            // Where there is no next one, no more were found.
            list.more = Some(more.unwrap_or(0));
            return Ok(list);
        }
    }
}

fn listed(list: &FlowList) -> String {
    if list.flows.is_empty() {
        return "no flows\n".to_owned();
    }
    let header = [
        ("client", Left),
        ("service", Left),
        ("", Left),
        ("backend", Left),
        ("", Left),
        ("protocol", Left),
        ("state", Left),
        ("age", Right),
        ("idle", Right),
    ];
    let rows = list.flows.iter().map(|flow| {
        let Flow {
            client,
            service,
            service_address,
            backend,
            backend_address,
            protocol,
            state,
            age_ms,
            idle_ms,
        } = flow;
        [
            client.to_string(),
            service.clone(),
            service_address.to_string(),
            backend.clone(),
            backend_address.to_string(),
            protocol.to_string(),
            state.name().to_owned(),
            age_ms.map_or("-".to_owned(), time),
            time(*idle_ms),
        ]
    });
    let mut text = output::table(header, rows, output::on_terminal()) + "\n";
    if let Some(more @ 1..) = list.more {
        // Writing into a String can't fail.
        let _ = writeln!(text, "and {more} more: --limit {}", list.flows.len() as u64 + more);
    }
    text
}

fn counted(count: &FlowCount) -> String {
    let FlowCount { flows, half_open, established, closing } = count;
    let rows = [("half-open", half_open), ("established", established), ("closing", closing), ("all", flows)];
    let rows = rows.map(|(state, count)| [state.to_owned(), count.to_string()]);
    output::table([("state", Left), ("flows", Right)], rows, output::on_terminal()) + "\n"
}

fn flows(count: u64) -> String {
    if count == 1 { "1 flow".to_owned() } else { format!("{count} flows") }
}

/// A time as people take it in: to a tenth of a second, later to a second, a minute.
fn time(milliseconds: u64) -> String {
    let seconds = milliseconds / 1000;
    match seconds {
        0..60 => format!("{seconds}.{}s", milliseconds % 1000 / 100),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        _ => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{api::FlowState, config::Protocol};

    fn flow(last: u8, state: FlowState, age_ms: Option<u64>) -> Flow {
        Flow {
            client: ([10, 0, 1, last], 40_000).into(),
            service: "web".to_owned(),
            service_address: ([192, 0, 2, 10], 80).into(),
            backend: "web-1".to_owned(),
            backend_address: ([10, 0, 2, 11], 8080).into(),
            protocol: Protocol::Tcp,
            state,
            age_ms,
            idle_ms: 134,
        }
    }

    #[test]
    fn one_flow_is_one_line() {
        let flows =
            vec![flow(10, FlowState::HalfOpen, Some(12_345)), flow(100, FlowState::Established, None)];
        let mut list = FlowList { flows, more: Some(3), next: Some(77) };
        let expected = " \
client            service                 backend                  protocol  state          age  idle
 10.0.1.10:40000   web      192.0.2.10:80  web-1    10.0.2.11:8080  tcp       half-open    12.3s  0.1s
 10.0.1.100:40000  web      192.0.2.10:80  web-1    10.0.2.11:8080  tcp       established      -  0.1s
and 3 more: --limit 5
";
        assert_eq!(listed(&list), expected);
        list.more = Some(0);
        list.flows.clear();
        assert_eq!(listed(&list), "no flows\n");
    }

    #[test]
    fn counts_add_up() {
        let count = FlowCount { flows: 12, half_open: 1, established: 9, closing: 2 };
        let rows = " state        flows\n half-open        1\n established      9\n closing          2\n all             12\n";
        assert_eq!(counted(&count), rows);
        assert_eq!([0, 1, 2].map(flows), ["0 flows", "1 flow", "2 flows"]);
    }

    #[test]
    fn times() {
        for (milliseconds, expected) in [
            (0, "0.0s"),
            (99, "0.0s"),
            (59_999, "59.9s"),
            (60_000, "1m00s"),
            (3_599_999, "59m59s"),
            (3_600_000, "1h00m"),
            (360_060_000, "100h01m"),
        ] {
            assert_eq!(time(milliseconds), expected);
        }
    }
}
