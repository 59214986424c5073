//! The growth of one backend's counters over the last seconds.

use std::{collections::VecDeque, time::Duration};

use balancer_common::Traffic;

use crate::clock::Monotonic;

/// The largest growth between two readings that is believed: 281 TB, or three weeks at 150 million packets/s.
const PLAUSIBLE: u64 = 1 << 48;
/// Growth that comes faster than this fraction of the span is put into one sample, so that memory is bounded.
const FINEST: u32 = 256;
/// Growth over a longer time than this fraction of the span is spread evenly over that time.
const COARSEST: u32 = 14;

/// How much a counter that only grows, and wraps at 2^64, has grown from `old` to `new`.
///
/// A value that fell without being a wrap was reset, and counts once; one that can be neither counts
/// nothing, so that a corrupt reading is never a huge load.
pub const fn difference(old: u64, new: u64) -> u64 {
    let growth = new.wrapping_sub(old);
    if growth <= PLAUSIBLE {
        growth
    } else if new <= PLAUSIBLE {
        new
    } else {
        0
    }
}

/// What a window adds up.
pub trait Growth: Copy + PartialEq {
    /// Nothing counted.
    const ZERO: Self;
    /// Both together.
    fn plus(self, other: Self) -> Self;
    /// What is left without `other`, which is a part of it.
    fn minus(self, other: Self) -> Self;
    /// The part that falls into the piece `index` of `count` equal ones; the pieces add up exactly.
    fn piece(self, index: u64, count: u64) -> Self;
}

/// What was counted within a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Packets and bytes of both directions.
    pub traffic: Traffic,
    /// Flows opened.
    pub opened: u64,
}

impl Growth for Totals {
    const ZERO: Totals = Totals { traffic: Traffic { packets: 0, bytes: 0 }, opened: 0 };

    fn plus(self, other: Totals) -> Totals {
        Totals {
            traffic: Traffic {
                packets: self.traffic.packets.wrapping_add(other.traffic.packets),
                bytes: self.traffic.bytes.wrapping_add(other.traffic.bytes),
            },
            opened: self.opened.wrapping_add(other.opened),
        }
    }

    fn minus(self, other: Totals) -> Totals {
        Totals {
            traffic: Traffic {
                packets: self.traffic.packets.wrapping_sub(other.traffic.packets),
                bytes: self.traffic.bytes.wrapping_sub(other.traffic.bytes),
            },
            opened: self.opened.wrapping_sub(other.opened),
        }
    }

    fn piece(self, index: u64, count: u64) -> Totals {
        let part = |value| piece(value, index, count);
        Totals {
            traffic: Traffic { packets: part(self.traffic.packets), bytes: part(self.traffic.bytes) },
            opened: part(self.opened),
        }
    }
}

/// The part of `value` that falls into the piece `index` of `count` equal ones; the pieces add up exactly.
pub fn piece(value: u64, index: u64, count: u64) -> u64 {
    let until = |piece: u64| u128::from(value) * u128::from(piece) / u128::from(count);
    // Both are at most `value`.
    (until(index + 1) - until(index)) as u64
}

#[derive(Clone, Copy, Debug)]
struct Sample<T> {
    at: Monotonic,
    growth: T,
}

/// The growth of one backend's counters over a span of time that moves with the clock.
///
/// A sample counts until it is as old as the span, never longer.
#[derive(Clone, Debug)]
pub struct Window<T = Totals> {
    span: Duration,
    start: Monotonic,
    /// When the last growth was pushed: what comes next happened after it.
    last: Monotonic,
    samples: VecDeque<Sample<T>>,
    /// When the first of them happened: while that is young, nothing else need be fetched into the cache.
    oldest: Option<Monotonic>,
    sum: T,
}

impl<T: Growth> Window<T> {
    /// An empty window whose history starts now.
    pub const fn new(now: Monotonic, span: Duration) -> Window<T> {
        Window { span, start: now, last: now, samples: VecDeque::new(), oldest: None, sum: T::ZERO }
    }

    /// Adds what was counted since the last push (or since the window's start).
    ///
    /// When that is long ago (late or missed ticks) the growth is spread evenly over the time that it really took.
    pub fn push(&mut self, now: Monotonic, growth: T) {
        let now = now.max(self.last);
        let elapsed = now.since(self.last);
        self.last = now;
        self.forget(now);
        if growth == T::ZERO {
            return;
        }
        let piece = (self.span / COARSEST).max(Duration::from_nanos(1));
        let pieces = u64::try_from(elapsed.as_nanos().div_ceil(piece.as_nanos())).unwrap_or(u64::MAX).max(1);
        // Pieces that ended before the window are nobody's load: a stall of an hour costs no more than one of the span.
        for index in pieces.saturating_sub(u64::from(COARSEST) + 1)..pieces {
            let later = fraction(elapsed, pieces - 1 - index, pieces);
            if later < self.span {
                self.add(
                    Monotonic::from_boot(now.since_boot().saturating_sub(later)),
                    growth.piece(index, pieces),
                );
            }
        }
    }

    /// What was counted in the span that ends now.
    pub fn totals(&self, now: Monotonic) -> T {
        if !self.is_old(self.oldest, now) {
            return self.sum;
        }
        let old = self.samples.iter().take_while(|sample| now.since(sample.at) >= self.span);
        old.fold(self.sum, |sum, sample| sum.minus(sample.growth))
    }

    /// The part of `totals` that was counted until `moment`.
    pub fn totals_until(&self, moment: Monotonic, now: Monotonic) -> T {
        let young = self.samples.iter().skip_while(|sample| now.since(sample.at) >= self.span);
        let early = young.take_while(|sample| sample.at <= moment);
        early.fold(T::ZERO, |sum, sample| sum.plus(sample.growth))
    }

    /// How much of the span the window can know about: the time since its start, at most the span.
    pub fn history(&self, now: Monotonic) -> Duration {
        now.since(self.start).min(self.span)
    }

    /// The length of the window.
    pub const fn span(&self) -> Duration {
        self.span
    }

    fn is_old(&self, sample: Option<Monotonic>, now: Monotonic) -> bool {
        sample.is_some_and(|at| now.since(at) >= self.span)
    }

    fn add(&mut self, at: Monotonic, growth: T) {
        self.sum = self.sum.plus(growth);
        self.oldest.get_or_insert(at);
        match self.samples.back_mut() {
            // The older stamp stays: nothing may count for longer than the span.
            Some(last) if at.since(last.at) < self.span / FINEST => last.growth = last.growth.plus(growth),
            _ => self.samples.push_back(Sample { at, growth }),
        }
    }

    fn forget(&mut self, now: Monotonic) {
        while self.is_old(self.oldest, now) {
            if let Some(oldest) = self.samples.pop_front() {
                self.sum = self.sum.minus(oldest.growth);
            }
            self.oldest = self.samples.front().map(|sample| sample.at);
        }
    }
}

/// `whole` × `part` / `parts`.
fn fraction(whole: Duration, part: u64, parts: u64) -> Duration {
    // With `part` < `parts` the result is below `whole`; a whole of more than 584 years is cut to that.
    let nanos = whole.as_nanos().min(u128::from(u64::MAX)) * u128::from(part) / u128::from(parts);
    Duration::from_nanos(nanos as u64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SPAN: Duration = Duration::from_secs(14);

    fn at(millis: u64) -> Monotonic {
        Monotonic::from_boot(Duration::from_millis(1_000_000 + millis))
    }

    fn packets(packets: u64) -> Traffic {
        Traffic { packets, bytes: packets * 100 }
    }

    fn grown(traffic: Traffic, opened: u64) -> Totals {
        Totals { traffic, opened }
    }

    #[test]
    fn a_counter_grows_wraps_resets_or_is_not_believed() {
        let high = u64::MAX - 1000;
        for (old, new, growth) in [
            (5, 5, 0),
            (5, 12, 7),
            (high, high.wrapping_add(10_000), 10_000),
            (high, 0, 1001),
            (5000, 0, 0),
            (5000, 30, 30),
            (0, high, 0),
            (5000, high, 0),
            (0, PLAUSIBLE, PLAUSIBLE),
            (0, PLAUSIBLE + 1, 0),
        ] {
            assert_eq!(difference(old, new), growth, "{old} to {new}");
        }
    }

    #[test]
    fn a_sample_counts_until_it_is_as_old_as_the_span() {
        let mut window = Window::new(at(0), SPAN);
        window.push(at(100), grown(packets(3), 1));
        window.push(at(1_000), grown(packets(4), 2));
        let seven = Totals { traffic: Traffic { packets: 7, bytes: 700 }, opened: 3 };
        assert_eq!(window.totals_until(at(999), at(1_000)).opened, 1);
        assert_eq!(window.totals_until(at(1_000), at(1_000)).opened, 3);
        assert_eq!(window.totals_until(at(1_000), at(14_100)).opened, 2);
        let four = Totals { traffic: Traffic { packets: 4, bytes: 400 }, opened: 2 };
        assert_eq!(window.totals(at(1_000)), seven);
        assert_eq!(window.totals(at(14_099)), seven);
        assert_eq!(window.totals(at(14_100)), four);
        assert_eq!(window.totals(at(15_000)), Totals::ZERO);
        window.push(at(14_100), grown(packets(0), 0));
        assert_eq!(window.totals(at(14_100)), four);
        assert_eq!(window.samples.len(), 1);
    }

    #[test]
    fn growth_of_a_late_tick_is_spread_over_the_time_it_took() {
        let mut window = Window::new(at(0), SPAN);
        window.push(at(5_000), grown(packets(50), 10));
        assert_eq!(window.totals(at(5_000)).traffic.packets, 50);
        assert_eq!(window.totals(at(15_000)).traffic.packets, 40);
        assert_eq!(window.totals(at(17_999)).traffic.packets, 20);
        assert_eq!(window.totals(at(19_000)).traffic.packets, 0);
    }

    #[test]
    fn a_stall_longer_than_the_span_leaves_only_the_span() {
        let mut window = Window::new(at(0), SPAN);
        window.push(at(28_000), grown(packets(2_800), 28));
        assert_eq!(
            window.totals(at(28_000)),
            Totals { traffic: Traffic { packets: 1_400, bytes: 140_000 }, opened: 14 }
        );
        let year = 365 * 86_400_000;
        window.push(at(28_000 + year), grown(packets(year / 1000), 0));
        assert_eq!(window.totals(at(28_000 + year)).traffic.packets, 14);
        assert_eq!(window.samples.len(), 14);
    }

    #[test]
    fn fast_ticks_keep_memory_bounded_and_never_prolong_a_sample() {
        let mut window = Window::new(at(0), SPAN);
        for tick in 1..=40_000 {
            window.push(at(tick), grown(packets(1), 0));
            assert!(window.samples.len() <= 257);
            assert!(window.totals(at(tick)).traffic.packets <= 14_000);
        }
        assert!(window.totals(at(40_000)).traffic.packets >= 14_000 - 55);
    }

    #[test]
    fn history_grows_up_to_the_span() {
        let window: Window = Window::new(at(0), SPAN);
        assert_eq!(window.history(at(0)), Duration::ZERO);
        assert_eq!(window.history(at(3_000)), Duration::from_secs(3));
        assert_eq!(window.history(at(90_000)), SPAN);
    }

    proptest! {
        #[test]
        fn totals_are_the_sum_of_what_is_young_enough(
            pushes in prop::collection::vec((60u64..1_000, 0u64..1_000), 1..200), later in 0u64..20_000,
        ) {
            let mut window = Window::new(at(0), SPAN);
            let mut time = 0;
            let mut kept = Vec::new();
            for (step, count) in pushes {
                time += step;
                window.push(at(time), grown(packets(count), count / 2));
                kept.push((time, count));
            }
            let young = kept.iter().filter(|(pushed, _)| time + later - pushed < 14_000);
            let (sum, opened) = young.fold((0, 0), |(sum, opened), (_, n)| (sum + n, opened + n / 2));
            prop_assert_eq!(window.totals(at(time + later)), Totals { traffic: packets(sum), opened });
        }

        #[test]
        fn nothing_is_lost_or_made_by_spreading(elapsed in 0u64..13_999, count in 0u64..1 << 48) {
            let mut window = Window::new(at(0), SPAN);
            let all = grown(Traffic { packets: count, bytes: count }, count);
            window.push(at(elapsed), all);
            prop_assert_eq!(window.totals(at(elapsed)), all);
        }
    }
}
