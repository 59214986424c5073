//! What the benchmarks measure is what they say: each case with few packets, without a look at the clock.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::process::Command;

/// Every case of `bench packet`: byte for byte, and counted as what it is called.
#[test]
fn every_case_does_what_its_name_says() {
    let output = Command::new(env!("CARGO_BIN_EXE_bench")).args(["packet", "--verify"]).output().unwrap();
    let (lines, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr).into_owned());
    assert!(output.status.success(), "{errors}");
    assert!(lines.lines().count() > 70, "{lines}");
    assert!(lines.lines().all(|line| line.ends_with(": right")), "{lines}");
}

/// A bench that is told nonsense measures nothing.
#[test]
fn a_wrong_call_is_refused() {
    let refused: [(&[&str], &str); 4] = [
        (&["--only", "no such case"], "no case is called so"),
        (&["--object", "nameless"], "NAME=FILE, please"),
        (&["--object", "a=/does/not/exist"], "read /does/not/exist"),
        (&["--cpu", "900"], "stay on CPU 900"),
    ];
    for (arguments, message) in refused {
        let output = Command::new(env!("CARGO_BIN_EXE_bench"))
            .args(["packet", "--verify"])
            .args(arguments)
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && errors.contains(message), "{arguments:?}: {errors}");
    }
}

/// `bench controller` with few sizes: flows are opened, found again, and counted; reloads change what they say.
#[test]
fn the_controller_is_measured_at_its_work() {
    let output = Command::new(env!("CARGO_BIN_EXE_bench")).args(["controller", "--verify"]).output().unwrap();
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{errors}");
    let memory = |family: &str| {
        let row = text.lines().find(|line| line.starts_with(&format!("| {family} |"))).expect("a row");
        row.split('|').skip(2).take(2).map(|cell| cell.trim().parse::<u64>().unwrap()).collect::<Vec<_>>()
    };
    // What is reserved is what 55 % of the places in use come to, and a little for clients.
    for (family, used) in [("IPv4", 130), ("IPv6", 258)] {
        let [each, reserved] = memory(family)[..] else { panic!("{text}") };
        assert!(each == used && (each * 100 / 55..each * 100 / 55 + 50).contains(&reserved), "{text}");
    }
}

/// Who may not load programs is told what is needed.
#[test]
fn without_privileges_it_says_so() {
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-all", "--inh-caps=-all", "--clear-groups"]);
    let output = command.arg(env!("CARGO_BIN_EXE_bench")).args(["packet", "--verify"]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && errors.contains("needs root, or CAP_BPF"), "{errors}");
}
