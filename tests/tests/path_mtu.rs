//! Routers on the way that take smaller packets only: whoever sends too large ones learns of it, by every way of forwarding,
//! and what is sent arrives.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use balancer_tests::{
    Balancer, Netns, Plan, Process,
    detour::Detour,
    eventually,
    nginx::Nginx,
    process::{balancer_binary, output},
    socket::FrameSocket,
    status,
    topology::{BALANCER_BACKEND_SIDE, Family, backend_address, mac},
    veth::{self, End},
};
use etherparse::{Icmpv4Type, PacketBuilder, icmpv4};

const LIMIT: Duration = Duration::from_secs(10);
const FAMILIES: [Family; 2] = [Family::Ipv4, Family::Ipv6];
/// What the routers let through.
const NARROW: u32 = 1400;
const PORT: u16 = 80;

/// A service of its own for each way.
struct Way {
    number: u8,
    mode: &'static str,
    service: Family,
    /// Of which family the backend's address is.
    backend: Family,
}

impl Way {
    fn all() -> Vec<Way> {
        let mut ways = Vec::new();
        for mode in ["nat", "full-nat", "dsr", "ipip", "gue"] {
            for service in FAMILIES {
                for backend in FAMILIES {
                    if service == backend || matches!(mode, "ipip" | "gue") {
                        ways.push(Way { number: 20 + ways.len() as u8, mode, service, backend });
                    }
                }
            }
        }
        ways
    }

    fn is_one_way(&self) -> bool {
        matches!(self.mode, "dsr" | "ipip" | "gue")
    }

    /// Its own, since hosts remember by address what they have learned.
    fn vip(&self) -> IpAddr {
        let number = self.number;
        match self.service {
            Family::Ipv4 => Ipv4Addr::new(192, 0, 2, number).into(),
            Family::Ipv6 => Ipv6Addr::new(0x2001, 0xdb8, 0xaa, 0, 0, 0, 0, u16::from(number)).into(),
        }
    }

    /// Behind the router, but for `dsr`, which none can be on the way of.
    fn backend(&self) -> IpAddr {
        let number = if self.is_one_way() { 1 } else { 2 };
        match (self.mode, self.backend) {
            ("dsr", family) => family.backend(1),
            (_, Family::Ipv4) => Ipv4Addr::new(10, 0, 7, 10 + number).into(),
            (_, Family::Ipv6) => Ipv6Addr::new(0x2001, 0xdb8, 7, 0, 0, 0, 0, 0x10 + u16::from(number)).into(),
        }
    }

    /// Where its server listens.
    fn server(&self) -> SocketAddr {
        let port = PORT + u16::from(self.number) * 10;
        SocketAddr::new(if self.is_one_way() { self.vip() } else { self.backend() }, port)
    }

    /// What of the path's MTU is left to clients.
    fn left(&self) -> u32 {
        let outer = if self.backend == Family::Ipv4 { 20 } else { 40 };
        match self.mode {
            "dsr" => 1500,
            "ipip" => NARROW - outer,
            "gue" => NARROW - outer - 8,
            _ => NARROW,
        }
    }

    fn configuration(&self) -> String {
        let more = match (self.mode, self.backend) {
            ("gue", Family::Ipv4) => "tunnel-source = \"10.254.0.0/16\"\n",
            ("gue", Family::Ipv6) => "tunnel-source = \"2001:db8:254::/64\"\n",
            _ => "",
        };
        let port = self.server().port();
        let [address, backend] = [self.vip(), self.backend()].map(|ip| SocketAddr::new(ip, port));
        format!(
            "\n[[service]]\nname = \"w{}\"\naddress = \"{address}\"\nprotocol = \"tcp\"\nmethod = \"round-robin\"\n\
             forward = \"{}\"\n{more}[[service.backend]]\nname = \"b\"\naddress = \"{backend}\"\n",
            self.number, self.mode
        )
    }
}

fn curl(netns: &Netns, words: &[&str]) -> Result<String, String> {
    let mut command = netns.command("curl");
    command.args(["--silent", "--show-error", "--fail", "--max-time", "20"]).args(words);
    output(&mut command, Duration::from_secs(25)).map_err(|error| format!("{error:#}"))
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count as u32).map(|place| (place.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// The path's MTU as a host knows it.
fn known_mtu(netns: &Netns, to: IpAddr) -> u32 {
    let route = netns.ip(&format!("route get {to}")).unwrap();
    let words: Vec<&str> = route.split_whitespace().collect();
    let mtu = words.iter().position(|word| *word == "mtu").map(|place| words[place + 1].parse().unwrap());
    mtu.unwrap_or(1500)
}

/// A router between the switch and further devices of both backends, which says what it takes.
fn gate(detour: &Detour) -> Netns {
    let gate = Netns::new("gate").unwrap();
    let end = |netns, device| End { netns, device, mac: None };
    veth::pair(end(&detour.bench.switch, "pg"), end(&gate, "g0"), 1500).unwrap();
    detour.bench.switch.ip("link set pg master br0").unwrap();
    let mut lines =
        "address add 10.0.2.253/24 dev g0\naddress add 2001:db8:2::253/64 dev g0 nodad\n".to_owned();
    forward(&gate, &["g0", "g1", "g2"], || {
        for (number, backend) in (1..).zip(&detour.bench.backends) {
            let device = format!("g{number}");
            let ours = End { netns: &gate, device: &device, mac: None };
            veth::pair(ours, End { netns: backend, device: "e2", mac: None }, 1500).unwrap();
            backend.set_sysctl("net/ipv6/conf/e2/disable_ipv6", "0").unwrap();
            let (v4, v6) = (format!("10.0.7.{}", 10 + number), format!("2001:db8:7::{:x}", 0x10 + number));
            // Answers leave by the first device.
            backend
                .ip_batch(&format!("address add {v4}/32 dev e2\naddress add {v6}/128 dev e2 nodad\n"))
                .unwrap();
            veth::finish_checksums(backend, "e2").unwrap();
            lines += &format!("route add {v4}/32 dev g{number} mtu lock {NARROW}\n");
            lines += &format!("route add {v6}/128 dev g{number} mtu lock {NARROW}\n");
        }
    });
    gate.ip_batch(&lines).unwrap();
    // Errors to clients go by the balancer, as all else.
    gate.ip_batch("route add default via 10.0.2.1\nroute add ::/0 via 2001:db8:2::1\n").unwrap();
    let lb = &detour.bench.balancer;
    lb.ip_batch("route add 10.0.7.0/24 via 10.0.2.253\nroute add 2001:db8:7::/64 via 2001:db8:2::253\n")
        .unwrap();
    // What is said to the addresses that tunnels' packets come from, comes in here.
    lb.ip_batch("route add local 10.254.0.0/16 dev lo\nroute add local 2001:db8:254::/64 dev lo\n").unwrap();
    gate
}

/// Has a namespace forward both families by these devices, which `make` makes.
fn forward(netns: &Netns, devices: &[&str], make: impl FnOnce()) {
    netns.set_sysctl("net/ipv4/ip_forward", "1").unwrap();
    netns.set_sysctl("net/ipv6/conf/all/forwarding", "1").unwrap();
    make();
    for device in devices {
        netns.set_sysctl(&format!("net/ipv6/conf/{device}/disable_ipv6"), "0").unwrap();
    }
}

/// Megabytes both ways, past a router in front of the backends and one that answers go by.
#[test]
fn routers_towards_the_backends_and_on_the_way_of_answers() {
    let detour = Detour::new(2);
    let _gate = gate(&detour);
    let [first, second] = [0, 1].map(|number| &detour.bench.backends[number]);
    // Of the second, all comes back to the balancer.
    second.ip_batch("route del 10.0.1.0/24\nroute del 2001:db8:1::/64\n").unwrap();
    detour.router.ip_batch(&format!(
        "route replace 10.0.1.0/24 via 10.0.3.10 mtu lock {NARROW}\nroute replace 2001:db8:1::/64 via 2001:db8:3::10 mtu lock {NARROW}\n\
         route add 192.0.2.0/24 via 10.0.2.1\nroute add 2001:db8:aa::/64 via 2001:db8:2::1\n"
    )).unwrap();
    let ways = Way::all();
    let mut text = "[daemon]\ninterfaces = [\"lc\", \"lk\"]\nwindow = \"5m\"\n".to_owned();
    let mut servers = Vec::new();
    for way in &ways {
        text += &way.configuration();
        let host = if way.is_one_way() { first } else { second };
        if way.is_one_way() {
            let nodad = if way.service == Family::Ipv6 { " nodad" } else { "" };
            host.ip(&format!(
                "address add {}/{} dev lo{nodad}",
                way.vip(),
                if nodad.is_empty() { 32 } else { 128 }
            ))
            .unwrap();
        }
        servers.push(Nginx::start(host, way.server(), "b").unwrap());
    }
    let mut command = first.command(balancer_binary().unwrap());
    let decap = Process::spawn(command.args(["decap", "e2"])).unwrap();
    eventually(LIMIT, "the program on the backend", || {
        decap.log().contains("unwrapping on e2").then_some(())
    })
    .unwrap_or_else(|error| panic!("{error:#}: {}", decap.log()));
    let balancer = Balancer::start(&detour.bench.balancer, &text).unwrap();
    status::wait_until_up(&balancer).unwrap();

    let content = bytes(2 << 20);
    let source = tempfile::NamedTempFile::new().unwrap();
    fs::write(source.path(), &content).unwrap();
    let client = &detour.bench.client;
    let mut faults = Vec::new();
    for (way, server) in ways.iter().zip(&servers) {
        let name = format!("{} {:?} in {:?}", way.mode, way.service, way.backend);
        fs::write(server.file("large"), &content).unwrap();
        let url =
            |path: &str| format!("http://{}/files/{path}", SocketAddr::new(way.vip(), way.server().port()));
        let target = tempfile::NamedTempFile::new().unwrap();
        if let Err(error) = curl(client, &[&url("large"), "--output", target.path().to_str().unwrap()]) {
            faults.push(format!("{name}: download: {error}"));
        }
        if let Err(error) = curl(client, &["--upload-file", source.path().to_str().unwrap(), &url("up")]) {
            faults.push(format!("{name}: upload: {error}"));
        }
        let came = fs::read(target.path()).unwrap() == content;
        let went = fs::read(server.file("up")).is_ok_and(|bytes| bytes == content);
        let seen = (came, went, known_mtu(client, way.vip()));
        if seen != (true, true, way.left()) {
            faults.push(format!("{name}: {seen:?}, not {}", way.left()));
        }
    }
    assert_eq!(faults, [""; 0], "{}", balancer.log());
    // What answers may be has been told by the router past which they go, through the balancer.
    for family in FAMILIES {
        assert_eq!(known_mtu(first, family.client()), NARROW, "{family:?}");
        assert_eq!(known_mtu(second, family.client()), 1500, "{family:?}");
    }
    let shown = status::read_fresh(&balancer).unwrap();
    let drops = status::drops(&shown);
    assert!(matches!(drops[..], [("too-big", 1..)]), "{drops:?}");
}

/// The client is behind a router whose own wire is narrower: what it says to the service reaches the backend.
#[test]
fn a_router_towards_the_clients() {
    let bench = Plan { ipv6: true, ..Plan::backends(1) }.build().unwrap();
    let far = Netns::new("far").unwrap();
    let end = |netns, device| End { netns, device, mac: None };
    veth::pair(end(&bench.client, "f1"), end(&far, "f0"), 1500).unwrap();
    far.set_sysctl("net/ipv6/conf/f0/disable_ipv6", "0").unwrap();
    veth::finish_checksums(&far, "f0").unwrap();
    forward(&bench.client, &["f1"], || ());
    bench.client.ip_batch(&format!(
        "address add 10.0.5.1/24 dev f1\naddress add 2001:db8:5::1/64 dev f1 nodad\n\
         route add 10.0.5.10/32 dev f1 mtu lock {NARROW}\nroute add 2001:db8:5::10/128 dev f1 mtu lock {NARROW}\n"
    )).unwrap();
    far.ip_batch(
        "address add 10.0.5.10/24 dev f0\naddress add 2001:db8:5::10/64 dev f0 nodad\n\
         route add default via 10.0.5.1\nroute add ::/0 via 2001:db8:5::1\n",
    )
    .unwrap();
    bench
        .balancer
        .ip_batch("route add 10.0.5.0/24 via 10.0.1.10\nroute add 2001:db8:5::/64 via 2001:db8:1::10\n")
        .unwrap();
    let backend = &bench.backends[0];
    let clients: [IpAddr; 2] = ["10.0.5.10", "2001:db8:5::10"].map(|text| text.parse().unwrap());
    let content = bytes(2 << 20);
    let mut text = "[daemon]\ninterfaces = [\"lc\", \"lk\"]\n".to_owned();
    let mut servers = Vec::new();
    for (mode, port) in [("nat", 80), ("full-nat", 81)] {
        for family in FAMILIES {
            let [vip, server] = [family.vip(), family.backend(1)].map(|ip| SocketAddr::new(ip, port));
            text += &format!(
                "[[service]]\nname = \"{mode}-{family:?}\"\naddress = \"{vip}\"\nprotocol = \"tcp\"\nmethod = \"round-robin\"\n\
                 forward = \"{mode}\"\n[[service.backend]]\nname = \"b\"\naddress = \"{server}\"\n"
            );
            let server = Nginx::start(backend, server, "b").unwrap();
            fs::write(server.file("large"), &content).unwrap();
            servers.push((vip, server));
        }
    }
    let balancer = Balancer::start(&bench.balancer, &text).unwrap();
    status::wait_until_up(&balancer).unwrap();
    for (vip, _server) in &servers {
        let target = tempfile::NamedTempFile::new().unwrap();
        let url = format!("http://{vip}/files/large");
        curl(&far, &[&url, "--output", target.path().to_str().unwrap()])
            .unwrap_or_else(|error| panic!("{vip}: {error}"));
        assert!(fs::read(target.path()).unwrap() == content, "{vip}");
    }
    // In `nat` the backend knows the client; in `full-nat` what it sends to is the balancer.
    for (family, client) in FAMILIES.into_iter().zip(clients) {
        assert_eq!(known_mtu(backend, client), NARROW, "{family:?}");
        assert_eq!(known_mtu(backend, family.balancer_backend_side()), NARROW, "{family:?}");
    }
    assert_eq!(status::drops(&status::read_fresh(&balancer).unwrap()), []);
}

/// Only what is said of a packet that this host has sent to a backend in a tunnel is believed.
#[test]
fn what_nobody_has_sent_is_not_believed() {
    let bench = Plan::backends(1).build().unwrap();
    let vip = SocketAddr::new(Family::Ipv4.vip(), PORT);
    let text = format!(
        "[daemon]\ninterfaces = [\"lc\", \"lk\"]\n[[service]]\nname = \"s\"\naddress = \"{vip}\"\nprotocol = \"udp\"\n\
         method = \"round-robin\"\nforward = \"gue\"\n[[service.backend]]\nname = \"b\"\naddress = \"10.0.2.11:{PORT}\"\n"
    );
    let balancer = Balancer::start(&bench.balancer, &text).unwrap();
    status::wait_until_up(&balancer).unwrap();
    let wire = FrameSocket::open(&bench.backends[0], "e0").unwrap();
    let (ours, theirs) = ([10, 0, 2, 1], [10, 0, 2, 11]);
    let say = |mtu: u16, protocol: u8, source: [u8; 4], destination: [u8; 4], port: u16| {
        let mut quoted = vec![0x45, 0, 5, 0xdc, 0, 0, 0x40, 0, 63, protocol, 0, 0];
        quoted.extend([source, destination].concat());
        quoted.extend([[0xc1, 0x23], port.to_be_bytes(), [5, 0xc8], [0; 2]].concat());
        let unreachable = icmpv4::DestUnreachableHeader::FragmentationNeeded { next_hop_mtu: mtu };
        let builder = PacketBuilder::ethernet2(mac(backend_address(1)), mac(BALANCER_BACKEND_SIDE))
            .ipv4([10, 0, 2, 254], ours, 64)
            .icmpv4(Icmpv4Type::DestinationUnreachable(unreachable));
        let mut frame = Vec::new();
        builder.write(&mut frame, &quoted).unwrap();
        wire.send(&frame).unwrap();
    };
    let gue = 6080;
    say(900, 17, [10, 0, 2, 9], theirs, gue);
    say(901, 17, ours, [10, 0, 2, 12], gue);
    say(902, 17, ours, theirs, 6081);
    say(903, 4, ours, theirs, gue);
    say(904, 6, ours, theirs, gue);
    say(1000, 17, ours, theirs, gue);
    let lines = || {
        let log = balancer.log();
        let all = log.lines().filter_map(|line| line.split_once("packets to 10.0.2.11 may have "));
        all.map(|(_, rest)| rest.split(' ').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let said = eventually(LIMIT, "what a router says", || Some(lines()).filter(|lines| !lines.is_empty()));
    assert_eq!(said.unwrap(), ["1000"]);
    // Of the tunnel's 28 bytes and the datagram's own.
    let client = bench.client.run(|| Ok(UdpSocket::bind("10.0.1.10:0")?)).unwrap();
    client.connect(vip).unwrap();
    let most = 1000 - 28 - 28;
    client.send(&vec![1; most]).unwrap();
    client.send(&vec![1; most + 1]).unwrap();
    let shown = status::wait(&balancer, "a refusal", |status| !status::drops(status).is_empty()).unwrap();
    assert_eq!(status::drops(&shown), [("too-big", 1)]);
    assert_eq!(status::each(&status::read_fresh(&balancer).unwrap(), |backend| backend.packets), [1]);
}
