//! Watches over the pins: who removes them would have the next daemon lose what this one knows.

use std::{path::PathBuf, time::Duration};

use anyhow::Result;

use crate::{clock::Monotonic, datapath::KeptPins, instance::Instance};

/// How often it is looked.
const PERIOD: Duration = Duration::from_secs(1);

/// The claim on the pin path, and what is pinned there.
pub struct PinWatch<'a> {
    instance: &'a mut Instance,
    /// `None` with `pin-path = ""`.
    pins: Option<(PathBuf, KeptPins)>,
    looked: Monotonic,
    is_in_trouble: bool,
}

impl<'a> PinWatch<'a> {
    /// Keeps what is pinned below the path now.
    ///
    /// # Errors
    ///
    /// When a pin can't be opened.
    pub fn new(
        now: Monotonic,
        instance: &'a mut Instance,
        pin_path: Option<PathBuf>,
    ) -> Result<PinWatch<'a>> {
        let read = |path: PathBuf| anyhow::Ok((path.clone(), KeptPins::read(&path)?));
        let pins = pin_path.map(read).transpose()?;
        Ok(PinWatch { instance, pins, looked: now, is_in_trouble: false })
    }

    /// Keeps what is pinned now instead: interfaces may have come.
    pub fn renew(&mut self) {
        if let Some((path, pins)) = &mut self.pins
            && !pins.are_missing()
        {
            match KeptPins::read(path) {
                Ok(read) => *pins = read,
                Err(error) => tracing::warn!("{error:#}"),
            }
        }
    }

    /// Looks now and then, and makes pins again that somebody has removed.
    pub fn look(&mut self, now: Monotonic) {
        let Some((path, pins)) = &self.pins else { return };
        if now.since(self.looked) < PERIOD {
            return;
        }
        self.looked = now;
        if !pins.are_missing() {
            return;
        }
        let shown = path.display();
        match self.instance.renew().and_then(|()| pins.restore()) {
            Ok(count) => {
                self.is_in_trouble = false;
                tracing::warn!("somebody has removed {count} pins below {shown}: they are there again");
            }
            Err(error) if !self.is_in_trouble => {
                self.is_in_trouble = true;
                tracing::error!(
                    "somebody has removed the pins below {shown}, and they can't be made again: {error:#}; until they can, the \
                     program and all flows go when the balancer ends"
                );
            }
            Err(_) => {}
        }
    }
}
