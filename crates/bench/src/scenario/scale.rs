//! How cost grows with numbers: processes, sessions, connections, readers of one process, watched
//! directories.
//!
//! Each kind is created in sizes up to 10,000 on a server of its own. Time, CPU and memory of each
//! size go to standard error; the rows hold the exponent `e` of cost = size^e between the two
//! largest sizes, where constant costs no longer count. 1 is linear.

use std::fs;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use exec_server_client::protocol::PathUri;
use rustix::process::Pid;

use super::{Bench, Line};
use crate::client::{Client, Stdio};
use crate::report::{Figure, Goal, Row, Unit};
use crate::server::{CommandLine, Server};

/// Room for the largest size.
const LIMITS: [&str; 6] = [
    "--set",
    "limits.processes=20000",
    "--set",
    "limits.processes_per_session=20000",
    "--set",
    "limits.sessions=20000",
];
const MORE_LIMITS: [&str; 4] = [
    "--set",
    "limits.connections=40000",
    "--set",
    "limits.connections_per_address=40000",
];

/// Requests that are sent before their answers are awaited.
const BATCH: usize = 50;

/// What one size cost.
#[derive(Debug, Clone, Copy)]
struct Cost {
    seconds: f64,
    cpu_seconds: f64,
    bytes: f64,
}

/// A kind of object that there can be many of.
struct Kind {
    name: &'static str,
    /// Makes so many of them and ends them; calls the closure when all are there.
    run: fn(&Server, usize, There<'_>) -> anyhow::Result<()>,
}

/// Called when all objects are there.
type There<'a> = &'a mut dyn FnMut() -> anyhow::Result<()>;

const KINDS: [Kind; 6] = [
    Kind {
        name: "processes",
        run: processes,
    },
    Kind {
        name: "processes ended one by one",
        run: terminated,
    },
    Kind {
        name: "sessions",
        run: sessions,
    },
    Kind {
        name: "connections",
        run: connections,
    },
    Kind {
        name: "readers of one process",
        run: readers,
    },
    Kind {
        name: "watched directories",
        run: watched,
    },
];

pub(super) fn run(bench: &Bench) -> Vec<Row> {
    let sizes: &[usize] = bench.pick(&[100, 1_000, 5_000, 10_000], &[100, 1_000, 2_000]);
    let bench = bench.without_peer();
    let mut rows = Vec::new();
    for kind in KINDS {
        let lines = ["time", "CPU", "memory"].map(|of| Line {
            name: format!("scale: {}, exponent of {of}", kind.name),
            unit: Unit::Number,
            base: "",
            goals: vec![Goal::Value {
                limit: 1.1,
                aim: 1.1,
            }],
        });
        let prepare = |command: &CommandLine| Ok(command.clone());
        rows.extend(bench.alone(1, lines.into(), prepare, |command| {
            let mut costs = Vec::new();
            for &size in sizes {
                let cost = measure(command, &kind, size)?;
                eprintln!(
                    "{} {}: {:.3} s, {:.3} s of CPU, {:.1} MiB",
                    size,
                    kind.name,
                    cost.seconds,
                    cost.cpu_seconds,
                    cost.bytes / 1024.0 / 1024.0
                );
                costs.push((size as f64, cost));
            }
            let [.., (small, before), (large, after)] = costs[..] else {
                anyhow::bail!("one size only")
            };
            let exponent = |of: fn(Cost) -> f64| {
                // Below these a figure is noise of the clock.
                let (before, after) = (of(before).max(1e-3), of(after).max(1e-3));
                Figure::plain((after / before).ln() / (large / small).ln())
            };
            Ok(vec![
                exponent(|cost| cost.seconds),
                exponent(|cost| cost.cpu_seconds),
                exponent(|cost| cost.bytes),
            ])
        }));
    }
    rows
}

fn measure(command: &CommandLine, kind: &Kind, size: usize) -> anyhow::Result<Cost> {
    let options = [&LIMITS[..], &MORE_LIMITS[..]].concat();
    let server = Server::start_with(command, &options)?.observed()?;
    // What the first of a kind costs once is not the cost of each.
    (kind.run)(&server, 20, &mut || Ok(()))?;
    let memory = server.own_memory()?;
    let processes = [server.own_pid(), server.serving_pid()];
    let cpu = cpu_seconds(&processes)?;
    let begun = Instant::now();
    let mut bytes = 0.0;
    let mut observing = Duration::ZERO;
    (kind.run)(&server, size, &mut || {
        let observed = Instant::now();
        bytes = server.own_memory()? as f64 - memory as f64;
        observing += observed.elapsed();
        Ok(())
    })?;
    Ok(Cost {
        seconds: (begun.elapsed() - observing).as_secs_f64(),
        cpu_seconds: cpu_seconds(&processes)? - cpu,
        bytes,
    })
}

/// CPU time of these processes, without that of their children.
fn cpu_seconds(processes: &[Pid]) -> anyhow::Result<f64> {
    /// Of the times in `/proc/PID/stat`, on every Linux.
    const TICKS_PER_SECOND: f64 = 100.0;
    let mut ticks = 0;
    for pid in processes {
        let path = format!("/proc/{}/stat", pid.as_raw_nonzero());
        let stat = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let (_, fields) = stat.rsplit_once(')').context("no name in the status")?;
        // User and system time are the 14th and 15th field, the 12th and 13th after the name.
        for field in fields.split_whitespace().skip(11).take(2) {
            ticks += field.parse::<u64>()?;
        }
    }
    Ok(ticks as f64 / TICKS_PER_SECOND)
}

/// Starts so many processes that sleep.
fn sleepers(client: &mut Client, count: usize) -> anyhow::Result<Vec<u64>> {
    let mut started = Vec::with_capacity(count);
    while started.len() < count {
        let batch = BATCH.min(count - started.len());
        for _ in 0..batch {
            started.push(client.start(&["sleep", "1000"], Stdio::Pipe)?.1);
        }
        client.answers(batch)?;
    }
    Ok(started)
}

/// Processes that the end of their session ends.
fn processes(server: &Server, count: usize, there: There<'_>) -> anyhow::Result<()> {
    let mut client = server.client()?;
    sleepers(&mut client, count)?;
    there()?;
    let ended = client.ask("session/end", "{}")?;
    client.answer(ended)
}

/// Processes that are terminated by a request each.
fn terminated(server: &Server, count: usize, there: There<'_>) -> anyhow::Result<()> {
    let mut client = server.client()?;
    let started = sleepers(&mut client, count)?;
    there()?;
    for batch in started.chunks(BATCH) {
        for &process in batch {
            client.terminate(process)?;
        }
        client.answers(batch.len())?;
    }
    let ended = client.ask("session/end", "{}")?;
    client.answer(ended)
}

/// Sessions that wait for their clients, then all of their ends.
fn sessions(server: &Server, count: usize, there: There<'_>) -> anyhow::Result<()> {
    let mut clients = Vec::with_capacity(count);
    for _ in 0..count {
        clients.push(server.client()?);
    }
    there()?;
    for client in &mut clients {
        let ended = client.ask("session/end", "{}")?;
        client.answer(ended)?;
    }
    Ok(())
}

/// Connections that have upgraded and sent nothing yet.
fn connections(server: &Server, count: usize, there: There<'_>) -> anyhow::Result<()> {
    let mut clients = Vec::with_capacity(count);
    for _ in 0..count {
        clients.push(Client::connect(server.address)?);
    }
    there()?;
    drop(clients);
    // The last one is answered after all the others have ended.
    drop(server.client()?);
    drop(TcpStream::connect(server.address)?);
    Ok(())
}

/// Requests that wait for the next output of one process, all answered by one line of it.
fn readers(server: &Server, count: usize, there: There<'_>) -> anyhow::Result<()> {
    let mut owner = server.client()?;
    let (request, process) = owner.start(&["cat"], Stdio::PipeWithInput)?;
    owner.answer(request)?;
    let params = format!(
        r#"{{"processId":"{}","afterSeq":0,"waitMs":60000}}"#,
        crate::wire::process_id(process)
    );
    owner.ask_batch("process/read", &params, count)?;
    there()?;
    owner.write(process, b"line\n")?;
    // The write is answered as well.
    owner.answers(count + 1)?;
    let ended = owner.ask("session/end", "{}")?;
    owner.answer(ended)
}

/// A tree of so many directories under one watch.
fn watched(server: &Server, count: usize, there: There<'_>) -> anyhow::Result<()> {
    let tree = tempfile::tempdir()?;
    for number in 0..count {
        fs::create_dir_all(tree.path().join(format!("{}/{number}", number % 100)))?;
    }
    let mut client = server.client()?;
    let path = PathUri::from_native(tree.path())?;
    let params = format!(r#"{{"path":"{path}","recursive":true,"watchId":"w"}}"#);
    let request = client.ask("fs/watch", &params)?;
    client.answer(request)?;
    there()?;
    let ended = client.ask("session/end", "{}")?;
    client.answer(ended)?;
    ensure!(tree.path().is_dir(), "the tree is gone");
    Ok(())
}
