//! The bench for services whose replies go to the client past the balancer.
#![allow(clippy::unwrap_used, reason = "it is a part of tests, which say what they expect")]

use std::time::Duration;

use crate::{
    Netns, Plan, Process, Topology, eventually,
    process::balancer_binary,
    topology::{VIP, VIP6},
    veth::{self, End},
};

const LIMIT: Duration = Duration::from_secs(10);

/// The bench with IPv6, and a router by which the backends' answers reach the client: over a second device of it, `c1`.
pub struct Detour {
    /// Without the router.
    pub bench: Topology,
    /// The router.
    pub router: Netns,
}

impl Detour {
    /// With so many backends, which have the services' addresses on their loopback devices.
    pub fn new(backends: u8) -> Self {
        let bench = Plan { ipv6: true, ..Plan::backends(backends) }.build().unwrap();
        let router = Netns::new("router").unwrap();
        let end = |netns, device| End { netns, device, mac: None };
        veth::pair(end(&bench.switch, "pr"), end(&router, "r0"), 1500).unwrap();
        veth::pair(end(&bench.client, "c1"), end(&router, "r1"), 1500).unwrap();
        bench.switch.ip("link set pr master br0").unwrap();
        for (netns, devices) in [(&router, &["r0", "r1"][..]), (&bench.client, &["c1"][..])] {
            for device in devices {
                netns.set_sysctl(&format!("net/ipv6/conf/{device}/disable_ipv6"), "0").unwrap();
            }
        }
        router.set_sysctl("net/ipv4/ip_forward", "1").unwrap();
        router.set_sysctl("net/ipv6/conf/all/forwarding", "1").unwrap();
        let lines = "address add 10.0.2.254/24 dev r0\naddress add 2001:db8:2::254/64 dev r0 nodad\n\
                     address add 10.0.3.1/24 dev r1\naddress add 2001:db8:3::1/64 dev r1 nodad\n\
                     route add 10.0.1.0/24 via 10.0.3.10\nroute add 2001:db8:1::/64 via 2001:db8:3::10\n";
        let of_client = "address add 10.0.3.10/24 dev c1\naddress add 2001:db8:3::10/64 dev c1 nodad\n";
        bench.client.ip_batch(of_client).unwrap();
        router.ip_batch(lines).unwrap();
        for backend in &bench.backends {
            // Each has the service's address, and is silent about it.
            backend.set_sysctl("net/ipv4/conf/all/arp_ignore", "1").unwrap();
            backend.set_sysctl("net/ipv4/conf/all/arp_announce", "2").unwrap();
            let lines = format!(
                "address add {VIP}/32 dev lo\naddress add {VIP6}/128 dev lo nodad\n\
                 route add 10.0.1.0/24 via 10.0.2.254\nroute add 2001:db8:1::/64 via 2001:db8:2::254\n"
            );
            backend.ip_batch(&lines).unwrap();
        }
        Self { bench, router }
    }

    /// `balancer decap` on each backend.
    pub fn unwrap(&self, more: &[&str]) -> Vec<Process> {
        let start = |backend: &Netns| {
            let mut command = backend.command(balancer_binary().unwrap());
            let process = Process::spawn(command.args(["decap", "e0"]).args(more)).unwrap();
            eventually(LIMIT, "the program on the backend", || {
                process.log().contains("unwrapping on e0 in native mode").then_some(())
            })
            .unwrap_or_else(|error| panic!("{error:#}: {}", process.log()));
            process
        };
        self.bench.backends.iter().map(start).collect()
    }
}
