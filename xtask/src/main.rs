//! `cargo xtask`: everything that is done to this repository.

fn main() {}
