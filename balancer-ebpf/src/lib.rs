//! The data plane: what happens to one packet, in the order in which it happens.
//!
//! [`parse`] finds the addresses and ports, [`table`] the flow, [`open`] makes a new one from the service's selection
//! ring, [`enter`] brings it into the table, [`persist`] remembers whose it was, [`source`] says where its packets come from,
//! [`state`] follows its life, [`exchange`] its requests and answers, [`rewrite`] changes the frame, [`wrap`] puts another around
//! it (and [`unwrap`], on a backend, takes it off); [`process`] is the whole way. What has no ports goes by [`fragment`] or [`icmp`], what asks for the service's MAC by [`neighbour`], datagrams of services that keep no flows by [`one_packet`]; who is
//! refused is told by [`answer`]. All of it is generic over [`Packet`] and [`Environment`], so that the same code runs in the kernel (`main.rs`) and
//! in the tests on the host.
#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

#[cfg(any(test, feature = "host"))]
extern crate std;

mod answer;
pub mod atomic;
pub mod checksum;
pub mod enter;
pub mod environment;
pub mod exchange;
pub mod fragment;
#[cfg(feature = "program")]
pub mod frame;
#[cfg(any(test, feature = "host"))]
pub mod host;
pub mod icmp;
mod media;
pub mod neighbour;
pub mod one_packet;
pub mod open;
pub mod packet;
pub mod parse;
mod persist;
pub mod process;
pub mod rewrite;
mod rounds;
mod source;
pub mod state;
pub mod table;
pub mod unwrap;
pub mod vlan;
pub mod wrap;

pub use environment::{Environment, FlowMemory, Way};
pub use packet::Packet;
pub use process::{Verdict, process};

#[cfg(test)]
mod tests;
