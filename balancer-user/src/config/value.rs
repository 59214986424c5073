use std::fmt;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::de::DeValue;

/// Why a value is not accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// What is wrong with it, when `allowed` does not make that plain.
    pub why: Option<String>,
    /// What would be accepted.
    pub allowed: String,
}

impl Refused {
    /// A refusal that `allowed` explains.
    pub(super) fn needs(allowed: impl Into<String>) -> Refused {
        Refused { why: None, allowed: allowed.into() }
    }

    /// A refusal because of `why`.
    pub(super) fn because(why: impl Into<String>, allowed: impl Into<String>) -> Refused {
        Refused { why: Some(why.into()), allowed: allowed.into() }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(why) = &self.why {
            write!(f, "{why}; ")?;
        }
        write!(f, "allowed: {}", self.allowed)
    }
}

impl std::error::Error for Refused {}

/// A reader of strings: `read` gets the text, and `allowed` is said of everything that is not a string.
pub(super) fn text<T>(
    allowed: &'static str,
    read: impl FnOnce(&str) -> Result<T, Refused>,
) -> impl FnOnce(&DeValue<'_>) -> Result<T, Refused> {
    move |value| match value.as_str() {
        Some(text) => read(text),
        None => Err(Refused::needs(allowed)),
    }
}

/// A reader of integers within `range`.
pub(super) fn integer(range: RangeInclusive<u32>) -> impl FnOnce(&DeValue<'_>) -> Result<u32, Refused> {
    move |value| {
        value
            .as_integer()
            .and_then(|integer| u32::from_str_radix(integer.as_str(), integer.radix()).ok())
            .filter(|number| range.contains(number))
            .ok_or_else(|| Refused::needs(format!("an integer from {} to {}", range.start(), range.end())))
    }
}

/// A range of ports as text, `first-last`; port 0 is none.
pub(super) fn ports(text: &str) -> Option<[u16; 2]> {
    let number = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
    let (first, last) = text.split_once('-')?;
    Some([number(first)?, number(last)?]).filter(|[first, last]| first <= last)
}

/// A reader of true and false.
pub(super) fn boolean(value: &DeValue<'_>) -> Result<bool, Refused> {
    value.as_bool().ok_or_else(|| Refused::needs("true, false"))
}

/// A reader of durations within `range`.
pub(super) fn duration(
    range: RangeInclusive<Duration>,
) -> impl FnOnce(&DeValue<'_>) -> Result<Duration, Refused> {
    move |value| {
        let [least, most] = [range.start(), range.end()].map(|&end| humantime::format_duration(end));
        let refused = |why: Option<&str>| Refused {
            why: why.map(str::to_owned),
            allowed: format!("a duration in quotes from \"{least}\" to \"{most}\""),
        };
        let text = value.as_str().ok_or_else(|| refused(None))?;
        let duration = humantime::parse_duration(text).map_err(|error| match error {
            humantime::DurationError::UnknownUnit { .. }
                if text.ends_with(|last: char| last.is_ascii_digit()) =>
            {
                refused(Some("without a unit"))
            }
            _ => refused(None),
        })?;
        if range.contains(&duration) { Ok(duration) } else { Err(refused(None)) }
    }
}

/// A reader of one of these words.
pub(super) fn choice<T: Copy>(words: &[(&str, T)]) -> impl FnOnce(&DeValue<'_>) -> Result<T, Refused> {
    move |value| {
        let word = value.as_str();
        if let Some((_, choice)) = words.iter().find(|(name, _)| Some(*name) == word) {
            return Ok(*choice);
        }
        let allowed: Vec<_> = words.iter().map(|(name, _)| format!("\"{name}\"")).collect();
        Err(Refused::needs(allowed.join(", ")))
    }
}

/// A reader of absolute paths.
pub(super) fn absolute_path(value: &DeValue<'_>) -> Result<PathBuf, Refused> {
    let path = Path::new(value.as_str().unwrap_or_default());
    if !path.is_absolute() || path.as_os_str().as_encoded_bytes().contains(&0) {
        return Err(Refused::needs("an absolute path in quotes"));
    }
    Ok(path.to_owned())
}
