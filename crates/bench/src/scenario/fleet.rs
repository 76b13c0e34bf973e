//! Fleet of three rendezvous nodes on a nats-server: two nodes compared with one, streams while
//! NATS is unavailable, and recovery after one of the nodes is killed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use exec_server_client::ExecServerClient;
use exec_server_client::registry::{RegistryAuth, RegistryConnectArgs};
use exec_server_registry::RegistryOptions;
use exec_server_registry::api::RegistryApi;
use exec_server_testkit::nats::Nats;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::relay::{Terminal, name, stream};
use super::rendezvous::{CounterStreams, RegistryAccess, echo, key};
use super::{Bench, RowSpec, size};
use crate::pattern::BytePattern;
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::{CommandLine, StartedProgram};
use crate::stats::percentile;

const ENVIRONMENT: &str = "bench";

/// Memory limit of a node: a quarter of the limit in the units in `dist`.
const CAP_BYTES: f64 = 512.0 * 1024.0 * 1024.0;

/// Time limit of everything that is not measured.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Three nodes.
struct Nodes {
    running: Vec<Option<StartedProgram>>,
    nats: std::cell::RefCell<Nats>,
    runtime: Runtime,
    files: TempDir,
}

impl Nodes {
    fn new(command: &CommandLine) -> anyhow::Result<Self> {
        Self::on(command, Nats::tuned())
    }

    fn on(command: &CommandLine, nats: impl Future<Output = Nats>) -> anyhow::Result<Self> {
        let files = tempfile::tempdir()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let nats = runtime.block_on(nats);
        let mut nodes = Self {
            running: Vec::new(),
            nats: nats.into(),
            runtime,
            files,
        };
        let (state, at) = (nodes.path("rendezvous"), nodes.nats.borrow().url());
        for node in ["one", "two", "three"] {
            let options = [
                "rendezvous",
                "--listen",
                "127.0.0.1:0",
                "--state-dir",
                &state,
                "--nats",
                &at,
                "--node-name",
                node,
            ];
            let program = StartedProgram::start(command, &options)?;
            nodes.running.push(Some(program));
        }
        Ok(nodes)
    }

    fn path(&self, name: &str) -> String {
        self.files.path().join(name).display().to_string()
    }

    fn url(&self, node: usize) -> anyhow::Result<&str> {
        let running = self.running[node]
            .as_ref()
            .context("the node does not run")?;
        Ok(&running.line)
    }

    fn token(&self, role: &str) -> anyhow::Result<String> {
        let file = self.path(&format!("rendezvous/{role}.token"));
        Ok(std::fs::read_to_string(file)?.trim().to_owned())
    }

    fn access(&self, node: usize) -> anyhow::Result<RegistryAccess> {
        Ok(RegistryAccess {
            url: self.url(node)?.to_owned(),
            executor: self.token("executor")?,
            harness: self.token("harness")?,
        })
    }

    /// Kills a node.
    fn kill(&mut self, node: usize) -> anyhow::Result<Instant> {
        self.running[node]
            .take()
            .context("the node does not run")?
            .kill();
        Ok(Instant::now())
    }

    /// Peak memory of the running nodes.
    fn peak(&self) -> anyhow::Result<u64> {
        let peaks = self.running.iter().flatten().map(StartedProgram::peak);
        let peaks = peaks.collect::<anyhow::Result<Vec<u64>>>()?;
        peaks.into_iter().max().context("no node runs")
    }

    /// Number of online environments, according to a node.
    async fn online(&self, node: usize) -> anyhow::Result<usize> {
        let auth = RegistryAuth::bearer(self.token("admin")?);
        let api = RegistryApi::new(self.url(node)?, RegistryOptions::new(auth))?;
        let answer = api.get("cloud/environments").await?;
        let list = answer["environments"].as_array().context("no list")?;
        Ok(list.iter().filter(|one| one["online"] == true).count())
    }
}

/// Executors that reconnect when their socket ends.
struct Executors {
    tasks: JoinSet<anyhow::Result<()>>,
    /// Number of connections of each.
    attached: Vec<Arc<AtomicU64>>,
}

impl Executors {
    /// Connects all to one node.
    async fn new(access: &RegistryAccess, count: usize) -> anyhow::Result<Self> {
        // The first connections are limited to what a node accepts at a time; reconnects are not.
        let slots = Arc::new(tokio::sync::Semaphore::new(64));
        let mut executors = Self {
            tasks: JoinSet::new(),
            attached: Vec::new(),
        };
        for index in 0..count {
            let attached = Arc::<AtomicU64>::default();
            executors.attached.push(Arc::clone(&attached));
            let (access, slots) = (access.clone(), Arc::clone(&slots));
            executors.tasks.spawn(async move {
                let turn = slots.acquire_owned().await?;
                let environment = format!("reconnect-{index}");
                let registry = access.registry(&environment, &access.executor)?;
                let answer = registry.register(&key()?, None).await?;
                let mut turn = Some(turn);
                loop {
                    // As an executor does: first the address it knows, then the alternatives.
                    let dial = registry.dial_any(&answer.url, &answer.urls, TIME_LIMIT);
                    if let Ok(link) = dial.await {
                        attached.fetch_add(1, Ordering::Relaxed);
                        turn.take();
                        let _ = echo(link).await;
                    }
                    tokio::time::sleep(Duration::from_millis(100 + (index % 100) as u64)).await;
                }
            });
        }
        executors
            .wait(1)
            .await
            .context("not all executors connected")?;
        Ok(executors)
    }

    /// Waits until each has connected `times` times.
    async fn wait(&mut self, times: u64) -> anyhow::Result<()> {
        let all = async {
            loop {
                if let Some(ended) = self.tasks.try_join_next() {
                    ended??;
                }
                let there = |attached: &Arc<AtomicU64>| attached.load(Ordering::Relaxed) >= times;
                if self.attached.iter().all(there) {
                    return Ok(());
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(TIME_LIMIT, all)
            .await
            .context("the time limit passed")?
    }
}

/// Kills the node to which all executors are connected; returns the seconds until the last one is
/// connected elsewhere, and the peak memory of a node.
fn reconnect_all(nodes: &mut Nodes, count: usize) -> anyhow::Result<(f64, f64)> {
    let handle = nodes.runtime.handle().clone();
    let access = nodes.access(0)?;
    let mut executors = handle.block_on(Executors::new(&access, count))?;
    let died = nodes.kill(0)?;
    handle
        .block_on(executors.wait(2))
        .context("not all executors reconnected")?;
    let took = died.elapsed().as_secs_f64();
    let online = handle.block_on(nodes.online(1))?;
    ensure!(online >= count, "{online} of {count} are online");
    Ok((took, nodes.peak()? as f64))
}

/// Kills a node with `streams` streams; returns the seconds until each has received an echo of
/// something it sent afterwards. Fails if a number is lost, duplicated or out of order.
fn kill_under_streams(nodes: &mut Nodes, streams: usize) -> anyhow::Result<f64> {
    let handle = nodes.runtime.handle().clone();
    let access: Vec<RegistryAccess> = (0..3)
        .map(|node| nodes.access(node))
        .collect::<Result<_, _>>()?;
    let mut counters = handle.block_on(CounterStreams::new(&access, streams))?;
    let died = nodes.kill(0)?;
    let marks = counters.marks();
    handle
        .block_on(counters.wait(&marks))
        .context("not all streams continued")?;
    let took = died.elapsed().as_secs_f64();
    // A second wait also finds late losses and duplicates.
    let marks = counters.marks();
    handle
        .block_on(counters.wait(&marks))
        .context("not all streams continued after that")?;
    Ok(took)
}

/// Three nodes, an executor and its clients.
struct FleetSetup {
    /// Connects to the node of the executor, and to another one.
    near: RegistryConnectArgs,
    far: RegistryConnectArgs,
    /// Fields are dropped in this order.
    _executor: StartedProgram,
    nodes: Nodes,
}

impl FleetSetup {
    fn new(command: &CommandLine) -> anyhow::Result<Self> {
        Self::at(command, Nodes::new(command)?)
    }

    fn at(command: &CommandLine, nodes: Nodes) -> anyhow::Result<Self> {
        let state = nodes.path("rendezvous");
        let (token, identity) = (format!("{state}/executor.token"), nodes.path("identity"));
        let executor = [
            "--remote",
            nodes.url(0)?,
            "--environment-id",
            ENVIRONMENT,
            "--remote-token-file",
            &token,
            "--identity-file",
            &identity,
        ];
        let executor = StartedProgram::start(command, &executor)?;
        let auth = RegistryAuth::BearerFile(format!("{state}/harness.token").into());
        let args = |node| -> anyhow::Result<RegistryConnectArgs> {
            let url = nodes.url(node)?;
            Ok(RegistryConnectArgs::new(
                url,
                ENVIRONMENT,
                auth.clone(),
                "bench",
            ))
        };
        Ok(Self {
            near: args(0)?,
            far: args(1)?,
            _executor: executor,
            nodes,
        })
    }

    fn connect(&self, args: &RegistryConnectArgs) -> anyhow::Result<ExecServerClient> {
        let connect = ExecServerClient::connect_registry(args.clone());
        Ok(self.nodes.runtime.block_on(connect)?)
    }

    /// Bytes per second of one stream on one node, and between two.
    fn rates(
        &self,
        bench: &Bench,
        pattern: &BytePattern,
        total: u64,
    ) -> anyhow::Result<(f64, f64)> {
        let run = |args| {
            let client = self.connect(args)?;
            let streamed = stream(bench, &client, pattern, total);
            self.nodes.runtime.block_on(streamed)
        };
        let (near, far) = (run(&self.near)?, run(&self.far)?);
        ensure!(far > 0.0, "nothing came");
        Ok((near, far))
    }

    /// Stops NATS for `long`; returns the longest echo on one node meanwhile, and the seconds from
    /// its return to the first echo between nodes.
    fn outage(&self, long: Duration) -> anyhow::Result<(f64, f64)> {
        let (near, far) = (self.connect(&self.near)?, self.connect(&self.far)?);
        let mut nats = self.nodes.nats.borrow_mut();
        self.nodes.runtime.block_on(async {
            let mut here = Terminal::start(&near, &name()).await?;
            let mut there = Terminal::start(&far, &name()).await?;
            nats.die().await;
            let end = Instant::now() + long;
            let mut longest: f64 = 0.0;
            while Instant::now() < end {
                longest = longest.max(here.key().await?);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            nats.open().await;
            let back = Instant::now();
            there.key().await.context("after NATS came back")?;
            Ok((longest, back.elapsed().as_secs_f64()))
        })
    }
}

pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    let keys = bench.pick(400, 200);
    let total: u64 = bench.pick(256 << 20, 64 << 20);
    let away = Duration::from_secs(bench.pick(10, 4));
    let pattern = BytePattern::new();
    let line = |name: &str, unit, base, goals| RowSpec {
        name: format!("fleet: {name}"),
        unit,
        base,
        goals,
    };
    let value = |limit| Goal::Value { limit, aim: limit };
    let base = |limit| Goal::Base { limit, aim: limit };
    let lines = vec![
        line(
            "echo between nodes p50, more than on one",
            Unit::Seconds,
            "",
            vec![value(1.5e-3)],
        ),
        line(
            &format!("stream {} between nodes", size(total)),
            Unit::BytesPerSecond,
            "one node",
            vec![base(0.6)],
        ),
    ];
    let mut rows = bench.alone(bench.pick(5, 1), lines, FleetSetup::new, |setup| {
        let (near, far) = (setup.connect(&setup.near)?, setup.connect(&setup.far)?);
        let echo = |client: &ExecServerClient| -> anyhow::Result<f64> {
            setup.nodes.runtime.block_on(async {
                let mut terminal = Terminal::start(client, &name()).await?;
                Ok(percentile(&terminal.keys(keys).await?, 50.0))
            })
        };
        let (near_echo, far_echo) = (echo(&near)?, echo(&far)?);
        let (near_rate, far_rate) = setup.rates(bench, &pattern, total)?;
        Ok(vec![
            Figure::plain((far_echo - near_echo).max(0.0)),
            Figure::against(far_rate, near_rate),
        ])
    });
    let lines = vec![line(
        &format!("stream {} between nodes, NATS not tuned", size(total)),
        Unit::BytesPerSecond,
        "one node",
        Vec::new(),
    )];
    let untuned =
        |command: &CommandLine| FleetSetup::at(command, Nodes::on(command, Nats::start())?);
    rows.extend(bench.alone(bench.pick(3, 1), lines, untuned, |setup| {
        let (near, far) = setup.rates(bench, &pattern, total)?;
        Ok(vec![Figure::against(far, near)])
    }));
    let lines = vec![
        line(
            &format!(
                "longest echo on one node, NATS away for {} s",
                away.as_secs()
            ),
            Unit::Seconds,
            "",
            vec![value(1.0)],
        ),
        line(
            "NATS back to the next echo between nodes",
            Unit::Seconds,
            "",
            vec![value(10.0)],
        ),
    ];
    rows.extend(bench.alone(1, lines, FleetSetup::new, |setup| {
        let (longest, back) = setup.outage(away)?;
        Ok(vec![Figure::plain(longest), Figure::plain(back)])
    }));
    let executors = bench.pick(2000, 200);
    let name = format!("{executors} executors after their node was killed");
    let lines = vec![
        line(
            &format!("{name}: all attached"),
            Unit::Seconds,
            "",
            vec![value(10.0)],
        ),
        line(
            &format!("{name}: most memory of a node"),
            Unit::Bytes,
            "",
            vec![value(0.8 * CAP_BYTES)],
        ),
    ];
    rows.extend(bench.alone(1, lines, Nodes::new, |nodes| {
        let (took, peak) = reconnect_all(nodes, executors)?;
        Ok(vec![Figure::plain(took), Figure::plain(peak)])
    }));
    let streams = bench.pick(200, 40);
    let lines = vec![line(
        &format!("a node killed under {streams} streams: all go on"),
        Unit::Seconds,
        "",
        vec![value(5.0)],
    )];
    rows.extend(bench.alone(1, lines, Nodes::new, |nodes| {
        Ok(vec![Figure::plain(kill_under_streams(nodes, streams)?)])
    }));
    rows
}
