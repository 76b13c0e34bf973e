//! The record of who ran what, under which policy, with which result.
//!
//! Owns an append-only file of JSON lines and what must not be in it. Requests never wait for the
//! disk: lines go through a bounded queue to a thread of its own. If that is full or the disk is,
//! lines are lost, counted, and the loss is written down as soon as there is room again.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{SystemTime, UNIX_EPOCH};

use exec_server_executor::log::Exit;
use exec_server_protocol::sandbox::EnforcementLevel;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::auth::Identity;

/// Lines that wait for the disk; about a megabyte of usual ones.
const QUEUE_LINES: usize = 4096;

/// Bytes of one argument that are written; the rest is told by its length.
const MAX_ARGUMENT_BYTES: usize = 1024;

/// Arguments that are written.
const MAX_ARGUMENTS: usize = 64;

/// What replaces something that must not be written.
const REDACTED: &str = "[redacted]";

/// An audit log; cheap to clone.
#[derive(Debug, Clone)]
pub struct Audit {
    lines: SyncSender<String>,
    lost: Arc<AtomicU64>,
    redact: Arc<[String]>,
}

impl Audit {
    /// Appends to this file, which only its owner can read; `redact` are texts that hide the
    /// arguments in which they occur.
    ///
    /// A text that ends with `=` hides what follows it, in the same argument.
    ///
    /// # Errors
    ///
    /// When the file cannot be opened or its thread not be started.
    pub fn open(path: &Path, redact: Vec<String>) -> io::Result<Self> {
        let file = open(path)?;
        let (lines, queue) = sync_channel(QUEUE_LINES);
        let lost = Arc::new(AtomicU64::new(0));
        let writer = Writer {
            file,
            path: path.to_owned(),
            lost: Arc::clone(&lost),
            complained: false,
        };
        // Ends when the last clone of this log is dropped.
        std::thread::Builder::new()
            .name("audit".to_owned())
            .spawn(move || writer.run(&queue))?;
        Ok(Self {
            lines,
            lost,
            redact: redact.into(),
        })
    }

    fn append(&self, line: &Value) {
        let mut text = line.to_string();
        text.push('\n');
        if self.lines.try_send(text).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Somebody came, or was not let in.
    pub(crate) fn connected(&self, peer: &str, outcome: Result<&Identity, &str>) {
        let (event, who, reason) = match outcome {
            Ok(identity) => ("connected", Some(&*identity.name), None),
            Err(reason) => ("refused", None, Some(reason)),
        };
        self.append(&json!({
            "time": now(), "event": event, "peer": peer, "identity": who, "reason": reason,
        }));
    }

    /// Somebody asked for a process; `outcome` is its number, or why there is none.
    pub(crate) fn started(&self, run: &Run<'_>, outcome: Result<i32, &str>) {
        let argv: Vec<_> = run
            .argv
            .iter()
            .take(MAX_ARGUMENTS)
            .map(|argument| self.clean(argument))
            .collect();
        self.append(&json!({
            "time": now(),
            "event": if outcome.is_ok() { "started" } else { "notStarted" },
            "identity": &*run.identity.name,
            "session": run.session,
            "processId": run.process_id,
            "argv": argv,
            "arguments": run.argv.len(),
            "cwd": run.cwd,
            "policy": run.policy,
            "enforcement": run.enforcement,
            "pid": outcome.ok(),
            "reason": outcome.err(),
        }));
    }

    /// A process has ended.
    pub(crate) fn exited(&self, session: &str, process_id: &str, pid: i32, exit: &Exit) {
        self.append(&json!({
            "time": now(),
            "event": "exited",
            "session": session,
            "processId": process_id,
            "pid": pid,
            "exitCode": exit.code,
            "signal": exit.signal,
            "timedOut": exit.timed_out,
        }));
    }

    /// Somebody changed a file.
    pub(crate) fn changed(&self, identity: &Identity, method: &str, params: Option<&str>) {
        /// What of the params says which file is meant; the rest may be large.
        #[derive(Default, Deserialize)]
        #[serde(rename_all = "camelCase", default)]
        struct Paths {
            path: Option<String>,
            from: Option<String>,
            to: Option<String>,
            source_path: Option<String>,
            destination_path: Option<String>,
        }
        let paths: Paths = params
            .and_then(|params| serde_json::from_str(params).ok())
            .unwrap_or_default();
        let from = paths.path.or(paths.from).or(paths.source_path);
        let to = paths.to.or(paths.destination_path);
        let clean = |path: Option<String>| path.map(|path| self.clean(&path));
        self.append(&json!({
            "time": now(), "event": "file", "identity": &*identity.name, "method": method,
            "path": clean(from), "to": clean(to),
        }));
    }

    /// An argument as it may be written.
    fn clean(&self, argument: &str) -> String {
        let mut cut = argument.len().min(MAX_ARGUMENT_BYTES);
        while !argument.is_char_boundary(cut) {
            cut -= 1;
        }
        for secret in &*self.redact {
            let Some(at) = argument.find(secret.as_str()) else {
                continue;
            };
            if secret.ends_with('=') {
                let kept = at + secret.len();
                return format!("{}{REDACTED}", &argument[..kept.min(cut)]);
            }
            return REDACTED.to_owned();
        }
        match argument.len() - cut {
            0 => argument.to_owned(),
            more => format!("{}[{more} more bytes]", &argument[..cut]),
        }
    }
}

/// Who asked for what.
pub(crate) struct Run<'a> {
    pub(crate) identity: &'a Identity,
    pub(crate) session: &'a str,
    pub(crate) process_id: &'a str,
    pub(crate) argv: &'a [String],
    pub(crate) cwd: String,
    /// The sandbox that was asked for.
    pub(crate) policy: &'a str,
    /// How much of it is enforced, if it runs and there is something to enforce.
    pub(crate) enforcement: Option<EnforcementLevel>,
}

fn now() -> u64 {
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
                    tracing::error!(%error, %path, "the audit log cannot be written");
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
    fn arguments_are_cleaned() {
        let directory = tempfile::tempdir().unwrap();
        let redact = vec!["password".to_owned(), "TOKEN=".to_owned()];
        let audit = Audit::open(&directory.path().join("audit"), redact).unwrap();
        assert_eq!(audit.clean("ls"), "ls");
        assert_eq!(audit.clean("--password=x"), REDACTED);
        assert_eq!(audit.clean("A=1 TOKEN=abc def"), "A=1 TOKEN=[redacted]");
        let long = "é".repeat(1000);
        let cut = audit.clean(&long);
        assert!(cut.ends_with("[976 more bytes]"), "{cut}");
    }

    #[test]
    fn a_full_disk_is_survived_and_told() {
        // `/dev/full` is a disk without room.
        let audit = Audit::open(Path::new("/dev/full"), Vec::new()).unwrap();
        for _ in 0..3 {
            audit.append(&json!({"x": 1}));
        }
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while audit.lost.load(Ordering::Relaxed) < 3 {
            assert!(std::time::Instant::now() < deadline, "nothing was lost");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_file_that_was_moved_away_is_begun_anew() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit");
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
