//! What can be typed.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Parser, Subcommand, ValueEnum};
use exec_server_rendezvous::Role;

use super::settings::{FORMATS, MODES};

use super::fs::args::{CpArgs, FsArgs};

/// Run commands on any machine, from any program, without losing a byte.
///
/// Without a command it serves clients, like `exec-server serve`.
#[derive(Debug, Parser)]
#[command(name = "exec-server", version, args_conflicts_with_subcommands = true)]
#[command(after_help = "Examples:
  exec-server --listen ws://127.0.0.1:4600          serve on a fixed port
  exec-server run -- make test                      run a command here
  exec-server run --url ws://127.0.0.1:4600 -- sh   run a shell on a server
  exec-server run --on worker -- make test          run it in an environment
  exec-server ps --url ws://127.0.0.1:4600          what runs there
  exec-server fs --url ws://127.0.0.1:4600 ls -l    the files there
  exec-server cp -r src ws://127.0.0.1:4600:/srv    copy a directory there
  exec-server run --on ssh://build -- make test     run it on any machine that has an sshd
  exec-server --remote https://meet.example --environment-id build-7 \\
      --remote-token-file token                     serve through a registry, from behind NAT
  exec-server run --url registry://meet.example/build-7 -- make    use it from anywhere
  exec-server --listen wss://0.0.0.0:4600 --tls-self-signed \\
      --ws-auth capability-token --ws-token-file token    serve others, who have the token

Exit codes: 0 success, 1 failure, 2 wrong usage; `run` and `fs search` have their own, see their --help.")]
pub(super) struct Args {
    #[command(subcommand)]
    pub(super) command: Option<Command>,
    #[command(flatten)]
    pub(super) serve: ServeArgs,
}

/// The same without everything about serving, which takes longer to spell out than a command.
///
/// Good for a command that is named first and is right; whatever else is typed is for [`Args`], which
/// knows what to say about it.
#[derive(Debug, Parser)]
#[command(name = "exec-server", version)]
struct Named {
    #[command(subcommand)]
    command: Command,
}

/// And that of `run` alone, which has to be there before what it runs.
#[derive(Debug, Parser)]
#[command(name = "exec-server run")]
struct Run {
    #[command(flatten)]
    run: RunArgs,
}

impl Command {
    /// What was typed; tells what is wrong with it, or what was asked about it, and ends the program.
    pub(super) fn parse() -> Self {
        let first = std::env::args_os().nth(1).unwrap_or_default();
        if first == "run"
            && let Ok(only) = Run::try_parse_from(std::env::args_os().skip(1))
        {
            return Self::Run(only.run);
        }
        let is_named = !first.is_empty() && !first.as_encoded_bytes().starts_with(b"-");
        if is_named && let Ok(named) = Named::try_parse() {
            return named.command;
        }
        let args = Args::parse();
        match args.command {
            Some(command) => command,
            None => Self::Serve(Box::new(args.serve)),
        }
    }
}

#[derive(Debug, Subcommand)]
// Only the one that is named is spelled out: all of them take longer than most commands.
#[command(defer = true)]
pub(super) enum Command {
    /// Serve clients (the default)
    Serve(Box<ServeArgs>),
    /// Run a command, here or on a server, as if it ran in this terminal
    #[command(after_help = "Examples:
  exec-server run -- make test
  exec-server run --url unix:///run/exec.sock --cwd /srv/app --env CI=1 -- ./build.sh
  exec-server run --sandbox workspace-write -- make test
  tar c src | exec-server run --url ws://127.0.0.1:4600 --no-tty -- tar x -C /tmp

Exit codes:
  the command's own, or 128 + N if signal N ended it
  124  the time was up (--timeout)
  125  exec-server itself failed
  126  the command cannot be executed
  127  the command was not found")]
    Run(RunArgs),
    /// List the processes of a server, of all its sessions
    Ps(PsArgs),
    /// End processes of a server, with everything they started
    #[command(after_help = "Examples:
  exec-server kill --url ws://127.0.0.1:4600 build-7
  exec-server kill --signal interrupt build-7
  exec-server kill --force 3f2a build-7      the `build-7` of the session that begins with 3f2a")]
    Kill(KillArgs),
    /// Use files of a server, or of this machine
    #[command(after_help = "Examples:
  exec-server fs --url ws://127.0.0.1:4600 ls -l /srv
  exec-server fs put -r src /srv/app        with EXEC_SERVER_URL set
  exec-server fs cat app.log                here, without a server

Paths are those of the machine where the files are. On a server, relative ones begin at the directory
that it was started in.")]
    Fs(FsArgs),
    /// Copy files and directories between this machine and a server
    #[command(after_help = "Examples:
  exec-server cp --url ws://127.0.0.1:4600 notes.txt :            into the server's directory
  exec-server cp -r src ws://127.0.0.1:4600:/srv/app              another way to name the server
  exec-server cp -a unix:///run/exec.sock:/srv/app backup         back, with modes and times

One side is a path here, the other one on a server: `:PATH` on the one that --on, --url or
EXEC_SERVER_URL names, `ENV:PATH` or `URL:PATH`. Relative paths there begin at the directory that the server was started in. A
file that has a colon in its name is written `./NAME`.

As with `cp`, something that is copied to an existing directory goes into it; `DIR/.` means what is in
DIR. Links stay links. Executable files stay executable; -a keeps all modes and times.

A file of 8 MiB or more that was cut off goes on where it stopped, if what has arrived is the beginning
of it; until it is whole it waits beside its target, as `.NAME.exec-server-part`. What cannot be copied
is named on standard error, the rest goes on, and the exit code is 1.")]
    Cp(CpArgs),
    /// Register a server that exists already as an environment of a registry
    #[command(after_help = "Examples:
  exec-server forward --connect ws://127.0.0.1:4600 \\
      --remote https://meet.example --environment-id build-7
  exec-server forward --remote https://meet.example --environment-id build-7 \\
      -- ssh build-host exec-server --listen stdio")]
    Forward(Box<ForwardArgs>),
    /// Name the machines to work on, and choose among them
    #[command(
        subcommand,
        after_help = "Examples:
  exec-server env add worker wss://build-host:4600 --token-file worker.token
  exec-server env add box ssh://me@box/srv/app
  exec-server env use worker                 what `run`, `ps`, `fs` and `cp` use unless told otherwise
  exec-server run --on box -- make test
  exec-server env status                     which of them answer, and what they can do

They are kept in `environments.toml`, in EXEC_SERVER_HOME or in ~/.config/exec-server."
    )]
    Env(EnvCommand),
    /// Offer commands and files to a model, as an MCP server
    #[cfg(feature = "mcp")]
    #[command(after_help = "Examples:
  exec-server mcp                                  this machine, on standard input and output
  exec-server mcp --on build-box                   an environment
  exec-server mcp --on local --with build-box      several; tools take an environment_id
  exec-server mcp --http 127.0.0.1:4700            streamable HTTP

How to configure clients is said in docs/agents.md.")]
    Mcp(Box<McpArgs>),
    /// Run an MCP server on another machine, as if it ran here
    #[cfg(feature = "mcp")]
    #[command(after_help = "Example:
  exec-server mcp-proxy --on build-box --cwd /srv/app -- npx -y @acme/db-mcp

Exit codes: that of the server, or 1 if it could not be talked to.")]
    McpProxy(Box<McpProxyArgs>),
    /// Let machines behind NAT be reached: registry and relay, which cannot see what passes
    #[command(
        args_conflicts_with_subcommands = true,
        after_help = "Without options it listens on loopback, makes a token of each role in its state directory and prints
what to type next. Examples:
  exec-server rendezvous                                      try it on this machine
  exec-server rendezvous --listen https://0.0.0.0:443 \\
      --tls-cert cert.pem --tls-key key.pem                   for everybody
  exec-server rendezvous --listen https://0.0.0.0:4700 --tls-self-signed
  exec-server rendezvous token-add ci --role harness --environment 'build-*'

Executors register, harnesses connect, and both keep a websocket to it. What they say to each other is
encrypted from end to end: it sees who talks to whom, when and how much, and nothing else.

The file of tokens has a line for each: NAME ROLES TOKEN [ENVIRONMENTS] [tenant=TENANT]. Roles are executor,
harness and admin, with commas between them; TOKEN is `sha256:` and the hash of one, or the token itself;
ENVIRONMENTS are ids or beginnings with a `*`. Tenants know nothing of each other; who names none is of
`default`, and an admin with `tenant=*` looks after all. The file is read again when it changes: whoever's line is gone is out
within a second. SIGHUP reads tokens and certificates again, SIGTERM ends it; all come back by themselves.

For admins, with a bearer token: GET /cloud/environments, POST /cloud/environment/ID/remove,
POST /cloud/revoke and /cloud/permit {\"harness\": \"token:NAME\" or \"key:SHA256\", \"environment_id\": ID},
GET /cloud/revocations, GET /cloud/streams, GET /events; `exec-server fleet` uses them. For everybody: /healthz and /readyz."
    )]
    Rendezvous(Box<RendezvousArgs>),
    /// Look after meeting points: nodes, environments, streams, revocations
    #[command(
        after_help = "Without options it asks the meeting point on this machine, with the admin's token in its state
directory. Examples:
  exec-server fleet nodes
  exec-server fleet environments --url https://meet.example --admin-token-file admin.token
  exec-server fleet streams build-7
  exec-server fleet revoke token:ci                      who came with this token is out, and stays out
  exec-server fleet revoke token:ci --undo
  exec-server fleet drain meet-2                         its sockets go elsewhere, then it ends
  exec-server fleet top

An admin sees its own tenant; one whose line in the file of tokens says `tenant=*` sees all, and is the one
who can use `nodes`, `drain` and `top`. Exit codes: 0 done, 1 refused or not reached."
    )]
    Fleet(FleetArgs),
    /// Make, sign and read the tokens that a server asks for
    #[command(subcommand)]
    Token(TokenCommand),
    /// Show the settings of a server and where each came from
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Start this user's server in the background, and tell where it listens
    ///
    /// `ssh://` uses it on the far side: it outlives the connection, and ends by itself when nobody
    /// needs it any more.
    Daemon(DaemonArgs),
    /// Tell how a server is
    Status(StatusArgs),
    /// Tell what this machine can enforce on sandboxed commands, and what is in the way
    #[command(after_help = "Exit codes: 0 everything can be enforced, 1 something cannot.")]
    Doctor(DoctorArgs),
    /// Print a completion script for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write those of all commands
    Man {
        /// Write all of them to this directory
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
}

/// Options of `serve`.
#[derive(Debug, Default, clap::Args)]
pub(super) struct ServeArgs {
    /// Where to listen: `ws://IP:PORT`, `wss://IP:PORT`, `unix:///PATH`, `stdio`, or `off`
    ///
    /// Port 0 takes a free one; the URL that clients can use is printed on standard output. Can be
    /// given several times. Without it: `ws://127.0.0.1:0`.
    #[arg(long, value_name = "URL")]
    pub(super) listen: Vec<String>,

    /// Read settings from this file (TOML); flags and variables win over it
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,

    /// Set any key of the settings file, as in `limits.sessions=100`
    #[arg(long, value_name = "KEY=VALUE")]
    pub(super) set: Vec<String>,

    /// Requests of one connection that are worked on at the same time; 1 is strictly serial
    #[arg(long, value_name = "COUNT")]
    pub(super) concurrent_requests: Option<NonZeroUsize>,

    /// Threads that serve connections; as many as suit the machine if not given
    #[arg(long, value_name = "COUNT")]
    pub(super) threads: Option<NonZeroUsize>,

    /// Listen where others can reach it, without authentication: anyone there can run commands
    #[arg(long)]
    pub(super) danger_no_auth: bool,

    #[command(flatten)]
    pub(super) auth: AuthArgs,

    #[command(flatten)]
    pub(super) tls: TlsArgs,

    #[command(flatten)]
    pub(super) remote: RemoteArgs,

    /// How long processes may go on after SIGTERM before they are ended, as in `30s`
    #[arg(long, value_name = "TIME")]
    pub(super) drain: Option<String>,

    /// How log lines look
    #[arg(long, value_name = "FORMAT", value_parser = PossibleValuesParser::new(FORMATS))]
    pub(super) log_format: Option<String>,

    /// What is logged, as in `info` or `exec_server_service=debug`
    #[arg(long, value_name = "FILTER")]
    pub(super) log: Option<String>,

    /// Serve Prometheus metrics at `/metrics` on this `IP:PORT`
    #[arg(long, value_name = "IP:PORT")]
    pub(super) metrics_listen: Option<String>,

    /// Append who ran what to this file, one JSON object per line
    #[arg(long, value_name = "FILE")]
    pub(super) audit_file: Option<PathBuf>,
}

/// Who may connect.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Authentication")]
pub(super) struct AuthArgs {
    /// Ask clients for a bearer token
    #[arg(long, value_name = "MODE", value_parser = PossibleValuesParser::new(MODES))]
    pub(super) ws_auth: Option<String>,

    /// A file with a token, or `NAME=FILE:SCOPE,SCOPE` for one that is good for some things only
    ///
    /// Scopes are exec, fs:read, fs:write and observe. Can be given several times.
    #[arg(long, value_name = "FILE")]
    pub(super) ws_token_file: Vec<String>,

    /// The SHA-256 of a token, instead of the token; `NAME=HEX:SCOPE,SCOPE` works here too
    #[arg(long, value_name = "HEX")]
    pub(super) ws_token_sha256: Vec<String>,

    /// A file with the secret that signs tokens (JWT, HS256), at least 32 bytes
    #[arg(long, value_name = "FILE")]
    pub(super) ws_shared_secret_file: Option<PathBuf>,

    /// Who must have issued a signed token
    #[arg(long, value_name = "NAME")]
    pub(super) ws_issuer: Option<String>,

    /// For whom a signed token must be
    #[arg(long, value_name = "NAME")]
    pub(super) ws_audience: Option<String>,

    /// How far the clocks of issuer and server may be apart; 30 if not given
    #[arg(long, value_name = "SECONDS")]
    pub(super) ws_max_clock_skew_seconds: Option<u32>,

    /// Let web pages of this origin connect, as in `https://console.example`; others cannot
    #[arg(long, value_name = "ORIGIN")]
    pub(super) allow_origin: Vec<String>,
}

/// How `wss://` is served.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "TLS")]
pub(super) struct TlsArgs {
    /// The server's certificate and its chain (PEM); read again when it changes, and on SIGHUP
    #[arg(long, value_name = "FILE")]
    pub(super) tls_cert: Option<PathBuf>,

    /// The key of the certificate (PEM)
    #[arg(long, value_name = "FILE")]
    pub(super) tls_key: Option<PathBuf>,

    /// Make a certificate and print the pin that clients can check; keep it in the files of
    /// --tls-cert and --tls-key if they are given
    #[arg(long)]
    pub(super) tls_self_signed: bool,

    /// Let in only clients with a certificate that one of these authorities (PEM) has signed
    #[arg(long, value_name = "FILE")]
    pub(super) tls_client_ca: Option<PathBuf>,
}

/// Serving through a registry instead of listening.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Remote mode")]
pub(super) struct RemoteArgs {
    /// Register at this registry (`https://HOST`) and serve whoever comes through it
    #[arg(long, value_name = "URL")]
    pub(super) remote: Option<String>,

    /// Which environment this machine is
    #[arg(long, value_name = "ID")]
    pub(super) environment_id: Option<String>,

    /// How people call this machine
    #[arg(long, value_name = "NAME")]
    pub(super) name: Option<String>,

    /// The file with the keys that clients know this machine by; made if it is not there
    #[arg(long, value_name = "FILE")]
    pub(super) identity_file: Option<PathBuf>,

    /// A file with the registry's token; without it EXEC_SERVER_API_KEY or CODEX_API_KEY
    #[arg(long, value_name = "FILE")]
    pub(super) remote_token_file: Option<PathBuf>,

    /// Read credentials for the registry from standard input, one JSON object per line; end with it
    #[arg(long, conflicts_with = "use_agent_identity_auth")]
    pub(super) executor_credential_stdin: bool,

    /// Sign for the agent whose identity is in CODEX_ACCESS_TOKEN; tasks are registered at the URL in
    /// EXEC_SERVER_AGENT_AUTH_API
    #[arg(long)]
    pub(super) use_agent_identity_auth: bool,

    /// End when standard input does
    #[arg(long, env = "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE", value_parser = clap::builder::FalseyValueParser::new())]
    pub(super) exit_on_stdin_close: bool,

    /// Believe the registry with this key (`sha256//…`)
    #[arg(long, value_name = "PIN")]
    pub(super) remote_tls_pin: Option<String>,

    /// Believe these certificate authorities (PEM) instead of the system's
    #[arg(long, value_name = "FILE")]
    pub(super) remote_tls_ca: Option<PathBuf>,

    /// Send credentials to a registry on another machine without TLS
    #[arg(long)]
    pub(super) danger_plain_http: bool,
}

/// Options of `forward`.
#[derive(Debug, clap::Args)]
pub(super) struct ForwardArgs {
    /// The server to forward to: `ws://HOST:PORT`, `wss://HOST:PORT` or `unix:///PATH`
    #[arg(
        long,
        value_name = "URL",
        required_unless_present = "command",
        conflicts_with = "command"
    )]
    pub(super) connect: Option<String>,

    /// A file with the token that the server asks for
    #[arg(long, value_name = "FILE", requires = "connect")]
    pub(super) connect_token_file: Option<PathBuf>,

    /// Believe the server with this key (`sha256//…`)
    #[arg(long, value_name = "PIN", requires = "connect")]
    pub(super) connect_tls_pin: Option<String>,

    /// Believe these certificate authorities (PEM) instead of the system's
    #[arg(long, value_name = "FILE", requires = "connect")]
    pub(super) connect_tls_ca: Option<PathBuf>,

    #[command(flatten)]
    pub(super) remote: RemoteArgs,

    /// Read settings from this file (TOML), of which those under `remote` and `log` count
    #[arg(long, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,

    /// What is logged, as in `info` or `exec_server_service=debug`
    #[arg(long, value_name = "FILTER")]
    pub(super) log: Option<String>,

    /// A command that serves its standard input and output, started for each client
    #[arg(last = true, value_name = "COMMAND")]
    pub(super) command: Vec<String>,
}

/// Options of `env trust`.
#[derive(Debug, clap::Args)]
pub(super) struct TrustArgs {
    #[command(flatten)]
    pub(super) server: ServerArgs,

    /// Believe this key, without asking the registry
    #[arg(long, value_name = "HEX")]
    pub(super) fingerprint: Option<String>,

    /// Forget the environment: the next key is believed
    #[arg(long, conflicts_with = "fingerprint")]
    pub(super) forget: bool,

    /// Print what is known
    #[arg(long, conflicts_with_all = ["fingerprint", "forget", "environment"])]
    pub(super) list: bool,

    /// The environment: `registry://HOST[:PORT]/ENVIRONMENT`
    #[arg(required_unless_present = "list", value_name = "URL")]
    pub(super) environment: Option<String>,
}

/// Options of `rendezvous`.
#[derive(Debug, clap::Args)]
pub(super) struct RendezvousArgs {
    #[command(subcommand)]
    pub(super) command: Option<RendezvousCommand>,

    /// Where to listen: `IP:PORT`, `http://IP:PORT` or `https://IP:PORT`; port 0 takes a free one
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:4700")]
    pub(super) listen: String,

    /// Where registrations, the signing secret and generated tokens are kept
    ///
    /// Without it: `rendezvous` in EXEC_SERVER_STATE_DIR, `$XDG_STATE_HOME/exec-server` or
    /// `~/.local/state/exec-server`.
    #[arg(long, value_name = "DIR", global = true)]
    pub(super) state_dir: Option<PathBuf>,

    /// The file of tokens; `tokens` in the state directory if not given
    #[arg(long, value_name = "FILE", global = true)]
    pub(super) tokens: Option<PathBuf>,

    /// How others reach it, as in `https://meet.example`; as they did if not given
    #[arg(long, value_name = "URL")]
    pub(super) public_url: Option<String>,

    /// Listen where others can reach it, without TLS: for a proxy in front of it that speaks TLS
    #[arg(long)]
    pub(super) danger_no_tls: bool,

    #[command(flatten)]
    pub(super) tls: TlsArgs,

    /// How long the address that an executor gets is good; then it registers again
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1h")]
    pub(super) executor_url_lifetime: Duration,

    /// How long the address and the authorization that a harness gets are good
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "60s")]
    pub(super) harness_url_lifetime: Duration,

    #[cfg(feature = "nats")]
    #[command(flatten)]
    pub(super) nats: NatsArgs,

    /// Connections at one time
    #[arg(long, value_name = "COUNT", default_value = "16384")]
    pub(super) max_connections: usize,

    /// Sockets of harnesses with the same token in one environment
    #[arg(long, value_name = "COUNT", default_value = "4096")]
    pub(super) max_harness_sockets: usize,

    /// Serve Prometheus metrics at `/metrics` on this `IP:PORT`
    #[arg(long, value_name = "IP:PORT")]
    pub(super) metrics_listen: Option<String>,

    /// Tenants that metrics know by name; the others are counted as `other`
    #[arg(long, value_name = "COUNT", default_value = "32")]
    pub(super) metrics_tenants: usize,

    /// A file with what tenants may use, read again when it changes
    ///
    /// One line each: `TENANT environments=N streams=N bandwidth=BYTES handshakes=N`, of which any
    /// may be left out. Bandwidth is bytes a second, handshakes are a second too; K, M and G may
    /// follow a number. `*` is every tenant without a line of its own.
    #[arg(long, value_name = "FILE")]
    pub(super) quotas: Option<PathBuf>,

    /// What a tenant may use, as in a line of --quotas; can be given several times, and comes before
    /// the file
    #[arg(long, value_name = "LINE")]
    pub(super) quota: Vec<String>,

    /// Let in whoever has a token (JWT) of this OIDC issuer, too
    #[arg(
        long,
        value_name = "URL",
        requires = "oidc_audience",
        requires = "oidc_jwks"
    )]
    pub(super) oidc_issuer: Option<String>,

    /// Whom the issuer's tokens must be for
    #[arg(long, value_name = "AUDIENCE", requires = "oidc_issuer")]
    pub(super) oidc_audience: Option<String>,

    /// The issuer's keys: a JWKS document, as a file or an `https://` URL
    ///
    /// RS256, ES256 and EdDSA. Read again when the file changes, every five minutes from a URL, and
    /// when a token names a key that is not known, at most every ten seconds.
    #[arg(long, value_name = "FILE|URL", requires = "oidc_issuer")]
    pub(super) oidc_jwks: Option<String>,

    /// Certificate authorities (PEM) to believe when keys are fetched, instead of the system's
    #[arg(long, value_name = "FILE", requires = "oidc_issuer")]
    pub(super) oidc_ca: Option<PathBuf>,

    /// The claim with the tenant; a token without it is of `default`
    #[arg(long, value_name = "CLAIM", default_value = "tenant")]
    pub(super) oidc_tenant_claim: String,

    /// The claim with the roles: executor, harness, admin
    #[arg(long, value_name = "CLAIM", default_value = "roles")]
    pub(super) oidc_role_claim: String,

    /// The claim with the environments that a token is good for; all if it is not there
    #[arg(long, value_name = "CLAIM", default_value = "environments")]
    pub(super) oidc_environments_claim: String,

    /// Append who registered, connected and was refused to this file, one JSON object per line
    #[arg(long, value_name = "FILE")]
    pub(super) audit_file: Option<PathBuf>,

    /// Threads that serve sockets; as many as suit the machine if not given
    #[arg(long, value_name = "COUNT")]
    pub(super) threads: Option<NonZeroUsize>,

    /// How log lines look
    #[arg(long, value_name = "FORMAT", value_parser = PossibleValuesParser::new(FORMATS))]
    pub(super) log_format: Option<String>,

    /// What is logged, as in `info` or `exec_server_rendezvous=debug`
    #[arg(long, value_name = "FILTER")]
    pub(super) log: Option<String>,
}

/// How many meeting points are one.
#[cfg(feature = "nats")]
#[derive(Debug, Clone, Default, clap::Args)]
pub(super) struct NatsArgs {
    /// Be one of many meeting points that work as one: NATS servers with JetStream, as in
    /// `nats://127.0.0.1:4222` or `tls://nats.example`
    ///
    /// All of them need the same file of tokens. Registrations are then kept there, not in the state
    /// directory.
    #[arg(long, value_name = "URL", value_delimiter = ',')]
    pub(super) nats: Vec<String>,

    /// The NATS credentials file
    #[arg(long, value_name = "FILE", requires = "nats")]
    pub(super) nats_creds: Option<PathBuf>,

    /// Certificates (PEM) of authorities that NATS's certificate is trusted by, besides those of
    /// this machine
    #[arg(long, value_name = "FILE", requires = "nats")]
    pub(super) nats_ca: Option<PathBuf>,

    /// The JetStream bucket; meeting points with the same one are one
    #[arg(
        long,
        value_name = "NAME",
        default_value = "exec-server",
        requires = "nats"
    )]
    pub(super) nats_bucket: String,

    /// Copies of the bucket, where NATS is a cluster itself
    #[arg(long, value_name = "COUNT", default_value = "1", requires = "nats")]
    pub(super) nats_replicas: usize,

    /// What this node is called; no two may have the same. The machine's name and something random
    /// if not given
    #[arg(long, value_name = "NAME", requires = "nats")]
    pub(super) node_name: Option<String>,

    /// How peers reach this very node, when others fail; `--public-url` or where it listens if not
    /// given
    #[arg(long, value_name = "URL", requires = "nats")]
    pub(super) node_url: Option<String>,

    /// How long it may take to send everybody elsewhere after SIGTERM
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "5s")]
    pub(super) drain: Duration,

    /// What to add to this machine's clock, in seconds; for tests
    #[arg(
        long,
        value_name = "SECONDS",
        default_value = "0",
        hide = true,
        allow_negative_numbers = true
    )]
    pub(super) clock_offset: i64,
}

/// What can be done with a meeting point besides running it.
#[derive(Debug, Subcommand)]
pub(super) enum RendezvousCommand {
    /// Make a token and add it to the file of tokens; a running meeting point takes it up
    #[command(after_help = "Examples:
  exec-server rendezvous token-add build-7 --role executor --environment build-7 --out build-7.token
  exec-server rendezvous token-add ci --role harness --environment 'build-*'")]
    TokenAdd(TokenAddArgs),
}

/// Options of `rendezvous token-add`.
#[derive(Debug, clap::Args)]
pub(super) struct TokenAddArgs {
    /// What to call it; appears in the audit log, and revoking goes by it
    pub(super) name: String,

    /// What it is good for; can be given several times
    #[arg(long, value_enum, required = true)]
    pub(super) role: Vec<RoleArg>,

    /// An environment that it is good for, or the beginning of some with a `*`; all if not given
    #[arg(long, value_name = "ID")]
    pub(super) environment: Vec<String>,

    /// Whose it is; `*` is for admins who look after all tenants
    #[arg(long, value_name = "TENANT", default_value = "default")]
    pub(super) tenant: String,

    /// Write it to this file, which only this user can read; it must not be there yet
    #[arg(long, value_name = "FILE")]
    pub(super) out: Option<PathBuf>,
}

/// Options of `fleet`.
#[derive(Debug, clap::Args)]
pub(super) struct FleetArgs {
    #[command(subcommand)]
    pub(super) command: FleetCommand,

    /// A meeting point: `https://HOST[:PORT]`, or any of several that work together [env:
    /// EXEC_SERVER_FLEET_URL] [default: http://127.0.0.1:4700]
    #[arg(long, global = true, value_name = "URL")]
    pub(super) url: Option<String>,

    /// A file with an admin's token [env: EXEC_SERVER_FLEET_TOKEN_FILE]
    ///
    /// Without it: `rendezvous/admin.token` in EXEC_SERVER_STATE_DIR, `$XDG_STATE_HOME/exec-server` or
    /// `~/.local/state/exec-server`.
    #[arg(long, global = true, value_name = "FILE")]
    pub(super) admin_token_file: Option<PathBuf>,

    /// Believe the meeting point with this key (`sha256//…`) [env: EXEC_SERVER_TLS_PIN]
    #[arg(long, global = true, value_name = "PIN")]
    pub(super) tls_pin: Option<String>,

    /// Believe these certificate authorities (PEM) instead of the system's [env: EXEC_SERVER_TLS_CA]
    #[arg(long, global = true, value_name = "FILE")]
    pub(super) tls_ca: Option<PathBuf>,

    /// Send the token to another machine without TLS
    #[arg(long, global = true)]
    pub(super) danger_plain_http: bool,

    /// Print JSON
    #[arg(long, global = true)]
    pub(super) json: bool,
}

/// What there is to know and to do.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(super) enum FleetCommand {
    /// The nodes that work together, and what is attached to each
    Nodes,
    /// The environments, and where each is attached
    Environments {
        /// Of this tenant alone
        #[arg(long, value_name = "TENANT")]
        tenant: Option<String>,

        /// Forget this environment and turn out all who are there; can be given several times
        #[arg(long, value_name = "ID")]
        remove: Vec<String>,
    },
    /// The streams, and who is at both ends of each
    Streams {
        /// Of this environment alone
        #[arg(value_name = "ENVIRONMENT")]
        environment: Option<String>,

        /// Of this tenant alone; whose environment it is
        #[arg(long, value_name = "TENANT")]
        tenant: Option<String>,
    },
    /// Turn somebody out, for good; without a name, show who is
    Revoke {
        /// `token:NAME`, `key:SHA256`, or the name of a token
        #[arg(value_name = "WHO")]
        who: Option<String>,

        /// Only here; everywhere if not given
        #[arg(long, value_name = "ID", requires = "who")]
        environment: Option<String>,

        /// Whose token or key it is
        #[arg(long, value_name = "TENANT", requires = "who")]
        tenant: Option<String>,

        /// Let it in again
        #[arg(long, requires = "who")]
        undo: bool,
    },
    /// Have a node send everybody elsewhere, and end
    Drain {
        /// As `fleet nodes` calls it
        #[arg(value_name = "NODE")]
        node: String,
    },
    /// Watch nodes, tenants and the busiest environments
    Top {
        /// How often to look
        #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "2s")]
        interval: Duration,

        /// How often in all; until interrupted if not given
        #[arg(long, value_name = "COUNT")]
        count: Option<u64>,
    },
}

/// Roles by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum RoleArg {
    /// Registers environments
    Executor,
    /// Connects to environments
    Harness,
    /// Lists, removes and revokes
    Admin,
}

impl RoleArg {
    pub(super) fn role(self) -> Role {
        match self {
            Self::Executor => Role::Executor,
            Self::Harness => Role::Harness,
            Self::Admin => Role::Admin,
        }
    }
}

/// How to reach a server.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct ServerArgs {
    /// The environment to work in: an id that `exec-server env list` shows, `local`, or a URL
    ///
    /// Without it, and without a server: the default environment, which is this machine unless
    /// `exec-server env use` said otherwise.
    #[arg(long, global = true, value_name = "ENV", conflicts_with = "url")]
    pub(super) on: Option<String>,

    /// The server: `ws://HOST:PORT`, `wss://HOST:PORT`, `unix:///PATH`,
    /// `registry://HOST[:PORT]/ENVIRONMENT` or `ssh://[USER@]HOST[:PORT][/PATH]` [env:
    /// EXEC_SERVER_URL]
    #[arg(long, global = true, value_name = "URL")]
    pub(super) url: Option<String>,

    /// A file with the token that the server asks for [env: EXEC_SERVER_TOKEN_FILE; or the token
    /// itself: EXEC_SERVER_TOKEN]
    #[arg(long, global = true, value_name = "FILE")]
    pub(super) token_file: Option<PathBuf>,

    /// Believe the server with this key (`sha256//…`, as it prints with --tls-self-signed) [env:
    /// EXEC_SERVER_TLS_PIN]
    #[arg(long, global = true, value_name = "PIN")]
    pub(super) tls_pin: Option<String>,

    /// Believe these certificate authorities (PEM) instead of the system's [env:
    /// EXEC_SERVER_TLS_CA]
    #[arg(long, global = true, value_name = "FILE")]
    pub(super) tls_ca: Option<PathBuf>,

    /// Our own certificate (PEM), for servers that want one
    #[arg(long, global = true, value_name = "FILE", requires = "tls_client_key")]
    pub(super) tls_client_cert: Option<PathBuf>,

    /// The key of our certificate (PEM)
    #[arg(long, global = true, value_name = "FILE", requires = "tls_client_cert")]
    pub(super) tls_client_key: Option<PathBuf>,

    #[command(flatten)]
    pub(super) ssh: SshArgs,
}

/// How to get to a server by ssh, and which paths there are which here.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "SSH")]
pub(super) struct SshArgs {
    /// An option for ssh, as after its -o; can be given several times
    #[arg(long, global = true, value_name = "NAME=VALUE")]
    pub(super) ssh_option: Vec<String>,

    /// The exec-server of the far side: a path, or a name in PATH; nothing is installed there
    #[arg(long, global = true, value_name = "PATH")]
    pub(super) remote_binary: Option<String>,

    /// The executable to install on the far side, instead of this one [env:
    /// EXEC_SERVER_LOCAL_BINARY]
    #[arg(long, global = true, value_name = "FILE")]
    pub(super) local_binary: Option<PathBuf>,

    /// A directory here that --remote-root stands for: paths are given and shown as those of this
    /// machine, and those outside of it are refused
    #[arg(long, global = true, value_name = "DIR")]
    pub(super) local_root: Option<PathBuf>,

    /// The directory there that stands for --local-root; the path of an ssh:// URL if not given
    #[arg(long, global = true, value_name = "DIR", requires = "local_root")]
    pub(super) remote_root: Option<PathBuf>,
}

/// Options of `daemon`.
#[derive(Debug, clap::Args)]
pub(super) struct DaemonArgs {
    /// Carry bytes between standard input and output and the daemon
    #[arg(long, conflicts_with = "stop")]
    pub(super) stdio: bool,

    /// End the daemon, with its sessions and everything they run
    #[arg(long)]
    pub(super) stop: bool,

    /// How long a daemon that is started now waits for something to do before it ends
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10m")]
    pub(super) idle: Duration,

    /// Where its socket, lock and log are; a directory of this machine in the user's cache if not
    /// given
    #[arg(long, value_name = "DIR")]
    pub(super) directory: Option<PathBuf>,

    /// Be the daemon
    #[arg(long, hide = true)]
    pub(super) serve: bool,
}

impl ServerArgs {
    /// The first flag that is about a server named by its URL.
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

/// What can be done with environments.
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
    Add(Box<EnvAddArgs>),
    /// Forget an environment
    Remove {
        /// Which one
        id: String,
    },
    /// Connect to environments and tell how they are
    #[command(after_help = "Exit codes: 0 all of them are ready, 1 some are not.")]
    Status {
        /// Which ones; all if not given
        ids: Vec<String>,
        /// How long to wait for each
        #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10s")]
        timeout: Duration,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Choose the environment that is used when nothing is said
    Use {
        /// Its id, `local` for this machine, or `none`
        id: String,
    },
    /// Believe the key that an environment of a registry has now, in place of any other
    #[command(after_help = "Examples:
  exec-server env trust registry://meet.example/build-7
  exec-server env trust registry://meet.example/build-7 --fingerprint 9f86d0…
  exec-server env trust --list

The first key that an environment shows is believed and written down; a client that meets another
does not connect. The executor prints its fingerprint when it starts: compare.")]
    Trust(Box<TrustArgs>),
}

/// Options of `env add`.
#[derive(Debug, clap::Args)]
pub(super) struct EnvAddArgs {
    /// What to call it: letters, digits, `-` and `_`
    pub(super) id: String,

    /// Where it is: `ws://HOST:PORT`, `wss://HOST:PORT`, `unix:///PATH` or
    /// `ssh://[USER@]HOST[:PORT][/PATH]`
    #[arg(required_unless_present = "program", conflicts_with = "program")]
    pub(super) url: Option<String>,

    /// A file with the token that the server asks for; it is read for every connection
    #[arg(long, value_name = "FILE", requires = "url")]
    pub(super) token_file: Option<PathBuf>,

    /// Believe the server with this key (`sha256//…`)
    #[arg(long, value_name = "PIN", requires = "url")]
    pub(super) tls_pin: Option<String>,

    /// An option for ssh, as after its -o; can be given several times
    #[arg(long, value_name = "NAME=VALUE", requires = "url")]
    pub(super) ssh_option: Vec<String>,

    /// The exec-server of the machine behind ssh: a path, or a name in PATH
    #[arg(long, value_name = "PATH", requires = "url")]
    pub(super) remote_binary: Option<String>,

    /// A directory here that a directory of the machine behind ssh stands for
    #[arg(long, value_name = "DIR", requires = "url")]
    pub(super) local_root: Option<PathBuf>,

    /// The directory there that stands for it; the path of the URL if not given
    #[arg(long, value_name = "DIR", requires = "local_root")]
    pub(super) remote_root: Option<String>,

    /// Where the program is run
    #[arg(long, value_name = "DIR", requires = "program")]
    pub(super) cwd: Option<PathBuf>,

    /// A variable that the program gets
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

    /// Use it when nothing is said
    #[arg(long)]
    pub(super) default: bool,

    /// A program that serves its standard input and output, and its arguments
    #[arg(last = true, value_name = "PROGRAM")]
    pub(super) program: Vec<String>,
}

/// What can be done with tokens.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(super) enum TokenCommand {
    /// Make a random token
    ///
    /// The token goes to standard output or to a file; its SHA-256, which is all that a server
    /// needs, to standard error.
    New {
        /// Write it to this file, which only this user can read; it must not be there yet
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Sign a token with a shared secret
    #[command(after_help = "Example:
  exec-server token sign --secret-file secret --subject ci --scope 'fs:read observe' --expires 1h")]
    Sign {
        /// The file with the secret, or /dev/stdin or /dev/fd/N
        #[arg(long, value_name = "FILE")]
        secret_file: PathBuf,
        /// How long it is valid
        #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1h")]
        expires: Duration,
        /// From when on it is valid, counted from now
        #[arg(long, value_name = "TIME", value_parser = parse_duration)]
        not_before: Option<Duration>,
        /// For whom; the server's name for its bearer
        #[arg(long, value_name = "NAME")]
        subject: Option<String>,
        /// What it is good for: exec, fs:read, fs:write, observe; everything if not given
        #[arg(long, value_name = "SCOPES")]
        scope: Option<String>,
        /// Who issues it
        #[arg(long, value_name = "NAME")]
        issuer: Option<String>,
        /// For which server
        #[arg(long, value_name = "NAME")]
        audience: Option<String>,
    },
    /// Show what a token says, and with the secret whether it is genuine
    Inspect {
        /// The file with the token; standard input if not given
        file: Option<PathBuf>,
        /// The file with the secret that should have signed it
        #[arg(long, value_name = "FILE")]
        secret_file: Option<PathBuf>,
    },
}

/// What can be asked about settings.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(super) enum ConfigCommand {
    /// Print every key, its value and where that came from
    Show {
        /// As they would be with these options of `serve`
        #[command(flatten)]
        serve: Box<ServeArgs>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Options of `run`.
#[derive(Debug, clap::Args)]
pub(super) struct RunArgs {
    #[command(flatten)]
    pub(super) server: ServerArgs,

    /// Working directory, on the machine where the command runs
    #[arg(long, value_name = "DIR")]
    pub(super) cwd: Option<PathBuf>,

    /// Set an environment variable; without a value, pass on the one that is set here
    #[arg(long = "env", short = 'e', value_name = "NAME[=VALUE]")]
    pub(super) env: Vec<String>,

    /// Give the command a terminal, even if this is none
    #[arg(long, short = 't', overrides_with = "no_tty")]
    pub(super) tty: bool,

    /// Give the command pipes, even if this is a terminal
    #[arg(long, short = 'T')]
    pub(super) no_tty: bool,

    /// End the command after this long, as in `90`, `500ms`, `10s`, `5m` or `1h`
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(super) timeout: Option<Duration>,

    #[command(flatten)]
    pub(super) sandbox: SandboxArgs,

    #[command(flatten)]
    pub(super) network: NetworkArgs,

    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub(super) command: Vec<String>,
}

/// Whom a command may reach.
#[derive(Debug, clap::Args)]
pub(super) struct NetworkArgs {
    /// Let the command reach this host, through a proxy of its own and in no other way: `NAME`,
    /// `*.NAME` (below it), `**.NAME` (it and below), an address, or `*`
    #[arg(long = "net-allow", value_name = "DOMAIN", conflicts_with = "network")]
    pub(super) net_allow: Vec<String>,

    /// Never let it reach this host, whatever else is allowed
    #[arg(long = "net-deny", value_name = "DOMAIN", conflicts_with = "network")]
    pub(super) net_deny: Vec<String>,

    /// Ask on this terminal about hosts that are neither allowed nor denied
    #[arg(long = "net-ask", conflicts_with = "network")]
    pub(super) net_ask: bool,
}

/// What a command may do.
#[derive(Debug, clap::Args)]
pub(super) struct SandboxArgs {
    /// Confine the command: to reading, or to writing in its working directory and /tmp
    #[arg(long, value_enum, value_name = "POLICY")]
    pub(super) sandbox: Option<SandboxArg>,

    /// A file or directory that it may write to as well
    #[arg(long, value_name = "PATH", requires = "sandbox")]
    pub(super) writable: Vec<PathBuf>,

    /// A file or directory that it may not even read
    #[arg(long, value_name = "PATH", requires = "sandbox")]
    pub(super) deny: Vec<PathBuf>,

    /// Whether it may use the network
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

/// Options of `mcp`.
#[cfg(feature = "mcp")]
#[derive(Debug, clap::Args)]
pub(super) struct McpArgs {
    #[command(flatten)]
    pub(super) server: ServerArgs,

    /// Another environment, which tools name by its id; can be given several times
    #[arg(long = "with", value_name = "ENV")]
    pub(super) with: Vec<String>,

    /// Where relative paths begin, on the machine where the tools work
    #[arg(long, value_name = "DIR")]
    pub(super) cwd: Option<PathBuf>,

    #[command(flatten)]
    pub(super) sandbox: SandboxArgs,

    /// The tools to offer, separated by commas; all if not given
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    #[arg(value_parser = PossibleValuesParser::new(exec_server_mcp::TOOLS))]
    pub(super) tools: Option<Vec<String>>,

    /// Serve streamable HTTP on this `IP:PORT` instead of standard input and output
    #[arg(long, value_name = "IP:PORT")]
    pub(super) http: Option<std::net::SocketAddr>,

    /// A file with the token that HTTP clients must bring
    #[arg(long, value_name = "FILE", requires = "http")]
    pub(super) http_token_file: Option<PathBuf>,
}

/// Options of `mcp-proxy`.
#[cfg(feature = "mcp")]
#[derive(Debug, clap::Args)]
pub(super) struct McpProxyArgs {
    #[command(flatten)]
    pub(super) server: ServerArgs,

    /// Working directory, on the machine where the server runs
    #[arg(long, value_name = "DIR")]
    pub(super) cwd: Option<PathBuf>,

    /// Set an environment variable; without a value, pass on the one that is set here
    #[arg(long = "env", short = 'e', value_name = "NAME[=VALUE]")]
    pub(super) env: Vec<String>,

    /// A variable that it gets from the machine where it runs, beside harmless ones
    #[arg(long, value_name = "NAME")]
    pub(super) inherit: Vec<String>,

    #[command(flatten)]
    pub(super) sandbox: SandboxArgs,

    /// The MCP server and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub(super) command: Vec<String>,
}

/// Options of `doctor`.
#[derive(Debug, clap::Args)]
pub(super) struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// Options of `ps`.
#[derive(Debug, clap::Args)]
pub(super) struct PsArgs {
    #[command(flatten)]
    pub(super) server: ServerArgs,

    /// Show ended processes that are still readable, too
    #[arg(long, short)]
    pub(super) all: bool,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// Options of `status`.
#[derive(Debug, clap::Args)]
pub(super) struct StatusArgs {
    #[command(flatten)]
    pub(super) server: ServerArgs,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// Options of `kill`.
#[derive(Debug, clap::Args)]
pub(super) struct KillArgs {
    #[command(flatten)]
    pub(super) server: ServerArgs,

    /// Send this signal to the process group instead of ending the process
    #[arg(long, short, value_enum)]
    pub(super) signal: Option<SignalArg>,

    /// End it at once, without a chance to clean up
    #[arg(long, short, conflicts_with = "signal")]
    pub(super) force: bool,

    /// How long it may take to clean up
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "5s")]
    pub(super) grace: Duration,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,

    /// Process id; before it, the beginning of its session's id if there are several of that name
    #[arg(required = true, num_args = 1..=2, value_names = ["SESSION] [PROCESS"])]
    pub(super) target: Vec<String>,
}

/// Signals by meaning.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum SignalArg {
    Interrupt,
    Terminate,
    Kill,
    Hangup,
    Quit,
    User1,
    User2,
    Stop,
    Continue,
}

/// Parses `500ms`, `10s`, `5m`, `1h` or plain seconds.
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: f64 = digits
        .parse()
        .map_err(|_| format!("`{text}` is not a time like 10s"))?;
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
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn durations() {
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
