//! Options of `fs` and `cp`.
//!
//! Structs of options have plain comments, as in [`crate::cli::args`].

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Subcommand;

use super::chmod::ModeChange;
use crate::cli::args::ServerArgs;
use crate::cli::values::parse_duration;

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
  exec-server fs put -a site/. /var/www           the contents, and only what has changed
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
    /// Create directories
    Mkdir(MkdirArgs),
    /// Change permissions
    #[command(after_help = "Examples:
  exec-server fs chmod 640 app.conf
  exec-server fs chmod -R u=rwX,go=rX /srv/site")]
    Chmod(ChmodArgs),
    /// Print the end of a file, and with -f what is added to it
    #[command(after_help = "Examples:
  exec-server fs tail -n 100 /var/log/app.log
  exec-server fs tail -f /var/log/app.log         until interrupted; follows a rotated file by its name")]
    Tail(TailArgs),
    /// Edit a file with $VISUAL or $EDITOR on this machine
    #[command(
        after_help = "The file is replaced only after the editor has ended, and only if it is unchanged on the
server since it was read; otherwise the edited copy stays on this machine and its path is printed."
    )]
    Edit(EditArgs),
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
#[derive(Debug, Clone, clap::Args)]
pub(super) struct CopyFlags {
    /// Copy directories with everything below them; links are copied as links
    #[arg(long, short)]
    pub(super) recursive: bool,

    /// Copy recursively what has changed; keep modes, times, hard links, and owners where allowed
    #[arg(long, short)]
    pub(super) archive: bool,

    /// Keep modes, modification times, and owners where allowed
    #[arg(long, short)]
    pub(super) preserve: bool,

    /// Check the content of files of the same size, with -a, instead of their times
    #[arg(long, requires = "archive")]
    pub(super) checksum: bool,

    /// Remove from the target's directories what the source does not have
    #[arg(long)]
    pub(super) delete: bool,

    /// Exclude what matches, as in `*.o`, `/top` or `cache/`; can be given several times
    #[arg(long, value_name = "GLOB")]
    pub(super) exclude: Vec<String>,

    /// Print what would be copied and removed, and change nothing
    #[arg(long, short = 'n')]
    pub(super) dry_run: bool,

    /// Print each copied and removed path
    #[arg(long, short)]
    pub(super) verbose: bool,

    /// Copy at most RATE bytes per second, as in 500k or 10M
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    pub(super) bwlimit: Option<u64>,

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
    ///
    /// On a server `~` is the home directory, and `*`, `?` and `[…]` select files.
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

// Options of `fs mkdir`.
#[derive(Debug, clap::Args)]
pub(super) struct MkdirArgs {
    /// Create missing parents too, and accept existing directories
    #[arg(long, short)]
    pub(super) parents: bool,

    /// Set these permissions, as in 750; otherwise 777 minus the server's umask
    #[arg(long, short, value_name = "MODE", value_parser = parse_mode)]
    pub(super) mode: Option<u32>,

    /// Create these directories
    #[arg(value_name = "PATH", required = true)]
    pub(super) paths: Vec<PathBuf>,
}

/// Permission bits in octal.
fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o7777 => Ok(mode),
        _ => Err("expected permissions in octal, as in 750".to_owned()),
    }
}

// Options of `fs chmod`.
#[derive(Debug, clap::Args)]
pub(super) struct ChmodArgs {
    /// Change directories with everything below them; links are left out
    #[arg(long, short = 'R')]
    pub(super) recursive: bool,

    /// Set this mode: octal as in 640, or symbolic as in u+x,go-w
    #[arg(value_name = "MODE", allow_hyphen_values = true)]
    pub(super) mode: ModeChange,

    /// Change these files and directories
    #[arg(value_name = "PATH", required = true)]
    pub(super) paths: Vec<PathBuf>,
}

// Options of `fs tail`.
#[derive(Debug, clap::Args)]
pub(super) struct TailArgs {
    /// Print what is added to the file until interrupted
    #[arg(long, short)]
    pub(super) follow: bool,

    /// Print the last COUNT lines
    #[arg(long, short = 'n', value_name = "COUNT", default_value_t = 10)]
    pub(super) lines: u64,

    /// Print this file
    #[arg(value_name = "PATH")]
    pub(super) path: PathBuf,
}

// Options of `fs edit`.
#[derive(Debug, clap::Args)]
pub(super) struct EditArgs {
    /// Edit this file; a missing file is created
    #[arg(value_name = "PATH")]
    pub(super) path: PathBuf,
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

/// A number of bytes per second, with a binary unit.
fn parse_rate(text: &str) -> Result<u64, String> {
    let expected = || "expected bytes per second, as in 500k or 10M".to_owned();
    let digits = text.trim_end_matches(|unit: char| !unit.is_ascii_digit());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return Err(expected()),
    };
    let count: u64 = digits.parse().map_err(|_| expected())?;
    match count.checked_mul(1 << shift) {
        Some(rate) if rate > 0 => Ok(rate),
        _ => Err(expected()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_binary_units() {
        for (text, rate) in [
            ("1", 1),
            ("500k", 500 << 10),
            ("10M", 10 << 20),
            ("2GiB", 2 << 30),
        ] {
            assert_eq!(parse_rate(text), Ok(rate), "{text}");
        }
        for text in ["", "0", "k", "1x", "-1", "99999999999999g"] {
            assert!(parse_rate(text).is_err(), "{text}");
        }
    }
}
