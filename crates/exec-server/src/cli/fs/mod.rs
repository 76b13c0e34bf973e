//! `exec-server fs` and `exec-server cp`: files of a server, or of this machine.

pub(super) mod args;
mod change;
mod copy;
mod find;
mod list;
mod progress;

use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use exec_server_client::fs::uri;
use exec_server_client::map::MappedFileSystem;
use exec_server_client::{ExecutorFileSystem, LocalFileSystem};
use exec_server_protocol::PathUri;
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
            FsCommand::Put(args) => copy::put(&location, args).await,
            FsCommand::Get(args) => copy::get(&location, args).await,
            FsCommand::Stat(args) => list::stat(&location, args).await,
            FsCommand::Rm(args) => change::rm(&location, args).await,
            FsCommand::Mv(args) => change::mv(&location, args).await,
            FsCommand::Cp(args) => change::cp(&location, args).await,
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

/// Files of one server or of this machine, with the base of relative paths.
struct FilesLocation {
    files: Arc<dyn ExecutorFileSystem>,
    /// Base directory of relative paths.
    directory: Option<PathBuf>,
}

impl FilesLocation {
    /// Connects to the files at the location.
    async fn new(location: on::CommandLocation) -> anyhow::Result<Self> {
        let here = || std::env::current_dir().context("no working directory");
        let on::CommandLocation::There(there) = location else {
            return Ok(Self {
                files: Arc::new(LocalFileSystem::new()),
                directory: Some(here()?),
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
            });
        }
        if directory.is_some() {
            return Ok(Self { files, directory });
        }
        let info = client.environment_info().await.ok();
        Ok(Self {
            directory: info.and_then(|info| info.cwd.as_ref()?.to_native().ok()),
            files,
        })
    }

    /// Returns the absolute path on the server; relative paths start at the server's directory.
    fn native(&self, path: &Path) -> anyhow::Result<PathBuf> {
        if path.is_absolute() {
            return Ok(path.to_owned());
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
    ///
    /// The server resolves `..`, since links may lead elsewhere: this function asks for the
    /// resolved path and never sends `..` itself.
    async fn uri(&self, path: &Path) -> anyhow::Result<PathUri> {
        let mut exact = PathBuf::new();
        for component in self.native(path)?.components() {
            if component != Component::ParentDir {
                exact.push(component);
                continue;
            }
            let below = self.files.canonicalize(&uri(&exact)?, None).await;
            let below = below.with_context(|| format!("cannot use `{}`", path.display()))?;
            exact = below.to_native()?;
            exact.pop();
        }
        Ok(uri(exact)?)
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
