//! Lines that match, in a file or a tree.
//!
//! Walks with as many threads as there are cores and stops early: at a bound, or when told to. Knows
//! the wire's types and limits, not who asks. Files are read, never mapped: a file that is cut short
//! while it is mapped would end this process.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::fs::{self, File};
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

use super::gitignore::{self, Rules};
use super::{Cancelled, FsError, check_globs};

/// Bytes of one line that are held in memory; a file with a longer one is given up there.
const MAX_LINE_BYTES: usize = 16 << 20;

/// Bytes of a compiled expression, and of what each thread remembers while matching.
const MAX_REGEX_BYTES: usize = 10 << 20;

/// What an answer holds for each match besides its path and its lines.
const MATCH_OVERHEAD_BYTES: usize = 64;

/// Checks the params against their bounds.
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
/// Matches come by path, then by line. When there are more than fit, which of them are told is
/// whichever were found first. Files that cannot be read, binary files and links below the root are
/// left out. Blocks until it is done, or until shortly after `cancelled` says so.
///
/// # Errors
///
/// [`FsError::Params`] when the pattern or a glob is invalid, or whatever the system says of the path.
pub fn search(
    root: &Path,
    params: &SearchParams,
    cancelled: Cancelled<'_>,
) -> Result<SearchResult, FsError> {
    let matcher =
        matcher(params).map_err(|error| FsError::Params(format!("invalid pattern: {error}")))?;
    let overrides = overrides(root, &params.globs)?;
    let found = fs::metadata(root).map_err(super::at(root))?;
    let shared = Shared {
        cancelled,
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
        // Whoever names a file wants it, whatever globs and rules say.
        let mut worker = shared.worker();
        worker.search(root.to_owned(), OFlags::empty());
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
        // Not left to the walk, which would wait for a pipe of that name.
        let ignored = Ignored::new(root);
        builder.filter_entry(move |entry| {
            let is_dir = entry.file_type().is_some_and(|kind| kind.is_dir());
            // What a glob asks for is wanted, whatever the rules say.
            let asked = overrides.matched(entry.path(), is_dir).is_whitelist();
            ignored.admits(entry.path(), is_dir, asked)
        });
    }
    builder.build_parallel()
}

/// What git's rules leave out of a search.
///
/// Rules count outside of a repository too. Those above the root count only within one, up to its
/// top: a stray file far up would hide everything.
struct Ignored {
    root: PathBuf,
    rules: Option<Arc<Rules>>,
    /// Directories below the root with other rules than the one around them.
    below: RwLock<HashMap<PathBuf, Option<Arc<Rules>>>>,
    /// There is one at least.
    differs: AtomicBool,
    /// How many rules are held.
    count: AtomicU64,
}

/// Rules that are held for one search; those of directories found later do not count.
const MAX_RULES: u64 = 1 << 17;

impl Ignored {
    fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            rules: gitignore::enter(root, gitignore::above(root)),
            below: RwLock::default(),
            differs: AtomicBool::new(false),
            count: AtomicU64::new(0),
        }
    }

    /// Whether something is searched; a directory is asked about before what is in it.
    fn admits(&self, path: &Path, is_dir: bool, asked: bool) -> bool {
        let rules = path.parent().and_then(|parent| self.rules_of(parent));
        if !asked && gitignore::ignores(rules.as_deref(), path, is_dir) {
            return false;
        }
        if is_dir {
            self.enter(path, rules);
        }
        true
    }

    fn enter(&self, directory: &Path, around: Option<Arc<Rules>>) {
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

    fn rules_of(&self, directory: &Path) -> Option<Arc<Rules>> {
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

/// What the threads of one search share.
struct Shared<'a> {
    cancelled: Cancelled<'a>,
    params: &'a SearchParams,
    matcher: RegexMatcher,
    /// No more matches are wanted.
    full: AtomicBool,
    /// Something was left out.
    truncated: AtomicBool,
    /// Matches so far, and those that came too late.
    taken: AtomicUsize,
    /// Bytes of the answer so far.
    bytes: AtomicUsize,
    files: AtomicU64,
    found: Mutex<Vec<Found>>,
}

/// The matches of one file.
struct Found {
    path: PathBuf,
    uri: PathUri,
    lines: Vec<Line>,
}

struct Line {
    number: u64,
    column: u64,
    text: Text,
    before: Vec<String>,
    after: Vec<String>,
}

#[derive(Clone)]
struct Text {
    text: String,
    cut: bool,
}

impl<'a> Shared<'a> {
    fn worker<'s>(&'s self) -> Worker<'s, 'a> {
        let context = self.params.context_lines;
        Worker {
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

    /// Whether there is room for one more match of this size.
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
        let matches = found.into_iter().flat_map(|Found { uri, lines, .. }| {
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

impl<'s> ParallelVisitorBuilder<'s> for &'s Shared<'_> {
    fn build(&mut self) -> Box<dyn ParallelVisitor + 's> {
        Box::new(self.worker())
    }
}

/// One thread of a search.
struct Worker<'s, 'a> {
    shared: &'s Shared<'a>,
    matcher: RegexMatcher,
    /// Keeps its buffers from file to file.
    searcher: Searcher,
    found: Vec<Found>,
}

impl ParallelVisitor for Worker<'_, '_> {
    fn visit(&mut self, entry: Result<DirEntry, ignore::Error>) -> WalkState {
        if self.shared.is_over() {
            return WalkState::Quit;
        }
        if let Ok(entry) = entry
            && entry.file_type().is_some_and(|kind| kind.is_file())
        {
            self.search(entry.into_path(), OFlags::NOFOLLOW);
        }
        WalkState::Continue
    }
}

impl Drop for Worker<'_, '_> {
    fn drop(&mut self) {
        self.shared.found.lock().append(&mut self.found);
    }
}

impl Worker<'_, '_> {
    fn search(&mut self, path: PathBuf, flags: OFlags) {
        // What was a file may be a pipe by now, and must not make the open wait.
        let flags = flags | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let Ok(file) = rustix::fs::open(&path, flags, Mode::empty()).map(File::from) else {
            return;
        };
        if !file.metadata().is_ok_and(|found| found.is_file()) {
            return;
        }
        self.shared.files.fetch_add(1, Ordering::Relaxed);
        let pending = Cell::new(false);
        let mut sink = Lines {
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
        let reader = Guarded {
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
            // Not the system's word: a line was too long to be held.
            self.shared.truncated.store(true, Ordering::Relaxed);
        }
        let (lines, uri) = (sink.lines, sink.uri);
        if !lines.is_empty()
            && let Some(uri) = uri
        {
            self.found.push(Found { path, uri, lines });
        }
    }
}

/// A file that seems to end as soon as no more of it is wanted.
struct Guarded<'s, 'a> {
    file: File,
    shared: &'s Shared<'a>,
    pending: &'s Cell<bool>,
}

impl Read for Guarded<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let shared = self.shared;
        if shared.is_cancelled() || (shared.full.load(Ordering::Relaxed) && !self.pending.get()) {
            return Ok(0);
        }
        self.file.read(buffer)
    }
}

/// Gathers the matches of one file.
struct Lines<'s, 'a> {
    shared: &'s Shared<'a>,
    matcher: &'s RegexMatcher,
    /// A match still waits for lines after it.
    pending: &'s Cell<bool>,
    path: &'s Path,
    /// Made for the first match only: most files have none.
    uri: Option<PathUri>,
    context: usize,
    lines: Vec<Line>,
    /// The first of `lines` that waits for lines after it.
    open: usize,
    /// The latest lines with their numbers, as many as the context.
    recent: VecDeque<(u64, String)>,
    /// No more matches are taken; only the lines after those that were.
    full: bool,
}

impl Lines<'_, '_> {
    /// Shows a line to the matches around it.
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

    /// The lines right before one.
    fn before(&self, number: u64) -> Vec<String> {
        let first = number.saturating_sub(self.context as u64);
        self.recent
            .iter()
            .filter(|(number, _)| *number >= first)
            .map(|(_, text)| text.clone())
            .collect()
    }

    /// Whether the file is to be read on.
    fn goes_on(&self) -> bool {
        !self.shared.is_cancelled() && (!self.full || self.pending.get())
    }
}

impl Sink for Lines<'_, '_> {
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
                self.lines.push(Line {
                    number,
                    column,
                    text,
                    before,
                    after: Vec::new(),
                });
                self.pending.set(self.context > 0);
                return Ok(self.goes_on());
            }
        }
        self.pass(number, text.text);
        Ok(self.goes_on())
    }

    fn context(&mut self, _: &Searcher, found: &SinkContext<'_>) -> io::Result<bool> {
        let text = shown(without_end(found.bytes()));
        self.pass(found.line_number().unwrap_or_default(), text.text);
        Ok(self.goes_on())
    }

    fn binary_data(&mut self, _: &Searcher, _: u64) -> io::Result<bool> {
        Ok(false)
    }

    fn finish(&mut self, _: &Searcher, finish: &SinkFinish) -> io::Result<()> {
        if finish.binary_byte_offset().is_some() {
            // What looked like text at first is not; it is as if it had not been looked into.
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

/// A line as it is shown: its beginning, with U+FFFD for bytes that are no text.
fn shown(line: &[u8]) -> Text {
    let cut = line.len() > MAX_SEARCH_TEXT_BYTES;
    let mut end = line.len().min(MAX_SEARCH_TEXT_BYTES);
    if cut {
        // Not in the middle of a character.
        let is_inside = |&byte: &u8| byte & 0xC0 == 0x80;
        while end > MAX_SEARCH_TEXT_BYTES - 4 && line.get(end).is_some_and(is_inside) {
            end -= 1;
        }
    }
    Text {
        text: String::from_utf8_lossy(&line[..end]).into_owned(),
        cut,
    }
}

#[cfg(test)]
mod tests;
