//! One balancer for each pin path: the claim that keeps a second one from starting.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    thread::sleep,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::{
        stat::{major, minor},
        statfs::{BPF_FS_MAGIC, statfs},
    },
};

use crate::config::Daemon;

/// How often, and after what time again, a lock is tried for that another process holds: one that was killed a moment ago
/// lets go of it once the kernel has taken its memory and sockets down.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(50);

/// The lock that a running balancer holds; the kernel lets go of it when the process ends, however it ends.
pub struct Instance {
    path: PathBuf,
    lock: Flock<File>,
}

impl Instance {
    /// Claims the pin path, which is made if it is missing; without pins, a file beside the socket.
    ///
    /// # Errors
    ///
    /// When another balancer holds it (with its process id), or the pin path is not on a BPF file system.
    pub fn claim(daemon: &Daemon) -> Result<Instance> {
        let path = daemon.pin_path.clone().unwrap_or_else(|| daemon.socket.with_extension("lock"));
        let claimed = match &daemon.pin_path {
            Some(pins) => lock(pins, TRIES, || open_pins(pins))?,
            None => lock(&path, TRIES, || open_socket_lock(&path))?,
        };
        match claimed {
            Claimed::Ours(lock) => Ok(Instance { path, lock }),
            Claimed::Held { by } => bail!(
                "another balancer is running: {by} holds {}; stop it, or give this one a pin-path and a socket of its own",
                path.display()
            ),
        }
    }

    /// Claims a pin path in order to clear it; `None` if there is none.
    ///
    /// # Errors
    ///
    /// When a balancer is running there, or the path is not on a BPF file system.
    pub fn claim_to_clear(pins: &Path) -> Result<Option<Instance>> {
        if !pins.exists() {
            return Ok(None);
        }
        require_bpffs(pins)?;
        match lock(pins, TRIES, || File::open(pins).with_context(|| format!("open {}", pins.display())))? {
            Claimed::Ours(lock) => Ok(Some(Instance { path: pins.to_owned(), lock })),
            Claimed::Held { by } => {
                bail!("a balancer is running: {by} holds {}; stop it first", pins.display())
            }
        }
    }
}

impl Instance {
    /// Claims the pin path anew if somebody has removed it, or put something else in its place.
    ///
    /// # Errors
    ///
    /// When another balancer holds it by now, or it is not on a BPF file system any more.
    pub fn renew(&mut self) -> Result<()> {
        let claimed = self.lock.metadata().context("look at the lock")?;
        let there = fs::metadata(&self.path);
        if there.is_ok_and(|there| (there.dev(), there.ino()) == (claimed.dev(), claimed.ino())) {
            return Ok(());
        }
        match lock(&self.path, 1, || open_pins(&self.path))? {
            Claimed::Ours(lock) => self.lock = lock,
            Claimed::Held { by } => bail!("{by} holds {}", self.path.display()),
        }
        Ok(())
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // Fails where pins are left, and that is how it must be.
        if self.path.is_dir() {
            drop(fs::remove_dir(&self.path));
        } else {
            drop(fs::remove_file(&self.path));
        }
    }
}

enum Claimed {
    Ours(Flock<File>),
    Held { by: String },
}

/// Locks what `open` opens at `path`; tried so often while another process holds it.
fn lock(path: &Path, tries: u32, open: impl Fn() -> Result<File>) -> Result<Claimed> {
    let mut tried = 1;
    loop {
        let file = open()?;
        let opened = file.metadata().with_context(|| format!("look at {}", path.display()))?;
        let identity = (opened.dev(), opened.ino());
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => {
                // Whoever held it may have removed it since it was opened here; then another can be made and locked.
                if fs::metadata(path).is_ok_and(|now| (now.dev(), now.ino()) == identity) {
                    return Ok(Claimed::Ours(lock));
                }
            }
            Err((_, Errno::EWOULDBLOCK)) if tried < tries => {
                tried += 1;
                sleep(PAUSE);
            }
            Err((_, Errno::EWOULDBLOCK)) => {
                let by = holder(identity)
                    .map_or_else(|| "another process".to_owned(), |process| format!("process {process}"));
                return Ok(Claimed::Held { by });
            }
            Err((_, error)) => return Err(error).with_context(|| format!("lock {}", path.display())),
        }
    }
}

fn open_pins(pins: &Path) -> Result<File> {
    require_bpffs(pins)?;
    fs::create_dir_all(pins).with_context(|| format!("create {}", pins.display()))?;
    File::open(pins).with_context(|| format!("open {}", pins.display()))
}

/// Fails where the pin path is not on a BPF file system.
///
/// # Errors
///
/// What to do about it.
pub fn require_bpffs(pins: &Path) -> Result<()> {
    let existing = pins.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let kind = statfs(existing).with_context(|| format!("look at {}", existing.display()))?.filesystem_type();
    if kind != BPF_FS_MAGIC {
        bail!(
            "pin-path {} is not on a BPF file system: mount one (`mount -t bpf bpf /sys/fs/bpf`), or set pin-path = \
             \"\" to do without pins; note that `ip netns exec` hides the host's, `nsenter --net=` does not",
            pins.display()
        );
    }
    Ok(())
}

fn open_socket_lock(path: &Path) -> Result<File> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    }
    File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .with_context(|| format!("open {}", path.display()))
}

/// The process that holds a lock on what has this device and inode, as /proc/locks tells it.
fn holder((device, inode): (u64, u64)) -> Option<u32> {
    let locks: io::Result<String> = fs::read_to_string("/proc/locks");
    let file = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
    locks.ok()?.lines().find_map(|line| {
        let mut words =
            line.split_whitespace().skip_while(|word| *word != "WRITE" && *word != "READ").skip(1);
        let process = words.next()?.parse().ok()?;
        (words.next()? == file).then_some(process)
    })
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_lock_that_is_let_go_of_a_moment_later_is_waited_for() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("b.lock");
        let open = || open_socket_lock(&path);
        let Claimed::Ours(first) = lock(&path, TRIES, open).expect("locked") else {
            panic!("nobody holds it")
        };
        let held = lock(&path, TRIES, open).expect("tried");
        assert!(matches!(held, Claimed::Held { by, .. } if by == format!("process {}", std::process::id())));

        let holder = thread::spawn(move || {
            sleep(4 * PAUSE);
            drop(first);
        });
        assert!(matches!(lock(&path, TRIES, open).expect("locked"), Claimed::Ours(_)));
        holder.join().expect("no panic");
    }
}
