//! Incremental Internet checksums (RFC 1624, equation 3): HC' = ~(~HC + Σ(~m + m')).
//!
//! A one's-complement sum does not care about byte order as long as all words are read alike (RFC 1071,
//! section 2B), so words are taken as they lie in memory and nothing is swapped. What a rewrite of the same
//! fields adds is the same for every packet of a flow: it is computed once, as a delta of 16 bits.

use balancer_common::Address;

/// The sum that replacing words adds to a checksum, not yet folded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delta(u64);

impl Delta {
    /// Lowering the TTL by one changes the word (TTL, protocol) by 0x0100.
    pub const TTL: Delta = Delta(u16::from_ne_bytes([0xfe, 0xff]) as u64);

    /// `self` and the change of a 16-bit word.
    #[inline(always)]
    pub const fn word(self, old: [u8; 2], new: [u8; 2]) -> Delta {
        Delta(self.0 + !u16::from_ne_bytes(old) as u64 + u16::from_ne_bytes(new) as u64)
    }

    /// `self` and the change of an address. What IPv4 addresses have in common here adds nothing.
    #[inline(always)]
    pub fn address(self, old: &Address, new: &Address) -> Delta {
        let ([a, b], [c, d]): ([u64; 2], [u64; 2]) = (bytemuck::cast(*old), bytemuck::cast(*new));
        Delta(self.0 + halves(!a) + halves(!b) + halves(c) + halves(d))
    }

    /// Both changes.
    #[inline(always)]
    pub const fn and(self, other: Delta) -> Delta {
        Delta(self.0 + other.0)
    }

    /// The delta as 16 bits: what [`update`] takes.
    #[inline(always)]
    pub const fn fold(self) -> u16 {
        fold(self.0)
    }
}

/// The sum of the 32-bit words of a 64-bit one.
#[inline(always)]
const fn halves(word: u64) -> u64 {
    (word & 0xffff_ffff) + (word >> 32)
}

/// The checksum after a change of `delta`.
#[inline(always)]
pub const fn update(checksum: [u8; 2], delta: u16) -> [u8; 2] {
    (!fold(!u16::from_ne_bytes(checksum) as u64 + delta as u64)).to_ne_bytes()
}

/// A sum over whole words, for a checksum made from nothing.
#[derive(Clone, Copy, Default)]
pub struct Sum(u64);

impl Sum {
    /// `self` and `bytes`, of which there must be an even number.
    #[inline(always)]
    pub fn and<const N: usize>(self, bytes: [u8; N]) -> Sum {
        let mut sum = self.0;
        let mut index = 0;
        while index + 1 < N {
            sum += u64::from(u16::from_ne_bytes([bytes[index], bytes[index + 1]]));
            index += 2;
        }
        Sum(sum)
    }

    /// The checksum (RFC 1071).
    #[inline(always)]
    pub const fn checksum(self) -> [u8; 2] {
        (!fold(self.0)).to_ne_bytes()
    }
}

/// Adds the carries back in until 16 bits are left.
#[inline(always)]
const fn fold(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + ((sum >> 16) & 0xffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    sum as u16
}
