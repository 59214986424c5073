//! What a service manager is told (sd_notify(3)): that the balancer is ready, alive, and about to stop. Without one, nobody is.

use std::{
    env,
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            ffi::OsStrExt as _,
            net::{SocketAddr, UnixDatagram},
        },
    },
    time::Duration,
};

use crate::clock::Monotonic;

/// The service manager, if there is one.
pub struct Supervisor {
    socket: Option<UnixDatagram>,
    /// How often it wants to hear that the balancer is alive.
    period: Option<Duration>,
    heard: Monotonic,
}

impl Supervisor {
    /// The one that has started this process, as the environment says (`NOTIFY_SOCKET`, `WATCHDOG_USEC`, `WATCHDOG_PID`).
    pub fn from_environment(now: Monotonic) -> Supervisor {
        let socket = env::var_os("NOTIFY_SOCKET").and_then(|name| match connect(&name) {
            Ok(socket) => Some(socket),
            Err(error) => {
                tracing::warn!("reach the service manager at {}: {error}", name.display());
                None
            }
        });
        let number = |name| env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
        let is_meant = number("WATCHDOG_PID").is_none_or(|id| id == u64::from(std::process::id()));
        // Three times within the limit: one may come late.
        let period =
            number("WATCHDOG_USEC").filter(|_| is_meant).map(|limit| Duration::from_micros(limit / 3));
        Supervisor { socket, period, heard: now }
    }

    /// The balancer balances.
    pub fn ready(&self) {
        self.tell("READY=1\n");
    }

    /// The balancer is about to stop.
    pub fn stopping(&self) {
        self.tell("STOPPING=1\n");
    }

    /// The controller has done its work at this moment.
    pub fn alive(&mut self, now: Monotonic) {
        if self.period.is_some_and(|period| now.since(self.heard) >= period) {
            self.heard = now;
            self.tell("WATCHDOG=1\n");
        }
    }

    fn tell(&self, what: &str) {
        if let Some(socket) = &self.socket {
            // One that does not listen gets nothing, and must not hold the balancer up.
            drop(socket.send(what.as_bytes()));
        }
    }
}

fn connect(name: &OsStr) -> io::Result<UnixDatagram> {
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(name)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.connect_addr(&address)?;
    Ok(socket)
}
