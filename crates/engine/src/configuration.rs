//! Codex configuration files: layers, trusted projects and key selection.
//!
//! Decides the order of the files, which projects are trusted, and how keys are selected. Does not
//! depend on a client: file names and directories are settings, and the values are not interpreted
//! here.

use std::fmt;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use exec_server_executor::fs::{FsError, SymlinkPolicy, open_file};
use exec_server_protocol::PathUri;
use exec_server_protocol::environment::{
    ConfigLayer, ConfigReadParams, ConfigReadResult, ConfigStack,
};
use exec_server_protocol::limits::{MAX_CONFIG_BYTES, MAX_CONFIG_PATHS};
use toml::{Table, Value};

use crate::{ApiError, host};

/// Maximum number of directories between the root of a project and `cwd`.
const MAX_PROJECT_DEPTH: usize = 128;

/// Locations and names of the configuration files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigFiles {
    /// The system-wide directory.
    pub system: PathBuf,
    /// The user's directory.
    pub home: PathBuf,
    /// Name of the configuration file in the system, user and project directories.
    pub config: String,
    /// Name of the system-wide file with requirements, which the configuration cannot override.
    pub requirements: String,
    /// Name of the system-wide configuration file that overrides all others.
    pub managed: String,
    /// Name of the directory that holds the configuration of a project.
    pub project_directory: String,
    /// Name of the entry that marks the root of a project.
    pub project_marker: String,
}

impl ConfigFiles {
    /// The files of Codex, with `home` as the user's directory.
    pub fn codex(home: PathBuf) -> Self {
        Self {
            system: "/etc/codex".into(),
            home,
            config: "config.toml".to_owned(),
            requirements: "requirements.toml".to_owned(),
            managed: "managed_config.toml".to_owned(),
            project_directory: ".codex".to_owned(),
            project_marker: ".git".to_owned(),
        }
    }

    /// Checks the params of `environmentConfig/read`, and returns the directory whose
    /// configuration is read.
    ///
    /// # Errors
    ///
    /// When there is no key or there are too many, or the directory is not one of this machine.
    pub fn check(params: &ConfigReadParams) -> Result<PathBuf, ApiError> {
        let ConfigReadParams {
            cwd,
            config_paths,
            requirements_paths,
        } = params;
        let paths = || config_paths.iter().chain(requirements_paths);
        let count = paths().count();
        let message = if count == 0 {
            "at least one config or requirements path is required".to_owned()
        } else if paths().any(Vec::is_empty) {
            "TOML paths must contain at least one key segment".to_owned()
        } else if count > MAX_CONFIG_PATHS {
            format!("{count} paths exceed the limit of {MAX_CONFIG_PATHS}")
        } else {
            return cwd.to_native().map_err(|error| {
                let message = format!("cwd URI `{cwd}` is not valid on this host: {error}");
                ApiError::invalid_params(message)
            });
        };
        Err(ApiError::invalid_params(message))
    }

    /// Reads what `environmentConfig/read` asks for. `cwd` is the directory that [`Self::check`]
    /// has returned; `user_home_dir` is reported to the client. Blocks on disk IO.
    ///
    /// # Errors
    ///
    /// When a file exists and cannot be read or parsed.
    pub fn read(
        &self,
        cwd: &Path,
        params: &ConfigReadParams,
        user_home_dir: Option<PathUri>,
    ) -> Result<ConfigReadResult, ApiError> {
        let failed = |error: ConfigError| match error {
            // The file belongs to the server.
            ConfigError::Refused(refusal) => ApiError::from(refusal),
            error => ApiError::internal(format!("failed to load executor-local config: {error}")),
        };
        let home = PathUri::from_native(&self.home);
        Ok(ConfigReadResult {
            user_home_dir,
            codex_home_dir: home.map_err(|error| ApiError::internal(error.to_string()))?,
            hostname: host::name(),
            config: self
                .read_config(cwd, &params.config_paths)
                .map_err(failed)?,
            requirements: self
                .read_requirements(&params.requirements_paths)
                .map_err(failed)?,
        })
    }

    /// The configured values of these keys for a client that works in `cwd`.
    ///
    /// Blocks on disk IO.
    ///
    /// # Errors
    ///
    /// When a file exists and cannot be read or parsed; the error names the location.
    fn read_config(&self, cwd: &Path, keys: &[Vec<String>]) -> Result<ConfigStack, ConfigError> {
        if keys.is_empty() {
            return Ok(ConfigStack::default());
        }
        let mut stack = LayerStack::new(keys);
        stack.add("system", &self.system.join(&self.config))?;
        stack.mark();
        let user = stack.add("user", &self.home.join(&self.config))?;
        for directory in self.trusted(cwd, user.as_ref()) {
            let folder = directory.join(&self.project_directory);
            // The user's own directory may also be a project directory: it is read only once.
            if folder != self.home {
                stack.add("project", &folder.join(&self.config))?;
            }
        }
        stack.add("managed", &self.system.join(&self.managed))?;
        Ok(stack.stack)
    }

    /// The requirements for these keys.
    ///
    /// Blocks on disk IO.
    ///
    /// # Errors
    ///
    /// Same as [`ConfigFiles::read_config`].
    fn read_requirements(&self, keys: &[Vec<String>]) -> Result<ConfigStack, ConfigError> {
        if keys.is_empty() {
            return Ok(ConfigStack::default());
        }
        let mut stack = LayerStack::new(keys);
        stack.add("system", &self.system.join(&self.requirements))?;
        Ok(stack.stack)
    }

    /// Directories whose configuration is used, from the root of the project down.
    fn trusted(&self, cwd: &Path, user: Option<&Table>) -> Vec<PathBuf> {
        let projects = user.and_then(|user| user.get("projects")?.as_table());
        let Some(projects) = projects else {
            return Vec::new();
        };
        let cwd = absolute(cwd);
        let top = cwd
            .ancestors()
            .take(MAX_PROJECT_DEPTH)
            .find(|directory| is_top(&directory.join(&self.project_marker)))
            .unwrap_or(&cwd);
        let verdict = |directory: &Path| -> Option<bool> {
            let real = directory.canonicalize().ok();
            let found = projects.iter().find(|(name, _)| {
                let name = Path::new(name);
                name == directory || real.as_deref() == Some(name)
            });
            let level = found?.1.get("trust_level")?.as_str()?;
            Some(level == "trusted")
        };
        let of_top = verdict(top).unwrap_or(false);
        let inside = cwd.ancestors().take_while(|path| path.starts_with(top));
        let mut trusted: Vec<PathBuf> = inside
            .filter(|directory| verdict(directory).unwrap_or(of_top))
            .map(Path::to_owned)
            .collect();
        trusted.reverse();
        trusted
    }
}

/// Whether a project begins here. Git does not accept an empty marker directory.
fn is_top(marker: &Path) -> bool {
    match marker.metadata() {
        Ok(metadata) if metadata.is_dir() => marker
            .read_dir()
            .is_ok_and(|mut entries| entries.next().is_some()),
        Ok(_) => true,
        Err(_) => false,
    }
}

/// Resolves links as far as the path exists, so that each project has one path.
fn absolute(path: &Path) -> PathBuf {
    let mut missing = Vec::new();
    for directory in path.ancestors() {
        if let Ok(mut real) = directory.canonicalize() {
            real.extend(missing.into_iter().rev());
            return real;
        }
        missing.extend(directory.file_name());
    }
    path.to_owned()
}

/// Errors of reading a configuration file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error from the system.
        source: io::Error,
    },
    /// The file must not be read for a client.
    #[error("{0}")]
    Refused(FsError),
    /// The file is too large.
    #[error("{path}: exceeds the limit of {MAX_CONFIG_BYTES} bytes", path = .0.display())]
    TooLarge(PathBuf),
    /// The path is not a regular file.
    #[error("{path}: not a regular file", path = .0.display())]
    NotAFile(PathBuf),
    /// The file is not valid TOML.
    #[error("{position}: {reason}")]
    Syntax {
        /// Position of the error.
        position: FilePosition,
        /// The parser's message.
        reason: String,
    },
    /// The path cannot be represented in the result.
    #[error("{path}: {reason}", path = path.display())]
    Path {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
}

/// Position in a file, counted from 1; columns are characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePosition {
    path: PathBuf,
    line: usize,
    column: usize,
}

impl FilePosition {
    fn at(path: &Path, text: &str, offset: usize) -> Self {
        let mut end = offset.min(text.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let before = &text[..end];
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        Self {
            path: path.to_owned(),
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    }
}

impl fmt::Display for FilePosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.path.display(), self.line, self.column)
    }
}

struct LayerStack<'a> {
    keys: Vec<&'a [String]>,
    stack: ConfigStack,
}

impl<'a> LayerStack<'a> {
    fn new(keys: &'a [Vec<String>]) -> Self {
        Self {
            keys: keys.iter().map(Vec::as_slice).collect(),
            stack: ConfigStack::default(),
        }
    }

    /// Adds the values that a file sets for the keys, if the file exists; returns the whole file.
    fn add(&mut self, kind: &str, path: &Path) -> Result<Option<Table>, ConfigError> {
        let Some(table) = read(path)? else {
            return Ok(None);
        };
        let selected = select(&table, &self.keys);
        if selected.is_empty() {
            return Ok(Some(table));
        }
        let unusable = |reason: String| ConfigError::Path {
            path: path.to_owned(),
            reason,
        };
        let base = path.parent().unwrap_or(path);
        self.stack.layers.push(ConfigLayer {
            source: format!("{kind} ({})", path.display()),
            base_dir: PathUri::from_native(base).map_err(|error| unusable(error.to_string()))?,
            toml: toml::to_string(&selected).map_err(|error| unusable(error.to_string()))?,
        });
        Ok(Some(table))
    }

    /// Values of the layers added after this call override all earlier layers.
    fn mark(&mut self) {
        self.stack.cloud_insertion_index = self.stack.layers.len();
    }
}

/// Reads a file, if it exists.
fn read(path: &Path) -> Result<Option<Table>, ConfigError> {
    let failed = |source| ConfigError::Io {
        path: path.to_owned(),
        source,
    };
    // Links are followed, except to files of the server: a client that may write files could
    // otherwise have the server read them.
    let file = match open_file(path, SymlinkPolicy::Follow) {
        Ok(file) => file,
        Err(FsError::Io { source, .. }) => {
            return match source.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(None),
                _ => Err(failed(source)),
            };
        }
        Err(FsError::NotAFile(_)) => return Err(ConfigError::NotAFile(path.to_owned())),
        Err(refusal) => return Err(ConfigError::Refused(refusal)),
    };
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(ConfigError::NotAFile(path.to_owned()));
    }
    let mut bytes = Vec::new();
    let most = MAX_CONFIG_BYTES as u64 + 1;
    file.take(most).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() > MAX_CONFIG_BYTES {
        return Err(ConfigError::TooLarge(path.to_owned()));
    }
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let good = error.utf8_error().valid_up_to();
            let text = String::from_utf8_lossy(&error.as_bytes()[..good]).into_owned();
            return Err(ConfigError::Syntax {
                position: FilePosition::at(path, &text, good),
                reason: "not UTF-8".to_owned(),
            });
        }
    };
    let table = text.parse::<Table>().map_err(|error| ConfigError::Syntax {
        position: FilePosition::at(path, &text, error.span().map_or(0, |span| span.start)),
        reason: error.message().replace('\n', ", "),
    })?;
    Ok(Some(table))
}

/// The parts of a table that these keys select. If a key path leads through a value that is not a
/// table, that value is returned.
fn select(table: &Table, keys: &[&[String]]) -> Table {
    let mut selected = Table::new();
    for key in keys {
        let Some((first, _)) = key.split_first() else {
            continue;
        };
        let Some(value) = table.get(first) else {
            continue;
        };
        if selected.contains_key(first) {
            continue;
        }
        let below: Vec<&[String]> = keys
            .iter()
            .filter_map(|key| key.split_first().filter(|(name, _)| *name == first))
            .map(|(_, rest)| rest)
            .collect();
        let whole = below.iter().any(|rest| rest.is_empty());
        match value {
            Value::Table(inner) if !whole => {
                let inner = select(inner, &below);
                if !inner.is_empty() {
                    selected.insert(first.clone(), Value::Table(inner));
                }
            }
            value => {
                selected.insert(first.clone(), value.clone());
            }
        }
    }
    selected
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(paths: &[&[&str]]) -> Vec<Vec<String>> {
        let path = |path: &&[&str]| path.iter().map(|&key| key.to_owned()).collect();
        paths.iter().map(path).collect()
    }

    fn selected(text: &str, paths: &[&[&str]]) -> String {
        let keys = keys(paths);
        let keys: Vec<&[String]> = keys.iter().map(Vec::as_slice).collect();
        toml::to_string(&select(&text.parse().unwrap(), &keys)).unwrap()
    }

    #[test]
    fn select_returns_requested_keys() {
        let text = "m = 1\n[a.b]\nc = 1\nd = 2\n[a.e]\nf = 3\n[[l]]\nx = 1\n";
        assert_eq!(selected(text, &[&["m"]]), "m = 1\n");
        assert_eq!(selected(text, &[&["a", "b", "c"]]), "[a.b]\nc = 1\n");
        assert_eq!(
            selected(text, &[&["a", "b", "c"], &["a", "e"]]),
            "[a.b]\nc = 1\n\n[a.e]\nf = 3\n"
        );
        assert_eq!(
            selected(text, &[&["a", "b", "c"], &["a"]]),
            "[a.b]\nc = 1\nd = 2\n\n[a.e]\nf = 3\n"
        );
        // A value on the path that is not a table is returned.
        assert_eq!(selected(text, &[&["m", "x"]]), "m = 1\n");
        assert_eq!(selected(text, &[&["l", "x"]]), "[[l]]\nx = 1\n");
        assert_eq!(selected(text, &[&["z"], &["a", "z"]]), "");
    }

    #[test]
    fn position_counts_lines_and_characters() {
        let text = "a = 1\nü = \nb";
        let position = FilePosition::at(Path::new("/x"), text, text.find("= \n").unwrap());
        assert_eq!(position.to_string(), "/x:2:3");
        assert_eq!(
            FilePosition::at(Path::new("/x"), text, 999).to_string(),
            "/x:3:2"
        );
    }

    #[test]
    fn only_trusted_projects_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (project, home) = (root.join("p"), root.join("home"));
        for path in ["p/.codex", "p/sub/.codex", "p/.git/refs", "home", "etc"] {
            std::fs::create_dir_all(root.join(path)).unwrap();
        }
        let write = |path: &str, text: &str| std::fs::write(root.join(path), text).unwrap();
        write("p/.codex/config.toml", "m = 'p'");
        write("p/sub/.codex/config.toml", "m = 'sub'");
        write("etc/config.toml", "m = 'system'");
        write("etc/managed_config.toml", "m = 'managed'");
        let files = ConfigFiles {
            system: root.join("etc"),
            ..ConfigFiles::codex(home)
        };
        let read = |cwd: &Path| {
            let stack = files.read_config(cwd, &keys(&[&["m"]])).unwrap();
            let value_of = |layer: &ConfigLayer| layer.toml.split('"').nth(1).unwrap().to_owned();
            let values: Vec<String> = stack.layers.iter().map(value_of).collect();
            (values.join(" "), stack.cloud_insertion_index)
        };
        let sub = project.join("sub/not/there");
        assert_eq!(read(&sub), ("system managed".to_owned(), 1));
        let trust = |path: &Path, level: &str| {
            format!("[projects.'{}']\ntrust_level = '{level}'\n", path.display())
        };
        write("home/config.toml", &trust(&project, "trusted"));
        assert_eq!(read(&sub).0, "system p sub managed");
        assert_eq!(read(&project).0, "system p managed");
        assert_eq!(read(&root).0, "system managed");
        // The trust setting of a directory overrides that of its project.
        let both = trust(&project, "trusted") + &trust(&project.join("sub"), "untrusted");
        write("home/config.toml", &both);
        assert_eq!(read(&sub).0, "system p managed");
        write("home/config.toml", &trust(&project.join("sub"), "trusted"));
        assert_eq!(read(&sub).0, "system sub managed");
        write("home/config.toml", "m = 'user'\nprojects = 3");
        assert_eq!(read(&sub), ("system user managed".to_owned(), 1));
        std::fs::remove_file(root.join("etc/config.toml")).unwrap();
        assert_eq!(read(&sub), ("user managed".to_owned(), 0));
    }
}
