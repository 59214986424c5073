//! The command line where no daemon runs: what is printed, where it points, and the exit code.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test says what it expects")]

use std::{fs, path::PathBuf};

use balancer_tests::{
    Plan,
    operator::{self, Ended, xdp},
    process::Place,
};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The tables of the documents that define the methods.
const TABLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/vectors/selection-tables.json");
/// The configuration that the documentation shows.
const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/config/web.toml");

/// A wrong configuration, and the places of its faults with what is said there.
const BAD: &str = r#"[daemon]
interfaces = []
xdp-mode = "fast"
foo = 1

[[service]]
name = "web"
address = "0.0.0.0:80"
protocol = "tcp"
method = "least-packet"

[[service.backend]]
name = "bäckend"
address = "10.0.0.1:99999"
weight = 101
"#;
const FAULTS: [&str; 8] = [
    "2:14: `interfaces` is empty; allowed: 1 to 64 interfaces",
    "3:12: `xdp-mode` is \"fast\"; allowed: \"auto\", \"native\", \"generic\"",
    "4:1: unknown key `foo` in [daemon]; allowed: ",
    "8:11: `address` is \"0.0.0.0:80\", ",
    "10:10: `method` is \"least-packet\"; allowed: \"least-packets\", ",
    "13:8: `name` is \"bäckend\"; allowed: ",
    "14:11: `address` is \"10.0.0.1:99999\", not a port; allowed: a port from 1 to 65535",
    "15:10: `weight` is 101; allowed: an integer from 0 to 100",
];

fn call(words: &[&str]) -> Ended {
    let ended = operator::balancer(words).unwrap();
    assert!(!ended.text.contains('\u{1b}'), "`{words:?}` prints colours into a file: {}", ended.text);
    ended
}

/// A file that goes with the test.
struct TextFile {
    path: PathBuf,
    _directory: TempDir,
}

impl TextFile {
    fn new(text: &str) -> Self {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, text).unwrap();
        Self { path, _directory: directory }
    }

    fn name(&self) -> &str {
        self.path.to_str().unwrap()
    }
}

fn tables() -> Value {
    serde_json::from_str(&fs::read_to_string(TABLES).unwrap()).unwrap()
}

/// What `simulate` must print for a case, as one line a row.
fn expected_rows(case: &Value) -> Vec<String> {
    let number = |row: &Value, key: &str| format!("{:.2}", row[key].as_f64().unwrap());
    let rows = case["expect"].as_array().unwrap().iter().zip(1..);
    rows.map(|(row, request)| {
        let pick = row["pick"].as_str().unwrap();
        format!("{request} {pick} {} {}", number(row, "before"), number(row, "after"))
    })
    .collect()
}

/// The tables in a text, each with its name: rows with single spaces.
fn printed_tables(text: &str) -> Vec<(String, Vec<String>)> {
    let row = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let table = |text: &str| {
        let mut lines = text.lines();
        let name = lines.next().unwrap().to_owned();
        assert_eq!(lines.next().map(row).as_deref(), Some("request pick before after"));
        (name, lines.map(row).collect())
    };
    text.split("\n\n").map(table).collect()
}

#[test]
fn simulate_prints_the_published_tables_row_by_row() {
    let file = tables();
    let cases = file["cases"].as_array().unwrap();
    let expected: Vec<_> =
        cases.iter().map(|case| (case["name"].as_str().unwrap().to_owned(), expected_rows(case))).collect();
    assert_eq!(expected.iter().map(|(_, rows)| rows.len()).collect::<Vec<_>>(), [8; 10]);

    let ended = call(&["simulate", TABLES]);
    assert_eq!(ended.code, 0, "{}", ended.text);
    assert_eq!(printed_tables(&ended.text), expected);

    let ended = call(&["simulate", TABLES, "--json"]);
    assert_eq!(ended.code, 0, "{}", ended.text);
    let printed: Value = serde_json::from_str(&ended.text).unwrap();
    let printed: Vec<_> = printed["cases"].as_array().unwrap().iter().map(json_rows).collect();
    assert_eq!(printed, expected);
}

fn json_rows(case: &Value) -> (String, Vec<String>) {
    let rows = case["rows"].as_array().unwrap().iter().map(|row| {
        let [before, after] = ["before", "after"].map(|key| row[key].as_f64().unwrap());
        format!("{} {} {before:.2} {after:.2}", row["request"], row["pick"].as_str().unwrap())
    });
    (case["name"].as_str().unwrap().to_owned(), rows.collect())
}

#[test]
fn simulate_takes_a_single_case_with_or_without_what_is_expected() {
    let file = tables();
    for case in file["cases"].as_array().unwrap() {
        let expected = [(case["name"].as_str().unwrap().to_owned(), expected_rows(case))];
        let mut bare = case.clone();
        bare.as_object_mut().unwrap().remove("expect").unwrap();
        for case in [case, &bare, &json!({ "cases": [bare] })] {
            let file = TextFile::new(&serde_json::to_string_pretty(case).unwrap());
            let ended = call(&["simulate", file.name()]);
            assert_eq!((printed_tables(&ended.text).as_slice(), ended.code), (expected.as_slice(), 0));
        }
    }
}

#[test]
fn simulate_says_where_a_file_is_wrong() {
    let service = r#"{"name": "s", "load": 1}"#;
    for (text, expected) in [
        ("", "1:1: "),
        ("{\n  \"cases\": [\n", "3:1: EOF while parsing a list"),
        (
            r#"{"name": "c", "method": "least"}"#,
            "1:31: unknown variant `least`, expected one of `least-packets`, ",
        ),
        (
            "{\"cases\": [\n {\"name\": \"c\", \"method\": \"least-packets\", \"services\":\n  [{\"name\": \"s\", \"load\": -1}]}]}",
            "3:27: case 1: service 1: load: invalid value: integer `-1`, expected a number from 0 to ",
        ),
        (
            &format!(
                "{{\"name\": \"c\", \"method\": \"least-packets\",\n\"services\": [{service}, {service}]}}"
            ),
            "1:1: \"c\": services: two are named \"s\"",
        ),
        (
            &format!(
                "{{\"name\": \"c\", \"method\": \"least-packets\",\n\"services\": [{service}], \"extra\": 1}}"
            ),
            "2:47: unknown field `extra`",
        ),
    ] {
        let file = TextFile::new(text);
        for more in [&[][..], &["--json"]] {
            let ended = call(&[&["simulate", file.name()], more].concat());
            assert_eq!(ended.code, 2, "{text}: {}", ended.text);
            let start = format!("{}:{expected}", file.name());
            assert!(ended.text.starts_with(&start), "{text}: {}, not {start}", ended.text);
            assert_eq!(ended.text.lines().count(), 1, "{}", ended.text);
        }
    }
    let ended = call(&["simulate", "/nowhere/tables.json"]);
    let expected = "balancer: read /nowhere/tables.json: No such file or directory (os error 2)\n";
    assert_eq!((ended.text.as_str(), ended.code), (expected, 1));
}

#[test]
fn check_accepts_the_example() {
    let ended = call(&["check", "-c", EXAMPLE]);
    assert_eq!((ended.text, ended.code), (format!("{EXAMPLE}: fine: 3 services, 7 backends\n"), 0));
}

#[track_caller]
fn assert_faults(ended: &Ended, file: &str) {
    let lines: Vec<_> = ended.text.lines().collect();
    assert_eq!(lines.len(), FAULTS.len(), "{}", ended.text);
    for (line, fault) in lines.iter().zip(FAULTS) {
        let start = format!("{file}:{fault}");
        assert!(line.starts_with(&start), "{line}, not {start}");
    }
    assert_eq!(ended.code, 2);
}

#[test]
fn check_and_run_give_the_same_verdict_and_run_touches_nothing() {
    let bench = Plan::backends(1).build().unwrap();
    let place = Place::new().unwrap();
    fs::write(place.config(), BAD).unwrap();
    let file = place.config().display().to_string();
    let checked = call(&["check", "-c", &file]);
    assert_faults(&checked, &file);
    let binary = balancer_tests::process::balancer_binary().unwrap();
    let ran = operator::run(bench.balancer.command(&binary).args(["run", "-c", &file])).unwrap();
    assert_eq!(ran, checked);

    // The same with interfaces that are there, and faults elsewhere.
    place.write_config(&BAD.replace("[]", "[\"lc\", \"lk\"]")).unwrap();
    let checked = call(&["check", "-c", &file]);
    let ran = operator::run(bench.balancer.command(&binary).args(["run", "-c", &file])).unwrap();
    assert_eq!(ran, checked);
    assert_eq!(ran.code, 2);
    assert_eq!(ran.text.lines().count(), FAULTS.len() - 1, "{}", ran.text);
    for device in ["lc", "lk"] {
        assert_eq!(xdp(&bench.balancer, device).unwrap(), None);
    }
    assert!(!place.pins().exists() && !place.socket().exists());
}

#[test]
fn a_file_that_is_no_configuration_is_told_in_one_line() {
    for verb in ["check", "run"] {
        for (text, expected) in [
            ("", ":1:1: the file is empty; needed: [daemon] with `interfaces`"),
            ("[daemon]\ninterfaces = \n", ":2:14: "),
            ("[daemon]\ninterfaces = [\"eth0\"]\ninterfaces = [\"eth1\"]\n", ":3:1: "),
        ] {
            let file = TextFile::new(text);
            let ended = call(&[verb, "-c", file.name()]);
            assert_eq!((ended.text.lines().count(), ended.code), (1, 2), "{verb}: {}", ended.text);
            let start = format!("{}{expected}", file.name());
            assert!(ended.text.starts_with(&start), "{verb}: {}, not {start}", ended.text);
        }
        let ended = call(&[verb, "-c", "/nowhere/balancer.toml"]);
        let expected = "/nowhere/balancer.toml: there is no such file\n";
        assert_eq!((ended.text.as_str(), ended.code), (expected, 2), "{verb}");
    }
}

#[test]
fn status_without_a_daemon_is_one_clear_line() {
    let place = Place::new().unwrap();
    let socket = place.socket().display().to_string();
    for more in [&[][..], &["--json"], &["web"]] {
        let ended = call(&[&["status", "--socket", &socket], more].concat());
        let expected = format!(
            "balancer: no balancer answers at {socket}: is `balancer run` running, and with this `socket`?\n"
        );
        assert_eq!((ended.text, ended.code), (expected, 1));
    }
    let example = fs::read_to_string(EXAMPLE).unwrap().replace("/run/balancer/balancer.sock", &socket);
    let file = TextFile::new(&example);
    let ended = call(&["status", "-c", file.name()]);
    assert_eq!(ended.code, 1);
    assert!(
        ended.text.starts_with(&format!("balancer: no balancer answers at {socket}: ")),
        "{}",
        ended.text
    );
    let file = TextFile::new(BAD);
    assert_faults(&call(&["status", "-c", file.name()]), file.name());
}

#[test]
fn every_verb_has_help_and_an_unknown_one_does_not_pass() {
    let help = call(&["--help"]);
    assert_eq!(help.code, 0);
    for verb in ["run", "check", "status", "simulate", "detach"] {
        assert!(help.text.contains(&format!("\n  {verb} ")), "{}", help.text);
        let ended = call(&[verb, "--help"]);
        assert_eq!(ended.code, 0, "{verb}");
        assert!(ended.text.contains(&format!("Usage: balancer {verb}")), "{verb}: {}", ended.text);
        assert!(ended.text.contains("Example"), "{verb}: {}", ended.text);
    }
    assert!(help.text.contains("Exit codes: 0 fine, 1 failed, 2 the call or the configuration is wrong."));
    for (words, says) in [
        (&["statsu"][..], "a similar subcommand exists: 'status'"),
        (&[], "Usage: balancer <COMMAND>"),
        (&["run"], "--config <FILE>"),
        (&["check", "--nonsense"], "unexpected argument '--nonsense'"),
        (&["detach", "a/b"], "invalid value 'a/b'"),
    ] {
        let ended = call(words);
        assert_eq!(ended.code, 2, "{words:?}");
        assert!(ended.text.contains(says), "{words:?}: {}", ended.text);
    }
    let ended = call(&["--version"]);
    assert_eq!((ended.text.as_str(), ended.code), (concat!("balancer ", env!("CARGO_PKG_VERSION"), "\n"), 0));
}
