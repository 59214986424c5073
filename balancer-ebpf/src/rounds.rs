//! Loops that stay loops.

/// So many rounds, of a number that the compiler does not know: it would unroll the loop, which costs stack and the
/// verifier's patience. The verifier knows the number.
#[derive(Clone, Copy)]
pub struct Rounds(usize);

impl Rounds {
    /// So many.
    #[inline(always)]
    pub const fn new(count: usize) -> Rounds {
        Rounds(count)
    }
}

impl Iterator for Rounds {
    type Item = ();

    #[inline(always)]
    fn next(&mut self) -> Option<()> {
        if self.0 == 0 {
            return None;
        }
        self.0 = hidden(self.0 - 1);
        Some(())
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
