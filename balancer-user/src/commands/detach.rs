//! `balancer detach`: the host as it was before.

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, Result, bail};

use crate::{
    cli::DetachArgs,
    config::{Config, DEFAULT_PIN_PATH},
    datapath::{PinnedLinks, detach_pins},
};

/// Takes program, links and pins off the interfaces, all or those named.
pub fn run(arguments: &DetachArgs) -> Result<ExitCode> {
    let pin_path = match (&arguments.pin_path, &arguments.config) {
        (Some(path), _) => path.clone(),
        (None, Some(file)) => Config::load(file)?
            .daemon
            .pin_path
            .context("pin-path is \"\" in this configuration: its program goes when the daemon goes")?,
        (None, None) => PathBuf::from(DEFAULT_PIN_PATH),
    };
    let wanted: Vec<String> = arguments.interfaces.iter().map(|name| name.to_string()).collect();
    let pinned = PinnedLinks::read(&pin_path)?.names();
    for name in &wanted {
        if !pinned.contains(name) {
            bail!("no program of ours is pinned for {name} below {}", pin_path.display());
        }
    }
    let removed = detach_pins(&pin_path, &wanted)?;
    if removed.is_empty() {
        println!("nothing to detach: there is no pin below {}", pin_path.display());
    }
    for name in removed {
        println!("detached from {name}");
    }
    Ok(ExitCode::SUCCESS)
}
