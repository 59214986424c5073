use bytemuck::{Pod, Zeroable};

use crate::BackendId;

/// Slots in each half of a selection ring.
pub const RING_SLOTS: usize = 4096;
/// Halves of a ring: one is in use while the controller writes the other.
pub const HALVES: usize = 2;

/// The selection ring of one service: each slot names the backend of one future flow.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct Ring {
    /// The two halves; `RingWord` says which one is in use and how long it is.
    pub halves: [[BackendId; RING_SLOTS]; HALVES],
}

const _: () = assert!(size_of::<Ring>() == 16_384);

/// The 64-bit word that steers a ring, so that neither side ever sees half a change.
///
/// Bit 0 is the half in use, bits 1 to 13 its length (0 = no backend may take a flow), bits 16 to 63 the
/// cursor: how many flows have taken a slot since the half was switched in. The program takes a slot by
/// fetch-and-add of `TAKE`, whose overflow falls off the top; the controller switches by exchange, and so
/// learns how many of the old half's slots were really taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct RingWord(pub u64);

impl RingWord {
    /// What a new flow adds to the word.
    pub const TAKE: u64 = 1 << 16;
    const LENGTH_MASK: u64 = 0x1fff;

    /// A word that starts `half` (0 or 1) at its first slot, with `length` slots (at most `RING_SLOTS`).
    pub const fn new(half: usize, length: usize) -> RingWord {
        RingWord((half as u64 & 1) | ((length as u64 & Self::LENGTH_MASK) << 1))
    }

    /// The half in use: 0 or 1.
    pub const fn half(self) -> usize {
        (self.0 & 1) as usize
    }

    /// How many slots of the half are in use; past the last one, the cursor goes round.
    pub const fn length(self) -> usize {
        ((self.0 >> 1) & Self::LENGTH_MASK) as usize
    }

    /// How many slots have been taken from the half in use.
    pub const fn taken(self) -> u64 {
        self.0 >> 16
    }

    /// The slot that the flow takes which saw this word before its fetch-and-add; `None` when the ring is empty.
    pub const fn slot(self) -> Option<usize> {
        match self.length() as u64 {
            0 => None,
            length => Some((self.taken() % length) as usize),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_keeps_half_length_and_cursor_apart() {
        let mut word = RingWord::new(1, RING_SLOTS);
        assert_eq!((word.half(), word.length(), word.taken(), word.slot()), (1, RING_SLOTS, 0, Some(0)));
        word.0 = word.0.wrapping_add(RingWord::TAKE * (RING_SLOTS as u64 + 5));
        assert_eq!((word.half(), word.length(), word.taken(), word.slot()), (1, RING_SLOTS, 4101, Some(5)));
    }

    #[test]
    fn a_cursor_that_overflows_leaves_half_and_length_alone() {
        let last = RingWord(RingWord::new(1, 3).0 | (u64::MAX << 16));
        let next = RingWord(last.0.wrapping_add(RingWord::TAKE));
        assert_eq!((next.half(), next.length(), next.taken()), (1, 3, 0));
    }

    #[test]
    fn an_empty_ring_has_no_slot() {
        assert_eq!(RingWord::new(0, 0).slot(), None);
    }
}
