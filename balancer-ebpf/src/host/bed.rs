//! A balancer between clients and backends, and what can be asked of it.

use std::{sync::Arc, vec::Vec};

use balancer_common::{
    Backend, BackendId, FIRST_SNAT_PORT, MAX_PORTS, NextHop, Reason, Service, TCP, UDP, ability, role, vlan,
};

use super::{
    buffer::{Buffer, Kernel, Memory},
    frame::{ACK, Endpoint, FIN, Frame, SYN, address, translated},
};
use crate::{Verdict, process};

/// A balancer between clients (interface 1, port 0) and backends (interface 2, port 1), with a third interface
/// (port 2) towards the clients. Two addresses of one service over TCP, two over UDP.
pub struct Bed {
    pub kernel: Kernel,
}

impl Bed {
    pub const CLIENT_SIDE: [u8; 6] = [2, 0, 0, 0, 0, 1];
    pub const CLIENT_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
    pub const THIRD_SIDE: [u8; 6] = [2, 0, 0, 0, 0, 3];
    pub const BACKEND_SIDE: [u8; 6] = [2, 0, 0, 0, 0, 10];
    pub const BACKEND_MACS: [[u8; 6]; 3] = [[2, 0, 0, 0, 0, 11], [2, 0, 0, 0, 0, 12], [2, 0, 0, 0, 0, 13]];
    pub const BACKENDS: [Endpoint; 3] =
        [([10, 0, 2, 11], 8080), ([10, 0, 2, 12], 8080), ([10, 0, 2, 13], 9090)];
    pub const VIPS: [Endpoint; 2] = [([192, 0, 2, 10], 80), ([192, 0, 2, 20], 443)];
    pub const TCP_SERVICE: Service = Service {
        id: 0,
        idle_timeout: 400,
        half_open_timeout: 100,
        closing_timeout: 50,
        selector: 0,
        answers: 0,
        options: 0,
        persistence_prefix: 0,
        persistence_timeout: 0,
        forward: 0,
        reserved: 0,
        address: [0; 16],
    };
    pub const UDP_SERVICE: Service = Service {
        id: 1,
        idle_timeout: 200,
        half_open_timeout: 1,
        closing_timeout: 1,
        selector: 0,
        answers: 0,
        options: 0,
        persistence_prefix: 0,
        persistence_timeout: 0,
        forward: 0,
        reserved: 0,
        address: [0; 16],
    };
    pub const MTU: u16 = 1500;

    /// A balancer with the first `backends` backends, which flows take in turns.
    pub fn new(backends: usize) -> Bed {
        Bed::with_table(backends, 64)
    }

    /// The same, with a flow table of so many buckets.
    pub fn with_table(backends: usize, buckets: u32) -> Bed {
        Bed::with_memory(backends, Memory::new(buckets, [0x1234_5678, 0x9abc_def0]))
    }

    /// The same, with this flow table: one CPU of several.
    pub fn with_memory(backends: usize, memory: Arc<Memory>) -> Bed {
        let mut kernel = Kernel::new(memory, backends);
        kernel.now.set(1_000);
        kernel.ingress.set(1);
        kernel.ports.extend([((1, 0), 0), ((2, 0), 1), ((3, 0), 2)]);
        let hop = |neighbour, port, source, ifindex| NextHop {
            neighbour,
            port,
            source,
            mtu: Bed::MTU,
            ifindex,
            unusable: 0,
            forward: 0,
            reserved: 0,
            vlan: vlan::NONE,
            index: 0,
        };
        kernel.set_hop(0, hop([0; 6], 0, Bed::CLIENT_SIDE, 1));
        kernel.set_hop(1, hop([0; 6], 1, Bed::BACKEND_SIDE, 2));
        kernel.set_hop(2, hop([0; 6], 2, Bed::THIRD_SIDE, 3));
        for (id, (short, port)) in Bed::BACKENDS.into_iter().take(backends).enumerate() {
            kernel.backends[id] = Backend {
                address: address(short),
                port: port.to_be_bytes(),
                abilities: ability::SERVE | ability::TAKE,
                snat_ports: [FIRST_SNAT_PORT, u16::MAX],
                ..Backend::default()
            };
            let hop = hop(Bed::BACKEND_MACS[id], 1, Bed::BACKEND_SIDE, 2);
            kernel.set_hop(MAX_PORTS + id as u32, hop);
            kernel.roles.insert(address(short), role::BACKEND);
        }
        for vip in Bed::VIPS {
            for (protocol, service) in [(TCP, Bed::TCP_SERVICE), (UDP, Bed::UDP_SERVICE)] {
                let key = kernel.key(vip, protocol);
                kernel.services.insert(key, Service { address: address(vip.0), ..service });
            }
            kernel.roles.insert(address(vip.0), role::SERVICE);
        }
        let bed = Bed { kernel };
        bed.set_ring(&Vec::from_iter(0..backends as BackendId));
        bed
    }

    /// Has packets go to all backends by this way: `forward::*`.
    pub fn set_mode(&mut self, mode: u8) {
        self.kernel.backends.iter_mut().for_each(|backend| backend.forward = mode);
        self.kernel.services.values_mut().for_each(|service| service.forward = mode);
        for (_, hop) in self.kernel.hops.iter_mut().filter(|(index, _)| **index >= MAX_PORTS) {
            hop.forward = mode;
        }
    }

    /// Gives both services these slots.
    pub fn set_ring(&self, slots: &[BackendId]) {
        self.kernel.set_ring(0, slots);
        self.kernel.set_ring(1, slots);
    }

    /// What becomes of a frame that comes in by an interface.
    pub fn run(&self, ingress: u32, frame: &[u8]) -> (Verdict, Vec<u8>) {
        self.kernel.ingress.set(ingress);
        let buffer = Buffer::new(frame);
        buffer.headroom.set(self.kernel.headroom.get());
        let verdict = process(&buffer, &self.kernel);
        (verdict, buffer.bytes())
    }

    /// Sends a frame from the client's side; the backend that got it, with all bytes checked.
    #[track_caller]
    pub fn request(&self, frame: &Frame) -> usize {
        let input = frame.bytes();
        let (verdict, output) = self.run(1, &input);
        assert_eq!(verdict, Verdict::Redirect(1), "{:?}: {:?}", frame.l4, self.kernel.drops());
        let backend = Bed::BACKEND_MACS.iter().position(|mac| *mac == output[..6]).unwrap();
        let to = Bed::BACKEND_MACS[backend];
        let expected = translated(&input, to, Bed::BACKEND_SIDE, frame.source, Bed::BACKENDS[backend]);
        assert_eq!(output, expected);
        backend
    }

    /// Sends a frame from a backend's side, which must reach the client from this address.
    #[track_caller]
    pub fn reply(&self, frame: &Frame, vip: Endpoint) {
        let input = frame.bytes();
        let (verdict, output) = self.run(2, &input);
        assert_eq!(verdict, Verdict::Redirect(0), "{:?}: {:?}", frame.l4, self.kernel.drops());
        let expected = translated(&input, Bed::CLIENT_MAC, Bed::CLIENT_SIDE, vip, frame.destination);
        assert_eq!(output, expected);
    }

    /// Sends a frame that must be refused for `reason`: not a byte of it and of the flow table changes, and it is
    /// counted once, under this name.
    #[track_caller]
    pub fn refused(&self, ingress: u32, input: &[u8], reason: Reason) {
        let before = Vec::from_iter(self.kernel.memory.live());
        let active = self.kernel.memory.active();
        let count = |bed: &Bed| {
            let drops = bed.kernel.drops();
            drops.iter().find(|(other, _)| *other == reason).map_or(0, |(_, count)| *count)
        };
        let (dropped, counted) = (self.kernel.dropped(), count(self));
        let traffic = self.traffic();
        let (verdict, output) = self.run(ingress, input);
        assert_eq!(verdict, Verdict::Drop, "{:?}", self.kernel.drops());
        assert_eq!(output, input);
        assert_eq!(
            (self.kernel.dropped(), count(self)),
            (dropped + 1, counted + 1),
            "{:?}",
            self.kernel.drops()
        );
        assert_eq!(self.traffic(), traffic);
        assert_eq!(Vec::from_iter(self.kernel.memory.live()), before);
        assert_eq!(self.kernel.memory.active(), active);
        self.kernel.assert_active_is_exact();
    }

    /// Sends a frame that must pass to the kernel unchanged and uncounted.
    #[track_caller]
    pub fn passed(&self, ingress: u32, input: &[u8]) {
        let (dropped, traffic) = (self.kernel.dropped(), self.traffic());
        assert_eq!(self.run(ingress, input), (Verdict::Pass, input.to_vec()));
        assert_eq!((self.kernel.dropped(), self.traffic()), (dropped, traffic));
    }

    /// Packets and bytes of requests and replies, over all backends.
    pub fn traffic(&self) -> [u64; 4] {
        [
            self.kernel.total(|counters| counters.request.packets),
            self.kernel.total(|counters| counters.request.bytes),
            self.kernel.total(|counters| counters.reply.packets),
            self.kernel.total(|counters| counters.reply.bytes),
        ]
    }

    /// Opened and closed flows, over all backends.
    pub fn flows(&self) -> (u64, u64) {
        (self.kernel.total(|counters| counters.opened), self.kernel.total(|counters| counters.closed))
    }

    pub fn wait(&self, stamps: u32) {
        self.kernel.now.set(self.kernel.now.get().wrapping_add(stamps));
    }

    /// Completes a handshake; the backend.
    #[track_caller]
    pub fn establish(&self, client: Endpoint) -> usize {
        let backend = self.request(&Frame::tcp(client, VIP, SYN));
        self.reply(&Frame::tcp(Bed::BACKENDS[backend], client, SYN_ACK), VIP);
        assert_eq!(self.request(&Frame::tcp(client, VIP, ACK)), backend);
        backend
    }
}

pub const CLIENT: Endpoint = ([10, 0, 1, 10], 40_000);
pub const VIP: Endpoint = Bed::VIPS[0];
pub const SYN_ACK: u8 = SYN | ACK;
pub const FIN_ACK: u8 = FIN | ACK;
/// Stamps in a unit of a service's timeouts.
pub const UNIT: u32 = 4;

pub fn to_vip(flags: u8) -> Frame {
    Frame::tcp(CLIENT, VIP, flags)
}

pub fn to_client(backend: usize, flags: u8) -> Frame {
    Frame::tcp(Bed::BACKENDS[backend], CLIENT, flags)
}

pub fn datagram() -> Frame {
    Frame::udp(CLIENT, VIP, b"ask")
}

pub fn answer(backend: usize) -> Frame {
    Frame::udp(Bed::BACKENDS[backend], CLIENT, b"answer")
}
