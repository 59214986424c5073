//! One balancer for each pin path: the claim that keeps a second one from starting.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    fcntl::{Flock, FlockArg},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};

use crate::config::Daemon;

/// The lock that a running balancer holds; the kernel lets go of it when the process ends, however it ends.
pub struct Instance {
    _lock: Flock<File>,
}

impl Instance {
    /// Claims the pin path, which is made if it is missing; without pins, the socket's path.
    ///
    /// # Errors
    ///
    /// When another balancer holds it (with its process id), or the pin path is not on a BPF file system.
    pub fn claim(daemon: &Daemon) -> Result<Instance> {
        let (path, file) = match &daemon.pin_path {
            Some(pins) => (pins.clone(), open_pins(pins)?),
            None => open_socket_lock(&daemon.socket)?,
        };
        let inode = file.metadata().with_context(|| format!("look at {}", path.display()))?.ino();
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => Ok(Instance { _lock: lock }),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => {
                let holder =
                    holder(inode).map_or_else(|| "another process".to_owned(), |id| format!("process {id}"));
                bail!(
                    "another balancer is running: {holder} holds {}; stop it, or give this one a pin-path and a \
                     socket of its own",
                    path.display()
                )
            }
            Err((_, error)) => Err(error).with_context(|| format!("lock {}", path.display())),
        }
    }
}

fn open_pins(pins: &Path) -> Result<File> {
    let existing = pins.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let kind = statfs(existing).with_context(|| format!("look at {}", existing.display()))?.filesystem_type();
    if kind != BPF_FS_MAGIC {
        bail!(
            "pin-path {} is not on a BPF file system: mount one (`mount -t bpf bpf /sys/fs/bpf`), or set pin-path = \
             \"\" to do without pins; note that `ip netns exec` hides the host's, `nsenter --net=` does not",
            pins.display()
        );
    }
    fs::create_dir_all(pins).with_context(|| format!("create {}", pins.display()))?;
    File::open(pins).with_context(|| format!("open {}", pins.display()))
}

fn open_socket_lock(socket: &Path) -> Result<(PathBuf, File)> {
    let path = socket.with_extension("lock");
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    }
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .with_context(|| format!("open {}", path.display()))?;
    Ok((path, file))
}

/// The process that holds a lock on this inode, as /proc/locks tells it.
fn holder(inode: u64) -> Option<u32> {
    let locks: io::Result<String> = fs::read_to_string("/proc/locks");
    locks.ok()?.lines().find_map(|line| {
        let mut words =
            line.split_whitespace().skip_while(|word| *word != "WRITE" && *word != "READ").skip(1);
        let id = words.next()?.parse().ok()?;
        let file = words.next()?;
        file.rsplit(':').next()?.parse::<u64>().is_ok_and(|number| number == inode).then_some(id)
    })
}
