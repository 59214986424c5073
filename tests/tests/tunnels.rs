//! What stands outside of wrapped packets, as a running daemon has it; and flows of the old way when `forward` changes.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket},
    time::Duration,
};

use balancer_tests::{
    Balancer,
    detour::Detour,
    echo::Echo,
    eventually,
    packet::{IPV4, IPV6},
    socket::FrameSocket,
    status::{self, each},
    topology::{BALANCER_BACKEND_SIDE, Family, VIP, backend_address},
};
use balancer_user::api::BackendState;

const LIMIT: Duration = Duration::from_secs(10);
const QUIET: Duration = Duration::from_millis(100);
const PORT: u16 = 8080;
const GUE_PORT: u16 = 6080;

/// How a packet of a client came to a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Wrapped {
    Not,
    Ipip,
    Gue,
}

/// A packet on the wire to the backends: how it is wrapped, where it comes from outside, and what tells its flow there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Seen {
    wrapped: Wrapped,
    source: IpAddr,
    /// The UDP source port of GUE; of IPv6, the flow label otherwise.
    lot: u32,
    /// The client's port.
    client: u16,
}

/// An untagged packet to a backend; `None` for anything but TCP and UDP of the two ports, wrapped or not.
fn seen(frame: &[u8]) -> Option<Seen> {
    let word = |bytes: &[u8], at: usize| Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
    let outer = frame.get(14..)?;
    let header = |packet: &[u8]| -> Option<(usize, u8, IpAddr)> {
        match packet.first()? >> 4 {
            4 => {
                let source: [u8; 4] = packet.get(12..16)?.try_into().ok()?;
                Some((20, *packet.get(9)?, Ipv4Addr::from(source).into()))
            }
            _ => {
                let source: [u8; 16] = packet.get(8..24)?.try_into().ok()?;
                Some((40, *packet.get(6)?, Ipv6Addr::from(source).into()))
            }
        }
    };
    if ![IPV4, IPV6].contains(&word(frame, 12)?) {
        return None;
    }
    let (length, protocol, source) = header(outer)?;
    let within = outer.get(length..)?;
    let (wrapped, lot, inner) = match protocol {
        4 | 41 => {
            let label = u32::from_be_bytes(outer.get(..4)?.try_into().ok()?) & 0xf_ffff;
            (Wrapped::Ipip, if length == 40 { label } else { 0 }, within)
        }
        17 if word(within, 2)? == GUE_PORT => (Wrapped::Gue, word(within, 0)?.into(), within.get(8..)?),
        _ => (Wrapped::Not, 0, outer),
    };
    let (length, protocol, _) = header(inner)?;
    let l4 = inner.get(length..)?;
    let is_request = [6, 17].contains(&protocol) && word(l4, 2)? == PORT;
    is_request.then_some(Seen { wrapped, source, lot, client: word(l4, 0)? })
}

/// What comes next on the wire, until nothing has for a while.
fn drain(wire: &FrameSocket) -> Vec<Seen> {
    let mut all = Vec::new();
    while let Some(next) = wire.receive(QUIET, seen).unwrap() {
        all.push(next);
    }
    all
}

fn service(mode: &str, protocol: &str, backend: IpAddr, more: &str) -> String {
    let address = SocketAddr::new(backend, PORT);
    format!(
        "[daemon]\ninterfaces = [\"lc\", \"lk\"]\n[[service]]\nname = \"s\"\naddress = \"{VIP}:{PORT}\"\n\
         protocol = \"{protocol}\"\nmethod = \"round-robin\"\nforward = \"{mode}\"\n{more}\n\
         [[service.backend]]\nname = \"b\"\naddress = \"{address}\"\n"
    )
}

/// Without `tunnel-source` all come from one address; with it each flow from one of the network's, always the same.
#[test]
fn flows_are_told_apart_outside() {
    let detour = Detour::new(1);
    let trusted = [
        "--from",
        "10.254.0.0/16",
        "--from",
        "2001:db8:254::/64",
        "--from",
        "10.0.2.1",
        "--from",
        "2001:db8:2::1",
    ];
    let _decap = detour.unwrap(&trusted);
    let _echo = Echo::udp(&detour.bench.backends[0], (VIP, PORT)).unwrap();
    let wire = FrameSocket::open(&detour.bench.switch, "lkp").unwrap();
    for family in Family::ALL {
        let (network, bits) = match family {
            Family::Ipv4 => ("10.254.0.0/16", 16),
            Family::Ipv6 => ("2001:db8:254::/64", 64),
        };
        for mode in ["ipip", "gue"] {
            for is_spread in [false, true] {
                let more = if is_spread { format!("tunnel-source = \"{network}\"") } else { String::new() };
                let text = service(mode, "udp", family.backend(1), &more);
                let balancer = Balancer::start(&detour.bench.balancer, &text).unwrap();
                status::wait_until_up(&balancer).unwrap();
                drain(&wire);
                let sockets: Vec<UdpSocket> = (0..32)
                    .map(|_| detour.bench.client.run(|| Ok(UdpSocket::bind("10.0.1.10:0")?)).unwrap())
                    .collect();
                for round in 0..3_u8 {
                    for socket in &sockets {
                        socket.set_read_timeout(Some(LIMIT)).unwrap();
                        socket.send_to(&[round], (VIP, PORT)).unwrap();
                        assert_eq!(socket.recv_from(&mut [0; 9]).unwrap(), (1, (VIP, PORT).into()));
                    }
                }
                let case = format!("{mode} {family:?} {is_spread}");
                let mut flows: BTreeMap<u16, BTreeSet<Seen>> = BTreeMap::new();
                let all = drain(&wire);
                assert_eq!(all.len(), 3 * 32, "{case}");
                for packet in all {
                    flows.entry(packet.client).or_default().insert(packet);
                }
                assert!(flows.len() == 32 && flows.values().all(|seen| seen.len() == 1), "{case}: {flows:?}");
                let seen: Vec<Seen> = flows.into_values().flatten().collect();
                let wrapped = if mode == "ipip" { Wrapped::Ipip } else { Wrapped::Gue };
                assert!(seen.iter().all(|packet| packet.wrapped == wrapped), "{case}: {seen:?}");
                let sources: BTreeSet<IpAddr> = seen.iter().map(|packet| packet.source).collect();
                let lots: BTreeSet<u32> = seen.iter().map(|packet| packet.lot).collect();
                if is_spread {
                    let text = network.split('/').next().unwrap();
                    let first: IpAddr = text.parse().unwrap();
                    let in_it = |address: &IpAddr| match (address, first) {
                        (IpAddr::V4(one), IpAddr::V4(first)) => {
                            (u32::from(*one) ^ u32::from(first)) >> (32 - bits) == 0
                        }
                        (IpAddr::V6(one), IpAddr::V6(first)) => {
                            (u128::from(*one) ^ u128::from(first)) >> (128 - bits) == 0
                        }
                        _ => false,
                    };
                    assert!(sources.iter().all(in_it), "{case}: {sources:?}");
                    assert!(sources.len() > 24, "{case}: {sources:?}");
                } else {
                    assert_eq!(sources, [family.balancer_backend_side()].into(), "{case}");
                }
                // IPv4 in IPv4 has no other place for it.
                if mode == "gue" || family == Family::Ipv6 {
                    assert!(lots.len() > 24, "{case}: {lots:?}");
                }
                assert_eq!(status::drops(&status::read_fresh(&balancer).unwrap()), [], "{case}");
            }
        }
    }
}

/// By way of four reloads, a connection of each way: those of the earlier ones go on as they began, new ones go by the new way.
#[test]
fn flows_go_on_by_the_way_that_they_began_with() {
    let detour = Detour::new(1);
    let _decap = detour.unwrap(&["--from", &BALANCER_BACKEND_SIDE.to_string()]);
    let backend = &detour.bench.backends[0];
    // One that is asked by the service's address, and one by its own, whose answers come back to the balancer's.
    let _servers =
        [IpAddr::from(VIP), backend_address(1).into()].map(|at| Echo::tcp(backend, (at, PORT)).unwrap());
    let wire = FrameSocket::open(&detour.bench.switch, "lkp").unwrap();
    let text = |mode: &str, more: &str| service(mode, "tcp", backend_address(1).into(), more);
    let balancer = Balancer::start(&detour.bench.balancer, &text("dsr", "")).unwrap();
    status::wait_until_up(&balancer).unwrap();
    let expected = [
        ("dsr", Wrapped::Not, IpAddr::from([10, 0, 1, 10])),
        ("ipip", Wrapped::Ipip, BALANCER_BACKEND_SIDE.into()),
        ("gue", Wrapped::Gue, BALANCER_BACKEND_SIDE.into()),
        ("full-nat", Wrapped::Not, BALANCER_BACKEND_SIDE.into()),
    ];
    let mut streams: Vec<TcpStream> = Vec::new();
    for (number, (mode, ..)) in expected.iter().enumerate() {
        if number > 0 {
            balancer.reload(&text(mode, "")).unwrap();
            // Beside the backend of the old way, which takes no more.
            eventually(LIMIT, "the new way", || {
                let shown = status::read(&balancer).ok()?;
                let states = each(&shown, |backend| backend.state);
                (shown.generation == number as u64 + 1 && states.contains(&BackendState::Up)).then_some(())
            })
            .unwrap_or_else(|error| panic!("{mode}: {error:#}: {}", balancer.log()));
        }
        let stream = detour.bench.client.run(|| Ok(TcpStream::connect_timeout(&(VIP, PORT).into(), LIMIT)?));
        let stream = stream.unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        streams.push(stream);
        for (mut stream, (mode, wrapped, source)) in streams.iter().zip(expected) {
            drain(&wire);
            stream.write_all(mode.as_bytes()).unwrap();
            let mut answer = vec![0; mode.len()];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!(answer, mode.as_bytes());
            let packets = drain(&wire);
            assert!(!packets.is_empty(), "{mode}");
            assert!(
                packets.iter().all(|packet| (packet.wrapped, packet.source) == (wrapped, source)),
                "{mode} after {number} reloads: {packets:?}"
            );
        }
    }
    assert_eq!(status::drops(&status::read_fresh(&balancer).unwrap()), []);
    // And not for ever: the time is that of the service when it changes.
    balancer.reload(&text("dsr", "drain-timeout = \"1s\"")).unwrap();
    let mut last = streams.pop().unwrap();
    let end = eventually(LIMIT, "the end of the last connection", || {
        let asked = last.write_all(b"?").and_then(|()| last.read_exact(&mut [0]));
        asked.err().map(|error| error.kind())
    });
    assert!([ErrorKind::ConnectionReset, ErrorKind::BrokenPipe].contains(&end.unwrap()));
}
