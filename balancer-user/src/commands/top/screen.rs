//! What `balancer top` shows: lines made of two statuses, cut to a terminal's size.

use std::collections::HashMap;

use crate::{
    api::{BackendState, BackendStatus, InterfaceState, ServiceStatus, Status},
    commands::status::{listed, listed_by_state},
};

/// Pieces of text that follow each other, and how each looks.
pub type Line = Vec<(String, Look)>;

/// How a piece of text looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    Plain,
    Title,
    Dim,
    Good,
    Odd,
    Bad,
    Bar,
}

/// The width of a share of 100 %, in characters.
const BAR: usize = 20;
const MARGIN: usize = 1;

/// What is shown, and from where on.
pub struct Screen {
    before: Option<Status>,
    now: Status,
    /// Why there is nothing newer.
    trouble: Option<String>,
    is_halted: bool,
    /// Rows of services above the first one that is shown.
    hidden: usize,
}

impl Screen {
    pub fn new(status: Status) -> Screen {
        Screen { before: None, now: status, trouble: None, is_halted: false, hidden: 0 }
    }

    /// Shows a newer status, or why there is none.
    pub fn show(&mut self, status: Result<Status, String>) {
        if self.is_halted {
            return;
        }
        match status {
            // What was published before still stands.
            Ok(status) if status.uptime_ms == self.now.uptime_ms => self.trouble = None,
            Ok(status) => {
                self.before = Some(std::mem::replace(&mut self.now, status));
                self.trouble = None;
            }
            Err(why) => self.trouble = Some(why),
        }
    }

    /// Stops, or goes on.
    pub fn halt(&mut self) {
        self.is_halted = !self.is_halted;
    }

    /// Moves over the services.
    pub fn scroll(&mut self, rows: isize) {
        self.hidden = self.hidden.saturating_add_signed(rows);
    }

    /// The lines for a terminal of this size.
    pub fn lines(&mut self, width: usize, height: usize) -> Vec<Line> {
        let mut lines = self.head();
        let rates = self.before.as_ref().map(|before| Rates::new(before, &self.now));
        let body: Vec<Line> =
            self.now.services.iter().flat_map(|service| service_lines(service, rates.as_ref())).collect();
        let room = height.saturating_sub(lines.len());
        self.hidden = self.hidden.min(body.len().saturating_sub(room));
        lines.extend(body.into_iter().skip(self.hidden).take(room));
        lines.truncate(height);
        lines.into_iter().map(|line| cut(line, width)).collect()
    }

    /// What concerns no single service.
    fn head(&self) -> Vec<Line> {
        let Status { generation, interfaces, flows, drops, missed_ticks, uptime_ms, .. } = &self.now;
        let uptime = humantime::format_duration(std::time::Duration::from_secs(uptime_ms / 1000));
        let mut first = vec![title("balancer"), plain(format!("  up {uptime}, generation {generation}"))];
        for port in interfaces {
            let look = if port.state == InterfaceState::Up { Look::Plain } else { Look::Bad };
            first.push((format!("  {} {} {}", port.name, port.mode, port.state), look));
        }
        if *missed_ticks > 0 {
            first.push((format!("  {missed_ticks} ticks missed"), Look::Odd));
        }
        match &self.trouble {
            Some(why) => first.push((format!("  {why}"), Look::Bad)),
            None if self.is_halted => first.push(("  halted".to_owned(), Look::Odd)),
            None => {}
        }
        let mut lines = vec![
            first,
            vec![title("flows"), plain(format!("     {} of {}", listed_by_state(&flows.now), flows.room))],
        ];
        let since = |name: &str, count: u64| {
            let before = self.before.as_ref()?.drops.get(name)?;
            count.checked_sub(*before)
        };
        let refused = drops.iter().filter_map(|(name, &count)| Some((name, since(name, count)?)));
        let refused = refused.filter(|(_, more)| *more > 0).map(|(name, more)| format!("{name} +{more}"));
        lines.push(vec![title("refused"), plain(format!("   {}", listed(refused)))]);
        lines.push(Vec::new());
        lines
    }
}

/// Packets and bytes a second between two statuses.
struct Rates<'a> {
    seconds: f64,
    before: HashMap<(&'a str, &'a str, std::net::SocketAddr), (u64, u64)>,
}

impl<'a> Rates<'a> {
    fn new(before: &'a Status, now: &Status) -> Rates<'a> {
        let counts = before.services.iter().flat_map(|service| {
            let backends = service.backends.iter();
            backends.map(|backend| {
                let key = (service.name.as_str(), backend.name.as_str(), backend.address);
                (key, (backend.packets, backend.bytes))
            })
        });
        // A daemon that has started anew has nothing before.
        let elapsed = now.uptime_ms.saturating_sub(before.uptime_ms);
        Rates { seconds: elapsed as f64 / 1000.0, before: counts.collect() }
    }

    /// Of one backend; `None` while it is not known.
    fn of(&self, service: &str, backend: &BackendStatus) -> Option<(f64, f64)> {
        let (packets, bytes) = self.before.get(&(service, backend.name.as_str(), backend.address))?;
        let packets = backend.packets.checked_sub(*packets)?;
        let bytes = backend.bytes.checked_sub(*bytes)?;
        (self.seconds > 0.0).then(|| (packets as f64 / self.seconds, bytes as f64 / self.seconds))
    }
}

fn service_lines(service: &ServiceStatus, rates: Option<&Rates<'_>>) -> Vec<Line> {
    let ServiceStatus { name, address, protocol, method, forward, backends } = service;
    let rates: Vec<Option<(f64, f64)>> = backends.iter().map(|backend| rates?.of(name, backend)).collect();
    let (packets, bytes) = rates.iter().flatten().fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    let about = format!("  {address}/{protocol}  {method}  {forward}");
    let total = format!("  {packets:.0} packets/s  {:.2} Mbit/s", megabits(bytes));
    let mut lines = vec![vec![title(name), plain(about), (total, Look::Dim)]];
    let widest = backends.iter().map(|backend| backend.name.len()).max().unwrap_or(0).max("backend".len());
    let header = format!(
        "{:MARGIN$}{:widest$}  {:<11} {:>6} {:>8} {:>10} {:>9} {:>12} {:>14}  {:>6}",
        "", "backend", "state", "weight", "active", "packets/s", "Mbit/s", "N", "Nw", "share"
    );
    lines.push(vec![(header, Look::Dim)]);
    for (backend, rate) in backends.iter().zip(rates) {
        let look = match backend.state {
            BackendState::Up => Look::Good,
            BackendState::Starting | BackendState::Disabled => Look::Odd,
            BackendState::Draining | BackendState::Leaving => Look::Odd,
            BackendState::Down | BackendState::Unreachable => Look::Bad,
        };
        let or_dash = |figure: Option<String>| figure.unwrap_or_else(|| "-".to_owned());
        let figures = format!(
            " {:>6} {:>8} {:>10} {:>9} {:>12.2} {:>14}  {:>5.1}% ",
            backend.weight,
            backend.active,
            or_dash(rate.map(|(packets, _)| format!("{packets:.0}"))),
            or_dash(rate.map(|(_, bytes)| format!("{:.2}", megabits(bytes)))),
            backend.n,
            or_dash(backend.nw.map(|nw| format!("{nw:.2}"))),
            backend.share * 100.0,
        );
        lines.push(vec![
            plain(format!("{:MARGIN$}{:widest$}  ", "", backend.name)),
            (format!("{:<11}", backend.state), look),
            plain(figures),
            (bar(backend.share), Look::Bar),
        ]);
    }
    lines.push(Vec::new());
    lines
}

fn megabits(bytes: f64) -> f64 {
    bytes * 8.0 / 1e6
}

/// A share of 0 to 1 as a bar, exact to an eighth of a character.
fn bar(share: f64) -> String {
    const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (share.clamp(0.0, 1.0) * (BAR * 8) as f64).round() as usize;
    "█".repeat(eighths / 8) + PARTS[eighths % 8]
}

fn title(text: &str) -> (String, Look) {
    (text.to_owned(), Look::Title)
}

fn plain(text: String) -> (String, Look) {
    (text, Look::Plain)
}

/// No more than `width` characters; each that is used here is one column wide.
fn cut(line: Line, width: usize) -> Line {
    let mut left = width;
    let mut fitting = Vec::with_capacity(line.len());
    for (text, look) in line {
        let text: String = text.chars().take(left).collect();
        left -= text.chars().count();
        fitting.push((text, look));
    }
    fitting
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::tests::example;

    fn drawn(screen: &mut Screen, width: usize, height: usize) -> String {
        let lines = screen.lines(width, height).into_iter();
        let lines = lines.map(|line| line.into_iter().map(|(text, _)| text).collect::<String>());
        lines.map(|line| line.trim_end().to_owned() + "\n").collect()
    }

    /// The example, and a while later.
    fn later(milliseconds: u64) -> Status {
        let mut status = example();
        status.uptime_ms += milliseconds;
        let backend = &mut status.services[0].backends[0];
        backend.packets += 500;
        backend.bytes += 250_000;
        status.drops.insert("malformed".to_owned(), 9);
        status
    }

    #[test]
    fn rates_are_those_between_two_statuses() {
        let mut screen = Screen::new(example());
        let first = drawn(&mut screen, 200, 50);
        assert!(
            first.contains(" web-11   up               2        3          -         -        46.67"),
            "{first}"
        );
        screen.show(Ok(later(2000)));
        let expected = "\
balancer  up 1h 2s, generation 3  eth0 generic up  4 ticks missed
flows     5 half open, 6 established, 7 closing of 1024
refused   malformed +2

web  192.0.2.10:80/tcp  least-packets  nat  250 packets/s  1.00 Mbit/s
 backend  state       weight   active  packets/s    Mbit/s            N             Nw   share
 web-11   up               2        3        250      1.00        46.67      233333.33   33.3% ██████▋
 web-12   unreachable      0        3          0      0.00        46.67              -    0.0%

";
        assert_eq!(drawn(&mut screen, 200, 50), expected);
        // The same status once more is nothing new.
        screen.show(Ok(later(2000)));
        assert_eq!(drawn(&mut screen, 200, 50), expected);

        // A daemon that has begun anew, with counters that may have begun anew too.
        screen.show(Ok(Status { uptime_ms: 200, ..example() }));
        assert!(drawn(&mut screen, 200, 50).contains("   -         -        46.67"));
    }

    #[test]
    fn without_an_answer_the_last_one_stays_and_trouble_is_told() {
        let mut screen = Screen::new(example());
        screen.show(Err("no balancer answers".to_owned()));
        let shown = drawn(&mut screen, 200, 50);
        assert!(shown.contains("missed  no balancer answers\n") && shown.contains("web-11"), "{shown}");
        screen.show(Ok(example()));
        assert!(!drawn(&mut screen, 200, 50).contains("no balancer answers"));
        screen.halt();
        screen.show(Err("no balancer answers".to_owned()));
        assert!(drawn(&mut screen, 200, 50).contains("missed  halted\n"));
    }

    #[test]
    fn it_fits_and_moves() {
        let mut screen = Screen::new(example());
        for (width, height) in [(0, 0), (1, 1), (40, 3), (80, 24), (300, 6)] {
            let lines = screen.lines(width, height);
            assert!(lines.len() <= height);
            let long = |line: &Line| line.iter().map(|(text, _)| text.chars().count()).sum::<usize>();
            assert!(lines.iter().all(|line| long(line) <= width), "{width} {height}");
        }
        let second =
            |screen: &mut Screen| drawn(screen, 100, 6).lines().nth(4).unwrap_or_default().to_owned();
        for (rows, expected) in [
            (0, "web  "),
            (1, " backend"),
            (1, " web-11"),
            (isize::MAX, " web-12"),
            (-1, " web-11"),
            (isize::MIN, "web  "),
        ] {
            screen.scroll(rows);
            let shown = second(&mut screen);
            assert!(shown.starts_with(expected), "after {rows}: {shown:?}");
        }
    }

    #[test]
    fn bars() {
        for (share, expected) in
            [(0.0, ""), (0.05, "█"), (0.5, "██████████"), (0.0281, "▌"), (2.0, "████████████████████")]
        {
            assert_eq!(bar(share), expected);
        }
    }
}
