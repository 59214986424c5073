//! Why there is no way to a backend, in words.

use std::net::IpAddr;

use balancer_common::forward;

use crate::network::Network;

/// What stands between the program and a backend at `address` that it has no way to; `ports` are the configured interfaces.
pub(super) fn obstacle(network: &Network, address: IpAddr, forward: u8, ports: &[&str]) -> String {
    let Some(route) = network.routes.get(&address) else { return "there is no route to it".to_owned() };
    let gateway = Some(route.neighbour).filter(|neighbour| *neighbour != address);
    if let (forward::DSR, Some(gateway)) = (forward, gateway) {
        return format!(
            "its route leads through the gateway {gateway}, and `forward = \"dsr\"` needs it on a network of this host"
        );
    }
    let Some(link) = network.links.iter().find(|link| link.index == route.ifindex) else {
        return "the interface that its route leads through is gone".to_owned();
    };
    let name = &link.name;
    if !link.is_up {
        return format!("its route leads through {name}, which is down");
    }
    if link.mac.is_none() || network.exit(link, ports).is_none() {
        return format!("its route leads through {name}, which is none of the configured interfaces");
    }
    if route.source.is_none() && matches!(forward, forward::IPIP | forward::GUE) {
        return "this host has no address to send wrapped packets to it from".to_owned();
    }
    match gateway {
        Some(gateway) => format!("the link-layer address of its gateway {gateway} is not known"),
        None => "its link-layer address is not known".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::{Link, Route};

    #[test]
    fn each_obstacle_has_words() {
        let address: IpAddr = "10.0.2.11".parse().unwrap();
        let gateway: IpAddr = "10.0.2.1".parse().unwrap();
        let link =
            |is_up, mac| Link { index: 5, name: "eth1".into(), mac, mtu: 1500, is_up, xdp: None, vlan: None };
        let good = || link(true, Some([2; 6]));
        let route = |neighbour, source| Route { ifindex: 5, neighbour, source };
        let direct = || Some(route(address, Some(gateway)));
        let behind = || Some(route(gateway, Some(gateway)));
        for (route, link, forward, ports, expected) in [
            (None, Some(good()), forward::NAT, "eth1", "there is no route to it"),
            (
                behind(),
                Some(good()),
                forward::DSR,
                "eth1",
                "its route leads through the gateway 10.0.2.1, and `forward = \"dsr\"` needs it on a network of this host",
            ),
            (direct(), None, forward::NAT, "eth1", "the interface that its route leads through is gone"),
            (
                direct(),
                Some(link(false, Some([2; 6]))),
                forward::NAT,
                "eth1",
                "its route leads through eth1, which is down",
            ),
            (
                direct(),
                Some(good()),
                forward::NAT,
                "eth0",
                "its route leads through eth1, which is none of the configured interfaces",
            ),
            (
                Some(Route { source: None, ..route(address, None) }),
                Some(good()),
                forward::IPIP,
                "eth1",
                "this host has no address to send wrapped packets to it from",
            ),
            (direct(), Some(good()), forward::DSR, "eth1", "its link-layer address is not known"),
            (
                behind(),
                Some(good()),
                forward::NAT,
                "eth1",
                "the link-layer address of its gateway 10.0.2.1 is not known",
            ),
        ] {
            let network = Network {
                links: link.into_iter().collect(),
                routes: route.map(|route| (address, route)).into_iter().collect(),
                ..Network::default()
            };
            assert_eq!(obstacle(&network, address, forward, &[ports]), expected);
        }
    }
}
