//! A balancer that is changed, killed and cut off at random for a minute does nothing wrong.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{env, process::Command};

#[test]
fn nothing_goes_wrong_whatever_is_done_to_it() {
    let minutes = if env::var_os("BALANCER_TEST_LONG").is_some() { "10" } else { "1" };
    let output = Command::new(env!("CARGO_BIN_EXE_soak")).args(["--minutes", minutes]).output().unwrap();
    let said =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(output.status.success(), "{said}");
    // It shows with a test that fails, and with `--nocapture`.
    println!("{said}");
    for expected in [" 0 wrong; ", "left behind: nothing", "soak: passed"] {
        assert!(said.contains(expected), "{said}");
    }
}
