//! A flood of SYNs from everywhere: who is connected stays so, and who comes honestly gets in.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use balancer_tests::{
    Balancer, Netns, Plan,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    echo::Echo,
    eventually,
    packet::{self, Path, Segment},
    socket::FrameSocket,
    status::{self, each},
    topology::{BALANCER_CLIENT_SIDE, CLIENT, VIP, backend_address, mac},
};

/// How many SYNs at least, and for how long at least.
const SYNS: u64 = 1_000_000;
const TIME: Duration = Duration::from_secs(10);
const ESTABLISHED: usize = 50;
const HALF_OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an honest client tries.
const PATIENCE: Duration = Duration::from_secs(15);

fn connect(client: &Netns) -> std::io::Result<TcpStream> {
    let address = SocketAddr::from((VIP, VIP_PORT));
    let stream =
        client.run(|| Ok(TcpStream::connect_timeout(&address, PATIENCE))).expect("the client's namespace")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn exchange(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(b"x")?;
    stream.read_exact(&mut [0; 1])
}

/// Sends SYNs from addresses and ports of the benchmarking network (RFC 2544), each another, until it is enough.
fn flood(client: &Netns, sent: &AtomicU64) {
    let socket = FrameSocket::open(client, "c0").unwrap();
    let syn = Path::new((CLIENT, 1), (VIP, VIP_PORT)).tcp(Segment::flags(Segment::SYN), &[]).unwrap();
    let template = packet::ethernet(mac(BALANCER_CLIENT_SIDE), mac(CLIENT), &syn);
    let mut number = 0x1234_5678_9abc_def0_u64;
    let start = Instant::now();
    while sent.load(Relaxed) < SYNS || start.elapsed() < TIME {
        let mut accepted = 0;
        for _ in 0..256 {
            // Marsaglia's xorshift.
            number ^= number << 13;
            number ^= number >> 7;
            number ^= number << 17;
            let [a, b, c, d, e, ..] = number.to_le_bytes();
            let frame = with_source(&template, [198, 18 | (a & 1), b, c], 1_024 | u16::from_le_bytes([d, e]));
            // A queue that is full is no fault: as fast as the machine sends.
            accepted += u64::from(socket.send(&frame).is_ok());
        }
        sent.fetch_add(accepted, Relaxed);
    }
}

/// A TCP frame without options in its IP header, from another source, with both checksums made anew.
fn with_source(template: &[u8], address: [u8; 4], port: u16) -> Vec<u8> {
    let mut frame = template.to_vec();
    frame[26..30].copy_from_slice(&address);
    frame[34..36].copy_from_slice(&port.to_be_bytes());
    for (place, range, pseudo) in [(24, 14..34, 0), (50, 26..frame.len(), 6 + frame.len() as u32 - 34)] {
        frame[place..place + 2].fill(0);
        let words = frame[range].chunks_exact(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
        let sum = words.sum::<u32>() + pseudo;
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
        frame[place..place + 2].copy_from_slice(&sum.to_be_bytes());
    }
    frame
}

#[test]
fn a_flood_of_syns_takes_nothing_from_those_who_are_connected() {
    let bench = Plan::backends(2).build().unwrap();
    let echoes: Vec<Echo> = (1..)
        .zip(&bench.backends)
        .map(|(number, netns)| {
            netns.set_sysctl("net/ipv4/tcp_syncookies", "2").unwrap();
            Echo::tcp(netns, SocketAddr::from((backend_address(number), BACKEND_PORT))).unwrap()
        })
        .collect();
    let daemon = "max-flows = 65536\nhalf-open-timeout = \"5s\"";
    let service = Service::new("tcp", "least-request", &[1, 1]);
    let balancer = Balancer::start(&bench.balancer, &config::text(daemon, &[service])).unwrap();
    status::wait_until_up(&balancer).unwrap();

    let mut streams: Vec<TcpStream> = (0..ESTABLISHED).map(|_| connect(&bench.client).unwrap()).collect();
    streams.iter_mut().for_each(|stream| exchange(stream).unwrap());
    let active = [ESTABLISHED as u64 / 2; 2];
    status::wait(&balancer, "the connections", |status| each(status, |backend| backend.active) == active)
        .unwrap();

    let (sent, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let (honest, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    let mut most_half_open = 0;
    thread::scope(|scope| {
        let flooding = scope.spawn(|| flood(&bench.client, &sent));
        // One packet a second each, and the answer to it.
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                let round = Instant::now();
                streams.iter_mut().for_each(|stream| exchange(stream).unwrap());
                thread::sleep(Duration::from_secs(1).saturating_sub(round.elapsed()));
            }
        });
        // New clients, all the time.
        for _ in 0..4 {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    let is_served =
                        connect(&bench.client).and_then(|mut stream| exchange(&mut stream)).is_ok();
                    (if is_served { &honest } else { &failed }).fetch_add(1, Relaxed);
                    thread::sleep(Duration::from_millis(20));
                }
            });
        }
        while !flooding.is_finished() {
            let flows = status::read(&balancer).unwrap().flows;
            most_half_open = flows.now.half_open.max(most_half_open);
        }
        is_over.store(true, Relaxed);
    });
    let end = Instant::now();
    let (sent, honest, failed) = (sent.load(Relaxed), honest.load(Relaxed), failed.load(Relaxed));
    println!("{sent} SYNs, at most {most_half_open} half open; {honest} honest clients served, {failed} not");
    assert!(sent >= SYNS);
    assert!(honest >= 100 && failed * 99 <= honest, "{honest} served, {failed} not");

    // The flood is shown, and forgotten: connections that were closed honestly are as well.
    let after =
        eventually(HALF_OPEN_TIMEOUT + Duration::from_secs(2), "the active counts to be right again", || {
            status::read(&balancer).ok().filter(|status| each(status, |backend| backend.active) == active)
        });
    let after = after.unwrap_or_else(|error| panic!("{error}: {:#?}", status::read(&balancer)));
    let took = end.elapsed();
    println!("right again after {took:?}");
    assert!(most_half_open > 30_000, "{most_half_open}");
    let evicted = after.flows.evicted;
    assert!(evicted.half_open > SYNS / 10, "{evicted:?}");
    assert_eq!(evicted.established, 0);
    streams.iter_mut().for_each(|stream| exchange(stream).unwrap());
    drop((streams, echoes));
}
