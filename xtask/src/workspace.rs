//! Where things are in the repository.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

/// The repository's directories. All paths are absolute.
pub struct Workspace {
    /// The directory that holds the workspace's `Cargo.toml`.
    pub root: PathBuf,
    /// Cargo's target directory: `CARGO_TARGET_DIR`, or `target` in the root.
    pub target: PathBuf,
}

impl Workspace {
    /// Finds the workspace that this program was built from.
    pub fn locate() -> Result<Self> {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = manifest.parent().context("find the directory above xtask")?.to_owned();
        // A relative CARGO_TARGET_DIR counts from where cargo was called, as it does for cargo itself.
        let target = match env::var_os("CARGO_TARGET_DIR") {
            Some(target) => env::current_dir().context("find the current directory")?.join(target),
            None => root.join("target"),
        };
        Ok(Self { root, target })
    }

    /// `cargo VERB` with the toolchain that runs us, for host code that embeds the XDP program.
    pub fn cargo(&self, verb: &str) -> Command {
        let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.current_dir(&self.root).arg(verb);
        command.env("CARGO_TARGET_DIR", &self.target).env("BALANCER_EBPF_OBJECT", self.ebpf_object());
        command
    }

    /// Where tools are installed with `cargo install --root`.
    pub fn tools(&self) -> PathBuf {
        self.target.join("tools")
    }

    /// The target directory of the eBPF build, apart from the host's so that neither waits for the other's lock.
    pub fn bpf_target(&self) -> PathBuf {
        self.target.join("bpf")
    }

    /// The built XDP program, as user space embeds it.
    pub fn ebpf_object(&self) -> PathBuf {
        self.target.join("ebpf").join("balancer")
    }

    /// The built programs that measure it.
    pub fn harness_object(&self) -> PathBuf {
        self.target.join("ebpf").join("harness")
    }
}
