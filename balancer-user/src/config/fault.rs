use std::fmt;

/// A place in a text; both numbers start at 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The line.
    pub line: usize,
    /// The character of the line.
    pub column: usize,
}

/// One thing that is wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Where; `None` when it is about the file and not about a part of it.
    pub position: Option<Position>,
    /// What is wrong, and what is allowed.
    pub message: String,
}

/// Everything that is wrong with a configuration, in the order of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults {
    file: String,
    faults: Vec<Fault>,
}

impl Faults {
    /// The one fault `message` of `file` as a whole.
    pub(super) fn of_file(file: &str, message: String) -> Faults {
        Faults { file: file.to_owned(), faults: vec![Fault { position: None, message }] }
    }

    /// The one fault `message` of `file`, at the byte `offset` of `text`.
    pub(super) fn at(file: &str, text: &str, offset: usize, message: String) -> Faults {
        let mut findings = Findings::new(file, text);
        findings.add(offset, message);
        findings.finish()
    }

    /// The faults, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = &Fault> {
        self.faults.iter()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.faults.is_empty()
    }
}

/// One line for each fault: `file:line:column: what is wrong`.
impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Fault { position, message }) in self.faults.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            match position {
                Some(Position { line, column }) => write!(f, "{}:{line}:{column}: {message}", self.file)?,
                None => write!(f, "{}: {message}", self.file)?,
            }
        }
        Ok(())
    }
}

impl std::error::Error for Faults {}

/// The faults found so far, by byte offset into the text that is being judged.
pub(super) struct Findings<'t> {
    file: &'t str,
    text: &'t str,
    line_starts: Vec<usize>,
    found: Vec<(usize, String)>,
}

impl<'t> Findings<'t> {
    pub(super) fn new(file: &'t str, text: &'t str) -> Findings<'t> {
        let after_newlines = text.match_indices('\n').map(|(offset, _)| offset + 1);
        Findings {
            file,
            text,
            line_starts: std::iter::once(0).chain(after_newlines).collect(),
            found: vec![],
        }
    }

    pub(super) fn add(&mut self, offset: usize, message: String) {
        self.found.push((offset, message));
    }

    /// The line of a byte offset, from 1.
    pub(super) fn line_of(&self, offset: usize) -> usize {
        self.line_starts.partition_point(|&start| start <= offset)
    }

    /// How the text writes what stands at `span`, on one line and not too long to be read.
    pub(super) fn source(&self, span: std::ops::Range<usize>) -> String {
        shorten(self.text.get(span).unwrap_or_default())
    }

    /// The faults, sorted by place.
    pub(super) fn finish(mut self) -> Faults {
        let mut found = std::mem::take(&mut self.found);
        found.sort_by_key(|&(offset, _)| offset);
        let faults = found
            .into_iter()
            .map(|(offset, message)| Fault { position: Some(self.position(offset)), message })
            .collect();
        Faults { file: self.file.to_owned(), faults }
    }

    fn position(&self, offset: usize) -> Position {
        let line = self.line_of(offset);
        let start = self.line_starts.get(line.saturating_sub(1)).copied().unwrap_or_default();
        let column = 1 + self.text.get(start..offset).unwrap_or_default().chars().count();
        Position { line, column }
    }
}

/// `text` with its control characters escaped, cut after 60 characters.
pub(super) fn shorten(text: &str) -> String {
    const MOST: usize = 60;
    let mut short = String::new();
    for (index, character) in text.chars().enumerate() {
        if index == MOST {
            short.push('…');
            break;
        }
        if character.is_control() {
            short.extend(character.escape_default());
        } else {
            short.push(character);
        }
    }
    short
}
