//! The compiler of the XDP program: one that can build `core` for the bpf target.
//!
//! Its `cargo` and `rustc` are called by their own paths, never through rustup's proxies, so that nothing has to be
//! linked or configured outside the repository.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

use crate::{command, packages, workspace::Workspace};

/// Debian's packages of a recent compiler, its sources, its linter and its LLVM.
const DEBIAN: [&str; 5] = ["rustc-web", "cargo-web", "rust-web-src", "rust-web-clippy", "llvm-22-dev"];
/// The oldest usable compiler, as in the workspace's `rust-version`.
const OLDEST: (u32, u32) = (1, 95);
/// How long rustup may take to download a toolchain.
const DOWNLOAD: Duration = Duration::from_secs(300);

/// A compiler for the bpf target.
pub struct Toolchain {
    /// What to call it in a message.
    pub name: String,
    /// The major version of its LLVM: bpf-linker's must not be older.
    pub llvm: u32,
    cargo: PathBuf,
    rustc: PathBuf,
}

impl Toolchain {
    /// Finds a toolchain that is there already.
    pub fn find() -> Option<Self> {
        Self::rustup().or_else(Self::debian)
    }

    /// Finds a toolchain, or installs one.
    pub fn find_or_install() -> Result<Self> {
        if let Some(toolchain) = Self::find() {
            return Ok(toolchain);
        }
        if let Some(rustup) = command::find("rustup") {
            let installed = Self::install_with_rustup(&rustup);
            match Self::rustup() {
                Some(toolchain) => return Ok(toolchain),
                None if installed.is_ok() => println!("setup: rustup's nightly is too old"),
                None => println!("setup: rustup could not get it"),
            }
        }
        if packages::available() {
            println!("setup: installing Debian's {} (about 200 MB)", DEBIAN.join(" "));
            packages::install(&DEBIAN)?;
            if Self::debian().is_none() {
                // An older compiler of the same name: the lists may be older than the update that brought ours.
                packages::refresh();
                packages::install(&DEBIAN)?;
            }
        }
        Self::debian().context(
            "no compiler for eBPF: run `rustup toolchain install nightly --component rust-src`, \
             then `cargo xtask setup` again",
        )
    }

    /// `cargo VERB`, with this toolchain and with nothing left of the cargo that runs us.
    pub fn cargo(&self, workspace: &Workspace, verb: &str) -> Command {
        let mut command = Command::new(&self.cargo);
        command.current_dir(&workspace.root).arg(verb);
        for (name, _) in env::vars_os() {
            if name.to_str().is_some_and(is_inherited) {
                command.env_remove(name);
            }
        }
        // The compiler's own directory first: cargo looks for `cargo-clippy` and `clippy-driver` on the PATH.
        let own = self.cargo.parent().map(Path::to_owned);
        let path = env::var_os("PATH").unwrap_or_default();
        if let Ok(path) = env::join_paths(own.into_iter().chain(env::split_paths(&path))) {
            command.env("PATH", path);
        }
        // `-Z build-std` and the unstable features of an eBPF program, on a stable compiler too.
        command.env("RUSTC", &self.rustc).env("RUSTC_BOOTSTRAP", "1");
        command
    }

    /// Whether this toolchain has clippy.
    pub fn has_clippy(&self) -> bool {
        self.cargo.with_file_name("cargo-clippy").exists()
            && self.cargo.with_file_name("clippy-driver").exists()
    }

    /// Adds clippy where that is possible; without it the lint of the program falls back to the host's.
    pub fn add_clippy(&self) {
        if self.cargo.starts_with("/usr/bin") && packages::available() {
            println!("lint: installing rust-web-clippy");
            drop(packages::install(&["rust-web-clippy"]));
        }
    }

    fn rustup() -> Option<Self> {
        let rustup = command::find("rustup")?;
        let list = command::output(Command::new(&rustup).args(["toolchain", "list"])).ok()?;
        let names = list.lines().filter_map(|line| line.split_whitespace().next());
        names.filter(|name| name.starts_with("nightly")).find_map(|name| {
            let which =
                command::output(Command::new(&rustup).args(["which", "--toolchain", name, "rustc"])).ok()?;
            Self::probe(name, Path::new(which.trim()).parent()?).ok()
        })
    }

    /// Completes the nightly toolchain that is there (updating it is not ours to do), or installs one.
    fn install_with_rustup(rustup: &Path) -> Result<()> {
        let names = command::output(Command::new(rustup).args(["toolchain", "list"]))?;
        let mut install = Command::new(rustup);
        // `nightly-HOST`, not `nightly-DATE-HOST`: that one stays as somebody pinned it.
        let is_nightly =
            |name: &str| name.strip_prefix("nightly-").is_some_and(|rest| !rest.starts_with('2'));
        if names.lines().any(is_nightly) {
            println!("setup: adding rust-src to rustup's nightly");
            install.args(["component", "add", "rust-src", "clippy", "--toolchain", "nightly"]);
        } else {
            println!("setup: installing rustup's nightly with rust-src");
            install.args(["toolchain", "install", "nightly", "--profile", "minimal"]);
            install.args(["--component", "rust-src", "--component", "clippy"]);
        }
        command::run_within(&mut install, DOWNLOAD)
    }

    fn debian() -> Option<Self> {
        Self::probe("Debian's rustc-web", Path::new("/usr/bin")).ok()
    }

    /// Takes the toolchain in `directory` if it can build `core` from source.
    fn probe(name: &str, directory: &Path) -> Result<Self> {
        let (cargo, rustc) = (directory.join("cargo"), directory.join("rustc"));
        let ask = |argument: &str| {
            let mut command = Command::new(&rustc);
            // Cargo points the loader at its own compiler's libraries.
            command.env_remove("LD_LIBRARY_PATH").args(argument.split(' '));
            command::output(&mut command)
        };
        let sysroot = ask("--print sysroot")?;
        if !cargo.exists() || !Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/core").exists() {
            bail!("{name} lacks cargo or rust-src");
        }
        let about = ask("--version --verbose")?;
        let field = |key: &str| about.lines().find_map(|line| line.strip_prefix(key));
        let release = field("release: ").context("read the compiler's version")?;
        let llvm = field("LLVM version: ").context("read the version of the compiler's LLVM")?;
        let mut numbers = release.split('.').map_while(|number| number.parse().ok());
        if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < OLDEST {
            bail!("{name} is {release}");
        }
        let llvm =
            llvm.split('.').next().and_then(|major| major.parse().ok()).context("parse LLVM's version")?;
        Ok(Self { name: format!("{name} ({release})"), llvm, cargo, rustc })
    }
}

/// Whether a variable comes from the cargo and rustup that run us, and would mislead another toolchain.
fn is_inherited(name: &str) -> bool {
    let kept = ["CARGO_HOME", "CARGO_HTTP_", "CARGO_NET_", "CARGO_REGISTR", "CARGO_SOURCE_", "CARGO_TERM_"];
    if kept.iter().any(|prefix| name.starts_with(prefix)) {
        return false;
    }
    let foreign = ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN", "RUSTFLAGS", "LD_LIBRARY_PATH"];
    foreign.iter().any(|prefix| name.starts_with(prefix))
}
