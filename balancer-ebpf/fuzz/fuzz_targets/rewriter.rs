#![no_main]

use balancer_ebpf::host::judge;

libfuzzer_sys::fuzz_target!(|input: &[u8]| judge::rewriter(input));
