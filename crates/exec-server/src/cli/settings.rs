//! Settings of the server, resolved from flags, environment, file and defaults.
//!
//! Owns where each value came from, and the one place where this program reads its environment;
//! `keys` is the table of every key. Reads no secret: those are read where they are used.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, bail};
use exec_server_egress::http::{HostRules, HttpConfig, ProxyChoice};
use exec_server_engine::configuration::ConfigFiles;
use exec_server_engine::host;
use exec_server_executor::fs;
use exec_server_executor::log::Retention;
use exec_server_sandbox::placeholder::journal;
use exec_server_service::{ExecServerConfig, ListenUrl};
use exec_server_transport::keepalive::KeepaliveConfig;
use toml::Value;

use super::args::ServeArgs;
use super::{access, own_socket};
use keys::{KEYS, SettingKey, size, time};

mod keys;

/// Variable with the path of the settings file.
pub(super) const FILE_VARIABLE: &str = "EXEC_SERVER_CONFIG";
/// Variables with a client's token, or with the file that holds it.
pub(super) const TOKEN_VARIABLE: &str = "EXEC_SERVER_TOKEN";
pub(super) const TOKEN_FILE_VARIABLE: &str = "EXEC_SERVER_TOKEN_FILE";
/// Variable with an executor's token for its registry.
pub(super) const API_KEY_VARIABLE: &str = "EXEC_SERVER_API_KEY";
/// Variables of compatible executors: the token, and an agent's identity.
pub(super) const CODEX_API_KEY_VARIABLE: &str = "CODEX_API_KEY";
pub(super) const ACCESS_TOKEN_VARIABLE: &str = "CODEX_ACCESS_TOKEN";
/// Variable with the URL where an agent registers its tasks.
pub(super) const AGENT_AUTH_API_VARIABLE: &str = "EXEC_SERVER_AGENT_AUTH_API";
/// Variable with the directory of keys and state.
pub(super) const STATE_VARIABLE: &str = "EXEC_SERVER_STATE_DIR";

/// Variables of this program that children do not inherit.
const PRIVATE_VARIABLES: &[&str] = &[
    TOKEN_VARIABLE,
    TOKEN_FILE_VARIABLE,
    "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
    "EXEC_SERVER_NOISE_AUTH_TOKEN",
    API_KEY_VARIABLE,
    "LISTEN_FDNAMES",
    "LISTEN_FDS",
    "LISTEN_PID",
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
];

/// Origin of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Origin {
    Default,
    File(PathBuf),
    Variable(String),
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Variable(name) => f.write_str(name),
            Self::Flag(name) => f.write_str(name),
        }
    }
}

/// Every key's value and origin.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    values: BTreeMap<&'static str, (Value, Origin)>,
    /// Path of the settings file, if there is one.
    pub(super) file: Option<PathBuf>,
}

/// Value of an environment variable, if it is set and valid UTF-8.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

impl Settings {
    /// Resolves the settings: flags override the environment, which overrides the file, which
    /// overrides the defaults.
    pub(super) fn resolve(args: &ServeArgs) -> anyhow::Result<Self> {
        Self::layered(args, variable)
    }

    fn layered(args: &ServeArgs, env: impl Fn(&str) -> Option<String>) -> anyhow::Result<Self> {
        let mut settings = Self {
            values: BTreeMap::new(),
            file: None,
        };
        let config = ExecServerConfig::default();
        for key in KEYS {
            if let Some(default) = key.default {
                settings.put(key.name, default(&config), Origin::Default)?;
            }
        }
        let file = args.config.clone();
        if let Some(path) = file.or_else(|| env(FILE_VARIABLE).map(PathBuf::from)) {
            settings.read(&path)?;
            settings.file = Some(path);
        }
        let given = |name: &str| env(name).filter(|text| !text.is_empty());
        for key in KEYS {
            let mut variable = key.variable();
            let mut text = given(&variable);
            if text.is_none() && key.name == "log.filter" {
                "RUST_LOG".clone_into(&mut variable);
                text = given(&variable);
            }
            if let Some(text) = text {
                let value = key.kind.typed(&text);
                settings.put(key.name, value, Origin::Variable(variable))?;
            }
        }
        for setting in &args.set {
            let (name, text) = setting
                .split_once('=')
                .with_context(|| format!("--set {setting}: expected KEY=VALUE"))?;
            let key = SettingKey::named(name).with_context(|| unknown(name, "--set"))?;
            let origin = Origin::Flag("--set".to_owned());
            settings.put(name, key.kind.typed(text), origin)?;
        }
        for key in KEYS {
            if let Some((flag, value)) = key.flag
                && let Some(value) = value(args)
            {
                settings.put(key.name, value, Origin::Flag(flag.to_owned()))?;
            }
        }
        // If the service manager passes sockets, the default listener is not used.
        let is_handed_over = env("LISTEN_FDS").is_some();
        let is_chosen = settings.is_set("listen") || settings.is_remote() || is_handed_over;
        if args.is_own && !is_chosen {
            let url = Value::String(own_socket::to_listen_on()?);
            settings.put("listen", Value::Array(vec![url]), Origin::Default)?;
        }
        Ok(settings)
    }

    fn read(&mut self, path: &Path) -> anyhow::Result<()> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the configuration {}", path.display()))?;
        let table: toml::Table = text
            .parse()
            .with_context(|| format!("cannot understand {}", path.display()))?;
        let sections: HashSet<&str> = KEYS
            .iter()
            .filter_map(|key| Some(key.name.split_once('.')?.0))
            .collect();
        let mut found = Vec::new();
        for (name, value) in table {
            match value {
                Value::Table(section) if sections.contains(name.as_str()) => {
                    let key = |(key, value)| (format!("{name}.{key}"), value);
                    found.extend(section.into_iter().map(key));
                }
                value => found.push((name, value)),
            }
        }
        for (name, value) in found {
            self.put(&name, value, Origin::File(path.to_owned()))?;
        }
        Ok(())
    }

    /// Sets a value; fails if it is not of the key's kind.
    fn put(&mut self, name: &str, value: Value, origin: Origin) -> anyhow::Result<()> {
        let Some(key) = SettingKey::named(name) else {
            bail!(unknown(name, &origin.to_string()));
        };
        if !key.kind.fits(&value) {
            bail!("{origin}: `{name}` must be {}, not {value}", key.kind);
        }
        self.values.insert(key.name, (value, origin));
        Ok(())
    }

    /// All keys, each with its value and its origin if it has one.
    pub(super) fn iter(
        &self,
    ) -> impl Iterator<Item = (&'static SettingKey, Option<&(Value, Origin)>)> {
        KEYS.iter().map(|key| (key, self.values.get(key.name)))
    }

    fn value(&self, name: &str) -> Option<&Value> {
        debug_assert!(SettingKey::named(name).is_some(), "{name} is in the table");
        self.values.get(name).map(|(value, _)| value)
    }

    /// The text of a key, unless it is empty.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.value(name)?.as_str().filter(|text| !text.is_empty())
    }

    pub(super) fn path(&self, name: &str) -> Option<PathBuf> {
        self.text(name).map(PathBuf::from)
    }

    pub(super) fn list(&self, name: &str) -> Vec<&str> {
        let items = self.value(name).and_then(Value::as_array);
        let items = items.into_iter().flatten();
        items.filter_map(Value::as_str).collect()
    }

    pub(super) fn flag(&self, name: &str) -> bool {
        self.value(name).and_then(Value::as_bool).unwrap_or(false)
    }

    pub(super) fn count(&self, name: &str) -> Option<usize> {
        usize::try_from(self.value(name)?.as_integer()?).ok()
    }

    fn size(&self, name: &str) -> Option<usize> {
        size(self.value(name)?)
    }

    pub(super) fn time(&self, name: &str) -> Option<Duration> {
        time(self.value(name)?)
    }

    /// Whether this key has a value other than its default.
    pub(super) fn is_set(&self, name: &str) -> bool {
        let given = |origin: &Origin| !matches!(origin, Origin::Default);
        self.values
            .get(name)
            .is_some_and(|(_, origin)| given(origin))
    }

    /// The configured listen URLs.
    pub(super) fn listen(&self) -> anyhow::Result<Vec<ListenUrl>> {
        let urls: Result<Vec<ListenUrl>, _> =
            self.list("listen").into_iter().map(str::parse).collect();
        let urls = urls?;
        if self.is_remote() && self.is_set("listen") {
            bail!("--remote and --listen cannot be combined");
        }
        let alone = |url: &ListenUrl| matches!(url, ListenUrl::Stdio | ListenUrl::Off);
        match &urls[..] {
            [] => bail!("`listen` is an empty list; `off` listens nowhere"),
            [_] => {}
            several => {
                if let Some(url) = several.iter().find(|url| alone(url)) {
                    bail!("--listen {url} cannot be combined with others");
                }
            }
        }
        Ok(urls)
    }

    /// The files with secrets of this server, which sandboxed processes must not read.
    fn secret_files(&self) -> Vec<PathBuf> {
        /// Keys whose values are secret.
        const SECRET: [&str; 2] = ["auth.token_sha256", "audit.redact"];
        let tokens = self.list("auth.token_files");
        let tokens = tokens
            .into_iter()
            .map(|given| access::token_file(given).to_owned());
        let named = [
            "auth.shared_secret_file",
            "tls.key",
            "audit.file",
            "remote.token_file",
        ];
        let named = named.into_iter().filter_map(|name| self.path(name));
        let named = named.chain(self.identity_file().filter(|_| self.is_remote()));
        let settings = SECRET.into_iter().filter_map(|name| {
            let (value, origin) = self.values.get(name)?;
            match origin {
                Origin::File(path) if value.as_array().is_some_and(|list| !list.is_empty()) => {
                    Some(path.clone())
                }
                _ => None,
            }
        });
        let mut files: Vec<PathBuf> = tokens
            .chain(named)
            .chain(settings)
            // A policy contains absolute paths. Descriptors and devices are left out, because they
            // are not files of the server.
            .filter_map(|path| std::path::absolute(path).ok())
            .filter(|path| !path.starts_with("/dev") && !path.starts_with("/proc"))
            .collect();
        files.sort();
        files.dedup();
        files
    }

    /// The files and directories of this server that file requests must not reach: besides those
    /// with secrets, its settings, its state, its executable, its sockets, the certificates that it
    /// trusts or shows, and the program that prints its credentials.
    pub(super) fn protected_paths(&self) -> Vec<PathBuf> {
        let sockets = self.listen().unwrap_or_default().into_iter();
        let sockets = sockets.filter_map(|url| match url {
            ListenUrl::Unix(path) => Some(path),
            _ => None,
        });
        let trusted = ["tls.client_ca", "tls.cert", "remote.tls_ca"];
        let trusted = trusted.into_iter().filter_map(|name| self.path(name));
        let own = self.file.iter().cloned().chain(own_paths()).chain(sockets);
        let own = own.chain(trusted).chain(self.credential_program());
        let own = own.filter_map(|path| std::path::absolute(path).ok());
        self.secret_files().into_iter().chain(own).collect()
    }

    /// The program of the credential command, unless it is one of the system: a shell or an
    /// interpreter is no file of the server.
    fn credential_program(&self) -> Option<PathBuf> {
        const SYSTEM: [&str; 4] = ["/usr", "/bin", "/sbin", "/lib"];
        let command = self.text("remote.credential_command")?;
        let first = command.split_whitespace().next()?;
        let name = Path::new(first.trim_matches(['"', '\'']));
        let program = if name.components().count() > 1 {
            name.to_owned()
        } else {
            let path = variable("PATH")?;
            let found = std::env::split_paths(&path).map(|directory| directory.join(name));
            found
                .into_iter()
                .find(|program| fs::canonicalize(program).is_ok())?
        };
        let is_of_system = SYSTEM
            .iter()
            .any(|directory| program.starts_with(directory));
        (!is_of_system).then_some(program)
    }

    /// Whether to serve through a registry.
    pub(super) fn is_remote(&self) -> bool {
        self.text("remote.url").is_some()
    }

    /// The file with the identity keys of this machine.
    pub(super) fn identity_file(&self) -> Option<PathBuf> {
        let given = self.path("remote.identity_file");
        given.or_else(|| Some(state_directory()?.join("executor.identity")))
    }

    /// Environment variables that children inherit from this program.
    pub(super) fn environment(&self) -> BTreeMap<String, String> {
        let mut environment = environment();
        if self.is_remote() {
            for name in [CODEX_API_KEY_VARIABLE, ACCESS_TOKEN_VARIABLE] {
                environment.remove(name);
            }
        }
        environment
    }

    /// Rules and limits of HTTP requests.
    fn http(&self) -> anyhow::Result<HttpConfig> {
        let defaults = HttpConfig::default();
        let rules = HostRules::new(&self.list("http.allow"), &self.list("http.deny"));
        Ok(HttpConfig {
            rules: rules.context("`http.allow` and `http.deny`")?,
            proxy: match self.text("http.proxy") {
                None | Some("none") => ProxyChoice::Direct,
                Some("environment") => ProxyChoice::Environment,
                Some(url) => ProxyChoice::Url(url.to_owned()),
            },
            max_response_bytes: self
                .size("http.max_response_bytes")
                .unwrap_or(defaults.max_response_bytes),
            max_stream_bytes: self.size("http.max_stream_bytes").map(|bytes| bytes as u64),
            ..defaults
        })
    }

    /// Configuration files of clients on this machine; by default those of Codex.
    fn config_files(&self, environment: &BTreeMap<String, String>) -> ConfigFiles {
        let user = host::home(environment, host::account().as_ref());
        let own = environment.get("CODEX_HOME").map(PathBuf::from);
        let home = self
            .path("client_config.home")
            .or(own.filter(|home| home.is_absolute()))
            .unwrap_or_else(|| user.unwrap_or_else(|| "/".into()).join(".codex"));
        let codex = ConfigFiles::codex(home);
        let name = |key, usual: String| self.text(key).map_or(usual, str::to_owned);
        ConfigFiles {
            system: self.path("client_config.system").unwrap_or(codex.system),
            home: codex.home,
            config: name("client_config.file", codex.config),
            requirements: name("client_config.requirements_file", codex.requirements),
            managed: name("client_config.managed_file", codex.managed),
            project_directory: name("client_config.project_directory", codex.project_directory),
            project_marker: name("client_config.project_marker", codex.project_marker),
        }
    }

    /// The settings of the server itself.
    ///
    /// # Errors
    ///
    /// When a value has the right kind but is out of range or contradicts another.
    pub(super) fn server(&self) -> anyhow::Result<ExecServerConfig> {
        let defaults = ExecServerConfig::default();
        let count = |name, default| self.count(name).unwrap_or(default);
        let time = |name, default| self.time(name).unwrap_or(default);
        let environment = self.environment();
        Ok(ExecServerConfig {
            http: self.http()?,
            config_files: self.config_files(&environment),
            discover_all: self.flag("client_config.discover_all"),
            max_connections: count("limits.connections", defaults.max_connections),
            max_connections_per_address: count(
                "limits.connections_per_address",
                defaults.max_connections_per_address,
            ),
            max_sessions: count("limits.sessions", defaults.max_sessions),
            max_processes: count("limits.processes", defaults.max_processes),
            max_processes_per_session: count(
                "limits.processes_per_session",
                defaults.max_processes_per_session,
            ),
            concurrent_requests: count("limits.concurrent_requests", defaults.concurrent_requests),
            max_waiting_requests: count("limits.waiting_requests", defaults.max_waiting_requests),
            retention: Retention {
                bytes: self
                    .size("limits.retained_bytes")
                    .unwrap_or(defaults.retention.bytes),
                chunks: count("limits.retained_chunks", defaults.retention.chunks),
            },
            max_retained_bytes: self
                .size("limits.total_retained_bytes")
                .unwrap_or(defaults.max_retained_bytes),
            max_queued_bytes: self
                .size("limits.response_bytes")
                .unwrap_or(defaults.max_queued_bytes),
            max_incomplete_bytes: self
                .size("limits.incomplete_bytes")
                .unwrap_or(defaults.max_incomplete_bytes),
            handshake_timeout: time("times.handshake", defaults.handshake_timeout),
            keepalive: KeepaliveConfig {
                interval: time("times.ping", defaults.keepalive.interval),
                deadline: time("times.silence", defaults.keepalive.deadline),
            },
            detach_grace: time("times.detach_grace", defaults.detach_grace),
            max_detach_grace: time("times.max_detach_grace", defaults.max_detach_grace),
            closed_retention: time("times.closed_retention", defaults.closed_retention),
            inherited_output_grace: time("times.inherited_output", defaults.inherited_output_grace),
            snapshot_time: time("times.shell_snapshot", defaults.snapshot_time),
            drain_timeout: time("times.drain", defaults.drain_timeout),
            shutdown_grace: time("times.shutdown_grace", defaults.shutdown_grace),
            environment,
            sandbox_launcher: None,
            sandbox_hidden: self.secret_files(),
            audit: None,
            tracer: None,
            cwd: std::env::current_dir().ok(),
        })
    }
}

fn unknown(name: &str, origin: &str) -> String {
    format!("{origin}: unknown key `{name}`; `exec-server config show` lists all of them")
}

/// Name of the directory with the journals of placeholders in the state directory.
const PLACEHOLDERS: &str = "placeholders";

/// Removes the placeholders of servers that were killed together with their guardians, and keeps a
/// list of those of this server for the next one.
pub(super) fn sweep_placeholders() {
    let Some(directory) = state_directory().map(|state| state.join(PLACEHOLDERS)) else {
        return;
    };
    if let Err(error) = journal::keep_in(&directory) {
        let directory = directory.display();
        tracing::warn!(%directory, %error, "placeholders of killed servers cannot be removed");
    }
}

/// Directory of this program's keys and of the keys that it trusts.
pub(super) fn state_directory() -> Option<PathBuf> {
    let given = |name: &str| variable(name).filter(|path| !path.is_empty());
    given(STATE_VARIABLE)
        .or_else(|| given("STATE_DIRECTORY"))
        .map(PathBuf::from)
        .or_else(|| given("XDG_STATE_HOME").map(|home| PathBuf::from(home).join("exec-server")))
        .or_else(|| given("HOME").map(|home| PathBuf::from(home).join(".local/state/exec-server")))
}

/// The arguments of this program, with its name.
#[cfg(feature = "mcp")]
pub(super) fn arguments() -> impl Iterator<Item = OsString> {
    std::env::args_os()
}

/// The path of this program.
pub(super) fn program() -> Option<PathBuf> {
    std::env::current_exe().ok()
}

/// The executable of this program and its state, which file requests must not reach.
pub(super) fn own_paths() -> Vec<PathBuf> {
    program().into_iter().chain(state_paths()).collect()
}

/// The state directory. If it contains the user's home or the working directory, as a service
/// manager may configure it, the files that this program stores in it instead.
fn state_paths() -> Vec<PathBuf> {
    const NAMES: [&str; 5] = [
        PLACEHOLDERS,
        "executor.identity",
        "harness.identity",
        "known_environments",
        "rendezvous",
    ];
    let Some(directory) = state_directory() else {
        return Vec::new();
    };
    let whole = fs::canonicalize(&directory).unwrap_or_else(|_| directory.clone());
    let places = [home_directory(), std::env::current_dir().ok()];
    let mut places = places.into_iter().flatten();
    let is_shared = places.any(|place| {
        let place = fs::canonicalize(&place).unwrap_or(place);
        place.starts_with(&whole)
    });
    if is_shared {
        NAMES.map(|name| directory.join(name)).into()
    } else {
        vec![directory]
    }
}

/// Secrets that are passed to this program in variables, which are erased before it serves.
pub(super) const SECRET_VARIABLES: [&str; 4] = [
    TOKEN_VARIABLE,
    API_KEY_VARIABLE,
    "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
    "EXEC_SERVER_NOISE_AUTH_TOKEN",
];

/// Home directory of the user.
pub(super) fn home_directory() -> Option<PathBuf> {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    home.filter(|home| home.is_absolute())
}

/// Cache directory of this program.
pub(super) fn cache_directory() -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.filter(|cache| cache.is_absolute());
    let cache = cache.or_else(|| Some(home_directory()?.join(".cache")))?;
    Some(cache.join("exec-server"))
}

/// Runtime directory for sockets of this login session, if there is one.
pub(super) fn runtime_directory() -> Option<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let runtime = runtime.filter(|runtime| runtime.is_absolute())?;
    Some(runtime.join("exec-server"))
}

/// Variables that apply to one login session or to another server only. A daemon outlives the login
/// session, so it starts without them.
pub(super) fn names_of_one_login() -> Vec<OsString> {
    /// Settings that the user of a daemon may set for every login.
    const KEPT: [&str; 4] = ["LIMITS_", "TIMES_", "LOG_", "AUDIT_"];
    let names = std::env::vars_os().map(|(name, _)| name);
    names
        .filter(|name| {
            let text = name.to_string_lossy();
            let ours = text.strip_prefix("EXEC_SERVER_");
            text.starts_with("SSH_")
                || PRIVATE_VARIABLES.contains(&&*text)
                || ours.is_some_and(|ours| KEPT.iter().all(|kept| !ours.starts_with(kept)))
        })
        .collect()
}

/// Environment of this program without its own settings; variables that are not valid UTF-8 are
/// left out.
pub(crate) fn environment() -> BTreeMap<String, String> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| !PRIVATE_VARIABLES.contains(&name.as_str()))
        .collect()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::super::args::CliArgs;
    use super::*;

    fn resolve(args: &[&str], env: &[(&str, &str)]) -> anyhow::Result<Settings> {
        let args = CliArgs::parse_from(["exec-server"].iter().chain(args));
        Settings::layered(&args.serve, |name| {
            let found = env.iter().find(|(key, _)| *key == name)?;
            Some(found.1.to_owned())
        })
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    #[test]
    fn flags_beat_variables_beat_files_beat_defaults() {
        let file = file("[limits]\nsessions = 1\nprocesses = 2\nconcurrent_requests = 3\n");
        let path = file.path().to_str().unwrap();
        let settings = resolve(
            &["--config", path, "--concurrent-requests", "5"],
            &[
                ("EXEC_SERVER_LIMITS_PROCESSES", "4"),
                ("EXEC_SERVER_LIMITS_CONCURRENT_REQUESTS", "4"),
            ],
        )
        .unwrap();
        let config = settings.server().unwrap();
        assert_eq!(
            (
                config.max_sessions,
                config.max_processes,
                config.concurrent_requests
            ),
            (1, 4, 5)
        );
        assert_eq!(config.max_waiting_requests, 16_384);
        let origin = |name: &str| settings.values[name].1.to_string();
        assert_eq!(origin("limits.sessions"), path);
        assert_eq!(origin("limits.processes"), "EXEC_SERVER_LIMITS_PROCESSES");
        assert_eq!(
            origin("limits.concurrent_requests"),
            "--concurrent-requests"
        );
        assert_eq!(origin("limits.waiting_requests"), "default");
    }

    #[test]
    fn certificates_and_the_credential_program_are_protected() {
        let file = file(
            "tls.cert = \"/own/cert\"\ntls.client_ca = \"/own/clients\"\n\
             remote.tls_ca = \"/own/ca\"\nremote.credential_command = \"/own/program -x\"\n",
        );
        let path = file.path().to_str().unwrap();
        let protected = resolve(&["--config", path], &[]).unwrap().protected_paths();
        for own in ["/own/cert", "/own/clients", "/own/ca", "/own/program", path] {
            assert!(
                protected.contains(&PathBuf::from(own)),
                "{own}: {protected:?}"
            );
        }
        let set = "remote.credential_command=/bin/sh -c 'print token'";
        let protected = resolve(&["--set", set], &[]).unwrap().protected_paths();
        assert!(!protected.contains(&PathBuf::from("/bin/sh")));
    }

    #[test]
    fn values_of_every_kind_parse_from_text() {
        let settings = resolve(
            &[
                "--set",
                "limits.retained_bytes=64KiB",
                "--set",
                "auth.danger_no_auth=true",
            ],
            &[
                ("EXEC_SERVER_TIMES_DRAIN", "90"),
                ("EXEC_SERVER_TIMES_PING", "500ms"),
                ("EXEC_SERVER_LISTEN", r#"["unix:///x", "ws://127.0.0.1:1"]"#),
                ("EXEC_SERVER_AUTH_TOKEN_FILES", "ci=/x:exec,fs:read"),
                ("RUST_LOG", "debug"),
            ],
        )
        .unwrap();
        let config = settings.server().unwrap();
        assert_eq!(config.retention.bytes, 65_536);
        assert_eq!(config.drain_timeout, Duration::from_secs(90));
        assert_eq!(config.keepalive.interval, Duration::from_millis(500));
        assert!(settings.flag("auth.danger_no_auth"));
        assert_eq!(settings.listen().unwrap().len(), 2);
        assert_eq!(settings.list("auth.token_files"), ["ci=/x:exec,fs:read"]);
        assert_eq!(settings.text("log.filter"), Some("debug"));
    }

    #[test]
    fn setting_errors_name_key_and_file() {
        for (text, expected) in [
            ("limits.sesions = 1", "unknown key `limits.sesions`"),
            ("[limit]\nsessions = 1", "unknown key `limit`"),
            ("limits = 3", "unknown key `limits`"),
            (
                "[limits]\nsessions = \"many\"",
                "`limits.sessions` must be a whole number of at least 1",
            ),
            ("limits.sessions = 0", "at least 1"),
            ("times.drain = \"1d\"", "`times.drain` must be a time"),
            ("listen = \"ws://127.0.0.1:0\"", "a list of texts"),
            ("listen = [1]", "a list of texts"),
            ("auth.mode = \"none\"", "one of capability-token"),
            ("limits.retained_bytes = \"1 furlong\"", "bytes"),
            ("a = ", "cannot understand"),
        ] {
            let file = file(text);
            let path = file.path().to_str().unwrap();
            let error = resolve(&["--config", path], &[]).unwrap_err();
            let error = format!("{error:#}");
            assert!(
                error.contains(expected) && error.contains(path),
                "{text}: {error}"
            );
        }
        let error = resolve(&[], &[(FILE_VARIABLE, "/no/such/file")]).unwrap_err();
        assert!(format!("{error:#}").contains("/no/such/file"), "{error:#}");
        let error = resolve(&[], &[("EXEC_SERVER_THREADS", "0")]).unwrap_err();
        assert!(error.to_string().contains("EXEC_SERVER_THREADS"), "{error}");
        assert!(resolve(&["--set", "nonsense=1"], &[]).is_err());
        assert!(resolve(&["--set", "threads"], &[]).is_err());
    }

    #[test]
    fn stdio_listener_excludes_other_listeners() {
        let settings = resolve(&["--listen", "stdio", "--listen", "unix:///x"], &[]).unwrap();
        assert!(settings.listen().is_err());
    }

    #[test]
    fn example_settings_name_every_key_with_its_default() {
        let example = include_str!("../../../../docs/exec-server.toml");
        let uncommented: String = example
            .lines()
            .map(|line| line.strip_prefix("#").filter(|rest| !rest.starts_with(' ')))
            .zip(example.lines())
            .map(|(setting, line)| format!("{}\n", setting.unwrap_or(line)))
            .collect();
        let file = file(&uncommented);
        let path = file.path().to_str().unwrap();
        let settings = resolve(&["--config", path], &[]).unwrap();
        let config = ExecServerConfig::default();
        for (key, value) in settings.iter() {
            let name = key.name;
            let (value, origin) = value.unwrap_or_else(|| panic!("{name} is not in the example"));
            assert_eq!(origin.to_string(), path, "{name} is not in the example");
            let same = |default: &Value| {
                size(value).zip(size(default)).map_or_else(
                    || {
                        time(value)
                            .zip(time(default))
                            .map_or(value == default, |(a, b)| a == b)
                    },
                    |(a, b)| a == b,
                )
            };
            if let Some(default) = key.default {
                let default = &default(&config);
                // Keys whose default is an empty list have an example value in the file.
                let shown = default.as_array().is_some_and(Vec::is_empty) || same(default);
                assert!(shown, "{name} is {default} by default, not {value}");
            }
        }
        // The example file changes no default.
        let file = self::file(example);
        let as_is = resolve(&["--config", file.path().to_str().unwrap()], &[]).unwrap();
        assert!(KEYS.iter().all(|key| !as_is.is_set(key.name)));
    }
}
