//! Whether the kernel forwards what an interface receives: without that it does not say where to.

use std::{collections::BTreeSet, fs};

use crate::config::Daemon;

/// Warns of interfaces whose packets of these families (`ipv4`, `ipv6`) the kernel may not forward: for backends behind them
/// whose services keep no flows, it must say where an answer goes.
pub fn warn_if_off(daemon: &Daemon, families: &BTreeSet<&str>) {
    for (name, family) in
        daemon.interfaces.iter().flat_map(|name| families.iter().map(move |family| (name, family)))
    {
        let setting = format!("/proc/sys/net/{family}/conf/{name}/forwarding");
        if fs::read_to_string(setting).is_ok_and(|value| value.trim() == "0") {
            tracing::warn!(
                "answers of `one-packet` backends behind {name} will be refused as no-egress: set \
                 net.{family}.conf.{name}.forwarding to 1, so that the kernel says where they go"
            );
        }
    }
}
