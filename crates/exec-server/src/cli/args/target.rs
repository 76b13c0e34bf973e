//! Options that say which machine a command works on, and how it is reached.

use std::path::PathBuf;
use std::time::Duration;

use crate::cli::values::parse_duration;

// How to reach a server; last in every struct that has it, so that its group is the last one.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Connection")]
pub(in crate::cli) struct ServerArgs {
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
    pub(in crate::cli) on: Option<String>,

    /// Connect to this server [env: EXEC_SERVER_URL]
    ///
    /// `ws://HOST:PORT`, `wss://HOST:PORT`, `unix:///PATH`, `ssh://[USER@]HOST[:PORT][/PATH]` or
    /// `registry://HOST[:PORT]/ENVIRONMENT`.
    #[arg(long, global = true, value_name = "URL", hide_short_help = true)]
    pub(in crate::cli) url: Option<String>,

    /// Read the server's token from FILE
    ///
    /// [env: EXEC_SERVER_TOKEN_FILE: the file, or EXEC_SERVER_TOKEN: the token itself]
    #[arg(long, global = true, value_name = "FILE", hide_short_help = true)]
    pub(in crate::cli) token_file: Option<PathBuf>,

    /// Trust the server with this key [env: EXEC_SERVER_TLS_PIN]
    ///
    /// `sha256//…`, as `exec-server serve --tls-self-signed` prints it.
    #[arg(long, global = true, value_name = "PIN", hide_short_help = true)]
    pub(in crate::cli) tls_pin: Option<String>,

    /// Trust these certificate authorities (PEM) instead of the system's [env: EXEC_SERVER_TLS_CA]
    #[arg(long, global = true, value_name = "FILE", hide_short_help = true)]
    pub(in crate::cli) tls_ca: Option<PathBuf>,

    /// Present this client certificate (PEM)
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        requires = "tls_client_key",
        hide_short_help = true
    )]
    pub(in crate::cli) tls_client_cert: Option<PathBuf>,

    /// Use this key of the client certificate (PEM)
    #[arg(
        long,
        global = true,
        value_name = "FILE",
        requires = "tls_client_cert",
        hide_short_help = true
    )]
    pub(in crate::cli) tls_client_key: Option<PathBuf>,

    #[command(flatten)]
    pub(in crate::cli) ssh: SshArgs,
}

// How to reach a server by ssh, and how its paths correspond to those of this machine.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Connection")]
pub(in crate::cli) struct SshArgs {
    /// Fail instead of installing exec-server on the remote machine.
    #[arg(skip)]
    pub(in crate::cli) no_install: bool,

    /// Pass this option to ssh, as with its -o; can be given several times
    #[arg(long, global = true, value_name = "NAME=VALUE", hide_short_help = true)]
    pub(in crate::cli) ssh_option: Vec<String>,

    /// Use this exec-server of the remote machine, a path or a name in PATH; install nothing
    #[arg(long, global = true, value_name = "PATH", hide_short_help = true)]
    pub(in crate::cli) remote_binary: Option<String>,

    /// Install this executable on the remote machine [env: EXEC_SERVER_LOCAL_BINARY]
    ///
    /// [default: this program]
    #[arg(long, global = true, value_name = "FILE", hide_short_help = true)]
    pub(in crate::cli) local_binary: Option<PathBuf>,

    /// Translate paths below this local directory to paths below --remote-root
    ///
    /// Paths are then given and shown as those of this machine, and paths outside of it are refused.
    #[arg(long, global = true, value_name = "DIR", hide_short_help = true)]
    pub(in crate::cli) local_root: Option<PathBuf>,

    /// Use this remote directory for --local-root [default: the path of the ssh:// URL]
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        requires = "local_root",
        hide_short_help = true
    )]
    pub(in crate::cli) remote_root: Option<PathBuf>,
}

// Options of `daemon`.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct DaemonArgs {
    /// Copy bytes between standard input and output and the daemon's socket
    #[arg(long, conflicts_with = "stop")]
    pub(in crate::cli) stdio: bool,

    /// Stop the daemon, its sessions and everything they run
    #[arg(long)]
    pub(in crate::cli) stop: bool,

    /// Stop a daemon that is started now after it was unused for this time
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10m")]
    pub(in crate::cli) idle: Duration,

    /// Keep its socket, lock and log in this directory
    ///
    /// [default: a directory per machine in `$XDG_CACHE_HOME/exec-server` or `~/.cache/exec-server`]
    #[arg(long, value_name = "DIR")]
    pub(in crate::cli) directory: Option<PathBuf>,

    /// Run as the daemon
    #[arg(long, hide = true)]
    pub(in crate::cli) serve: bool,
}

impl ServerArgs {
    /// The first given flag that applies only to a server named by its URL.
    pub(in crate::cli) fn about_url(&self) -> Option<&'static str> {
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
