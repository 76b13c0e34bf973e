//! `cp`, `fs put`, `fs get`, `fs cat`: transfers between this machine and another.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use exec_server_client::fs::{Feature, WriteMode, WriteStreamOptions};
use exec_server_client::transfer::{TransferError, TransferOptions, TransferReport};
use exec_server_client::transfer::{download, upload};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::args::{CatArgs, CopyFlags, CpArgs, TransferArgs};
use super::progress::ProgressLine;
use super::{FilesLocation, sources_and_target};
use crate::cli::error::{self, notice};
use crate::cli::on;
use crate::cli::table::visible;

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

pub(super) async fn put(location: &FilesLocation, args: &TransferArgs) -> anyhow::Result<ExitCode> {
    let (sources, target) = with_default(&args.paths);
    if sources.iter().any(|source| source.as_os_str() == STREAM) {
        if sources.len() > 1 || args.paths.len() < 2 {
            bail!("standard input goes to one file: `fs put - PATH`");
        }
        return put_stdin(location, target).await;
    }
    send(location, sources, target, args.flags).await
}

pub(super) async fn get(location: &FilesLocation, args: &TransferArgs) -> anyhow::Result<ExitCode> {
    let (sources, target) = with_default(&args.paths);
    if args.paths.len() > 1 && target.as_os_str() == STREAM {
        let paths = sources.to_vec();
        return cat(location, &CatArgs { paths }).await;
    }
    fetch(location, sources, target, args.flags).await
}

/// A single path is copied to the current directory.
fn with_default(paths: &[PathBuf]) -> (&[PathBuf], &Path) {
    match sources_and_target(paths) {
        Ok((sources, target)) => (sources, target),
        Err(_) => (paths, Path::new(".")),
    }
}

/// One side of a `cp`.
#[derive(Debug, PartialEq, Eq)]
enum CopySide {
    Here(PathBuf),
    /// A path of this environment or of the server of this URL, or else of the target of the
    /// options.
    There(Option<String>, PathBuf),
}

impl CopySide {
    fn parse(text: &OsStr, is_environment: impl Fn(&str) -> bool) -> anyhow::Result<Self> {
        let bytes = text.as_bytes();
        let there = |url: Option<&[u8]>, path: &[u8]| {
            let url = url.map(|url| String::from_utf8_lossy(url).into_owned());
            // An empty path after the colon means the working directory of the server.
            let path = if path.is_empty() { b"." } else { path };
            Self::There(url, OsString::from_vec(path.to_vec()).into())
        };
        if let Some(path) = bytes.strip_prefix(b":") {
            return Ok(there(None, path));
        }
        if let Some(end) = url_length(bytes) {
            return match bytes.get(end) {
                Some(b':') => Ok(there(Some(&bytes[..end]), &bytes[end + 1..])),
                _ => bail!(
                    "`{0}` names a server but no path on it: write `{0}:PATH`",
                    text.to_string_lossy()
                ),
            };
        }
        let colon = bytes.iter().position(|&byte| byte == b':');
        let slash = bytes.iter().position(|&byte| byte == b'/');
        if let Some(colon) = colon
            && is_environment(&String::from_utf8_lossy(&bytes[..colon]))
        {
            return Ok(there(Some(&bytes[..colon]), &bytes[colon + 1..]));
        }
        match (colon, slash) {
            (Some(colon), slash) if slash.is_none_or(|slash| colon < slash) => bail!(
                "`{0}` looks like a path in an environment `{1}`, which does not exist: write `:PATH` \
                 with --url, or `ws://HOST:PORT:PATH`, or `./{0}` for a file here",
                text.to_string_lossy(),
                String::from_utf8_lossy(&bytes[..colon]),
            ),
            _ => Ok(Self::Here(text.into())),
        }
    }
}

/// Length of the server's URL at the start of a text, if there is one.
fn url_length(text: &[u8]) -> Option<usize> {
    let until = |from: usize, stops: &[u8]| {
        let stop = text[from..].iter().position(|byte| stops.contains(byte));
        stop.map_or(text.len(), |at| from + at)
    };
    if text.starts_with(b"unix://") {
        return Some(until("unix://".len(), b":"));
    }
    let scheme = [
        b"ws://".as_slice(),
        b"wss://",
        b"ssh://",
        b"registry://",
        b"registry+http://",
        b"registry+https://",
    ]
    .into_iter()
    .find(|scheme| text.starts_with(scheme))?;
    let mut end = match text.get(scheme.len()) {
        Some(b'[') => until(scheme.len(), b"]") + 1,
        _ => until(scheme.len(), b":/"),
    }
    .min(text.len());
    if text.get(end) == Some(&b':') {
        let digits = text[end + 1..]
            .iter()
            .take_while(|byte| byte.is_ascii_digit());
        let port_end = end + 1 + digits.count();
        // Digits up to the end of the text or the next `/` are the port; other text after the colon
        // is a path.
        if port_end > end + 1 && matches!(text.get(port_end), None | Some(b':' | b'/')) {
            end = port_end;
        }
    }
    if text.get(end) == Some(&b'/') {
        end = until(end, b":");
    }
    Some(end)
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
    let (sources, target) = sources_and_target(&sides)?;
    let mut servers = sides.iter().filter_map(|side| match side {
        CopySide::There(name, _) => Some(name.as_deref()),
        CopySide::Here(_) => None,
    });
    let Some(server) = servers.next() else {
        bail!("neither side is on a server: write `:PATH` for a path there, or use plain `cp`");
    };
    // Two different names of one server count as two servers.
    let given = args.server.on.as_deref().or(args.server.url.as_deref());
    if servers.any(|other| other.or(given) != server.or(given)) {
        bail!("the paths are on different servers; copy from one at a time");
    }
    let location = match server {
        Some(name) => on::named(name, &args.server)?,
        None => on::resolve(&args.server)?,
    };
    if matches!(location, on::CommandLocation::Here) {
        bail!("no server given: pass --on ENV or --url URL, or set EXEC_SERVER_URL");
    }
    let here = |side: &CopySide| match side {
        CopySide::Here(path) => Some(path.clone()),
        CopySide::There(..) => None,
    };
    let there = |side: &CopySide| match side {
        CopySide::There(_, path) => Some(path.clone()),
        CopySide::Here(_) => None,
    };
    let from_here: Option<Vec<PathBuf>> = sources.iter().map(here).collect();
    let from_there: Option<Vec<PathBuf>> = sources.iter().map(there).collect();
    match (from_here, from_there, target) {
        (Some(sources), _, CopySide::There(_, target)) => {
            send(
                &FilesLocation::new(location).await?,
                &sources,
                target,
                args.flags,
            )
            .await
        }
        (_, Some(sources), CopySide::Here(target)) => {
            fetch(
                &FilesLocation::new(location).await?,
                &sources,
                target,
                args.flags,
            )
            .await
        }
        _ => bail!(
            "one side must be here and the other on the server; within a server use \
             `exec-server fs cp`"
        ),
    }
}

fn options(flags: CopyFlags, bar: &ProgressLine) -> TransferOptions {
    let mut options = TransferOptions::default();
    options.recursive = flags.recursive || flags.archive;
    options.archive = flags.archive;
    options.resume = !flags.no_resume;
    options.progress = bar.callback();
    options
}

/// Whether a path means the entries of a directory and not the directory itself: `DIR/.`.
fn means_content(path: &Path) -> bool {
    let bytes = path.as_os_str().as_bytes();
    bytes == b"." || bytes.ends_with(b"/.") || path.file_name().is_none()
}

async fn send(
    location: &FilesLocation,
    sources: &[PathBuf],
    target: &Path,
    flags: CopyFlags,
) -> anyhow::Result<ExitCode> {
    let into = location.uri(target).await?;
    let is_directory = location.is_directory(&into).await;
    if sources.len() > 1 && !is_directory {
        bail!("`{}` is not a directory on the server", target.display());
    }
    let mut outcome = CopyOutcome::default();
    for source in sources {
        let to = match source.file_name() {
            Some(name) if is_directory && !means_content(source) => {
                exec_server_client::fs::child(&into, name)?
            }
            _ => into.clone(),
        };
        if !is_directory && ends_with_slash(target) && !source.is_dir() {
            bail!("`{}` is not a directory on the server", target.display());
        }
        let bar = ProgressLine::new(flags.quiet);
        let sent = upload(source, location.files.clone(), &to, options(flags, &bar)).await;
        drop(bar);
        outcome.take(sent);
    }
    Ok(outcome.code())
}

async fn fetch(
    location: &FilesLocation,
    sources: &[PathBuf],
    target: &Path,
    flags: CopyFlags,
) -> anyhow::Result<ExitCode> {
    let is_directory = target.is_dir();
    if sources.len() > 1 && !is_directory {
        bail!("`{}` is not a directory", target.display());
    }
    let mut outcome = CopyOutcome::default();
    for source in sources {
        let from = location.uri(source).await?;
        let to = match source.file_name() {
            Some(name) if is_directory && !means_content(source) => target.join(name),
            _ => target.to_owned(),
        };
        if !is_directory && ends_with_slash(target) && !location.is_directory(&from).await {
            bail!("`{}` is not a directory", target.display());
        }
        let bar = ProgressLine::new(flags.quiet);
        let fetched = download(location.files.clone(), &from, &to, options(flags, &bar)).await;
        drop(bar);
        outcome.take(fetched);
    }
    Ok(outcome.code())
}

fn ends_with_slash(path: &Path) -> bool {
    path.as_os_str().as_bytes().ends_with(b"/")
}

/// Outcome of several copies; each failure is printed as it occurs.
#[derive(Default)]
struct CopyOutcome {
    arrived: u64,
    failed: usize,
}

impl CopyOutcome {
    fn take(&mut self, result: Result<TransferReport, TransferError>) {
        let failures = match result {
            Ok(report) => {
                self.arrived += report.files + report.links + report.directories;
                report.failures
            }
            Err(error) => vec![error],
        };
        self.failed += failures.len();
        for failure in failures {
            let reason = match failure {
                TransferError::IsDirectory(path) => {
                    format!("`{path}`: it is a directory (use -r)")
                }
                failure => error::message(&failure.into()),
            };
            notice(&visible(&format!("cannot copy {reason}")));
        }
    }

    fn code(self) -> ExitCode {
        if self.failed == 0 {
            return ExitCode::SUCCESS;
        }
        if self.arrived > 0 {
            notice(&format!(
                "{} could not be copied, everything else was",
                self.failed
            ));
        }
        ExitCode::FAILURE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_arguments_are_classified_as_local_or_remote() {
        let here = |path: &str| CopySide::Here(path.into());
        let there =
            |url: Option<&str>, path: &str| CopySide::There(url.map(Into::into), path.into());
        for (text, side) in [
            ("a/b", here("a/b")),
            ("./a:b", here("./a:b")),
            ("/a:b", here("/a:b")),
            (":", there(None, ".")),
            (":/x:y", there(None, "/x:y")),
            ("ws://h:4600:/x", there(Some("ws://h:4600"), "/x")),
            ("ws://h:4600:x:1", there(Some("ws://h:4600"), "x:1")),
            ("ws://h:/x", there(Some("ws://h"), "/x")),
            ("ws://h:12x", there(Some("ws://h"), "12x")),
            ("ws://h:1/p:q", there(Some("ws://h:1/p"), "q")),
            ("ssh://u@h:22/p:/q", there(Some("ssh://u@h:22/p"), "/q")),
            ("ssh://h:x", there(Some("ssh://h"), "x")),
            ("ws://[::1]:46:", there(Some("ws://[::1]:46"), ".")),
            ("worker:/x", there(Some("worker"), "/x")),
            ("worker:", there(Some("worker"), ".")),
            ("./worker:x", here("./worker:x")),
            (
                "registry://h:47/env:/x",
                there(Some("registry://h:47/env"), "/x"),
            ),
            ("unix:///run/s:rel", there(Some("unix:///run/s"), "rel")),
        ] {
            let parsed = CopySide::parse(text.as_ref(), |name| name == "worker");
            assert_eq!(parsed.unwrap(), side, "{text}");
        }
        for text in ["host:/x", "ws://h:4600", "unix:///run/s", "ws://[::1"] {
            let parsed = CopySide::parse(text.as_ref(), |name| name == "worker");
            assert!(parsed.is_err(), "{text}");
        }
    }
}
