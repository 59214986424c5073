//! Configuration files for the bench of network namespaces.

use std::net::SocketAddr;

use crate::topology::Family;

/// The port of a service and of its backends, unless a test says otherwise.
pub const VIP_PORT: u16 = 80;
/// The port that backends listen on.
pub const BACKEND_PORT: u16 = 8080;

/// One service. Its backends are called `b1`, `b2`, … in their order.
#[derive(Clone, Debug)]
pub struct Service {
    /// Its name.
    pub name: String,
    /// What clients talk to.
    pub address: SocketAddr,
    /// `tcp` or `udp`.
    pub protocol: &'static str,
    /// How the backend of a new flow is chosen.
    pub method: &'static str,
    /// Further lines of the section.
    pub more: &'static str,
    /// Address and weight of each backend.
    pub backends: Vec<(SocketAddr, u8)>,
}

impl Service {
    /// A service at `VIP`:80 with backends 1, 2, … of these weights at their port 8080, called as its protocol.
    pub fn new(protocol: &'static str, method: &'static str, weights: &[u8]) -> Self {
        Self::of(Family::Ipv4, protocol, method, weights)
    }

    /// The same at the addresses of a family; with IPv6, a 6 is added to its name.
    pub fn of(family: Family, protocol: &'static str, method: &'static str, weights: &[u8]) -> Self {
        let backend =
            |(number, weight): (u8, &u8)| (SocketAddr::new(family.backend(number), BACKEND_PORT), *weight);
        let suffix = if family == Family::Ipv6 { "6" } else { "" };
        Self {
            name: format!("{protocol}{suffix}"),
            address: SocketAddr::new(family.vip(), VIP_PORT),
            protocol,
            method,
            more: "",
            backends: (1..).zip(weights).map(backend).collect(),
        }
    }
}

/// A configuration file for the balancer's namespace; `daemon` are further lines of its `[daemon]` section. The window is
/// longer than any test: what was counted stays in it, and `window_ms` tells one status from the next.
pub fn text(daemon: &str, services: &[Service]) -> String {
    let mut text = format!("[daemon]\ninterfaces = [\"lc\", \"lk\"]\nwindow = \"5m\"\n{daemon}\n");
    for service in services {
        let Service { name, address, protocol, method, more, backends } = service;
        text.push_str(&format!(
            "\n[[service]]\nname = \"{name}\"\naddress = \"{address}\"\nprotocol = \"{protocol}\"\n\
             method = \"{method}\"\n{more}\n"
        ));
        for (number, (address, weight)) in (1..).zip(backends) {
            text.push_str(&format!(
                "\n[[service.backend]]\nname = \"b{number}\"\naddress = \"{address}\"\nweight = {weight}\n"
            ));
        }
    }
    text
}
