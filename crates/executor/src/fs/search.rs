//! Content search: lines that match a pattern, in a file or a tree.
//!
//! Uses as many threads as there are cores and stops early at a limit or on cancellation. Uses the
//! types and limits of the protocol. Files are read and never mapped: a file that is truncated
//! while it is mapped would crash this process.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;

use exec_server_protocol::PathUri;
use exec_server_protocol::fs::{SearchMatch, SearchParams, SearchResult};
use exec_server_protocol::limits::{
    MAX_SEARCH_CONTEXT_LINES, MAX_SEARCH_PATTERN_BYTES, MAX_SEARCH_REPLY_BYTES,
    MAX_SEARCH_TEXT_BYTES,
};
use exec_server_sync::{Mutex, RwLock};
use grep_matcher::Matcher as _;
use grep_regex::{RegexMatcher, RegexMatcherBuilder};
use grep_searcher::{
    BinaryDetection, Searcher, SearcherBuilder, Sink, SinkContext, SinkFinish, SinkMatch,
};
use ignore::overrides::{Override, OverrideBuilder};
use ignore::{DirEntry, ParallelVisitor, ParallelVisitorBuilder, WalkBuilder, WalkState};
use rustix::fs::{Mode, OFlags};

use super::gitignore::{self, IgnoreRules};
use super::open::{open, open_below};
use super::{CancelCheck, FsError, SymlinkPolicy, check_globs};

/// Maximum length of a line in memory; the search of a file ends at a longer line.
const MAX_LINE_BYTES: usize = 16 << 20;

/// Maximum size of a compiled expression, and of the matcher's cache of each thread.
const MAX_REGEX_BYTES: usize = 10 << 20;

/// Size of a match in the response besides its path and its lines.
const MATCH_OVERHEAD_BYTES: usize = 64;

/// Checks the parameters against their limits.
///
/// # Errors
///
/// [`FsError::Params`].
pub(super) fn check(params: &SearchParams) -> Result<(), FsError> {
    check_globs("globs", &params.globs)?;
    let bytes = params.pattern.len();
    if bytes > MAX_SEARCH_PATTERN_BYTES {
        return Err(FsError::Params(format!(
            "pattern of {bytes} bytes exceeds the limit of {MAX_SEARCH_PATTERN_BYTES} bytes"
        )));
    }
    let lines = params.context_lines;
    if lines > MAX_SEARCH_CONTEXT_LINES {
        return Err(FsError::Params(format!(
            "contextLines {lines} exceeds the limit of {MAX_SEARCH_CONTEXT_LINES} lines"
        )));
    }
    Ok(())
}

/// Searches `root`, which is `params.path` on this machine.
///
/// Matches are sorted by path, then by line. If there are more than the limit allows, the result
/// holds those that were found first. Unreadable files, binary files and links below the root are
/// left out. Blocks until the search is done, or until shortly after `cancelled` returns true.
///
/// # Errors
///
/// [`FsError::Params`] when the pattern or a glob is invalid, or an IO error of the path.
pub fn search(
    root: &Path,
    params: &SearchParams,
    cancelled: CancelCheck<'_>,
) -> Result<SearchResult, FsError> {
    let matcher =
        matcher(params).map_err(|error| FsError::Params(format!("invalid pattern: {error}")))?;
    let overrides = overrides(root, &params.globs)?;
    let top = open(root, OFlags::PATH, Mode::empty(), SymlinkPolicy::Follow)?;
    let found = top.metadata().map_err(super::at(root))?;
    let shared = SearchShared {
        cancelled,
        root,
        top,
        params,
        matcher,
        full: AtomicBool::new(false),
        truncated: AtomicBool::new(false),
        taken: AtomicUsize::new(0),
        bytes: AtomicUsize::new(0),
        files: AtomicU64::new(0),
        found: Mutex::default(),
    };
    if found.is_dir() {
        walk(root, params.gitignore, overrides).visit(&mut &shared);
    } else {
        // A file that the request names is searched regardless of globs and ignore rules.
        let mut worker = shared.worker();
        worker.search(root.to_owned());
    }
    Ok(shared.into_result())
}

fn matcher(params: &SearchParams) -> Result<RegexMatcher, grep_regex::Error> {
    RegexMatcherBuilder::new()
        .case_insensitive(!params.case_sensitive)
        .fixed_strings(!params.regex)
        .multi_line(true)
        .line_terminator(Some(b'\n'))
        .size_limit(MAX_REGEX_BYTES)
        .dfa_size_limit(MAX_REGEX_BYTES)
        .build(&params.pattern)
}

fn overrides(root: &Path, globs: &[String]) -> Result<Override, FsError> {
    let mut builder = OverrideBuilder::new(root);
    let bad = |glob: &str| {
        let glob = glob.to_owned();
        move |source: ignore::Error| FsError::Params(format!("invalid glob `{glob}`: {source}"))
    };
    for glob in globs {
        builder.add(glob).map_err(bad(glob))?;
    }
    builder.build().map_err(bad(&globs.join(", ")))
}

fn walk(root: &Path, gitignore: bool, overrides: Override) -> ignore::WalkParallel {
    let mut builder = WalkBuilder::new(root);
    builder
        .standard_filters(false)
        .hidden(gitignore)
        .overrides(overrides.clone())
        .threads(thread::available_parallelism().map_or(1, usize::from));
    if gitignore {
        // Ignore rules are evaluated here: the walker would block on a pipe named like a rules
        // file.
        let ignored = SearchIgnore::new(root);
        builder.filter_entry(move |entry| {
            let is_dir = entry.file_type().is_some_and(|kind| kind.is_dir());
            // An explicit glob overrides the ignore rules.
            let is_whitelisted = overrides.matched(entry.path(), is_dir).is_whitelist();
            ignored.admits(entry.path(), is_dir, is_whitelisted)
        });
    }
    builder.build_parallel()
}

/// `.gitignore` rules of one search.
///
/// Rules also apply outside a repository. Rules above the root apply only within a repository, up
/// to its root: a stray file in a distant parent could otherwise hide everything.
struct SearchIgnore {
    root: PathBuf,
    rules: Option<Arc<IgnoreRules>>,
    /// Directories below the root whose rules differ from those of their parent.
    below: RwLock<HashMap<PathBuf, Option<Arc<IgnoreRules>>>>,
    /// Whether `below` has any entry.
    differs: AtomicBool,
    /// Number of rules in memory.
    count: AtomicU64,
}

/// Maximum number of rules in memory for one search; rules of directories found later are ignored.
const MAX_RULES: u64 = 1 << 17;

impl SearchIgnore {
    fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            rules: gitignore::enter(root, gitignore::above(root)),
            below: RwLock::default(),
            differs: AtomicBool::new(false),
            count: AtomicU64::new(0),
        }
    }

    /// Whether a path is searched; must be called for a directory before its entries.
    fn admits(&self, path: &Path, is_dir: bool, is_whitelisted: bool) -> bool {
        let rules = path.parent().and_then(|parent| self.rules_of(parent));
        if !is_whitelisted && gitignore::ignores(rules.as_deref(), path, is_dir) {
            return false;
        }
        if is_dir {
            self.enter(path, rules);
        }
        true
    }

    fn enter(&self, directory: &Path, around: Option<Arc<IgnoreRules>>) {
        let rules = gitignore::enter_any(directory, around.clone());
        let same = match (&rules, &around) {
            (Some(rules), Some(around)) => Arc::ptr_eq(rules, around),
            (rules, around) => rules.is_none() && around.is_none(),
        };
        if same {
            return;
        }
        let more = 1 + rules.as_ref().map_or(0, |rules| rules.len());
        if self.count.fetch_add(more, Ordering::Relaxed) < MAX_RULES {
            let mut below = self.below.write();
            below.insert(directory.to_owned(), rules);
            self.differs.store(true, Ordering::Release);
        }
    }

    fn rules_of(&self, directory: &Path) -> Option<Arc<IgnoreRules>> {
        if self.differs.load(Ordering::Acquire) {
            let below = self.below.read();
            let within = directory.ancestors();
            let mut within = within.take_while(|directory| *directory != self.root);
            if let Some(rules) = within.find_map(|directory| below.get(directory)) {
                return rules.clone();
            }
        }
        self.rules.clone()
    }
}

/// State shared by the threads of one search.
struct SearchShared<'a> {
    cancelled: CancelCheck<'a>,
    root: &'a Path,
    /// The root, opened as a path. Files are opened relative to it, so that a directory that is
    /// replaced by a link meanwhile does not lead out of the tree.
    top: File,
    params: &'a SearchParams,
    matcher: RegexMatcher,
    /// The limit of matches is reached.
    full: AtomicBool,
    /// Some matches were left out.
    truncated: AtomicBool,
    /// Number of matches so far, including those above the limit.
    taken: AtomicUsize,
    /// Size of the response so far, in bytes.
    bytes: AtomicUsize,
    files: AtomicU64,
    found: Mutex<Vec<FileMatches>>,
}

/// Matches of one file.
struct FileMatches {
    path: PathBuf,
    uri: PathUri,
    lines: Vec<MatchedLine>,
}

struct MatchedLine {
    number: u64,
    column: u64,
    text: LineText,
    before: Vec<String>,
    after: Vec<String>,
}

#[derive(Clone)]
struct LineText {
    text: String,
    cut: bool,
}

impl<'a> SearchShared<'a> {
    fn worker<'s>(&'s self) -> SearchWorker<'s, 'a> {
        let context = self.params.context_lines;
        SearchWorker {
            shared: self,
            matcher: self.matcher.clone(),
            searcher: SearcherBuilder::new()
                .binary_detection(BinaryDetection::quit(b'\0'))
                .line_number(true)
                .before_context(context)
                .after_context(context)
                .heap_limit(Some(MAX_LINE_BYTES))
                .build(),
            found: Vec::new(),
        }
    }

    fn is_cancelled(&self) -> bool {
        (self.cancelled)()
    }

    fn is_over(&self) -> bool {
        self.is_cancelled() || self.full.load(Ordering::Relaxed)
    }

    /// Whether one more match of this size fits.
    fn admit(&self, bytes: usize) -> bool {
        let before = self.taken.fetch_add(1, Ordering::Relaxed);
        let used = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let fits = before < self.params.max_matches && used + bytes <= MAX_SEARCH_REPLY_BYTES;
        if !fits {
            self.truncated.store(true, Ordering::Relaxed);
            self.full.store(true, Ordering::Relaxed);
        }
        fits
    }

    fn into_result(self) -> SearchResult {
        let mut found = self.found.into_inner();
        found.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        let matches = found
            .into_iter()
            .flat_map(|FileMatches { uri, lines, .. }| {
                lines.into_iter().map(move |line| SearchMatch {
                    path: uri.clone(),
                    line: line.number,
                    column: line.column,
                    text: line.text.text,
                    cut: line.text.cut,
                    before: line.before,
                    after: line.after,
                })
            });
        SearchResult {
            matches: matches.collect(),
            files_searched: self.files.into_inner(),
            truncated: self.truncated.into_inner(),
        }
    }
}

impl<'s> ParallelVisitorBuilder<'s> for &'s SearchShared<'_> {
    fn build(&mut self) -> Box<dyn ParallelVisitor + 's> {
        Box::new(self.worker())
    }
}

/// State of one search thread.
struct SearchWorker<'s, 'a> {
    shared: &'s SearchShared<'a>,
    matcher: RegexMatcher,
    /// Reuses its buffers from file to file.
    searcher: Searcher,
    found: Vec<FileMatches>,
}

impl ParallelVisitor for SearchWorker<'_, '_> {
    fn visit(&mut self, entry: Result<DirEntry, ignore::Error>) -> WalkState {
        if self.shared.is_over() {
            return WalkState::Quit;
        }
        if let Ok(entry) = entry
            && entry.file_type().is_some_and(|kind| kind.is_file())
        {
            self.search(entry.into_path());
        }
        WalkState::Continue
    }
}

impl Drop for SearchWorker<'_, '_> {
    fn drop(&mut self) {
        self.shared.found.lock().append(&mut self.found);
    }
}

impl SearchWorker<'_, '_> {
    fn search(&mut self, path: PathBuf) {
        let SearchShared { root, top, .. } = self.shared;
        let opened = match path.strip_prefix(root) {
            Ok(below) if !below.as_os_str().is_empty() => {
                open_below(top, below, &path, OFlags::RDONLY)
            }
            // The path of the request itself, which may be a link.
            _ => open(&path, OFlags::RDONLY, Mode::empty(), SymlinkPolicy::Follow),
        };
        let Ok(file) = opened else {
            return;
        };
        if !file.metadata().is_ok_and(|found| found.is_file()) {
            return;
        }
        self.shared.files.fetch_add(1, Ordering::Relaxed);
        let pending = Cell::new(false);
        let mut sink = MatchCollector {
            shared: self.shared,
            matcher: &self.matcher,
            pending: &pending,
            path: &path,
            uri: None,
            context: self.shared.params.context_lines,
            lines: Vec::new(),
            open: 0,
            recent: VecDeque::new(),
            full: false,
        };
        let reader = LimitedReader {
            file,
            shared: self.shared,
            pending: &pending,
        };
        let searched = self
            .searcher
            .search_reader(&self.matcher, reader, &mut sink);
        if let Err(error) = searched
            && error.raw_os_error().is_none()
        {
            // This is not an IO error: a line was too long to be held in memory.
            self.shared.truncated.store(true, Ordering::Relaxed);
        }
        let (lines, uri) = (sink.lines, sink.uri);
        if !lines.is_empty()
            && let Some(uri) = uri
        {
            self.found.push(FileMatches { path, uri, lines });
        }
    }
}

/// Reader that reports the end of the file when no more of it is needed.
struct LimitedReader<'s, 'a> {
    file: File,
    shared: &'s SearchShared<'a>,
    pending: &'s Cell<bool>,
}

impl Read for LimitedReader<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let shared = self.shared;
        if shared.is_cancelled() || (shared.full.load(Ordering::Relaxed) && !self.pending.get()) {
            return Ok(0);
        }
        self.file.read(buffer)
    }
}

/// Collects the matches of one file.
struct MatchCollector<'s, 'a> {
    shared: &'s SearchShared<'a>,
    matcher: &'s RegexMatcher,
    /// Whether a match still needs context lines after it.
    pending: &'s Cell<bool>,
    path: &'s Path,
    /// Created at the first match: most files have none.
    uri: Option<PathUri>,
    context: usize,
    lines: Vec<MatchedLine>,
    /// Index of the first of `lines` that still needs context lines after it.
    open: usize,
    /// The latest lines with their numbers, as many as the context needs.
    recent: VecDeque<(u64, String)>,
    /// No more matches are accepted, only the context lines of earlier matches.
    full: bool,
}

impl MatchCollector<'_, '_> {
    /// Adds a line to the context of the matches near it.
    fn pass(&mut self, number: u64, text: String) {
        if self.context == 0 {
            return;
        }
        let mut used = 0;
        for line in &mut self.lines[self.open..] {
            line.after.push(text.clone());
            used += text.len();
        }
        while let Some(line) = self.lines.get(self.open)
            && line.after.len() >= self.context
        {
            self.open += 1;
        }
        self.shared.bytes.fetch_add(used, Ordering::Relaxed);
        if self.recent.len() >= self.context {
            self.recent.pop_front();
        }
        self.recent.push_back((number, text));
        self.pending.set(self.open < self.lines.len());
    }

    /// The context lines before a line.
    fn before(&self, number: u64) -> Vec<String> {
        let first = number.saturating_sub(self.context as u64);
        self.recent
            .iter()
            .filter(|(number, _)| *number >= first)
            .map(|(_, text)| text.clone())
            .collect()
    }

    /// Whether to continue reading the file.
    fn wants_more(&self) -> bool {
        !self.shared.is_cancelled() && (!self.full || self.pending.get())
    }
}

impl Sink for MatchCollector<'_, '_> {
    type Error = io::Error;

    fn matched(&mut self, _: &Searcher, found: &SinkMatch<'_>) -> io::Result<bool> {
        if self.uri.is_none() {
            self.uri = PathUri::from_native(self.path).ok();
        }
        let Some(uri) = &self.uri else {
            return Ok(false);
        };
        let overhead = uri.as_str().len() + MATCH_OVERHEAD_BYTES;
        let line = without_end(found.bytes());
        let number = found.line_number().unwrap_or_default();
        let text = shown(line);
        if !self.full {
            let before = self.before(number);
            let shown: usize = before.iter().map(String::len).sum();
            self.full = !self.shared.admit(overhead + text.text.len() + shown);
            if !self.full {
                let column = match self.matcher.find(line) {
                    Ok(Some(found)) => found.start() as u64 + 1,
                    _ => 1,
                };
                self.pass(number, text.text.clone());
                self.lines.push(MatchedLine {
                    number,
                    column,
                    text,
                    before,
                    after: Vec::new(),
                });
                self.pending.set(self.context > 0);
                return Ok(self.wants_more());
            }
        }
        self.pass(number, text.text);
        Ok(self.wants_more())
    }

    fn context(&mut self, _: &Searcher, found: &SinkContext<'_>) -> io::Result<bool> {
        let text = shown(without_end(found.bytes()));
        self.pass(found.line_number().unwrap_or_default(), text.text);
        Ok(self.wants_more())
    }

    fn binary_data(&mut self, _: &Searcher, _: u64) -> io::Result<bool> {
        Ok(false)
    }

    fn finish(&mut self, _: &Searcher, finish: &SinkFinish) -> io::Result<()> {
        if finish.binary_byte_offset().is_some() {
            // The file looked like text at first and is binary: drop its matches.
            let taken = self.lines.len();
            self.shared.taken.fetch_sub(taken, Ordering::Relaxed);
            self.lines.clear();
        }
        Ok(())
    }
}

fn without_end(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    line.strip_suffix(b"\r").unwrap_or(line)
}

/// The displayed part of a line: its beginning, with U+FFFD for invalid UTF-8.
fn shown(line: &[u8]) -> LineText {
    let cut = line.len() > MAX_SEARCH_TEXT_BYTES;
    let mut end = line.len().min(MAX_SEARCH_TEXT_BYTES);
    if cut {
        // Do not cut within a character.
        let is_inside = |&byte: &u8| byte & 0xC0 == 0x80;
        while end > MAX_SEARCH_TEXT_BYTES - 4 && line.get(end).is_some_and(is_inside) {
            end -= 1;
        }
    }
    LineText {
        text: String::from_utf8_lossy(&line[..end]).into_owned(),
        cut,
    }
}

#[cfg(test)]
mod tests;
