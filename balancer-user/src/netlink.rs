//! The kernel's links, routes and neighbours, by rtnetlink: read once, then followed.

mod examine;

use std::{collections::HashMap, net::IpAddr, time::Duration};

use anyhow::{Context as _, Result};
use balancer_common::vlan;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use rtnetlink::{
    Handle, MulticastGroup, RouteMessageBuilder, new_connection, new_multicast_connection,
    packet_core::{NetlinkMessage, NetlinkPayload},
    packet_route::{
        RouteNetlinkMessage,
        address::{AddressAttribute, AddressMessage},
        link::{InfoData, InfoVlan, LinkAttribute, LinkFlags, LinkInfo, LinkXdp, VlanProtocol, XdpAttached},
        neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState},
        route::{RouteAddress, RouteAttribute, RouteType, RouteVia},
    },
};
use tokio::sync::{mpsc, watch};

pub use examine::{Detail, Taken};

use crate::{
    address,
    network::{Link, LocalAddress, Neighbour, Network, Route, Vlan, XdpAttachment},
};

/// How long changes are gathered before the tables are read again.
const SETTLE: Duration = Duration::from_millis(20);
/// Most requests that are under way at once: their answers fit into the socket's buffer.
const AT_ONCE: usize = 64;
/// How often neighbours that the kernel is not sure of are asked for.
const CONFIRM: Duration = Duration::from_secs(1);

type Events = futures_util::stream::BoxStream<
    'static,
    (NetlinkMessage<RouteNetlinkMessage>, rtnetlink::sys::SocketAddr),
>;

/// Two connections to rtnetlink: one for requests, and one for what the kernel tells of its own accord. That one loses messages
/// when they come faster than they are read, and an answer that was lost so would be waited for without end.
pub struct Netlink {
    handle: Handle,
    events: Events,
}

impl Netlink {
    /// Connects, and begins to listen for changes. Must be called within a tokio runtime.
    pub fn open() -> Result<Netlink> {
        let groups = [
            MulticastGroup::Link,
            MulticastGroup::Neigh,
            MulticastGroup::Ipv4Route,
            MulticastGroup::Ipv4Ifaddr,
            MulticastGroup::Ipv6Route,
            MulticastGroup::Ipv6Ifaddr,
        ];
        let (connection, handle, _) = new_connection().context("open a netlink socket")?;
        tokio::spawn(connection);
        let (connection, _, events) = new_multicast_connection(&groups).context("open a netlink socket")?;
        tokio::spawn(connection);
        Ok(Netlink { handle, events: events.boxed() })
    }

    /// Reads all tables, with the routes to `addresses`.
    pub async fn read(&self, addresses: &[IpAddr]) -> Result<Network> {
        let mut network = Network {
            links: self.links().await?,
            addresses: self.addresses().await?,
            neighbours: self.neighbours().await?,
            ..Network::default()
        };
        // The kernel has no one answer to what many addresses' routes are.
        let mut routes = stream::iter(addresses)
            .map(|address| async { (*address, self.route(*address).await) })
            .buffer_unordered(AT_ONCE);
        while let Some((address, route)) = routes.next().await {
            network.routes.extend(route.map(|route| (address, route)));
        }
        drop(routes);
        Ok(network)
    }

    /// Asks the kernel to find or confirm the MACs on the way to `addresses`.
    pub async fn confirm(&self, network: &Network, addresses: &[IpAddr]) {
        let ask = |route: Route| self.ask_for(route.ifindex, route.neighbour);
        stream::iter(network.unconfirmed(addresses)).for_each_concurrent(AT_ONCE, ask).await;
    }

    /// Asks the kernel to find or confirm a neighbour's MAC.
    async fn ask_for(&self, ifindex: u32, neighbour: IpAddr) {
        let request = self
            .handle
            .neighbours()
            .add(ifindex, neighbour)
            .state(NeighbourState::None)
            .flags(NeighbourFlags::Use)
            .replace();
        if let Err(error) = request.execute().await {
            tracing::debug!("ask for the neighbour {neighbour}: {error}");
        }
    }

    /// Keeps `network` in step with the kernel, with the routes to the latest `addresses`, until its receivers are gone; and
    /// asks for the `neighbours` that it is told, each an interface and an address.
    pub async fn follow(
        mut self,
        mut addresses: watch::Receiver<Vec<IpAddr>>,
        mut neighbours: mpsc::Receiver<(u32, IpAddr)>,
        network: watch::Sender<Network>,
    ) -> Result<()> {
        let mut confirm = tokio::time::interval(CONFIRM);
        loop {
            tokio::select! {
                event = self.events.next() => {
                    let Some(first) = event else { anyhow::bail!("the kernel closed the netlink socket") };
                    match self.gather(first.0).await {
                        Change::Nothing => continue,
                        Change::Neighbours => {
                            let neighbours = self.neighbours().await?;
                            network.send_if_modified(|seen| {
                                let is_changed = seen.neighbours != neighbours;
                                seen.neighbours = neighbours;
                                is_changed
                            });
                            // A neighbour that was forgotten is asked for at once: until then its flows are refused.
                            let (seen, addresses) = (network.borrow().clone(), addresses.borrow().clone());
                            self.confirm(&seen, &addresses).await;
                            continue;
                        }
                        Change::Ways => {}
                    }
                }
                _ = confirm.tick() => {
                    let (seen, addresses) = (network.borrow().clone(), addresses.borrow().clone());
                    self.confirm(&seen, &addresses).await;
                    continue;
                }
                Some((ifindex, neighbour)) = neighbours.recv() => {
                    self.ask_for(ifindex, neighbour).await;
                    continue;
                }
                changed = addresses.changed() => changed.context("follow the backends' addresses")?,
                () = network.closed() => return Ok(()),
            }
            let wanted = addresses.borrow_and_update().clone();
            let now = self.read(&wanted).await?;
            // New backends' neighbours are asked for at once.
            self.confirm(&now, &wanted).await;
            network.send_if_modified(|seen| {
                let is_changed = *seen != now;
                *seen = now;
                is_changed
            });
        }
    }

    /// Waits a little for what comes with `first`; what all of it changes.
    async fn gather(&mut self, first: NetlinkMessage<RouteNetlinkMessage>) -> Change {
        let mut change = change(&first);
        let settle = tokio::time::sleep(SETTLE);
        tokio::pin!(settle);
        loop {
            tokio::select! {
                event = self.events.next() => match event {
                    Some((message, _)) => change = change.max(self::change(&message)),
                    None => return change,
                },
                () = &mut settle => return change,
            }
        }
    }

    async fn links(&self) -> Result<Vec<Link>> {
        let messages: Vec<_> =
            self.handle.link().get().execute().try_collect().await.context("read the network interfaces")?;
        Ok(messages
            .into_iter()
            .map(|message| {
                let mut link = Link {
                    index: message.header.index,
                    name: String::new(),
                    mac: None,
                    mtu: 0,
                    is_up: message.header.flags.contains(LinkFlags::Up),
                    xdp: None,
                    vlan: None,
                };
                let (mut below, mut tag) = (None, None);
                for attribute in message.attributes {
                    match attribute {
                        LinkAttribute::IfName(name) => link.name = name,
                        LinkAttribute::Address(address) => link.mac = address.try_into().ok(),
                        LinkAttribute::Mtu(mtu) => link.mtu = mtu,
                        LinkAttribute::Xdp(attributes) => link.xdp = attachment(&attributes),
                        LinkAttribute::Link(index) => below = Some(index),
                        LinkAttribute::LinkInfo(infos) => tag = vlan_tag(&infos),
                        _ => {}
                    }
                }
                link.vlan = below.zip(tag).map(|(below, tag)| Vlan { below, tag });
                link
            })
            .collect())
    }

    async fn addresses(&self) -> Result<Vec<LocalAddress>> {
        let request = self.handle.address().get();
        let messages: Vec<_> = request.execute().try_collect().await.context("read the host's addresses")?;
        let of_message = |message: AddressMessage| {
            let (prefix, ifindex) = (message.header.prefix_len, message.header.index);
            // Where the link has another end, `Address` is that one's.
            let local = message.attributes.iter().find_map(|attribute| match attribute {
                AddressAttribute::Local(address) => Some(*address),
                _ => None,
            });
            let any = message.attributes.iter().find_map(|attribute| match attribute {
                AddressAttribute::Address(address) => Some(*address),
                _ => None,
            });
            local.or(any).map(|address| LocalAddress { address, prefix, ifindex })
        };
        let mut addresses: Vec<LocalAddress> = messages.into_iter().filter_map(of_message).collect();
        addresses.sort_unstable();
        addresses.dedup();
        Ok(addresses)
    }

    async fn neighbours(&self) -> Result<HashMap<(u32, IpAddr), Neighbour>> {
        let request = self.handle.neighbours().get();
        let messages: Vec<_> = request.execute().try_collect().await.context("read the neighbours")?;
        Ok(messages.into_iter().filter_map(neighbour).collect())
    }

    /// Where the kernel would send a packet for `address`; `None` when it would not send it on.
    async fn route(&self, address: IpAddr) -> Option<Route> {
        let request = RouteMessageBuilder::<IpAddr>::new()
            .destination_prefix(address, address::width(address))
            .ok()?
            .build();
        let answer = self.handle.route().get(request).execute().try_next().await.ok()??;
        if answer.header.kind != RouteType::Unicast {
            return None;
        }
        let mut route = Route { ifindex: 0, neighbour: address, source: None };
        for attribute in answer.attributes {
            match attribute {
                RouteAttribute::Oif(index) => route.ifindex = index,
                RouteAttribute::Gateway(gateway) => route.neighbour = ip(&gateway)?,
                RouteAttribute::Via(RouteVia::Inet6(gateway)) => route.neighbour = gateway.into(),
                RouteAttribute::PrefSource(source) => route.source = ip(&source),
                _ => {}
            }
        }
        (route.ifindex != 0).then_some(route)
    }
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some(IpAddr::V4(*address)),
        RouteAddress::Inet6(address) => Some(IpAddr::V6(*address)),
        _ => None,
    }
}

/// The tag of a VLAN device; `None` for other interfaces.
fn vlan_tag(infos: &[LinkInfo]) -> Option<u32> {
    let attributes = infos.iter().find_map(|info| match info {
        LinkInfo::Data(InfoData::Vlan(attributes)) => Some(attributes),
        _ => None,
    })?;
    let (mut id, mut kind) = (None, 0);
    for attribute in attributes {
        match attribute {
            InfoVlan::Id(number) => id = Some(u32::from(*number)),
            InfoVlan::Protocol(VlanProtocol::Ieee8021Ad) => kind = vlan::SERVICE,
            _ => {}
        }
    }
    id.map(|id| kind | id)
}

fn attachment(attributes: &[LinkXdp]) -> Option<XdpAttachment> {
    let mut is_generic = false;
    let mut program = 0;
    for attribute in attributes {
        match attribute {
            LinkXdp::Attached(XdpAttached::None) => return None,
            LinkXdp::Attached(mode) => is_generic = *mode == XdpAttached::SocketBuffer,
            LinkXdp::ProgId(id) => program = *id,
            _ => {}
        }
    }
    (program != 0).then_some(XdpAttachment { is_generic, program })
}

fn neighbour(message: NeighbourMessage) -> Option<((u32, IpAddr), Neighbour)> {
    let state = message.header.state;
    let mut address = None;
    let mut mac = None;
    for attribute in message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(destination)) => {
                address = Some(IpAddr::V4(destination));
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(destination)) => {
                address = Some(IpAddr::V6(destination));
            }
            NeighbourAttribute::LinkLayerAddress(bytes) => mac = bytes.try_into().ok(),
            _ => {}
        }
    }
    use NeighbourState::{Delay, Noarp, Permanent, Probe, Reachable, Stale};
    let is_usable = matches!(state, Reachable | Stale | Delay | Probe | Permanent | Noarp);
    // What the kernel is confirming right now needs no second request.
    let is_confirmed = matches!(state, Reachable | Delay | Probe | Permanent | Noarp);
    Some(((message.header.ifindex, address?), Neighbour { mac: mac.filter(|_| is_usable), is_confirmed }))
}

/// What must be read again after a message.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Change {
    Nothing,
    Neighbours,
    /// Links, addresses, routes: everything.
    Ways,
}

fn change(message: &NetlinkMessage<RouteNetlinkMessage>) -> Change {
    use RouteNetlinkMessage::{
        DelAddress, DelLink, DelNeighbour, DelRoute, NewAddress, NewLink, NewNeighbour, NewRoute,
    };
    match message.payload {
        NetlinkPayload::InnerMessage(NewNeighbour(_) | DelNeighbour(_)) => Change::Neighbours,
        NetlinkPayload::InnerMessage(
            NewLink(_) | DelLink(_) | NewRoute(_) | DelRoute(_) | NewAddress(_) | DelAddress(_),
        )
        | NetlinkPayload::Overrun(_) => Change::Ways,
        _ => Change::Nothing,
    }
}
