//! Processes that do nothing, under a policy: what the sandbox adds.

use std::time::Instant;

use exec_server_protocol::PathUri;
use exec_server_protocol::sandbox::{
    Access, Entry, EntryPath, FileSystem, Network, Permissions, Sandbox, Special,
};

use super::spawn::ends;
use super::{Bench, Line};
use crate::client::{Client, Stdio};
use crate::floor::TRUE;
use crate::report::{Figure, Goal, Row, Unit};
use crate::stats::median;

/// A workspace as clients send it, and reading only; what each adds to a spawn without.
pub(super) fn run(bench: &Bench) -> Vec<Row> {
    let count = bench.pick(40, 20);
    let line = |name: &str| Line {
        name: format!("sandboxed spawn {name}, added p50"),
        unit: Unit::Seconds,
        base: "",
        goals: vec![Goal::Value {
            limit: 0.0025,
            aim: 0.0015,
        }],
    };
    let directory = std::env::temp_dir();
    let workspace = policy(
        &[Special::ProjectRoots { subpath: None }, Special::SlashTmp],
        &directory,
    );
    let reading = policy(&[], &directory);
    let lines = vec![line("workspace-write"), line("read-only")];
    let floor = || Ok(());
    bench.rounds(bench.pick(13, 3), lines, floor, |server, ()| {
        let mut client = server.client()?;
        let plain = one_by_one(&mut client, count, None)?;
        let workspace = one_by_one(&mut client, count, Some(&workspace))?;
        let reading = one_by_one(&mut client, count, Some(&reading))?;
        Ok(vec![
            Figure::plain((workspace - plain).max(0.0)),
            Figure::plain((reading - plain).max(0.0)),
        ])
    })
}

/// Reading everything, writing to these, no network.
fn policy(writable: &[Special], root: &std::path::Path) -> Sandbox {
    let entry = |value: Special, access| Entry {
        path: EntryPath::Special { value },
        access,
        missing_path_behavior: None,
    };
    let mut entries = vec![entry(Special::Root, Access::Read)];
    entries.extend(
        writable
            .iter()
            .map(|value| entry(value.clone(), Access::Write)),
    );
    let file_system = FileSystem::Restricted {
        entries,
        glob_scan_max_depth: None,
    };
    let mut sandbox = Sandbox::new(Permissions::Managed {
        file_system,
        network: Network::Restricted,
    });
    sandbox.workspace_roots = PathUri::from_native(root).into_iter().collect();
    sandbox
}

/// Seconds from start to closed: the median.
fn one_by_one(client: &mut Client, count: usize, sandbox: Option<&Sandbox>) -> anyhow::Result<f64> {
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        client.start_in(sandbox, &[TRUE], Stdio::Pipe)?;
        ends(client, 1)?;
        samples.push(start.elapsed().as_secs_f64());
    }
    Ok(median(&samples))
}
