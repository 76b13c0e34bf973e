//! Environments that tools run in.

use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use exec_server_client::fs::uri;
use exec_server_client::without_numbers;
use exec_server_client::{BoxFuture, ExecBackend, ExecServerError, ExecutorFileSystem};
use exec_server_protocol::PathUri;
use exec_server_protocol::sandbox::{Denial, DenialKind, Sandbox};

use crate::unified::denied_operation;

/// A machine, or a working directory on one, with the settings that tools need.
#[derive(Debug, Clone)]
pub struct ToolEnvironment {
    /// Runs processes in the environment.
    pub backend: Arc<dyn ExecBackend>,
    /// Accesses files of the environment.
    pub files: Arc<dyn ExecutorFileSystem>,
    /// Path of the shell that runs commands.
    pub shell: String,
    /// Base of relative paths.
    pub cwd: PathBuf,
    /// Sandbox policy of all processes and file operations.
    pub sandbox: Option<Sandbox>,
}

impl ToolEnvironment {
    /// Resolves a path against the working directory and removes `.` and `..`.
    pub(crate) fn path(&self, path: &str) -> Result<PathUri, ToolEnvironmentError> {
        let joined = self.cwd.join(path);
        let mut plain = PathBuf::new();
        for part in joined.components() {
            match part {
                Component::CurDir => {}
                Component::ParentDir => {
                    plain.pop();
                }
                part => plain.push(part),
            }
        }
        uri(&plain).map_err(|error| ToolEnvironmentError::Path {
            path: path.to_owned(),
            message: error.to_string(),
        })
    }

    /// Path for display: relative to the working directory if it is below it.
    pub(crate) fn shown(&self, path: &PathUri) -> String {
        let Ok(native) = path.to_native() else {
            return path.to_string();
        };
        let below = native.strip_prefix(&self.cwd).ok();
        let below = below.filter(|below| *below != Path::new(""));
        below.unwrap_or(&native).display().to_string()
    }
}

impl ToolEnvironment {
    /// Describes a failed file operation for the model: with the path, without error numbers, and
    /// with the sandbox if that is the cause.
    pub(crate) fn failure(&self, path: &PathUri, error: &ExecServerError) -> String {
        /// Errors of the system that a sandbox causes.
        const DENIED: [&str; 3] = [
            "Read-only file system",
            "Permission denied",
            "Operation not permitted",
        ];
        let message = match error {
            ExecServerError::Server { message, .. } => message.clone(),
            other => other.to_string(),
        };
        let message = without_numbers(&message);
        // The server names the path on which the operation failed, which may be a parent.
        let Some((cause, failed)) = message
            .strip_suffix('`')
            .and_then(|message| message.rsplit_once(": `"))
        else {
            let is_complete = message.contains('`') || message.starts_with("invalid ");
            return match is_complete {
                true => message,
                false => format!("`{}`: {message}", self.shown(path)),
            };
        };
        let failed = match Path::new(failed).strip_prefix(&self.cwd) {
            Ok(below) if below != Path::new("") => below.display().to_string(),
            _ => failed.to_owned(),
        };
        if self.sandbox.is_some() && DENIED.contains(&cause) {
            let denied = denied_operation(&Denial {
                kind: DenialKind::FileSystem,
                path: Some(failed),
                address: None,
                syscall: None,
            });
            return format!("Sandbox: denied {denied} ({cause})");
        }
        format!("`{failed}`: {cause}")
    }
}

/// Why an environment or a path in it cannot be used.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ToolEnvironmentError {
    /// No environment has this id.
    #[error("unknown environment `{id}`; known are {known}")]
    Unknown {
        /// The requested id.
        id: String,
        /// The ids that exist.
        known: String,
    },
    /// The environment cannot be reached.
    #[error("cannot reach environment `{id}`: {message}")]
    Unreachable {
        /// Id of the environment.
        id: String,
        /// The cause.
        message: String,
    },
    /// The path is invalid.
    #[error("invalid path `{path}`: {message}")]
    Path {
        /// The given path.
        path: String,
        /// Description of the error.
        message: String,
    },
}

/// Environments that tools can choose from.
pub trait ToolEnvironments: Send + Sync + std::fmt::Debug {
    /// Ids of the environments; the first is the default.
    fn ids(&self) -> Vec<String>;

    /// Describes what the sandbox of all environments allows, in sentences for the model.
    fn policy(&self) -> Option<String> {
        None
    }

    /// Returns an environment and connects to it if necessary.
    ///
    /// # Errors
    ///
    /// If no environment has this id, or it cannot be reached.
    fn get<'a>(
        &'a self,
        id: &'a str,
    ) -> BoxFuture<'a, Result<Arc<ToolEnvironment>, ToolEnvironmentError>>;
}

/// A set of one environment.
#[derive(Debug, Clone)]
pub struct SingleEnvironment {
    /// Id of the environment.
    pub id: String,
    /// The environment.
    pub environment: Arc<ToolEnvironment>,
}

impl ToolEnvironments for SingleEnvironment {
    fn ids(&self) -> Vec<String> {
        vec![self.id.clone()]
    }

    fn get<'a>(
        &'a self,
        id: &'a str,
    ) -> BoxFuture<'a, Result<Arc<ToolEnvironment>, ToolEnvironmentError>> {
        Box::pin(async move {
            if id == self.id {
                return Ok(Arc::clone(&self.environment));
            }
            Err(ToolEnvironmentError::Unknown {
                id: id.to_owned(),
                known: format!("`{}`", self.id),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use exec_server_client::executor::{Executor, ExecutorConfig};
    use exec_server_client::{LocalBackend, LocalFileSystem};

    use super::*;

    #[test]
    fn relative_paths_resolve_against_the_working_directory() {
        let executor = Executor::new(ExecutorConfig::default()).unwrap();
        let environment = ToolEnvironment {
            backend: Arc::new(LocalBackend::new(executor)),
            files: Arc::new(LocalFileSystem::new()),
            shell: "/bin/sh".to_owned(),
            cwd: PathBuf::from("/srv/app"),
            sandbox: None,
        };
        for (path, uri, shown) in [
            (".", "file:///srv/app", "/srv/app"),
            ("a b", "file:///srv/app/a%20b", "a b"),
            ("./x/../y", "file:///srv/app/y", "y"),
            ("../other", "file:///srv/other", "/srv/other"),
            ("../../../../etc", "file:///etc", "/etc"),
            ("/tmp/z", "file:///tmp/z", "/tmp/z"),
        ] {
            let found = environment.path(path).unwrap();
            assert_eq!(found.as_str(), uri, "{path}");
            assert_eq!(environment.shown(&found), shown, "{path}");
        }
        assert!(environment.path("a\0b").is_err());
    }
}
