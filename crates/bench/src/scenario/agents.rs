//! Commands for models: cost added to the server's own.
//!
//! Rows are differences from, or ratios to, the same work with the plain client on the same server,
//! one after the other in every round.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use exec_server_agents::unified::{
    CommandLaunch, DirectRequest, ExecCommand, UnifiedExec, UnifiedExecConfig,
};
use exec_server_client::{
    ExecBackend, ExecProcessEvent, ExecProcessEvents, ExecServerClient,
    RemoteExecServerConnectArgs, StartedProcess, WaitForRequest,
};
use exec_server_protocol::PathUri;
use exec_server_protocol::process::{Condition, StartParams};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::{Bench, RowSpec};
use crate::floor::TRUE;
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::server::{BenchServer, CommandLine};
use crate::stats::median;

/// Output of one yield or one search: 100 MB.
const BYTES: u64 = 100_000_000;

/// Commands of which the median is taken.
const COMMANDS: usize = 40;

/// `true`, large output, and a search.
pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    let more = |name: &str| RowSpec {
        name: name.to_owned(),
        unit: Unit::Seconds,
        base: "",
        goals: vec![Goal::Value {
            limit: 0.003,
            aim: 0.001,
        }],
    };
    let rate = |name: &str| RowSpec {
        name: name.to_owned(),
        unit: Unit::BytesPerSecond,
        base: "raw stream",
        goals: vec![Goal::Base {
            limit: 0.5,
            aim: 0.8,
        }],
    };
    let lines = vec![
        more("exec_command of true: over a spawn"),
        more("exec_command of true by MCP: over that"),
        RowSpec {
            name: "100 MB in one yield: growth".to_owned(),
            unit: Unit::Bytes,
            base: "",
            goals: vec![Goal::Value {
                limit: 8.0 * 1048576.0,
                aim: 4.0 * 1048576.0,
            }],
        },
        rate("100 MB in one yield"),
        rate("waitFor regex over 100 MB"),
    ];
    bench.alone(
        bench.pick(7, 3),
        lines,
        AgentSubject::start,
        AgentSubject::round,
    )
}

/// A server, a client, and an MCP server that is another client.
struct AgentSubject {
    runtime: Runtime,
    unified: UnifiedExec,
    client: Arc<ExecServerClient>,
    mcp: Mcp,
    number: u64,
    _server: BenchServer,
}

impl AgentSubject {
    fn start(command: &CommandLine) -> anyhow::Result<Self> {
        let server = BenchServer::start(command)?;
        let url = format!("ws://{}", server.address);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let args = RemoteExecServerConnectArgs::new(url.clone(), "bench");
        let client = Arc::new(runtime.block_on(ExecServerClient::connect(args))?);
        let mut subject = Self {
            runtime,
            unified: UnifiedExec::new(UnifiedExecConfig::default()),
            client,
            mcp: Mcp::start(command, &url)?,
            number: 0,
            _server: server,
        };
        // Excludes one-time costs of the first of each kind.
        for _ in 0..5 {
            subject.spawn()?;
            subject.exec(&[TRUE])?;
            subject.mcp.exec()?;
        }
        subject.exec(&writes(BYTES / 10))?;
        Ok(subject)
    }

    fn round(&mut self) -> anyhow::Result<Vec<Figure>> {
        let (mut spawns, mut execs, mut calls) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..COMMANDS {
            spawns.push(timed(|| self.spawn())?);
            execs.push(timed(|| self.exec(&[TRUE]))?);
            calls.push(timed(|| self.mcp.exec())?);
        }
        let (spawn, exec, call) = (median(&spawns), median(&execs), median(&calls));
        let raw = BYTES as f64 / timed(|| self.stream())?;
        let before = forget_peak()?;
        let in_yield = BYTES as f64 / timed(|| self.exec(&writes(BYTES)))?;
        let growth = peak()?.saturating_sub(before);
        let search = BYTES as f64 / timed(|| self.search())?;
        Ok(vec![
            Figure::plain((exec - spawn).max(0.0)),
            Figure::plain((call - exec).max(0.0)),
            Figure::plain(growth as f64),
            Figure::against(in_yield, raw),
            Figure::against(search, raw),
        ])
    }

    /// Runs `true`, from start to closed.
    fn spawn(&mut self) -> anyhow::Result<()> {
        let params = self.params(&[TRUE]);
        let bytes = self.runtime.block_on(async {
            let started = self.client.start(params).await?;
            drain(started.process.events()?).await
        })?;
        ensure!(bytes == 0, "`true` wrote something");
        Ok(())
    }

    fn stream(&mut self) -> anyhow::Result<()> {
        let params = self.params(&writes(BYTES));
        let bytes = self.runtime.block_on(async {
            let started = self.client.start(params).await?;
            drain(started.process.events()?).await
        })?;
        ensure!(bytes == BYTES, "{bytes} of {BYTES} bytes came");
        Ok(())
    }

    fn exec(&mut self, argv: &[&str]) -> anyhow::Result<()> {
        let argv = argv.iter().map(|&word| word.to_owned()).collect();
        let request = DirectRequest::new(argv, PathUri::parse("file:///")?);
        let backend = Arc::clone(&self.client) as Arc<dyn ExecBackend>;
        let mut command = ExecCommand::new("bench", CommandLaunch::direct(backend, request));
        command.yield_time = Some(Duration::from_secs(30));
        let answer = self.runtime.block_on(self.unified.exec_command(command))?;
        ensure!(answer.exit_code == Some(0), "{}", answer.text());
        Ok(())
    }

    /// Searches large output for a text at its end.
    fn search(&mut self) -> anyhow::Result<()> {
        let script = format!("head -c {BYTES} /dev/zero | tr '\\0' x; echo found");
        let params = self.params(&["/bin/sh", "-c", &script]);
        self.runtime.block_on(async {
            let StartedProcess { process, .. } = self.client.start(params).await?;
            let events = process.events()?;
            let request = WaitForRequest {
                any: vec![Condition::Regex {
                    regex: "f[a-z]+nd\n".to_owned(),
                    stream: None,
                }],
                after_seq: 0,
                timeout: Some(Duration::from_secs(60)),
            };
            let (found, bytes) = tokio::join!(process.wait_for(request), drain(events));
            let found = found?;
            ensure!(
                found.fired == Some(0) && found.evicted.is_none(),
                "{found:?}"
            );
            ensure!(bytes? > BYTES, "output is missing");
            Ok(())
        })
    }

    fn params(&mut self, argv: &[&str]) -> StartParams {
        self.number += 1;
        StartParams {
            process_id: format!("bench-{}", self.number),
            argv: argv.iter().map(|&word| word.to_owned()).collect(),
            env: [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into(),
            ..StartParams::default()
        }
    }
}

/// Command that writes `bytes` bytes.
fn writes(bytes: u64) -> [&'static str; 3] {
    match bytes {
        BYTES => ["/bin/sh", "-c", "head -c 100000000 /dev/zero | tr '\\0' x"],
        _ => ["/bin/sh", "-c", "head -c 10000000 /dev/zero | tr '\\0' x"],
    }
}

async fn drain(mut events: ExecProcessEvents) -> anyhow::Result<u64> {
    let mut bytes = 0;
    while let Some(event) = events.recv().await {
        match event {
            ExecProcessEvent::Output { chunk, .. } => bytes += chunk.len() as u64,
            ExecProcessEvent::Exited { exit, .. } => ensure!(exit.success(), "{exit:?}"),
            ExecProcessEvent::Closed { .. } => break,
            other => bail!("{other:?}"),
        }
    }
    Ok(bytes)
}

fn timed(work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Resets the peak memory of this program; returns its current memory.
fn forget_peak() -> anyhow::Result<u64> {
    std::fs::write("/proc/self/clear_refs", "5")?;
    peak()
}

fn peak() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    Ok(number.context("no VmHWM")? * 1024)
}

/// An MCP server with pipes.
struct Mcp {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    number: u64,
}

impl Mcp {
    fn start(command: &CommandLine, url: &str) -> anyhow::Result<Self> {
        let mut child = command.piped(&["mcp", "--on", url])?;
        let mut mcp = Self {
            stdin: child.stdin.take().context("no input")?,
            stdout: BufReader::new(child.stdout.take().context("no output")?),
            child,
            number: 0,
        };
        mcp.call(
            "initialize",
            &json!({
                "protocolVersion": "2025-06-18",
                "capabilities": {},
                "clientInfo": {"name": "bench", "version": "1"},
            }),
        )?;
        let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        mcp.send(&ready)?;
        Ok(mcp)
    }

    fn exec(&mut self) -> anyhow::Result<()> {
        // A shell that is replaced by the command, as cheap as possible.
        let arguments = json!({"cmd": format!("exec {TRUE}"), "shell": "/bin/sh"});
        let params = json!({"name": "exec_command", "arguments": arguments});
        let result = self.call("tools/call", &params)?;
        ensure!(result["structuredContent"]["exit_code"] == 0, "{result}");
        Ok(())
    }

    fn call(&mut self, method: &str, params: &Value) -> anyhow::Result<Value> {
        self.number += 1;
        let id = self.number;
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}))?;
        loop {
            let mut line = String::new();
            let read = self.stdout.read_line(&mut line)?;
            ensure!(read > 0, "the MCP server has ended");
            let mut message: Value = serde_json::from_str(&line)?;
            if message["id"] == id {
                ensure!(message.get("error").is_none(), "{message}");
                return Ok(message["result"].take());
            }
        }
    }

    fn send(&mut self, message: &Value) -> anyhow::Result<()> {
        let mut line = message.to_string();
        line.push('\n');
        self.stdin.write_all(line.as_bytes())?;
        Ok(())
    }
}

impl Drop for Mcp {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
