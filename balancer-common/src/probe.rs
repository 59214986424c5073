//! Health checks that go the way of a service's packets: what the program that turns them must know.

use bytemuck::{Pod, Zeroable};

/// The upper half of the mark of a check's packets (`SO_MARK`); the lower one is the backend's number.
pub const PROBE_MARK: u32 = 0xba1a_0000;
/// Most checks whose answers are turned back.
pub const MOST_PROBES: u32 = 4096;

/// How checks get to a backend that holds the service's address, as two words of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ProbeWay {
    /// What is asked: the service's address, as two words of memory.
    pub service: [u64; 2],
    /// Where wrapped packets come from, in the same way.
    pub source: [u64; 2],
    /// The UDP port of GUE, network order.
    pub gue_port: u16,
    /// `forward::*`; `forward::NAT`: not so.
    pub forward: u8,
    /// 0.
    pub reserved: [u8; 5],
}

const _: () = assert!(size_of::<ProbeWay>() == 40);

/// Names of the programs and maps, as they stand in the object file.
pub mod probe_names {
    /// The program that checks leave by.
    pub const OUT: &str = "probe_out";
    /// The program that answers come in by.
    pub const IN: &str = "probe_in";
    /// `Array<ProbeWay>`, indexed by `BackendId`.
    pub const WAYS: &str = "WAYS";
}
