//! The smallest XDP program there is: it passes every frame.
//!
//! A veth device takes frames that were sent by `XDP_TX` or a redirect on its peer only while it has an XDP program of
//! its own. Two instructions, loaded by system call: no compiler takes part.

use std::{
    io,
    mem::size_of,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

use anyhow::{Context as _, Result};

use crate::Netns;

const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;
/// The program takes frames of several buffers (kernel 5.18): needed for a large MTU.
const BPF_F_XDP_HAS_FRAGS: u32 = 1 << 5;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

/// `r0 = XDP_PASS; exit`, in the kernel's instruction encoding.
const PASS: [u64; 2] = [0x0000_0002_0000_00b7, 0x0000_0000_0000_0095];

/// `union bpf_attr` for BPF_PROG_LOAD, up to the last field that is used.
#[repr(C)]
struct Load {
    program_type: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
}

/// `union bpf_attr` for BPF_LINK_CREATE, up to the last field that is used.
#[repr(C)]
struct LinkCreate {
    program: u32,
    device: u32,
    attach_type: u32,
    flags: u32,
}

/// A pass program on a device; dropping it takes the program off.
#[derive(Debug)]
pub struct PassProgram {
    _link: OwnedFd,
}

impl PassProgram {
    /// Attaches the program to `device` in native mode.
    pub fn attach(netns: &Netns, device: &str) -> Result<Self> {
        let index = netns.device_index(device)?;
        // A link's device is looked up in the namespace of the caller.
        let link = netns.run(|| create_link(&load()?, index).context("attach the pass program"));
        Ok(Self { _link: link.with_context(|| format!("on the device {device}"))? })
    }
}

fn load() -> Result<OwnedFd> {
    let load = Load {
        program_type: BPF_PROG_TYPE_XDP,
        instruction_count: 2,
        instructions: PASS.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel_version: 0,
        flags: BPF_F_XDP_HAS_FRAGS,
    };
    // SAFETY: the kernel reads `Load`, and through it PASS and the license, which are static.
    unsafe { bpf(BPF_PROG_LOAD, &load) }.context("load the pass program (needs root)")
}

fn create_link(program: &OwnedFd, device: u32) -> Result<OwnedFd> {
    let create = LinkCreate {
        program: program.as_raw_fd().unsigned_abs(),
        device,
        attach_type: BPF_XDP,
        flags: XDP_FLAGS_DRV_MODE,
    };
    // SAFETY: `LinkCreate` holds no pointers.
    unsafe { bpf(BPF_LINK_CREATE, &create) }.context("create the link")
}

/// A bpf(2) command that returns a descriptor.
///
/// # Safety
///
/// `attributes` must be a prefix of the `union bpf_attr` that `command` reads, and the pointers in it must be valid for
/// the call.
unsafe fn bpf<T>(command: libc::c_int, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes from `attributes`; the caller answers for what they point to.
    let descriptor = unsafe { libc::syscall(libc::SYS_bpf, command, attributes, size_of::<T>()) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    let descriptor = i32::try_from(descriptor).map_err(io::Error::other)?;
    // SAFETY: the call has just returned it to us and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}
