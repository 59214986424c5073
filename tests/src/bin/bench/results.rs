//! What a measurement has come to: the same for all of them, for people as Markdown, for later as JSON, and to be judged.

mod interval;
mod machine;
mod spread;
mod target;

use std::{
    fmt,
    fs::{self, File},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

pub use self::{interval::Interval, machine::Machine, spread::Spread, target::Target};

/// What becomes of the results.
#[derive(clap::Args)]
pub struct Output {
    /// Write the results as JSON to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Compare with the targets: exit 1 with those that are missed
    #[arg(long)]
    check: bool,
}

/// All that one measurement says.
#[derive(Serialize, Deserialize)]
pub struct Results {
    /// Its name: `cargo xtask bench NAME`.
    bench: String,
    machine: Machine,
    tables: Vec<Table>,
    /// What one must know to read them.
    notes: Vec<String>,
    targets: Vec<Target>,
}

/// Rows of the same kind.
#[derive(Serialize, Deserialize)]
pub struct Table {
    pub columns: Vec<String>,
    pub rows: Vec<Vec<Cell>>,
}

/// A value in a table.
#[derive(Clone, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Cell {
    Count(u64),
    Number(f64),
    Spread(Spread),
    Interval(Interval),
    Text(String),
    Nothing,
}

impl Results {
    /// Nothing yet, but the name and where it is measured.
    pub fn new(bench: &str, machine: Machine) -> Results {
        Results {
            bench: bench.to_owned(),
            machine,
            tables: Vec::new(),
            notes: Vec::new(),
            targets: Vec::new(),
        }
    }

    /// Begins a table.
    pub fn table(&mut self, columns: &[&str]) -> &mut Table {
        self.tables
            .push(Table { columns: columns.iter().map(ToString::to_string).collect(), rows: Vec::new() });
        let last = self.tables.len() - 1;
        &mut self.tables[last]
    }

    /// Says something about the whole.
    pub fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    /// Adds what is judged.
    pub fn targets(&mut self, targets: impl IntoIterator<Item = Target>) {
        self.targets.extend(targets);
    }

    /// Prints, writes and judges, as asked for. False: a target was missed, and it was asked for.
    pub fn finish(&self, output: &Output) -> Result<bool> {
        print!("{self}");
        if let Some(path) = &output.json {
            let file = File::create(path).with_context(|| format!("create {}", path.display()))?;
            serde_json::to_writer_pretty(file, self).with_context(|| format!("write {}", path.display()))?;
        }
        if !output.check {
            return Ok(true);
        }
        println!();
        self.targets.iter().for_each(|target| println!("{target}"));
        Ok(self.targets.iter().all(Target::is_met))
    }

    /// What was written to a file.
    pub fn read(path: &Path) -> Result<Results> {
        let text = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        serde_json::from_slice(&text)
            .with_context(|| format!("{} is not what a measurement has written", path.display()))
    }
}

impl fmt::Display for Results {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "`bench {}`: {}", self.bench, self.machine)?;
        for table in &self.tables {
            write!(out, "\n{table}")?;
        }
        for note in &self.notes {
            writeln!(out, "\n{note}")?;
        }
        let cells = || self.tables.iter().flat_map(|table| table.rows.iter().flatten());
        if cells().any(|cell| matches!(cell, Cell::Spread(spread) if spread.disagrees())) {
            writeln!(
                out,
                "\n? = the rounds disagree by more than {} ×: measure again on a quiet machine.",
                Spread::MOST
            )?;
        }
        Ok(())
    }
}

impl Table {
    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        self.rows.push(cells.into_iter().collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_text =
            |column: usize| self.rows.iter().any(|row| matches!(row.get(column), Some(Cell::Text(_))));
        writeln!(out, "| {} |", self.columns.join(" | "))?;
        for column in 0..self.columns.len() {
            write!(out, "| {} ", if is_text(column) { "---" } else { "---:" })?;
        }
        writeln!(out, "|")?;
        for row in &self.rows {
            row.iter().try_for_each(|cell| write!(out, "| {cell} "))?;
            writeln!(out, "|")?;
        }
        Ok(())
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cell::Count(count) => write!(out, "{count}"),
            Cell::Number(number) => short(*number, out),
            Cell::Spread(spread) => write!(out, "{spread}"),
            Cell::Interval(interval) => write!(out, "{interval}"),
            Cell::Text(text) => write!(out, "{text}"),
            Cell::Nothing => Ok(()),
        }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Cell {
        Cell::Text(text.to_owned())
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Cell {
        Cell::Text(text)
    }
}

impl From<u32> for Cell {
    fn from(count: u32) -> Cell {
        Cell::Count(count.into())
    }
}

impl From<u64> for Cell {
    fn from(count: u64) -> Cell {
        Cell::Count(count)
    }
}

impl From<f64> for Cell {
    fn from(number: f64) -> Cell {
        Cell::Number(number)
    }
}

impl From<Spread> for Cell {
    fn from(spread: Spread) -> Cell {
        Cell::Spread(spread)
    }
}

impl From<Interval> for Cell {
    fn from(interval: Interval) -> Cell {
        Cell::Interval(interval)
    }
}

impl<T: Into<Cell>> From<Option<T>> for Cell {
    fn from(cell: Option<T>) -> Cell {
        cell.map_or(Cell::Nothing, Into::into)
    }
}

/// A number with about three digits that count.
fn short(number: f64, out: &mut fmt::Formatter<'_>) -> fmt::Result {
    let size = number.abs();
    let places = match size {
        _ if size >= 100.0 => 0,
        _ if size >= 10.0 => 1,
        _ if size >= 0.2 || size == 0.0 => 2,
        _ => 4,
    };
    write!(out, "{number:.places$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_back_from_json_and_mark_what_disagrees() {
        let mut results = Results::new("test", Machine::here().unwrap());
        let table = results.table(&["case", "flows", "ratio", "left out"]);
        table.row(["steady".into(), 1u32.into(), Spread::of(&[1.0, 2.0, 3.0]).into(), Cell::Nothing]);
        table.row(["wild".into(), 2u32.into(), Spread::of(&[1.0, 2.0, 3.5]).into(), 0.0123.into()]);
        results.targets([
            Target::at_most("steady", Some(2.0), 2.0),
            Target::at_least("wild", None, 1.0),
            Target::at_least("low", Some(0.5), 1.0),
        ]);
        let text = results.to_string();
        let rows = "| case | flows | ratio | left out |\n| --- | ---: | ---: | ---: |\n\
                    | steady | 1 | 2.00 (1.00–3.00) |  |\n| wild | 2 | ? (1.00–3.50) | 0.0123 |\n";
        assert!(text.contains(rows) && text.contains("? = the rounds disagree"), "{text}");
        let back: Results = serde_json::from_str(&serde_json::to_string(&results).unwrap()).unwrap();
        assert_eq!(back.to_string(), text);
        assert_eq!(back.targets.iter().map(Target::is_met).collect::<Vec<_>>(), [true, false, false]);
    }
}
