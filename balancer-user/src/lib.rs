//! The controller: reads what the XDP program counted, chooses, and writes the selection rings.

pub mod api;
pub mod balance;
pub mod cli;
pub mod clock;
pub mod commands;
pub mod config;
pub mod cost;
pub mod datapath;
pub mod load;
pub mod method;
pub mod rotation;
pub mod schedule;
pub mod simulate;
pub mod window;
