//! `balancer api`: what can the control socket be asked?

use std::process::ExitCode;

use super::output::print;
use crate::api::openapi;

/// Prints the API as an OpenAPI document.
///
/// # Errors
///
/// When it can't be written.
pub fn run() -> anyhow::Result<ExitCode> {
    print(&format!("{:#}\n", openapi()))?;
    Ok(ExitCode::SUCCESS)
}
