use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use super::fault::Faults;

/// Largest file that is read, in bytes: ten times what the largest number of backends takes.
const LARGEST: u64 = 1 << 20;

/// The text of the file at `path`, which the faults call `name`.
pub(super) fn read(path: &Path, name: &str) -> Result<String, Faults> {
    let bytes = read_bytes(path).map_err(|error| {
        let why = match error.kind() {
            io::ErrorKind::NotFound => "there is no such file".to_owned(),
            io::ErrorKind::IsADirectory => "this is a directory; needed: a TOML file".to_owned(),
            _ => format!("can't be read: {error}"),
        };
        Faults::of_file(name, why)
    })?;
    if bytes.len() as u64 > LARGEST {
        return Err(Faults::of_file(name, "larger than 1 MiB, which no configuration needs".to_owned()));
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let text = String::from_utf8_lossy(error.as_bytes());
        Faults::at(name, &text, valid, "not UTF-8 from here on; TOML files are UTF-8".to_owned())
    })
}

/// At most one byte more than `LARGEST`.
fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(LARGEST + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}
