//! File tools: `read_file`, `write_file`, `edit`, `list_dir`, `search`, `watch_once`.

use std::fmt::Write as _;
use std::time::Duration;

use bytes::Bytes;
use exec_server_client::fs::{
    AccessOptions, CreateDirectoryOptions, DirectoryPages, ReadDirectoryOptions, ReadStreamOptions,
    RemoveOptions, SearchOptions, TreeWalkOptions, WatchOptions, WriteOptions,
};
use exec_server_protocol::fs::{ChangeKind, SearchMatch, WalkKind, WalkResult};
use exec_server_protocol::{PathUri, codes};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use super::commands::WAITS;
use super::text::{HEAD_BYTES, not_text, text_in};
use super::{Room, ToolError, ToolOutcome, ToolResult, cancellable};
use crate::mcp::environment::ToolEnvironment;
use crate::mcp::params::{EditParams, ListDir, ReadFile, SearchFilesParams, WatchOnce, WriteFile};
use crate::mcp::patch::{self, FilePatch};
use crate::mcp::results::{
    DirectoryEntries, EditedFile, EditedFiles, FileLines, FoundLine, FoundLines, ListedEntry,
    WatchedChange, WatchedChanges, WrittenFile,
};
use crate::mcp::server::ToolCall;

/// Maximum size of a file to edit. Models do not edit larger files intentionally.
const MAX_EDIT_BYTES: u64 = 16 << 20;

/// Bytes per read.
const READ_BYTES: usize = 64 * 1024;

/// Default and maximum number of entries that `list_dir` shows.
const ENTRIES: (usize, usize) = (1_000, 20_000);

/// Default and maximum number of matches that `search` shows.
const MATCHES: (usize, usize) = (200, 5_000);

/// Maximum depth of `list_dir`.
const MAX_DEPTH: usize = 16;

/// Maximum number of changes that `watch_once` shows.
const MAX_CHANGES: usize = 500;

pub(super) async fn read_file(call: &ToolCall, params: ReadFile) -> ToolResult {
    let (_, environment) = call.environment(params.environment_id.as_deref()).await?;
    let path = environment.path(&params.path)?;
    let options = ReadStreamOptions {
        offset: 0,
        sandbox: environment.sandbox.clone(),
    };
    let Room(room) = Room::of(params.max_output_tokens);
    let mut lines = LineSelection::new(
        params.offset.unwrap_or(1).max(1),
        params.limit.unwrap_or(u64::MAX),
        room,
    );
    let mut head = Vec::new();
    cancellable(call, async {
        let file = environment.files.open_read(&path, options).await;
        let file = file.map_err(|error| ToolError(environment.failure(&path, &error)))?;
        let mut file = BufReader::with_capacity(READ_BYTES, file);
        loop {
            let read = file.fill_buf().await;
            let bytes = read.map_err(|error| ToolError(error.to_string()))?;
            if bytes.is_empty() {
                lines.finish();
                return Ok(());
            }
            let missing = HEAD_BYTES - head.len();
            head.extend_from_slice(&bytes[..bytes.len().min(missing)]);
            let length = bytes.len();
            if lines.take(bytes) {
                return Ok(());
            }
            file.consume(length);
        }
    })
    .await?;
    let shown = environment.shown(&path);
    let content = match text_in(std::mem::take(&mut lines.taken)) {
        Ok(content) => content,
        Err(flaw) => {
            let access = AccessOptions {
                sandbox: environment.sandbox.clone(),
                ..AccessOptions::default()
            };
            let found = environment.files.metadata(&path, access).await;
            let size = found.ok().map(|found| found.size);
            return Err(not_text(&shown, size, &head, flaw, lines.first));
        }
    };
    let structured = FileLines {
        path: shown.clone(),
        first_line: lines.first,
        last_line: lines.last_taken(),
        next_offset: lines.next,
        content: content.clone(),
    };
    let text = with_rest(content, &lines, &shown);
    ToolOutcome::new(text, &structured)
}

/// Appends how to read the rest of a file, or that it has no such lines.
fn with_rest(content: String, lines: &LineSelection, shown: &str) -> String {
    let bytes = content.len();
    let mut text = content;
    // Writing to a string cannot fail.
    if let Some(next) = lines.next {
        if !text.ends_with('\n') {
            text.push('\n');
        }
        if lines.cut {
            let line = next - 1;
            let _ = writeln!(
                text,
                "[line {line} is cut after {bytes} bytes; all of it: a larger max_output_tokens, or \
                 exec_command with `sed -n {line}p {shown} | tail -c +{}`]",
                bytes + 1
            );
        }
        let _ = writeln!(
            text,
            "[more from line {next}: read_file with offset {next}]"
        );
    } else if text.is_empty() {
        let _ = match lines.line - 1 {
            0 => writeln!(text, "[the file is empty]"),
            1 => writeln!(text, "[the file has 1 line]"),
            count => writeln!(text, "[the file has {count} lines]"),
        };
    }
    text
}

/// Selects lines of a file while it is read.
#[derive(Debug)]
struct LineSelection {
    /// Number of the current line, from 1.
    line: u64,
    first: u64,
    /// Number of the line after the last wanted line.
    end: u64,
    room: usize,
    taken: Vec<u8>,
    /// Offset in `taken` at which the current line begins.
    line_start: usize,
    /// Line at which a further call can continue.
    next: Option<u64>,
    /// Whether a single line was too long and was cut.
    cut: bool,
}

impl LineSelection {
    fn new(first: u64, limit: u64, room: usize) -> Self {
        Self {
            line: 1,
            first,
            end: first.saturating_add(limit),
            room,
            taken: Vec::new(),
            line_start: 0,
            next: None,
            cut: false,
        }
    }

    /// Adds a piece of the file. Returns `true` when no more is needed.
    fn take(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            if self.line >= self.end {
                // Input remains, so a next line exists.
                self.next = Some(self.line);
                return true;
            }
            let newline = memchr::memchr(b'\n', bytes);
            let (piece, rest) = bytes.split_at(newline.map_or(bytes.len(), |at| at + 1));
            bytes = rest;
            if self.line >= self.first {
                if self.taken.len() + piece.len() > self.room {
                    self.overflow(piece);
                    return true;
                }
                self.taken.extend_from_slice(piece);
            }
            if newline.is_some() {
                self.line += 1;
                self.line_start = self.taken.len();
            }
        }
        false
    }

    /// Stops before a line that does not fit; the first line is cut instead.
    fn overflow(&mut self, piece: &[u8]) {
        if self.line_start > 0 {
            self.taken.truncate(self.line_start);
            self.next = Some(self.line);
            return;
        }
        let room = self.room - self.taken.len();
        self.taken.extend_from_slice(&piece[..room]);
        // Cuts at a character boundary.
        let whole = match std::str::from_utf8(&self.taken) {
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            _ => self.taken.len(),
        };
        self.taken.truncate(whole);
        self.cut = true;
        self.next = Some(self.line + 1);
    }

    fn finish(&mut self) {
        if self.taken.len() > self.line_start {
            // The last line has no line ending.
            self.line += 1;
        }
    }

    fn last_taken(&self) -> u64 {
        match self.next {
            Some(next) => next - 1,
            None => (self.line - 1).max(self.first.saturating_sub(1)),
        }
    }
}

pub(super) async fn write_file(call: &ToolCall, params: WriteFile) -> ToolResult {
    let (_, environment) = call.environment(params.environment_id.as_deref()).await?;
    let path = environment.path(&params.path)?;
    let bytes = params.content.len();
    let mode = params.executable.then_some(0o755);
    write(&environment, &path, params.content, mode).await?;
    let shown = environment.shown(&path);
    let text = format!("wrote {bytes} bytes to {shown}");
    ToolOutcome::new(text, &WrittenFile { path: shown, bytes })
}

async fn write(
    environment: &ToolEnvironment,
    path: &PathUri,
    content: String,
    mode: Option<u32>,
) -> Result<(), ToolError> {
    let native = path.to_native().ok();
    let parent = native.as_deref().and_then(|native| native.parent());
    if let Some(parent) = parent {
        let parent = exec_server_client::fs::uri(parent)?;
        let options = AccessOptions {
            sandbox: environment.sandbox.clone(),
            ..AccessOptions::default()
        };
        // Checked first: a user may write into a directory without permission to create
        // directories.
        let there = environment.files.metadata(&parent, options).await;
        if there.is_err_and(|error| error.code() == Some(codes::NOT_FOUND)) {
            let options = CreateDirectoryOptions {
                sandbox: environment.sandbox.clone(),
                ..CreateDirectoryOptions::default()
            };
            let made = environment.files.create_directory(&parent, options).await;
            made.map_err(|error| ToolError(environment.failure(&parent, &error)))?;
        }
    }
    let options = WriteOptions {
        mode,
        sandbox: environment.sandbox.clone(),
        ..WriteOptions::default()
    };
    let content = Bytes::from(content);
    let written = environment.files.write_file(path, content, options).await;
    written.map_err(|error| ToolError(environment.failure(path, &error)))
}

/// Reads a text file that is small enough to be edited.
async fn text_of(environment: &ToolEnvironment, path: &PathUri) -> Result<String, ToolError> {
    let failed = |error| ToolError(environment.failure(path, &error));
    let access = AccessOptions {
        sandbox: environment.sandbox.clone(),
        ..AccessOptions::default()
    };
    let files = &environment.files;
    let found = files.metadata(path, access.clone()).await.map_err(failed)?;
    let (shown, size) = (environment.shown(path), found.size);
    if size > MAX_EDIT_BYTES {
        return Err(ToolError(format!(
            "`{shown}` has {size} bytes; only files of up to {MAX_EDIT_BYTES} bytes can be edited"
        )));
    }
    let bytes = files.read_file(path, access).await.map_err(failed)?;
    let head = bytes[..bytes.len().min(HEAD_BYTES)].to_vec();
    text_in(bytes.into()).map_err(|flaw| not_text(&shown, Some(size), &head, flaw, 1))
}

/// Planned change of one file; all changes are planned before the first is made.
enum PlannedEdit {
    Write { path: PathUri, content: String },
    Remove { path: PathUri },
}

pub(super) async fn edit(call: &ToolCall, params: EditParams) -> ToolResult {
    let (_, environment) = call.environment(params.environment_id.as_deref()).await?;
    let steps = match (params.patch, params.path, params.old_text, params.new_text) {
        (Some(patch), None, None, None) => patch_steps(&environment, &patch).await?,
        (None, Some(path), Some(old), Some(new)) => {
            let path = environment.path(&path)?;
            let content = text_of(&environment, &path).await?;
            let content = replaced(
                &environment.shown(&path),
                &content,
                &old,
                &new,
                params.replace_all,
            )?;
            vec![PlannedEdit::Write { path, content }]
        }
        _ => {
            let message = "give either `patch`, or `path`, `old_text` and `new_text`";
            return Err(ToolError(message.to_owned()));
        }
    };
    let mut files = Vec::new();
    let mut text = String::new();
    for step in steps {
        let (path, change, outcome) = match step {
            PlannedEdit::Write { path, content } => {
                let outcome = write(&environment, &path, content, None).await;
                (path, "written", outcome)
            }
            PlannedEdit::Remove { path } => {
                let options = RemoveOptions {
                    sandbox: environment.sandbox.clone(),
                    ..RemoveOptions::default()
                };
                let outcome = environment.files.remove(&path, options).await;
                let outcome = outcome.map_err(|error| environment.failure(&path, &error));
                (path, "removed", outcome.map_err(ToolError))
            }
        };
        if let Err(ToolError(message)) = outcome {
            return Err(ToolError(match text.is_empty() {
                true => format!("{message}\nnothing was changed"),
                false => format!("{message}\nchanged before this error:\n{text}"),
            }));
        }
        let path = environment.shown(&path);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{path}: {change}");
        files.push(EditedFile { path, change });
    }
    ToolOutcome::new(text, &EditedFiles { files })
}

fn replaced(
    shown: &str,
    content: &str,
    old: &str,
    new: &str,
    all: bool,
) -> Result<String, ToolError> {
    if old.is_empty() {
        return Err(ToolError("`old_text` is empty".to_owned()));
    }
    match content.matches(old).count() {
        0 => Err(ToolError(format!(
            "`{shown}` does not contain `old_text`; read_file returns its exact text"
        ))),
        1 => Ok(content.replacen(old, new, 1)),
        _ if all => Ok(content.replace(old, new)),
        count => Err(ToolError(format!(
            "`{shown}` contains `old_text` {count} times; add lines around it, or set replace_all"
        ))),
    }
}

async fn patch_steps(
    environment: &ToolEnvironment,
    patch: &str,
) -> Result<Vec<PlannedEdit>, ToolError> {
    let failed = |error: patch::PatchError| ToolError(error.to_string());
    let mut steps = Vec::new();
    for change in patch::parse(patch).map_err(failed)? {
        match change {
            FilePatch::Add { path, content } => {
                let path = environment.path(&path)?;
                steps.push(PlannedEdit::Write { path, content });
            }
            FilePatch::Delete { path } => {
                let path = environment.path(&path)?;
                // Checked now, so that an error is reported before anything is changed.
                text_of(environment, &path).await?;
                steps.push(PlannedEdit::Remove { path });
            }
            FilePatch::Update {
                path,
                move_to,
                hunks,
            } => {
                let from = environment.path(&path)?;
                let content = text_of(environment, &from).await?;
                let content = patch::apply(&path, &content, &hunks).map_err(failed)?;
                match move_to {
                    Some(to) => {
                        let to = environment.path(&to)?;
                        steps.push(PlannedEdit::Write { path: to, content });
                        steps.push(PlannedEdit::Remove { path: from });
                    }
                    None => steps.push(PlannedEdit::Write {
                        path: from,
                        content,
                    }),
                }
            }
        }
    }
    Ok(steps)
}

pub(super) async fn list_dir(call: &ToolCall, params: ListDir) -> ToolResult {
    let (_, environment) = call.environment(params.environment_id.as_deref()).await?;
    let path = environment.path(params.path.as_deref().unwrap_or("."))?;
    let depth = params.depth.unwrap_or(1).clamp(1, MAX_DEPTH);
    let max = params.max_entries.unwrap_or(ENTRIES.0).min(ENTRIES.1);
    let mut listing = match depth {
        1 => names_in(&environment, &path, params.after.as_deref(), max).await,
        _ => cancellable(call, names_below(&environment, &path, depth)).await,
    }?;
    if let Some(after) = &params.after {
        listing.entries.retain(|entry| entry.name > *after);
    }
    listing.entries.sort();
    let mut room = Room::of(None);
    let mut text = String::new();
    let mut shown = 0;
    for ListedEntry { name, directory } in listing.entries.iter().take(max) {
        let line = format!("{name}{}\n", if *directory { "/" } else { "" });
        if !room.take(line.len()) {
            break;
        }
        text += &line;
        shown += 1;
    }
    let more = listing.entries.len() > shown;
    listing.entries.truncate(shown);
    let next_after = listing.entries.last().map(|entry| entry.name.clone());
    let next_after = next_after.filter(|_| more);
    if listing.entries.is_empty() {
        text.push_str("[no entries]\n");
    }
    // Writing to a string cannot fail.
    if let Some(after) = &next_after {
        let _ = writeln!(
            text,
            "[{shown} entries shown; more: list_dir with after {after:?}]"
        );
    }
    if listing.is_partial {
        let _ = writeln!(
            text,
            "[only {} entries of this tree were examined; list a subdirectory, or fewer levels]",
            ENTRIES.1
        );
    }
    if listing.unreadable > 0 {
        let _ = writeln!(
            text,
            "[{} directories could not be read]",
            listing.unreadable
        );
    }
    let structured = DirectoryEntries {
        path: environment.shown(&path),
        entries: listing.entries,
        truncated: more || listing.is_partial,
        next_after,
    };
    ToolOutcome::new(text, &structured)
}

/// Names in a directory or a tree, in any order.
struct DirectoryNames {
    entries: Vec<ListedEntry>,
    /// Directories that could not be read.
    unreadable: usize,
    /// Whether the tree has more entries than are examined.
    is_partial: bool,
}

/// Names in a directory after `after`: at least one more than `max`, if there are so many.
async fn names_in(
    environment: &ToolEnvironment,
    path: &PathUri,
    after: Option<&str>,
    max: usize,
) -> Result<DirectoryNames, ToolError> {
    let options = ReadDirectoryOptions {
        sandbox: environment.sandbox.clone(),
        ..ReadDirectoryOptions::default()
    };
    let failed = |error| ToolError(environment.failure(path, &error));
    let mut pages = DirectoryPages::new(environment.files.clone(), path, options);
    let mut entries = Vec::new();
    // Pages arrive in the order of names, so pages beyond the limit are not requested.
    while entries.len() <= max
        && let Some(page) = pages.next().await.map_err(failed)?
    {
        let page = page.into_iter().map(|entry| ListedEntry {
            name: entry.file_name,
            directory: entry.is_directory,
        });
        entries.extend(page.filter(|entry| after.is_none_or(|after| *entry.name > *after)));
    }
    Ok(DirectoryNames {
        entries,
        unreadable: 0,
        is_partial: false,
    })
}

/// Names in a tree, relative to its root.
async fn names_below(
    environment: &ToolEnvironment,
    path: &PathUri,
    depth: usize,
) -> Result<DirectoryNames, ToolError> {
    let options = TreeWalkOptions {
        max_depth: depth - 1,
        max_entries: ENTRIES.1,
        prune_hidden_directories: true,
        sandbox: environment.sandbox.clone(),
        ..TreeWalkOptions::default()
    };
    let walked = environment.files.walk(path, options).await;
    let walked = walked.map_err(|error| ToolError(environment.failure(path, &error)))?;
    let WalkResult {
        entries,
        errors,
        truncated,
        ..
    } = walked;
    let root = path.to_native().ok();
    let entries = entries.into_iter().map(|entry| {
        let native = entry.path.to_native().ok();
        let below = native.as_deref().zip(root.as_deref());
        let below = below.and_then(|(native, root)| native.strip_prefix(root).ok());
        let name = below.map_or_else(
            || entry.path.to_string(),
            |below| below.display().to_string(),
        );
        let directory = entry.kind == WalkKind::Directory;
        ListedEntry { name, directory }
    });
    Ok(DirectoryNames {
        entries: entries.collect(),
        unreadable: errors.len(),
        is_partial: truncated,
    })
}

pub(super) async fn search(call: &ToolCall, params: SearchFilesParams) -> ToolResult {
    let (_, environment) = call.environment(params.environment_id.as_deref()).await?;
    let path = environment.path(params.path.as_deref().unwrap_or("."))?;
    let options = SearchOptions {
        regex: !params.literal,
        case_sensitive: !params.ignore_case,
        globs: params.globs,
        gitignore: !params.include_ignored,
        // The order is certain only if all matches are found; then calls can continue.
        max_matches: MATCHES.1,
        context_lines: params.context_lines,
        sandbox: environment.sandbox.clone(),
    };
    let searching = environment.files.search(&path, &params.pattern, options);
    let found = cancellable(call, async {
        let found = searching.await;
        found.map_err(|error| ToolError(environment.failure(&path, &error)))
    })
    .await?;
    let max = params.max_matches.unwrap_or(MATCHES.0).min(MATCHES.1);
    let mut room = Room::of(params.max_output_tokens);
    let mut text = String::new();
    let mut matches = Vec::new();
    for one in found.matches.iter().skip(params.offset).take(max) {
        let file = environment.shown(&one.path);
        let lines = match_lines(&file, one);
        if !room.take(lines.len()) {
            break;
        }
        text += &lines;
        matches.push(FoundLine {
            path: file,
            line: one.line,
            column: one.column,
            text: one.text.clone(),
        });
    }
    let next = params.offset.saturating_add(matches.len());
    let more = next < found.matches.len();
    // Writing to a string cannot fail.
    if found.matches.is_empty() {
        let _ = writeln!(text, "no match in {} files", found.files_searched);
    } else if more {
        let of = match found.truncated {
            true => format!("more than {}", found.matches.len()),
            false => found.matches.len().to_string(),
        };
        let _ = writeln!(
            text,
            "[{} of {of} matches shown; more: search with offset {next}]",
            matches.len()
        );
    }
    if found.truncated {
        let _ = writeln!(
            text,
            "[not all matches were found, because there are too many: use a narrower pattern, path \
             or globs]"
        );
    }
    let structured = FoundLines {
        matches,
        files_searched: found.files_searched,
        truncated: more || found.truncated,
        next_offset: more.then_some(next),
    };
    ToolOutcome::new(text, &structured)
}

/// A matching line and the lines around it, as grep prints them.
fn match_lines(file: &str, found: &SearchMatch) -> String {
    let mut text = String::new();
    let first = found.line - found.before.len() as u64;
    // Writing to a string cannot fail.
    for (number, line) in (first..).zip(&found.before) {
        let _ = writeln!(text, "{file}-{number}- {line}");
    }
    let cut = if found.cut { " [line is cut]" } else { "" };
    let _ = writeln!(text, "{file}:{}: {}{cut}", found.line, found.text);
    for (number, line) in (found.line + 1..).zip(&found.after) {
        let _ = writeln!(text, "{file}-{number}- {line}");
    }
    text
}

pub(super) async fn watch_once(call: &ToolCall, params: WatchOnce) -> ToolResult {
    let (_, environment) = call.environment(params.environment_id.as_deref()).await?;
    let path = environment.path(params.path.as_deref().unwrap_or("."))?;
    let options = WatchOptions {
        recursive: params.recursive.unwrap_or(true),
        sandbox: environment.sandbox.clone(),
        ..WatchOptions::default()
    };
    let timeout = params.timeout_ms.map(Duration::from_millis);
    let timeout = timeout.unwrap_or(WAITS.0).min(WAITS.1);
    let batch = cancellable(call, async {
        let watching = environment.files.watch(&path, options).await;
        let mut changes = watching.map_err(|error| {
            let failure = environment.failure(&path, &error);
            ToolError(match failure.contains("sandbox intent cannot be enforced") {
                true => format!(
                    "Sandbox: denied watching `{}`, because its policy denies reading some files; \
                     call list_dir or read_file again after a while",
                    environment.shown(&path)
                ),
                false => failure,
            })
        })?;
        match tokio::time::timeout(timeout, changes.recv()).await {
            Ok(Some(batch)) => Ok(Some(batch)),
            Ok(None) => Err(ToolError("the watch has ended".to_owned())),
            Err(_) => Ok(None),
        }
    })
    .await?;
    let Some(batch) = batch else {
        let nothing = WatchedChanges {
            changes: Vec::new(),
            timed_out: true,
            more: false,
        };
        return ToolOutcome::new("nothing changed in time\n".to_owned(), &nothing);
    };
    let mut text = String::new();
    let mut changes = Vec::new();
    for change in batch.changes.iter().take(MAX_CHANGES) {
        let path = environment.shown(&change.path);
        let kind = match change.kind {
            ChangeKind::Created => "created",
            ChangeKind::Modified => "modified",
            ChangeKind::Removed => "removed",
            ChangeKind::Renamed => "renamed",
        };
        let from = change.from.as_ref().map(|from| environment.shown(from));
        // Writing to a string cannot fail.
        let _ = match &from {
            Some(from) => writeln!(text, "{path}: {kind} from {from}"),
            None => writeln!(text, "{path}: {kind}"),
        };
        changes.push(WatchedChange { path, kind, from });
    }
    let more = batch.overflow || batch.changes.len() > MAX_CHANGES;
    if more {
        text.push_str("[there were more changes: list_dir shows the current state]\n");
    }
    let structured = WatchedChanges {
        changes,
        timed_out: false,
        more,
    };
    ToolOutcome::new(text, &structured)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str, first: u64, limit: u64, room: usize, cut: usize) -> LineSelection {
        let mut lines = LineSelection::new(first, limit, room);
        for piece in text.as_bytes().chunks(cut) {
            if lines.take(piece) {
                return lines;
            }
        }
        lines.finish();
        lines
    }

    #[test]
    fn line_selection_does_not_depend_on_read_sizes() {
        let text = "one\ntwo\nthree\nfour";
        for cut in [1, 3, 4, 100] {
            let picked = |first, limit, room| {
                let lines = lines(text, first, limit, room, cut);
                let taken = String::from_utf8(lines.taken.clone()).unwrap();
                (taken, lines.last_taken(), lines.next)
            };
            assert_eq!(
                picked(1, u64::MAX, 100),
                (text.to_owned(), 4, None),
                "{cut}"
            );
            assert_eq!(
                picked(2, 2, 100),
                ("two\nthree\n".to_owned(), 3, Some(4)),
                "{cut}"
            );
            assert_eq!(
                picked(3, 9, 100),
                ("three\nfour".to_owned(), 4, None),
                "{cut}"
            );
            assert_eq!(
                picked(1, 9, 8),
                ("one\ntwo\n".to_owned(), 2, Some(3)),
                "{cut}"
            );
            assert_eq!(picked(9, 1, 8), (String::new(), 8, None), "{cut}");
            assert_eq!(picked(1, 0, 8).0, "", "{cut}");
        }
        assert_eq!(lines("", 1, 9, 9, 1).last_taken(), 0);
    }

    #[test]
    fn overlong_line_is_cut_at_a_character_boundary() {
        let cut = lines("aé€\nnext\n", 1, 9, 5, 100);
        assert_eq!(String::from_utf8(cut.taken.clone()).unwrap(), "aé");
        assert_eq!((cut.cut, cut.next), (true, Some(2)));
    }

    #[test]
    fn replace_requires_one_occurrence_unless_all_are_requested() {
        let replace = |old: &str, all| replaced("f", "a b a", old, "c", all);
        assert_eq!(replace("b", false).unwrap(), "a c a");
        assert_eq!(replace("a", true).unwrap(), "c b c");
        for (old, message) in [("a", "2 times"), ("x", "does not contain"), ("", "empty")] {
            let Err(ToolError(error_text)) = replace(old, false) else {
                panic!("{old} was replaced")
            };
            assert!(error_text.contains(message), "{error_text}");
        }
    }
}
