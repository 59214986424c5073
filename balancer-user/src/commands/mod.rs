//! What the verbs do, one file each.

pub mod check;
pub mod detach;
mod output;
pub mod run;
pub mod simulate;
pub mod status;
