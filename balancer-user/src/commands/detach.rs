//! `balancer detach`: the host as it was before.

use std::{fmt::Write as _, path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result, bail};

use super::output::print;
use crate::{
    cli::DetachArgs,
    config::{Config, DEFAULT_PIN_PATH},
    datapath::{PinnedLinks, detach_pins, remove_pinned_maps},
    instance::Instance,
};

/// Takes program, links and pins off the interfaces, all or those named.
///
/// # Errors
///
/// When a balancer is running, when nothing is pinned for an interface that is named, or when the kernel refuses.
pub fn run(arguments: &DetachArgs) -> Result<ExitCode> {
    let pin_path = match (&arguments.pin_path, &arguments.config) {
        (Some(path), _) => path.clone(),
        (None, Some(file)) => Config::load(file)?
            .daemon
            .pin_path
            .context("pin-path is \"\" in this configuration: its program goes when the daemon goes")?,
        (None, None) => PathBuf::from(DEFAULT_PIN_PATH),
    };
    // A running balancer would go on without a program. The directory goes with the claim when it is empty.
    let _instance = Instance::claim_to_clear(&pin_path)?;
    let wanted: Vec<String> = arguments.interfaces.iter().map(|name| name.to_string()).collect();
    let pinned = PinnedLinks::read(&pin_path)?.names();
    for name in &wanted {
        if !pinned.contains(name) {
            bail!("no program of ours is pinned for {name} below {}", pin_path.display());
        }
    }
    let removed = detach_pins(&pin_path, &wanted)?;
    if PinnedLinks::read(&pin_path)?.names().is_empty() {
        remove_pinned_maps(&pin_path)?;
    }
    let mut text = String::new();
    for name in &removed {
        // Writing into a String can't fail.
        let _ = writeln!(text, "detached from {name}");
    }
    if removed.is_empty() {
        let _ = writeln!(text, "nothing to detach: there is no pin below {}", pin_path.display());
    }
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}
