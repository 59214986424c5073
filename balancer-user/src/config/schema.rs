//! The configuration file as a JSON Schema, for editors: which keys there are, of which type, and what some may be. What
//! one key means to another is for `Config::parse` to judge.

use serde_json::{Map, Value, json};

use super::section::{Key, Schema};

/// The schema of the whole file.
pub fn json_schema() -> Value {
    let mut schema = section(&super::FILE, |key| match key {
        "daemon" => Some(section(&super::daemon::DAEMON, |key| {
            let interface =
                json!({ "anyOf": [{ "type": "string" }, section(&super::daemon::INTERFACE, |_| None)] });
            (key == "interfaces").then(|| json!({ "type": "array", "minItems": 1, "items": interface }))
        })),
        "service" => Some(json!({ "type": "array", "items": section(&super::service::SERVICE, of_service) })),
        _ => None,
    });
    schema["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    schema["title"] = json!("The configuration of balancer");
    schema
}

fn of_service(key: &str) -> Option<Value> {
    match key {
        "persistence" => Some(section(&super::service::PERSISTENCE, |_| None)),
        "rtsp-nat" => Some(section(&super::service::RTSP_NAT, |_| None)),
        "passive-health" => Some(section(&super::health::PASSIVE_HEALTH, |_| None)),
        "health" => Some(json!({ "oneOf": checks() })),
        "backend" => {
            let of_backend = |key: &str| {
                let unchecked = json!({ "const": false });
                let any = [checks(), vec![unchecked]].concat();
                (key == "health").then(|| json!({ "oneOf": any }))
            };
            Some(json!({ "type": "array", "items": section(&super::backend::BACKEND, of_backend) }))
        }
        _ => None,
    }
}

/// Each kind of health checks.
fn checks() -> Vec<Value> {
    let kinds = super::health::schemas().map(|(kind, schema)| {
        let mut schema = section(schema, |_| None);
        schema["properties"]["kind"] = json!({ "const": kind });
        schema
    });
    kinds.into()
}

/// A section; `special` says what its keys hold that hold sections.
fn section(schema: &Schema, special: impl Fn(&str) -> Option<Value>) -> Value {
    let mut properties = Map::new();
    for key in schema.keys {
        let described = special(key.name).unwrap_or_else(|| property(key));
        properties.insert(key.name.to_owned(), described);
    }
    let needed: Vec<&str> = schema.keys.iter().filter(|key| key.is_needed).map(|key| key.name).collect();
    json!({ "type": "object", "properties": properties, "required": needed, "additionalProperties": false })
}

/// A key, by the example that it has.
fn property(key: &Key) -> Value {
    let example = toml::from_str::<Map<_, _>>(key.example).ok().and_then(|mut read| read.remove(key.name));
    let Some(example) = example else { return json!({}) };
    let kind = match &example {
        Value::String(_) => "string",
        Value::Bool(_) => "boolean",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
        _ => "integer",
    };
    let mut property = json!({ "type": kind, "examples": [example] });
    if !key.choices.is_empty() {
        property["enum"] = json!(key.choices);
    }
    property
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    /// Whether a document is one by a schema, as far as it uses what is made here.
    fn fits(document: &Value, schema: &Value) -> Result<(), String> {
        let refuse = |why: &str| Err(format!("{document} is not {why}"));
        if let Some(any) = schema.get("anyOf").or_else(|| schema.get("oneOf")).and_then(Value::as_array) {
            let fitting = any.iter().filter(|schema| fits(document, schema).is_ok()).count();
            return if fitting == 1 { Ok(()) } else { refuse("one of the alternatives") };
        }
        if let Some(value) = schema.get("const") {
            return if document == value { Ok(()) } else { refuse(&value.to_string()) };
        }
        if let Some(choices) = schema.get("enum").and_then(Value::as_array)
            && !choices.contains(document)
        {
            return refuse("one of the choices");
        }
        match (schema["type"].as_str().unwrap_or_default(), document) {
            ("object", Value::Object(entries)) => {
                let properties = &schema["properties"];
                for (key, value) in entries {
                    let Some(property) = properties.get(key) else {
                        return refuse(&format!("without {key}"));
                    };
                    fits(value, property)?;
                }
                match schema["required"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .find(|key| !entries.contains_key(key.as_str().unwrap()))
                {
                    Some(key) => refuse(&format!("with {key}")),
                    None => Ok(()),
                }
            }
            ("array", Value::Array(items)) => items
                .iter()
                .try_for_each(|item| schema.get("items").map_or(Ok(()), |schema| fits(item, schema))),
            ("string", Value::String(_)) | ("boolean", Value::Bool(_)) | ("integer", Value::Number(_)) => {
                Ok(())
            }
            (kind, _) => refuse(kind),
        }
    }

    fn document(text: &str) -> Value {
        toml::from_str::<Value>(text).unwrap()
    }

    #[test]
    fn the_example_fits_and_what_is_wrong_does_not() {
        let schema = json_schema();
        let example = include_str!("../../../tests/config/web.toml");
        assert_eq!(fits(&document(example), &schema), Ok(()));
        for (right, wrong) in [
            ("name = \"web\"\n", ""),
            ("name = \"web\"\n", "name = 7\n"),
            ("protocol = \"tcp\"", "protocol = \"sctp\""),
            ("method = \"least-packets\"", "method = \"least\""),
            ("kind = \"http\", path", "kind = \"tcp\", path"),
            ("weight = 2 ", "weihgt = 2 "),
            ("[daemon]", "[deamon]"),
            ("health = false", "health = true"),
            ("interfaces = [\"eth0\", \"eth1\"]", "interfaces = [7]"),
            ("{ mask = 32, timeout = \"2m\" }", "{ mask = \"32\" }"),
        ] {
            assert!(example.contains(right), "{right}");
            let text = example.replacen(right, wrong, 1);
            assert!(fits(&document(&text), &schema).is_err(), "{wrong}");
            assert!(Config::parse("f", &text).is_err(), "{wrong}");
        }
    }

    /// What may be chosen is what the readers take: they say so themselves.
    #[test]
    fn the_choices_are_those_of_the_readers() {
        let service = |line: &str| {
            format!(
                "[daemon]\ninterfaces = [\"e\"]\n[[service]]\nname = \"s\"\naddress = \"192.0.2.1:80\"\nprotocol = \"tcp\"\n\
                 method = \"least-request\"\n{line}\n"
            )
        };
        let mut checked = 0;
        for key in super::super::service::SERVICE.keys.iter().filter(|key| !key.choices.is_empty()) {
            let text =
                service("").replace(&format!("{} = ", key.name), "#") + &format!("{} = \"?\"\n", key.name);
            let said = Config::parse("f", &text).unwrap_err().to_string();
            let quoted: Vec<_> = key.choices.iter().map(|choice| format!("\"{choice}\"")).collect();
            let expected = format!("`{}` is \"?\"; allowed: {}", key.name, quoted.join(", "));
            assert!(said.contains(&expected), "{said} without {expected}");
            checked += 1;
        }
        assert_eq!(checked, 8);
        let said = Config::parse("f", "[daemon]\nxdp-mode = \"?\"").unwrap_err().to_string();
        assert!(said.contains("`xdp-mode` is \"?\"; allowed: \"auto\", \"native\", \"generic\""), "{said}");
    }

    #[test]
    fn every_example_is_one() {
        let sections =
            [&super::super::daemon::DAEMON, &super::super::service::SERVICE, &super::super::backend::BACKEND];
        for key in sections.iter().flat_map(|section| section.keys) {
            assert!(key.example.starts_with('[') || property(key).get("type").is_some(), "{}", key.name);
        }
    }
}
