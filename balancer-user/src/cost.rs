//! What one flow is expected to add to its backend's load.

use crate::load::Load;

/// The load that one flow is expected to bring within the window: what a pick is charged when the method is
/// simulated forward, and what a pick weighs that the counters do not show yet.
///
/// For now it is the mean over the service's window. A curve by age, learned per service, will take its place: its
/// total is then the charge, and what it still promises of each recent flow is added to that flow's backend
/// (committed load). Callers need nothing but `charge`, so the change stays in here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowCost(Load);

impl FlowCost {
    /// The mean of `total` units over `opened` flows, both within the window; at least one unit.
    ///
    /// With no flow opened the whole total counts as one: a pick then weighs so much that the next one
    /// goes elsewhere, which is safe while nothing is known.
    pub fn mean(total: u64, opened: u64) -> FlowCost {
        FlowCost(Load::mean(total, opened).max(Load::ONE))
    }

    /// What a pick adds.
    pub const fn charge(self) -> Load {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_costs_the_mean_and_at_least_one() {
        assert_eq!(FlowCost::mean(0, 0).charge(), Load::ONE);
        assert_eq!(FlowCost::mean(10, 10).charge(), Load::ONE);
        assert_eq!(FlowCost::mean(3, 10).charge(), Load::ONE);
        assert_eq!(FlowCost::mean(25, 10).charge(), Load::from_decimal("2.5").unwrap());
        assert_eq!(FlowCost::mean(700, 0).charge(), Load::units(700));
    }
}
