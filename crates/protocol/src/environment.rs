//! `environment/*`: description and configuration of the server's machine.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::method::method_types;
use crate::path::PathUri;

method_types! {
    /// `environment/info`: the machine, its shell and the server's features.
    Info;
    /// `environment/status`: readiness of the environment.
    Status;
    /// `environmentConfig/read`: parts of the files that configure clients on this machine.
    ConfigRead;
}

/// Params of [`ConfigRead`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigReadParams {
    /// The client's working directory; it need not exist.
    pub cwd: PathUri,
    /// Requested keys of the configuration, each as a path of keys.
    pub config_paths: Vec<Vec<String>>,
    /// Requested keys of the requirements, each as a path of keys.
    pub requirements_paths: Vec<Vec<String>>,
}

/// Result of [`ConfigRead`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigReadResult {
    /// The home directory of the server's user.
    pub user_home_dir: Option<PathUri>,
    /// Directory of that user's Codex configuration.
    pub codex_home_dir: PathUri,
    /// Hostname of the machine.
    pub hostname: Option<String>,
    /// Requested keys of the configuration.
    pub config: ConfigStack,
    /// Requested keys of the requirements.
    pub requirements: ConfigStack,
}

/// Values of the same keys in several files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigStack {
    /// Files that contain a requested key, in increasing precedence.
    pub layers: Vec<ConfigLayer>,
    /// Number of layers that have lower precedence than the client's cloud configuration.
    pub cloud_insertion_index: usize,
}

/// Requested keys of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConfigLayer {
    /// Kind and location of the file, for users.
    pub source: String,
    /// Directory to which relative paths in the file refer.
    pub base_dir: PathUri,
    /// The requested keys, as TOML.
    pub toml: String,
}

/// Result of [`Status`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusResult {
    /// Readiness of the environment.
    pub status: StatusValue,
    /// The server is shutting down: it starts nothing more and ends what runs. Absent otherwise.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draining: bool,
}

/// Values of `environment/status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StatusValue {
    /// Ready for use.
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
    /// Opaque id of this machine that does not change across restarts.
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
    /// Directories that the server prepends to every `PATH`; this server prepends none.
    #[serde(default)]
    pub prepend_path_dirs: Vec<PathUri>,
    /// `TMPDIR`, if it is set.
    #[serde(default)]
    pub temporary_directories: Vec<PathUri>,
    /// Directory for temporary files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temp_dir: Option<PathUri>,
    /// Compatible features by name; an absent feature is not supported.
    #[serde(default)]
    pub capabilities: BTreeMap<String, bool>,
    /// Extension methods and `method#field`s that this server implements.
    #[serde(default)]
    pub extensions: Vec<String>,
}

/// A shell and its path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shell {
    /// `bash`, `zsh`, `sh`, `powershell` or `cmd`.
    pub name: String,
    /// Native path of the shell.
    pub path: String,
}
