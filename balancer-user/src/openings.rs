//! When a service's flows were opened, and towards which backend: as far back as the window reaches.

use std::{collections::VecDeque, time::Duration};

use crate::clock::Monotonic;

/// Ticks that come faster than this fraction of the span share one cell, so that memory is bounded.
const FINEST: u32 = 256;

/// A stretch of time in which flows were opened, evenly as far as is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// When it began.
    pub from: Monotonic,
    /// When it ended.
    pub until: Monotonic,
    /// Flows opened, whatever their backend.
    pub opened: u64,
}

/// The service's cells, oldest first. Each backend keeps a `Row` of its own counts beside them.
#[derive(Clone, Debug)]
pub struct Openings {
    span: Duration,
    last: Monotonic,
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
    pub const fn new(now: Monotonic, span: Duration) -> Openings {
        Openings { span, last: now, cells: VecDeque::new() }
    }

    /// Adds the flows opened since the last call; with `Row::follow` for each backend's part.
    pub fn push(&mut self, now: Monotonic, opened: u64) -> Shift {
        let now = now.max(self.last);
        let from = std::mem::replace(&mut self.last, now);
        let old = self.cells.iter().take_while(|cell| now.since(cell.until) >= self.span).count();
        self.cells.drain(..old);
        let mut is_new = opened > 0;
        if let Some(cell) = self.cells.back_mut()
            && is_new
            && now.since(cell.from) < self.span / FINEST
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

    /// For each age in `ages` (nanoseconds, rising): how many flows are younger, in 2^20ths.
    pub fn younger(&self, now: Monotonic, ages: impl IntoIterator<Item = u64>) -> impl Iterator<Item = u64> {
        let mut cells = self.cells.iter().rev().peekable();
        let mut whole = 0u64;
        ages.into_iter().map(move |age| {
            while let Some(cell) = cells.next_if(|cell| nanos(now.since(cell.from)) <= age) {
                whole = whole.saturating_add(cell.opened << FLOW_BITS);
            }
            let part = cells.peek().map_or(0, |cell| {
                let (youngest, oldest) = (nanos(now.since(cell.until)), nanos(now.since(cell.from)));
                let inside = age.saturating_sub(youngest);
                let opened = u128::from(cell.opened) << FLOW_BITS;
                // At most all of them, as `inside` is below `oldest - youngest`.
                (opened * u128::from(inside) / u128::from(oldest - youngest).max(1)) as u64
            });
            whole.saturating_add(part)
        })
    }
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
        let millis = |moment: Monotonic| moment.since(at(0)).as_millis() as u64;
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
