//! bpf-linker, which turns LLVM bitcode into an eBPF object.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{command, packages, toolchain::Toolchain, workspace::Workspace};

const VERSION: &str = "0.13.0";
/// The versions of LLVM that this bpf-linker can be built with.
const SUPPORTED: [u32; 3] = [21, 22, 23];

/// Where the linker is, or will be.
pub fn path(workspace: &Workspace) -> PathBuf {
    workspace.tools().join("bin").join("bpf-linker")
}

/// Installs the linker unless it is there, with an LLVM that can read what `toolchain` writes.
pub fn find_or_install(workspace: &Workspace, toolchain: &Toolchain) -> Result<PathBuf> {
    let linker = path(workspace);
    if is_usable(&linker, &workspace.tools(), toolchain.llvm) {
        return Ok(linker);
    }
    if command::find("cargo-binstall").is_some() {
        println!("setup: downloading bpf-linker {VERSION} into {}", workspace.tools().display());
        let mut binstall = Command::new("cargo-binstall");
        binstall.args(["--no-confirm", "--quiet", "--root"]).arg(workspace.tools());
        binstall.args(["--version", VERSION, "bpf-linker"]);
        // A source build follows when the release can't be reached.
        drop(command::run(&mut binstall));
        if is_usable(&linker, &workspace.tools(), toolchain.llvm) {
            return Ok(linker);
        }
    }
    let (llvm, prefix) = find_or_install_llvm(toolchain.llvm)?;
    let compiler = packages::Tool { program: "c++", package: "g++" };
    packages::require("setup", &[compiler])?;
    println!("setup: building bpf-linker {VERSION} into {} (about 80 s)", workspace.tools().display());
    let mut install = workspace.cargo("install");
    install.args([
        "bpf-linker",
        "--version",
        VERSION,
        "--locked",
        "--quiet",
        "--force",
        "--no-default-features",
    ]);
    install.arg("--features").arg(format!("llvm-{llvm}")).arg("--root").arg(workspace.tools());
    // Its own place to build in: two cargo processes must not wait for each other.
    install.env("CARGO_TARGET_DIR", workspace.tools().join("build")).env("LLVM_PREFIX", prefix);
    command::run(&mut install)?;
    fs::remove_dir_all(workspace.tools().join("build")).context("remove what building bpf-linker left")?;
    Ok(linker)
}

fn is_usable(linker: &Path, root: &Path, llvm: u32) -> bool {
    let version = command::output(Command::new(linker).env_remove("LD_LIBRARY_PATH").arg("--version"));
    if !version.is_ok_and(|text| text.split_whitespace().any(|word| word == VERSION)) {
        return false;
    }
    // `cargo install` notes the features it built with. A released binary (no note) has the newest LLVM.
    let notes = fs::read_to_string(root.join(".crates2.json")).unwrap_or_default();
    let built_with = SUPPORTED.iter().find(|version| notes.contains(&format!("\"llvm-{version}\"")));
    built_with.is_none_or(|&built_with| built_with >= llvm)
}

fn find_or_install_llvm(oldest: u32) -> Result<(u32, PathBuf)> {
    let usable = || SUPPORTED.into_iter().filter(|&version| version >= oldest);
    let find = || {
        usable()
            .map(|version| (version, PathBuf::from(format!("/usr/lib/llvm-{version}"))))
            .find(|(_, prefix)| prefix.join("bin/llvm-config").exists() && prefix.join("include").exists())
    };
    if let Some(found) = find() {
        return Ok(found);
    }
    if packages::available() {
        for version in usable() {
            println!("setup: installing llvm-{version}-dev (about 100 MB)");
            if packages::install(&[&format!("llvm-{version}-dev")]).is_ok() {
                break;
            }
        }
    }
    match find() {
        Some(found) => Ok(found),
        None => bail!(
            "no LLVM {oldest} or later to build bpf-linker with: run `cargo install cargo-binstall`, \
             then `cargo xtask setup` again"
        ),
    }
}
