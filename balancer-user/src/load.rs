//! What a backend carries, as an exact number: how loads are compared and shown.

use std::cmp::Ordering;

/// Parts of one unit (packet, byte, request): decimals of up to nine places are exact, as in the tables that
/// `simulate` plays, and so is the comparison of their sums.
const PARTS: u128 = 1_000_000_000;

/// A load in fixed point: an unsigned number of billionths, at most 10^23 units.
///
/// A whole counter (2^64), weighted, stays far below the limit, and a load at the limit can still be multiplied by
/// the factors of `cmp_weighted` and `weighted` without overflow. Sums stop at the limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Load(u128);

impl Load {
    /// No load.
    pub const ZERO: Load = Load(0);
    /// One packet, byte or request.
    pub const ONE: Load = Load(PARTS);
    const MAX: Load = Load(100_000_000_000_000_000_000_000 * PARTS);

    /// This many whole units.
    pub const fn units(units: u64) -> Load {
        Load(units as u128 * PARTS)
    }

    /// `total` ÷ `count` (at least 1), rounded half up to a billionth.
    pub const fn mean(total: u64, count: u64) -> Load {
        let count = if count == 0 { 1 } else { count as u128 };
        Load((total as u128 * PARTS * 2 + count) / (count * 2))
    }

    /// The load nearest to a plain decimal such as `12.75`; `None` if it is no such number, or above the limit.
    pub fn from_decimal(text: &str) -> Option<Load> {
        let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
        let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        if whole.is_empty() || !digits(whole) || !digits(decimals) {
            return None;
        }
        let kept: String = decimals.chars().chain("0000000000".chars()).take(10).collect();
        let parts = (kept.parse::<u128>().ok()? + 5) / 10;
        let load = whole.parse::<u128>().ok()?.checked_mul(PARTS)?.checked_add(parts)?;
        (load <= Self::MAX.0).then_some(Load(load))
    }

    /// This many millionths of a unit.
    pub const fn micros(micros: u128) -> Load {
        Load(micros.saturating_mul(PARTS / 1_000_000)).limited()
    }

    /// In millionths of a unit, rounded down.
    pub const fn in_micros(self) -> u128 {
        self.0 / (PARTS / 1_000_000)
    }

    /// In billionths of a unit.
    pub const fn parts(self) -> u128 {
        self.0
    }

    /// Both together.
    pub const fn plus(self, other: Load) -> Load {
        Load(self.0.saturating_add(other.0)).limited()
    }

    /// What is left without `other`; nothing if that is more.
    pub const fn less(self, other: Load) -> Load {
        Load(self.0.saturating_sub(other.0))
    }

    /// `count` of these.
    pub const fn times(self, count: u64) -> Load {
        Load(self.0.saturating_mul(count as u128)).limited()
    }

    /// This load as often as `factor` says; a fraction of a billionth is dropped.
    pub const fn scaled(self, factor: Load) -> Load {
        // Split, so that the product of the whole parts does not meet the 128-bit limit early.
        let whole = self.0.saturating_mul(factor.0 / PARTS);
        let rest = self.0.saturating_mul(factor.0 % PARTS) / PARTS;
        Load(whole.saturating_add(rest)).limited()
    }

    /// `part` ÷ `of` of this load (`part` ≤ `of`), to 1/65536 and rounded down.
    pub const fn share(self, part: u64, of: u64) -> Load {
        if of == 0 || part >= of {
            return self;
        }
        let fraction = ((part as u128) << 16) / of as u128;
        Load((self.0 * fraction) >> 16)
    }

    /// Mean of N / weight over the backends given, × `weight`, rounded down; `None` of none. Weights of 0 are left out.
    pub fn mean_for(weight: u8, of: impl IntoIterator<Item = (Load, u8)>) -> Option<Load> {
        let (mut sum, mut count) = (Load::ZERO, 0);
        for (load, other) in of {
            if let Some(per) = (load.0 * u128::from(weight)).checked_div(u128::from(other)) {
                sum = sum.plus(Load(per).limited());
                count += 1;
            }
        }
        sum.0.checked_div(count).map(Load)
    }

    /// Orders two backends by N × 10000 / weight, exactly: the fractions are compared by cross-multiplication.
    /// Weights may be in any unit, up to 2^20 of it.
    pub const fn cmp_weighted(self, weight: u32, other: Load, other_weight: u32) -> Ordering {
        let (left, right) = (self.0 * other_weight as u128, other.0 * weight as u128);
        if left < right {
            Ordering::Less
        } else if left > right {
            Ordering::Greater
        } else {
            Ordering::Equal
        }
    }

    /// N for display, rounded half up to two decimals.
    pub fn shown(self) -> f64 {
        hundredths(self.0, PARTS)
    }

    /// Nw = N × 10000 / weight for display, rounded half up to two decimals; `None` for weight 0, which has none.
    pub fn shown_weighted(self, weight: impl Into<u32>) -> Option<f64> {
        let weight = weight.into();
        (weight > 0).then(|| hundredths(self.0 * 10_000, PARTS * u128::from(weight)))
    }

    /// A load of bytes as the rate that carries them in `micros` microseconds: Mbit/s.
    pub const fn megabits_over(self, micros: u64) -> Load {
        let micros = if micros == 0 { 1 } else { micros as u128 };
        Load(self.0.saturating_mul(8) / micros).limited()
    }

    const fn limited(self) -> Load {
        if self.0 > Self::MAX.0 { Self::MAX } else { self }
    }
}

/// The fraction rounded half up to two decimals: `7 × 10000 / 3` is 23333.33.
fn hundredths(numerator: u128, denominator: u128) -> f64 {
    let rounded = (numerator * 200 + denominator) / (denominator * 2);
    rounded as f64 / 100.0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn decimals_are_exact_to_a_billionth() {
        for (text, parts) in [
            ("0", Some(0)),
            ("3", Some(3_000_000_000)),
            ("0.1", Some(100_000_000)),
            ("12.750", Some(12_750_000_000)),
            ("0.0000000014", Some(1)),
            ("0.0000000015", Some(2)),
            ("0.9999999999", Some(1_000_000_000)),
            ("100000000000000000000000", Some(Load::MAX.0)),
            ("100000000000000000000001", None),
            ("-1", None),
            ("", None),
            (".5", None),
            ("1e3", None),
            ("NaN", None),
        ] {
            assert_eq!(Load::from_decimal(text).map(|load| load.0), parts, "{text}");
        }
        let tenth = Load::from_decimal("0.1").unwrap();
        assert_eq!(tenth.plus(tenth).plus(tenth), Load::from_decimal("0.3").unwrap());
    }

    #[test]
    fn nw_is_shown_rounded_half_up_to_two_decimals() {
        assert_eq!(Load::units(7).shown_weighted(3u8), Some(23333.33));
        assert_eq!(Load::units(5).shown_weighted(3u8), Some(16666.67));
        assert_eq!(Load::units(8).shown_weighted(3u8), Some(26666.67));
        assert_eq!(Load::units(3).shown_weighted(2u8), Some(15000.0));
        assert_eq!(Load::units(3).shown_weighted(0u8), None);
        assert_eq!(Load::from_decimal("0.125").unwrap().shown(), 0.13);
        assert_eq!(Load::from_decimal("0.124").unwrap().shown(), 0.12);
    }

    #[test]
    fn the_largest_loads_neither_overflow_nor_tie() {
        // 14 s at 100 Gbit/s.
        let full = Load::units(175_000_000_000);
        let more = full.plus(Load(1));
        assert_eq!(full.cmp_weighted(100, more, 100), Ordering::Less);
        assert_eq!(full.cmp_weighted(1, full, 100), Ordering::Greater);
        assert_eq!(full.times(100).cmp_weighted(100, full, 1), Ordering::Equal);
        assert_eq!(full.shown_weighted(1u8), Some(1.75e15));
        let max = Load::MAX;
        assert_eq!(max.plus(max), max);
        assert_eq!(max.times(u64::MAX), max);
        assert_eq!(max.scaled(max), max);
        assert_eq!(max.cmp_weighted(1 << 20, max, 1 << 20), Ordering::Equal);
        assert!((max.shown_weighted(1u8).unwrap() / 1e27 - 1.0).abs() < 1e-12);
        assert_eq!(max.share(1, 2).0, max.0 / 2);
        assert_eq!(Load::mean_for(255, [(max, 1), (max, 1)]), Some(Load(max.0 / 2)));
        assert_eq!(Load::mean(u64::MAX, 1), Load::units(u64::MAX));
    }

    #[test]
    fn means_scale_and_share() {
        assert_eq!(Load::mean(10, 4), Load(2_500_000_000));
        assert_eq!(Load::mean(2, 3), Load(666_666_667));
        assert_eq!(Load::mean(7, 0), Load::units(7));
        assert_eq!(Load::units(3).scaled(Load::from_decimal("1.5").unwrap()), Load(4_500_000_000));
        assert_eq!(Load::micros(1_500_000), Load(1_500_000_000));
        assert_eq!(Load(1_500_000_999).in_micros(), 1_500_000);
        assert_eq!(Load::units(8).less(Load::units(3)), Load::units(5));
        assert_eq!(Load::units(3).less(Load::units(8)), Load::ZERO);
        assert_eq!(Load::units(8).share(1, 4), Load::units(2));
        assert_eq!(
            Load::mean_for(2, [(Load::units(6), 3), (Load::units(8), 2), (Load::ONE, 0)]),
            Some(Load::units(6))
        );
        assert_eq!(Load::mean_for(2, [(Load::ONE, 0)]), None);
        // 12.5 MB in one second are 100 Mbit/s.
        assert_eq!(Load::units(12_500_000).megabits_over(1_000_000), Load::units(100));
    }

    proptest! {
        #[test]
        fn weighted_order_is_that_of_the_exact_fractions(
            a in any::<u64>(), b in any::<u64>(), wa in 1u8..=100, wb in 1u8..=100,
        ) {
            // In units, where both products fit beyond doubt.
            let exact = (u128::from(a) * u128::from(wb)).cmp(&(u128::from(b) * u128::from(wa)));
            prop_assert_eq!(Load::units(a).cmp_weighted(wa.into(), Load::units(b), wb.into()), exact);
            // A multiple of both weights on both sides is a tie however large.
            let (x, y) = (Load::units(a).times(u64::from(wa)), Load::units(a).times(u64::from(wb)));
            prop_assert_eq!(x.cmp_weighted(wa.into(), y, wb.into()), Ordering::Equal);
        }

        #[test]
        fn what_is_shown_is_within_half_a_hundredth(n in 0u64..1 << 30, weight in 1u8..=100) {
            let shown = Load::units(n).shown_weighted(weight).unwrap();
            let hundredths = (shown * 100.0).round() as i128;
            let exact = i128::from(n) * 1_000_000;
            let off = hundredths * i128::from(weight) - exact;
            prop_assert!(off * 2 <= i128::from(weight) && off * 2 > -i128::from(weight), "{} {}", shown, off);
        }

        #[test]
        fn decimals_are_read_as_written(whole in 0u64..1 << 60, parts in 0u64..1_000_000_000) {
            let load = Load::from_decimal(&format!("{whole}.{parts:09}")).unwrap();
            prop_assert_eq!(load.0, u128::from(whole) * PARTS + u128::from(parts));
        }
    }
}
