//! `cp`, `fs put`, `fs get`, `fs cat`: transfers between this machine and another.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use exec_server_client::fs::{Feature, WriteMode, WriteStreamOptions};
use exec_server_client::transfer::{
    self, TransferAction, TransferEnd, TransferError, TransferEvent, TransferOptions,
    TransferReport,
};
use exec_server_sync::Mutex;
use rustix::fs::{Mode, OFlags};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::args::{CatArgs, CopyFlags, CpArgs, TransferArgs};
use super::progress::ProgressLine;
use super::side::CopySide;
use super::{FilesLocation, glob, sources_and_target};
use crate::cli::error::{self, notice};
use crate::cli::on;
use crate::cli::table::{bytes, visible};
use crate::cli::{print, required};

/// Name that stands for standard input or standard output.
const STREAM: &str = "-";

pub(super) async fn cat(location: &FilesLocation, args: &CatArgs) -> anyhow::Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for path in &args.paths {
        match print_file(location, path).await {
            Ok(OutputReaderState::Listens) => {}
            Ok(OutputReaderState::Left) => return Ok(ExitCode::SUCCESS),
            Err(error) => {
                error::report(&error);
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

/// The reader of standard output.
enum OutputReaderState {
    Listens,
    /// The reader needs no more output, as `head` does.
    Left,
}

async fn print_file(location: &FilesLocation, path: &Path) -> anyhow::Result<OutputReaderState> {
    let failed = || format!("cannot read `{}`", path.display());
    let uri = location.uri(path).await?;
    let stream = location.files.open_read(&uri, Default::default()).await;
    let mut stream = stream.with_context(failed)?;
    let mut stdout = tokio::io::stdout();
    while let Some(chunk) = stream.next_chunk().await.with_context(failed)? {
        let written = async {
            stdout.write_all(&chunk).await?;
            stdout.flush().await
        };
        match written.await {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                return Ok(OutputReaderState::Left);
            }
            written => written.context("cannot write to standard output")?,
        }
    }
    Ok(OutputReaderState::Listens)
}

/// Sends standard input to a file; atomically if the server supports it.
async fn put_stdin(location: &FilesLocation, target: &Path) -> anyhow::Result<ExitCode> {
    let failed = || format!("cannot write `{}`", target.display());
    let uri = location.uri(target).await?;
    if location.is_directory(&uri).await {
        bail!(
            "`{}` is a directory: give the file a name",
            target.display()
        );
    }
    let mode = match location.files.supports(Feature::AtomicStreams).await? {
        true => WriteMode::Atomic,
        false => WriteMode::Replace,
    };
    let stream = WriteStreamOptions {
        mode,
        ..WriteStreamOptions::default()
    };
    let writer = location.files.open_write(&uri, stream).await;
    let mut writer = writer.with_context(failed)?;
    let mut stdin = tokio::io::stdin();
    let mut piece = bytes::BytesMut::new();
    loop {
        piece.reserve(64 * 1024);
        if stdin.read_buf(&mut piece).await? == 0 {
            break;
        }
        let sent = writer.write_chunk(piece.split().freeze()).await;
        sent.with_context(failed)?;
    }
    writer.commit().await.with_context(failed)?;
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn put(location: FilesLocation, args: &TransferArgs) -> anyhow::Result<ExitCode> {
    let (sources, target) = with_default(&args.paths);
    if sources.iter().any(|source| source.as_os_str() == STREAM) {
        if sources.len() > 1 || args.paths.len() < 2 {
            bail!("standard input goes to one file: `fs put - PATH`");
        }
        return put_stdin(&location, target).await;
    }
    let here = Arc::new(FilesLocation::new(on::CommandLocation::Here).await?);
    let location = Arc::new(location);
    let sources = sources.iter().map(|path| CopyPath::new(&here, path));
    run(
        sources.collect(),
        CopyPath::new(&location, target),
        &args.flags,
    )
    .await
}

pub(super) async fn get(location: FilesLocation, args: &TransferArgs) -> anyhow::Result<ExitCode> {
    let (sources, target) = with_default(&args.paths);
    if args.paths.len() > 1 && target.as_os_str() == STREAM {
        let paths = sources.to_vec();
        return cat(&location, &CatArgs { paths }).await;
    }
    let here = Arc::new(FilesLocation::new(on::CommandLocation::Here).await?);
    let location = Arc::new(location);
    let sources = sources.iter().map(|path| CopyPath::new(&location, path));
    run(sources.collect(), CopyPath::new(&here, target), &args.flags).await
}

/// A single path is copied to the current directory.
fn with_default(paths: &[PathBuf]) -> (&[PathBuf], &Path) {
    match sources_and_target(paths) {
        Ok((sources, target)) => (sources, target),
        Err(_) => (paths, Path::new(".")),
    }
}

/// A path of one machine.
#[derive(Clone)]
struct CopyPath {
    location: Arc<FilesLocation>,
    path: PathBuf,
    /// Name of the machine, if several servers take part.
    name: Option<String>,
}

impl CopyPath {
    fn new(location: &Arc<FilesLocation>, path: &Path) -> Self {
        Self {
            location: Arc::clone(location),
            path: path.to_owned(),
            name: None,
        }
    }

    fn end(&self, path: &exec_server_protocol::PathUri) -> TransferEnd {
        let end = TransferEnd::new(Arc::clone(&self.location.files), path.clone());
        match (&self.name, self.location.is_local) {
            (_, true) => end.on_this_machine(),
            (Some(name), false) => end.named(name),
            (None, false) => end,
        }
    }

    /// Fails because the path is not the directory that it has to be.
    fn is_no_directory<T>(&self) -> anyhow::Result<T> {
        let whose = if self.location.is_local {
            ""
        } else {
            " on the server"
        };
        bail!("`{}` is not a directory{whose}", self.path.display())
    }
}

pub(super) async fn cp(args: &CpArgs) -> anyhow::Result<ExitCode> {
    let environments = on::list();
    let is_environment = |name: &str| match &environments {
        Ok(list) => list.entry(name).is_some(),
        Err(_) => false,
    };
    let sides: Vec<CopySide> = args
        .paths
        .iter()
        .map(|path| CopySide::parse(path, is_environment))
        .collect::<anyhow::Result<_>>()?;
    sources_and_target(&sides)?;
    // A server that is named twice in different ways is taken for two.
    let given = args.server.on.as_deref().or(args.server.url.as_deref());
    let mut servers = BTreeMap::new();
    for side in &sides {
        if let CopySide::There(name, _) = side {
            servers.insert(name.as_deref().or(given), None);
        }
    }
    if servers.is_empty() {
        bail!("neither side is on a server: write `:PATH` for a path there, or use plain `cp`");
    }
    for (name, reached) in &mut servers {
        let location = match name {
            Some(name) => on::named(name, &args.server)?,
            None => on::CommandLocation::There(required(&args.server)?),
        };
        if matches!(location, on::CommandLocation::Here) {
            bail!(
                "`{}` is this machine: use plain `cp`",
                name.unwrap_or("local")
            );
        }
        *reached = Some(Arc::new(FilesLocation::new(location).await?));
    }
    let here = Arc::new(FilesLocation::new(on::CommandLocation::Here).await?);
    let several = servers.len() > 1;
    let mut paths = sides.iter().map(|side| {
        let (name, path) = match side {
            CopySide::Here(path) => return CopyPath::new(&here, path),
            CopySide::There(name, path) => (name.as_deref().or(given), path),
        };
        let reached = servers.get(&name).and_then(Option::as_ref);
        let mut path = CopyPath::new(reached.unwrap_or(&here), path);
        path.name = name.filter(|_| several).map(str::to_owned);
        path
    });
    let paths: Vec<CopyPath> = paths.by_ref().collect();
    let (sources, target) = sources_and_target(&paths)?;
    run(sources.to_vec(), target.clone(), &args.flags).await
}

fn options(flags: &CopyFlags, bar: &ProgressLine, root: &Path) -> TransferOptions {
    let mut options = TransferOptions::default();
    options.recursive = flags.recursive || flags.archive;
    options.archive = flags.archive;
    options.preserve = flags.preserve;
    options.checksum = flags.checksum;
    options.delete = flags.delete;
    options.exclude = flags.exclude.clone();
    options.dry_run = flags.dry_run;
    options.bytes_per_second = flags.bwlimit;
    options.resume = !flags.no_resume;
    options.progress = bar.callback();
    if flags.verbose || flags.dry_run {
        let (root, out) = (root.to_owned(), Mutex::new(()));
        options.observer = Some(Arc::new(move |event| {
            // Lines of concurrent copies are not mixed.
            let _guard = out.lock();
            let _ = print(&event_line(&root, event));
        }));
    }
    options
}

/// A line of `-v`, as rsync prints it.
fn event_line(root: &Path, event: &TransferEvent<'_>) -> Vec<u8> {
    let path = match event.path.as_os_str().is_empty() {
        true => root.to_owned(),
        false => root.join(event.path),
    };
    let mut line = match event.action {
        TransferAction::Remove => b"deleting ".to_vec(),
        _ => Vec::new(),
    };
    match path.as_os_str().is_empty() {
        true => line.push(b'.'),
        false => line.extend_from_slice(path.as_os_str().as_bytes()),
    }
    if event.action == TransferAction::CreateDirectory && !line.ends_with(b"/") {
        line.push(b'/');
    }
    let mut out = Vec::new();
    super::push_line(&mut out, &line, super::prints_to_terminal());
    out
}

/// Whether what is in a directory is meant, rather than the directory: `DIR/.`.
fn means_content(path: &Path) -> bool {
    let bytes = path.as_os_str().as_bytes();
    bytes == b"." || bytes.ends_with(b"/.") || path.file_name().is_none()
}

/// Copies the sources to the target; each may be on another machine.
async fn run(
    sources: Vec<CopyPath>,
    target: CopyPath,
    flags: &CopyFlags,
) -> anyhow::Result<ExitCode> {
    let mut expanded = Vec::new();
    for source in sources {
        for path in glob::expand(&source.location, &source.path).await? {
            expanded.push(CopyPath {
                path,
                ..source.clone()
            });
        }
    }
    let into = target.location.uri(&target.path).await?;
    let found = target
        .location
        .files
        .metadata(&into, Default::default())
        .await;
    let is_directory = found.as_ref().is_ok_and(|found| found.is_directory);
    let is_special = found.is_ok_and(|found| !found.is_directory && !found.is_file);
    if expanded.len() > 1 && !is_directory {
        return target.is_no_directory();
    }
    let mut outcome = CopyOutcome::default();
    for source in &expanded {
        let from = source.location.uri(&source.path).await?;
        if !is_directory
            && ends_with_slash(&target.path)
            && !source.location.is_directory(&from).await
        {
            return target.is_no_directory();
        }
        if is_special && target.location.is_local {
            write_into(source, &target.path).await?;
            continue;
        }
        let to = match source.path.file_name() {
            Some(name) if is_directory && !means_content(&source.path) => {
                exec_server_client::fs::child(&into, name)?
            }
            _ => into.clone(),
        };
        let bar = ProgressLine::new(flags.quiet || flags.verbose || flags.dry_run);
        let root = match means_content(&source.path) {
            true => Path::new(""),
            false => source.path.file_name().map_or(Path::new(""), Path::new),
        };
        let options = options(flags, &bar, root);
        let copied = transfer::copy(source.end(&from), target.end(&to), options).await;
        drop(bar);
        outcome.take(copied, &source.path, &super::shown(&from));
    }
    if flags.verbose {
        outcome.summarize();
    }
    Ok(outcome.code())
}

/// Writes a file into a pipe or a device of this machine, which cannot be replaced.
async fn write_into(source: &CopyPath, target: &Path) -> anyhow::Result<()> {
    let failed = || format!("cannot copy `{}`", source.path.display());
    let from = source.location.uri(&source.path).await?;
    let reader = source
        .location
        .files
        .open_read(&from, Default::default())
        .await;
    let mut reader = reader.with_context(failed)?;
    let unwritable = || format!("cannot write `{}`", target.display());
    let path = target.to_owned();
    let open = move || rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
    // Opening a pipe waits for its reader.
    let file = tokio::task::spawn_blocking(open).await?;
    let file = Arc::new(file.with_context(unwritable)?);
    while let Some(mut chunk) = reader.next_chunk().await.with_context(failed)? {
        while !chunk.is_empty() {
            let (file, data) = (Arc::clone(&file), chunk.clone());
            let written = tokio::task::spawn_blocking(move || rustix::io::write(&*file, &data));
            let _ = chunk.split_to(written.await?.with_context(unwritable)?);
        }
    }
    Ok(())
}

fn ends_with_slash(path: &Path) -> bool {
    path.as_os_str().as_bytes().ends_with(b"/")
}

/// Outcome of several copies; each failure is printed as it occurs.
#[derive(Default)]
struct CopyOutcome {
    report: TransferReport,
    failed: usize,
    is_full: bool,
}

impl CopyOutcome {
    /// Adds a result; `typed` is the source as the user wrote it, `source` its path.
    fn take(&mut self, result: Result<TransferReport, TransferError>, typed: &Path, source: &str) {
        let failures = match result {
            Ok(report) => {
                self.report.files += report.files;
                self.report.links += report.links + report.hard_links;
                self.report.directories += report.directories;
                self.report.bytes += report.bytes;
                self.report.unchanged += report.unchanged;
                self.report.removed += report.removed;
                report.failures
            }
            Err(error) => vec![error],
        };
        self.failed += failures.len();
        for failure in failures {
            self.is_full |= matches!(failure, TransferError::Full { .. });
            let reason = match failure {
                TransferError::IsDirectory(path) if path == source => {
                    format!("`{}`: it is a directory (use -r)", typed.display())
                }
                failure => error::message(&failure.into()),
            };
            notice(&visible(&format!("cannot copy {reason}")));
        }
    }

    fn summarize(&self) {
        let TransferReport {
            files,
            bytes: count,
            unchanged,
            removed,
            ..
        } = &self.report;
        notice(&format!(
            "{files} files copied ({}), {unchanged} unchanged, {removed} removed",
            bytes(*count)
        ));
    }

    fn code(self) -> ExitCode {
        if self.failed == 0 {
            return ExitCode::SUCCESS;
        }
        let arrived = self.report.files + self.report.links + self.report.directories;
        if arrived > 0 && !self.is_full {
            notice(&format!(
                "{} could not be copied, everything else was",
                self.failed
            ));
        }
        ExitCode::FAILURE
    }
}
