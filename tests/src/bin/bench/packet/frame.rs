//! The frames that are made: as they arrive, as they must leave, and as the harness is told of them.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context as _, Result, ensure};
use balancer_common::{FlowKey, TCP, UDP, family, forward};
use balancer_harness::{HEAD, LONGEST, Packets, client_address, client_port};
use balancer_tests::{
    program::{BACKEND_PORT, BACKEND_SIDE, CLIENT, CLIENT_SIDE, VIP_PORT, backend_mac},
    topology,
};
use bytemuck::Zeroable as _;
use etherparse::{Ipv4Header, PacketBuilder, TcpHeader};

/// Bytes of Ethernet's header.
const ETHERNET: usize = 14;
/// The smallest frame, without its check sequence and with what pads it.
const SHORTEST: usize = 64;
/// The UDP port that backends unwrap GUE at.
pub const GUE_PORT: u16 = 6080;

/// IPv4 or IPv6: what differs between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    /// What a case is called after.
    pub name: &'static str,
    /// Whose addresses they are.
    pub plan: topology::Family,
    /// Bytes of the IP header.
    header: usize,
    /// Offsets of the last 4 bytes of the source's and the destination's address in it.
    addresses: [usize; 2],
}

/// The Internet Protocol, version 4 (RFC 791).
pub const IPV4: Family =
    Family { name: "IPv4", plan: topology::Family::Ipv4, header: 20, addresses: [12, 16] };
/// The Internet Protocol, version 6 (RFC 8200).
pub const IPV6: Family =
    Family { name: "IPv6", plan: topology::Family::Ipv6, header: 40, addresses: [20, 36] };

impl Family {
    fn service(self) -> IpAddr {
        self.plan.vip()
    }

    fn backend(self) -> IpAddr {
        self.plan.backend(1)
    }
}

/// TCP or UDP: what differs between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transport {
    /// What a case is called after.
    pub name: &'static str,
    /// Its number.
    pub protocol: u8,
    /// Where the filler is, that makes up for the client's port in checksums: TCP's urgent pointer, UDP's first payload.
    filler: usize,
}

/// The Transmission Control Protocol (RFC 9293).
pub const TRANSMISSION: Transport = Transport { name: "TCP", protocol: TCP, filler: 18 };
/// The User Datagram Protocol (RFC 768).
pub const DATAGRAM: Transport = Transport { name: "UDP", protocol: UDP, filler: 8 };

/// Which way a frame goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From a client to the service.
    Request,
    /// From the backend to a client.
    Reply,
}

/// How packets get to the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Nat,
    FullNat,
    Dsr,
    Ipip,
    Gue,
}

impl Mode {
    /// As in the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Mode::Nat => "nat",
            Mode::FullNat => "full-nat",
            Mode::Dsr => "dsr",
            Mode::Ipip => "ipip",
            Mode::Gue => "gue",
        }
    }

    /// As in the maps.
    pub const fn number(self) -> u8 {
        match self {
            Mode::Nat | Mode::FullNat => forward::NAT,
            Mode::Dsr => forward::DSR,
            Mode::Ipip => forward::IPIP,
            Mode::Gue => forward::GUE,
        }
    }

    /// Whether replies go past the balancer.
    pub const fn is_one_way(self) -> bool {
        self.number() != forward::NAT
    }
}

/// What part of its datagram a frame holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Whole,
    /// The first fragment.
    First,
    /// A later one of the same.
    Later,
    /// A later one of another, whose first was never seen.
    Stray,
}

/// What the program has given a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Given {
    /// Its source port towards the backend, where that is translated.
    pub port: u16,
    /// What tells it from others once it is wrapped.
    pub lot: u16,
}

/// All frames of a case: they differ by their client alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub family: Family,
    pub mode: Mode,
    pub transport: Transport,
    pub way: Way,
    /// TCP's flags, as in the header's byte 13.
    pub flags: u8,
    /// Sequence and acknowledgement number.
    pub numbers: (u32, u32),
    /// The port that clients send to, or get replies from.
    pub service_port: u16,
    pub part: Part,
    /// What the flow has been given; all flows, where the frames depend on it.
    pub given: Given,
}

/// Addresses, ports and MACs of a frame.
struct Ends {
    macs: [[u8; 6]; 2],
    source: (IpAddr, u16),
    destination: (IpAddr, u16),
}

impl Shape {
    /// The frame of a flow, as it arrives.
    pub fn frame(&self, flow: u32) -> Result<Vec<u8>> {
        let ends = match self.way {
            Way::Request => Ends {
                macs: [CLIENT, CLIENT_SIDE],
                source: self.client(flow),
                destination: (self.family.service(), self.service_port),
            },
            Way::Reply => Ends {
                macs: [backend_mac(0), BACKEND_SIDE],
                source: (self.family.backend(), BACKEND_PORT),
                destination: self.seen_source(flow),
            },
        };
        self.build(flow, &ends, 64)
    }

    /// The frame of a flow, as it leaves.
    pub fn forwarded(&self, flow: u32) -> Result<Vec<u8>> {
        let to_backend = [BACKEND_SIDE, backend_mac(0)];
        let handed_on = |frame: Vec<u8>| {
            let [source, destination] = to_backend;
            [&destination[..], &source, &frame[12..]].concat()
        };
        match (self.way, self.mode) {
            (Way::Request, Mode::Dsr) => Ok(handed_on(self.frame(flow)?)),
            (Way::Request, Mode::Ipip | Mode::Gue) => {
                let destination = (self.family.service(), self.service_port);
                let ends = Ends { macs: to_backend, source: self.client(flow), destination };
                Ok(self.wrapped(&self.build(flow, &ends, 63)?))
            }
            (Way::Request, _) => {
                let destination = (self.family.backend(), BACKEND_PORT);
                self.build(flow, &Ends { macs: to_backend, source: self.seen_source(flow), destination }, 63)
            }
            (Way::Reply, _) => {
                let source = (self.family.service(), self.service_port);
                self.build(
                    flow,
                    &Ends { macs: [CLIENT_SIDE, CLIENT], source, destination: self.client(flow) },
                    63,
                )
            }
        }
    }

    /// The key of a flow's requests, with what the program takes for an address.
    pub fn key(&self, flow: u32, short: impl Fn(IpAddr) -> [u8; 4]) -> FlowKey {
        let (client, port) = self.client(flow);
        FlowKey {
            source: short(client),
            destination: short(self.family.service()),
            source_port: port.to_be_bytes(),
            destination_port: VIP_PORT.to_be_bytes(),
            protocol: self.transport.protocol,
            family: if client.is_ipv4() { family::IPV4 } else { family::IPV6 },
            reserved: [0; 2],
        }
    }

    /// What the harness is to make: `count` flows (a power of two) from `first` on, at random or one after the other.
    pub fn packets(&self, first: u32, count: u32, random: Option<u64>) -> Result<Packets> {
        let frame = self.frame(0)?;
        let mut bytes = [0; LONGEST];
        bytes
            .get_mut(..frame.len())
            .context("a frame longer than the harness makes")?
            .copy_from_slice(&frame);
        let mut packets = Packets::zeroed();
        let mut used = 0;
        for (offset, width, empty, patch) in self.fields() {
            bytes[offset..offset + width].copy_from_slice(&empty[..width]);
            let (word, shift) = ((offset - HEAD) / 8, (offset - HEAD) % 8 * 8);
            ensure!(shift + width * 8 <= 64, "a field lies in two words");
            let scale = |sign: i64| (sign << shift) as u64;
            let known = packets.patches[..used].iter().position(|patch| patch.word == word as u64);
            let place = known.unwrap_or(used);
            used = used.max(place + 1);
            let merged =
                packets.patches.get_mut(place).context("more words differ than the harness can change")?;
            merged.word = word as u64;
            match patch {
                Field::Address => merged.address = scale(1),
                Field::Port => merged.port = merged.port.wrapping_add(scale(1)),
                Field::Filler => merged.port = merged.port.wrapping_add(scale(-1)),
            }
        }
        let (head, words) = bytes.split_at(HEAD);
        packets.head = u64::from_le_bytes(std::array::from_fn(|byte| head.get(byte).copied().unwrap_or(0)));
        packets.words = std::array::from_fn(|word| {
            u64::from_le_bytes(std::array::from_fn(|byte| words[word * 8 + byte]))
        });
        packets.length = frame.len() as u64;
        ensure!(count.is_power_of_two(), "{count} flows: not a power of two");
        (packets.first, packets.mask) = (first, count - 1);
        (packets.state, packets.multiplier, packets.increment) = match random {
            // Knuth's; of a generator modulo 2^64, the high half is good enough.
            Some(seed) => (seed, 6_364_136_223_846_793_005, 1_442_695_040_888_963_407),
            None => (u64::MAX << 32, 1, 1 << 32),
        };
        Ok(packets)
    }

    /// Where flows differ: offset, width, what stands there before it is added to, and what is added.
    fn fields(&self) -> Vec<(usize, usize, [u8; 4], Field)> {
        // Of these there is one flow.
        if self.part != Part::Whole || (self.way == Way::Reply && self.mode == Mode::FullNat) {
            return Vec::new();
        }
        let l4 = ETHERNET + self.family.header;
        let end = match self.way {
            Way::Request => 0,
            Way::Reply => 1,
        };
        vec![
            (ETHERNET + self.family.addresses[end], 4, [0; 4], Field::Address),
            (l4 + end * 2, 2, [0; 4], Field::Port),
            (l4 + self.transport.filler, 2, [0xff; 4], Field::Filler),
        ]
    }

    fn client(&self, flow: u32) -> (IpAddr, u16) {
        let address = match self.family.service() {
            IpAddr::V4(_) => Ipv4Addr::from(client_address(flow)).into(),
            IpAddr::V6(service) => {
                let mut octets = service.octets();
                octets[12..].copy_from_slice(&client_address(flow));
                IpAddr::from(octets)
            }
        };
        (address, client_port(flow))
    }

    /// Where a flow's requests come from, as the backend sees it.
    fn seen_source(&self, flow: u32) -> (IpAddr, u16) {
        if self.mode == Mode::FullNat {
            (self.family.plan.balancer_backend_side(), self.given.port)
        } else {
            self.client(flow)
        }
    }

    fn build(&self, flow: u32, ends: &Ends, ttl: u8) -> Result<Vec<u8>> {
        let ([from, to], filler) = (ends.macs, !client_port(flow));
        let builder = PacketBuilder::ethernet2(from, to);
        let builder = match (ends.source.0, ends.destination.0) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                builder.ipv4(source.octets(), destination.octets(), ttl)
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                builder.ipv6(source.octets(), destination.octets(), ttl)
            }
            _ => anyhow::bail!("an address of each family in one packet"),
        };
        let mut frame = Vec::with_capacity(SHORTEST);
        if self.transport == TRANSMISSION {
            let mut tcp = TcpHeader::new(ends.source.1, ends.destination.1, self.numbers.0, 64_000);
            tcp.acknowledgment_number = self.numbers.1;
            [tcp.fin, tcp.syn, tcp.rst, tcp.psh, tcp.ack] =
                std::array::from_fn(|bit| self.flags & (1 << bit) != 0);
            tcp.urgent_pointer = filler;
            builder.tcp_header(tcp).write(&mut frame, &[]).context("build a TCP segment")?;
        } else {
            // A fragment's own header is to fit as well.
            let more = if self.part == Part::Whole { 14 } else { 6 };
            let payload = [&filler.to_be_bytes()[..], &[0; 14][..more]].concat();
            let builder = builder.udp(ends.source.1, ends.destination.1);
            builder.write(&mut frame, &payload).context("build a UDP datagram")?;
        }
        if self.part != Part::Whole {
            self.split(&mut frame)?;
        }
        let longest_patch = if self.family == IPV4 { SHORTEST } else { 80 };
        frame.resize(frame.len().max(longest_patch), 0);
        Ok(frame)
    }

    /// Makes a fragment of a frame.
    fn split(&self, frame: &mut Vec<u8>) -> Result<()> {
        let (identification, offset): (u16, u16) = match self.part {
            Part::Whole | Part::First => (7, 0),
            Part::Later => (7, 185),
            Part::Stray => (9, 185),
        };
        if offset != 0 {
            // No ports.
            frame[ETHERNET + self.family.header..].fill(0x55);
        }
        if self.family == IPV4 {
            let mut ip = Ipv4Header::from_slice(&frame[ETHERNET..]).context("read the IP header back")?.0;
            ip.identification = identification;
            ip.dont_fragment = false;
            ip.more_fragments = offset == 0;
            ip.fragment_offset = offset.try_into().context("a fragment offset")?;
            ip.header_checksum = ip.calc_header_checksum();
            frame[ETHERNET..][..ip.header_len()].copy_from_slice(&ip.to_bytes());
            return Ok(());
        }
        let [offset, identification] =
            [offset << 3 | u16::from(offset == 0), identification].map(u16::to_be_bytes);
        let header = [&[UDP, 0][..], &offset, &[0, 0], &identification].concat();
        let at = ETHERNET + self.family.header;
        let length = (frame.len() - at + header.len()) as u16;
        frame[ETHERNET + 4..][..2].copy_from_slice(&length.to_be_bytes());
        frame[ETHERNET + 6] = 44;
        frame.splice(at..at, header);
        Ok(())
    }

    /// A frame's packet within that of a tunnel (RFC 2003, RFC 2473; GUE variant 1), from the balancer to the backend.
    fn wrapped(&self, frame: &[u8]) -> Vec<u8> {
        let (link, packet) = frame.split_at(ETHERNET);
        let Given { lot, .. } = self.given;
        let length = if self.family == IPV4 {
            u16::from_be_bytes([packet[2], packet[3]])
        } else {
            40 + u16::from_be_bytes([packet[4], packet[5]])
        };
        let inner = if self.family == IPV4 { 4 } else { 41 };
        let (protocol, length, udp) = if self.mode == Mode::Gue {
            let udp = [0xc000 | lot, GUE_PORT, length + 8, 0].map(u16::to_be_bytes).concat();
            (UDP, length + 8, udp)
        } else {
            (inner, length, Vec::new())
        };
        let outer = match (self.family.plan.balancer_backend_side(), self.family.backend()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let mut ip = Ipv4Header {
                    source: source.octets(),
                    destination: destination.octets(),
                    ..Ipv4Header::default()
                };
                (ip.total_len, ip.time_to_live, ip.protocol) = (20 + length, 64, protocol.into());
                ip.dont_fragment = true;
                ip.header_checksum = ip.calc_header_checksum();
                ip.to_bytes().to_vec()
            }
            (source, destination) => {
                let [source, destination] = [source, destination].map(balancer_user::address::to_wire);
                let first = (6 << 28 | u32::from(lot)).to_be_bytes();
                let [high, low] = length.to_be_bytes();
                [&first[..], &[high, low, protocol, 64], &source, &destination].concat()
            }
        };
        [link, &outer, &udp, packet].concat()
    }
}

/// What differs between flows.
enum Field {
    Address,
    Port,
    Filler,
}
