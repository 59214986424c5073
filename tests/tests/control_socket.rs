//! The control socket: who may use it, and that nobody who does delays the balancer.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    fs,
    io::{ErrorKind, Write as _},
    os::unix::{
        fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
        net::UnixStream,
    },
    thread,
    time::Duration,
};

use balancer_tests::{
    Balancer, Plan, Topology, config, eventually, operator,
    responder::{self, Responders, ask, connect},
    status,
};
use nix::sys::signal::Signal;

/// Much more than a tick takes on a busy machine; who waited for these clients would wait for ever.
const LIMIT: Duration = Duration::from_secs(10);

fn start(bench: &Topology) -> Balancer {
    let balancer = Balancer::start(&bench.balancer, &config::text("", &[responder::service(bench)])).unwrap();
    status::wait_until_up(&balancer).unwrap();
    balancer
}

#[test]
fn it_is_the_owners_alone_and_goes_with_the_daemon() {
    let bench = Plan::backends(1).build().unwrap();
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let mut balancer = start(&bench);
        let socket = balancer.place().socket();
        let metadata = fs::metadata(&socket).unwrap();
        assert!(metadata.file_type().is_socket());
        assert_eq!((metadata.permissions().mode() & 0o7777, metadata.uid()), (0o600, 0));
        balancer.process().signal(signal).unwrap();
        let status = balancer.process().wait(Duration::from_secs(5)).unwrap();
        assert!(status.success(), "{signal}: {status}");
        assert!(!socket.exists(), "{signal}");
    }
}

#[test]
fn a_stale_one_is_replaced() {
    let bench = Plan::backends(1).build().unwrap();
    let place = start(&bench).crash();
    let error = UnixStream::connect(place.socket()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "there is a socket, and nobody listens");
    let balancer = Balancer::start_in(place, &bench.balancer).unwrap();
    status::read(&balancer).unwrap();
}

#[test]
fn clients_that_say_nothing_delay_nobody() {
    let bench = Plan::backends(1).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    let balancer = start(&bench);
    let connect_idle = |number: usize| {
        let mut client = UnixStream::connect(balancer.place().socket()).unwrap();
        let mut send = |text: &str, times| client.write_all(text.repeat(times).as_bytes()).unwrap();
        let list = "POST /v1/flows/list HTTP/1.1\r\nhost: x\r\ncontent-length: 12\r\n\r\n{\"limit\": 9}";
        match number % 5 {
            0 => {}
            1 => send("GET /v1/sta", 1),
            // Half a request.
            2 => send(list.trim_end_matches("9}"), 1),
            // Answers that nobody reads.
            3 => send("GET /v1/status HTTP/1.1\r\nhost: x\r\n\r\n", 100),
            _ => send(list, 100),
        }
        client
    };
    let idle: Vec<_> = (0..50).map(connect_idle).collect();

    let flow = connect(&bench).unwrap();
    let packets = || status::read(&balancer).unwrap().services[0].backends[0].packets;
    let before = packets();
    for count in 1..=10 {
        ask(&flow).unwrap();
        // A request and its reply, seen after some ticks of 100 ms.
        eventually(LIMIT, "the packets counted", || (packets() >= before + 2 * count).then_some(())).unwrap();
        // Ticks go on, whoever waits for what.
        let age = status::read(&balancer).unwrap().selection_age_ms;
        assert!(age < 5_000, "a selection of {age} ms ago");
    }
    assert_eq!(packets(), before + 20);
    status::read_fresh(&balancer).unwrap();
    drop(idle);
}

/// Who else may is in the group that is configured, and nobody but those.
#[test]
fn a_group_may_use_it_too() {
    const NOBODY: u32 = 65_534;
    let bench = Plan::backends(1).build().unwrap();
    let group = nix::unistd::Group::from_name("daemon").unwrap().unwrap().gid.as_raw();
    let text = config::text("socket-group = \"daemon\"", &[responder::service(&bench)]);
    let balancer = Balancer::start(&bench.balancer, &text).unwrap();
    let socket = balancer.place().socket();
    let metadata = fs::metadata(&socket).unwrap();
    assert_eq!((metadata.permissions().mode() & 0o7777, metadata.uid(), metadata.gid()), (0o660, 0, group));
    fs::set_permissions(socket.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
    let connect = |group: u32| {
        thread::scope(|scope| {
            let client = scope.spawn(|| {
                // Of this thread alone.
                // SAFETY: both system calls take numbers only.
                unsafe {
                    libc::syscall(libc::SYS_setgroups, 0, 0);
                    assert_eq!(libc::syscall(libc::SYS_setresgid, group, group, group), 0);
                    assert_eq!(libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY), 0);
                }
                UnixStream::connect(&socket).map(drop).map_err(|error| error.kind())
            });
            client.join().unwrap()
        })
    };
    assert_eq!(connect(group), Ok(()));
    assert_eq!(connect(NOBODY), Err(ErrorKind::PermissionDenied));

    let place = balancer.crash();
    let text = config::text("socket-group = \"no-such-group\"", &[responder::service(&bench)]);
    place.write_config(&text).unwrap();
    let said = operator::refused(&bench.balancer, &place.config()).unwrap();
    assert!(said.contains("there is no group \"no-such-group\": make it"), "{said}");
}
