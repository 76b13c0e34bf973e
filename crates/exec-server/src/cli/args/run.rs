//! Options of `run`, and of the sandbox and the network of its command.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;

use super::target::ServerArgs;
use crate::cli::values::parse_duration;

// Options of `run`.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct RunArgs {
    /// Run in this directory of the target machine
    ///
    /// [default: the current directory here, the server's directory on a server]
    #[arg(long, value_name = "DIR")]
    pub(in crate::cli) cwd: Option<PathBuf>,

    /// Set a variable; without a value, pass on the one set here
    #[arg(long = "env", short = 'e', value_name = "NAME[=VALUE]")]
    pub(in crate::cli) env: Vec<String>,

    /// Allocate a pseudo-terminal even if stdin is a pipe
    #[arg(long, short = 't', overrides_with = "no_tty")]
    pub(in crate::cli) tty: bool,

    /// Use pipes even if stdin is a terminal
    #[arg(long, short = 'T')]
    pub(in crate::cli) no_tty: bool,

    /// End the command after this time: `500ms`, `10s`, `5m`, `1h`
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(in crate::cli) timeout: Option<Duration>,

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
    pub(in crate::cli) keep_alive: Duration,

    /// Keep processes running that the command started and that outlive it
    ///
    /// Without this option, they are ended with the command, and listed. With it, the server ends them
    /// when the time of --keep-alive has passed.
    #[arg(long, hide_short_help = true)]
    pub(in crate::cli) leave_running: bool,

    /// Connect the command's standard input to /dev/null
    #[arg(short = 'n', long, conflicts_with = "tty")]
    pub(in crate::cli) no_input: bool,

    /// Print output and exit as JSON lines on standard output; without a terminal
    #[arg(long, conflicts_with = "tty", hide_short_help = true)]
    pub(in crate::cli) json: bool,

    /// Show where the command runs
    #[arg(long, short = 'v', conflicts_with = "quiet", hide_short_help = true)]
    pub(in crate::cli) verbose: bool,

    /// Print errors only, no notices
    #[arg(long, short = 'q', hide_short_help = true)]
    pub(in crate::cli) quiet: bool,

    /// Run this program with these arguments; no shell interprets them
    ///
    /// Without it, --on and --url open a login shell.
    #[arg(trailing_var_arg = true, value_name = "COMMAND")]
    pub(in crate::cli) command: Vec<String>,

    #[command(flatten)]
    pub(in crate::cli) sandbox: SandboxArgs,

    #[command(flatten)]
    pub(in crate::cli) network: NetworkArgs,

    #[command(flatten)]
    pub(in crate::cli) server: ServerArgs,
}

// The hosts that a command may reach.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Network")]
pub(in crate::cli) struct NetworkArgs {
    /// Allow only this host: `NAME`, `*.NAME`, an address, or `*`
    ///
    /// The command reaches it only through a proxy that is started for it. `*.NAME` means hosts
    /// below NAME, `**.NAME` NAME as well.
    #[arg(long = "net-allow", value_name = "DOMAIN", conflicts_with = "network")]
    pub(in crate::cli) net_allow: Vec<String>,

    /// Deny this host, even if --net-allow includes it
    #[arg(long = "net-deny", value_name = "DOMAIN", conflicts_with = "network")]
    pub(in crate::cli) net_deny: Vec<String>,

    /// Ask on this terminal about all other hosts
    #[arg(long = "net-ask", conflicts_with = "network")]
    pub(in crate::cli) net_ask: bool,
}

// Sandbox of a command.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Sandbox")]
pub(in crate::cli) struct SandboxArgs {
    /// Restrict the command to reading, or to writing in its directory and /tmp
    #[arg(long, value_enum, value_name = "POLICY")]
    pub(in crate::cli) sandbox: Option<SandboxArg>,

    /// Allow writing to this file or directory as well
    #[arg(long, value_name = "PATH", requires = "sandbox")]
    pub(in crate::cli) writable: Vec<PathBuf>,

    /// Deny even reading this file or directory
    #[arg(long, value_name = "PATH", requires = "sandbox")]
    pub(in crate::cli) deny: Vec<PathBuf>,

    /// Allow network access
    #[arg(
        long,
        value_enum,
        value_name = "SWITCH",
        requires = "sandbox",
        default_value = "off"
    )]
    pub(in crate::cli) network: SwitchArg,
}

/// Policies by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum SandboxArg {
    ReadOnly,
    WorkspaceWrite,
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum SwitchArg {
    On,
    Off,
}
