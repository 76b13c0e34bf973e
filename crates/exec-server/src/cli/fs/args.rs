//! Options of `fs` and `cp`.
//!
//! Structs of options have plain comments, as in [`crate::cli::args`].

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;

use crate::cli::args::{ServerArgs, parse_duration};

// Options of `fs`.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct FsArgs {
    #[command(subcommand)]
    pub(super) command: FsCommand,

    #[command(flatten)]
    pub(super) server: ServerArgs,
}

// Subcommands of `fs`.
#[derive(Debug, Subcommand)]
pub(super) enum FsCommand {
    /// List directories
    #[command(visible_alias = "list")]
    Ls(LsArgs),
    /// Print files
    Cat(CatArgs),
    /// Copy files and directories from this machine to the server
    #[command(after_help = "Examples:
  exec-server fs put notes.txt                    into the server's directory
  exec-server fs put -r src /srv/app              to /srv/app/src if that exists
  exec-server fs put -a site/. /var/www           the contents, with modes and times
  make image | exec-server fs put - /srv/image    from a pipe

An interrupted copy of a file of 8 MiB or more resumes where it stopped.")]
    Put(TransferArgs),
    /// Copy files and directories from the server to this machine
    #[command(after_help = "Examples:
  exec-server fs get /var/log/app.log             into this directory
  exec-server fs get -r /srv/app backup           to backup/app if backup exists
  exec-server fs get /srv/image - | sha256sum     to a pipe

An interrupted copy of a file of 8 MiB or more resumes where it stopped.")]
    Get(TransferArgs),
    /// Show the kind, size, mode, owner and times of files
    Stat(StatArgs),
    /// Remove files and directories
    Rm(RmArgs),
    /// Move or rename files and directories on the server
    Mv(MvArgs),
    /// Copy files and directories within the server
    Cp(CpThereArgs),
    /// List a directory tree
    Walk(WalkArgs),
    /// Search files for lines that match a pattern
    #[command(after_help = "Examples:
  exec-server fs search TODO /srv/app
  exec-server fs search -i -F 'a.b(' -g '*.rs' -g '!target' .

Skips hidden files and those that .gitignore excludes, unless --no-ignore is given.
Exit codes: 0 something matches, 1 nothing does, 2 failure.")]
    Search(SearchArgs),
    /// Print changes below a directory as they happen, until interrupted
    #[command(after_help = "Examples:
  exec-server fs watch src
  exec-server fs watch --gitignore --ignore '*.log' --json . | while read -r event; do …; done")]
    Watch(WatchArgs),
}

// Options of `fs ls`.
#[derive(Debug, clap::Args)]
pub(super) struct LsArgs {
    /// Show kind, mode, size and modification time (UTC)
    #[arg(long, short)]
    pub(super) long: bool,

    /// Show names that begin with a dot too
    #[arg(long, short)]
    pub(super) all: bool,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,

    /// List these files or directories
    #[arg(value_name = "PATH", default_value = ".")]
    pub(super) paths: Vec<PathBuf>,
}

// Options of `fs cat`.
#[derive(Debug, clap::Args)]
pub(super) struct CatArgs {
    /// Print these files
    #[arg(value_name = "PATH", required = true)]
    pub(super) paths: Vec<PathBuf>,
}

// How to copy between machines.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(super) struct CopyFlags {
    /// Copy directories with everything below them; links are copied as links
    #[arg(long, short)]
    pub(super) recursive: bool,

    /// Copy recursively and keep modes and modification times
    #[arg(long, short)]
    pub(super) archive: bool,

    /// Show no progress
    #[arg(long, short)]
    pub(super) quiet: bool,

    /// Copy large files from the beginning instead of resuming an interrupted copy
    #[arg(long)]
    pub(super) no_resume: bool,
}

// Options of `fs put` and `fs get`.
#[derive(Debug, clap::Args)]
pub(super) struct TransferArgs {
    #[command(flatten)]
    pub(super) flags: CopyFlags,

    /// Copy the first paths to the last one; `-` is standard input or output
    ///
    /// A single path is copied to the current directory of the other side.
    #[arg(value_name = "PATH", required = true)]
    pub(super) paths: Vec<PathBuf>,
}

// Options of `cp`.
#[derive(Debug, clap::Args)]
pub(in crate::cli) struct CpArgs {
    #[command(flatten)]
    pub(super) flags: CopyFlags,

    /// Copy the first paths to the last one; on a server: `:PATH`, `ENV:PATH` or `URL:PATH`
    #[arg(value_name = "PATH", num_args = 2.., required = true)]
    pub(super) paths: Vec<OsString>,

    #[command(flatten)]
    pub(super) server: ServerArgs,
}

// Options of `fs stat`.
#[derive(Debug, clap::Args)]
pub(super) struct StatArgs {
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,

    /// Show these files or directories
    #[arg(value_name = "PATH", required = true)]
    pub(super) paths: Vec<PathBuf>,
}

// Options of `fs rm`.
#[derive(Debug, clap::Args)]
pub(super) struct RmArgs {
    /// Remove directories with everything below them
    #[arg(long, short)]
    pub(super) recursive: bool,

    /// Ignore paths that do not exist
    #[arg(long, short)]
    pub(super) force: bool,

    /// Remove these; of a symbolic link, the link itself
    #[arg(value_name = "PATH", required = true)]
    pub(super) paths: Vec<PathBuf>,
}

// Options of `fs mv`.
#[derive(Debug, clap::Args)]
pub(super) struct MvArgs {
    /// Keep existing files instead of replacing them
    #[arg(long, short)]
    pub(super) no_clobber: bool,

    /// Move the first paths to the last one
    #[arg(value_name = "PATH", num_args = 2.., required = true)]
    pub(super) paths: Vec<PathBuf>,
}

// Options of `fs cp`.
#[derive(Debug, clap::Args)]
pub(super) struct CpThereArgs {
    /// Copy directories with everything below them; links are copied as links
    #[arg(long, short)]
    pub(super) recursive: bool,

    /// Copy the first paths to the last one
    #[arg(value_name = "PATH", num_args = 2.., required = true)]
    pub(super) paths: Vec<PathBuf>,
}

// Options of `fs walk`.
#[derive(Debug, clap::Args)]
pub(super) struct WalkArgs {
    /// Descend COUNT directories; 0 lists PATH itself only
    #[arg(long, value_name = "COUNT", default_value_t = 64)]
    pub(super) depth: usize,

    /// Stop after COUNT entries; above 50000 the walk is depth first
    #[arg(long, value_name = "COUNT", default_value_t = 50_000)]
    pub(super) entries: usize,

    /// Follow symbolic links to directories
    #[arg(long, short = 'L')]
    pub(super) follow: bool,

    /// Skip directories whose name begins with a dot
    #[arg(long)]
    pub(super) prune_hidden: bool,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,

    /// Start at this directory
    #[arg(value_name = "PATH", default_value = ".")]
    pub(super) path: PathBuf,
}

// Options of `fs search`.
#[derive(Debug, clap::Args)]
pub(super) struct SearchArgs {
    /// Search for the pattern as plain text, not as a regular expression
    #[arg(long, short = 'F')]
    pub(super) fixed_strings: bool,

    /// Ignore the difference between upper and lower case
    #[arg(long, short)]
    pub(super) ignore_case: bool,

    /// Search only files that match, as in `*.rs`; with a leading `!`, all others
    #[arg(long, short, value_name = "GLOB")]
    pub(super) glob: Vec<String>,

    /// Search hidden and ignored files too
    #[arg(long)]
    pub(super) no_ignore: bool,

    /// Show LINES lines before and after each match
    #[arg(long, short = 'C', value_name = "LINES", default_value_t = 0)]
    pub(super) context: usize,

    /// Stop after COUNT matching lines
    #[arg(long, short, value_name = "COUNT", default_value_t = 1000)]
    pub(super) max_count: usize,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,

    /// Find lines that contain this
    pub(super) pattern: String,

    /// Search this directory or file
    #[arg(value_name = "PATH", default_value = ".")]
    pub(super) path: PathBuf,
}

// Options of `fs watch`.
#[derive(Debug, clap::Args)]
pub(super) struct WatchArgs {
    /// Watch PATH itself only, not the directories below it
    #[arg(long)]
    pub(super) no_recursive: bool,

    /// Skip what .gitignore excludes, and .git
    #[arg(long)]
    pub(super) gitignore: bool,

    /// Skip what matches, as in `*.log`; can be given several times
    #[arg(long, value_name = "GLOB")]
    pub(super) ignore: Vec<String>,

    /// Collect changes for this time before printing them
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "50ms")]
    pub(super) debounce: Duration,

    /// Print one line of JSON per batch of changes
    #[arg(long)]
    pub(super) json: bool,

    /// Watch this file or directory
    #[arg(value_name = "PATH", default_value = ".")]
    pub(super) path: PathBuf,
}
