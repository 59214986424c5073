//! Packet sockets: whole frames, sent and received on one device.

use std::{
    io, mem,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use crate::{Netns, packet};

const ALL_PROTOCOLS: u16 = libc::ETH_P_ALL as u16;
/// Room for the largest frame that a device of any MTU here carries.
const LARGEST: usize = 1 << 16;

/// A packet socket on one device of a namespace.
#[derive(Debug)]
pub struct FrameSocket {
    socket: OwnedFd,
}

impl FrameSocket {
    /// Opens it. It receives every frame that arrives at `device` from now on, after XDP, and none that leaves it.
    pub fn open(netns: &Netns, device: &str) -> Result<Self> {
        let index = i32::try_from(netns.device_index(device)?).context("convert a device's index")?;
        let socket = netns.run(|| {
            // SAFETY: no pointers are passed.
            let descriptor = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
            check(descriptor).context("open a packet socket (needs root)")?;
            // SAFETY: the call has just returned it to us and nobody else knows it.
            Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
        })?;
        let socket = Self { socket };
        for (option, what) in [
            (libc::PACKET_AUXDATA, "ask for VLAN tags"),
            (libc::PACKET_IGNORE_OUTGOING, "ask for arriving frames only"),
        ] {
            socket.set_option(libc::SOL_PACKET, option, 1).context(what)?;
        }
        // SAFETY: `sockaddr_ll` is a plain C structure, for which all zeros is a value.
        let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = ALL_PROTOCOLS.to_be();
        address.sll_ifindex = index;
        // SAFETY: the kernel reads `size_of_val(&address)` bytes from `address`.
        let result = unsafe {
            libc::bind(
                socket.socket.as_raw_fd(),
                (&raw const address).cast(),
                size_of_val(&address) as libc::socklen_t,
            )
        };
        check(result).with_context(|| format!("bind a packet socket to {device}"))?;
        Ok(socket)
    }

    /// Makes room for so many bytes of frames that wait to be received. The kernel counts each at what it occupies.
    pub fn set_receive_buffer(&self, bytes: usize) -> Result<()> {
        let bytes = libc::c_int::try_from(bytes).context("convert the size of a buffer")?;
        self.set_option(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, bytes).context("enlarge a receive buffer")
    }

    /// Sends past the queueing discipline from now on, each CPU by a queue of its own as far as the device has as many.
    pub fn send_by_cpu(&self) -> Result<()> {
        self.set_option(libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, 1)
            .context("ask for a queue for each CPU")
    }

    /// How many frames were lost, since this was last asked, because the receive buffer was full.
    pub fn lost(&self) -> Result<u32> {
        let mut statistics = libc::tpacket_stats { tp_packets: 0, tp_drops: 0 };
        let mut length = size_of_val(&statistics) as libc::socklen_t;
        // SAFETY: the kernel writes at most `length` bytes, the size of `statistics`, into it.
        let result = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                (&raw mut statistics).cast(),
                &raw mut length,
            )
        };
        check(result).context("read a packet socket's statistics")?;
        Ok(statistics.tp_drops)
    }

    fn set_option(&self, level: libc::c_int, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
        // SAFETY: the kernel reads one `c_int` from `value`.
        let result = unsafe {
            libc::setsockopt(
                self.socket.as_raw_fd(),
                level,
                option,
                (&raw const value).cast(),
                size_of_val(&value) as libc::socklen_t,
            )
        };
        check(result).map(drop)
    }

    /// Sends one whole frame.
    pub fn send(&self, frame: &[u8]) -> Result<()> {
        // SAFETY: the kernel reads `frame.len()` bytes from `frame`.
        let sent = unsafe { libc::send(self.socket.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
        if sent != check(sent).context("send a frame")? || sent.unsigned_abs() != frame.len() {
            bail!("only {sent} of {} bytes of a frame were sent", frame.len());
        }
        Ok(())
    }

    /// Sends whole frames one after the other, with few system calls.
    pub fn send_all(&self, frames: &[Vec<u8>]) -> Result<()> {
        let mut buffers: Vec<libc::iovec> = frames
            .iter()
            .map(|frame| libc::iovec { iov_base: frame.as_ptr().cast_mut().cast(), iov_len: frame.len() })
            .collect();
        let message = |buffer: &mut libc::iovec| {
            // SAFETY: `mmsghdr` is a plain C structure, for which all zeros is a value.
            let mut message: libc::mmsghdr = unsafe { mem::zeroed() };
            message.msg_hdr.msg_iov = buffer;
            message.msg_hdr.msg_iovlen = 1;
            message
        };
        let mut messages: Vec<libc::mmsghdr> = buffers.iter_mut().map(message).collect();
        let mut rest = messages.as_mut_slice();
        while !rest.is_empty() {
            let count = libc::c_uint::try_from(rest.len()).context("count the frames")?;
            // SAFETY: each message points to its buffer in `buffers`, and that to its frame; the kernel reads those, and
            // writes to the messages of `rest`, whose number it is given.
            let sent = unsafe { libc::sendmmsg(self.socket.as_raw_fd(), rest.as_mut_ptr(), count, 0) };
            let sent = check(sent).context("send frames")?.unsigned_abs() as usize;
            rest = rest.get_mut(sent..).unwrap_or_default();
        }
        for (message, frame) in messages.iter().zip(frames) {
            anyhow::ensure!(message.msg_len as usize == frame.len(), "a frame was sent in part");
        }
        Ok(())
    }

    /// The next frame for which `choose` returns a value, or `None` if none comes within `limit`.
    pub fn receive<T>(
        &self,
        limit: Duration,
        mut choose: impl FnMut(&[u8]) -> Option<T>,
    ) -> Result<Option<T>> {
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            // Rounded up: a poll of 0 ms before the end would spin.
            let milliseconds = i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
            let mut poll = libc::pollfd { fd: self.socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: the kernel reads and writes the one `pollfd` that `poll` is.
            let ready = unsafe { libc::poll(&raw mut poll, 1, milliseconds) };
            if ready < 0 {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error).context("wait for a frame");
                }
            } else if ready > 0 {
                if let Some(value) = choose(&self.take()?) {
                    return Ok(Some(value));
                }
            } else if left.is_zero() {
                return Ok(None);
            }
        }
    }

    /// The next frame whose IP packet `wanted` accepts (headers from IP on, as in the recipes' hexadecimal strings).
    pub fn receive_packet(
        &self,
        limit: Duration,
        mut wanted: impl FnMut(&[u8]) -> bool,
    ) -> Result<Option<Vec<u8>>> {
        self.receive(limit, |frame| {
            let (header, packet) = frame.split_at_checked(14)?;
            let ether_type = u16::from_be_bytes(header.get(12..14)?.try_into().ok()?);
            let is_ip = [packet::IPV4, packet::IPV6].contains(&ether_type);
            (is_ip && wanted(packet)).then(|| packet.to_vec())
        })
    }

    /// One frame that is known to be there, with the VLAN tag that the kernel took out put back.
    fn take(&self) -> Result<Vec<u8>> {
        let mut frame = vec![0_u8; LARGEST];
        let mut control = [0_u64; 16];
        let mut buffer = libc::iovec { iov_base: frame.as_mut_ptr().cast(), iov_len: frame.len() };
        // SAFETY: `msghdr` is a plain C structure, for which all zeros is a value.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = &raw mut buffer;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: `message` points to `buffer` (which spans `frame`) and `control`, with their sizes; all outlive the call.
        let length = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &raw mut message, 0) };
        let length = check(length).context("receive a frame")?.unsigned_abs();
        frame.truncate(length);

        // SAFETY: `recvmsg` has just filled `message` and `control`.
        let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
        if header.is_null() {
            return Ok(frame);
        }
        // SAFETY: PACKET_AUXDATA is the only control message asked for, so the first is one, in full; it is copied out
        // without regard to its alignment.
        let auxiliary: libc::tpacket_auxdata =
            unsafe { libc::CMSG_DATA(header).cast::<libc::tpacket_auxdata>().read_unaligned() };
        if auxiliary.tp_status & libc::TP_STATUS_VLAN_VALID == 0 {
            return Ok(frame);
        }
        packet::tagged(&frame, &[(auxiliary.tp_vlan_tpid, auxiliary.tp_vlan_tci)])
    }
}

/// A system call's result, or the error it left.
fn check<T: PartialOrd + Default>(result: T) -> io::Result<T> {
    if result < T::default() { Err(io::Error::last_os_error()) } else { Ok(result) }
}
