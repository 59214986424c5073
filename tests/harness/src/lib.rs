//! The contract between the benchmarks and the programs that they measure with: names, the description of packets, and
//! which client each flow has.
#![no_std]

use bytemuck::{Pod, Zeroable};

/// Names of the maps and programs, as they stand in the object file.
pub mod names {
    /// Makes the next packet, and calls the program under test.
    pub const HARNESS: &str = "harness";
    /// The least that any program can do: `XDP_TX`.
    pub const FLOOR: &str = "floor";
    /// The least that a rewriter can do: all that `nat` writes, each time the same, and nothing looked up.
    pub const LIMIT: &str = "limit";
    /// Makes the next packet, and sends it out of the device in `OUT`.
    pub const GENERATOR: &str = "generator";
    /// Counts packets, and drops them.
    pub const SINK: &str = "sink";
    /// `DevMap` of one: where the generator sends.
    pub const OUT: &str = "OUT";
    /// `PerCpuArray<u64>` of one: what the sink has seen.
    pub const SEEN: &str = "SEEN";
    /// `Array<Packets>` of one: the packets to be made.
    pub const PACKETS: &str = "PACKETS";
    /// `ProgramArray` of one: the program under test.
    pub const UNDER_TEST: &str = "UNDER_TEST";
}

/// Bytes of a frame that are written before the first word.
pub const HEAD: usize = 6;
/// Words of a frame that can be described; so many bytes from `HEAD` on.
pub const WORDS: usize = 16;
/// Words that are written of each frame: 62 bytes with the head.
pub const SHORT: usize = 7;
/// Words that are written of a frame which is long enough: 78 bytes with the head.
pub const LONG: usize = 9;
/// The longest frame.
pub const LONGEST: usize = HEAD + WORDS * 8;
/// How many flows can be told apart.
pub const FLOWS: u32 = 1 << 23;

/// Which packets the harness makes: those of a set of flows, all alike but for the client's address and port.
///
/// A frame is written in stores that start where its headers' fields do (6 bytes, then words), so that no load of the
/// program under test has to wait for two of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct Packets {
    /// The frame's first 6 bytes, as they lie in memory.
    pub head: u64,
    /// The frame from there on. Fields that differ from flow to flow are 0, and a filler is ffff.
    pub words: [u64; WORDS],
    /// The words with fields that differ.
    pub patches: [Patch; 3],
    /// Bytes of the frame. One that the program under test has made longer or shorter in front is mended.
    pub length: u64,
    /// The state from which the next flow comes: state × `multiplier` + `increment`, whose high half counts.
    pub state: u64,
    /// See `state`.
    pub multiplier: u64,
    /// See `state`.
    pub increment: u64,
    /// The first flow.
    pub first: u32,
    /// How many flows follow it: a power of two, less one.
    pub mask: u32,
}

/// What is added to a word: the client's address × `address` + its port × `port`, both as they lie in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct Patch {
    /// Which word.
    pub word: u64,
    /// 2^shift, or 0.
    pub address: u64,
    /// 2^shift where the port is, −2^shift where the filler is, that makes up for it in checksums; or 0.
    pub port: u64,
}

/// The address of a flow's client, 10.x.y.z: of all, the same sum, so that no checksum depends on it. (The last half of an
/// IPv6 address's words can be that as well.)
#[inline(always)]
pub const fn client_address(flow: u32) -> [u8; 4] {
    let group = (flow / PORTS) & 0xff;
    (0x0a00_feff + (group << 16) - group).to_be_bytes()
}

/// The port of a flow's client: 32768 and on.
#[inline(always)]
pub const fn client_port(flow: u32) -> u16 {
    (PORTS + flow % PORTS) as u16
}

/// Ports of a client.
const PORTS: u32 = 1 << 15;

/// The rewrite of [`names::LIMIT`]: of packets to this address and port, TCP.
pub mod limit {
    /// Destination address and port of what comes in.
    pub const FROM: ([u8; 4], u16) = ([192, 0, 2, 10], 80);
    /// Destination address and port of what leaves.
    pub const TO: ([u8; 4], u16) = ([10, 0, 2, 11], 8080);
    /// Destination MAC of what leaves.
    pub const NEIGHBOUR: [u8; 6] = [2, 0, 0, 0, 2, 11];
    /// Source MAC of what leaves.
    pub const SOURCE: [u8; 6] = [2, 0, 0, 0, 2, 1];
}
