use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::fault::{Findings, shorten};
use super::suggest::closest;
use super::value::Refused;

/// A value of the file, with its place.
pub(super) type Value<'t> = Spanned<DeValue<'t>>;

/// A key that a section may have.
pub(super) struct Key {
    pub(super) name: &'static str,
    /// How it is written, for whoever has left it out.
    pub(super) example: &'static str,
    /// Whether it must be there.
    pub(super) is_needed: bool,
    /// What it may be, where that is one of a few words; else empty.
    pub(super) choices: &'static [&'static str],
}

impl Key {
    pub(super) const fn new(name: &'static str, example: &'static str) -> Key {
        Key { name, example, is_needed: false, choices: &[] }
    }

    /// The same, and it must be there.
    pub(super) const fn needed(self) -> Key {
        Key { is_needed: true, ..self }
    }

    /// The same, and it is one of these words.
    pub(super) const fn of(self, choices: &'static [&'static str]) -> Key {
        Key { choices, ..self }
    }
}

/// What one kind of section may hold.
pub(super) struct Schema {
    /// How the faults call the section.
    pub(super) title: &'static str,
    pub(super) keys: &'static [Key],
}

impl Schema {
    fn allowed(&self) -> String {
        self.keys.iter().map(|key| key.name).collect::<Vec<_>>().join(", ")
    }
}

/// A table of the file, while it is being read.
pub(super) struct Section<'t> {
    schema: &'static Schema,
    /// Byte offset of its header.
    place: usize,
    table: &'t DeTable<'t>,
}

impl<'t> Section<'t> {
    /// The table of the whole file.
    pub(super) fn of_file(
        schema: &'static Schema,
        table: &'t DeTable<'t>,
        findings: &mut Findings<'_>,
    ) -> Section<'t> {
        Section { schema, place: 0, table }.refuse_unknown_keys(findings)
    }

    /// The table that `value` must be; reports all keys that don't belong there.
    pub(super) fn open(
        schema: &'static Schema,
        value: &'t Value<'t>,
        findings: &mut Findings<'_>,
    ) -> Option<Section<'t>> {
        let place = value.span().start;
        let Some(table) = value.get_ref().as_table() else {
            let what = value.get_ref().type_str();
            findings.add(place, format!("{} is of type {what}; needed: a table", schema.title));
            return None;
        };
        Some(Section { schema, place, table }.refuse_unknown_keys(findings))
    }

    fn refuse_unknown_keys(self, findings: &mut Findings<'_>) -> Section<'t> {
        let Schema { title, keys } = *self.schema;
        for key in self.table.keys() {
            let name: &str = key.get_ref();
            if keys.iter().any(|known| known.name == name) {
                continue;
            }
            let shown = shorten(name);
            let allowed = self.schema.allowed();
            let hint = closest(name, keys.iter().map(|key| key.name))
                .map_or(String::new(), |near| format!(", did you mean `{near}`?"));
            let message = format!("unknown key `{shown}` in {title}{hint}; allowed: {allowed}");
            findings.add(key.span().start, message);
        }
        self
    }

    /// Byte offset of the section's header.
    pub(super) fn place(&self) -> usize {
        self.place
    }

    /// Byte offset of the key's value, or of the header when it has none.
    pub(super) fn place_of(&self, key: &str) -> usize {
        self.get(key).map_or(self.place, |value| value.span().start)
    }

    pub(super) fn get(&self, key: &str) -> Option<&'t Value<'t>> {
        self.table.get(key)
    }

    pub(super) fn report_missing(&self, key: &str, findings: &mut Findings<'_>) {
        let title = self.schema.title;
        let example = self.schema.keys.iter().find(|known| known.name == key).map(|known| known.example);
        let example = example.unwrap_or_default();
        findings.add(self.place, format!("`{key}` is missing in {title}; needed: {example}"));
    }

    /// The value of a key that must be there; `None` after a fault.
    pub(super) fn required<T>(
        &self,
        key: &str,
        read: impl FnOnce(&DeValue<'_>) -> Result<T, Refused>,
        findings: &mut Findings<'_>,
    ) -> Option<T> {
        if let Some(value) = self.get(key) {
            return read_value(key, value, read, findings);
        }
        self.report_missing(key, findings);
        None
    }

    /// The value of a key, or `default` when it isn't there; `None` after a fault.
    pub(super) fn optional<T>(
        &self,
        key: &str,
        default: T,
        read: impl FnOnce(&DeValue<'_>) -> Result<T, Refused>,
        findings: &mut Findings<'_>,
    ) -> Option<T> {
        match self.get(key) {
            Some(value) => read_value(key, value, read, findings),
            None => Some(default),
        }
    }
}

/// Reads `value`, which belongs to `key`; `None` after a fault.
pub(super) fn read_value<T>(
    key: &str,
    value: &Value<'_>,
    read: impl FnOnce(&DeValue<'_>) -> Result<T, Refused>,
    findings: &mut Findings<'_>,
) -> Option<T> {
    match read(value.get_ref()) {
        Ok(read) => Some(read),
        Err(Refused { why, allowed }) => {
            let written = findings.source(value.span());
            let why = why.map_or(String::new(), |why| format!(", {why}"));
            findings.add(value.span().start, format!("`{key}` is {written}{why}; allowed: {allowed}"));
            None
        }
    }
}

/// The elements of the list that `value` must be; `None` after a fault.
pub(super) fn list<'t>(
    value: &'t Value<'t>,
    title: &'static str,
    findings: &mut Findings<'_>,
) -> Option<&'t [Value<'t>]> {
    let list = value.get_ref().as_array().map(|array| &array[..]);
    if list.is_none() {
        let message = format!("{title} is of type {}; needed: a list", value.get_ref().type_str());
        findings.add(value.span().start, message);
    }
    list
}

/// Values that may stand only once, with the byte offset of each.
pub(super) struct Once<K>(HashMap<K, usize>);

impl<K> Default for Once<K> {
    fn default() -> Once<K> {
        Once(HashMap::new())
    }
}

impl<K: Eq + Hash> Once<K> {
    /// All of them, with their places.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&K, usize)> {
        self.0.iter().map(|(key, place)| (key, *place))
    }

    /// Where `key` stands.
    pub(super) fn place_of(&self, key: &K) -> Option<usize> {
        self.0.get(key).copied()
    }

    /// Reports `key` at `place` when it has stood before, and says whether it had not; `what` says what it is.
    pub(super) fn claim(&mut self, key: K, place: usize, what: &str, findings: &mut Findings<'_>) -> bool {
        match self.0.entry(key) {
            Entry::Vacant(vacant) => {
                vacant.insert(place);
                true
            }
            Entry::Occupied(first) => {
                let line = findings.line_of(*first.get());
                findings.add(place, format!("{what} stands on line {line} already; allowed: once"));
                false
            }
        }
    }
}
