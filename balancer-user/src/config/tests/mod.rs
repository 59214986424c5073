//! Tables of configurations and of what is wrong with them, to the letter and the column.

mod refusals;

use std::fs;
use std::path::Path;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::method::Method;

/// A valid file. The rows of `refusals` replace one of its lines.
const BASE: [&str; 11] = [
    r#"[daemon]"#,
    r#"interfaces = ["eth0"]"#,
    r#""#,
    r#"[[service]]"#,
    r#"name = "web""#,
    r#"address = "192.0.2.10:80""#,
    r#"protocol = "tcp""#,
    r#"method = "least-packets""#,
    r#"[[service.backend]]"#,
    r#"name = "web-1""#,
    r#"address = "10.0.0.11:8080""#,
];

fn base_with(line: usize, replacement: &str) -> String {
    let mut lines = BASE.map(str::to_owned);
    lines[line - 1] = replacement.to_owned();
    lines.join("\n") + "\n"
}

fn faults_of(text: &str) -> Vec<String> {
    match Config::parse("f", text) {
        Ok(_) => vec![],
        Err(faults) => faults.to_string().lines().map(str::to_owned).collect(),
    }
}

const DAEMON_KEYS: &str = "interfaces, xdp-mode, socket, socket-group, pin-path, ipv6, tick, window, max-flows, max-services, \
                           max-backends, half-open-timeout, closing-timeout";

const METHODS: &str = "\"least-packets\", \"least-bandwidth\", \"least-request\", \"least-response-time\", \
                       \"round-robin\", \"source-hash\", \"maglev\"";

#[test]
fn the_base_is_valid() {
    assert_eq!(faults_of(&BASE.join("\n")), Vec::<String>::new());
}

#[test]
fn texts_that_are_not_toml() {
    for (text, expected) in [
        ("", vec!["f:1:1: the file is empty; needed: [daemon] with `interfaces`"]),
        (" \n\n", vec!["f:1:1: the file is empty; needed: [daemon] with `interfaces`"]),
        ("# nothing\n", vec!["f:1:1: `daemon` is missing in this file; needed: [daemon]"]),
        (
            "[daemon]\ninterfaces = [\"eth0\"]\ntick = \n",
            vec!["f:3:8: string values must be quoted, expected literal string"],
        ),
        ("[daemon\n", vec!["f:1:8: unclosed table, expected `]`"]),
        ("[daemon]\ninterfaces = [\"eth0\"]\ninterfaces = [\"eth1\"]\n", vec!["f:3:1: duplicate key"]),
        (
            "a = = 1\nb = [1,\n",
            vec!["f:1:5: extra `=`, expected nothing", "f:2:8: unclosed array, expected `]`"],
        ),
        (
            "a = \"\\q\"\n",
            vec!["f:1:7: missing escaped value, expected `b`, `e`, `f`, `n`, `r`, `\\`, `\"`, `x`, `u`, `U`"],
        ),
    ] {
        assert_eq!(faults_of(text), expected, "{text:?}");
    }
}

#[test]
fn all_faults_come_at_once_in_the_order_of_the_file() {
    let text = r#"[[service]]
name = "a b"
address = "192.0.2.10:0"
protocol = "tcp"
method = "sticky"

[[service.backend]]
weight = 101
address = "10.0.0.1:80"
name = "b1"

[daemon]
interfaces = []
tick = "1h"
colour = "red"
"#;
    let expected = format!(
        r#"f:2:8: `name` is "a b"; allowed: 1 to 64 characters of A-Z a-z 0-9 . _ - in quotes
f:3:11: `address` is "192.0.2.10:0", not a port; allowed: a port from 1 to 65535
f:5:10: `method` is "sticky"; allowed: {METHODS}
f:8:10: `weight` is 101; allowed: an integer from 0 to 100
f:13:14: `interfaces` is empty; allowed: 1 to 64 interfaces
f:14:8: `tick` is "1h"; allowed: a duration in quotes from "10ms" to "10s"
f:15:1: unknown key `colour` in [daemon]; allowed: {DAEMON_KEYS}"#
    );
    assert_eq!(faults_of(text).join("\n"), expected);
}

#[test]
fn columns_count_characters_after_a_byte_order_mark_too() {
    let text = format!("\u{feff}{}", base_with(1, "daemon.\"é\" = 1\n[daemon]"));
    assert_eq!(faults_of(&base_with(5, "name = \"web\" # é\n\"é\" = \"é\"")).len(), 1);
    assert!(!faults_of(&text).is_empty());
    let inline = base_with(2, "interfaces = [\"é\", \"\"]");
    assert!(faults_of(&inline)[0].starts_with("f:2:20: "), "{:?}", faults_of(&inline));
    assert_eq!(
        faults_of("\u{feff}colour = 1\n[daemon]\ninterfaces = [\"e\"]"),
        ["f:1:1: unknown key `colour` in this file; allowed: daemon, service"]
    );
}

#[test]
fn the_example_says_what_it_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/config/web.toml");
    let config = Config::load(&path).expect("the example is valid");
    let Daemon {
        interfaces,
        optional,
        xdp_mode,
        socket,
        socket_group,
        pin_path,
        ipv6,
        tick,
        window,
        max_flows,
        max_services,
        max_backends,
        half_open_timeout,
        closing_timeout,
    } = &config.daemon;
    assert_eq!(interfaces.iter().map(InterfaceName::as_str).collect::<Vec<_>>(), ["eth0", "eth1"]);
    assert_eq!(optional, &[]);
    assert_eq!(*xdp_mode, XdpMode::Auto);
    assert_eq!(socket, Path::new("/run/balancer/balancer.sock"));
    assert_eq!(*socket_group, None);
    assert_eq!(pin_path.as_deref(), Some(Path::new("/sys/fs/bpf/balancer")));
    assert_eq!(*ipv6, None);
    assert_eq!((*tick, *window), (Duration::from_millis(100), Duration::from_secs(14)));
    assert_eq!((*max_flows, *max_services, *max_backends), (262_144, 256, 4096));
    assert_eq!((half_open_timeout.as_secs(), closing_timeout.as_secs()), (30, 30));

    assert_eq!((config.services.len(), config.backend_count()), (3, 7));
    let web = &config.services[0];
    assert_eq!((web.name.as_str(), web.address.to_string().as_str()), ("web", "192.0.2.10:80"));
    assert_eq!(
        (web.protocol, web.method, web.forward.mode),
        (Protocol::Tcp, Method::LeastPackets, Forward::Nat)
    );
    assert_eq!(web.forward.snat, Snat::Auto);
    let expect = "200-299".parse().expect("statuses");
    let probe = Probe::Http { tls: false, path: "/healthz".to_owned(), host: None, expect };
    let [interval, timeout] = [5, 2].map(Duration::from_secs);
    assert_eq!(web.health, Some(Health { probe, port: None, interval, timeout, rise: 2, fall: 3 }));
    let [timeout, rest] = [3, 30].map(Duration::from_secs);
    assert_eq!(web.passive_health, Some(PassiveHealth { failures: 10, timeout, rest }));
    let own: Vec<_> = web.backends.iter().map(|backend| backend.checks(web).is_some()).collect();
    assert_eq!(own, [true, false, true, true]);
    assert_eq!(web.idle_timeout, Duration::from_secs(7200));
    assert_eq!(web.backends.iter().map(|backend| backend.weight.get()).collect::<Vec<_>>(), [2, 1, 0, 1]);
    assert_eq!(web.backends[1].name.as_str(), "web-2");
    assert_eq!(web.backends[1].address.to_string(), "10.0.0.12:8080");
    let dns = &config.services[1];
    assert_eq!((dns.address.to_string().as_str(), dns.protocol.number()), ("192.0.2.10:53", 17));
    assert_eq!(dns.idle_timeout, Duration::from_secs(10));
    assert_eq!((dns.method, dns.requests, dns.one_packet), (Method::LeastRequest, Requests::Flow, false));
    let limited = &web.backends[3];
    assert_eq!((limited.backup, limited.max_active), (true, Some(1000)));
    let cameras = &config.services[2];
    assert_eq!(cameras.rtsp_nat.map(|ports| ports.to_string()).as_deref(), Some("6970-6999"));
}

fn names_of(words: &str) -> Vec<String> {
    words.split(' ').map(str::to_owned).collect()
}

#[test]
fn what_is_left_out_has_the_documented_defaults() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/config/web.toml");
    let example = Config::load(&path).expect("the example is valid").daemon;
    let config = Config::parse("f", &BASE.join("\n")).expect("the base is valid");
    assert_eq!(Daemon { interfaces: example.interfaces.clone(), ..config.daemon }, example);
    assert_eq!(config.services[0].idle_timeout, Duration::from_secs(7200));
    assert_eq!(config.services[0].forward.snat, Snat::Auto);
    let udp = Config::parse("f", &base_with(7, "protocol = \"udp\"")).expect("valid");
    assert_eq!(udp.services[0].idle_timeout, Duration::from_secs(120));
    let service = &config.services[0];
    assert_eq!((service.requests, service.persistence, service.one_packet), (Requests::Flow, None, false));
    let checked = base_with(8, "method = \"maglev\"\nhealth = { kind = \"http\" }");
    let health = Config::parse("f", &checked).expect("valid").services.remove(0).health.expect("checks");
    let example =
        Config::load(&path).expect("the example is valid").services.remove(0).health.expect("checks");
    let expect = "200-299".parse().expect("statuses");
    let probe = Probe::Http { tls: false, path: "/".to_owned(), host: None, expect };
    assert_eq!((service.health.as_ref(), health), (None, Health { probe, ..example }));
    let passive = base_with(8, "method = \"maglev\"\npassive-health = {}");
    let passive = Config::parse("f", &passive).expect("valid").services.remove(0).passive_health;
    let example = Config::load(&path).expect("the example is valid").services.remove(0).passive_health;
    assert_eq!((service.passive_health, passive), (None, example));
    let hasty = base_with(8, "method = \"maglev\"\nhealth = { kind = \"tcp\", interval = \"1s\" }");
    let hasty = Config::parse("f", &hasty).expect("valid").services.remove(0).health.expect("checks");
    assert_eq!(hasty.timeout, Duration::from_secs(1));
    assert_eq!((service.drain_timeout, service.slow_start), (Duration::from_secs(60), Duration::ZERO));
    let backend = &service.backends[0];
    assert_eq!((backend.weight.get(), backend.backup, backend.max_active), (1, false, None));
    let persistent =
        Config::parse("f", &base_with(7, "protocol = \"udp\"\npersistence = {}")).expect("valid");
    let expected = Persistence { mask: 32, timeout: Duration::from_secs(120) };
    assert_eq!(persistent.services[0].persistence, Some(expected));
    let some =
        base_with(2, "interfaces = [\"eth0\", { name = \"eth1\", optional = true }, { name = \"eth2\" }]");
    let daemon = Config::parse("f", &some).expect("valid").daemon;
    let names = |names: &[InterfaceName]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(
        (names(&daemon.interfaces), names(&daemon.optional)),
        (names_of("eth0 eth1 eth2"), names_of("eth1"))
    );
    let unpinned = Config::parse("f", &base_with(3, "pin-path = \"\"")).expect("valid");
    assert_eq!(unpinned.daemon.pin_path, None);
}

/// The base, over IPv6.
fn base6() -> String {
    BASE.join("\n")
        .replace("192.0.2.10:80", "[2001:db8:aa::10]:80")
        .replace("10.0.0.11:8080", "[2001:db8:2::11]:8080")
}

#[test]
fn ipv6_is_wanted_where_a_service_or_the_operator_wants_it() {
    let parse = |text: &str| Config::parse("f", text).expect("valid");
    let with = |base: &str, line: &str| base.replacen('\n', &format!("\n{line}\n"), 1);
    let (ipv4, ipv6) = (BASE.join("\n"), base6());
    for (text, wanted) in [
        (ipv4.clone(), None),
        (with(&ipv4, "ipv6 = true"), Some(true)),
        (with(&ipv4, "ipv6 = false"), Some(false)),
        (ipv6.clone(), Some(true)),
        (with(&ipv6, "ipv6 = true"), Some(true)),
    ] {
        assert_eq!(parse(&text).ipv6(), wanted, "{text}");
    }
    assert_eq!(
        faults_of(&with(&ipv6, "ipv6 = false")),
        ["f:7:11: an IPv6 service with `ipv6 = false` in [daemon]; allowed: without, or with true"]
    );
    assert_eq!(
        faults_of(&with(&ipv4, "ipv6 = \"auto\"")),
        ["f:2:8: `ipv6` is \"auto\"; allowed: true, false"]
    );
}

#[test]
fn a_service_and_its_backends_are_of_one_family() {
    let mixed = base6().replace("[2001:db8:2::11]:8080", "10.0.0.11:8080");
    assert_eq!(
        faults_of(&mixed),
        [
            "f:11:11: backend address 10.0.0.11:8080 is IPv4, and the address of its service, [2001:db8:aa::10]:80, is \
          IPv6; allowed: both of one family with `forward = \"nat\"`"
        ]
    );
    assert_eq!(
        faults_of(&base_with(11, "address = \"[2001:db8:2::11]:8080\"")),
        [
            "f:11:11: backend address [2001:db8:2::11]:8080 is IPv6, and the address of its service, 192.0.2.10:80, is \
          IPv4; allowed: both of one family with `forward = \"nat\"`"
        ]
    );
    // However an address is written, it is that address.
    let twice = base6()
        + "\n[[service.backend]]\nname = \"web-2\"\naddress = \"[2001:DB8:2:0:0::0011]:8080\"\n\
           [[service.backend]]\nname = \"web-3\"\naddress = \"[2001:0db8:aa::10]:8080\"";
    assert_eq!(
        faults_of(&twice),
        [
            "f:14:11: backend address [2001:db8:2::11]:8080 of this service stands on line 11 already; allowed: once",
            "f:17:11: backend address 2001:db8:aa::10 is that of the service on line 6; allowed: an address that no service has",
        ]
    );
}

#[test]
fn clients_are_known_by_as_many_bits_as_their_addresses_have() {
    let with = |base: &str, persistence: &str| {
        base.replace("protocol =", &format!("persistence = {persistence}\nprotocol ="))
    };
    for (base, whole) in [(BASE.join("\n"), 32), (base6(), 128)] {
        let mask = |persistence: &str| {
            let config = Config::parse("f", &with(&base, persistence)).expect("valid");
            config.services[0].persistence.map(|persistence| persistence.mask)
        };
        assert_eq!(mask("{}"), Some(whole));
        assert_eq!(mask("{ mask = 0 }"), Some(0));
        assert_eq!(mask(&format!("{{ mask = {whole} }}")), Some(whole));
        assert_eq!(
            faults_of(&with(&base, &format!("{{ mask = {} }}", whole + 1))),
            [format!("f:7:24: `mask` is {}; allowed: an integer from 0 to {whole}", whole + 1)]
        );
    }
}

#[test]
fn services_without_eligible_backends_are_valid() {
    let none = Config::parse("f", &BASE[..8].join("\n")).expect("no backends");
    assert_eq!(none.services[0].backends, []);
    let idle = base_with(11, "address = \"10.0.0.11:8080\"\nweight = 0");
    assert_eq!(Config::parse("f", &idle).expect("all weights 0").services[0].backends[0].weight.get(), 0);
    assert_eq!(Config::parse("f", &BASE[..2].join("\n")).expect("no services").services, []);
}

#[test]
fn files_that_cannot_be_read() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let said = |path: &Path| {
        let faults = Config::load(path).expect_err("a fault").to_string();
        faults.strip_prefix(&path.display().to_string()).expect("the path in front").to_owned()
    };
    assert_eq!(said(&path("missing")), ": there is no such file");
    assert_eq!(said(directory.path()), ": this is a directory; needed: a TOML file");
    fs::write(path("latin1"), b"[daemon]\n# \xe9\n").expect("written");
    assert_eq!(said(&path("latin1")), ":2:3: not UTF-8 from here on; TOML files are UTF-8");
    fs::write(path("empty"), "").expect("written");
    assert_eq!(said(&path("empty")), ":1:1: the file is empty; needed: [daemon] with `interfaces`");

    let filled = |length: usize| BASE.join("\n") + "\n#" + &"x".repeat(length - BASE.join("\n").len() - 2);
    fs::write(path("most"), filled(16 << 20)).expect("written");
    assert!(Config::load(&path("most")).is_ok());
    fs::write(path("large"), filled((16 << 20) + 1)).expect("written");
    assert_eq!(said(&path("large")), ": larger than 16 MiB, which no configuration needs");
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text in any::<String>()) {
        let _ = Config::parse("f", &text);
    }

    #[test]
    fn no_damage_to_a_valid_text_makes_it_panic(
        cut in any::<prop::sample::Index>(),
        length in 0..40_usize,
        instead in "[\\[\\]{}=\"'.,#\\n a-z0-9é-]{0,8}",
    ) {
        let text: Vec<char> = BASE.join("\n").chars().collect();
        let start = cut.index(text.len());
        let end = (start + length).min(text.len());
        let damaged: String =
            text[..start].iter().chain(&instead.chars().collect::<Vec<_>>()).chain(&text[end..]).collect();
        if let Err(faults) = Config::parse("f", &damaged) {
            prop_assert!(faults.iter().count() > 0);
            prop_assert!(faults.iter().map(|fault| fault.position).is_sorted());
        }
    }
}
