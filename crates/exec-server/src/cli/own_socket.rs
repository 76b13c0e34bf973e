//! Socket of this user's own server: `serve` listens on it, and clients without a URL connect to
//! it.
//!
//! The socket is in a directory that only this user can access.

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use exec_server_transport::private_file::make_directory;
use rustix::fs::{FileType, lstat};

use super::settings;

/// Maximum length of the socket's path, without the suffix that a listener adds temporarily.
const MAX_PATH: usize = 107 - ".1234567890.tmp".len();

const NAME: &str = "serve.sock";

/// Directory of the socket: in the runtime directory of this login, or in `/tmp`.
fn directory() -> PathBuf {
    let fits = |path: &PathBuf| path.as_os_str().len() + 1 + NAME.len() <= MAX_PATH;
    settings::runtime_directory()
        .filter(fits)
        .unwrap_or_else(|| {
            let uid = rustix::process::geteuid().as_raw();
            PathBuf::from(format!("/tmp/exec-server-{uid}"))
        })
}

/// Whether only this user can use the directory.
fn is_private(directory: &PathBuf) -> bool {
    lstat(directory).is_ok_and(|found| {
        let is_directory = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
        let is_own = found.st_uid == rustix::process::geteuid().as_raw();
        is_directory && is_own && found.st_mode & 0o077 == 0
    })
}

/// Returns the URL to listen on, and creates the directory.
pub(super) fn to_listen_on() -> anyhow::Result<String> {
    let directory = directory();
    make_directory(&directory).with_context(|| format!("cannot use `{}`", directory.display()))?;
    if !is_private(&directory) {
        bail!(
            "`{}` must be a directory that only this user can use (mode 0700); or pass --listen",
            directory.display()
        );
    }
    Ok(url(&directory))
}

/// URL of this user's server, if its socket exists.
pub(super) fn found() -> Option<String> {
    let directory = directory();
    let found = lstat(directory.join(NAME)).ok()?;
    let is_socket = FileType::from_raw_mode(found.st_mode) == FileType::Socket;
    (is_socket && is_private(&directory)).then(|| url(&directory))
}

fn url(directory: &std::path::Path) -> String {
    format!("unix://{}", directory.join(NAME).display())
}
