//! What the arguments and the environment amount to.

use std::collections::BTreeMap;

use exec_server_service::ExecServerConfig;

use super::args::ServeArgs;

/// The settings of a server.
pub(super) fn server(args: &ServeArgs) -> ExecServerConfig {
    let mut config = ExecServerConfig {
        environment: environment(),
        cwd: std::env::current_dir().ok(),
        ..ExecServerConfig::default()
    };
    if let Some(count) = args.concurrent_requests {
        config.concurrent_requests = count.get();
    }
    config
}

/// This program's environment; variables that are not text cannot be told to anyone.
pub(super) fn environment() -> BTreeMap<String, String> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}
