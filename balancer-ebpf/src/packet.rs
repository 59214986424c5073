//! Access to the bytes of a frame, always checked against its end.

use network_types::{eth::EthHdr, ip::Ipv4Hdr, tcp::TcpHdr, udp::UdpHdr};

/// A type that any bytes of the wire are a valid value of.
///
/// # Safety
/// Every bit pattern must be valid, and reading it must need no alignment beyond what `read_unaligned` gives.
pub unsafe trait Wire: Copy {}

// SAFETY: these consist of integers and byte arrays alone.
unsafe impl Wire for EthHdr {}
// SAFETY: as above.
unsafe impl Wire for Ipv4Hdr {}
// SAFETY: as above.
unsafe impl Wire for TcpHdr {}
// SAFETY: as above.
unsafe impl Wire for UdpHdr {}
// SAFETY: bytes.
unsafe impl<const N: usize> Wire for [u8; N] {}

/// A frame, from its Ethernet header on.
///
/// Only the first buffer of a multi-buffer frame can be reached; headers that do not lie in it whole count as
/// truncated.
pub trait Packet {
    /// Where the `T` at `offset` lies, or `None` when it would end past the end of the first buffer.
    ///
    /// The pointer is valid for reads and writes of a `T`, unaligned, as long as the frame is.
    fn at<T: Wire>(&self, offset: usize) -> Option<*mut T>;

    /// Whether the frame has at least `length` bytes, over all its buffers.
    fn has(&self, length: usize) -> bool;
}
