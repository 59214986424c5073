//! The XDP program beside a model that shares no code with it, on generated packets: verdict, bytes and counters are the same.
//!
//! `BALANCER_TEST_LONG=1` (`cargo xtask test --long`) makes it a million packets instead of twenty thousand.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    env,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use balancer_common::{
    Backend as Record, MAX_PORTS, NextHop, Reason, Service as Entry, TCP, UDP, ability, endpoint, forward,
    role, vlan,
};
use balancer_tests::{
    oracle::{Backend, Fate, Mode, Oracle, Service, Tag},
    packet::to_hex,
    program::{INGRESS, verdict},
    topology::Family,
};
use balancer_user::{
    address,
    datapath::{Datapath, Sizes},
};
use fastrand::Rng;

/// Where frames leave towards backends: no device that exists.
const ELSEWHERE: u32 = 4_000_000;
const CLIENT_SIDE: [u8; 6] = [2, 0, 0, 0, 1, 1];
const BACKEND_SIDE: [u8; 6] = [2, 0, 0, 0, 2, 1];
const CLIENT: [u8; 6] = [2, 0, 0, 0, 1, 10];
const FAMILIES: [Family; 2] = [Family::Ipv4, Family::Ipv6];
const GUE_PORT: u16 = 6080;
/// VLANs that the balancer has devices of.
const VLAN: &[Tag] = &[(0x8100, 7)];
const STACKED: &[Tag] = &[(0x88a8, 5), (0x8100, 7)];
/// Their ports.
const PORTS: [(u16, &[Tag]); 3] = [(0, &[]), (64, VLAN), (65, STACKED)];
const MODES: [Mode; 4] = [Mode::Nat, Mode::Dsr, Mode::Ipip, Mode::Gue(GUE_PORT)];

fn outer(family: Family) -> IpAddr {
    family.balancer_backend_side()
}

/// Every mode over both families and protocols, each with two backends; those of tunnels are of different families.
fn world() -> (Vec<Service>, Vec<Backend>) {
    let (mut services, mut backends) = (Vec::new(), Vec::new());
    for (number, mode) in (0..).zip(MODES) {
        for family in FAMILIES {
            for protocol in [TCP, UDP] {
                let port = 80 + number;
                let own = [0u8, 1].map(|second| {
                    let is_tunnel = matches!(mode, Mode::Ipip | Mode::Gue(_));
                    let of = if is_tunnel { FAMILIES[usize::from(second)] } else { family };
                    let id = backends.len() as u8;
                    let port = if mode == Mode::Nat { 8000 + u16::from(second) } else { port };
                    // Each backend is its own, so that nobody's replies are another's.
                    backends.push(Backend {
                        address: (of.backend(id + 1), port),
                        mac: [2, 0, 0, 0, 2, 11 + id],
                        outer: outer(of),
                        mtu: if second == 0 { 1400 } else { 9000 },
                        tags: PORTS[usize::from(id) % 3].1,
                    });
                    usize::from(id)
                });
                services.push(Service {
                    front: (family.vip(), port, protocol),
                    mode,
                    backends: own.to_vec(),
                });
            }
        }
    }
    (services, backends)
}

const fn number(mode: Mode) -> u8 {
    match mode {
        Mode::Nat => forward::NAT,
        Mode::Dsr => forward::DSR,
        Mode::Ipip => forward::IPIP,
        Mode::Gue(_) => forward::GUE,
    }
}

/// Tags as the program has them.
fn stack(tags: &[Tag]) -> u32 {
    let number = |(kind, id): &Tag| u32::from(*id) | if *kind == 0x88a8 { vlan::SERVICE } else { 0 };
    tags.iter().fold(vlan::NONE, |above, tag| above << vlan::BITS | number(tag))
}

fn program(services: &[Service], backends: &[Backend]) -> Datapath {
    let sizes = Sizes {
        flows: 1 << 18,
        services: services.len() as u32,
        backends: backends.len() as u32,
        ipv6: Some(true),
        profiled_age: Duration::from_secs(14),
    };
    let mut program = Datapath::load(sizes, false, None).unwrap();
    program.set_egress(0, INGRESS).unwrap();
    program.set_ports(&PORTS.map(|(port, tags)| ([INGRESS, stack(tags)], port)).into()).unwrap();
    for (port, tags) in PORTS {
        let (source, vlan) = (CLIENT_SIDE, stack(tags));
        let hop = NextHop { port: 0, source, mtu: 9000, ifindex: INGRESS, vlan, ..NextHop::default() };
        program.set_next_hop(port.into(), &hop);
    }
    for (id, service) in (0..).zip(services) {
        let (address, port, protocol) = service.front;
        let key = program.key(SocketAddr::new(address, port), protocol);
        let entry = Entry {
            address: address::to_wire(address),
            id,
            idle_timeout: 26_822,
            half_open_timeout: 26_822,
            closing_timeout: 26_822,
            forward: number(service.mode),
            ..Entry::default()
        };
        program.set_service(&key, &entry).unwrap();
        program.set_roles(entry.address, role::SERVICE).unwrap();
        let ring: Vec<u16> = service.backends.iter().map(|id| *id as u16).collect();
        program.switch_ring(id, &ring, None).unwrap();
        for backend in &service.backends {
            let Backend { address: (address, port), mac, outer, mtu, tags } = backends[*backend];
            let record = Record {
                address: address::to_wire(address),
                port: port.to_be_bytes(),
                service: id,
                snat_address: if service.mode == Mode::Nat { [0; 16] } else { address::to_wire(outer) },
                snat_prefix: 128,
                abilities: ability::SERVE | ability::TAKE,
                tunnel_port: GUE_PORT.to_be_bytes(),
                forward: number(service.mode),
                ..Record::default()
            };
            program.set_backend(*backend as u16, &record).unwrap();
            let around = match (service.mode, address.is_ipv4()) {
                (Mode::Nat | Mode::Dsr, _) => 0,
                (Mode::Ipip, true) => 20,
                (Mode::Ipip, false) => 40,
                (Mode::Gue(_), true) => 28,
                (Mode::Gue(_), false) => 48,
            };
            let hop = NextHop {
                neighbour: mac,
                port: 0,
                source: BACKEND_SIDE,
                mtu: mtu as u16 - around,
                ifindex: ELSEWHERE,
                forward: number(service.mode),
                vlan: stack(tags),
                ..NextHop::default()
            };
            program.set_next_hop(MAX_PORTS + *backend as u32, &hop);
            if service.mode == Mode::Nat {
                program.set_roles(record.address, role::BACKEND).unwrap();
                let key = program.key(SocketAddr::new(address, port), protocol);
                program.set_endpoint(&key, endpoint::SERVER).unwrap();
            }
        }
    }
    program
}

/// The end of a conversation: an address and a port.
type End = (IpAddr, u16);

/// Makes packets: most of them such as networks carry, the others not.
struct Generator {
    rng: Rng,
    services: Vec<Service>,
    backends: Vec<Backend>,
    /// Conversations that were begun: client, service and protocol.
    begun: Vec<(End, End, u8, Mode, Vec<usize>)>,
    /// Fragmented datagrams whose first part was sent: its frame but for the place.
    fragmented: Vec<(End, End, u8, u32)>,
}

impl Generator {
    fn next(&mut self) -> Vec<u8> {
        let frame = match self.rng.u8(..10) {
            0..=3 => self.first(),
            4..=5 if !self.begun.is_empty() => self.another(),
            6..=7 if !self.begun.is_empty() => self.reply(),
            8 if !self.fragmented.is_empty() => self.rest(),
            9 => self.stranger(),
            _ => self.first(),
        };
        if self.rng.u8(..6) == 0 { self.spoiled(frame) } else { frame }
    }

    fn client(&mut self, is_ipv4: bool) -> End {
        let port = self.rng.u16(1024..);
        let [a, b] = [self.rng.u8(..), self.rng.u8(1..255)];
        let address = match (is_ipv4, self.rng.u8(..40)) {
            (true, 0) => [224, 0, a, b].into(),
            (true, 1) => [127, 0, a, b].into(),
            (true, _) => [10, 1, a, b].into(),
            (false, 0) => [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, a, b].into(),
            (false, 1) => [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, a, b].into(),
            (false, _) => [0x20, 1, 0xd, 0xb8, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, a, b].into(),
        };
        (address, port)
    }

    /// The first packet of a conversation.
    fn first(&mut self) -> Vec<u8> {
        let service = self.rng.choice(&self.services).unwrap().clone();
        let (address, port, protocol) = service.front;
        let client = self.client(address.is_ipv4());
        self.begun.push((client, (address, port), protocol, service.mode, service.backends));
        let flags = if self.rng.u8(..12) == 0 { self.rng.u8(..) } else { 0x02 };
        self.packet(client, (address, port), protocol, flags)
    }

    fn another(&mut self) -> Vec<u8> {
        let (client, service, protocol, ..) = self.rng.choice(&self.begun).unwrap().clone();
        // Nothing that ends it.
        let flags = *self.rng.choice(&[0x10, 0x18, 0x02]).unwrap();
        self.packet(client, service, protocol, flags)
    }

    fn reply(&mut self) -> Vec<u8> {
        let (client, _, protocol, _, backends) = self.rng.choice(&self.begun).unwrap().clone();
        let backend = *self.rng.choice(&backends).unwrap();
        let flags = *self.rng.choice(&[0x12, 0x10, 0x18]).unwrap();
        let from = self.backends[backend].address;
        if from.0.is_ipv4() != client.0.is_ipv4() {
            return self.first();
        }
        self.packet(from, client, protocol, flags)
    }

    fn stranger(&mut self) -> Vec<u8> {
        let is_ipv4 = self.rng.bool();
        let (from, to) = (self.client(is_ipv4), self.client(is_ipv4));
        let vip = if is_ipv4 { Family::Ipv4.vip() } else { Family::Ipv6.vip() };
        let to = if self.rng.bool() { (vip, to.1) } else { to };
        let protocol = *self.rng.choice(&[TCP, UDP, 47, 132, 1 + u8::from(is_ipv4)]).unwrap();
        self.packet(from, to, protocol, 0x10)
    }

    fn rest(&mut self) -> Vec<u8> {
        // Of the last ones: a first part is remembered for half a minute.
        let last = self.fragmented.len().saturating_sub(50);
        let (from, to, protocol, id) = *self.rng.choice(&self.fragmented[last..]).unwrap();
        // Sometimes of a datagram that nobody has begun.
        let id = if self.rng.u8(..5) == 0 { self.rng.u32(..) } else { id };
        let bytes: Vec<u8> = (0..self.rng.usize(8..600)).map(|_| self.rng.u8(..)).collect();
        let ttl = self.rng.u8(2..);
        let offset = self.rng.u16(1..1000);
        let packet = match (from.0, to.0) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let field = ((u16::from(self.rng.bool()) << 13) | offset).to_be_bytes();
                let ends = [source.octets(), destination.octets()].concat();
                ipv4(&[], 0, (id as u16).to_be_bytes(), field, ttl, protocol, &ends, &bytes)
            }
            _ => {
                let field = (offset << 3 | u16::from(self.rng.bool())).to_be_bytes();
                let header = [&[protocol, 0][..], &field, &id.to_be_bytes()].concat();
                ipv6(0, ttl, 44, &[octets(from.0), octets(to.0)].concat(), &[header, bytes].concat())
            }
        };
        self.frame(&packet)
    }

    /// A packet of TCP, UDP or anything, with all that may stand around it.
    fn packet(&mut self, from: End, to: End, protocol: u8, flags: u8) -> Vec<u8> {
        let length = match self.rng.u8(..8) {
            0 => 0,
            1 => self.rng.usize(1300..1500),
            // More than one buffer.
            2 if self.rng.bool() => self.rng.usize(3000..8900),
            _ => self.rng.usize(..200),
        };
        let payload: Vec<u8> = (0..length).map(|_| self.rng.u8(..)).collect();
        let ends = [octets(from.0), octets(to.0)].concat();
        let mut l4 = [from.1.to_be_bytes(), to.1.to_be_bytes()].concat();
        match protocol {
            TCP => {
                let options = self.rng.usize(..4) * 4 * usize::from(self.rng.bool());
                l4.extend((0..8).map(|_| self.rng.u8(..)));
                l4.extend([(5 + options / 4) as u8 * 16, flags, 0xfa, 0xf0, 0, 0, 0, 0]);
                l4.extend(vec![1; options]);
            }
            UDP => l4.extend([(8 + length as u16).to_be_bytes(), [0, 0]].concat()),
            _ => l4.clear(),
        }
        l4.extend(&payload);
        let has_sum = matches!(protocol, TCP) || protocol == UDP && self.rng.u8(..8) > 0;
        if has_sum {
            let place = if protocol == TCP { 16 } else { 6 };
            let pseudo = [&ends[..], &[0, protocol], &(l4.len() as u16).to_be_bytes(), &l4].concat();
            let sum = match (checksum(&pseudo), protocol) {
                ([0, 0], UDP) => [0xff, 0xff],
                (sum, _) => sum,
            };
            l4[place..place + 2].copy_from_slice(&sum);
        }
        let ttl = if self.rng.u8(..20) == 0 { self.rng.u8(..3) } else { self.rng.u8(2..) };
        let class = self.rng.u8(..);
        // The first of several parts: its sum is as if it were all, which nobody here can tell.
        let is_first = matches!(protocol, TCP | UDP) && self.rng.u8(..12) == 0;
        let id = self.rng.u32(..);
        if is_first {
            let id = if from.0.is_ipv4() { id & 0xffff } else { id };
            self.fragmented.push((from, to, protocol, id));
        }
        let packet = if from.0.is_ipv4() {
            let options = vec![1; self.rng.usize(..4) * 4 * usize::from(self.rng.bool())];
            let field = match (is_first, self.rng.bool()) {
                (true, _) => [0x20, 0],
                (false, true) => [0x40, 0],
                _ => [0, 0],
            };
            ipv4(&options, class, (id as u16).to_be_bytes(), field, ttl, protocol, &ends, &l4)
        } else {
            let (next, mut chain) = self.extensions(protocol);
            let mut first = next;
            if is_first {
                // The fragment header goes last.
                let header = [&[protocol, 0, 0, 1][..], &id.to_be_bytes()].concat();
                (first, chain) = (44, header);
            }
            ipv6(class, ttl, first, &ends, &[chain, l4].concat())
        };
        self.frame(&packet)
    }

    /// A chain of extension headers before this protocol: the number of the first, and their bytes.
    fn extensions(&mut self, protocol: u8) -> (u8, Vec<u8>) {
        let count = if self.rng.bool() { 0 } else { self.rng.usize(..12) };
        let (mut next, mut chain) = (protocol, Vec::new());
        for _ in 0..count {
            let kind = *self.rng.choice(&[0u8, 43, 51, 60, 44]).unwrap();
            let header = match kind {
                // Segments left: mostly none.
                43 => [next, 0, 4, u8::from(self.rng.u8(..10) == 0), 0, 0, 0, 0].to_vec(),
                51 => [&[next, 4][..], &[7; 22]].concat(),
                // An atomic fragment.
                44 => [next, 0, 0, 0, 1, 2, 3, 4].to_vec(),
                _ => [&[next, 1, 1, 12][..], &[0; 12]].concat(),
            };
            chain = [header, chain].concat();
            next = kind;
        }
        (next, chain)
    }

    fn frame(&mut self, packet: &[u8]) -> Vec<u8> {
        let all: [&[[u8; 4]]; 6] = [
            &[[0x81, 0, 0, 7]],
            &[[0x88, 0xa8, 0, 5], [0x81, 0, 0, 7]],
            // A priority alone; VLANs that there is no device of; one tag more than is looked at.
            &[[0x81, 0, 0xa0, 0]],
            &[[0x88, 0xa8, 0, 5]],
            &[[0x81, 0, 0x60, 7], [0x81, 0, 0, 9]],
            &[[0x88, 0xa8, 0, 5], [0x81, 0, 0, 7], [0x81, 0, 0, 9]],
        ];
        let tags = if self.rng.bool() { &[][..] } else { self.rng.choice(all).unwrap_or_default() };
        let kind: [u8; 2] = if packet[0] >> 4 == 4 { [8, 0] } else { [0x86, 0xdd] };
        let mut frame = [&CLIENT_SIDE[..], &CLIENT, &tags.concat(), &kind, packet].concat();
        let padding = if frame.len() < 60 { 60 - frame.len() } else { self.rng.usize(..2) * 3 };
        frame.extend((0..padding).map(|_| self.rng.u8(..)));
        frame
    }

    /// A frame with a byte changed, cut off, or with another MAC.
    fn spoiled(&mut self, mut frame: Vec<u8>) -> Vec<u8> {
        match self.rng.u8(..4) {
            0 => frame.truncate(self.rng.usize(15..frame.len())),
            1 => frame[usize::from(self.rng.bool()) * 6] |= 1,
            _ => {
                // Lengths, versions, places and flags are up front. But nothing becomes ICMP, which is not looked at here,
                // and no flow ends.
                let end = frame.len().min(14 + 60);
                let place = self.rng.usize(12..end);
                let before = frame[place];
                frame[place] ^= 1 << self.rng.u8(..8);
                if [1, 58].contains(&frame[place]) || [1, 4, 5].contains(&(before ^ frame[place])) {
                    frame[place] = before;
                }
            }
        }
        frame
    }
}

#[expect(clippy::too_many_arguments, reason = "an IP header has so many fields")]
fn ipv4(
    options: &[u8],
    class: u8,
    id: [u8; 2],
    field: [u8; 2],
    ttl: u8,
    protocol: u8,
    ends: &[u8],
    content: &[u8],
) -> Vec<u8> {
    let length = (20 + options.len() + content.len()) as u16;
    let first = 0x45 + (options.len() / 4) as u8;
    let start = [&[first, class][..], &length.to_be_bytes(), &id, &field, &[ttl, protocol, 0, 0]].concat();
    let mut header = [&start[..], ends, options].concat();
    let sum = checksum(&header);
    header[10..12].copy_from_slice(&sum);
    [&header, content].concat()
}

fn ipv6(class: u8, ttl: u8, next: u8, ends: &[u8], content: &[u8]) -> Vec<u8> {
    let word = (6 << 28 | u32::from(class) << 20 | 0x1_2345).to_be_bytes();
    [&word[..], &(content.len() as u16).to_be_bytes(), &[next, ttl], ends, content].concat()
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn checksum(bytes: &[u8]) -> [u8; 2] {
    let mut sum: u32 = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0)))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

/// Requests and replies of each backend, packets and bytes.
fn counted(program: &mut Datapath, backends: usize) -> Vec<[u64; 4]> {
    let cpus = program.cpus();
    let cells = program.read_counters(backends).unwrap();
    let of = |per_cpu: &[balancer_common::BackendCounters]| {
        per_cpu.iter().fold([0; 4], |[a, b, c, d], cell| {
            let (request, reply) = (cell.request, cell.reply);
            [a + request.packets, b + request.bytes, c + reply.packets, d + reply.bytes]
        })
    };
    cells.chunks(cpus).map(of).collect()
}

/// IP total length of the packet in a frame.
fn length(frame: &[u8]) -> u64 {
    let mut l3 = 14;
    while [[0x81, 0], [0x88, 0xa8]].contains(&[frame[l3 - 2], frame[l3 - 1]]) {
        l3 += 4;
    }
    let word = |at: usize| u64::from(u16::from_be_bytes([frame[l3 + at], frame[l3 + at + 1]]));
    if frame[l3] >> 4 == 4 { word(2) } else { 40 + word(4) }
}

/// Packets of a round; each has a program of its own, with room for all its flows.
const ROUND: u32 = 20_000;

#[test]
fn the_program_does_what_the_model_says() {
    let rounds = if env::var_os("BALANCER_TEST_LONG").is_some() { 50 } else { 1 };
    let wanted = env::var("BALANCER_SEED").ok().and_then(|seed| seed.parse().ok());
    for _ in 0..rounds {
        compare(wanted.unwrap_or_else(|| fastrand::u64(..)));
    }
}

fn compare(seed: u64) {
    let (services, backends) = world();
    let mut program = program(&services, &backends);
    let mut oracle =
        Oracle::new(services.clone(), backends.clone(), [CLIENT_SIDE, BACKEND_SIDE], &[VLAN, STACKED]);
    let rng = Rng::with_seed(seed);
    let mut generator =
        Generator { rng, services, backends: backends.clone(), begun: Vec::new(), fragmented: Vec::new() };
    let mut fates = [0u32; 5];
    let mut drops = program.read_drops().unwrap();
    let mut traffic = counted(&mut program, backends.len());
    for number in 0..ROUND {
        let frame = generator.next();
        let (seen, output) = program.test_run(&frame, INGRESS).unwrap();
        let expected = oracle.judge(&frame, &output);
        let what = || {
            format!(
                "packet {number} of seed {seed}: {}\nexpected {expected:?}\ngot {seen} {}",
                to_hex(&frame),
                to_hex(&output)
            )
        };
        let (fate, reason) = match &expected {
            Fate::Pass => {
                assert_eq!((seen, &output), (verdict::PASS, &frame), "{}", what());
                (0, None)
            }
            Fate::Drop(reason) => {
                assert_eq!((seen, &output), (verdict::DROP, &frame), "{}", what());
                (1, Some(*reason))
            }
            Fate::Told(reason) => {
                let is_silent = (seen, &output) == (verdict::DROP, &frame);
                let is_answer =
                    seen == verdict::TX && output[..6] == frame[6..12] && output[6..12] == frame[..6];
                assert!(is_silent || is_answer, "{}", what());
                (2, Some(*reason))
            }
            Fate::ToBackend(id, expected) => {
                assert_eq!((seen, to_hex(&output)), (verdict::REDIRECT, to_hex(expected)), "{}", what());
                traffic[*id][0] += 1;
                traffic[*id][1] += length(&frame);
                (3, None)
            }
            Fate::ToClient(id, expected) => {
                assert_eq!((seen, to_hex(&output)), (verdict::TX, to_hex(expected)), "{}", what());
                traffic[*id][2] += 1;
                traffic[*id][3] += length(&frame);
                (4, None)
            }
        };
        fates[fate] += 1;
        if let Some(reason) = reason {
            drops[reason as usize] += 1;
        }
        if number % 64 == 0 || reason.is_some() {
            let seen = program.read_drops().unwrap();
            assert_eq!(named(&seen), named(&drops), "{}", what());
        }
        if number % 64 == 0 {
            assert_eq!(counted(&mut program, backends.len()), traffic, "{}", what());
        }
    }
    // Each happens often enough that it was looked at.
    assert!(fates.iter().all(|times| *times > ROUND / 100), "{fates:?} of seed {seed}");
    assert_eq!(counted(&mut program, backends.len()), traffic);
}

fn named(drops: &[u64]) -> Vec<(&'static str, u64)> {
    Reason::ALL.iter().zip(drops).map(|(reason, count)| (reason.name(), *count)).collect()
}
