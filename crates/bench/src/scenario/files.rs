//! Files: short requests, long responses, directories and trees.

use std::collections::VecDeque;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};
use exec_server_protocol::PathUri;

use super::{Bench, RowSpec, size, stream};
use crate::client::BenchClient;
use crate::floor;
use crate::pattern::BytePattern;
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::stats::median;
use crate::wire::BenchMessage;

/// Entries of the listed directory.
const ENTRIES: usize = 10_000;
/// Size of the walked tree: directories, and files in each.
const BRANCHES: usize = 200;
const LEAVES: usize = 99;
/// Concurrent short requests.
const IN_FLIGHT: usize = 32;
/// Concurrent blocks, and the size of each.
const DEPTH: usize = 4;
const BLOCK_BYTES: u64 = 1 << 20;

/// All measurements in one scratch directory.
pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    match FilesSetup::new(bench) {
        Ok(scratch) => [
            short_requests(bench, &scratch),
            whole(bench, &scratch),
            first_byte(bench, &scratch),
            blocks(bench, &scratch),
            listings(bench, &scratch),
        ]
        .concat(),
        Err(error) => vec![ReportRow {
            name: "files".to_owned(),
            unit: Unit::Seconds,
            base: "",
            goals: vec![],
            server: Err(format!("no scratch directory: {error:#}")),
            peer: None,
        }],
    }
}

/// Files that are read and written.
struct FilesSetup {
    directory: tempfile::TempDir,
    pattern: BytePattern,
    /// Size of the file that is read and written as a whole.
    whole: u64,
    /// Size of the file that is read in blocks.
    large: u64,
}

impl FilesSetup {
    fn new(bench: &Bench) -> anyhow::Result<Self> {
        let scratch = Self {
            directory: tempfile::tempdir()?,
            pattern: BytePattern::new(),
            whole: bench.pick(32 << 20, 8 << 20),
            large: bench.pick(256 << 20, 64 << 20),
        };
        let root = scratch.directory.path();
        scratch.fill(&root.join("small"), 4096)?;
        scratch.fill(&root.join("whole"), scratch.whole)?;
        scratch.fill(&root.join("large"), scratch.large)?;
        fs::create_dir(root.join("wide"))?;
        for entry in 0..ENTRIES {
            fs::write(root.join(format!("wide/file-{entry}")), "")?;
        }
        for branch in 0..BRANCHES {
            let branch = root.join(format!("tree/{}/{branch}", branch % 10));
            fs::create_dir_all(&branch)?;
            for leaf in 0..LEAVES {
                fs::write(branch.join(format!("file-{leaf}")), "")?;
            }
        }
        Ok(scratch)
    }

    fn fill(&self, path: &Path, total: u64) -> anyhow::Result<()> {
        let mut file = fs::File::create(path)?;
        let mut offset = 0;
        while offset < total {
            let window = self.pattern.window(offset, total - offset);
            file.write_all(window)?;
            offset += window.len() as u64;
        }
        Ok(())
    }

    fn uri(&self, name: &str) -> anyhow::Result<String> {
        Ok(PathUri::from_native(&self.directory.path().join(name))?.to_string())
    }
}

/// Waits for the response to a request; returns what `show` extracts.
pub(super) fn answer<R>(
    client: &mut BenchClient,
    id: i64,
    take: impl FnOnce(BenchMessage<'_>) -> anyhow::Result<R>,
) -> anyhow::Result<R> {
    match client.receive()? {
        message @ (BenchMessage::Response { id: answered, .. }
        | BenchMessage::Data { id: answered, .. }) => {
            ensure!(answered == id, "{answered} was answered instead of {id}");
            take(message)
        }
        other => bail!("expected an answer, not {other:?}"),
    }
}

/// Metadata and a short file, sequentially and concurrently.
fn short_requests(bench: &Bench, scratch: &FilesSetup) -> Vec<ReportRow> {
    let count = bench.pick(400, 200);
    let line = |name: &str, limit| RowSpec {
        name: name.to_owned(),
        unit: Unit::Seconds,
        base: "bare round trip",
        goals: vec![Goal::Base { limit, aim: limit }],
    };
    let lines = vec![
        line("getMetadata p50", 1.5),
        line("readFile 4 KiB p50", 1.7),
        RowSpec {
            name: format!("getMetadata, {IN_FLIGHT} in flight"),
            unit: Unit::PerSecond,
            base: "",
            goals: vec![Goal::Either {
                value: 60_000.0,
                peer: 3.0,
            }],
        },
    ];
    let floor = || floor::round_trip(&bench.own, count);
    bench.placed_rounds(bench.pick(9, 3), lines, floor, |server, &floor| {
        let mut client = server.client()?;
        let params = format!(r#"{{"path":"{}"}}"#, scratch.uri("small")?);
        let metadata = sequential_requests(&mut client, "fs/getMetadata", &params, count)?;
        let read = sequential_requests(&mut client, "fs/readFile", &params, count)?;
        let total = bench.pick(20_000, 5_000);
        let rate = concurrent_requests(&mut client, "fs/getMetadata", &params, total)?;
        Ok(vec![
            Figure::against(metadata, floor),
            Figure::against(read, floor),
            Figure::plain(rate),
        ])
    })
}

/// Median seconds of each of `count` requests.
fn sequential_requests(
    client: &mut BenchClient,
    method: &str,
    params: &str,
    count: usize,
) -> anyhow::Result<f64> {
    let mut samples = Vec::with_capacity(count);
    for round in 0..count + 20 {
        let start = Instant::now();
        let id = client.ask(method, params)?;
        answer(client, id, |_| Ok(()))?;
        if round >= 20 {
            samples.push(start.elapsed().as_secs_f64());
        }
    }
    Ok(median(&samples))
}

/// Requests per second with [`IN_FLIGHT`] of them concurrently.
fn concurrent_requests(
    client: &mut BenchClient,
    method: &str,
    params: &str,
    total: usize,
) -> anyhow::Result<f64> {
    let start = Instant::now();
    let (mut asked, mut answered) = (0, 0);
    while answered < total {
        if asked < total && asked - answered < IN_FLIGHT {
            // Fills the free slots with one write, as a client with a queue does.
            let now = (IN_FLIGHT - (asked - answered)).min(total - asked);
            client.ask_batch(method, params, now)?;
            asked += now;
        }
        match client.receive()? {
            BenchMessage::Response { .. } => answered += 1,
            other => bail!("expected an answer, not {other:?}"),
        }
        while client.has_buffered() && answered < asked {
            match client.receive()? {
                BenchMessage::Response { .. } => answered += 1,
                other => bail!("expected an answer, not {other:?}"),
            }
        }
    }
    Ok(total as f64 / start.elapsed().as_secs_f64())
}

/// A file in one response, and in one request.
fn whole(bench: &Bench, scratch: &FilesSetup) -> Vec<ReportRow> {
    let total = scratch.whole;
    let line = |name: &str, base, goal| RowSpec {
        name: format!("{name} {}", size(total)),
        unit: Unit::BytesPerSecond,
        base,
        goals: vec![goal],
    };
    let lines = vec![
        line("readFile", "", Goal::Peer { limit: 4.0 }),
        line(
            "write, in blocks and atomic,",
            "write + rename",
            Goal::Base {
                limit: 0.6,
                aim: 0.6,
            },
        ),
        line(
            "writeFile in one request,",
            "write + rename",
            Goal::DesiredBase { aim: 0.6 },
        ),
    ];
    let floor = || write_and_rename(scratch, total);
    bench.placed_rounds(bench.pick(5, 3), lines, floor, |server, &floor| {
        let mut client = server.client()?;
        let start = Instant::now();
        let params = format!(r#"{{"path":"{}"}}"#, scratch.uri("whole")?);
        let id = client.ask("fs/readFile", &params)?;
        let seen = answer(&mut client, id, |message| match message {
            BenchMessage::Data { text, .. } => scratch
                .pattern
                .check_text(0, text)
                .context("wrong bytes in the file"),
            other => bail!("no data in {other:?}"),
        })?;
        let read = total as f64 / start.elapsed().as_secs_f64();
        ensure!(seen == total, "{seen} of {total} bytes came");
        let path = scratch.uri("written")?;
        let streamed = write_blocks(&mut client, scratch, &path, total)?;
        let id = client.queue_file(&path, &scratch.pattern, total as usize)?;
        let start = Instant::now();
        client.flush()?;
        answer(&mut client, id, |_| Ok(()))?;
        let written = total as f64 / start.elapsed().as_secs_f64();
        let length = fs::metadata(scratch.directory.path().join("written"))?.len();
        ensure!(length == total, "{length} of {total} bytes were written");
        Ok(vec![
            Figure::plain(read),
            Figure::against(streamed, floor),
            Figure::against(written, floor),
        ])
    })
}

/// Time until the first byte of a large file arrives.
fn first_byte(bench: &Bench, scratch: &FilesSetup) -> Vec<ReportRow> {
    let line = RowSpec {
        name: format!("readFile {}, first byte", size(scratch.whole)),
        unit: Unit::Seconds,
        base: "",
        // The whole file in one message takes 14 ms to read and encode.
        goals: vec![Goal::Value {
            limit: 2e-3,
            aim: 1e-3,
        }],
    };
    let lines = vec![line];
    bench.placed_rounds(
        bench.pick(9, 3),
        lines,
        || Ok(()),
        |server, ()| {
            let mut client = server.client()?;
            let params = format!(r#"{{"path":"{}"}}"#, scratch.uri("whole")?);
            let start = Instant::now();
            let id = client.ask("fs/readFile", &params)?;
            client.await_first_bytes()?;
            let first = start.elapsed().as_secs_f64();
            answer(&mut client, id, |_| Ok(()))?;
            Ok(vec![Figure::plain(first)])
        },
    )
}

/// Bytes per second of writing a large file in concurrent blocks; the file is replaced atomically
/// where the server supports that.
fn write_blocks(
    client: &mut BenchClient,
    scratch: &FilesSetup,
    path: &str,
    total: u64,
) -> anyhow::Result<f64> {
    let mode = if client.has_atomic_writes() {
        "atomic"
    } else {
        "replace"
    };
    let each = (0..total).step_by(BLOCK_BYTES as usize);
    let blocks: Vec<_> = each
        .map(|offset| {
            let len = BLOCK_BYTES.min(total - offset) as usize;
            client.write_block("w", &scratch.pattern, offset, len)
        })
        .collect::<Result<_, _>>()?;
    let mut blocks = blocks.iter();
    let start = Instant::now();
    let mut waiting = VecDeque::new();
    let open = format!(r#"{{"handleId":"w","path":"{path}","mode":"{mode}"}}"#);
    waiting.push_back(client.ask("fs/open", &open)?);
    while let Some(id) = waiting.pop_front() {
        answer(client, id, |_| Ok(()))?;
        while waiting.len() < DEPTH
            && let Some(block) = blocks.next()
        {
            waiting.push_back(client.send_encoded(block)?);
        }
    }
    let id = client.ask("fs/close", r#"{"handleId":"w","commit":true}"#)?;
    answer(client, id, |_| Ok(()))?;
    Ok(total as f64 / start.elapsed().as_secs_f64())
}

/// Bytes per second of writing a file that then replaces another.
fn write_and_rename(scratch: &FilesSetup, total: u64) -> anyhow::Result<f64> {
    let (new, old) = (
        scratch.directory.path().join("new"),
        scratch.directory.path().join("old"),
    );
    let start = Instant::now();
    scratch.fill(&new, total)?;
    fs::rename(new, old)?;
    Ok(total as f64 / start.elapsed().as_secs_f64())
}

/// A file in concurrent blocks.
fn blocks(bench: &Bench, scratch: &FilesSetup) -> Vec<ReportRow> {
    let total = scratch.large;
    let line = RowSpec {
        name: format!("readBlock {}, depth {DEPTH}", size(total)),
        unit: Unit::BytesPerSecond,
        base: "bare frames",
        goals: vec![
            Goal::Base {
                limit: 0.4,
                aim: 0.4,
            },
            Goal::Peer { limit: 2.0 },
        ],
    };
    let floor = || stream::push_rate(bench, &scratch.pattern, total);
    bench.placed_rounds(bench.pick(5, 3), vec![line], floor, |server, &floor| {
        let mut client = server.client()?;
        let path = scratch.uri("large")?;
        let start = Instant::now();
        let open = format!(r#"{{"handleId":"h","path":"{path}"}}"#);
        let id = client.ask("fs/open", &open)?;
        answer(&mut client, id, |_| Ok(()))?;
        let (mut offset, mut seen, mut waiting) = (0, 0, VecDeque::new());
        while seen < total {
            while offset < total && waiting.len() < DEPTH {
                let block = format!(r#"{{"handleId":"h","offset":{offset},"len":{BLOCK_BYTES}}}"#);
                waiting.push_back(client.ask("fs/readBlock", &block)?);
                offset += BLOCK_BYTES;
            }
            let id = waiting.pop_front().context("nothing is under way")?;
            seen += answer(&mut client, id, |message| match message {
                BenchMessage::Data { text, .. } => scratch
                    .pattern
                    .check_text(seen, text)
                    .with_context(|| format!("wrong bytes after {seen}")),
                other => bail!("no data in {other:?}"),
            })?;
        }
        Ok(vec![Figure::against(
            total as f64 / start.elapsed().as_secs_f64(),
            floor,
        )])
    })
}

/// A directory with many entries, and a tree.
fn listings(bench: &Bench, scratch: &FilesSetup) -> Vec<ReportRow> {
    let line = |name: String, base, limit| RowSpec {
        name,
        unit: Unit::Seconds,
        base,
        goals: vec![Goal::Base { limit, aim: limit }],
    };
    let entries = BRANCHES * (LEAVES + 1) + 10;
    let lines = vec![
        line(format!("readDirectory {ENTRIES}"), "read_dir", 2.0),
        line(format!("walk {entries}"), "plain walk", 2.5),
    ];
    let root = scratch.directory.path();
    let floor = || -> anyhow::Result<(f64, f64)> {
        let start = Instant::now();
        let listed = list(&root.join("wide"))?;
        let wide = start.elapsed().as_secs_f64();
        let start = Instant::now();
        let walked = list(&root.join("tree"))?;
        let tree = start.elapsed().as_secs_f64();
        ensure!(
            listed == ENTRIES && walked == entries,
            "{listed} and {walked} entries"
        );
        Ok((wide, tree))
    };
    bench.placed_rounds(bench.pick(7, 3), lines, floor, |server, &(wide, tree)| {
        let mut client = server.client()?;
        let start = Instant::now();
        let params = format!(r#"{{"path":"{}"}}"#, scratch.uri("wide")?);
        let id = client.ask("fs/readDirectory", &params)?;
        count(&mut client, id, "fileName", ENTRIES)?;
        let listed = start.elapsed().as_secs_f64();
        let start = Instant::now();
        let params = format!(
            r#"{{"path":"{}","options":{{"maxDepth":64,"maxDirectories":10000,"maxEntries":50000,"followDirectorySymlinks":false}}}}"#,
            scratch.uri("tree")?
        );
        let id = client.ask("fs/walk", &params)?;
        count(&mut client, id, "kind", entries)?;
        let walked = start.elapsed().as_secs_f64();
        Ok(vec![
            Figure::against(listed, wide),
            Figure::against(walked, tree),
        ])
    })
}

/// Checks the number of entries in a response.
fn count(client: &mut BenchClient, id: i64, key: &str, expected: usize) -> anyhow::Result<()> {
    answer(client, id, |message| match message {
        BenchMessage::Response { result, .. } => {
            let found = result.matches(&format!("\"{key}\"")).count();
            ensure!(found == expected, "{found} of {expected} entries came");
            Ok(())
        }
        other => bail!("no list in {other:?}"),
    })
}

/// Number of entries below a directory, each with its type, by the simplest use of the standard
/// library.
fn list(directory: &Path) -> anyhow::Result<usize> {
    let mut pending = vec![directory.to_owned()];
    let mut entries = 0;
    while let Some(directory) = pending.pop() {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            entries += 1;
            if entry.file_type()?.is_dir() {
                pending.push(entry.path());
            }
        }
    }
    Ok(entries)
}
