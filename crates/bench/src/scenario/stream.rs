//! Large output, checked byte by byte: with a fast reader and with one that sleeps.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use exec_server_protocol::sandbox::Sandbox;

use super::{Bench, RowSpec, median_figure, size};
use crate::client::{BenchClient, ChildStdio};
use crate::floor::{self, WebsocketResponder};
use crate::pattern::BytePattern;
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::BenchServer;
use crate::wire::BenchMessage;

/// Bytes of a stream measurement over all its processes.
fn total(bench: &Bench) -> u64 {
    bench.pick(256 << 20, 64 << 20)
}

/// From one process and from eight concurrently, on one connection.
///
/// The last row is the rate at which this client receives frames without a server: apart from pipe
/// and base64, no server can be faster.
pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    let pattern = BytePattern::new();
    let total = total(bench);
    let line = |name: &str| RowSpec {
        name: format!("stream {} from {name}", size(total)),
        unit: Unit::BytesPerSecond,
        base: "pipe",
        goals: vec![
            Goal::Base {
                limit: 0.35,
                aim: 0.35,
            },
            Goal::Peer { limit: 2.0 },
        ],
    };
    let mut pushes = Vec::new();
    let floor = || {
        pushes.push(Figure::plain(push_rate(bench, &pattern, total)?));
        floor::pipe(&bench.own, total)
    };
    let lines = vec![line("one"), line("eight")];
    let mut rows = bench.placed_rounds(bench.pick(5, 3), lines, floor, |server, &floor| {
        let rate = |processes| rate(bench, server.client()?, &pattern, (processes, total), None);
        Ok(vec![
            Figure::against(rate(1)?, floor),
            Figure::against(rate(8)?, floor),
        ])
    });
    rows.push(ReportRow {
        name: "stream of bare frames, no server".to_owned(),
        unit: Unit::BytesPerSecond,
        base: "",
        goals: vec![],
        server: Ok(median_figure(&pushes)),
        peer: None,
    });
    rows
}

/// Bytes per second from `count` processes that write `total` bytes together, with or without a
/// policy.
pub(super) fn rate(
    bench: &Bench,
    mut client: BenchClient,
    pattern: &BytePattern,
    (processes, total): (u64, u64),
    sandbox: Option<&Sandbox>,
) -> anyhow::Result<f64> {
    let start = Instant::now();
    let emitters = Emitters::start(bench, &mut client, (processes, total), sandbox)?;
    emitters.drain(&mut client, pattern)?;
    Ok(total as f64 / start.elapsed().as_secs_f64())
}

/// Bytes per second from a process that only pushes frames with the pattern.
pub(super) fn push_rate(bench: &Bench, pattern: &BytePattern, total: u64) -> anyhow::Result<f64> {
    let responder = WebsocketResponder::start(&bench.own, Some(total))?;
    let mut client = BenchClient::connect(responder.address)?;
    let start = Instant::now();
    let pushed = Emitters {
        first: 0,
        each: total,
        seen: vec![EmitterState::default()],
    };
    pushed.drain(&mut client, pattern)?;
    Ok(total as f64 / start.elapsed().as_secs_f64())
}

/// Growth of a server's memory while the reader sleeps and then reads everything.
pub(super) fn sleeping_reader(bench: &Bench) -> Vec<ReportRow> {
    /// Bytes that a server retains for one process.
    const RETENTION: f64 = (1 << 20) as f64;
    const MARGIN: f64 = (8 << 20) as f64;
    let pattern = BytePattern::new();
    let total = total(bench);
    let nap = bench.pick(Duration::from_secs(2), Duration::from_millis(700));
    let line = RowSpec {
        name: format!("{} while the reader sleeps: growth", size(total)),
        unit: Unit::Bytes,
        base: "",
        goals: vec![Goal::Value {
            limit: RETENTION + MARGIN,
            aim: RETENTION + MARGIN,
        }],
    };
    bench.measure_each(1, line, |command| {
        let server = BenchServer::start_observed(command)?;
        let mut client = server.client()?;
        let before = server.resident_at_rest()?;
        let peak = peak_of(&server, || {
            let emitters = Emitters::start(bench, &mut client, (1, total), None)?;
            std::thread::sleep(nap);
            emitters.drain(&mut client, &pattern)
        })?;
        Ok(Figure::plain(peak.saturating_sub(before) as f64))
    })
}

/// Peak resident memory during `work`.
fn peak_of(server: &BenchServer, work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<u64> {
    let (done, peak) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                peak.fetch_max(server.resident().unwrap_or(0), Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let result = work();
        done.store(true, Ordering::Relaxed);
        result
    })?;
    Ok(peak.into_inner())
}

/// Processes that write the pattern.
struct Emitters {
    first: u64,
    each: u64,
    seen: Vec<EmitterState>,
}

/// State of one of them.
#[derive(Debug, Clone, Default)]
struct EmitterState {
    bytes: u64,
    /// Output, exited and closed events.
    events: u64,
    /// Sequence number of the last output.
    last: u64,
    exit: Option<i32>,
    /// Sequence number of the closed event.
    closed: Option<u64>,
}

impl EmitterState {
    /// Whether all announced events have arrived; a server may send exited after closed.
    fn is_complete(&self) -> bool {
        self.exit.is_some() && self.closed == Some(self.events)
    }
}

impl Emitters {
    /// Starts `count` of them, which write `total` bytes together.
    fn start(
        bench: &Bench,
        client: &mut BenchClient,
        (count, total): (u64, u64),
        sandbox: Option<&Sandbox>,
    ) -> anyhow::Result<Self> {
        let own = bench.own.display().to_string();
        let each = total / count;
        let mut first = None;
        for _ in 0..count {
            let argv = [&own, "--emit-pattern", &each.to_string()];
            let (_, process) = client.start_in(sandbox, &argv, ChildStdio::Pipe)?;
            first.get_or_insert(process);
        }
        let first = first.context("no process was started")?;
        Ok(Self {
            first,
            each,
            seen: vec![EmitterState::default(); count as usize],
        })
    }

    /// Reads until all are complete; checks every byte and every sequence number.
    fn drain(mut self, client: &mut BenchClient, pattern: &BytePattern) -> anyhow::Result<()> {
        let mut left = self.seen.len();
        while left > 0 {
            let message = client
                .receive()
                .with_context(|| format!("got only {:?}", self.seen))?;
            let seen = match message {
                BenchMessage::Output {
                    process,
                    seq,
                    chunk,
                } => {
                    let seen = self.of(process)?;
                    ensure!(seq > seen.last, "output {seq} came after {}", seen.last);
                    seen.last = seq;
                    seen.bytes += pattern
                        .check_text(seen.bytes, &chunk)
                        .with_context(|| format!("wrong bytes after {}", seen.bytes))?;
                    seen
                }
                BenchMessage::Exited { process, code } => {
                    let seen = self.of(process)?;
                    seen.exit = Some(code);
                    seen
                }
                BenchMessage::Closed { process, seq } => {
                    let seen = self.of(process)?;
                    seen.closed = Some(seq);
                    seen
                }
                BenchMessage::Response { .. }
                | BenchMessage::Data { .. }
                | BenchMessage::Delta { .. }
                | BenchMessage::Other => continue,
            };
            seen.events += 1;
            left -= usize::from(seen.is_complete());
        }
        for seen in &self.seen {
            ensure!(seen.exit == Some(0), "a child ended badly: {seen:?}");
            ensure!(
                seen.bytes == self.each,
                "{} of {} bytes came",
                seen.bytes,
                self.each
            );
        }
        Ok(())
    }

    fn of(&mut self, process: u64) -> anyhow::Result<&mut EmitterState> {
        let index = process.checked_sub(self.first).map(|index| index as usize);
        index
            .and_then(|index| self.seen.get_mut(index))
            .context("output of an unknown process")
    }
}
