//! What a balancer holds of the host's: it must not be more after a soak than before.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use aya::maps::{HashMap, Map, MapData};
use balancer_common::{Address, Service, ServiceKey};
use balancer_tests::{Balancer, Topology, eventually, operator, process::Place, status::each};
use balancer_user::api::{BackendState, ByState, Status};

/// How long what is not needed any more may be held.
const LIMIT: Duration = Duration::from_secs(20);

/// What a balancer holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftovers {
    descriptors: usize,
    threads: usize,
    pins: Vec<PathBuf>,
    devices: Vec<String>,
    /// Entries of the maps that have a varying number of them: services, addresses, endpoints, interfaces.
    entries: Vec<(String, usize)>,
}

impl fmt::Display for Leftovers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} files, {} threads, {} pins", self.descriptors, self.threads, self.pins.len())?;
        self.entries.iter().try_for_each(|(map, entries)| write!(f, ", {entries} in {map}"))
    }
}

impl Leftovers {
    /// Counts.
    pub fn of(bench: &Topology, balancer: &Balancer) -> Result<Leftovers> {
        let process = process(balancer)?;
        let links = bench.balancer.ip("-brief link show")?;
        let name = |line: &str| line.split(['@', ' ']).next().unwrap_or_default().to_owned();
        Ok(Leftovers {
            descriptors: entries(&process.join("fd"))?.len(),
            threads: entries(&process.join("task"))?.len(),
            pins: pins(balancer.place().pins())?,
            devices: links.lines().map(name).collect(),
            entries: map_entries(&process)?,
        })
    }

    /// Waits until it is no more than this again, and says what it is then.
    pub fn wait_for(&self, bench: &Topology, balancer: &Balancer) -> Result<Leftovers> {
        let mut last = None;
        let found = eventually(LIMIT, "nothing left behind", || {
            let now = Leftovers::of(bench, balancer).ok();
            last = now.clone();
            now.filter(|now| now == self)
        });
        found.with_context(|| format!("at first: {self:?}; at last: {last:?}"))
    }
}

/// Whether nothing is under way, and every backend there to serve.
pub fn is_idle(status: &Status) -> bool {
    status.flows.now == ByState::default()
        && each(status, |backend| (backend.active, backend.state))
            .iter()
            .all(|backend| *backend == (0, BackendState::Up))
}

/// How much memory the daemon has, in KiB.
pub fn memory_kib(balancer: &Balancer) -> Result<u64> {
    let path = process(balancer)?.join("status");
    let status = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("find its memory")?;
    line.trim().trim_end_matches(" kB").parse().context("read its memory")
}

/// Takes the program off, after which nothing may be left.
pub fn detach(bench: &Topology, place: &Place) -> Result<()> {
    let binary = balancer_tests::process::balancer_binary()?;
    let mut command = bench.balancer.command(binary);
    let ended = operator::run(command.args(["detach", "--pin-path"]).arg(place.pins()))?;
    ensure!(ended.code == 0, "detach failed: {}", ended.text);
    for device in ["lc", "lk"] {
        if let Some(left) = operator::xdp(&bench.balancer, device)? {
            bail!("a program is left on {device}: {left:?}");
        }
    }
    ensure!(!place.pins().exists(), "pins are left: {:?}", pins(place.pins()));
    ensure!(!place.socket().exists(), "the socket is left");
    Ok(())
}

fn process(balancer: &Balancer) -> Result<PathBuf> {
    let path = PathBuf::from(format!("/proc/{}", balancer.id()));
    ensure!(path.exists(), "the daemon is gone; it printed:\n{}", balancer.log());
    Ok(path)
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    let read = || fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>();
    read().with_context(|| format!("look into {}", directory.display()))
}

fn pins(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut pins = Vec::new();
    for path in entries(directory)? {
        if path.is_dir() {
            pins.extend(self::pins(&path)?);
        } else {
            pins.push(path);
        }
    }
    pins.sort_unstable();
    Ok(pins)
}

/// How many entries there are in each hash map that a process has open.
fn map_entries(process: &Path) -> Result<Vec<(String, usize)>> {
    let mut counts = Vec::new();
    for path in entries(&process.join("fdinfo"))? {
        // It may have been closed meanwhile.
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let Some(id) = text.lines().find_map(|line| line.strip_prefix("map_id:")) else { continue };
        let data = MapData::from_id(id.trim().parse().context("read a map's number")?)?;
        let name = data.info()?.name_as_str().unwrap_or_default().to_owned();
        let count = match name.as_str() {
            "SERVICES" => keys::<{ size_of::<ServiceKey>() }, { size_of::<Service>() }>(data)?,
            "ENDPOINTS" => keys::<{ size_of::<ServiceKey>() }, 4>(data)?,
            "ADDRESSES" => keys::<{ size_of::<Address>() }, 4>(data)?,
            "PORTS" => keys::<8, 4>(data)?,
            _ => continue,
        };
        counts.push((name, count));
    }
    counts.sort_unstable();
    counts.dedup();
    Ok(counts)
}

fn keys<const KEY: usize, const VALUE: usize>(data: MapData) -> Result<usize> {
    let map: HashMap<_, [u8; KEY], [u8; VALUE]> = HashMap::try_from(Map::HashMap(data))?;
    Ok(map.keys().filter(Result::is_ok).count())
}
