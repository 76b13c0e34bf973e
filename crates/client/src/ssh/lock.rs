//! Private socket directory and its lock.

use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use exec_server_transport::private_file::{make_directory, open_lock};

use super::SshError;

/// Maximum length of a socket path that every kernel accepts (104 bytes), minus the suffix that ssh
/// appends while it creates a socket.
const MAX_SOCKET_PATH: usize = 104 - 18;

/// Maximum length of a socket file name in this directory.
const NAME_BYTES: usize = 16 + 1 + 8 + 5;

/// Creates the directory for sockets, or verifies that only this user can access an existing one.
pub(super) fn private_directory(path: &Path) -> Result<(), SshError> {
    let refuse = |reason: String| SshError::Directory {
        path: path.to_owned(),
        reason,
    };
    if !path.is_absolute() {
        return Err(refuse("it is no absolute path".to_owned()));
    }
    if path.as_os_str().len() + 1 + NAME_BYTES > MAX_SOCKET_PATH {
        return Err(refuse("the path is too long for a socket".to_owned()));
    }
    make_directory(path).map_err(|error| refuse(error.to_string()))?;
    let found = path
        .symlink_metadata()
        .map_err(|error| refuse(error.to_string()))?;
    let own = found.uid() == rustix::process::geteuid().as_raw();
    match found.is_dir() && own && found.mode() & 0o077 == 0 {
        true => Ok(()),
        false => Err(refuse(
            "it must be a directory that only this user can use (mode 0700)".to_owned(),
        )),
    }
}

/// Waits for the setup lock, which is released by dropping the file.
///
/// There is no time limit, because the holder of the lock may be uploading a binary. Cancel safe.
pub(super) async fn hold(path: &Path) -> Result<File, SshError> {
    /// Polling interval. Only programs that connect at the same time as the first one wait here.
    const PERIOD: Duration = Duration::from_millis(20);
    let refuse = |reason: String| SshError::Directory {
        path: path.to_owned(),
        reason,
    };
    let file = open_lock(path).map_err(|error| refuse(error.to_string()))?;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => tokio::time::sleep(PERIOD).await,
            Err(TryLockError::Error(error)) => return Err(refuse(error.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn private_directory_rejects_shared_linked_relative_and_long_paths() {
        let home = tempfile::tempdir().unwrap();
        let own = home.path().join("own");
        private_directory(&own).unwrap();
        private_directory(&own).unwrap();
        std::fs::set_permissions(&own, Permissions::from_mode(0o755)).unwrap();
        assert!(private_directory(&own).is_err());
        std::fs::set_permissions(&own, Permissions::from_mode(0o700)).unwrap();
        let link = home.path().join("link");
        std::os::unix::fs::symlink(&own, &link).unwrap();
        assert!(private_directory(&link).is_err());
        assert!(private_directory(Path::new("relative")).is_err());
        let long = home.path().join("x".repeat(100));
        assert!(private_directory(&long).is_err() && !long.exists());
    }

    #[tokio::test]
    async fn hold_waits_until_the_lock_is_released() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("lock");
        let first = hold(&path).await.unwrap();
        let second = tokio::spawn({
            let path = path.clone();
            async move { hold(&path).await.map(drop) }
        });
        tokio::task::yield_now().await;
        assert!(!second.is_finished());
        drop(first);
        second.await.unwrap().unwrap();
    }
}
