//! What the kernel's verifier says of the programs: that each build loads with every feature on and off, how many instructions
//! it follows, and how much stack each function takes. A test binary of its own: it takes file descriptors from its process.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{fs::File, os::fd::AsRawFd as _, path::PathBuf};

use aya::{
    Ebpf, EbpfLoader, VerifierLogLevel,
    programs::{ProgramError, Xdp},
};
use balancer_common::{names, tunnel_names};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// The kernel gives up at a million.
const MOST_INSTRUCTIONS: u64 = 600_000;
/// Of one function; with all its callers it may have 512, each rounded up.
const MOST_STACK: u64 = 384;

/// What the verifier has found.
#[derive(Debug)]
struct Followed {
    instructions: u64,
    /// Bytes of stack of each function, the program's own first.
    stack: Vec<u64>,
}

/// Loads a program as far as its file descriptor, for which there is no room: the verifier's statistics come with refusals
/// alone.
fn followed(ebpf: &mut Ebpf, program: &str) -> Followed {
    let program: &mut Xdp = ebpf.program_mut(program).unwrap().try_into().unwrap();
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let next = File::open("/dev/null").unwrap().as_raw_fd();
    setrlimit(Resource::RLIMIT_NOFILE, u64::try_from(next).unwrap(), hard).unwrap();
    let refused = program.load();
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    let Err(ProgramError::LoadError { io_error, verifier_log }) = refused else { panic!("{refused:?}") };
    let log = verifier_log.to_string();
    assert_eq!(io_error.raw_os_error(), Some(libc::EMFILE), "{io_error}: {log}");
    let behind = |word: &str| {
        let (_, rest) = log.split_once(word).unwrap_or_else(|| panic!("no `{word}` in {log}"));
        rest.split_whitespace().next().unwrap()
    };
    let stack = behind("stack depth ").split('+').map(|bytes| bytes.parse().unwrap()).collect();
    // It does load.
    program.load().unwrap();
    Followed { instructions: behind("processed ").parse().unwrap(), stack }
}

fn object(name: &str) -> Vec<u8> {
    let program = std::env::var_os("BALANCER_EBPF_OBJECT").expect("set by `cargo xtask test`");
    std::fs::read(PathBuf::from(program).with_file_name(name)).unwrap()
}

#[track_caller]
fn check(what: &str, followed: &Followed) {
    let Followed { instructions, stack } = followed;
    let largest = stack.iter().max().unwrap();
    println!("{what}: {instructions} instructions, {largest} bytes of stack in one function; {stack:?}");
    assert!(*instructions < MOST_INSTRUCTIONS, "{what}: {instructions} instructions");
    assert!(*largest <= MOST_STACK, "{what}: {largest} bytes of stack in one function");
}

#[test]
fn every_feature_loads_within_the_ceilings() {
    let bytes = object("balancer");
    for (ipv6, log_refusals) in [(0_u32, 0_u32), (0, 1), (1, 0), (1, 1)] {
        let mut ebpf = EbpfLoader::new()
            .verifier_log_level(VerifierLogLevel::STATS)
            .override_global(names::HASH_SEED, &[1_u64, 2], true)
            .override_global(names::BUCKETS, &10_000_u32, true)
            .override_global(names::PROFILED_AGE, &208_u32, true)
            .override_global(names::LOG_REFUSALS, &log_refusals, true)
            .override_global(names::IPV6, &ipv6, true)
            .load(&bytes)
            .unwrap();
        let what = format!("ipv6 {ipv6}, log-refusals {log_refusals}");
        check(&what, &followed(&mut ebpf, names::PROGRAM));
    }
    let mut decap = EbpfLoader::new()
        .verifier_log_level(VerifierLogLevel::STATS)
        .override_global(tunnel_names::GUE_PORT, &6080_u16.to_be_bytes(), true)
        .load(&object("decap"))
        .unwrap();
    check("decap", &followed(&mut decap, tunnel_names::PROGRAM));
}
