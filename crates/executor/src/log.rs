//! Retained output of one process.
//!
//! Holds the bytes, their sequence numbers, the eviction budget and the sizes of evicted output.
//! Does not depend on sessions, JSON, or the identity of readers.
//!
//! ```text
//!  seq  1 … 40      41 … 57                 58 …
//!      evicted │ retained, newest first │ future
//!              └ what `read` can return       └ next_seq
//! ```
//!
//! Each stream also keeps its own head and tail for snapshots; the bytes are shared.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use exec_server_protocol::limits;
pub use exec_server_protocol::process::OutputStream;
use exec_server_protocol::sandbox::Denial;

use exec_server_sys::memory;

/// 4 KiB: approximate memory of one ended process besides its output (record, task and queues).
const RECORD_BYTES: usize = 4 << 10;

/// Limits of the output that one process retains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Bytes kept for reading, newest first; also the bytes kept of each stream for snapshots, half
    /// head and half tail.
    pub bytes: usize,
    /// Maximum number of chunks kept for reading: many tiny chunks cost more memory than their
    /// bytes.
    pub chunks: usize,
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            bytes: 1 << 20,
            chunks: 50_000,
        }
    }
}

/// Number of evicted entries whose sizes are remembered, so that a slow reader learns exactly how
/// many bytes it missed. Four bytes each.
const EVICTED_INDEX: usize = limits::EVICTED_SIZES as usize;

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exit {
    /// Exit status, or 128 + N for a death by signal N; -1 if unknown.
    pub code: i32,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Whether the process was killed because its timeout expired.
    pub timed_out: bool,
    /// CPU time in user mode, in microseconds.
    pub user_micros: u64,
    /// CPU time in the kernel, in microseconds.
    pub system_micros: u64,
    /// Peak resident memory of its largest process.
    pub max_rss_bytes: u64,
    /// Accesses that its sandbox denied, if they were relevant to its failure.
    pub denials: Option<Vec<Denial>>,
}

/// End of a log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogEnd {
    /// A descendant still holds the output open.
    pub inherited_output: bool,
    /// Output that arrived too late to be retained, in bytes.
    pub discarded_bytes: u64,
    /// Descendants that still ran, with their command lines, if the process was started with
    /// [`ProcessSpec::list_descendants`](crate::ProcessSpec::list_descendants).
    pub descendants: Vec<(i32, String)>,
}

/// Content of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogEntryKind {
    /// Output arrived.
    Output(OutputStream, Bytes),
    /// The process ended.
    Exited(Exit),
    /// No more entries follow.
    Closed(LogEnd),
}

/// One entry with its sequence number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogEntry {
    /// Sequence number, from 1 without gaps.
    pub seq: u64,
    /// The content.
    pub kind: LogEntryKind,
    /// Bytes of output before this entry, including evicted ones.
    before: u64,
}

impl LogEntry {
    fn len(&self) -> usize {
        match &self.kind {
            LogEntryKind::Output(_, bytes) => bytes.len(),
            _ => 0,
        }
    }
}

/// Output that a reader has missed because it was evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MissedOutput {
    /// Entries up to this number were evicted.
    pub through_seq: u64,
    /// Number of their bytes after the reader's cursor. For a reader that is more than
    /// [`limits::EVICTED_SIZES`] entries behind: the number of their bytes from the beginning.
    pub bytes: u64,
}

/// Result of a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSlice {
    /// Output after the cursor, in order.
    pub chunks: Vec<(u64, OutputStream, Bytes)>,
    /// Sequence number at which to continue.
    pub next_seq: u64,
    /// Output missing between the cursor and the first chunk.
    pub lost: Option<MissedOutput>,
}

/// Head and tail of one stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StreamExcerpt {
    /// The head, followed by the tail.
    pub bytes: Vec<u8>,
    /// Length of the head in bytes.
    pub head: u64,
    /// Number of bytes omitted between head and tail.
    pub omitted: u64,
}

/// Counter of the output that many logs retain and evict; clones share one count.
#[derive(Debug, Clone, Default)]
pub struct OutputMeter(Arc<OutputCounts>);

#[derive(Debug, Default)]
struct OutputCounts {
    retained: AtomicU64,
    evicted: AtomicU64,
}

impl OutputMeter {
    /// Bytes retained now.
    pub fn bytes(&self) -> u64 {
        self.0.retained.load(Ordering::Relaxed)
    }

    /// Total bytes evicted so far.
    pub fn evicted(&self) -> u64 {
        self.0.evicted.load(Ordering::Relaxed)
    }
}

/// Bytes that one log retains, as part of a shared count.
#[derive(Debug)]
struct RetainedBytes {
    bytes: usize,
    meter: OutputMeter,
}

impl RetainedBytes {
    fn add(&mut self, bytes: usize) {
        self.bytes += bytes;
        let counts = &self.meter.0;
        counts.retained.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn evict(&mut self, bytes: usize) {
        self.bytes -= bytes;
        let counts = &self.meter.0;
        counts.retained.fetch_sub(bytes as u64, Ordering::Relaxed);
        counts.evicted.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl Drop for RetainedBytes {
    fn drop(&mut self) {
        let counts = &self.meter.0;
        counts
            .retained
            .fetch_sub(self.bytes as u64, Ordering::Relaxed);
        memory::freed(self.bytes + RECORD_BYTES);
    }
}

/// The log of one process.
#[derive(Debug)]
pub struct Log {
    retention: Retention,
    entries: VecDeque<LogEntry>,
    /// Bytes in `entries`.
    retained: RetainedBytes,
    next_seq: u64,
    /// Total bytes appended.
    total: u64,
    /// Sizes of the newest evicted entries, oldest first.
    evicted: VecDeque<u32>,
    exit: Option<Exit>,
    close: Option<LogEnd>,
    streams: [HeadAndTail; 3],
    /// Bytes taken by the consumer that applies backpressure; `None`: there is no such consumer.
    held: Option<u64>,
    /// Bytes taken by each search of the output, by watcher id.
    watchers: BTreeMap<u64, u64>,
    next_watcher: u64,
}

impl Log {
    /// Creates an empty log.
    pub fn new(retention: Retention) -> Self {
        Self::metered(retention, OutputMeter::default())
    }

    /// Creates an empty log that shares a counter with other logs.
    pub fn metered(retention: Retention, meter: OutputMeter) -> Self {
        Self {
            retention,
            entries: VecDeque::new(),
            retained: RetainedBytes { bytes: 0, meter },
            next_seq: 1,
            total: 0,
            evicted: VecDeque::new(),
            exit: None,
            close: None,
            streams: Default::default(),
            held: None,
            watchers: BTreeMap::new(),
            next_watcher: 0,
        }
    }

    /// Sequence number of the next entry.
    pub fn next_seq(&self) -> u64 {
        self.next_seq
    }

    /// The exit of the process, once it has ended.
    pub fn exit(&self) -> Option<&Exit> {
        self.exit.as_ref()
    }

    /// The close of the log, once it is closed.
    pub fn close(&self) -> Option<&LogEnd> {
        self.close.as_ref()
    }

    /// Retained output, oldest first.
    pub fn retained(&self) -> impl Iterator<Item = &[u8]> {
        self.entries.iter().filter_map(|entry| match &entry.kind {
            LogEntryKind::Output(_, bytes) => Some(&bytes[..]),
            _ => None,
        })
    }

    /// Bytes of retained output.
    pub fn retained_bytes(&self) -> u64 {
        self.retained.bytes as u64
    }

    /// Bytes of evicted output.
    pub fn evicted_bytes(&self) -> u64 {
        self.total - self.retained.bytes as u64
    }

    /// Appends output.
    pub fn output(&mut self, stream: OutputStream, bytes: Bytes) {
        debug_assert!(self.close.is_none(), "output after close");
        self.streams[index(stream)].push(&bytes, self.retention.bytes / 2);
        self.append(LogEntryKind::Output(stream, bytes));
        self.trim();
    }

    /// Evicts what exceeds the budget, except output that a consumer with backpressure has not
    /// taken.
    fn trim(&mut self) {
        let needed = self.needed();
        while (self.retained.bytes > self.retention.bytes
            || self.entries.len() > self.retention.chunks)
            && let Some(front) = self.entries.front()
            && needed.is_none_or(|needed| front.before + front.len() as u64 <= needed)
        {
            self.evict();
        }
    }

    /// Appends the exit of the process.
    pub fn exited(&mut self, exit: Exit) {
        debug_assert!(self.exit.is_none(), "exited twice");
        self.exit = Some(exit.clone());
        self.append(LogEntryKind::Exited(exit));
    }

    /// Appends the close of the log.
    pub fn closed(&mut self, close: LogEnd) {
        debug_assert!(self.close.is_none(), "closed twice");
        self.close = Some(close.clone());
        self.append(LogEntryKind::Closed(close));
    }

    fn append(&mut self, kind: LogEntryKind) {
        let entry = LogEntry {
            seq: self.next_seq,
            kind,
            before: self.total,
        };
        self.next_seq += 1;
        self.total += entry.len() as u64;
        self.retained.add(entry.len());
        self.entries.push_back(entry);
    }

    fn evict(&mut self) {
        let Some(entry) = self.entries.pop_front() else {
            return;
        };
        self.retained.evict(entry.len());
        if self.evicted.len() == EVICTED_INDEX {
            self.evicted.pop_front();
        }
        // A chunk is bounded by MAX_CHUNK_BYTES, far below 4 GiB.
        self.evicted.push_back(entry.len() as u32);
    }

    /// Sequence number of the oldest retained entry.
    fn first_seq(&self) -> u64 {
        self.next_seq - self.entries.len() as u64
    }

    /// The first retained entry after `cursor`.
    pub fn entry_after(&self, cursor: u64) -> Option<&LogEntry> {
        let first = self.first_seq();
        let index = cursor.saturating_add(1).saturating_sub(first);
        usize::try_from(index)
            .ok()
            .and_then(|index| self.entries.get(index))
    }

    /// Whether there is retained output after `cursor`.
    pub fn has_output_after(&self, cursor: u64) -> bool {
        let from = cursor.saturating_add(1).saturating_sub(self.first_seq());
        let from = usize::try_from(from)
            .unwrap_or(usize::MAX)
            .min(self.entries.len());
        // The only other entries are the exit and the close, so this examines at most three.
        let mut after = self.entries.range(from..);
        after.any(|entry| matches!(entry.kind, LogEntryKind::Output(..)))
    }

    /// Retained output after `cursor`.
    ///
    /// With `max_bytes` the slice ends before a chunk that would exceed it, but contains at least
    /// one chunk. `next_seq` is the number after the last chunk returned.
    pub fn read(&self, cursor: u64, max_bytes: Option<usize>) -> LogSlice {
        let mut chunks = Vec::new();
        let mut bytes = 0;
        let from = (cursor.saturating_add(1)).saturating_sub(self.first_seq());
        let from = usize::try_from(from)
            .unwrap_or(usize::MAX)
            .min(self.entries.len());
        for entry in self.entries.range(from..) {
            let LogEntryKind::Output(stream, data) = &entry.kind else {
                continue;
            };
            if max_bytes.is_some_and(|max| !chunks.is_empty() && bytes + data.len() > max) {
                break;
            }
            bytes += data.len();
            chunks.push((entry.seq, *stream, data.clone()));
        }
        let next_seq = match (max_bytes, chunks.last()) {
            (Some(_), Some((seq, ..))) => seq + 1,
            _ => self.next_seq,
        };
        LogSlice {
            chunks,
            next_seq,
            lost: self.lost_after(cursor),
        }
    }

    /// Bytes of the retained output after `cursor`, and the number of its entries.
    pub fn size_after(&self, cursor: u64) -> (usize, usize) {
        let from = (cursor.saturating_add(1)).saturating_sub(self.first_seq());
        let from = usize::try_from(from).unwrap_or(usize::MAX);
        let Some(first) = self.entries.get(from) else {
            return (0, 0);
        };
        let bytes = usize::try_from(self.total - first.before).unwrap_or(usize::MAX);
        (bytes, self.entries.len() - from)
    }

    /// Bytes of [`cut`](Self::cut) of all streams.
    pub fn cut_bytes(&self, max_bytes: Option<u64>) -> usize {
        let most = max_bytes.map_or(usize::MAX, |max| usize::try_from(max).unwrap_or(usize::MAX));
        let kept = |stream: &HeadAndTail| (stream.head_bytes + stream.tail_bytes).min(most);
        self.streams.iter().map(kept).sum()
    }

    /// The evicted part of the output after `cursor`.
    pub fn lost_after(&self, cursor: u64) -> Option<MissedOutput> {
        let through_seq = self.first_seq() - 1;
        if cursor >= through_seq {
            return None;
        }
        let bytes = if cursor == 0 {
            self.evicted_bytes()
        } else {
            let count = usize::try_from(through_seq - cursor).unwrap_or(usize::MAX);
            if count > self.evicted.len() {
                self.evicted_bytes()
            } else {
                self.evicted
                    .iter()
                    .rev()
                    .take(count)
                    .map(|&size| u64::from(size))
                    .sum()
            }
        };
        // Entries without bytes (the exit) are not a loss of output.
        (bytes > 0).then_some(MissedOutput { through_seq, bytes })
    }

    /// Head and tail of a stream, at most `max_bytes` together.
    pub fn cut(&self, stream: OutputStream, max_bytes: Option<u64>) -> StreamExcerpt {
        let budget = max_bytes.map_or(usize::MAX, |max| usize::try_from(max).unwrap_or(usize::MAX));
        self.streams[index(stream)].cut(budget.min(self.retention.bytes))
    }

    /// A consumer at `cursor` (usually the latest number) starts to apply backpressure.
    pub fn hold(&mut self, cursor: u64) {
        self.held = Some(self.bytes_through(cursor));
    }

    /// The consumer has taken everything up to `cursor`.
    pub fn advance(&mut self, cursor: u64) {
        if let Some(held) = self.held {
            self.held = Some(held.max(self.bytes_through(cursor)));
            self.trim();
        }
    }

    /// Ends the backpressure of the consumer.
    pub fn release(&mut self) {
        self.held = None;
        self.trim();
    }

    /// Whether more output can be appended without evicting output that the consumer with
    /// backpressure has not taken.
    ///
    /// Uses half the budget: the other half is for output that was sent to a consumer but lost with
    /// its connection.
    pub fn has_room(&self) -> bool {
        self.needed()
            .is_none_or(|needed| self.total - needed < (self.retention.bytes / 2).max(1) as u64)
    }

    /// Registers a search of the output from `cursor` on, which applies backpressure like a
    /// consumer; returns the watcher id.
    pub fn watch(&mut self, cursor: u64) -> u64 {
        let watcher = self.next_watcher;
        self.next_watcher += 1;
        self.watchers.insert(watcher, self.bytes_through(cursor));
        watcher
    }

    /// A watcher has searched everything up to `cursor`.
    pub fn watched(&mut self, watcher: u64, cursor: u64) {
        let through = self.bytes_through(cursor);
        if let Some(at) = self.watchers.get_mut(&watcher) {
            *at = through.max(*at);
            self.trim();
        }
    }

    /// Unregisters a watcher.
    pub fn unwatch(&mut self, watcher: u64) {
        self.watchers.remove(&watcher);
        self.trim();
    }

    /// Number of bytes that every consumer and watcher with backpressure has taken.
    fn needed(&self) -> Option<u64> {
        self.watchers.values().copied().chain(self.held).min()
    }

    fn bytes_through(&self, cursor: u64) -> u64 {
        match self.entry_after(cursor) {
            Some(next) => next.before,
            None => self.total,
        }
    }
}

fn index(stream: OutputStream) -> usize {
    match stream {
        OutputStream::Stdout => 0,
        OutputStream::Stderr => 1,
        OutputStream::Pty => 2,
    }
}

/// Head and tail of one stream.
#[derive(Debug, Default)]
struct HeadAndTail {
    /// The first bytes, up to half the budget.
    head: Vec<Bytes>,
    head_bytes: usize,
    /// The newest bytes after the head, up to half the budget.
    tail: VecDeque<Bytes>,
    tail_bytes: usize,
    total: u64,
}

impl HeadAndTail {
    fn push(&mut self, bytes: &Bytes, half: usize) {
        self.total += bytes.len() as u64;
        let mut rest = bytes.clone();
        if self.head_bytes < half {
            let part = rest.split_to(rest.len().min(half - self.head_bytes));
            self.head_bytes += part.len();
            self.head.push(part);
        }
        if rest.is_empty() {
            return;
        }
        self.tail_bytes += rest.len();
        self.tail.push_back(rest);
        while self.tail_bytes > half {
            let excess = self.tail_bytes - half;
            let Some(front) = self.tail.front_mut() else {
                break;
            };
            if front.len() <= excess {
                self.tail_bytes -= front.len();
                self.tail.pop_front();
            } else {
                self.tail_bytes -= excess;
                let _ = front.split_to(excess);
            }
        }
    }

    fn cut(&self, budget: usize) -> StreamExcerpt {
        let kept = self.head_bytes + self.tail_bytes;
        if self.total == kept as u64 && kept <= budget {
            let bytes = self
                .head
                .iter()
                .chain(&self.tail)
                .flatten()
                .copied()
                .collect();
            return StreamExcerpt {
                bytes,
                head: kept as u64,
                omitted: 0,
            };
        }
        // An odd byte goes to the head. A tail shorter than its half leaves no extra bytes to the
        // head, because the head never exceeds its own half.
        let head_len = (budget - budget / 2).min(self.head_bytes);
        let tail_len = (budget / 2).min(kept - head_len);
        let mut bytes: Vec<u8> = self.head.iter().flatten().copied().take(head_len).collect();
        let all = self.head.iter().chain(&self.tail).flatten().copied();
        bytes.extend(all.skip(kept - tail_len));
        let omitted = self.total - bytes.len() as u64;
        StreamExcerpt {
            bytes,
            head: head_len as u64,
            omitted,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const EXIT: Exit = Exit {
        code: 0,
        signal: None,
        timed_out: false,
        user_micros: 0,
        system_micros: 0,
        max_rss_bytes: 0,
        denials: None,
    };

    fn stream(n: u8) -> OutputStream {
        if n.is_multiple_of(2) {
            OutputStream::Stdout
        } else {
            OutputStream::Stderr
        }
    }

    /// All output ever appended, without eviction.
    #[derive(Default)]
    struct LogModel {
        entries: Vec<Option<(OutputStream, Vec<u8>)>>,
    }

    impl LogModel {
        /// The smallest number such that it and everything after fits the budget.
        fn first_retained(&self, retention: Retention) -> usize {
            let (mut bytes, mut first) = (0, self.entries.len());
            for (at, entry) in self.entries.iter().enumerate().rev() {
                bytes += entry.as_ref().map_or(0, |(_, data)| data.len());
                if bytes > retention.bytes || self.entries.len() - at > retention.chunks {
                    break;
                }
                first = at;
            }
            first
        }

        fn all(&self, wanted: OutputStream) -> Vec<u8> {
            let of_stream = self
                .entries
                .iter()
                .flatten()
                .filter(|(stream, _)| *stream == wanted);
            of_stream.flat_map(|(_, data)| data.clone()).collect()
        }
    }

    proptest! {
        #[test]
        fn log_matches_a_model_without_eviction(
            writes in prop::collection::vec((0u8..2, 1usize..40), 0..60),
            exit_at in 0usize..60, budget in 1usize..200, chunks in 1usize..30,
            cursor in 0u64..70, max in prop::option::of(0usize..100),
        ) {
            let retention = Retention { bytes: budget, chunks };
            let mut log = Log::new(retention);
            let mut model = LogModel::default();
            // Eviction runs when output is appended, so an exit may exceed the limit by one.
            let mut first = 0;
            for (n, (which, size)) in writes.iter().enumerate() {
                if n == exit_at {
                    log.exited(EXIT);
                    model.entries.push(None);
                }
                let data = vec![n as u8; *size];
                log.output(stream(*which), data.clone().into());
                model.entries.push(Some((stream(*which), data)));
                first = first.max(model.first_retained(retention));
            }
            prop_assert_eq!(log.next_seq(), model.entries.len() as u64 + 1);

            let expected: Vec<_> = model.entries.iter().enumerate()
                .filter(|(at, _)| *at >= first && *at as u64 + 1 > cursor)
                .filter_map(|(at, entry)| entry.as_ref().map(|(s, d)| (at as u64 + 1, *s, d.clone())))
                .collect();
            let slice = log.read(cursor, max);
            let got: Vec<_> = slice.chunks.iter().map(|(q, s, d)| (*q, *s, d.to_vec())).collect();
            prop_assert_eq!(&got[..], &expected[..got.len()]);
            let size: usize = got.iter().map(|(_, _, d)| d.len()).sum();
            match max {
                None => prop_assert_eq!(got.len(), expected.len()),
                Some(max) => {
                    prop_assert!(size <= max || got.len() == 1);
                    if let Some((_, _, next)) = expected.get(got.len()) {
                        prop_assert!(!got.is_empty() && size + next.len() > max);
                    }
                }
            }
            let next = match (max, got.last()) {
                (Some(_), Some((seq, ..))) => seq + 1,
                _ => model.entries.len() as u64 + 1,
            };
            prop_assert_eq!(slice.next_seq, next);

            let missing: usize = model.entries.iter().enumerate()
                .filter(|(at, _)| *at < first && *at as u64 + 1 > cursor)
                .map(|(_, entry)| entry.as_ref().map_or(0, |(_, d)| d.len())).sum();
            let lost = (missing > 0)
                .then_some(MissedOutput { through_seq: first as u64, bytes: missing as u64 });
            prop_assert_eq!(slice.lost, lost);

            for wanted in [OutputStream::Stdout, OutputStream::Stderr] {
                let all = model.all(wanted);
                let cut = log.cut(wanted, max.map(|max| max as u64));
                let room = max.unwrap_or(usize::MAX).min(budget);
                prop_assert!(cut.bytes.len() <= room);
                prop_assert_eq!(cut.omitted as usize + cut.bytes.len(), all.len());
                let (head, tail) = cut.bytes.split_at(cut.head as usize);
                prop_assert!(all.starts_with(head) && all.ends_with(tail));
                if all.len() <= room && all.len() < budget / 2 * 2 {
                    prop_assert_eq!(cut.omitted, 0);
                }
                if cut.omitted > 0 && room > 3 {
                    prop_assert!(head.len() + 2 >= room / 2 && tail.len() + 2 >= room / 2);
                }
            }
        }

        #[test]
        fn consumer_with_backpressure_loses_no_output(
            steps in prop::collection::vec((any::<bool>(), 1usize..20), 0..200),
            budget in 0usize..64, chunks in 1usize..10,
        ) {
            let mut log = Log::new(Retention { bytes: budget, chunks });
            log.hold(0);
            let (mut cursor, mut seen, mut written) = (0, 0, 0);
            for (write, size) in steps {
                if write && log.has_room() {
                    log.output(OutputStream::Stdout, vec![0; size].into());
                    written += size;
                } else if let Some(entry) = log.entry_after(cursor) {
                    prop_assert_eq!(entry.seq, cursor + 1);
                    seen += entry.len();
                    cursor = entry.seq;
                    log.advance(cursor);
                }
            }
            while let Some(entry) = log.entry_after(cursor) {
                seen += entry.len();
                cursor = entry.seq;
            }
            prop_assert_eq!(seen, written);
        }
    }

    #[test]
    fn backpressure_counts_bytes_not_yet_taken() {
        let mut log = Log::new(Retention {
            bytes: 100,
            chunks: 10,
        });
        log.output(OutputStream::Pty, vec![0; 90].into());
        assert!(log.has_room(), "nobody holds it back");
        log.hold(1);
        assert!(log.has_room(), "the consumer begins after what is there");
        log.output(OutputStream::Pty, vec![0; 50].into());
        assert!(!log.has_room());
        log.advance(2);
        assert!(log.has_room());
        log.output(OutputStream::Pty, vec![0; 50].into());
        log.release();
        assert!(log.has_room());
    }

    #[test]
    fn logs_of_one_meter_share_its_total() {
        let retention = Retention {
            bytes: 10,
            chunks: 10,
        };
        let meter = OutputMeter::default();
        let mut logs = [(); 2].map(|()| Log::metered(retention, meter.clone()));
        for log in &mut logs {
            for _ in 0..3 {
                log.output(OutputStream::Stdout, Bytes::from_static(b"12345"));
            }
        }
        assert_eq!((meter.bytes(), meter.evicted()), (20, 10));
        drop(logs);
        assert_eq!((meter.bytes(), meter.evicted()), (0, 10));
    }

    #[test]
    fn loss_of_a_reader_far_behind_is_counted_from_the_beginning() {
        let mut log = Log::new(Retention {
            bytes: 10,
            chunks: 10,
        });
        for _ in 0..EVICTED_INDEX + 100 {
            log.output(OutputStream::Stdout, vec![0; 1].into());
        }
        let evicted = log.evicted_bytes();
        assert_eq!(log.lost_after(0).unwrap().bytes, evicted);
        assert_eq!(log.lost_after(50).unwrap().bytes, evicted);
        assert_eq!(log.lost_after(200).unwrap().bytes, evicted - 200);
    }
}
