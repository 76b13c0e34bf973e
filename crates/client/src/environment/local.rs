//! What this machine is like.

use std::path::Path;

use exec_server_executor::{ExecutorConfig, host};
use exec_server_protocol::PathUri;
use exec_server_protocol::environment::{EnvironmentInfo, Shell};

/// Describes this machine as a server on it would, but for what only servers offer.
pub(super) fn describe(config: &ExecutorConfig) -> EnvironmentInfo {
    let account = host::account();
    let (name, path) = host::shell(account.as_ref());
    let uri = |path: &Path| PathUri::from_native(path).ok();
    let tmpdir = config
        .environment
        .get("TMPDIR")
        .filter(|dir| !dir.is_empty());
    EnvironmentInfo {
        shell: Shell {
            name,
            path: path.to_string_lossy().into_owned(),
        },
        executor_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        provider_id: None,
        cwd: None,
        user_home_dir: host::home(&config.environment, account.as_ref())
            .as_deref()
            .and_then(uri),
        platform_os: Some(std::env::consts::OS.to_owned()),
        prepend_path_dirs: Vec::new(),
        temporary_directories: tmpdir
            .and_then(|dir| uri(Path::new(dir)))
            .into_iter()
            .collect(),
        temp_dir: uri(Path::new(tmpdir.map_or("/tmp", String::as_str))),
        capabilities: Default::default(),
        extensions: Vec::new(),
    }
}
