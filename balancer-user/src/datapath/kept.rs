//! The pins while the daemon runs: made again when somebody has removed them, or the BPF file system with them. Without pins,
//! program and flows would go when the daemon goes.

use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::{AsFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use super::{attachment::links_directory, object, pins::directory};

/// What is pinned below a pin path, kept open.
pub struct KeptPins(BTreeMap<PathBuf, OwnedFd>);

impl KeptPins {
    /// All that is pinned there now.
    ///
    /// # Errors
    ///
    /// When a pin can't be opened.
    pub fn read(pin_path: &Path) -> Result<KeptPins> {
        let mut kept = BTreeMap::new();
        for directory in [directory(pin_path), links_directory(pin_path)] {
            let entries = match fs::read_dir(&directory) {
                // No link while there is no interface.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                entries => entries.with_context(|| format!("read {}", directory.display()))?,
            };
            for entry in entries {
                let path = entry.with_context(|| format!("read {}", directory.display()))?.path();
                let opened = object::open(&path).with_context(|| format!("open {}", path.display()))?;
                kept.insert(path, opened);
            }
        }
        Ok(KeptPins(kept))
    }

    /// Whether a pin is missing.
    pub fn are_missing(&self) -> bool {
        self.0.keys().any(|pin| !pin.exists())
    }

    /// Makes those again that are missing, and returns how many they were.
    ///
    /// # Errors
    ///
    /// When the kernel refuses, as where the path is not on a BPF file system.
    pub fn restore(&self) -> Result<usize> {
        let mut missing = 0;
        for (pin, object) in self.0.iter().filter(|(pin, _)| !pin.exists()) {
            if let Some(directory) = pin.parent() {
                fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
            }
            object::pin(object.as_fd(), pin).with_context(|| format!("pin at {}", pin.display()))?;
            missing += 1;
        }
        Ok(missing)
    }
}
