//! Extensions for trees: search, watch, upload of many small files, and copies of unchanged trees.
//!
//! The peer does not have these methods, so only the server under test is measured.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
use exec_server_client::transfer::{self, TransferOptions};
use exec_server_client::{ExecServerClient, RemoteExecServerConnectArgs};
use exec_server_protocol::PathUri;
use exec_server_sync::Mutex;
use grep_regex::RegexMatcher;
use grep_searcher::{BinaryDetection, SearcherBuilder, sinks};
use ignore::{WalkBuilder, WalkState};

use super::{Bench, RowSpec};
use crate::client::BenchClient;
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::BenchServer;
use crate::stats::median;
use crate::wire::BenchMessage;

const MIB: f64 = 1024.0 * 1024.0;

/// Size of the searched tree: directories, files in each, lines in each file.
const BRANCHES: usize = 200;
const LEAVES: usize = 100;
const LINES: usize = 60;
/// One of this many files contains the searched word.
const RARE: usize = 50;
const WORD: &str = "haystack_needle";

/// Size of the uploaded tree: files, in this many directories.
const SENT: usize = 2_000;
const SENT_DIRECTORIES: usize = 20;

/// Time for which changes are collected.
const DEBOUNCE_MS: u64 = 50;

/// `fs/search` compared with the libraries that it uses.
pub(super) fn search(bench: &Bench) -> Vec<ReportRow> {
    let files = BRANCHES * LEAVES;
    let line = RowSpec {
        name: format!("search {files} files"),
        unit: Unit::Seconds,
        base: "ripgrep's crates",
        goals: vec![Goal::Base {
            limit: 1.5,
            aim: 1.5,
        }],
    };
    let tree = match searched_tree() {
        Ok(tree) => tree,
        Err(error) => return failed(line, &error),
    };
    let expected = files / RARE;
    let floor = || {
        let start = Instant::now();
        let found = search_locally(tree.path())?;
        ensure!(found == expected, "{found} of {expected} matches");
        Ok(start.elapsed().as_secs_f64())
    };
    let bench = bench.without_peer();
    bench.rounds(bench.pick(9, 3), vec![line], floor, |server, &floor| {
        let mut client = server.client()?;
        let path = PathUri::from_native(tree.path())?;
        let params = format!(r#"{{"path":"{path}","pattern":"{WORD}"}}"#);
        let start = Instant::now();
        let id = client.ask("fs/search", &params)?;
        let found = answered(&mut client, id, |result| {
            result.matches("\"column\"").count()
        })?;
        let elapsed = start.elapsed().as_secs_f64();
        ensure!(found == expected, "{found} of {expected} matches");
        Ok(vec![Figure::against(elapsed, floor)])
    })
}

fn searched_tree() -> anyhow::Result<tempfile::TempDir> {
    let tree = tempfile::tempdir()?;
    let mut number = 0;
    for branch in 0..BRANCHES {
        let branch = tree.path().join(format!("{}/{branch}", branch % 10));
        fs::create_dir_all(&branch)?;
        for leaf in 0..LEAVES {
            let mut text = String::new();
            for line in 0..LINES {
                text += &format!("    let value_{line} = compute(input_{leaf}, {number});\n");
            }
            if number % RARE == 0 {
                text += &format!("    // {WORD}\n");
            }
            fs::write(branch.join(format!("file-{leaf}.rs")), text)?;
            number += 1;
        }
    }
    Ok(tree)
}

/// Counts the matches below a directory with as many threads as the server.
fn search_locally(root: &Path) -> anyhow::Result<usize> {
    let matcher = RegexMatcher::new_line_matcher(WORD)?;
    let found = Mutex::new(Vec::new());
    let walk = WalkBuilder::new(root)
        .standard_filters(false)
        .hidden(true)
        .git_ignore(true)
        .git_exclude(true)
        .require_git(false)
        .threads(std::thread::available_parallelism().map_or(1, usize::from))
        .build_parallel();
    walk.run(|| {
        let (matcher, found) = (matcher.clone(), &found);
        // Files are read and not mapped, as in the server; this is the default.
        let mut searcher = SearcherBuilder::new()
            .binary_detection(BinaryDetection::quit(b'\0'))
            .line_number(true)
            .build();
        Box::new(move |entry| {
            let Ok(entry) = entry else {
                return WalkState::Continue;
            };
            if entry.file_type().is_some_and(|kind| kind.is_file()) {
                let path = entry.path();
                let sink = sinks::Lossy(|number, line| {
                    let mut found = found.lock();
                    found.push((path.to_owned(), number, line.to_owned()));
                    Ok(true)
                });
                // A file that cannot be read lowers the count, which the caller checks.
                let _ = searcher.search_path(&matcher, path, sink);
            }
            WalkState::Continue
        })
    });
    let found = found.into_inner();
    Ok(found.len())
}

/// Delay from a change to its notification, and memory for many directories.
pub(super) fn watch(bench: &Bench) -> Vec<ReportRow> {
    let bench = bench.without_peer();
    [watch_delay(&bench), watch_memory(&bench)].concat()
}

fn watch_delay(bench: &Bench) -> Vec<ReportRow> {
    let count = bench.pick(20, 7);
    let line = RowSpec {
        name: format!("watch p50, {DEBOUNCE_MS} ms gathered"),
        unit: Unit::Seconds,
        base: "",
        goals: vec![Goal::Value {
            limit: 0.055,
            aim: 0.055,
        }],
    };
    let nothing = || Ok(());
    bench.rounds(bench.pick(5, 3), vec![line], nothing, |server, ()| {
        let directory = tempfile::tempdir()?;
        let mut client = server.client()?;
        start_watch(&mut client, directory.path())?;
        let mut samples = Vec::with_capacity(count);
        for number in 0..count {
            let path = directory.path().join(number.to_string());
            let start = Instant::now();
            fs::File::create(path)?;
            match client.receive()? {
                BenchMessage::Other => samples.push(start.elapsed().as_secs_f64()),
                other => bail!("expected fs/changed, not {other:?}"),
            }
        }
        Ok(vec![Figure::plain(median(&samples))])
    })
}

fn watch_memory(bench: &Bench) -> Vec<ReportRow> {
    let (outer, inner) = (bench.pick(200, 50), 99);
    let line = RowSpec {
        name: format!("watch of {} directories, memory", outer * (inner + 1)),
        unit: Unit::Bytes,
        base: "",
        goals: vec![Goal::Value {
            limit: 64.0 * MIB,
            aim: 64.0 * MIB,
        }],
    };
    bench.measure_each(1, line, |command| {
        let tree = tempfile::tempdir()?;
        for outer in 0..outer {
            for inner in 0..inner {
                fs::create_dir_all(tree.path().join(format!("dir-{outer}/dir-{inner}")))?;
            }
        }
        let server = BenchServer::start_observed(command)?;
        let mut client = server.client()?;
        let before = server.resident_at_rest()?;
        start_watch(&mut client, tree.path())?;
        let after = server.resident_at_rest()?;
        Ok(Figure::plain(after as f64 - before as f64))
    })
}

fn start_watch(client: &mut BenchClient, path: &Path) -> anyhow::Result<()> {
    let path = PathUri::from_native(path)?;
    let params = format!(r#"{{"watchId":"w","path":"{path}","debounceMs":{DEBOUNCE_MS}}}"#);
    let id = client.ask("fs/watch", &params)?;
    answered(client, id, |_| ())
}

/// Waits for the response to a request and returns what `show` extracts.
fn answered<R>(
    client: &mut BenchClient,
    id: i64,
    show: impl FnOnce(&str) -> R,
) -> anyhow::Result<R> {
    match client.receive()? {
        BenchMessage::Response {
            id: answered,
            result,
        } if answered == id => Ok(show(result)),
        other => bail!("expected an answer, not {other:?}"),
    }
}

/// Upload of many small files, compared with copying them locally.
pub(super) fn upload(bench: &Bench) -> Vec<ReportRow> {
    let line = RowSpec {
        name: format!("upload {SENT} files of 4 KiB"),
        unit: Unit::PerSecond,
        base: "plain copy",
        goals: vec![Goal::Base {
            limit: 0.3,
            aim: 0.3,
        }],
    };
    let prepared = (|| {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()?;
        anyhow::Ok((sent_tree()?, runtime))
    })();
    let (tree, runtime) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => return failed(line, &error),
    };
    let floor = || {
        let target = tempfile::tempdir()?;
        let start = Instant::now();
        let copied = copy_locally(tree.path(), &target.path().join("copy"))?;
        ensure!(copied == SENT, "{copied} of {SENT} files were copied");
        Ok(SENT as f64 / start.elapsed().as_secs_f64())
    };
    let bench = bench.without_peer();
    bench.rounds(bench.pick(9, 3), vec![line], floor, |server, &floor| {
        let target = tempfile::tempdir()?;
        let to = PathUri::from_native(&target.path().join("copy"))?;
        let url = format!("ws://{}", server.address);
        let client = RemoteExecServerConnectArgs::new(url, "bench");
        let client = runtime.block_on(ExecServerClient::connect(client))?;
        let mut options = TransferOptions::default();
        options.recursive = true;
        let files = Arc::new(client.file_system());
        let start = Instant::now();
        let report = runtime.block_on(transfer::upload(tree.path(), files, &to, options))?;
        let elapsed = start.elapsed().as_secs_f64();
        if let Some(failure) = report.failures.first() {
            bail!("{failure}");
        }
        let sent = report.files;
        ensure!(sent == SENT as u64, "{sent} of {SENT} files were sent");
        Ok(vec![Figure::against(SENT as f64 / elapsed, floor)])
    })
}

/// Copy of an unchanged tree in archive mode, compared with `rsync -a` within this machine.
pub(super) fn unchanged(bench: &Bench) -> Vec<ReportRow> {
    let files = BRANCHES * LEAVES / 2;
    let line = RowSpec {
        name: format!("copy {files} unchanged files"),
        unit: Unit::Seconds,
        base: "rsync -a",
        goals: vec![Goal::Base {
            limit: 1.3,
            aim: 1.3,
        }],
    };
    let prepared = (|| {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()?;
        let (tree, target) = (tempfile::tempdir()?, tempfile::tempdir()?);
        for directory in 0..BRANCHES / 2 {
            let directory = tree.path().join(directory.to_string());
            fs::create_dir(&directory)?;
            for file in 0..LEAVES {
                fs::write(directory.join(file.to_string()), [b'x'; 64])?;
            }
        }
        rsync(tree.path(), target.path()).context("rsync is needed")?;
        anyhow::Ok((tree, target, runtime))
    })();
    let (tree, target, runtime) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => return failed(line, &error),
    };
    let floor = || {
        let start = Instant::now();
        rsync(tree.path(), target.path())?;
        Ok(start.elapsed().as_secs_f64())
    };
    let bench = bench.without_peer();
    bench.rounds(bench.pick(9, 3), vec![line], floor, |server, &floor| {
        let to = PathUri::from_native(target.path())?;
        let url = format!("ws://{}", server.address);
        // As rsync, from its start: the connection is part of it.
        let start = Instant::now();
        let client = RemoteExecServerConnectArgs::new(url, "bench");
        let client = runtime.block_on(ExecServerClient::connect(client))?;
        let mut options = TransferOptions::default();
        options.recursive = true;
        options.archive = true;
        let there = Arc::new(client.file_system());
        let report = runtime.block_on(transfer::upload(tree.path(), there, &to, options))?;
        let elapsed = start.elapsed().as_secs_f64();
        if let Some(failure) = report.failures.first() {
            bail!("{failure}");
        }
        let unchanged = report.unchanged;
        ensure!(
            unchanged == files as u64 && report.files == 0,
            "{unchanged} of {files} files were unchanged"
        );
        Ok(vec![Figure::against(elapsed, floor)])
    })
}

/// Copies what has changed with rsync.
fn rsync(from: &Path, to: &Path) -> anyhow::Result<()> {
    let mut command = std::process::Command::new("rsync");
    let mut from = from.as_os_str().to_owned();
    from.push("/");
    let status = command.arg("-a").arg(from).arg(to).status()?;
    ensure!(status.success(), "rsync ended with {status}");
    Ok(())
}

fn sent_tree() -> anyhow::Result<tempfile::TempDir> {
    let tree = tempfile::tempdir()?;
    for directory in 0..SENT_DIRECTORIES {
        let directory = tree.path().join(directory.to_string());
        fs::create_dir(&directory)?;
        for file in 0..SENT / SENT_DIRECTORIES {
            fs::write(directory.join(file.to_string()), [b'x'; 4096])?;
        }
    }
    Ok(tree)
}

/// Copies a tree; returns the number of files.
fn copy_locally(from: &Path, to: &Path) -> anyhow::Result<usize> {
    fs::create_dir(to)?;
    let mut copied = 0;
    for entry in fs::read_dir(from).context("cannot read the tree")? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copied += copy_locally(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
            copied += 1;
        }
    }
    Ok(copied)
}

fn failed(line: RowSpec, error: &anyhow::Error) -> Vec<ReportRow> {
    super::rows(vec![line], vec![Err(format!("no tree: {error:#}"))])
}
