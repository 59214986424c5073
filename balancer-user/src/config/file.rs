use std::fs::{self, File};
use std::io::{self, Read, Write as _};
use std::path::Path;
use std::sync::Mutex;

use anyhow::{Context as _, anyhow};

use super::Config;
use super::fault::Faults;

/// Largest file that is read, in bytes: four times what 32,768 backends with long names take.
const LARGEST: u64 = 16 << 20;

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
        return Err(Faults::of_file(name, "larger than 16 MiB, which no configuration needs".to_owned()));
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

/// Changes the text of the file at `path`, which is a valid configuration before and after, or as it was: it is replaced by
/// another one, whole, with the same mode and owner.
///
/// # Errors
///
/// When the file is wrong, or would be, or can't be written.
pub fn save(path: &Path, change: impl FnOnce(&str) -> anyhow::Result<String>) -> anyhow::Result<()> {
    // Of two that change it at once, each has read what the other has written.
    static ONE_BY_ONE: Mutex<()> = Mutex::new(());
    let _one = ONE_BY_ONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let name = path.display().to_string();
    let text = change(&read(path, &name)?)?;
    Config::parse(&name, &text)?;
    // Behind a symbolic link is the file that is meant.
    let path = fs::canonicalize(path).with_context(|| format!("find {name}"))?;
    let directory = path.parent().ok_or_else(|| anyhow!("{name} is in no directory"))?;
    let mut beside = path.file_name().unwrap_or_default().to_owned();
    beside.push(".new");
    let beside = directory.join(beside);
    let written = replace(&path, &beside, &text);
    if written.is_err() {
        // It may not be there.
        drop(fs::remove_file(&beside));
    }
    written.with_context(|| format!("write {name}"))
}

fn replace(path: &Path, beside: &Path, text: &str) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, fchown};

    let old = fs::metadata(path)?;
    // What a crash has left of an earlier one.
    if let Err(error) = fs::remove_file(beside)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error);
    }
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(beside)?;
    fchown(&file, Some(old.uid()), Some(old.gid()))?;
    file.set_permissions(old.permissions())?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(beside, path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

    use super::*;

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let [path, link] = ["real.toml", "link.toml"].map(|name| directory.path().join(name));
        let old = "# ours\n[daemon]\ninterfaces = [\"eth0\"]\n";
        fs::write(&path, old).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        symlink("real.toml", &link).unwrap();
        fs::write(directory.path().join("real.toml.new"), "what a crash has left").unwrap();
        let inode = fs::metadata(&path).unwrap().ino();
        save(&link, |text| Ok(text.replace("eth0", "eth1"))).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), old.replace("eth0", "eth1"));
        let new = fs::metadata(&path).unwrap();
        assert_eq!(new.permissions().mode() & 0o7777, 0o640);
        assert_ne!(new.ino(), inode, "never half written");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());

        for (change, expected) in [
            (Ok("[daemon]\n".to_owned()), "`interfaces` is missing in [daemon]"),
            (Err(anyhow!("not today")), "not today"),
        ] {
            let error = format!("{:#}", save(&path, |_| change).unwrap_err());
            assert!(error.contains(expected), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), old.replace("eth0", "eth1"));
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2, "nothing is left beside it");
    }
}
