//! The flows that clients open: when, how many packets, how fast.

use fastrand::Rng;

/// Nanoseconds in a second: the unit of time here.
pub const SECOND: u64 = 1_000_000_000;

/// What kind of flows there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// 20/s; exponential duration, mean 60 s; 10 packets/s.
    Exp,
    /// 20/s; heavy-tailed in duration (mean 60 s, at most 20 min) and in rate (mean 10 packets/s).
    Heavy,
    /// 200/s; a quarter of a second, 1 + Poisson(9) packets.
    Short,
    /// 200/s; one packet.
    One,
    /// 60/s; four of five are one packet, the rest as `Heavy`.
    Mix,
}

/// A flow to come.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    /// When its first packet comes.
    pub at: u64,
    /// Time from one packet to the next.
    pub gap: u64,
    /// Packets.
    pub packets: u64,
    /// When it ends: not before its last packet.
    pub end: u64,
    /// Bytes of each packet.
    pub size: u64,
}

impl Workload {
    pub const ALL: [Workload; 5] =
        [Workload::Exp, Workload::Heavy, Workload::Short, Workload::One, Workload::Mix];

    pub fn name(self) -> &'static str {
        match self {
            Workload::Exp => "exp",
            Workload::Heavy => "heavy",
            Workload::Short => "short",
            Workload::One => "one",
            Workload::Mix => "mix",
        }
    }

    /// Flows a second with three backends.
    fn arrivals(self) -> f64 {
        match self {
            Workload::Exp | Workload::Heavy => 20.0,
            Workload::Short | Workload::One => 200.0,
            Workload::Mix => 60.0,
        }
    }

    /// Poisson arrivals for `backends` until `end`.
    pub fn flows(self, seed: u64, backends: usize, end: u64) -> impl Iterator<Item = Flow> {
        let mut random = Rng::with_seed(seed);
        let mean = 3.0 / (self.arrivals() * backends as f64);
        let mut at = 0;
        std::iter::from_fn(move || {
            at += nanos(exponential(&mut random) * mean);
            let (seconds, packets, gap) = self.shape(&mut random);
            let size = if random.u8(0..3) == 0 { 100 } else { 1_400 };
            (at < end).then(|| Flow { at, gap: nanos(gap), packets, end: at + nanos(seconds), size })
        })
    }

    /// Duration in seconds, packets, and seconds from one to the next.
    fn shape(self, random: &mut Rng) -> (f64, u64, f64) {
        let steady = |seconds: f64, rate: f64| (seconds, 1 + (seconds * rate) as u64, 1.0 / rate);
        match self {
            Workload::Exp => steady(exponential(random) * 60.0, 10.0),
            Workload::Heavy => {
                let seconds = (lomax(random, 1.3) + 1.0) * 60.0 * 0.3 / 1.3;
                let rate = 10.0 * ((lomax(random, 1.5) + 1.0) / 3.0).min(50.0);
                steady(seconds.min(1_200.0), rate)
            }
            Workload::Short => {
                let packets = 1 + poisson(random, 9.0);
                (0.25, packets, 0.25 / packets as f64)
            }
            Workload::One => (0.0, 1, 1.0),
            Workload::Mix if random.u8(0..5) < 4 => Workload::One.shape(random),
            Workload::Mix => Workload::Heavy.shape(random),
        }
    }
}

fn nanos(seconds: f64) -> u64 {
    (seconds * SECOND as f64) as u64
}

/// Mean 1.
fn exponential(random: &mut Rng) -> f64 {
    -(1.0 - random.f64()).ln()
}

/// The Pareto distribution moved to start at 0.
fn lomax(random: &mut Rng, shape: f64) -> f64 {
    (1.0 - random.f64()).powf(-1.0 / shape) - 1.0
}

/// How many exponential steps fit into the mean.
fn poisson(random: &mut Rng, mean: f64) -> u64 {
    let mut time = 0.0;
    let mut count = 0;
    loop {
        time += exponential(random);
        if time > mean {
            return count;
        }
        count += 1;
    }
}
