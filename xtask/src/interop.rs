//! `cargo xtask interop`: the balancer between the tunnels and VLAN devices of Debian's kernel, in a virtual machine.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead as _, BufReader},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};

use crate::{
    build, command,
    packages::{self, Tool},
    workspace::Workspace,
};

/// What runs in the virtual machine, and what runs it.
const TOOLS: [Tool; 7] = [
    Tool { program: "qemu-system-x86_64", package: "qemu-system-x86" },
    Tool { program: "busybox", package: "busybox-static" },
    Tool { program: "socat", package: "socat" },
    Tool { program: "ethtool", package: "ethtool" },
    Tool { program: "ip", package: "iproute2" },
    Tool { program: "xz", package: "xz-utils" },
    Tool { program: "dpkg-deb", package: "dpkg" },
];
/// Programs of the host that the machine has as well.
const GUEST: [&str; 3] = ["ip", "ethtool", "socat"];
/// Where its kernels are: the oldest that the program is made for, Linux 6.1, and 6.12.
const SUITES: [&str; 2] = ["bookworm", "bookworm-backports"];
const KERNEL: &str = "linux-image-cloud-amd64";
/// Directories of the kernel's modules that the machine needs, below `kernel`, and a single one.
const MODULES: [&str; 7] = [
    "net/ipv4",
    "net/ipv6",
    "net/8021q",
    "net/802",
    "net/llc",
    "drivers/net/veth.ko",
    "drivers/net/veth.ko.xz",
];
/// An emulated processor takes its time: the verifier alone some minutes.
const LIMIT: &str = "1500";

/// Builds all, starts the machine with each kernel, which needs no privilege, and fails unless every way that it tries goes well.
pub fn run(workspace: &Workspace) -> Result<()> {
    packages::require("interop", &TOOLS)?;
    let binary = build::run(workspace, &build::Options { release: false })?;
    for suite in SUITES {
        let place = workspace.target.join("interop").join(suite);
        let kernel = kernel(&place, suite)?;
        let image = image(workspace, &place, &kernel, &binary)?;
        boot(&kernel, &image)?;
    }
    Ok(())
}

/// Downloads and unpacks Debian's kernel, unless it is there: its directory.
fn kernel(place: &Path, suite: &str) -> Result<PathBuf> {
    let unpacked = place.join("kernel");
    if unpacked.join("boot").exists() {
        return Ok(unpacked);
    }
    println!("interop: downloading {KERNEL} of Debian's {suite}");
    for directory in ["lists/partial", "cache/archives/partial"] {
        create(&place.join(directory))?;
    }
    let source = format!(
        "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian {suite} main\n"
    );
    fs::write(place.join("sources.list"), source).context("write a list of package sources")?;
    // Package lists and all else of its own: nothing of the host changes.
    let apt = |program: &str, words: &[&str]| {
        let mut apt = Command::new(program);
        apt.current_dir(place).args(["--option", "Dir::Etc::sourceparts=/nonexistent", "--quiet=2"]);
        for (option, path) in [
            ("Dir::Etc::sourcelist", "sources.list"),
            ("Dir::State::lists", "lists"),
            ("Dir::Cache", "cache"),
        ] {
            apt.arg("--option").arg(format!("{option}={}", place.join(path).display()));
        }
        apt.args(words);
        apt
    };
    command::run(&mut apt("apt-get", &["update"])).context("reach deb.debian.org")?;
    let depends = command::output(&mut apt("apt-cache", &["depends", KERNEL]))?;
    let name = depends.split_whitespace().find(|word| word.starts_with("linux-image-6"));
    let name = name.with_context(|| format!("find out which package {KERNEL} stands for"))?;
    command::run(&mut apt("apt-get", &["download", name])).context("download a kernel")?;
    let mut entries = fs::read_dir(place).context("look for the kernel's package")?.filter_map(Result::ok);
    let is_package = |entry: &fs::DirEntry| entry.path().extension().is_some_and(|end| end == "deb");
    let package = entries.find(is_package).context("find the kernel's package")?.path();
    command::run(Command::new("dpkg-deb").arg("--extract").arg(&package).arg(&unpacked))?;
    Ok(unpacked)
}

/// The release of an unpacked kernel.
fn release(kernel: &Path) -> Result<String> {
    let modules = kernel.join("lib/modules");
    let mut entries = fs::read_dir(&modules).with_context(|| format!("read {}", modules.display()))?;
    let release =
        entries.next().context("find the kernel's modules")?.context("find the kernel's modules")?;
    Ok(release.file_name().to_string_lossy().into_owned())
}

/// Packs what the machine starts with: its path.
fn image(workspace: &Workspace, place: &Path, kernel: &Path, binary: &Path) -> Result<PathBuf> {
    let root = place.join("root");
    if root.exists() {
        fs::remove_dir_all(&root).context("remove an earlier image")?;
    }
    for directory in ["bin", "sbin", "usr/bin", "usr/sbin", "proc", "sys", "dev", "tmp", "run"] {
        create(&root.join(directory))?;
    }
    let release = release(kernel)?;
    for module in modules(&kernel.join("lib/modules").join(&release).join("kernel"))? {
        let to = root.join(module.strip_prefix(kernel).context("name a module")?);
        create(to.parent().unwrap_or(&root))?;
        copy(&module, &to)?;
        if is_packed(&to) {
            command::run(Command::new("xz").arg("--decompress").arg("--force").arg(&to))?;
        }
    }
    let busybox = command::find("busybox").context("find busybox")?;
    let mut depmod = Command::new(&busybox);
    command::run(depmod.args(["depmod", "-b"]).arg(&root).arg(&release))?;

    copy(&busybox, &root.join("bin/busybox"))?;
    let init = root.join("init");
    copy(&workspace.root.join("tests/interop/init"), &init)?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).context("make `init` a program")?;
    let ours = root.join("bin/balancer");
    // What debuggers need makes most of its size; whoever has no `strip` waits a little longer.
    if command::find("strip").is_none()
        || command::run(Command::new("strip").arg("-o").arg(&ours).arg(binary)).is_err()
    {
        copy(binary, &ours)?;
    }
    let mut libraries = libraries(binary)?;
    for program in GUEST {
        let path = command::find(program).with_context(|| format!("find {program}"))?;
        copy(&path, &root.join("sbin").join(program))?;
        libraries.append(&mut self::libraries(&path)?);
    }
    for library in libraries {
        let to = root.join(library.strip_prefix("/").context("name a library")?);
        create(to.parent().unwrap_or(&root))?;
        copy(&library, &to)?;
    }
    let image = place.join("image");
    let pack = "cd \"$1\" && find . | busybox cpio -o -H newc 2>/dev/null | gzip -1 > \"$2\"";
    command::run(Command::new("sh").args(["-c", pack, "pack"]).arg(&root).arg(&image))?;
    Ok(image)
}

/// The modules that the machine needs, of those below `from`.
fn modules(from: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for name in MODULES {
        let path = from.join(name);
        if path.is_file() {
            found.push(path);
        } else if path.is_dir() {
            let entries = fs::read_dir(&path).with_context(|| format!("read {}", path.display()))?;
            let files = entries.filter_map(Result::ok).map(|entry| entry.path());
            found.extend(
                files.filter(|file| is_packed(file) || file.extension().is_some_and(|end| end == "ko")),
            );
        }
    }
    Ok(found)
}

fn is_packed(module: &Path) -> bool {
    module.extension().is_some_and(|end| end == "xz")
}

/// The libraries that a program is linked with.
fn libraries(program: &Path) -> Result<BTreeSet<PathBuf>> {
    let list = command::output(Command::new("ldd").arg(program))?;
    let paths = list.split_whitespace().filter(|word| word.starts_with('/') && !word.ends_with(':'));
    Ok(paths.map(PathBuf::from).collect())
}

/// Runs the machine, shows what it says, and judges it.
fn boot(kernel: &Path, image: &Path) -> Result<()> {
    println!("interop: starting Linux {} on an emulated processor", release(kernel)?);
    let vmlinuz = kernel.join("boot").join(format!("vmlinuz-{}", release(kernel)?));
    let mut machine = Command::new("timeout");
    machine.args([LIMIT, "qemu-system-x86_64", "-accel", "tcg"]);
    // Without cmpxchg16b, which QEMU 7.2 emulates wrongly.
    machine.args(["-cpu", "qemu64,-cx16", "-m", "2048", "-nographic", "-no-reboot"]);
    machine.arg("-kernel").arg(vmlinuz).arg("-initrd").arg(image);
    machine.args(["-append", "console=ttyS0 quiet panic=-1"]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut machine = machine.spawn().context("run qemu-system-x86_64")?;
    let output = machine.stdout.take().context("read what the machine says")?;
    let (mut good, mut bad, mut is_done) = (0, 0, false);
    for line in BufReader::new(output).split(b'\n') {
        let line = line.context("read what the machine says")?;
        let line = String::from_utf8_lossy(&line);
        let line = line.trim_end();
        if !line.is_empty() {
            println!("{line}");
        }
        good += u32::from(line.starts_with("ok "));
        bad += u32::from(line.starts_with("failed "));
        is_done |= line == "done";
    }
    machine.wait().context("wait for the machine's end")?;
    if bad != 0 || !is_done {
        bail!(
            "{bad} ways failed, and {good} went well; the machine came {}to its end",
            if is_done { "" } else { "not " }
        );
    }
    println!("interop: all {good} ways went well");
    Ok(())
}

fn create(directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).map(drop).with_context(|| format!("copy {} to {}", from.display(), to.display()))
}
