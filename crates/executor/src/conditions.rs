//! `process/waitFor`: wait for process exit, a regular expression, silence, a port or a terminal
//! read.
//!
//! Searches output as it arrives and schedules the inspection of `/proc`. Output is searched in the
//! order of the log and is not evicted before it was searched: a search applies backpressure to the
//! process as a consumer does, for as long as the search takes.
//!
//! A match may span any number of chunks. The latest [`MATCH_BYTES`] of each stream are kept for
//! that, so every match up to this length is found. A longer match is found if it lies within the
//! data that is searched together. A match that more output could change (because it ends at the
//! current end of the output) counts after a short time without further output: `$` is then the end
//! of the output.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use exec_server_protocol::process::{Condition, Evicted, Match, OutputStream, WaitForResult};
use regex_automata::Input;
use regex_automata::meta::Regex;
use regex_automata::util::syntax;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::patterns::{CACHE_BYTES, CompiledPattern, PatternError, PatternUse};
use crate::proc_inspect;
use crate::process::{OutputWatch, Process, blocking, sleep_until};
use crate::slots::{SharedSlots, SlotShare};

/// The longest match that is guaranteed to be found.
pub const MATCH_BYTES: usize = 16 * 1024;

/// Maximum number of conditions in one wait.
pub const MAX_CONDITIONS: usize = 16;

/// Maximum length of a regular expression.
pub const MAX_REGEX_BYTES: usize = 4096;

/// Maximum size of a compiled expression: enough for long alternatives and Unicode classes, and
/// small enough that the worst expression searches a batch within seconds, on a blocking thread.
const MAX_PROGRAM_BYTES: usize = 512 * 1024;

/// Maximum output searched in one call.
const BATCH_BYTES: usize = 256 * 1024;

/// Output searched in one step: a wait that has ended stops after the current step.
const STEP_BYTES: usize = 64 * 1024;

/// Concurrent searches of all waits. The cache of an expression exists once for each of them.
const SEARCHES: usize = 4;

static SEARCHING: LazyLock<SharedSlots> = LazyLock::new(|| SharedSlots::new(SEARCHES));

/// Bytes kept before the searched data, so that assertions can look behind: one character.
const CONTEXT_BYTES: usize = 4;

/// Time without output after which a match at the end of output counts, or after which a process
/// that was seen waiting for input is inspected again.
const SETTLE: Duration = Duration::from_millis(20);

/// Shortest and longest pause between two inspections of `/proc`.
const INSPECTION_PAUSES: (Duration, Duration) =
    (Duration::from_millis(5), Duration::from_millis(200));

/// Inspections may take at most 1/`INSPECTION_SHARE` of the time.
const INSPECTION_SHARE: u32 = 10;

/// Limits the threads that read `/proc` for all waits together.
static INSPECTION_SLOTS: Semaphore = Semaphore::const_new(2);

/// Maximum length of the match text in the result.
const MAX_MATCH_TEXT_BYTES: usize = 4096;

/// Reasons why conditions are rejected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConditionError {
    /// No condition, or too many.
    #[error("`any` must have 1 to {MAX_CONDITIONS} conditions, not {0}")]
    Count(usize),
    /// The expression is too long.
    #[error(
        "condition {index}: a regular expression may have {MAX_REGEX_BYTES} bytes, not {bytes}"
    )]
    TooLong {
        /// Index of the condition, from 0.
        index: usize,
        /// Length of the pattern in bytes.
        bytes: usize,
    },
    /// The expressions that are in use take too much memory.
    #[error(
        "condition {index}: the regular expressions of waits exceed the limit of {limit} bytes: end \
         other waits, or use shorter expressions"
    )]
    Memory {
        /// Index of the condition, from 0.
        index: usize,
        /// The limit.
        limit: usize,
    },
    /// The expression is invalid, or too large when compiled.
    #[error("condition {index}: {message}")]
    Regex {
        /// Index of the condition, from 0.
        index: usize,
        /// The error of the regex parser.
        message: String,
    },
}

/// Compiled conditions of one wait.
#[derive(Debug)]
pub struct Conditions {
    any: Vec<CompiledCondition>,
    slots: SlotShare,
}

#[derive(Debug)]
enum CompiledCondition {
    Exit,
    Regex(Box<OutputPattern>),
    Quiet(Duration),
    /// `None` matches any port.
    Port(Option<u16>),
    TtyRead,
}

#[derive(Debug)]
struct OutputPattern {
    used: PatternUse,
    stream: Option<OutputStream>,
}

impl Conditions {
    /// As [`Conditions::compile`], on a blocking thread if there are expressions: a large one takes
    /// milliseconds.
    ///
    /// # Errors
    ///
    /// As [`Conditions::compile`].
    pub async fn prepare(any: Vec<Condition>, owner: &Arc<str>) -> Result<Self, ConditionError> {
        if !any.iter().any(|one| matches!(one, Condition::Regex { .. })) {
            return Self::compile(&any, owner);
        }
        let (slot, owner) = (SEARCHING.share(owner).acquire().await, Arc::clone(owner));
        blocking(move || {
            let compiled = Self::compile(&any, &owner);
            drop(slot);
            compiled
        })
        .await
    }

    /// Checks and compiles the conditions. Their memory and their searches count for `owner`.
    ///
    /// # Errors
    ///
    /// When there are no conditions or too many, an expression is invalid or too large, or the
    /// expressions in use take too much memory.
    pub fn compile(any: &[Condition], owner: &Arc<str>) -> Result<Self, ConditionError> {
        if any.is_empty() || any.len() > MAX_CONDITIONS {
            return Err(ConditionError::Count(any.len()));
        }
        let compiled = any.iter().enumerate().map(|(index, condition)| {
            Ok(match condition {
                Condition::Exit => CompiledCondition::Exit,
                Condition::Regex { regex, stream } => {
                    CompiledCondition::Regex(Box::new(OutputPattern {
                        used: pattern(index, regex, owner)?,
                        stream: *stream,
                    }))
                }
                Condition::Quiet { quiet_ms } => {
                    CompiledCondition::Quiet(Duration::from_millis(*quiet_ms))
                }
                Condition::Port { port } => CompiledCondition::Port((*port != 0).then_some(*port)),
                Condition::TtyRead => CompiledCondition::TtyRead,
            })
        });
        Ok(Self {
            any: compiled.collect::<Result<_, _>>()?,
            slots: SEARCHING.share(owner),
        })
    }

    /// Waits until one of the conditions is met, the log is closed, or the deadline passes.
    ///
    /// Cancel safe.
    pub async fn wait(
        self,
        process: &Process,
        after_seq: u64,
        timeout: Option<Duration>,
    ) -> WaitForResult {
        let now = Instant::now();
        let searches = self
            .any
            .iter()
            .any(|one| matches!(one, CompiledCondition::Regex(_)));
        let needs_inspection = self.any.iter().any(CompiledCondition::needs_inspection);
        // A cursor beyond the end of the log means: only output from now on.
        let end = process.with_log(|log| log.next_seq() - 1);
        let cursor = after_seq.min(end);
        WaitProgress {
            process,
            watch: searches.then(|| process.watch(cursor)),
            search: Some(OutputSearch::new(self.any, searches)),
            slots: self.slots,
            cursor,
            evicted: None,
            active: now,
            tentative: None,
            look_at: needs_inspection.then_some(now),
            pause: INSPECTION_PAUSES.0,
            reader: None,
        }
        .run(timeout.and_then(|timeout| now.checked_add(timeout)))
        .await
    }
}

impl CompiledCondition {
    fn needs_inspection(&self) -> bool {
        matches!(self, Self::Port(_) | Self::TtyRead)
    }
}

fn pattern(index: usize, regex: &str, owner: &Arc<str>) -> Result<PatternUse, ConditionError> {
    PatternUse::new(owner, regex, || compiled(index, regex)).map_err(|error| match error {
        PatternError::Compile(error) => error,
        PatternError::TooMuch(limit) => ConditionError::Memory { index, limit },
    })
}

fn compiled(index: usize, regex: &str) -> Result<CompiledPattern, ConditionError> {
    if regex.len() > MAX_REGEX_BYTES {
        let bytes = regex.len();
        return Err(ConditionError::TooLong { index, bytes });
    }
    let wrong = |message: String| ConditionError::Regex { index, message };
    // Output is bytes: an expression may match bytes that are not UTF-8.
    let syntax = syntax::Config::new().utf8(false).nest_limit(64);
    let parsed = syntax::parse_with(regex, &syntax).map_err(|error| wrong(error.to_string()))?;
    let properties = parsed.properties();
    let is_literal = properties.is_literal();
    let is_definite = properties.look_set().is_empty()
        && properties.maximum_len().is_some()
        && properties.maximum_len() == properties.minimum_len();
    let config = Regex::config()
        .utf8_empty(false)
        .nfa_size_limit(Some(MAX_PROGRAM_BYTES))
        .onepass_size_limit(Some(MAX_PROGRAM_BYTES))
        .hybrid_cache_capacity(CACHE_BYTES);
    let mut builder = Regex::builder();
    let regex = builder
        .configure(config)
        .build_from_hir(&parsed)
        .map_err(|error| match error.size_limit() {
            Some(limit) => wrong(format!("takes more than {limit} bytes when compiled")),
            None => wrong(error.to_string()),
        })?;
    Ok(CompiledPattern {
        regex,
        is_definite,
        is_literal,
    })
}

/// State of one wait.
struct WaitProgress<'a> {
    process: &'a Process,
    /// Prevents eviction of output that was not searched yet.
    watch: Option<OutputWatch>,
    /// The search; `None` while a blocking thread uses it.
    search: Option<OutputSearch>,
    /// Limits the concurrent searches of the client.
    slots: SlotShare,
    /// Sequence number of the last searched entry.
    cursor: u64,
    evicted: Option<Evicted>,
    /// Time of the latest output.
    active: Instant,
    /// A match that more output may still change.
    tentative: Option<(usize, Match)>,
    /// Time of the next inspection of `/proc`.
    look_at: Option<Instant>,
    pause: Duration,
    /// The process that was seen waiting for input, and the next sequence number at that time.
    reader: Option<(i32, u64)>,
}

impl WaitProgress<'_> {
    async fn run(mut self, deadline: Option<Instant>) -> WaitForResult {
        loop {
            let changed = self.process.changed();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(result) = self.search_more().await {
                return result;
            }
            let (exited, closed, next) = self.process.with_log(|log| {
                let (exit, close) = (log.exit().is_some(), log.close().is_some());
                (exit, close, log.next_seq())
            });
            if next != self.cursor + 1 {
                // More output arrived during the search; it must be searched before later events
                // are reported.
                continue;
            }
            if closed && let Some((index, found)) = self.tentative.take() {
                return self.fired(index, |result| result.found = Some(found));
            }
            if exited && let Some(index) = self.index(|one| matches!(one, CompiledCondition::Exit))
            {
                return self.fired(index, |_| {});
            }
            if closed {
                return self.result(|_| {});
            }
            let now = Instant::now();
            if let Some((index, found)) = self.tentative.take_if(|_| now >= self.active + SETTLE) {
                return self.fired(index, |result| result.found = Some(found));
            }
            let silence = now - self.active;
            let quiet = |one: &CompiledCondition| matches!(one, CompiledCondition::Quiet(time) if *time <= silence);
            if let Some(index) = self.index(quiet) {
                return self.fired(index, |_| {});
            }
            if self.look_at.is_some_and(|at| now >= at)
                && let Some(result) = self.check_conditions().await
            {
                return result;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return self.result(|result| result.wait_timed_out = true);
            }
            let next = self.next_check(deadline);
            tokio::select! {
                () = changed => {}
                () = sleep_until(next) => {}
            }
        }
    }

    /// Time of the next step if no output arrives.
    fn next_check(&self, deadline: Option<Instant>) -> Option<Instant> {
        let quiet = self.conditions().iter().filter_map(|one| match one {
            CompiledCondition::Quiet(time) => self.active.checked_add(*time),
            _ => None,
        });
        let settled = self.tentative.is_some().then(|| self.active + SETTLE);
        let moments = [deadline, settled, self.look_at];
        quiet.chain(moments.into_iter().flatten()).min()
    }

    /// Searches all new output.
    async fn search_more(&mut self) -> Option<WaitForResult> {
        loop {
            let cursor = self.cursor;
            let (slice, end) = self.process.with_log(|log| {
                let slice = log.read(cursor, Some(BATCH_BYTES));
                (slice, log.next_seq() - 1)
            });
            if let Some(lost) = slice.lost {
                let told = self.evicted.map_or(0, |evicted| evicted.bytes);
                self.evicted = Some(Evicted {
                    through_seq: lost.through_seq,
                    bytes: told + lost.bytes,
                });
            }
            let Some(&(last, ..)) = slice.chunks.last() else {
                // The only new entries are the process exit or the end of the log.
                self.cursor = end;
                return None;
            };
            self.active = Instant::now();
            // Recent output often announces the awaited event, so inspect sooner.
            self.pause = INSPECTION_PAUSES.0;
            if let Some(at) = &mut self.look_at {
                *at = (*at).min(self.active + self.pause);
            }
            let found = self.search(slice.chunks).await;
            self.cursor = last;
            if let Some(watch) = &self.watch {
                watch.advance(last);
            }
            match found {
                OutputMatch::Nothing => self.tentative = None,
                OutputMatch::Tentative(index, found) => self.tentative = Some((index, found)),
                OutputMatch::Definite(index, found) => {
                    // The caller may want the output after the match.
                    self.cursor = found.seq;
                    return Some(self.fired(index, |result| result.found = Some(found)));
                }
            }
            tokio::task::coop::consume_budget().await;
        }
    }

    /// Runs the search on a blocking thread: an expression may be slow, and async workers serve
    /// other connections.
    async fn search(&mut self, chunks: Vec<(u64, OutputStream, Bytes)>) -> OutputMatch {
        let Some(mut search) = self.search.take() else {
            return OutputMatch::Nothing;
        };
        if !search.searches {
            self.search = Some(search);
            return OutputMatch::Nothing;
        }
        let slot = self.slots.acquire().await;
        // Dropped with this future: the thread stops soon after the wait has ended.
        let ended = SearchEnd::default();
        let is_ended = Arc::clone(&ended.0);
        let (search, found) = blocking(move || {
            let found = search.feed_in_steps(&chunks, &is_ended);
            drop(slot);
            (search, found)
        })
        .await;
        self.search = Some(search);
        found
    }

    /// Inspects the process and its descendants.
    async fn check_conditions(&mut self) -> Option<WaitForResult> {
        let began = Instant::now();
        let process = self.process;
        let ports: Vec<(usize, Option<u16>)> = self
            .conditions()
            .iter()
            .enumerate()
            .filter_map(|(index, one)| match one {
                CompiledCondition::Port(port) => Some((index, *port)),
                _ => None,
            })
            .collect();
        let tty = self.index(|one| matches!(one, CompiledCondition::TtyRead));
        let members = process.members().await;
        // This semaphore is never closed.
        let permit = INSPECTION_SLOTS.acquire().await;
        let (port, reader) = blocking(move || {
            let port = ports.into_iter().find_map(|(index, wanted)| {
                proc_inspect::listens(&members, wanted).map(|(pid, port)| (index, pid, port))
            });
            let reader = tty.and_then(|_| proc_inspect::reads_terminal(&members));
            (port, reader)
        })
        .await;
        drop(permit);
        if let Some((index, pid, port)) = port {
            return Some(self.fired(index, |result| {
                result.pid = Some(pid);
                result.port = Some(port);
            }));
        }
        let next_seq = self.process.with_log(|log| log.next_seq());
        if let (Some(index), Some(pid)) = (tty, reader) {
            // The process was seen waiting twice without output in between: all its earlier output
            // is in the log now.
            if self.reader == Some((pid, next_seq)) && next_seq == self.cursor + 1 {
                return Some(self.fired(index, |result| result.pid = Some(pid)));
            }
            self.reader = Some((pid, next_seq));
            self.look_at = Some(Instant::now() + SETTLE);
            return None;
        }
        self.reader = None;
        let pause = self.pause.max(began.elapsed() * INSPECTION_SHARE);
        self.look_at = Some(Instant::now() + pause);
        self.pause = (self.pause * 2).min(INSPECTION_PAUSES.1);
        None
    }

    fn conditions(&self) -> &[CompiledCondition] {
        self.search.as_ref().map_or(&[], |search| &search.any)
    }

    fn index(&self, is: impl Fn(&CompiledCondition) -> bool) -> Option<usize> {
        self.conditions().iter().position(is)
    }

    fn fired(&self, index: usize, add: impl FnOnce(&mut WaitForResult)) -> WaitForResult {
        self.result(|result| {
            result.fired = Some(index);
            add(result);
        })
    }

    fn result(&self, add: impl FnOnce(&mut WaitForResult)) -> WaitForResult {
        let mut result = self.process.with_log(|log| WaitForResult {
            cursor: self.cursor,
            exited: log.exit().is_some(),
            exit_code: log.exit().map(|exit| exit.code),
            closed: log.close().is_some(),
            evicted: self.evicted,
            ..WaitForResult::default()
        });
        add(&mut result);
        result
    }
}

/// Ends the search on a blocking thread when it is dropped.
#[derive(Debug, Default)]
struct SearchEnd(Arc<AtomicBool>);

impl Drop for SearchEnd {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Result of a search of new output.
#[derive(Debug, PartialEq, Eq)]
enum OutputMatch {
    Nothing,
    /// The match ends at the end of the output; more output could change it.
    Tentative(usize, Match),
    Definite(usize, Match),
}

/// Latest output of each stream and the expressions to search for.
#[derive(Debug)]
struct OutputSearch {
    any: Vec<CompiledCondition>,
    searches: bool,
    windows: [StreamWindow; 3],
}

/// Latest output of one stream.
#[derive(Debug, Default)]
struct StreamWindow {
    bytes: Vec<u8>,
    /// Where the search begins; bytes before it are only context for look-behind assertions.
    start: usize,
    /// End offset and sequence number of each chunk.
    ends: Vec<(usize, u64)>,
}

const STREAMS: [OutputStream; 3] = [
    OutputStream::Stdout,
    OutputStream::Stderr,
    OutputStream::Pty,
];

impl OutputSearch {
    fn new(any: Vec<CompiledCondition>, searches: bool) -> Self {
        Self {
            any,
            searches,
            windows: Default::default(),
        }
    }

    /// Searches new output step by step, until the wait has ended.
    fn feed_in_steps(
        &mut self,
        chunks: &[(u64, OutputStream, Bytes)],
        is_ended: &AtomicBool,
    ) -> OutputMatch {
        let mut result = OutputMatch::Nothing;
        let (mut step, mut bytes) = (Vec::new(), 0);
        let parts = chunks.iter().flat_map(|(seq, stream, data)| {
            let starts = (0..data.len()).step_by(STEP_BYTES);
            starts.map(|start| {
                let end = data.len().min(start + STEP_BYTES);
                (*seq, *stream, data.slice(start..end))
            })
        });
        let mut parts = parts.peekable();
        while let Some(part) = parts.next() {
            bytes += part.2.len();
            step.push(part);
            let next = parts.peek().map_or(STEP_BYTES, |(.., data)| data.len());
            if bytes + next <= STEP_BYTES && parts.peek().is_some() {
                continue;
            }
            if is_ended.load(Ordering::Relaxed) {
                return OutputMatch::Nothing;
            }
            result = match (self.feed(&step), result) {
                // Output of other streams does not change a match.
                (OutputMatch::Nothing, OutputMatch::Tentative(index, found))
                    if step.iter().all(|(_, stream, _)| *stream != found.stream) =>
                {
                    OutputMatch::Tentative(index, found)
                }
                (found @ OutputMatch::Definite(..), _) => return found,
                (found, _) => found,
            };
            step.clear();
            bytes = 0;
        }
        result
    }

    /// Searches new output together with the output just before it.
    ///
    /// Of several matches, the one that ends first counts; among equals, the one of the earlier
    /// condition.
    fn feed(&mut self, chunks: &[(u64, OutputStream, Bytes)]) -> OutputMatch {
        let mut best: Option<(u64, usize, bool, Match)> = None;
        for (stream, window) in STREAMS.into_iter().zip(&mut self.windows) {
            let mut is_new = false;
            for (seq, from, bytes) in chunks {
                if *from == stream {
                    is_new = true;
                    window.bytes.extend_from_slice(bytes);
                    window.ends.push((window.bytes.len(), *seq));
                }
            }
            if !is_new {
                continue;
            }
            for (index, one) in self.any.iter().enumerate() {
                let CompiledCondition::Regex(pattern) = one else {
                    continue;
                };
                if pattern.stream.is_some_and(|wanted| wanted != stream) {
                    continue;
                }
                let compiled = pattern.used.pattern();
                let Some((seq, at_end, text)) = window.find(&compiled.regex) else {
                    continue;
                };
                let definite = compiled.is_definite || !at_end;
                let found = Match { seq, stream, text };
                let better = best.as_ref().is_none_or(|(other, at, was_definite, _)| {
                    (!was_definite, *other, *at) > (!definite, seq, index)
                });
                if better {
                    best = Some((seq, index, definite, found));
                }
            }
            window.trim();
        }
        match best {
            None => OutputMatch::Nothing,
            Some((_, index, true, found)) => OutputMatch::Definite(index, found),
            Some((_, index, false, found)) => OutputMatch::Tentative(index, found),
        }
    }
}

impl StreamWindow {
    /// The first match: the sequence number of the chunk where it ends, whether it ends at the end
    /// of the data, and its text.
    fn find(&self, regex: &Regex) -> Option<(u64, bool, String)> {
        let found = regex.find(Input::new(&self.bytes).range(self.start..))?;
        let (seq, at_end) = match self.ends.iter().find(|(end, _)| *end >= found.end()) {
            Some((_, seq)) => (*seq, found.end() == self.bytes.len()),
            None => return None,
        };
        let told =
            &self.bytes[found.start()..found.end().min(found.start() + MAX_MATCH_TEXT_BYTES)];
        let text = String::from_utf8_lossy(told).into_owned();
        Some((seq, at_end, text))
    }

    /// Drops data in which no future match can begin.
    fn trim(&mut self) {
        let begin = self.bytes.len().saturating_sub(MATCH_BYTES);
        let gone = begin.saturating_sub(CONTEXT_BYTES);
        self.bytes.drain(..gone);
        self.start = begin - gone;
        for (end, _) in &mut self.ends {
            *end = end.saturating_sub(gone);
        }
        // A match never ends in a chunk that was dropped completely.
        let first = self.ends.partition_point(|(end, _)| *end <= self.start);
        let first = first.min(self.ends.len().saturating_sub(1));
        self.ends.drain(..first);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn search(regexes: &[&str]) -> OutputSearch {
        let any: Vec<Condition> = regexes
            .iter()
            .map(|regex| Condition::Regex {
                regex: (*regex).to_owned(),
                stream: None,
            })
            .collect();
        OutputSearch::new(Conditions::compile(&any, &owner()).unwrap().any, true)
    }

    fn owner() -> Arc<str> {
        "test".into()
    }

    fn feed(search: &mut OutputSearch, seq: u64, text: &[u8]) -> OutputMatch {
        search.feed(&[(seq, OutputStream::Stdout, Bytes::copy_from_slice(text))])
    }

    fn found(seq: u64, text: &str) -> Match {
        Match {
            seq,
            stream: OutputStream::Stdout,
            text: text.to_owned(),
        }
    }

    #[test]
    fn match_across_chunks_is_found() {
        let mut search = search(&["listening on [0-9]+\n"]);
        assert_eq!(
            feed(&mut search, 1, b"starting\nlist"),
            OutputMatch::Nothing
        );
        assert_eq!(feed(&mut search, 2, b"ening on 80"), OutputMatch::Nothing);
        let text = "listening on 8080\n";
        let expected = OutputMatch::Tentative(0, found(3, text));
        assert_eq!(feed(&mut search, 3, b"80\n"), expected);
    }

    #[test]
    fn match_that_can_grow_waits_for_more_output() {
        let mut search = search(&["port [0-9]+", "READY"]);
        let grows = OutputMatch::Tentative(0, found(1, "port 80"));
        assert_eq!(feed(&mut search, 1, b"port 80"), grows);
        let grown = OutputMatch::Definite(0, found(2, "port 8080"));
        assert_eq!(feed(&mut search, 2, b"80 "), grown);
        let ready = OutputMatch::Definite(1, found(3, "READY"));
        // The first match is still in the window; the match that ends first counts.
        assert_eq!(
            feed(&mut search, 3, b"READY"),
            OutputMatch::Definite(0, found(2, "port 8080"))
        );
        let mut other = self::search(&["READY"]);
        let OutputMatch::Definite(_, expected) = ready else {
            unreachable!()
        };
        assert_eq!(
            feed(&mut other, 3, b"READY"),
            OutputMatch::Definite(0, expected)
        );
    }

    #[test]
    fn assertions_see_the_bytes_before_the_window() {
        let mut search = search(&[r"(?m)^ready", r"\bgo\b"]);
        let filler = vec![b'x'; MATCH_BYTES * 2];
        assert_eq!(feed(&mut search, 1, &filler), OutputMatch::Nothing);
        // The start of the search window is not the start of a line or a word.
        assert_eq!(
            feed(&mut search, 2, b"ready go-"),
            OutputMatch::Definite(1, found(2, "go"))
        );
        let mut search = self::search(&[r"(?m)^ready"]);
        feed(&mut search, 1, &filler);
        assert_eq!(feed(&mut search, 2, b"ready"), OutputMatch::Nothing);
        let expected = OutputMatch::Tentative(0, found(3, "ready"));
        assert_eq!(feed(&mut search, 3, b"\nready"), expected);
        let mut search = self::search(&[r"\Aready"]);
        feed(&mut search, 1, &filler);
        assert_eq!(feed(&mut search, 2, b"ready"), OutputMatch::Nothing);
    }

    #[test]
    fn streams_are_searched_separately() {
        let mut search = search(&["ab"]);
        let chunk = |seq, stream, text| (seq, stream, Bytes::from_static(text));
        let mixed = [
            chunk(1, OutputStream::Stdout, b"a"),
            chunk(2, OutputStream::Stderr, b"b"),
        ];
        assert_eq!(search.feed(&mixed), OutputMatch::Nothing);
        let rest = [chunk(3, OutputStream::Stdout, b"b")];
        assert_eq!(search.feed(&rest), OutputMatch::Definite(0, found(3, "ab")));
    }

    #[test]
    fn long_output_is_searched_in_steps_until_the_wait_ends() {
        let mut text = vec![b'x'; STEP_BYTES * 3];
        text.extend_from_slice(b"go");
        let early = (1, OutputStream::Stderr, Bytes::from_static(b"port 80"));
        let chunks = [early, (2, OutputStream::Stdout, Bytes::from(text))];
        let is_ended = AtomicBool::new(false);
        let steps = |search: &mut OutputSearch| search.feed_in_steps(&chunks, &is_ended);
        let expected = OutputMatch::Definite(0, found(2, "go"));
        assert_eq!(steps(&mut search(&["go"])), expected);
        // A match of another stream stays.
        let tentative = steps(&mut search(&["port [0-9]+"]));
        assert!(
            matches!(tentative, OutputMatch::Tentative(0, _)),
            "{tentative:?}"
        );
        is_ended.store(true, Ordering::Relaxed);
        assert_eq!(steps(&mut search(&["go"])), OutputMatch::Nothing);
    }

    #[test]
    fn invalid_utf8_is_searched() {
        let mut search = search(&[r"(?-u:\xff)\x00"]);
        let OutputMatch::Definite(0, found) = feed(&mut search, 1, b"a\xff\0b") else {
            panic!("not found")
        };
        assert_eq!(found.text, "\u{FFFD}\0");
    }

    #[test]
    fn search_window_is_bounded() {
        let mut search = search(&["never"]);
        for seq in 1..2000 {
            feed(&mut search, seq, &[b'x'; 1000]);
        }
        let window = &search.windows[0];
        assert!(window.bytes.len() <= MATCH_BYTES + CONTEXT_BYTES);
        assert!(window.ends.len() <= MATCH_BYTES / 1000 + 2);
    }

    #[test]
    fn invalid_conditions_are_rejected() {
        let compile = |regex: &str| {
            let regex = regex.to_owned();
            let stream = None;
            Conditions::compile(
                &[Condition::Exit, Condition::Regex { regex, stream }],
                &owner(),
            )
            .map(drop)
            .unwrap_err()
            .to_string()
        };
        assert!(compile("(").contains("condition 1: "), "{}", compile("("));
        let large = compile(r"(\w{500}){500}");
        assert!(large.contains("bytes when compiled"), "{large}");
        assert!(compile(&"x".repeat(5000)).contains("4096 bytes, not 5000"));
        assert!(compile(&"(".repeat(100)).starts_with("condition 1: "));
        let none = Conditions::compile(&[], &owner()).unwrap_err().to_string();
        assert!(none.contains("1 to 16 conditions, not 0"), "{none}");
        assert!(Conditions::compile(&vec![Condition::Exit; 17], &owner()).is_err());
    }

    proptest! {
        /// A search of output in chunks finds the same first match as a search of the whole output.
        #[test]
        fn chunked_search_equals_whole_search(
            text in "[abc\n]{0,60}",
            cuts in proptest::collection::vec(1usize..10, 0..20),
            regex in prop::sample::select(vec![
                "abc", "a+b", "(?m)^b", "(?m)c$", "ab|ca", r"\ba", "c{2,3}", "a[^a]*a",
            ]),
        ) {
            let all = text.as_bytes();
            let compiled = pattern(0, regex, &owner()).unwrap();
            let whole = compiled.pattern().regex.find(all);
            let mut search = search(&[regex]);
            let (mut at, mut seq, mut last) = (0, 0, OutputMatch::Nothing);
            for cut in cuts.into_iter().chain([all.len().max(1)]) {
                let end = (at + cut).min(all.len());
                if at == end {
                    break;
                }
                seq += 1;
                last = feed(&mut search, seq, &all[at..end]);
                at = end;
                if matches!(last, OutputMatch::Definite(..)) {
                    break;
                }
            }
            match (whole, last) {
                (None, OutputMatch::Nothing) => {}
                (Some(whole), OutputMatch::Definite(_, found) | OutputMatch::Tentative(_, found)) => {
                    let expected = String::from_utf8_lossy(&all[whole.range()]).into_owned();
                    prop_assert_eq!(found.text, expected);
                }
                (whole, last) => prop_assert!(false, "{:?} but {:?}", whole, last),
            }
        }
    }
}
