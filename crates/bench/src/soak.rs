//! Endurance run: mixed work on one server for a long time, with a line of figures every period.
//!
//! Clients keep a server busy directly, over connections that are cut, under sandboxes and through
//! the relay. Each of the sixty periods prints memory, descriptors, threads, retained output and
//! the latency of an echo. The run fails if a figure of the last ten periods is above the same
//! figure of the first ten, or if a client saw a wrong byte.

use std::fs;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use exec_server_client::fs::{
    AccessOptions, CopyOptions, HashOptions, ReadDirectoryOptions, RemoveOptions, SearchOptions,
    TreeWalkOptions, WatchOptions, WriteOptions, child, uri,
};
use exec_server_client::protocol::process::{Delivery, StartParams, TerminateMode};
use exec_server_client::protocol::sandbox::Sandbox;
use exec_server_client::registry::RegistryConnectArgs;
use exec_server_client::{
    CollectOptions, ExecBackend as _, ExecProcessEvent, ExecServerClient, ExecutorFileSystem as _,
    RemoteExecServerConnectArgs,
};
use exec_server_sync::Mutex;
use rustix::process::Pid;

use crate::scenario::relay::{CuttableForwarder, RelaySetup, Terminal, name};
use crate::scenario::sandbox::policy;
use crate::scenario::server_options::scrape;
use crate::server::{CommandLine, serving_process};
use crate::stats::{median, percentile};

/// Lines that a run prints.
const PERIODS: usize = 60;
/// Periods at each end that are compared.
const COMPARED: usize = 10;

/// Runs the mixed work for `duration`; returns whether no figure grew.
pub(crate) fn run(command: &CommandLine, duration: Duration) -> anyhow::Result<bool> {
    let setup = RelaySetup::with_options(command, &["--metrics-listen", "127.0.0.1:0"])?;
    let metrics = setup
        .server
        .logged_address("metrics: http://", "/metrics")?;
    let observed = ObservedProcesses {
        server: serving_process(setup.server.own_pid())?,
        guardian: setup.server.own_pid(),
        executor: serving_process(setup.executor.own_pid())?,
        rendezvous: setup.rendezvous.own_pid(),
        metrics,
    };
    let work = Arc::new(SoakState::default());
    let registry = setup.registry.clone();
    let direct = setup.direct.clone();
    let threads = std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            setup
                .runtime
                .block_on(all(&work, &direct, &registry, setup.server.address))
        });
        let watched = watch(&observed, &work, duration);
        work.done.store(true, Ordering::Relaxed);
        let worked = worker
            .join()
            .map_err(|_| anyhow::anyhow!("a client panicked"));
        (watched, worked)
    });
    let (samples, worked) = threads;
    worked??;
    judge(&samples?, duration / PERIODS as u32)
}

/// State that the clients share with the thread that prints.
#[derive(Default)]
struct SoakState {
    done: AtomicBool,
    operations: AtomicU64,
    echoes: Mutex<Vec<f64>>,
    failure: Mutex<Option<String>>,
}

impl SoakState {
    fn is_running(&self) -> bool {
        !self.done.load(Ordering::Relaxed)
    }

    fn count(&self) {
        self.operations.fetch_add(1, Ordering::Relaxed);
    }
}

/// Processes that are observed.
struct ObservedProcesses {
    server: Pid,
    guardian: Pid,
    executor: Pid,
    rendezvous: Pid,
    metrics: SocketAddr,
}

/// The figures of one period, in the order of [`COLUMNS`].
type Sample = [f64; COLUMNS.len()];

/// Name and tolerance of each figure: the last periods may exceed the first by this factor plus
/// this amount.
const COLUMNS: [(&str, f64, f64); 17] = [
    ("server MiB", 1.1, 3.0),
    ("server fds", 1.1, 8.0),
    ("server threads", 1.1, 8.0),
    ("guardian MiB", 1.1, 1.0),
    ("guardian fds", 1.1, 4.0),
    ("guardian threads", 1.0, 0.0),
    ("retained KiB", 1.5, 8192.0),
    ("processes", 1.1, 20.0),
    ("executor MiB", 1.1, 3.0),
    ("executor fds", 1.1, 8.0),
    ("executor threads", 1.1, 8.0),
    ("rendezvous MiB", 1.1, 3.0),
    ("rendezvous fds", 1.1, 8.0),
    ("rendezvous threads", 1.1, 8.0),
    ("echo p50 us", 1.5, 100.0),
    ("echo p99 us", 2.0, 5000.0),
    ("operations", f64::INFINITY, 0.0),
];

fn watch(
    observed: &ObservedProcesses,
    work: &SoakState,
    duration: Duration,
) -> anyhow::Result<Vec<Sample>> {
    let period = duration / PERIODS as u32;
    let titles: Vec<&str> = COLUMNS.iter().map(|(name, ..)| *name).collect();
    print(&format!("period  {}", titles.join("  ")))?;
    let started_at = Instant::now();
    let mut samples = Vec::with_capacity(PERIODS);
    for number in 1..=PERIODS {
        while started_at.elapsed() < period * number as u32 {
            if let Some(failure) = work.failure.lock().take() {
                bail!("{failure}");
            }
            std::thread::sleep(Duration::from_millis(100).min(period));
        }
        let sample = sample(observed, work)?;
        let cells = sample.iter().zip(titles.iter());
        let cells: Vec<String> = cells
            .map(|(value, title)| format!("{value:>width$.1}", width = title.len()))
            .collect();
        print(&format!("{number:>6}  {}", cells.join("  ")))?;
        samples.push(sample);
    }
    Ok(samples)
}

fn sample(observed: &ObservedProcesses, work: &SoakState) -> anyhow::Result<Sample> {
    let page = scrape(observed.metrics)?;
    let metric = |name: &str| -> anyhow::Result<f64> {
        let prefix = format!("exec_server_{name} ");
        let line = page.lines().find_map(|line| line.strip_prefix(&prefix));
        Ok(line.with_context(|| format!("no metric {name}"))?.parse()?)
    };
    let mut echoes = std::mem::take(&mut *work.echoes.lock());
    if echoes.is_empty() {
        echoes.push(f64::NAN);
    }
    let server = resources(observed.server)?;
    let guardian = resources(observed.guardian)?;
    let executor = resources(observed.executor)?;
    let rendezvous = resources(observed.rendezvous)?;
    Ok([
        server.mebibytes,
        server.descriptors,
        server.threads,
        guardian.mebibytes,
        guardian.descriptors,
        guardian.threads,
        metric("retained_bytes")? / 1024.0,
        metric("processes")?,
        executor.mebibytes,
        executor.descriptors,
        executor.threads,
        rendezvous.mebibytes,
        rendezvous.descriptors,
        rendezvous.threads,
        median(&echoes) * 1e6,
        percentile(&echoes, 99.0) * 1e6,
        work.operations.swap(0, Ordering::Relaxed) as f64,
    ])
}

/// Resources of a process.
struct Resources {
    /// Resident anonymous memory.
    mebibytes: f64,
    descriptors: f64,
    threads: f64,
}

fn resources(pid: Pid) -> anyhow::Result<Resources> {
    let of = |file: &str| format!("/proc/{}/{file}", pid.as_raw_nonzero());
    let status = fs::read_to_string(of("status")).context("a server has ended")?;
    let number = |name: &str| -> anyhow::Result<f64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let line = line.with_context(|| format!("no {name} in the status"))?;
        Ok(line.trim().trim_end_matches(" kB").parse()?)
    };
    Ok(Resources {
        mebibytes: number("RssAnon:")? / 1024.0,
        descriptors: fs::read_dir(of("fd"))?.count() as f64,
        threads: number("Threads:")?,
    })
}

/// Compares the last periods with the first after the warm-up, in which records of closed processes
/// collect until the oldest expire.
fn judge(samples: &[Sample], period: Duration) -> anyhow::Result<bool> {
    /// Longer than the 80 s for which servers keep records of closed processes by default.
    const WARM_UP: Duration = Duration::from_secs(90);
    let warm = WARM_UP.div_duration_f64(period).ceil() as usize;
    let samples = samples.get(warm..).unwrap_or_default();
    ensure!(
        samples.len() >= 4,
        "too short: nothing is left to compare after {WARM_UP:?}"
    );
    let compared = COMPARED.min(samples.len() / 2);
    let mut flat = true;
    for (index, (name, factor, amount)) in COLUMNS.iter().enumerate() {
        let of = |samples: &[Sample]| {
            let values: Vec<f64> = samples.iter().map(|sample| sample[index]).collect();
            median(&values)
        };
        let first = of(&samples[..compared]);
        let last = of(&samples[samples.len() - compared..]);
        let allowed = (first * factor).max(first + amount);
        let grew = last > allowed;
        flat &= !grew;
        let verdict = if grew { "GREW" } else { "flat" };
        print(&format!(
            "{name:>16}: first {first:.1}, last {last:.1}: {verdict}"
        ))?;
    }
    Ok(flat)
}

/// Writes a line and flushes it: the next one may follow a minute later.
fn print(line: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    writeln!(stdout, "{line}")?;
    Ok(stdout.flush()?)
}

/// Runs all kinds of work until the time has passed or one of them fails.
async fn all(
    work: &Arc<SoakState>,
    direct: &RemoteExecServerConnectArgs,
    registry: &RegistryConnectArgs,
    server: SocketAddr,
) -> anyhow::Result<()> {
    let files = tempfile::tempdir()?;
    let result = tokio::try_join!(
        named("short commands", short_commands(work, direct)),
        named("long commands", long_commands(work, direct)),
        named("a terminal", terminal(work, direct)),
        named("files", file_work(work, direct, files.path())),
        named("cuts", cuts(work, server)),
        named("sandboxed work", sandboxed(work, direct, files.path())),
        named("the relay", relayed(work, registry)),
    );
    if let Err(error) = result {
        *work.failure.lock() = Some(format!("{error:#}"));
    }
    Ok(())
}

async fn named(what: &str, work: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
    work.await.with_context(|| what.to_owned())
}

fn shell(script: &str) -> StartParams {
    StartParams {
        process_id: name(),
        argv: ["/bin/sh", "-c", script].map(str::to_owned).to_vec(),
        env: [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into(),
        ..StartParams::default()
    }
}

async fn pause(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

/// Runs a command to its end and checks how many bytes it wrote.
async fn command(
    client: &ExecServerClient,
    params: StartParams,
    bytes: usize,
) -> anyhow::Result<()> {
    let process = client.start(params).await?.process;
    let output = process.output(CollectOptions::default()).await?;
    let exit = output.exit.context("no exit")?;
    ensure!(exit.exit_code == 0, "exit code {}", exit.exit_code);
    let received = output.stdout.len() + output.terminal.len();
    ensure!(received == bytes, "{received} bytes of {bytes}");
    Ok(())
}

/// Commands with little and with much output in one session: pipes, terminals and pulled output.
async fn short_commands(
    work: &SoakState,
    args: &RemoteExecServerConnectArgs,
) -> anyhow::Result<()> {
    const SIZES: [usize; 4] = [0, 100, 300_000, 2_000_000];
    let client = ExecServerClient::connect(args.clone()).await?;
    // A fixed rate: the output that is retained depends on it, and the machine's speed varies.
    let mut ticks = tokio::time::interval(Duration::from_millis(100));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut number = 0;
    while work.is_running() {
        ticks.tick().await;
        let bytes = SIZES[number % SIZES.len()];
        let mut params = shell(&format!("head -c {bytes} /dev/zero"));
        match number % 3 {
            0 => {}
            1 => params.tty = true,
            _ => params.delivery = Some(Delivery::Pull),
        }
        command(&client, params, bytes).await?;
        work.count();
        number += 1;
    }
    Ok(())
}

/// Commands that are terminated, and sessions that end with running commands.
async fn long_commands(work: &SoakState, args: &RemoteExecServerConnectArgs) -> anyhow::Result<()> {
    const LIVE: usize = 20;
    let client = ExecServerClient::connect(args.clone()).await?;
    let mut live = std::collections::VecDeque::new();
    while work.is_running() {
        live.push_back(client.start(shell("sleep 600 & wait")).await?.process);
        if live.len() > LIVE
            && let Some(oldest) = live.pop_front()
        {
            let ended = oldest.terminate(TerminateMode::Force, true).await?;
            ensure!(ended.gone == Some(true), "a command still runs: {ended:?}");
        }
        let other = ExecServerClient::connect(args.clone()).await?;
        other.start(shell("sleep 600")).await?;
        other.end_session().await?;
        work.count();
        pause(100).await;
    }
    Ok(())
}

/// Timed echoes in a terminal.
async fn terminal(work: &SoakState, args: &RemoteExecServerConnectArgs) -> anyhow::Result<()> {
    let client = ExecServerClient::connect(args.clone()).await?;
    let mut terminal = Terminal::start(&client, &name()).await?;
    while work.is_running() {
        let sample = terminal.key().await?;
        work.echoes.lock().push(sample);
        pause(20).await;
    }
    Ok(())
}

/// Reads, writes, listings, searches, copies and watched changes.
async fn file_work(
    work: &SoakState,
    args: &RemoteExecServerConnectArgs,
    root: &Path,
) -> anyhow::Result<()> {
    let client = ExecServerClient::connect(args.clone()).await?;
    let files = client.file_system();
    let root = uri(root)?;
    let content = bytes::Bytes::from(vec![b'x'; 1 << 20]);
    while work.is_running() {
        let options = WatchOptions {
            recursive: true,
            ..WatchOptions::default()
        };
        let mut changes = files.watch(&root, options).await?;
        let (file, copy) = (child(&root, "file")?, child(&root, "copy")?);
        files
            .write_file(&file, content.clone(), WriteOptions::default())
            .await?;
        changes.recv().await.context("the watch ended")?;
        drop(changes);
        ensure!(files.read_file(&file, AccessOptions::default()).await? == content);
        files.copy(&file, &copy, CopyOptions::default()).await?;
        files.hash(&copy, HashOptions::default()).await?;
        files
            .read_directory(&root, ReadDirectoryOptions::default())
            .await?;
        files.walk(&root, TreeWalkOptions::default()).await?;
        files
            .search(&root, "needle", SearchOptions::default())
            .await?;
        files.remove(&file, RemoveOptions::default()).await?;
        files.remove(&copy, RemoveOptions::default()).await?;
        work.count();
        pause(50).await;
    }
    Ok(())
}

/// Numbered lines over connections that are cut: none may be lost or duplicated.
async fn cuts(work: &SoakState, server: SocketAddr) -> anyhow::Result<()> {
    const LINES: u64 = 3000;
    let wire = CuttableForwarder::new(server).await?;
    let args = RemoteExecServerConnectArgs::new(format!("ws://{}", wire.address), "bench");
    while work.is_running() {
        let client = ExecServerClient::connect(args.clone()).await?;
        let script = format!(
            "i=0; while [ $i -lt {LINES} ]; do echo $i; i=$((i+1)); [ $((i%100)) = 0 ] && sleep 0.05; done; true"
        );
        let process = client.start(shell(&script)).await?.process;
        let mut events = process.events()?;
        let mut text = Vec::new();
        let mut received = 0_u64;
        loop {
            match events.recv().await {
                Some(ExecProcessEvent::Output { chunk, .. }) => {
                    text.extend_from_slice(&chunk);
                    let before = received / 50;
                    received += 1;
                    // A cut about every half second.
                    if received / 50 != before || received == 10 {
                        wire.cut();
                    }
                }
                Some(ExecProcessEvent::Failed(failure)) => return Err(failure.into()),
                Some(_) => {}
                None => break,
            }
        }
        let expected: String = (0..LINES).map(|number| format!("{number}\n")).collect();
        if text != expected.as_bytes() {
            let same = text.iter().zip(expected.as_bytes());
            let same = same.take_while(|(a, b)| a == b).count();
            let odd = &text[same..text.len().min(same + 40)];
            bail!(
                "{} of {} bytes of numbered lines, which differ after {same} bytes: {:?}",
                text.len(),
                expected.len(),
                String::from_utf8_lossy(odd)
            );
        }
        client.end_session().await?;
        work.count();
    }
    Ok(())
}

/// Commands and reads under a policy.
async fn sandboxed(
    work: &SoakState,
    args: &RemoteExecServerConnectArgs,
    root: &Path,
) -> anyhow::Result<()> {
    let client = ExecServerClient::connect(args.clone()).await?;
    let files = client.file_system();
    let sandbox: Sandbox = policy(&[], root);
    let path = uri("/etc/hostname")?;
    while work.is_running() {
        let params = StartParams {
            sandbox: Some(sandbox.clone()),
            ..shell("head -c 100 /dev/zero")
        };
        command(&client, params, 100).await?;
        let access = AccessOptions {
            sandbox: Some(sandbox.clone()),
            ..AccessOptions::default()
        };
        files.read_file(&path, access).await?;
        work.count();
        pause(50).await;
    }
    Ok(())
}

/// Sessions through the relay, a few commands each.
async fn relayed(work: &SoakState, args: &RegistryConnectArgs) -> anyhow::Result<()> {
    while work.is_running() {
        let client = ExecServerClient::connect_registry(args.clone()).await?;
        for _ in 0..10 {
            command(&client, shell("head -c 200000 /dev/zero"), 200_000).await?;
            work.count();
            pause(50).await;
        }
        client.end_session().await?;
    }
    Ok(())
}
