use std::env;
use std::io::{self, IsTerminal, Write};

use anyhow::Context;
use comfy_table::{Attribute, Cell, CellAlignment, Table, presets};
use serde::Serialize;

/// Writes `text` to the standard output. A reader that has seen enough (`| head`) is no failure.
pub(super) fn print(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("write to the standard output"),
    }
}

/// A document as one line.
pub(super) fn json(document: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string(document).context("write JSON")? + "\n")
}

/// Whether the output may be styled.
pub(super) fn on_terminal() -> bool {
    io::stdout().is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Rows below a header, without lines; the last one has no line break.
pub(super) fn table<const COLUMNS: usize>(
    header: [(&str, CellAlignment); COLUMNS],
    rows: impl IntoIterator<Item = [String; COLUMNS]>,
    styled: bool,
) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if !styled {
        table.force_no_tty();
    }
    table.set_header(header.map(|(title, _)| Cell::new(title).add_attribute(Attribute::Bold)));
    table.add_rows(rows);
    for (column, (_, alignment)) in table.column_iter_mut().zip(header) {
        column.set_cell_alignment(alignment);
    }
    table.trim_fmt()
}
