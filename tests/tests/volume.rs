//! A million datagrams as fast as two CPUs send them: each is counted once, and arrives.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    fs::File,
    iter,
    net::{SocketAddr, UdpSocket},
    os::unix::fs::FileExt as _,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use balancer_tests::{
    Balancer, Netns, Plan, Topology,
    config::{self, BACKEND_PORT, Service, VIP_PORT},
    cpu, eventually,
    packet::{self, Path},
    socket::FrameSocket,
    status,
    topology::{BALANCER_CLIENT_SIDE, CLIENT, VIP, backend_address, mac},
};

const LIMIT: Duration = Duration::from_secs(10);
const SENDERS: u16 = 2;
/// Source ports, and so flows, of each sender.
const PORTS: u16 = 10_000;
/// Datagrams of each flow.
const ROUNDS: u64 = 50;
const PACKETS: u64 = SENDERS as u64 * PORTS as u64 * ROUNDS;
/// Frames in one system call.
const BATCH: usize = 64;
/// How many frames may be under way: a veth's queue holds 256, and loses what comes beyond.
const UNDER_WAY: u64 = 192;

/// One datagram of each of a sender's flows, of unlike lengths.
fn frames(sender: u16) -> Vec<Vec<u8>> {
    let first = 1024 + sender * PORTS;
    let frame = |port: u16| {
        let payload = vec![port as u8; 18 + usize::from(port % 61)];
        let packet = Path::new((CLIENT, port), (VIP, VIP_PORT)).udp(&payload).unwrap();
        packet::ethernet(mac(BALANCER_CLIENT_SIDE), mac(CLIENT), &packet)
    };
    (first..first + PORTS).map(frame).collect()
}

fn sum(figures: Vec<u64>) -> u64 {
    figures.iter().sum()
}

/// The IP packets that the backends have received, as their kernels count them.
struct Arrivals {
    /// Each tells of the namespace that it was opened in.
    snmp: Vec<File>,
    before: Vec<u64>,
}

impl Arrivals {
    fn new(bench: &Topology) -> Arrivals {
        let open = |netns: &Netns| netns.run(|| Ok(File::open("/proc/thread-self/net/snmp")?)).unwrap();
        let snmp: Vec<File> = bench.backends.iter().map(open).collect();
        let before = snmp.iter().map(received).collect();
        Arrivals { snmp, before }
    }

    fn each(&self) -> Vec<u64> {
        self.snmp.iter().zip(&self.before).map(|(snmp, before)| received(snmp) - before).collect()
    }
}

fn received(snmp: &File) -> u64 {
    let mut text = [0; 4096];
    let length = snmp.read_at(&mut text, 0).unwrap();
    let mut ip =
        str::from_utf8(&text[..length]).unwrap().lines().filter_map(|line| line.strip_prefix("Ip: "));
    let (names, values) = (ip.next().unwrap().split(' '), ip.next().unwrap().split(' '));
    names.zip(values).find(|(name, _)| *name == "InReceives").unwrap().1.parse().unwrap()
}

#[test]
fn a_million_datagrams_are_counted_exactly_and_arrive() {
    let bench = Plan::default().build().unwrap();
    let balancer = Balancer::start(
        &bench.balancer,
        &config::text("xdp-mode = \"native\"", &[Service::new("udp", "least-packets", &[1, 1, 1])]),
    )
    .unwrap();
    status::wait_until_up(&balancer).unwrap();
    // Somebody must be there, or each datagram is answered with an error; nobody needs to read.
    let bind = |(number, netns): (u8, &Netns)| {
        let address = SocketAddr::from((backend_address(number), BACKEND_PORT));
        netns.run(|| Ok(UdpSocket::bind(address)?)).unwrap()
    };
    let _sockets: Vec<UdpSocket> = (1..).zip(&bench.backends).map(bind).collect();
    let arrivals = Arrivals::new(&bench);
    let sent = AtomicU64::new(0);

    let bytes: u64 = thread::scope(|scope| {
        let senders = (0..SENDERS).map(|sender| {
            let socket = FrameSocket::open(&bench.client, "c0").unwrap();
            let (sent, arrivals) = (&sent, &arrivals);
            scope.spawn(move || {
                let frames = frames(sender);
                let cpus = cpu::usable().unwrap();
                cpu::pin(cpus[usize::from(sender) % cpus.len()]).unwrap();
                for batch in iter::repeat_n(frames.chunks(BATCH), ROUNDS as usize).flatten() {
                    let after = sent.fetch_add(batch.len() as u64, Relaxed) + batch.len() as u64;
                    let patience = Instant::now() + LIMIT;
                    while after > sum(arrivals.each()) + UNDER_WAY && Instant::now() < patience {
                        thread::yield_now();
                    }
                    socket.send_all(batch).unwrap();
                }
                frames.iter().map(|frame| frame.len() as u64 - 14).sum::<u64>() * ROUNDS
            })
        });
        let senders: Vec<_> = senders.collect();
        senders.into_iter().map(|sender| sender.join().unwrap()).sum()
    });

    let status = status::wait(&balancer, "a million datagrams counted", |status| {
        sum(status::each(status, |backend| backend.packets)) >= PACKETS
    });
    let devices = || {
        let show = |netns: &Netns, device: &str| {
            netns.ip(&format!("-statistics -statistics link show dev {device}")).unwrap()
        };
        [
            show(&bench.client, "c0"),
            show(&bench.balancer, "lc"),
            show(&bench.balancer, "lk"),
            show(&bench.switch, "lkp"),
        ]
        .concat()
    };
    status.unwrap_or_else(|error| panic!("{error:#}\nthe devices counted:\n{}", devices()));
    let status = status::read_fresh(&balancer).unwrap();
    assert_eq!(sum(status::each(&status, |backend| backend.packets)), PACKETS);
    assert_eq!(sum(status::each(&status, |backend| backend.bytes)), bytes);
    assert_eq!(sum(status::each(&status, |backend| backend.active)), u64::from(SENDERS * PORTS));
    assert_eq!(status::drops(&status), []);

    // And not one was lost after the balancer had counted it.
    let counted = status::each(&status, |backend| backend.packets);
    let all =
        eventually(LIMIT, "the arrival of what was counted", || (arrivals.each() == counted).then_some(()));
    assert!(
        all.is_ok(),
        "counted {counted:?}, arrived {:?}; the devices counted:\n{}",
        arrivals.each(),
        devices()
    );
    // Flows of fifty packets each, spread by what the backends had already got.
    assert!(
        counted.iter().all(|packets| packets * 30 >= PACKETS * 9 && packets * 30 <= PACKETS * 11),
        "{counted:?}"
    );
}
