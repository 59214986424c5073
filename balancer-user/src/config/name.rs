use std::fmt;
use std::str::FromStr;

use super::value::Refused;

/// Name of a service or backend: 1 to 64 letters, digits, dots, underscores and hyphens of ASCII.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

impl Name {
    pub(super) const ALLOWED: &str = "1 to 64 characters of A-Z a-z 0-9 . _ - in quotes";

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = Refused;

    fn from_str(text: &str) -> Result<Name, Refused> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if (1..=64).contains(&text.len()) && text.bytes().all(fits) {
            return Ok(Name(text.to_owned()));
        }
        Err(Refused::needs(Name::ALLOWED))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Name of a network interface, as the kernel accepts it (`dev_valid_name`).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InterfaceName(String);

impl InterfaceName {
    pub(super) const ALLOWED: &str =
        "an interface name in quotes: 1 to 15 bytes, without whitespace, '/' or ':'";

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for InterfaceName {
    type Err = Refused;

    fn from_str(text: &str) -> Result<InterfaceName, Refused> {
        let bad = |c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control();
        if (1..=15).contains(&text.len()) && !text.contains(bad) && text != "." && text != ".." {
            return Ok(InterfaceName(text.to_owned()));
        }
        Err(Refused::needs(InterfaceName::ALLOWED))
    }
}

impl fmt::Display for InterfaceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}
