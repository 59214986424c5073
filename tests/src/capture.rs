//! What arrives at a device while a test runs, packet by packet.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};

use crate::{Netns, packet, socket::FrameSocket};

/// How long the capturing thread waits before it looks whether it is to end.
const WAIT: Duration = Duration::from_millis(20);
/// Room for what arrives while the thread does not run.
const BUFFER: usize = 64 << 20;

/// An IP packet with TCP or UDP, as it arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet {
    /// Destination MAC, then source MAC.
    pub macs: [[u8; 6]; 2],
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// IP total length; of IPv6, with the header's 40 bytes.
    pub length: u16,
    /// 6 or 17.
    pub protocol: u8,
    /// Where it comes from.
    pub source: SocketAddr,
    /// Where it goes.
    pub destination: SocketAddr,
    /// TCP flags, 0 for UDP.
    pub flags: u8,
}

impl Packet {
    /// Takes an untagged frame apart; `None` for anything but TCP or UDP right behind an IP header and its options, and for
    /// later fragments.
    pub fn parse(frame: &[u8]) -> Option<Self> {
        let (header, ip) = frame.split_at_checked(14)?;
        let word =
            |bytes: &[u8], at: usize| Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
        let address = |bytes: &[u8]| -> Option<IpAddr> {
            let ipv4 = || <[u8; 4]>::try_from(bytes).map(IpAddr::from);
            <[u8; 16]>::try_from(bytes).map(IpAddr::from).or_else(|_| ipv4()).ok()
        };
        let (l4, length, protocol, ttl, addresses) = match word(header, 12)? {
            packet::IPV4 if word(ip, 6)? & 0x1fff == 0 => {
                (usize::from(*ip.first()? & 15) * 4, word(ip, 2)?, *ip.get(9)?, *ip.get(8)?, ip.get(12..20)?)
            }
            packet::IPV6 => (40, word(ip, 4)?.checked_add(40)?, *ip.get(6)?, *ip.get(7)?, ip.get(8..40)?),
            _ => return None,
        };
        let is_ours = [libc::IPPROTO_TCP, libc::IPPROTO_UDP].contains(&i32::from(protocol));
        let l4 = ip.get(l4..).filter(|_| is_ours)?;
        let (source, destination) = addresses.split_at(addresses.len() / 2);
        Some(Self {
            macs: [header.get(..6)?.try_into().ok()?, header.get(6..12)?.try_into().ok()?],
            ttl,
            length,
            protocol,
            source: SocketAddr::new(address(source)?, word(l4, 0)?),
            destination: SocketAddr::new(address(destination)?, word(l4, 2)?),
            flags: if i32::from(protocol) == libc::IPPROTO_TCP { *l4.get(13)? } else { 0 },
        })
    }
}

/// Packets and their bytes (IP total length).
pub fn total<'a>(packets: impl IntoIterator<Item = &'a Packet>) -> (u64, u64) {
    packets
        .into_iter()
        .fold((0, 0), |(packets, bytes), packet| (packets + 1, bytes + u64::from(packet.length)))
}

/// A device that is being listened to, from the moment it is made.
#[derive(Debug)]
pub struct Capture {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<()>>>,
}

#[derive(Debug)]
struct Shared {
    socket: FrameSocket,
    packets: Mutex<Vec<Packet>>,
    stopped: AtomicBool,
}

impl Capture {
    /// Listens to what arrives at `device`, after XDP. What the device itself sends is not heard.
    pub fn start(netns: &Netns, device: &str) -> Result<Self> {
        let socket = FrameSocket::open(netns, device)?;
        socket.set_receive_buffer(BUFFER)?;
        let shared = Arc::new(Shared { socket, packets: Mutex::default(), stopped: AtomicBool::new(false) });
        let thread = thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.follow()
        });
        Ok(Self { shared, thread: Some(thread) })
    }

    /// What has arrived so far.
    pub fn packets(&self) -> Vec<Packet> {
        self.shared.packets().clone()
    }

    /// All that has arrived; fails when some of it could not be kept.
    pub fn finish(mut self) -> Result<Vec<Packet>> {
        self.end()?;
        let lost = self.shared.socket.lost()?;
        ensure!(lost == 0, "{lost} frames arrived faster than they could be captured");
        Ok(std::mem::take(&mut *self.shared.packets()))
    }

    fn end(&mut self) -> Result<()> {
        self.shared.stopped.store(true, Ordering::Release);
        let Some(thread) = self.thread.take() else { return Ok(()) };
        thread.join().map_err(|_| anyhow!("the capturing thread panicked"))?.context("capture")
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // Whoever needs the result has called `finish`.
        drop(self.end());
    }
}

impl Shared {
    fn follow(&self) -> Result<()> {
        loop {
            // Read first: what arrived before the stop is still taken.
            let is_last = self.stopped.load(Ordering::Acquire);
            let take = |frame: &[u8]| -> Option<()> {
                self.packets().extend(Packet::parse(frame));
                None
            };
            self.socket.receive(if is_last { Duration::ZERO } else { WAIT }, take)?;
            if is_last {
                return Ok(());
            }
        }
    }

    fn packets(&self) -> MutexGuard<'_, Vec<Packet>> {
        self.packets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
