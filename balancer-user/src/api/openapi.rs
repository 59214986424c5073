//! The API as an OpenAPI 3.1 document, made of the types themselves and of the one table of verbs.

use schemars::{
    JsonSchema, Schema, SchemaGenerator,
    generate::{Contract, SchemaSettings},
};
use serde_json::{Map, Value, json};

use super::{
    model::Status,
    refusal::Refused,
    verb::{EachVerb, OPENAPI_PATH, STATUS_PATH, Verb, verbs},
};

/// What can be asked, where and how, and what the answers look like.
pub fn openapi() -> Value {
    let Document { paths, asked, answered } = verbs(Document::new());
    let mut schemas = asked.schemas();
    schemas.extend(answered.schemas());
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "balancer",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "HTTP over the Unix socket of `balancer run` (`socket` in [daemon]).",
            "license": { "name": env!("CARGO_PKG_LICENSE") },
        },
        "paths": paths,
        "components": { "schemas": schemas },
    })
}

/// The document, while it is being made.
struct Document {
    paths: Map<String, Value>,
    /// Of what clients write, and of what they read: what may be left out of one is there in the other.
    asked: Schemas,
    answered: Schemas,
}

struct Schemas(SchemaGenerator);

impl Schemas {
    fn new(contract: Contract) -> Schemas {
        let settings = SchemaSettings::draft2020_12().with(|settings| {
            settings.definitions_path = "/components/schemas".into();
            settings.contract = contract;
        });
        Schemas(settings.into_generator())
    }

    /// A reference to the schema of a type, and that schema.
    fn of<T: JsonSchema>(&mut self) -> (Schema, Value) {
        let reference = self.0.subschema_for::<T>();
        let schema = self.0.definitions().get(T::schema_name().as_ref()).cloned();
        (reference, schema.unwrap_or_default())
    }

    fn schemas(mut self) -> Map<String, Value> {
        self.0.take_definitions(true)
    }
}

impl Document {
    fn new() -> Document {
        let mut document = Document {
            paths: Map::new(),
            asked: Schemas::new(Contract::Deserialize),
            answered: Schemas::new(Contract::Serialize),
        };
        let (status, described) = document.answered.of::<Status>();
        let get = |path: &str, summary: &Value, answer: Value| {
            let responses = json!({ "200": { "description": "it", "content": content(&answer) } });
            json!({ "get": { "operationId": id(path), "summary": summary, "responses": responses } })
        };
        let this = json!("This document");
        for (path, summary, answer) in [
            (STATUS_PATH, &described["description"], json!(status)),
            (OPENAPI_PATH, &this, json!({ "type": "object" })),
        ] {
            document.paths.insert(path.to_owned(), get(path, summary, answer));
        }
        document
    }
}

impl EachVerb for Document {
    fn verb<V: Verb>(mut self) -> Self {
        let (request, asked) = self.asked.of::<V>();
        let (answer, answered) = self.answered.of::<V::Answer>();
        let (refused, _) = self.answered.of::<Refused>();
        let is_needed = asked.get("required").is_some();
        let mut responses = json!({
            "200": { "description": answered["description"], "content": content(&json!(answer)) },
        });
        for (status, description) in [
            ("404", "There is no such service or backend"),
            ("413", "The request is too large"),
            ("422", "The request can't be understood, or must not be done like that"),
            ("500", "The kernel, or something else beneath, refused"),
            ("503", "Too much to do, or no answer in time: try again"),
        ] {
            responses[status] = json!({ "description": description, "content": content(&json!(refused)) });
        }
        let operation = json!({
            "operationId": id(V::PATH),
            "summary": asked["description"],
            "requestBody": { "required": is_needed, "content": content(&json!(request)) },
            "responses": responses,
        });
        self.paths.insert(V::PATH.to_owned(), json!({ "post": operation }));
        self
    }
}

fn content(schema: &Value) -> Value {
    json!({ "application/json": { "schema": schema } })
}

/// `/v1/flows/list` is `flows-list`.
fn id(path: &str) -> String {
    path.trim_start_matches("/v1/").trim_end_matches(".json").replace('/', "-")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Every reference in a value.
    fn references(value: &Value) -> Vec<&str> {
        match value {
            Value::Object(entries) => {
                let own = entries.get("$ref").and_then(Value::as_str);
                own.into_iter().chain(entries.values().flat_map(references)).collect()
            }
            Value::Array(items) => items.iter().flat_map(references).collect(),
            _ => Vec::new(),
        }
    }

    #[test]
    fn everything_that_is_named_is_there_and_described() {
        let document = openapi();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        let used: BTreeSet<&str> = references(&document).into_iter().collect();
        let there: BTreeSet<String> =
            schemas.keys().map(|name| format!("#/components/schemas/{name}")).collect();
        assert_eq!(used, there.iter().map(String::as_str).collect());
        for (name, schema) in schemas {
            assert!(schema["description"].as_str().is_some_and(|text| text.len() > 3), "{name}: {schema}");
            for (property, schema) in schema["properties"].as_object().into_iter().flatten() {
                assert!(schema.get("description").is_some(), "{property} of {name}: {schema}");
            }
        }
        let paths = document["paths"].as_object().unwrap();
        assert_eq!(paths.len(), 12);
        let operations = paths.values().flat_map(|path| path.as_object().unwrap().values());
        for operation in operations {
            assert!(operation["summary"].as_str().is_some_and(|text| !text.is_empty()), "{operation}");
            assert!(operation["responses"]["200"]["description"].is_string(), "{operation}");
        }
    }

    /// Where both sides use a type, they mean the same: else one of the two schemas is lost.
    #[test]
    fn no_two_schemas_have_one_name() {
        let Document { asked, answered, .. } = verbs(Document::new());
        let (asked, answered) = (asked.schemas(), answered.schemas());
        for (name, schema) in &asked {
            assert!(answered.get(name).is_none_or(|other| other == schema), "{name}");
        }
    }

    #[test]
    fn what_may_be_left_out_is_said() {
        let document = openapi();
        let operation = |path: &str| document["paths"][path]["post"].clone();
        assert_eq!(operation("/v1/flows/list")["requestBody"]["required"], false);
        assert_eq!(operation("/v1/explain")["requestBody"]["required"], true);
        let schemas = &document["components"]["schemas"];
        assert_eq!(schemas["Explain"]["required"], json!(["service"]));
        assert_eq!(schemas["Explain"]["additionalProperties"], false);
        let needed = schemas["BackendStatus"]["required"].as_array().unwrap();
        assert!(needed.contains(&json!("nw")) && !needed.contains(&json!("drain")), "{needed:?}");
    }
}
