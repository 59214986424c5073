//! The web server of the end-to-end tests: Debian's `nginx-light`.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};
use tempfile::TempDir;

use crate::{Netns, Process, eventually};

/// A running nginx, which answers `/name` with its name, and serves and takes (PUT) files under `/files/`.
#[derive(Debug)]
pub struct Nginx {
    // The server goes before its files.
    _process: Process,
    directory: TempDir,
}

impl Nginx {
    /// Starts it in a namespace and waits until it listens.
    pub fn start(netns: &Netns, address: impl Into<SocketAddr>, name: &str) -> Result<Self> {
        Self::start_with(netns, address, "", name)
    }

    /// The same; `more` follows the address in its configuration (`ssl;` and what belongs to it).
    pub fn start_with(netns: &Netns, address: impl Into<SocketAddr>, more: &str, name: &str) -> Result<Self> {
        let address = address.into();
        let more = if more.is_empty() { ";" } else { more };
        let directory = TempDir::with_prefix("balancer-nginx-").context("make a directory for nginx")?;
        let at = directory.path().display();
        let temporary = |kind: &str| format!("{kind}_temp_path {at}/{kind};");
        let config = format!(
            "daemon off; master_process off; worker_processes 1; pid {at}/pid; error_log stderr;
             events {{ worker_connections 512; }}
             http {{
                 access_log off; client_max_body_size 64m;
                 {} {} {} {} {}
                 server {{
                     listen {address} {more}
                     location = /name {{ return 200 {name}; }}
                     location /files/ {{ root {at}; dav_methods PUT; }}
                 }}
             }}",
            temporary("client_body"),
            temporary("proxy"),
            temporary("fastcgi"),
            temporary("scgi"),
            temporary("uwsgi"),
        );
        let file = directory.path().join("nginx.conf");
        fs::write(&file, config).context("write nginx's configuration")?;
        fs::create_dir(directory.path().join("files")).context("make a directory for files")?;
        let mut command = netns.command("nginx");
        let process = Process::spawn(command.arg("-p").arg(directory.path()).arg("-c").arg(&file))?;
        let limit = Duration::from_secs(5);
        netns
            .run(|| {
                eventually(limit, "an nginx that listens", || {
                    TcpStream::connect_timeout(&address, limit).ok()
                })
            })
            .with_context(|| format!("nginx printed:\n{}", process.log()))?;
        Ok(Self { _process: process, directory })
    }

    /// Where a file is that clients know as `/files/NAME`.
    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join("files").join(name)
    }

    /// A place for other files, removed with the server.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }
}
