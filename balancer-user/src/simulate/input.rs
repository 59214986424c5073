//! How a table is written in JSON. What it says is checked while it is read, so that an error has a place.

use std::{collections::HashSet, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, SeqAccess, Unexpected, Visitor},
};

use super::{BadInput, Case, Service};
use crate::{load::Load, method::Method};

/// Requests where a case does not say how many: as many as the published tables have.
const DEFAULT_REQUESTS: usize = 8;
/// The largest number accepted: above any counter's sum over a window, far below the limit of `Load`.
const LARGEST: u64 = 1_000_000_000_000_000_000;

pub(super) fn read(text: &str) -> Result<Vec<Case>, BadInput> {
    // Which of the two shapes it is must be known first: an untagged enum would lose the place of every error.
    let shape: Shape = serde_json::from_str(text)?;
    if shape.cases.is_some() {
        Ok(serde_json::from_str::<File>(text)?.cases.0)
    } else {
        Ok(vec![serde_json::from_str::<Case>(text)?])
    }
}

impl From<serde_json::Error> for BadInput {
    fn from(error: serde_json::Error) -> BadInput {
        let (line, column) = (error.line(), error.column());
        let text = error.to_string();
        let message = text.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&text);
        // What is wrong with a whole case that stands alone has no place of its own.
        BadInput { line: line.max(1), column: column.max(1), message: message.to_owned() }
    }
}

#[derive(Deserialize)]
struct Shape {
    cases: Option<IgnoredAny>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    cases: List<Case>,
    #[serde(default, rename = "about")]
    _about: IgnoredAny,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CaseText {
    name: String,
    method: Method,
    services: List<ServiceText>,
    adds: Option<List<Number>>,
    #[serde(default, rename = "unit")]
    _unit: IgnoredAny,
    #[serde(default, rename = "about")]
    _about: IgnoredAny,
    #[serde(default, rename = "note")]
    _note: IgnoredAny,
    #[serde(default, rename = "expect")]
    _expect: IgnoredAny,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ServiceText {
    name: String,
    #[serde(deserialize_with = "load")]
    load: Load,
    #[serde(default, deserialize_with = "weight")]
    weight: Option<u8>,
    #[serde(default = "one", deserialize_with = "step")]
    step: Load,
}

const fn one() -> Load {
    Load::ONE
}

fn load<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Load, D::Error> {
    named("load", Number::deserialize(deserializer)).map(|number| number.0)
}

fn step<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Load, D::Error> {
    named("step", Number::deserialize(deserializer)).map(|number| number.0)
}

fn weight<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u8>, D::Error> {
    let weight = named("weight", Number::deserialize(deserializer))?.0;
    match (0..=100).find(|whole| Load::units(u64::from(*whole)) == weight) {
        Some(whole) => Ok(Some(whole)),
        None => Err(D::Error::custom("weight: expected a whole number from 0 to 100")),
    }
}

/// Puts the name before an error; JSON's own errors keep their place.
fn named<T, E: Error>(name: impl fmt::Display, result: Result<T, E>) -> Result<T, E> {
    result.map_err(|error| E::custom(format_args!("{name}: {error}")))
}

impl<'de> Deserialize<'de> for Case {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Case, D::Error> {
        let CaseText { name, method, services: List(services), adds, .. } =
            CaseText::deserialize(deserializer)?;
        let fail = |what| Err(D::Error::custom(format_args!("\"{name}\": services: {what}")));
        if services.iter().all(|service| service.weight == Some(0)) {
            return fail(format_args!("there is none that could be picked"));
        }
        let mut names = HashSet::new();
        if let Some(twice) = services.iter().find(|service| !names.insert(&service.name)) {
            return fail(format_args!("two are named \"{}\"", twice.name));
        }
        Ok(Case {
            method,
            is_weighted: services.iter().any(|service| service.weight.is_some()),
            services: services.into_iter().map(Service::from).collect(),
            adds: match adds {
                Some(List(adds)) => adds.into_iter().map(|factor| factor.0).collect(),
                None => vec![Load::ONE; DEFAULT_REQUESTS],
            },
            name,
        })
    }
}

impl From<ServiceText> for Service {
    fn from(text: ServiceText) -> Service {
        let ServiceText { name, load, weight, step } = text;
        Service { name, load, weight: weight.unwrap_or(1), step }
    }
}

/// A list whose errors say which element is meant, counted from 1.
struct List<T>(Vec<T>);

/// What an element of a list is called.
trait Element {
    const NAME: &'static str;
}

impl Element for Case {
    const NAME: &'static str = "case";
}

impl Element for ServiceText {
    const NAME: &'static str = "service";
}

impl Element for Number {
    const NAME: &'static str = "adds, request";
}

impl<'de, T: Deserialize<'de> + Element> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<List<T>, D::Error> {
        deserializer.deserialize_seq(ListVisitor(PhantomData))
    }
}

struct ListVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de> + Element> Visitor<'de> for ListVisitor<T> {
    type Value = List<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<List<T>, A::Error> {
        let mut list = Vec::new();
        loop {
            let element = elements.next_element();
            match named(format_args!("{} {}", T::NAME, list.len() + 1), element)? {
                Some(element) => list.push(element),
                None => return Ok(List(list)),
            }
        }
    }
}

/// A number of 0 or more, exactly as it is written.
struct Number(Load);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Number, D::Error> {
        deserializer.deserialize_any(NumberVisitor)
    }
}

struct NumberVisitor;

impl Visitor<'_> for NumberVisitor {
    type Value = Number;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a number from 0 to {LARGEST}")
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Number, E> {
        if number > LARGEST {
            return Err(E::invalid_value(Unexpected::Unsigned(number), &self));
        }
        Ok(Number(Load::units(number)))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Number, E> {
        match u64::try_from(number) {
            Ok(number) => self.visit_u64(number),
            Err(_) => Err(E::invalid_value(Unexpected::Signed(number), &self)),
        }
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<Number, E> {
        // The shortest decimal that reads as this number is the one that was written.
        match Load::from_decimal(&number.abs().to_string()) {
            Some(load) if number >= 0.0 && load <= Load::units(LARGEST) => Ok(Number(load)),
            _ => Err(E::invalid_value(Unexpected::Float(number), &self)),
        }
    }
}
