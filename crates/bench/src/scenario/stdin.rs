//! Large input for one process, which checks every byte.

use std::time::Instant;

use anyhow::{bail, ensure};

use super::{Bench, RowSpec, size};
use crate::client::ChildStdio;
use crate::floor;
use crate::pattern::{BytePattern, WRITE_BYTES};
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::BenchServer;
use crate::wire::BenchMessage;

/// 16 writes of 64 KiB in flight: 1 MiB keeps the connection busy and does not fill it.
const WINDOW: usize = 16;

/// Writes of 64 KiB until the child has read and checked everything and exited.
///
/// The child gets the expected number of bytes as an argument, because some servers cannot close
/// its input.
pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    let pattern = BytePattern::new();
    let total: u64 = bench.pick(64 << 20, 16 << 20);
    let line = RowSpec {
        name: format!("stdin {} in 64 KiB writes", size(total)),
        unit: Unit::BytesPerSecond,
        base: "pipe",
        goals: vec![Goal::Peer { limit: 2.0 }, Goal::DesiredBase { aim: 0.3 }],
    };
    let floor = || floor::pipe(&bench.own, bench.pick(256 << 20, 64 << 20));
    bench.placed_rounds(bench.pick(5, 3), vec![line], floor, |server, &floor| {
        Ok(vec![Figure::against(
            rate(bench, server, &pattern, total)?,
            floor,
        )])
    })
}

fn rate(
    bench: &Bench,
    server: &BenchServer,
    pattern: &BytePattern,
    total: u64,
) -> anyhow::Result<f64> {
    let own = bench.own.display().to_string();
    let mut client = server.client()?;
    let argv = [&own, "--check-pattern", &total.to_string()];
    let (request, process) = client.start(&argv, ChildStdio::PipeWithInput)?;
    client.answer(request)?;
    let each = (0..total).step_by(WRITE_BYTES);
    let writes: Vec<_> = each
        .map(|offset| client.write_pattern(process, pattern, offset, WRITE_BYTES))
        .collect::<Result<_, _>>()?;
    let mut writes = writes.iter();
    let start = Instant::now();
    let (mut waiting, mut exited, mut closed) = (0, false, false);
    while !closed || waiting > 0 {
        if waiting < WINDOW
            && let Some(write) = writes.next()
        {
            client.send_encoded(write)?;
            waiting += 1;
            continue;
        }
        match client.receive()? {
            BenchMessage::Response { result, .. } => {
                ensure!(
                    result.contains("accepted"),
                    "a write was answered with {result}"
                );
                waiting -= 1;
            }
            BenchMessage::Exited { code, .. } => {
                ensure!(
                    code == 0,
                    "the child found wrong bytes and exited with {code}"
                );
                exited = true;
            }
            BenchMessage::Closed { .. } => closed = true,
            BenchMessage::Output { .. } => bail!("the child complained"),
            BenchMessage::Data { .. } | BenchMessage::Delta { .. } | BenchMessage::Other => {}
        }
    }
    let unsent = writes.len();
    ensure!(
        exited && unsent == 0,
        "the child left before {unsent} of the writes"
    );
    Ok(total as f64 / start.elapsed().as_secs_f64())
}
