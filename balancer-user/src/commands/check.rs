//! `balancer check`: is a configuration fine?

use std::path::Path;
use std::process::ExitCode;

use super::output::print;
use crate::config::{Config, json_schema};

/// Says that the configuration in `file` is fine, and what it holds.
///
/// # Errors
///
/// All faults of the file, as [`Faults`](crate::config::Faults).
pub fn run(file: &Path) -> anyhow::Result<ExitCode> {
    let config = Config::load(file)?;
    print(&verdict(&file.display().to_string(), &config))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the JSON Schema of configuration files.
///
/// # Errors
///
/// When it can't be written.
pub fn schema() -> anyhow::Result<ExitCode> {
    print(&format!("{:#}\n", json_schema()))?;
    Ok(ExitCode::SUCCESS)
}

fn verdict(file: &str, config: &Config) -> String {
    let services = counted(config.services.len(), "service");
    let backends = counted(config.backend_count(), "backend");
    format!("{file}: fine: {services}, {backends}\n")
}

fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts() {
        let example = include_str!("../../../tests/config/web.toml");
        let config = Config::parse("f", example).expect("valid");
        assert_eq!(verdict("web.toml", &config), "web.toml: fine: 3 services, 7 backends\n");
        let one =
            &example[..example.find("[[service.backend]]\nname = \"web-2\"").expect("a second backend")];
        let config = Config::parse("f", one).expect("valid");
        assert_eq!(verdict("web.toml", &config), "web.toml: fine: 1 service, 1 backend\n");
    }
}
