//! `cargo xtask build`: the XDP program, then the `balancer` binary that carries it.

use std::{
    fs,
    io::IsTerminal as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};

use crate::{
    command,
    setup::{self, Tools},
    workspace::Workspace,
};

/// The target of the XDP program, which cargo builds `core` for.
pub const BPF_TARGET: [&str; 4] = ["--target", "bpfel-unknown-none", "-Z", "build-std=core"];
/// What is built for it: the XDP program.
pub const PROGRAM: [&str; 6] =
    ["--package", "balancer-ebpf", "--bin", "balancer-program", "--features", "program"];
/// What is built for it as well: the XDP program of backends.
pub const DECAP: [&str; 6] =
    ["--package", "balancer-ebpf", "--bin", "decap-program", "--features", "program"];
/// And the programs of health checks.
pub const PROBE: [&str; 6] =
    ["--package", "balancer-ebpf", "--bin", "probe-program", "--features", "program"];
/// The programs that measure it.
pub const HARNESS: [&str; 6] = ["--package", "balancer-harness", "--bin", "harness", "--features", "program"];

/// LLVM's name for loads and stores of any alignment.
const MISALIGNED: &str = "allows-misaligned-mem-access";

/// `cargo xtask build`'s options.
#[derive(clap::Args)]
pub struct Options {
    /// Build the optimised binary; the XDP program is always optimised
    #[arg(long)]
    pub release: bool,
}

/// Builds all and returns the path of the `balancer` binary.
pub fn run(workspace: &Workspace, options: &Options) -> Result<PathBuf> {
    let tools = setup::build_tools(workspace)?;
    program(workspace, &tools)?;
    binary(workspace, options)
}

/// Builds the XDP programs and puts the objects where user space embeds them from.
pub fn program(workspace: &Workspace, tools: &Tools) -> Result<()> {
    println!("build: the XDP program, with {}", tools.toolchain.name);
    object(workspace, tools, &PROGRAM, "balancer-program", &workspace.ebpf_object())?;
    let beside = |name| workspace.ebpf_object().with_file_name(name);
    object(workspace, tools, &DECAP, "decap-program", &beside("decap"))?;
    object(workspace, tools, &PROBE, "probe-program", &beside("probe"))
}

/// Builds the programs that measure it.
pub fn harness(workspace: &Workspace, tools: &Tools) -> Result<()> {
    println!("build: the harness");
    object(workspace, tools, &HARNESS, "harness", &workspace.harness_object())
}

fn object(workspace: &Workspace, tools: &Tools, what: &[&str], name: &str, object: &Path) -> Result<()> {
    let mut build = tools.toolchain.cargo(workspace, "build");
    build
        .args(what)
        .args(BPF_TARGET)
        .args(["--release", "--quiet", "--target-dir"])
        .arg(workspace.bpf_target());
    build.env("CARGO_ENCODED_RUSTFLAGS", rustflags(tools));
    // bpf-linker optimises the whole program itself.
    build.env("CARGO_PROFILE_RELEASE_LTO", "off");
    run_quietly(&mut build)?;

    let built = workspace.bpf_target().join("bpfel-unknown-none/release").join(name);
    let bytes = fs::read(&built).with_context(|| format!("read {}", built.display()))?;
    // An untouched file keeps its time, and so cargo does not rebuild user space.
    if fs::read(object).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    let directory = object.parent().context("find the object's directory")?;
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    fs::write(object, bytes).with_context(|| format!("write {}", object.display()))
}

/// The compiler's flags for the bpf target, in cargo's encoding.
pub fn rustflags(tools: &Tools) -> String {
    let mut flags = vec![
        // v3 (kernel 5.12): 32-bit arithmetic, and atomics that return a value.
        "-Ctarget-cpu=v3".to_owned(),
        "-Cdebuginfo=2".to_owned(),
        // BTF: typed maps, and line numbers in the verifier's log.
        "-Clink-arg=--btf".to_owned(),
        format!("-Clinker={}", tools.linker.display()),
    ];
    if tools.toolchain.llvm >= 22 {
        // Headers are read with one load each instead of byte by byte. Kernels allow it on x86-64 and arm64.
        flags.push(format!("-Ctarget-feature=+{MISALIGNED}"));
    }
    flags.join("\x1f")
}

/// Runs a build for the bpf target without the compiler's note that it does not know `MISALIGNED` itself.
pub fn run_quietly(build: &mut Command) -> Result<()> {
    let colour = if std::io::stderr().is_terminal() { "always" } else { "never" };
    let output = build.env("CARGO_TERM_COLOR", colour).stderr(Stdio::piped()).output();
    let output = output.context("run the eBPF toolchain's cargo")?;
    let messages = String::from_utf8_lossy(&output.stderr);
    let is_ours = |message: &&str| !message.trim().is_empty() && !message.contains(MISALIGNED);
    for message in messages.split("\n\n").filter(is_ours) {
        eprintln!("{}", message.trim_end());
    }
    if !output.status.success() {
        bail!("the XDP program does not compile");
    }
    Ok(())
}

/// Builds the `balancer` binary and returns its path.
pub fn binary(workspace: &Workspace, options: &Options) -> Result<PathBuf> {
    println!("build: the balancer binary");
    let mut build = workspace.cargo("build");
    build.args(["--package", "balancer-user", "--bin", "balancer", "--quiet"]);
    if options.release {
        build.arg("--release");
    }
    command::run(&mut build)?;
    let profile = if options.release { "release" } else { "debug" };
    Ok(workspace.target.join(profile).join("balancer"))
}
