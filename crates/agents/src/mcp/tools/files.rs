//! File tools: `read_file`, `write_file`, `edit`, `list_dir`, `search`, `watch_once`.

use std::fmt::Write as _;
use std::time::Duration;

use bytes::Bytes;
use exec_server_client::ExecServerError;
use exec_server_client::fs::{
    AccessOptions, CreateDirectoryOptions, DirectoryPages, ReadDirectoryOptions, ReadStreamOptions,
    RemoveOptions, SearchOptions, TreeWalkOptions, WatchOptions, WriteOptions,
};
use exec_server_protocol::fs::{ChangeKind, WalkKind};
use exec_server_protocol::{PathUri, codes};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use super::commands::WAITS;
use super::{ToolError, ToolOutcome, ToolResult, budget, cancellable, fitted};
use crate::mcp::environment::ToolEnvironment;
use crate::mcp::params::{EditParams, ListDir, ReadFile, SearchFilesParams, WatchOnce, WriteFile};
use crate::mcp::patch::{self, FilePatch};
use crate::mcp::server::ToolCall;
use crate::unified::BYTES_PER_TOKEN;

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
    let tokens = budget(params.max_output_tokens);
    let mut lines = LineSelection::new(
        params.offset.unwrap_or(1).max(1),
        params.limit.unwrap_or(u64::MAX),
        tokens.saturating_mul(BYTES_PER_TOKEN),
    );
    cancellable(call, async {
        let file = environment.files.open_read(&path, options).await?;
        let mut file = BufReader::with_capacity(READ_BYTES, file);
        loop {
            let read = file.fill_buf().await;
            let bytes = read.map_err(|error| ToolError::Failed(error.to_string()))?;
            if bytes.is_empty() {
                lines.finish();
                return Ok(());
            }
            let length = bytes.len();
            if lines.take(bytes) {
                return Ok(());
            }
            file.consume(length);
        }
    })
    .await?;
    let content = String::from_utf8_lossy(&lines.taken).into_owned();
    let mut structured = json!({
        "path": environment.shown(&path),
        "content": content,
        "first_line": lines.first,
        "last_line": lines.last_taken(),
    });
    let mut text = content;
    if let Some(next) = lines.next {
        structured["next_offset"] = next.into();
        if !text.ends_with('\n') {
            text.push('\n');
        }
        // Writing to a string cannot fail.
        let _ = match lines.cut {
            true => writeln!(text, "[line {} is cut; more from line {next}]", next - 1),
            false => writeln!(text, "[more from line {next}]"),
        };
    }
    Ok(ToolOutcome { text, structured })
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
    let structured = json!({ "path": shown, "bytes": bytes });
    Ok(ToolOutcome { text, structured })
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
            environment.files.create_directory(&parent, options).await?;
        }
    }
    let options = WriteOptions {
        mode,
        sandbox: environment.sandbox.clone(),
        ..WriteOptions::default()
    };
    let content = Bytes::from(content);
    environment.files.write_file(path, content, options).await?;
    Ok(())
}

/// Reads a text file that is small enough to be edited.
async fn text_of(environment: &ToolEnvironment, path: &PathUri) -> Result<String, ToolError> {
    let shown = environment.shown(path);
    let named = |error: ExecServerError| ToolError::Failed(format!("{shown}: {error}"));
    let access = AccessOptions {
        sandbox: environment.sandbox.clone(),
        ..AccessOptions::default()
    };
    let found = environment
        .files
        .metadata(path, access.clone())
        .await
        .map_err(named)?;
    if found.size > MAX_EDIT_BYTES {
        let size = found.size;
        let message = format!(
            "{shown} has {size} bytes; only files of up to {MAX_EDIT_BYTES} bytes can be edited"
        );
        return Err(ToolError::Failed(message));
    }
    let bytes = environment
        .files
        .read_file(path, access)
        .await
        .map_err(named)?;
    String::from_utf8(bytes.to_vec())
        .map_err(|_| ToolError::Failed(format!("{shown} is not UTF-8 text")))
}

/// Planned change of one file; all changes are planned before the first is made.
enum PlannedEdit {
    Write { path: PathUri, content: String },
    Remove { path: PathUri },
}

pub(super) async fn edit(call: &ToolCall, params: EditParams) -> ToolResult {
    let (_, environment) = call.environment(params.environment_id.as_deref()).await?;
    let wrong = |message: &str| ToolError::Arguments(message.to_owned());
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
            return Err(wrong(
                "give either `patch`, or `path`, `old_text` and `new_text`",
            ));
        }
    };
    let mut done: Vec<Value> = Vec::new();
    let mut text = String::new();
    for step in steps {
        let (path, kind, outcome) = match step {
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
                (path, "removed", outcome.map_err(ToolError::from))
            }
        };
        let shown = environment.shown(&path);
        if let Err(ToolError::Failed(message) | ToolError::Arguments(message)) = outcome {
            let before = if text.is_empty() { "nothing\n" } else { &text };
            let message = format!("{shown} could not be {kind}: {message}\ndone before:\n{before}");
            return Err(ToolError::Failed(message));
        }
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{shown}: {kind}");
        done.push(json!({ "path": shown, "change": kind }));
    }
    let structured = json!({ "files": done });
    Ok(ToolOutcome { text, structured })
}

fn replaced(
    shown: &str,
    content: &str,
    old: &str,
    new: &str,
    all: bool,
) -> Result<String, ToolError> {
    if old.is_empty() {
        return Err(ToolError::Arguments("`old_text` is empty".to_owned()));
    }
    match content.matches(old).count() {
        0 => Err(ToolError::Failed(format!(
            "{shown} does not contain `old_text`"
        ))),
        1 => Ok(content.replacen(old, new, 1)),
        _ if all => Ok(content.replace(old, new)),
        count => Err(ToolError::Failed(format!(
            "{shown} contains `old_text` {count} times; add lines around it, or set replace_all"
        ))),
    }
}

async fn patch_steps(
    environment: &ToolEnvironment,
    patch: &str,
) -> Result<Vec<PlannedEdit>, ToolError> {
    let failed = |error: patch::PatchError| ToolError::Failed(error.to_string());
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
    let max = params.max_entries.unwrap_or(ENTRIES.0).min(ENTRIES.1);
    let depth = params.depth.unwrap_or(1).clamp(1, MAX_DEPTH);
    // Name relative to the directory, and whether the entry is a directory.
    let mut entries: Vec<(String, bool)> = Vec::new();
    let mut truncated = false;
    let mut errors = 0;
    if depth == 1 {
        let options = ReadDirectoryOptions {
            sandbox: environment.sandbox.clone(),
            ..ReadDirectoryOptions::default()
        };
        let mut pages = DirectoryPages::new(environment.files.clone(), &path, options);
        // Pages arrive in the order of names, so pages beyond the limit are not requested.
        while entries.len() <= max
            && let Some(page) = pages.next().await?
        {
            let page = page.into_iter();
            entries.extend(page.map(|entry| (entry.file_name, entry.is_directory)));
        }
        entries.sort();
    } else {
        let options = TreeWalkOptions {
            max_depth: depth - 1,
            max_entries: max,
            prune_hidden_directories: true,
            sandbox: environment.sandbox.clone(),
            ..TreeWalkOptions::default()
        };
        let walk = cancellable(call, async {
            Ok(environment.files.walk(&path, options).await?)
        });
        let found = walk.await?;
        truncated = found.truncated;
        errors = found.errors.len();
        let root = path.to_native().ok();
        entries.extend(found.entries.into_iter().map(|entry| {
            let native = entry.path.to_native().ok();
            let below = native.as_deref().zip(root.as_deref());
            let below = below.and_then(|(native, root)| native.strip_prefix(root).ok());
            let name = below.map_or_else(
                || entry.path.to_string(),
                |below| below.display().to_string(),
            );
            (name, entry.kind == WalkKind::Directory)
        }));
        entries.sort();
    }
    if entries.len() > max {
        truncated = true;
        entries.truncate(max);
    }
    let mut text = String::new();
    for (name, is_directory) in &entries {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name}{}", if *is_directory { "/" } else { "" });
    }
    if truncated {
        let _ = writeln!(text, "[{} entries shown; there are more]", entries.len());
    }
    if errors > 0 {
        let _ = writeln!(text, "[{errors} directories could not be read]");
    }
    let listed: Vec<Value> = entries
        .iter()
        .map(|(name, is_directory)| json!({ "name": name, "directory": is_directory }))
        .collect();
    let structured = json!({
        "path": environment.shown(&path),
        "entries": listed,
        "truncated": truncated,
    });
    let text = fitted(&text, budget(None));
    Ok(ToolOutcome { text, structured })
}

pub(super) async fn search(call: &ToolCall, params: SearchFilesParams) -> ToolResult {
    let (_, environment) = call.environment(params.environment_id.as_deref()).await?;
    let path = environment.path(params.path.as_deref().unwrap_or("."))?;
    let options = SearchOptions {
        regex: !params.literal,
        case_sensitive: !params.ignore_case,
        globs: params.globs,
        gitignore: !params.include_ignored,
        max_matches: params.max_matches.unwrap_or(MATCHES.0).min(MATCHES.1),
        context_lines: params.context_lines,
        sandbox: environment.sandbox.clone(),
    };
    let searching = environment.files.search(&path, &params.pattern, options);
    let found = cancellable(call, async { Ok(searching.await?) }).await?;
    let mut text = String::new();
    let mut matches: Vec<Value> = Vec::new();
    for one in &found.matches {
        let file = environment.shown(&one.path);
        // Writing to a string cannot fail.
        let first = one.line - one.before.len() as u64;
        for (number, line) in (first..).zip(&one.before) {
            let _ = writeln!(text, "{file}-{number}- {line}");
        }
        let _ = writeln!(text, "{file}:{}: {}", one.line, one.text);
        for (number, line) in (one.line + 1..).zip(&one.after) {
            let _ = writeln!(text, "{file}-{number}- {line}");
        }
        matches.push(
            json!({ "path": file, "line": one.line, "column": one.column, "text": one.text }),
        );
    }
    if found.matches.is_empty() {
        text.push_str("no match\n");
    }
    if found.truncated {
        text.push_str("[there are more matches]\n");
    }
    let tokens = budget(params.max_output_tokens);
    // The structured result has the same bound: the first matches that fit.
    let mut room = tokens.saturating_mul(BYTES_PER_TOKEN);
    let mut cut = found.truncated;
    let shown: Vec<Value> = matches
        .into_iter()
        .map_while(|one| {
            let length = one.to_string().len();
            let fits = room.checked_sub(length);
            cut |= fits.is_none();
            room = fits?;
            Some(one)
        })
        .collect();
    let structured = json!({
        "matches": shown,
        "files_searched": found.files_searched,
        "truncated": cut,
    });
    let text = fitted(&text, tokens);
    Ok(ToolOutcome { text, structured })
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
        let mut changes = environment.files.watch(&path, options).await?;
        match tokio::time::timeout(timeout, changes.recv()).await {
            Ok(Some(batch)) => Ok(Some(batch)),
            Ok(None) => Err(ToolError::Failed("the watch has ended".to_owned())),
            Err(_) => Ok(None),
        }
    })
    .await?;
    let Some(batch) = batch else {
        let structured = json!({ "changes": [], "timed_out": true });
        let text = "nothing changed in time\n".to_owned();
        return Ok(ToolOutcome { text, structured });
    };
    let mut text = String::new();
    let mut changes: Vec<Value> = Vec::new();
    for change in batch.changes.iter().take(MAX_CHANGES) {
        let shown = environment.shown(&change.path);
        let kind = match change.kind {
            ChangeKind::Created => "created",
            ChangeKind::Modified => "modified",
            ChangeKind::Removed => "removed",
            ChangeKind::Renamed => "renamed",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{shown}: {kind}");
        let mut one = json!({ "path": shown, "kind": kind });
        if let Some(from) = &change.from {
            one["from"] = environment.shown(from).into();
        }
        changes.push(one);
    }
    let more = batch.overflow || batch.changes.len() > MAX_CHANGES;
    if more {
        text.push_str("[there were more changes]\n");
    }
    let structured = json!({ "changes": changes, "timed_out": false, "more": more });
    Ok(ToolOutcome { text, structured })
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
            let Err(ToolError::Failed(error_text) | ToolError::Arguments(error_text)) =
                replace(old, false)
            else {
                panic!("{old} was replaced")
            };
            assert!(error_text.contains(message), "{error_text}");
        }
    }
}
