//! The XDP program under BPF_PROG_TEST_RUN: one frame in, the verdict, the frame out and the counters read.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result};
use balancer_common::{
    AGES, AgeProfile, Backend, BackendCounters, BackendId, MAX_PORTS, NextHop, Reason, Service, ServiceKey,
    TCP, Traffic, UDP, ability, endpoint, role, vlan,
};
use balancer_user::{
    address,
    datapath::{Datapath, Sizes},
};

use crate::topology::Family;

/// The loopback interface, which every network namespace has: test frames come in by it.
pub const INGRESS: u32 = 1;
/// An interface index that is not the ingress: frames for it are redirected.
const ELSEWHERE: u32 = 4_000_000;

/// MAC of the balancer's client side.
pub const CLIENT_SIDE: [u8; 6] = [2, 0, 0, 0, 1, 1];
/// MAC of the balancer's backend side.
pub const BACKEND_SIDE: [u8; 6] = [2, 0, 0, 0, 2, 1];
/// MAC of the client.
pub const CLIENT: [u8; 6] = [2, 0, 0, 0, 1, 10];
/// The virtual address.
pub const VIP: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 10);
/// The port of the services at the virtual address, TCP and UDP.
pub const VIP_PORT: u16 = 80;
/// The port of the backends.
pub const BACKEND_PORT: u16 = 8080;
/// What the kernel calls the verdicts (`enum xdp_action`).
pub mod verdict {
    /// XDP_DROP
    pub const DROP: u32 = 1;
    /// XDP_PASS
    pub const PASS: u32 = 2;
    /// XDP_TX
    pub const TX: u32 = 3;
    /// XDP_REDIRECT
    pub const REDIRECT: u32 = 4;
}

/// MAC of a backend.
pub const fn backend_mac(id: BackendId) -> [u8; 6] {
    [2, 0, 0, 0, 2, 11 + id as u8]
}

/// Address of a backend: 10.0.2.11 and on.
pub const fn backend_address(id: BackendId) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 2, 11 + id as u8)
}

/// A freshly loaded program that serves `VIP`:80, TCP (service 0) and UDP (service 1), by the same backends at
/// port 8080, reached through another interface than the clients.
pub struct Program {
    /// The loaded program.
    pub datapath: Datapath,
    backends: Vec<Backend>,
    services: Vec<(ServiceKey, Service)>,
}

impl Program {
    /// Loads the program with so many backends, all in both rings once.
    pub fn new(backends: BackendId) -> Result<Program> {
        Program::with_flows(backends, 4096)
    }

    /// As `new`, with room for so many flows.
    pub fn with_flows(backends: BackendId, flows: u32) -> Result<Program> {
        let sizes = sizes(Family::Ipv4, flows, Duration::from_secs(14));
        Program::configured(Family::Ipv4, backends, Datapath::load(sizes, false, None)?)
    }

    /// As `new`, with the addresses of a family that `topology` plans.
    pub fn of(family: Family, backends: BackendId) -> Result<Program> {
        let sizes = sizes(family, 4096, Duration::from_secs(14));
        Program::configured(family, backends, Datapath::load(sizes, false, None)?)
    }

    /// As `with_flows`, where packets count by their flow's age up to `profiled_age`; of another build of the program, if
    /// `object` holds one.
    pub fn built(
        object: Option<&[u8]>,
        family: Family,
        backends: BackendId,
        flows: u32,
        profiled_age: Duration,
    ) -> Result<Program> {
        let sizes = sizes(family, flows, profiled_age);
        let datapath = match object {
            Some(object) => Datapath::load_object(object, sizes)?,
            None => Datapath::load(sizes, false, None)?,
        };
        Program::configured(family, backends, datapath)
    }

    fn configured(family: Family, backends: BackendId, mut datapath: Datapath) -> Result<Program> {
        let mut services = Vec::new();
        for (id, protocol) in [TCP, UDP].into_iter().enumerate() {
            let key = datapath.key(SocketAddr::new(family.vip(), VIP_PORT), protocol);
            let service = Service {
                address: address::to_wire(family.vip()),
                id: id as u16,
                idle_timeout: if protocol == TCP { 26_822 } else { 447 },
                half_open_timeout: 112,
                closing_timeout: 112,
                ..Service::default()
            };
            datapath.set_service(&key, &service)?;
            services.push((key, service));
        }
        datapath.set_roles(address::to_wire(family.vip()), role::SERVICE)?;
        let mut written = Vec::new();
        for id in 0..backends {
            let endpoint = SocketAddr::new(family.backend(id as u8 + 1), BACKEND_PORT);
            let address = address::to_wire(endpoint.ip());
            let abilities = ability::SERVE | ability::TAKE;
            let port = endpoint.port().to_be_bytes();
            let backend = Backend { address, port, abilities, ..Backend::default() };
            datapath.set_backend(id, &backend)?;
            written.push(backend);
            datapath.set_roles(address, role::BACKEND)?;
            for protocol in [TCP, UDP] {
                datapath.set_endpoint(&datapath.key(endpoint, protocol), endpoint::SERVER)?;
            }
        }
        datapath.set_egress(0, INGRESS)?;
        datapath.set_ports(&[([INGRESS, vlan::NONE], 0)].into())?;
        let mut program = Program { datapath, backends: written, services };
        program.set_port_hop(0, INGRESS, 1500);
        for id in 0..backends {
            program.set_hop(id, ELSEWHERE, 1500);
        }
        let ring: Vec<BackendId> = (0..backends).collect();
        for service in 0..2 {
            program.set_ring(service, &ring)?;
        }
        Ok(program)
    }

    /// Changes both services.
    pub fn change_services(&mut self, change: impl Fn(&mut Service)) -> Result<()> {
        for (key, service) in &mut self.services {
            change(service);
            self.datapath.set_service(key, service)?;
        }
        Ok(())
    }

    /// Has the services reach their backends in another way: `forward::*`, with this change to each. Hops that are set after
    /// that are of this way.
    pub fn set_forward(&mut self, forward: u8, change: impl Fn(&mut Backend)) -> Result<()> {
        self.change_services(|service| service.forward = forward)?;
        for (id, backend) in (0..).zip(&mut self.backends) {
            backend.forward = forward;
            change(backend);
            self.datapath.set_backend(id, backend)?;
        }
        Ok(())
    }

    /// Leads to a backend through interface `ifindex` of this MTU; 0 = there is no neighbour.
    pub fn set_hop(&mut self, id: BackendId, ifindex: u32, mtu: u16) {
        let hop = NextHop {
            neighbour: backend_mac(id),
            port: 0,
            source: BACKEND_SIDE,
            mtu,
            ifindex,
            unusable: if mtu == 0 { Reason::NoNeighbour as u16 } else { 0 },
            forward: self.backends.get(usize::from(id)).map_or(0, |backend| backend.forward),
            ..NextHop::default()
        };
        self.datapath.set_next_hop(MAX_PORTS + u32::from(id), &hop);
    }

    /// Describes the interface that is port `port`.
    pub fn set_port_hop(&mut self, port: u16, ifindex: u32, mtu: u16) {
        let hop =
            NextHop { neighbour: [0; 6], port, source: CLIENT_SIDE, mtu, ifindex, ..NextHop::default() };
        self.datapath.set_next_hop(u32::from(port), &hop);
    }

    /// Puts a ring into use.
    pub fn set_ring(&mut self, service: u16, slots: &[BackendId]) -> Result<()> {
        self.datapath
            .switch_ring(service, slots, None)
            .map(drop)
            .map_err(|_| anyhow::anyhow!("the ring could not be switched"))
    }

    /// Sends a frame in; returns the verdict and the frame as it left.
    pub fn run(&self, frame: &[u8]) -> Result<(u32, Vec<u8>)> {
        self.datapath.test_run(frame, INGRESS)
    }

    /// Sends an IP packet from the client in.
    pub fn from_client(&self, packet: &[u8]) -> Result<(u32, Vec<u8>)> {
        self.run(&super::packet::ethernet(CLIENT_SIDE, CLIENT, packet))
    }

    /// Sends an IP packet from a backend in.
    pub fn from_backend(&self, id: BackendId, packet: &[u8]) -> Result<(u32, Vec<u8>)> {
        self.run(&super::packet::ethernet(BACKEND_SIDE, backend_mac(id), packet))
    }

    /// The counters of each backend, summed over the CPUs.
    pub fn counters(&mut self) -> Result<Vec<BackendCounters>> {
        let cpus = self.datapath.cpus();
        let backends = self.backends.len();
        let values = self.datapath.read_counters(backends).context("read the counters")?;
        let add = |sum: BackendCounters, cpu: &BackendCounters| BackendCounters {
            request: add_traffic(sum.request, cpu.request),
            reply: add_traffic(sum.reply, cpu.reply),
            opened: sum.opened + cpu.opened,
            closed: sum.closed + cpu.closed,
            asked: sum.asked + cpu.asked,
            answered: sum.answered + cpu.answered,
            reopened: sum.reopened + cpu.reopened,
        };
        Ok(values.chunks(cpus).map(|per_cpu| per_cpu.iter().fold(BackendCounters::default(), add)).collect())
    }

    /// The age profile of a service, summed over the CPUs.
    pub fn profile(&mut self, service: u16) -> Result<AgeProfile> {
        let cpus = self.datapath.cpus();
        let values = self.datapath.read_profiles(4)?;
        let mut sum = AgeProfile { ages: [Traffic::default(); AGES] };
        for cpu in values.chunks(cpus).nth(usize::from(service)).unwrap_or_default() {
            for (sum, age) in sum.ages.iter_mut().zip(cpu.ages) {
                *sum = add_traffic(*sum, age);
            }
        }
        Ok(sum)
    }

    /// How many flows gave way to new ones.
    pub fn evicted(&mut self) -> Result<u64> {
        Ok(self.datapath.read_evicted()?.iter().sum())
    }

    /// The reasons that were counted, with how often.
    pub fn drops(&mut self) -> Result<Vec<(Reason, u64)>> {
        let counts = self.datapath.read_drops()?;
        Ok(Reason::ALL.into_iter().zip(counts).filter(|(_, count)| *count != 0).collect())
    }
}

fn sizes(family: Family, flows: u32, profiled_age: Duration) -> Sizes {
    Sizes { flows, services: 4, backends: 16, ipv6: Some(family == Family::Ipv6), profiled_age }
}

fn add_traffic(a: Traffic, b: Traffic) -> Traffic {
    Traffic { packets: a.packets + b.packets, bytes: a.bytes + b.bytes }
}
