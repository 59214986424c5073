//! The XDP program of a backend that unwraps what the balancer has wrapped for it.
#![no_std]
#![no_main]

use core::ptr;

use aya_ebpf::{
    bindings::xdp_action::{XDP_DROP, XDP_PASS},
    macros::{map, xdp},
    maps::{HashMap, LpmTrie, PerCpuArray, lpm_trie::Key},
    programs::XdpContext,
};
use balancer_common::{Address, MOST_OWN, MOST_TRUSTED, Tunnelled};
use balancer_ebpf::{
    frame::Frame,
    unwrap::{Receiver, unwrap},
};

#[map]
static OWN: HashMap<Address, u32> = HashMap::with_max_entries(MOST_OWN, 0);
#[map]
static TRUSTED: LpmTrie<Address, u32> = LpmTrie::with_max_entries(MOST_TRUSTED, 1);
#[map]
static UNWRAPPED: PerCpuArray<u64> = PerCpuArray::with_max_entries(Tunnelled::ALL.len() as u32, 0);

/// The UDP port of GUE, network order.
#[unsafe(no_mangle)]
static GUE_PORT: [u8; 2] = [0; 2];

/// What the controller says of this host.
struct Maps;

impl Receiver for Maps {
    #[inline(always)]
    fn is_own(&self, address: &Address) -> bool {
        OWN.get_ptr(address).is_some()
    }

    #[inline(always)]
    fn is_trusted(&self, address: &Address) -> bool {
        TRUSTED.get(Key::new(128, *address)).is_some()
    }

    #[inline(always)]
    fn gue_port(&self) -> [u8; 2] {
        // SAFETY: a static; volatile, since it is set before the program is loaded.
        unsafe { ptr::read_volatile(&raw const GUE_PORT) }
    }
}

#[xdp(frags)]
fn decap(context: XdpContext) -> u32 {
    let Some(what) = unwrap(&Frame(&context), &Maps) else { return XDP_PASS };
    if let Some(count) = UNWRAPPED.get_ptr_mut(what as u32) {
        // SAFETY: valid, aligned, and this CPU's own.
        unsafe { *count = (*count).wrapping_add(1) };
    }
    match what {
        Tunnelled::Ipip | Tunnelled::Gue => XDP_PASS,
        Tunnelled::Malformed | Tunnelled::Untrusted => XDP_DROP,
    }
}

#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
