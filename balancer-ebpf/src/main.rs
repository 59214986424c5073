//! The XDP program: the maps, and [`balancer_ebpf::process`] between them and the packet.
#![no_std]
#![no_main]

use core::{mem, ptr};

use aya_ebpf::{
    EbpfContext,
    bindings::{
        BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS, bpf_fib_lookup as FibLookup,
        xdp_action::{XDP_DROP, XDP_PASS, XDP_REDIRECT, XDP_TX},
        xdp_md,
    },
    helpers::{bpf_fib_lookup, bpf_ktime_get_coarse_ns, bpf_ktime_get_ns},
    macros::{map, xdp},
    maps::{Array, DevMap, HashMap, LruHashMap, PerCpuArray},
    programs::XdpContext,
};
use aya_log_ebpf::debug;
use balancer_common::{
    Address, AgeProfile, Backend, BackendCounters, BackendId, Bucket, ClientKey, Control, EXCHANGE_SHIFT,
    FlowAddresses, FlowKey, Fragment, FragmentKey, HALVES, Layout, MAX_INTERFACES, MAX_PORTS, NextHop,
    PORT_FILTER_WORDS, Phase, PortFilter, RING_SLOTS, Reason, Remembered, ResponseTimes, Ring, RingWord,
    STAMP_SHIFT, Service, ServiceId, ServiceKey, UDP, Unresolved, WAYS, family,
};
use balancer_ebpf::{
    Environment, FlowMemory, Packet, Verdict, Way, atomic,
    enter::{self, Entered},
    exchange, fragment,
    frame::{Frame, bounded},
    icmp, neighbour, one_packet,
    open::{self, Choice, Opening},
    parse::{self, Unparsed, Upper},
    process::{self, Step, process},
    rewrite::in_header,
    state::{self, Segment},
    table::{self, Found},
    vlan, wrap,
};

/// Lets user space map the memory of an array (kernel 5.5).
const MMAPABLE: u32 = 1 << 10;

/// Takes memory for what is there only (kernel 4.6).
const NO_PREALLOCATION: u32 = 1;

// The controller sets the real sizes when it loads the program.
#[map]
static FLOW_TAGS: Array<u64> = Array::with_max_entries(1, MMAPABLE);
#[map]
static FLOWS: Array<Bucket> = Array::with_max_entries(1, MMAPABLE);
#[map]
static FLOW_ADDRESSES: Array<[FlowAddresses; WAYS]> = Array::with_max_entries(1, MMAPABLE);
#[map]
static SERVICES: HashMap<ServiceKey, Service> = HashMap::with_max_entries(1, NO_PREALLOCATION);
#[map]
static ADDRESSES: HashMap<Address, u32> = HashMap::with_max_entries(1, 0);
#[map]
static ENDPOINTS: HashMap<ServiceKey, u32> = HashMap::with_max_entries(1, NO_PREALLOCATION);
#[map]
static CLIENTS: LruHashMap<ClientKey, Remembered> = LruHashMap::with_max_entries(1, 0);
#[map]
static FRAGMENTS: LruHashMap<FragmentKey, Fragment> = LruHashMap::with_max_entries(MOST_FRAGMENTED, 0);
#[map]
static RINGS: Array<Ring> = Array::with_max_entries(1, MMAPABLE);
#[map]
static RING_WORDS: Array<u64> = Array::with_max_entries(1, MMAPABLE);
#[map]
static BACKENDS: Array<Backend> = Array::with_max_entries(1, 0);
#[map]
static NEXT_HOPS: Array<NextHop> = Array::with_max_entries(1, MMAPABLE);
#[map]
static EGRESS: DevMap = DevMap::with_max_entries(MAX_INTERFACES, 0);
#[map]
static PORTS: HashMap<[u32; 2], u32> = HashMap::with_max_entries(2 * MAX_PORTS, NO_PREALLOCATION);
#[map]
static COUNTERS: PerCpuArray<BackendCounters> = PerCpuArray::with_max_entries(1, 0);
#[map]
static RESPONSE_TIMES: PerCpuArray<ResponseTimes> = PerCpuArray::with_max_entries(1, 0);
#[map]
static OPENING: PerCpuArray<Opening> = PerCpuArray::with_max_entries(1, 0);
#[map]
static ICMP_ADDRESSES: PerCpuArray<icmp::Addresses> = PerCpuArray::with_max_entries(1, 0);
#[map]
static ICMP_SENT: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);
#[map]
static AGE_PROFILES: PerCpuArray<AgeProfile> = PerCpuArray::with_max_entries(1, 0);
#[map]
static EVICTED: PerCpuArray<u64> = PerCpuArray::with_max_entries(Phase::ALL.len() as u32, 0);
#[map]
static DROPS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Reason::ALL.len() as u32, 0);
#[map]
static PORT_FILTER: Array<PortFilter> = Array::with_max_entries(1, MMAPABLE);
#[map]
static UNRESOLVED: Array<Unresolved> = Array::with_max_entries(1, MMAPABLE);

// For the controller alone.
#[map]
static LAYOUT: Array<Layout> = Array::with_max_entries(1, 0);

/// The address families, as the kernel numbers them.
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// What stands before an IPv4 address in the second word of an `Address`, on the little-endian machines that this runs on.
const MAPPED: u64 = 0xffff_0000;
/// How many fragmented datagrams are remembered.
const MOST_FRAGMENTED: u32 = 16_384;

/// How many ICMP messages a CPU sends within one stamp (67 ms): about a thousand a second, as Linux does.
const ICMP_PER_STAMP: u32 = 64;

/// The secret of the flow hash.
#[unsafe(no_mangle)]
static HASH_SEED: [u64; 2] = [0; 2];
/// How many buckets `FLOWS` has.
#[unsafe(no_mangle)]
static BUCKETS: u32 = 1;
/// 1: there may be IPv6 services; 0: IPv6 is the kernel's business (the branches are compiled away at load).
#[unsafe(no_mangle)]
static IPV6: u32 = 1;
/// Up to which age, in stamps, packets count in `AGE_PROFILES`.
#[unsafe(no_mangle)]
static PROFILED_AGE: u32 = 0;
/// 1: log each refused packet (for troubleshooting; the branch is compiled away at load when 0).
#[unsafe(no_mangle)]
static LOG_REFUSALS: u32 = 0;

#[xdp(frags)]
fn balancer(context: XdpContext) -> u32 {
    let frame = Frame(&context);
    match process(&frame, &Kernel(&context)) {
        Verdict::Pass => XDP_PASS,
        Verdict::Drop => XDP_DROP,
        Verdict::Transmit => XDP_TX,
        // Where to was said when the way was checked.
        Verdict::Redirect(_) => XDP_REDIRECT,
    }
}

/// The maps and the clock of the kernel.
struct Kernel<'a>(&'a XdpContext);

impl FlowMemory for Kernel<'_> {
    #[inline(always)]
    fn seed(&self) -> [u64; 2] {
        // SAFETY: a static; volatile, since the controller sets it before the program is loaded.
        unsafe { ptr::read_volatile(&raw const HASH_SEED) }
    }

    #[inline(always)]
    fn buckets(&self) -> u32 {
        // SAFETY: as above.
        unsafe { ptr::read_volatile(&raw const BUCKETS) }
    }

    #[inline(always)]
    fn tags(&self, bucket: u32) -> Option<*mut u64> {
        FLOW_TAGS.get_ptr_mut(bucket)
    }

    #[inline(always)]
    fn bucket(&self, bucket: u32) -> Option<*mut Bucket> {
        FLOWS.get_ptr_mut(bucket)
    }
}

impl Environment for Kernel<'_> {
    #[inline(always)]
    fn now(&self) -> u32 {
        // SAFETY: the helper takes nothing and always answers (kernel 5.11).
        (unsafe { bpf_ktime_get_coarse_ns() } >> STAMP_SHIFT) as u32
    }

    #[inline(always)]
    fn has_ipv6(&self) -> bool {
        // SAFETY: a static; volatile, since the controller sets it before the program is loaded.
        unsafe { ptr::read_volatile(&raw const IPV6) != 0 }
    }

    #[inline(always)]
    fn addresses(&self, index: u32) -> Option<*mut FlowAddresses> {
        let bucket = FLOW_ADDRESSES.get_ptr_mut(index / WAYS as u32)?;
        // SAFETY: the rest of a division by `WAYS` is within the bucket.
        Some(unsafe { bucket.cast::<FlowAddresses>().add((index % WAYS as u32) as usize) })
    }

    #[inline(always)]
    fn icmp_addresses(&self) -> Option<*mut icmp::Addresses> {
        ICMP_ADDRESSES.get_ptr_mut(0)
    }

    #[inline(always)]
    fn opening(&self) -> Option<*mut Opening> {
        OPENING.get_ptr_mut(0)
    }

    #[inline(always)]
    fn ingress(&self) -> u32 {
        self.0.ingress_ifindex() as u32
    }

    #[inline(always)]
    fn port(&self, ifindex: u32, vlan: u32) -> Option<u16> {
        // SAFETY: the value is one aligned word, copied at once.
        unsafe { PORTS.get([ifindex, vlan]) }.map(|port| *port as u16)
    }

    #[inline(always)]
    fn port_filter(&self, word: usize) -> u64 {
        let Some(ports) = PORT_FILTER.get_ptr(0) else { return u64::MAX };
        let word = bounded::<{ PORT_FILTER_WORDS - 1 }>(word);
        // SAFETY: the index is less than the length; the controller sets bits meanwhile, a word at a time.
        unsafe { ptr::read_volatile(ports.cast::<u64>().add(word)) }
    }

    #[inline(always)]
    fn service(&self, key: &ServiceKey) -> Option<&Service> {
        // SAFETY: an update replaces the whole element, so what is read stays as it is until this run ends.
        unsafe { SERVICES.get(key) }
    }

    #[inline(always)]
    fn endpoint(&self, key: &ServiceKey) -> u32 {
        // SAFETY: the value is one aligned word, copied at once.
        unsafe { ENDPOINTS.get(key) }.copied().unwrap_or(0)
    }

    #[inline(always)]
    fn roles(&self, address: &Address) -> u32 {
        // SAFETY: the value is one aligned word, copied at once.
        unsafe { ADDRESSES.get(address) }.copied().unwrap_or(0)
    }

    #[inline(always)]
    fn take(&self, service: ServiceId) -> RingWord {
        let Some(word) = RING_WORDS.get_ptr_mut(u32::from(service)) else { return RingWord::new(0, 0) };
        // SAFETY: array elements are valid and aligned, and the word is only ever changed atomically.
        RingWord(unsafe { atomic::fetch_add(word, RingWord::TAKE) })
    }

    #[inline(always)]
    fn slot(&self, service: ServiceId, half: usize, slot: usize) -> Option<BackendId> {
        let ring = RINGS.get_ptr(u32::from(service))?;
        let place = (half * RING_SLOTS + slot) & (HALVES * RING_SLOTS - 1);
        // SAFETY: `place` is within both halves together, which lie one after the other.
        Some(unsafe { ptr::read_volatile(ring.cast::<BackendId>().add(place)) })
    }

    #[inline(always)]
    fn backend(&self, id: BackendId) -> Option<&Backend> {
        BACKENDS.get(u32::from(id))
    }

    #[inline(always)]
    fn remembered(&self, client: &ClientKey) -> Remembered {
        match CLIENTS.get_ptr(client) {
            // SAFETY: valid and aligned; read whole, and whatever is read is judged by whoever reads it.
            Some(value) => unsafe { ptr::read_volatile(value) },
            None => Remembered { stamp: 0, entry: 0, backend: 0, reserved: [0; 3] },
        }
    }

    #[inline(always)]
    fn remember(&self, client: &ClientKey, value: &Remembered) {
        // It fails only where the kernel has no memory: the client is not remembered then.
        let _ = CLIENTS.insert(client, value, 0);
    }

    #[inline(always)]
    fn next_hop(&self, index: u32) -> Option<&NextHop> {
        NEXT_HOPS.get(index)
    }

    #[inline(always)]
    fn redirect(&self, port: u16) -> bool {
        EGRESS.redirect(u32::from(port), 0).is_ok()
    }

    #[inline(always)]
    fn way(&self, family: u8, source: &Address, destination: &Address) -> Result<Way, Reason> {
        // SAFETY: integers and arrays of them, for which all zeros is a value.
        let mut wanted: FibLookup = unsafe { mem::zeroed() };
        wanted.family = if family == family::IPV4 { AF_INET } else { AF_INET6 };
        wanted.l4_protocol = UDP;
        wanted.ifindex = self.ingress();
        // Those of IPv4 are where the first word of these is.
        wanted.__bindgen_anon_3.ipv6_src = bytemuck::cast(in_header(family, source));
        wanted.__bindgen_anon_4.ipv6_dst = bytemuck::cast(in_header(family, destination));
        let size = size_of::<FibLookup>() as i32;
        // SAFETY: the context is the one that the program was called with, and the other a structure of this size (kernel
        // 4.18).
        let result = unsafe { bpf_fib_lookup(self.0.as_ptr(), &raw mut wanted, size, 0) };
        if result == i64::from(BPF_FIB_LKUP_RET_SUCCESS) {
            // Half word by half word: the kernel refuses to see more read at such a place of the stack.
            // SAFETY: within the structure, and aligned, since its offset is even.
            let [a, b, c] = [0, 1, 2].map(|half| unsafe {
                ptr::read_volatile((&raw const wanted.dmac).cast::<u16>().add(half)).to_ne_bytes()
            });
            let neighbour = [a[0], a[1], b[0], b[1], c[0], c[1]];
            return Ok(Way { ifindex: wanted.ifindex, neighbour });
        }
        if result != i64::from(BPF_FIB_LKUP_RET_NO_NEIGH) {
            return Err(Reason::NoEgress);
        }
        if let Some(unresolved) = UNRESOLVED.get_ptr_mut(0) {
            let unresolved = unresolved.cast::<u64>();
            // A gateway may be of the other family.
            let is_ipv4 = wanted.family == AF_INET;
            // SAFETY: the kernel has written the neighbour's address there, that of the gateway or of the destination.
            let [high, low]: [u64; 2] = bytemuck::cast(unsafe { wanted.__bindgen_anon_4.ipv6_dst });
            let [high, low] = if is_ipv4 { [0, high << 32 | MAPPED] } else { [high, low] };
            // SAFETY: valid and aligned; each written whole, and that by which it is known last.
            unsafe {
                ptr::write_volatile(unresolved.add(1), high);
                ptr::write_volatile(unresolved.add(2), low);
                ptr::write_volatile(unresolved, u64::from(wanted.ifindex));
            };
        }
        Err(Reason::NoNeighbour)
    }

    #[inline(always)]
    fn counters(&self, id: BackendId) -> Option<*mut BackendCounters> {
        COUNTERS.get_ptr_mut(u32::from(id))
    }

    #[inline(always)]
    fn precise(&self) -> u32 {
        // SAFETY: the helper takes nothing and always answers (kernel 4.1).
        (unsafe { bpf_ktime_get_ns() } >> EXCHANGE_SHIFT) as u32
    }

    #[inline(always)]
    fn response_times(&self, id: BackendId) -> Option<*mut ResponseTimes> {
        RESPONSE_TIMES.get_ptr_mut(u32::from(id))
    }

    #[inline(always)]
    fn profile(&self, service: ServiceId) -> Option<*mut AgeProfile> {
        AGE_PROFILES.get_ptr_mut(u32::from(service))
    }

    #[inline(always)]
    fn profiled_age(&self) -> u32 {
        // SAFETY: a static; volatile, since the controller sets it before the program is loaded.
        unsafe { ptr::read_volatile(&raw const PROFILED_AGE) }
    }

    #[inline(always)]
    fn may_send_icmp(&self, now: u32) -> bool {
        let Some(sent) = ICMP_SENT.get_ptr_mut(0) else { return false };
        // SAFETY: valid, aligned, and this CPU's own.
        let sent = unsafe { &mut *sent };
        if (*sent >> 32) as u32 != now {
            *sent = u64::from(now) << 32;
        }
        *sent += 1;
        *sent as u32 <= ICMP_PER_STAMP
    }

    #[inline(always)]
    fn evicted(&self, phase: Phase) {
        if let Some(count) = EVICTED.get_ptr_mut(phase as u32) {
            // SAFETY: valid, aligned, and this CPU's own.
            unsafe { *count = (*count).wrapping_add(1) };
        }
    }

    #[inline(always)]
    fn upper<P: Packet>(&self, _packet: &P, upper: Upper) -> Result<Upper, Unparsed> {
        Upper::from_number(packet_upper(self.0.ctx, Upper::to_number(Ok(upper))))
    }

    #[inline(always)]
    fn forward<P: Packet>(&self, _packet: &P, is_first: bool) -> Step {
        Step::from_number(packet_forward(self.0.ctx, u32::from(is_first)))
    }

    #[inline(always)]
    fn fragment(&self, key: &FragmentKey) -> Fragment {
        match FRAGMENTS.get_ptr(key) {
            // SAFETY: valid and aligned; read whole, and whatever is read is judged by whoever reads it.
            Some(value) => unsafe { ptr::read_volatile(value) },
            None => Fragment { entry: 0, stamp: 0, sequence: 0, reserved: [0; 3] },
        }
    }

    #[inline(always)]
    fn set_fragment(&self, key: &FragmentKey, value: &Fragment) {
        // It fails only where the kernel has no memory: the rest of the datagram is refused then.
        let _ = FRAGMENTS.insert(key, value, 0);
    }

    #[inline(always)]
    fn pass_one_way<P: Packet>(&self, _packet: &P, backend: BackendId, lot: u16) -> Step {
        Step::from_number(packet_pass_one_way(self.0.ctx, u32::from(backend), u32::from(lot)))
    }

    #[inline(always)]
    fn tell_neighbour<P: Packet>(&self, _packet: &P) -> Step {
        Step::from_number(packet_tell_neighbour(self.0.ctx))
    }

    #[inline(always)]
    fn leave<P: Packet>(&self, _packet: &P, hop: u32) -> Step {
        Step::from_number(packet_leave(self.0.ctx, hop))
    }

    #[inline(always)]
    fn knows_vlan(&self, tags: u32) -> bool {
        packet_knows_vlan(self.0.ctx, tags) != 0
    }

    #[inline(always)]
    fn wrap<P: Packet>(&self, _packet: &P, backend: BackendId, lot: u16) -> Step {
        Step::from_number(packet_wrap(self.0.ctx, u32::from(backend), u32::from(lot)))
    }

    #[inline(always)]
    fn carry_alone<P: Packet>(&self, _packet: &P, is_answer: bool) -> Step {
        let step = if is_answer { packet_answer_alone(self.0.ctx) } else { packet_ask_alone(self.0.ctx) };
        Step::from_number(step)
    }

    #[inline(always)]
    fn remember_part<P: Packet>(&self, _packet: &P, found: &Found) {
        packet_remember_part(self.0.ctx, found.index, u32::from(found.control.sequence()));
    }

    #[inline(always)]
    fn pass_part<P: Packet>(&self, _packet: &P) {
        packet_pass_part(self.0.ctx);
    }

    #[inline(always)]
    fn forward_rest<P: Packet>(&self, _packet: &P) -> Step {
        Step::from_number(packet_forward_rest(self.0.ctx))
    }

    #[inline(always)]
    fn control<P: Packet>(&self, _packet: &P) -> Step {
        Step::from_number(packet_control(self.0.ctx))
    }

    #[inline(always)]
    fn is_ours<P: Packet>(&self, _packet: &P) -> bool {
        packet_is_ours(self.0.ctx) != 0
    }

    #[inline(always)]
    fn ask<P: Packet>(&self, _packet: &P, stale: u32) -> Step {
        Step::from_number(packet_ask(self.0.ctx, stale))
    }

    #[inline(always)]
    fn open(&self) -> Step {
        Step::from_number(flow_open(self.0.ctx))
    }

    #[inline(always)]
    fn reject<P: Packet>(&self, _packet: &P, reason: Reason, most: u16) -> bool {
        packet_reject(self.0.ctx, reason as u32, u32::from(most)) != 0
    }

    #[inline(always)]
    fn choose(&self, now: u32) -> Result<Choice, Reason> {
        let choice = flow_choose(now);
        if choice & REFUSED != 0 {
            return Err(Reason::from_index(choice as u32).unwrap_or(Reason::NoBackend));
        }
        Ok(Choice { id: choice as BackendId, port: ((choice >> 16) as u16).to_ne_bytes() })
    }

    #[inline(always)]
    fn is_free(&self, reply: &FlowKey, now: u32) -> bool {
        let [addresses, ports] = bytemuck::cast(*reply);
        flow_is_free(addresses, ports, now) != 0
    }

    #[inline(always)]
    fn reserve(&self, key: &FlowKey, now: u32) -> u32 {
        let [addresses, ports] = bytemuck::cast(*key);
        flow_reserve(addresses, ports, now)
    }

    #[inline(always)]
    fn claim_free(&self, [request, reply]: [&FlowKey; 2]) -> [u32; 2] {
        let ([r0, r1], [p0, p1]): ([u64; 2], [u64; 2]) = (bytemuck::cast(*request), bytemuck::cast(*reply));
        let ways = flow_claim_free(r0, r1, p0, p1);
        [ways as u32, (ways >> 32) as u32]
    }

    #[inline(always)]
    fn announce(&self, [index, twin]: [u32; 2], marks: u8, now: u32) {
        flow_announce(index, twin, u32::from(marks), now);
    }

    #[inline(always)]
    fn enter(&self, request: u32) -> Entered {
        Entered::from_number(flow_enter(request))
    }

    #[inline(always)]
    fn release(&self, found: &Found) {
        flow_release(found.index, found.control.0);
    }

    #[inline(always)]
    fn end(&self, found: &Found, now: u32) {
        flow_end(found.index, found.control.0, now);
    }

    #[inline(always)]
    fn move_client(&self, found: &Found, word: u64, tags: u32) {
        flow_move_client(self.0.ctx, found.index, found.control.0, word, tags);
    }

    #[inline(always)]
    fn advance<P: Packet>(&self, _packet: &P, index: u32, control: Control, segment: Segment) {
        flow_advance(self.0.ctx, index, control.0, segment.to_number());
    }

    #[inline(always)]
    fn follow<P: Packet>(&self, _packet: &P, index: u32, control: Control, segment: Segment) {
        flow_follow(self.0.ctx, index, control.0, segment.to_number());
    }

    #[inline(always)]
    fn refuse(&self, reason: Reason) {
        packet_refuse(self.0.ctx, reason as u32);
    }
}

// Functions whose names are known outside are verified each by itself (kernel 5.6). They take numbers, or what the verifier
// knows the type of, and know no packet but by its context. Each argument must be used: for others the compiler passes
// nothing, which the verifier refuses. With all that are under way at once they must get by with 512 bytes of stack.

/// A stand-in where no packet is looked at.
const NO_PACKET: XdpContext = XdpContext { ctx: ptr::null_mut() };

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_forward(context: *mut xdp_md, is_first: u32) -> u64 {
    let context = XdpContext::new(context);
    process::forward(&Frame(&context), &Kernel(&context), is_first != 0).to_number()
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_refuse(context: *mut xdp_md, reason: u32) -> u32 {
    let context = XdpContext::new(context);
    if let Some(count) = DROPS.get_ptr_mut(reason) {
        // SAFETY: valid, aligned, and this CPU's own.
        unsafe { *count = (*count).wrapping_add(1) };
    }
    // SAFETY: a static; volatile, since the controller sets it before the program is loaded.
    if unsafe { ptr::read_volatile(&raw const LOG_REFUSALS) } != 0
        && let Some(reason) = Reason::from_index(reason)
    {
        debug!(context, "refused a packet from interface {}: {}", context.ingress_ifindex(), reason.name());
    }
    0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_pass_one_way(context: *mut xdp_md, backend: u32, lot: u32) -> u64 {
    let context = XdpContext::new(context);
    icmp::pass_one_way(&Frame(&context), &Kernel(&context), backend as BackendId, lot as u16).to_number()
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_tell_neighbour(context: *mut xdp_md) -> u64 {
    let context = XdpContext::new(context);
    neighbour::tell(&Frame(&context), &Kernel(&context)).to_number()
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_knows_vlan(context: *mut xdp_md, tags: u32) -> u32 {
    u32::from(vlan::is_known(&Kernel(&XdpContext::new(context)), tags))
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_leave(context: *mut xdp_md, hop: u32) -> u64 {
    let context = XdpContext::new(context);
    vlan::leave(&Frame(&context), &Kernel(&context), hop).to_number()
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_wrap(context: *mut xdp_md, backend: u32, lot: u32) -> u64 {
    let context = XdpContext::new(context);
    wrap::wrap(&Frame(&context), &Kernel(&context), backend as BackendId, lot as u16).to_number()
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_ask_alone(context: *mut xdp_md) -> u64 {
    let context = XdpContext::new(context);
    one_packet::carry(&Frame(&context), &Kernel(&context), false).to_number()
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_answer_alone(context: *mut xdp_md) -> u64 {
    let context = XdpContext::new(context);
    one_packet::carry(&Frame(&context), &Kernel(&context), true).to_number()
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_upper(context: *mut xdp_md, upper: u64) -> u64 {
    let context = XdpContext::new(context);
    let found = Upper::from_number(upper).and_then(|upper| parse::upper(&Frame(&context), upper));
    Upper::to_number(found)
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_remember_part(context: *mut xdp_md, entry: u32, sequence: u32) -> u32 {
    let context = XdpContext::new(context);
    fragment::remember(&Frame(&context), &Kernel(&context), entry, sequence as u16);
    0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_pass_part(context: *mut xdp_md) -> u32 {
    let context = XdpContext::new(context);
    fragment::pass(&Frame(&context), &Kernel(&context));
    0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_forward_rest(context: *mut xdp_md) -> u64 {
    let context = XdpContext::new(context);
    fragment::forward(&Frame(&context), &Kernel(&context)).to_number()
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_control(context: *mut xdp_md) -> u64 {
    let context = XdpContext::new(context);
    icmp::control(&Frame(&context), &Kernel(&context)).to_number()
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_is_ours(context: *mut xdp_md) -> u32 {
    let context = XdpContext::new(context);
    u32::from(process::is_ours(&Frame(&context), &Kernel(&context)))
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_ask(context: *mut xdp_md, stale: u32) -> u64 {
    let context = XdpContext::new(context);
    process::ask(&Frame(&context), &Kernel(&context), stale).to_number()
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn packet_reject(context: *mut xdp_md, reason: u32, most: u32) -> u32 {
    let context = XdpContext::new(context);
    let Some(reason) = Reason::from_index(reason) else { return 0 };
    u32::from(process::reject(&Frame(&context), &Kernel(&context), reason, most as u16).is_some())
}

/// In what `flow_choose` returns: it is a reason, and no backend (bits 0 to 15) with a port (bits 16 to 31).
const REFUSED: u64 = 1 << 32;

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_choose(now: u32) -> u64 {
    match open::choose(&Kernel(&NO_PACKET), now) {
        Ok(Choice { id, port }) => u64::from(id) | u64::from(u16::from_ne_bytes(port)) << 16,
        Err(reason) => REFUSED | reason as u64,
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_open(context: *mut xdp_md) -> u64 {
    let context = XdpContext::new(context);
    process::open(&Kernel(&context)).to_number()
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_is_free(addresses: u64, ports: u64, now: u32) -> u32 {
    u32::from(open::is_free(&Kernel(&NO_PACKET), &bytemuck::cast([addresses, ports]), now))
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_reserve(addresses: u64, ports: u64, now: u32) -> u32 {
    enter::reserve(&Kernel(&NO_PACKET), &bytemuck::cast([addresses, ports]), now)
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_claim_free(r0: u64, r1: u64, p0: u64, p1: u64) -> u64 {
    let (request, reply) = (bytemuck::cast([r0, r1]), bytemuck::cast([p0, p1]));
    let [request, reply] = enter::claim_free(&Kernel(&NO_PACKET), [&request, &reply]);
    u64::from(request) | u64::from(reply) << 32
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_announce(index: u32, twin: u32, marks: u32, now: u32) -> u32 {
    open::announce(&Kernel(&NO_PACKET), [index, twin], marks as u8, now);
    0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_enter(request: u32) -> u32 {
    enter::enter(&Kernel(&NO_PACKET), request) as u32
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_release(index: u32, control: u32) -> u32 {
    let kernel = Kernel(&NO_PACKET);
    let found = Found::at(&kernel, index, Control(control));
    if found.exists() {
        table::release(&kernel, &found);
    }
    0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_end(index: u32, control: u32, now: u32) -> u32 {
    let kernel = Kernel(&NO_PACKET);
    let found = Found::at(&kernel, index, Control(control));
    if found.exists() {
        table::end(&kernel, &found, now);
    }
    0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_move_client(context: *mut xdp_md, index: u32, control: u32, word: u64, tags: u32) -> u32 {
    let context = XdpContext::new(context);
    let kernel = Kernel(&context);
    let found = Found::at(&kernel, index, Control(control));
    if found.exists() && table::is_unchanged(&found) {
        process::move_client(&kernel, &found, word, tags);
    }
    0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_advance(context: *mut xdp_md, index: u32, control: u32, segment: u64) -> u32 {
    let (context, segment) = (XdpContext::new(context), Segment::from_number(segment));
    state::advance(&Frame(&context), &Kernel(&context), index, Control(control), segment);
    0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_follow(context: *mut xdp_md, index: u32, control: u32, segment: u64) -> u32 {
    let (context, segment) = (XdpContext::new(context), Segment::from_number(segment));
    exchange::follow(&Frame(&context), &Kernel(&context), index, Control(control), segment);
    0
}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
