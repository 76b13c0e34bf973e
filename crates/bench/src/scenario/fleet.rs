//! Three meeting points that are one, on a nats-server: between two of them against on one of them,
//! and what becomes of a stream while NATS is away.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use exec_server_client::ExecServerClient;
use exec_server_client::registry::{RegistryAuth, RegistryConnectArgs};
use exec_server_testkit::nats::Nats;
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::relay::{Terminal, name, stream};
use super::{Bench, Line, size};
use crate::pattern::Pattern;
use crate::report::{Figure, Goal, Row, Unit};
use crate::server::{CommandLine, Program};
use crate::stats::percentile;

const ENVIRONMENT: &str = "bench";

/// Everything that a client needs to be there.
struct Stage {
    /// Of the node with the executor, and of another.
    near: RegistryConnectArgs,
    far: RegistryConnectArgs,
    /// In the order in which they end.
    _executor: Program,
    _nodes: Vec<Program>,
    nats: std::cell::RefCell<Nats>,
    runtime: Runtime,
    _files: TempDir,
}

impl Stage {
    fn new(command: &CommandLine) -> anyhow::Result<Self> {
        let files = tempfile::tempdir()?;
        let path = |name: &str| files.path().join(name).display().to_string();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let nats = runtime.block_on(Nats::start());
        let (state, at) = (path("rendezvous"), nats.url());
        let mut nodes = Vec::new();
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
            nodes.push(Program::start(command, &options)?);
        }
        let (token, identity) = (format!("{state}/executor.token"), path("identity"));
        let executor = [
            "--remote",
            &nodes[0].line,
            "--environment-id",
            ENVIRONMENT,
            "--remote-token-file",
            &token,
            "--identity-file",
            &identity,
        ];
        let executor = Program::start(command, &executor)?;
        let auth = RegistryAuth::BearerFile(format!("{state}/harness.token").into());
        let args = |node: &Program| {
            let url = node.line.clone();
            RegistryConnectArgs::new(url, ENVIRONMENT, auth.clone(), "bench")
        };
        Ok(Self {
            near: args(&nodes[0]),
            far: args(&nodes[1]),
            _executor: executor,
            _nodes: nodes,
            nats: nats.into(),
            runtime,
            _files: files,
        })
    }

    fn connect(&self, args: &RegistryConnectArgs) -> anyhow::Result<ExecServerClient> {
        let connect = ExecServerClient::connect_registry(args.clone());
        Ok(self.runtime.block_on(connect)?)
    }

    /// Ends NATS for so long; the longest echo on one node meanwhile, and how long after its return
    /// the first echo between nodes came.
    fn outage(&self, long: Duration) -> anyhow::Result<(f64, f64)> {
        let (near, far) = (self.connect(&self.near)?, self.connect(&self.far)?);
        let mut nats = self.nats.borrow_mut();
        self.runtime.block_on(async {
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
    bench.alone(bench.pick(3, 1), lines, Stage::new, |stage| {
        let (near, far) = (stage.connect(&stage.near)?, stage.connect(&stage.far)?);
        let echo = |client: &ExecServerClient| -> anyhow::Result<f64> {
            stage.runtime.block_on(async {
                let mut terminal = Terminal::start(client, &name()).await?;
                Ok(percentile(&terminal.keys(keys).await?, 50.0))
            })
        };
        let (near_echo, far_echo) = (echo(&near)?, echo(&far)?);
        let run = |client: &ExecServerClient| {
            let streamed = stream(bench, client, &pattern, total);
            stage.runtime.block_on(streamed)
        };
        let (near_rate, far_rate) = (run(&near)?, run(&far)?);
        ensure!(far_rate > 0.0, "nothing came");
        let (longest, back) = stage.outage(away)?;
        Ok(vec![
            Figure::plain((far_echo - near_echo).max(0.0)),
            Figure::against(far_rate, near_rate),
            Figure::plain(longest),
            Figure::plain(back),
        ])
    })
}
