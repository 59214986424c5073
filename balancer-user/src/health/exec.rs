//! A program, which says by its exit code whether the backend serves.

use std::{io, net::SocketAddr, os::unix::process::ExitStatusExt as _, process::Stdio};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tokio::process::{Child, Command};

use super::{Limit, Outcome, said};

/// Whom it is asked about: in its environment, which holds nothing else.
pub(super) struct Subject<'a> {
    pub(super) service: &'a str,
    pub(super) backend: &'a str,
    pub(super) address: SocketAddr,
    /// What clients talk to.
    pub(super) front: SocketAddr,
}

pub(super) async fn probe(command: &[String], subject: &Subject<'_>, limit: Limit) -> Outcome {
    let [program, arguments @ ..] = command else { return Err("there is no command".to_owned()) };
    let mut command = Command::new(program);
    command
        .args(arguments)
        .current_dir("/")
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env("BALANCER_SERVICE", subject.service)
        .env("BALANCER_BACKEND", subject.backend)
        .env("BALANCER_ADDRESS", subject.address.ip().to_string())
        .env("BALANCER_PORT", subject.address.port().to_string())
        .env("BALANCER_SERVICE_ADDRESS", subject.front.ip().to_string())
        .env("BALANCER_SERVICE_PORT", subject.front.port().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0);
    // SAFETY: between fork and exec it makes two system calls and allocates nothing.
    unsafe { command.pre_exec(leave_nothing_behind) };
    let child = command.spawn().map_err(|error| format!("start {program}: {}", said(&error)))?;
    let mut group = Group::of(child);
    let status = limit.wait("exit", group.child.wait()).await?.map_err(|error| said(&error))?;
    match (status.code(), status.signal()) {
        (Some(0), _) => Ok(()),
        (Some(code), _) => Err(format!("exit code {code}")),
        (None, signal) => Err(format!("ended by signal {}", signal.unwrap_or_default())),
    }
}

/// In the new process: it inherits no open file, and goes when the balancer goes.
fn leave_nothing_behind() -> io::Result<()> {
    const ABOVE_STANDARD_STREAMS: libc::c_uint = 3;
    // SAFETY: no memory is involved; the descriptors are marked, for `exec` to close them.
    let closed = unsafe {
        libc::close_range(ABOVE_STANDARD_STREAMS, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int)
    };
    // SAFETY: no memory is involved.
    let dies = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if closed < 0 || dies < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A process and those that it has started: all of them end with this value, however the check ends.
struct Group {
    child: Child,
    id: Option<Pid>,
}

impl Group {
    fn of(child: Child) -> Group {
        let id = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
        Group { child, id }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            // Mostly none is left. The number of one that has just ended is given to nobody else before all others were.
            let _ = killpg(id, Signal::SIGKILL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        time::{Duration, Instant},
    };

    use super::*;

    async fn outcome(script: &str, limit: Duration) -> Outcome {
        let command = ["/bin/sh", "-c", script].map(str::to_owned);
        let address = SocketAddr::from(([10, 0, 0, 1], 8080));
        let front = SocketAddr::from(([192, 0, 2, 10], 80));
        probe(&command, &Subject { service: "web", backend: "web-1", address, front }, Limit::of(limit)).await
    }

    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn the_exit_code_says_it() {
        assert_eq!(outcome("exit 0", LONG).await, Ok(()));
        assert_eq!(outcome("exit 3", LONG).await, Err("exit code 3".to_owned()));
        assert_eq!(outcome("kill -9 $$", LONG).await, Err("ended by signal 9".to_owned()));
        let missing = ["/no/such/program".to_owned()];
        let address = SocketAddr::from(([10, 0, 0, 1], 80));
        let outcome =
            probe(&missing, &Subject { service: "", backend: "", address, front: address }, Limit::of(LONG))
                .await;
        assert_eq!(outcome, Err("start /no/such/program: no such file or directory".to_owned()));
    }

    #[tokio::test]
    async fn it_is_told_whom_it_is_asked_about_and_inherits_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path().display();
        // An open file that a careless program would hand on.
        let handed_on = fs::File::create(directory.path().join("open")).unwrap();
        nix::fcntl::fcntl(&handed_on, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
        let script = format!(
            "env | sort > {at}/env; ls -l /proc/$$/fd > {at}/fd; ps -o pgid= -p $$ > {at}/pgid; echo $$ > {at}/pid"
        );
        assert_eq!(outcome(&script, LONG).await, Ok(()));
        let read = |name: &str| fs::read_to_string(directory.path().join(name)).unwrap();
        let environment = read("env");
        let own: Vec<&str> = environment.lines().filter(|line| !line.starts_with("PATH=")).collect();
        let expected = [
            "BALANCER_ADDRESS=10.0.0.1",
            "BALANCER_BACKEND=web-1",
            "BALANCER_PORT=8080",
            "BALANCER_SERVICE=web",
            "BALANCER_SERVICE_ADDRESS=192.0.2.10",
            "BALANCER_SERVICE_PORT=80",
            "PWD=/",
        ];
        let own: Vec<&str> = own
            .into_iter()
            .filter(|line| {
                !line.starts_with("_=") && !line.starts_with("OLDPWD") && !line.starts_with("SHLVL")
            })
            .collect();
        assert_eq!(own, expected);
        assert!(!read("fd").contains("/open"), "{}", read("fd"));
        assert_eq!(read("pgid").trim(), read("pid").trim());
    }

    #[tokio::test]
    async fn one_that_takes_too_long_goes_with_all_that_it_has_started() {
        let directory = tempfile::tempdir().unwrap();
        let pid = directory.path().join("pid");
        let script = format!("sleep 600 & echo $! > {0}.new; mv {0}.new {0}; wait", pid.display());
        let begun = Instant::now();
        let outcome = outcome(&script, Duration::from_secs(1)).await;
        assert_eq!(outcome, Err("no exit within 1s".to_owned()));
        assert!(begun.elapsed() < Duration::from_secs(10));
        let id = fs::read_to_string(&pid).unwrap();
        let gone = || {
            fs::read_to_string(format!("/proc/{}/stat", id.trim())).map_or(true, |stat| stat.contains(") Z "))
        };
        while !gone() {
            assert!(begun.elapsed() < Duration::from_secs(10), "it is still there");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
