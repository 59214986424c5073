use std::{error::Error, fmt};

use axum::{
    Json,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Most names that a refusal lists.
const NAMES_SHOWN: usize = 20;

/// Why the daemon did not do what it was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such service or backend.
    Unknown {
        /// `service` or `backend`.
        what: &'static str,
        /// The name that was asked for.
        name: String,
        /// The names that there are.
        known: Vec<String>,
    },
    /// The request can't be understood, or must not be done like that.
    Wrong(String),
    /// Larger than any request that can be meant, in bytes.
    TooLarge(usize),
    /// Too much to do, or no answer in time: try again.
    Busy(String),
    /// The kernel, or something else beneath, refused.
    Failed(String),
}

/// A refusal as it is sent.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(super) struct Refused {
    /// What is wrong, and what to do about it.
    pub(super) error: String,
}

impl Refusal {
    /// The status that the answer has. 404, 413 and 422 say that the call is wrong.
    pub const fn status(&self) -> StatusCode {
        match self {
            Refusal::Unknown { .. } => StatusCode::NOT_FOUND,
            Refusal::Wrong(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Refusal::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Refusal::Busy(_) => StatusCode::SERVICE_UNAVAILABLE,
            Refusal::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Unknown { what, name, known } => {
                write!(f, "there is no {what} {name:?}; there ")?;
                if known.is_empty() {
                    return write!(f, "is none");
                }
                let shown: Vec<_> = known.iter().take(NAMES_SHOWN).map(String::as_str).collect();
                write!(f, "are: {}", shown.join(", "))?;
                match known.len() - shown.len() {
                    0 => Ok(()),
                    more => write!(f, ", and {more} more"),
                }
            }
            Refusal::TooLarge(most) => write!(f, "the request is larger than {most} bytes"),
            Refusal::Wrong(why) | Refusal::Busy(why) | Refusal::Failed(why) => f.write_str(why),
        }
    }
}

impl Error for Refusal {}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status(), Json(Refused { error: self.to_string() })).into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_not_there_is_told_from_who_is() {
        let unknown = |names: usize| Refusal::Unknown {
            what: "backend",
            name: "wep-1".to_owned(),
            known: (1..=names).map(|number| format!("b{number}")).collect(),
        };
        for (names, expected) in [
            (0, "there is no backend \"wep-1\"; there is none"),
            (2, "there is no backend \"wep-1\"; there are: b1, b2"),
            (
                23,
                "there is no backend \"wep-1\"; there are: b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, \
                 b15, b16, b17, b18, b19, b20, and 3 more",
            ),
        ] {
            assert_eq!(unknown(names).to_string(), expected);
        }
    }
}
