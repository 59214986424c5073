//! `balancer doctor`: is this host fit to balance, or to be a backend?

use std::{
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    process::ExitCode,
};

use anyhow::{Context as _, Result, bail};
use serde::Serialize;

use super::{
    output::{json, print},
    run::{first_network, sizes},
};
use crate::{
    cli::DoctorArgs,
    config::Config,
    datapath::Datapath,
    doctor::{self, Finding, Level, Serving},
    netlink::Netlink,
    network::Network,
};

/// Stands for any client on the internet: documentation's (RFC 5737, RFC 3849).
const SOME_CLIENT: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);
const SOME_CLIENT6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xffff, 0, 0, 0, 0, 7);
/// What is loaded where no configuration says how large its maps are.
const DEFAULTS: &str = "[daemon]\ninterfaces = [\"eth0\"]\n";

#[derive(Serialize)]
struct Report {
    findings: Vec<Finding>,
}

/// Examines this host, prints what was found, and fails when something would not work.
///
/// # Errors
///
/// The faults of the configuration, or that the kernel does not answer.
pub fn run(arguments: &DoctorArgs) -> Result<ExitCode> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the event loop")?;
    let findings = match arguments.backend_of {
        Some(service) => {
            runtime.block_on(doctor::backend(&serving(arguments, service)?, &arguments.interfaces))?
        }
        None => {
            let config = arguments.config.as_deref().map(Config::load).transpose()?;
            runtime.block_on(examine(arguments, config.as_ref()))?
        }
    };
    let worst = findings.iter().map(|finding| finding.level).max();
    let report = Report { findings };
    print(&if arguments.json { json(&report)? } else { shown(&report.findings) })?;
    Ok(if worst == Some(Level::Failure) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn serving(arguments: &DoctorArgs, service: IpAddr) -> Result<Serving> {
    let any = if service.is_ipv4() { SOME_CLIENT.into() } else { SOME_CLIENT6.into() };
    let client = arguments.client.unwrap_or(any);
    if client.is_ipv4() != service.is_ipv4() {
        bail!("{client} can't be a client of {service}: they are of different families");
    }
    Ok(Serving { service, forward: arguments.forward, gue_port: arguments.gue_port, client })
}

async fn examine(arguments: &DoctorArgs, config: Option<&Config>) -> Result<Vec<Finding>> {
    let mut findings = vec![program(config)?];
    let network = match config {
        Some(config) => network(config).await?,
        None => Network::default(),
    };
    let config = config.map(|config| (config, &network));
    findings.extend(doctor::balancer(&arguments.interfaces, config).await?);
    Ok(findings)
}

/// Whether the kernel takes the program: that it knows all that is needed, and allows it.
fn program(config: Option<&Config>) -> Result<Finding> {
    let defaults = Config::parse("", DEFAULTS)?;
    let sizes = sizes(config.unwrap_or(&defaults));
    Ok(doctor::loaded(Datapath::load(sizes, false, None).map(drop)))
}

/// The kernel's tables, with the ways to all backends.
async fn network(config: &Config) -> Result<Network> {
    let backends = config.services.iter().flat_map(|service| &service.backends);
    let mut addresses: Vec<IpAddr> = backends.map(|backend| backend.address.ip()).collect();
    addresses.sort_unstable();
    addresses.dedup();
    first_network(&Netlink::open()?, &addresses).await
}

fn shown(findings: &[Finding]) -> String {
    let mut text = String::new();
    let mut counts = [0; 2];
    for finding in findings {
        let level = match finding.level {
            Level::Fine => "fine   ",
            Level::Warning => {
                counts[1] += 1;
                "warning"
            }
            Level::Failure => {
                counts[0] += 1;
                "FAILURE"
            }
        };
        // Writing into a String can't fail.
        let _ = writeln!(text, "{level}  {}: {}", finding.about, finding.what);
        if !finding.advice.is_empty() {
            let _ = writeln!(text, "           do: {}", finding.advice);
        }
    }
    let [failures, warnings] = counts;
    let _ = writeln!(text, "{failures} would fail, {warnings} to look at");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_found_is_shown_with_what_to_do() {
        let finding = |level, advice: &str| Finding {
            level,
            about: "eth0".to_owned(),
            what: "is so".to_owned(),
            advice: advice.to_owned(),
        };
        let findings = [finding(Level::Fine, ""), finding(Level::Failure, "this")];
        assert_eq!(
            shown(&findings),
            "fine     eth0: is so\nFAILURE  eth0: is so\n           do: this\n1 would fail, 0 to look at\n"
        );
        let report = Report { findings: findings.to_vec() };
        assert_eq!(
            json(&report).unwrap(),
            "{\"findings\":[{\"level\":\"fine\",\"about\":\"eth0\",\"what\":\"is so\"},\
             {\"level\":\"failure\",\"about\":\"eth0\",\"what\":\"is so\",\"advice\":\"this\"}]}\n"
        );
    }
}
