//! Every key of the settings: its name, kind, default and flag.
//!
//! The order is the one in which keys are shown. What a key does is in `settings`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use exec_server_egress::http::DEFAULT_DENY;
use exec_server_engine::configuration::ConfigFiles;
use exec_server_service::{DEFAULT_LISTEN_URL, ExecServerConfig, auth};
use toml::Value;

use crate::cli::args::ServeArgs;
use crate::cli::values::{FORMATS, MODES, parse_duration};

/// One setting. The file names it, a variable derived from the name sets it, and so may a flag.
pub(in crate::cli) struct SettingKey {
    pub(in crate::cli) name: &'static str,
    pub(super) kind: ValueKind,
    /// The default value, if the key has one.
    pub(super) default: Option<fn(&ExecServerConfig) -> Value>,
    /// The flag, and its value if it was given.
    pub(super) flag: Option<(&'static str, FlagValue)>,
}

/// Returns the value of a flag.
pub(super) type FlagValue = fn(&ServeArgs) -> Option<Value>;

impl SettingKey {
    const fn new(name: &'static str, kind: ValueKind) -> Self {
        Self {
            name,
            kind,
            default: None,
            flag: None,
        }
    }

    const fn default(mut self, value: fn(&ExecServerConfig) -> Value) -> Self {
        self.default = Some(value);
        self
    }

    const fn flag(mut self, name: &'static str, value: FlagValue) -> Self {
        self.flag = Some((name, value));
        self
    }

    /// The key of this name.
    pub(super) fn named(name: &str) -> Option<&'static Self> {
        KEYS.iter().find(|key| key.name == name)
    }

    /// The variable that sets the key.
    pub(in crate::cli) fn variable(&self) -> String {
        let name = self.name.replace('.', "_").to_uppercase();
        format!("EXEC_SERVER_{name}")
    }
}

/// Every key there is, in the order in which they are shown.
pub(super) static KEYS: &[SettingKey] = &[
    SettingKey::new("listen", ValueKind::List)
        .default(|_| list(&[DEFAULT_LISTEN_URL]))
        .flag("--listen", |args| several(&args.listen)),
    SettingKey::new("threads", ValueKind::Count(1)).flag("--threads", |args| {
        args.threads.map(|number| count(number.get()))
    }),
    SettingKey::new("auth.mode", ValueKind::Choice(MODES))
        .flag("--ws-auth", |args| args.auth.ws_auth.as_deref().map(text)),
    SettingKey::new("auth.token_files", ValueKind::List)
        .default(|_| list(&[]))
        .flag("--ws-token-file", |args| several(&args.auth.ws_token_file)),
    SettingKey::new("auth.token_sha256", ValueKind::List)
        .default(|_| list(&[]))
        .flag("--ws-token-sha256", |args| {
            several(&args.auth.ws_token_sha256)
        }),
    SettingKey::new("auth.shared_secret_file", ValueKind::Text)
        .flag("--ws-shared-secret-file", |args| {
            args.auth.ws_shared_secret_file.as_deref().map(path)
        }),
    SettingKey::new("auth.issuer", ValueKind::Text).flag("--ws-issuer", |args| {
        args.auth.ws_issuer.as_deref().map(text)
    }),
    SettingKey::new("auth.audience", ValueKind::Text).flag("--ws-audience", |args| {
        args.auth.ws_audience.as_deref().map(text)
    }),
    SettingKey::new("auth.max_clock_skew", ValueKind::Time)
        .default(|_| duration(auth::DEFAULT_CLOCK_SKEW))
        .flag("--ws-max-clock-skew-seconds", |args| {
            args.auth
                .ws_max_clock_skew_seconds
                .map(|seconds| Value::Integer(seconds.into()))
        }),
    SettingKey::new("auth.allow_origins", ValueKind::List)
        .default(|_| list(&[]))
        .flag("--allow-origin", |args| several(&args.auth.allow_origin)),
    SettingKey::new("auth.trusted_proxies", ValueKind::List).default(|_| list(&[])),
    SettingKey::new("auth.danger_no_auth", ValueKind::Flag)
        .default(|_| Value::Boolean(false))
        .flag("--danger-no-auth", |args| switch(args.danger_no_auth)),
    SettingKey::new("tls.cert", ValueKind::Text)
        .flag("--tls-cert", |args| args.tls.tls_cert.as_deref().map(path)),
    SettingKey::new("tls.key", ValueKind::Text)
        .flag("--tls-key", |args| args.tls.tls_key.as_deref().map(path)),
    SettingKey::new("tls.self_signed", ValueKind::Flag)
        .default(|_| Value::Boolean(false))
        .flag("--tls-self-signed", |args| switch(args.tls.tls_self_signed)),
    SettingKey::new("tls.client_ca", ValueKind::Text).flag("--tls-client-ca", |args| {
        args.tls.tls_client_ca.as_deref().map(path)
    }),
    SettingKey::new("remote.url", ValueKind::Text)
        .flag("--remote", |args| args.remote.remote.as_deref().map(text)),
    SettingKey::new("remote.environment_id", ValueKind::Text).flag("--environment-id", |args| {
        args.remote.environment_id.as_deref().map(text)
    }),
    SettingKey::new("remote.name", ValueKind::Text)
        .flag("--name", |args| args.remote.name.as_deref().map(text)),
    SettingKey::new("remote.identity_file", ValueKind::Text).flag("--identity-file", |args| {
        args.remote.identity_file.as_deref().map(path)
    }),
    SettingKey::new("remote.token_file", ValueKind::Text).flag("--remote-token-file", |args| {
        args.remote.remote_token_file.as_deref().map(path)
    }),
    SettingKey::new("remote.tls_pin", ValueKind::Text).flag("--remote-tls-pin", |args| {
        args.remote.remote_tls_pin.as_deref().map(text)
    }),
    SettingKey::new("remote.tls_ca", ValueKind::Text).flag("--remote-tls-ca", |args| {
        args.remote.remote_tls_ca.as_deref().map(path)
    }),
    SettingKey::new("remote.danger_plain_http", ValueKind::Flag)
        .default(|_| Value::Boolean(false))
        .flag("--danger-plain-http", |args| {
            switch(args.remote.danger_plain_http)
        }),
    SettingKey::new("remote.credential_command", ValueKind::Text)
        .flag("--credential-command", |args| {
            args.remote.credential_command.as_deref().map(text)
        }),
    SettingKey::new("remote.stay", ValueKind::Flag)
        .default(|_| Value::Boolean(false))
        .flag("--stay", |args| switch(args.remote.stay)),
    SettingKey::new("remote.lifecycle_listen", ValueKind::Text)
        .flag("--lifecycle-listen", |args| {
            args.remote.lifecycle_listen.as_deref().map(text)
        }),
    SettingKey::new("limits.connections", ValueKind::Count(1))
        .default(|config| count(config.max_connections)),
    SettingKey::new("limits.connections_per_address", ValueKind::Count(1))
        .default(|config| count(config.max_connections_per_address)),
    SettingKey::new("limits.sessions", ValueKind::Count(1))
        .default(|config| count(config.max_sessions)),
    SettingKey::new("limits.processes", ValueKind::Count(1))
        .default(|config| count(config.max_processes)),
    SettingKey::new("limits.processes_per_session", ValueKind::Count(1))
        .default(|config| count(config.max_processes_per_session)),
    SettingKey::new("limits.concurrent_requests", ValueKind::Count(1))
        .default(|config| count(config.concurrent_requests))
        .flag("--concurrent-requests", |args| {
            args.concurrent_requests.map(|number| count(number.get()))
        }),
    SettingKey::new("limits.waiting_requests", ValueKind::Count(1))
        .default(|config| count(config.max_waiting_requests)),
    SettingKey::new("limits.retained_bytes", ValueKind::Size)
        .default(|config| count(config.retention.bytes)),
    SettingKey::new("limits.retained_chunks", ValueKind::Count(1))
        .default(|config| count(config.retention.chunks)),
    SettingKey::new("limits.total_retained_bytes", ValueKind::Size)
        .default(|config| count(config.max_retained_bytes)),
    SettingKey::new("limits.response_bytes", ValueKind::Size)
        .default(|config| count(config.max_queued_bytes)),
    SettingKey::new("limits.incomplete_bytes", ValueKind::Size)
        .default(|config| count(config.max_incomplete_bytes)),
    SettingKey::new("times.handshake", ValueKind::Time)
        .default(|config| duration(config.handshake_timeout)),
    SettingKey::new("times.ping", ValueKind::Time)
        .default(|config| duration(config.keepalive.interval)),
    SettingKey::new("times.silence", ValueKind::Time)
        .default(|config| duration(config.keepalive.deadline)),
    SettingKey::new("times.detach_grace", ValueKind::Time)
        .default(|config| duration(config.detach_grace)),
    SettingKey::new("times.max_detach_grace", ValueKind::Time)
        .default(|config| duration(config.max_detach_grace)),
    SettingKey::new("times.closed_retention", ValueKind::Time)
        .default(|config| duration(config.closed_retention)),
    SettingKey::new("times.inherited_output", ValueKind::Time)
        .default(|config| duration(config.inherited_output_grace)),
    SettingKey::new("times.shell_snapshot", ValueKind::Time)
        .default(|config| duration(config.snapshot_time)),
    SettingKey::new("times.drain", ValueKind::Time)
        .default(|config| duration(config.drain_timeout))
        .flag("--drain", |args| args.drain.as_deref().map(text)),
    SettingKey::new("times.shutdown_grace", ValueKind::Time)
        .default(|config| duration(config.shutdown_grace)),
    SettingKey::new("http.allow", ValueKind::List).default(|_| list(&[])),
    SettingKey::new("http.deny", ValueKind::List).default(|_| list(DEFAULT_DENY)),
    SettingKey::new("http.proxy", ValueKind::Text).default(|_| text("environment")),
    SettingKey::new("http.max_response_bytes", ValueKind::Size)
        .default(|config| count(config.http.max_response_bytes)),
    SettingKey::new("http.max_stream_bytes", ValueKind::Size),
    SettingKey::new("client_config.system", ValueKind::Text)
        .default(|_| text(&codex_files().system.to_string_lossy())),
    SettingKey::new("client_config.home", ValueKind::Text),
    SettingKey::new("client_config.file", ValueKind::Text).default(|_| text(&codex_files().config)),
    SettingKey::new("client_config.requirements_file", ValueKind::Text)
        .default(|_| text(&codex_files().requirements)),
    SettingKey::new("client_config.managed_file", ValueKind::Text)
        .default(|_| text(&codex_files().managed)),
    SettingKey::new("client_config.project_directory", ValueKind::Text)
        .default(|_| text(&codex_files().project_directory)),
    SettingKey::new("client_config.project_marker", ValueKind::Text)
        .default(|_| text(&codex_files().project_marker)),
    SettingKey::new("client_config.discover_all", ValueKind::Flag)
        .default(|_| Value::Boolean(false)),
    SettingKey::new("log.format", ValueKind::Choice(FORMATS))
        .default(|_| text("text"))
        .flag("--log-format", |args| args.log_format.as_deref().map(text)),
    SettingKey::new("log.filter", ValueKind::Text)
        .default(|_| text("error"))
        .flag("--log", |args| args.log.as_deref().map(text)),
    SettingKey::new("metrics.listen", ValueKind::Text).flag("--metrics-listen", |args| {
        args.metrics_listen.as_deref().map(text)
    }),
    SettingKey::new("traces.endpoint", ValueKind::Text),
    SettingKey::new("traces.service", ValueKind::Text).default(|_| text("exec-server")),
    SettingKey::new("audit.file", ValueKind::Text)
        .flag("--audit-file", |args| args.audit_file.as_deref().map(path)),
    SettingKey::new("audit.redact", ValueKind::List).default(|_| list(&[])),
];

/// Type of a setting's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ValueKind {
    Flag,
    Text,
    Choice(&'static [&'static str]),
    List,
    /// A whole number with this minimum.
    Count(i64),
    /// Bytes: a number, or one with KiB, MiB or GiB.
    Size,
    /// A time like `10s`, or a number of seconds.
    Time,
}

impl fmt::Display for ValueKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("true or false"),
            Self::Text => f.write_str("a text"),
            Self::Choice(names) => write!(f, "one of {}", names.join(", ")),
            Self::List => f.write_str("a list of texts"),
            Self::Count(least) => write!(f, "a whole number of at least {least}"),
            Self::Size => f.write_str("a number of bytes, as in 65536 or \"64KiB\""),
            Self::Time => f.write_str("a time, as in \"500ms\", \"10s\", \"5m\" or \"1h\""),
        }
    }
}

impl ValueKind {
    /// Whether a value is of this kind.
    pub(super) fn fits(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Flag, Value::Boolean(_)) | (Self::Text, Value::String(_)) => true,
            (Self::Choice(names), Value::String(text)) => names.contains(&text.as_str()),
            (Self::List, Value::Array(items)) => items.iter().all(Value::is_str),
            (Self::Count(least), Value::Integer(number)) => *number >= least,
            (Self::Size, value) => size(value).is_some(),
            (Self::Time, value) => time(value).is_some(),
            _ => false,
        }
    }

    /// Converts text to a value of this kind; text that cannot be converted stays text and is rejected
    /// later.
    pub(super) fn typed(self, text: &str) -> Value {
        let plain = || Value::String(text.to_owned());
        match self {
            Self::Text | Self::Choice(_) => plain(),
            Self::Flag => text.parse().map_or_else(|_| plain(), Value::Boolean),
            Self::Count(_) | Self::Size | Self::Time => {
                text.parse().map_or_else(|_| plain(), Value::Integer)
            }
            // A list has the syntax of the settings file; a single element may be written without
            // brackets.
            Self::List => match format!("list = {text}").parse::<toml::Table>() {
                Ok(mut table) if text.starts_with('[') => {
                    table.remove("list").unwrap_or_else(plain)
                }
                _ => Value::Array(vec![plain()]),
            },
        }
    }
}

pub(super) fn size(value: &Value) -> Option<usize> {
    match value {
        Value::Integer(bytes) => usize::try_from(*bytes).ok(),
        Value::String(text) => {
            let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
            let unit = match &text[digits.len()..] {
                "" | "B" => 1,
                "KiB" => 1 << 10,
                "MiB" => 1 << 20,
                "GiB" => 1 << 30,
                _ => return None,
            };
            digits.trim_end().parse::<usize>().ok()?.checked_mul(unit)
        }
        _ => None,
    }
}

pub(super) fn time(value: &Value) -> Option<Duration> {
    match value {
        Value::Integer(seconds) => u64::try_from(*seconds).ok().map(Duration::from_secs),
        Value::String(text) => parse_duration(text).ok(),
        _ => None,
    }
}

fn text(text: &str) -> Value {
    Value::String(text.to_owned())
}

fn path(path: &Path) -> Value {
    Value::String(path.to_string_lossy().into_owned())
}

fn list(items: &[&str]) -> Value {
    Value::Array(items.iter().map(|item| text(item)).collect())
}

fn count(number: usize) -> Value {
    Value::Integer(i64::try_from(number).unwrap_or(i64::MAX))
}

fn duration(time: Duration) -> Value {
    Value::String(if time.subsec_millis() == 0 {
        format!("{}s", time.as_secs())
    } else {
        format!("{}ms", time.as_millis())
    })
}

/// A list, unless it is empty.
fn several(items: &[String]) -> Option<Value> {
    let list = || Value::Array(items.iter().map(|item| text(item)).collect());
    (!items.is_empty()).then(list)
}

fn switch(on: bool) -> Option<Value> {
    on.then_some(Value::Boolean(true))
}

fn codex_files() -> ConfigFiles {
    ConfigFiles::codex(PathBuf::new())
}
