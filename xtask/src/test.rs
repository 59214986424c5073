//! `cargo xtask test`: every test there is.

use std::ffi::OsString;

use anyhow::{Result, bail};

use crate::{
    build, command, end_to_end, lint,
    packages::{self, Tool},
    setup,
    workspace::Workspace,
};

/// What the bench of network namespaces calls.
const BENCH: [Tool; 1] = [Tool { program: "ip", package: "iproute2" }];
/// What the end-to-end tests call beside it.
const TOOLS: [Tool; 10] = [
    Tool { program: "nft", package: "nftables" },
    Tool { program: "curl", package: "curl" },
    Tool { program: "openssl", package: "openssl" },
    Tool { program: "nginx", package: "nginx-light" },
    Tool { program: "ffmpeg", package: "ffmpeg" },
    Tool { program: "ping", package: "iputils-ping" },
    Tool { program: "iperf3", package: "iperf3" },
    Tool { program: "traceroute", package: "traceroute" },
    Tool { program: "dig", package: "bind9-dnsutils" },
    Tool { program: "dnsmasq", package: "dnsmasq-base" },
];
/// What the RTSP server of the end-to-end tests is made of.
const MEDIA: [&str; 4] =
    ["python3-gi", "gir1.2-gst-rtsp-server-1.0", "gstreamer1.0-plugins-base", "gstreamer1.0-plugins-good"];

/// `cargo xtask test`'s options.
#[derive(clap::Args)]
pub struct Options {
    /// Give the tests that load, wait or repeat their full length
    #[arg(long)]
    long: bool,
    /// Run only the tests whose name contains this; skips the lints
    filter: Option<String>,
}

/// Sets up, builds, lints and tests.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let tools = setup::run(workspace)?;
    require_tools("test")?;
    packages::require("test", &TOOLS)?;
    packages::require_all("test", &MEDIA)?;
    build::program(workspace, &tools)?;
    build::harness(workspace, &tools)?;
    let binary = build::binary(workspace, &build::Options { release: false })?;
    if options.filter.is_none() {
        lint::check(workspace, &tools)?;
    }

    println!("test: on the host");
    let host = command::run(workspace.cargo("test").arg("--no-fail-fast").args(&options.filter));

    println!("test: end to end, in network namespaces, as root");
    let long = [("BALANCER_TEST_LONG", OsString::from("1"))];
    let mut end_to_end =
        end_to_end::cargo(workspace, "test", binary, if options.long { &long } else { &[] })?;
    end_to_end.arg("--no-fail-fast");
    let end_to_end = command::run(end_to_end.args(&options.filter));

    match (host, end_to_end) {
        (Ok(()), Ok(())) => Ok(()),
        (Err(error), Ok(())) | (Ok(()), Err(error)) => Err(error),
        (Err(host), Err(end_to_end)) => bail!("{host}; {end_to_end}"),
    }
}

/// Installs the programs that the bench of network namespaces calls.
pub fn require_tools(step: &str) -> Result<()> {
    packages::require(step, &BENCH)
}
