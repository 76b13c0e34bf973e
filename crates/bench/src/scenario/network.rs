//! Managed network: requests through its proxy compared with direct ones, and its cost at a start.

use std::time::Instant;

use anyhow::{Context as _, ensure};
use base64_turbo::STANDARD;
use exec_server_protocol::network::{DomainRule, NetworkProxy, ProxySettings};
use exec_server_protocol::process::StartParams;
use exec_server_protocol::sandbox::Sandbox;

use super::http::KeptAliveSite;
use super::sandbox::policy;
use super::spawn::wait_closed;
use super::{Bench, RowSpec};
use crate::child;
use crate::client::{BenchClient, ChildStdio};
use crate::floor::TRUE;
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::stats::median;
use crate::wire::BenchMessage;

/// Concurrent streams.
const STREAMS: usize = 200;

/// A small request, many streams, and starts.
pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    let count = bench.pick(400, 150);
    let total: u64 = bench.pick(1 << 20, 256 << 10);
    let starts = bench.pick(40, 20);
    let lines = vec![
        RowSpec {
            name: "proxied request p50, beyond a direct one".to_owned(),
            unit: Unit::Seconds,
            base: "",
            goals: vec![Goal::Value {
                limit: 500e-6,
                aim: 250e-6,
            }],
        },
        RowSpec {
            name: format!("{STREAMS} proxied streams at the same time"),
            unit: Unit::BytesPerSecond,
            base: "direct",
            goals: vec![Goal::Base {
                limit: 0.2,
                aim: 0.4,
            }],
        },
        RowSpec {
            name: "start with a managed network, beyond a sandboxed one, p50".to_owned(),
            unit: Unit::Seconds,
            base: "",
            goals: vec![Goal::Value {
                limit: 0.003,
                aim: 0.001,
            }],
        },
    ];
    let site = match KeptAliveSite::start(total) {
        Ok(site) => site,
        Err(error) => {
            let failed = Err(format!("no site: {error:#}"));
            return super::rows(lines, vec![failed]);
        }
    };
    let address = site.address.to_string();
    let own = bench.own.display().to_string();
    let reading = policy(&[], &std::env::temp_dir());
    let floor = || {
        let request = child::requests(&address, None, count)?;
        Ok((request, child::streams(&address, None, STREAMS, total)?))
    };
    let alone = bench.without_peer();
    alone.rounds(bench.pick(7, 3), lines, floor, |server, &(direct, wide)| {
        let mut client = server.client()?;
        let (count, total) = (count.to_string(), total.to_string());
        let requests = [&own, "--proxied-requests", &count, "--site", &address];
        let proxied = run_for_number(&mut client, &reading, &requests)?;
        let streams = [&own, "--proxied-streams", &total, "--site", &address];
        let streamed = run_for_number(&mut client, &reading, &streams)?;
        let plain = started(&mut client, starts, &reading, false)?;
        let managed = started(&mut client, starts, &reading, true)?;
        Ok(vec![
            Figure::plain(proxied - direct),
            Figure::against(streamed, wide),
            Figure::plain((managed - plain).max(0.0)),
        ])
    })
}

/// Number of streams that a child opens.
pub(crate) fn stream_count() -> usize {
    STREAMS
}

/// Requests a network in which only this machine's address is allowed.
fn managed(params: &mut StartParams) {
    params.enforce_managed_network = true;
    params.network_proxy = Some(NetworkProxy {
        proxy: ProxySettings {
            enabled: true,
            enable_socks5: true,
            domains: Some([("127.0.0.1".to_owned(), DomainRule::Allow)].into()),
            ..ProxySettings::default()
        },
        audit_metadata: None,
        environment_id: None,
        execution_id: None,
        policy_decision_timeout_ms: None,
    });
}

/// Runs a child in a managed network; returns the number that it prints.
fn run_for_number(
    client: &mut BenchClient,
    sandbox: &Sandbox,
    argv: &[&str],
) -> anyhow::Result<f64> {
    client.start_with(Some(sandbox), argv, ChildStdio::Pipe, managed)?;
    let mut output = Vec::new();
    loop {
        match client.receive()? {
            BenchMessage::Output { chunk, .. } => output.extend(STANDARD.decode(&*chunk)?),
            BenchMessage::Exited { code, .. } => {
                ensure!(code == 0, "{}", String::from_utf8_lossy(&output));
            }
            BenchMessage::Closed { .. } => break,
            _ => {}
        }
    }
    let output = String::from_utf8(output)?;
    output
        .trim()
        .parse()
        .with_context(|| format!("no number: {output}"))
}

/// Median seconds from start to closed.
fn started(
    client: &mut BenchClient,
    count: usize,
    sandbox: &Sandbox,
    with_network: bool,
) -> anyhow::Result<f64> {
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        client.start_with(Some(sandbox), &[TRUE], ChildStdio::Pipe, |params| {
            if with_network {
                managed(params);
            }
        })?;
        wait_closed(client, 1)?;
        samples.push(start.elapsed().as_secs_f64());
    }
    Ok(median(&samples))
}
