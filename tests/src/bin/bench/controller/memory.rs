//! Memory of the maps, as the kernel accounts for it.

use std::{
    fs,
    os::fd::{AsFd as _, AsRawFd as _},
    time::Duration,
};

use anyhow::{Context as _, Result};
use aya::maps::MapInfo;
use balancer_common::{FlowAddresses, FlowEntry};
use balancer_user::datapath::{Datapath, Sizes};

/// Bytes that both directions of a flow take: an entry, its tag, and for IPv6 its addresses.
pub fn of_flow(ipv6: bool) -> u64 {
    let addresses = if ipv6 { size_of::<FlowAddresses>() } else { 0 };
    2 * (size_of::<FlowEntry>() + 1 + addresses) as u64
}

/// Bytes of all maps of a program with room for so many flows.
pub fn of_maps(flows: u32, ipv6: bool) -> Result<f64> {
    let sizes =
        Sizes { flows, services: 1, backends: 16, ipv6: Some(ipv6), profiled_age: Duration::from_secs(14) };
    let datapath = Datapath::load(sizes, false, None)?;
    let program = datapath.loaded_program()?.info().context("ask the kernel about the program")?;
    let maps = program.map_ids()?.context("the kernel does not say which maps a program has")?;
    maps.into_iter().map(of_map).sum()
}

fn of_map(id: u32) -> Result<f64> {
    let map = MapInfo::from_id(id).and_then(|map| map.fd()).context("open a map of the program")?;
    let path = format!("/proc/self/fdinfo/{}", map.as_fd().as_raw_fd());
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let bytes = text.lines().find_map(|line| line.strip_prefix("memlock:"));
    bytes.and_then(|bytes| bytes.trim().parse().ok()).context("the kernel does not say what a map takes")
}
