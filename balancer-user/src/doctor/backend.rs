//! Whether a host that holds a service's address answers for it, and for nothing else.

use std::net::IpAddr;

use super::Finding;
use crate::{address, config::Forward};

/// What a backend is asked to be.
#[derive(Clone, Copy, Debug)]
pub struct Serving {
    /// The service's address.
    pub service: IpAddr,
    /// How packets come: `dsr`, `ipip` or `gue`.
    pub forward: Forward,
    /// `gue`: the UDP port they come to.
    pub gue_port: u16,
    /// A client, to whom the answers' way is looked up.
    pub client: IpAddr,
}

/// What a backend is, as far as it matters to one service.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Where the service's address is.
    pub places: Vec<Place>,
    /// The Ethernet interfaces that packets come in by.
    pub wires: Vec<Wire>,
    /// The kernel's devices that unwrap what comes, of either outer family.
    pub tunnels: Vec<Tunnel>,
    /// Whether the kernel unwraps UDP at the port.
    pub has_gue_port: bool,
    /// The interface by which answers to the client leave; `None` = there is no way.
    pub way_back: Option<String>,
}

/// Where an address is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The interface.
    pub interface: String,
    /// How many leading bits are its network's.
    pub prefix: u8,
    /// Whether neighbours can ask for it there.
    pub is_ethernet: bool,
}

/// An interface that is connected to others.
#[derive(Clone, Debug)]
pub struct Wire {
    /// Its name.
    pub name: String,
    /// Its MTU.
    pub mtu: u32,
    /// Whether `balancer decap` is on it.
    pub unwraps: bool,
    /// The settings of IPv4 as they hold: the larger of `all` and the interface's.
    pub arp_ignore: u8,
    /// The same.
    pub arp_announce: u8,
    /// What the kernel would do with a packet of the client to the service that came in here.
    pub verdict: Verdict,
}

/// A device that unwraps.
#[derive(Clone, Debug)]
pub struct Tunnel {
    /// Its name.
    pub name: String,
    /// What the kernel would do with what it unwraps.
    pub verdict: Verdict,
}

/// What becomes of a packet that comes in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is this host's.
    Local,
    /// `rp_filter` throws it away.
    Filtered,
    /// Anything else: why it is not delivered.
    Lost(String),
}

impl Serving {
    /// What is found.
    pub fn judge(&self, facts: &Facts) -> Vec<Finding> {
        let mut findings = self.places(facts);
        if self.service.is_ipv4() {
            facts.wires.iter().for_each(|wire| self.silence(wire, &mut findings));
        }
        if self.forward.is_tunnel() {
            self.tunnels(facts, &mut findings);
        } else {
            for wire in &facts.wires {
                self.delivery(facts, &wire.name, &wire.verdict, &mut findings);
            }
        }
        if facts.wires.is_empty() {
            findings.push(Finding::failure(
                "interfaces",
                "no Ethernet interface is up",
                "bring up the one that the balancer's packets come in by",
            ));
        }
        findings.push(match &facts.way_back {
            Some(interface) => Finding::fine(
                self.client.to_string(),
                format!("answers to this client leave by {interface}, past the balancer"),
            ),
            None => Finding::failure(
                self.client.to_string(),
                "there is no route to this client, so nobody is answered",
                "add a default route, or name a client that there is a route to with `--client`",
            ),
        });
        findings
    }

    fn places(&self, facts: &Facts) -> Vec<Finding> {
        let (address, whole) = (self.service, address::width(self.service));
        let add = format!("`ip address add {address}/{whole} dev lo`");
        let about = address.to_string();
        if facts.places.is_empty() {
            return vec![Finding::failure(about, "the service's address is not on this host", add)];
        }
        let judge = |place: &Place| {
            let (interface, prefix) = (&place.interface, place.prefix);
            let instead = format!("`ip address del {address}/{prefix} dev {interface}`, and {add}");
            if place.is_ethernet {
                Finding::failure(
                    &about,
                    format!(
                        "is on {interface}, so this host tells its neighbours that it is here, and takes it from the balancer"
                    ),
                    instead,
                )
            } else if prefix != whole {
                Finding::failure(
                    &about,
                    format!(
                        "is on {interface} with its network (/{prefix}), all of which this host takes for its own"
                    ),
                    instead,
                )
            } else {
                Finding::fine(&about, format!("is on {interface}"))
            }
        };
        facts.places.iter().map(judge).collect()
    }

    /// Whether an interface is silent about the address, which is on another one.
    fn silence(&self, wire: &Wire, findings: &mut Vec<Finding>) {
        let Wire { name, arp_ignore, arp_announce, .. } = wire;
        let is_ignored = matches!(arp_ignore, 1 | 2 | 8);
        let settings = [
            ("arp_ignore", *arp_ignore, is_ignored, "1", "it answers ARP for the service's address"),
            (
                "arp_announce",
                *arp_announce,
                *arp_announce == 2,
                "2",
                "it asks its neighbours in the service's name",
            ),
        ];
        for (setting, value, is_right, right, what) in settings {
            if is_right {
                findings.push(Finding::fine(name, format!("{setting} is {value}")));
                continue;
            }
            let what = format!(
                "{setting} is {value}: {what}, and so takes clients and routers away from the balancer"
            );
            let advice = format!("`sysctl -w net.ipv4.conf.all.{setting}={right}`");
            // Who gets packets in tunnels may be on another network than the service's clients and routers.
            findings.push(match self.forward.is_tunnel() {
                true => Finding::warning(name, what, advice),
                false => Finding::failure(name, what, advice),
            });
        }
    }

    fn tunnels(&self, facts: &Facts, findings: &mut Vec<Finding>) {
        let Serving { forward, gue_port, service, .. } = self;
        let kernel = if *forward == Forward::Gue && !facts.has_gue_port { &[][..] } else { &facts.tunnels };
        for tunnel in kernel {
            findings.push(Finding::fine(&tunnel.name, format!("unwraps {forward}")));
            self.delivery(facts, &tunnel.name, &tunnel.verdict, findings);
        }
        let by_program: Vec<_> = facts.wires.iter().filter(|wire| wire.unwraps).collect();
        for wire in &by_program {
            findings.push(Finding::fine(&wire.name, format!("`balancer decap` unwraps {forward}")));
            self.delivery(facts, &wire.name, &wire.verdict, findings);
        }
        if kernel.is_empty() && by_program.is_empty() {
            let device = match (forward, service) {
                (Forward::Gue, _) => format!("a tunnel device and `ip fou add port {gue_port} gue`"),
                (_, IpAddr::V4(_)) => {
                    "a device of the kernel's, `ip link add t0 type ipip local ADDRESS remote BALANCER`"
                        .to_owned()
                }
                (_, IpAddr::V6(_)) => "a device of the kernel's, of type sit or ip6tnl".to_owned(),
            };
            findings.push(Finding::failure(
                forward.to_string(),
                "nothing on this host unwraps what the balancer sends",
                format!("`balancer decap IFACE --from BALANCER`, or {device}"),
            ));
        }
        let overhead = if *forward == Forward::Gue { 28 } else { 20 };
        for wire in facts.wires.iter().filter(|wire| wire.mtu < 1500 + overhead) {
            findings.push(Finding::warning(
                &wire.name,
                format!(
                    "clients' packets of 1500 bytes do not fit into its MTU of {} when they are wrapped, so the balancer \
                     tells their senders to make them smaller",
                    wire.mtu
                ),
                format!("where the network allows it: `ip link set {} mtu {}`, and more for IPv6", wire.name, 1500 + overhead),
            ));
        }
    }

    fn delivery(&self, facts: &Facts, interface: &str, verdict: &Verdict, findings: &mut Vec<Finding>) {
        if facts.places.is_empty() {
            // Which has been said.
            return;
        }
        let Serving { client, service, .. } = self;
        findings.push(match verdict {
            Verdict::Local => {
                Finding::fine(interface, format!("packets from {client} to {service} are taken in"))
            }
            Verdict::Filtered => Finding::failure(
                interface,
                format!("rp_filter throws away what {client} sends, since answers leave by another interface or by none"),
                format!("`sysctl -w net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.{interface}.rp_filter=0`, or 2, which is content with any route"),
            ),
            Verdict::Lost(why) => Finding::failure(
                interface,
                format!("packets from {client} to {service} are not taken in: {why}"),
                format!("look at `ip route get {service} from {client} iif {interface}`"),
            ),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Level;

    fn serving(forward: Forward) -> Serving {
        let [service, client] = ["192.0.2.10", "198.51.100.7"].map(|text| text.parse().unwrap());
        Serving { service, forward, gue_port: 6080, client }
    }

    fn facts() -> Facts {
        let wire = Wire {
            name: "eth0".to_owned(),
            mtu: 1600,
            unwraps: true,
            arp_ignore: 1,
            arp_announce: 2,
            verdict: Verdict::Local,
        };
        Facts {
            places: vec![Place { interface: "lo".to_owned(), prefix: 32, is_ethernet: false }],
            wires: vec![wire],
            tunnels: Vec::new(),
            has_gue_port: false,
            way_back: Some("eth0".to_owned()),
        }
    }

    fn changed(change: impl FnOnce(&mut Facts)) -> Facts {
        let mut facts = facts();
        change(&mut facts);
        facts
    }

    #[test]
    fn each_fault_of_a_backend_is_found_alone() {
        use Forward::{Dsr, Gue, Ipip};
        use Level::{Failure, Warning};
        let tunnel = |verdict| Tunnel { name: "t4".to_owned(), verdict };
        let by_kernel = |verdict, has_gue_port| {
            changed(|facts| {
                facts.wires[0].unwraps = false;
                facts.tunnels = vec![tunnel(verdict)];
                facts.has_gue_port = has_gue_port;
            })
        };
        let lost = Verdict::Lost("no route".to_owned());
        let rows = [
            (Dsr, facts(), None),
            (Ipip, facts(), None),
            (Gue, facts(), None),
            (Dsr, changed(|facts| facts.places.clear()), Some((Failure, "is not on this host"))),
            (
                Dsr,
                changed(|facts| facts.places[0].is_ethernet = true),
                Some((Failure, "tells its neighbours")),
            ),
            (Dsr, changed(|facts| facts.places[0].prefix = 24), Some((Failure, "with its network (/24)"))),
            (Dsr, changed(|facts| facts.wires[0].arp_ignore = 0), Some((Failure, "arp_ignore is 0"))),
            (Dsr, changed(|facts| facts.wires[0].arp_ignore = 2), None),
            (Dsr, changed(|facts| facts.wires[0].arp_ignore = 3), Some((Failure, "arp_ignore is 3"))),
            (Dsr, changed(|facts| facts.wires[0].arp_announce = 1), Some((Failure, "arp_announce is 1"))),
            (Ipip, changed(|facts| facts.wires[0].arp_ignore = 0), Some((Warning, "arp_ignore is 0"))),
            (
                Dsr,
                changed(|facts| facts.wires[0].verdict = Verdict::Filtered),
                Some((Failure, "rp_filter throws")),
            ),
            (Dsr, changed(|facts| facts.wires[0].verdict = lost.clone()), Some((Failure, "no route"))),
            (Dsr, changed(|facts| facts.wires.clear()), Some((Failure, "no Ethernet interface is up"))),
            (Dsr, changed(|facts| facts.way_back = None), Some((Failure, "no route to this client"))),
            (Dsr, changed(|facts| facts.wires[0].mtu = 1500), None),
            (Dsr, changed(|facts| facts.wires[0].unwraps = false), None),
            (Ipip, changed(|facts| facts.wires[0].mtu = 1519), Some((Warning, "MTU of 1519"))),
            (Ipip, changed(|facts| facts.wires[0].mtu = 1520), None),
            (Gue, changed(|facts| facts.wires[0].mtu = 1527), Some((Warning, "MTU of 1527"))),
            (
                Ipip,
                changed(|facts| facts.wires[0].unwraps = false),
                Some((Failure, "nothing on this host unwraps")),
            ),
            (
                Ipip,
                changed(|facts| facts.wires[0].verdict = Verdict::Filtered),
                Some((Failure, "rp_filter throws")),
            ),
            (Ipip, by_kernel(Verdict::Local, false), None),
            (Ipip, by_kernel(Verdict::Filtered, false), Some((Failure, "rp_filter throws"))),
            (Gue, by_kernel(Verdict::Local, true), None),
            (Gue, by_kernel(Verdict::Local, false), Some((Failure, "nothing on this host unwraps"))),
        ];
        for (row, (forward, facts, expected)) in rows.into_iter().enumerate() {
            let found: Vec<_> = serving(forward)
                .judge(&facts)
                .into_iter()
                .filter(|finding| finding.level != Level::Fine)
                .collect();
            match (&found[..], expected) {
                ([], None) => {}
                ([finding], Some((level, part))) if finding.level == level && finding.what.contains(part) => {
                    assert!(!finding.advice.is_empty());
                }
                _ => panic!("row {row}: {found:?}"),
            }
        }
    }

    /// Neighbours are not asked for IPv6 addresses of other interfaces.
    #[test]
    fn ipv6_needs_no_silence() {
        let service = "2001:db8:aa::10".parse().unwrap();
        let facts = changed(|facts| {
            facts.wires[0].arp_ignore = 0;
            facts.places[0].prefix = 128;
        });
        let found = Serving { service, ..serving(Forward::Dsr) }.judge(&facts);
        assert!(found.iter().all(|finding| finding.level == Level::Fine), "{found:?}");
    }
}
