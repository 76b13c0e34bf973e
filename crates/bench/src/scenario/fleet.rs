//! Three meeting points that are one, on a nats-server: between two of them against on one of them,
//! what becomes of a stream while NATS is away, and of everybody when one of the three dies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use exec_server_client::ExecServerClient;
use exec_server_client::registry::{RegistryAuth, RegistryConnectArgs};
use exec_server_testkit::nats::Nats;
use exec_server_transport::registry::RegistryOptions;
use exec_server_transport::registry::api::RegistryApi;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::meeting::{Counters, Places, echo, key};
use super::relay::{Terminal, name, stream};
use super::{Bench, Line, size};
use crate::pattern::Pattern;
use crate::report::{Figure, Goal, Row, Unit};
use crate::server::{CommandLine, Program};
use crate::stats::percentile;

const ENVIRONMENT: &str = "bench";

/// What a node of this size may use of memory: a quarter of what the units in `dist` allow.
const CAP_BYTES: f64 = 512.0 * 1024.0 * 1024.0;

/// How long anything may take that is not measured.
const PATIENCE: Duration = Duration::from_secs(60);

/// Three nodes.
struct Nodes {
    running: Vec<Option<Program>>,
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
            let program = Program::start(command, &options)?;
            nodes.running.push(Some(program));
        }
        Ok(nodes)
    }

    fn path(&self, name: &str) -> String {
        self.files.path().join(name).display().to_string()
    }

    fn url(&self, node: usize) -> anyhow::Result<&str> {
        let running = self.running[node].as_ref().context("it does not run")?;
        Ok(&running.line)
    }

    fn token(&self, role: &str) -> anyhow::Result<String> {
        let file = self.path(&format!("rendezvous/{role}.token"));
        Ok(std::fs::read_to_string(file)?.trim().to_owned())
    }

    fn places(&self, node: usize) -> anyhow::Result<Places> {
        Ok(Places {
            url: self.url(node)?.to_owned(),
            executor: self.token("executor")?,
            harness: self.token("harness")?,
        })
    }

    /// Ends a node without a word.
    fn kill(&mut self, node: usize) -> anyhow::Result<Instant> {
        self.running[node].take().context("it does not run")?.kill();
        Ok(Instant::now())
    }

    /// The most memory that a node had which still runs.
    fn peak(&self) -> anyhow::Result<u64> {
        let peaks = self.running.iter().flatten().map(Program::peak);
        let peaks = peaks.collect::<anyhow::Result<Vec<u64>>>()?;
        peaks.into_iter().max().context("no node runs")
    }

    /// How many environments are online, as a node sees it.
    async fn online(&self, node: usize) -> anyhow::Result<usize> {
        let auth = RegistryAuth::bearer(self.token("admin")?);
        let api = RegistryApi::new(self.url(node)?, RegistryOptions::new(auth))?;
        let answer = api.get("cloud/environments").await?;
        let list = answer["environments"].as_array().context("no list")?;
        Ok(list.iter().filter(|one| one["online"] == true).count())
    }
}

/// Executors of a crowd, each of which attaches again when its socket ends.
struct Crowd {
    tasks: JoinSet<anyhow::Result<()>>,
    /// How often each was attached.
    attached: Vec<Arc<AtomicU64>>,
}

impl Crowd {
    /// All at one node.
    async fn new(places: &Places, count: usize) -> anyhow::Result<Self> {
        // As many come in at a time as are welcome; later it is each for itself.
        let gate = Arc::new(tokio::sync::Semaphore::new(64));
        let mut crowd = Self {
            tasks: JoinSet::new(),
            attached: Vec::new(),
        };
        for index in 0..count {
            let attached = Arc::<AtomicU64>::default();
            crowd.attached.push(Arc::clone(&attached));
            let (places, gate) = (places.clone(), Arc::clone(&gate));
            crowd.tasks.spawn(async move {
                let turn = gate.acquire_owned().await?;
                let environment = format!("storm-{index}");
                let registry = places.registry(&environment, &places.executor)?;
                let answer = registry.register(&key()?, None).await?;
                let mut turn = Some(turn);
                loop {
                    // As an executor does: the address it knows, then the others it was told.
                    let dial = registry.dial_any(&answer.url, &answer.urls, PATIENCE);
                    if let Ok(link) = dial.await {
                        attached.fetch_add(1, Ordering::Relaxed);
                        turn.take();
                        let _ = echo(link).await;
                    }
                    tokio::time::sleep(Duration::from_millis(100 + (index % 100) as u64)).await;
                }
            });
        }
        crowd.wait(1).await.context("not all came in")?;
        Ok(crowd)
    }

    /// Until each was attached so often.
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
        timeout(PATIENCE, all).await.context("it takes too long")?
    }
}

/// Everybody is at one node, which dies: seconds until the last is attached elsewhere, and the most
/// memory of a node then.
fn storm(nodes: &mut Nodes, count: usize) -> anyhow::Result<(f64, f64)> {
    let handle = nodes.runtime.handle().clone();
    let places = nodes.places(0)?;
    let mut crowd = handle.block_on(Crowd::new(&places, count))?;
    let died = nodes.kill(0)?;
    handle
        .block_on(crowd.wait(2))
        .context("not all came back")?;
    let took = died.elapsed().as_secs_f64();
    let online = handle.block_on(nodes.online(1))?;
    ensure!(online >= count, "{online} of {count} are online");
    Ok((took, nodes.peak()? as f64))
}

/// A node dies under so many streams: seconds until each has heard something that it said after
/// that. All numbers of all streams come once and in order, else this fails.
fn death(nodes: &mut Nodes, streams: usize) -> anyhow::Result<f64> {
    let handle = nodes.runtime.handle().clone();
    let places: Vec<Places> = (0..3)
        .map(|node| nodes.places(node))
        .collect::<Result<_, _>>()?;
    let mut counters = handle.block_on(Counters::new(&places, streams))?;
    let died = nodes.kill(0)?;
    let marks = counters.marks();
    handle
        .block_on(counters.wait(&marks))
        .context("not all streams went on")?;
    let took = died.elapsed().as_secs_f64();
    // What was lost or doubled late is found too.
    let marks = counters.marks();
    handle
        .block_on(counters.wait(&marks))
        .context("not all streams went on for long")?;
    Ok(took)
}

/// Everything that a client needs to be there.
struct Stage {
    /// Of the node with the executor, and of another.
    near: RegistryConnectArgs,
    far: RegistryConnectArgs,
    /// In the order in which they end.
    _executor: Program,
    nodes: Nodes,
}

impl Stage {
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
        let executor = Program::start(command, &executor)?;
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

    /// Bytes a second of one stream on one node, and between two.
    fn rates(&self, bench: &Bench, pattern: &Pattern, total: u64) -> anyhow::Result<(f64, f64)> {
        let run = |args| {
            let client = self.connect(args)?;
            let streamed = stream(bench, &client, pattern, total);
            self.nodes.runtime.block_on(streamed)
        };
        let (near, far) = (run(&self.near)?, run(&self.far)?);
        ensure!(far > 0.0, "nothing came");
        Ok((near, far))
    }

    /// Ends NATS for so long; the longest echo on one node meanwhile, and how long after its return
    /// the first echo between nodes came.
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

pub(super) fn run(bench: &Bench) -> Vec<Row> {
    let keys = bench.pick(400, 200);
    let total: u64 = bench.pick(256 << 20, 64 << 20);
    let away = Duration::from_secs(bench.pick(10, 4));
    let pattern = Pattern::new();
    let line = |name: &str, unit, base, goals| Line {
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
    let mut rows = bench.alone(bench.pick(5, 1), lines, Stage::new, |stage| {
        let (near, far) = (stage.connect(&stage.near)?, stage.connect(&stage.far)?);
        let echo = |client: &ExecServerClient| -> anyhow::Result<f64> {
            stage.nodes.runtime.block_on(async {
                let mut terminal = Terminal::start(client, &name()).await?;
                Ok(percentile(&terminal.keys(keys).await?, 50.0))
            })
        };
        let (near_echo, far_echo) = (echo(&near)?, echo(&far)?);
        let (near_rate, far_rate) = stage.rates(bench, &pattern, total)?;
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
    let untuned = |command: &CommandLine| Stage::at(command, Nodes::on(command, Nats::start())?);
    rows.extend(bench.alone(bench.pick(3, 1), lines, untuned, |stage| {
        let (near, far) = stage.rates(bench, &pattern, total)?;
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
    rows.extend(bench.alone(1, lines, Stage::new, |stage| {
        let (longest, back) = stage.outage(away)?;
        Ok(vec![Figure::plain(longest), Figure::plain(back)])
    }));
    let crowd = bench.pick(2000, 200);
    let name = format!("{crowd} executors after the death of their node");
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
        let (took, peak) = storm(nodes, crowd)?;
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
        Ok(vec![Figure::plain(death(nodes, streams)?)])
    }));
    rows
}
