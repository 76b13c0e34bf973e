//! Growth of cost with the number of processes, sessions, connections, readers of one process,
//! watched directories, and environments of a rendezvous server.
//!
//! Each kind is created in sizes up to 10,000 on a new server. Time, CPU and memory of each size go
//! to standard error; the rows contain the exponent `e` of cost = size^e between the largest size and
//! the largest one of at most its half, where constant costs no longer matter. 1 is linear.

use std::fs;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use exec_server_client::protocol::PathUri;
use rustix::process::{Pid, Resource, getrlimit};

use super::rendezvous::RestartableRendezvous;
use super::{Bench, RowSpec};
use crate::client::{BenchClient, ChildStdio};
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::{BenchServer, CommandLine, own_memory};

/// Server options that allow the largest size.
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

/// Requests that are sent before their responses are awaited.
const BATCH: usize = 50;

/// Measured cost of one case, at one number of processes or connections.
#[derive(Debug, Clone, Copy)]
struct SizeCost {
    seconds: f64,
    cpu_seconds: f64,
    bytes: f64,
}

/// A kind of object.
struct ObjectKind {
    name: &'static str,
    /// Descriptors that the server, or this program, needs for each.
    descriptors: usize,
    /// Creates this many objects and ends them; starts and stops the clock.
    run: fn(&BenchServer, usize, &mut Clock) -> anyhow::Result<()>,
}

/// Measures what happens between [`Clock::start`] and [`Clock::stop`].
struct Clock {
    /// Processes whose CPU time counts; the memory of the last one does.
    processes: Vec<Pid>,
    started_at: Instant,
    cpu: f64,
    memory: f64,
    cost: SizeCost,
}

impl Clock {
    fn new(processes: Vec<Pid>) -> Self {
        Self {
            processes,
            started_at: Instant::now(),
            cpu: 0.0,
            memory: 0.0,
            cost: SizeCost {
                seconds: 0.0,
                cpu_seconds: 0.0,
                bytes: 0.0,
            },
        }
    }

    /// To be called when all preparation outside the server is done.
    fn start(&mut self) -> anyhow::Result<()> {
        self.memory = self.memory_bytes()?;
        self.cpu = self.cpu_seconds()?;
        self.started_at = Instant::now();
        Ok(())
    }

    /// To be called when all objects exist.
    fn all_exist(&mut self) -> anyhow::Result<()> {
        let before = Instant::now();
        self.cost.bytes = self.memory_bytes()? - self.memory;
        self.started_at += before.elapsed();
        Ok(())
    }

    /// To be called when all objects have ended.
    fn stop(&mut self) -> anyhow::Result<()> {
        self.cost.seconds = self.started_at.elapsed().as_secs_f64();
        self.cost.cpu_seconds = self.cpu_seconds()? - self.cpu;
        Ok(())
    }

    fn memory_bytes(&self) -> anyhow::Result<f64> {
        let last = self.processes.last().context("no process")?;
        Ok(own_memory(*last)? as f64)
    }

    fn cpu_seconds(&self) -> anyhow::Result<f64> {
        cpu_seconds(&self.processes)
    }
}

const KINDS: [ObjectKind; 6] = [
    ObjectKind {
        name: "processes",
        descriptors: 3,
        run: processes,
    },
    ObjectKind {
        name: "processes ended one by one",
        descriptors: 3,
        run: terminated,
    },
    ObjectKind {
        name: "sessions",
        descriptors: 1,
        run: sessions,
    },
    ObjectKind {
        name: "connections",
        descriptors: 1,
        run: connections,
    },
    ObjectKind {
        name: "readers of one process",
        descriptors: 0,
        run: readers,
    },
    ObjectKind {
        name: "watched directories",
        descriptors: 0,
        run: watched,
    },
];

pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    let sizes: &[usize] = bench.pick(&[100, 1_000, 5_000, 10_000], &[100, 1_000, 2_000]);
    let bench = bench.without_peer();
    let mut rows = Vec::new();
    for kind in KINDS {
        let sizes = fitting(sizes, kind.descriptors);
        rows.extend(growth(&bench, kind.name, &sizes, |command, size| {
            measure(command, &kind, size)
        }));
    }
    let sizes = fitting(sizes, 1);
    rows.extend(growth(&bench, "environments", &sizes, environments));
    rows
}

/// Measures each size and returns the exponents.
fn growth(
    bench: &Bench,
    name: &str,
    sizes: &[usize],
    mut measure: impl FnMut(&CommandLine, usize) -> anyhow::Result<SizeCost>,
) -> Vec<ReportRow> {
    let lines = ["time", "CPU", "memory"].map(|of| RowSpec {
        name: format!("scale: {name}, exponent of {of}"),
        unit: Unit::Number,
        base: "",
        goals: vec![Goal::Value {
            limit: 1.1,
            aim: 1.1,
        }],
    });
    let prepare = |command: &CommandLine| Ok(command.clone());
    bench.alone(1, lines.into(), prepare, |command| {
        let mut costs = Vec::new();
        for &size in sizes {
            let cost = measure(command, size)?;
            eprintln!(
                "{} {name}: {:.3} s, {:.3} s of CPU, {:.1} MiB",
                size,
                cost.seconds,
                cost.cpu_seconds,
                cost.bytes / 1024.0 / 1024.0
            );
            costs.push((size as f64, cost));
        }
        // Between sizes that are closer to each other, noise of the machine decides the exponent.
        let (large, after) = *costs.last().context("no size")?;
        let smaller = costs.iter().rev().find(|(size, _)| *size <= large / 2.0);
        let (small, before) = *smaller.context("one size only")?;
        // Below `least` a figure is noise of the scheduler, of the kernel's CPU clock or of the
        // allocator.
        let exponent = |of: fn(SizeCost) -> f64, least: f64| {
            let (before, after) = (of(before).max(least), of(after).max(least));
            Figure::plain((after / before).ln() / (large / small).ln())
        };
        Ok(vec![
            exponent(|cost| cost.seconds, 0.02),
            exponent(|cost| cost.cpu_seconds, 0.05),
            exponent(|cost| cost.bytes, 2.0 * 1024.0 * 1024.0),
        ])
    })
}

/// The sizes for which there are descriptors enough. One that does not fit is replaced by the largest
/// that does, so that machines with a low limit measure what they can.
fn fitting(sizes: &[usize], descriptors: usize) -> Vec<usize> {
    /// For everything else that a server has open.
    const OTHERS: u64 = 500;
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let most = match descriptors {
        0 => usize::MAX,
        each => usize::try_from(limit.saturating_sub(OTHERS)).unwrap_or(usize::MAX) / each,
    };
    let mut fitting: Vec<usize> = sizes.iter().map(|&size| size.min(most)).collect();
    fitting.dedup();
    fitting
}

fn measure(command: &CommandLine, kind: &ObjectKind, size: usize) -> anyhow::Result<SizeCost> {
    let options = [&LIMITS[..], &MORE_LIMITS[..]].concat();
    let server = BenchServer::start_with(command, &options)?.observed()?;
    // Excludes one-time costs of the first object of a kind.
    let clock = || Clock::new(vec![server.own_pid(), server.serving_pid()]);
    (kind.run)(&server, 20, &mut clock())?;
    let mut clock = clock();
    (kind.run)(&server, size, &mut clock)?;
    Ok(clock.cost)
}

/// CPU time of these processes, without that of their children.
pub(super) fn cpu_seconds(processes: &[Pid]) -> anyhow::Result<f64> {
    /// Unit of times in `/proc/PID/stat`, the same on every Linux.
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

/// Starts `count` processes that sleep.
fn sleepers(client: &mut BenchClient, count: usize) -> anyhow::Result<Vec<u64>> {
    let mut started = Vec::with_capacity(count);
    while started.len() < count {
        let batch = BATCH.min(count - started.len());
        for _ in 0..batch {
            started.push(client.start(&["sleep", "1000"], ChildStdio::Pipe)?.1);
        }
        client.answers(batch)?;
    }
    Ok(started)
}

/// Processes that end with their session.
fn processes(server: &BenchServer, count: usize, clock: &mut Clock) -> anyhow::Result<()> {
    let mut client = server.client()?;
    clock.start()?;
    sleepers(&mut client, count)?;
    clock.all_exist()?;
    let ended = client.ask("session/end", "{}")?;
    client.answer(ended)?;
    clock.stop()
}

/// Processes that are terminated by one request each.
fn terminated(server: &BenchServer, count: usize, clock: &mut Clock) -> anyhow::Result<()> {
    let mut client = server.client()?;
    clock.start()?;
    let started = sleepers(&mut client, count)?;
    clock.all_exist()?;
    for batch in started.chunks(BATCH) {
        for &process in batch {
            client.terminate(process)?;
        }
        client.answers(batch.len())?;
    }
    let ended = client.ask("session/end", "{}")?;
    client.answer(ended)?;
    clock.stop()
}

/// Sessions that wait for their clients, and then all expire.
fn sessions(server: &BenchServer, count: usize, clock: &mut Clock) -> anyhow::Result<()> {
    let mut clients = Vec::with_capacity(count);
    clock.start()?;
    for _ in 0..count {
        clients.push(server.client()?);
    }
    clock.all_exist()?;
    for client in &mut clients {
        let ended = client.ask("session/end", "{}")?;
        client.answer(ended)?;
    }
    clock.stop()
}

/// Connections that have upgraded and sent nothing.
fn connections(server: &BenchServer, count: usize, clock: &mut Clock) -> anyhow::Result<()> {
    let mut clients = Vec::with_capacity(count);
    clock.start()?;
    for _ in 0..count {
        clients.push(BenchClient::connect(server.address)?);
    }
    clock.all_exist()?;
    drop(clients);
    // This connection gets a response only after all others have ended.
    drop(server.client()?);
    clock.stop()
}

/// Requests that wait for the next output of one process, all answered by one line of output.
fn readers(server: &BenchServer, count: usize, clock: &mut Clock) -> anyhow::Result<()> {
    let mut owner = server.client()?;
    let (request, process) = owner.start(&["cat"], ChildStdio::PipeWithInput)?;
    owner.answer(request)?;
    let params = format!(
        r#"{{"processId":"{}","afterSeq":0,"waitMs":60000}}"#,
        crate::wire::process_id(process)
    );
    clock.start()?;
    owner.ask_batch("process/read", &params, count)?;
    clock.all_exist()?;
    owner.write(process, b"line\n")?;
    // The response to the write is one more.
    owner.answers(count + 1)?;
    clock.stop()?;
    let ended = owner.ask("session/end", "{}")?;
    owner.answer(ended)
}

/// A tree of `count` directories under one watch.
fn watched(server: &BenchServer, count: usize, clock: &mut Clock) -> anyhow::Result<()> {
    let tree = tempfile::tempdir()?;
    for number in 0..count {
        fs::create_dir_all(tree.path().join(format!("{}/{number}", number % 100)))?;
    }
    let mut client = server.client()?;
    let path = PathUri::from_native(tree.path())?;
    let params = format!(r#"{{"path":"{path}","recursive":true,"watchId":"w"}}"#);
    clock.start()?;
    let request = client.ask("fs/watch", &params)?;
    client.answer(request)?;
    clock.all_exist()?;
    let ended = client.ask("session/end", "{}")?;
    client.answer(ended)?;
    clock.stop()?;
    ensure!(tree.path().is_dir(), "the tree was removed");
    Ok(())
}

/// Executors that register and attach to a rendezvous server, and then all leave.
fn environments(command: &CommandLine, count: usize) -> anyhow::Result<SizeCost> {
    let server = RestartableRendezvous::new(command)?;
    // The first registrations open files of the store, too.
    let before = server.descriptors()? + 4;
    drop(server.attach(20)?);
    server.wait_for_descriptors(before)?;
    let mut clock = Clock::new(vec![server.pid()?]);
    clock.start()?;
    let attached = server.attach(count)?;
    clock.all_exist()?;
    drop(attached);
    server.wait_for_descriptors(before)?;
    clock.stop()?;
    Ok(clock.cost)
}
