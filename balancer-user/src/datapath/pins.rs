//! Maps that outlive the daemon: pinned beside the links, and taken over by the next one if it understands them.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, anyhow, bail};
use aya::maps::{Array, Map, MapData, MapInfo};
use balancer_common::{LAYOUT_VERSION, Layout, names};

/// The maps in which flows, counters and the numbers of services, backends and ports are.
const PINNED: [&str; 17] = [
    names::LAYOUT,
    names::FLOW_TAGS,
    names::FLOWS,
    names::FLOW_ADDRESSES,
    names::SERVICES,
    names::BACKENDS,
    names::CLIENTS,
    names::FRAGMENTS,
    names::RINGS,
    names::RING_WORDS,
    names::COUNTERS,
    names::RESPONSE_TIMES,
    names::AGE_PROFILES,
    names::DROPS,
    names::EVICTED,
    names::PORTS,
    names::PORT_FILTER,
];

/// The pins of the maps.
pub struct PinnedMaps {
    directory: PathBuf,
    /// What an earlier daemon left.
    earlier: Option<Layout>,
}

/// How large a map must be: its name, the setting that makes it so, and its entries.
pub type Wanted = (&'static str, &'static str, u32);

impl PinnedMaps {
    /// Looks at what is pinned below `pin_path`, and changes nothing but what was never finished.
    ///
    /// # Errors
    ///
    /// When the maps are those of another version or of other sizes.
    pub fn open(pin_path: &Path, wanted: &[Wanted]) -> Result<PinnedMaps> {
        let directory = directory(pin_path);
        let layout = read_layout(&directory)?;
        let Some(layout) = layout.filter(|layout| layout.version != 0) else {
            remove(pin_path)?;
            fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
            return Ok(PinnedMaps { directory, earlier: None });
        };
        let anew = "start with `balancer run --fresh` to begin with empty maps: live flows are lost";
        if layout.version != LAYOUT_VERSION {
            bail!(
                "the maps below {} have layout {}, this balancer needs layout {LAYOUT_VERSION}; {anew}",
                directory.display(),
                layout.version
            );
        }
        if let Some(missing) = PINNED.iter().find(|name| !directory.join(name).exists()) {
            bail!("the map {missing} is missing below {}: somebody removed it; {anew}", directory.display());
        }
        for (name, setting, entries) in wanted {
            let Some(found) = entries_of(&directory.join(name))? else { continue };
            if found != *entries {
                bail!(
                    "`{setting}` can't change without loss: the map {name} has {found} entries, and {entries} are configured; \
                     put `{setting}` back, or {anew}"
                );
            }
        }
        Ok(PinnedMaps { directory, earlier: Some(layout) })
    }

    /// How many entries a map has that an earlier daemon left.
    pub fn entries(&self, name: &str) -> Result<Option<u32>> {
        entries_of(&self.directory.join(name))
    }

    /// What an earlier daemon left, if it did.
    pub const fn earlier(&self) -> Option<Layout> {
        self.earlier
    }

    /// The pins, by map.
    pub fn paths(&self) -> impl Iterator<Item = (&'static str, PathBuf)> {
        PINNED.iter().map(|name| (*name, self.directory.join(name)))
    }

    /// Makes the maps fit to be taken over.
    pub fn finish(&self, map: Map, seed: [u64; 2]) -> Result<()> {
        let mut layout: Array<MapData, [u64; 3]> = Array::try_from(map)?;
        let [low, high] = seed;
        layout.set(0, [LAYOUT_VERSION, low, high], 0).context("write the layout of the maps")
    }
}

/// Removes the pins of the maps below `pin_path`: those that are still in use go on without.
pub fn remove(pin_path: &Path) -> Result<()> {
    let directory = directory(pin_path);
    match fs::remove_dir_all(&directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", directory.display()))
        }
        _ => Ok(()),
    }
}

/// How many entries the map pinned here has, if there is one.
fn entries_of(pin: &Path) -> Result<Option<u32>> {
    if !pin.exists() {
        return Ok(None);
    }
    let info = MapInfo::from_pin(pin).with_context(|| format!("open {}", pin.display()))?;
    Ok(Some(info.max_entries()))
}

fn read_layout(directory: &Path) -> Result<Option<Layout>> {
    let pin = directory.join(names::LAYOUT);
    if !pin.exists() {
        return Ok(None);
    }
    let data = MapData::from_pin(&pin).with_context(|| format!("open {}", pin.display()))?;
    let map: Array<MapData, [u64; 3]> = Array::try_from(Map::Array(data))
        .map_err(|error| anyhow!("{} is no layout: {error}", pin.display()))?;
    let [version, low, high] = map.get(&0, 0).context("read the layout of the maps")?;
    Ok(Some(Layout { version, seed: [low, high] }))
}

pub(super) fn directory(pin_path: &Path) -> PathBuf {
    pin_path.join("maps")
}
