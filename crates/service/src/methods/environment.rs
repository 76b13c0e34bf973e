//! `environment/*`.

use std::collections::BTreeMap;
use std::path::Path;

use exec_server_executor::host;
use exec_server_protocol::environment::{EnvironmentInfo, EnvironmentStatus, Readiness, Shell};
use exec_server_protocol::{NoParams, PathUri};
use sha2::{Digest as _, Sha256};

use crate::config::ExecServerConfig;
use crate::dispatch::{Call, EXTENSIONS};

/// What this machine is like; asked once, at start.
pub(crate) fn describe(config: &ExecServerConfig) -> EnvironmentInfo {
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
        provider_id: host::machine_id().map(|id| provider_id(&id)),
        cwd: config.cwd.as_deref().and_then(uri),
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
        capabilities: BTreeMap::from([
            ("fileWriteStreaming".to_owned(), true),
            ("fsWatchMissing".to_owned(), true),
            ("sandboxedFileStreaming".to_owned(), true),
        ]),
        extensions: EXTENSIONS.iter().map(|&name| name.to_owned()).collect(),
    }
}

/// A name for this machine that does not give its identity away.
fn provider_id(machine: &str) -> String {
    let mut hash = Sha256::new();
    hash.update(b"exec-server provider\0");
    hash.update(machine.as_bytes());
    let hex: String = hash
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("sha256:{hex}")
}

pub(crate) fn info(call: Call<'_>, _: NoParams) {
    let answer = call.phase.ready("environment info");
    let info = call.connection.server.info();
    call.responder.send(answer.map(|_| info));
}

pub(crate) fn status(call: Call<'_>, _: NoParams) {
    let answer = call.phase.ready("environment status");
    call.responder.send(answer.map(|_| EnvironmentStatus {
        status: Readiness::Ready,
    }));
}
