//! `balancer decap`: on a backend, takes off what the balancer has wrapped packets in.

use std::{fmt::Write as _, process::ExitCode, time::Duration};

use anyhow::{Context as _, Result, anyhow, bail};
use balancer_common::Tunnelled;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::interval,
};

use super::{output::print, run::start_log};
use crate::{
    address, api::AttachedMode, cli::DecapArgs, config::XdpMode, datapath::Decapsulator, netlink::Netlink,
    prefix::Prefix,
};

/// How often this host's addresses are read again.
const ADDRESSES: Duration = Duration::from_secs(1);

/// Unwraps until SIGINT or SIGTERM, then prints how many packets there were; SIGUSR1 logs it meanwhile.
///
/// # Errors
///
/// When there is no such interface, when it has a program already, or when the kernel refuses.
pub fn run(arguments: &DecapArgs) -> Result<ExitCode> {
    start_log()?;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start the event loop")?;
    let counts = runtime.block_on(unwrap(arguments))?;
    print(&format!("{}\n", shown(counts)))?;
    Ok(ExitCode::SUCCESS)
}

type Counts = [u64; Tunnelled::ALL.len()];

async fn unwrap(arguments: &DecapArgs) -> Result<Counts> {
    let DecapArgs { interface, gue_port, from, xdp_mode } = arguments;
    let netlink = Netlink::open()?;
    let network = netlink.read(&[]).await?;
    let link = network.link(interface.as_str()).with_context(|| {
        let others: Vec<&str> = network.links.iter().map(|link| link.name.as_str()).collect();
        format!("there is no interface {interface}; there are: {}", others.join(", "))
    })?;
    if let Some(other) = link.xdp {
        bail!(
            "interface {interface} carries an XDP program (id {}) already: take it off with its own tool first",
            other.program
        );
    }
    let everybody = [Prefix::of([0, 0, 0, 0].into(), 0), Prefix::of([0; 16].into(), 0)];
    let trusted = if from.is_empty() { &everybody[..] } else { from };
    let trusted: Vec<_> = trusted
        .iter()
        .map(|network| {
            let address = network.address();
            (address::to_wire(address), address::length_on_wire(address, network.length()))
        })
        .collect();
    let mut decapsulator = Decapsulator::load(*gue_port, &trusted)?;
    let own = |network: &crate::network::Network| {
        network.addresses.iter().map(|local| address::to_wire(local.address)).collect()
    };
    decapsulator.set_addresses(own(&network))?;

    let native = match xdp_mode {
        XdpMode::Generic => None,
        XdpMode::Native | XdpMode::Auto => Some(decapsulator.attach(link.index, false)),
    };
    let (_link, mode) = match native {
        Some(Ok(attached)) => (attached, AttachedMode::Native),
        Some(Err(error)) if *xdp_mode == XdpMode::Native || !error.allows_generic() => {
            return Err(anyhow!("attach to {interface} in native mode: {error}"));
        }
        refused => {
            if let Some(Err(error)) = refused {
                tracing::warn!(
                    "{interface} does not take the program in native mode ({error}): generic mode it is"
                );
            }
            let attached = decapsulator.attach(link.index, true);
            let attached =
                attached.map_err(|error| anyhow!("attach to {interface} in generic mode: {error}"))?;
            (attached, AttachedMode::Generic)
        }
    };
    if from.is_empty() {
        tracing::warn!(
            "anyone who reaches {interface} may send wrapped packets: name the balancers with `--from`"
        );
    }
    tracing::info!("unwrapping on {interface} in {mode} mode");

    let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut tell = signal(SignalKind::user_defined1()).context("listen for SIGUSR1")?;
    let mut addresses = interval(ADDRESSES);
    loop {
        tokio::select! {
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            _ = tell.recv() => tracing::info!("{}", shown(decapsulator.counts()?)),
            _ = addresses.tick() => decapsulator.set_addresses(own(&netlink.read(&[]).await?))?,
        }
    }
    decapsulator.counts()
}

/// The counts, each with its name.
fn shown(counts: Counts) -> String {
    let mut text = String::new();
    for (what, count) in Tunnelled::ALL.iter().zip(counts) {
        let separator = if text.is_empty() { "" } else { "  " };
        // Writing into a String can't fail.
        let _ = write!(text, "{separator}{} {count}", what.name());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_count_has_its_name() {
        assert_eq!(shown([1, 20, 3, 0]), "ipip 1  gue 20  malformed 3  untrusted 0");
    }
}
