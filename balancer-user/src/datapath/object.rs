//! What aya does not offer. Detaching a pinned link at once: removing the pin alone detaches later than that on kernels
//! before 6.10, and not at all while another process has the link open. And pinning what is pinned a second time.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_OBJ_GET: libc::c_int = 7;
const BPF_LINK_DETACH: libc::c_int = 34;

/// `union bpf_attr` for BPF_OBJ_PIN and BPF_OBJ_GET, up to the last field that is used.
#[repr(C)]
struct Object {
    path: u64,
    descriptor: u32,
    flags: u32,
}

/// `union bpf_attr` for BPF_LINK_DETACH.
#[repr(C)]
struct LinkDetach {
    link: u32,
}

/// What is pinned at `pin`: a map or a link.
pub(super) fn open(pin: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let get = Object { path: path.as_ptr() as u64, descriptor: 0, flags: 0 };
    // SAFETY: the kernel reads `get`, and through it the C string `path`, which outlives the call.
    let object = unsafe { bpf(BPF_OBJ_GET, &get) }?;
    // SAFETY: the call has just returned it to us and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(object) })
}

/// Pins a map or a link, whether it is pinned elsewhere or not.
pub(super) fn pin(object: BorrowedFd<'_>, pin: &Path) -> io::Result<()> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let descriptor = object.as_raw_fd().unsigned_abs();
    let put = Object { path: path.as_ptr() as u64, descriptor, flags: 0 };
    // SAFETY: the kernel reads `put`, and through it the C string `path`, which outlives the call.
    unsafe { bpf(BPF_OBJ_PIN, &put) }.map(drop)
}

/// Takes the program behind the link pinned at `pin` off its interface (Linux 5.9). The pin stays.
pub(super) fn detach(pin: &Path) -> io::Result<()> {
    let link = open(pin)?;
    let detach = LinkDetach { link: link.as_raw_fd().unsigned_abs() };
    // SAFETY: `LinkDetach` holds no pointers.
    unsafe { bpf(BPF_LINK_DETACH, &detach) }.map(drop)
}

/// A bpf(2) command.
///
/// # Safety
///
/// `attributes` must be a prefix of the `union bpf_attr` that `command` reads, and the pointers in it must be valid for
/// the call.
unsafe fn bpf<T>(command: libc::c_int, attributes: &T) -> io::Result<libc::c_int> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes from `attributes`; the caller answers for what they point to.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attributes, size_of::<T>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    libc::c_int::try_from(result).map_err(io::Error::other)
}
