//! Servers that send back what they get.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result};

use crate::Netns;

/// How long a server waits before it looks whether it is to end.
const WAIT: Duration = Duration::from_millis(20);

/// A running server; dropping it ends it and, for TCP, its connections.
#[derive(Debug)]
pub struct Echo {
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Echo {
    /// Sends each datagram back to where it came from.
    pub fn udp(netns: &Netns, address: impl Into<SocketAddr>) -> Result<Self> {
        let address = address.into();
        let socket = netns.run(|| UdpSocket::bind(address).with_context(|| format!("bind to {address}")))?;
        socket.set_read_timeout(Some(WAIT)).context("limit a wait")?;
        Ok(Self::start(move |stopped| {
            let mut datagram = vec![0; 1 << 16];
            while !stopped.load(Relaxed) {
                let Ok((length, client)) = socket.recv_from(&mut datagram) else { continue };
                // A client that is gone is none of the server's business.
                drop(socket.send_to(datagram.get(..length).unwrap_or_default(), client));
            }
        }))
    }

    /// Takes connections, and sends back on each what comes in until its client has finished.
    pub fn tcp(netns: &Netns, address: impl Into<SocketAddr>) -> Result<Self> {
        let address = address.into();
        let listener =
            netns.run(|| TcpListener::bind(address).with_context(|| format!("listen on {address}")))?;
        listener.set_nonblocking(true).context("prepare a listener")?;
        Ok(Self::start(move |stopped| {
            thread::scope(|scope| {
                while !stopped.load(Relaxed) {
                    match listener.accept() {
                        Ok((stream, _)) => drop(scope.spawn(|| serve(stream, stopped))),
                        Err(_) => thread::sleep(Duration::from_millis(1)),
                    }
                }
            });
        }))
    }

    fn start(work: impl FnOnce(&AtomicBool) + Send + 'static) -> Self {
        let stopped = Arc::new(AtomicBool::new(false));
        let thread = thread::spawn({
            let stopped = Arc::clone(&stopped);
            move || work(&stopped)
        });
        Self { stopped, thread: Some(thread) }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stopped.store(true, Relaxed);
        // A server that panicked has shown as a missing answer.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

fn serve(mut stream: TcpStream, stopped: &AtomicBool) {
    let prepared = stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(WAIT)));
    let mut bytes = vec![0; 1 << 16];
    while prepared.is_ok() && !stopped.load(Relaxed) {
        match stream.read(&mut bytes) {
            Ok(0) => return,
            Ok(length) if stream.write_all(bytes.get(..length).unwrap_or_default()).is_ok() => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            _ => return,
        }
    }
}
