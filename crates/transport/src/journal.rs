//! An append-only file of JSON lines that nobody waits for.
//!
//! Lines go through a bounded queue to a thread of its own. If that is full or the disk is, lines are
//! lost, counted, and the loss is written down as soon as there is room again.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

/// Lines that wait for the disk; about a megabyte of usual ones.
const QUEUE_LINES: usize = 4096;

/// A file of lines; cheap to clone.
#[derive(Debug, Clone)]
pub struct Journal {
    lines: SyncSender<String>,
    lost: Arc<AtomicU64>,
}

impl Journal {
    /// Appends to this file, which only its owner can read.
    ///
    /// # Errors
    ///
    /// When the file cannot be opened or its thread not be started.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = open(path)?;
        let (lines, queue) = sync_channel(QUEUE_LINES);
        let lost = Arc::new(AtomicU64::new(0));
        let writer = Writer {
            file,
            path: path.to_owned(),
            lost: Arc::clone(&lost),
            complained: false,
        };
        // Ends when the last clone of this journal is dropped.
        std::thread::Builder::new()
            .name("audit".to_owned())
            .spawn(move || writer.run(&queue))?;
        Ok(Self { lines, lost })
    }

    /// Appends a line, soon.
    pub fn append(&self, line: &Value) {
        let mut text = line.to_string();
        text.push('\n');
        if self.lines.try_send(text).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Milliseconds since 1970, as lines say when they were written.
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

/// The thread that writes.
struct Writer {
    file: File,
    path: PathBuf,
    lost: Arc<AtomicU64>,
    /// The disk's trouble is told once, until it is over.
    complained: bool,
}

impl Writer {
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
        // Somebody may have moved the file away to begin a new one.
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
    fn a_full_disk_is_survived_and_told() {
        // `/dev/full` is a disk without room.
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
    fn a_file_that_was_moved_away_is_begun_anew() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal");
        let file = open(&path).unwrap();
        let mut writer = Writer {
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
