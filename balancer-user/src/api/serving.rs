//! A thread for the control socket: whatever clients cost, it is not the controller's time.

use std::{
    convert::Infallible,
    future::Future,
    thread::{self, JoinHandle},
};

use anyhow::{Context as _, anyhow};
use tokio::{
    net::UnixListener,
    sync::{oneshot, watch},
};

use super::{
    server::{Published, Server},
    verb::Ask,
};
use crate::capabilities;

/// A server on a thread of its own, which holds no privileges. It stops when this goes.
pub struct Serving {
    stop: Option<oneshot::Sender<Infallible>>,
    ended: oneshot::Receiver<anyhow::Error>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Answers as [`Server::serve`] does, on a thread beside the caller's.
    ///
    /// # Errors
    ///
    /// When the kernel refuses a thread or an event loop.
    pub fn serve_beside(self, published: watch::Receiver<Published>, ask: Ask) -> anyhow::Result<Serving> {
        let (listener, file) = self.into_parts().context("take the control socket along")?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("start an event loop for the control socket")?;
        let (stop, stopped) = oneshot::channel::<Infallible>();
        let (end, ended) = oneshot::channel();
        let serve = async move {
            capabilities::keep_none()?;
            let server = Server::from_parts(UnixListener::from_std(listener)?, file);
            server.serve(published, ask, async { drop(stopped.await) }).await
        };
        let thread = thread::Builder::new()
            .name("api".to_owned())
            .spawn(move || {
                if let Err(error) = runtime.block_on(serve) {
                    // Who does not listen any more is about to end.
                    let _ = end.send(error);
                }
            })
            .context("start a thread for the control socket")?;
        Ok(Serving { stop: Some(stop), ended, thread: Some(thread) })
    }
}

impl Serving {
    /// Why nobody answers any more; waits until that is so.
    pub fn ended(&mut self) -> impl Future<Output = anyhow::Error> {
        let ended = &mut self.ended;
        async { ended.await.unwrap_or_else(|_| anyhow!("the thread of the control socket has ended")) }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop = None;
        // A panic has been printed.
        drop(self.thread.take().map(JoinHandle::join));
    }
}
