//! Keystrokes: from `process/write` to the terminal's echo.

use std::time::{Duration, Instant};

use anyhow::ensure;

use super::{Bench, RowSpec};
use crate::client::{BenchClient, ChildStdio};
use crate::floor::{ECHO, TcpEcho, TerminalEcho};
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::stats::{median, percentile};
use crate::wire::BenchMessage;

/// Receive buffer of the client: 64 KiB.
///
/// A default buffer grows to megabytes during a flood, and a keystroke's echo then waits behind all
/// of it in the client's kernel, which no server can change. A client that needs low latency limits
/// its buffer.
const RECEIVE_BUFFER: usize = 64 * 1024;
/// Time limit of one measurement; ends it early on a server that takes 40 ms per echo.
const TIME_LIMIT: Duration = Duration::from_millis(700);

/// The same terminal alone, and beside a process that floods the same connection.
pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    let count = bench.pick(500, 300);
    let line = |name: &str, base, goals| RowSpec {
        name: format!("echo {name}"),
        unit: Unit::Seconds,
        base,
        goals,
    };
    let lines = vec![
        line(
            "p50",
            "pty + tcp",
            vec![Goal::Base {
                limit: 1.6,
                aim: 1.6,
            }],
        ),
        line(
            "p99",
            "pty + tcp",
            vec![Goal::Base {
                limit: 4.0,
                aim: 4.0,
            }],
        ),
        line(
            "in a flood p50",
            "own calm",
            vec![Goal::Base {
                limit: 5.0,
                aim: 2.0,
            }],
        ),
        line("in a flood p99", "own calm", vec![]),
        RowSpec {
            unit: Unit::BytesPerSecond,
            ..line("in a flood: the flood", "", vec![])
        },
    ];
    bench.placed_rounds(
        bench.pick(9, 3),
        lines,
        || Ok(()),
        |server, ()| {
            let mut floor = (TerminalEcho::start()?, TcpEcho::start()?);
            let client = BenchClient::connect_with_buffer(server.address, RECEIVE_BUFFER)?;
            let mut terminal = TerminalClient::start(client.ready()?)?;
            let (floor, calm) = terminal.type_keys_beside(&mut floor, count)?;
            let (calm50, calm99) = (percentile(&calm, 50.0), percentile(&calm, 99.0));
            let flood = terminal.start_flood(bench)?;
            let start = Instant::now();
            terminal.flooded = 0;
            let busy = terminal.type_keys(count / 2, Duration::from_millis(1))?;
            let rate = terminal.flooded as f64 / start.elapsed().as_secs_f64();
            terminal.client.terminate(flood)?;
            terminal.client.closed(flood)?;
            terminal.client.terminate(terminal.process)?;
            terminal.client.closed(terminal.process)?;
            Ok(vec![
                Figure::against(calm50, floor),
                Figure::against(calm99, floor),
                Figure::against(percentile(&busy, 50.0), calm50),
                Figure::against(percentile(&busy, 99.0), calm99),
                Figure::plain(rate),
            ])
        },
    )
}

/// Client that types into a terminal.
pub(super) struct TerminalClient {
    client: BenchClient,
    process: u64,
    /// Bytes of output of other processes.
    flooded: u64,
}

impl TerminalClient {
    /// Starts the terminal and warms it up.
    pub(super) fn start(mut client: BenchClient) -> anyhow::Result<Self> {
        let (_, process) = client.start(&ECHO, ChildStdio::Tty)?;
        let mut terminal = Self {
            client,
            process,
            flooded: 0,
        };
        terminal.echo()?;
        for _ in 0..20 {
            terminal.client.write(process, b"x")?;
            terminal.echo()?;
        }
        Ok(terminal)
    }

    fn start_flood(&mut self, bench: &Bench) -> anyhow::Result<u64> {
        let own = bench.own.display().to_string();
        let endless = u64::MAX.to_string();
        let (_, flood) = self
            .client
            .start(&[&own, "--emit-pattern", &endless], ChildStdio::Pipe)?;
        self.idle(Duration::from_millis(100))?;
        ensure!(self.flooded > 0, "the flood does not come");
        Ok(flood)
    }

    /// Seconds from each key to its echo, with a pause after each.
    pub(super) fn type_keys(&mut self, count: usize, pause: Duration) -> anyhow::Result<Vec<f64>> {
        let begin = Instant::now();
        let mut samples = Vec::with_capacity(count);
        while samples.len() < count && begin.elapsed() < TIME_LIMIT {
            let start = Instant::now();
            self.client.write(self.process, b"x")?;
            self.echo()?;
            samples.push(start.elapsed().as_secs_f64());
            if pause > Duration::ZERO {
                self.idle(pause)?;
            }
        }
        Ok(samples)
    }

    /// Measures a key on the machine alone and through the server, in turns; returns the seconds of
    /// each. Both depend on whether the kernel finds another core awake, which rarely changes.
    fn type_keys_beside(
        &mut self,
        (terminal, tcp): &mut (TerminalEcho, TcpEcho),
        count: usize,
    ) -> anyhow::Result<(f64, Vec<f64>)> {
        const TURN: usize = 25;
        let begin = Instant::now();
        let (mut terminals, mut round_trips, mut keys) = (Vec::new(), Vec::new(), Vec::new());
        while keys.len() < count && begin.elapsed() < TIME_LIMIT {
            terminals.extend(terminal.samples(TURN)?);
            round_trips.extend(tcp.samples(TURN)?);
            keys.extend(self.type_keys(TURN, Duration::ZERO)?);
        }
        Ok((median(&terminals) + median(&round_trips), keys))
    }

    /// Waits for output of the terminal.
    fn echo(&mut self) -> anyhow::Result<()> {
        while !self.receive()? {}
        Ok(())
    }

    /// Receives messages for at least `pause` during a flood.
    fn idle(&mut self, pause: Duration) -> anyhow::Result<()> {
        let start = Instant::now();
        while start.elapsed() < pause {
            self.receive()?;
        }
        Ok(())
    }

    /// Receives one message; returns whether it is output of the terminal.
    fn receive(&mut self) -> anyhow::Result<bool> {
        match self.client.receive()? {
            BenchMessage::Output { process, .. } if process == self.process => Ok(true),
            BenchMessage::Output { chunk, .. } => {
                self.flooded += (chunk.len() / 4 * 3) as u64;
                Ok(false)
            }
            _ => Ok(false),
        }
    }
}
