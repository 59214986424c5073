//! Access to the bytes of a frame, always checked against its end.

use network_types::{
    eth::EthHdr,
    ip::{Ipv4Hdr, Ipv6Hdr},
    tcp::TcpHdr,
    udp::UdpHdr,
};

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
unsafe impl Wire for Ipv6Hdr {}
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

    /// Moves the start of the frame by so many bytes; negative: there is more room in front. All pointers into the frame
    /// are void afterwards. False when it could not be done.
    fn shift(&self, bytes: i32) -> bool;

    /// Cuts the frame to `length` bytes. All pointers into it are void afterwards. False when it could not be done.
    fn cut(&self, length: usize) -> bool;

    /// Whether the frame has at least `length` bytes, over all its buffers.
    fn has(&self, length: usize) -> bool;
}

/// Reads the `T` at `offset`.
#[inline(always)]
pub fn read<P: Packet, T: Wire>(packet: &P, offset: usize) -> Option<T> {
    let place: *mut T = packet.at(offset)?;
    // SAFETY: `at` checked that it lies in the frame.
    Some(unsafe { core::ptr::read_unaligned(place) })
}

/// Writes `value` at `offset`.
#[inline(always)]
pub fn write<P: Packet, T: Wire>(packet: &P, offset: usize, value: T) -> Option<()> {
    let place: *mut T = packet.at(offset)?;
    // SAFETY: `at` checked that it lies in the frame.
    unsafe { core::ptr::write_unaligned(place, value) };
    Some(())
}
