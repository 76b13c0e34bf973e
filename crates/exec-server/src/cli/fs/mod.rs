//! `exec-server fs` and `exec-server cp`: files of a server, or of this machine.

pub(super) mod args;
mod change;
mod chmod;
mod copy;
mod edit;
mod find;
mod glob;
mod list;
mod progress;
mod side;
mod tail;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use exec_server_client::fs::resolve;
use exec_server_client::map::MappedFileSystem;
use exec_server_client::{ExecutorFileSystem, LocalFileSystem};
use exec_server_protocol::PathUri;
use exec_server_protocol::fs::DirectoryEntry;
use rustix::termios::isatty;

use super::table::visible;
use super::{on, runtime};
use args::{CpArgs, FsArgs, FsCommand};

/// Exit code of `fs search` when it could not search; 1 means that nothing matches.
const SEARCH_FAILED: u8 = 2;

pub(super) fn run(args: &FsArgs) -> anyhow::Result<ExitCode> {
    let runtime = runtime()?;
    let work = async {
        let location = FilesLocation::new(on::resolve(&args.server)?).await?;
        match &args.command {
            FsCommand::Ls(args) => list::ls(&location, args).await,
            FsCommand::Cat(args) => copy::cat(&location, args).await,
            FsCommand::Put(args) => copy::put(location, args).await,
            FsCommand::Get(args) => copy::get(location, args).await,
            FsCommand::Stat(args) => list::stat(&location, args).await,
            FsCommand::Rm(args) => change::rm(&location, args).await,
            FsCommand::Mv(args) => change::mv(&location, args).await,
            FsCommand::Cp(args) => change::cp(&location, args).await,
            FsCommand::Mkdir(args) => change::mkdir(&location, args).await,
            FsCommand::Chmod(args) => chmod::chmod(&location, args).await,
            FsCommand::Tail(args) => tail::tail(&location, args).await,
            FsCommand::Edit(args) => edit::edit(&location, args).await,
            FsCommand::Walk(args) => list::walk(&location, args).await,
            FsCommand::Search(args) => find::search(&location, args).await,
            FsCommand::Watch(args) => find::watch(&location, args).await,
        }
    };
    let outcome = runtime.block_on(work);
    // A thread may still block on a pipe, so the runtime is not awaited.
    runtime.shutdown_background();
    match outcome {
        Err(error) if matches!(args.command, FsCommand::Search(_)) => {
            super::error::report(&error);
            Ok(ExitCode::from(SEARCH_FAILED))
        }
        outcome => outcome,
    }
}

pub(super) fn run_cp(args: &CpArgs) -> anyhow::Result<ExitCode> {
    let runtime = runtime()?;
    let outcome = runtime.block_on(copy::cp(args));
    runtime.shutdown_background();
    outcome
}

pub(in crate::cli) use side::split_side;

/// The names in a directory, those of directories with a `/`; for completion.
pub(super) async fn names_in(
    place: on::CommandLocation,
    directory: &Path,
) -> anyhow::Result<Vec<String>> {
    let place = FilesLocation::new(place).await?;
    let uri = place.uri(directory).await?;
    let entries = place.files.read_directory(&uri, Default::default()).await?;
    let name = |entry: &DirectoryEntry| match entry.is_directory {
        true => format!("{}/", entry.file_name),
        false => entry.file_name.clone(),
    };
    Ok(entries.iter().map(name).collect())
}

/// Files of one server or of this machine, with the base of relative paths.
struct FilesLocation {
    files: Arc<dyn ExecutorFileSystem>,
    /// Base directory of relative paths.
    directory: Option<PathBuf>,
    /// Home directory of the server's user, if there is a server.
    home: Option<PathBuf>,
    /// It is this machine, without a server.
    is_local: bool,
}

impl FilesLocation {
    /// Connects to the files at the location.
    async fn new(location: on::CommandLocation) -> anyhow::Result<Self> {
        let here = || std::env::current_dir().context("no working directory");
        let on::CommandLocation::There(there) = location else {
            return Ok(Self {
                files: Arc::new(LocalFileSystem::new()),
                directory: Some(here()?),
                home: None,
                is_local: true,
            });
        };
        let on::ReachedSession {
            client,
            map,
            directory,
        } = there.reach().await?;
        let files: Arc<dyn ExecutorFileSystem> = Arc::new(client.file_system());
        if let Some(map) = map {
            return Ok(Self {
                files: Arc::new(MappedFileSystem::new(files, map)),
                directory: Some(here()?),
                home: None,
                is_local: false,
            });
        }
        let info = client.environment_info().await.ok();
        let native = |path: &Option<PathUri>| path.as_ref()?.to_native().ok();
        Ok(Self {
            directory: directory.or_else(|| native(&info.as_ref()?.cwd)),
            home: info.as_ref().and_then(|info| native(&info.user_home_dir)),
            files,
            is_local: false,
        })
    }

    /// Returns the absolute path on the server; relative paths start at the server's directory.
    fn native(&self, path: &Path) -> anyhow::Result<PathBuf> {
        if path.is_absolute() {
            return Ok(path.to_owned());
        }
        // On this machine the shell has replaced it.
        if !self.is_local
            && let Ok(below) = path.strip_prefix("~")
        {
            let home = self.home.as_ref().with_context(|| {
                format!(
                    "cannot use `{}`: the server does not report its home directory; give an absolute path",
                    path.display()
                )
            })?;
            return Ok(home.join(below));
        }
        match &self.directory {
            Some(directory) => Ok(directory.join(path)),
            None => bail!(
                "cannot resolve the relative path `{}`: the server does not report its directory; give an absolute path",
                path.display()
            ),
        }
    }

    /// Converts a path on the server to a URI.
    async fn uri(&self, path: &Path) -> anyhow::Result<PathUri> {
        let resolved = resolve(&*self.files, &self.native(path)?).await;
        resolved.with_context(|| format!("cannot use `{}`", path.display()))
    }

    /// Whether the path is a directory, or a link to one.
    async fn is_directory(&self, path: &PathUri) -> bool {
        let found = self.files.metadata(path, Default::default()).await;
        found.is_ok_and(|found| found.is_directory)
    }

    /// Destination path of a source: below `target` if that is a directory, otherwise `target`.
    async fn destination(&self, source: &Path, target: &Path) -> anyhow::Result<PathUri> {
        let target = self.uri(target).await?;
        if self.is_directory(&target).await
            && let Some(name) = source.file_name()
        {
            return Ok(exec_server_client::fs::child(&target, name)?);
        }
        Ok(target)
    }
}

/// Splits the arguments into the sources and the destination.
fn sources_and_target<T>(paths: &[T]) -> anyhow::Result<(&[T], &T)> {
    match paths.split_last() {
        Some((target, sources)) if !sources.is_empty() => Ok((sources, target)),
        _ => bail!("give the paths to copy or move and, last, the target"),
    }
}

/// A path of the server as bytes, for output that programs read.
fn native_bytes(path: &PathUri) -> Vec<u8> {
    use std::os::unix::ffi::OsStringExt as _;
    match path.to_native() {
        Ok(path) => path.into_os_string().into_vec(),
        Err(_) => path.as_str().as_bytes().to_vec(),
    }
}

/// A path of the server as escaped text, for output that people read.
fn shown(path: &PathUri) -> String {
    String::from_utf8_lossy(&native_bytes(path)).into_owned()
}

/// Appends a line to the output: exact if a program reads it, escaped if a terminal shows it.
fn push_line(out: &mut Vec<u8>, line: &[u8], for_terminal: bool) {
    if for_terminal {
        out.extend_from_slice(visible(&String::from_utf8_lossy(line)).as_bytes());
    } else {
        out.extend_from_slice(line);
    }
    out.push(b'\n');
}

fn prints_to_terminal() -> bool {
    isatty(rustix::stdio::stdout())
}
