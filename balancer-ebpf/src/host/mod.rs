//! The data plane on the host: the same code as in the kernel, between a buffer and maps made of vectors. For tests and
//! fuzzing: it panics where something is read or written that is not the packet's.
#![allow(clippy::unwrap_used, reason = "a test says what it expects")]
#![allow(missing_docs, reason = "fields and constants that are named for what they hold")]

pub mod bed;
pub mod buffer;
pub mod frame;
pub mod judge;
pub mod turns;
