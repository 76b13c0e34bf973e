//! Processes that do nothing: from `process/start` to `process/closed`.

use std::time::{Duration, Instant};

use anyhow::ensure;

use super::{Bench, Line, size};
use crate::client::{Client, Stdio};
use crate::floor::{self, TRUE};
use crate::report::{Figure, Goal, Row, Unit};
use crate::server::Server;
use crate::stats::median;
use crate::wire::Message;

/// How many starts are in flight where more than one is.
const WIDTH: usize = 16;
/// A server that takes 50 ms for each process is cut short after this.
const PATIENCE: Duration = Duration::from_millis(400);

/// Pipes and terminals, one by one and sixteen at a time, on one connection.
pub(super) fn run(bench: &Bench) -> Vec<Row> {
    let (count, many) = (40, bench.pick(160, 80));
    let line = |name: &str, goals| Line {
        name: format!("spawn {name}"),
        unit: Unit::Seconds,
        base: "posix_spawn",
        goals,
    };
    let rate = |name: &str, goals| Line {
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
            Figure::against(one_by_one(&mut client, count, Stdio::Pipe)?, one),
            Figure::against(one_by_one(&mut client, count, Stdio::Tty)?, one),
            Figure::against(side_by_side(&mut client, many, Stdio::Pipe)?, rate),
            Figure::against(side_by_side(&mut client, many, Stdio::Tty)?, rate),
        ])
    })
}

/// The same for a server that holds much memory, against itself before.
///
/// Memory is made resident by what every server does: it retains the output of processes that have
/// ended, for half a minute.
pub(super) fn large(bench: &Bench) -> Vec<Row> {
    let goal: u64 = bench.pick(1 << 30, 256 << 20);
    let count = bench.pick(400, 100);
    let line = Line {
        name: format!("spawn pipe p50 at {} resident", size(goal)),
        unit: Unit::Seconds,
        base: "own when small",
        goals: vec![Goal::Base {
            limit: 1.2,
            aim: 1.2,
        }],
    };
    bench.each(1, line, |command| {
        let server = Server::start_observed(command)?;
        let mut client = server.client()?;
        one_by_one(&mut client, count / 4, Stdio::Pipe)?;
        let small = steady(&mut client, count)?;
        // Several, because one alone does not keep every server busy.
        let mut growers = [server.client()?, server.client()?, server.client()?];
        grow(&server, &mut growers, goal)?;
        let large = steady(&mut client, count)?;
        let after = server.resident()?;
        ensure!(
            after >= goal * 9 / 10,
            "it fell back to {} while measured",
            size(after)
        );
        Ok(Figure::against(large, small))
    })
}

/// The calmest of several blocks: before and after cannot take turns, and noise only adds.
fn steady(client: &mut Client, count: usize) -> anyhow::Result<f64> {
    const BLOCKS: usize = 5;
    let mut lowest = f64::INFINITY;
    for _ in 0..BLOCKS {
        lowest = lowest.min(one_by_one(client, count / BLOCKS, Stdio::Pipe)?);
    }
    Ok(lowest)
}

/// Starts processes until the server is large; their sessions live as long as the clients.
fn grow(server: &Server, clients: &mut [Client], goal: u64) -> anyhow::Result<()> {
    /// Retained output is forgotten after 30 s, and the measurement needs its part of that.
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
                client.start(&ARGV, Stdio::Pipe)?;
            }
        }
        for client in &mut *clients {
            ends(client, WIDTH)?;
        }
    }
}

/// Seconds from start to closed: the median.
fn one_by_one(client: &mut Client, count: usize, stdio: Stdio) -> anyhow::Result<f64> {
    let begin = Instant::now();
    let mut samples = Vec::with_capacity(count);
    while samples.len() < count && begin.elapsed() < PATIENCE {
        let start = Instant::now();
        client.start(&[TRUE], stdio)?;
        ends(client, 1)?;
        samples.push(start.elapsed().as_secs_f64());
    }
    Ok(median(&samples))
}

/// Processes per second while [`WIDTH`] of them are in flight.
fn side_by_side(client: &mut Client, count: usize, stdio: Stdio) -> anyhow::Result<f64> {
    let start = Instant::now();
    for _ in 0..WIDTH {
        client.start(&[TRUE], stdio)?;
    }
    let mut started = WIDTH;
    while started < count && start.elapsed() < PATIENCE {
        ends(client, 1)?;
        client.start(&[TRUE], stdio)?;
        started += 1;
    }
    ends(client, WIDTH)?;
    Ok(started as f64 / start.elapsed().as_secs_f64())
}

/// Waits until so many more processes have closed, whichever they are.
pub(super) fn ends(client: &mut Client, mut count: usize) -> anyhow::Result<()> {
    while count > 0 {
        match client.receive()? {
            Message::Exited { code, .. } => ensure!(code == 0, "a child exited with {code}"),
            Message::Closed { .. } => count -= 1,
            _ => {}
        }
    }
    Ok(())
}
