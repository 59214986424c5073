//! How the program gets onto interfaces and off them again: modes, programs of others, pins, restarts, privileges.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use aya::{EbpfLoader, programs};
use balancer_common::names;
use balancer_tests::{
    Balancer, Netns, Plan, Process, Topology, config, eventually,
    operator::{self, Xdp, pinned_link, refused, refused_under, xdp},
    process::{DEFAULT_LIMIT, Place, balancer_binary, output},
    responder::{self, Received, Responders, Stream, ask, connect},
    status,
    xdp::PassProgram,
};
use balancer_user::api::AttachedMode;
use nix::sys::signal::Signal;

/// How soon the kernel must have taken off what is to go.
const LIMIT: Duration = Duration::from_secs(2);

/// A configuration with these interfaces; `daemon` are further lines of its `[daemon]` section.
fn text(bench: &Topology, interfaces: &[&str], daemon: &str) -> String {
    let text = config::text(daemon, &[responder::service(bench)]);
    text.replacen("[\"lc\", \"lk\"]", &format!("{interfaces:?}"), 1)
}

/// A place with that configuration.
fn place(bench: &Topology, interfaces: &[&str], daemon: &str) -> Place {
    let place = Place::new().unwrap();
    place.write_config(&text(bench, interfaces, daemon)).unwrap();
    place
}

/// Changes the configuration of a place.
fn edit(place: &Place, from: &str, to: &str) {
    let text = fs::read_to_string(place.config()).unwrap();
    assert!(text.contains(from), "{text}");
    fs::write(place.config(), text.replacen(from, to, 1)).unwrap();
}

/// Changes the configuration of a place to one with another pin path; "" is none.
fn edit_pins(place: &Place, pins: &Path) {
    let path = |path: &Path| format!("pin-path = {:?}", path.display().to_string());
    edit(place, &path(place.pins()), &path(pins));
}

fn start(bench: &Topology, interfaces: &[&str], daemon: &str) -> Balancer {
    start_in(bench, place(bench, interfaces, daemon))
}

fn start_in(bench: &Topology, place: Place) -> Balancer {
    let balancer = Balancer::start_in(place, &bench.balancer).unwrap();
    status::wait_until_up(&balancer).unwrap();
    balancer
}

fn pin(place: &Place, interface: &str) -> PathBuf {
    place.pins().join("links").join(interface)
}

/// The names below the pin path's `links`, sorted.
fn pinned(place: &Place) -> Vec<String> {
    let entries = fs::read_dir(place.pins().join("links")).into_iter().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn modes(balancer: &Balancer) -> Vec<(String, AttachedMode)> {
    let status = status::read(balancer).unwrap();
    status.interfaces.into_iter().map(|interface| (interface.name, interface.mode)).collect()
}

/// The programs on devices of the balancer's namespace.
fn programs<const N: usize>(bench: &Topology, devices: [&str; N]) -> [Option<Xdp>; N] {
    devices.map(|device| xdp(&bench.balancer, device).unwrap())
}

/// Nothing is attached to the balancer's devices, and nothing is pinned, not even a directory.
#[track_caller]
fn assert_bare(bench: &Topology, place: &Place, devices: &[&str]) {
    for device in devices {
        assert_eq!(xdp(&bench.balancer, device).unwrap(), None, "on {device}");
    }
    assert!(!place.pins().exists(), "{} is left, with {:?}", place.pins().display(), pinned(place));
    assert!(!place.socket().exists(), "the socket is left");
}

#[track_caller]
fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
}

/// Devices that refuse a native program, each with the kernel's answer.
fn devices_without_native(netns: &Netns) -> [(&'static str, &'static str); 2] {
    netns.ip("link add br9 type bridge").unwrap();
    netns
        .ip("link add name q0 numtxqueues 1 numrxqueues 1 type veth peer name q1 numtxqueues 4 numrxqueues 4")
        .unwrap();
    [("br9", "Operation not supported (os error 95)"), ("q0", "No space left on device (os error 28)")]
}

#[test]
fn native_wherever_the_driver_can_whatever_mtu_and_name() {
    let bench = Plan::backends(1).build().unwrap();
    bench.balancer.ip("link add vlan.7 mtu 9000 type veth peer far mtu 9000").unwrap();
    let devices = ["lc", "lk", "vlan.7"];
    let balancer = start(&bench, &devices, "");
    assert_eq!(modes(&balancer), devices.map(|name| (name.to_owned(), AttachedMode::Native)));
    let programs = programs(&bench, devices);
    assert!(programs.iter().all(|xdp| xdp.is_some_and(|xdp| !xdp.is_generic)), "{programs:?}");
    assert_eq!(pinned(balancer.place()), ["lc", "lk", "vlan%2e7"]);
    let log = balancer.log();
    assert_contains(&log, &["balancing on lc, lk, vlan.7 in native mode"]);
    assert!(!log.contains('\u{1b}'), "colours in a file: {log}");

    let (status, place) = balancer.stop().unwrap();
    assert!(status.success(), "{status}");
    let ended = operator::balancer(["detach".as_ref(), "--pin-path".as_ref(), place.pins().as_os_str()]);
    assert_eq!(ended.unwrap().text, "detached from lc\ndetached from lk\ndetached from vlan.7\n");
    assert_bare(&bench, &place, &devices);
}

#[test]
fn auto_falls_back_on_all_interfaces_together_and_says_why() {
    let bench = Plan::backends(1).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    for (device, reason) in devices_without_native(&bench.balancer) {
        let devices = ["lc", "lk", device];
        let balancer = start(&bench, &devices, "xdp-mode = \"auto\"");
        assert_eq!(modes(&balancer), devices.map(|name| (name.to_owned(), AttachedMode::Generic)));
        let programs = programs(&bench, devices);
        assert!(programs.iter().all(|xdp| xdp.is_some_and(|xdp| xdp.is_generic)), "{programs:?}");
        let log = balancer.log();
        let all = || log.lines().filter(|line| line.contains("WARN"));
        // What the devices do to frames before the program sees them is said of each.
        let (offloads, warnings): (Vec<_>, Vec<_>) = all().partition(|line| line.contains("`ethtool -K"));
        let of = |what: &str| offloads.iter().filter(|line| line.contains(what)).count();
        assert!(of("rxvlan takes VLAN tags off") >= 2, "{log}");
        assert_eq!(warnings.len(), 1, "{log}");
        let attempt = format!("attach the XDP program to {device} in native mode");
        assert_contains(warnings[0], &[&attempt, reason, "falling back to generic mode on all interfaces"]);
        assert_eq!(ask(&connect(&bench).unwrap()).unwrap(), 1);
    }
}

#[test]
fn native_does_not_fall_back_and_leaves_nothing() {
    let bench = Plan::backends(1).build().unwrap();
    for (device, reason) in devices_without_native(&bench.balancer) {
        let devices = ["lc", "lk", device];
        let place = place(&bench, &devices, "xdp-mode = \"native\"");
        let text = refused(&bench.balancer, &place.config()).unwrap();
        let attempt = format!("balancer: attach the XDP program to {device} in native mode: {reason}");
        assert_contains(&text, &[&attempt]);
        assert_bare(&bench, &place, &devices);
    }
}

/// A program that some other tool has attached by netlink, taken off with its pin.
struct ByNetlink<'a> {
    bench: &'a Topology,
    device: &'a str,
    place: Place,
}

impl<'a> ByNetlink<'a> {
    fn attach(bench: &'a Topology, device: &'a str) -> Self {
        let place = Place::new().unwrap();
        fs::create_dir_all(place.pins()).unwrap();
        let pin = place.pins().join("program");
        let mut object = EbpfLoader::new()
            .load_file(std::env::var_os("BALANCER_EBPF_OBJECT").expect("set by `cargo xtask test`"))
            .unwrap();
        let program: &mut programs::Xdp = object.program_mut(names::PROGRAM).unwrap().try_into().unwrap();
        program.load().unwrap();
        program.pin(&pin).unwrap();
        bench.balancer.ip(&format!("link set dev {device} xdpdrv pinned {}", pin.display())).unwrap();
        Self { bench, device, place }
    }
}

impl Drop for ByNetlink<'_> {
    fn drop(&mut self) {
        drop(self.bench.balancer.ip(&format!("link set dev {} xdpdrv off", self.device)));
        drop(fs::remove_dir_all(self.place.pins()));
    }
}

#[test]
fn a_program_of_others_is_left_alone() {
    let bench = Plan::backends(1).build().unwrap();
    let assert_left_alone = || {
        let before = xdp(&bench.balancer, "lk").unwrap();
        let id = before.expect("a foreign program").program;
        for mode in ["auto", "native", "generic"] {
            let place = place(&bench, &["lc", "lk"], &format!("xdp-mode = \"{mode}\""));
            let text = refused(&bench.balancer, &place.config()).unwrap();
            let carries = format!("balancer: interface lk carries another XDP program (id {id})");
            let see = format!("`bpftool prog show id {id}`");
            assert_contains(&text, &[&carries, &see, "`ip link set dev lk xdp off`"]);
            assert_eq!(xdp(&bench.balancer, "lk").unwrap(), before, "mode {mode}");
            assert_bare(&bench, &place, &["lc"]);
        }
    };
    let link = PassProgram::attach(&bench.balancer, "lk").unwrap();
    assert_left_alone();
    drop(link);
    let netlink = ByNetlink::attach(&bench, "lk");
    assert_left_alone();
    drop(netlink);
    start(&bench, &["lc", "lk"], "");
}

#[test]
fn a_missing_interface_is_named_with_those_that_exist() {
    let bench = Plan::backends(1).build().unwrap();
    let place = place(&bench, &["lc", "eth7"], "");
    let text = refused(&bench.balancer, &place.config()).unwrap();
    assert_contains(&text, &["balancer: there is no interface eth7; there are: lo, ", "lc", "lk"]);
    assert_bare(&bench, &place, &["lc", "lk"]);
}

#[test]
fn a_second_balancer_does_not_start_and_the_first_goes_on() {
    let bench = Plan::backends(2).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    let mut first = start(&bench, &["lc", "lk"], "");
    let id = first.process().id();
    let before = (programs(&bench, ["lc", "lk"]), pinned_link(&pin(first.place(), "lc")).unwrap());
    let stream = Stream::start(&bench).unwrap();

    let same_pins = place(&bench, &["lc", "lk"], "");
    edit_pins(&same_pins, first.place().pins());
    let text = refused(&bench.balancer, &same_pins.config()).unwrap();
    let holder =
        format!("another balancer is running: process {id} holds {};", first.place().pins().display());
    assert_contains(&text, &[&holder, "give this one a pin-path and a socket of its own"]);

    let other_pins = place(&bench, &["lc", "lk"], "");
    let text = refused(&bench.balancer, &other_pins.config()).unwrap();
    let id = before.0[0].unwrap().program;
    let carries = format!("interface lc carries another XDP program (id {id})");
    assert_contains(&text, &[&carries, "`balancer detach --pin-path PATH`"]);
    assert!(!other_pins.pins().exists());

    let after = (programs(&bench, ["lc", "lk"]), pinned_link(&pin(first.place(), "lc")).unwrap());
    assert_eq!(after, before);
    assert_eq!(stream.finish().unwrap().lost, [0_u64; 0]);
    ask(&connect(&bench).unwrap()).unwrap();
    assert_eq!(first.process().ended().unwrap(), None);
}

#[test]
fn a_second_balancer_without_pins_is_told_by_its_socket() {
    let bench = Plan::backends(1).build().unwrap();
    let place = place(&bench, &["lc", "lk"], "");
    edit_pins(&place, Path::new(""));
    let config = place.config();
    let lock = place.socket().with_extension("lock");
    let mut first = start_in(&bench, place);
    let holder =
        format!("another balancer is running: process {} holds {};", first.process().id(), lock.display());
    assert_contains(&refused(&bench.balancer, &config).unwrap(), &[&holder]);
    status::read(&first).unwrap();
    let (_, place) = first.stop().unwrap();
    assert!(!lock.exists());
    drop(place);
}

#[test]
fn without_pins_the_program_goes_with_the_daemon() {
    let bench = Plan::backends(1).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGKILL] {
        let place = place(&bench, &["lc", "lk"], "");
        edit_pins(&place, Path::new(""));
        let mut balancer = start_in(&bench, place);
        ask(&connect(&bench).unwrap()).unwrap();
        assert!(programs(&bench, ["lc", "lk"]).iter().all(Option::is_some));
        balancer.process().signal(signal).unwrap();
        let status = balancer.process().wait(DEFAULT_LIMIT).unwrap();
        assert_eq!(status.success(), signal != Signal::SIGKILL, "{signal}: {status}");
        eventually(LIMIT, "the program to go", || {
            (programs(&bench, ["lc", "lk"]) == [None, None]).then_some(())
        })
        .unwrap();
        assert!(!balancer.place().pins().exists());
        assert_eq!(balancer.place().socket().exists(), signal == Signal::SIGKILL, "{signal}");
    }
}

#[test]
fn a_pin_path_that_can_hold_no_pins_is_one_clear_line() {
    let bench = Plan::backends(1).build().unwrap();
    let place = place(&bench, &["lc", "lk"], "");
    let says = |wrapper: &[&str], path: &Path, parts: &[&str]| {
        let text = refused_under(&bench.balancer, wrapper, &place.config()).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        assert_contains(&text, &[&format!("balancer: pin-path {} ", path.display())]);
        assert_contains(&text, parts);
        assert_eq!(programs(&bench, ["lc", "lk"]), [None, None]);
    };
    let not_bpffs = ["is not on a BPF file system", "`mount -t bpf bpf /sys/fs/bpf`", "pin-path = \"\""];
    // What `ip netns exec` does: /sys anew, without what was mounted below it.
    let fresh_sys = ["unshare", "-m", "sh", "-c", "mount -t sysfs sysfs /sys && exec \"$0\" \"$@\""];
    says(&fresh_sys, place.pins(), &[not_bpffs.as_slice(), &["`nsenter --net=`"]].concat());
    assert!(!place.pins().exists());

    let directory = place.socket().with_extension("pins");
    edit_pins(&place, &directory);
    says(&[], &directory, &not_bpffs);
    assert!(!directory.exists());
    fs::create_dir(&directory).unwrap();
    says(&[], &directory, &not_bpffs);
    assert!(directory.exists(), "what the operator made stays");

    let mount = format!("mount -t bpf -o ro bpf {} && exec \"$0\" \"$@\"", directory.display());
    let path = directory.join("balancer");
    let text = fs::read_to_string(place.config()).unwrap();
    let text = text.replacen(&directory.display().to_string(), &path.display().to_string(), 1);
    let text = text.replacen("balancer.pins/balancer\"\nsocket", "balancer.sock\"\nsocket", 1);
    fs::write(place.config(), text).unwrap();
    let text =
        refused_under(&bench.balancer, &["unshare", "-m", "sh", "-c", &mount], &place.config()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert_contains(&text, &[&format!("create {}", path.display()), "Read-only file system"]);
}

/// Ends a daemon by `end`, watches live and new flows go on without it, and starts it again in its place.
fn assert_goes_on_without_a_daemon(end: impl Fn(Balancer) -> Place) -> Received {
    let bench = Plan::backends(2).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    let balancer = start(&bench, &["lc", "lk"], "");
    let before = programs(&bench, ["lc", "lk"]);
    let link = |place: &Place| ["lc", "lk"].map(|name| pinned_link(&pin(place, name)).unwrap().0);
    let links = link(balancer.place());
    let stream = Stream::start(&bench).unwrap();

    let place = end(balancer);
    assert_eq!(programs(&bench, ["lc", "lk"]), before);
    assert_eq!(link(&place), links);
    let mut answered = [ask(&connect(&bench).unwrap()).unwrap(), ask(&connect(&bench).unwrap()).unwrap()];
    answered.sort();
    assert_eq!(answered, [1, 2], "new flows go round the last selection");

    let balancer = start_in(&bench, place);
    let after = programs(&bench, ["lc", "lk"]);
    for (before, after) in before.iter().zip(&after) {
        let (before, after) = (before.unwrap(), after.unwrap());
        assert!(!after.is_generic);
        assert_ne!(after.program, before.program, "a new program has taken over");
    }
    assert_eq!(link(balancer.place()), links, "in the place of the old one");
    let mut answered = [ask(&connect(&bench).unwrap()).unwrap(), ask(&connect(&bench).unwrap()).unwrap()];
    answered.sort();
    assert_eq!(answered, [1, 2], "new flows are balanced");
    let log = balancer.log();
    let mut bad = log.lines().filter(|line| line.contains("WARN") || line.contains("ERROR"));
    assert!(bad.all(|line| line.contains("rxvlan takes VLAN tags off")), "{log}");
    stream.finish().unwrap()
}

#[test]
fn a_restart_loses_no_packet() {
    let received = assert_goes_on_without_a_daemon(|balancer| {
        let (status, place) = balancer.stop().unwrap();
        assert!(status.success(), "{status}");
        assert!(!place.socket().exists());
        place
    });
    assert_eq!(received.lost, [0_u64; 0], "of {}", received.sent);
}

#[test]
fn a_crash_loses_no_packet_and_needs_no_cleaning_up() {
    let received = assert_goes_on_without_a_daemon(|balancer| {
        let place = balancer.crash();
        assert!(place.socket().exists(), "a stale socket, which the next one replaces");
        place
    });
    assert_eq!(received.lost, [0_u64; 0], "of {}", received.sent);
}

#[test]
fn an_interface_that_is_not_configured_any_more_loses_the_program() {
    let bench = Plan::backends(1).build().unwrap();
    bench.balancer.ip("link add extra type veth peer far").unwrap();
    let (_, place) = start(&bench, &["lc", "lk", "extra"], "").stop().unwrap();
    let link = pinned_link(&pin(&place, "lc")).unwrap().0;
    assert!(xdp(&bench.balancer, "extra").unwrap().is_some());

    // A start that fails takes nothing off.
    place.write_config(&text(&bench, &["lc", "nowhere"], "")).unwrap();
    refused(&bench.balancer, &place.config()).unwrap();
    assert!(xdp(&bench.balancer, "extra").unwrap().is_some());
    assert_eq!(pinned(&place), ["extra", "lc", "lk"]);

    place.write_config(&text(&bench, &["lc", "lk"], "")).unwrap();
    let balancer = start_in(&bench, place);
    assert_eq!(xdp(&bench.balancer, "extra").unwrap(), None);
    assert_eq!(pinned(balancer.place()), ["lc", "lk"]);
    assert_eq!(pinned_link(&pin(balancer.place(), "lc")).unwrap().0, link);
}

#[test]
fn a_restart_can_change_the_mode() {
    let bench = Plan::backends(1).build().unwrap();
    let _responders = Responders::start(&bench).unwrap();
    let mut place = place(&bench, &["lc", "lk"], "xdp-mode = \"auto\"");
    for (change, expected) in [
        (("\"auto\"", "\"generic\""), AttachedMode::Generic),
        (("\"generic\"", "\"auto\""), AttachedMode::Generic),
        (("\"auto\"", "\"native\""), AttachedMode::Native),
        (("\"native\"", "\"auto\""), AttachedMode::Native),
    ] {
        (_, place) = start_in(&bench, place).stop().unwrap();
        edit(&place, change.0, change.1);
        let balancer = start_in(&bench, place);
        let both = ["lc", "lk"].map(|name| (name.to_owned(), expected));
        assert_eq!(modes(&balancer), both, "{change:?}");
        let is_generic = expected == AttachedMode::Generic;
        for xdp in programs(&bench, ["lc", "lk"]) {
            assert_eq!(xdp.map(|xdp| xdp.is_generic), Some(is_generic), "{change:?}");
        }
        ask(&connect(&bench).unwrap()).unwrap();
        // One holder still: the pin path has not been made anew under the lock.
        assert_contains(
            &refused(&bench.balancer, &balancer.place().config()).unwrap(),
            &["another balancer is running"],
        );
        (_, place) = balancer.stop().unwrap();
    }
}

#[test]
fn one_interface_that_changes_mode_keeps_its_lock() {
    let bench = Plan::backends(1).build().unwrap();
    let (_, place) = start(&bench, &["lk"], "xdp-mode = \"native\"").stop().unwrap();
    edit(&place, "\"native\"", "\"generic\"");
    let balancer = start_in(&bench, place);
    let text = refused(&bench.balancer, &balancer.place().config()).unwrap();
    assert_contains(&text, &["another balancer is running"]);
}

#[test]
fn detach_leaves_the_host_as_it_was() {
    let bench = Plan::backends(1).build().unwrap();
    let mut balancer = start(&bench, &["lc", "lk"], "");
    let id = balancer.process().id();
    let pins = balancer.place().pins().display().to_string();
    let detach =
        |more: &[&str]| operator::balancer([&["detach", "--pin-path", &pins], more].concat()).unwrap();

    for more in [&[][..], &["lc"]] {
        let ended = detach(more);
        assert_eq!(
            ended.text,
            format!("balancer: a balancer is running: process {id} holds {pins}; stop it first\n")
        );
        assert_eq!(ended.code, 1);
        assert!(programs(&bench, ["lc", "lk"]).iter().all(Option::is_some));
    }

    let (_, place) = balancer.stop().unwrap();
    let ended = detach(&["lo"]);
    assert_eq!(ended.text, format!("balancer: no program of ours is pinned for lo below {pins}\n"));
    assert_eq!(ended.code, 1);

    let kept = programs(&bench, ["lk"]);
    // Another process that has the link open keeps nothing attached.
    let _open = programs::links::PinnedLink::from_pin(pin(&place, "lc")).unwrap();
    let ended = detach(&["lc"]);
    assert_eq!((ended.text.as_str(), ended.code), ("detached from lc\n", 0));
    assert_eq!(programs(&bench, ["lc", "lk"]), [None, kept[0]]);
    assert_eq!(pinned(&place), ["lk"]);

    let config = place.config().display().to_string();
    let ended = operator::balancer(["detach", "-c", &config]).unwrap();
    assert_eq!((ended.text.as_str(), ended.code), ("detached from lk\n", 0));
    assert_bare(&bench, &place, &["lc", "lk"]);

    let ended = detach(&[]);
    let nothing = format!("nothing to detach: there is no pin below {pins}\n");
    assert_eq!((ended.text, ended.code), (nothing, 0));
}

#[test]
fn detach_does_not_remove_a_directory_that_holds_no_pins() {
    let place = Place::new().unwrap();
    let directory = place.socket().with_extension("precious");
    fs::create_dir(&directory).unwrap();
    let ended =
        operator::balancer(["detach".as_ref(), "--pin-path".as_ref(), directory.as_os_str()]).unwrap();
    assert_eq!(ended.code, 1);
    assert_contains(&ended.text, &["is not on a BPF file system"]);
    assert!(directory.exists());
}

#[test]
fn an_interface_that_was_deleted_meanwhile_is_forgotten() {
    let bench = Plan::backends(1).build().unwrap();
    bench.balancer.ip("link add extra type veth peer far").unwrap();
    let (_, place) = start(&bench, &["lc", "lk", "extra"], "").stop().unwrap();
    bench.balancer.ip("link del extra").unwrap();
    assert_contains(&refused(&bench.balancer, &place.config()).unwrap(), &["there is no interface extra"]);

    // Made anew, it gets the program, and its pin leads to it.
    bench.balancer.ip("link add extra type veth peer far").unwrap();
    let balancer = start_in(&bench, place);
    let program = xdp(&bench.balancer, "extra").unwrap().unwrap().program;
    assert_eq!(u64::from(pinned_link(&pin(balancer.place(), "extra")).unwrap().1), program);
    let (_, place) = balancer.stop().unwrap();

    bench.balancer.ip("link del extra").unwrap();
    place.write_config(&text(&bench, &["lc", "lk"], "")).unwrap();
    let balancer = start_in(&bench, place);
    assert_eq!(pinned(balancer.place()), ["lc", "lk"]);
}

#[test]
fn a_renamed_interface_is_told_from_a_foreign_program() {
    let bench = Plan::backends(1).build().unwrap();
    let (_, place) = start(&bench, &["lc", "lk"], "").stop().unwrap();
    bench.balancer.ip("link set lk down").unwrap();
    bench.balancer.ip("link set lk name lk9").unwrap();
    place.write_config(&text(&bench, &["lc", "lk9"], "")).unwrap();
    let text = refused(&bench.balancer, &place.config()).unwrap();
    assert_contains(&text, &["interface lk9 carries an earlier balancer's program", "`balancer detach`"]);
}

#[test]
fn a_missing_privilege_is_named_and_nothing_is_left() {
    let bench = Plan::backends(1).build().unwrap();
    let place = place(&bench, &["lc", "lk"], "");
    for (wrapper, lack) in [
        (&["setpriv", "--bounding-set=-bpf,-sys_admin"][..], "CAP_BPF is missing"),
        (&["setpriv", "--bounding-set=-net_admin"], "CAP_NET_ADMIN is missing"),
        (
            &["setpriv", "--bounding-set=-bpf,-sys_admin,-perfmon,-net_admin"],
            "CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN are missing",
        ),
        (&["unshare", "-Ur"], "the capabilities of a user namespace"),
    ] {
        let text = refused_under(&bench.balancer, wrapper, &place.config()).unwrap();
        assert_contains(&text, &[&format!("not permitted: {lack}"), "run as root, or with CAP_BPF"]);
        assert_bare(&bench, &place, &["lc", "lk"]);
    }
}

/// Without CAP_PERFMON the verifier holds the program to the rules for unprivileged ones, and rejects it.
#[test]
fn a_rejected_program_shows_the_end_of_the_verifiers_log() {
    let bench = Plan::backends(1).build().unwrap();
    let place = place(&bench, &["lc", "lk"], "");
    let wrapper = ["setpriv", "--bounding-set=-perfmon,-sys_admin"];
    let text = refused_under(&bench.balancer, &wrapper, &place.config()).unwrap();
    assert_contains(
        &text,
        &["balancer: load the XDP program: ", "CAP_PERFMON is missing", "the verifier's log ends:"],
    );
    // The verifier's last line, whatever it rejected, and not more than a screen.
    assert_contains(&text, &["processed ", " insns (limit 1000000)"]);
    assert!((3..=25).contains(&text.lines().count()), "{text}");
    assert_bare(&bench, &place, &["lc", "lk"]);
}

/// A control group with little memory, removed with this value.
struct MemoryGroup {
    path: PathBuf,
}

impl MemoryGroup {
    fn new(bytes: u64) -> Self {
        let name = format!("balancer-test-{}", std::process::id());
        let v1 = Path::new("/sys/fs/cgroup/memory");
        let (path, limit) = match v1.is_dir() {
            true => (v1.join(name), "memory.limit_in_bytes"),
            false => (Path::new("/sys/fs/cgroup").join(name), "memory.max"),
        };
        fs::create_dir(&path).expect("a control group: is /sys/fs/cgroup mounted and writable?");
        let group = Self { path };
        fs::write(group.path.join(limit), bytes.to_string()).expect("the memory controller, switched on");
        group
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // What was charged to it may still be on its way out.
        drop(eventually(LIMIT, "the control group to go", || fs::remove_dir(&self.path).ok()));
    }
}

#[test]
fn a_flow_table_larger_than_the_memory_is_told_as_such() {
    let bench = Plan::backends(1).build().unwrap();
    let group = MemoryGroup::new(64 << 20);
    let place = place(&bench, &["lc", "lk"], "max-flows = 4194304");
    let join = format!("echo $$ > {}/cgroup.procs && exec \"$0\" \"$@\"", group.path.display());
    let text = refused_under(&bench.balancer, &["sh", "-c", &join], &place.config()).unwrap();
    let expected = "balancer: create the BPF maps: not enough memory: lower max-flows, or raise the memory limit of the \
                    control group: ";
    assert_contains(&text, &[expected, "Cannot allocate memory (os error 12)"]);
    assert_eq!(text.lines().count(), 1, "{text}");
    assert_bare(&bench, &place, &["lc", "lk"]);
}

#[test]
fn a_low_limit_of_locked_memory_does_not_matter() {
    let bench = Plan::backends(1).build().unwrap();
    let place = place(&bench, &["lc", "lk"], "");
    let mut command = bench.balancer.command("prlimit");
    command.arg("--memlock=65536").arg(balancer_binary().unwrap()).arg("run").arg("-c").arg(place.config());
    let mut process = Process::spawn(&mut command).unwrap();
    let answer = eventually(DEFAULT_LIMIT, "an answer from the balancer", || {
        let mut status = Command::new(balancer_binary().unwrap());
        let status = output(status.arg("status").arg("--socket").arg(place.socket()), DEFAULT_LIMIT);
        (status.is_ok() || process.ended().unwrap().is_some()).then_some(status)
    });
    answer.unwrap().unwrap_or_else(|error| panic!("{error:#}: {}", process.log()));
    assert!(programs(&bench, ["lc", "lk"]).iter().all(Option::is_some));
}
