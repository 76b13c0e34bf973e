//! Executors at the registry of a service: time from their start until they are attached, and memory
//! with an open stream.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use exec_server_client::ExecServerClient;
use exec_server_client::registry::{RegistryAuth, RegistryConnectArgs};
use exec_server_testkit::fake_registry::FakeRegistry;
use exec_server_testkit::proc;
use rustix::process::Pid;
use tokio::runtime::Runtime;

use super::memory::AT_REST;
use super::{Bench, RowSpec};
use crate::floor;
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::{CommandLine, StartedProgram, proportional};

const ENVIRONMENT: &str = "bench";

pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    let mut rows = attached(bench);
    rows.extend(with_a_stream(bench));
    rows
}

/// From the start of the command to the open socket at the registry. Both programs get the same
/// arguments and the same key.
fn attached(bench: &Bench) -> Vec<ReportRow> {
    let line = RowSpec {
        name: "hosted: start to attached".to_owned(),
        unit: Unit::Seconds,
        base: "spawn",
        goals: vec![
            Goal::Value {
                limit: 60e-3,
                aim: 30e-3,
            },
            Goal::Peer { limit: 0.5 },
        ],
    };
    bench.measure_each(bench.pick(11, 5), line, |command| {
        let floor = floor::spawn(20)?;
        let runtime = runtime()?;
        let registry = runtime.block_on(FakeRegistry::start());
        let url = registry.url();
        let arguments = ["--remote", &url, "--environment-id", ENVIRONMENT];
        let command = command.with_variable("CODEX_API_KEY", "key");
        let start = Instant::now();
        let running = StartedProgram::start_silent(&command, &arguments)?;
        runtime.block_on(registry.until_attached(true));
        let taken = start.elapsed();
        drop(running);
        Ok(Figure::against(taken.as_secs_f64(), floor))
    })
}

/// Memory of the executor and its guardian with one open stream. The rendezvous server runs from another
/// copy of the program: pages that both share would count in parts.
fn with_a_stream(bench: &Bench) -> Vec<ReportRow> {
    const MIB: f64 = 1024.0 * 1024.0;
    let line = RowSpec {
        name: "hosted: executor and guardian with a stream, proportional set".to_owned(),
        unit: Unit::Bytes,
        base: "",
        goals: vec![Goal::Value {
            limit: 10.0 * MIB,
            aim: 8.0 * MIB,
        }],
    };
    bench
        .without_peer()
        .measure_each(bench.pick(3, 1), line, |command| {
            let files = tempfile::tempdir()?;
            let copy = files.path().join("rendezvous-server");
            std::fs::copy(command.executable()?, &copy)?;
            let state = files.path().join("state").display().to_string();
            let arguments = [
                "rendezvous",
                "--listen",
                "127.0.0.1:0",
                "--state-dir",
                &state,
            ];
            let rendezvous = StartedProgram::start(&CommandLine::program(&copy), &arguments)?;
            let url = rendezvous.line.clone();
            let token = |role: &str| format!("{state}/{role}.token");
            let executor_token = token("executor");
            let arguments = [
                "--remote",
                &url,
                "--environment-id",
                ENVIRONMENT,
                "--remote-token-file",
                &executor_token,
            ];
            let home = files.path().display().to_string();
            let command = command.with_variable("EXEC_SERVER_STATE_DIR", &home);
            let executor = StartedProgram::start(&command, &arguments)?;
            let runtime = runtime()?;
            let auth = RegistryAuth::BearerFile(token("harness").into());
            let args = RegistryConnectArgs::new(url, ENVIRONMENT, auth, "bench");
            let client = runtime.block_on(ExecServerClient::connect_registry(args))?;
            // The client answers pings meanwhile.
            runtime.block_on(tokio::time::sleep(AT_REST + Duration::from_secs(1)));
            let guardian = executor.own_pid();
            let children = proc::children(guardian.as_raw_nonzero().get().cast_unsigned());
            let serving = children.first().and_then(|pid| Pid::from_raw(*pid));
            let serving = serving.context("the guardian has no child")?;
            let figure = proportional([guardian, serving])? as f64;
            drop(client);
            Ok(Figure::plain(figure))
        })
}

fn runtime() -> std::io::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
}
