//! `environment/*`: what the machine behind the server is like.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::method::{NoParams, methods};
use crate::path::PathUri;

methods! {
    /// `environment/info`: the machine, its shell and what the server can do.
    Info = "environment/info" (NoParams) -> EnvironmentInfo;
    /// `environment/status`: whether the environment can be used.
    Status = "environment/status" (NoParams) -> EnvironmentStatus;
}

/// Result of [`Status`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnvironmentStatus {
    /// How the environment is.
    pub status: Readiness,
}

/// The states that `environment/status` knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Readiness {
    /// It can be used.
    Ready,
}

/// Result of [`Info`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnvironmentInfo {
    /// The user's shell.
    pub shell: Shell,
    /// Version of the server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub executor_version: Option<String>,
    /// An opaque name for this machine, the same across restarts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider_id: Option<String>,
    /// The server's own working directory.
    #[serde(default)]
    pub cwd: Option<PathUri>,
    /// The home directory of the server's user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_home_dir: Option<PathUri>,
    /// The operating system, in Rust's spelling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform_os: Option<String>,
    /// Directories that the server puts before every `PATH`; ours adds none.
    #[serde(default)]
    pub prepend_path_dirs: Vec<PathUri>,
    /// `TMPDIR`, when it is set.
    #[serde(default)]
    pub temporary_directories: Vec<PathUri>,
    /// Where temporary files go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temp_dir: Option<PathUri>,
    /// Compatible features, by name; missing means no.
    #[serde(default)]
    pub capabilities: BTreeMap<String, bool>,
    /// Extension methods and `method#field`s that this server implements.
    #[serde(default)]
    pub extensions: Vec<String>,
}

/// A shell and where it lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shell {
    /// `bash`, `zsh`, `sh`, `powershell` or `cmd`.
    pub name: String,
    /// Its native path.
    pub path: String,
}
