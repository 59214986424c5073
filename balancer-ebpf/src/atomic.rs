//! The atomic operations that the data plane needs, on memory that other CPUs and user space share.
//!
//! `core::sync::atomic` lacks them on the bpf target, so they are single instructions there (kernel 5.12, cpu
//! v3).

#[cfg(target_arch = "bpf")]
mod imp {
    use core::arch::asm;

    pub unsafe fn fetch_add(place: *mut u64, addend: u64) -> u64 {
        let mut before = addend;
        // SAFETY: the caller vouches for `place`; the instruction touches nothing else.
        unsafe {
            asm!(
                "{0} = atomic_fetch_add((u64 *)({1} + 0), {0})",
                inout(reg) before,
                in(reg) place,
            );
        }
        before
    }

    pub unsafe fn set_bits(place: *mut u64, bits: u64) {
        // SAFETY: the caller vouches for `place`; the instruction touches nothing else.
        unsafe { asm!("lock *(u64 *)({0} + 0) |= {1}", in(reg) place, in(reg) bits) };
    }

    pub unsafe fn clear_bits(place: *mut u64, bits: u64) {
        // SAFETY: as above.
        unsafe { asm!("lock *(u64 *)({0} + 0) &= {1}", in(reg) place, in(reg) !bits) };
    }

    pub unsafe fn compare_exchange(place: *mut u32, expected: u32, new: u32) -> u32 {
        let before: u32;
        // SAFETY: the caller vouches for `place`; the instruction touches nothing else but w0.
        unsafe {
            asm!(
                "w0 = cmpxchg32_32({place} + 0, w0, {new})",
                place = in(reg) place,
                new = in(wreg) new,
                inout("w0") expected => before,
            );
        }
        before
    }
}

#[cfg(not(target_arch = "bpf"))]
mod imp {
    use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    pub unsafe fn fetch_add(place: *mut u64, addend: u64) -> u64 {
        // SAFETY: the caller vouches for `place`.
        unsafe { AtomicU64::from_ptr(place) }.fetch_add(addend, Ordering::SeqCst)
    }

    pub unsafe fn set_bits(place: *mut u64, bits: u64) {
        // SAFETY: the caller vouches for `place`.
        unsafe { AtomicU64::from_ptr(place) }.fetch_or(bits, Ordering::SeqCst);
    }

    pub unsafe fn clear_bits(place: *mut u64, bits: u64) {
        // SAFETY: the caller vouches for `place`.
        unsafe { AtomicU64::from_ptr(place) }.fetch_and(!bits, Ordering::SeqCst);
    }

    pub unsafe fn compare_exchange(place: *mut u32, expected: u32, new: u32) -> u32 {
        // SAFETY: the caller vouches for `place`.
        match unsafe { AtomicU32::from_ptr(place) }.compare_exchange(
            expected,
            new,
            Ordering::SeqCst,
            Ordering::SeqCst,
        ) {
            Ok(before) | Err(before) => before,
        }
    }
}

/// Adds `addend` to `*place`, wrapping; returns the value before.
///
/// # Safety
/// `place` is aligned and valid for reads and writes, and others change it only atomically.
#[inline(always)]
pub unsafe fn fetch_add(place: *mut u64, addend: u64) -> u64 {
    // SAFETY: the same contract.
    unsafe { imp::fetch_add(place, addend) }
}

/// Sets `bits` in `*place`.
///
/// # Safety
/// As [`fetch_add`].
#[inline(always)]
pub unsafe fn set_bits(place: *mut u64, bits: u64) {
    // SAFETY: the same contract.
    unsafe { imp::set_bits(place, bits) }
}

/// Clears `bits` in `*place`.
///
/// # Safety
/// As [`fetch_add`].
#[inline(always)]
pub unsafe fn clear_bits(place: *mut u64, bits: u64) {
    // SAFETY: the same contract.
    unsafe { imp::clear_bits(place, bits) }
}

/// Writes `new` to `*place` if it holds `expected`; returns the value before, which is `expected` exactly when
/// `new` was written.
///
/// # Safety
/// As [`fetch_add`].
#[inline(always)]
pub unsafe fn compare_exchange(place: *mut u32, expected: u32, new: u32) -> u32 {
    // SAFETY: the same contract.
    unsafe { imp::compare_exchange(place, expected, new) }
}
