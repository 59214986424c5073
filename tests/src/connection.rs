//! TCP connections whose port is chosen, and whose end is: orderly, by a reset, or without a word.

use std::{
    net::{SocketAddrV4, TcpListener, TcpStream},
    os::fd::{AsRawFd as _, OwnedFd},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, setsockopt, socket,
        sockopt::{Linger, ReuseAddr},
    },
};

use crate::{Netns, eventually};

/// How long a wait within a test may take.
const LIMIT: Duration = Duration::from_secs(5);
/// How often a listener is looked at: connections are counted in thousands here.
const LOOK: Duration = Duration::from_micros(100);

/// Connects from a port that others may use too, as soon as the kernel there has forgotten its own last connection with
/// the same ends. Returns how long the handshake took as well.
pub fn connect_from(netns: &Netns, from: SocketAddrV4, to: SocketAddrV4) -> Result<(TcpStream, Duration)> {
    let connected = netns.run(|| {
        eventually(LIMIT, "a free port", || {
            let attempt = || -> Result<(TcpStream, Duration), Errno> {
                let socket: OwnedFd =
                    socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
                setsockopt(&socket, ReuseAddr, &true)?;
                bind(socket.as_raw_fd(), &SockaddrIn::from(from))?;
                let start = Instant::now();
                connect(socket.as_raw_fd(), &SockaddrIn::from(to))?;
                Ok((TcpStream::from(socket), start.elapsed()))
            };
            match attempt() {
                Err(Errno::EADDRNOTAVAIL | Errno::EADDRINUSE) => None,
                other => Some(other),
            }
        })?
        .with_context(|| format!("connect from {from} to {to}"))
    });
    let (stream, took) = connected?;
    stream.set_read_timeout(Some(LIMIT)).context("limit a wait")?;
    Ok((stream, took))
}

/// A listener on each of some backends.
#[derive(Debug)]
pub struct Listeners(Vec<TcpListener>);

impl Listeners {
    /// Opens them.
    pub fn open<'a>(places: impl IntoIterator<Item = (&'a Netns, SocketAddrV4)>) -> Result<Self> {
        let open = |(netns, address): (&Netns, SocketAddrV4)| {
            let listener =
                netns.run(|| TcpListener::bind(address).with_context(|| format!("listen on {address}")))?;
            listener.set_nonblocking(true).context("prepare a listener")?;
            Ok(listener)
        };
        Ok(Self(places.into_iter().map(open).collect::<Result<_>>()?))
    }

    /// The next connection, and the number of the backend that has it: 1, 2, ….
    pub fn accept(&self) -> Result<(u8, TcpStream)> {
        let end = Instant::now() + LIMIT;
        while Instant::now() < end {
            for (number, listener) in (1..).zip(&self.0) {
                if let Ok((stream, _)) = listener.accept() {
                    stream.set_nonblocking(false).context("prepare a connection")?;
                    stream.set_read_timeout(Some(LIMIT)).context("limit a wait")?;
                    return Ok((number, stream));
                }
            }
            std::thread::sleep(LOOK);
        }
        bail!("nobody was connected to")
    }
}

/// Ends a connection with a RST.
pub fn reset(stream: TcpStream) -> Result<()> {
    setsockopt(&stream, Linger, &libc::linger { l_onoff: 1, l_linger: 0 }).context("have a close reset")
}

/// Ends a connection as a crash of its host does: nothing is sent, and nothing is known of it any more.
pub fn vanish(stream: TcpStream) -> Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the kernel reads one `c_int` from `on`.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_REPAIR,
            (&raw const on).cast(),
            size_of_val(&on) as libc::socklen_t,
        )
    };
    Errno::result(result).map(drop).context("have a close say nothing (needs root)")
}
