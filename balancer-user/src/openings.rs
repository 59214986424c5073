//! When a service's flows were opened, and towards which backend: as far back as the window reaches.

use std::{collections::VecDeque, time::Duration};

use crate::clock::Monotonic;

/// Ticks that come faster than this fraction of the span share one cell, so that memory is bounded.
const FINEST: u64 = 256;

/// A stretch of time in which flows were opened, evenly as far as is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// When it began, in nanoseconds of the monotonic clock.
    pub from: u64,
    /// When it ended.
    pub until: u64,
    /// Flows opened, whatever their backend.
    pub opened: u64,
}

/// The service's cells, oldest first. Each backend keeps a `Row` of its own counts beside them.
#[derive(Clone, Debug)]
pub struct Openings {
    /// In nanoseconds.
    span: u64,
    last: u64,
    cells: VecDeque<Cell>,
}

/// One backend's part of each cell, in the same order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row(VecDeque<u32>);

/// What a `Row` must do to stay beside the cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shift {
    forget: usize,
    is_new: bool,
}

impl Openings {
    /// No flows so far; what comes next happened after `now`.
    pub fn new(now: Monotonic, span: Duration) -> Openings {
        Openings { span: nanos(span), last: nanos(now.since_boot()), cells: VecDeque::new() }
    }

    /// Adds the flows opened since the last call; with `Row::follow` for each backend's part.
    pub fn push(&mut self, now: Monotonic, opened: u64) -> Shift {
        let now = nanos(now.since_boot()).max(self.last);
        let from = std::mem::replace(&mut self.last, now);
        let old = self.cells.iter().take_while(|cell| now - cell.until >= self.span).count();
        self.cells.drain(..old);
        let mut is_new = opened > 0;
        if let Some(cell) = self.cells.back_mut()
            && is_new
            && now - cell.from < self.span / FINEST
        {
            cell.until = now;
            cell.opened = cell.opened.saturating_add(opened);
            is_new = false;
        }
        if is_new {
            self.cells.push_back(Cell { from, until: now, opened });
        }
        Shift { forget: old, is_new }
    }

    /// The row of a backend that has opened nothing.
    pub fn row(&self) -> Row {
        Row(VecDeque::from(vec![0; self.cells.len()]))
    }

    /// Oldest first.
    pub fn cells(&self) -> impl DoubleEndedIterator<Item = &Cell> + ExactSizeIterator {
        self.cells.iter()
    }

    /// One weight for each cell, by the mean age of its flows in nanoseconds.
    pub fn weights(&self, now: Monotonic, of: impl Fn(u64) -> u64) -> CellWeights {
        let now = nanos(now.since_boot()).max(self.last);
        let weights: Vec<u64> =
            self.cells.iter().map(|cell| of(now - cell.from.midpoint(cell.until))).collect();
        let opened = self.cells.iter().map(|cell| cell.opened).fold(0, u64::saturating_add);
        let heaviest = weights.iter().copied().max().unwrap_or(0);
        let skip = weights.iter().take_while(|weight| **weight == 0).count();
        CellWeights { weights, skip, fits: heaviest.checked_mul(opened).is_some() }
    }

    /// For each age in `ages` (nanoseconds, rising): how many flows are younger, in 2^20ths.
    pub fn younger(&self, now: Monotonic, ages: impl IntoIterator<Item = u64>) -> impl Iterator<Item = u64> {
        let now = nanos(now.since_boot()).max(self.last);
        let mut cells = self.cells.iter().rev().peekable();
        let mut whole = 0u64;
        ages.into_iter().map(move |age| {
            while let Some(cell) = cells.next_if(|cell| now - cell.from <= age) {
                whole = whole.saturating_add(cell.opened << FLOW_BITS);
            }
            let part = cells.peek().map_or(0, |cell| {
                let (youngest, oldest) = (now - cell.until, now - cell.from);
                let inside = age.saturating_sub(youngest);
                let opened = u128::from(cell.opened) << FLOW_BITS;
                // At most all of them, as `inside` is below `oldest - youngest`.
                (opened * u128::from(inside) / u128::from(oldest - youngest).max(1)) as u64
            });
            whole.saturating_add(part)
        })
    }
}

/// What a flow of each cell weighs, oldest first.
#[derive(Clone, Debug)]
pub struct CellWeights {
    weights: Vec<u64>,
    /// The first ones, which are 0.
    skip: usize,
    /// Whether the sum over all flows fits into 64 bits.
    fits: bool,
}

impl Row {
    /// Takes the step that `Openings::push` took, with this backend's part of the flows.
    pub fn follow(&mut self, shift: Shift, opened: u64) {
        self.0.drain(..shift.forget.min(self.0.len()));
        let opened = u32::try_from(opened).unwrap_or(u32::MAX);
        match self.0.back_mut() {
            Some(last) if !shift.is_new => *last = last.saturating_add(opened),
            _ if shift.is_new => self.0.push_back(opened),
            _ => {}
        }
    }

    /// The sum over the cells of how many were opened × what each one weighs.
    pub fn weighed(&self, weights: &CellWeights) -> u128 {
        let (older, newer) = self.0.as_slices();
        let CellWeights { weights, skip, fits } = weights;
        let (of_older, of_newer) = weights.split_at(older.len().min(weights.len()));
        let parts = [(older, of_older, *skip), (newer, of_newer, skip.saturating_sub(older.len()))];
        let parts = parts.map(|(counts, weights, skip)| {
            let pairs = counts.iter().zip(weights).skip(skip);
            match fits {
                true => u128::from(pairs.map(|(count, weight)| u64::from(*count) * weight).sum::<u64>()),
                // Fewer than 2^9 products of less than 2^96 each.
                false => pairs.map(|(count, weight)| u128::from(*count) * u128::from(*weight)).sum(),
            }
        });
        parts.into_iter().sum()
    }

    /// How many were opened in each cell, oldest first.
    pub fn counts(&self) -> impl DoubleEndedIterator<Item = u32> + ExactSizeIterator {
        self.0.iter().copied()
    }
}

/// Flows are counted in parts of 2^-20 where they are spread over time.
pub const FLOW_BITS: u32 = 20;

/// A duration in nanoseconds, at most 584 years.
pub fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SPAN: Duration = Duration::from_secs(14);

    fn at(millis: u64) -> Monotonic {
        Monotonic::from_boot(Duration::from_millis(1_000 + millis))
    }

    fn cells(openings: &Openings) -> Vec<(u64, u64, u64)> {
        let millis = |moment: u64| moment / 1_000_000 - 1_000;
        openings.cells().map(|cell| (millis(cell.from), millis(cell.until), cell.opened)).collect()
    }

    #[test]
    fn ticks_without_flows_leave_no_cell() {
        let mut openings = Openings::new(at(0), SPAN);
        openings.push(at(100), 3);
        openings.push(at(200), 0);
        openings.push(at(300), 2);
        assert_eq!(cells(&openings), [(0, 100, 3), (200, 300, 2)]);
        openings.push(at(14_100), 0);
        assert_eq!(cells(&openings), [(200, 300, 2)]);
        openings.push(at(20_000), 7);
        assert_eq!(cells(&openings), [(14_100, 20_000, 7)]);
    }

    #[test]
    fn fast_ticks_share_cells() {
        let mut openings = Openings::new(at(0), SPAN);
        let mut row = openings.row();
        for tick in 1..=30_000 {
            let shift = openings.push(at(tick), 2);
            row.follow(shift, 1);
            assert!(openings.cells().len() <= 264);
        }
        let opened: u64 = openings.cells().map(|cell| cell.opened).sum();
        assert!((28_000..28_200).contains(&opened));
        assert_eq!(row.counts().map(u64::from).sum::<u64>() * 2, opened);
    }

    #[test]
    fn flows_are_spread_over_the_time_in_which_they_came() {
        let mut openings = Openings::new(at(0), SPAN);
        openings.push(at(1_000), 10);
        openings.push(at(2_000), 0);
        openings.push(at(2_100), 4);
        let ages = [0, 50, 100, 1_000, 1_100, 1_600, 2_100, 9_000].map(|age| age * 1_000_000);
        let younger: Vec<_> =
            openings.younger(at(2_100), ages).map(|parts| parts as f64 / 1_048_576.0).collect();
        assert_eq!(younger, [0.0, 2.0, 4.0, 4.0, 4.0, 9.0, 14.0, 14.0]);
    }

    #[test]
    fn weights_are_summed_whatever_their_size() {
        let mut openings = Openings::new(at(0), SPAN);
        let mut row = openings.row();
        for tick in 1..=400 {
            let shift = openings.push(at(tick * 100), 3 * tick);
            row.follow(shift, 2 * tick);
        }
        let expected = |of: &dyn Fn(u64) -> u64| -> u128 {
            let last = 400 * 100 * 1_000_000 + 1_000_000_000;
            let ages = openings.cells().map(|cell| last - (cell.from + cell.until) / 2);
            ages.zip(row.counts()).map(|(age, count)| u128::from(of(age)) * u128::from(count)).sum()
        };
        let of: [&dyn Fn(u64) -> u64; 4] = [
            &|_| 0,
            &|age| age,
            // Nothing at the older ages; too much for 64 bits.
            &|age| 3_000_000_000u64.saturating_sub(age),
            &|age| u64::MAX - age,
        ];
        for (of, fits) in of.into_iter().zip([true, true, true, false]) {
            let weights = openings.weights(at(40_000), of);
            assert_eq!((row.weighed(&weights), weights.fits), (expected(of), fits));
        }
    }

    proptest! {
        #[test]
        fn rows_stay_beside_the_cells(
            ticks in prop::collection::vec((1u64..3_000, 0u64..4, 0u64..4), 0..80), join in 0usize..80,
        ) {
            let mut openings = Openings::new(at(0), SPAN);
            let mut rows = vec![openings.row()];
            let mut time = 0;
            for (index, (step, one, other)) in ticks.into_iter().enumerate() {
                if index == join {
                    rows.push(openings.row());
                }
                time += step;
                let is_joined = rows.len() > 1;
                let shift = openings.push(at(time), one + if is_joined { other } else { 0 });
                for (row, opened) in rows.iter_mut().zip([one, other]) {
                    row.follow(shift, opened);
                }
                let expected: Vec<u64> = openings.cells().map(|cell| cell.opened).collect();
                let mut sums = vec![0u64; expected.len()];
                for row in &rows {
                    prop_assert_eq!(row.counts().len(), sums.len());
                    for (sum, count) in sums.iter_mut().zip(row.counts()) {
                        *sum += u64::from(count);
                    }
                }
                prop_assert_eq!(sums, expected);
            }
        }
    }
}
