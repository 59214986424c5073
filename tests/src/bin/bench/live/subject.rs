//! Who takes the packets.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use balancer_common::{RING_SLOTS, vlan};
use balancer_harness::{FLOWS, names};
use balancer_tests::{harness::Harness, program::Program};

use super::road::{Arrival, Road};
use crate::packet::{
    bed::{self, BRIEF, DEFAULT_FLOWS, GROWTH},
    case::{MANY, established, handshake, opening},
    frame::{DATAGRAM, IPV4, TRANSMISSION, Way},
};

/// A row of the result.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// Dropped as soon as it comes in.
    Drop,
    /// Sent back as it is.
    Floor,
    /// A fixed rewrite, nothing looked up.
    Limit,
    /// The program: datagrams of established flows.
    Balancer(u32),
    /// The program: SYNs of new flows, into a table of the default size that is full of half-open ones.
    BalancerFlood,
    /// nftables' DNAT through the kernel: datagrams of known flows.
    Nftables(u32),
    /// nftables: SYNs of new flows.
    NftablesFlood,
}

/// How many flows there are.
const COUNTS: [u32; 3] = [1, 1 << 16, MANY];

impl Subject {
    /// All of them.
    pub fn all(rivals: bool) -> Vec<Subject> {
        let mut all = vec![Subject::Drop, Subject::Floor, Subject::Limit];
        all.extend(COUNTS.map(Subject::Balancer));
        all.push(Subject::BalancerFlood);
        if rivals {
            all.extend(COUNTS.map(Subject::Nftables));
            all.push(Subject::NftablesFlood);
        }
        all
    }

    pub fn name(&self) -> &'static str {
        match self {
            Subject::Drop => "drop",
            Subject::Floor => "XDP_TX",
            Subject::Limit => "limit: fixed rewrite, no lookup",
            Subject::Balancer(_) => "balancer, UDP",
            Subject::BalancerFlood => "balancer, SYNs of new flows",
            Subject::Nftables(_) => "nftables, UDP",
            Subject::NftablesFlood => "nftables, SYNs of new flows",
        }
    }

    /// How many flows the packets are of; 0 = each of its own.
    pub fn flows(&self) -> u32 {
        match self {
            Subject::Balancer(flows) | Subject::Nftables(flows) => *flows,
            Subject::BalancerFlood | Subject::NftablesFlood => 0,
            _ => 1,
        }
    }

    /// What it is compared with.
    pub fn rival(&self) -> Option<Subject> {
        match self {
            Subject::Balancer(flows) => Some(Subject::Nftables(*flows)),
            Subject::BalancerFlood => Some(Subject::NftablesFlood),
            _ => None,
        }
    }

    /// How many times as fast it must be.
    pub fn least(&self) -> Option<f64> {
        match self {
            Subject::Balancer(MANY) => Some(4.0),
            Subject::Balancer(_) => Some(3.5),
            Subject::BalancerFlood => Some(4.5),
            _ => None,
        }
    }
}

/// The programs, with their flows.
pub struct Bench {
    many: Program,
    full: Program,
    /// The next flow that has not been seen.
    next: u32,
    has_rival: bool,
}

impl Bench {
    /// Loads the programs and opens the flows.
    pub fn new(harness: &mut Harness, road: &mut Road) -> Result<Bench> {
        let mut many = bed::load(None, IPV4, MANY * 5 / 4, BRIEF)?;
        let mut full = bed::load(None, IPV4, DEFAULT_FLOWS, BRIEF)?;
        for shape in handshake(IPV4, DATAGRAM) {
            bed::pass(harness, &many, &shape, MANY)?;
        }
        std::thread::sleep(GROWTH);
        bed::pass(harness, &many, &established(IPV4, DATAGRAM, Way::Request), MANY)?;
        bed::pass(harness, &full, &opening(IPV4, TRANSMISSION), DEFAULT_FLOWS * 4)?;
        // Requests go back out of the device that they come in by.
        let device = road.device;
        for program in [&mut many, &mut full] {
            program.set_hop(0, device, 1500);
            program.set_port_hop(0, device, 1500);
            road.balancer.run(|| program.datapath.set_egress(0, device))?;
            program.datapath.set_ports(&[([device, vlan::NONE], 0)].into())?;
            program.set_ring(0, &[0; RING_SLOTS])?;
        }
        Ok(Bench { many, full, next: DEFAULT_FLOWS * 4, has_rival: false })
    }

    /// Has packets processed; how long it took.
    pub fn run(
        &mut self,
        harness: &mut Harness,
        road: &mut Road,
        subject: &Subject,
        count: u32,
        seed: u64,
    ) -> Result<Duration> {
        let device = road.device;
        if self.next + count.next_power_of_two() > FLOWS {
            self.next = 0;
        }
        let is_flood = matches!(subject, Subject::BalancerFlood | Subject::NftablesFlood);
        let packets = if is_flood {
            let first = self.next;
            self.next += count;
            opening(IPV4, TRANSMISSION).packets(first, count.next_power_of_two(), None)?
        } else {
            let transport = if *subject == Subject::Limit { TRANSMISSION } else { DATAGRAM };
            established(IPV4, transport, Way::Request).packets(0, subject.flows(), Some(seed))?
        };
        match subject {
            Subject::Drop => {
                let _link = road.balancer.run(|| harness.attach(names::SINK, device))?;
                road.drive(harness, &packets, count, Arrival::Sink)
            }
            Subject::Floor | Subject::Limit => {
                let name = if *subject == Subject::Floor { names::FLOOR } else { names::LIMIT };
                let _link = road.balancer.run(|| harness.attach(name, device))?;
                road.drive(harness, &packets, count, Arrival::Sink)
            }
            Subject::Balancer(_) | Subject::BalancerFlood => {
                let program = if is_flood { &mut self.full } else { &mut self.many };
                let _link = road.balancer.run(|| Ok(program.datapath.attach(device, false)?))?;
                let before = counted(program)?;
                let took = road.drive(harness, &packets, count, Arrival::Sink)?;
                let after = counted(program)?;
                let opened = if is_flood { u64::from(count) } else { 0 };
                let expected = (before.0 + u64::from(count), before.1 + opened);
                ensure!(after == expected, "packets and flows counted as {after:?} instead of {expected:?}");
                Ok(took)
            }
            Subject::Nftables(_) | Subject::NftablesFlood => {
                if !self.has_rival {
                    road.forward_by_nftables()?;
                    self.has_rival = true;
                    // Its flows, once.
                    let all = established(IPV4, DATAGRAM, Way::Request).packets(0, MANY, None)?;
                    road.drive(harness, &all, MANY, Arrival::Backend).context("open nftables' flows")?;
                }
                road.drive(harness, &packets, count, Arrival::Backend)
            }
        }
    }
}

/// Requests that the program has sent on, and flows that it has opened.
fn counted(program: &mut Program) -> Result<(u64, u64)> {
    let counters = program.counters()?;
    let counters = counters.first().context("the program has no backend")?;
    Ok((counters.request.packets, counters.opened))
}
