//! The program under test, with the flows that its packets are to be of.

use std::{net::SocketAddr, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use balancer_common::{BackendCounters, RING_SLOTS, Reason};
use balancer_ebpf::table;
use balancer_harness::{FLOWS, Packets};
use balancer_tests::{
    harness::{Harness, Subject},
    program::{INGRESS, Program},
};
use balancer_user::address;

use super::{
    case::{self, Case, Kind, MANY, SOURCES},
    frame::{DATAGRAM, Family, GUE_PORT, Given, Mode, Part, Shape, TRANSMISSION, Way},
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
    programs: Vec<(Place, Program)>,
    /// The next flow that full tables have not seen for long.
    flood: u32,
}

/// Where the flows of a case are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    family: Family,
    mode: Mode,
    room: Room,
}

/// A table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// A million flows of each protocol, and room for those that come.
    Many,
    /// Flows that stay young.
    Young,
    /// It fits into the cache.
    Few,
    /// Of the default size, full of half-open flows.
    Full,
}

impl Place {
    fn of(case: &Case) -> Place {
        let room = match case.kind {
            Kind::Young => Room::Young,
            Kind::NewWarm => Room::Few,
            Kind::Flood => Room::Full,
            _ => Room::Many,
        };
        Place { family: case.shape.family, mode: case.shape.mode, room }
    }
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
    /// Loads the program and opens the flows that these cases are of.
    pub fn new(
        harness: &mut Harness,
        name: &str,
        object: Option<&[u8]>,
        scale: Scale,
        cases: &[Case],
    ) -> Result<Bed> {
        let mut bed = Bed { name: name.to_owned(), programs: Vec::new(), flood: scale.many * 2 };
        for place in cases.iter().map(Place::of) {
            if bed.programs.iter().all(|(known, _)| *known != place) {
                let program = prepare(harness, object, scale, place);
                let program = program.with_context(|| format!("{name}: open flows for {place:?}"))?;
                bed.programs.push((place, program));
            }
        }
        if let Some((_, program)) = bed.programs.first() {
            super::miss::map(program.datapath.flows());
        }
        Ok(bed)
    }

    /// Makes one packet of a case for each of these flows, and compares what comes of it byte for byte.
    pub fn verify(&mut self, harness: &mut Harness, case: &Case, scale: Scale) -> Result<()> {
        let flows = scale.flows(case);
        let first = self.first(case, scale);
        for flow in [first, first + flows / 3, first + flows - 1] {
            self.ready(harness, case)?;
            let shape = self.shape(case, flow)?;
            let packets = shape.packets(flow, 1, None)?;
            let length = packets.length as usize;
            harness.make(&packets)?;
            harness.call(&Subject::Own(balancer_harness::names::FLOOR))?;
            let (_, last) = harness.run(1, length)?;
            let arrives = shape.frame(flow)?;
            ensure!(last.frame == arrives, "{}: flow {flow} is not made as it should be", case.name());
            let leaves = if case.verdict() == balancer_tests::program::verdict::TX {
                shape.forwarded(flow)?
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
        self.ready(harness, case)?;
        let packets = self.shape(case, first)?.packets(first, set, random)?;
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

    /// The first table's memory: random loads from it, one after the other; what one took, in nanoseconds.
    pub fn miss(&self, loads: u32, seed: u64) -> f64 {
        let probe = |program: &Program| super::miss::probe(program.datapath.flows(), loads, seed);
        self.programs.first().map_or(f64::NAN, |(_, program)| probe(program))
    }

    /// Sends what must have come before.
    fn ready(&self, harness: &mut Harness, case: &Case) -> Result<()> {
        if case.kind == Kind::Fragment {
            let first = Shape { part: Part::First, ..case.shape };
            pass(harness, self.program(case)?, &first, 1)?;
        }
        Ok(())
    }

    /// The frames of a case, with what the program has given to one flow if they depend on it.
    fn shape(&self, case: &Case, flow: u32) -> Result<Shape> {
        if case.shape.mode == Mode::Nat {
            return Ok(case.shape);
        }
        Ok(Shape { given: given(self.program(case)?, &case.shape, flow)?, ..case.shape })
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

    fn program(&self, case: &Case) -> Result<&Program> {
        let place = Place::of(case);
        let found = self.programs.iter().find(|(known, _)| *known == place);
        found.map(|(_, program)| program).with_context(|| format!("there is no table for {place:?}"))
    }

    fn program_mut(&mut self, case: &Case) -> Result<&mut Program> {
        let place = Place::of(case);
        let found = self.programs.iter_mut().find(|(known, _)| *known == place);
        found.map(|(_, program)| program).with_context(|| format!("there is no table for {place:?}"))
    }

    fn subject(&self, case: &Case) -> Result<Subject<'_>> {
        Ok(match case.kind {
            Kind::Limit => Subject::Own(balancer_harness::names::LIMIT),
            _ => Subject::Loaded(self.program(case)?.datapath.loaded_program()?),
        })
    }

    fn counts(&mut self, case: &Case) -> Result<Counts> {
        let program = self.program_mut(case)?;
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
            Kind::Hit | Kind::Young | Kind::Fragment => match case.shape.way {
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
    fn forget(&self, case: &Case, flows: std::ops::Range<u32>) -> Result<()> {
        let program = self.program(case)?;
        let table = program.datapath.flows();
        for flow in flows {
            let key = key(program, &case.shape, flow);
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

/// A table with its flows.
fn prepare(harness: &mut Harness, object: Option<&[u8]>, scale: Scale, place: Place) -> Result<Program> {
    let Place { family, mode, room } = place;
    let sources = SOURCES.min(scale.many);
    let (flows, age) = match room {
        Room::Many if mode == Mode::FullNat => (sources * 4, BRIEF),
        // A flow of which only requests are seen has one entry, where there is room for two.
        Room::Many if mode.is_one_way() => (scale.many * 5 / 8, BRIEF),
        Room::Many => (scale.many * 5 / 2, BRIEF),
        Room::Young => (FEW_FLOWS, Duration::from_secs(24 * 60 * 60)),
        Room::Few => (FEW_FLOWS, BRIEF),
        Room::Full => (DEFAULT_FLOWS.min(scale.many), BRIEF),
    };
    let mut program = load(object, family, flows, age)?;
    set_mode(&mut program, family, mode)?;
    let of_mode = |shape: Shape| Shape { mode, ..shape };
    let request = |transport| of_mode(case::established(family, transport, Way::Request));
    let opening = |transport| of_mode(case::opening(family, transport));
    let mut opened = 0;
    match room {
        Room::Few => {}
        Room::Full => {
            pass(harness, &program, &opening(TRANSMISSION), scale.many * 2)?;
            return Ok(program);
        }
        Room::Many | Room::Young => {
            let many = if room == Room::Young { 1 } else { scale.many };
            let transports = match mode {
                Mode::Nat | Mode::FullNat => &[TRANSMISSION, DATAGRAM][..],
                _ => &[TRANSMISSION][..],
            };
            // One more packet of each, by which it is seen to be older than the profile's ages.
            let mut last = Vec::new();
            for transport in transports.iter().copied() {
                let count = match (mode, transport) {
                    (Mode::FullNat, TRANSMISSION) => 1,
                    (Mode::FullNat, _) => sources,
                    _ => many,
                };
                pass(harness, &program, &opening(transport), count)?;
                // Replies to given ports can be made for one flow only.
                if mode == Mode::Nat || count == 1 {
                    let answer = of_mode(case::answer(family, transport));
                    let given = given(&program, &answer, 0)?;
                    pass(harness, &program, &Shape { given, ..answer }, count)?;
                }
                pass(harness, &program, &request(transport), count)?;
                last.push((request(transport), count));
                opened += u64::from(count);
            }
            if room == Room::Many {
                thread::sleep(GROWTH);
                last.iter().try_for_each(|(shape, count)| pass(harness, &program, shape, *count))?;
            }
        }
    }
    let counted = program.counters()?.first().map_or(0, |counters| counters.opened);
    ensure!(counted == opened, "{counted} flows instead of {opened}");
    Ok(program)
}

/// Has a program reach its backend in another way.
fn set_mode(program: &mut Program, family: Family, mode: Mode) -> Result<()> {
    if mode == Mode::Nat {
        return Ok(());
    }
    program.set_forward(mode.number(), |backend| {
        if mode != Mode::Dsr {
            backend.snat_address = address::to_wire(family.plan.balancer_backend_side());
        }
        // All clients are translated; no bit of a tunnel's source is free.
        backend.snat_prefix = if mode == Mode::FullNat { 0 } else { 128 };
        backend.snat_ports = [1024, u16::MAX];
        backend.tunnel_port = GUE_PORT.to_be_bytes();
    })?;
    program.set_hop(0, INGRESS, 1500);
    Ok(())
}

/// The key of a flow's requests.
fn key(program: &Program, shape: &Shape, flow: u32) -> balancer_common::FlowKey {
    let protocol = shape.transport.protocol;
    shape.key(flow, |address| program.datapath.key(SocketAddr::new(address, 0), protocol).address)
}

/// What the program has given to a flow.
fn given(program: &Program, shape: &Shape, flow: u32) -> Result<Given> {
    let table = program.datapath.flows();
    let key = key(program, shape, flow);
    let found = table::find(table, &key, table::hash(table, &key));
    ensure!(found.exists(), "flow {flow} is not in the table");
    let entry = found.entry.flow();
    Ok(Given { port: u16::from_be_bytes(entry.new_source_port), lot: entry.exchange as u16 })
}

/// Loads a program whose flows stay, with one backend.
pub fn load(object: Option<&[u8]>, family: Family, flows: u32, profiled_age: Duration) -> Result<Program> {
    let mut program =
        Program::built(object, family.plan, 1, flows, profiled_age).context("load the program")?;
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
