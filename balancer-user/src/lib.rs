//! The controller: reads what the XDP program counted, chooses, and writes the selection rings.

pub mod api;
pub mod attach;
pub mod balance;
pub mod cli;
pub mod clock;
pub mod commands;
pub mod config;
pub mod controller;
pub mod cost;
pub mod curve;
pub mod datapath;
pub mod ephemeral;
pub mod forward;
pub mod instance;
pub mod load;
pub mod maglev;
pub mod method;
pub mod netlink;
pub mod network;
pub mod openings;
pub mod profile;
pub mod responses;
pub mod rotation;
pub mod schedule;
pub mod simulate;
pub mod window;
