//! `balancer simulate`: plays tables of loads, offline.

use std::{fs, path::Path, process::ExitCode};

use anyhow::Context;
use comfy_table::{CellAlignment, Table as Print, presets::NOTHING};

use super::output::print;
use crate::simulate::{self, Table};

/// Plays the cases of a JSON file and prints, for each request, the pick and its value before and after.
///
/// # Errors
///
/// When the file can't be read. A file that holds no tables is told on stderr and is exit code 2.
pub fn run(file: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    let tables = match simulate::play(&text) {
        Ok(tables) => tables,
        Err(error) => {
            eprintln!("{}:{error}", file.display());
            return Ok(ExitCode::from(2));
        }
    };
    if json {
        print(&(serde_json::to_string_pretty(&tables)? + "\n"))?;
    } else {
        let texts: Vec<_> =
            tables.cases.iter().map(|table| format!("{}\n{}\n", table.name, printed(table))).collect();
        print(&texts.join("\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn printed(table: &Table) -> Print {
    let mut out = Print::new();
    out.load_style(NOTHING).set_header(["request", "pick", "before", "after"]);
    for row in &table.rows {
        out.add_row([
            row.request.to_string(),
            row.pick.clone(),
            format!("{:.2}", row.before),
            format!("{:.2}", row.after),
        ]);
    }
    for column in [0, 2, 3] {
        if let Some(column) = out.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_printed_with_two_decimals() {
        let text = r#"{"name": "c", "method": "least-packets", "adds": [1, 1],
            "services": [{"name": "web-1", "load": 6, "weight": 3}]}"#;
        let tables = simulate::play(text).unwrap();
        let text = printed(&tables.cases[0]).to_string();
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            rows,
            [
                ["request", "pick", "before", "after"],
                ["1", "web-1", "20000.00", "23333.33"],
                ["2", "web-1", "23333.33", "26666.67"]
            ]
        );
    }

    #[test]
    fn bad_input_is_exit_code_2_and_an_unreadable_file_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("case.json");
        fs::write(&file, r#"{"cases": [{}]}"#).unwrap();
        assert_eq!(run(&file, true).unwrap(), ExitCode::from(2));
        fs::write(&file, r#"{"cases": []}"#).unwrap();
        assert_eq!(run(&file, true).unwrap(), ExitCode::SUCCESS);
        let missing = directory.path().join("none.json");
        let error = run(&missing, false).unwrap_err();
        assert_eq!(error.to_string(), format!("read {}", missing.display()));
    }
}
