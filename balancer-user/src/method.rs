//! The ways to choose a backend.

use std::{error::Error, fmt, str::FromStr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a service chooses the backend of a new flow. Written in kebab case: `least-packets`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// The fewest packets to and from it within the window.
    LeastPackets,
    /// The fewest bytes to and from it within the window.
    LeastBandwidth,
    /// The fewest active requests.
    LeastRequest,
    /// The lowest product of active requests and time to first byte.
    LeastResponseTime,
    /// In turn, by weight, whatever they carry.
    RoundRobin,
    /// By a consistent hash of the client's address (Maglev).
    SourceHash,
    /// By a consistent hash of addresses, ports and protocol (Maglev).
    Maglev,
}

impl Method {
    /// Every method.
    pub const ALL: [Method; 7] = [
        Method::LeastPackets,
        Method::LeastBandwidth,
        Method::LeastRequest,
        Method::LeastResponseTime,
        Method::RoundRobin,
        Method::SourceHash,
        Method::Maglev,
    ];

    /// The name in configurations, on the command line and in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Method::LeastPackets => "least-packets",
            Method::LeastBandwidth => "least-bandwidth",
            Method::LeastRequest => "least-request",
            Method::LeastResponseTime => "least-response-time",
            Method::RoundRobin => "round-robin",
            Method::SourceHash => "source-hash",
            Method::Maglev => "maglev",
        }
    }

    /// What N is counted in; `None` for a method that compares nothing.
    pub const fn unit(self) -> Option<&'static str> {
        match self {
            Method::LeastPackets => Some("packets"),
            Method::LeastBandwidth => Some("Mbit/s"),
            Method::LeastRequest => Some("requests"),
            Method::LeastResponseTime => Some("requests × ms"),
            Method::RoundRobin | Method::SourceHash | Method::Maglev => None,
        }
    }

    /// Whether it compares active requests.
    pub const fn counts_requests(self) -> bool {
        matches!(self, Method::LeastRequest | Method::LeastResponseTime)
    }

    /// Whether the backend follows from a hash: nothing is compared.
    pub const fn is_hash(self) -> bool {
        matches!(self, Method::SourceHash | Method::Maglev)
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Method {
    type Err = UnknownMethod;

    fn from_str(name: &str) -> Result<Method, UnknownMethod> {
        Method::ALL
            .into_iter()
            .find(|method| method.name() == name)
            .ok_or_else(|| UnknownMethod(name.to_owned()))
    }
}

/// A name that no method has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownMethod(pub String);

impl fmt::Display for UnknownMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown method `{}`, expected one of", self.0)?;
        let mut separator = " ";
        for method in Method::ALL {
            write!(f, "{separator}`{method}`")?;
            separator = ", ";
        }
        Ok(())
    }
}

impl Error for UnknownMethod {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_write_a_method_is_the_same() {
        for method in Method::ALL {
            assert_eq!(method.name().parse(), Ok(method));
            assert_eq!(serde_json::to_value(method).unwrap(), method.to_string());
            assert_eq!(serde_json::from_value::<Method>(method.name().into()).unwrap(), method);
        }
        assert_eq!(
            "least".parse::<Method>().unwrap_err().to_string(),
            "unknown method `least`, expected one of `least-packets`, `least-bandwidth`, `least-request`, \
             `least-response-time`, `round-robin`, `source-hash`, `maglev`"
        );
    }
}
