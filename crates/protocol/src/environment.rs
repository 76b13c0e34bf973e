//! `environment/*`: what the machine behind the server is like.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::method::method_types;
use crate::path::PathUri;

method_types! {
    /// `environment/info`: the machine, its shell and what the server can do.
    Info;
    /// `environment/status`: whether the environment can be used.
    Status;
    /// `environmentConfig/read`: parts of the files that configure clients on this machine.
    ConfigRead;
}

/// Params of [`ConfigRead`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigReadParams {
    /// Where the client works; it need not exist.
    pub cwd: PathUri,
    /// Which keys of the configuration are wanted, each as the keys that lead to it.
    pub config_paths: Vec<Vec<String>>,
    /// Which keys of the requirements.
    pub requirements_paths: Vec<Vec<String>>,
}

/// Result of [`ConfigRead`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigReadResult {
    /// The home directory of the server's user.
    pub user_home_dir: Option<PathUri>,
    /// Where that user's configuration is.
    pub codex_home_dir: PathUri,
    /// What the machine calls itself.
    pub hostname: Option<String>,
    /// What was wanted of the configuration.
    pub config: ConfigStack,
    /// What was wanted of the requirements.
    pub requirements: ConfigStack,
}

/// What several files say of the same keys.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigStack {
    /// Files that have something to say, those that win last.
    pub layers: Vec<ConfigLayer>,
    /// How many of them come before what a client is configured with from elsewhere.
    pub cloud_insertion_index: usize,
}

/// What one file says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigLayer {
    /// Which kind of file, and where it is; for people.
    pub source: String,
    /// What relative paths in it are relative to.
    pub base_dir: PathUri,
    /// What was wanted of it, as TOML.
    pub toml: String,
}

/// Result of [`Status`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnvironmentStatus {
    /// How the environment is.
    pub status: Readiness,
    /// The server is shutting down: it starts nothing more and ends what runs. Absent otherwise.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
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
