//! What the verbs do, one file each.

pub mod api;
pub mod backend;
pub mod change;
pub mod check;
mod daemon;
pub mod decap;
pub mod detach;
pub mod doctor;
pub mod explain;
pub mod flows;
mod output;
pub mod plan;
pub mod run;
pub mod simulate;
pub mod status;
pub mod top;
pub mod whatif;
