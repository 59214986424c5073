use bytemuck::{Pod, Zeroable};

/// Index of a service in `RINGS` and `RING_WORDS`.
pub type ServiceId = u16;
/// Index of a backend in `BACKENDS` and `COUNTERS`.
pub type BackendId = u16;

/// What a client talks to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct ServiceKey {
    /// Virtual address, network order.
    pub address: [u8; 4],
    /// Port, network order.
    pub port: [u8; 2],
    /// IP protocol number: `TCP` or `UDP`.
    pub protocol: u8,
    /// Always 0.
    pub reserved: u8,
}

const _: () = assert!(size_of::<ServiceKey>() == 8);

/// What the program must know of a service to open a flow. Times are in units of 2^`TIMEOUT_SHIFT` ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct Service {
    /// Index of its ring.
    pub id: ServiceId,
    /// How long an established flow may be silent.
    pub idle_timeout: u16,
    /// How long a TCP flow may take from its SYN to the end of the handshake.
    pub half_open_timeout: u16,
    /// How long a TCP flow is remembered after both FINs, or a RST.
    pub closing_timeout: u16,
}

const _: () = assert!(size_of::<Service>() == 8);

/// A real server, as the program needs it to open a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C, align(8))]
pub struct Backend {
    /// Address, network order.
    pub address: [u8; 4],
    /// Port, network order.
    pub port: [u8; 2],
    /// Grows each time the slot is given to another backend.
    pub generation: u16,
}

const _: () = assert!(size_of::<Backend>() == 8);

/// Roles of an address in `ADDRESSES`: bits of its value.
pub mod role {
    /// Clients send to it.
    pub const SERVICE: u32 = 1;
    /// A backend sends from it.
    pub const BACKEND: u32 = 2;
}
