//! `fs tail`: the end of a file, and what is added to it.

use std::io;
use std::process::ExitCode;

use anyhow::Context as _;
use exec_server_client::fs::{ReadStreamOptions, WatchOptions, uri};
use exec_server_protocol::PathUri;
use exec_server_protocol::fs::MetadataResult;
use tokio::io::{AsyncWrite, AsyncWriteExt as _};

use super::FilesLocation;
use super::args::TailArgs;
use crate::cli::error::notice;

/// 64 KiB: how much is read at a time to find the last lines.
const STEP_BYTES: u64 = 64 << 10;

pub(super) async fn tail(location: &FilesLocation, args: &TailArgs) -> anyhow::Result<ExitCode> {
    let failed = || format!("cannot read `{}`", args.path.display());
    let path = location.uri(&args.path).await?;
    // Registered first, so that nothing is missed between reading and waiting.
    let mut changes = match args.follow {
        true => {
            let native = path.to_native()?;
            let parent = native
                .parent()
                .context("the root directory is not a file")?;
            let parent = uri(parent)?;
            let options = WatchOptions {
                recursive: false,
                ..WatchOptions::default()
            };
            let watch = location.files.watch(&parent, options).await;
            Some(watch.with_context(failed)?)
        }
        false => None,
    };
    let mut found = location
        .files
        .metadata(&path, Default::default())
        .await
        .with_context(failed)?;
    let mut stdout = tokio::io::stdout();
    let start = last_lines(location, &path, found.size, args.lines)
        .await
        .with_context(failed)?;
    let mut printed = match print_from(location, &path, start, &mut stdout).await {
        Ok(printed) => printed,
        Err(error) if is_closed(&error) => return Ok(ExitCode::SUCCESS),
        Err(error) => return Err(error).with_context(failed),
    };
    let Some(changes) = &mut changes else {
        return Ok(ExitCode::SUCCESS);
    };
    while changes.recv().await.is_some() {
        // The file may be missing while it is replaced.
        let Ok(now) = location.files.metadata(&path, Default::default()).await else {
            continue;
        };
        if is_other(&found, &now) {
            notice(&format!(
                "`{}` was replaced: printing the new file",
                args.path.display()
            ));
            printed = 0;
        } else if now.size < printed {
            notice(&format!("`{}` was truncated", args.path.display()));
            printed = 0;
        }
        found = now;
        if found.size == printed {
            continue;
        }
        match print_from(location, &path, printed, &mut stdout).await {
            Ok(end) => printed = end,
            Err(error) if is_closed(&error) => return Ok(ExitCode::SUCCESS),
            Err(error) => return Err(error).with_context(failed),
        }
    }
    anyhow::bail!("the connection was closed, which ended the output")
}

fn is_other(before: &MetadataResult, now: &MetadataResult) -> bool {
    (before.inode, before.device) != (now.inode, now.device)
}

/// Whether the reader of standard output has closed it, as `head` does.
fn is_closed(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<io::Error>();
    cause.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

/// Offset at which the last `lines` lines begin.
async fn last_lines(
    location: &FilesLocation,
    path: &PathUri,
    size: u64,
    lines: u64,
) -> anyhow::Result<u64> {
    if lines == 0 {
        return Ok(size);
    }
    let mut breaks = 0;
    let mut end = size;
    while end > 0 {
        let start = end.saturating_sub(STEP_BYTES);
        let mut reader = location
            .files
            .open_read(
                path,
                ReadStreamOptions {
                    offset: start,
                    sandbox: None,
                },
            )
            .await?;
        let mut step = Vec::new();
        while (step.len() as u64) < end - start
            && let Some(chunk) = reader.next_chunk().await?
        {
            step.extend_from_slice(&chunk);
        }
        step.truncate(usize::try_from(end - start).unwrap_or(usize::MAX));
        for (at, _) in step
            .iter()
            .enumerate()
            .rev()
            .filter(|(_, byte)| **byte == b'\n')
        {
            let after = start + at as u64 + 1;
            // A line break at the end of the file ends the last line.
            if after == size {
                continue;
            }
            breaks += 1;
            if breaks == lines {
                return Ok(after);
            }
        }
        end = start;
    }
    Ok(0)
}

/// Prints the file from an offset on; returns the offset of its end.
async fn print_from(
    location: &FilesLocation,
    path: &PathUri,
    offset: u64,
    out: &mut (impl AsyncWrite + Unpin),
) -> anyhow::Result<u64> {
    let stream = ReadStreamOptions {
        offset,
        sandbox: None,
    };
    let mut reader = location.files.open_read(path, stream).await?;
    let mut end = offset;
    while let Some(chunk) = reader.next_chunk().await? {
        out.write_all(&chunk).await?;
        end += chunk.len() as u64;
    }
    out.flush().await?;
    Ok(end)
}
