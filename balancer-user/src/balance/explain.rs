use std::cmp::Ordering;

use balancer_common::BackendId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Balance, Measure, Score, Taken};
use crate::{clock::Monotonic, forward::Contender, load::Load};

/// Why the next flows go where they go.
#[derive(Clone, Debug, PartialEq)]
pub struct Explained {
    /// How each backend stands before the next pick, in configured order.
    pub backends: Vec<Stance>,
    /// Whoever was picked last: among equals it is the turn of the next after it.
    pub last: Option<BackendId>,
    /// The next picks, as the installed ring has them; none where a hash picks.
    pub picks: Vec<Pick>,
}

/// How one backend stands before the next pick. Loads are in the method's unit, to two decimals.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stance {
    /// As it is scored: N, what is committed, ramp and share of the ring. Nw is that of the score, without `pending`.
    pub score: Score,
    /// Whether it can be picked.
    pub takes: Takes,
    /// What a newcomer counts for the history that it lacks.
    pub lacking: f64,
    /// What the flows count that have been sent to it since the counters were read.
    pub pending: f64,
    /// All of that together: what is compared, before it is weighted. 0 where nothing is compared.
    pub compared: f64,
    /// Compared × 10000 / weight; `None` where nothing is compared, and for weight 0.
    pub nw: Option<f64>,
    /// Whether its Nw is the lowest, and another's as well.
    pub is_tied: bool,
}

/// Whether a backend can be picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Takes {
    /// It can.
    Yes,
    /// Its weight is 0.
    No,
    /// It has `max-active` flows.
    Full,
    /// It is a backup, and another that is none can be picked.
    Standby,
}

/// One pick.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pick {
    /// Who is picked; `None`: the slot is nobody's, since all are full.
    pub backend: Option<BackendId>,
    /// Its Nw before it is; `None` where nothing is compared.
    pub nw: Option<f64>,
    /// Who has the lowest Nw besides, and comes next in turn.
    pub second: Option<BackendId>,
    /// How much higher that one's Nw is: 0 in a tie. Below 0 where a ring that is too short for the arrivals goes round.
    pub margin: Option<f64>,
    /// Whose Nw is the same.
    pub tied: Vec<BackendId>,
}

impl Balance {
    /// The table behind the next `count` picks. `now` is when the ring was last planned, `taken` how many of its slots have
    /// been taken until now.
    pub fn explain(&self, now: Monotonic, taken: u64, count: usize) -> Explained {
        let standings = self.standings(now, &self.totals(now));
        // As they stood when the ring was planned, and the flows since.
        let (mut contenders, counted) = match &self.asked {
            Some(asked) => (asked.question.contenders.clone(), asked.question.taken),
            None => (self.contenders(&standings), taken),
        };
        self.charge_taken(&mut contenders, Taken { counted, now: taken });

        let takes = self.takes(&contenders);
        let lowest = lowest(&contenders, &takes, None);
        let is_lowest = |place: usize| {
            let lowest = lowest.filter(|_| self.compares());
            lowest.is_some_and(|lowest| is_even(&contenders, &takes, place, lowest))
        };
        let ties = (0..contenders.len()).filter(|place| is_lowest(*place)).count();
        let each = standings.iter().zip(self.scores(now)).zip(contenders.iter().zip(&takes)).enumerate();
        let backends = each.map(|(place, ((standing, score), (contender, takes)))| {
            let shown = |load: Load| self.in_unit(load).shown();
            Stance {
                score,
                takes: *takes,
                lacking: shown(standing.compared.less(standing.measured).less(standing.committed)),
                pending: shown(contender.n.less(standing.compared)),
                compared: shown(contender.n),
                nw: self.nw(contender),
                is_tied: ties > 1 && is_lowest(place),
            }
        });
        let backends = backends.collect();
        let last = self.installed.last_pick(taken, |id| self.position(id).is_some());
        let upcoming =
            self.installed.upcoming(taken).take(if self.measure == Measure::Hash { 0 } else { count });
        let picks = upcoming.map(|id| self.pick(&mut contenders, id)).collect();
        Explained { backends, last, picks }
    }

    /// One pick, and what it leaves.
    fn pick(&self, contenders: &mut [Contender], id: BackendId) -> Pick {
        let Some(winner) = self.position(id) else { return Pick::default() };
        let id_of = |place: usize| self.backends.get(place).map(|backend| backend.member.id);
        let mut pick = Pick { backend: Some(id), ..Pick::default() };
        if self.compares() {
            let takes = self.takes(contenders);
            let second = lowest(contenders, &takes, Some(winner));
            let even = (0..contenders.len())
                .filter(|place| *place != winner && is_even(contenders, &takes, *place, winner));
            pick.tied = even.filter_map(id_of).collect();
            pick.second = second.and_then(id_of);
            pick.nw = self.nw(&contenders[winner]);
            let difference = |second: usize| Some(self.nw(&contenders[second])? - pick.nw?);
            pick.margin = second.and_then(difference).map(|margin| (margin * 100.0).round() / 100.0);
        }
        let contender = &mut contenders[winner];
        contender.n = contender.n.plus(contender.charge);
        contender.room = contender.room.saturating_sub(1);
        pick
    }

    /// Who can be picked.
    fn takes(&self, contenders: &[Contender]) -> Vec<Takes> {
        let each = || contenders.iter().zip(&self.backends);
        let can = |contender: &Contender| contender.weight > 0 && contender.room > 0;
        let is_standby = each().any(|(contender, backend)| can(contender) && !backend.member.is_backup);
        each()
            .map(|(contender, backend)| match contender {
                Contender { weight: 0, .. } => Takes::No,
                Contender { room: 0, .. } => Takes::Full,
                _ if backend.member.is_backup && is_standby => Takes::Standby,
                _ => Takes::Yes,
            })
            .collect()
    }

    fn nw(&self, contender: &Contender) -> Option<f64> {
        self.weighted(contender.n, contender.weight).filter(|_| self.compares())
    }

    const fn compares(&self) -> bool {
        !matches!(self.measure, Measure::Turns | Measure::Hash)
    }
}

const fn compare(a: &Contender, b: &Contender) -> Ordering {
    a.n.cmp_weighted(a.weight, b.n, b.weight)
}

/// The lowest of those that can be picked, but for `winner`: among equals the first after it.
fn lowest(contenders: &[Contender], takes: &[Takes], winner: Option<usize>) -> Option<usize> {
    let count = contenders.len();
    let first = winner.map_or(0, |winner| winner + 1);
    let in_turn = (0..count).map(|step| (first + step) % count).filter(|place| Some(*place) != winner);
    let can = in_turn.filter(|place| takes.get(*place) == Some(&Takes::Yes));
    can.min_by(|a, b| compare(&contenders[*a], &contenders[*b]))
}

/// Whether `place` can be picked, and compares equal to `other`.
fn is_even(contenders: &[Contender], takes: &[Takes], place: usize, other: usize) -> bool {
    takes.get(place) == Some(&Takes::Yes)
        && compare(&contenders[place], &contenders[other]) == Ordering::Equal
}
