//! `balancer decap` on a backend: each packet that comes wrapped moves exactly its own counter, and none that does not.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use balancer_tests::{
    Plan, Process, Topology, eventually,
    packet::{self, Path, Segment},
    process::balancer_binary,
    socket::FrameSocket,
    topology::{
        BALANCER_BACKEND_SIDE, BALANCER_BACKEND_SIDE6, CLIENT, backend_address, backend_address6, mac,
    },
};
use etherparse::{IpNumber, Ipv4Header};
use nix::sys::signal::Signal;

const LIMIT: Duration = Duration::from_secs(10);
const GUE_PORT: u16 = 6080;
const SERVER: u16 = 9000;
/// Nobody that may send wrapped packets.
const STRANGER: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 200);
/// An address that the backend does not have yet.
const LATER: Ipv4Addr = Ipv4Addr::new(10, 0, 7, 7);

/// Unwrapped IPIP and GUE; malformed; untrusted.
type Counts = [u64; 4];

/// A backend that unwraps, and who sends to it: the balancer's device, without a balancer.
struct Scene {
    decap: Process,
    sender: FrameSocket,
    server: UdpSocket,
    counts: Counts,
    bench: Topology,
}

impl Scene {
    fn new() -> Scene {
        let bench = Plan { ipv6: true, ..Plan::backends(1) }.build().unwrap();
        let backend = bench.backend(1).unwrap();
        // What is unwrapped comes from a client that the backend has no route to.
        backend.set_sysctl("net/ipv4/conf/all/rp_filter", "0").unwrap();
        backend.set_sysctl("net/ipv4/conf/e0/rp_filter", "0").unwrap();
        let mut command = backend.command(balancer_binary().unwrap());
        command.args(["decap", "e0", "--from", "10.0.2.1", "--from", "2001:db8:2::1"]);
        let decap = Process::spawn(&mut command).unwrap();
        eventually(LIMIT, "the program on the backend", || {
            decap.log().contains("unwrapping on e0 in native mode").then_some(())
        })
        .unwrap_or_else(|error| panic!("{error:#}: {}", decap.log()));
        let server = backend.run(|| Ok(UdpSocket::bind((backend_address(1), SERVER))?)).unwrap();
        server.set_read_timeout(Some(LIMIT)).unwrap();
        let sender = FrameSocket::open(&bench.balancer, "lk").unwrap();
        Scene { decap, sender, server, counts: [0; 4], bench }
    }

    fn send(&self, packet: &[u8]) {
        let frame = packet::ethernet(mac(backend_address(1)), mac(BALANCER_BACKEND_SIDE), packet);
        self.sender.send(&frame).unwrap();
    }

    /// Sends a packet of which this comes; nothing else is counted.
    fn counted(&mut self, what: &str, packet: &[u8], counter: Option<usize>) {
        self.send(packet);
        if let Some(counter) = counter {
            self.counts[counter] += 1;
        }
        // All before this one have been dealt with when it is counted; it comes from a stranger.
        self.send(&ipip(STRANGER, backend_address(1), &[0; 20]));
        self.counts[3] += 1;
        let mut read = [0; 4];
        eventually(LIMIT, "the counters", || {
            read = counts(&self.decap);
            (read[3] >= self.counts[3]).then_some(())
        })
        .unwrap_or_else(|error| panic!("{what}: {error:#}: {read:?}"));
        assert_eq!(read, self.counts, "{what}");
    }

    /// The next datagram that the server gets.
    fn received(&self) -> (Vec<u8>, SocketAddr) {
        let mut buffer = [0; 100];
        let (length, from) = self.server.recv_from(&mut buffer).unwrap();
        (buffer[..length].to_vec(), from)
    }
}

/// What `decap` says of itself when it is asked.
fn counts(decap: &Process) -> Counts {
    let said = || {
        let log = decap.log();
        let lines: Vec<&str> = log.lines().filter(|line| line.contains("untrusted ")).collect();
        (lines.len(), lines.last().map(|line| (*line).to_owned()))
    };
    let before = said().0;
    decap.signal(Signal::SIGUSR1).unwrap();
    let line = eventually(LIMIT, "the counts in the log", || {
        let (lines, last) = said();
        last.filter(|line| {
            lines > before && line.split("untrusted ").nth(1).is_some_and(|rest| !rest.is_empty())
        })
    });
    let line = line.unwrap();
    let number = |name: &str| {
        let (_, rest) = line.split_once(&format!("{name} ")).unwrap();
        rest.split_whitespace().next().unwrap().parse().unwrap()
    };
    ["ipip", "gue", "malformed", "untrusted"].map(number)
}

fn ipip(source: Ipv4Addr, destination: Ipv4Addr, inner: &[u8]) -> Vec<u8> {
    let protocol = if inner.first().is_some_and(|first| first >> 4 == 6) { 41 } else { 4 };
    let length = u16::try_from(inner.len()).unwrap();
    let mut header =
        Ipv4Header::new(length, 64, IpNumber(protocol), source.octets(), destination.octets()).unwrap();
    header.header_checksum = header.calc_header_checksum();
    [&header.to_bytes()[..], inner].concat()
}

fn gue(source: impl Into<IpAddr>, destination: impl Into<IpAddr>, port: u16, inner: &[u8]) -> Vec<u8> {
    Path::new((source.into(), 50_000), (destination.into(), port)).udp(inner).unwrap()
}

/// A client's datagram to the server.
fn datagram(payload: &[u8]) -> Vec<u8> {
    Path::new((CLIENT, 40_000), (backend_address(1), SERVER)).udp(payload).unwrap()
}

const IPIP: Option<usize> = Some(0);
const GUE: Option<usize> = Some(1);
const MALFORMED: Option<usize> = Some(2);
const UNTRUSTED: Option<usize> = Some(3);

#[test]
fn each_packet_moves_exactly_its_own_counter() {
    let mut scene = Scene::new();
    let (balancer, host) = (BALANCER_BACKEND_SIDE, backend_address(1));
    let (balancer6, host6) = (BALANCER_BACKEND_SIDE6, backend_address6(1));

    for (what, packet, counter) in [
        ("ipip", ipip(balancer, host, &datagram(b"ipip")), IPIP),
        ("gue", gue(balancer, host, GUE_PORT, &datagram(b"gue")), GUE),
        ("gue over IPv6", gue(balancer6, host6, GUE_PORT, &datagram(b"gue6")), GUE),
    ] {
        scene.counted(what, &packet, counter);
        let (payload, from) = scene.received();
        assert_eq!(from, SocketAddr::from((CLIENT, 40_000)), "{what}");
        assert!(packet.ends_with(&payload), "{what}: {payload:?}");
    }

    let whole = datagram(b"never");
    let cut = &whole[..whole.len() - 1];
    let mut variant = whole.clone();
    variant[0] = 0x05;
    for (what, packet, counter) in [
        ("a packet that is cut off", ipip(balancer, host, cut), MALFORMED),
        ("the same in GUE", gue(balancer, host, GUE_PORT, cut), MALFORMED),
        ("nothing", gue(balancer, host, GUE_PORT, &[]), MALFORMED),
        ("GUE variant 0", gue(balancer, host, GUE_PORT, &variant), MALFORMED),
        ("the same over IPv6", gue(balancer6, host6, GUE_PORT, &variant), MALFORMED),
        ("a stranger's ipip", ipip(STRANGER, host, &whole), UNTRUSTED),
        ("a stranger's GUE", gue(STRANGER, host, GUE_PORT, &whole), UNTRUSTED),
        ("to another port", gue(balancer, host, GUE_PORT + 1, &whole), None),
        ("to another host", ipip(balancer, STRANGER, &whole), None),
    ] {
        scene.counted(what, &packet, counter);
    }
    // What is not wrapped arrives, and nothing of what was refused has.
    scene.counted("not wrapped", &datagram(b"plain"), None);
    assert_eq!(scene.received().0, b"plain");
    let syn = Path::new((CLIENT, 40_000), (host, SERVER)).tcp(Segment::flags(Segment::SYN), &[]).unwrap();
    scene.counted("a connection", &syn, None);

    scene.decap.signal(Signal::SIGTERM).unwrap();
    assert!(scene.decap.wait(LIMIT).unwrap().success());
    let [ipip, gue, malformed, untrusted] = scene.counts;
    let last = format!("ipip {ipip}  gue {gue}  malformed {malformed}  untrusted {untrusted}");
    assert_eq!(scene.decap.log().lines().last(), Some(last.as_str()));
}

/// An address that comes counts from then on, and one that goes no longer.
#[test]
fn addresses_that_come_and_go_are_followed() {
    let mut scene = Scene::new();
    let wrapped = ipip(BALANCER_BACKEND_SIDE, LATER, &datagram(b"x"));
    scene.counted("before the address", &wrapped, None);
    let change = |scene: &Scene, verb: &str| {
        scene.bench.backend(1).unwrap().ip(&format!("address {verb} {LATER}/32 dev lo")).unwrap();
    };
    // How many packets it takes until it has noticed, nobody knows; each is counted, or left alone.
    let until = |scene: &mut Scene, counts_them: bool| {
        eventually(LIMIT, "the address to be noticed", || {
            let before = counts(&scene.decap)[0];
            scene.send(&wrapped);
            scene.send(&ipip(STRANGER, backend_address(1), &[0; 20]));
            scene.counts[3] += 1;
            let mut read = [0; 4];
            eventually(LIMIT, "the counters", || {
                read = counts(&scene.decap);
                (read[3] == scene.counts[3]).then_some(())
            })
            .unwrap();
            scene.counts[0] = read[0];
            ((read[0] > before) == counts_them).then_some(())
        })
        .unwrap();
    };
    change(&scene, "add");
    until(&mut scene, true);
    scene.counted("with the address", &wrapped, IPIP);
    scene.counted("with the address", &wrapped, IPIP);
    change(&scene, "del");
    until(&mut scene, false);
    scene.counted("without the address", &wrapped, None);
}
