//! The bench that all recipes use: a client, the balancer, and backends behind a switch.
//!
//! ```text
//!  client          balancer            switch (bridge)          backend 1, 2, …
//!  c0 ──────────── lc    lk ────────── lkp  p1 ──────────────── e0 10.0.2.11/24
//!  10.0.1.10/24    10.0.1.1/24         (no addresses)           e0 10.0.2.12/24 …
//!                        10.0.2.1/24
//! ```
//!
//! With [`Plan::ipv6`] the same devices have the addresses 2001:db8:1::10 and 2001:db8:1::1, 2001:db8:2::1 and
//! 2001:db8:2::11, … as well, each in a network of 64 bits.
//!
//! The kernel forwards nothing in the balancer's namespace (unless [`Plan::forwarding`] says so), so what crosses it
//! crossed it in XDP.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result};

use crate::{
    Netns,
    veth::{self, End},
    xdp::PassProgram,
};

/// The address that clients talk to.
pub const VIP: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 10);
/// The same for IPv6.
pub const VIP6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xaa, 0, 0, 0, 0, 0x10);
/// The network of this and other such addresses; the client's route leads to the balancer.
const VIPS: &str = "192.0.2.0/24";
/// The same for IPv6.
const VIPS6: &str = "2001:db8:aa::/64";
/// The client.
pub const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 10);
/// The same for IPv6.
pub const CLIENT6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 0x10);
/// The balancer, as the client sees it.
pub const BALANCER_CLIENT_SIDE: Ipv4Addr = Ipv4Addr::new(10, 0, 1, 1);
/// The same for IPv6.
pub const BALANCER_CLIENT_SIDE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 1);
/// The balancer, as the backends see it.
pub const BALANCER_BACKEND_SIDE: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 1);
/// The same for IPv6.
pub const BALANCER_BACKEND_SIDE6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, 1);

/// What to build. `Plan::default().build()` gives the plan of addresses with three backends.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How many backends, up to 200.
    pub backends: u8,
    /// The MTU of all devices.
    pub mtu: u32,
    /// Whether the balancer's kernel forwards packets too.
    pub forwarding: bool,
    /// Whether the devices have IPv6 addresses.
    pub ipv6: bool,
    /// How many queues the balancer's devices have in each direction.
    pub queues: u8,
}

impl Default for Plan {
    fn default() -> Self {
        Self { backends: 3, mtu: 1500, forwarding: false, ipv6: false, queues: 1 }
    }
}

impl Plan {
    /// The default plan with `backends` backends.
    pub fn backends(backends: u8) -> Self {
        Self { backends, ..Self::default() }
    }

    /// Builds it.
    pub fn build(&self) -> Result<Topology> {
        Topology::new(self).context("build the bench of network namespaces")
    }
}

/// The bench, ready: every device is up, and the far ends of the balancer's devices have a program that passes.
#[derive(Debug)]
pub struct Topology {
    // The links go before the namespaces that their devices are in.
    _pass: [PassProgram; 2],
    /// The client's namespace; its device is `c0`.
    pub client: Netns,
    /// The balancer's namespace; its devices are `lc` towards the client and `lk` towards the backends.
    pub balancer: Netns,
    /// The switch's namespace; its ports are `lkp` towards the balancer and `p1`, `p2`, … towards the backends.
    pub switch: Netns,
    /// The backends' namespaces; the device of each is `e0`.
    pub backends: Vec<Netns>,
}

impl Topology {
    fn new(plan: &Plan) -> Result<Self> {
        anyhow::ensure!(
            plan.backends <= 200,
            "{} backends do not fit into the plan of addresses",
            plan.backends
        );
        let client = Netns::new("client")?;
        let balancer = Netns::new("balancer")?;
        let switch = Netns::new("switch")?;
        if plan.forwarding {
            balancer.set_sysctl("net/ipv4/ip_forward", "1")?;
            balancer.set_sysctl("net/ipv6/conf/all/forwarding", "1")?;
            balancer.set_sysctl("net/ipv6/conf/default/forwarding", "1")?;
        }

        veth::pair_with_queues(
            End { netns: &client, device: "c0", mac: Some(mac(CLIENT)) },
            End { netns: &balancer, device: "lc", mac: Some(mac(BALANCER_CLIENT_SIDE)) },
            plan.mtu,
            plan.queues,
        )?;
        switch.ip(&format!("link add br0 mtu {} type bridge stp_state 0 mcast_snooping 0", plan.mtu))?;
        veth::pair_with_queues(
            End { netns: &switch, device: "lkp", mac: None },
            End { netns: &balancer, device: "lk", mac: Some(mac(BALANCER_BACKEND_SIDE)) },
            plan.mtu,
            plan.queues,
        )?;
        let mut ports = String::from("link set br0 up\nlink set lkp master br0\n");
        let mut backends = Vec::new();
        for number in 1..=plan.backends {
            let backend = Netns::new(&format!("backend {number}"))?;
            let port = format!("p{number}");
            veth::pair(
                End { netns: &switch, device: &port, mac: None },
                End { netns: &backend, device: "e0", mac: Some(mac(backend_address(number))) },
                plan.mtu,
            )?;
            ports.push_str(&format!("link set {port} master br0\n"));
            backends.push(backend);
        }
        switch.ip_batch(&ports)?;

        let addressing = Addressing { ipv6: plan.ipv6 };
        addressing.add(&balancer, "lc", BALANCER_CLIENT_SIDE, BALANCER_CLIENT_SIDE6, None)?;
        addressing.add(&balancer, "lk", BALANCER_BACKEND_SIDE, BALANCER_BACKEND_SIDE6, None)?;
        let to_vip = [
            format!("route add {VIPS} via {BALANCER_CLIENT_SIDE}"),
            format!("route add {VIPS6} via {BALANCER_CLIENT_SIDE6}"),
        ];
        addressing.add(&client, "c0", CLIENT, CLIENT6, Some(to_vip))?;
        veth::finish_checksums(&client, "c0")?;
        for (number, backend) in (1..).zip(&backends) {
            let (address, address6) = (backend_address(number), backend_address6(number));
            let default = [
                format!("route add default via {BALANCER_BACKEND_SIDE}"),
                format!("route add ::/0 via {BALANCER_BACKEND_SIDE6}"),
            ];
            addressing.add(backend, "e0", address, address6, Some(default))?;
            veth::finish_checksums(backend, "e0")?;
        }

        let pass = [PassProgram::attach(&client, "c0")?, PassProgram::attach(&switch, "lkp")?];
        veth::keep_frames_apart(&client, "c0")?;
        veth::keep_frames_apart(&switch, "lkp")?;
        Ok(Self { _pass: pass, client, balancer, switch, backends })
    }

    /// Backend 1, 2, …, as the plan of addresses counts them.
    pub fn backend(&self, number: u8) -> Result<&Netns> {
        usize::from(number)
            .checked_sub(1)
            .and_then(|index| self.backends.get(index))
            .with_context(|| format!("there is no backend {number}"))
    }
}

struct Addressing {
    ipv6: bool,
}

impl Addressing {
    /// Gives a device its addresses, and the namespace a route of each family.
    fn add(
        &self,
        netns: &Netns,
        device: &str,
        v4: Ipv4Addr,
        v6: Ipv6Addr,
        routes: Option<[String; 2]>,
    ) -> Result<()> {
        let [route4, route6] = routes.unwrap_or_default();
        netns.ip_batch(&format!("address add {v4}/24 dev {device}\n{route4}\n"))?;
        if self.ipv6 {
            // Also for what a host sends to itself.
            for device in [device, "lo"] {
                netns.set_sysctl(&format!("net/ipv6/conf/{device}/disable_ipv6"), "0")?;
            }
            netns.ip_batch(&format!("address add {v6}/64 dev {device} nodad\n{route6}\n"))?;
        }
        Ok(())
    }
}

/// One of the two families that the plan has addresses of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4
    Ipv4,
    /// IPv6
    Ipv6,
}

impl Family {
    /// Both of them.
    pub const ALL: [Family; 2] = [Family::Ipv4, Family::Ipv6];

    /// The address that clients talk to.
    pub fn vip(self) -> IpAddr {
        self.choose(VIP, VIP6)
    }

    /// The client.
    pub fn client(self) -> IpAddr {
        self.choose(CLIENT, CLIENT6)
    }

    /// Backend 1, 2, ….
    pub fn backend(self, number: u8) -> IpAddr {
        self.choose(backend_address(number), backend_address6(number))
    }

    /// The balancer, as the client sees it.
    pub fn balancer_client_side(self) -> IpAddr {
        self.choose(BALANCER_CLIENT_SIDE, BALANCER_CLIENT_SIDE6)
    }

    /// The balancer, as the backends see it.
    pub fn balancer_backend_side(self) -> IpAddr {
        self.choose(BALANCER_BACKEND_SIDE, BALANCER_BACKEND_SIDE6)
    }

    fn choose(self, v4: Ipv4Addr, v6: Ipv6Addr) -> IpAddr {
        match self {
            Family::Ipv4 => v4.into(),
            Family::Ipv6 => v6.into(),
        }
    }
}

/// The address of backend 1, 2, ….
pub fn backend_address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 2, number.saturating_add(10))
}

/// The IPv6 address of backend 1, 2, …: its last group is written like the IPv4 address's last byte.
pub fn backend_address6(number: u8) -> Ipv6Addr {
    let decimal = u16::from(number.saturating_add(10));
    // 11 is written 11, not b.
    let group = decimal % 10 + decimal / 10 % 10 * 0x10 + decimal / 100 * 0x100;
    Ipv6Addr::new(0x2001, 0xdb8, 2, 0, 0, 0, 0, group)
}

/// The MAC address of the device that has `address`: 02:00 and the address's bytes.
pub fn mac(address: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = address.octets();
    [0x02, 0x00, a, b, c, d]
}
