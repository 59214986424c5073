//! The frame that an XDP program is called for.

use aya_ebpf::{
    EbpfContext as _,
    helpers::{bpf_xdp_adjust_head, bpf_xdp_adjust_tail, bpf_xdp_get_buff_len},
    programs::XdpContext,
};

use crate::{Packet, packet::Wire};

/// The frame that a program was called for.
pub struct Frame<'a>(pub &'a XdpContext);

impl Frame<'_> {
    /// Where the first buffer starts, and where it ends.
    ///
    /// Loaded by hand: what the compiler knows to be 32 bits wide it may extend by shifts, which the verifier refuses
    /// to see done to a packet pointer, in one build and not in another.
    #[inline(always)]
    pub fn bounds(&self) -> (usize, usize) {
        let context = self.0.as_ptr();
        let (start, end): (usize, usize);
        // SAFETY: the two words are `data` and `data_end` of the context that the program was called with.
        #[cfg(target_arch = "bpf")]
        unsafe {
            core::arch::asm!(
                "{start} = *(u32 *)({context} + 0)",
                "{end} = *(u32 *)({context} + 4)",
                context = in(reg) context,
                start = out(reg) start,
                end = out(reg) end,
                options(readonly, nostack),
            );
        }
        #[cfg(not(target_arch = "bpf"))]
        {
            _ = context;
            (start, end) = (self.0.data(), self.0.data_end());
        }
        (start, end)
    }
}

impl Packet for Frame<'_> {
    #[inline(always)]
    fn at<T: Wire>(&self, offset: usize) -> Option<*mut T> {
        let (start, end) = self.bounds();
        let place = start + offset;
        (place + size_of::<T>() <= end).then_some(place as *mut T)
    }

    #[inline(always)]
    fn shift(&self, bytes: i32) -> bool {
        // SAFETY: the context is the one that the program was called with (kernel 4.10).
        unsafe { bpf_xdp_adjust_head(self.0.as_ptr().cast(), bytes) == 0 }
    }

    #[inline(always)]
    fn cut(&self, length: usize) -> bool {
        let context = self.0.as_ptr().cast();
        // SAFETY: the context is the one that the program was called with (kernels 5.18, 4.18).
        unsafe {
            let now = bpf_xdp_get_buff_len(context) as i32;
            bpf_xdp_adjust_tail(context, length as i32 - now) == 0
        }
    }

    #[inline(always)]
    fn has(&self, length: usize) -> bool {
        let (start, end) = self.bounds();
        if start + bounded::<MOST>(length) <= end {
            return true;
        }
        // More than the first buffer: only then is it worth a call (kernel 5.18).
        // SAFETY: the context is the one that the program was called with.
        let whole = unsafe { bpf_xdp_get_buff_len(self.0.as_ptr().cast()) };
        length as u64 <= whole
    }
}

/// A number that is no more than `MOST`, all ones. Before Linux 6.6 the verifier forgets the bounds of a number whose bytes
/// were swapped, and LLVM, which does not, would take a plain mask away.
#[cfg(target_arch = "bpf")]
#[inline(always)]
pub fn bounded<const MOST: usize>(mut length: usize) -> usize {
    // SAFETY: it changes a register alone.
    unsafe {
        core::arch::asm!("{0} &= {1}", inout(reg) length, const MOST, options(nomem, nostack, preserves_flags));
    }
    length
}

/// More than 64 KiB, and tags.
const MOST: usize = (1 << 17) - 1;

/// The same for tests, which have no verifier.
#[cfg(not(target_arch = "bpf"))]
pub const fn bounded<const MOST: usize>(length: usize) -> usize {
    length
}
