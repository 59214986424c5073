//! Privileges that are given up once they have done their service (capabilities(7)).

use std::io;

use anyhow::{Context as _, Result};

const CAP_NET_ADMIN: u32 = 12;
const CAP_NET_RAW: u32 = 13;
const CAP_BPF: u32 = 39;

/// To write maps and ask for neighbours, and to attach the program to an interface that appears.
const OF_THE_CONTROLLER: u64 = 1 << CAP_NET_ADMIN | 1 << CAP_BPF;
/// For echo requests, and for the marks of checks that go through to backends (SO_MARK, Linux 5.17).
const OF_THE_PROBER: u64 = 1 << CAP_NET_RAW;

/// `_LINUX_CAPABILITY_VERSION_3`: two words of 32 bits for each set.
const VERSION: u32 = 0x2008_0522;

#[repr(C)]
struct Header {
    version: u32,
    /// 0 = this thread.
    process: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Sets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Leaves this thread, which steers, with what it still needs once the program is loaded and attached.
///
/// # Errors
///
/// When the kernel refuses.
pub fn keep_those_of_the_controller() -> Result<()> {
    keep(OF_THE_CONTROLLER).context("give up privileges")
}

/// Leaves this thread, which checks backends, with what it needs.
///
/// # Errors
///
/// When the kernel refuses.
pub fn keep_those_of_the_prober() -> Result<()> {
    keep(OF_THE_PROBER).context("give up privileges")
}

/// Leaves this thread, which talks to clients, with none.
///
/// # Errors
///
/// When the kernel refuses.
pub fn keep_none() -> Result<()> {
    keep(0).context("give up privileges")
}

/// Whether this thread may send and receive packets as they are on the wire, and mark them.
pub fn holds_net_raw() -> bool {
    read().is_ok_and(|(_, [low, _])| low.effective & (1 << CAP_NET_RAW) != 0)
}

fn read() -> io::Result<(Header, [Sets; 2])> {
    let mut header = Header { version: VERSION, process: 0 };
    let mut sets = [Sets::default(); 2];
    // SAFETY: the kernel reads the header and, for this version, writes two `Sets`.
    call(unsafe { libc::syscall(libc::SYS_capget, &raw mut header, sets.as_mut_ptr()) })?;
    Ok((header, sets))
}

/// Leaves this thread those of `wanted` that it has.
fn keep(wanted: u64) -> io::Result<()> {
    let (mut header, mut sets) = read()?;
    for (sets, wanted) in sets.iter_mut().zip([wanted as u32, (wanted >> 32) as u32]) {
        let kept = sets.permitted & wanted;
        *sets = Sets { effective: kept, permitted: kept, inheritable: sets.inheritable & wanted };
    }
    // SAFETY: the kernel reads the header and two `Sets`.
    call(unsafe { libc::syscall(libc::SYS_capset, &raw mut header, sets.as_ptr()) })
}

fn call(result: libc::c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::{fs, thread};

    use super::*;

    fn effective() -> u64 {
        let status = fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    }

    #[test]
    fn a_thread_keeps_what_it_wants_and_has() {
        thread::spawn(|| {
            let before = effective();
            keep(OF_THE_CONTROLLER).unwrap();
            assert_eq!(effective(), before & OF_THE_CONTROLLER);
            keep(0).unwrap();
            assert_eq!(effective(), 0);
            keep(OF_THE_CONTROLLER).unwrap();
            assert_eq!(effective(), 0, "what is gone does not come again");
        })
        .join()
        .unwrap();
    }
}
