//! `balancer top` on a terminal.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    fs::File,
    io::{Read as _, Write as _},
    process::{Child, Command},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use balancer_tests::{
    Balancer, Plan,
    config::{self, Service},
    operator,
    process::{Place, balancer_binary},
    status,
};
use nix::{
    pty::{Winsize, openpty},
    sys::{
        signal::{Signal, kill},
        termios::{LocalFlags, tcgetattr},
    },
    unistd::Pid,
};

const LIMIT: Duration = Duration::from_secs(10);
const ENTER: &str = "\u{1b}[?1049h";
const LEAVE: &str = "\u{1b}[?1049l";

/// `balancer top` on a terminal of 120 × 30 characters, and what it has drawn.
struct Top {
    child: Child,
    keys: File,
    drawn: mpsc::Receiver<String>,
    all: String,
}

impl Top {
    fn start(place: &Place) -> Top {
        let size = Winsize { ws_row: 30, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(Some(&size), None).unwrap();
        let mut command = Command::new(balancer_binary().unwrap());
        command.args(["top", "--interval", "100ms", "--socket"]).arg(place.socket()).env("NO_COLOR", "1");
        command
            .stdin(pty.slave.try_clone().unwrap())
            .stdout(pty.slave.try_clone().unwrap())
            .stderr(pty.slave);
        let child = command.spawn().unwrap();
        let keys = File::from(pty.master);
        let mut screen = keys.try_clone().unwrap();
        let (send, drawn) = mpsc::channel();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            // EIO: nobody has the other end any more.
            while let Ok(length @ 1..) = screen.read(&mut buffer) {
                drop(send.send(String::from_utf8_lossy(&buffer[..length]).into_owned()));
            }
        });
        Top { child, keys, drawn, all: String::new() }
    }

    /// Waits until `text` is drawn, after all that was waited for before.
    fn wait_for(&mut self, text: &str) {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(at) = self.all.find(text) {
                self.all.drain(..at + text.len());
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let more = self.drawn.recv_timeout(left);
            self.all.push_str(&more.unwrap_or_else(|_| panic!("no {text:?} in {:?}", self.all)));
        }
    }

    fn has_raw_terminal(&self) -> bool {
        !tcgetattr(&self.keys).unwrap().local_flags.contains(LocalFlags::ICANON)
    }

    /// It ends with this exit code, and the terminal is as before.
    fn assert_over(&mut self) {
        self.wait_for(LEAVE);
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
        assert!(!self.has_raw_terminal());
    }
}

impl Drop for Top {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

#[test]
fn it_shows_what_happens_outlives_the_daemon_and_gives_the_terminal_back() {
    let bench = Plan::backends(2).build().unwrap();
    let text = config::text("", &[Service::new("udp", "round-robin", &[1, 3])]);
    let balancer = Balancer::start(&bench.balancer, &text).unwrap();
    status::wait_until_up(&balancer).unwrap();

    let mut top = Top::start(balancer.place());
    top.wait_for(ENTER);
    top.wait_for("generation 1");
    top.wait_for("75.0%");
    assert!(top.has_raw_terminal());
    balancer.call(&["backend", "set", "b2", "weight=1"]).unwrap();
    top.wait_for("generation 2");
    top.wait_for("50.0%");

    let (_, place) = balancer.stop().unwrap();
    top.wait_for("no balancer answers");
    let balancer = Balancer::start_in(place, &bench.balancer).unwrap();
    top.wait_for("generation 1");
    top.keys.write_all(b"q").unwrap();
    top.assert_over();

    for end in [b"\x03", b"\x1b"] {
        let mut top = Top::start(balancer.place());
        top.wait_for("generation 1");
        top.keys.write_all(end).unwrap();
        top.assert_over();
    }
    let mut top = Top::start(balancer.place());
    top.wait_for("generation 1");
    kill(Pid::from_raw(top.child.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
    top.assert_over();
}

#[test]
fn without_a_terminal_or_a_daemon_it_says_so() {
    let ended = operator::balancer(["top", "--socket", "/nowhere/b.sock"]).unwrap();
    assert_eq!(ended.code, 2, "{}", ended.text);
    assert!(ended.text.contains("for files and pipes there is `balancer status`"), "{}", ended.text);

    let place = Place::new().unwrap();
    let mut top = Top::start(&place);
    top.wait_for("no balancer answers at");
    assert_eq!(top.child.wait().unwrap().code(), Some(1));
    assert!(!top.has_raw_terminal());
    assert!(!top.all.contains(ENTER));
}
