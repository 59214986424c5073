use bytemuck::{Pod, Zeroable};

/// Packets and bytes of one direction. Both only grow, and wrap at 2^64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Traffic {
    /// Packets forwarded.
    pub packets: u64,
    /// Bytes of IP total length forwarded: link-layer padding and tags do not count.
    pub bytes: u64,
}

/// What one CPU has counted for one backend. Every field only grows, and wraps at 2^64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BackendCounters {
    /// From clients to the backend.
    pub request: Traffic,
    /// From the backend to clients.
    pub reply: Traffic,
    /// Flows opened towards the backend.
    pub opened: u64,
    /// Flows that the program itself saw end; those that the sweep expires are counted in user space.
    pub closed: u64,
}

const _: () = assert!(size_of::<BackendCounters>() == 48);
