//! What a flow is taken to cost while nothing has been learned about its load by age.

use crate::load::Load;

/// The mean of `total` units over `opened` flows, both within the window; at least one unit.
///
/// With no flow opened the whole total counts as one: a pick then weighs so much that the next one
/// goes elsewhere, which is safe while nothing is known.
pub fn mean_charge(total: u64, opened: u64) -> Load {
    Load::mean(total, opened).max(Load::ONE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_costs_the_mean_and_at_least_one() {
        assert_eq!(mean_charge(0, 0), Load::ONE);
        assert_eq!(mean_charge(10, 10), Load::ONE);
        assert_eq!(mean_charge(3, 10), Load::ONE);
        assert_eq!(mean_charge(25, 10), Load::from_decimal("2.5").unwrap());
        assert_eq!(mean_charge(700, 0), Load::units(700));
    }
}
