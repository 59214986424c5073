//! What a configuration needs of the host and its neighbours.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use balancer_common::Reason;

use super::Finding;
use crate::{
    config::{Config, Forward},
    controller::overhead,
    network::Network,
};

/// Where packets would go.
pub fn judge(config: &Config, network: &Network) -> Vec<Finding> {
    let mut findings = backends(config, network);
    let own: BTreeSet<IpAddr> = network.addresses.iter().map(|local| local.address).collect();
    for service in &config.services {
        for address in service.forward.snat_addresses.iter().filter(|address| !own.contains(address)) {
            findings.push(Finding::warning(
                address.to_string(),
                format!("is given to clients of service {}, and is not on this host", service.name),
                "put it on the interface towards the backends, or route it to this host there",
            ));
        }
        if !service.advertise && !own.contains(&service.address.ip()) {
            findings.push(Finding::fine(
                service.address.ip().to_string(),
                format!("service {}: on no interface of this host, so it must be routed here", service.name),
            ));
        }
    }
    findings.dedup();
    findings
}

fn backends(config: &Config, network: &Network) -> Vec<Finding> {
    let ports: Vec<&str> = config.daemon.interfaces.iter().map(|name| name.as_str()).collect();
    let mut ways: BTreeMap<(IpAddr, u8), (Forward, String, bool)> = BTreeMap::new();
    for service in &config.services {
        let mode = service.forward.mode;
        for backend in &service.backends {
            let has_source = service.forward.tunnel_source.is_some();
            let named = (mode, format!("{}/{}", service.name, backend.name), has_source);
            ways.entry((backend.address.ip(), mode.number())).or_insert(named);
        }
    }
    let of_way = |((address, number), (mode, name, has_source)): ((IpAddr, u8), (Forward, String, bool))| {
        let about = address.to_string();
        let hop = network.next_hop(address, &ports);
        let mtu = u32::from(hop.mtu.saturating_sub(overhead(number, address)));
        // Clients come in by the others, where there are any.
        let largest = largest(network, &ports, |index| index != hop.ifindex)
            .or_else(|| largest(network, &ports, |_| true))
            .unwrap_or(0);
        if !network.routes.contains_key(&address) {
            return Finding::failure(about, format!("no route to backend {name}"), "`ip route get` says why");
        }
        match Reason::from_index(hop.unusable.into()) {
            _ if mode == Forward::Dsr && !network.is_on_link(address) => Finding::failure(
                about,
                format!(
                    "backend {name} is behind a gateway, which would get what is for the service's address"
                ),
                "use forward = \"ipip\" or \"gue\", or put the backend on a network of this host's",
            ),
            _ if mode.is_tunnel() && !has_source && network.source(address).is_none() => Finding::failure(
                about,
                format!("this host has no address towards backend {name} to send wrapped packets from"),
                "add one to the interface, or set tunnel-source",
            ),
            Some(Reason::NoNeighbour) => Finding::warning(
                about,
                format!("backend {name} can't be reached: nobody answers for its address, or its gateway's"),
                "see whether it is up, and on this network",
            ),
            _ if hop.mtu == 0 => Finding::failure(
                about,
                format!("backend {name} is not behind one of the configured interfaces, or that one is down"),
                "add the interface that `ip route get` names to `interfaces`, or bring it up",
            ),
            _ if mtu < largest => Finding::warning(
                about,
                format!(
                    "clients' packets of more than {mtu} bytes do not fit on the way to backend {name}: their senders are told so"
                ),
                format!("raise the MTU on the way by {} bytes", largest - mtu),
            ),
            _ => Finding::fine(about, format!("backend {name} can be reached")),
        }
    };
    ways.into_iter().map(of_way).collect()
}

/// The largest MTU of some of the configured interfaces.
fn largest(network: &Network, ports: &[&str], is_one: impl Fn(u32) -> bool) -> Option<u32> {
    let links = ports.iter().filter_map(|name| network.link(name)).filter(|link| is_one(link.index));
    links.map(|link| link.mtu).max()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        doctor::Level,
        network::{Link, LocalAddress, Neighbour, Route},
    };

    const CONFIG: &str = "[daemon]\ninterfaces = [\"eth0\", \"eth1\"]\n\
        [[service]]\nname = \"web\"\naddress = \"192.0.2.10:80\"\nprotocol = \"tcp\"\nmethod = \"round-robin\"\n\
        forward = \"MODE\"\n[[service.backend]]\nname = \"b1\"\naddress = \"10.0.2.11:80\"\n";

    fn config(mode: &str) -> Config {
        Config::parse("f", &CONFIG.replace("MODE", mode)).unwrap()
    }

    fn network() -> Network {
        let link = |index, name: &str| Link {
            index,
            name: name.to_owned(),
            mac: Some([2, 0, 0, 0, 0, 1]),
            mtu: 1500,
            is_up: true,
            xdp: None,
            vlan: None,
        };
        let [backend, own, service] =
            ["10.0.2.11", "10.0.2.1", "192.0.2.10"].map(|text| text.parse().unwrap());
        Network {
            links: vec![link(4, "eth0"), link(5, "eth1")],
            addresses: vec![
                LocalAddress { address: own, prefix: 24, ifindex: 5 },
                LocalAddress { address: service, prefix: 32, ifindex: 4 },
            ],
            routes: [(backend, Route { ifindex: 5, neighbour: backend, source: Some(own) })].into(),
            neighbours: [((5, backend), Neighbour { mac: Some([2, 0, 0, 0, 0, 9]), is_confirmed: true })]
                .into(),
        }
    }

    #[test]
    fn each_fault_on_the_way_to_a_backend_is_found_alone() {
        use Level::{Failure, Fine, Warning};
        let gateway: IpAddr = "10.0.2.254".parse().unwrap();
        let backend: IpAddr = "10.0.2.11".parse().unwrap();
        let with = |change: &dyn Fn(&mut Network)| {
            let mut network = network();
            change(&mut network);
            network
        };
        let behind = with(&|network| {
            network.routes.values_mut().for_each(|route| route.neighbour = gateway);
            let known = network.neighbours[&(5, backend)];
            network.neighbours.insert((5, gateway), known);
        });
        let rows = [
            ("nat", network(), Fine, "backend web/b1 can be reached"),
            ("dsr", network(), Fine, "can be reached"),
            ("nat", with(&|network| network.routes.clear()), Failure, "no route"),
            ("nat", behind.clone(), Fine, "can be reached"),
            ("dsr", behind, Failure, "behind a gateway"),
            ("nat", with(&|network| network.neighbours.clear()), Warning, "nobody answers"),
            (
                "nat",
                with(&|network| network.links[1].name = "eth7".to_owned()),
                Failure,
                "configured interfaces",
            ),
            ("nat", with(&|network| network.links[1].is_up = false), Failure, "is down"),
            ("nat", with(&|network| network.links[1].mtu = 1400), Warning, "more than 1400 bytes"),
            ("ipip", network(), Warning, "more than 1480 bytes"),
            ("gue", network(), Warning, "more than 1472 bytes"),
            ("gue", with(&|network| network.links[1].mtu = 1528), Fine, "can be reached"),
            (
                "ipip",
                with(&|n| n.routes.values_mut().for_each(|route| route.source = None)),
                Failure,
                "no address towards",
            ),
        ];
        for (row, (mode, network, level, part)) in rows.into_iter().enumerate() {
            let found = judge(&config(mode), &network);
            assert_eq!(found.len(), 1, "row {row}: {found:?}");
            assert_eq!((found[0].level, found[0].what.contains(part)), (level, true), "row {row}: {found:?}");
        }
    }
}
