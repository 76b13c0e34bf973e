//! What can be typed.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use exec_server_service::DEFAULT_LISTEN_URL;

/// Run commands on any machine, from any program, without losing a byte.
///
/// Without a command it serves clients, like `exec-server serve`.
#[derive(Debug, Parser)]
#[command(name = "exec-server", version, args_conflicts_with_subcommands = true)]
#[command(after_help = "Examples:
  exec-server --listen ws://127.0.0.1:4600          serve on a fixed port
  exec-server run -- make test                      run a command here
  exec-server run --url ws://127.0.0.1:4600 -- sh   run a shell on a server
  exec-server ps --url ws://127.0.0.1:4600          what runs there

Exit codes: 0 success, 1 failure, 2 wrong usage; `run` has its own, see `run --help`.")]
pub(super) struct Args {
    #[command(subcommand)]
    pub(super) command: Option<Command>,
    #[command(flatten)]
    pub(super) serve: ServeArgs,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Serve clients (the default)
    Serve(ServeArgs),
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
    /// Tell what this machine can enforce on sandboxed commands, and what is in the way
    #[command(after_help = "Exit codes: 0 everything can be enforced, 1 something cannot.")]
    Doctor(DoctorArgs),
    /// Print a completion script for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

/// Options of `serve`.
#[derive(Debug, clap::Args)]
pub(super) struct ServeArgs {
    /// Where to listen: `ws://IP:PORT`, `unix:///PATH`, `stdio`, or `off`
    ///
    /// Port 0 takes a free one; the URL that clients can use is printed on standard output.
    #[arg(long, value_name = "URL", default_value = DEFAULT_LISTEN_URL)]
    pub(super) listen: String,

    /// Requests of one connection that are worked on at the same time; 1 is strictly serial
    #[arg(long, value_name = "COUNT")]
    pub(super) concurrent_requests: Option<NonZeroUsize>,

    /// Threads that serve connections; as many as suit the machine if not given
    #[arg(long, value_name = "COUNT")]
    pub(super) threads: Option<NonZeroUsize>,

    /// Listen where others can reach it, without authentication: anyone there can run commands
    #[arg(long)]
    pub(super) danger_no_auth: bool,
}

/// How to reach a server.
#[derive(Debug, clap::Args)]
pub(super) struct ServerArgs {
    /// The server: `ws://HOST:PORT` or `unix:///PATH`
    #[arg(long, value_name = "URL", env = "EXEC_SERVER_URL")]
    pub(super) url: Option<String>,
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

    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub(super) command: Vec<String>,
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
fn parse_duration(text: &str) -> Result<Duration, String> {
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
