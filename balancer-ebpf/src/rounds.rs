//! Loops that stay loops.

/// So many rounds, numbered from 0, of a number that the compiler does not know: it would unroll the loop, which costs stack and the
/// verifier's patience. The verifier knows the number.
#[derive(Clone, Copy)]
pub struct Rounds {
    next: usize,
    end: usize,
}

impl Rounds {
    /// So many.
    #[inline(always)]
    pub const fn new(count: usize) -> Rounds {
        Rounds { next: 0, end: count }
    }
}

impl Iterator for Rounds {
    type Item = usize;

    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        let round = self.next;
        if round >= self.end {
            return None;
        }
        self.next = hidden(round + 1);
        Some(round)
    }
}

#[cfg(target_arch = "bpf")]
#[inline(always)]
fn hidden(mut value: usize) -> usize {
    // SAFETY: it copies a register to itself. (With no instruction at all, the line numbers are refused.)
    unsafe { core::arch::asm!("{0} = {0}", inout(reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

#[cfg(not(target_arch = "bpf"))]
#[inline(always)]
fn hidden(value: usize) -> usize {
    value
}
