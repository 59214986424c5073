//! The `balancer` binary.

fn main() {}
