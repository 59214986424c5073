//! The kernel side: the only module that knows aya. It loads the program, attaches it, and gives typed access to
//! its maps; it decides nothing.

mod attachment;
mod batch;
mod decap;
mod flows;
mod kept;
mod memory;
mod object;
mod pins;
mod probes;
mod refusal;

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr},
    os::fd::AsFd,
    path::Path,
    sync::atomic::Ordering,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow};
use aya::{
    Ebpf, EbpfLoader,
    maps::{Array, DevMap, HashMap, Map, MapData},
    programs::{TestRun, TestRunOptions, Xdp},
};
use aya_log::EbpfLogger;
use balancer_common::{
    Address, AgeProfile, Backend, BackendCounters, BackendId, MAX_PORTS, NextHop, Phase, PortFilter, Reason,
    ResponseTimes, Ring, RingWord, STAMP_SHIFT, Service, ServiceId, ServiceKey, TCP, UDP, Unresolved, WAYS,
    flow_buckets, names, port_bit, unmapped,
};

use balancer_ebpf::table;
use tokio::io::{Interest, unix::AsyncFd};

use crate::{address, config};

pub use attachment::{AttachError, Attached, Pin, PinnedLinks, detach_pins};
use batch::PerCpuArray;
pub use decap::Decapsulator;
pub use flows::{Ended, Flow, FlowTable, Sweep};
pub use kept::KeptPins;
use memory::SharedArray;
use pins::PinnedMaps;
pub use pins::remove as remove_pinned_maps;
pub use probes::{ProbePath, can_turn_probes};
use refusal::{explain_load, explain_program, require_net_admin};

/// The program, compiled by `cargo xtask build`.
static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("BALANCER_EBPF_OBJECT"));

/// How many addresses of its own the host may have.
const LOCAL_ADDRESSES: u32 = 4096;

/// The name of a loaded program; `None` if it may not be asked for, or is gone.
pub fn program_name(id: u32) -> Option<String> {
    let programs = aya::programs::loaded_programs().filter_map(Result::ok);
    programs.into_iter().find(|program| program.id() == id)?.name_as_str().map(str::to_owned)
}

/// How large the maps are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Flows that fit into the flow table.
    pub flows: u32,
    /// Services.
    pub services: u32,
    /// Backends of all services together.
    pub backends: u32,
    /// Whether there is room for the addresses of IPv6 flows; `None`: if the pinned maps have it.
    pub ipv6: Option<bool>,
    /// Up to which age of a flow its packets count in the age profile of its service.
    pub profiled_age: Duration,
}

impl Sizes {
    /// What the pinned maps must have been made with.
    fn wanted(self) -> Vec<pins::Wanted> {
        let addresses = self.ipv6.map(|ipv6| (names::FLOW_ADDRESSES, "ipv6", self.address_buckets(ipv6)));
        let always = [
            (names::FLOW_TAGS, "max-flows", self.buckets()),
            (names::FLOWS, "max-flows", self.buckets()),
            (names::SERVICES, "max-services", self.services + config::MOST_DATA_PORTS),
            (names::RINGS, "max-services", self.services),
            (names::BACKENDS, "max-backends", self.backends),
        ];
        always.into_iter().chain(addresses).collect()
    }

    /// Buckets of the addresses of IPv6 flows.
    fn address_buckets(self, ipv6: bool) -> u32 {
        if ipv6 { self.buckets() } else { 1 }
    }

    /// Clients that are remembered.
    pub const fn clients(self) -> u32 {
        self.flows / 4
    }

    /// Buckets of the flow table.
    pub fn buckets(self) -> u32 {
        flow_buckets(self.flows)
    }
}

/// The loaded program and its maps.
pub struct Datapath {
    ebpf: Ebpf,
    services: HashMap<MapData, [u8; 8], [u8; 32]>,
    addresses: HashMap<MapData, Address, u32>,
    endpoints: HashMap<MapData, [u8; 8], u32>,
    backends: Array<MapData, [u8; size_of::<Backend>()]>,
    ports: HashMap<MapData, [u32; 2], u32>,
    /// The same, as written.
    known_ports: BTreeMap<[u32; 2], u16>,
    egress: DevMap<MapData>,
    counters: PerCpuArray<BackendCounters>,
    profiles: PerCpuArray<AgeProfile>,
    response_times: PerCpuArray<ResponseTimes>,
    drops: PerCpuArray<u64>,
    evicted: PerCpuArray<u64>,
    rings: SharedArray<Ring>,
    ring_words: SharedArray<u64>,
    port_filter: SharedArray<PortFilter>,
    next_hops: SharedArray<NextHop>,
    unresolved: SharedArray<Unresolved>,
    flows: FlowTable,
    seed: [u64; 2],
    sizes: Sizes,
    has_ipv6: bool,
    is_adopted: bool,
}

impl Datapath {
    /// Loads the program with maps of these sizes; those that an earlier daemon has pinned below `pins` are taken over.
    /// Nothing is attached.
    ///
    /// Needs CAP_BPF and CAP_NET_ADMIN, or root, and Linux 5.18.
    ///
    /// # Errors
    ///
    /// What the kernel refuses, or that the pinned maps are of another version or of other sizes.
    pub fn load(sizes: Sizes, log_refusals: bool, pins: Option<&Path>) -> Result<Datapath> {
        require_net_admin()?;
        let pinned = pins.map(|pins| PinnedMaps::open(pins, &sizes.wanted())).transpose()?;
        let earlier = pinned.as_ref().and_then(PinnedMaps::earlier);
        let seed = match earlier {
            Some(layout) => layout.seed,
            None => random_seed().context("read the seed of the flow hash from the kernel")?,
        };
        let has_ipv6 = match (sizes.ipv6, &pinned) {
            (Some(ipv6), _) => ipv6,
            (None, Some(pinned)) => {
                pinned.entries(names::FLOW_ADDRESSES)? == Some(sizes.address_buckets(true))
            }
            (None, None) => false,
        };
        let loaded = Datapath::load_with(OBJECT, sizes, has_ipv6, log_refusals, seed, pinned.as_ref());
        if let (Err(_), Some(pins), None) = (&loaded, pins, earlier) {
            remove_pinned_maps(pins)?;
        }
        loaded
    }

    /// Loads another build of the program, from its object file, with maps of its own (for benchmarks). Its maps must be
    /// laid out as this build's are.
    pub fn load_object(object: &[u8], sizes: Sizes) -> Result<Datapath> {
        require_net_admin()?;
        let seed = random_seed().context("read the seed of the flow hash from the kernel")?;
        Datapath::load_with(object, sizes, sizes.ipv6.unwrap_or(false), false, seed, None)
    }

    fn load_with(
        object: &[u8],
        sizes: Sizes,
        has_ipv6: bool,
        log_refusals: bool,
        seed: [u64; 2],
        pinned: Option<&PinnedMaps>,
    ) -> Result<Datapath> {
        let (buckets, address_buckets) = (sizes.buckets(), sizes.address_buckets(has_ipv6));
        let ipv6 = u32::from(has_ipv6);
        let log_refusals = u32::from(log_refusals);
        let profiled_age = (sizes.profiled_age.as_nanos() >> STAMP_SHIFT) as u32;
        let mut loader = EbpfLoader::new();
        for (name, path) in pinned.iter().flat_map(|pinned| pinned.paths()) {
            loader.map_pin_path(name, path);
        }
        let mut ebpf = loader
            .override_global(names::HASH_SEED, &seed, true)
            .override_global(names::BUCKETS, &buckets, true)
            .override_global(names::IPV6, &ipv6, true)
            .override_global(names::PROFILED_AGE, &profiled_age, true)
            .override_global(names::LOG_REFUSALS, &log_refusals, true)
            .map_max_entries(names::FLOW_TAGS, buckets)
            .map_max_entries(names::FLOWS, buckets)
            .map_max_entries(names::FLOW_ADDRESSES, address_buckets)
            .map_max_entries(names::SERVICES, sizes.services + config::MOST_DATA_PORTS)
            .map_max_entries(names::ADDRESSES, sizes.services + sizes.backends + LOCAL_ADDRESSES)
            .map_max_entries(names::ENDPOINTS, sizes.backends + config::MOST_DATA_SOURCES)
            .map_max_entries(names::RINGS, sizes.services)
            .map_max_entries(names::RING_WORDS, sizes.services)
            .map_max_entries(names::AGE_PROFILES, sizes.services)
            .map_max_entries(names::BACKENDS, sizes.backends)
            .map_max_entries(names::CLIENTS, sizes.clients())
            .map_max_entries(names::COUNTERS, sizes.backends)
            .map_max_entries(names::RESPONSE_TIMES, sizes.backends)
            .map_max_entries(names::NEXT_HOPS, MAX_PORTS + sizes.backends)
            .load(object)
            .map_err(explain_load)?;
        let program: &mut Xdp = ebpf
            .program_mut(names::PROGRAM)
            .ok_or_else(|| anyhow!("the object file has no program `{}`", names::PROGRAM))?
            .try_into()?;
        program.load().map_err(explain_program)?;
        let layout = take(&mut ebpf, names::LAYOUT)?;
        let ports: HashMap<MapData, [u32; 2], u32> = HashMap::try_from(take(&mut ebpf, names::PORTS)?)?;
        let known_ports = ports.iter().map(|entry| entry.map(|(place, port)| (place, port as u16)));
        let known_ports = known_ports.collect::<Result<_, _>>().context("read the ports")?;
        if let Some(pinned) = pinned {
            pinned.finish(layout, seed)?;
        }

        let [entries, addresses] = [buckets, address_buckets].map(|buckets| buckets * WAYS as u32);
        Ok(Datapath {
            services: HashMap::try_from(take(&mut ebpf, names::SERVICES)?)?,
            addresses: HashMap::try_from(take(&mut ebpf, names::ADDRESSES)?)?,
            endpoints: HashMap::try_from(take(&mut ebpf, names::ENDPOINTS)?)?,
            backends: Array::try_from(take(&mut ebpf, names::BACKENDS)?)?,
            ports,
            known_ports,
            egress: DevMap::try_from(take(&mut ebpf, names::EGRESS)?)?,
            counters: PerCpuArray::new(data(take(&mut ebpf, names::COUNTERS)?)?, sizes.backends)?,
            profiles: PerCpuArray::new(data(take(&mut ebpf, names::AGE_PROFILES)?)?, sizes.services)?,
            response_times: PerCpuArray::new(data(take(&mut ebpf, names::RESPONSE_TIMES)?)?, sizes.backends)?,
            evicted: PerCpuArray::new(data(take(&mut ebpf, names::EVICTED)?)?, Phase::ALL.len() as u32)?,
            drops: PerCpuArray::new(data(take(&mut ebpf, names::DROPS)?)?, Reason::ALL.len() as u32)?,
            rings: shared(&mut ebpf, names::RINGS, sizes.services)?,
            ring_words: shared(&mut ebpf, names::RING_WORDS, sizes.services)?,
            next_hops: shared(&mut ebpf, names::NEXT_HOPS, MAX_PORTS + sizes.backends)?,
            port_filter: shared(&mut ebpf, names::PORT_FILTER, 1)?,
            unresolved: shared(&mut ebpf, names::UNRESOLVED, 1)?,
            flows: FlowTable::new(
                seed,
                shared(&mut ebpf, names::FLOW_TAGS, buckets)?,
                shared(&mut ebpf, names::FLOWS, entries)?,
                shared(&mut ebpf, names::FLOW_ADDRESSES, addresses)?,
            ),
            ebpf,
            seed,
            sizes,
            has_ipv6,
            is_adopted: pinned.is_some_and(|pinned| pinned.earlier().is_some()),
        })
    }

    /// Whether the maps hold what an earlier daemon left.
    pub const fn is_adopted(&self) -> bool {
        self.is_adopted
    }

    /// How large the maps are.
    pub const fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Whether there may be IPv6 services.
    pub const fn has_ipv6(&self) -> bool {
        self.has_ipv6
    }

    /// By what the program knows an address and port of an IP protocol.
    pub fn key(&self, address: SocketAddr, protocol: u8) -> ServiceKey {
        let (ip, port) = (address.ip(), address.port().to_be_bytes());
        let wire = address::to_wire(ip);
        let short = if ip.is_ipv6() { table::digest(&wire, self.seed) } else { unmapped(&wire) };
        ServiceKey { address: short, port, protocol, family: address::family_of(ip) }
    }

    /// The services that the program knows.
    pub fn services(&self) -> Result<Vec<(ServiceKey, Service)>> {
        let pairs = self.services.iter().map(|pair| {
            let (key, service) = pair?;
            Ok((bytemuck::cast(key), bytemuck::cast(service)))
        });
        pairs.collect::<Result<_>>().context("read the services")
    }

    /// What is in a backend's slot.
    pub fn backend(&self, id: BackendId) -> Result<Backend> {
        Ok(bytemuck::cast(self.backends.get(&u32::from(id), 0).context("read a backend")?))
    }

    /// The slots of the half of a service's ring that is in use.
    pub fn slots(&self, service: ServiceId) -> Vec<BackendId> {
        let word = self.ring_word(service);
        self.rings.load_half(usize::from(service), word.half(), word.length())
    }

    /// Joins the program's log lines to the daemon's own, for as long as the future is polled. Must be called within
    /// a tokio runtime.
    pub fn follow_log(&mut self) -> Result<impl Future<Output = ()> + use<>> {
        let logger = EbpfLogger::init(&mut self.ebpf).context("find the log ring of the XDP program")?;
        // SAFETY: the logger owns its descriptor and always gives the same one, as long as it lives.
        let mut lines = unsafe { AsyncFd::register_with_interest(logger, Interest::READABLE) }
            .context("wait for the log lines of the XDP program")?;
        Ok(async move {
            while let Ok(mut ready) = lines.readable_mut().await {
                ready.get_inner_mut().flush();
                ready.clear_ready();
            }
        })
    }

    /// Runs the program on `frame` as if it had come in by interface `ifindex`; returns the verdict
    /// (`XDP_PASS`, …) and the frame as it left (Linux 5.18; for tests and benchmarks).
    pub fn test_run(&self, frame: &[u8], ifindex: u32) -> Result<(u32, Vec<u8>)> {
        let program = self.loaded_program()?;
        // struct xdp_md: data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex.
        let context: [u32; 6] = [0, frame.len() as u32, 0, ifindex, 0, 0];
        let mut output = vec![0; frame.len() + 256];
        let result = program
            .test_run(TestRunOptions {
                data_in: Some(frame),
                data_out: Some(&mut output),
                ctx_in: Some(bytemuck::bytes_of(&context)),
                ..TestRunOptions::default()
            })
            .context("run the XDP program on a test frame")?;
        output.truncate(result.data_size_out as usize);
        Ok((result.return_value, output))
    }

    /// The loaded program, for another one to call (for benchmarks).
    pub fn loaded_program(&self) -> Result<&Xdp> {
        let program = self.ebpf.program(names::PROGRAM);
        Ok(program.ok_or_else(|| anyhow!("the program `{}` is gone", names::PROGRAM))?.try_into()?)
    }

    /// Makes a service known, or changes it.
    pub fn set_service(&mut self, key: &ServiceKey, service: &Service) -> Result<()> {
        self.note_port(key.protocol, key.port);
        self.services.insert(
            bytemuck::cast::<_, [u8; 8]>(*key),
            bytemuck::cast::<_, [u8; 32]>(*service),
            0,
        )?;
        Ok(())
    }

    /// Takes a service out: packets to it are none of ours any more, but for those of live flows.
    pub fn remove_service(&mut self, key: &ServiceKey) -> Result<()> {
        Ok(self.services.remove(&bytemuck::cast::<_, [u8; 8]>(*key))?)
    }

    /// Has packets from and to this port looked up from now on. It stays so: flows may outlive what had it.
    fn note_port(&self, protocol: u8, port: [u8; 2]) {
        let (word, bit) = port_bit(protocol, port);
        self.port_filter.word_of(word).fetch_or(bit, Ordering::Release);
    }

    /// Sets the roles (`role::*`) of an address; 0 = none of ours.
    pub fn set_roles(&mut self, address: Address, roles: u32) -> Result<()> {
        if roles == 0 {
            self.addresses.remove(&address)?;
        } else {
            self.addresses.insert(address, roles, 0)?;
        }
        Ok(())
    }

    /// Makes known who answers from `key`: of `endpoint::*`.
    pub fn set_endpoint(&mut self, key: &ServiceKey, who: u32) -> Result<()> {
        self.note_port(key.protocol, key.port);
        self.endpoints.insert(bytemuck::cast::<_, [u8; 8]>(*key), who, 0)?;
        Ok(())
    }

    /// Makes known that no backend answers from `key` any more.
    pub fn remove_endpoint(&mut self, key: &ServiceKey) -> Result<()> {
        Ok(self.endpoints.remove(&bytemuck::cast::<_, [u8; 8]>(*key))?)
    }

    /// Writes a backend into its slot.
    pub fn set_backend(&mut self, id: BackendId, backend: &Backend) -> Result<()> {
        for protocol in [TCP, UDP] {
            self.note_port(protocol, backend.port);
        }
        self.backends.set(u32::from(id), bytemuck::cast::<_, [u8; size_of::<Backend>()]>(*backend), 0)?;
        Ok(())
    }

    /// Has what leaves by port number `port` leave by interface `ifindex`.
    pub fn set_egress(&mut self, port: u16, ifindex: u32) -> Result<()> {
        Ok(self.egress.set(u32::from(port), ifindex, None, 0)?)
    }

    /// The ports, by the index of an interface and the tags (`vlan::*`) of what comes in there.
    pub const fn ports(&self) -> &BTreeMap<[u32; 2], u16> {
        &self.known_ports
    }

    /// Has the program know these ports, and no others.
    pub fn set_ports(&mut self, ports: &BTreeMap<[u32; 2], u16>) -> Result<()> {
        for (place, port) in ports {
            if self.known_ports.get(place) != Some(port) {
                self.ports.insert(place, u32::from(*port), 0)?;
                self.known_ports.insert(*place, *port);
            }
        }
        let gone: Vec<_> =
            self.known_ports.keys().filter(|place| !ports.contains_key(*place)).copied().collect();
        for place in gone {
            self.ports.remove(&place)?;
            self.known_ports.remove(&place);
        }
        Ok(())
    }

    /// Writes a next hop: four words, each atomically. The packet that passes meanwhile sees a mixture at worst.
    pub fn set_next_hop(&mut self, index: u32, hop: &NextHop) {
        self.next_hops.store_words(index as usize, &NextHop { index, ..*hop });
    }

    /// A neighbour without a MAC that an answer was refused for since this was last asked: its interface and address.
    pub fn take_unresolved(&self) -> Option<(u32, IpAddr)> {
        let [ifindex, high, low] = self.unresolved.words(0);
        let ifindex = ifindex.swap(0, Ordering::AcqRel) as u32;
        let words = [high, low].map(|word| word.load(Ordering::Relaxed));
        (ifindex != 0).then(|| (ifindex, address::from_wire(bytemuck::cast(words))))
    }

    /// The word that steers a service's ring.
    pub fn ring_word(&self, service: ServiceId) -> RingWord {
        RingWord(self.ring_words.word(usize::from(service)).load(Ordering::Acquire))
    }

    /// Writes `slots` into the half of the ring that is not in use, and switches to it if no flow has taken a
    /// slot since `expected` was read, or at once if `expected` is `None`.
    ///
    /// Returns the word that was replaced; as the error, the word that did not match.
    pub fn switch_ring(
        &mut self,
        service: ServiceId,
        slots: &[BackendId],
        expected: Option<RingWord>,
    ) -> Result<RingWord, RingWord> {
        let current = self.ring_word(service);
        let half = 1 - current.half();
        self.rings.store_half(usize::from(service), half, slots);
        let new = RingWord::new(half, slots.len());
        let word = self.ring_words.word(usize::from(service));
        match expected {
            None => Ok(RingWord(word.swap(new.0, Ordering::AcqRel))),
            Some(expected) => word
                .compare_exchange(expected.0, new.0, Ordering::AcqRel, Ordering::Acquire)
                .map(RingWord)
                .map_err(RingWord),
        }
    }

    /// Reads the counters of the first `backends` slots in one batch: for each slot, one value per CPU.
    pub fn read_counters(&mut self, backends: usize) -> Result<&[BackendCounters]> {
        self.counters.read(backends).context("read the backends' counters")
    }

    /// Reads the age profiles of the first `services` slots in one batch: for each slot, one value per CPU.
    pub fn read_profiles(&mut self, services: usize) -> Result<&[AgeProfile]> {
        self.profiles.read(services).context("read the services' age profiles")
    }

    /// Reads the response times of the first `backends` slots in one batch: for each slot, one value per CPU.
    pub fn read_response_times(&mut self, backends: usize) -> Result<&[ResponseTimes]> {
        self.response_times.read(backends).context("read the backends' response times")
    }

    /// The flow table.
    pub fn flows(&self) -> &FlowTable {
        &self.flows
    }

    /// How many values `read_counters` gives for each slot.
    pub fn cpus(&self) -> usize {
        self.counters.cpus()
    }

    /// Refused packets by reason, summed over the CPUs.
    pub fn read_drops(&mut self) -> Result<[u64; Reason::ALL.len()]> {
        sums(&mut self.drops).context("read the refused packets' counters")
    }

    /// Flows that gave way to new ones, in the order of `Phase::ALL`, summed over the CPUs.
    pub fn read_evicted(&mut self) -> Result<[u64; Phase::ALL.len()]> {
        sums(&mut self.evicted).context("read how many flows gave way")
    }
}

fn sums<const COUNT: usize>(counters: &mut PerCpuArray<u64>) -> io::Result<[u64; COUNT]> {
    let cpus = counters.cpus();
    let mut sums = [0u64; COUNT];
    for (sum, per_cpu) in sums.iter_mut().zip(counters.read(COUNT)?.chunks(cpus)) {
        *sum = per_cpu.iter().fold(0, |sum, value| sum.wrapping_add(*value));
    }
    Ok(sums)
}

fn take(ebpf: &mut Ebpf, name: &str) -> Result<Map> {
    ebpf.take_map(name).ok_or_else(|| anyhow!("the object file has no map `{name}`"))
}

fn data(map: Map) -> Result<MapData> {
    match map {
        Map::Array(data) | Map::PerCpuArray(data) => Ok(data),
        _ => Err(anyhow!("a map of the object file is not an array")),
    }
}

fn shared<T: bytemuck::Pod>(ebpf: &mut Ebpf, name: &str, length: u32) -> Result<SharedArray<T>> {
    let map = data(take(ebpf, name)?)?;
    SharedArray::map(map.fd().as_fd(), length as usize).with_context(|| format!("map the memory of `{name}`"))
}

fn random_seed() -> io::Result<[u64; 2]> {
    let mut seed = [0u64; 2];
    let bytes = bytemuck::bytes_of_mut(&mut seed);
    // SAFETY: the pointer and length are those of `seed`.
    let filled = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if filled == bytes.len() as isize { Ok(seed) } else { Err(io::Error::last_os_error()) }
}
