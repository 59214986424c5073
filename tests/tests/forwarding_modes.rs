//! The modes whose replies go to the client past the balancer: real programs talk through each, in both families, and the
//! backends' answers come by another way than the balancer.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use balancer_tests::{
    Balancer, Capture, Netns, Plan,
    config::VIP_PORT,
    detour::Detour,
    echo::Echo,
    nginx::Nginx,
    status::{self, each},
    topology::{Family, VIP},
};
use balancer_user::api::{FlowList, FlowState};
use nix::sys::signal::Signal;

const LIMIT: Duration = Duration::from_secs(10);
const FAMILIES: [Family; 2] = [Family::Ipv4, Family::Ipv6];

fn start(detour: &Detour, services: &str) -> Balancer {
    let text = format!("[daemon]\ninterfaces = [\"lc\", \"lk\"]\nwindow = \"5m\"\n{services}");
    let balancer = Balancer::start(&detour.bench.balancer, &text).unwrap();
    status::wait_until_up(&balancer).unwrap();
    balancer
}

/// What each way of forwarding asks of a backend's address: of which family it is.
fn ways() -> Vec<(&'static str, Family, Family)> {
    let mut ways = Vec::new();
    for mode in ["dsr", "ipip", "gue"] {
        for service in FAMILIES {
            for backend in FAMILIES {
                if mode != "dsr" || service == backend {
                    ways.push((mode, service, backend));
                }
            }
        }
    }
    ways
}

fn name(mode: &str, protocol: &str, service: Family, backend: Family) -> String {
    let digit = |family| if family == Family::Ipv4 { '4' } else { '6' };
    format!("{mode}-{protocol}-{}{}", digit(service), digit(backend))
}

/// A service on this port, whose backends are 1, 2, ….
fn service(
    (mode, of, family): (&str, Family, Family),
    protocol: &str,
    port: u16,
    backends: u8,
    more: &str,
) -> String {
    let name = name(mode, protocol, of, family);
    let address = SocketAddr::new(of.vip(), port);
    let mut text = format!(
        "\n[[service]]\nname = \"{name}\"\naddress = \"{address}\"\nprotocol = \"{protocol}\"\n\
         method = \"round-robin\"\nforward = \"{mode}\"\n{more}\n"
    );
    for number in 1..=backends {
        let address = SocketAddr::new(family.backend(number), port);
        text += &format!("[[service.backend]]\nname = \"b{number}\"\naddress = \"{address}\"\n");
    }
    text
}

fn curl(netns: &Netns, words: &[&str]) -> String {
    let mut command = netns.command("curl");
    command.args(["--silent", "--show-error", "--fail", "--max-time", "20"]).args(words);
    balancer_tests::process::output(&mut command, Duration::from_secs(25)).unwrap()
}

/// 5 MiB down and 3 MiB up, byte for byte, and fifty short connections, by every mode and mixture of families at once; the
/// full-sized segments of uploads do not fit into tunnels, and their senders are told so.
#[test]
fn web_servers_are_reached_by_every_mode() {
    let detour = Detour::new(2);
    let ways = ways();
    let mut decaps = detour.unwrap(&["--from", "10.0.2.1", "--from", "2001:db8:2::1"]);
    let mut services = String::new();
    let mut servers = Vec::new();
    for (way, port) in ways.iter().zip(VIP_PORT..) {
        services += &service(*way, "tcp", port, 2, "");
        for (number, backend) in (1..).zip(&detour.bench.backends) {
            let address = SocketAddr::new(way.1.vip(), port);
            servers.push(Nginx::start(backend, address, &format!("b{number}")).unwrap());
        }
    }
    let bytes: Vec<u8> =
        (0..5u32 << 20).map(|place| (place.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let upload = &bytes[..3 << 20];
    let source = tempfile::NamedTempFile::new().unwrap();
    fs::write(source.path(), upload).unwrap();
    for server in &servers {
        fs::write(server.file("large"), &bytes).unwrap();
    }
    let balancer = start(&detour, &services);
    let through = Capture::start(&detour.bench.balancer, "lk").unwrap();
    let client = &detour.bench.client;
    for ((way, port), pair) in ways.iter().zip(VIP_PORT..).zip(servers.chunks(2)) {
        let url = |path: &str| format!("http://{}{path}", SocketAddr::new(way.1.vip(), port));
        let mut seen = [0; 2];
        for _ in 0..50 {
            let name = curl(client, &[&url("/name")]);
            seen[usize::from(name == "b2")] += 1;
            assert!(["b1", "b2"].contains(&name.as_str()), "{way:?}: {name}");
        }
        assert_eq!(seen, [25, 25], "{way:?}");
        let target = tempfile::NamedTempFile::new().unwrap();
        curl(client, &[&url("/files/large"), "--output", target.path().to_str().unwrap()]);
        assert_eq!(fs::read(target.path()).unwrap(), bytes, "{way:?}: download");
        curl(client, &["--upload-file", source.path().to_str().unwrap(), &url("/files/up")]);
        let stored = pair.iter().filter_map(|server| fs::read(server.file("up")).ok());
        assert_eq!(stored.collect::<Vec<_>>(), [upload], "{way:?}: upload");
    }
    // 52 connections each, of which none is open; and not one answer came through here.
    let shown = status::wait(&balancer, "every connection closed", |status| {
        each(status, |backend| backend.active).iter().all(|active| *active == 0)
    })
    .unwrap();
    assert_eq!(shown.flows.evicted.established, 0);
    assert_eq!(through.finish().unwrap(), []);
    let tunnels = ways.iter().filter(|(mode, ..)| *mode != "dsr").count() as u64;
    let drops = status::drops(&shown);
    // One for each upload, at least: the client remembers what it is told of an address.
    assert!(matches!(drops[..], [("too-big", count)] if count >= 2 && count < 20 * tunnels), "{drops:?}");
    for decap in &mut decaps {
        decap.signal(Signal::SIGTERM).unwrap();
        assert!(decap.wait(LIMIT).unwrap().success());
        let counts = decap.log();
        let last = counts.lines().last().unwrap();
        let numbers: Vec<u64> = last.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        assert!(numbers[0] > 1_000 && numbers[1] > 1_000, "{last}");
        assert_eq!(numbers[2..], [0, 0], "{last}");
    }
}

/// Datagrams of several sizes, larger than any packet too, are answered from the service's address; each is counted once, with
/// the bytes that the client sent, whatever they were wrapped in.
#[test]
fn datagrams_are_counted_as_the_client_sent_them() {
    let detour = Detour::new(1);
    let ways = ways();
    let _decaps = detour.unwrap(&["--gue-port", "7000"]);
    let mut services = String::new();
    let mut servers = Vec::new();
    for (way, port) in ways.iter().zip(VIP_PORT..) {
        let more = if way.0 == "gue" { "gue-port = 7000" } else { "" };
        services += &service(*way, "udp", port, 1, more);
        let address = SocketAddr::new(way.1.vip(), port);
        servers.push(Echo::udp(detour.bench.backend(1).unwrap(), address).unwrap());
    }
    let balancer = start(&detour, &services);
    // So that fragments fit into every tunnel: those of IPv4 may be split again, but are not.
    let (v4, v6) = ("192.0.2.0/24 via 10.0.1.1", "2001:db8:aa::/64 via 2001:db8:1::1");
    detour
        .bench
        .client
        .ip_batch(&format!("route change {v4} mtu 1400\nroute change {v6} mtu 1400\n"))
        .unwrap();
    let sizes: [usize; 4] = [1, 700, 1300, 4000];
    for (way, port) in ways.iter().zip(VIP_PORT..) {
        let socket = detour.bench.client.run(|| Ok(UdpSocket::bind((way.1.client(), 0))?)).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket.connect((way.1.vip(), port)).unwrap();
        for size in sizes {
            let datagram: Vec<u8> = (0..size).map(|place| place as u8).collect();
            socket.send(&datagram).unwrap();
            let mut answer = vec![0; 1 << 16];
            let length = socket.recv(&mut answer).unwrap_or_else(|error| panic!("{way:?} {size}: {error}"));
            assert_eq!(answer[..length], datagram, "{way:?}");
        }
    }
    let shown = status::read_fresh(&balancer).unwrap();
    for ((way, service), counted) in
        ways.iter().zip(&shown.services).zip(shown.services.iter().map(status::traffic))
    {
        // Of 4,000 bytes and the UDP header: three fragments.
        let (header, fragments) = match way.1 {
            Family::Ipv4 => (20, 3 * 20),
            Family::Ipv6 => (40, 3 * 48),
        };
        let whole: usize = sizes[..3].iter().map(|size| header + 8 + size).sum();
        let bytes = whole + fragments + 8 + 4000;
        assert_eq!(counted, [(6, bytes as u64)], "{way:?} {}", service.name);
    }
    assert_eq!(status::drops(&shown), []);
}

/// The life of a connection of which only the client's half is seen: half open until it goes on twice, closing with its FIN.
#[test]
fn a_connection_lives_by_the_clients_half() {
    let detour = Detour::new(1);
    let way = ("dsr", Family::Ipv4, Family::Ipv4);
    let server = SocketAddr::new(VIP.into(), VIP_PORT);
    let _echo = Echo::tcp(detour.bench.backend(1).unwrap(), server).unwrap();
    let balancer = start(&detour, &service(way, "tcp", VIP_PORT, 1, ""));
    let connect = || detour.bench.client.run(|| Ok(TcpStream::connect_timeout(&server, LIMIT)?)).unwrap();
    let mut stream = connect();
    let flows = || -> Vec<(FlowState, SocketAddr)> {
        let list: FlowList =
            serde_json::from_str(&balancer.call(&["flows", "list", "--json"]).unwrap()).unwrap();
        list.flows.into_iter().map(|flow| (flow.state, flow.backend_address)).collect()
    };
    let backend = SocketAddr::new(Family::Ipv4.backend(1), VIP_PORT);
    // SYN and ACK.
    assert_eq!(flows(), [(FlowState::HalfOpen, backend)]);
    stream.write_all(b"hello").unwrap();
    stream.read_exact(&mut [0; 5]).unwrap();
    assert_eq!(flows(), [(FlowState::Established, backend)]);
    status::wait(&balancer, "one active", |status| each(status, |backend| backend.active) == [1]).unwrap();
    drop(stream);
    status::wait(&balancer, "none active", |status| each(status, |backend| backend.active) == [0]).unwrap();
    assert_eq!(flows(), [(FlowState::Closing, backend)]);
    // Reset by the client.
    let stream = connect();
    socket2_linger(&stream);
    drop(stream);
    status::wait(&balancer, "none active", |status| {
        each(status, |backend| (backend.active, backend.packets > 8)) == [(0, true)]
    })
    .unwrap();
}

/// Has a connection end with a RST.
fn socket2_linger(stream: &TcpStream) {
    use std::os::fd::AsRawFd as _;
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    // SAFETY: the kernel reads the structure, whose size is given.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of_val(&linger) as libc::socklen_t,
        )
    };
    assert_eq!(result, 0);
}

/// Everybody gets a source of the balancer's, from the addresses and ports that are given; answers come back from anywhere.
#[test]
fn full_nat_gives_every_client_a_source() {
    let bench = Plan { ipv6: true, ..Plan::backends(2) }.build().unwrap();
    for address in ["10.0.2.3/24", "10.0.2.4/24"] {
        bench.balancer.ip(&format!("address add {address} dev lk")).unwrap();
    }
    let mut text = "[daemon]\ninterfaces = [\"lc\", \"lk\"]\nwindow = \"5m\"\n".to_owned();
    let mut servers = Vec::new();
    for family in FAMILIES {
        let address = SocketAddr::new(family.vip(), VIP_PORT);
        let more = match family {
            Family::Ipv4 => "snat-addresses = [\"10.0.2.3\", \"10.0.2.4\"]\nsnat-ports = \"20000-20009\"",
            Family::Ipv6 => "",
        };
        text += &format!(
            "\n[[service]]\nname = \"{family:?}\"\naddress = \"{address}\"\nprotocol = \"tcp\"\n\
             method = \"round-robin\"\nforward = \"full-nat\"\n{more}\n"
        );
        for number in 1..=2 {
            let address = SocketAddr::new(family.backend(number), 8080);
            text += &format!("[[service.backend]]\nname = \"b{number}\"\naddress = \"{address}\"\n");
            servers.push(Echo::tcp(bench.backend(number).unwrap(), address).unwrap());
        }
    }
    let balancer = Balancer::start(&bench.balancer, &text).unwrap();
    status::wait_until_up(&balancer).unwrap();
    for family in FAMILIES {
        let wire: Vec<_> =
            bench.backends.iter().map(|backend| Capture::start(backend, "e0").unwrap()).collect();
        let address = SocketAddr::new(family.vip(), VIP_PORT);
        let mut streams = Vec::new();
        for number in 0..8 {
            let mut stream = bench.client.run(|| Ok(TcpStream::connect_timeout(&address, LIMIT)?)).unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            stream.write_all(&[number; 3000]).unwrap();
            let mut answer = [0; 3000];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!(answer, [number; 3000]);
            streams.push(stream);
        }
        for (wire, own) in wire.into_iter().zip([[10, 0, 2, 3], [10, 0, 2, 4]]) {
            let packets = wire.finish().unwrap();
            let mut sources: Vec<SocketAddr> = packets
                .iter()
                // The connections of the other family may still be closing.
                .filter(|packet| {
                    packet.destination.port() == 8080 && packet.source.is_ipv4() == address.is_ipv4()
                })
                .map(|packet| packet.source)
                .collect();
            sources.sort_unstable();
            sources.dedup();
            assert_eq!(sources.len(), 4, "{sources:?}");
            let (given, ports) = match family {
                Family::Ipv4 => (IpAddr::from(own), 20_000..=20_009),
                Family::Ipv6 => (family.balancer_backend_side(), 61_000..=65_535),
            };
            assert!(
                sources.iter().all(|source| source.ip() == given && ports.contains(&source.port())),
                "{sources:?}"
            );
        }
    }
    assert_eq!(status::drops(&status::read_fresh(&balancer).unwrap()), []);
}
