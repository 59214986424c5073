//! What the verbs do, one file each.

pub mod check;
mod output;
pub mod simulate;
pub mod status;
