//! Per-CPU arrays read in one system call.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _},
};

use aya::{maps::MapData, util::nr_cpus};
use aya_obj::generated::{bpf_attr, bpf_attr__bindgen_ty_3, bpf_cmd};
use bytemuck::Pod;

/// A `BPF_MAP_TYPE_PERCPU_ARRAY` of `T`, whose size must be a multiple of eight.
pub struct PerCpuArray<T> {
    map: MapData,
    cpus: usize,
    keys: Vec<u32>,
    values: Vec<T>,
}

impl<T: Pod> PerCpuArray<T> {
    /// Wraps a map of `length` values.
    pub fn new(map: MapData, length: u32) -> io::Result<PerCpuArray<T>> {
        const { assert!(size_of::<T>().is_multiple_of(8)) };
        let cpus =
            nr_cpus().map_err(|(path, error)| io::Error::new(error.kind(), format!("{path}: {error}")))?;
        let length = length as usize;
        Ok(PerCpuArray { map, cpus, keys: vec![0; length], values: vec![T::zeroed(); length * cpus] })
    }

    /// How many values there are for each index: one per possible CPU.
    pub fn cpus(&self) -> usize {
        self.cpus
    }

    /// Reads the first `length` indices, each with one value per CPU (Linux 5.13).
    pub fn read(&mut self, length: usize) -> io::Result<&[T]> {
        let length = length.min(self.keys.len());
        if length == 0 {
            return Ok(&[]);
        }
        let mut cursor = 0u32;
        // SAFETY: all members are integers, for which zero is valid.
        let mut attr: bpf_attr = unsafe { std::mem::zeroed() };
        attr.batch = bpf_attr__bindgen_ty_3 {
            in_batch: 0,
            out_batch: &raw mut cursor as u64,
            keys: self.keys.as_mut_ptr() as u64,
            values: self.values.as_mut_ptr() as u64,
            count: length as u32,
            map_fd: self.map.fd().as_fd().as_raw_fd() as u32,
            elem_flags: 0,
            flags: 0,
        };
        // SAFETY: the buffers have room for `length` keys and `length × cpus` values, as the kernel writes.
        let result = unsafe {
            libc::syscall(
                libc::SYS_bpf,
                bpf_cmd::BPF_MAP_LOOKUP_BATCH as libc::c_long,
                &raw mut attr,
                size_of::<bpf_attr>(),
            )
        };
        // SAFETY: the kernel wrote how many it has read.
        let count = unsafe { attr.batch.count } as usize;
        let error = io::Error::last_os_error();
        // ENOENT says that the end of the map was reached.
        if result != 0 && error.raw_os_error() != Some(libc::ENOENT) {
            return Err(error);
        }
        if count != length {
            return Err(io::Error::other(format!("the kernel gave {count} of {length} values")));
        }
        Ok(&self.values[..length * self.cpus])
    }
}
