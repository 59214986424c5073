//! The programs that the benchmarks measure with.
#![no_std]
#![no_main]

use core::ptr;

use aya_ebpf::{
    bindings::xdp_action::{XDP_ABORTED, XDP_DROP, XDP_TX},
    helpers::bpf_xdp_adjust_head,
    macros::{map, xdp},
    maps::{Array, DevMap, PerCpuArray, ProgramArray},
    programs::XdpContext,
};
use balancer_common::mapped;
use balancer_ebpf::{
    checksum::{self, Delta},
    frame::Frame,
};
use balancer_harness::{HEAD, LONG, Packets, SHORT, WORDS, client_address, client_port, limit};

#[map]
static PACKETS: Array<Packets> = Array::with_max_entries(1, 0);
#[map]
static UNDER_TEST: ProgramArray = ProgramArray::with_max_entries(1, 0);
#[map]
static OUT: DevMap = DevMap::with_max_entries(1, 0);
#[map]
static SEEN: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

/// Writes the next packet over the last one, whatever has become of that, and has it processed.
#[xdp(frags)]
fn harness(context: XdpContext) -> u32 {
    if make(&context).is_some() {
        // SAFETY: nothing here needs to be dropped.
        unsafe { UNDER_TEST.tail_call(&context, 0) };
    }
    XDP_ABORTED
}

#[inline(always)]
fn make(context: &XdpContext) -> Option<()> {
    let packets = PACKETS.get_ptr_mut(0)?;
    // SAFETY: array elements are valid and aligned; one test runs at a time.
    let packets = unsafe { &mut *packets };
    packets.state = packets.state.wrapping_mul(packets.multiplier).wrapping_add(packets.increment);
    let flow = packets.first + ((packets.state >> 32) as u32 & packets.mask);

    let (mut start, mut end) = Frame(context).bounds();
    let excess = (end - start) as i32 - packets.length as i32;
    if excess != 0 {
        // SAFETY: the context is the one that the program was called with (kernel 4.10).
        if unsafe { bpf_xdp_adjust_head(context.ctx, excess) } != 0 {
            return None;
        }
        (start, end) = Frame(context).bounds();
    }
    write(start, end, 0, packets.head as u32)?;
    write(start, end, 4, (packets.head >> 32) as u16)?;
    for word in 0..SHORT {
        write(start, end, HEAD + word * 8, packets.words[word])?;
    }
    if packets.length >= (HEAD + LONG * 8) as u64 {
        for word in SHORT..LONG {
            write(start, end, HEAD + word * 8, packets.words[word])?;
        }
    }
    let address = u64::from(u32::from_ne_bytes(client_address(flow)));
    let port = u64::from(client_port(flow).to_be());
    for patch in &packets.patches {
        let word = (patch.word as usize) & (WORDS - 1);
        let value = packets.words[word]
            .wrapping_add(address.wrapping_mul(patch.address))
            .wrapping_add(port.wrapping_mul(patch.port));
        write(start, end, HEAD + word * 8, value)?;
    }
    Some(())
}

/// Writes the next packet, and sends it.
#[xdp(frags)]
fn generator(context: XdpContext) -> u32 {
    match make(&context) {
        Some(()) => OUT.redirect(0, 0).unwrap_or(XDP_ABORTED),
        None => XDP_ABORTED,
    }
}

#[xdp(frags)]
fn sink(_: XdpContext) -> u32 {
    if let Some(seen) = SEEN.get_ptr_mut(0) {
        // SAFETY: valid, aligned, and this CPU's own.
        unsafe { *seen += 1 };
    }
    XDP_DROP
}

#[xdp(frags)]
fn floor(_: XdpContext) -> u32 {
    XDP_TX
}

#[xdp(frags)]
fn limit(context: XdpContext) -> u32 {
    if rewrite(&context).is_some() { XDP_TX } else { XDP_ABORTED }
}

#[inline(always)]
fn rewrite(context: &XdpContext) -> Option<()> {
    const IP: usize = 14;
    const TCP: usize = IP + 20;
    let (start, end) = Frame(context).bounds();
    // Constants, once compiled.
    let address = Delta::default().address(&mapped(limit::FROM.0), &mapped(limit::TO.0));
    let port = address.word(limit::FROM.1.to_be_bytes(), limit::TO.1.to_be_bytes());
    let ttl: u8 = read(start, end, IP + 8)?;
    let ip_sum: [u8; 2] = read(start, end, IP + 10)?;
    let tcp_sum: [u8; 2] = read(start, end, TCP + 16)?;
    write(start, end, 0, limit::NEIGHBOUR)?;
    write(start, end, 6, limit::SOURCE)?;
    write(start, end, IP + 8, ttl - 1)?;
    write(start, end, IP + 10, checksum::update(ip_sum, address.and(Delta::TTL).fold()))?;
    write(start, end, IP + 16, limit::TO.0)?;
    write(start, end, TCP + 2, limit::TO.1.to_be_bytes())?;
    write(start, end, TCP + 16, checksum::update(tcp_sum, port.fold()))
}

#[inline(always)]
fn write<T>(start: usize, end: usize, offset: usize, value: T) -> Option<()> {
    let place = start + offset;
    if place + size_of::<T>() > end {
        return None;
    }
    // SAFETY: within the frame, as was just checked.
    unsafe { ptr::write_unaligned(place as *mut T, value) };
    Some(())
}

#[inline(always)]
fn read<T>(start: usize, end: usize, offset: usize) -> Option<T> {
    let place = start + offset;
    if place + size_of::<T>() > end {
        return None;
    }
    // SAFETY: within the frame, as was just checked; used for bytes alone, of which any are valid.
    Some(unsafe { ptr::read_unaligned(place as *const T) })
}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
