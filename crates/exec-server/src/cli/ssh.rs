//! `ssh://` servers: client options from flags and environment.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
pub(super) use exec_server_client::ssh::SshTarget as Target;
use exec_server_client::ssh::{SshOptions, SshUrl, own_executable};
use rustix::termios::isatty;

use super::args::SshArgs;
use super::error::notice;
use super::settings;

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
    ssh.interactive = isatty(rustix::stdio::stderr());
    ssh.version = env!("CARGO_PKG_VERSION").to_owned();
    ssh.notice = Some(Arc::new(|text: &str| notice(text)));
    let named = args.local_binary.clone();
    let named = named.or_else(|| settings::variable(BINARY_VARIABLE).map(PathBuf::from));
    ssh.local_binary = match (&ssh.remote_binary, named) {
        (Some(_), _) => None,
        (None, Some(path)) => Some(path),
        (None, None) => Some(own_executable().context("cannot find the path of this program")?),
    };
    target.options.client_name = format!("exec-server {}", env!("CARGO_PKG_VERSION"));
    Ok(target)
}

/// Directory of this program's sockets: that of the login session, or one in a directory that every
/// user can write.
fn directory() -> PathBuf {
    let fits = |path: &PathBuf| path.as_os_str().len() <= MAX_DIRECTORY;
    settings::runtime_directory()
        .filter(fits)
        .unwrap_or_else(exec_server_client::ssh::default_directory)
}
