//! One value at a time: what is refused, with which words, and what is not.

use super::{DAEMON_KEYS, METHODS, base_with, faults_of};
use crate::method::Method;

const SERVICE_KEYS: &str = "name, address, protocol, method, requests, advertise, forward, snat, snat-addresses, snat-ports, \
                            gue-port, tunnel-source, idle-timeout, drain-timeout, persistence, one-packet, \
                            rtsp-nat, slow-start, health, passive-health, no-backend, unknown-flow, backend";

/// Rows: line of `BASE`, what replaces it, the faults without their leading `f:`.
fn check(rows: &[(usize, &str, &[&str])]) {
    for &(line, replacement, expected) in rows {
        let expected: Vec<_> = expected.iter().map(|fault| format!("f:{fault}")).collect();
        assert_eq!(faults_of(&base_with(line, replacement)), expected, "line {line}: {replacement}");
    }
}

#[test]
fn interfaces() {
    let allowed = "an interface name in quotes: 1 to 15 bytes, without whitespace, '/' or ':'";
    let bad = |column, written: &str| format!("2:{column}: `interfaces` is {written}; allowed: {allowed}");
    let many = format!("interfaces = [\n{}]", (0..65).map(|n| format!("\"e{n}\",\n")).collect::<String>());
    check(&[
        (2, "", &["1:1: `interfaces` is missing in [daemon]; needed: interfaces = [\"eth0\"]"]),
        (2, r#"interfaces = "eth0""#, &["2:14: `interfaces` is of type string; needed: a list"]),
        (2, "interfaces = []", &["2:14: `interfaces` is empty; allowed: 1 to 64 interfaces"]),
        (2, &many, &["67:1: `interfaces` has 65 elements; allowed: 1 to 64"]),
        (2, r#"interfaces = [""]"#, &[&bad(15, r#""""#)]),
        (2, "interfaces = [7]", &[&bad(15, "7")]),
        (2, r#"interfaces = ["eth0", "a/b"]"#, &[&bad(23, r#""a/b""#)]),
        (2, r#"interfaces = ["eth 0"]"#, &[&bad(15, r#""eth 0""#)]),
        (2, r#"interfaces = ["eth0:1"]"#, &[&bad(15, r#""eth0:1""#)]),
        (2, r#"interfaces = [".."]"#, &[&bad(15, r#""..""#)]),
        (2, r#"interfaces = ["sixteen-bytes-16"]"#, &[&bad(15, r#""sixteen-bytes-16""#)]),
        (2, r#"interfaces = ["fifteen-bytes15"]"#, &[]),
        (2, r#"interfaces = [{ name = "eth0" }, { name = "eth1", optional = false }]"#, &[]),
        (2, r#"interfaces = ["eth0", { name = "eth1", optional = true }]"#, &[]),
        (
            2,
            r#"interfaces = [{ nam = "eth0" }]"#,
            &[
                "2:15: `name` is missing in an interface; needed: name = \"eth0\"",
                "2:17: unknown key `nam` in an interface, did you mean `name`?; allowed: name, optional",
            ],
        ),
        (
            2,
            r#"interfaces = ["eth0", "eth1", "eth0"]"#,
            &["2:31: interface \"eth0\" stands on line 2 already; allowed: once"],
        ),
    ]);
}

#[test]
fn daemon() {
    let socket = |n: usize| format!("socket = \"/{}\"", "s".repeat(n - 1));
    let too_long = format!(
        "3:10: `socket` is \"/{}…; allowed: an absolute path of a file, at most 107 bytes",
        "s".repeat(58)
    );
    check(&[
        (3, "xdp-mode = \"native\"", &[]),
        (3, "xdp-mode = \"generic\"", &[]),
        (
            3,
            "xdp-mode = \"offload\"",
            &["3:12: `xdp-mode` is \"offload\"; allowed: \"auto\", \"native\", \"generic\""],
        ),
        (
            3,
            "socket = \"run/b.sock\"",
            &["3:10: `socket` is \"run/b.sock\"; allowed: an absolute path in quotes"],
        ),
        (3, "socket = \"\"", &["3:10: `socket` is \"\"; allowed: an absolute path in quotes"]),
        (
            3,
            r#"socket = "/a\u0000b""#,
            &[r#"3:10: `socket` is "/a\u0000b"; allowed: an absolute path in quotes"#],
        ),
        (
            3,
            "socket = \"/\"",
            &["3:10: `socket` is \"/\"; allowed: an absolute path of a file, at most 107 bytes"],
        ),
        (3, &socket(107), &[]),
        (3, &socket(108), &[&too_long]),
        (3, "pin-path = \"\"", &[]),
        (
            3,
            "pin-path = \"bpf\"",
            &["3:12: `pin-path` is \"bpf\"; allowed: an absolute path in quotes, or \"\" for no pins"],
        ),
        (
            3,
            "pin-path = 1",
            &["3:12: `pin-path` is 1; allowed: an absolute path in quotes, or \"\" for no pins"],
        ),
        (3, "tick = \"10ms\"", &[]),
        (
            3,
            "tick = \"9ms\"",
            &["3:8: `tick` is \"9ms\"; allowed: a duration in quotes from \"10ms\" to \"10s\""],
        ),
        (
            3,
            "tick = \"10001ms\"",
            &["3:8: `tick` is \"10001ms\"; allowed: a duration in quotes from \"10ms\" to \"10s\""],
        ),
        (3, "tick = 100", &["3:8: `tick` is 100; allowed: a duration in quotes from \"10ms\" to \"10s\""]),
        (
            3,
            "tick = \"100\"",
            &[
                "3:8: `tick` is \"100\", without a unit; allowed: a duration in quotes from \"10ms\" to \"10s\"",
            ],
        ),
        (
            3,
            "tick = \"-1s\"",
            &["3:8: `tick` is \"-1s\"; allowed: a duration in quotes from \"10ms\" to \"10s\""],
        ),
        (
            3,
            "tick = \"99999999999999999999y\"",
            &[
                "3:8: `tick` is \"99999999999999999999y\"; allowed: a duration in quotes from \"10ms\" to \"10s\"",
            ],
        ),
        (3, "tick = \"7s\"", &[]),
        (3, "tick = \"8s\"", &["3:8: `window` is \"14s\" with a `tick` of \"8s\"; allowed: 2 ticks or more"]),
        (
            3,
            "tick = \"1s\"\nwindow = \"1999ms\"",
            &["4:10: `window` is \"1s 999ms\" with a `tick` of \"1s\"; allowed: 2 ticks or more"],
        ),
        (3, "window = \"1s\"", &[]),
        (3, "window = \"5m\"", &[]),
        (
            3,
            "window = \"999ms\"",
            &["3:10: `window` is \"999ms\"; allowed: a duration in quotes from \"1s\" to \"5m\""],
        ),
        (
            3,
            "window = \"301s\"",
            &["3:10: `window` is \"301s\"; allowed: a duration in quotes from \"1s\" to \"5m\""],
        ),
        (3, "max-flows = 1024", &[]),
        (3, "max-flows = 0x400000", &[]),
        (3, "max-flows = 1023", &["3:13: `max-flows` is 1023; allowed: an integer from 1024 to 4194304"]),
        (
            3,
            "max-flows = 4194305",
            &["3:13: `max-flows` is 4194305; allowed: an integer from 1024 to 4194304"],
        ),
        (3, "max-services = 0", &["3:16: `max-services` is 0; allowed: an integer from 1 to 4096"]),
        (3, "max-services = 4097", &["3:16: `max-services` is 4097; allowed: an integer from 1 to 4096"]),
        (3, "max-backends = 0", &["3:16: `max-backends` is 0; allowed: an integer from 1 to 32768"]),
        (3, "max-backends = 32769", &["3:16: `max-backends` is 32769; allowed: an integer from 1 to 32768"]),
        (
            3,
            "half-open-timeout = \"999ms\"",
            &["3:21: `half-open-timeout` is \"999ms\"; allowed: a duration in quotes from \"1s\" to \"1h\""],
        ),
        (
            3,
            "closing-timeout = \"61m\"",
            &["3:19: `closing-timeout` is \"61m\"; allowed: a duration in quotes from \"1s\" to \"1h\""],
        ),
    ]);
}

#[test]
fn keys() {
    let allowed = |at: &str, what: &str, keys: &str| format!("{at}: {what}; allowed: {keys}");
    check(&[
        (
            3,
            "max_flows = 2048",
            &[&allowed("3:1", "unknown key `max_flows` in [daemon], did you mean `max-flows`?", DAEMON_KEYS)],
        ),
        (3, "  colour = 1", &[&allowed("3:3", "unknown key `colour` in [daemon]", DAEMON_KEYS)]),
        (
            3,
            "socket-group = \"a b\"",
            &["3:16: `socket-group` is \"a b\"; allowed: 1 to 64 characters of A-Z a-z 0-9 . _ - in quotes"],
        ),
        (3, "[metrics]", &["3:2: unknown key `metrics` in this file; allowed: daemon, service"]),
        (
            3,
            "[services]",
            &["3:2: unknown key `services` in this file, did you mean `service`?; allowed: daemon, service"],
        ),
        (3, "\"\\u001b[31m\" = 1", &[&allowed("3:1", r"unknown key `\u{1b}[31m` in [daemon]", DAEMON_KEYS)]),
        (
            6,
            "adress = \"192.0.2.10:80\"",
            &[
                "4:1: `address` is missing in [[service]]; needed: address = \"192.0.2.10:80\"",
                &allowed("6:1", "unknown key `adress` in [[service]], did you mean `address`?", SERVICE_KEYS),
            ],
        ),
        (8, "method = \"round-robin\"\nhealth = { kind = \"tcp\" }", &[]),
        (
            11,
            "address = \"10.0.0.11:80\"\nback-up = true",
            &[
                "12:1: unknown key `back-up` in [[service.backend]], did you mean `backup`?; allowed: name, address, \
               weight, backup, max-active, health",
            ],
        ),
        (
            1,
            "",
            &[
                "1:1: `daemon` is missing in this file; needed: [daemon]",
                "2:1: unknown key `interfaces` in this file; allowed: daemon, service",
            ],
        ),
        (
            1,
            "daemon = 7",
            &[
                "1:10: [daemon] is of type integer; needed: a table",
                "2:1: unknown key `interfaces` in this file; allowed: daemon, service",
            ],
        ),
    ]);
}

#[test]
fn names_and_words_of_a_service() {
    let name = "1 to 64 characters of A-Z a-z 0-9 . _ - in quotes";
    let bad = |written: &str| format!("5:8: `name` is {written}; allowed: {name}");
    let long = "n".repeat(64);
    let too_long = format!("\"{}…", "n".repeat(59));
    check(&[
        (5, "", &["4:1: `name` is missing in [[service]]; needed: name = \"web\""]),
        (5, "name = \"\"", &[&bad("\"\"")]),
        (5, "name = \"we b\"", &[&bad("\"we b\"")]),
        (5, "name = \"wéb\"", &[&bad("\"wéb\"")]),
        (5, "name = true", &[&bad("true")]),
        (5, "name = \"A.b_c-9\"", &[]),
        (5, &format!("name = \"{long}\""), &[]),
        (5, &format!("name = \"{long}n\""), &[&bad(&too_long)]),
        (7, "", &["4:1: `protocol` is missing in [[service]]; needed: protocol = \"tcp\""]),
        (7, "protocol = \"udp\"", &[]),
        (7, "protocol = \"TCP\"", &["7:12: `protocol` is \"TCP\"; allowed: \"tcp\", \"udp\""]),
        (7, "protocol = \"sctp\"", &["7:12: `protocol` is \"sctp\"; allowed: \"tcp\", \"udp\""]),
        (8, "", &["4:1: `method` is missing in [[service]]; needed: method = \"least-packets\""]),
        (8, "method = \"least-bandwidth\"", &[]),
        (8, "method = \"round-robin\"", &[]),
        (8, "method = \"random\"", &[&format!("8:10: `method` is \"random\"; allowed: {METHODS}")]),
    ]);
    for method in Method::ALL {
        assert_eq!(faults_of(&base_with(8, &format!("method = \"{method}\""))), [""; 0]);
        let fault = format!(
            "f:9:12: `requests` means nothing to the method \"{method}\"; \
             allowed: with \"least-request\" and \"least-response-time\""
        );
        let expected = if method.counts_requests() { vec![] } else { vec![fault] };
        for requests in ["flow", "exchange"] {
            let text = format!("method = \"{method}\"\nrequests = \"{requests}\"");
            assert_eq!(faults_of(&base_with(8, &text)), expected, "{text}");
        }
    }
    let drains = "9:17: `drain-timeout` is 60; allowed: a duration in quotes from \"0s\" to \"1day\"";
    check(&[
        (8, "method = \"maglev\"\ndrain-timeout = \"0s\"", &[]),
        (8, "method = \"maglev\"\ndrain-timeout = 60", &[drains]),
        (8, "method = \"maglev\"\npersistence = { mask = 24, timeout = \"1h\" }", &[]),
        (
            8,
            "method = \"maglev\"\npersistence = { mask = 33, timeout = \"0s\", key = \"x\" }",
            &[
                "9:24: `mask` is 33; allowed: an integer from 0 to 32",
                "9:38: `timeout` is \"0s\"; allowed: a duration in quotes from \"1s\" to \"4h\"",
                "9:44: unknown key `key` in persistence; allowed: mask, timeout",
            ],
        ),
        (
            8,
            "method = \"maglev\"\npersistence = true",
            &["9:15: persistence is of type boolean; needed: a table"],
        ),
        (8, "method = \"maglev\"\nrtsp-nat = { data-ports = \"6970-6999\" }", &[]),
        (
            8,
            "method = \"maglev\"\nrtsp-nat = { data-ports = \"1-1025\" }",
            &[
                "9:27: `data-ports` is \"1-1025\"; allowed: a range of 1 to 1024 ports in quotes, \"6970-6999\"",
            ],
        ),
        (
            8,
            "method = \"maglev\"\nrtsp-nat = { data-ports = \"7000-6999\" }",
            &[
                "9:27: `data-ports` is \"7000-6999\"; allowed: a range of 1 to 1024 ports in quotes, \"6970-6999\"",
            ],
        ),
        (
            8,
            "method = \"maglev\"\nrtsp-nat = { data-ports = \"0-9\" }",
            &["9:27: `data-ports` is \"0-9\"; allowed: a range of 1 to 1024 ports in quotes, \"6970-6999\""],
        ),
        (
            7,
            "protocol = \"udp\"\nrtsp-nat = { data-ports = \"6970-6999\" }",
            &["8:12: `rtsp-nat` of a service over udp; allowed: over tcp, where the control connections are"],
        ),
        (
            8,
            "method = \"maglev\"\nrtsp-nat = {}",
            &["9:12: `data-ports` is missing in rtsp-nat; needed: data-ports = \"6970-6999\""],
        ),
        (11, "address = \"10.0.0.11:8080\"\nbackup = true\nmax-active = 1", &[]),
        (11, "address = \"10.0.0.11:8080\"\nbackup = 1", &["12:10: `backup` is 1; allowed: true, false"]),
        (
            11,
            "address = \"10.0.0.11:8080\"\nmax-active = 0",
            &["12:14: `max-active` is 0; allowed: an integer from 1 to 4294967295"],
        ),
    ]);
    let timeouts = "allowed: a duration in quotes from \"1s\" to \"4h\"";
    check(&[
        (4, "[[service]]\nforward = \"nat\"", &[]),
        (
            4,
            "[[service]]\nforward = \"tunnel\"",
            &["5:11: `forward` is \"tunnel\"; allowed: \"nat\", \"full-nat\", \"dsr\", \"ipip\", \"gue\""],
        ),
        (4, "[[service]]\nadvertise = \"arp\"", &[]),
        (
            4,
            "[[service]]\nadvertise = \"bgp\"",
            &["5:13: `advertise` is \"bgp\"; allowed: \"none\", \"arp\""],
        ),
        (4, "[[service]]\nsnat = \"auto\"", &[]),
        (4, "[[service]]\nsnat = \"always\"", &[]),
        (4, "[[service]]\nsnat = \"never\"", &[]),
        (
            4,
            "[[service]]\nsnat = \"on\"",
            &["5:8: `snat` is \"on\"; allowed: \"auto\", \"always\", \"never\""],
        ),
        (4, "[[service]]\nsnat = true", &["5:8: `snat` is true; allowed: \"auto\", \"always\", \"never\""]),
        (4, "[[service]]\nslow-start = \"30s\"", &[]),
        (4, "[[service]]\nslow-start = \"0s\"", &[]),
        (
            4,
            "[[service]]\nslow-start = \"2h\"",
            &["5:14: `slow-start` is \"2h\"; allowed: a duration in quotes from \"0s\" to \"1h\""],
        ),
        (4, "[[service]]\nno-backend = \"drop\"\nunknown-flow = \"drop\"", &[]),
        (4, "[[service]]\nno-backend = \"reject\"\nunknown-flow = \"reset\"", &[]),
        (
            4,
            "[[service]]\nno-backend = \"reset\"\nunknown-flow = \"reject\"",
            &[
                "5:14: `no-backend` is \"reset\"; allowed: \"reject\", \"drop\"",
                "6:16: `unknown-flow` is \"reject\"; allowed: \"reset\", \"drop\"",
            ],
        ),
        (4, "[[service]]\nidle-timeout = \"4h\"", &[]),
        (4, "[[service]]\nidle-timeout = \"1s\"", &[]),
        (4, "[[service]]\nidle-timeout = \"0s\"", &[&format!("5:16: `idle-timeout` is \"0s\"; {timeouts}")]),
        (
            4,
            "[[service]]\nidle-timeout = \"241m\"",
            &[&format!("5:16: `idle-timeout` is \"241m\"; {timeouts}")],
        ),
    ]);
}

/// The same rows for the address of a service and that of a backend.
#[test]
fn addresses() {
    let unicast = "a unicast address with a port, \"A.B.C.D:port\" or \"[A:B::C]:port\"";
    let port = "a port from 1 to 65535";
    for (address, why, allowed) in [
        ("\"0.0.0.0:80\"", ", an address of \"this network\" (0.0.0.0/8)", unicast),
        ("\"127.0.0.1:80\"", ", a loopback address", unicast),
        ("\"127.255.0.1:80\"", ", a loopback address", unicast),
        ("\"224.0.0.1:80\"", ", a multicast address", unicast),
        ("\"239.255.255.255:80\"", ", a multicast address", unicast),
        ("\"240.0.0.1:80\"", ", a reserved address (240.0.0.0/4)", unicast),
        ("\"255.255.255.254:80\"", ", a reserved address (240.0.0.0/4)", unicast),
        ("\"255.255.255.255:80\"", ", the broadcast address", unicast),
        ("\"[::]:80\"", ", the unspecified address", unicast),
        ("\"[::1]:80\"", ", a loopback address", unicast),
        ("\"[ff02::1]:80\"", ", a multicast address", unicast),
        (
            "\"[fe80::1]:80\"",
            ", a link-local address, which needs a zone to say on which link, and can have none here",
            unicast,
        ),
        ("\"[fe80::1%eth0]:80\"", ", an address with a zone", unicast),
        (
            "\"[::ffff:192.0.2.10]:80\"",
            ", an IPv4 address written as IPv6: write it as \"A.B.C.D:port\"",
            unicast,
        ),
        ("\"[::192.0.2.10]:80\"", ", a reserved address (::/96)", unicast),
        ("\"2001:db8::10\"", ", IPv6 without brackets and a port", unicast),
        ("\"2001:db8::10:80\"", ", IPv6 without brackets and a port", unicast),
        ("\"[2001:db8::10]\"", ", without a port", unicast),
        ("\"[2001:db8::10:80\"", ", without a closing ]", unicast),
        ("\"[2001:db8::10g]:80\"", ", not an address and port", unicast),
        ("\"[203.0.113.9]:80\"", ", not an address and port", unicast),
        ("\"[2001:db8::10]:0\"", ", not a port", port),
        ("\"[2001:db8::10]:65536\"", ", not a port", port),
        ("\"203.0.113.9\"", ", without a port", unicast),
        ("\"web.example:80\"", ", not an address and port", unicast),
        ("\"203.0.113.256:80\"", ", not an address and port", unicast),
        ("\"203.0.113.09:80\"", ", not an address and port", unicast),
        ("\" 203.0.113.9:80\"", ", not an address and port", unicast),
        ("\"\"", ", without a port", unicast),
        ("80", "", unicast),
        ("\"203.0.113.9:0\"", ", not a port", port),
        ("\"203.0.113.9:65536\"", ", not a port", port),
        ("\"203.0.113.9:123456\"", ", not a port", port),
        ("\"203.0.113.9:+80\"", ", not a port", port),
        ("\"203.0.113.9:\"", ", not a port", port),
        ("\"203.0.113.9:http\"", ", not a port", port),
    ] {
        for line in [6, 11] {
            let expected = format!("f:{line}:11: `address` is {address}{why}; allowed: {allowed}");
            assert_eq!(faults_of(&base_with(line, &format!("address = {address}"))), [expected]);
        }
    }
    for line in [6, 11] {
        check(&[(line, "address = \"203.0.113.9:65535\"", &[]), (line, "address = \"1.0.0.1:1\"", &[])]);
    }
}

#[test]
fn backends() {
    let weight = |written: &str| format!("12:10: `weight` is {written}; allowed: an integer from 0 to 100");
    let address = "address = \"10.0.0.11:8080\"\n";
    for (written, fine) in [
        ("0", true),
        ("1", true),
        ("100", true),
        ("-1", false),
        ("101", false),
        ("65536", false),
        ("18446744073709551617", false),
        ("1.5", false),
        ("\"2\"", false),
        ("true", false),
    ] {
        let expected = if fine { vec![] } else { vec![format!("f:{}", weight(written))] };
        assert_eq!(faults_of(&base_with(11, &format!("{address}weight = {written}"))), expected);
    }
    let second = |name: &str, address: &str| {
        format!(
            "address = \"10.0.0.11:8080\"\n[[service.backend]]\nname = \"{name}\"\naddress = \"{address}\""
        )
    };
    check(&[
        (10, "", &["9:1: `name` is missing in [[service.backend]]; needed: name = \"web-1\""]),
        (11, "", &["9:1: `address` is missing in [[service.backend]]; needed: address = \"10.0.0.11:8080\""]),
        (
            10,
            "name = \"w/1\"",
            &["10:8: `name` is \"w/1\"; allowed: 1 to 64 characters of A-Z a-z 0-9 . _ - in quotes"],
        ),
        (11, &second("web-2", "10.0.0.12:8080"), &[]),
        (11, &second("web-2", "10.0.0.11:8081"), &[]),
        (
            11,
            &second("web-1", "10.0.0.12:8080"),
            &["13:8: backend name \"web-1\" of this service stands on line 10 already; allowed: once"],
        ),
        (
            11,
            &second("web-2", "10.0.0.11:8080"),
            &[
                "14:11: backend address 10.0.0.11:8080 of this service stands on line 11 already; allowed: once",
            ],
        ),
        (
            11,
            "address = \"192.0.2.10:8080\"",
            &["11:11: backend address 192.0.2.10 is that of the service on line 6; \
             allowed: an address that no service has"],
        ),
        (9, "[service.backend]", &["9:1: [[service.backend]] is of type table; needed: a list"]),
        (4, "[service]", &["4:1: [[service]] is of type table; needed: a list"]),
    ]);
}

#[test]
fn across_services() {
    let service = |name: &str, address: &str, protocol: &str| {
        format!(
            "address = \"10.0.0.11:8080\"\n[[service]]\nname = \"{name}\"\naddress = \"{address}\"\n\
             protocol = \"{protocol}\"\nmethod = \"round-robin\""
        )
    };
    let daemon = |line: &str, text: &str| base_with(11, text).replacen('\n', &format!("\n{line}\n"), 1);
    check(&[
        (11, &service("dns", "192.0.2.10:81", "tcp"), &[]),
        (11, &service("dns", "192.0.2.10:80", "udp"), &[]),
        (
            11,
            &service("web", "192.0.2.11:80", "tcp"),
            &["13:8: service name \"web\" stands on line 5 already; allowed: once"],
        ),
        (
            11,
            &service("web2", "192.0.2.10:80", "tcp"),
            &["14:11: service address 192.0.2.10:80 with tcp stands on line 6 already; allowed: once"],
        ),
        // The address of a service that comes after the backend.
        (
            11,
            &service("web2", "10.0.0.11:1", "udp"),
            &["11:11: backend address 10.0.0.11 is that of the service on line 14; \
             allowed: an address that no service has"],
        ),
    ]);
    assert_eq!(
        faults_of(&daemon("max-services = 1", &service("dns", "192.0.2.10:81", "tcp"))),
        ["f:13:1: 2 services in this file; allowed: `max-services`, 1"]
    );
    let two = "address = \"10.0.0.11:80\"\n[[service.backend]]\nname = \"b\"\naddress = \"10.0.0.12:80\"";
    assert_eq!(
        faults_of(&daemon("max-backends = 1", two)),
        ["f:13:1: 2 backends in this file; allowed: `max-backends`, 1"]
    );
    assert_eq!(faults_of(&daemon("max-backends = 2", two)), Vec::<String>::new());
}

#[test]
fn one_packet_goes_with_nothing_about_flows() {
    let flows = |at: &str, key: &str| {
        format!("{at}: `{key}` is about flows, and `one-packet` keeps none; allowed: one of the two")
    };
    let udp = |more: &str| format!("protocol = \"udp\"\none-packet = true\n{more}");
    let method = |method: &str| {
        format!(
            "8:14: `one-packet` leaves the method \"{method}\" no flow to count; allowed: with a method that counts none"
        )
    };
    check(&[
        (7, &udp(""), &[]),
        (7, "protocol = \"udp\"\none-packet = false\nidle-timeout = \"9s\"\nsnat = \"always\"", &[]),
        (7, &udp("snat = \"never\""), &[]),
        (7, &udp("slow-start = \"9s\"\ndrain-timeout = \"9s\"\nno-backend = \"drop\""), &[]),
        (7, "protocol = \"udp\"\none-packet = 1", &["8:14: `one-packet` is 1; allowed: true, false"]),
        (
            7,
            "protocol = \"tcp\"\none-packet = true",
            &["8:14: `one-packet` of a service over tcp; allowed: over udp"],
        ),
        (
            7,
            &udp("snat = \"always\""),
            &["9:8: `snat` is \"always\", and `one-packet` keeps no flow to translate answers back by; \
               allowed: \"auto\", \"never\""],
        ),
        (
            7,
            &udp("rtsp-nat = { data-ports = \"6970-6999\" }"),
            &["9:12: `rtsp-nat` of a service over udp; allowed: over tcp, where the control connections are"],
        ),
        (7, &udp("idle-timeout = \"9s\""), &[&flows("9:16", "idle-timeout")]),
        (7, &udp("persistence = {}"), &[&flows("9:15", "persistence")]),
    ]);
    let text = base_with(7, &udp(""))
        .replace("192.0.2.10:", "[2001:db8::10]:")
        .replace("10.0.0.11:", "[2001:db8::11]:");
    assert_eq!(faults_of(&text), Vec::<String>::new());
    for name in Method::ALL.map(Method::name) {
        let counts = ["least-request", "least-response-time"].contains(&name);
        let expected = if counts { vec![format!("f:{}", method(name))] } else { vec![] };
        let text = base_with(7, "protocol = \"udp\"\none-packet = true").replace("least-packets", name);
        assert_eq!(faults_of(&text), expected);
    }
    let text =
        base_with(7, "protocol = \"udp\"\none-packet = true").replace(":8080\"", ":8080\"\nmax-active = 1");
    assert_eq!(faults_of(&text), [format!("f:{}", flows("13:14", "max-active"))]);
}

/// Who answers without a flow must be known by address and port alone.
#[test]
fn a_backend_of_a_one_packet_service_is_of_no_other() {
    let service = |name: &str, protocol: &str, more: &str, backends: &[&str]| {
        let mut text = format!(
            "[[service]]\nname = \"{name}\"\naddress = \"192.0.2.10:{}\"\nprotocol = \"{protocol}\"\n\
             method = \"maglev\"\n{more}\n",
            name.len()
        );
        for (number, backend) in backends.iter().enumerate() {
            text.push_str(&format!("[[service.backend]]\nname = \"b{number}\"\naddress = \"{backend}\"\n"));
        }
        text
    };
    let daemon = "[daemon]\ninterfaces = [\"eth0\"]\n";
    let first = service("1", "udp", "one-packet = true", &["10.0.0.11:53", "10.0.0.12:53"]);
    let stands = "f:23:11: backend address 10.0.0.12:53 over udp stands on line 14 already; \
                  allowed: once, since with `one-packet` nothing else tells whose an answer is";
    let media = "f:14:11: backend address 10.0.0.12:53 over udp stands among the data ports on line 20 already; \
                 allowed: a port that no media come from";
    for (second, expected) in [
        (service("22", "udp", "one-packet = true", &["10.0.0.13:53"]), None),
        (service("22", "udp", "", &["10.0.0.12:54"]), None),
        (service("22", "tcp", "", &["10.0.0.12:53"]), None),
        (service("22", "udp", "", &["10.0.0.12:53"]), Some(stands)),
        (service("22", "udp", "one-packet = true", &["10.0.0.12:53"]), Some(stands)),
        (service("22", "tcp", "rtsp-nat = { data-ports = \"50-59\" }", &["10.0.0.12:554"]), Some(media)),
    ] {
        let text = format!("{daemon}{first}{second}");
        assert_eq!(faults_of(&text), Vec::from_iter(expected.map(str::to_owned)), "{text}");
    }
    // With flows as well.
    let flows = service("1", "udp", "", &["10.0.0.11:53", "10.0.0.12:53"]);
    let rtsp = service("22", "tcp", "rtsp-nat = { data-ports = \"50-59\" }", &["10.0.0.12:554"]);
    assert_eq!(faults_of(&format!("{daemon}{flows}{rtsp}")), [media]);
    // Two services with flows share what they like.
    let plain = |name| service(name, "udp", "", &["10.0.0.12:53"]);
    assert_eq!(faults_of(&format!("{daemon}{}{}", plain("1"), plain("22"))), [""; 0]);
}

#[test]
fn data_ports_of_rtsp_services_do_not_overlap() {
    let service = |name: &str, address: &str, ports: &str, backend: &str| {
        format!(
            "[[service]]\nname = \"{name}\"\naddress = \"{address}\"\nprotocol = \"tcp\"\nmethod = \"maglev\"\n\
             rtsp-nat = {{ data-ports = \"{ports}\" }}\n\
             [[service.backend]]\nname = \"b\"\naddress = \"{backend}\"\n"
        )
    };
    let daemon = "[daemon]\ninterfaces = [\"eth0\"]\n";
    let first = service("one", "192.0.2.10:554", "6970-6999", "10.0.0.11:554");
    for (second, expected) in [
        (service("two", "192.0.2.11:554", "6970-6999", "10.0.0.12:554"), None),
        (service("two", "192.0.2.10:555", "7000-7009", "10.0.0.12:554"), None),
        (service("two", "192.0.2.11:554", "7000-7009", "10.0.0.11:554"), None),
        (
            service("two", "192.0.2.10:555", "6999-7009", "10.0.0.12:554"),
            Some(
                "f:17:12: service address 192.0.2.10:6999 with udp, a data port of 6999-7009, stands on line 8 already; \
                 allowed: once",
            ),
        ),
        (
            service("two", "192.0.2.11:554", "6980-7009", "10.0.0.11:555"),
            Some(
                "f:17:12: backend address 10.0.0.11 with data port 6980 stands on line 8 already; allowed: once",
            ),
        ),
    ] {
        let text = format!("{daemon}{first}{second}");
        assert_eq!(faults_of(&text), Vec::from_iter(expected.map(str::to_owned)), "{text}");
    }
    let udp =
        "[[service]]\nname = \"u\"\naddress = \"192.0.2.10:6980\"\nprotocol = \"udp\"\nmethod = \"maglev\"\n";
    let expected =
        "f:14:11: service address 192.0.2.10:6980 with udp stands on line 8 already; allowed: once";
    assert_eq!(faults_of(&format!("{daemon}{first}{udp}")), [expected]);
}

#[test]
fn health() {
    let exchange = "kind, port, send, receive, interval, timeout, rise, fall";
    let request = "kind, port, path, host, expect, interval, timeout, rise, fall";
    let unknown = |column: usize, key: &str, kind: &str, allowed: &str| {
        format!("9:{column}: unknown key `{key}` in health of kind \"{kind}\"; allowed: {allowed}")
    };
    let kinds = "\"tcp\", \"udp\", \"http\", \"https\", \"ping\", \"exec\"";
    let codes = "status codes from 100 to 599 in quotes, \"200\", \"200-299\" or \"200,301-308\"";
    let bytes = "at most 1024 bytes in quotes: a text, or \"hex:\" and pairs of hexadecimal digits";
    let long = "x".repeat(1025);
    for (health, expected) in [
        (r#"{ kind = "tcp" }"#, vec![]),
        (r#"{ kind = "tcp", port = 9000, send = "PING\r\n", receive = "+PONG" }"#, vec![]),
        (r#"{ kind = "udp", send = "hex:00fF", receive = "hex:" }"#, vec![]),
        (r#"{ kind = "http", path = "/a?b=c", host = "www.example.com:8080", expect = "200, 301-308" }"#, vec![]),
        (r#"{ kind = "https", port = 8443, interval = "1s", timeout = "1s", rise = 100, fall = 1 }"#, vec![]),
        (r#"{ kind = "ping", interval = "100ms" }"#, vec![]),
        (r#"{ kind = "exec", command = ["/bin/true", "", "-x"], interval = "1h" }"#, vec![]),
        (r#""tcp""#, vec!["9:10: health is of type string; needed: a table".to_owned()]),
        ("{}", vec!["9:10: `kind` is missing in health; needed: kind = \"tcp\"".to_owned()]),
        (r#"{ kind = "sctp", path = "/" }"#, vec![format!("9:19: `kind` is \"sctp\"; allowed: {kinds}")]),
        (r#"{ kind = "tcp", path = "/" }"#, vec![unknown(26, "path", "tcp", exchange)]),
        (r#"{ kind = "https", send = "x" }"#, vec![unknown(28, "send", "https", request)]),
        (r#"{ kind = "ping", port = 1 }"#, vec![unknown(27, "port", "ping", "kind, interval, timeout, rise, fall")]),
        (
            r#"{ kind = "tcp", interval = "1s", timeout = "1001ms", rise = 0, fall = 101, port = 0 }"#,
            vec![
                "9:53: `timeout` is \"1s 1ms\" with an `interval` of \"1s\"; allowed: at most that".to_owned(),
                "9:70: `rise` is 0; allowed: an integer from 1 to 100".to_owned(),
                "9:80: `fall` is 101; allowed: an integer from 1 to 100".to_owned(),
                "9:92: `port` is 0; allowed: an integer from 1 to 65535".to_owned(),
            ],
        ),
        (
            r#"{ kind = "tcp", interval = "99ms" }"#,
            vec!["9:37: `interval` is \"99ms\"; allowed: a duration in quotes from \"100ms\" to \"1h\"".to_owned()],
        ),
        (r#"{ kind = "http", expect = "200-" }"#, vec![format!("9:36: `expect` is \"200-\"; allowed: {codes}")]),
        (r#"{ kind = "http", expect = "299-200" }"#, vec![format!("9:36: `expect` is \"299-200\"; allowed: {codes}")]),
        (r#"{ kind = "http", expect = "99" }"#, vec![format!("9:36: `expect` is \"99\"; allowed: {codes}")]),
        (
            r#"{ kind = "http", path = "healthz", host = "a b" }"#,
            vec![
                "9:34: `path` is \"healthz\"; allowed: a path of at most 1024 bytes in quotes, without spaces, that begins \
                 with /"
                    .to_owned(),
                "9:52: `host` is \"a b\"; allowed: a host name of at most 1024 bytes in quotes, without spaces and slashes"
                    .to_owned(),
            ],
        ),
        (r#"{ kind = "udp", send = "hex:0" }"#, vec![format!("9:33: `send` is \"hex:0\"; allowed: {bytes}")]),
        (
            &format!(r#"{{ kind = "udp", receive = "{long}" }}"#),
            vec![format!("9:36: `receive` is \"{}…; allowed: {bytes}", "x".repeat(59))],
        ),
        (
            r#"{ kind = "exec" }"#,
            vec![
                "9:10: `command` is missing in health of kind \"exec\"; needed: command = [\"/usr/local/bin/check\", \
                 \"--fast\"]"
                    .to_owned(),
            ],
        ),
        (r#"{ kind = "exec", command = [] }"#, vec!["9:37: `command` has 0 elements; allowed: 1 to 100".to_owned()]),
        (
            r#"{ kind = "exec", command = ["check", 7] }"#,
            vec![
                "9:38: `command` is \"check\"; allowed: the absolute path of a program in quotes".to_owned(),
                "9:47: `command` is 7; allowed: an argument in quotes".to_owned(),
            ],
        ),
    ] {
        let faults = faults_of(&base_with(8, &format!("method = \"round-robin\"\nhealth = {health}")));
        let expected: Vec<_> = expected.iter().map(|fault| format!("f:{fault}")).collect();
        assert_eq!(faults, expected, "{health}");
    }
}

#[test]
fn a_backends_own_health() {
    let address = "address = \"10.0.0.11:8080\"";
    let allowed = "allowed: false, for no checks, or a table as in [[service]]";
    for (health, expected) in [
        ("false", vec![]),
        ("{ kind = \"ping\" }", vec![]),
        ("true", vec![format!("12:10: `health` is true; {allowed}")]),
        ("\"tcp\"", vec![format!("12:10: `health` is \"tcp\"; {allowed}")]),
        ("{}", vec!["12:10: `kind` is missing in health; needed: kind = \"tcp\"".to_owned()]),
    ] {
        let faults = faults_of(&base_with(11, &format!("{address}\nhealth = {health}")));
        let expected: Vec<_> = expected.iter().map(|fault| format!("f:{fault}")).collect();
        assert_eq!(faults, expected, "{health}");
    }
}

#[test]
fn passive_health() {
    for (line, text, expected) in [
        (8, "method = \"maglev\"\npassive-health = {}", vec![]),
        (
            8,
            "method = \"maglev\"\npassive-health = { failures = 1, timeout = \"1s\", rest = \"1h\" }",
            vec![],
        ),
        (7, "protocol = \"udp\"\npassive-health = {}", vec![]),
        (
            8,
            "method = \"maglev\"\npassive-health = { failures = 0, timeout = \"11s\", rest = \"0s\", fall = 3 }",
            vec![
                "9:31: `failures` is 0; allowed: an integer from 1 to 1000",
                "9:44: `timeout` is \"11s\"; allowed: a duration in quotes from \"1s\" to \"10s\"",
                "9:58: `rest` is \"0s\"; allowed: a duration in quotes from \"1s\" to \"1h\"",
                "9:64: unknown key `fall` in passive-health; allowed: failures, timeout, rest",
            ],
        ),
        (
            8,
            "method = \"maglev\"\npassive-health = true",
            vec!["9:18: passive-health is of type boolean; needed: a table"],
        ),
        (
            7,
            "protocol = \"udp\"\none-packet = true\npassive-health = {}",
            vec![
                "9:18: `passive-health` is about flows, and `one-packet` keeps none; allowed: one of the two",
            ],
        ),
    ] {
        let expected: Vec<_> = expected.iter().map(|fault| format!("f:{fault}")).collect();
        assert_eq!(faults_of(&base_with(line, text)), expected, "{text}");
    }
}

#[test]
fn each_way_of_forwarding_has_its_own_keys() {
    let stranger = |place: &str, key: &str, mode: &str, allowed: &str| {
        format!("{place}: `{key}` means nothing to `forward = \"{mode}\"`; allowed: with {allowed}")
    };
    let port = |mode: &str| {
        format!(
            "12:11: backend address 10.0.0.11:8080 has another port than its service, 192.0.2.10:80, and \
             `forward = \"{mode}\"` changes none; allowed: port 80"
        )
    };
    let addresses = "a list of unicast addresses of the service's family, [\"192.0.2.1\"]";
    check(&[
        (4, "[[service]]\nforward = \"full-nat\"", &[]),
        (4, "[[service]]\nforward = \"dsr\"", &[&port("dsr")]),
        (4, "[[service]]\nforward = \"ipip\"", &[&port("ipip")]),
        (
            4,
            "[[service]]\nforward = \"gue\"\ngue-port = 0\n",
            &[
                "6:12: `gue-port` is 0; allowed: an integer from 1 to 65535",
                &port("gue").replace("12:", "14:"),
            ],
        ),
        (
            4,
            "[[service]]\nsnat-ports = \"1024-1024\"",
            &[&stranger("5:14", "snat-ports", "nat", "\"full-nat\"")],
        ),
        (
            4,
            "[[service]]\nforward = \"full-nat\"\nsnat = \"always\"\ngue-port = 1",
            &[
                &stranger("6:8", "snat", "full-nat", "\"nat\""),
                &stranger("7:12", "gue-port", "full-nat", "\"gue\""),
            ],
        ),
        (
            4,
            "[[service]]\ntunnel-source = \"10.254.0.0/16\"",
            &[&stranger("5:17", "tunnel-source", "nat", "\"ipip\" and \"gue\"")],
        ),
        (
            4,
            "[[service]]\nforward = \"full-nat\"\nsnat-addresses = [\"10.0.0.1\", \"10.0.0.2\"]\nsnat-ports = \"1024-65535\"",
            &[],
        ),
        (
            4,
            "[[service]]\nforward = \"full-nat\"\nsnat-addresses = [\"127.0.0.1\", \"2001:db8::1\", 7]\nsnat-ports = \"80-90\"",
            &[
                &format!("6:19: `snat-addresses` is \"127.0.0.1\", a loopback address; allowed: {addresses}"),
                &format!(
                    "6:32: `snat-addresses` is \"2001:db8::1\", of another family than the service; allowed: {addresses}"
                ),
                &format!("6:47: `snat-addresses` is 7; allowed: {addresses}"),
                "7:14: `snat-ports` is \"80-90\"; allowed: a range of ports from 1024 on in quotes, \"61000-65535\"",
            ],
        ),
        (
            4,
            "[[service]]\nforward = \"full-nat\"\nsnat-addresses = []",
            &[&format!("6:18: `snat-addresses` is empty; allowed: {addresses}")],
        ),
        (11, "address = \"10.0.0.11:80\"", &[]),
    ]);
}

#[test]
fn what_needs_replies_goes_with_no_mode_that_does_not_see_them() {
    let faults = |method: &str, more: &str| {
        let text = base_with(8, &format!("method = \"{method}\"\nforward = \"ipip\"\n{more}"));
        faults_of(&text.replace("10.0.0.11:8080", "10.0.0.11:80"))
    };
    let unseen = |place: &str, what: &str| {
        format!(
            "f:{place}: {what} needs replies to be seen, and with `forward = \"ipip\"` they go past the balancer; \
             allowed: with \"nat\" and \"full-nat\""
        )
    };
    assert_eq!(faults("least-request", "requests = \"flow\""), [""; 0]);
    assert_eq!(faults("least-response-time", ""), [unseen("8:10", "the method \"least-response-time\"")]);
    assert_eq!(faults("least-request", "requests = \"exchange\""), [unseen("10:12", "`requests`")]);
    let rtsp = faults("maglev", "rtsp-nat = { data-ports = \"6970-6999\" }");
    assert_eq!(rtsp, [unseen("10:12", "`rtsp-nat`")]);
    assert_eq!(faults("maglev", "passive-health = {}"), [unseen("10:18", "`passive-health`")]);
}

#[test]
fn a_tunnel_may_lead_into_the_other_family() {
    let with = |mode: &str| {
        let text = base_with(4, &format!("[[service]]\nforward = \"{mode}\""));
        faults_of(&text.replace("10.0.0.11:8080", "[2001:db8::11]:80"))
    };
    assert_eq!(with("ipip"), [""; 0]);
    assert_eq!(with("gue"), [""; 0]);
    let [fault] = &with("dsr")[..] else { panic!("{:?}", with("dsr")) };
    assert!(fault.ends_with("allowed: both of one family with `forward = \"dsr\"`"), "{fault}");
    // Checks can't be turned from one family to the other; programs go their own ways.
    let mixed = "health checks of an IPv4 service can't go through to an IPv6 backend; allowed: `health = false`, or \
                 of the kind \"exec\"";
    for (health, expected) in
        [("kind = \"tcp\"", &[format!("f:12:1: {mixed}")][..]), ("kind = \"exec\", command = [\"/x\"]", &[])]
    {
        assert_eq!(with(&format!("gue\"\nhealth = {{ {health} }}\n#")), expected, "{health}");
    }
}
