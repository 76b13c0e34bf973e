//! Options of `serve`: listeners, authentication, TLS, limits and the registry that it serves through.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::builder::PossibleValuesParser;

use super::target::ServerArgs;
use crate::cli::values::{FORMATS, MODES};

// Options of `serve`.
#[derive(Debug, Default, clap::Args)]
pub(in crate::cli) struct ServeArgs {
    /// The command `serve` was named: without --listen, the server listens on this user's socket.
    #[arg(skip)]
    pub(in crate::cli) is_own: bool,

    /// Listen on `ws://IP:PORT`, `wss://IP:PORT`, `unix:///PATH`, `stdio`, or `off`
    ///
    /// Port 0 picks a free port. The URL for clients is printed on standard output. Can be given
    /// several times. Without --listen, `serve` listens on a private socket of this user, which `ps`,
    /// `kill`, `status` and `--on serve` find. [default without `serve`: ws://127.0.0.1:0]
    #[arg(long, value_name = "URL")]
    pub(in crate::cli) listen: Vec<String>,

    /// Read settings from this TOML file
    ///
    /// Options and variables override it.
    #[arg(long, value_name = "FILE")]
    pub(in crate::cli) config: Option<PathBuf>,

    /// Set a key of the settings: `limits.sessions=100`
    #[arg(long, value_name = "KEY=VALUE", hide_short_help = true)]
    pub(in crate::cli) set: Vec<String>,

    /// Handle up to COUNT requests of a connection at a time; 1 is serial [default: 256]
    #[arg(long, value_name = "COUNT", hide_short_help = true)]
    pub(in crate::cli) concurrent_requests: Option<NonZeroUsize>,

    /// Use COUNT threads for connections [default: one per core, one in all on up to 2 cores]
    #[arg(long, value_name = "COUNT", hide_short_help = true)]
    pub(in crate::cli) threads: Option<NonZeroUsize>,

    /// Allow all clients without authentication
    ///
    /// Every client that can reach the port can then run commands as this user, and the port may be
    /// on an address beyond loopback. Without it, and without tokens, a port serves processes of the
    /// same user and root only.
    #[arg(long)]
    pub(in crate::cli) danger_no_auth: bool,

    /// Let processes run for TIME after SIGTERM [default: 0s]
    ///
    /// A number with a unit, as in `30s` or `5m`.
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub(in crate::cli) drain: Option<String>,

    /// Write log lines in this format [default: text]
    #[arg(long, value_name = "FORMAT", value_parser = PossibleValuesParser::new(FORMATS), hide_short_help = true)]
    pub(in crate::cli) log_format: Option<String>,

    /// Log what matches, as in `info` or `exec_server_service=debug` [default: error]
    #[arg(long, value_name = "FILTER")]
    pub(in crate::cli) log: Option<String>,

    /// Serve Prometheus metrics at `http://IP:PORT/metrics`
    #[arg(long, value_name = "IP:PORT", hide_short_help = true)]
    pub(in crate::cli) metrics_listen: Option<String>,

    /// Append connections and commands to this file, as JSON lines
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(in crate::cli) audit_file: Option<PathBuf>,

    #[command(flatten)]
    pub(in crate::cli) auth: AuthArgs,

    #[command(flatten)]
    pub(in crate::cli) tls: TlsArgs,

    #[command(flatten)]
    pub(in crate::cli) remote: RemoteArgs,
}

// Authentication of connections.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Authentication")]
pub(in crate::cli) struct AuthArgs {
    /// Require a bearer token from clients
    #[arg(long, value_name = "MODE", value_parser = PossibleValuesParser::new(MODES))]
    pub(in crate::cli) ws_auth: Option<String>,

    /// Accept the token in FILE; `NAME=FILE:SCOPE,SCOPE` limits it to scopes
    ///
    /// Scopes are exec, fs:read, fs:write and observe; `until=2027-01-31` beside them lets the token
    /// expire at the end of that day (UTC), `until=2027-01-31T12:00:00Z` at that time. Can be given
    /// several times. A file that changes is read again within a second.
    #[arg(long, value_name = "FILE")]
    pub(in crate::cli) ws_token_file: Vec<String>,

    /// Accept the token with this SHA-256; `NAME=HEX:SCOPE,SCOPE` limits it to scopes
    #[arg(long, value_name = "HEX")]
    pub(in crate::cli) ws_token_sha256: Vec<String>,

    /// Accept tokens (JWT, HS256) signed with the secret in FILE, of 32 bytes or more
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(in crate::cli) ws_shared_secret_file: Option<PathBuf>,

    /// Require this issuer in signed tokens
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub(in crate::cli) ws_issuer: Option<String>,

    /// Require this audience in signed tokens
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub(in crate::cli) ws_audience: Option<String>,

    /// Tolerate this difference between the clocks of issuer and server [default: 30]
    #[arg(long, value_name = "SECONDS", hide_short_help = true)]
    pub(in crate::cli) ws_max_clock_skew_seconds: Option<u32>,

    /// Accept connections from web pages of this origin, as in `https://console.example`
    ///
    /// Without it, connections from web pages are refused. Can be given several times.
    #[arg(long, value_name = "ORIGIN", hide_short_help = true)]
    pub(in crate::cli) allow_origin: Vec<String>,
}

// TLS of `wss://` listeners.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "TLS")]
pub(in crate::cli) struct TlsArgs {
    /// Serve with this certificate and its chain (PEM)
    ///
    /// Reloaded when the file changes, and on SIGHUP.
    #[arg(long, value_name = "FILE")]
    pub(in crate::cli) tls_cert: Option<PathBuf>,

    /// Use this key of the certificate (PEM)
    #[arg(long, value_name = "FILE")]
    pub(in crate::cli) tls_key: Option<PathBuf>,

    /// Create a certificate and print its pin for clients' --tls-pin
    ///
    /// Stored in the files of --tls-cert and --tls-key if they are given, else in memory only.
    #[arg(long)]
    pub(in crate::cli) tls_self_signed: bool,

    /// Require client certificates signed by one of these authorities (PEM)
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(in crate::cli) tls_client_ca: Option<PathBuf>,
}

// Serving through a registry instead of listening.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Remote mode")]
pub(in crate::cli) struct RemoteArgs {
    /// Register at this registry, `https://HOST`, and serve through it
    #[arg(long, value_name = "URL")]
    pub(in crate::cli) remote: Option<String>,

    /// Register this machine under this environment id
    #[arg(long, value_name = "ID")]
    pub(in crate::cli) environment_id: Option<String>,

    /// Show this display name in `exec-server fleet environments`
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub(in crate::cli) name: Option<String>,

    /// Keep this machine's identity keys in FILE; created if it does not exist
    ///
    /// [default: `executor.identity` in EXEC_SERVER_STATE_DIR, `$XDG_STATE_HOME/exec-server` or
    /// `~/.local/state/exec-server`]
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(in crate::cli) identity_file: Option<PathBuf>,

    /// Read the registry's token from FILE
    ///
    /// [env: EXEC_SERVER_API_KEY or CODEX_API_KEY: the token itself]
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(in crate::cli) remote_token_file: Option<PathBuf>,

    /// Read credentials for the registry from standard input, one JSON object per line
    ///
    /// Ends when standard input does.
    #[arg(
        long,
        conflicts_with = "use_agent_identity_auth",
        hide_short_help = true
    )]
    pub(in crate::cli) executor_credential_stdin: bool,

    /// Read one bearer token for the registry from standard input, a line of at most 16 KiB
    #[arg(
        long,
        conflicts_with_all = ["use_agent_identity_auth", "executor_credential_stdin"],
        hide_short_help = true
    )]
    pub(in crate::cli) registration_bearer_stdin: bool,

    /// Authenticate as the agent whose identity is in CODEX_ACCESS_TOKEN
    ///
    /// Tasks are registered at the URL in EXEC_SERVER_AGENT_AUTH_API.
    #[arg(long, hide_short_help = true)]
    pub(in crate::cli) use_agent_identity_auth: bool,

    /// Stop when standard input ends
    #[arg(
        long,
        env = "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE",
        value_parser = clap::builder::FalseyValueParser::new(),
        hide_short_help = true
    )]
    pub(in crate::cli) exit_on_stdin_close: bool,

    /// Trust the registry with this key (`sha256//…`)
    #[arg(long, value_name = "PIN", hide_short_help = true)]
    pub(in crate::cli) remote_tls_pin: Option<String>,

    /// Trust these certificate authorities (PEM) for the registry instead of the system's
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(in crate::cli) remote_tls_ca: Option<PathBuf>,

    /// Allow sending credentials to a registry on another machine without TLS
    #[arg(long, hide_short_help = true)]
    pub(in crate::cli) danger_plain_http: bool,

    /// Run this shell command before each connection; its output is the registry's token
    #[arg(long, value_name = "COMMAND", hide_short_help = true)]
    pub(in crate::cli) credential_command: Option<String>,

    /// Keep trying if the registry reports that the environment was deleted
    ///
    /// Without it, the program then exits with 1, unless the registry asks executors to stay, as
    /// `exec-server rendezvous` does.
    #[arg(long, hide_short_help = true)]
    pub(in crate::cli) stay: bool,

    /// Serve GET /ready and POST /suspend, /resume and /terminate on this loopback address
    #[arg(long, value_name = "IP:PORT", hide_short_help = true)]
    pub(in crate::cli) lifecycle_listen: Option<String>,

    /// Whether this program was called as `codex exec-server`.
    #[arg(skip)]
    pub(in crate::cli) as_codex: bool,
}

// Options of `forward`.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct ForwardArgs {
    /// Forward to this server: `ws://HOST:PORT`, `wss://HOST:PORT` or `unix:///PATH`
    #[arg(
        long,
        value_name = "URL",
        required_unless_present = "command",
        conflicts_with = "command"
    )]
    pub(in crate::cli) connect: Option<String>,

    /// Read the server's token from FILE
    #[arg(long, value_name = "FILE", requires = "connect")]
    pub(in crate::cli) connect_token_file: Option<PathBuf>,

    /// Trust the server with this key (`sha256//…`)
    #[arg(long, value_name = "PIN", requires = "connect")]
    pub(in crate::cli) connect_tls_pin: Option<String>,

    /// Trust these certificate authorities (PEM) for the server instead of the system's
    #[arg(long, value_name = "FILE", requires = "connect")]
    pub(in crate::cli) connect_tls_ca: Option<PathBuf>,

    /// Read settings from this TOML file; only `remote` and `log` are used
    #[arg(long, value_name = "FILE")]
    pub(in crate::cli) config: Option<PathBuf>,

    /// Log what matches, as in `info` or `exec_server_service=debug` [default: error]
    #[arg(long, value_name = "FILTER")]
    pub(in crate::cli) log: Option<String>,

    /// Start this command for each client and forward to its standard input and output
    #[arg(last = true, value_name = "COMMAND")]
    pub(in crate::cli) command: Vec<String>,

    #[command(flatten)]
    pub(in crate::cli) remote: RemoteArgs,
}

// Options of `env trust`.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct TrustArgs {
    /// Trust this key, without asking the registry for the current one
    #[arg(long, value_name = "HEX")]
    pub(in crate::cli) fingerprint: Option<String>,

    /// Remove the stored key; the next one that the environment shows is trusted
    #[arg(long, conflicts_with = "fingerprint")]
    pub(in crate::cli) forget: bool,

    /// List the stored keys
    #[arg(long, conflicts_with_all = ["fingerprint", "forget", "environment"])]
    pub(in crate::cli) list: bool,

    /// Name the environment: `registry://HOST[:PORT]/ENVIRONMENT`
    #[arg(required_unless_present = "list", value_name = "URL")]
    pub(in crate::cli) environment: Option<String>,

    #[command(flatten)]
    pub(in crate::cli) server: ServerArgs,
}
