//! Where frames leave: from the kernel's links, routes and neighbours to the next hops of the XDP program. Plain
//! functions of values; `netlink` gets the values.

use std::{collections::HashMap, net::IpAddr};

use balancer_common::{NextHop, Reason, vlan};
use bytemuck::Zeroable as _;

use crate::{address, prefix::Prefix};

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Kernel index.
    pub index: u32,
    /// Name.
    pub name: String,
    /// Ethernet address; `None` for an interface that has none.
    pub mac: Option<[u8; 6]>,
    /// Largest IP packet, in bytes.
    pub mtu: u32,
    /// Whether it is up.
    pub is_up: bool,
    /// The XDP program on it.
    pub xdp: Option<XdpAttachment>,
    /// What it is a VLAN device of.
    pub vlan: Option<Vlan>,
}

/// What a VLAN device puts on the frames of another interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vlan {
    /// Index of that interface.
    pub below: u32,
    /// The tag: one of `vlan::*`.
    pub tag: u32,
}

/// How packets leave by an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// The port of the configured interface that their frames leave by.
    pub port: u16,
    /// Its index.
    pub ifindex: u32,
    /// The tags that they leave with: `vlan::*`.
    pub vlan: u32,
}

/// An XDP program on an interface, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XdpAttachment {
    /// In generic mode.
    pub is_generic: bool,
    /// The program's id.
    pub program: u32,
}

/// Where the kernel would send a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// The interface it leaves by.
    pub ifindex: u32,
    /// The neighbour it goes to: the gateway, or the destination itself.
    pub neighbour: IpAddr,
    /// The address of this host that it would come from.
    pub source: Option<IpAddr>,
}

/// An address of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LocalAddress {
    /// The address.
    pub address: IpAddr,
    /// How many of its leading bits are its network's.
    pub prefix: u8,
    /// The interface that it is on.
    pub ifindex: u32,
}

/// What this host may give clients as their source, so that a backend's replies come to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The address that this host itself would talk to the backend from.
    pub address: IpAddr,
    /// The network that both are on, whose clients the backend answers past this host: how many leading bits of the backend's
    /// address it is, of 128 in either family; all when they share none.
    pub prefix: u8,
}

impl Source {
    /// For a backend, another address of this network for each flow; `None` if it is of the other family.
    pub fn spread_over(network: Prefix, backend: IpAddr) -> Option<Source> {
        let address = network.address();
        let is_its = address.is_ipv4() == backend.is_ipv4();
        is_its.then(|| Source { address, prefix: address::length_on_wire(address, network.length()) })
    }

    /// Whether `address` is it, or one of its network.
    pub fn covers(&self, address: IpAddr) -> bool {
        let [own, other] =
            [self.address, address].map(|address| u128::from_be_bytes(address::to_wire(address)));
        (own ^ other).leading_zeros() >= u32::from(self.prefix)
    }
}

/// What the kernel knows of a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Its MAC, while it may be used.
    pub mac: Option<[u8; 6]>,
    /// Whether the kernel is sure of it for now, so that there is no need to ask.
    pub is_confirmed: bool,
}

/// The kernel's tables, as of one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Network {
    /// Interfaces.
    pub links: Vec<Link>,
    /// This host's own addresses.
    pub addresses: Vec<LocalAddress>,
    /// Routes to the addresses that were asked for; no entry = no way there.
    pub routes: HashMap<IpAddr, Route>,
    /// Neighbours by interface and address.
    pub neighbours: HashMap<(u32, IpAddr), Neighbour>,
}

impl Network {
    /// The interface with this name.
    pub fn link(&self, name: &str) -> Option<&Link> {
        self.links.iter().find(|link| link.name == name)
    }

    /// How the program gets a packet to `address`; `ports` are the configured interfaces' names, by port number.
    pub fn next_hop(&self, address: IpAddr, ports: &[&str]) -> NextHop {
        let unusable = |reason: Reason| NextHop { unusable: reason as u16, ..NextHop::zeroed() };
        let Some(route) = self.routes.get(&address) else { return unusable(Reason::NoEgress) };
        let Some(link) = self.links.iter().find(|link| link.index == route.ifindex) else {
            return unusable(Reason::NoEgress);
        };
        let Some(hop) = self.exit(link, ports).and_then(|exit| exit_hop(link, exit)) else {
            return unusable(Reason::NoEgress);
        };
        match self.neighbours.get(&(route.ifindex, route.neighbour)).and_then(|neighbour| neighbour.mac) {
            Some(mac) => NextHop { neighbour: mac, ..hop },
            None => NextHop { mtu: 0, unusable: Reason::NoNeighbour as u16, ..hop },
        }
    }

    /// How packets leave by an interface: one of those configured, or a VLAN device on one, or on such a device. `None` for
    /// others, and while one of them is down.
    pub fn exit(&self, link: &Link, ports: &[&str]) -> Option<Exit> {
        let (mut at, mut vlan) = (link, vlan::NONE);
        for depth in 0..=2 {
            if !at.is_up {
                return None;
            }
            if let Some(port) = ports.iter().position(|name| *name == at.name) {
                return Some(Exit { port: u16::try_from(port).ok()?, ifindex: at.index, vlan });
            }
            let Vlan { below, tag } = at.vlan?;
            vlan |= tag << (depth * vlan::BITS);
            at = self.links.iter().find(|link| link.index == below)?;
        }
        None
    }

    /// Whether `address` is reached without a gateway.
    pub fn is_on_link(&self, address: IpAddr) -> bool {
        self.routes.get(&address).is_some_and(|route| route.neighbour == address)
    }

    /// What clients of a backend at `address` may be given as their source; `None` while there is no way to it, or no
    /// address to come from.
    pub fn source(&self, address: IpAddr) -> Option<Source> {
        let route = self.routes.get(&address)?;
        let own = route.source.filter(|own| !own.is_unspecified() && !own.is_loopback())?;
        let is_on_link = route.neighbour == address;
        let is_shared = |local: &&LocalAddress| {
            let network = Prefix::of(local.address, local.prefix);
            is_on_link && local.ifindex == route.ifindex && network.contains(address)
        };
        let shared = self.addresses.iter().filter(is_shared);
        // Of several networks the widest.
        let widest = shared.map(|local| local.prefix).min().unwrap_or(address::width(address));
        Some(Source { address: own, prefix: address::length_on_wire(address, widest) })
    }

    /// The neighbours on the way to `addresses` whose MACs the kernel must be asked to find or confirm.
    pub fn unconfirmed(&self, addresses: &[IpAddr]) -> Vec<Route> {
        let routes = addresses.iter().filter_map(|address| self.routes.get(address)).copied();
        let is_confirmed = |route: &Route| {
            let neighbour = self.neighbours.get(&(route.ifindex, route.neighbour));
            neighbour.is_some_and(|neighbour| neighbour.is_confirmed)
        };
        // Backends behind one gateway share a neighbour.
        let mut asked: Vec<Route> = routes.filter(|route| !is_confirmed(route)).collect();
        asked.sort_unstable();
        asked.dedup();
        asked
    }
}

/// The hop that leaves by an interface, its neighbour left open; `None` while nothing can leave by it.
pub fn exit_hop(link: &Link, Exit { port, ifindex, vlan }: Exit) -> Option<NextHop> {
    let source = link.mac.filter(|_| link.is_up)?;
    let mtu = link.mtu.min(u32::from(u16::MAX)) as u16;
    Some(NextHop { neighbour: [0; 6], port, source, mtu, ifindex, vlan, ..NextHop::zeroed() })
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use super::*;

    const BACKEND: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 2, 11));
    const GATEWAY: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 2, 1));
    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
    const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const OWN_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 2, 7));
    const ROUTE: Route = Route { ifindex: 5, neighbour: GATEWAY, source: Some(OWN_ADDRESS) };

    fn network() -> Network {
        let link = Link {
            index: 5,
            name: "eth1".into(),
            mac: Some(OWN),
            mtu: 1500,
            is_up: true,
            xdp: None,
            vlan: None,
        };
        Network {
            links: vec![link],
            addresses: Vec::new(),
            routes: HashMap::from([(BACKEND, ROUTE)]),
            neighbours: HashMap::from([((5, GATEWAY), Neighbour { mac: Some(MAC), is_confirmed: true })]),
        }
    }

    #[test]
    fn a_hop_goes_to_the_neighbour_by_the_routes_interface() {
        let expected =
            NextHop { neighbour: MAC, port: 1, source: OWN, mtu: 1500, ifindex: 5, ..NextHop::zeroed() };
        assert_eq!(network().next_hop(BACKEND, &["eth0", "eth1"]), expected);
    }

    #[test]
    fn what_is_missing_makes_a_hop_unusable_by_name() {
        let hop = |network: &Network, ports: &[&str]| {
            let hop = network.next_hop(BACKEND, ports);
            (hop.mtu, Reason::from_index(hop.unusable.into()).unwrap())
        };
        let ports = &["eth0", "eth1"];
        assert_eq!(hop(&network(), &["eth0"]), (0, Reason::NoEgress), "not a configured interface");
        let mut changed = network();
        changed.routes.clear();
        assert_eq!(hop(&changed, ports), (0, Reason::NoEgress), "no route");
        let mut changed = network();
        changed.links[0].is_up = false;
        assert_eq!(hop(&changed, ports), (0, Reason::NoEgress), "interface down");
        let mut changed = network();
        changed.neighbours.clear();
        assert_eq!(hop(&changed, ports), (0, Reason::NoNeighbour), "neighbour unknown");
        assert_eq!(changed.next_hop(BACKEND, ports).ifindex, 5, "but the rest stands");
    }

    /// By the way to the backend and this host's addresses: the source to give, and to whom.
    #[test]
    fn clients_are_given_this_hosts_address_towards_the_backend() {
        let direct = Route { neighbour: BACKEND, ..ROUTE };
        let local = |address: &str, prefix: u8, ifindex: u32| LocalAddress {
            address: address.parse().unwrap(),
            prefix,
            ifindex,
        };
        let near = local("10.0.2.7", 24, 5);
        type Row<'a> = (Option<Route>, &'a [LocalAddress], Option<u8>);
        let rows: [Row<'_>; 12] = [
            (Some(direct), &[near], Some(120)),
            (Some(direct), &[local("10.0.2.7", 25, 5)], Some(121)),
            (Some(direct), &[near, local("10.0.7.1", 16, 5)], Some(112)),
            (Some(direct), &[local("10.0.2.7", 0, 5)], Some(96)),
            // Behind a gateway, on another interface, by a route to an interface alone, and of another family.
            (Some(ROUTE), &[near], Some(128)),
            (Some(direct), &[local("10.0.2.7", 24, 6)], Some(128)),
            (Some(direct), &[local("10.0.3.7", 24, 5), local("10.0.2.7", 32, 5)], Some(128)),
            (Some(direct), &[local("2001:db8:2::7", 0, 5)], Some(128)),
            // Nothing to give.
            (None, &[near], None),
            (Some(Route { source: None, ..direct }), &[near], None),
            (Some(Route { source: Some(Ipv4Addr::UNSPECIFIED.into()), ..direct }), &[near], None),
            (Some(Route { source: Some(Ipv6Addr::LOCALHOST.into()), ..direct }), &[near], None),
        ];
        for (route, addresses, prefix) in rows {
            let mut network = network();
            network.routes = route.map(|route| (BACKEND, route)).into_iter().collect();
            network.addresses = addresses.to_vec();
            let expected = prefix.map(|prefix| Source { address: OWN_ADDRESS, prefix });
            assert_eq!(network.source(BACKEND), expected, "{route:?} {addresses:?}");
        }
    }

    #[test]
    fn an_ipv6_backend_is_reached_and_its_clients_are_given_a_source_alike() {
        let [backend, own, gateway] =
            ["2001:db8:2::11", "2001:db8:2::1", "fe80::1"].map(|text| text.parse().unwrap());
        let mut network = network();
        let direct = Route { ifindex: 5, neighbour: backend, source: Some(own) };
        network.addresses = vec![
            LocalAddress { address: own, prefix: 64, ifindex: 5 },
            LocalAddress { address: "10.0.2.1".parse().unwrap(), prefix: 0, ifindex: 5 },
            LocalAddress { address: "fe80::7".parse().unwrap(), prefix: 10, ifindex: 5 },
        ];
        for (route, prefix) in [(direct, 64), (Route { neighbour: gateway, ..direct }, 128)] {
            network.routes = HashMap::from([(backend, route)]);
            network.neighbours.clear();
            assert_eq!(network.next_hop(backend, &["eth1"]).unusable, Reason::NoNeighbour as u16);
            assert_eq!(network.unconfirmed(&[backend]), [route]);
            network.neighbours.insert((5, route.neighbour), Neighbour { mac: Some(MAC), is_confirmed: true });
            assert_eq!(network.next_hop(backend, &["eth1"]).neighbour, MAC);
            assert_eq!(network.source(backend), Some(Source { address: own, prefix }));
        }
    }

    #[test]
    fn the_kernel_is_asked_for_neighbours_it_is_not_sure_of() {
        let mut network = network();
        assert_eq!(network.unconfirmed(&[BACKEND]), []);
        network.neighbours.insert((5, GATEWAY), Neighbour { mac: Some(MAC), is_confirmed: false });
        assert_eq!(network.unconfirmed(&[BACKEND]), [ROUTE]);
        network.neighbours.clear();
        assert_eq!(network.unconfirmed(&[BACKEND]).len(), 1);
    }
}
