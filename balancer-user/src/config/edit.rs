//! One change to the text of a configuration, which leaves the rest as it is written, comments too.

use std::str::FromStr as _;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use toml_edit::{Array, ArrayOfTables, DocumentMut, InlineTable, Item, Table, Value};

/// A change to a service or a backend.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Edit {
    /// What becomes of it.
    pub action: Action,
    /// The name of the service; of a backend's service where several have a backend of this name, or it is added.
    #[serde(default)]
    pub service: Option<String>,
    /// The name of the backend, if it is one.
    #[serde(default)]
    pub backend: Option<String>,
    /// Keys and their values as in the file, for `add` and `set`; `null` takes a key out, so that its default holds.
    #[serde(default)]
    pub keys: Map<String, Json>,
}

/// What becomes of a service or backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// It comes, as the last one.
    Add,
    /// Some of its keys change.
    Set,
    /// It goes.
    Remove,
}

/// Why a text can't be changed so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CannotEdit {
    /// There is no such service or backend.
    Unknown {
        /// `service` or `backend`.
        what: &'static str,
        /// The name that was asked for.
        name: String,
        /// The names that there are.
        known: Vec<String>,
    },
    /// Anything else, with what to do about it.
    Because(String),
}

impl Edit {
    /// The text with this change.
    ///
    /// # Errors
    ///
    /// When what is to be changed is not there, or what is to be added is. Whether the result is a valid configuration is for
    /// `Config::parse` to say.
    pub fn apply(&self, text: &str) -> Result<String, CannotEdit> {
        let mut document = DocumentMut::from_str(text)
            .map_err(|error| CannotEdit::Because(format!("the text is no TOML: {}", error.message())))?;
        let services = tables(document.as_table_mut(), "service", "[[service]]")?;
        match &self.backend {
            None => {
                let name = self.service.as_deref().ok_or_else(|| because("say which service"))?;
                self.change(services, "service", name)?;
            }
            Some(backend) => {
                let service = self.service_of(services, backend)?;
                let Some(service) = services.get_mut(service) else { return Ok(document.to_string()) };
                let backends = tables(service, "backend", "[[service.backend]]")?;
                self.change(backends, "backend", backend)?;
            }
        }
        Ok(document.to_string())
    }

    /// Where the service is that a backend belongs to.
    fn service_of(&self, services: &ArrayOfTables, backend: &str) -> Result<usize, CannotEdit> {
        if let Some(name) = &self.service {
            return position(services, "service", name);
        }
        if self.action == Action::Add {
            return match services.len() {
                1 => Ok(0),
                _ => Err(because("say with `service` (--service) which service the backend is added to")),
            };
        }
        let backends = |service: &Table| service.get("backend").and_then(Item::as_array_of_tables).map(names);
        let mut having = (0..).zip(services.iter()).filter(|(_, service)| {
            backends(service).is_some_and(|names| names.iter().any(|name| name == backend))
        });
        match (having.next(), having.next()) {
            (Some((index, _)), None) => Ok(index),
            (Some(_), Some(_)) => Err(because(&format!(
                "several services have a backend {backend:?}: say which with `service` (--service)"
            ))),
            (None, _) => {
                let mut known: Vec<_> = services.iter().filter_map(backends).flatten().collect();
                known.sort();
                known.dedup();
                Err(CannotEdit::Unknown { what: "backend", name: backend.to_owned(), known })
            }
        }
    }

    fn change(&self, tables: &mut ArrayOfTables, what: &'static str, name: &str) -> Result<(), CannotEdit> {
        match self.action {
            Action::Add => {
                if names(tables).iter().any(|known| known == name) {
                    return Err(because(&format!(
                        "there is a {what} {name:?} already: `{what} set` changes it"
                    )));
                }
                let mut table = Table::new();
                // As people write it: a line between sections.
                table.decor_mut().set_prefix("\n");
                table.insert("name", Item::Value(name.into()));
                set(&mut table, &self.keys)?;
                tables.push(table);
            }
            Action::Set => {
                if self.keys.is_empty() {
                    return Err(because("say which keys are to change, as KEY=VALUE"));
                }
                let index = position(tables, what, name)?;
                if let Some(table) = tables.get_mut(index) {
                    set(table, &self.keys)?;
                }
            }
            Action::Remove => {
                if !self.keys.is_empty() {
                    return Err(because(&format!("a {what} is removed as a whole: no keys are needed")));
                }
                tables.remove(position(tables, what, name)?);
            }
        }
        Ok(())
    }
}

/// The sections of this name, which may be none.
fn tables<'t>(parent: &'t mut Table, key: &str, written: &str) -> Result<&'t mut ArrayOfTables, CannotEdit> {
    let item = parent.entry(key).or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new()));
    item.as_array_of_tables_mut().ok_or_else(|| {
        because(&format!(
            "`{key}` is written as a list on one line: write {written} sections, or change the file by hand"
        ))
    })
}

fn names(tables: &ArrayOfTables) -> Vec<String> {
    tables.iter().filter_map(|table| Some(table.get("name")?.as_str()?.to_owned())).collect()
}

fn position(tables: &ArrayOfTables, what: &'static str, name: &str) -> Result<usize, CannotEdit> {
    let of_table = |table: &Table| table.get("name").and_then(Item::as_str) == Some(name);
    tables.iter().position(of_table).ok_or_else(|| CannotEdit::Unknown {
        what,
        name: name.to_owned(),
        known: names(tables),
    })
}

fn set(table: &mut Table, keys: &Map<String, Json>) -> Result<(), CannotEdit> {
    for (key, value) in keys {
        if key == "backend" {
            return Err(because("the backends of a service are changed one by one, by `backend` verbs"));
        }
        let Some(mut value) = toml(value)? else {
            table.remove(key);
            continue;
        };
        match table.get_mut(key) {
            Some(item) => {
                if let Some(old) = item.as_value() {
                    // With it stays the comment behind it.
                    *value.decor_mut() = old.decor().clone();
                }
                *item = Item::Value(value);
            }
            None => _ = table.insert(key, Item::Value(value)),
        }
    }
    Ok(())
}

/// A value as the file has it; `None` for `null`.
fn toml(value: &Json) -> Result<Option<Value>, CannotEdit> {
    Ok(Some(match value {
        Json::Null => return Ok(None),
        Json::Bool(value) => (*value).into(),
        Json::String(value) => value.as_str().into(),
        Json::Number(number) => match (number.as_i64(), number.as_f64()) {
            (Some(number), _) => number.into(),
            (None, Some(number)) => number.into(),
            (None, None) => return Err(because(&format!("{number} is too large a number"))),
        },
        Json::Array(items) => {
            let mut array = Array::new();
            for item in items {
                array.extend(toml(item)?);
            }
            array.into()
        }
        Json::Object(entries) => {
            let mut table = InlineTable::new();
            for (key, value) in entries {
                if let Some(value) = toml(value)? {
                    table.insert(key, value);
                }
            }
            table.into()
        }
    }))
}

fn because(why: &str) -> CannotEdit {
    CannotEdit::Because(why.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const TEXT: &str = r#"# ours
[daemon]
interfaces = ["eth0"] # both ways

[[service]]
name = "web"
address = "192.0.2.10:80"
protocol = "tcp"
method = "maglev"

# the old one
[[service.backend]]
name = "a"
address = "10.0.0.1:80"
weight = 2 # twice

[[service.backend]]
name = "b"
address = "10.0.0.2:80"

[[service]] # names
name = "dns"
address = "192.0.2.10:53"
protocol = "udp"
method = "maglev"

[[service.backend]]
name = "b"
address = "10.0.0.2:53"
"#;

    fn edited(
        action: Action,
        service: Option<&str>,
        backend: Option<&str>,
        keys: Json,
    ) -> Result<String, CannotEdit> {
        let [service, backend] = [service, backend].map(|name| name.map(str::to_owned));
        let keys = keys.as_object().cloned().unwrap_or_default();
        Edit { action, service, backend, keys }.apply(TEXT)
    }

    /// The lines that are gone, and those that are new.
    fn changed(text: &str) -> (Vec<&str>, Vec<&str>) {
        let (old, new): (Vec<&str>, Vec<&str>) = (TEXT.lines().collect(), text.lines().collect());
        let same = old.iter().zip(&new).take_while(|(old, new)| old == new).count();
        let tail = old[same..]
            .iter()
            .rev()
            .zip(new[same..].iter().rev())
            .take_while(|(old, new)| old == new)
            .count();
        let gone = TEXT.lines().skip(same).take(old.len() - same - tail).collect();
        (gone, new[same..new.len() - tail].to_vec())
    }

    #[test]
    fn only_what_is_meant_changes() {
        use Action::{Add, Remove, Set};
        for (action, service, backend, keys, gone, new) in [
            (
                Set,
                None,
                Some("a"),
                json!({"weight": 3}),
                &["weight = 2 # twice"][..],
                &["weight = 3 # twice"][..],
            ),
            (Set, None, Some("a"), json!({"weight": null}), &["weight = 2 # twice"], &[]),
            (
                Set,
                Some("dns"),
                Some("b"),
                json!({"backup": true, "max-active": 7}),
                &[],
                &["backup = true", "max-active = 7"],
            ),
            (
                Set,
                Some("web"),
                None,
                json!({"method": "round-robin", "health": {"kind": "exec", "command": ["/bin/true"]}}),
                &["method = \"maglev\""],
                &["method = \"round-robin\"", "health = { command = [\"/bin/true\"], kind = \"exec\" }"],
            ),
            (
                Add,
                Some("web"),
                Some("c"),
                json!({"address": "10.0.0.3:80"}),
                &[],
                &["[[service.backend]]", "name = \"c\"", "address = \"10.0.0.3:80\"", ""],
            ),
            (
                Remove,
                None,
                Some("a"),
                json!({}),
                &[
                    "# the old one",
                    "[[service.backend]]",
                    "name = \"a\"",
                    "address = \"10.0.0.1:80\"",
                    "weight = 2 # twice",
                    "",
                ],
                &[],
            ),
            (
                Add,
                Some("new"),
                None,
                json!({"address": "192.0.2.11:80", "protocol": "tcp"}),
                &[],
                &["", "[[service]]", "name = \"new\"", "address = \"192.0.2.11:80\"", "protocol = \"tcp\""],
            ),
            (
                Remove,
                Some("dns"),
                None,
                json!({}),
                &[
                    "",
                    "[[service]] # names",
                    "name = \"dns\"",
                    "address = \"192.0.2.10:53\"",
                    "protocol = \"udp\"",
                    "method = \"maglev\"",
                    "",
                    "[[service.backend]]",
                    "name = \"b\"",
                    "address = \"10.0.0.2:53\"",
                ],
                &[],
            ),
        ] {
            let text = edited(action, service, backend, keys).unwrap();
            assert_eq!(changed(&text), (gone.to_vec(), new.to_vec()), "{text}");
        }
    }

    #[test]
    fn what_can_not_be_changed() {
        use Action::{Add, Remove, Set};
        let known = |what, name: &str, known: &[&str]| CannotEdit::Unknown {
            what,
            name: name.to_owned(),
            known: known.iter().map(|name| (*name).to_owned()).collect(),
        };
        for (action, service, backend, keys, expected) in [
            (Set, Some("wep"), None, json!({"method": "maglev"}), known("service", "wep", &["web", "dns"])),
            (Remove, Some("dns"), Some("a"), json!({}), known("backend", "a", &["b"])),
            (Remove, None, Some("c"), json!({}), known("backend", "c", &["a", "b"])),
            (
                Remove,
                None,
                Some("b"),
                json!({}),
                because("several services have a backend \"b\": say which with `service` (--service)"),
            ),
            (
                Add,
                None,
                Some("c"),
                json!({}),
                because("say with `service` (--service) which service the backend is added to"),
            ),
            (
                Add,
                Some("web"),
                None,
                json!({}),
                because("there is a service \"web\" already: `service set` changes it"),
            ),
            (Set, Some("web"), None, json!({}), because("say which keys are to change, as KEY=VALUE")),
            (
                Set,
                Some("web"),
                None,
                json!({"backend": []}),
                because("the backends of a service are changed one by one, by `backend` verbs"),
            ),
            (
                Remove,
                Some("web"),
                None,
                json!({"a": 1}),
                because("a service is removed as a whole: no keys are needed"),
            ),
        ] {
            assert_eq!(edited(action, service, backend, keys), Err(expected));
        }
    }
}
