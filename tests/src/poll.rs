//! Waiting for something to come true, never for time to pass.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

/// How long to wait between two looks.
const PAUSE: Duration = Duration::from_millis(10);

/// Looks until `look` returns a value; fails after `limit`, naming `what` it waited for.
pub fn eventually<T>(limit: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> Result<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(value) = look() {
            return Ok(value);
        }
        if Instant::now() >= end {
            bail!("{what}: not within {} ms", limit.as_millis());
        }
        thread::sleep(PAUSE);
    }
}
