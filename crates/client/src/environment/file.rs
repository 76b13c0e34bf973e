//! `environments.toml` parser.
//!
//! Defines the keys and their valid values. Each error names the file, the line and the key. Opens
//! no connection and reads no secret.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read as _;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use exec_server_transport::Secret;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

#[cfg(feature = "registry")]
use super::connect::is_exposed;
use super::connect::{Connect, ENVIRONMENT_CLIENT_NAME, StdioTarget, UrlTarget, at_ssh};
use super::id::{self, LOCAL, NONE};
#[cfg(feature = "registry")]
use super::registry::RegistryEntry;
use crate::map::PathMap;
#[cfg(feature = "registry")]
use crate::options::ExecServerClientConnectOptions;
use crate::options::RemoteExecServerConnectArgs;
#[cfg(feature = "registry")]
use crate::registry::{RegistryAuth, RegistryUrl};
use crate::ssh::SshTarget;
#[cfg(feature = "registry")]
use exec_server_transport::tls::TlsClientOptions;

/// File name, in the settings directory.
pub const FILE_NAME: &str = "environments.toml";

/// Maximum file size: 1 MiB, enough for a thousand environments.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Maximum duration: one day, in seconds. A longer one is an error.
const MAX_SECONDS: f64 = 86_400.0;

const TOP_KEYS: &[&str] = &["default", "include_local", "environments"];
const KEYS: &[&str] = &[
    "id",
    "url",
    "program",
    "args",
    "env",
    "cwd",
    "connect_timeout_sec",
    "initialize_timeout_sec",
    "auth_bearer_token",
    "auth_token_file",
    "tls_pin",
    "ssh",
    "ssh_options",
    "remote_binary",
    "local_root",
    "remote_root",
    "registry",
    "skills",
];
/// The keys that select how an environment is reached. Each entry has exactly one of them.
const WAYS: &[&str] = &["url", "program", "ssh", "registry"];

/// Content of an `environments.toml`.
///
/// ```
/// use std::path::Path;
///
/// use exec_server_client::environment::{DefaultEnvironment, EnvironmentsFile};
///
/// let text = r#"
///     default = "worker"
///     [[environments]]
///     id = "worker"
///     url = "wss://build-host:4600"
///     auth_token_file = "worker.token"
///     [[environments]]
///     id = "box"
///     ssh = "ssh://me@box/srv/app"
/// "#;
/// let file = EnvironmentsFile::parse(text, Path::new("/etc/x/environments.toml"))?;
/// assert_eq!(file.default, DefaultEnvironment::Id("worker".to_owned()));
/// assert_eq!(file.environments[1].connect.target(), "ssh://me@box/srv/app");
///
/// let error = EnvironmentsFile::parse("defualt = 1", Path::new("e.toml")).unwrap_err();
/// assert!(error.to_string().starts_with("e.toml:1: `defualt`: unknown key"));
/// # Ok::<_, exec_server_client::environment::EnvironmentsFileError>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EnvironmentsFile {
    /// The environment that is used if the caller names none.
    pub default: DefaultEnvironment,
    /// Whether this machine is one of the environments.
    pub include_local: bool,
    /// The other environments, in the order of the file.
    pub environments: Vec<EnvironmentEntry>,
}

/// The default environment that a file selects.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum DefaultEnvironment {
    /// This machine if it is one of the environments, else none.
    #[default]
    Unset,
    /// No default environment.
    Disabled,
    /// The environment with this id.
    Id(String),
}

/// Environment definition: its id and how to reach it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EnvironmentEntry {
    /// Id of the environment.
    pub id: String,
    /// Connection target.
    pub connect: Arc<dyn Connect>,
    /// Skills that the environment must have (`skills.required`). The embedder checks them.
    pub required_skills: Vec<String>,
}

impl EnvironmentEntry {
    /// Creates an entry without required skills.
    pub fn new(id: impl Into<String>, connect: Arc<dyn Connect>) -> Self {
        Self {
            id: id.into(),
            connect,
            required_skills: Vec::new(),
        }
    }
}

/// Error of an `environments.toml`: it is invalid or cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentsFileError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The file is not valid TOML.
    #[error("{}:{line}: {reason}", path.display())]
    Syntax {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The reason why the text is rejected.
        reason: String,
    },
    /// A key is unknown, missing or has an invalid value.
    #[error("{}:{line}: `{key}`: {reason}", path.display())]
    Key {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// The key.
        key: String,
        /// The reason why the value is rejected.
        reason: String,
    },
}

impl EnvironmentsFile {
    /// Reads a file.
    ///
    /// # Errors
    ///
    /// When the file cannot be read or is invalid.
    pub fn read(path: &Path) -> Result<Self, EnvironmentsFileError> {
        Self::read_with_state(path, path.parent())
    }

    /// Reads a file like [`EnvironmentsFile::read`], and stores keys as
    /// [`EnvironmentsFile::parse_with_state`] does.
    ///
    /// # Errors
    ///
    /// Same as [`EnvironmentsFile::read`].
    pub fn read_with_state(
        path: &Path,
        state: Option<&Path>,
    ) -> Result<Self, EnvironmentsFileError> {
        let failed = |source| EnvironmentsFileError::Read {
            path: path.to_owned(),
            source,
        };
        let file = std::fs::File::open(path).map_err(failed)?;
        let mut text = String::new();
        file.take(MAX_FILE_BYTES + 1)
            .read_to_string(&mut text)
            .map_err(failed)?;
        if text.len() as u64 > MAX_FILE_BYTES {
            let reason = format!("it is longer than {MAX_FILE_BYTES} bytes");
            return Err(failed(std::io::Error::other(reason)));
        }
        Self::parse_with_state(&text, path, state)
    }

    /// Parses `text`. Error messages name `path`, and relative paths are resolved against its
    /// directory.
    ///
    /// # Errors
    ///
    /// When the text is invalid.
    pub fn parse(text: &str, path: &Path) -> Result<Self, EnvironmentsFileError> {
        Self::parse_with_state(text, path, path.parent())
    }

    /// Parses `text` like [`EnvironmentsFile::parse`], but stores the keys of this program and the
    /// known keys of environments in the directory `state` instead of beside the file.
    ///
    /// # Errors
    ///
    /// Same as [`EnvironmentsFile::parse`].
    pub fn parse_with_state(
        text: &str,
        path: &Path,
        state: Option<&Path>,
    ) -> Result<Self, EnvironmentsFileError> {
        let source = TomlSource { text, path, state };
        let document = DeTable::parse(text).map_err(|error| EnvironmentsFileError::Syntax {
            path: path.to_owned(),
            line: source.line(error.span().map_or(0, |span| span.start)),
            reason: error.message().to_owned(),
        })?;
        let top = TomlTable::new(&source, document.get_ref(), document.span(), TOP_KEYS)?;
        let include_local = top.flag("include_local")?.unwrap_or(true);
        let mut environments: Vec<EnvironmentEntry> = Vec::new();
        if let Some((value, span)) = top.value("environments") {
            let Some(tables) = value.as_array() else {
                let reason = "expected tables, as in [[environments]]";
                return Err(source.wrong(span, "environments", reason));
            };
            for table in tables.iter() {
                let Some(content) = table.get_ref().as_table() else {
                    let reason = "expected tables, as in [[environments]]";
                    return Err(source.wrong(table.span(), "environments", reason));
                };
                let table = TomlTable::new(&source, content, table.span(), KEYS)?;
                let entry = environment(&table)?;
                if environments.iter().any(|other| other.id == entry.id) {
                    let reason = format!("there is another environment `{}`", entry.id);
                    return Err(table.wrong("id", reason));
                }
                environments.push(entry);
            }
        }
        let default = match top.text("default")? {
            None => DefaultEnvironment::Unset,
            Some(id) if id.eq_ignore_ascii_case(NONE) => DefaultEnvironment::Disabled,
            Some(id) => {
                let known = environments.iter().any(|entry| entry.id == id)
                    || (include_local && id == LOCAL);
                if !known {
                    let reason = format!("there is no environment `{id}`");
                    return Err(top.wrong("default", reason));
                }
                DefaultEnvironment::Id(id.to_owned())
            }
        };
        Ok(Self {
            default,
            include_local,
            environments,
        })
    }
}

fn environment(table: &TomlTable<'_>) -> Result<EnvironmentEntry, EnvironmentsFileError> {
    let Some(id) = table.text("id")? else {
        return Err(table.wrong("id", "every environment needs one"));
    };
    id::check(id).map_err(|error| table.wrong("id", error))?;
    let given: Vec<&str> = WAYS
        .iter()
        .copied()
        .filter(|way| table.value(way).is_some())
        .collect();
    let way = match given[..] {
        [way] => way,
        [] => {
            let reason = format!("`{id}` needs one of {}", WAYS.join(", "));
            return Err(table.wrong("id", reason));
        }
        [first, second, ..] => {
            let reason = format!("`{id}` has `{first}` already; only one of them can be");
            return Err(table.wrong(second, reason));
        }
    };
    let only = |keys: &[&str], ways: &[&str]| {
        let stray = keys.iter().find(|key| table.value(key).is_some());
        match stray {
            Some(key) if !ways.contains(&way) => {
                Err(table.wrong(key, format!("requires `{}`", ways.join("` or `"))))
            }
            _ => Ok(()),
        }
    };
    only(&["args", "env", "cwd"], &["program"])?;
    only(&["connect_timeout_sec"], &["url", "ssh"])?;
    only(
        &["ssh_options", "remote_binary", "local_root", "remote_root"],
        &["ssh"],
    )?;
    only(
        &["auth_bearer_token", "auth_token_file", "tls_pin"],
        &["url", "registry"],
    )?;
    let connect: Arc<dyn Connect> = match way {
        "url" => Arc::new(url(table)?),
        "ssh" => Arc::new(ssh(table)?),
        #[cfg(feature = "registry")]
        "registry" => Arc::new(registry(table)?),
        #[cfg(not(feature = "registry"))]
        "registry" => {
            return Err(table.wrong("registry", "this program was built without registries"));
        }
        _ => Arc::new(program(table)?),
    };
    Ok(EnvironmentEntry {
        id: id.to_owned(),
        connect,
        required_skills: required_skills(table)?,
    })
}

/// Parses `ssh = "ssh://…"` and the keys that belong to it.
fn ssh(table: &TomlTable<'_>) -> Result<SshTarget, EnvironmentsFileError> {
    let url = table.text("ssh")?.unwrap_or_default().trim();
    let mut target = at_ssh(url).map_err(|error| table.wrong("ssh", error))?;
    if let Some(timeout) = table.seconds("connect_timeout_sec")? {
        target.ssh.connect_timeout = timeout;
    }
    if let Some(timeout) = table.seconds("initialize_timeout_sec")? {
        target.options.initialize_timeout = timeout;
    }
    if let Some(options) = table.texts("ssh_options")? {
        target.ssh.options = options;
    }
    target.ssh.remote_binary = table.text("remote_binary")?.map(str::to_owned);
    let remote = match table.text("remote_root")? {
        Some(root) if !root.starts_with('/') => {
            return Err(table.wrong("remote_root", "it is no absolute path"));
        }
        root => root.map(PathBuf::from),
    };
    let path = target.ssh.url.path().map(Path::to_owned);
    target.map = match (table.path("local_root")?, remote.clone().or(path)) {
        (Some(local), Some(remote)) => {
            let map = PathMap::new(local, remote);
            Some(map.map_err(|error| table.wrong("local_root", error))?)
        }
        (Some(_), None) => {
            let reason = "requires `remote_root`, or a path in `ssh`";
            return Err(table.wrong("local_root", reason));
        }
        (None, _) if remote.is_some() => {
            return Err(table.wrong("remote_root", "requires `local_root`"));
        }
        (None, _) => None,
    };
    Ok(target)
}

fn url(table: &TomlTable<'_>) -> Result<UrlTarget, EnvironmentsFileError> {
    let url = table.text("url")?.unwrap_or_default().trim();
    if url.starts_with("ssh://") {
        return Err(table.wrong("url", "write `ssh = \"ssh://…\"` for a machine behind ssh"));
    }
    let mut args = RemoteExecServerConnectArgs::new("", ENVIRONMENT_CLIENT_NAME);
    if let Some(timeout) = table.seconds("connect_timeout_sec")? {
        args.connect_timeout = timeout;
    }
    if let Some(timeout) = table.seconds("initialize_timeout_sec")? {
        args.options.initialize_timeout = timeout;
    }
    if let Some(pin) = table.text("tls_pin")? {
        if !url.starts_with("wss://") {
            return Err(table.wrong("tls_pin", "requires a `wss://` url"));
        }
        let pin = pin.parse().map_err(|error| table.wrong("tls_pin", error))?;
        args.tls.pin = Some(pin);
    }
    let mut target = UrlTarget::new(url, args).map_err(|error| table.wrong("url", error))?;
    match token(table, target.is_exposed())? {
        Some(TokenSource::Text(token)) => target.args.bearer_token = Some(token),
        Some(TokenSource::File(path)) => target.token_file = Some(path),
        None => {}
    }
    Ok(target)
}

/// Credential of an entry.
enum TokenSource {
    Text(Secret),
    File(PathBuf),
}

/// Parses the token of an entry, if it has one. Rejects it if the connection is readable on the
/// network (`exposed`).
fn token(
    table: &TomlTable<'_>,
    exposed: bool,
) -> Result<Option<TokenSource>, EnvironmentsFileError> {
    let text = table.text("auth_bearer_token")?;
    let (key, token) = match (text, table.path("auth_token_file")?) {
        (None, None) => return Ok(None),
        (Some(_), Some(_)) => {
            let reason = "`auth_bearer_token` is already set; only one of the two is allowed";
            return Err(table.wrong("auth_token_file", reason));
        }
        (Some(text), None) if text.trim().is_empty() => {
            return Err(table.wrong("auth_bearer_token", "it is empty"));
        }
        (Some(text), None) => (
            "auth_bearer_token",
            TokenSource::Text(Secret::from(text.trim())),
        ),
        (None, Some(path)) => ("auth_token_file", TokenSource::File(path)),
    };
    if exposed {
        let reason = "a token needs `wss://` or TLS otherwise, a unix socket or an address of this \
                      machine: anyone on the way could read it";
        return Err(table.wrong(key, reason));
    }
    Ok(Some(token))
}

/// Parses `registry = "registry://…"` and the keys that belong to it.
#[cfg(feature = "registry")]
fn registry(table: &TomlTable<'_>) -> Result<RegistryEntry, EnvironmentsFileError> {
    let text = table.text("registry")?.unwrap_or_default().trim();
    let url: RegistryUrl = text
        .parse()
        .map_err(|error| table.wrong("registry", error))?;
    let auth = match token(table, is_exposed(url.registry_url()))? {
        Some(TokenSource::Text(token)) => RegistryAuth::bearer(token),
        Some(TokenSource::File(path)) => RegistryAuth::BearerFile(path),
        None => RegistryAuth::Open,
    };
    let mut options = ExecServerClientConnectOptions::new(ENVIRONMENT_CLIENT_NAME);
    if let Some(timeout) = table.seconds("initialize_timeout_sec")? {
        options.initialize_timeout = timeout;
    }
    let mut tls = TlsClientOptions::default();
    if let Some(pin) = table.text("tls_pin")? {
        let pin = pin.parse().map_err(|error| table.wrong("tls_pin", error))?;
        tls.pin = Some(pin);
    }
    Ok(RegistryEntry {
        url,
        auth,
        tls,
        options,
        state: table.source.state.map(Path::to_owned),
    })
}

fn program(table: &TomlTable<'_>) -> Result<StdioTarget, EnvironmentsFileError> {
    let program = table.text("program")?.unwrap_or_default().trim();
    if program.is_empty() {
        return Err(table.wrong("program", "it is empty"));
    }
    let mut target = StdioTarget::new(program, table.texts("args")?.unwrap_or_default());
    target.env = table.variables("env")?;
    target.cwd = table.path("cwd")?;
    if let Some(timeout) = table.seconds("initialize_timeout_sec")? {
        target.options.initialize_timeout = timeout;
    }
    Ok(target)
}

fn required_skills(table: &TomlTable<'_>) -> Result<Vec<String>, EnvironmentsFileError> {
    let Some((value, span)) = table.value("skills") else {
        return Ok(Vec::new());
    };
    let Some(skills) = value.as_table() else {
        return Err(table.wrong("skills", "expected a table"));
    };
    let skills = TomlTable::new(table.source, skills, span, &["required"])?;
    Ok(skills.texts("required")?.unwrap_or_default())
}

/// Text of a file and its path.
struct TomlSource<'a> {
    text: &'a str,
    path: &'a Path,
    /// Directory for keys.
    #[cfg_attr(
        not(feature = "registry"),
        expect(dead_code, reason = "only registries have keys")
    )]
    state: Option<&'a Path>,
}

impl TomlSource<'_> {
    fn line(&self, offset: usize) -> usize {
        let before = self.text.get(..offset).unwrap_or(self.text);
        before.matches('\n').count() + 1
    }

    fn wrong(
        &self,
        span: Range<usize>,
        key: &str,
        reason: impl fmt::Display,
    ) -> EnvironmentsFileError {
        EnvironmentsFileError::Key {
            path: self.path.to_owned(),
            line: self.line(span.start),
            key: key.to_owned(),
            reason: reason.to_string(),
        }
    }
}

/// TOML table that has only known keys.
struct TomlTable<'a> {
    source: &'a TomlSource<'a>,
    content: &'a DeTable<'a>,
    span: Range<usize>,
}

impl<'a> TomlTable<'a> {
    fn new(
        source: &'a TomlSource<'a>,
        content: &'a DeTable<'a>,
        span: Range<usize>,
        known: &[&str],
    ) -> Result<Self, EnvironmentsFileError> {
        // Report the first unknown key in file order; the table itself iterates in alphabetical
        // order.
        let unknown = content
            .iter()
            .map(|(key, _)| key)
            .filter(|key| !known.contains(&key.get_ref().as_ref()))
            .min_by_key(|key| key.span().start);
        match unknown {
            Some(key) => {
                let reason = format!("unknown key; known are {}", known.join(", "));
                Err(source.wrong(key.span(), key.get_ref(), reason))
            }
            None => Ok(Self {
                source,
                content,
                span,
            }),
        }
    }

    /// Creates an error about a key, or about a missing key.
    fn wrong(&self, key: &str, reason: impl fmt::Display) -> EnvironmentsFileError {
        let there = self.content.iter().find(|(name, _)| name.get_ref() == key);
        let span = there.map_or_else(|| self.span.clone(), |(name, _)| name.span());
        self.source.wrong(span, key, reason)
    }

    fn value(&self, key: &str) -> Option<(&'a DeValue<'a>, Range<usize>)> {
        let (_, value) = self
            .content
            .iter()
            .find(|(name, _)| name.get_ref() == key)?;
        Some((value.get_ref(), value.span()))
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>, EnvironmentsFileError> {
        match self.value(key) {
            None => Ok(None),
            Some((DeValue::String(text), _)) => Ok(Some(text.as_ref())),
            Some(_) => Err(self.wrong(key, "expected a text in quotes")),
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, EnvironmentsFileError> {
        match self.value(key) {
            None => Ok(None),
            Some((DeValue::Boolean(flag), _)) => Ok(Some(*flag)),
            Some(_) => Err(self.wrong(key, "expected true or false")),
        }
    }

    fn seconds(&self, key: &str) -> Result<Option<Duration>, EnvironmentsFileError> {
        let number = match self.value(key) {
            None => return Ok(None),
            Some((DeValue::Float(number), _)) => number.as_str().parse().ok(),
            Some((DeValue::Integer(number), _)) if number.radix() == 10 => {
                number.as_str().parse().ok()
            }
            Some(_) => None,
        };
        match number {
            Some(seconds) if seconds > 0.0 && seconds <= MAX_SECONDS => {
                Ok(Some(Duration::from_secs_f64(seconds)))
            }
            _ => {
                let reason = format!("expected seconds, more than 0 and at most {MAX_SECONDS}");
                Err(self.wrong(key, reason))
            }
        }
    }

    fn texts(&self, key: &str) -> Result<Option<Vec<String>>, EnvironmentsFileError> {
        let Some((value, _)) = self.value(key) else {
            return Ok(None);
        };
        let text = |value: &Spanned<DeValue<'_>>| value.get_ref().as_str().map(str::to_owned);
        let texts = value
            .as_array()
            .and_then(|list| list.iter().map(text).collect());
        match texts {
            Some(texts) => Ok(Some(texts)),
            None => Err(self.wrong(key, "expected a list of texts")),
        }
    }

    fn variables(&self, key: &str) -> Result<BTreeMap<String, String>, EnvironmentsFileError> {
        let Some((value, _)) = self.value(key) else {
            return Ok(BTreeMap::new());
        };
        let Some(table) = value.as_table() else {
            return Err(self.wrong(key, "expected a table of texts"));
        };
        let mut variables = BTreeMap::new();
        for (name, value) in table.iter() {
            let wrong = |reason: &str| {
                let key = format!("{key}.{}", name.get_ref());
                Err(self.source.wrong(name.span(), &key, reason))
            };
            if name.get_ref().is_empty() || name.get_ref().contains(['=', '\0']) {
                return wrong("this is no name of a variable");
            }
            match value.get_ref().as_str() {
                Some(value) if value.contains('\0') => {
                    return wrong("no variable can hold this value");
                }
                Some(value) => variables.insert(name.get_ref().to_string(), value.to_owned()),
                None => return wrong("expected a text in quotes"),
            };
        }
        Ok(variables)
    }

    /// Reads a path; a relative one is resolved against the directory of the file.
    fn path(&self, key: &str) -> Result<Option<PathBuf>, EnvironmentsFileError> {
        match self.text(key)? {
            None => Ok(None),
            Some("") => Err(self.wrong(key, "it is empty")),
            Some(path) => Ok(Some(match self.source.path.parent() {
                Some(directory) => directory.join(path),
                None => PathBuf::from(path),
            })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<EnvironmentsFile, EnvironmentsFileError> {
        EnvironmentsFile::parse(text, Path::new("/etc/exec-server/environments.toml"))
    }

    #[test]
    fn parse_reads_every_key_and_redacts_tokens() {
        let file = parse(
            r#"
            default = "worker"
            include_local = false
            [[environments]]
            id = "worker"
            url = " wss://build:4600/x "
            connect_timeout_sec = 2.5
            initialize_timeout_sec = 3
            auth_bearer_token = "s3cret"
            tls_pin = "sha256//AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
            skills = { required = ["a", "b"] }
            [[environments]]
            id = "box-2_B"
            program = " ssh "
            args = ["box", "exec-server --listen stdio"]
            env = { LANG = "C" }
            cwd = "work"
            initialize_timeout_sec = 1
            [[environments]]
            id = "sock"
            url = "unix:///run/x.sock"
            auth_token_file = "sock.token"
            [[environments]]
            id = "far"
            registry = " registry://meet.example/build-7 "
            auth_token_file = "far.token"
            initialize_timeout_sec = 4
            "#,
        )
        .unwrap();
        assert_eq!(file.default, DefaultEnvironment::Id("worker".to_owned()));
        assert!(!file.include_local);
        let ids: Vec<_> = file.environments.iter().map(|entry| &*entry.id).collect();
        assert_eq!(ids, ["worker", "box-2_B", "sock", "far"]);
        let far = &file.environments[3].connect;
        assert_eq!(far.target(), "registry://meet.example/build-7");
        assert_eq!(file.environments[0].required_skills, ["a", "b"]);
        let shown = format!("{:?}", file.environments);
        for part in [
            "wss://build:4600/x\"",
            "2.5s",
            "3s",
            "Pin(",
            "[redacted]",
            "\"ssh\"",
            "\"LANG\": \"C\"",
            "/etc/exec-server/work",
            "/etc/exec-server/sock.token",
            "/etc/exec-server/far.token",
            "4s",
        ] {
            assert!(shown.contains(part), "{part} in {shown}");
        }
        assert!(!shown.contains("s3cret"), "{shown}");
    }

    #[test]
    fn documented_example_parses_and_mentions_every_key() {
        let path = Path::new("/etc/exec-server/environments.toml");
        let text = include_str!("../../../../docs/environments.toml");
        let file = EnvironmentsFile::parse(text, path).unwrap();
        assert!(file.environments.len() >= 3);
        for key in KEYS {
            assert!(text.contains(key), "the example does not mention `{key}`");
        }
    }

    #[test]
    fn parse_empty_file_selects_local_machine() {
        let file = parse("").unwrap();
        assert_eq!(file.default, DefaultEnvironment::Unset);
        assert!(file.include_local && file.environments.is_empty());
        assert_eq!(
            parse("default = 'NonE'").unwrap().default,
            DefaultEnvironment::Disabled
        );
        let local = DefaultEnvironment::Id("local".to_owned());
        assert_eq!(parse("default = 'local'").unwrap().default, local);
    }

    /// Invalid files with the expected line number and message.
    #[test]
    fn parse_errors_name_file_line_and_key() {
        let long = format!(
            "[[environments]]\nid = \"{}\"\nurl = \"ws://h\"",
            "x".repeat(65)
        );
        let table = |lines: &str| format!("\n[[environments]]\nid = \"a\"\n{lines}");
        for (text, says) in [
            ("default = ".to_owned(), "1: "),
            (
                "\ndefualt = 'x'".to_owned(),
                "2: `defualt`: unknown key; known are default, ",
            ),
            ("default = 1".to_owned(), "1: `default`: expected a text"),
            (
                "default = 'x'".to_owned(),
                "1: `default`: there is no environment `x`",
            ),
            (
                "include_local = false\ndefault = 'local'".to_owned(),
                "2: `default`: there is no environment `local`",
            ),
            (
                "include_local = 'yes'".to_owned(),
                "1: `include_local`: expected true",
            ),
            (
                "environments = 1".to_owned(),
                "1: `environments`: expected tables",
            ),
            (
                "environments = [1]".to_owned(),
                "1: `environments`: expected tables",
            ),
            (
                "[[environments]]\nurl = 'ws://h'".to_owned(),
                "1: `id`: every environment needs",
            ),
            (
                "[[environments]]\nid = 1".to_owned(),
                "2: `id`: expected a text",
            ),
            (
                "[[environments]]\nid = ''".to_owned(),
                "2: `id`: `` is not a valid environment id",
            ),
            (
                "[[environments]]\nid = ' a'".to_owned(),
                "2: `id`: ` a` is not a valid environment id",
            ),
            (
                "[[environments]]\nid = 'a b'".to_owned(),
                "2: `id`: `a b` is not a valid environment id",
            ),
            (
                "[[environments]]\nid = 'ä'".to_owned(),
                "2: `id`: `ä` is not a valid environment id",
            ),
            (long, "2: `id`: "),
            (
                "[[environments]]\nid = 'local'".to_owned(),
                "2: `id`: `local` is reserved",
            ),
            (
                "[[environments]]\nid = 'None'".to_owned(),
                "2: `id`: `None` is reserved",
            ),
            (
                "[[environments]]\nid='a'\nurl='ws://h'\n[[environments]]\nid='a'\nurl='ws://i'"
                    .to_owned(),
                "5: `id`: there is another environment `a`",
            ),
            (
                table("colour = 1"),
                "4: `colour`: unknown key; known are id, url, ",
            ),
            (
                table(""),
                "3: `id`: `a` needs one of url, program, ssh, registry",
            ),
            (table("url = 'ssh://h'"), "4: `url`: write `ssh = "),
            (table("ssh = 'box'"), "4: `ssh`: "),
            (
                table("url = 'ws://h'\nremote_binary = 'x'"),
                "5: `remote_binary`: requires `ssh`",
            ),
            (
                table("ssh = 'ssh://h'\ntls_pin = 'x'"),
                "5: `tls_pin`: requires `url` or `registry`",
            ),
            (
                table("ssh = 'ssh://h'\nlocal_root = 'x'"),
                "5: `local_root`: requires `remote_root`",
            ),
            (
                table("ssh = 'ssh://h/r'\nremote_root = '/r'"),
                "5: `remote_root`: requires `local_root`",
            ),
            (
                table("ssh = 'ssh://h'\nlocal_root = 'x'\nremote_root = 'r'"),
                "6: `remote_root`: it is no absolute path",
            ),
            (
                table("ssh = 'ssh://h'\nssh_options = 'x'"),
                "5: `ssh_options`: expected a list",
            ),
            (
                table("registry = 'h'"),
                "4: `registry`: `h` is not the URL of an environment",
            ),
            (
                table("registry = 'registry+http://h/e'\nauth_bearer_token = 'x'"),
                "5: `auth_bearer_token`: a token needs",
            ),
            (
                table("registry = 'registry://h/e'\ntls_pin = 'x'"),
                "5: `tls_pin`: invalid pin `x`",
            ),
            (
                table("registry = 'registry://h/e'\nconnect_timeout_sec = 1"),
                "5: `connect_timeout_sec`: requires",
            ),
            (
                table("url = 'ws://h'\nprogram = 'x'"),
                "5: `program`: `a` has `url` already",
            ),
            (
                table("url = 'http://h'"),
                "4: `url`: `http://h` is not the URL of a server",
            ),
            (table("url = 'ws://'"), "4: `url`: `ws://`: "),
            (table("url = 7"), "4: `url`: expected a text"),
            (table("program = ' '"), "4: `program`: it is empty"),
            (
                table("program = 'x'\nargs = 'y'"),
                "5: `args`: expected a list",
            ),
            (
                table("program = 'x'\nargs = [1]"),
                "5: `args`: expected a list",
            ),
            (
                table("program = 'x'\nenv = 1"),
                "5: `env`: expected a table",
            ),
            (
                table("program = 'x'\nenv = { A = 1 }"),
                "5: `env.A`: expected a text",
            ),
            (
                table("program = 'x'\nenv = { 'A=B' = '' }"),
                "5: `env.A=B`: this is no name",
            ),
            (table("program = 'x'\ncwd = ''"), "5: `cwd`: it is empty"),
            (
                table("url = 'ws://h'\nargs = []"),
                "5: `args`: requires `program`",
            ),
            (
                table("url = 'ws://h'\nenv = {}"),
                "5: `env`: requires `program`",
            ),
            (
                table("url = 'ws://h'\ncwd = '/'"),
                "5: `cwd`: requires `program`",
            ),
            (
                table("program = 'x'\nconnect_timeout_sec = 1"),
                "5: `connect_timeout_sec`: requires `url`",
            ),
            (
                table("program = 'x'\nauth_bearer_token = 'x'"),
                "5: `auth_bearer_token`: requires `url` or `registry`",
            ),
            (
                table("program = 'x'\nauth_token_file = 'x'"),
                "5: `auth_token_file`: requires",
            ),
            (
                table("program = 'x'\ntls_pin = 'x'"),
                "5: `tls_pin`: requires `url` or `registry`",
            ),
            (
                table("url = 'ws://h'\ntls_pin = 'x'"),
                "5: `tls_pin`: requires a `wss://` url",
            ),
            (
                table("url = 'wss://h'\ntls_pin = 'x'"),
                "5: `tls_pin`: invalid pin `x`",
            ),
            (
                table("url = 'ws://h'\nconnect_timeout_sec = 0"),
                "5: `connect_timeout_sec`: exp",
            ),
            (
                table("url = 'ws://h'\nconnect_timeout_sec = -1.5"),
                "5: `connect_timeout_sec`",
            ),
            (
                table("url = 'ws://h'\nconnect_timeout_sec = nan"),
                "5: `connect_timeout_sec`",
            ),
            (
                table("url = 'ws://h'\nconnect_timeout_sec = 'x'"),
                "5: `connect_timeout_sec`",
            ),
            (
                table("url = 'ws://h'\ninitialize_timeout_sec = 1e9"),
                "5: `initialize_timeout_sec`",
            ),
            (
                table("url = 'ws://h:1'\nauth_bearer_token = 'x'"),
                "5: `auth_bearer_token`: a token needs `wss://`",
            ),
            (
                table("url = 'ws://h:1'\nauth_token_file = 'x'"),
                "5: `auth_token_file`: a token",
            ),
            (
                table("url = 'wss://h'\nauth_bearer_token = ' '"),
                "5: `auth_bearer_token`: it is",
            ),
            (
                table("url = 'wss://h'\nauth_bearer_token = 'x'\nauth_token_file = 'y'"),
                "6: `auth_token_file`: `auth_bearer_token` is already set",
            ),
            (
                table("url = 'ws://h'\nskills = []"),
                "5: `skills`: expected a table",
            ),
            (
                table("url = 'ws://h'\nskills = { x = 1 }"),
                "5: `x`: unknown key; known are requ",
            ),
            (
                table("url = 'ws://h'\n[environments.skills]\nrequired = 1"),
                "6: `required`: expected a list",
            ),
        ] {
            let error = parse(&text).unwrap_err().to_string();
            let says = format!("/etc/exec-server/environments.toml:{says}");
            assert!(error.starts_with(&says), "{text}\n{error}\nexpected {says}");
        }
    }

    #[test]
    fn read_rejects_missing_oversized_and_non_utf8_files() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE_NAME);
        let error = EnvironmentsFile::read(&path).unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
        std::fs::write(&path, vec![b'#'; 1 << 20]).unwrap();
        assert!(EnvironmentsFile::read(&path).is_ok());
        std::fs::write(&path, vec![b'#'; (1 << 20) + 1]).unwrap();
        assert!(EnvironmentsFile::read(&path).is_err());
        std::fs::write(&path, b"\xff").unwrap();
        assert!(EnvironmentsFile::read(&path).is_err());
    }
}
