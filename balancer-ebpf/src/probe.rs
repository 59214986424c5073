//! The tc programs that have health checks go the way of a service's packets, to backends that hold its address.
//!
//! A check's socket talks to the backend's own address, so that routes and neighbours are the kernel's business. On its way out
//! each packet is addressed to the service instead, and wrapped where the service's are; answers come from the service's
//! address, past every flow, and are turned back before the kernel looks for the socket.
#![no_std]
#![no_main]

use aya_ebpf::{
    bindings::{BPF_F_MARK_MANGLED_0, BPF_F_PSEUDO_HDR},
    helpers::bpf_csum_diff,
    macros::{classifier, map},
    maps::{Array, LruHashMap},
    programs::TcContext,
};
use balancer_common::{ICMP, ICMPV6, MOST_PROBES, PROBE_MARK, ProbeWay, TCP, UDP, forward};
use balancer_ebpf::wrap::{IPV4_WITHIN, IPV6_WITHIN};

#[map]
static WAYS: Array<ProbeWay> = Array::with_max_entries(1 << 16, 0);
#[map]
static ASKED: LruHashMap<[u64; 3], Words> = LruHashMap::with_max_entries(MOST_PROBES, 0);

/// The next program decides.
const NEXT: i32 = -1;
const DROP: i32 = 2;
/// Offset of the IP header. Tags are beside the packet here.
const L3: usize = 14;
const IPV4_LENGTH: usize = 20;
const IPV6_LENGTH: usize = 40;
const TTL: u8 = 64;
/// GUE's source ports are those that nobody listens at (RFC 6335).
const FIRST_PORT: u16 = 0xc000;
/// Room is made between the link's header and the network's.
const ROOM_MAC: u32 = 1;
const ENCAP_IPV4: u64 = 1 << 1;
const ENCAP_IPV6: u64 = 1 << 2;
const ENCAP_UDP: u64 = 1 << 4;

/// An address in two words, as it stands in memory: the verifier wants what lies on the stack read by whole words.
type Words = [u64; 2];

/// What must be known of a packet. Ports are in network order.
struct Parsed {
    is_ipv4: bool,
    l4: usize,
    protocol: u8,
    source: Words,
    destination: Words,
    source_port: u16,
    destination_port: u16,
}

#[inline(always)]
fn parse(context: &TcContext) -> Option<Parsed> {
    let kind: u16 = context.load(L3 - 2).ok()?;
    let is_ipv4 = kind == 0x0800_u16.to_be();
    if !is_ipv4 && kind != 0x86dd_u16.to_be() {
        return None;
    }
    let (protocol, source, destination): (u8, Words, Words);
    let l4 = if is_ipv4 {
        let first: u8 = context.load(L3).ok()?;
        if first != 0x45 {
            return None;
        }
        protocol = context.load(L3 + 9).ok()?;
        source = of_ipv4(context.load(L3 + 12).ok()?);
        destination = of_ipv4(context.load(L3 + 16).ok()?);
        L3 + IPV4_LENGTH
    } else {
        protocol = context.load(L3 + 6).ok()?;
        source = context.load(L3 + 8).ok()?;
        destination = context.load(L3 + 24).ok()?;
        L3 + IPV6_LENGTH
    };
    let (source_port, destination_port) = match protocol {
        TCP | UDP => (context.load(l4).ok()?, context.load(l4 + 2).ok()?),
        ICMP | ICMPV6 => {
            // The identifier is the socket's, in either direction.
            let identifier: u16 = context.load(l4 + 4).ok()?;
            (identifier, identifier)
        }
        _ => return None,
    };
    Some(Parsed { is_ipv4, l4, protocol, source, destination, source_port, destination_port })
}

/// `address` as it stands in memory.
#[inline(always)]
fn of_ipv4(address: u32) -> Words {
    [0, u64::from_ne_bytes([0, 0, 0xff, 0xff, 0, 0, 0, 0]) | u64::from(address) << 32]
}

/// Puts another address into a packet, at `offset`, and its checksums right.
#[inline(always)]
fn put(context: &TcContext, parsed: &Parsed, offset: usize, old: Words, new: Words) -> Option<()> {
    let (mut from, mut to) = (old, new);
    // What is the same in both does not count.
    // SAFETY: both are 16 bytes.
    let difference = unsafe { bpf_csum_diff(from.as_mut_ptr().cast(), 16, to.as_mut_ptr().cast(), 16, 0) };
    let difference = u64::try_from(difference).ok()?;
    let pseudo = u64::from(BPF_F_PSEUDO_HDR);
    match parsed.protocol {
        TCP => context.l4_csum_replace(parsed.l4 + 16, 0, difference, pseudo).ok()?,
        UDP => {
            let flags = pseudo | u64::from(BPF_F_MARK_MANGLED_0);
            context.l4_csum_replace(parsed.l4 + 6, 0, difference, flags).ok()?;
        }
        ICMPV6 => context.l4_csum_replace(parsed.l4 + 2, 0, difference, pseudo).ok()?,
        _ => {}
    }
    if parsed.is_ipv4 {
        context.l3_csum_replace(L3 + 10, 0, difference, 0).ok()?;
        context.store(offset, &((new[1] >> 32) as u32), 0).ok()
    } else {
        context.store(offset, &new, 0).ok()
    }
}

/// Whose answers come from `address` and `service_port` to `own_port`.
#[inline(always)]
fn key(parsed: &Parsed, address: Words, service_port: u16, own_port: u16) -> [u64; 3] {
    let is_echo = matches!(parsed.protocol, ICMP | ICMPV6);
    let service_port = if is_echo { 0 } else { service_port };
    let ports = u64::from(service_port) | u64::from(own_port) << 16 | u64::from(parsed.protocol) << 32;
    [address[0], address[1], ports]
}

#[classifier]
fn probe_out(context: TcContext) -> i32 {
    // SAFETY: the kernel's context, which the verifier knows.
    let mark = unsafe { (*context.skb.skb).mark };
    if mark & 0xffff_0000 != PROBE_MARK {
        return NEXT;
    }
    // What can't be turned would be asked of another address than is meant.
    let Some(way) = WAYS.get(mark & 0xffff) else { return DROP };
    if way.forward == forward::NAT {
        return DROP;
    }
    turn_out(&context, way).map_or(DROP, |()| NEXT)
}

#[inline(always)]
fn turn_out(context: &TcContext, way: &ProbeWay) -> Option<()> {
    let parsed = parse(context)?;
    let [service, source]: [Words; 2] = [way.service, way.source];
    let key = key(&parsed, service, parsed.destination_port, parsed.source_port);
    ASKED.insert(key, parsed.destination, 0).ok()?;
    let offset = L3 + if parsed.is_ipv4 { 16 } else { 24 };
    put(context, &parsed, offset, parsed.destination, service)?;
    if way.forward == forward::DSR {
        return Some(());
    }
    let is_gue = way.forward == forward::GUE;
    let (udp, udp_flag): (u16, u64) = if is_gue { (8, ENCAP_UDP) } else { (0, 0) };
    let protocol = match (is_gue, parsed.is_ipv4) {
        (true, _) => UDP,
        (false, true) => IPV4_WITHIN,
        (false, false) => IPV6_WITHIN,
    };
    // All that is within, and the header of GUE.
    let payload = if parsed.is_ipv4 {
        u16::from_be(context.load(L3 + 2).ok()?)
    } else {
        u16::from_be(context.load(L3 + 4).ok()?).wrapping_add(IPV6_LENGTH as u16)
    }
    .wrapping_add(udp);
    let l4 = if parsed.is_ipv4 {
        context.adjust_room(IPV4_LENGTH as i32 + i32::from(udp), ROOM_MAC, ENCAP_IPV4 | udp_flag).ok()?;
        let [l0, l1] = payload.wrapping_add(IPV4_LENGTH as u16).to_be_bytes();
        let mut outer = [
            u32::from_ne_bytes([0x45, 0, l0, l1]),
            0,
            u32::from_ne_bytes([TTL, protocol, 0, 0]),
            (source[1] >> 32) as u32,
            (parsed.destination[1] >> 32) as u32,
        ];
        // The sum of its halves, in whatever order their bytes are (RFC 1071).
        let mut sum = 0;
        for word in outer {
            sum += (word & 0xffff) + (word >> 16);
        }
        sum = (sum & 0xffff) + (sum >> 16);
        sum = (sum & 0xffff) + (sum >> 16);
        outer[2] |= (!sum & 0xffff) << 16;
        context.store(L3, &outer, 0).ok()?;
        L3 + IPV4_LENGTH
    } else {
        context.adjust_room(IPV6_LENGTH as i32 + i32::from(udp), ROOM_MAC, ENCAP_IPV6 | udp_flag).ok()?;
        let [l0, l1] = payload.to_be_bytes();
        let outer = [u32::from_ne_bytes([0x60, 0, 0, 0]), u32::from_ne_bytes([l0, l1, protocol, TTL])];
        context.store(L3, &outer, 0).ok()?;
        context.store(L3 + 8, &source, 0).ok()?;
        context.store(L3 + 24, &parsed.destination, 0).ok()?;
        L3 + IPV6_LENGTH
    };
    if is_gue {
        let ports = u32::from(parsed.source_port | FIRST_PORT.to_be()) | u32::from(way.gue_port) << 16;
        // No checksum: what is within has its own.
        context.store(l4, &[ports, u32::from(payload.to_be())], 0).ok()?;
    }
    Some(())
}

#[classifier]
fn probe_in(context: TcContext) -> i32 {
    if let Some(parsed) = parse(&context) {
        let key = key(&parsed, parsed.source, parsed.source_port, parsed.destination_port);
        // SAFETY: a value that only changes to what it is already.
        if let Some(backend) = unsafe { ASKED.get(key) } {
            let offset = L3 + if parsed.is_ipv4 { 12 } else { 8 };
            let _ = put(&context, &parsed, offset, parsed.source, *backend);
        }
    }
    NEXT
}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
