//! Keystrokes: from `process/write` until the terminal's echo is back.

use std::time::{Duration, Instant};

use anyhow::ensure;

use super::{Bench, Line};
use crate::client::{Client, Stdio};
use crate::floor::{ECHO, TcpEcho, TerminalEcho};
use crate::report::{Figure, Goal, Row, Unit};
use crate::stats::{median, percentile};
use crate::wire::Message;

/// The client's receive buffer.
///
/// A default one grows to megabytes under a flood, and a keystroke then waits behind all of them in
/// the client's own kernel, where no server can help. A client that cares for latency bounds it.
const RECEIVE_BUFFER: usize = 64 * 1024;
/// A server that takes 40 ms for each echo is cut short after this.
const PATIENCE: Duration = Duration::from_millis(700);

/// The same terminal alone, and beside a process that floods the same connection.
pub(super) fn run(bench: &Bench) -> Vec<Row> {
    let count = bench.pick(500, 300);
    let line = |name: &str, base, goals| Line {
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
        Line {
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
            let client = Client::connect_with_buffer(server.address, RECEIVE_BUFFER)?;
            let mut typist = Typist::start(client.ready()?)?;
            let (floor, calm) = typist.type_keys_beside(&mut floor, count)?;
            let (calm50, calm99) = (percentile(&calm, 50.0), percentile(&calm, 99.0));
            let flood = typist.start_flood(bench)?;
            let start = Instant::now();
            typist.flooded = 0;
            let busy = typist.type_keys(count / 2, Duration::from_millis(1))?;
            let rate = typist.flooded as f64 / start.elapsed().as_secs_f64();
            typist.client.terminate(flood)?;
            typist.client.closed(flood)?;
            typist.client.terminate(typist.process)?;
            typist.client.closed(typist.process)?;
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

/// Somebody who types into a terminal.
pub(super) struct Typist {
    client: Client,
    process: u64,
    /// Bytes that other processes wrote.
    flooded: u64,
}

impl Typist {
    /// Starts the terminal and warms it up.
    pub(super) fn start(mut client: Client) -> anyhow::Result<Self> {
        let (_, process) = client.start(&ECHO, Stdio::Tty)?;
        let mut typist = Self {
            client,
            process,
            flooded: 0,
        };
        typist.echo()?;
        for _ in 0..20 {
            typist.client.write(process, b"x")?;
            typist.echo()?;
        }
        Ok(typist)
    }

    fn start_flood(&mut self, bench: &Bench) -> anyhow::Result<u64> {
        let own = bench.own.display().to_string();
        let endless = u64::MAX.to_string();
        let (_, flood) = self
            .client
            .start(&[&own, "--emit-pattern", &endless], Stdio::Pipe)?;
        self.idle(Duration::from_millis(100))?;
        ensure!(self.flooded > 0, "the flood does not come");
        Ok(flood)
    }

    /// Seconds from each key to its echo, with a pause between them.
    pub(super) fn type_keys(&mut self, count: usize, pause: Duration) -> anyhow::Result<Vec<f64>> {
        let begin = Instant::now();
        let mut samples = Vec::with_capacity(count);
        while samples.len() < count && begin.elapsed() < PATIENCE {
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

    /// What the machine needs for a key, and seconds from each key to its echo, in turns: whether the
    /// kernel finds another core awake decides over both, and stays as it is for a while.
    fn type_keys_beside(
        &mut self,
        (terminal, tcp): &mut (TerminalEcho, TcpEcho),
        count: usize,
    ) -> anyhow::Result<(f64, Vec<f64>)> {
        const TURN: usize = 25;
        let begin = Instant::now();
        let (mut terminals, mut round_trips, mut keys) = (Vec::new(), Vec::new(), Vec::new());
        while keys.len() < count && begin.elapsed() < PATIENCE {
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

    /// Takes what comes for a while, during a flood: only what comes ends it.
    fn idle(&mut self, pause: Duration) -> anyhow::Result<()> {
        let start = Instant::now();
        while start.elapsed() < pause {
            self.receive()?;
        }
        Ok(())
    }

    /// Takes one message and says whether it is output of the terminal.
    fn receive(&mut self) -> anyhow::Result<bool> {
        match self.client.receive()? {
            Message::Output { process, .. } if process == self.process => Ok(true),
            Message::Output { chunk, .. } => {
                self.flooded += (chunk.len() / 4 * 3) as u64;
                Ok(false)
            }
            _ => Ok(false),
        }
    }
}
