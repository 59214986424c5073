//! Network namespaces.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::process::CommandExt as _,
    },
    panic,
    path::PathBuf,
    process::Command,
    thread,
};

use anyhow::{Context as _, Result};
use nix::{
    sched::{CloneFlags, setns, unshare},
    sys::{prctl, signal::Signal},
};

use crate::process::{self, DEFAULT_LIMIT};

/// A network namespace without a name in `/run/netns`: it ends with the last process and descriptor in it, so that
/// nothing is left behind even after a kill. IPv6 is off and nothing is forwarded or filtered until a test says so.
#[derive(Debug)]
pub struct Netns {
    name: String,
    handle: OwnedFd,
}

impl Netns {
    /// Makes a namespace whose loopback device is up. `name` only appears in messages.
    pub fn new(name: &str) -> Result<Self> {
        // A thread of its own, because the caller must stay where it is.
        let handle = thread::scope(|scope| {
            join(scope.spawn(|| {
                unshare(CloneFlags::CLONE_NEWNET)?;
                anyhow::Ok(OwnedFd::from(File::open("/proc/thread-self/ns/net")?))
            }))
        })
        .with_context(|| format!("make the network namespace {name} (needs root)"))?;
        let netns = Self { name: name.to_owned(), handle };
        // IPv4 settings start as copies of the host's.
        netns.set_sysctl("net/ipv4/ip_forward", "0")?;
        netns.set_sysctl("net/ipv4/conf/all/rp_filter", "0")?;
        netns.set_sysctl("net/ipv4/conf/default/rp_filter", "0")?;
        netns.set_sysctl("net/ipv6/conf/all/disable_ipv6", "1")?;
        netns.set_sysctl("net/ipv6/conf/default/disable_ipv6", "1")?;
        // No address waits a second for somebody who has it already.
        netns.set_sysctl("net/ipv6/conf/default/accept_dad", "0")?;
        netns.ip("link set lo up")?;
        Ok(netns)
    }

    /// What messages call it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A path that stands for the namespace, as `nsenter --net=` and `ip link set DEVICE netns` take it. Valid while
    /// this value lives.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.handle.as_raw_fd()))
    }

    /// Runs `work` inside, on a thread of its own. A socket that it opens stays in the namespace, wherever it is used
    /// afterwards.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        thread::scope(|scope| {
            join(scope.spawn(|| {
                setns(self.handle.as_fd(), CloneFlags::CLONE_NEWNET)
                    .with_context(|| format!("enter the network namespace {}", self.name))?;
                work()
            }))
        })
        .with_context(|| format!("in the network namespace {}", self.name))
    }

    /// A command that will run inside, in the host's mount namespace (so that `/sys/fs/bpf` is the host's). It is
    /// killed when the thread that starts it ends.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        let handle = self.handle.as_raw_fd();
        let enter = move || {
            // SAFETY: `process::spawn` and `std` start the child while the caller still holds `self`: a command is
            // used before its namespace goes. A descriptor that is closed all the same makes `setns` fail, no more.
            let handle = unsafe { std::os::fd::BorrowedFd::borrow_raw(handle) };
            setns(handle, CloneFlags::CLONE_NEWNET).map_err(io::Error::from)?;
            prctl::set_pdeathsig(Signal::SIGKILL).map_err(io::Error::from)
        };
        // SAFETY: between fork and exec `enter` makes two system calls and allocates nothing.
        unsafe { command.pre_exec(enter) };
        command
    }

    /// Runs a program to its end and returns what it printed; fails when it fails or takes longer than ten seconds.
    pub fn output(&self, program: &str, arguments: &[&str]) -> Result<String> {
        process::output(self.command(program).args(arguments), DEFAULT_LIMIT)
            .with_context(|| format!("in the network namespace {}", self.name))
    }

    /// Runs `ip` with words separated by spaces: `netns.ip("link set lo up")`.
    pub fn ip(&self, words: &str) -> Result<String> {
        self.output("ip", &words.split(' ').collect::<Vec<_>>())
    }

    /// Runs several `ip` commands, one a line, in one go.
    pub fn ip_batch(&self, lines: &str) -> Result<()> {
        let mut file = tempfile::NamedTempFile::new().context("make a file of ip commands")?;
        io::Write::write_all(&mut file, lines.as_bytes()).context("write a file of ip commands")?;
        let path = file.path().to_str().context("name a file of ip commands")?;
        self.output("ip", &["-batch", path]).with_context(|| format!("run the ip commands:\n{lines}"))?;
        Ok(())
    }

    /// Sets a network sysctl, named by its path under `/proc/sys`.
    pub fn set_sysctl(&self, path: &str, value: &str) -> Result<()> {
        self.run(|| fs::write(format!("/proc/sys/{path}"), value).with_context(|| format!("set {path}")))
    }

    /// The index of a device.
    pub fn device_index(&self, device: &str) -> Result<u32> {
        self.run(|| {
            nix::net::if_::if_nametoindex(device).with_context(|| format!("find the device {device}"))
        })
    }
}

/// The thread's result; its panic goes on in the caller.
fn join<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
}
