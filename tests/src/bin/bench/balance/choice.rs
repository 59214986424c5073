//! The methods that are compared.

mod balancer;
mod maglev;
mod others;

use balancer_common::{AGES, Traffic};
use balancer_user::{balance::Observation, method::Method};

use self::{
    balancer::Balancer,
    maglev::Maglev,
    others::{LeastConnections, Random, RoundRobin, TwoChoices},
};

/// What flows there are at a backend, as one would know who sees each flow open and close.
#[derive(Clone, Copy, Debug, Default)]
pub struct Live {
    /// Open flows.
    pub active: u64,
    /// Flows that ended within the last two minutes.
    pub inactive: u64,
}

/// A way to choose the backend of a new flow.
pub trait Choice {
    /// From `now` (ns) on, these weights; 0 = takes no flows.
    fn set_weights(&mut self, now: u64, weights: &[u8]);
    /// Where the next flow goes.
    fn choose(&mut self, live: &[Live]) -> usize;
    /// The counters are read: what each backend's have grown by, and those by age.
    fn observe(&mut self, _now: u64, _growth: &[Observation], _ages: &[Traffic; AGES]) {}
    /// A little later, the next choices are made.
    fn plan(&mut self, _now: u64) {}
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// This balancer, by load.
    Balancer,
    /// The same without what it learns of flows by age.
    BareWindow,
    RoundRobin,
    Random,
    TwoChoices,
    LeastConnections,
    Maglev,
}

impl Kind {
    pub const ALL: [Kind; 7] = [
        Kind::Balancer,
        Kind::BareWindow,
        Kind::RoundRobin,
        Kind::Random,
        Kind::TwoChoices,
        Kind::LeastConnections,
        Kind::Maglev,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Kind::Balancer => "balancer",
            Kind::BareWindow => "bare window",
            Kind::RoundRobin => "round robin",
            Kind::Random => "random",
            Kind::TwoChoices => "two choices",
            Kind::LeastConnections => "least connections",
            Kind::Maglev => "maglev",
        }
    }

    pub fn start(self, method: Method, seed: u64) -> Box<dyn Choice> {
        let random = || fastrand::Rng::with_seed(seed ^ 0x5eed);
        match self {
            Kind::Balancer => Box::new(Balancer::new(method, true)),
            Kind::BareWindow => Box::new(Balancer::new(method, false)),
            Kind::RoundRobin => Box::new(RoundRobin::default()),
            Kind::Random => Box::new(Random::new(random())),
            Kind::TwoChoices => Box::new(TwoChoices::new(random())),
            Kind::LeastConnections => Box::new(LeastConnections::default()),
            Kind::Maglev => Box::new(Maglev::new(random())),
        }
    }
}
