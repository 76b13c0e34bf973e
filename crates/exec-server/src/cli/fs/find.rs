//! `fs search` and `fs watch`.

use std::io::{self, Write as _};
use std::process::ExitCode;

use anyhow::Context as _;
use exec_server_client::fs::{ChangeBatch, SearchOptions, WatchOptions};
use exec_server_protocol::fs::{ChangeKind, SearchMatch, WatchIgnore};
use serde_json::json;

use super::args::{SearchArgs, WatchArgs};
use super::progress::{FoundCount, with_counter};
use super::{FilesLocation, native_bytes, prints_to_terminal, push_line};
use crate::cli::error::notice;
use crate::cli::print;
use crate::cli::table::visible;

/// Exit code of `fs search` when nothing matches.
const NOTHING: u8 = 1;

pub(super) async fn search(
    location: &FilesLocation,
    args: &SearchArgs,
) -> anyhow::Result<ExitCode> {
    let options = SearchOptions {
        regex: !args.fixed_strings,
        case_sensitive: !args.ignore_case,
        globs: args.glob.clone(),
        gitignore: !args.no_ignore,
        max_matches: args.max_count,
        context_lines: args.context,
        sandbox: None,
    };
    let path = location.uri(&args.path).await?;
    let title = format!("searching {}", super::shown(&path));
    let search = location.files.search(&path, &args.pattern, options);
    let result = with_counter(&title, &FoundCount::default(), search)
        .await
        .with_context(|| format!("cannot search `{}`", args.path.display()))?;
    let nothing = result.matches.is_empty();
    if args.json {
        print(format!("{}\n", serde_json::to_string_pretty(&result)?).as_bytes())?;
    } else {
        let for_terminal = prints_to_terminal();
        let mut out = Vec::new();
        for (number, found) in result.matches.iter().enumerate() {
            if args.context > 0 && number > 0 {
                out.extend_from_slice(b"--\n");
            }
            push_match(&mut out, found, for_terminal);
        }
        print(&out)?;
        if result.truncated {
            notice("there may be more matches; --max-count N shows up to N");
        }
    }
    Ok(ExitCode::from(if nothing { NOTHING } else { 0 }))
}

/// Prints a match in the format of `grep -n`.
fn push_match(out: &mut Vec<u8>, found: &SearchMatch, for_terminal: bool) {
    let path = native_bytes(&found.path);
    let mut push = |number: u64, mark: char, text: &str| {
        let mut line = path.clone();
        line.extend_from_slice(format!("{mark}{number}{mark}{text}").as_bytes());
        push_line(out, &line, for_terminal);
    };
    let first = found.line.saturating_sub(found.before.len() as u64);
    for (number, text) in (first..).zip(&found.before) {
        push(number, '-', text);
    }
    push(found.line, ':', &found.text);
    for (number, text) in (found.line + 1..).zip(&found.after) {
        push(number, '-', text);
    }
}

pub(super) async fn watch(location: &FilesLocation, args: &WatchArgs) -> anyhow::Result<ExitCode> {
    let options = WatchOptions {
        recursive: !args.no_recursive,
        ignore: WatchIgnore {
            gitignore: args.gitignore,
            patterns: args.ignore.clone(),
        },
        debounce: args.debounce,
        sandbox: None,
    };
    let path = location.uri(&args.path).await?;
    let mut changes = location
        .files
        .watch(&path, options)
        .await
        .with_context(|| format!("cannot watch `{}`", args.path.display()))?;
    eprintln!("watching {}", visible(&super::shown(changes.path())));
    let for_terminal = prints_to_terminal();
    while let Some(batch) = changes.recv().await {
        let mut out = Vec::new();
        if args.json {
            let line = json!({"changes": batch.changes, "overflow": batch.overflow});
            out.extend_from_slice(line.to_string().as_bytes());
            out.push(b'\n');
        } else {
            push_changes(&mut out, &batch, for_terminal);
        }
        let mut stdout = io::stdout().lock();
        match stdout.write_all(&out).and_then(|()| stdout.flush()) {
            // The reader has closed the pipe, as `head` does.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                return Ok(ExitCode::SUCCESS);
            }
            written => written.context("cannot write to standard output")?,
        }
        if batch.overflow && !args.json {
            notice("changes were lost: read the whole tree again");
        }
    }
    anyhow::bail!("the connection was closed, which ended the watch")
}

fn push_changes(out: &mut Vec<u8>, batch: &ChangeBatch, for_terminal: bool) {
    for change in &batch.changes {
        let kind = match change.kind {
            ChangeKind::Created => "created",
            ChangeKind::Modified => "modified",
            ChangeKind::Removed => "removed",
            ChangeKind::Renamed => "renamed",
        };
        let mut line = format!("{kind:8}  ").into_bytes();
        if let Some(from) = &change.from {
            line.extend_from_slice(&native_bytes(from));
            line.extend_from_slice(b" -> ");
        }
        line.extend_from_slice(&native_bytes(&change.path));
        push_line(out, &line, for_terminal);
    }
}
