//! Definition of the command line: commands, options and their help.
//!
//! Structs of options and subcommands have plain comments: clap would show a doc comment as the first
//! line of the command's help page, in place of the one in [`CliCommand`].

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum};
use exec_server_protocol::process::SignalName;
use exec_server_rendezvous::TokenRole;

use super::settings::{FORMATS, MODES};
use super::{codex, overview};

use super::fs::args::{CpArgs, FsArgs};
use super::kill::signal_named;

/// Ends the short help of every command that works on another machine.
macro_rules! machine_note {
    () => {
        "

Machine: --on ENVIRONMENT or --url URL; else EXEC_SERVER_URL, else the default
environment (`exec-server env`). All connection options: --help"
    };
}

/// Run commands and use files on any machine, without losing a byte
#[derive(Debug, Parser)]
#[command(name = "exec-server", version, args_conflicts_with_subcommands = true)]
#[command(after_help = "Examples:
  exec-server run -- make test                   run a command on this machine
  exec-server run --on ssh://build -- make test  on a machine with an sshd
  exec-server serve                              serve this machine; prints a URL
  exec-server run --url URL -- bash              open a shell on a served machine
  exec-server cp -r src ssh://build:/srv         copy a directory there

`exec-server COMMAND -h` shows a command's options, --help all about it.")]
#[command(after_long_help = "Examples:
  exec-server run -- make test                       run a command here
  exec-server run --on ssh://build -- make test      on a machine with an sshd
  exec-server serve --listen ws://127.0.0.1:4600     serve on a fixed port
  exec-server run --url ws://127.0.0.1:4600 -- bash  open a shell there
  exec-server ps --url ws://127.0.0.1:4600           list what runs there
  exec-server fs --url ws://127.0.0.1:4600 ls -l     list the files there
  exec-server cp -r src ws://127.0.0.1:4600:/srv     copy a directory there
  exec-server env add worker ws://127.0.0.1:4600     give a machine a name
  exec-server run --on worker -- make test           run a command on it

Serve other machines, with a token and TLS:
  exec-server token new --out token
  exec-server serve --listen wss://0.0.0.0:4600 --tls-self-signed \\
      --ws-auth capability-token --ws-token-file token

Serve through a registry, from behind NAT, and use that from anywhere:
  exec-server serve --remote https://meet.example --environment-id build-7 \\
      --remote-token-file executor.token
  exec-server run --url registry://meet.example/build-7 --token-file token -- make

Without a command, options are those of `serve`.

Exit codes: 0 success, 1 failure, 2 wrong usage; `run` and `fs search` have
their own, see their --help.")]
pub(super) struct CliArgs {
    #[command(subcommand)]
    pub(super) command: Option<CliCommand>,
    #[command(flatten)]
    pub(super) serve: ServeArgs,
}

/// The commands alone, without the options of `serve` at the top level.
///
/// Defining all commands takes longer than most commands take to run. Parsing with this type
/// suffices when a command is named first and its options are valid; [`CliArgs`] handles the rest,
/// errors and help included.
#[derive(Debug, Parser)]
#[command(name = "exec-server", version)]
struct CommandsOnly {
    #[command(subcommand)]
    command: CliCommand,
}

/// `run` alone: its definition delays the command that it starts.
#[derive(Debug, Parser)]
#[command(name = "exec-server run")]
struct RunOnly {
    #[command(flatten)]
    run: RunArgs,
}

/// The whole definition, with the commands in groups; the options of `serve` are on its own page.
pub(super) fn definition() -> clap::Command {
    let command = CliArgs::command();
    let template = overview::template(&command);
    command
        .mut_args(|arg| arg.hide(true))
        .override_usage("exec-server <COMMAND> [OPTIONS]")
        .help_template(template)
}

impl CliCommand {
    /// The same command. The flag records that `serve` was typed and is not only the default.
    fn named(mut self) -> Self {
        if let Self::Serve(args) = &mut self {
            args.is_own = true;
        }
        self
    }

    /// Parses this program's arguments.
    ///
    /// If there is no command to run, prints the help, the version or the error, and returns the exit
    /// code.
    pub(super) fn parse() -> Result<Self, ExitCode> {
        let arguments: Vec<OsString> = std::env::args_os().collect();
        if let Some(parsed) = codex::parse(&arguments) {
            return parsed;
        }
        let first = arguments.get(1).cloned().unwrap_or_default();
        if (first == "run" || first == "exec")
            && let Ok(only) = RunOnly::try_parse_from(&arguments[1..])
        {
            return Ok(Self::Run(only.run));
        }
        let is_named = !first.is_empty() && !first.as_encoded_bytes().starts_with(b"-");
        if is_named && let Ok(named) = CommandsOnly::try_parse_from(&arguments) {
            return Ok(named.command.named());
        }
        if let Some(code) = overview::answer() {
            return Err(code);
        }
        let mut definition = definition();
        let parsed = definition
            .try_get_matches_from_mut(arguments)
            .and_then(|mut matches| CliArgs::from_arg_matches_mut(&mut matches));
        match parsed {
            Ok(args) => Ok(match args.command {
                Some(command) => command.named(),
                None => Self::Serve(Box::new(args.serve)),
            }),
            Err(error) => Err(refuse(&error.format(&mut definition))),
        }
    }
}

/// Prints the requested help or version, or the error in the arguments.
pub(super) fn refuse(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    match text.strip_prefix("error: ") {
        Some(text) if error.use_stderr() => eprint!("exec-server: {text}"),
        _ => {
            let _ = error.print();
        }
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

#[derive(Debug, Subcommand)]
// Defines only the command that is named, because defining all of them takes longer than most
// commands run.
#[command(defer = true)]
pub(super) enum CliCommand {
    /// Serve clients: run their commands, give them files
    #[command(after_help = "Examples:
  exec-server serve                    for this user: exec-server run --on serve
  exec-server serve --listen unix:///run/exec.sock
  exec-server serve --listen wss://0.0.0.0:4600 --tls-self-signed \\
      --ws-auth capability-token --ws-token-file token

Prints the URL of each listener on standard output. SIGTERM stops the server and
everything it runs; SIGHUP reloads settings, tokens and certificates.
More options, for signed tokens and remote mode: --help")]
    Serve(Box<ServeArgs>),
    /// Run a command, here or on another machine, as if in this terminal
    #[command(
        alias = "exec",
        after_help = concat!("Examples:
  exec-server run -- make test
  exec-server run --on ssh://build --cwd /srv/app -e CI=1 -- ./build.sh
  exec-server run --sandbox workspace-write -- make test
  exec-server run -- sh -c 'cd src && ls | wc -l'        with a shell

Exit codes: the command's own, 128 + N if signal N ended it, 124 timeout,
125 exec-server failed, 126 not executable, 127 not found", machine_note!()),
        after_long_help = concat!("Examples:
  exec-server run -- make test
  exec-server run --on ssh://build --cwd /srv/app -e CI=1 -- ./build.sh
  exec-server run --sandbox workspace-write -- make test
  exec-server run -- sh -c 'cd src && ls | wc -l'        with a shell
  tar c src | exec-server run --url ws://127.0.0.1:4600 --no-tty -- tar x -C /tmp

Exit codes:
  the command's own, or 128 + N if signal N ended it
  124  the command was still running at the end of --timeout
  125  exec-server itself failed
  126  the command cannot be executed
  127  the command was not found
  129  ~. was typed
  141  the reader of the output has closed it, as `head` does

On a terminal, at the beginning of a line (after Enter): ~. ends the command and
this program, also without a connection; ~? lists the escape sequences; ~~ sends
~. Without a terminal, a second ^C within 5 s ends both.", machine_note!())
    )]
    Run(RunArgs),
    /// List the processes of a server, of all its sessions
    #[command(after_help = concat!("Examples:
  exec-server ps --on build
  exec-server ps --url ws://127.0.0.1:4600 --all --json", machine_note!()))]
    Ps(PsArgs),
    /// End a process of a server, with everything it started
    #[command(after_help = concat!("Examples:
  exec-server kill --url ws://127.0.0.1:4600 build-7
  exec-server kill -s INT build-7
  exec-server kill -9 464 run-461            several, by pid or id
  exec-server kill 3f2a/build-7              in the session whose id begins with 3f2a

`exec-server ps` lists processes and sessions. Sends SIGTERM, and SIGKILL after
--grace; prints what could not be ended and exits with 1.", machine_note!()))]
    Kill(KillArgs),
    /// List, read, copy, change, search and watch files
    #[command(after_help = concat!("Examples:
  exec-server fs --url ws://127.0.0.1:4600 ls -l /srv
  exec-server fs put -r src /srv/app
  exec-server fs cat app.log

Paths are those of the machine where the files are. On a server, relative paths
begin at the directory that it was started in.", machine_note!()))]
    Fs(FsArgs),
    /// Copy files and directories between this machine and another
    #[command(
        after_help = concat!("Examples:
  exec-server cp --on build notes.txt :              into the server's directory
  exec-server cp -r src ws://127.0.0.1:4600:/srv/app
  exec-server cp -a build:/srv/app backup            back, with modes and times

At least one path is on a server: `ENV:PATH`, `URL:PATH`, or `:PATH`
with --on, --url or EXEC_SERVER_URL. A file with a colon in its name is `./NAME`.",
            machine_note!()),
        after_long_help = concat!("Examples:
  exec-server cp --on build notes.txt :              into the server's directory
  exec-server cp -r src ws://127.0.0.1:4600:/srv/app
  exec-server cp -a build:/srv/app backup            back, and only what has changed
  exec-server cp -a --delete src/. :/srv/app         make both sides equal
  exec-server cp ':~/logs/*.log' .                   patterns of the server, in quotes
  exec-server cp -a build:/srv/app test:/srv         from one server to another

A path on a server is `:PATH` on the server that --on, --url or EXEC_SERVER_URL
names, `ENV:PATH` or `URL:PATH`. Relative paths there begin at the directory that
the server was started in, `~/` at the home directory of its user. A file with a
colon in its name is written `./NAME`.

As with `cp`, what is copied to an existing directory goes into it; `DIR/.`
means the contents of DIR. Symbolic links are copied as links. A new file has
the mode of its source, reduced by the umask; -p and -a keep modes and times.

An interrupted copy of a file of 8 MiB or more resumes where it stopped, if what
has arrived is the beginning of the file. Until it is complete it is stored
beside its target as `.NAME.exec-server-part`. What cannot be copied is reported
on standard error, the rest is copied, and the exit code is 1.", machine_note!())
    )]
    Cp(CpArgs),
    /// Name the machines to work on, and choose the default
    #[command(
        subcommand,
        after_help = "Examples:
  exec-server env add worker wss://build-host:4600 --token-file worker.token
  exec-server env add box ssh://me@box/srv/app
  exec-server env use worker             make it the default of run, ps, fs and cp
  exec-server run --on box -- make test
  exec-server env status                 check which of them answer

Environments are stored in `environments.toml`, in EXEC_SERVER_HOME or
~/.config/exec-server."
    )]
    Env(EnvCommand),
    /// Start a per-user server in the background and print its socket
    ///
    /// `ssh://` uses it on the remote machine. It outlives the connection and ends by itself when it
    /// has no connections, sessions and processes for the time of --idle.
    Daemon(DaemonArgs),
    /// Create, sign and inspect access tokens
    #[command(subcommand)]
    Token(TokenCommand),
    /// Show the server's settings and where each came from
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Show a server's version, latency and load
    #[command(after_help = concat!("Example:
  exec-server status --url ws://127.0.0.1:4600", machine_note!()))]
    Status(StatusArgs),
    /// Check which sandbox features this machine supports
    ///
    /// Prints how to enable the others.
    #[command(after_help = "Exit codes: 0 all features can be used, 1 some cannot.")]
    Doctor(DoctorArgs),
    /// Run a rendezvous server: a relay for machines behind NAT
    ///
    /// Registry and end-to-end encrypted relay.
    #[command(
        args_conflicts_with_subcommands = true,
        after_help = "Examples:
  exec-server rendezvous                           try it on this machine
  exec-server rendezvous --listen https://0.0.0.0:443 \\
      --tls-cert cert.pem --tls-key key.pem        for other machines
  exec-server rendezvous token-add ci --role harness --environment 'build-*'

Without options it listens on loopback, creates a token of each role in its
state directory and prints the commands to type next.
Lifetimes, quotas, OIDC, NATS, metrics and the token file: --help",
        after_long_help = "Examples:
  exec-server rendezvous                           try it on this machine
  exec-server rendezvous --listen https://0.0.0.0:443 \\
      --tls-cert cert.pem --tls-key key.pem        for other machines
  exec-server rendezvous --listen https://0.0.0.0:4700 --tls-self-signed
  exec-server rendezvous token-add ci --role harness --environment 'build-*'

Without options it listens on loopback, creates a token of each role in its
state directory and prints the commands to type next.

Executors register and harnesses connect, each over a websocket. Their traffic is
encrypted end to end: the server sees who communicates with whom, when and how
much, but no content.

The token file has one line per token: NAME ROLES TOKEN [ENVIRONMENTS]
[tenant=TENANT]. ROLES are executor, harness and admin, separated by commas;
TOKEN is `sha256:` and the hash of the token, or the token itself; ENVIRONMENTS
are ids or prefixes with a `*`. Tenants cannot see each other; the default tenant
is `default`, and an admin with `tenant=*` administers all of them. The file is
reloaded when it changes; connections whose token was removed are closed within
one second.

SIGHUP reloads tokens and certificates. SIGTERM shuts down; clients reconnect by
themselves.

HTTP, for admins, with a bearer token: GET /cloud/environments,
POST /cloud/environment/ID/remove, POST /cloud/revoke and /cloud/permit
{\"harness\": \"token:NAME\" or \"key:SHA256\", \"environment_id\": ID},
GET /cloud/revocations, GET /cloud/streams, GET /events; `exec-server fleet` uses
them. Without a token: GET /healthz and /readyz."
    )]
    Rendezvous(Box<RendezvousArgs>),
    /// Administer rendezvous servers: environments, tokens, load
    #[command(after_help = "Examples:
  exec-server fleet nodes
  exec-server fleet environments --url https://meet.example \\
      --admin-token-file admin.token
  exec-server fleet streams build-7
  exec-server fleet revoke token:ci          close its connections and refuse new ones
  exec-server fleet revoke token:ci --undo
  exec-server fleet drain meet-2             move its connections away, then stop it
  exec-server fleet top

Server: --url URL, else EXEC_SERVER_FLEET_URL, else the one on this machine with
the admin token in its state directory. All connection options: --help

An admin sees its own tenant. With `tenant=*` in the token file it sees all, and
can use `nodes`, `drain` and `top`. Exit codes: 0 success, 1 failure.")]
    Fleet(FleetArgs),
    /// Register an existing server as an environment of a registry
    #[command(after_help = "Examples:
  exec-server forward --connect ws://127.0.0.1:4600 \\
      --remote https://meet.example --environment-id build-7
  exec-server forward --remote https://meet.example --environment-id build-7 \\
      -- ssh build-host exec-server serve --listen stdio")]
    Forward(Box<ForwardArgs>),
    /// Offer commands and files to a model, as an MCP server
    #[cfg(feature = "mcp")]
    #[command(after_help = concat!("Examples:
  exec-server mcp                                this machine, on standard input and output
  exec-server mcp --on build-box                 an environment
  exec-server mcp --on local --with build-box    several; tools take an environment_id
  exec-server mcp --http 127.0.0.1:4700          streamable HTTP

docs/agents.md describes how to configure MCP clients.", machine_note!()))]
    Mcp(Box<McpArgs>),
    /// Run an MCP server on another machine, as if it ran here
    #[cfg(feature = "mcp")]
    #[command(after_help = concat!("Example:
  exec-server mcp-proxy --on build-box --cwd /srv/app -- npx -y @acme/db-mcp

Exit codes: that of the MCP server, or 1 if it cannot be reached.", machine_note!()))]
    McpProxy(Box<McpProxyArgs>),
    /// Print a completion script for a shell
    #[command(after_help = "Example, for bash:
  exec-server completions bash > ~/.local/share/bash-completion/completions/exec-server")]
    Completions {
        /// Print the script for this shell
        shell: clap_complete::Shell,
    },
    /// Create the link DIR/codex to this program, for tools that start `codex exec-server`
    #[command(after_help = "Example:
  exec-server install-as-codex /usr/local/bin
  codex exec-server --remote \"$REMOTE_URL\" --environment-id \"$ID\"

Called as `codex`, or with `exec-server` as the first argument, this program
accepts the options of `codex exec-server`, and no other command of Codex.")]
    InstallAsCodex {
        /// Create the link in this directory
        #[arg(value_name = "DIR")]
        directory: PathBuf,
        /// Replace an existing file or link
        #[arg(long)]
        force: bool,
    },
    /// Print the manual page, or write those of all commands
    Man {
        /// Write the pages of all commands to this directory
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
}

// Options of `serve`.
#[derive(Debug, Default, clap::Args)]
pub(super) struct ServeArgs {
    /// The command `serve` was named: without --listen, the server listens on this user's socket.
    #[arg(skip)]
    pub(super) is_own: bool,

    /// Listen on `ws://IP:PORT`, `wss://IP:PORT`, `unix:///PATH`, `stdio`, or `off`
    ///
    /// Port 0 picks a free port. The URL for clients is printed on standard output. Can be given
    /// several times. Without --listen, `serve` listens on a private socket of this user, which `ps`,
    /// `kill`, `status` and `--on serve` find. [default without `serve`: ws://127.0.0.1:0]
    #[arg(long, value_name = "URL")]
    pub(super) listen: Vec<String>,

    /// Read settings from this TOML file
    ///
    /// Options and variables override it.
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,

    /// Set a key of the settings: `limits.sessions=100`
    #[arg(long, value_name = "KEY=VALUE")]
    pub(super) set: Vec<String>,

    /// Handle up to COUNT requests of a connection at a time; 1 is serial [default: 256]
    #[arg(long, value_name = "COUNT", hide_short_help = true)]
    pub(super) concurrent_requests: Option<NonZeroUsize>,

    /// Use COUNT threads for connections [default: one per core, one in all on up to 2 cores]
    #[arg(long, value_name = "COUNT", hide_short_help = true)]
    pub(super) threads: Option<NonZeroUsize>,

    /// Allow all clients without authentication
    ///
    /// Every client that can reach the port can then run commands as this user, and the port may be
    /// on an address beyond loopback. Without it, and without tokens, a port serves processes of the
    /// same user and root only.
    #[arg(long)]
    pub(super) danger_no_auth: bool,

    /// Let processes run for TIME after SIGTERM [default: 0s]
    ///
    /// A number with a unit, as in `30s` or `5m`.
    #[arg(long, value_name = "TIME")]
    pub(super) drain: Option<String>,

    /// Write log lines in this format [default: text]
    #[arg(long, value_name = "FORMAT", value_parser = PossibleValuesParser::new(FORMATS), hide_short_help = true)]
    pub(super) log_format: Option<String>,

    /// Log what matches, as in `info` or `exec_server_service=debug` [default: error]
    #[arg(long, value_name = "FILTER")]
    pub(super) log: Option<String>,

    /// Serve Prometheus metrics at `http://IP:PORT/metrics`
    #[arg(long, value_name = "IP:PORT", hide_short_help = true)]
    pub(super) metrics_listen: Option<String>,

    /// Append connections and commands to this file, as JSON lines
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(super) audit_file: Option<PathBuf>,

    #[command(flatten)]
    pub(super) auth: AuthArgs,

    #[command(flatten)]
    pub(super) tls: TlsArgs,

    #[command(flatten)]
    pub(super) remote: RemoteArgs,
}

// Authentication of connections.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Authentication")]
pub(super) struct AuthArgs {
    /// Require a bearer token from clients
    #[arg(long, value_name = "MODE", value_parser = PossibleValuesParser::new(MODES))]
    pub(super) ws_auth: Option<String>,

    /// Accept the token in FILE; `NAME=FILE:SCOPE,SCOPE` limits it to scopes
    ///
    /// Scopes are exec, fs:read, fs:write and observe. Can be given several times.
    #[arg(long, value_name = "FILE")]
    pub(super) ws_token_file: Vec<String>,

    /// Accept the token with this SHA-256; `NAME=HEX:SCOPE,SCOPE` limits it to scopes
    #[arg(long, value_name = "HEX")]
    pub(super) ws_token_sha256: Vec<String>,

    /// Accept tokens (JWT, HS256) signed with the secret in FILE, of 32 bytes or more
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(super) ws_shared_secret_file: Option<PathBuf>,

    /// Require this issuer in signed tokens
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub(super) ws_issuer: Option<String>,

    /// Require this audience in signed tokens
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub(super) ws_audience: Option<String>,

    /// Tolerate this difference between the clocks of issuer and server [default: 30]
    #[arg(long, value_name = "SECONDS", hide_short_help = true)]
    pub(super) ws_max_clock_skew_seconds: Option<u32>,

    /// Accept connections from web pages of this origin, as in `https://console.example`
    ///
    /// Without it, connections from web pages are refused. Can be given several times.
    #[arg(long, value_name = "ORIGIN", hide_short_help = true)]
    pub(super) allow_origin: Vec<String>,
}

// TLS of `wss://` listeners.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "TLS")]
pub(super) struct TlsArgs {
    /// Serve with this certificate and its chain (PEM)
    ///
    /// Reloaded when the file changes, and on SIGHUP.
    #[arg(long, value_name = "FILE")]
    pub(super) tls_cert: Option<PathBuf>,

    /// Use this key of the certificate (PEM)
    #[arg(long, value_name = "FILE")]
    pub(super) tls_key: Option<PathBuf>,

    /// Create a certificate and print its pin for clients' --tls-pin
    ///
    /// Stored in the files of --tls-cert and --tls-key if they are given, else in memory only.
    #[arg(long)]
    pub(super) tls_self_signed: bool,

    /// Require client certificates signed by one of these authorities (PEM)
    #[arg(long, value_name = "FILE")]
    pub(super) tls_client_ca: Option<PathBuf>,
}

// Serving through a registry instead of listening.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Remote mode")]
pub(super) struct RemoteArgs {
    /// Register at this registry, `https://HOST`, and serve through it
    #[arg(long, value_name = "URL")]
    pub(super) remote: Option<String>,

    /// Register this machine under this environment id
    #[arg(long, value_name = "ID")]
    pub(super) environment_id: Option<String>,

    /// Show this display name in `exec-server fleet environments`
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub(super) name: Option<String>,

    /// Keep this machine's identity keys in FILE; created if it does not exist
    ///
    /// [default: `executor.identity` in EXEC_SERVER_STATE_DIR, `$XDG_STATE_HOME/exec-server` or
    /// `~/.local/state/exec-server`]
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(super) identity_file: Option<PathBuf>,

    /// Read the registry's token from FILE
    ///
    /// [env: EXEC_SERVER_API_KEY or CODEX_API_KEY: the token itself]
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(super) remote_token_file: Option<PathBuf>,

    /// Read credentials for the registry from standard input, one JSON object per line
    ///
    /// Ends when standard input does.
    #[arg(
        long,
        conflicts_with = "use_agent_identity_auth",
        hide_short_help = true
    )]
    pub(super) executor_credential_stdin: bool,

    /// Read one bearer token for the registry from standard input, a line of at most 16 KiB
    #[arg(
        long,
        conflicts_with_all = ["use_agent_identity_auth", "executor_credential_stdin"],
        hide_short_help = true
    )]
    pub(super) registration_bearer_stdin: bool,

    /// Authenticate as the agent whose identity is in CODEX_ACCESS_TOKEN
    ///
    /// Tasks are registered at the URL in EXEC_SERVER_AGENT_AUTH_API.
    #[arg(long, hide_short_help = true)]
    pub(super) use_agent_identity_auth: bool,

    /// Stop when standard input ends
    #[arg(
        long,
        env = "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE",
        value_parser = clap::builder::FalseyValueParser::new(),
        hide_short_help = true
    )]
    pub(super) exit_on_stdin_close: bool,

    /// Trust the registry with this key (`sha256//…`)
    #[arg(long, value_name = "PIN", hide_short_help = true)]
    pub(super) remote_tls_pin: Option<String>,

    /// Trust these certificate authorities (PEM) for the registry instead of the system's
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(super) remote_tls_ca: Option<PathBuf>,

    /// Allow sending credentials to a registry on another machine without TLS
    #[arg(long, hide_short_help = true)]
    pub(super) danger_plain_http: bool,

    /// Run this shell command before each connection; its output is the registry's token
    #[arg(long, value_name = "COMMAND", hide_short_help = true)]
    pub(super) credential_command: Option<String>,

    /// Keep trying if the registry reports that the environment was deleted
    ///
    /// Without it, the program then exits with 1, unless the registry asks executors to stay, as
    /// `exec-server rendezvous` does.
    #[arg(long, hide_short_help = true)]
    pub(super) stay: bool,

    /// Serve GET /ready and POST /suspend, /resume and /terminate on this loopback address
    #[arg(long, value_name = "IP:PORT", hide_short_help = true)]
    pub(super) lifecycle_listen: Option<String>,

    /// Whether this program was called as `codex exec-server`.
    #[arg(skip)]
    pub(super) as_codex: bool,
}

// Options of `forward`.
#[derive(Debug, clap::Args)]
pub(super) struct ForwardArgs {
    /// Forward to this server: `ws://HOST:PORT`, `wss://HOST:PORT` or `unix:///PATH`
    #[arg(
        long,
        value_name = "URL",
        required_unless_present = "command",
        conflicts_with = "command"
    )]
    pub(super) connect: Option<String>,

    /// Read the server's token from FILE
    #[arg(long, value_name = "FILE", requires = "connect")]
    pub(super) connect_token_file: Option<PathBuf>,

    /// Trust the server with this key (`sha256//…`)
    #[arg(long, value_name = "PIN", requires = "connect")]
    pub(super) connect_tls_pin: Option<String>,

    /// Trust these certificate authorities (PEM) for the server instead of the system's
    #[arg(long, value_name = "FILE", requires = "connect")]
    pub(super) connect_tls_ca: Option<PathBuf>,

    /// Read settings from this TOML file; only `remote` and `log` are used
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,

    /// Log what matches, as in `info` or `exec_server_service=debug` [default: error]
    #[arg(long, value_name = "FILTER")]
    pub(super) log: Option<String>,

    /// Start this command for each client and forward to its standard input and output
    #[arg(last = true, value_name = "COMMAND")]
    pub(super) command: Vec<String>,

    #[command(flatten)]
    pub(super) remote: RemoteArgs,
}

// Options of `env trust`.
#[derive(Debug, clap::Args)]
pub(super) struct TrustArgs {
    /// Trust this key, without asking the registry for the current one
    #[arg(long, value_name = "HEX")]
    pub(super) fingerprint: Option<String>,

    /// Remove the stored key; the next one that the environment shows is trusted
    #[arg(long, conflicts_with = "fingerprint")]
    pub(super) forget: bool,

    /// List the stored keys
    #[arg(long, conflicts_with_all = ["fingerprint", "forget", "environment"])]
    pub(super) list: bool,

    /// Name the environment: `registry://HOST[:PORT]/ENVIRONMENT`
    #[arg(required_unless_present = "list", value_name = "URL")]
    pub(super) environment: Option<String>,

    #[command(flatten)]
    pub(super) server: ServerArgs,
}

// Options of `rendezvous`.
#[derive(Debug, clap::Args)]
pub(super) struct RendezvousArgs {
    #[command(subcommand)]
    pub(super) command: Option<RendezvousCommand>,

    /// Listen on `IP:PORT`, `http://IP:PORT` or `https://IP:PORT`; port 0 picks a free port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:4700")]
    pub(super) listen: String,

    /// Store registrations, the signing secret and generated tokens in this directory
    ///
    /// [default: `rendezvous` in EXEC_SERVER_STATE_DIR, `$XDG_STATE_HOME/exec-server` or
    /// `~/.local/state/exec-server`]
    #[arg(long, value_name = "DIR", global = true)]
    pub(super) state_dir: Option<PathBuf>,

    /// Read the tokens from this file [default: `tokens` in the state directory]
    #[arg(long, value_name = "FILE", global = true)]
    pub(super) tokens: Option<PathBuf>,

    /// Announce this URL, as in `https://meet.example` [default: the one each caller used]
    #[arg(long, value_name = "URL")]
    pub(super) public_url: Option<String>,

    /// Allow listening beyond loopback without TLS, behind a proxy that provides it
    #[arg(long)]
    pub(super) danger_no_tls: bool,

    /// Expire the address of an executor after this time; it registers again
    #[arg(
        long,
        value_name = "TIME",
        value_parser = parse_duration,
        default_value = "1h",
        hide_short_help = true
    )]
    pub(super) executor_url_lifetime: Duration,

    /// Expire the address and the authorization of a harness after this time
    #[arg(
        long,
        value_name = "TIME",
        value_parser = parse_duration,
        default_value = "60s",
        hide_short_help = true
    )]
    pub(super) harness_url_lifetime: Duration,

    /// Accept up to COUNT connections at a time
    #[arg(
        long,
        value_name = "COUNT",
        default_value = "16384",
        hide_short_help = true
    )]
    pub(super) max_connections: usize,

    /// Accept up to COUNT client connections per token and environment
    #[arg(
        long,
        value_name = "COUNT",
        default_value = "4096",
        hide_short_help = true
    )]
    pub(super) max_harness_sockets: usize,

    /// Serve Prometheus metrics at `http://IP:PORT/metrics`
    #[arg(long, value_name = "IP:PORT", hide_short_help = true)]
    pub(super) metrics_listen: Option<String>,

    /// Report up to COUNT tenants by name in metrics; the others are counted as `other`
    #[arg(
        long,
        value_name = "COUNT",
        default_value = "32",
        hide_short_help = true
    )]
    pub(super) metrics_tenants: usize,

    /// Limit what tenants may use, by this file; reloaded when it changes
    ///
    /// One line each: `TENANT environments=N streams=N bandwidth=BYTES handshakes=N`; any of them
    /// may be left out. Bandwidth is in bytes per second, handshakes are per second; K, M and G may
    /// follow a number. `*` is every tenant without its own line.
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(super) quotas: Option<PathBuf>,

    /// Limit what a tenant may use, as a line of --quotas; overrides the file
    ///
    /// Can be given several times.
    #[arg(long, value_name = "LINE", hide_short_help = true)]
    pub(super) quota: Vec<String>,

    /// Count failed attempts through this reverse proxy by the address in X-Forwarded-For
    ///
    /// An address, or a network such as 10.0.0.0/8; can be given several times. The header is
    /// ignored if it comes from another address.
    #[arg(long, value_name = "ADDRESS", hide_short_help = true)]
    pub(super) trusted_proxy: Vec<String>,

    /// Append registrations, connections and refusals to this file, as JSON lines
    #[arg(long, value_name = "FILE")]
    pub(super) audit_file: Option<PathBuf>,

    /// Use COUNT threads for connections [default: one per core, one in all on up to 2 cores]
    #[arg(long, value_name = "COUNT", hide_short_help = true)]
    pub(super) threads: Option<NonZeroUsize>,

    /// Write log lines in this format [default: text]
    #[arg(
        long,
        value_name = "FORMAT",
        value_parser = PossibleValuesParser::new(FORMATS),
        hide_short_help = true
    )]
    pub(super) log_format: Option<String>,

    /// Log what matches, as in `info` or `exec_server_rendezvous=debug` [default: warn]
    #[arg(long, value_name = "FILTER")]
    pub(super) log: Option<String>,

    #[command(flatten)]
    pub(super) tls: TlsArgs,

    #[command(flatten)]
    pub(super) oidc: OidcArgs,

    #[command(flatten)]
    pub(super) nats: NatsArgs,
}

// Tokens of an OIDC issuer.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "OIDC")]
pub(super) struct OidcArgs {
    /// Accept tokens (JWT) of this OIDC issuer, besides those of the token file
    #[arg(
        long,
        value_name = "URL",
        requires = "oidc_audience",
        requires = "oidc_jwks",
        hide_short_help = true
    )]
    pub(super) oidc_issuer: Option<String>,

    /// Require this audience in the issuer's tokens
    #[arg(
        long,
        value_name = "AUDIENCE",
        requires = "oidc_issuer",
        hide_short_help = true
    )]
    pub(super) oidc_audience: Option<String>,

    /// Read the issuer's keys from this JWKS document: a file or an `https://` URL
    ///
    /// RS256, ES256 and EdDSA. Read again when the file changes; from a URL every five minutes, and
    /// when a token names an unknown key, at most every ten seconds.
    #[arg(
        long,
        value_name = "FILE|URL",
        requires = "oidc_issuer",
        hide_short_help = true
    )]
    pub(super) oidc_jwks: Option<String>,

    /// Trust these certificate authorities (PEM) for the keys' URL instead of the system's
    #[arg(
        long,
        value_name = "FILE",
        requires = "oidc_issuer",
        hide_short_help = true
    )]
    pub(super) oidc_ca: Option<PathBuf>,

    /// Read the tenant from this claim; a token without it belongs to `default`
    #[arg(
        long,
        value_name = "CLAIM",
        default_value = "tenant",
        hide_short_help = true
    )]
    pub(super) oidc_tenant_claim: String,

    /// Read the roles (executor, harness, admin) from this claim
    #[arg(
        long,
        value_name = "CLAIM",
        default_value = "roles",
        hide_short_help = true
    )]
    pub(super) oidc_role_claim: String,

    /// Read the permitted environments from this claim; without it, all are
    #[arg(
        long,
        value_name = "CLAIM",
        default_value = "environments",
        hide_short_help = true
    )]
    pub(super) oidc_environments_claim: String,
}

// Several rendezvous servers that act as one. The options exist in every build, so that one without
// the feature can report what is missing.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Fleet")]
pub(super) struct NatsArgs {
    /// Join a fleet of rendezvous servers through these NATS servers with JetStream
    ///
    /// As in `nats://127.0.0.1:4222` or `tls://nats.example`, separated by commas. All nodes need
    /// the same token file. Registrations are stored in NATS, not in the state directory.
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = ',',
        hide_short_help = true
    )]
    pub(super) nats: Vec<String>,

    /// Authenticate with this NATS credentials file
    #[arg(long, value_name = "FILE", requires = "nats", hide_short_help = true)]
    pub(super) nats_creds: Option<PathBuf>,

    /// Trust these certificate authorities (PEM) for NATS, besides the system's
    #[arg(long, value_name = "FILE", requires = "nats", hide_short_help = true)]
    pub(super) nats_ca: Option<PathBuf>,

    /// Use this JetStream bucket; servers with the same bucket form one fleet
    #[arg(
        long,
        value_name = "NAME",
        default_value = "exec-server",
        requires = "nats",
        hide_short_help = true
    )]
    pub(super) nats_bucket: String,

    /// Keep COUNT copies of the bucket, where NATS is itself a cluster
    #[arg(
        long,
        value_name = "COUNT",
        default_value = "1",
        requires = "nats",
        hide_short_help = true
    )]
    pub(super) nats_replicas: usize,

    /// Give this node a name, unique in its fleet [default: the host name and a random suffix]
    #[arg(long, value_name = "NAME", requires = "nats", hide_short_help = true)]
    pub(super) node_name: Option<String>,

    /// Announce this URL of the node itself, for clients to use when other nodes fail
    ///
    /// [default: --public-url, else the address it listens on]
    #[arg(long, value_name = "URL", requires = "nats", hide_short_help = true)]
    pub(super) node_url: Option<String>,

    /// Move connections to other nodes for up to this time after SIGTERM
    #[arg(
        long,
        value_name = "TIME",
        value_parser = parse_duration,
        default_value = "5s",
        hide_short_help = true
    )]
    pub(super) drain: Duration,

    /// Add this many seconds to this machine's clock, for tests
    #[arg(
        long,
        value_name = "SECONDS",
        default_value = "0",
        hide = true,
        allow_negative_numbers = true
    )]
    pub(super) clock_offset: i64,
}

// Subcommands of `rendezvous`.
#[derive(Debug, Subcommand)]
pub(super) enum RendezvousCommand {
    /// Create a token and add it to the token file; a running server accepts it within a second
    #[command(after_help = "Examples:
  exec-server rendezvous token-add build-7 --role executor \\
      --environment build-7 --out build-7.token
  exec-server rendezvous token-add ci --role harness --environment 'build-*'")]
    TokenAdd(TokenAddArgs),
}

// Options of `rendezvous token-add`.
#[derive(Debug, clap::Args)]
pub(super) struct TokenAddArgs {
    /// Give the token this name; the audit log shows it, and `fleet revoke` takes it
    pub(super) name: String,

    /// Grant this role; can be given several times
    #[arg(long, value_enum, required = true)]
    pub(super) role: Vec<RoleArg>,

    /// Limit it to this environment, or to those with a prefix, as in `build-*` [default: all]
    ///
    /// Can be given several times.
    #[arg(long, value_name = "ID")]
    pub(super) environment: Vec<String>,

    /// Make it a token of this tenant; `*` is for admins of all tenants
    #[arg(long, value_name = "TENANT", default_value = "default")]
    pub(super) tenant: String,

    /// Write the token to this new file, mode 0600, instead of standard output
    #[arg(long, value_name = "FILE")]
    pub(super) out: Option<PathBuf>,
}

// Options of `fleet`.
#[derive(Debug, clap::Args)]
pub(super) struct FleetArgs {
    #[command(subcommand)]
    pub(super) command: FleetCommand,

    /// Print JSON
    #[arg(long, global = true)]
    pub(super) json: bool,

    /// Connect to this rendezvous server, `https://HOST[:PORT]`; any node of a fleet will do
    ///
    /// [env: EXEC_SERVER_FLEET_URL] [default: http://127.0.0.1:4700]
    #[arg(
        long,
        global = true,
        value_name = "URL",
        help_heading = "Connection",
        hide_short_help = true
    )]
    pub(super) url: Option<String>,

    /// Read the admin token from FILE [env: EXEC_SERVER_FLEET_TOKEN_FILE]
    ///
    /// [default: `rendezvous/admin.token` in EXEC_SERVER_STATE_DIR, `$XDG_STATE_HOME/exec-server` or
    /// `~/.local/state/exec-server`]
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        help_heading = "Connection",
        hide_short_help = true
    )]
    pub(super) admin_token_file: Option<PathBuf>,

    /// Trust the server with this key (`sha256//…`) [env: EXEC_SERVER_TLS_PIN]
    #[arg(
        long,
        global = true,
        value_name = "PIN",
        help_heading = "Connection",
        hide_short_help = true
    )]
    pub(super) tls_pin: Option<String>,

    /// Trust these certificate authorities (PEM) instead of the system's [env: EXEC_SERVER_TLS_CA]
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        help_heading = "Connection",
        hide_short_help = true
    )]
    pub(super) tls_ca: Option<PathBuf>,

    /// Allow sending the token to another machine without TLS
    #[arg(
        long,
        global = true,
        help_heading = "Connection",
        hide_short_help = true
    )]
    pub(super) danger_plain_http: bool,
}

// Subcommands of `fleet`.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(super) enum FleetCommand {
    /// List the nodes of a fleet and what is connected to each
    Nodes,
    /// List environments and the node each is connected to, or remove some
    Environments {
        /// Show only this tenant
        #[arg(long, value_name = "TENANT")]
        tenant: Option<String>,

        /// Remove this environment and close its connections; can be given several times
        #[arg(long, value_name = "ID")]
        remove: Vec<String>,
    },
    /// List the open streams and both ends of each
    Streams {
        /// Show only this environment
        #[arg(value_name = "ENVIRONMENT")]
        environment: Option<String>,

        /// Show only this tenant
        #[arg(long, value_name = "TENANT")]
        tenant: Option<String>,
    },
    /// Revoke a token or key, or list revocations
    Revoke {
        /// Revoke `token:NAME`, `key:SHA256`, or the token of this name; without it, list all
        #[arg(value_name = "WHO")]
        who: Option<String>,

        /// Revoke it in this environment only [default: everywhere]
        #[arg(long, value_name = "ID", requires = "who")]
        environment: Option<String>,

        /// Name the tenant that the token or key belongs to
        #[arg(long, value_name = "TENANT", requires = "who")]
        tenant: Option<String>,

        /// Remove the revocation
        #[arg(long, requires = "who")]
        undo: bool,
    },
    /// Move all connections off a node and stop it
    Drain {
        /// Stop this node; `exec-server fleet nodes` lists the names
        #[arg(value_name = "NODE")]
        node: String,
    },
    /// Show the load of nodes, tenants and the busiest environments, refreshed regularly
    Top {
        /// Refresh after this time
        #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "2s")]
        interval: Duration,

        /// Stop after COUNT refreshes [default: until interrupted]
        #[arg(long, value_name = "COUNT")]
        count: Option<u64>,
    },
}

/// Roles by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum RoleArg {
    /// Register environments
    Executor,
    /// Connect to environments
    Harness,
    /// List, remove and revoke
    Admin,
}

impl RoleArg {
    pub(super) fn role(self) -> TokenRole {
        match self {
            Self::Executor => TokenRole::Executor,
            Self::Harness => TokenRole::Harness,
            Self::Admin => TokenRole::Admin,
        }
    }
}

// How to reach a server; last in every struct that has it, so that its group is the last one.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Connection")]
pub(super) struct ServerArgs {
    /// Work in this environment: an id of `exec-server env list`, `local`, or a URL
    ///
    /// [default: --url, else EXEC_SERVER_URL, else the environment of `exec-server env use`, else
    /// this machine]
    #[arg(
        long,
        global = true,
        value_name = "ENV",
        conflicts_with = "url",
        hide_short_help = true
    )]
    pub(super) on: Option<String>,

    /// Connect to this server [env: EXEC_SERVER_URL]
    ///
    /// `ws://HOST:PORT`, `wss://HOST:PORT`, `unix:///PATH`, `ssh://[USER@]HOST[:PORT][/PATH]` or
    /// `registry://HOST[:PORT]/ENVIRONMENT`.
    #[arg(long, global = true, value_name = "URL", hide_short_help = true)]
    pub(super) url: Option<String>,

    /// Read the server's token from FILE
    ///
    /// [env: EXEC_SERVER_TOKEN_FILE: the file, or EXEC_SERVER_TOKEN: the token itself]
    #[arg(long, global = true, value_name = "FILE", hide_short_help = true)]
    pub(super) token_file: Option<PathBuf>,

    /// Trust the server with this key [env: EXEC_SERVER_TLS_PIN]
    ///
    /// `sha256//…`, as `exec-server serve --tls-self-signed` prints it.
    #[arg(long, global = true, value_name = "PIN", hide_short_help = true)]
    pub(super) tls_pin: Option<String>,

    /// Trust these certificate authorities (PEM) instead of the system's [env: EXEC_SERVER_TLS_CA]
    #[arg(long, global = true, value_name = "FILE", hide_short_help = true)]
    pub(super) tls_ca: Option<PathBuf>,

    /// Present this client certificate (PEM)
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        requires = "tls_client_key",
        hide_short_help = true
    )]
    pub(super) tls_client_cert: Option<PathBuf>,

    /// Use this key of the client certificate (PEM)
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        requires = "tls_client_cert",
        hide_short_help = true
    )]
    pub(super) tls_client_key: Option<PathBuf>,

    #[command(flatten)]
    pub(super) ssh: SshArgs,
}

// How to reach a server by ssh, and how its paths correspond to those of this machine.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Connection")]
pub(super) struct SshArgs {
    /// Pass this option to ssh, as with its -o; can be given several times
    #[arg(long, global = true, value_name = "NAME=VALUE", hide_short_help = true)]
    pub(super) ssh_option: Vec<String>,

    /// Use this exec-server of the remote machine, a path or a name in PATH; install nothing
    #[arg(long, global = true, value_name = "PATH", hide_short_help = true)]
    pub(super) remote_binary: Option<String>,

    /// Install this executable on the remote machine [env: EXEC_SERVER_LOCAL_BINARY]
    ///
    /// [default: this program]
    #[arg(long, global = true, value_name = "FILE", hide_short_help = true)]
    pub(super) local_binary: Option<PathBuf>,

    /// Translate paths below this local directory to paths below --remote-root
    ///
    /// Paths are then given and shown as those of this machine, and paths outside of it are refused.
    #[arg(long, global = true, value_name = "DIR", hide_short_help = true)]
    pub(super) local_root: Option<PathBuf>,

    /// Use this remote directory for --local-root [default: the path of the ssh:// URL]
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        requires = "local_root",
        hide_short_help = true
    )]
    pub(super) remote_root: Option<PathBuf>,
}

// Options of `daemon`.
#[derive(Debug, clap::Args)]
pub(super) struct DaemonArgs {
    /// Copy bytes between standard input and output and the daemon's socket
    #[arg(long, conflicts_with = "stop")]
    pub(super) stdio: bool,

    /// Stop the daemon, its sessions and everything they run
    #[arg(long)]
    pub(super) stop: bool,

    /// Stop a daemon that is started now after it was unused for this time
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10m")]
    pub(super) idle: Duration,

    /// Keep its socket, lock and log in this directory
    ///
    /// [default: a directory per machine in `$XDG_CACHE_HOME/exec-server` or `~/.cache/exec-server`]
    #[arg(long, value_name = "DIR")]
    pub(super) directory: Option<PathBuf>,

    /// Run as the daemon
    #[arg(long, hide = true)]
    pub(super) serve: bool,
}

impl ServerArgs {
    /// The first given flag that applies only to a server named by its URL.
    pub(super) fn about_url(&self) -> Option<&'static str> {
        let given = [
            (self.token_file.is_some(), "--token-file"),
            (self.tls_pin.is_some(), "--tls-pin"),
            (self.tls_ca.is_some(), "--tls-ca"),
            (self.tls_client_cert.is_some(), "--tls-client-cert"),
            (!self.ssh.ssh_option.is_empty(), "--ssh-option"),
            (self.ssh.remote_binary.is_some(), "--remote-binary"),
        ];
        given
            .into_iter()
            .find(|(given, _)| *given)
            .map(|(_, flag)| flag)
    }
}

// Subcommands of `env`.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(super) enum EnvCommand {
    /// List the environments
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Add an environment, or change one
    #[command(after_help = "Examples:
  exec-server env add worker wss://build-host:4600 --token-file worker.token
  exec-server env add box ssh://me@box/srv/app
  exec-server env add container -- docker exec -i app exec-server serve --listen stdio")]
    Add(Box<EnvAddArgs>),
    /// Remove an environment from the list
    Remove {
        /// Remove this environment
        id: String,
    },
    /// Connect to environments and show which answer, their version and latency
    #[command(after_help = "Exit codes: 0 all of them answered, 1 some did not.")]
    Status {
        /// Check only these [default: all]
        ids: Vec<String>,
        /// Wait up to this time for each
        #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10s")]
        timeout: Duration,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Set the default environment
    Use {
        /// Use this environment by default: its id, `local` for this machine, or `none`
        id: String,
    },
    /// Trust an environment's current key, replacing the stored one
    #[command(after_help = "Examples:
  exec-server env trust registry://meet.example/build-7
  exec-server env trust registry://meet.example/build-7 --fingerprint 9f86d0…
  exec-server env trust --list

The first key that an environment shows is trusted and stored; a client that
sees another one refuses to connect. The executor prints its fingerprint when it
starts: compare.")]
    Trust(Box<TrustArgs>),
}

// Options of `env add`.
#[derive(Debug, clap::Args)]
pub(super) struct EnvAddArgs {
    /// Name the environment: letters, digits, `-` and `_`
    pub(super) id: String,

    /// Connect to this URL: ws://, wss://, unix://, ssh:// or registry://
    ///
    /// `ws://HOST:PORT`, `wss://HOST:PORT`, `unix:///PATH`, `ssh://[USER@]HOST[:PORT][/PATH]` or
    /// `registry://HOST[:PORT]/ENVIRONMENT`.
    #[arg(required_unless_present = "program", conflicts_with = "program")]
    pub(super) url: Option<String>,

    /// Read the server's token from FILE, at every connection
    #[arg(long, value_name = "FILE", requires = "url")]
    pub(super) token_file: Option<PathBuf>,

    /// Trust the server with this key (`sha256//…`)
    #[arg(long, value_name = "PIN", requires = "url")]
    pub(super) tls_pin: Option<String>,

    /// Pass this option to ssh, as with its -o; can be given several times
    #[arg(long, value_name = "NAME=VALUE", requires = "url")]
    pub(super) ssh_option: Vec<String>,

    /// Use this exec-server of the machine behind ssh, a path or a name in PATH
    #[arg(long, value_name = "PATH", requires = "url")]
    pub(super) remote_binary: Option<String>,

    /// Translate paths below this local directory to paths below --remote-root
    #[arg(long, value_name = "DIR", requires = "url")]
    pub(super) local_root: Option<PathBuf>,

    /// Use this remote directory for --local-root [default: the path of the URL]
    #[arg(long, value_name = "DIR", requires = "local_root")]
    pub(super) remote_root: Option<String>,

    /// Run the program in this directory
    #[arg(long, value_name = "DIR", requires = "program")]
    pub(super) cwd: Option<PathBuf>,

    /// Set an environment variable of the program
    #[arg(
        long = "env",
        short = 'e',
        value_name = "NAME=VALUE",
        requires = "program"
    )]
    pub(super) env: Vec<String>,

    /// Replace an environment of this id
    #[arg(long, short)]
    pub(super) force: bool,

    /// Make it the default environment
    #[arg(long)]
    pub(super) default: bool,

    /// Skip the first connection, which shows whether the environment works
    #[arg(long)]
    pub(super) no_try: bool,

    /// Start this program, with its arguments, as a server on standard input and output
    #[arg(last = true, value_name = "PROGRAM")]
    pub(super) program: Vec<String>,
}

// Subcommands of `token`.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(super) enum TokenCommand {
    /// Create a random token
    ///
    /// Prints the token on standard output, or writes it to a file. Prints its SHA-256, which is all
    /// that a server needs, on standard error.
    New {
        /// Write the token to this new file, mode 0600, instead of standard output
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Sign a token with a shared secret
    #[command(after_help = "Example:
  exec-server token sign --secret-file secret --subject ci \\
      --scope 'fs:read observe' --expires 1h")]
    Sign {
        /// Sign with the secret in FILE, which may be /dev/stdin or /dev/fd/N
        #[arg(long, value_name = "FILE")]
        secret_file: PathBuf,
        /// Let it expire after this time
        #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1h")]
        expires: Duration,
        /// Make it valid only after this time [default: 0s]
        #[arg(long, value_name = "TIME", value_parser = parse_duration)]
        not_before: Option<Duration>,
        /// Name its holder, for the server's logs
        #[arg(long, value_name = "NAME")]
        subject: Option<String>,
        /// Limit it to these scopes: exec, fs:read, fs:write, observe [default: all]
        #[arg(long, value_name = "SCOPES")]
        scope: Option<String>,
        /// Set the issuer
        #[arg(long, value_name = "NAME")]
        issuer: Option<String>,
        /// Set the audience: the server it is for
        #[arg(long, value_name = "NAME")]
        audience: Option<String>,
    },
    /// Print a token's claims, and check its signature if the secret is given
    #[command(after_help = "Exit codes: 0 valid or not checked, 1 not valid.")]
    Inspect {
        /// Read the token from this file [default: standard input]
        file: Option<PathBuf>,
        /// Check the signature with the secret in FILE
        #[arg(long, value_name = "FILE")]
        secret_file: Option<PathBuf>,
    },
}

// Subcommands of `config`.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(super) enum ConfigCommand {
    /// Print every key, its value and where that came from
    Show {
        /// Print JSON
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        serve: Box<ServeArgs>,
    },
}

// Options of `run`.
#[derive(Debug, clap::Args)]
pub(super) struct RunArgs {
    /// Run in this directory of the target machine
    ///
    /// [default: the current directory here, the server's directory on a server]
    #[arg(long, value_name = "DIR")]
    pub(super) cwd: Option<PathBuf>,

    /// Set a variable; without a value, pass on the one set here
    #[arg(long = "env", short = 'e', value_name = "NAME[=VALUE]")]
    pub(super) env: Vec<String>,

    /// Allocate a pseudo-terminal even if stdin is a pipe
    #[arg(long, short = 't', overrides_with = "no_tty")]
    pub(super) tty: bool,

    /// Use pipes even if stdin is a terminal
    #[arg(long, short = 'T')]
    pub(super) no_tty: bool,

    /// End the command after this time: `500ms`, `10s`, `5m`, `1h`
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(super) timeout: Option<Duration>,

    /// Keep the command running for this time without a connection, as in `30s` or `24h`
    ///
    /// After a lost connection this program reconnects for as long. The server may keep it for less.
    #[arg(
        long,
        value_name = "TIME",
        value_parser = parse_duration,
        default_value = "24h",
        hide_short_help = true
    )]
    pub(super) keep_alive: Duration,

    /// Keep processes running that the command started and that outlive it
    ///
    /// Without this option, they are ended with the command, and listed. With it, the server ends them
    /// when the time of --keep-alive has passed.
    #[arg(long, hide_short_help = true)]
    pub(super) leave_running: bool,

    /// Connect the command's standard input to /dev/null
    #[arg(short = 'n', long, conflicts_with = "tty")]
    pub(super) no_input: bool,

    /// Print output and exit as JSON lines on standard output; without a terminal
    #[arg(long, conflicts_with = "tty", hide_short_help = true)]
    pub(super) json: bool,

    /// Show where the command runs
    #[arg(long, short = 'v', conflicts_with = "quiet", hide_short_help = true)]
    pub(super) verbose: bool,

    /// Print errors only, no notices
    #[arg(long, short = 'q', hide_short_help = true)]
    pub(super) quiet: bool,

    /// Run this program with these arguments; no shell interprets them
    ///
    /// Without it, --on and --url open a login shell.
    #[arg(
        required_unless_present_any = ["on", "url"],
        trailing_var_arg = true,
        value_name = "COMMAND"
    )]
    pub(super) command: Vec<String>,

    #[command(flatten)]
    pub(super) sandbox: SandboxArgs,

    #[command(flatten)]
    pub(super) network: NetworkArgs,

    #[command(flatten)]
    pub(super) server: ServerArgs,
}

// The hosts that a command may reach.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Network")]
pub(super) struct NetworkArgs {
    /// Allow only this host: `NAME`, `*.NAME`, an address, or `*`
    ///
    /// The command reaches it only through a proxy that is started for it. `*.NAME` means hosts
    /// below NAME, `**.NAME` NAME as well.
    #[arg(long = "net-allow", value_name = "DOMAIN", conflicts_with = "network")]
    pub(super) net_allow: Vec<String>,

    /// Deny this host, even if --net-allow includes it
    #[arg(long = "net-deny", value_name = "DOMAIN", conflicts_with = "network")]
    pub(super) net_deny: Vec<String>,

    /// Ask on this terminal about all other hosts
    #[arg(long = "net-ask", conflicts_with = "network")]
    pub(super) net_ask: bool,
}

// Sandbox of a command.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Sandbox")]
pub(super) struct SandboxArgs {
    /// Restrict the command to reading, or to writing in its directory and /tmp
    #[arg(long, value_enum, value_name = "POLICY")]
    pub(super) sandbox: Option<SandboxArg>,

    /// Allow writing to this file or directory as well
    #[arg(long, value_name = "PATH", requires = "sandbox")]
    pub(super) writable: Vec<PathBuf>,

    /// Deny even reading this file or directory
    #[arg(long, value_name = "PATH", requires = "sandbox")]
    pub(super) deny: Vec<PathBuf>,

    /// Allow network access
    #[arg(
        long,
        value_enum,
        value_name = "SWITCH",
        requires = "sandbox",
        default_value = "off"
    )]
    pub(super) network: SwitchArg,
}

/// Policies by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum SandboxArg {
    ReadOnly,
    WorkspaceWrite,
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum SwitchArg {
    On,
    Off,
}

// Options of `mcp`.
#[cfg(feature = "mcp")]
#[derive(Debug, clap::Args)]
pub(super) struct McpArgs {
    /// Offer another environment, which tools name by its id; can be given several times
    #[arg(long = "with", value_name = "ENV")]
    pub(super) with: Vec<String>,

    /// Resolve relative paths against this directory of the machine where the tools work
    #[arg(long, value_name = "DIR")]
    pub(super) cwd: Option<PathBuf>,

    /// Offer only these tools, separated by commas [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    #[arg(value_parser = PossibleValuesParser::new(exec_server_agents::mcp::TOOLS))]
    pub(super) tools: Option<Vec<String>>,

    /// Serve streamable HTTP on `IP:PORT` instead of standard input and output
    #[arg(long, value_name = "IP:PORT")]
    pub(super) http: Option<std::net::SocketAddr>,

    /// Require the token in FILE from HTTP clients
    #[arg(long, value_name = "FILE", requires = "http")]
    pub(super) http_token_file: Option<PathBuf>,

    #[command(flatten)]
    pub(super) sandbox: SandboxArgs,

    #[command(flatten)]
    pub(super) server: ServerArgs,
}

// Options of `mcp-proxy`.
#[cfg(feature = "mcp")]
#[derive(Debug, clap::Args)]
pub(super) struct McpProxyArgs {
    /// Run in this directory of the machine where the MCP server runs
    #[arg(long, value_name = "DIR")]
    pub(super) cwd: Option<PathBuf>,

    /// Set an environment variable; without a value, pass on that of this machine
    #[arg(long = "env", short = 'e', value_name = "NAME[=VALUE]")]
    pub(super) env: Vec<String>,

    /// Pass on this variable of the machine where the MCP server runs, besides harmless ones
    #[arg(long, value_name = "NAME")]
    pub(super) inherit: Vec<String>,

    /// Run this MCP server with these arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub(super) command: Vec<String>,

    #[command(flatten)]
    pub(super) sandbox: SandboxArgs,

    #[command(flatten)]
    pub(super) server: ServerArgs,
}

// Options of `doctor`.
#[derive(Debug, clap::Args)]
pub(super) struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

// Options of `ps`.
#[derive(Debug, clap::Args)]
pub(super) struct PsArgs {
    /// List ended processes too, while their output can still be read
    #[arg(long, short)]
    pub(super) all: bool,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,

    #[command(flatten)]
    pub(super) server: ServerArgs,
}

// Options of `status`.
#[derive(Debug, clap::Args)]
pub(super) struct StatusArgs {
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,

    #[command(flatten)]
    pub(super) server: ServerArgs,
}

// Options of `kill`.
#[derive(Debug, clap::Args)]
pub(super) struct KillArgs {
    /// Send this signal to the process group instead of ending the process: `INT`, `SIGINT` or `2`
    #[arg(long, short, value_name = "SIGNAL", value_parser = signal_named)]
    pub(super) signal: Option<SignalName>,

    /// Send SIGKILL without SIGTERM first
    #[arg(long, short, short_alias = '9', conflicts_with = "signal")]
    pub(super) force: bool,

    /// Send SIGKILL this long after SIGTERM
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "5s")]
    pub(super) grace: Duration,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,

    /// End these processes, by their ids or pids; SESSION/ID names one of several with the same id
    #[arg(required = true, value_name = "PROCESS")]
    pub(super) target: Vec<String>,

    #[command(flatten)]
    pub(super) server: ServerArgs,
}

/// Parses `500ms`, `10s`, `5m`, `1h` or plain seconds.
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: f64 = digits
        .parse()
        .map_err(|_| format!("`{text}` is not a time; write it as 500ms, 10s, 5m or 1h"))?;
    let unit = match &text[digits.len()..] {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        other => return Err(format!("unknown unit `{other}`; use ms, s, m or h")),
    };
    Duration::try_from_secs_f64(number * unit).map_err(|error| format!("`{text}`: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_definitions_pass_the_checks_of_clap() {
        CliArgs::command().debug_assert();
        definition().debug_assert();
    }

    #[test]
    fn durations_parse_with_units_and_reject_other_text() {
        for (text, millis) in [
            ("90", 90_000),
            ("500ms", 500),
            ("1.5s", 1500),
            ("2m", 120_000),
        ] {
            assert_eq!(
                parse_duration(text),
                Ok(Duration::from_millis(millis)),
                "{text}"
            );
        }
        for text in ["", "s", "-1s", "1d", "1e300h"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
