//! The program under test, with the flows that its packets are to be of.

use std::{thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use balancer_common::{BackendCounters, RING_SLOTS, Reason};
use balancer_ebpf::table;
use balancer_harness::{FLOWS, Packets};
use balancer_tests::{
    harness::{Harness, Subject},
    program::{INGRESS, Program},
};

use super::{
    case::{self, Case, Kind, MANY},
    frame::{DATAGRAM, IPV4, Shape, TRANSMISSION, Way},
};

/// Up to which age packets of most tables count by their flow's age: all flows are older when they are measured.
pub const BRIEF: Duration = Duration::from_millis(70);
/// How long to wait until flows are older than that: it is counted in stamps of 67 ms.
pub const GROWTH: Duration = Duration::from_millis(210);
/// The default of `max-flows`.
pub const DEFAULT_FLOWS: u32 = 262_144;
/// Flows of a table that fits into the cache.
const FEW_FLOWS: u32 = 4096;
/// How many new flows such a table takes before they are taken out again.
const FEW: u32 = 2048;
/// How long a flow may be silent, in units of 2^`TIMEOUT_SHIFT` ns: longer than any measurement.
const HOURS: u16 = 26_822;

/// One build of the program, in as many instances as there are tables.
pub struct Bed {
    /// What it is called.
    pub name: String,
    many: Program,
    young: Program,
    few: Program,
    full: Program,
    /// The next flow that `full` has not seen for long.
    flood: u32,
}

/// How many flows and packets there are.
#[derive(Clone, Copy)]
pub struct Scale {
    /// The flows of the largest case.
    pub many: u32,
    /// Packets of a run: a power of two.
    pub packets: u32,
}

impl Scale {
    /// A case's flows, at this scale.
    pub fn flows(&self, case: &Case) -> u32 {
        case.flows.min(self.many)
    }
}

/// What a program has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    backend: BackendCounters,
    /// For the reason of the case.
    refused: u64,
    /// For others.
    refused_otherwise: u64,
    evicted: u64,
}

impl Bed {
    /// Loads the program and opens the flows.
    pub fn new(harness: &mut Harness, name: &str, object: Option<&[u8]>, scale: Scale) -> Result<Bed> {
        let bed = Bed {
            name: name.to_owned(),
            // A million flows of each protocol, and room for those that come.
            many: load(object, scale.many * 5 / 2, BRIEF)?,
            young: load(object, FEW_FLOWS, Duration::from_secs(24 * 60 * 60))?,
            few: load(object, FEW_FLOWS, BRIEF)?,
            full: load(object, DEFAULT_FLOWS.min(scale.many), BRIEF)?,
            flood: 0,
        };
        for transport in [TRANSMISSION, DATAGRAM] {
            for shape in case::handshake(IPV4, transport) {
                pass(harness, &bed.many, &shape, scale.many)?;
                pass(harness, &bed.young, &shape, 1)?;
            }
        }
        // One more packet of each, by which it is seen to be older than the profile's ages.
        thread::sleep(GROWTH);
        for transport in [TRANSMISSION, DATAGRAM] {
            pass(harness, &bed.many, &case::established(IPV4, transport, Way::Request), scale.many)?;
        }
        let mut bed = bed;
        let opened = bed.many.counters()?.first().map_or(0, |counters| counters.opened);
        ensure!(
            opened == u64::from(scale.many) * 2,
            "{name}: {opened} flows instead of {} twice",
            scale.many
        );
        let full = pass(harness, &bed.full, &case::opening(IPV4, TRANSMISSION), scale.many * 2);
        full.context("fill a table with half-open flows")?;
        bed.flood = scale.many * 2;
        super::miss::map(bed.many.datapath.flows());
        Ok(bed)
    }

    /// Makes one packet of a case for each of these flows, and compares what comes of it byte for byte.
    pub fn verify(&mut self, harness: &mut Harness, case: &Case, scale: Scale) -> Result<()> {
        let flows = scale.flows(case);
        let first = self.first(case, scale);
        for flow in [first, first + flows / 3, first + flows - 1] {
            let packets = case.shape.packets(flow, 1, None)?;
            let length = packets.length as usize;
            harness.make(&packets)?;
            harness.call(&Subject::Own(balancer_harness::names::FLOOR))?;
            let (_, last) = harness.run(1, length)?;
            let arrives = case.shape.frame(flow)?;
            ensure!(last.frame == arrives, "{}: flow {flow} is not made as it should be", case.name());
            let leaves = if case.verdict() == balancer_tests::program::verdict::TX {
                case.shape.forwarded(flow)?
            } else {
                arrives
            };
            harness.call(&self.subject(case)?)?;
            let (_, last) = harness.run(1, length)?;
            ensure!(
                last.verdict == case.verdict() && last.frame == leaves,
                "{}: {}: flow {flow} leaves with verdict {} as {:02x?} instead of {} as {leaves:02x?}",
                self.name,
                case.name(),
                last.verdict,
                last.frame,
                case.verdict()
            );
            if matches!(case.kind, Kind::New | Kind::NewWarm) {
                self.forget(case, flow..flow + 1)?;
            }
        }
        if case.kind == Kind::Flood {
            self.flood += flows;
        }
        Ok(())
    }

    /// Has packets of a case processed; what one took, in nanoseconds. The program's own counters must agree.
    pub fn run(&mut self, harness: &mut Harness, case: &Case, scale: Scale, seed: u64) -> Result<f64> {
        let is_new = matches!(case.kind, Kind::New | Kind::NewWarm);
        let count = if case.kind == Kind::NewWarm { FEW.min(scale.packets) } else { scale.packets };
        let runs = (scale.packets / count).min(16);
        let first = self.first(case, scale);
        let random = Some(seed).filter(|_| !is_new && case.kind != Kind::Flood);
        let set = if random.is_some() { scale.flows(case) } else { count };
        let packets = case.shape.packets(first, set, random)?;
        harness.call(&self.subject(case)?)?;
        let before = self.counts(case)?;
        let mut sum = 0.0;
        for _ in 0..runs {
            sum += self.measure(harness, &packets, count)?;
            if is_new {
                self.forget(case, first..first + count)?;
            }
        }
        let packets = u64::from(count) * u64::from(runs);
        let after = self.counts(case)?;
        self.check(case, packets, before, after)?;
        if case.kind == Kind::Flood {
            self.flood = (self.flood + count) % (FLOWS - count);
        }
        Ok(sum / f64::from(runs))
    }

    /// The table's memory: random loads from it, one after the other; what one took, in nanoseconds.
    pub fn miss(&self, loads: u32, seed: u64) -> f64 {
        super::miss::probe(self.many.datapath.flows(), loads, seed)
    }

    fn measure(&self, harness: &mut Harness, packets: &Packets, count: u32) -> Result<f64> {
        harness.make(packets)?;
        Ok(harness.run(count, packets.length as usize)?.0)
    }

    /// The first flow of a case's packets: new ones are those that the others do not use.
    fn first(&self, case: &Case, scale: Scale) -> u32 {
        match case.kind {
            Kind::New => MANY.max(scale.many),
            Kind::Flood => self.flood,
            _ => 0,
        }
    }

    fn program(&mut self, kind: Kind) -> &mut Program {
        match kind {
            Kind::Young => &mut self.young,
            Kind::NewWarm => &mut self.few,
            Kind::Flood => &mut self.full,
            _ => &mut self.many,
        }
    }

    fn subject(&mut self, case: &Case) -> Result<Subject<'_>> {
        Ok(match case.kind {
            Kind::Limit => Subject::Own(balancer_harness::names::LIMIT),
            kind => Subject::Loaded(self.program(kind).datapath.loaded_program()?),
        })
    }

    fn counts(&mut self, case: &Case) -> Result<Counts> {
        let program = self.program(case.kind);
        let backend = program.counters()?.first().copied().unwrap_or_default();
        let drops = program.drops()?;
        let is_wanted = |drop: &&(Reason, u64)| case.kind == Kind::Refused(drop.0);
        let all: u64 = drops.iter().map(|(_, count)| count).sum();
        let refused = drops.iter().find(is_wanted).map_or(0, |(_, count)| *count);
        Ok(Counts { backend, refused, refused_otherwise: all - refused, evicted: program.evicted()? })
    }

    /// Whether each packet did what its case says.
    fn check(&self, case: &Case, packets: u64, before: Counts, after: Counts) -> Result<()> {
        let mut expected = before;
        let bytes = |traffic: &mut balancer_common::Traffic, now: balancer_common::Traffic| {
            traffic.packets += packets;
            traffic.bytes = now.bytes;
        };
        match case.kind {
            Kind::Limit | Kind::Foreign => {}
            Kind::Refused(_) => expected.refused += packets,
            Kind::Hit | Kind::Young => match case.shape.way {
                Way::Request => bytes(&mut expected.backend.request, after.backend.request),
                Way::Reply => bytes(&mut expected.backend.reply, after.backend.reply),
            },
            Kind::New | Kind::NewWarm | Kind::Flood => {
                bytes(&mut expected.backend.request, after.backend.request);
                expected.backend.opened += packets;
            }
        }
        if case.kind == Kind::Flood {
            // A flow gives two places free, and takes two, of which each may be another's.
            let evicted = after.evicted - before.evicted;
            ensure!(evicted >= packets / 2, "{}: only {evicted} of {packets} flows gave way", case.name());
            expected.evicted = after.evicted;
            expected.backend.closed = after.backend.closed;
        }
        ensure!(
            after == expected,
            "{}: {}: {packets} packets counted as {after:?} instead of {expected:?}",
            self.name,
            case.name()
        );
        Ok(())
    }

    /// Takes flows out of the table, as if they had never been.
    fn forget(&mut self, case: &Case, flows: std::ops::Range<u32>) -> Result<()> {
        let table = self.program(case.kind).datapath.flows();
        for flow in flows {
            let key = case.shape.key(flow);
            let found = table::find(table, &key, table::hash(table, &key));
            ensure!(
                found.exists() && table::end_with(table, &found, 0, |_, _| {}),
                "{}: flow {flow} is not in the table",
                case.name()
            );
        }
        Ok(())
    }
}

/// Loads a program whose flows stay, with one backend.
pub fn load(object: Option<&[u8]>, flows: u32, profiled_age: Duration) -> Result<Program> {
    let mut program = Program::built(object, 1, flows, profiled_age).context("load the program")?;
    program.set_hop(0, INGRESS, 1500);
    program.change_services(|service| {
        (service.idle_timeout, service.half_open_timeout, service.closing_timeout) = (HOURS, HOURS, HOURS);
    })?;
    for service in 0..2 {
        program.set_ring(service, &[0; RING_SLOTS])?;
    }
    Ok(program)
}

/// Sends one packet of each flow through a program.
pub fn pass(harness: &mut Harness, program: &Program, shape: &Shape, flows: u32) -> Result<()> {
    let packets = shape.packets(0, flows, None)?;
    harness.make(&packets)?;
    harness.call(&Subject::Loaded(program.datapath.loaded_program()?))?;
    harness.run(flows, packets.length as usize)?;
    Ok(())
}
