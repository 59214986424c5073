//! What the end-to-end tests, the demonstration and the benchmarks share: network namespaces, the bench of namespaces
//! that all recipes use, raw packets, and a running balancer.
//!
//! Everything here removes itself when it is dropped, and what the kernel holds for it goes with this process even if
//! it is killed: namespaces have no name, XDP links are not pinned, and children are told to die with their parent.

pub mod capture;
pub mod config;
pub mod connection;
pub mod cpu;
pub mod detour;
pub mod echo;
pub mod harness;
pub mod netns;
pub mod nginx;
pub mod operator;
pub mod oracle;
pub mod packet;
pub mod ping;
pub mod poll;
pub mod process;
pub mod program;
pub mod responder;
pub mod rtsp;
pub mod socket;
pub mod status;
pub mod topology;
pub mod veth;
pub mod xdp;

pub use capture::Capture;
pub use netns::Netns;
pub use poll::eventually;
pub use process::{Balancer, Process};
pub use topology::{Plan, Topology};
