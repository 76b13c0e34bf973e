//! Processes without work: from `process/start` to `process/closed`.

use std::time::{Duration, Instant};

use anyhow::ensure;

use super::{Bench, RowSpec, size};
use crate::client::{BenchClient, ChildStdio};
use crate::floor::{self, TRUE};
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::BenchServer;
use crate::stats::median;
use crate::wire::BenchMessage;

/// Concurrent starts in rows with more than one.
const WIDTH: usize = 16;
/// Time limit of one measurement; ends it early on a server that takes 50 ms per process.
const TIME_LIMIT: Duration = Duration::from_millis(400);

/// Pipes and terminals, sequentially and sixteen at a time, on one connection.
pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    let (count, many) = (40, bench.pick(160, 80));
    let line = |name: &str, goals| RowSpec {
        name: format!("spawn {name}"),
        unit: Unit::Seconds,
        base: "posix_spawn",
        goals,
    };
    let rate = |name: &str, goals| RowSpec {
        unit: Unit::PerSecond,
        base: "posix_spawn x4",
        ..line(name, goals)
    };
    let lines = vec![
        line(
            "pipe p50",
            vec![Goal::Base {
                limit: 1.7,
                aim: 1.3,
            }],
        ),
        line(
            "tty p50",
            vec![Goal::Base {
                limit: 2.0,
                aim: 1.5,
            }],
        ),
        rate(
            "pipe 16-way",
            vec![Goal::Base {
                limit: 0.7,
                aim: 0.9,
            }],
        ),
        rate("tty 16-way", vec![]),
    ];
    let floor = || Ok((floor::spawn(count)?, floor::spawn_rate(many)?));
    bench.rounds(bench.pick(13, 3), lines, floor, |server, &(one, rate)| {
        let mut client = server.client()?;
        Ok(vec![
            Figure::against(sequential(&mut client, count, ChildStdio::Pipe)?, one),
            Figure::against(sequential(&mut client, count, ChildStdio::Tty)?, one),
            Figure::against(concurrent(&mut client, many, ChildStdio::Pipe)?, rate),
            Figure::against(concurrent(&mut client, many, ChildStdio::Tty)?, rate),
        ])
    })
}

/// The same on a server with much resident memory, compared with itself before.
///
/// Memory becomes resident through what every server does: it retains the output of ended processes
/// for half a minute.
pub(super) fn large(bench: &Bench) -> Vec<ReportRow> {
    let goal: u64 = bench.pick(1 << 30, 256 << 20);
    let count = bench.pick(400, 100);
    let line = RowSpec {
        name: format!("spawn pipe p50 at {} resident", size(goal)),
        unit: Unit::Seconds,
        base: "own when small",
        goals: vec![Goal::Base {
            limit: 1.2,
            aim: 1.2,
        }],
    };
    bench.measure_each(1, line, |command| {
        let server = BenchServer::start_observed(command)?;
        let mut client = server.client()?;
        sequential(&mut client, count / 4, ChildStdio::Pipe)?;
        let small = best_block(&mut client, count)?;
        // Several clients, because one alone does not keep every server busy.
        let mut growers = [server.client()?, server.client()?, server.client()?];
        grow(&server, &mut growers, goal)?;
        let large = best_block(&mut client, count)?;
        let after = server.resident()?;
        ensure!(
            after >= goal * 9 / 10,
            "it fell back to {} while measured",
            size(after)
        );
        Ok(Figure::against(large, small))
    })
}

/// Best of several blocks: before and after cannot be measured in turns, and noise only increases a
/// figure.
fn best_block(client: &mut BenchClient, count: usize) -> anyhow::Result<f64> {
    const BLOCKS: usize = 5;
    let mut lowest = f64::INFINITY;
    for _ in 0..BLOCKS {
        lowest = lowest.min(sequential(client, count / BLOCKS, ChildStdio::Pipe)?);
    }
    Ok(lowest)
}

/// Starts processes until the server has reached `goal`; their sessions live as long as the
/// clients.
fn grow(server: &BenchServer, clients: &mut [BenchClient], goal: u64) -> anyhow::Result<()> {
    /// Retained output expires after 30 s, of which the measurement needs a part.
    const GROWTH: Duration = Duration::from_secs(22);
    /// A little more than one process can retain.
    const ARGV: [&str; 4] = ["head", "-c", "1114112", "/dev/zero"];
    let start = Instant::now();
    loop {
        let resident = server.resident()?;
        if resident >= goal {
            return Ok(());
        }
        ensure!(
            start.elapsed() < GROWTH,
            "it cannot be brought to {}: {} after {GROWTH:?}",
            size(goal),
            size(resident)
        );
        for client in &mut *clients {
            for _ in 0..WIDTH {
                client.start(&ARGV, ChildStdio::Pipe)?;
            }
        }
        for client in &mut *clients {
            wait_closed(client, WIDTH)?;
        }
    }
}

/// Median seconds from start to closed.
fn sequential(client: &mut BenchClient, count: usize, stdio: ChildStdio) -> anyhow::Result<f64> {
    let begin = Instant::now();
    let mut samples = Vec::with_capacity(count);
    while samples.len() < count && begin.elapsed() < TIME_LIMIT {
        let start = Instant::now();
        client.start(&[TRUE], stdio)?;
        wait_closed(client, 1)?;
        samples.push(start.elapsed().as_secs_f64());
    }
    Ok(median(&samples))
}

/// Processes per second with [`WIDTH`] of them concurrently.
fn concurrent(client: &mut BenchClient, count: usize, stdio: ChildStdio) -> anyhow::Result<f64> {
    let start = Instant::now();
    for _ in 0..WIDTH {
        client.start(&[TRUE], stdio)?;
    }
    let mut started = WIDTH;
    while started < count && start.elapsed() < TIME_LIMIT {
        wait_closed(client, 1)?;
        client.start(&[TRUE], stdio)?;
        started += 1;
    }
    wait_closed(client, WIDTH)?;
    Ok(started as f64 / start.elapsed().as_secs_f64())
}

/// Waits until `count` more processes have closed, in any order.
pub(super) fn wait_closed(client: &mut BenchClient, mut count: usize) -> anyhow::Result<()> {
    while count > 0 {
        match client.receive()? {
            BenchMessage::Exited { code, .. } => ensure!(code == 0, "a child exited with {code}"),
            BenchMessage::Closed { .. } => count -= 1,
            _ => {}
        }
    }
    Ok(())
}
