use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt, lchown};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use nix::{
    sys::stat::{Mode, fchmod},
    unistd::Group,
};
use tokio::net::{UnixListener, UnixSocket, UnixStream};

/// Clients that may wait until they are accepted.
const BACKLOG: u32 = 128;

/// The file of a listening socket: goes when this goes, unless somebody has put another one there.
pub(super) struct SocketFile {
    path: PathBuf,
    device_and_inode: (u64, u64),
}

impl SocketFile {
    /// Listens on `path`, for the owner alone (mode 0600), or also for a group (0660). Makes its directory when there is none,
    /// and takes the place of a socket that nobody answers on.
    pub(super) async fn listen(
        path: &Path,
        group: Option<&str>,
    ) -> anyhow::Result<(UnixListener, SocketFile)> {
        let group = group.map(group_id).transpose()?;
        if let Some(directory) = path.parent() {
            DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(directory)
                .with_context(|| format!("create the directory {}", directory.display()))?;
        }
        let context = || format!("listen on {}", path.display());
        let listener = match bind_private(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(path).await?;
                bind_private(path).with_context(context)?
            }
            bound => bound.with_context(context)?,
        };
        let device_and_inode = device_and_inode(path).with_context(context)?;
        let file = SocketFile { path: path.to_owned(), device_and_inode };
        if let Some(group) = group {
            share(path, group).with_context(|| {
                format!(
                    "give {} to the `socket-group` (under systemd: have it in SupplementaryGroups=)",
                    path.display()
                )
            })?;
        }
        Ok((listener, file))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if device_and_inode(&self.path).is_ok_and(|now| now == self.device_and_inode) {
            // It may be gone by now, and there is nobody left to tell.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn device_and_inode(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

/// Linux gives the file the mode that the socket has when it is bound: so it is never open to others, as it
/// would be until a later chmod, and no umask is changed under the feet of other threads.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let socket = UnixSocket::new_stream()?;
    fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR)?;
    socket.bind(path)?;
    socket.listen(BACKLOG)
}

fn group_id(name: &str) -> anyhow::Result<u32> {
    let group = Group::from_name(name).with_context(|| format!("look up the `socket-group` \"{name}\""))?;
    let group = group.with_context(|| {
        format!(
            "there is no group \"{name}\": make it (`groupadd {name}`), or configure another `socket-group`"
        )
    })?;
    Ok(group.gid.as_raw())
}

/// First whose it is, then what they may: it is never open to another group.
fn share(path: &Path, group: u32) -> io::Result<()> {
    lchown(path, None, Some(group))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o660))
}

async fn remove_stale(path: &Path) -> anyhow::Result<()> {
    let shown = path.display();
    let is_socket = fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    if !is_socket {
        bail!("{shown} is there already and is not a socket: move it away, or configure another `socket`");
    }
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).with_context(|| format!("remove the stale socket {shown}"))
        }
        // Gone in the meantime.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // Connected, or too busy to answer: alive.
        _ => bail!("another balancer answers on {shown}: stop it, or configure another `socket`"),
    }
}
