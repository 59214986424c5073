use serde::Deserialize;

use super::*;

const VECTORS: &str = include_str!("../../../tests/vectors/selection-tables.json");

#[derive(Deserialize)]
struct Expected {
    cases: Vec<ExpectedCase>,
}

#[derive(Deserialize)]
struct ExpectedCase {
    name: String,
    expect: Vec<ExpectedRow>,
}

#[derive(Deserialize)]
struct ExpectedRow {
    pick: String,
    before: f64,
    after: f64,
}

fn case(services: &str, rest: &str) -> String {
    format!(r#"{{"name": "c", "method": "least-packets", "services": [{services}]{rest}}}"#)
}

fn picks(text: &str) -> String {
    play(text).unwrap().cases[0].rows.iter().map(|row| row.pick.as_str()).collect()
}

#[test]
fn the_published_tables_come_out_row_by_row() {
    let played = play(VECTORS).unwrap();
    let expected: Expected = serde_json::from_str(VECTORS).unwrap();
    assert_eq!((played.cases.len(), expected.cases.len()), (10, 10));
    for (table, expected) in played.cases.iter().zip(&expected.cases) {
        assert_eq!(table.name, expected.name);
        assert_eq!(table.rows.len(), expected.expect.len());
        for (index, (row, expected)) in table.rows.iter().zip(&expected.expect).enumerate() {
            let is_same = row.request == index + 1
                && row.pick == expected.pick
                && (row.before - expected.before).abs() < 0.005
                && (row.after - expected.after).abs() < 0.005;
            let ExpectedRow { pick, before, after } = expected;
            assert!(is_same, "{}: {row:?}, not {pick} {before} {after}", table.name);
        }
    }
}

#[test]
fn rows_are_written_with_two_decimals_at_most() {
    let text = case(r#"{"name": "a", "load": 6, "weight": 3, "step": 1}"#, r#", "adds": [1, 0.1]"#);
    assert_eq!(
        serde_json::to_string(&play(&text).unwrap()).unwrap(),
        r#"{"cases":[{"name":"c","rows":[{"request":1,"pick":"a","before":20000.0,"after":23333.33},{"request":2,"pick":"a","before":23333.33,"after":23666.67}]}]}"#
    );
}

#[test]
fn adds_default_to_eight_requests_and_steps_to_one() {
    let text = case(r#"{"name": "a", "load": 0}, {"name": "b", "load": 2}"#, "");
    assert_eq!(picks(&text), "aabababa");
}

#[test]
fn decimals_tie_as_they_are_written() {
    let text = case(
        r#"{"name": "a", "load": 0.1, "step": 0.1}, {"name": "b", "load": 0.3, "step": 1}"#,
        r#", "adds": [1, 1, 1, 1]"#,
    );
    // 0.1, 0.2, then both 0.3: the next after `a`.
    assert_eq!(picks(&text), "aaba");
}

#[test]
fn weights_of_some_are_one_for_the_others_and_zero_is_never_picked() {
    let text = case(
        r#"{"name": "a", "load": 4}, {"name": "b", "load": 4, "weight": 2}, {"name": "c", "load": 0, "weight": 0}"#,
        r#", "adds": [1, 1, 1, 1, 1, 1]"#,
    );
    let table = &play(&text).unwrap().cases[0];
    let rows: Vec<_> = table.rows.iter().map(|row| (row.pick.as_str(), row.before)).collect();
    assert_eq!(
        rows,
        [
            ("b", 20_000.0),
            ("b", 25_000.0),
            ("b", 30_000.0),
            ("b", 35_000.0),
            ("a", 40_000.0),
            ("b", 40_000.0)
        ]
    );
}

#[test]
fn round_robin_counts_its_own_picks() {
    let text = r#"{"name": "r", "method": "round-robin", "adds": [1, 1, 1, 5], "services": [
        {"name": "a", "load": 900, "weight": 2}, {"name": "b", "load": 0, "weight": 1}]}"#;
    let rows: Vec<_> = play(text).unwrap().cases.remove(0).rows;
    let rows: Vec<_> = rows.iter().map(|row| (row.pick.as_str(), row.before, row.after)).collect();
    assert_eq!(
        rows,
        [("a", 0.0, 5_000.0), ("b", 0.0, 10_000.0), ("a", 5_000.0, 10_000.0), ("a", 10_000.0, 15_000.0)]
    );
}

#[test]
fn bad_input_says_where_and_what() {
    let one = r#"{"name": "a", "load": 1}"#;
    for (text, error) in [
        ("", "1:1: EOF while parsing a value"),
        ("{\n  \"cases\": [,]}", "2:13: "),
        ("{\"cases\": []} x", "1:15: trailing characters"),
        ("[]", "1:2: "),
        (
            "{\"cases\": [\n{\"name\": \"c\", \"method\": \"least-packets\", \"services\": [\n  {\"name\": \"a\", \"load\": -1}]}]}",
            "3:26: case 1: service 1: load: invalid value: integer `-1`, expected a number from 0 to 1000000000000000000",
        ),
        (
            &case(r#"{"name": "a", "load": -0.5}"#, ""),
            "service 1: load: invalid value: floating point `-0.5`",
        ),
        (&case(r#"{"name": "a", "load": NaN}"#, ""), "1:77: expected value"),
        (&case(r#"{"name": "a", "load": "3"}"#, ""), "service 1: load: invalid type: string \"3\""),
        (&case(r#"{"name": "a", "load": 1e400}"#, ""), "service 1: load: number out of range"),
        (&case(r#"{"name": "a", "load": 1e19}"#, ""), "service 1: load: invalid value"),
        (&case(r#"{"name": "a", "load": 18446744073709551615}"#, ""), "service 1: load: invalid value"),
        (&case(r#"{"name": "a"}"#, ""), "service 1: missing field `load`"),
        (
            &case(&format!(r#"{one}, {{"name": "b", "load": 1, "step": -2}}"#), ""),
            "service 2: step: invalid value",
        ),
        (
            &case(r#"{"name": "a", "load": 1, "weight": 101}"#, ""),
            "service 1: weight: expected a whole number from 0 to 100",
        ),
        (
            &case(r#"{"name": "a", "load": 1, "weight": 1.5}"#, ""),
            "service 1: weight: expected a whole number",
        ),
        (&case(r#"{"name": "a", "load": 1, "wieght": 1}"#, ""), "service 1: unknown field `wieght`"),
        (&case(one, r#", "adds": [1, -1]"#), "adds, request 2: invalid value"),
        (&case(one, r#", "requests": 3"#), "unknown field `requests`"),
        (&case(&format!("{one}, {one}"), ""), "\"c\": services: two are named \"a\""),
        (&case("", ""), "\"c\": services: there is none that could be picked"),
        (&case(r#"{"name": "a", "load": 1, "weight": 0}"#, ""), "there is none that could be picked"),
        (&case(one, "").replace("least-packets", "least"), "unknown variant `least`"),
        (
            &format!("{{\"cases\": [{}, {}]}}", case(one, ""), case("", "")),
            "case 2: \"c\": services: there is none that could be picked",
        ),
    ] {
        let found = play(text).unwrap_err();
        assert!(found.to_string().contains(error), "{found}\n  not\n{error}");
        assert!(!found.message.contains(" at line "), "{found}");
        assert!(found.line >= 1 && found.column >= 1);
    }
}
