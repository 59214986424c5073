//! Array maps whose memory is mapped: read and written without a system call.

use std::{
    io,
    ops::Range,
    os::fd::{AsRawFd, BorrowedFd},
    sync::atomic::{AtomicU16, AtomicU64, Ordering},
};

use balancer_common::{BackendId, NextHop, PortFilter, RING_SLOTS, Ring, Unresolved};
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

    /// The value with this index, valid and aligned as long as `self` is; `None` past the last one.
    pub fn pointer(&self, index: usize) -> Option<*mut T> {
        (index < self.length).then(|| self.place(index, 0..size_of::<T>()).cast())
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
}

impl SharedArray<Unresolved> {
    /// The words of the value with this index.
    pub fn words(&self, index: usize) -> [&AtomicU64; 3] {
        [0, 8, 16].map(|offset| self.word64_at(index, offset))
    }
}

impl SharedArray<PortFilter> {
    /// A word of the only value.
    pub fn word_of(&self, word: usize) -> &AtomicU64 {
        self.word64_at(0, word * size_of::<u64>())
    }
}

impl SharedArray<NextHop> {
    /// Stores a next hop word by word; the word that allows its use (with the MTU) goes last.
    pub fn store_words(&self, index: usize, hop: &NextHop) {
        let [neighbour, source, interface, tags]: [u64; 4] = bytemuck::cast(*hop);
        self.word64_at(index, 24).store(tags, Ordering::Release);
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

impl<T: Pod> SharedArray<T> {
    /// A copy of a value that is one cache line. It is one flow's only if the sequence in the control word of the flow's entry
    /// is the same before and after.
    pub fn snapshot(&self, index: usize) -> T {
        const { assert!(size_of::<T>() == 64 && align_of::<T>() == 64) };
        let place = self.place(index, 0..size_of::<T>()).cast::<[AtomicU64; 8]>();
        // SAFETY: within the mapping and page-aligned plus multiples of 64; every word of it is read whole.
        let words = unsafe { &*place };
        bytemuck::cast(words.each_ref().map(|word| word.load(Ordering::Acquire)))
    }
}
