//! The files that configure clients on this machine: which there are, and what they say.
//!
//! Owns the order of files, which projects are trusted and how keys are selected. Knows no client:
//! names and places of files are settings, and what they say is nobody's business here.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use exec_server_protocol::PathUri;
use exec_server_protocol::environment::{ConfigLayer, ConfigStack};
use exec_server_protocol::limits::MAX_CONFIG_BYTES;
use rustix::fs::OFlags;
use toml::{Table, Value};

/// Directories from the top of a project down to where a client works.
const MAX_PROJECT_DEPTH: usize = 128;

/// Where files are, and what they are called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigFiles {
    /// The directory of the whole machine.
    pub system: PathBuf,
    /// The directory of the user.
    pub home: PathBuf,
    /// The name of the configuration, in each of them and in projects.
    pub config: String,
    /// The name of what must hold, whatever the configuration says; of the whole machine alone.
    pub requirements: String,
    /// The name of a configuration of the whole machine that wins over all others.
    pub managed: String,
    /// The directory that holds the configuration of a project.
    pub project_directory: String,
    /// What the top of a project holds.
    pub project_marker: String,
}

impl ConfigFiles {
    /// The files of Codex, with the user's in this directory.
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

    /// What the files say of these keys, for somebody who works in `cwd`.
    ///
    /// Blocks on the disk.
    ///
    /// # Errors
    ///
    /// When a file is there and cannot be read or understood; says where.
    pub fn read_config(
        &self,
        cwd: &Path,
        keys: &[Vec<String>],
    ) -> Result<ConfigStack, ConfigError> {
        if keys.is_empty() {
            return Ok(ConfigStack::default());
        }
        let mut stack = Stack::new(keys);
        stack.add("system", &self.system.join(&self.config))?;
        stack.mark();
        let user = stack.add("user", &self.home.join(&self.config))?;
        for directory in self.trusted(cwd, user.as_ref()) {
            let place = directory.join(&self.project_directory);
            // The user's own directory may be where a project would have its: it counts once.
            if place != self.home {
                stack.add("project", &place.join(&self.config))?;
            }
        }
        stack.add("managed", &self.system.join(&self.managed))?;
        Ok(stack.stack)
    }

    /// What must hold, of these keys.
    ///
    /// Blocks on the disk.
    ///
    /// # Errors
    ///
    /// As [`ConfigFiles::read_config`].
    pub fn read_requirements(&self, keys: &[Vec<String>]) -> Result<ConfigStack, ConfigError> {
        if keys.is_empty() {
            return Ok(ConfigStack::default());
        }
        let mut stack = Stack::new(keys);
        stack.add("system", &self.system.join(&self.requirements))?;
        Ok(stack.stack)
    }

    /// Directories whose configuration counts, from the top of the project down.
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

/// Whether a project begins here. An empty directory of that name is none of git's.
fn is_top(marker: &Path) -> bool {
    match marker.metadata() {
        Ok(metadata) if metadata.is_dir() => marker
            .read_dir()
            .is_ok_and(|mut entries| entries.next().is_some()),
        Ok(_) => true,
        Err(_) => false,
    }
}

/// Without links as far as it exists, so that a project is the same however one got there.
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

/// Why a file counts for nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// It cannot be read.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is too large.
    #[error("{path}: exceeds the limit of {MAX_CONFIG_BYTES} bytes", path = .0.display())]
    TooLarge(PathBuf),
    /// It is no file.
    #[error("{path}: not a regular file", path = .0.display())]
    NotAFile(PathBuf),
    /// It makes no sense.
    #[error("{place}: {reason}")]
    Syntax {
        /// Where.
        place: Place,
        /// Why.
        reason: String,
    },
    /// Its path cannot be told.
    #[error("{path}: {reason}", path = path.display())]
    Path {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// A place in a file, counted from one; columns are characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    path: PathBuf,
    line: usize,
    column: usize,
}

impl Place {
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

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.path.display(), self.line, self.column)
    }
}

struct Stack<'a> {
    keys: Vec<&'a [String]>,
    stack: ConfigStack,
}

impl<'a> Stack<'a> {
    fn new(keys: &'a [Vec<String>]) -> Self {
        Self {
            keys: keys.iter().map(Vec::as_slice).collect(),
            stack: ConfigStack::default(),
        }
    }

    /// Adds what a file says of the keys, if it is there and says anything; all of it is returned.
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

    /// What comes from elsewhere wins over all so far.
    fn mark(&mut self) {
        self.stack.cloud_insertion_index = self.stack.layers.len();
    }
}

/// Reads a file, if it is there.
fn read(path: &Path) -> Result<Option<Table>, ConfigError> {
    let failed = |source| ConfigError::Io {
        path: path.to_owned(),
        source,
    };
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    // A pipe of that name must not hold us up.
    let opened = File::options().read(true).custom_flags(flags).open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) => {
            return match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(None),
                _ => Err(failed(error)),
            };
        }
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
                place: Place::at(path, &text, good),
                reason: "not UTF-8".to_owned(),
            });
        }
    };
    let table = text.parse::<Table>().map_err(|error| ConfigError::Syntax {
        place: Place::at(path, &text, error.span().map_or(0, |span| span.start)),
        reason: error.message().replace('\n', ", "),
    })?;
    Ok(Some(table))
}

/// What a table holds of these keys. Where a key leads through something that is no table, that is
/// what there is to tell.
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
    fn keys_select_parts() {
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
        // What is in the way is told.
        assert_eq!(selected(text, &[&["m", "x"]]), "m = 1\n");
        assert_eq!(selected(text, &[&["l", "x"]]), "[[l]]\nx = 1\n");
        assert_eq!(selected(text, &[&["z"], &["a", "z"]]), "");
    }

    #[test]
    fn places_count_lines_and_characters() {
        let text = "a = 1\nü = \nb";
        let place = Place::at(Path::new("/x"), text, text.find("= \n").unwrap());
        assert_eq!(place.to_string(), "/x:2:3");
        assert_eq!(Place::at(Path::new("/x"), text, 999).to_string(), "/x:3:2");
    }

    #[test]
    fn projects_count_when_they_are_trusted() {
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
            let said = |layer: &ConfigLayer| layer.toml.split('"').nth(1).unwrap().to_owned();
            let said: Vec<String> = stack.layers.iter().map(said).collect();
            (said.join(" "), stack.cloud_insertion_index)
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
        // A word about a directory counts more than one about the project.
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
