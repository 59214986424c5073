//! The inputs that fuzzing begins with, and those that it found faults with: `fuzz/corpus`.

use std::{fs, path::Path, string::String, vec::Vec};

use crate::host::judge;

/// Judges every input of a target.
fn replay(target: &str, judge: fn(&[u8]), least: usize) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut files = Vec::from_iter(fs::read_dir(directory).unwrap().map(|file| file.unwrap().path()));
    files.sort();
    assert!(files.len() >= least, "{} inputs of {target}", files.len());
    for file in files {
        let input = fs::read(&file).unwrap();
        let outcome = std::panic::catch_unwind(|| judge(&input));
        let said = outcome.err().map(|said| said.downcast_ref::<String>().cloned().unwrap_or_default());
        assert_eq!(said, None, "{}", file.display());
    }
}

#[test]
fn what_was_parsed_still_is() {
    replay("parser", judge::parser, 30);
}

#[test]
fn what_was_rewritten_still_is() {
    replay("rewriter", judge::rewriter, 60);
}

#[test]
fn what_was_unwrapped_still_is() {
    replay("unwrapper", judge::unwrapper, 15);
}
