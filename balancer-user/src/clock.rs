//! The one place that reads a clock. Everything else gets `now` as a value.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// A moment of the kernel's monotonic clock, the same one that the XDP program reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Monotonic(Duration);

impl Monotonic {
    /// The moment `since_boot` after the clock's start.
    pub const fn from_boot(since_boot: Duration) -> Monotonic {
        Monotonic(since_boot)
    }

    /// Reads the clock.
    pub fn now() -> Monotonic {
        // CLOCK_MONOTONIC exists on every Linux; the call has no other way to fail.
        clock_gettime(ClockId::CLOCK_MONOTONIC)
            .map_or(Monotonic(Duration::ZERO), |time| Monotonic(time.into()))
    }

    /// Time since the clock's start.
    pub const fn since_boot(self) -> Duration {
        self.0
    }

    /// Time from `earlier` to `self`; zero when `earlier` is later.
    pub const fn since(self, earlier: Monotonic) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// So long before; at the earliest the boot.
    pub const fn minus(self, before: Duration) -> Monotonic {
        Monotonic::from_boot(self.since_boot().saturating_sub(before))
    }

    /// The moment `after` later.
    pub const fn plus(self, after: Duration) -> Monotonic {
        Monotonic(self.0.saturating_add(after))
    }
}
