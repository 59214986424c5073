//! What an operator reaches for: iperf3, ping, traceroute and dig, through every way of forwarding.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    net::{IpAddr, SocketAddr},
    process::Command,
    time::Duration,
};

use balancer_tests::{
    Balancer, Netns, Process,
    detour::Detour,
    eventually,
    process::output,
    status::{self, each},
    topology::Family,
};

const LIMIT: Duration = Duration::from_secs(30);
const FAMILIES: [Family; 2] = [Family::Ipv4, Family::Ipv6];
const MODES: [&str; 5] = ["nat", "full-nat", "dsr", "ipip", "gue"];
const IPERF: u16 = 5201;
const DNS: u16 = 53;

/// Which backend serves by this way: the second one's answers come back to the balancer.
fn server(number: usize) -> u8 {
    if matches!(MODES[number], "nat" | "full-nat") { 2 } else { 1 }
}

/// The bench, with two such backends, and what unwraps on both.
fn detour() -> (Vec<Process>, Detour) {
    let detour = Detour::new(2);
    let back = "route del 10.0.1.0/24\nroute del 2001:db8:1::/64\n";
    detour.bench.backend(2).unwrap().ip_batch(back).unwrap();
    (detour.unwrap(&["--from", "10.0.2.1", "--from", "2001:db8:2::1"]), detour)
}

/// Services at these ports, each with its own way, over both families and both protocols; one backend each.
fn start(detour: &Detour, ports: impl Fn(usize) -> u16) -> Balancer {
    let mut text = "[daemon]\ninterfaces = [\"lc\", \"lk\"]\nwindow = \"5m\"\n".to_owned();
    for (number, mode) in MODES.iter().enumerate() {
        for family in FAMILIES {
            for protocol in ["tcp", "udp"] {
                let (name, port) = (format!("{mode}-{family:?}-{protocol}"), ports(number));
                let [address, backend] =
                    [family.vip(), family.backend(server(number))].map(|ip| SocketAddr::new(ip, port));
                text += &format!(
                    "\n[[service]]\nname = \"{name}\"\naddress = \"{address}\"\nprotocol = \"{protocol}\"\n\
                     method = \"least-packets\"\nforward = \"{mode}\"\n\
                     [[service.backend]]\nname = \"b1\"\naddress = \"{backend}\"\n"
                );
            }
        }
    }
    let balancer = Balancer::start(&detour.bench.balancer, &text).unwrap();
    status::wait_until_up(&balancer).unwrap();
    balancer
}

fn run(netns: &Netns, program: &str, words: &[&str]) -> String {
    output(netns.command(program).args(words), LIMIT).unwrap()
}

fn background(command: &mut Command) -> Process {
    Process::spawn(command).unwrap()
}

/// Waits for a server at either of these.
fn listens(netns: &Netns, one: &str, other: &str) {
    eventually(LIMIT, "a server that listens", || {
        let all = netns.output("ss", &["-lnt"]).unwrap();
        [one, other].iter().any(|at| all.contains(&format!("{at} "))).then_some(())
    })
    .unwrap();
}

/// Where the server of a way listens.
fn own(number: usize, family: Family) -> IpAddr {
    if server(number) == 2 { family.backend(2) } else { family.vip() }
}

/// Bytes that iperf3 says the server has got, and datagrams lost.
fn iperf(netns: &Netns, family: Family, port: u16, more: &[&str]) -> (u64, u64) {
    let (vip, port) = (family.vip().to_string(), port.to_string());
    let words =
        [&["--json", "--client", &vip, "--port", &port, "--connect-timeout", "5000"][..], more].concat();
    let report = run(netns, "iperf3", &words);
    let report: serde_json::Value = serde_json::from_str(&report).unwrap_or_else(|_| panic!("{report}"));
    assert!(report["error"].is_null(), "{report}");
    let sum = |key: &str| report["end"][key].clone();
    let received = if sum("sum_received").is_null() { sum("sum") } else { sum("sum_received") };
    (received["bytes"].as_u64().unwrap(), sum("sum")["lost_packets"].as_u64().unwrap_or(0))
}

/// Megabytes either way, and datagrams, by each way in both families.
#[test]
fn iperf3_by_every_way() {
    let (_decaps, detour) = detour();
    let port = |number: usize| IPERF + number as u16;
    let mut servers = Vec::new();
    for number in 0..MODES.len() {
        let backend = detour.bench.backend(server(number)).unwrap();
        for family in FAMILIES {
            // Bound, so that answers to datagrams come from there.
            let (port, at) = (port(number).to_string(), own(number, family).to_string());
            let words = ["--server", "--port", &port, "--bind", &at];
            servers.push(background(backend.command("iperf3").args(words)));
            listens(backend, &format!("{at}]:{port}"), &format!("{at}:{port}"));
        }
    }
    let balancer = start(&detour, port);
    let client = &detour.bench.client;
    for (number, mode) in MODES.iter().enumerate() {
        for family in FAMILIES {
            let measure = |more: &[&str]| iperf(client, family, port(number), more);
            // What is still in buffers when the last byte is handed over, iperf3 does not count.
            let up = measure(&["--bytes", "10M", "--window", "256K"]).0;
            let down = measure(&["--bytes", "10M", "--window", "256K", "--reverse"]).0;
            assert!(up >= 8 << 20 && down >= 8 << 20, "{mode} {family:?}: {up} {down}");
            let (bytes, lost) =
                measure(&["--udp", "--length", "1200", "--bytes", "600K", "--bitrate", "20M"]);
            assert!(bytes >= 500_000 && lost == 0, "{mode} {family:?}: {bytes} bytes, {lost} lost");
        }
    }
    let shown = status::read_fresh(&balancer).unwrap();
    let seen = each(&shown, |backend| backend.bytes);
    for (service, bytes) in shown.services.iter().zip(seen) {
        // Up by TCP and at least the acknowledgements of what came down; up by UDP.
        let least = if service.name.ends_with("tcp") { 8 << 20 } else { 500_000 };
        assert!(bytes > least, "{}: {bytes}", service.name);
    }
    let drops = status::drops(&shown);
    assert!(drops.iter().all(|(name, _)| *name == "too-big"), "{drops:?}");
}

/// The balancer shows as the hop before the service, but not in `dsr`, which is none; echo requests are answered.
#[test]
fn ping_and_traceroute() {
    let (_decaps, detour) = detour();
    let port = |number: usize| 8080 + number as u16;
    let listen = |family: Family, number: usize| {
        let at = own(number, family);
        balancer_tests::echo::Echo::tcp(
            detour.bench.backend(server(number)).unwrap(),
            SocketAddr::new(at, port(number)),
        )
        .unwrap()
    };
    let _servers: Vec<_> = FAMILIES
        .iter()
        .flat_map(|family| (0..5).map(move |number| (*family, number)))
        .map(|(f, n)| listen(f, n))
        .collect();
    let balancer = start(&detour, port);
    let client = &detour.bench.client;
    for family in FAMILIES {
        let vip = family.vip().to_string();
        let ping = run(client, "ping", &["-c", "3", "-i", "0.2", "-W", "5", &vip]);
        assert!(ping.contains("3 received, 0% packet loss"), "{ping}");
        for (number, mode) in MODES.iter().enumerate() {
            let port = port(number).to_string();
            let words = ["-n", "-T", "-p", &port, "-q", "1", "-w", "5", "-m", "5", &vip];
            let route = run(client, "traceroute", &words);
            let hops: Vec<&str> =
                route.lines().skip(1).filter_map(|line| line.split_whitespace().nth(1)).collect();
            // Who answers for a hop's end is the service's address: nobody's private one shows.
            let expected = if *mode == "dsr" { vec![&*vip] } else { vec![&*vip, &*vip] };
            assert_eq!(hops, expected, "{mode} {family:?}: {route}");
        }
    }
    let shown = status::read_fresh(&balancer).unwrap();
    let drops: Vec<_> = status::drops(&shown).into_iter().map(|(name, _)| name).collect();
    assert_eq!(drops, ["ttl-exceeded"]);
}

/// A name server answers over both protocols, with answers larger than a datagram too.
#[test]
fn dig_by_every_way() {
    let (_decaps, detour) = detour();
    let port = |number: usize| DNS + 1000 * number as u16;
    let long = "a".repeat(250);
    let _servers: Vec<_> = (0..MODES.len())
        .map(|number| {
            let backend = detour.bench.backend(server(number)).unwrap();
            let records: Vec<String> =
                (0..12).map(|record| format!("--txt-record=long.test,{record}{long}")).collect();
            let mut command = backend.command("dnsmasq");
            command
                .args([
                    "--no-daemon",
                    "--no-resolv",
                    "--no-hosts",
                    "--user=root",
                    "--pid-file",
                    "--edns-packet-max=1232",
                ])
                .arg(format!("--port={}", port(number)))
                .arg("--host-record=web.test,192.0.2.77,2001:db8:aa::77")
                .args(records);
            let server = background(&mut command);
            let at = format!(":{}", port(number));
            listens(backend, &at, &at);
            server
        })
        .collect();
    let _balancer = start(&detour, port);
    let client = &detour.bench.client;
    for (number, mode) in MODES.iter().enumerate() {
        for family in FAMILIES {
            let (vip, port) = (format!("@{}", family.vip()), port(number).to_string());
            let dig = |more: &[&str]| {
                let words = [&[&*vip, "-p", &port, "+short", "+time=5", "+tries=1"][..], more].concat();
                run(client, "dig", &words)
            };
            for protocol in ["+notcp", "+tcp"] {
                assert_eq!(dig(&[protocol, "web.test", "A"]).trim(), "192.0.2.77", "{mode} {family:?}");
                assert_eq!(dig(&[protocol, "web.test", "AAAA"]).trim(), "2001:db8:aa::77");
            }
            // It does not fit into a datagram, and is asked for again over TCP.
            let texts = dig(&["long.test", "TXT"]);
            assert_eq!(
                texts.lines().filter(|line| line.len() > 250).count(),
                12,
                "{mode} {family:?}: {texts}"
            );
        }
    }
}
