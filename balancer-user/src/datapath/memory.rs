//! Array maps whose memory is mapped: read and written without a system call.

use std::{
    io,
    ops::Range,
    os::fd::{AsRawFd, BorrowedFd},
    sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering},
};

use balancer_common::{BackendId, FlowEntry, NO_TWIN, NextHop, RING_SLOTS, Ring};
use bytemuck::Pod;
use memmap2::{MmapOptions, MmapRaw};

/// The memory of an array map of `T`, shared with the program: every access is atomic, word by word.
pub struct SharedArray<T> {
    memory: MmapRaw,
    length: usize,
    _values: std::marker::PhantomData<T>,
}

impl<T: Pod> SharedArray<T> {
    /// Maps `length` values of the array map behind `map`, which must have been made with BPF_F_MMAPABLE
    /// (Linux 5.5).
    pub fn map(map: BorrowedFd<'_>, length: usize) -> io::Result<SharedArray<T>> {
        let memory = MmapOptions::new().len(length * size_of::<T>()).map_raw(map.as_raw_fd())?;
        Ok(SharedArray { memory, length, _values: std::marker::PhantomData })
    }

    /// How many values there are.
    pub fn len(&self) -> usize {
        self.length
    }

    /// The `width` bytes at `offset` of value `index`, as a pointer that is valid as long as `self` is.
    fn place(&self, index: usize, bytes: Range<usize>) -> *mut u8 {
        assert!(index < self.length && bytes.end <= size_of::<T>(), "within the mapped array");
        // SAFETY: the assertion keeps it within the mapping.
        unsafe { self.memory.as_mut_ptr().add(index * size_of::<T>() + bytes.start) }
    }

    fn half_word_at(&self, index: usize, offset: usize) -> &AtomicU16 {
        // SAFETY: `place` is within the mapping, page-aligned plus multiples of two; the program accesses it only whole.
        unsafe { AtomicU16::from_ptr(self.place(index, offset..offset + 2).cast()) }
    }

    fn word32_at(&self, index: usize, offset: usize) -> &AtomicU32 {
        // SAFETY: as above, multiples of four.
        unsafe { AtomicU32::from_ptr(self.place(index, offset..offset + 4).cast()) }
    }

    fn word64_at(&self, index: usize, offset: usize) -> &AtomicU64 {
        // SAFETY: as above, multiples of eight.
        unsafe { AtomicU64::from_ptr(self.place(index, offset..offset + 8).cast()) }
    }
}

impl SharedArray<u64> {
    /// The word with this index.
    pub fn word(&self, index: usize) -> &AtomicU64 {
        self.word64_at(index, 0)
    }

    /// Clears the tag byte of a way in a word of flow tags.
    pub fn clear_tag(&self, index: usize, way: usize) {
        // SAFETY: the byte is within the mapping.
        unsafe { std::ptr::write_volatile(self.place(index, way..way + 1), 0) };
    }

    /// Takes the protection from a way in a word of flow tags.
    pub fn unprotect(&self, index: usize, way: usize) {
        self.word(index).fetch_and(!(0x80 << (way * 8)), Ordering::AcqRel);
    }
}

impl SharedArray<NextHop> {
    /// Stores a next hop word by word; the word that allows its use (with the MTU) goes last.
    pub fn store_words(&self, index: usize, hop: &NextHop) {
        let [neighbour, source, interface]: [u64; 3] = bytemuck::cast(*hop);
        self.word64_at(index, 16).store(interface, Ordering::Release);
        self.word64_at(index, 0).store(neighbour, Ordering::Release);
        self.word64_at(index, 8).store(source, Ordering::Release);
    }
}

impl SharedArray<Ring> {
    /// Stores the slots of a half, which must not be in use.
    pub fn store_half(&self, index: usize, half: usize, slots: &[BackendId]) {
        let start = half * RING_SLOTS * size_of::<BackendId>();
        for (slot, backend) in slots.iter().take(RING_SLOTS).enumerate() {
            self.half_word_at(index, start + slot * size_of::<BackendId>())
                .store(*backend, Ordering::Relaxed);
        }
    }
}

impl SharedArray<Ring> {
    /// The first `length` slots of a half.
    pub fn load_half(&self, index: usize, half: usize, length: usize) -> Vec<BackendId> {
        let start = half * RING_SLOTS * size_of::<BackendId>();
        let slot =
            |slot| self.half_word_at(index, start + slot * size_of::<BackendId>()).load(Ordering::Relaxed);
        (0..length.min(RING_SLOTS)).map(slot).collect()
    }
}

impl SharedArray<FlowEntry> {
    /// The control word of an entry.
    pub fn control(&self, index: usize) -> &AtomicU32 {
        self.word32_at(index, std::mem::offset_of!(FlowEntry, control))
    }

    /// Makes a claimed entry one without a twin that has expired with the stamp `end`.
    pub fn expire(&self, index: usize, end: u32) {
        use std::mem::offset_of;
        self.word32_at(index, offset_of!(FlowEntry, twin)).store(NO_TWIN, Ordering::Relaxed);
        self.half_word_at(index, offset_of!(FlowEntry, timeout)).store(0, Ordering::Relaxed);
        self.word32_at(index, offset_of!(FlowEntry, stamp)).store(end, Ordering::Relaxed);
    }

    /// A copy of an entry. It is one flow's only if the control word's sequence is the same before and after.
    pub fn snapshot(&self, index: usize) -> FlowEntry {
        let mut words = [0u64; size_of::<FlowEntry>() / 8];
        for (number, word) in words.iter_mut().enumerate() {
            *word = self.word64_at(index, number * 8).load(Ordering::Acquire);
        }
        bytemuck::cast(words)
    }
}
