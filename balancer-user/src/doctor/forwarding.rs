//! Whether the kernel forwards what an interface receives: without that it does not say where to.

use std::{collections::BTreeSet, fs};

use super::Finding;
use crate::config::{Daemon, Service};

/// The interfaces whose packets the kernel may not forward, of the families of services that keep no flows: for the answers of
/// backends behind them it must say where they go.
pub fn without_forwarding<'a>(daemon: &Daemon, services: impl Iterator<Item = &'a Service>) -> Vec<Finding> {
    let families: BTreeSet<&str> = services
        .filter(|service| service.one_packet)
        .map(|service| if service.address.is_ipv6() { "ipv6" } else { "ipv4" })
        .collect();
    let families = &families;
    let pairs = daemon.interfaces.iter().flat_map(|name| families.iter().map(move |family| (name, *family)));
    let is_off = |name: &str, family: &str| {
        let setting = format!("/proc/sys/net/{family}/conf/{name}/forwarding");
        fs::read_to_string(setting).is_ok_and(|value| value.trim() == "0")
    };
    pairs
        .filter(|(name, family)| is_off(name.as_str(), family))
        .map(|(name, family)| {
            Finding::warning(
                name.as_str(),
                format!("answers of `one-packet` backends behind {name} will be refused as no-egress"),
                format!(
                    "set net.{family}.conf.{name}.forwarding to 1, so that the kernel says where they go"
                ),
            )
        })
        .collect()
}
