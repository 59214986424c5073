//! Learns what one flow brings by each age, from what all flows of a service carry.

use std::{collections::VecDeque, time::Duration};

use balancer_common::AGES;

use crate::{
    clock::Monotonic,
    curve::{Curve, MICRO, bucket_edge, bucket_of, width},
    openings::{FLOW_BITS, Openings, nanos},
};

/// Pieces of memory: what is older than all of them is forgotten, the oldest little by little while the last one grows.
const PIECES: usize = 8;
/// How long a piece lasts: this fraction of the window.
const PIECE: u32 = 4;
/// A piece is kept beyond its time until those after it hold this many flows.
const ENOUGH: u64 = 16;
/// Growth over a longer time than this fraction of the window teaches nothing about ages.
const COARSEST: u32 = 8;
/// A whole flow, in parts.
const FLOW: u64 = 1 << FLOW_BITS;
/// The oldest piece is forgotten in steps of 2^-16 of it.
const FADE_BITS: u32 = 16;

/// Load by the age of the flow that brought it, over the flows that passed that age.
///
/// For each bucket of ages, two sums over the last 28 s (two windows):
///
/// - `brought`: what all flows carried while they were of these ages;
/// - `reached`: how many flows passed these ages, ended ones too: the time that they spent there ÷ the bucket's width.
///   When flows were opened is known (`Openings`), so at any moment those between two ages can be counted.
///
/// Their quotient is what one flow brings in the bucket, and the sum of the quotients up to an age is C of that age.
/// The oldest ticks fade out. Were they dropped at once, all that is committed would change at once, most of it where most
/// is committed, and the flows of the next ticks would all go there to make up for it.
///
/// Both sums are of the same ticks; a tick teaches nothing about ages at which a flow of before the first tick could be.
/// Bucket 0 is about the flows opened in the very ticks, so flows of one packet give exactly 1.
#[derive(Clone, Debug)]
pub struct Profile {
    span: Duration,
    /// Nothing is known about flows from before.
    start: Monotonic,
    last: Monotonic,
    /// Flows between the edges of each bucket at `last`, in 2^20ths.
    inside: Vec<u64>,
    /// Oldest first; the last one grows.
    pieces: VecDeque<Piece>,
    /// All pieces together.
    sum: Piece,
    /// Flows opened in the last tick.
    latest: u64,
}

/// How the oldest piece fades.
struct Memory<'a> {
    oldest: Option<&'a Piece>,
    /// In 2^-16ths.
    faded: u128,
}

/// What a flow carries, in whatever unit the service is measured by, and how many flows it was.
#[derive(Clone, Debug)]
struct Piece {
    began: Monotonic,
    opened: u64,
    /// Packets in bucket 0: at least one for each flow opened.
    first: u64,
    /// By bucket, in units.
    brought: Vec<u64>,
    /// By bucket, in 2^20ths of a flow. Bucket 0 is not used.
    reached: Vec<u64>,
}

impl Profile {
    /// Nothing learned yet; flows opened before `now` are not known.
    pub fn new(now: Monotonic, span: Duration) -> Profile {
        let count = buckets(span);
        let empty = Piece::new(now, count);
        Profile {
            span,
            start: now,
            last: now,
            inside: vec![0; count],
            pieces: VecDeque::from([empty.clone()]),
            sum: empty,
            latest: 0,
        }
    }

    /// How far back the openings of flows must be known: to the end of the last bucket that the span touches.
    pub const fn reach(span: Duration) -> Duration {
        Duration::from_nanos(bucket_edge(buckets(span)))
    }

    /// Adds what was brought since the last call, by bucket, and the packets among it that were in bucket 0.
    ///
    /// `opened` flows have been opened since then; they are in `openings` already.
    pub fn observe(
        &mut self,
        now: Monotonic,
        brought: impl IntoIterator<Item = u64>,
        first: u64,
        opened: u64,
        openings: &Openings,
    ) {
        let past = self.last;
        let now = now.max(past);
        self.last = now;
        self.turn(now);
        self.latest = opened;
        let count = self.inside.len();
        let Some(piece) = self.pieces.back_mut() else { return };
        for sums in [&mut *piece, &mut self.sum] {
            sums.opened = sums.opened.saturating_add(opened);
            sums.first = sums.first.saturating_add(first);
        }
        let elapsed = now.since(past);
        let is_fine = elapsed <= self.span / COARSEST;
        let known = nanos(past.since(self.start));
        let mut edges = openings.younger(now, (1..=count).map(bucket_edge));
        let mut younger = edges.next().unwrap_or(0);
        for (bucket, brought) in brought.into_iter().enumerate().take(count) {
            let mut reached = 0;
            let mut is_known = true;
            if bucket > 0 {
                let until = edges.next().unwrap_or(younger);
                let inside = until - younger;
                younger = until;
                let before = std::mem::replace(&mut self.inside[bucket], inside);
                // The mean of before and after, as long as it lasted: time spent there, in flows that pass through.
                let time = (u128::from(before) + u128::from(inside)) / 2 * elapsed.as_nanos();
                reached = u64::try_from(time >> width(bucket).trailing_zeros()).unwrap_or(u64::MAX);
                is_known = is_fine && bucket_edge(bucket + 1) <= known;
            }
            if is_known {
                for sums in [&mut *piece, &mut self.sum] {
                    sums.brought[bucket] = sums.brought[bucket].saturating_add(brought);
                    sums.reached[bucket] = sums.reached[bucket].saturating_add(reached);
                }
            }
        }
    }

    /// Whether flows have been watched for a whole window and the ages it touches.
    pub fn is_full(&self, now: Monotonic) -> bool {
        now.since(self.start) > Profile::reach(self.span)
    }

    /// What one flow brings by each age; `None` while no flow has been seen.
    ///
    /// What less than one whole flow showed counts as if by one.
    pub fn curve(&self) -> Option<Curve> {
        let Memory { oldest, faded } = self.memory();
        // Of a sum what is not forgotten, in 2^-16ths.
        let kept =
            |sum: u64, oldest: u64| (u128::from(sum) << FADE_BITS) - u128::from(oldest.min(sum)) * faded;
        let lists = |of: fn(&Piece) -> &Vec<u64>| {
            let oldest =
                oldest.map_or(&[][..], |oldest| of(oldest)).iter().copied().chain(std::iter::repeat(0));
            of(&self.sum).iter().copied().zip(oldest).map(|(sum, oldest)| kept(sum, oldest))
        };
        let one = |of: fn(&Piece) -> u64| kept(of(&self.sum), oldest.map_or(0, of));
        let flows = self.flows(one(|piece| piece.opened), one(|piece| piece.first))?;
        let per = |brought: u128, flows: u128, parts: u64| {
            let millionths = brought.saturating_mul(u128::from(MICRO) * u128::from(parts)) / flows;
            u64::try_from(millionths).unwrap_or(u64::MAX)
        };
        let mut brought = lists(|piece| &piece.brought);
        let at_once = per(brought.next().unwrap_or(0), flows, 1);
        let later = brought.zip(lists(|piece| &piece.reached).skip(1));
        let later =
            later.map(|(brought, reached)| per(brought, reached.max(u128::from(FLOW) << FADE_BITS), FLOW));
        Some(Curve::new(std::iter::once(at_once).chain(later), nanos(self.span)))
    }

    /// How many flows bucket 0 is about, in 2^-16ths, of so many that opened and packets in it; `None` of none.
    ///
    /// Openings and ages are not read at the same instant: the sums may be a few flows apart. Each flow has at least one
    /// packet in bucket 0, so where there are hardly more packets, or fewer, they are the flows.
    fn flows(&self, opened: u128, first: u128) -> Option<u128> {
        let flows = if first <= opened + (u128::from(self.latest) << FADE_BITS) { first } else { opened };
        (opened > 0 && flows > 0).then_some(flows)
    }

    /// The oldest piece, while it is being forgotten, and how much of it is.
    fn memory(&self) -> Memory<'_> {
        let oldest = self.pieces.front().filter(|oldest| {
            self.pieces.len() >= PIECES && self.sum.opened.saturating_sub(oldest.opened) >= ENOUGH
        });
        let grown = self.pieces.back().map_or(0, |last| nanos(self.last.since(last.began)));
        let length = nanos(self.span / PIECE).max(1);
        Memory { oldest, faded: (u128::from(grown.min(length)) << FADE_BITS) / u128::from(length) }
    }

    fn turn(&mut self, now: Monotonic) {
        let is_over = |piece: &Piece| now.since(piece.began) >= self.span / PIECE;
        if !self.pieces.back().is_some_and(is_over) {
            return;
        }
        if self.pieces.len() >= PIECES
            && let Some(oldest) = self.pieces.pop_front()
        {
            match self.pieces.front_mut() {
                Some(next) if self.sum.opened - oldest.opened < ENOUGH => next.add(&oldest),
                _ => self.sum.subtract(&oldest),
            }
        }
        self.pieces.push_back(Piece::new(now, self.inside.len()));
    }
}

/// How many buckets a span touches.
const fn buckets(span: Duration) -> usize {
    let nanos = span.as_nanos();
    match bucket_of(if nanos > u64::MAX as u128 { u64::MAX } else { nanos as u64 }) {
        Some(last) => last + 1,
        None => AGES,
    }
}

impl Piece {
    fn new(began: Monotonic, buckets: usize) -> Piece {
        Piece { began, opened: 0, first: 0, brought: vec![0; buckets], reached: vec![0; buckets] }
    }

    fn add(&mut self, other: &Piece) {
        self.combine(other, u64::saturating_add);
    }

    fn subtract(&mut self, other: &Piece) {
        self.combine(other, u64::saturating_sub);
    }

    fn combine(&mut self, other: &Piece, with: impl Fn(u64, u64) -> u64) {
        self.opened = with(self.opened, other.opened);
        self.first = with(self.first, other.first);
        let lists = [(&mut self.brought, &other.brought), (&mut self.reached, &other.reached)];
        for (own, other) in lists {
            for (own, other) in own.iter_mut().zip(other) {
                *own = with(*own, *other);
            }
        }
    }
}

#[cfg(test)]
mod tests;
