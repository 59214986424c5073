/// What a backend's program has made of packets that came wrapped. The number is the index into `UNWRAPPED`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Tunnelled {
    /// Unwrapped: IP in IP.
    Ipip = 0,
    /// Unwrapped: GUE.
    Gue = 1,
    /// Refused: what is within is no whole packet.
    Malformed = 2,
    /// Refused: from an address that may not send such.
    Untrusted = 3,
}

impl Tunnelled {
    /// Every one, in the order of its number.
    pub const ALL: [Tunnelled; 4] =
        [Tunnelled::Ipip, Tunnelled::Gue, Tunnelled::Malformed, Tunnelled::Untrusted];

    /// The name that operators see.
    pub const fn name(self) -> &'static str {
        match self {
            Tunnelled::Ipip => "ipip",
            Tunnelled::Gue => "gue",
            Tunnelled::Malformed => "malformed",
            Tunnelled::Untrusted => "untrusted",
        }
    }
}

/// Most addresses that a backend unwraps packets at.
pub const MOST_OWN: u32 = 1024;
/// Most networks that may send it such.
pub const MOST_TRUSTED: u32 = 256;

/// Names of a backend's program and its maps, as they stand in the object file.
pub mod tunnel_names {
    /// The program.
    pub const PROGRAM: &str = "decap";
    /// `HashMap<Address, u32>`: this host's addresses.
    pub const OWN: &str = "OWN";
    /// `LpmTrie<Address, u32>`: the networks that may send wrapped packets.
    pub const TRUSTED: &str = "TRUSTED";
    /// `PerCpuArray<u64>`, indexed by `Tunnelled`: packets.
    pub const UNWRAPPED: &str = "UNWRAPPED";
    /// `.rodata` `[u8; 2]`: the UDP port of GUE, network order.
    pub const GUE_PORT: &str = "GUE_PORT";
}
