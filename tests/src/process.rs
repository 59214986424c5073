//! Programs started by a test: each ends within a time limit, and none outlives the value that stands for it.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::{sys::signal, unistd::Pid};
use tempfile::TempDir;

use crate::{Netns, eventually};

/// How long a command may take when nothing else is said.
pub const DEFAULT_LIMIT: Duration = Duration::from_secs(30);
/// Under this directory the balancer pins its maps and link.
const BPFFS: &str = "/sys/fs/bpf";
/// What the names of our directories there begin with; the process id follows.
const PINS: &str = "balancer-test-";

/// A running program whose standard streams go to a file. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    child: Child,
    line: String,
    log: PathBuf,
    _directory: TempDir,
}

impl Process {
    /// Starts `command`; see [`Netns::command`] for one that runs in a namespace.
    pub fn spawn(command: &mut Command) -> Result<Self> {
        let line = line(command);
        let directory = TempDir::new().context("make a directory for a log")?;
        let log = directory.path().join("log");
        let file = fs::File::create(&log).context("create a log")?;
        let errors = file.try_clone().context("open a log a second time")?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(errors)
            .spawn()
            .with_context(|| format!("start `{line}`"))?;
        Ok(Self { child, line, log, _directory: directory })
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it has printed so far, on standard output and standard error.
    pub fn log(&self) -> String {
        fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// Its exit status, if it has ended.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("look after `{}`", self.line))
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: signal::Signal) -> Result<()> {
        let id = Pid::from_raw(i32::try_from(self.id()).context("convert a process id")?);
        signal::kill(id, signal).with_context(|| format!("send {signal} to `{}`", self.line))
    }

    /// Waits for its end.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let what = format!("the end of `{}`", self.line);
        let ended = eventually(limit, &what, || self.ended().transpose());
        ended.with_context(|| format!("it printed:\n{}", self.log()))?
    }

    /// Kills it, if it runs, and waits for it.
    pub fn kill(&mut self) {
        // Both fail only when it has ended already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs `command` to its end and returns what it printed; fails when it fails, and kills it after `limit`.
pub fn output(command: &mut Command, limit: Duration) -> Result<String> {
    let mut process = Process::spawn(command)?;
    let status = process.wait(limit)?;
    let text = process.log();
    if !status.success() {
        bail!("`{}` failed ({status}): {}", process.line, text.trim());
    }
    Ok(text)
}

fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// The path of the `balancer` binary under test, from `BALANCER_BIN`.
pub fn balancer_binary() -> Result<PathBuf> {
    let path = env::var_os("BALANCER_BIN").context("BALANCER_BIN is not set: use `cargo xtask test`")?;
    Ok(PathBuf::from(path))
}

/// Where one balancer keeps what is its own, so that several can run side by side.
#[derive(Debug)]
pub struct Place {
    directory: TempDir,
    pins: PathBuf,
}

impl Place {
    /// A new directory, and a new name under bpffs.
    pub fn new() -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        if number == 0 {
            remove_orphaned_pins();
        }
        let directory = TempDir::with_prefix("balancer-").context("make a directory for a balancer")?;
        let pins = Path::new(BPFFS).join(format!("{PINS}{}-{number}", std::process::id()));
        Ok(Self { directory, pins })
    }

    /// The configuration file.
    pub fn config(&self) -> PathBuf {
        self.directory.path().join("balancer.toml")
    }

    /// The control socket.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("balancer.sock")
    }

    /// The directory of pins.
    pub fn pins(&self) -> &Path {
        &self.pins
    }

    /// Writes the configuration: `config` with `socket` and `pin-path` added to its `[daemon]` section, which must be
    /// there.
    pub fn write_config(&self, config: &str) -> Result<()> {
        let ours = format!(
            "[daemon]\nsocket = {:?}\npin-path = {:?}\n",
            self.socket().display().to_string(),
            self.pins.display().to_string()
        );
        anyhow::ensure!(config.contains("[daemon]\n"), "the configuration has no [daemon] section");
        fs::write(self.config(), config.replacen("[daemon]\n", &ours, 1)).context("write the configuration")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Pins keep program, maps and link alive; there may be none.
        drop(fs::remove_dir_all(&self.pins));
    }
}

/// Removes the pins of test processes that were killed before they could: nothing else that is theirs outlives them.
fn remove_orphaned_pins() {
    for entry in fs::read_dir(BPFFS).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(PINS)?.split('-').next());
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            // Another process may be at it too.
            drop(fs::remove_dir_all(entry.path()));
        }
    }
}

/// A running `balancer run`. Dropping it kills the daemon, then removes its pins.
#[derive(Debug)]
pub struct Balancer {
    // The daemon goes before its place.
    process: Process,
    place: Place,
}

impl Balancer {
    /// Starts the daemon in `netns` and waits until it answers. `config` is a configuration file's text with a
    /// `[daemon]` section; its `socket` and `pin-path` are added.
    pub fn start(netns: &Netns, config: &str) -> Result<Self> {
        let place = Place::new()?;
        place.write_config(config)?;
        Self::start_in(place, netns)
    }

    /// Starts the daemon with the configuration, socket and pins of an earlier one.
    pub fn start_in(place: Place, netns: &Netns) -> Result<Self> {
        let mut command = netns.command(balancer_binary()?);
        let process = Process::spawn(command.arg("run").arg("-c").arg(place.config()))?;
        let mut balancer = Self { process, place };
        let answer =
            eventually(DEFAULT_LIMIT, "an answer from the balancer", || match balancer.process.ended() {
                Ok(None) => balancer.status().ok().map(Ok),
                Ok(Some(status)) => Some(Err(anyhow::anyhow!("the balancer ended ({status})"))),
                Err(error) => Some(Err(error)),
            });
        match answer.and_then(|answer| answer) {
            Ok(_) => Ok(balancer),
            Err(error) => Err(error.context(format!("the balancer printed:\n{}", balancer.log()))),
        }
    }

    /// Where its files are.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Its process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// What the daemon has printed so far.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Runs a verb of the command line against this daemon and returns what it printed.
    pub fn call(&self, words: &[&str]) -> Result<String> {
        let mut command = Command::new(balancer_binary()?);
        command.args(words).arg("--socket").arg(self.place.socket());
        output(&mut command, DEFAULT_LIMIT)
    }

    /// What `balancer status --json` prints.
    pub fn status(&self) -> Result<serde_json::Value> {
        serde_json::from_str(&self.call(&["status", "--json"])?).context("parse the balancer's status")
    }

    /// Writes another configuration and has the daemon reload it (SIGHUP).
    pub fn reload(&self, config: &str) -> Result<()> {
        self.place.write_config(config)?;
        self.hang_up()
    }

    /// Has the daemon reload its configuration as it is.
    pub fn hang_up(&self) -> Result<()> {
        self.process.signal(signal::Signal::SIGHUP)
    }

    /// Ends the daemon as a service manager does, and returns its exit status and its place, where another can start.
    pub fn stop(mut self) -> Result<(ExitStatus, Place)> {
        self.process.signal(signal::Signal::SIGTERM)?;
        let status = self.process.wait(DEFAULT_LIMIT)?;
        Ok((status, self.place))
    }

    /// Ends the daemon as a crash does, and returns its place, where another can start.
    pub fn crash(mut self) -> Place {
        self.process.kill();
        self.place
    }
}
