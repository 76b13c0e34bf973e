//! `ssh://` servers: client options from flags and environment.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::Context as _;
pub(super) use exec_server_client::ssh::SshTarget as Target;
use exec_server_client::ssh::{SshOptions, SshUrl, UploadProgressFn, own_executable};
use rustix::termios::isatty;

use super::args::SshArgs;
use super::error::notice;
use super::settings;
use super::table::bytes;

/// Scheme of the URLs of ssh environments.
pub(super) const SCHEME: &str = "ssh://";

/// Variable with the executable to install on other machines.
const BINARY_VARIABLE: &str = "EXEC_SERVER_LOCAL_BINARY";

/// Maximum length of the path of the socket directory; `SshHost::new` refuses longer ones.
const MAX_DIRECTORY: usize = 55;

/// Connection options of a URL, with the flags that apply to it.
pub(super) fn at_url(url: &str, args: &SshArgs) -> anyhow::Result<Target> {
    let url: SshUrl = url.parse()?;
    let mut target = Target::new(SshOptions::new(url, directory()));
    target.ssh.options.clone_from(&args.ssh_option);
    target.ssh.remote_binary.clone_from(&args.remote_binary);
    adapt(target, args)
}

/// Adds the options of this program, which can be installed on other machines and may have a
/// terminal.
pub(super) fn adapt(mut target: Target, args: &SshArgs) -> anyhow::Result<Target> {
    let ssh = &mut target.ssh;
    ssh.directory = directory();
    ssh.interactive = isatty(rustix::stdio::stderr()) && !args.no_install;
    ssh.installs = !args.no_install;
    ssh.version = env!("CARGO_PKG_VERSION").to_owned();
    ssh.notice = Some(Arc::new(|text: &str| notice(text)));
    let named = args.local_binary.clone();
    let named = named.or_else(|| settings::variable(BINARY_VARIABLE).map(PathBuf::from));
    ssh.local_binary = match (&ssh.remote_binary, named) {
        (Some(_), _) => None,
        (None, Some(path)) => Some(path),
        (None, None) => Some(own_executable().context("cannot find the path of this program")?),
    };
    ssh.other_binaries = match args.local_binary.as_deref().and_then(Path::parent) {
        Some(directory) => Some(directory.to_owned()),
        None => settings::program().and_then(|path| Some(path.parent()?.to_owned())),
    };
    if ssh.interactive {
        ssh.progress = Some(upload_progress());
    }
    target.options.client_name = format!("exec-server {}", env!("CARGO_PKG_VERSION"));
    Ok(target)
}

/// A line on the terminal that shows how far an installation is, if that takes a while.
fn upload_progress() -> UploadProgressFn {
    /// Shorter installations show nothing.
    const PATIENCE: Duration = Duration::from_secs(2);
    let begun = OnceLock::new();
    Arc::new(move |sent, all| {
        let elapsed = begun.get_or_init(Instant::now).elapsed();
        if elapsed < PATIENCE {
            return;
        }
        let mut stderr = std::io::stderr().lock();
        let _ = match sent < all {
            true => {
                let rate = sent as f64 / elapsed.as_secs_f64();
                let left = (all - sent) as f64 / rate.max(1.0);
                write!(
                    stderr,
                    "\r\x1b[K{:3}%  {} of {}  {}/s  {}:{:02} left",
                    sent * 100 / all.max(1),
                    bytes(sent),
                    bytes(all),
                    bytes(rate as u64),
                    left as u64 / 60,
                    left as u64 % 60,
                )
            }
            false => write!(stderr, "\r\x1b[K"),
        };
        let _ = stderr.flush();
    })
}

/// Directory of this program's sockets: that of the login session, or one in a directory that every
/// user can write.
fn directory() -> PathBuf {
    let fits = |path: &PathBuf| path.as_os_str().len() <= MAX_DIRECTORY;
    settings::runtime_directory()
        .filter(fits)
        .unwrap_or_else(exec_server_client::ssh::default_directory)
}
