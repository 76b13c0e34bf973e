//! Resident memory of an idle server, of a running process and of an idle connection.

use std::time::Duration;

use super::spawn::wait_closed;
use super::{Bench, RowSpec};
use crate::client::{BenchClient, ChildStdio};
use crate::floor::TRUE;
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::BenchServer;

const KIB: f64 = 1024.0;
const MIB: f64 = 1024.0 * KIB;

fn line(name: String, limit: f64, aim: f64) -> RowSpec {
    RowSpec {
        name,
        unit: Unit::Bytes,
        base: "",
        goals: vec![Goal::Value { limit, aim }],
    }
}

/// A server that has just served its first connection, and the same some seconds later, when its
/// start-up code has left memory.
pub(super) fn idle(bench: &Bench) -> Vec<ReportRow> {
    let mut rows = served(bench);
    let line = line(
        "idle server and guardian, proportional set".to_owned(),
        6.0 * MIB,
        5.0 * MIB,
    );
    rows.extend(
        bench
            .without_peer()
            .measure_each(bench.pick(3, 1), line, |command| {
                let server = BenchServer::start_observed(command)?;
                drop(server.client()?);
                std::thread::sleep(AT_REST);
                Ok(Figure::plain(server.proportional()? as f64))
            }),
    );
    let line = self::line(
        "idle server and guardian, own memory".to_owned(),
        2.0 * MIB,
        1.5 * MIB,
    );
    rows.extend(
        bench
            .without_peer()
            .measure_each(bench.pick(3, 1), line, |command| {
                let server = BenchServer::start_observed(command)?;
                drop(server.client()?);
                std::thread::sleep(AT_REST);
                Ok(Figure::plain(server.own_of_all()? as f64))
            }),
    );
    rows
}

/// Time after which a server has returned what only its start-up needed.
pub(super) const AT_REST: Duration = Duration::from_secs(2);

fn served(bench: &Bench) -> Vec<ReportRow> {
    let line = line("idle server resident".to_owned(), 14.0 * MIB, 7.0 * MIB);
    bench.measure_each(bench.pick(3, 1), line, |command| {
        let server = BenchServer::start_observed(command)?;
        drop(server.client()?);
        Ok(Figure::plain(server.resident_at_rest()? as f64))
    })
}

/// Memory added by each of many running processes.
pub(super) fn processes(bench: &Bench) -> Vec<ReportRow> {
    let count = bench.pick(500, 200);
    let line = line(
        format!("per live process, of {count}"),
        32.0 * KIB,
        16.0 * KIB,
    );
    bench.measure_each(1, line, |command| {
        let server = BenchServer::start_observed(command)?;
        let mut client = server.client()?;
        // Excludes one-time costs of the first processes.
        for _ in 0..16 {
            client.start(&[TRUE], ChildStdio::Pipe)?;
            wait_closed(&mut client, 1)?;
        }
        let before = server.resident_at_rest()?;
        let mut processes = Vec::with_capacity(count);
        while processes.len() < count {
            // Each batch gets a response before the next, so that no request is queued in the server's
            // memory.
            const BATCH: usize = 20;
            for _ in 0..BATCH {
                processes.push(client.start(&["sleep", "1000"], ChildStdio::Pipe)?.1);
            }
            client.answers(BATCH)?;
        }
        let after = server.resident_at_rest()?;
        for process in processes {
            client.terminate(process)?;
        }
        Ok(Figure::plain((after as f64 - before as f64) / count as f64))
    })
}

/// Memory added by each of many connections, each with its own session.
pub(super) fn connections(bench: &Bench) -> Vec<ReportRow> {
    let count = bench.pick(300, 150);
    let line = line(
        format!("per idle connection, of {count}"),
        48.0 * KIB,
        24.0 * KIB,
    );
    bench.measure_each(1, line, |command| {
        let server = BenchServer::start_observed(command)?;
        let _first = server.client()?;
        let before = server.resident_at_rest()?;
        let clients: Vec<BenchClient> = (0..count)
            .map(|_| server.client())
            .collect::<anyhow::Result<_>>()?;
        let after = server.resident_at_rest()?;
        drop(clients);
        Ok(Figure::plain((after as f64 - before as f64) / count as f64))
    })
}
