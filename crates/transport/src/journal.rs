//! Append-only JSON-lines file with a bounded queue (audit log).
//!
//! Callers never block: lines go through the queue to a writer thread. If the queue or the disk is
//! full, lines are dropped and counted, and the writer records the number of lost lines as soon as
//! it can write again.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

/// Capacity of the queue in lines; about 1 MiB for lines of usual length.
const QUEUE_LINES: usize = 4096;

/// Append-only file of JSON lines; cheap to clone.
#[derive(Debug, Clone)]
pub struct Journal {
    lines: SyncSender<String>,
    lost: Arc<AtomicU64>,
}

impl Journal {
    /// Opens a file for appending. A new file is readable only by its owner.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened or the writer thread cannot be started.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = open(path)?;
        let (lines, queue) = sync_channel(QUEUE_LINES);
        let lost = Arc::new(AtomicU64::new(0));
        let writer = JournalWriter {
            file,
            path: path.to_owned(),
            lost: Arc::clone(&lost),
            complained: false,
        };
        // The thread ends when the last clone of this journal is dropped.
        std::thread::Builder::new()
            .name("audit".to_owned())
            .spawn(move || writer.run(&queue))?;
        Ok(Self { lines, lost })
    }

    /// Queues a line for writing; does not block.
    pub fn append(&self, line: &Value) {
        let mut text = line.to_string();
        text.push('\n');
        if self.lines.try_send(text).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Returns the current time in milliseconds since 1970, as used in journal lines.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
}

/// State of the writer thread.
struct JournalWriter {
    file: File,
    path: PathBuf,
    lost: Arc<AtomicU64>,
    /// A write error was logged. It is logged once, and again only after a write has succeeded.
    complained: bool,
}

impl JournalWriter {
    fn run(mut self, queue: &Receiver<String>) {
        while let Ok(line) = queue.recv() {
            let mut batch = line;
            while batch.len() < 64 * 1024
                && let Ok(line) = queue.try_recv()
            {
                batch.push_str(&line);
            }
            self.write(&batch);
        }
    }

    fn write(&mut self, batch: &str) {
        // If log rotation moved the file away, create a new one.
        if !self.path.exists()
            && let Ok(fresh) = open(&self.path)
        {
            self.file = fresh;
        }
        let lost = self.lost.load(Ordering::Relaxed);
        let mut text = String::new();
        if lost > 0 {
            text = format!(
                "{}\n",
                json!({"time": now(), "event": "lost", "lines": lost})
            );
        }
        text.push_str(batch);
        match self.file.write_all(text.as_bytes()) {
            Ok(()) => {
                self.lost.fetch_sub(lost, Ordering::Relaxed);
                self.complained = false;
            }
            Err(error) => {
                let lines = batch.lines().count() as u64;
                self.lost.fetch_add(lines, Ordering::Relaxed);
                if !self.complained {
                    let path = self.path.display();
                    tracing::error!(%error, %path, "cannot write the audit log");
                }
                self.complained = true;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_disk_write_errors_are_reported_and_later_writes_succeed() {
        // Every write to `/dev/full` fails with ENOSPC.
        let journal = Journal::open(Path::new("/dev/full")).unwrap();
        for _ in 0..3 {
            journal.append(&json!({"x": 1}));
        }
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while journal.lost.load(Ordering::Relaxed) < 3 {
            assert!(std::time::Instant::now() < deadline, "nothing was lost");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_file_that_was_moved_away_is_created_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal");
        let file = open(&path).unwrap();
        let mut writer = JournalWriter {
            file,
            path: path.clone(),
            lost: Arc::new(AtomicU64::new(2)),
            complained: false,
        };
        writer.write("{\"a\":1}\n");
        std::fs::rename(&path, directory.path().join("old")).unwrap();
        writer.write("{\"b\":2}\n");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"b\":2}\n");
        let old = std::fs::read_to_string(directory.path().join("old")).unwrap();
        assert!(old.contains("\"event\":\"lost\"") && old.ends_with("{\"a\":1}\n"));
    }
}
