//! `balancer top`: the status, drawn anew on the terminal again and again.

mod screen;

use std::{
    io::{self, IsTerminal as _, Write as _},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, Result};
use crossterm::{
    cursor,
    event::{Event, EventStream, KeyCode, KeyEvent, KeyEventKind, KeyModifiers},
    execute, queue,
    style::{Print, Stylize as _},
    terminal::{self, Clear, ClearType},
};
use futures_util::StreamExt as _;
use tokio::{
    signal::unix::{SignalKind, signal},
    time::{MissedTickBehavior, interval},
};

use self::screen::{Line, Look, Screen};
use super::{daemon::Daemon, output, status::only};
use crate::{
    api::{
        STATUS_PATH, Status,
        client::{WrongCall, understand},
    },
    cli::TopArgs,
};

/// Longest time that the daemon may take to answer: it is asked again.
const LIMIT: Duration = Duration::from_secs(2);
/// The daemon is not asked more often.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);

/// Shows the status until a key or a signal ends it.
///
/// # Errors
///
/// When there is no terminal, or no daemon answers at first, or the service is not there.
pub fn run(args: &TopArgs) -> Result<ExitCode> {
    if !(io::stdout().is_terminal() && io::stdin().is_terminal()) {
        let why =
            "top draws on a terminal and listens to its keys; for files and pipes there is `balancer status`";
        return Err(WrongCall(why.to_owned()).into());
    }
    let daemon = Daemon::find(&args.daemon)?;
    let coloured = output::on_terminal();
    daemon.block_on(async {
        let mut screen = Screen::new(read(&daemon, args).await?);
        let terminal = Terminal::take()?;
        watch(&daemon, args, &mut screen, &terminal, coloured).await
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn read(daemon: &Daemon, args: &TopArgs) -> Result<Status> {
    let status = understand(&daemon.read(STATUS_PATH, LIMIT).await?)?;
    match &args.service {
        Some(name) => only(status, name),
        None => Ok(status),
    }
}

async fn watch(
    daemon: &Daemon,
    args: &TopArgs,
    screen: &mut Screen,
    terminal: &Terminal,
    coloured: bool,
) -> Result<()> {
    let mut events = EventStream::new();
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let mut hangup = signal(SignalKind::hangup()).context("listen for SIGHUP")?;
    let mut tick = interval(args.interval.max(SHORTEST_INTERVAL));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        terminal.draw(screen, coloured)?;
        tokio::select! {
            _ = tick.tick() => screen.show(read(daemon, args).await.map_err(|error| format!("{error:#}"))),
            event = events.next() => match event {
                Some(Ok(Event::Key(key))) if key.kind != KeyEventKind::Release => match action(key) {
                    Some(Action::End) => return Ok(()),
                    Some(Action::Halt) => screen.halt(),
                    Some(Action::Move(rows)) => screen.scroll(rows),
                    None => {}
                },
                // A new size is seen as it is drawn.
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error).context("listen to the terminal"),
                None => return Ok(()),
            },
            _ = terminate.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
        }
    }
}

enum Action {
    End,
    Halt,
    /// So many rows down; negative: up.
    Move(isize),
}

fn action(KeyEvent { code, modifiers, .. }: KeyEvent) -> Option<Action> {
    const PAGE: isize = 20;
    Some(match code {
        KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => Action::End,
        KeyCode::Char('q') | KeyCode::Esc => Action::End,
        KeyCode::Char(' ') => Action::Halt,
        KeyCode::Up => Action::Move(-1),
        KeyCode::Down => Action::Move(1),
        KeyCode::PageUp => Action::Move(-PAGE),
        KeyCode::PageDown => Action::Move(PAGE),
        KeyCode::Home => Action::Move(isize::MIN),
        KeyCode::End => Action::Move(isize::MAX),
        _ => return None,
    })
}

/// The terminal while it is ours; it gets back what it showed.
struct Terminal;

impl Terminal {
    fn take() -> Result<Terminal> {
        terminal::enable_raw_mode().context("have the terminal tell each key")?;
        // From here on it is given back whatever happens.
        let terminal = Terminal;
        execute!(io::stdout(), terminal::EnterAlternateScreen, cursor::Hide)
            .context("draw on the terminal")?;
        Ok(terminal)
    }

    /// Draws all lines over the old ones, so that nothing flickers.
    fn draw(&self, screen: &mut Screen, coloured: bool) -> Result<()> {
        let (width, height) = terminal::size().context("learn the terminal's size")?;
        let mut out = io::BufWriter::new(io::stdout().lock());
        for (row, line) in (0..height).zip(screen.lines(width.into(), height.into())) {
            queue!(out, cursor::MoveTo(0, row))?;
            draw(&mut out, &line, coloured)?;
            queue!(out, Clear(ClearType::UntilNewLine))?;
        }
        queue!(out, Clear(ClearType::FromCursorDown))?;
        out.flush().context("draw on the terminal")
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        drop(execute!(io::stdout(), cursor::Show, terminal::LeaveAlternateScreen));
        drop(terminal::disable_raw_mode());
    }
}

fn draw(out: &mut impl io::Write, line: &Line, coloured: bool) -> io::Result<()> {
    for (text, look) in line {
        let text = text.as_str();
        let styled = match look {
            Look::Title => text.bold(),
            Look::Dim if coloured => text.dark_grey(),
            Look::Good if coloured => text.green(),
            Look::Odd if coloured => text.yellow(),
            Look::Bad if coloured => text.red(),
            Look::Bar if coloured => text.blue(),
            Look::Plain | Look::Dim | Look::Good | Look::Odd | Look::Bad | Look::Bar => text.stylize(),
        };
        queue!(out, Print(styled))?;
    }
    Ok(())
}
