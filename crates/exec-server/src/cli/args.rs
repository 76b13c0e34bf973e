//! Definition of the command line: commands, options and their help.
//!
//! Structs of options and subcommands have plain comments: clap would show a doc comment as the first
//! line of the command's help page, in place of the one in [`CliCommand`].

use std::path::PathBuf;
use std::time::Duration;

#[cfg(feature = "mcp")]
use clap::ValueEnum;
#[cfg(feature = "mcp")]
use clap::builder::PossibleValuesParser;
use clap::{Parser, Subcommand};
use exec_server_protocol::process::SignalName;

use super::fs::args::{CpArgs, FsArgs};
use super::values::{parse_duration, signal_named};

/// Ends the short help of every command that works on another machine.
macro_rules! machine_note {
    () => {
        "

Machine: --on ENVIRONMENT or --url URL; else EXEC_SERVER_URL, else the default
environment (`exec-server env`). All connection options: --help"
    };
}

mod rendezvous;
mod run;
mod serve;
mod target;

pub(super) use rendezvous::{
    FleetArgs, FleetCommand, RendezvousArgs, RendezvousCommand, TokenAddArgs,
};
pub(super) use run::{NetworkArgs, RunArgs, SandboxArg, SandboxArgs, SwitchArg};
pub(super) use serve::{ForwardArgs, RemoteArgs, ServeArgs, TrustArgs};
pub(super) use target::{DaemonArgs, ServerArgs, SshArgs};

/// Run commands and use files on any machine, without losing a byte
#[derive(Debug, Parser)]
#[command(name = "exec-server", version, args_conflicts_with_subcommands = true)]
#[command(after_help = "Examples:
  exec-server run -- make test                   run a command on this machine
  exec-server run --on ssh://build -- make test  on a machine with an sshd
  exec-server serve                              serve this machine, to yourself
  exec-server run --on serve -- bash             open a shell on that server
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
    /// Create token, certificate, settings and service of a server for other machines
    #[command(after_help = "Examples:
  exec-server init                                   on wss://0.0.0.0:4600
  exec-server init --listen wss://10.0.0.7:4600 --host build.example

Prints the command that starts the server, and the line to paste on the other
machine. As root it creates /etc/exec-server/network.toml and a unit of the
system, else `server/network.toml` beside environments.toml and a unit of this
user. It replaces no file.")]
    Init(InitArgs),
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
    #[command(after_help = "Examples:
  exec-server doctor
  exec-server doctor --on build          of another machine; all connection options: --help

Exit codes: 0 all features can be used, 1 some cannot.")]
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
[tenant=TENANT] [until=TIME]. ROLES are executor, harness and admin, separated by commas;
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
    #[command(args_conflicts_with_subcommands = true, after_help = concat!("Examples:
  exec-server mcp                                this machine, on standard input and output
  exec-server mcp --on build-box                 an environment
  exec-server mcp --on local --with build-box    several; tools take an environment_id
  exec-server mcp --http 127.0.0.1:4700          streamable HTTP
  exec-server mcp config --client claude --on build-box    what to paste into a client", machine_note!()))]
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

// Options of `init`.
#[derive(Debug, clap::Args)]
pub(super) struct InitArgs {
    /// Listen on this `wss://IP:PORT`
    #[arg(long, value_name = "URL", default_value = "wss://0.0.0.0:4600")]
    pub(super) listen: String,

    /// Use this name of the machine in the printed line [default: its own]
    #[arg(long, value_name = "HOST")]
    pub(super) host: Option<String>,

    /// Create all files in this directory
    #[arg(long, value_name = "DIR")]
    pub(super) directory: Option<PathBuf>,
}

// Subcommands of `token`.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub(super) enum TokenCommand {
    /// Create a random token
    ///
    /// Prints the token on standard output and its SHA-256, which is all that a server needs, on
    /// standard error. With --out, prints the SHA-256 on standard output.
    #[command(after_help = "Example:
  exec-server token new --out ci.token       prints the hash for --ws-token-sha256")]
    New {
        /// Write the token to this new file, mode 0600, instead of standard output
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Print the SHA-256 of a token, which is all that a server needs
    Hash {
        /// Read the token from this file [default: standard input]
        file: Option<PathBuf>,
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

// Options of `mcp`.
#[cfg(feature = "mcp")]
#[derive(Debug, clap::Args)]
pub(super) struct McpArgs {
    #[command(subcommand)]
    pub(super) action: Option<McpAction>,

    /// Serve streamable HTTP on `IP:PORT` instead of standard input and output
    #[arg(long, value_name = "IP:PORT")]
    pub(super) http: Option<std::net::SocketAddr>,

    /// Require the token in FILE from HTTP clients
    #[arg(long, value_name = "FILE", requires = "http")]
    pub(super) http_token_file: Option<PathBuf>,

    #[command(flatten)]
    pub(super) tools: McpToolArgs,

    #[command(flatten)]
    pub(super) server: ServerArgs,
}

// What the tools of `mcp` work on, and which there are.
#[cfg(feature = "mcp")]
#[derive(Debug, clap::Args)]
pub(super) struct McpToolArgs {
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

    #[command(flatten)]
    pub(super) sandbox: SandboxArgs,
}

// Subcommands of `mcp`.
#[cfg(feature = "mcp")]
#[derive(Debug, Subcommand)]
pub(super) enum McpAction {
    /// Print what to paste into an MCP client, with the same options as `mcp`
    #[command(after_help = "Examples:
  exec-server mcp config --client claude --on build-box
  exec-server mcp config --client cursor --on build-box > .cursor/mcp.json
  exec-server mcp config --client codex --remote-only --on build-box

Prints configuration on standard output, and on standard error where it belongs.")]
    Config(Box<McpConfigArgs>),
}

// Options of `mcp config`.
#[cfg(feature = "mcp")]
#[derive(Debug, clap::Args)]
pub(super) struct McpConfigArgs {
    /// Print configuration for this client
    #[arg(long, value_enum, value_name = "CLIENT")]
    pub(super) client: McpClientArg,

    /// Print also how to forbid the client's own tools for commands and files of this machine
    #[arg(long)]
    pub(super) remote_only: bool,

    /// Name the server NAME in the client [default: the environment, or exec-server]
    #[arg(long, value_name = "NAME")]
    pub(super) name: Option<String>,

    #[command(flatten)]
    pub(super) tools: McpToolArgs,
}

/// MCP clients that can be configured.
#[cfg(feature = "mcp")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum McpClientArg {
    /// Claude Code
    Claude,
    /// Codex
    Codex,
    /// Cursor
    Cursor,
    /// Visual Studio Code
    #[value(name = "vscode")]
    VsCode,
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

    #[command(flatten)]
    pub(super) server: ServerArgs,
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
