//! Tells the crate where the programs are that it embeds: the balancer's, and beside it those of backends and of health checks.

use std::{
    env,
    path::{Path, PathBuf},
};

const OBJECT: &str = "BALANCER_EBPF_OBJECT";
const DECAP_OBJECT: &str = "BALANCER_DECAP_OBJECT";
const PROBE_OBJECT: &str = "BALANCER_PROBE_OBJECT";

fn main() {
    println!("cargo::rerun-if-env-changed={OBJECT}");
    let object = env::var_os(OBJECT).map_or_else(default_object, PathBuf::from);
    embed(OBJECT, &object);
    embed(DECAP_OBJECT, &object.with_file_name("decap"));
    embed(PROBE_OBJECT, &object.with_file_name("probe"));
}

fn embed(name: &str, object: &Path) {
    println!("cargo::rerun-if-changed={}", object.display());
    if object.is_file() {
        println!("cargo::rustc-env={name}={}", object.display());
    } else {
        println!(
            "cargo::error=there is no XDP program at {}: run `cargo xtask build` first",
            object.display()
        );
    }
}

/// Where `cargo xtask build` puts it.
fn default_object() -> PathBuf {
    let manifest = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from).unwrap_or_default();
    manifest.join("../target/ebpf/balancer")
}
