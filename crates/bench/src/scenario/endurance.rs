//! Long use: memory after bursts of commands and connections, and the cost of output in single
//! bytes.
//!
//! The run of an hour is `--soak`; growth with the number of objects is in `scale`.

use std::time::Duration;

use anyhow::ensure;
use exec_server_protocol::chunk::encoded_len;

use super::scale::cpu_seconds;
use super::spawn::wait_closed;
use super::{Bench, RowSpec};
use crate::client::{BenchClient, ChildStdio};
use crate::floor::TRUE;
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::{BenchServer, own_memory};
use crate::wire::BenchMessage;

const MIB: f64 = 1024.0 * 1024.0;

/// Objects that exist at the same time.
const BATCH: usize = 50;

pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    let bench = bench.without_peer();
    [
        after_commands(&bench),
        after_connections(&bench),
        single_bytes(&bench),
    ]
    .concat()
}

/// A row with the memory of the server some time after a burst.
fn memory_row(bench: &Bench, name: String) -> RowSpec {
    RowSpec {
        name: format!("{name}, {} s later", at_rest(bench).as_secs()),
        unit: Unit::Bytes,
        base: "",
        goals: vec![Goal::Value {
            limit: 10.0 * MIB,
            aim: 5.0 * MIB,
        }],
    }
}

/// Time in which the server returns memory to the system.
fn at_rest(bench: &Bench) -> Duration {
    Duration::from_secs(bench.pick(40, 15))
}

fn resting_memory(bench: &Bench, server: &BenchServer) -> anyhow::Result<Figure> {
    std::thread::sleep(at_rest(bench));
    Ok(Figure::plain(own_memory(server.serving_pid())? as f64))
}

fn end_session(client: &mut BenchClient) -> anyhow::Result<()> {
    let ended = client.ask("session/end", "{}")?;
    client.answer(ended)
}

fn after_commands(bench: &Bench) -> Vec<ReportRow> {
    let count = bench.pick(20_000, 4_000);
    let line = memory_row(bench, format!("own memory after {count} commands"));
    bench.measure_each(1, line, |command| {
        let server = BenchServer::start_observed(command)?;
        let mut client = server.client()?;
        for _ in 0..count / BATCH {
            for _ in 0..BATCH {
                client.start(&[TRUE], ChildStdio::Pipe)?;
            }
            wait_closed(&mut client, BATCH)?;
        }
        end_session(&mut client)?;
        resting_memory(bench, &server)
    })
}

fn after_connections(bench: &Bench) -> Vec<ReportRow> {
    let count = bench.pick(5_000, 1_000);
    let line = memory_row(bench, format!("own memory after {count} connections"));
    bench.measure_each(1, line, |command| {
        let server = BenchServer::start_observed(command)?;
        for _ in 0..count / BATCH {
            let mut clients = Vec::with_capacity(BATCH);
            for _ in 0..BATCH {
                clients.push(server.client()?);
            }
            for client in &mut clients {
                end_session(client)?;
            }
        }
        resting_memory(bench, &server)
    })
}

/// A child that writes one byte every 100 µs: bytes on the wire, and CPU time of the server.
fn single_bytes(bench: &Bench) -> Vec<ReportRow> {
    let count = bench.pick(30_000, 10_000);
    let line = |name: &str, unit, limit: f64| RowSpec {
        name: format!("one byte every 100 µs, {name} per byte"),
        unit,
        base: "",
        goals: vec![Goal::Value { limit, aim: limit }],
    };
    // Of a notification for each byte, the figures are 92 bytes and 26 µs.
    let lines = vec![
        line("bytes on the wire", Unit::Bytes, 46.0),
        line("CPU", Unit::Seconds, 13e-6),
    ];
    let prepare = |command: &crate::server::CommandLine| BenchServer::start_observed(command);
    let own = bench.own.display().to_string();
    bench.alone(bench.pick(3, 1), lines, prepare, |server| {
        let mut client = server.client()?;
        let processes = [server.serving_pid()];
        let count_text = count.to_string();
        let (received, cpu) = (client.received_bytes(), cpu_seconds(&processes)?);
        client.start(
            &[own.as_str(), "--emit-slowly", count_text.as_str()],
            ChildStdio::Pipe,
        )?;
        let mut text = 0;
        loop {
            match client.receive()? {
                BenchMessage::Output { chunk, .. } => {
                    let padding = chunk.iter().rev().take_while(|&&byte| byte == b'=').count();
                    text += chunk.len() / 4 * 3 - padding;
                }
                BenchMessage::Closed { .. } => break,
                _ => {}
            }
        }
        ensure!(text == count, "{text} of {count} bytes arrived");
        let wire = (client.received_bytes() - received) as f64;
        let cpu = cpu_seconds(&processes)? - cpu;
        debug_assert!(wire >= encoded_len(count) as f64);
        Ok(vec![
            Figure::plain(wire / count as f64),
            Figure::plain(cpu / count as f64),
        ])
    })
}
