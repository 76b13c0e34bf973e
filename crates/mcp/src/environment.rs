//! Where tools work.

use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use exec_server_client::fs::uri;
use exec_server_client::{BoxFuture, ExecBackend, ExecutorFileSystem};
use exec_server_protocol::PathUri;
use exec_server_protocol::sandbox::Sandbox;

/// A machine, or a place on one, with what tools need to know of it.
#[derive(Debug, Clone)]
pub struct Environment {
    /// Its processes.
    pub backend: Arc<dyn ExecBackend>,
    /// Its files.
    pub files: Arc<dyn ExecutorFileSystem>,
    /// The shell that commands are for, as a path there.
    pub shell: String,
    /// Where relative paths begin.
    pub cwd: PathBuf,
    /// The policy that everything runs under.
    pub sandbox: Option<Sandbox>,
}

impl Environment {
    /// A path there: as it is, or from the working directory on, without `.` and `..`.
    pub(crate) fn path(&self, path: &str) -> Result<PathUri, EnvironmentError> {
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
        uri(&plain).map_err(|error| EnvironmentError::Path {
            path: path.to_owned(),
            message: error.to_string(),
        })
    }

    /// How a path is shown: from the working directory on where it is below.
    pub(crate) fn shown(&self, path: &PathUri) -> String {
        let Ok(native) = path.to_native() else {
            return path.to_string();
        };
        let below = native.strip_prefix(&self.cwd).ok();
        let below = below.filter(|below| *below != Path::new(""));
        below.unwrap_or(&native).display().to_string()
    }
}

/// Why there is no environment, or no such path in it.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentError {
    /// Nobody knows it.
    #[error("unknown environment `{id}`; there are {known}")]
    Unknown {
        /// What was asked for.
        id: String,
        /// What there is.
        known: String,
    },
    /// It cannot be reached.
    #[error("cannot reach environment `{id}`: {message}")]
    Unreachable {
        /// Which one.
        id: String,
        /// Why.
        message: String,
    },
    /// Not a path.
    #[error("`{path}` is no path: {message}")]
    Path {
        /// What was given.
        path: String,
        /// What is wrong with it.
        message: String,
    },
}

/// The environments that tools can choose from.
pub trait Environments: Send + Sync + std::fmt::Debug {
    /// Their ids; the first is used where none is named.
    fn ids(&self) -> Vec<String>;

    /// One of them, connected to if need be.
    ///
    /// # Errors
    ///
    /// When there is none of that id, or it cannot be reached.
    fn get<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<Arc<Environment>, EnvironmentError>>;
}

/// A single environment.
#[derive(Debug, Clone)]
pub struct OneEnvironment {
    /// What it is called.
    pub id: String,
    /// What it is.
    pub environment: Arc<Environment>,
}

impl Environments for OneEnvironment {
    fn ids(&self) -> Vec<String> {
        vec![self.id.clone()]
    }

    fn get<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<Arc<Environment>, EnvironmentError>> {
        Box::pin(async move {
            if id == self.id {
                return Ok(Arc::clone(&self.environment));
            }
            Err(EnvironmentError::Unknown {
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
    fn paths_begin_at_the_working_directory() {
        let executor = Executor::new(ExecutorConfig::default()).unwrap();
        let environment = Environment {
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
