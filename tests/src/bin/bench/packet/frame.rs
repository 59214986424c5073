//! The frames that are made: as they arrive, as they must leave, and as the harness is told of them.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context as _, Result, ensure};
use balancer_common::{FlowKey, TCP, UDP, family};
use balancer_harness::{HEAD, LONGEST, Packets, client_address, client_port};
use balancer_tests::program::{
    BACKEND_PORT, BACKEND_SIDE, CLIENT, CLIENT_SIDE, VIP, VIP_PORT, backend_address, backend_mac,
};
use bytemuck::Zeroable as _;
use etherparse::{Ipv4Header, PacketBuilder, TcpHeader};

/// Bytes of Ethernet's header.
const ETHERNET: usize = 14;
/// The smallest frame, without its check sequence and with what pads it.
const SHORTEST: usize = 64;

/// IPv4 or IPv6: what differs between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    /// What a case is called after.
    pub name: &'static str,
    /// The address of the services.
    service: IpAddr,
    /// The address of the backend.
    backend: IpAddr,
    /// Bytes of the IP header.
    header: usize,
    /// Offsets of the last 4 bytes of the source's and the destination's address in it.
    addresses: [usize; 2],
}

/// The Internet Protocol, version 4 (RFC 791).
pub const IPV4: Family = Family {
    name: "IPv4",
    service: IpAddr::V4(VIP),
    backend: IpAddr::V4(backend_address(0)),
    header: 20,
    addresses: [12, 16],
};

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

/// All frames of a case: they differ by their client alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub family: Family,
    pub transport: Transport,
    pub way: Way,
    /// TCP's flags, as in the header's byte 13.
    pub flags: u8,
    /// Sequence and acknowledgement number.
    pub numbers: (u32, u32),
    /// The port that clients send to, or get replies from.
    pub service_port: u16,
    /// It is a later fragment of its packet.
    pub is_fragment: bool,
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
        let client = (self.client(flow), client_port(flow));
        let ends = match self.way {
            Way::Request => Ends {
                macs: [CLIENT, CLIENT_SIDE],
                source: client,
                destination: (self.family.service, self.service_port),
            },
            Way::Reply => Ends {
                macs: [backend_mac(0), BACKEND_SIDE],
                source: (self.family.backend, BACKEND_PORT),
                destination: client,
            },
        };
        self.build(flow, &ends, 64)
    }

    /// The frame of a flow, as it leaves.
    pub fn forwarded(&self, flow: u32) -> Result<Vec<u8>> {
        let client = (self.client(flow), client_port(flow));
        let ends = match self.way {
            Way::Request => Ends {
                macs: [BACKEND_SIDE, backend_mac(0)],
                source: client,
                destination: (self.family.backend, BACKEND_PORT),
            },
            Way::Reply => Ends {
                macs: [CLIENT_SIDE, CLIENT],
                source: (self.family.service, self.service_port),
                destination: client,
            },
        };
        self.build(flow, &ends, 63)
    }

    /// The key of a flow's requests.
    pub fn key(&self, flow: u32) -> FlowKey {
        FlowKey {
            source: client_address(flow),
            destination: VIP.octets(),
            source_port: client_port(flow).to_be_bytes(),
            destination_port: VIP_PORT.to_be_bytes(),
            protocol: self.transport.protocol,
            family: family::IPV4,
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
        if self.is_fragment {
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

    fn client(&self, flow: u32) -> IpAddr {
        match self.family.service {
            IpAddr::V4(_) => Ipv4Addr::from(client_address(flow)).into(),
            IpAddr::V6(service) => {
                let mut octets = service.octets();
                octets[12..].copy_from_slice(&client_address(flow));
                IpAddr::from(octets)
            }
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
            let payload = [&filler.to_be_bytes()[..], &[0; 14][..]].concat();
            let builder = builder.udp(ends.source.1, ends.destination.1);
            builder.write(&mut frame, &payload).context("build a UDP datagram")?;
        }
        if self.is_fragment {
            let mut ip = Ipv4Header::from_slice(&frame[ETHERNET..]).context("read the IP header back")?.0;
            ip.fragment_offset = 185_u16.try_into().context("a fragment offset")?;
            ip.header_checksum = ip.calc_header_checksum();
            frame[ETHERNET..][..ip.header_len()].copy_from_slice(&ip.to_bytes());
        }
        let longest_patch = if self.family.header == 20 { SHORTEST } else { 80 };
        frame.resize(frame.len().max(longest_patch), 0);
        Ok(frame)
    }
}

/// What differs between flows.
enum Field {
    Address,
    Port,
    Filler,
}
