//! What can be typed about files.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;

use crate::cli::args::{ServerArgs, parse_duration};

/// Options of `fs`.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct FsArgs {
    #[command(flatten)]
    pub(super) server: ServerArgs,

    #[command(subcommand)]
    pub(super) command: FsCommand,
}

#[derive(Debug, Subcommand)]
pub(super) enum FsCommand {
    /// List directories
    #[command(visible_alias = "list")]
    Ls(LsArgs),
    /// Print files
    Cat(CatArgs),
    /// Copy files and directories of this machine to the server
    #[command(after_help = "Examples:
  exec-server fs put notes.txt                      into the server's directory
  exec-server fs put -r src /srv/app                a directory, as /srv/app/src if that is one
  exec-server fs put -a site/. /var/www             what is in a directory, with modes and times
  make image | exec-server fs put - /srv/image      what another program writes

A file of 8 MiB or more that was cut off goes on where it stopped.")]
    Put(TransferArgs),
    /// Copy files and directories of the server to this machine
    #[command(after_help = "Examples:
  exec-server fs get /var/log/app.log               into this directory
  exec-server fs get -r /srv/app backup             a directory, as backup/app if that is one
  exec-server fs get /srv/image - | sha256sum       for another program to read

A file of 8 MiB or more that was cut off goes on where it stopped.")]
    Get(TransferArgs),
    /// Show what is at a path
    Stat(StatArgs),
    /// Remove files and directories
    Rm(RmArgs),
    /// Move or rename on the server
    Mv(MvArgs),
    /// Copy from one place of the server to another
    Cp(CpThereArgs),
    /// List a tree
    Walk(WalkArgs),
    /// Find lines that match
    #[command(after_help = "Examples:
  exec-server fs search TODO /srv/app
  exec-server fs search -i -F 'a.b(' -g '*.rs' -g '!target' .

Hidden files, and what .gitignore files name, are left out unless --no-ignore is given.
Exit codes: 0 something matches, 1 nothing does, 2 failure.")]
    Search(SearchArgs),
    /// Tell of changes as they happen, until interrupted
    #[command(after_help = "Examples:
  exec-server fs watch src
  exec-server fs watch --gitignore --ignore '*.log' --json . | while read -r event; do …; done")]
    Watch(WatchArgs),
}

/// Options of `fs ls`.
#[derive(Debug, clap::Args)]
pub(super) struct LsArgs {
    /// Show kind, mode, size and time of last change (UTC)
    #[arg(long, short)]
    pub(super) long: bool,

    /// Show names that begin with a dot, too
    #[arg(long, short)]
    pub(super) all: bool,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,

    /// What to list
    #[arg(value_name = "PATH", default_value = ".")]
    pub(super) paths: Vec<PathBuf>,
}

/// Options of `fs cat`.
#[derive(Debug, clap::Args)]
pub(super) struct CatArgs {
    /// What to print
    #[arg(value_name = "PATH", required = true)]
    pub(super) paths: Vec<PathBuf>,
}

/// How to copy between machines.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(super) struct CopyFlags {
    /// Copy directories with everything below them; links stay links
    #[arg(long, short)]
    pub(super) recursive: bool,

    /// As --recursive, and keep modes and times of last change
    #[arg(long, short)]
    pub(super) archive: bool,

    /// Show no progress
    #[arg(long, short)]
    pub(super) quiet: bool,

    /// Begin large files anew instead of going on where an earlier copy was cut off
    #[arg(long)]
    pub(super) no_resume: bool,
}

/// Options of `fs put` and `fs get`.
#[derive(Debug, clap::Args)]
pub(super) struct TransferArgs {
    #[command(flatten)]
    pub(super) flags: CopyFlags,

    /// What to copy, and last, where to if there are several; `-` is standard input or output
    #[arg(value_name = "PATH", required = true)]
    pub(super) paths: Vec<PathBuf>,
}

/// Options of `cp`.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct CpArgs {
    #[command(flatten)]
    pub(super) server: ServerArgs,

    #[command(flatten)]
    pub(super) flags: CopyFlags,

    /// What to copy, and last, where to: a path, `:PATH` on the server, or `URL:PATH`
    #[arg(value_name = "PATH", num_args = 2.., required = true)]
    pub(super) paths: Vec<OsString>,
}

/// Options of `fs stat`.
#[derive(Debug, clap::Args)]
pub(super) struct StatArgs {
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,

    /// What to look at
    #[arg(value_name = "PATH", required = true)]
    pub(super) paths: Vec<PathBuf>,
}

/// Options of `fs rm`.
#[derive(Debug, clap::Args)]
pub(super) struct RmArgs {
    /// Remove directories with everything below them
    #[arg(long, short)]
    pub(super) recursive: bool,

    /// It is no failure that nothing is there
    #[arg(long, short)]
    pub(super) force: bool,

    /// What to remove; a link is removed itself
    #[arg(value_name = "PATH", required = true)]
    pub(super) paths: Vec<PathBuf>,
}

/// Options of `fs mv`.
#[derive(Debug, clap::Args)]
pub(super) struct MvArgs {
    /// Do not replace what is there
    #[arg(long, short)]
    pub(super) no_clobber: bool,

    /// What to move, and last, where to
    #[arg(value_name = "PATH", num_args = 2.., required = true)]
    pub(super) paths: Vec<PathBuf>,
}

/// Options of `fs cp`.
#[derive(Debug, clap::Args)]
pub(super) struct CpThereArgs {
    /// Copy directories with everything below them; links stay links
    #[arg(long, short)]
    pub(super) recursive: bool,

    /// What to copy, and last, where to
    #[arg(value_name = "PATH", num_args = 2.., required = true)]
    pub(super) paths: Vec<PathBuf>,
}

/// Options of `fs walk`.
#[derive(Debug, clap::Args)]
pub(super) struct WalkArgs {
    /// How many directories deep, 0 for what is in PATH itself
    #[arg(long, value_name = "COUNT", default_value_t = 64)]
    pub(super) depth: usize,

    /// Stop after this many entries
    #[arg(long, value_name = "COUNT", default_value_t = 50_000)]
    pub(super) entries: usize,

    /// Enter links to directories, too
    #[arg(long, short = 'L')]
    pub(super) follow: bool,

    /// Do not enter directories whose name begins with a dot
    #[arg(long)]
    pub(super) prune_hidden: bool,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,

    /// Where to start
    #[arg(value_name = "PATH", default_value = ".")]
    pub(super) path: PathBuf,
}

/// Options of `fs search`.
#[derive(Debug, clap::Args)]
pub(super) struct SearchArgs {
    /// Take the pattern as it is, not as a regular expression
    #[arg(long, short = 'F')]
    pub(super) fixed_strings: bool,

    /// Do not tell upper from lower case
    #[arg(long, short)]
    pub(super) ignore_case: bool,

    /// Only these files, as in `*.rs`; with `!` before it, not these
    #[arg(long, short, value_name = "GLOB")]
    pub(super) glob: Vec<String>,

    /// Look into hidden and ignored files, too
    #[arg(long)]
    pub(super) no_ignore: bool,

    /// Show this many lines around each match
    #[arg(long, short = 'C', value_name = "LINES", default_value_t = 0)]
    pub(super) context: usize,

    /// Stop after this many matching lines
    #[arg(long, short, value_name = "COUNT", default_value_t = 1000)]
    pub(super) max_count: usize,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,

    /// What a line must contain
    pub(super) pattern: String,

    /// Where to look: a directory or a file
    #[arg(value_name = "PATH", default_value = ".")]
    pub(super) path: PathBuf,
}

/// Options of `fs watch`.
#[derive(Debug, clap::Args)]
pub(super) struct WatchArgs {
    /// Watch PATH alone, not what is below its directories
    #[arg(long)]
    pub(super) no_recursive: bool,

    /// Leave out what .gitignore files name, and .git
    #[arg(long)]
    pub(super) gitignore: bool,

    /// Leave out what this matches, as in `*.log`
    #[arg(long, value_name = "GLOB")]
    pub(super) ignore: Vec<String>,

    /// How long to gather changes before telling of them
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "50ms")]
    pub(super) debounce: Duration,

    /// Print a line of JSON for each batch of changes
    #[arg(long)]
    pub(super) json: bool,

    /// What to watch
    #[arg(value_name = "PATH", default_value = ".")]
    pub(super) path: PathBuf,
}
