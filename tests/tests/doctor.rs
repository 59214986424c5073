//! `balancer doctor`: one thing wrong at a time, on the balancer's host and on a backend, with real settings and devices.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use balancer_tests::{
    Netns, Plan,
    detour::Detour,
    operator::{Ended, run, xdp},
    process::{Place, balancer_binary},
    topology::{CLIENT, CLIENT6, VIP, VIP6},
    veth::{self, End},
    xdp::PassProgram,
};
use serde_json::Value;

/// A finding: its level, what it is about, and what it is.
type Found = (String, String, String);

/// `balancer doctor` in a namespace: its exit code, and what is not fine.
fn doctor(netns: &Netns, words: &[&str]) -> (i32, Vec<Found>) {
    let mut command = netns.command(balancer_binary().unwrap());
    let Ended { code, text } = run(command.arg("doctor").arg("--json").args(words)).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let field = |finding: &Value, name: &str| finding[name].as_str().unwrap().to_owned();
    let found = report["findings"].as_array().unwrap().iter();
    let found = found
        .map(|finding| ["level", "about", "what"].map(|name| field(finding, name)).into())
        .collect::<Vec<Found>>();
    assert!(found.iter().any(|(level, ..)| level == "fine"), "{found:?}");
    (code, found.into_iter().filter(|(level, ..)| level != "fine").collect())
}

/// Asserts that one thing is not fine, and that the exit code says so.
#[track_caller]
fn assert_one((code, found): &(i32, Vec<Found>), expected: (&str, &str, &str)) {
    let (level, about, what) = expected;
    let is_it = |one: &Found| one.0 == level && one.1 == about && one.2.contains(what);
    assert!(matches!(&found[..], [one] if is_it(one)), "{expected:?}: {found:?}");
    assert_eq!(*code, i32::from(level == "failure"), "{found:?}");
}

const FINE: (i32, Vec<Found>) = (0, Vec::new());

/// What is said of every veth, whose other end is asked only as far as that goes.
fn without_notes((code, found): (i32, Vec<Found>)) -> (i32, Vec<Found>) {
    let is_note = |one: &Found| one.0 == "warning" && one.2.contains("sums that nobody has finished");
    (code, found.into_iter().filter(|one| !is_note(one)).collect())
}

#[test]
fn what_is_wrong_with_an_interface_is_said() {
    let bench = Plan::backends(1).build().unwrap();
    let lb = &bench.balancer;
    for device in ["lc", "lk"] {
        veth::strip_tags(lb, device, false).unwrap();
    }
    let both = || without_notes(doctor(lb, &["lc", "lk"]));
    assert_eq!(both(), FINE);
    assert_eq!(doctor(lb, &[]), doctor(lb, &["lc", "lk"]), "all that are up");

    assert_one(&without_notes(doctor(lb, &["lc", "lz"])), ("failure", "lz", "there is no such interface"));
    veth::strip_tags(lb, "lc", true).unwrap();
    assert_one(&both(), ("warning", "lc", "rxvlan takes VLAN tags off"));
    veth::strip_tags(lb, "lc", false).unwrap();
    lb.ip("link set lk down").unwrap();
    assert_one(&both(), ("failure", "lk", "is down"));
    lb.ip("link set lk up").unwrap();
    bench.switch.ip("link set lkp down").unwrap();
    assert_one(&both(), ("failure", "lk", "has no carrier"));
    bench.switch.ip("link set lkp up").unwrap();
    let other = PassProgram::attach(lb, "lk").unwrap();
    assert_one(&both(), ("failure", "lk", "carries another XDP program"));
    drop(other);
    assert_eq!(both(), FINE);
    // Nobody's program is at the other end; and here it can be asked who finishes sums.
    let backend = doctor(&bench.switch, &["p1"]);
    let what: Vec<_> = backend.1.iter().map(|one| (one.0.as_str(), one.2.as_str())).collect();
    assert!(
        matches!(what[..], [("warning", _), ("failure", lost), ("warning", _)]
        if lost == "frames that the program sends by it are lost unless e0 has an XDP program as well"),
        "{what:?}"
    );
    assert_eq!(backend.0, 1);
    assert_eq!(xdp(lb, "lc").unwrap(), None);
}

/// What the kernel refuses when a program is attached is told before.
#[test]
fn refusals_of_native_mode_are_foretold() {
    let lb = Netns::new("balancer").unwrap();
    lb.ip_batch(
        "link add e0 type veth peer name e1\nlink add q0 numtxqueues 1 numrxqueues 1 type veth peer name q1 numtxqueues 4 numrxqueues 4\n\
         link add br0 type bridge\n",
    )
    .unwrap();
    for device in ["e0", "e1", "q0", "q1", "br0"] {
        lb.ip(&format!("link set {device} up")).unwrap();
        veth::keep_frames_apart(&lb, device).unwrap();
    }
    for device in ["e0", "e1", "q0", "q1"] {
        veth::strip_tags(&lb, device, false).unwrap();
        veth::finish_checksums(&lb, device).unwrap();
    }
    assert_one(&doctor(&lb, &["q0"]), ("warning", "q0", "fewer receiving queues than its other end"));
    // Generic on all, where the other end needs no program.
    assert_one(&doctor(&lb, &["q0", "e0"]), ("warning", "q0", "fewer receiving queues than its other end"));
    assert_one(&doctor(&lb, &["e0"]), ("failure", "e0", "lost unless e1 has an XDP program"));
    let pass = PassProgram::attach(&lb, "e1").unwrap();
    assert_eq!(doctor(&lb, &["e0"]), FINE);
    veth::leave_checksums(&lb, "e1", true).unwrap();
    assert_one(&doctor(&lb, &["e0"]), ("failure", "e0", "sums that nobody has finished"));
    drop(pass);
    let native = config("xdp-mode = \"native\"\ninterfaces = [\"br0\"]\n");
    let bridge = doctor(&lb, &["-c", native.config().to_str().unwrap()]);
    assert_one(&bridge, ("failure", "br0", "bridge has no native XDP"));
}

/// A file with this `[daemon]` section, and what follows it.
fn config(text: &str) -> Place {
    let place = Place::new().unwrap();
    place.write_config(&format!("[daemon]\n{text}")).unwrap();
    place
}

/// What a configuration needs, and the settings that `run` warns of.
#[test]
fn what_a_configuration_needs_is_looked_for() {
    let bench = Plan { ipv6: true, ..Plan::backends(1) }.build().unwrap();
    let lb = &bench.balancer;
    for device in ["lc", "lk"] {
        veth::strip_tags(lb, device, false).unwrap();
    }
    let service = |backend: &str, more: &str| {
        format!(
            "interfaces = [\"lc\", \"lk\"]\n[[service]]\nname = \"web\"\naddress = \"{VIP}:80\"\nprotocol = \"udp\"\n\
             method = \"round-robin\"\n{more}\n[[service.backend]]\nname = \"b1\"\naddress = \"{backend}:80\"\n"
        )
    };
    let ask = |text: &str| {
        let place = config(text);
        let found = without_notes(doctor(lb, &["-c", place.config().to_str().unwrap()]));
        assert!(!place.pins().exists(), "nothing is pinned");
        found
    };
    assert_eq!(ask(&service("10.0.2.11", "")), FINE);
    assert_eq!(xdp(lb, "lc").unwrap(), None);
    assert_one(&ask(&service("10.9.9.9", "")), ("failure", "10.9.9.9", "no route to backend web/b1"));
    assert_one(&ask(&service("10.0.2.99", "")), ("warning", "10.0.2.99", "nobody answers"));
    let tunnel = "forward = \"gue\"\ntunnel-source = \"10.254.0.0/16\"";
    let narrow = "clients' packets of more than 1472 bytes do not fit";
    assert_one(&ask(&service("10.0.2.11", tunnel)), ("warning", "10.0.2.11", narrow));
    lb.ip("route add 10.7.0.0/16 via 10.0.2.11").unwrap();
    let behind = ask(&service("10.7.0.1", "forward = \"dsr\""));
    assert_one(&behind, ("failure", "10.7.0.1", "is behind a gateway"));
    let given = "forward = \"full-nat\"\nsnat-addresses = [\"10.0.2.77\"]";
    assert_one(&ask(&service("10.0.2.11", given)), ("warning", "10.0.2.77", "is not on this host"));
    let one_packet = ask(&service("10.0.2.11", "one-packet = true"));
    let refused =
        |name: &str| format!("answers of `one-packet` backends behind {name} will be refused as no-egress");
    let both: Vec<_> = ["lc", "lk"].map(|name| ("warning".to_owned(), name.to_owned(), refused(name))).into();
    assert_eq!(one_packet, (0, both));
    lb.set_sysctl("net/ipv4/ip_local_port_range", "32768 65535").unwrap();
    let shared = "may come from the ports 61000 to 65535, which clients are given as well";
    assert_one(&ask(&service("10.0.2.11", "")), ("warning", "net.ipv4.ip_local_port_range", shared));
    lb.set_sysctl("net/ipv4/ip_local_port_range", "32768 60999").unwrap();

    // The interfaces are the kernel's business, the file's faults are the file's.
    let place = config("interfaces = [\"lc\"]\nfrequency = 3\n");
    let mut command = lb.command(balancer_binary().unwrap());
    let ended = run(command.args(["doctor", "-c"]).arg(place.config())).unwrap();
    assert!(ended.code == 2 && ended.text.contains("frequency"), "{ended:?}");
}

/// Without a privilege or a BPF file system, what `run` would say.
#[test]
fn a_host_that_does_not_take_the_program_is_told_of() {
    let lb = Netns::new("balancer").unwrap();
    let binary = balancer_binary().unwrap();
    let without = |capabilities: &str| {
        let mut command = lb.command("setpriv");
        run(command.arg(format!("--bounding-set={capabilities}")).arg(&binary).args(["doctor", "--json"]))
            .unwrap()
    };
    for (capabilities, missing) in
        [("-bpf,-sys_admin", "CAP_BPF is missing"), ("-net_admin", "CAP_NET_ADMIN is missing")]
    {
        let ended = without(capabilities);
        assert!(ended.code == 1 && ended.text.contains(missing), "{ended:?}");
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("balancer.toml");
    std::fs::write(&file, "[daemon]\ninterfaces = [\"lo\"]\npin-path = \"/tmp/balancer-pins\"\n").unwrap();
    let (code, found) = doctor(&lb, &["-c", file.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(found[0].1 == "pin-path" && found[0].2.contains("is not on a BPF file system"), "{found:?}");
}

/// Where a backend's setting differs from what it should be: how it gets so, how it gets right again, what is said.
type Wrong<'a> = (&'a [&'a str], &'a [&'a str], (&'a str, &'a str, &'a str));

#[test]
fn a_backend_with_one_setting_wrong_is_found_out() {
    let detour = Detour::new(1);
    let backend = detour.bench.backend(1).unwrap();
    let client = CLIENT.to_string();
    let vip = VIP.to_string();
    let as_dsr = || doctor(backend, &["e0", "--backend-of", &vip, "--client", &client]);
    let change = |words: &[&str]| {
        for words in words {
            match words.split_once('=') {
                Some((path, value)) => backend.set_sysctl(&format!("net/ipv4/conf/{path}"), value).unwrap(),
                None => drop(backend.ip(words).unwrap()),
            }
        }
    };
    // A second NIC, by which nothing comes.
    let other = Netns::new("other").unwrap();
    let end = |netns, device| End { netns, device, mac: None };
    veth::pair(end(&other, "o0"), end(backend, "e1"), 1500).unwrap();
    backend.ip("address add 10.0.9.1/24 dev e1").unwrap();
    assert_eq!(as_dsr(), FINE);

    let rows: [Wrong<'_>; 10] = [
        (
            &["address del 192.0.2.10/32 dev lo"],
            &["address add 192.0.2.10/32 dev lo"],
            ("failure", &vip, "is not on this host"),
        ),
        (
            &["address add 192.0.2.10/32 dev e1"],
            &["address del 192.0.2.10/32 dev e1"],
            ("failure", &vip, "is on e1, so this host tells its neighbours"),
        ),
        (&["all/arp_ignore=0"], &["all/arp_ignore=1"], ("failure", "e0", "arp_ignore is 0")),
        (&["all/arp_ignore=3"], &["all/arp_ignore=2"], ("failure", "e0", "arp_ignore is 3")),
        (&["all/arp_announce=1"], &["all/arp_announce=2"], ("failure", "e0", "arp_announce is 1")),
        (&["e0/arp_ignore=4"], &["e0/arp_ignore=0"], ("failure", "e0", "arp_ignore is 4")),
        // Strict, and the way back is another: once by either of the two that count.
        (
            &["route replace 10.0.1.0/24 via 10.0.9.2", "all/rp_filter=1"],
            &["route replace 10.0.1.0/24 via 10.0.2.254", "all/rp_filter=0"],
            ("failure", "e0", "rp_filter throws away"),
        ),
        (
            &["route replace 10.0.1.0/24 via 10.0.9.2", "e0/rp_filter=1"],
            &["route replace 10.0.1.0/24 via 10.0.2.254", "e0/rp_filter=0"],
            ("failure", "e0", "rp_filter throws away"),
        ),
        (
            &["route del 10.0.1.0/24", "route del default"],
            &["route add 10.0.1.0/24 via 10.0.2.254", "route add default via 10.0.2.1"],
            ("failure", &client, "there is no route to this client"),
        ),
        (
            &["link set e0 down"],
            &["link set e0 up", "route add 10.0.1.0/24 via 10.0.2.254"],
            ("failure", "", ""),
        ),
    ];
    for (wrong, right, expected) in &rows[..9] {
        change(wrong);
        assert_one(&as_dsr(), *expected);
        change(right);
        assert_eq!(as_dsr(), FINE, "{right:?}");
    }
    // Of several kinds.
    change(&["route replace 10.0.1.0/24 via 10.0.9.2", "all/rp_filter=2"]);
    assert_eq!(as_dsr(), FINE, "loose, which any route satisfies");
    change(&["route replace 10.0.1.0/24 via 10.0.2.254", "all/rp_filter=0"]);
    change(&["e1/arp_ignore=0", "all/arp_ignore=0", "e0/arp_ignore=1"]);
    assert_eq!(as_dsr(), FINE, "the interface's own setting will do");
    let both = doctor(backend, &["--backend-of", &vip, "--client", &client]);
    assert_one(&both, ("failure", "e1", "arp_ignore is 0"));
    change(rows[9].0);
    let (code, found) = as_dsr();
    assert!(code == 1 && found[0].2.contains("no such interface, or it is down"), "{found:?}");
}

/// What nobody unwraps; and the service's network on the loopback device.
#[test]
fn a_backend_that_does_not_unwrap_is_found_out() {
    let detour = Detour::new(1);
    let backend = detour.bench.backend(1).unwrap();
    backend.ip("link set e0 mtu 1600").unwrap();
    for (vip, client) in [(VIP.to_string(), CLIENT.to_string()), (VIP6.to_string(), CLIENT6.to_string())] {
        let ask = |mode: &str| {
            doctor(backend, &["e0", "--backend-of", &vip, "--forward", mode, "--client", &client])
        };
        for mode in ["ipip", "gue"] {
            assert_one(&ask(mode), ("failure", mode, "nothing on this host unwraps"));
        }
        assert_eq!(ask("dsr"), FINE);
        let decap = detour.unwrap(&[]);
        for mode in ["dsr", "ipip", "gue"] {
            assert_eq!(ask(mode), FINE, "{mode}");
        }
        backend.ip("link set e0 mtu 1500").unwrap();
        assert_one(&ask("ipip"), ("warning", "e0", "do not fit into its MTU of 1500"));
        backend.ip("link set e0 mtu 1600").unwrap();
        drop(decap);
    }
    backend.ip_batch("address del 192.0.2.10/32 dev lo\naddress add 192.0.2.10/24 dev lo\n").unwrap();
    let wide = doctor(backend, &["e0", "--backend-of", "192.0.2.10", "--client", &CLIENT.to_string()]);
    assert_one(&wide, ("failure", "192.0.2.10", "is on lo with its network (/24)"));
}
