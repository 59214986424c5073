//! The ports of the XDP program: the configured interfaces, and the VLANs that this host has devices of on them.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use balancer_common::{MAX_INTERFACES, MAX_PORTS, NextHop, vlan};
use bytemuck::Zeroable as _;
use tracing::warn;

use crate::{
    datapath::Datapath,
    network::{Exit, Network, exit_hop},
};

/// Which port is which VLAN's. Flows lead to ports, so that a number is no other VLAN's as long as the maps live.
#[derive(Default)]
pub(super) struct Ports {
    /// By the port of the interface, and the tags.
    vlans: BTreeMap<(u16, u32), u16>,
}

impl Ports {
    /// Those that an earlier daemon left in the maps.
    pub(super) fn adopt(datapath: &Datapath) -> Ports {
        let left = datapath.ports();
        let interfaces = |ifindex: u32| left.get(&[ifindex, vlan::NONE]).copied();
        let vlans = left.iter().filter(|([_, tags], _)| *tags != vlan::NONE);
        let vlans = vlans.filter_map(|([ifindex, tags], port)| Some(((interfaces(*ifindex)?, *tags), *port)));
        Ports { vlans: vlans.collect() }
    }

    /// The number of a VLAN's port; `None` when all are taken.
    fn number(&mut self, exit: Exit) -> Option<u16> {
        if let Some(port) = self.vlans.get(&(exit.port, exit.vlan)) {
            return Some(*port);
        }
        let last = self.vlans.values().copied().max();
        let port = last.map_or(MAX_INTERFACES, |last| u32::from(last) + 1);
        let port = u16::try_from(port).ok().filter(|port| u32::from(*port) < MAX_PORTS)?;
        self.vlans.insert((exit.port, exit.vlan), port);
        Some(port)
    }

    /// Writes what the ports are now, and the next hops by which packets leave there. `names` are the configured interfaces.
    ///
    /// # Errors
    ///
    /// When the kernel refuses.
    pub(super) fn write(&mut self, datapath: &mut Datapath, network: &Network, names: &[&str]) -> Result<()> {
        let mut ports: BTreeMap<[u32; 2], u16> = BTreeMap::new();
        for (port, name) in (0..).zip(names) {
            let Some(link) = network.link(name) else { continue };
            datapath.set_egress(port, link.index).with_context(|| format!("set up port {name}"))?;
            ports.insert([link.index, vlan::NONE], port);
            let exit = Exit { port, ifindex: link.index, vlan: vlan::NONE };
            let hop = exit_hop(link, exit).unwrap_or_else(NextHop::zeroed);
            datapath.set_next_hop(u32::from(port), &hop);
        }
        let mut hops: BTreeMap<u16, NextHop> =
            self.vlans.values().map(|port| (*port, NextHop::zeroed())).collect();
        for link in network.links.iter().filter(|link| link.is_up && link.vlan.is_some()) {
            let Some(exit) = network.exit(link, names).filter(|exit| exit.vlan != vlan::NONE) else {
                continue;
            };
            let Some(port) = self.number(exit) else {
                warn!(device = link.name, "no VLAN device more can be served: {MAX_PORTS} ports are taken");
                continue;
            };
            ports.insert([exit.ifindex, exit.vlan], port);
            // By which the kernel's routes name it.
            ports.insert([link.index, vlan::NONE], port);
            hops.extend(exit_hop(link, exit).map(|hop| (port, hop)));
        }
        for (port, hop) in &hops {
            datapath.set_next_hop(u32::from(*port), hop);
        }
        datapath.set_ports(&ports).context("write the ports")
    }
}
