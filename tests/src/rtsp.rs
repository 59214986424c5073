//! Media: Debian's GStreamer RTSP server, and ffmpeg as its client.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;

use crate::{Netns, Process, eventually};

/// How long the server may take to start: it looks for all its plugins first.
const START: Duration = Duration::from_secs(30);

/// A running server of a tone.
#[derive(Debug)]
pub struct RtspServer {
    _process: Process,
    _home: TempDir,
}

impl RtspServer {
    /// Starts it in a namespace, with media from these UDP ports, and waits until it listens.
    pub fn start(netns: &Netns, address: SocketAddr, data_ports: [u16; 2]) -> Result<Self> {
        let home = TempDir::with_prefix("balancer-rtsp-").context("make a directory for an RTSP server")?;
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("rtsp/server.py");
        let mut command = netns.command("/usr/bin/python3");
        command
            .arg(script)
            .args([address.ip().to_string(), address.port().to_string()])
            .args(data_ports.map(|port| port.to_string()))
            .env("HOME", home.path())
            .env("GST_REGISTRY", home.path().join("registry"));
        let mut process = Process::spawn(&mut command)?;
        let started = eventually(START, "an RTSP server that listens", || {
            let has_ended = process.ended().is_ok_and(|ended| ended.is_some());
            (process.log().contains("serving") || has_ended).then_some(!has_ended)
        });
        let log = process.log();
        ensure!(started.with_context(|| log.clone())?, "the RTSP server ended: {log}");
        Ok(Self { _process: process, _home: home })
    }
}

/// How media come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// In datagrams of their own.
    Udp,
    /// Within the control connection.
    Tcp,
}

/// A client that takes the tone for some seconds.
#[derive(Debug)]
pub struct RtspClient {
    process: Process,
    file: PathBuf,
    _directory: TempDir,
}

impl RtspClient {
    /// Starts it in a namespace; its media come in datagrams.
    pub fn start(netns: &Netns, address: SocketAddr, seconds: u32) -> Result<Self> {
        Self::start_with(netns, address, seconds, Transport::Udp)
    }

    /// The same with a transport of one's own.
    pub fn start_with(
        netns: &Netns,
        address: SocketAddr,
        seconds: u32,
        transport: Transport,
    ) -> Result<Self> {
        let transport = if transport == Transport::Udp { "udp" } else { "tcp" };
        let directory =
            TempDir::with_prefix("balancer-rtsp-").context("make a directory for an RTSP client")?;
        let file = directory.path().join("tone.wav");
        let mut command = netns.command("ffmpeg");
        command
            .args(["-hide_banner", "-nostdin", "-loglevel", "warning", "-rtsp_transport", transport])
            .args(["-i", &format!("rtsp://{address}/tone"), "-t", &seconds.to_string()])
            .arg(&file);
        Ok(Self { process: Process::spawn(&mut command)?, file, _directory: directory })
    }

    /// Waits for its end; how many bytes of sound it has received: 16,000 a second.
    pub fn received(mut self, limit: Duration) -> Result<u64> {
        let status = self.process.wait(limit)?;
        ensure!(status.success(), "ffmpeg failed ({status}): {}", self.process.log());
        Ok(fs::metadata(&self.file).context("look at what was received")?.len())
    }
}
