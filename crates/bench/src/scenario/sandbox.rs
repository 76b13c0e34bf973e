//! Processes without work and short file calls under a policy: cost of the sandbox.

use std::time::Instant;

use exec_server_protocol::PathUri;
use exec_server_protocol::sandbox::{
    EntryPath, FilePermissions, NetworkPermission, PathAccess, Permissions, Sandbox, SandboxEntry,
    SpecialPath,
};

use super::files::answer;
use super::spawn::wait_closed;
use super::stream::rate;
use super::{Bench, RowSpec, size};
use crate::client::{BenchClient, ChildStdio};
use crate::floor::TRUE;
use crate::pattern::BytePattern;
use crate::report::{Figure, Goal, ReportRow, Unit};
use crate::stats::median;

/// All measurements.
pub(super) fn run(bench: &Bench) -> Vec<ReportRow> {
    let mut rows = [spawns(bench, ""), files(bench), work(bench)].concat();
    if let Some(ordinary) = as_ordinary_user(bench) {
        rows.extend(spawns(&ordinary, " as an ordinary user"));
    }
    rows
}

/// The same with a server of an unprivileged user; only root can start one.
fn as_ordinary_user(bench: &Bench) -> Option<Bench> {
    let setpriv = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
    ];
    let mut ordinary = bench.without_peer();
    for side in &mut ordinary.sides {
        side.command = side.command.behind(&setpriv);
    }
    rustix::process::geteuid().is_root().then_some(ordinary)
}

/// Runs of `git status` in one child.
const REPEATS: usize = 15;

/// Work under a policy compared with work without: a program with many system calls, and one with
/// much output.
fn work(bench: &Bench) -> Vec<ReportRow> {
    let pattern = BytePattern::new();
    let files: u32 = bench.pick(20_000, 5_000);
    let total: u64 = bench.pick(256 << 20, 64 << 20);
    let lines = vec![
        RowSpec {
            name: format!("sandboxed git status, {REPEATS} times, {files} files"),
            unit: Unit::Seconds,
            base: "unsandboxed",
            goals: vec![Goal::Base {
                limit: 1.05,
                aim: 1.02,
            }],
        },
        RowSpec {
            name: format!("sandboxed stream {}", size(total)),
            unit: Unit::BytesPerSecond,
            base: "unsandboxed",
            goals: vec![Goal::Base {
                limit: 0.95,
                aim: 0.98,
            }],
        },
    ];
    let tree = match repository(files) {
        Ok(tree) => tree,
        Err(error) => {
            eprintln!("no repository to look at: {error:#}");
            return Vec::new();
        }
    };
    let reading = policy(&[], tree.path());
    // Examines every file and does not write the index. Repeated, because the cost of the start is
    // another row.
    let script = format!(
        "for i in $(seq {REPEATS}); do git --no-optional-locks -c 'safe.directory=*' -C '{}' status \
         --porcelain || exit; done",
        tree.path().display()
    );
    let status = ["sh", "-c", &script];
    bench.rounds(
        bench.pick(9, 3),
        lines,
        || Ok(()),
        |server, ()| {
            let mut client = server.client()?;
            let mut seen = [Vec::new(), Vec::new()];
            // In turns, so that a slow moment of the machine affects both.
            for _ in 0..3 {
                for (sandbox, seen) in [None, Some(&reading)].into_iter().zip(&mut seen) {
                    let start = Instant::now();
                    client.start_in(sandbox, &status, ChildStdio::Pipe)?;
                    wait_closed(&mut client, 1)?;
                    seen.push(start.elapsed().as_secs_f64());
                }
            }
            let [plain, held] = seen.map(|seen| median(&seen));
            let rate = |sandbox| rate(bench, server.client()?, &pattern, (1, total), sandbox);
            let plain_rate = rate(None)?;
            let held_rate = rate(Some(&reading))?;
            Ok(vec![
                Figure::against(held, plain),
                Figure::against(held_rate, plain_rate),
            ])
        },
    )
}

/// A repository with `files` committed files, a hundred in each directory.
fn repository(files: u32) -> anyhow::Result<tempfile::TempDir> {
    let tree = tempfile::tempdir_in("/var/tmp")?;
    for file in 0..files {
        let directory = tree.path().join(format!("d{}", file / 100));
        if file % 100 == 0 {
            std::fs::create_dir(&directory)?;
        }
        std::fs::write(directory.join(format!("f{file}")), file.to_string())?;
    }
    for arguments in [&["init", "-q"][..], &["add", "-A"]] {
        let done = std::process::Command::new("git")
            .arg("-C")
            .arg(tree.path())
            .args(arguments)
            .status()?;
        anyhow::ensure!(done.success(), "git {arguments:?} failed: {done}");
    }
    Ok(tree)
}

/// Consecutive calls of one kind.
const TURN: usize = 50;

/// Reading and writing 4 KiB under a policy that needs a helper, compared with no policy; and the
/// first call under a new policy.
fn files(bench: &Bench) -> Vec<ReportRow> {
    let line = |name: &str, base, goal| RowSpec {
        name: format!("sandboxed {name}, p50"),
        unit: Unit::Seconds,
        base,
        goals: vec![goal],
    };
    let twice = || Goal::Base {
        limit: 2.0,
        aim: 1.5,
    };
    let lines = vec![
        line("readFile 4 KiB", "unsandboxed", twice()),
        line("writeFile 4 KiB", "unsandboxed", twice()),
        line(
            "first call of a policy",
            "",
            Goal::Value {
                limit: 0.008,
                aim: 0.005,
            },
        ),
    ];
    let count = bench.pick(400, 100);
    let mut fresh = 0;
    let scratch = || Ok(tempfile::tempdir_in("/var/tmp")?);
    bench.placed_rounds(bench.pick(7, 2), lines, scratch, |server, scratch| {
        let mut client = server.client()?;
        let path = |name: &str| scratch.path().join(name);
        std::fs::write(path("file"), [b'x'; 4096])?;
        std::fs::write(path("secret"), "")?;
        let mut sandbox = policy(
            &[SpecialPath::ProjectRoots { subpath: None }],
            scratch.path(),
        );
        sandbox.cwd = PathUri::from_native(scratch.path()).ok();
        let uri = PathUri::from_native(&path("file"))?;
        let denied = serde_json::to_string(&denying(&sandbox, &path("secret"))?)?;
        let workspace = serde_json::to_string(&sandbox)?;
        let read = |sandbox: &str| format!(r#"{{"path":"{uri}","sandbox":{sandbox}}}"#);
        let data = "eHh4".repeat(1365);
        let write = |sandbox: &str| {
            format!(r#"{{"path":"{uri}","dataBase64":"{data}","sandbox":{sandbox}}}"#)
        };
        // Seconds of both variants. In turns, because the machine's speed varies; a turn is long
        // enough for caches to be warm.
        let mut asked = |method: &str, both: [String; 2]| -> anyhow::Result<[f64; 2]> {
            let mut samples = [Vec::with_capacity(count), Vec::with_capacity(count)];
            for _ in 0..count / TURN {
                for (params, samples) in both.iter().zip(&mut samples) {
                    // The first call may start a helper.
                    for sample in 0..=TURN {
                        let start = Instant::now();
                        let id = client.ask(method, params)?;
                        answer(&mut client, id, |_| Ok(()))?;
                        if sample > 0 {
                            samples.push(start.elapsed().as_secs_f64());
                        }
                    }
                }
            }
            Ok(samples.map(|samples| median(&samples)))
        };
        let [plain_read, held_read] = asked("fs/readFile", [read("null"), read(&denied)])?;
        let [plain_write, held_write] = asked("fs/writeFile", [write("null"), write(&workspace)])?;
        let mut firsts = Vec::new();
        for _ in 0..10 {
            fresh += 1;
            let secret = path(&format!("secret{fresh}"));
            std::fs::write(&secret, "")?;
            let sandbox = serde_json::to_string(&denying(&sandbox, &secret)?)?;
            let start = Instant::now();
            let id = client.ask("fs/readFile", &read(&sandbox))?;
            answer(&mut client, id, |_| Ok(()))?;
            firsts.push(start.elapsed().as_secs_f64());
        }
        Ok(vec![
            Figure::against(held_read, plain_read),
            Figure::against(held_write, plain_write),
            Figure::plain(median(&firsts)),
        ])
    })
}

/// Returns the same policy with this file denied.
fn denying(sandbox: &Sandbox, path: &std::path::Path) -> anyhow::Result<Sandbox> {
    let mut sandbox = sandbox.clone();
    if let Permissions::Managed {
        file_system: FilePermissions::Restricted { entries, .. },
        ..
    } = &mut sandbox.permissions
    {
        entries.push(SandboxEntry {
            path: EntryPath::Path {
                path: PathUri::from_native(path)?,
            },
            access: PathAccess::Deny,
            missing_path_behavior: None,
        });
    }
    Ok(sandbox)
}

/// Concurrent starts.
const WIDTH: usize = 16;

/// A workspace policy as clients send it, and a read-only policy: cost of one start, and how much of
/// it a start without a policy does not have; starts sixteen at a time.
fn spawns(bench: &Bench, suffix: &str) -> Vec<ReportRow> {
    let (count, many) = (bench.pick(40, 20), bench.pick(320, 160));
    let line = |name: &str| RowSpec {
        name: format!("sandboxed spawn {name}{suffix}, added p50"),
        unit: Unit::Seconds,
        base: "",
        goals: vec![Goal::Value {
            limit: if suffix.is_empty() { 0.0025 } else { 0.004 },
            aim: 0.0015,
        }],
    };
    let whole = RowSpec {
        name: format!("sandboxed spawn workspace-write{suffix}, p50"),
        goals: vec![Goal::Value {
            limit: 0.002,
            aim: 0.0015,
        }],
        ..line("")
    };
    let rate = RowSpec {
        name: format!("sandboxed spawn workspace-write{suffix}, 16-way"),
        unit: Unit::PerSecond,
        goals: vec![Goal::Value {
            limit: 1000.0,
            aim: 1500.0,
        }],
        ..line("")
    };
    let directory = std::env::temp_dir();
    let workspace = policy(
        &[
            SpecialPath::ProjectRoots { subpath: None },
            SpecialPath::SlashTmp,
        ],
        &directory,
    );
    let reading = policy(&[], &directory);
    let lines = vec![line("workspace-write"), line("read-only"), whole, rate];
    let floor = || Ok(());
    bench.rounds(bench.pick(13, 3), lines, floor, |server, ()| {
        let mut client = server.client()?;
        let plain = sequential(&mut client, count, None)?;
        let rate = concurrent(&mut client, many, &workspace)?;
        let workspace = sequential(&mut client, count, Some(&workspace))?;
        let reading = sequential(&mut client, count, Some(&reading))?;
        Ok(vec![
            Figure::plain((workspace - plain).max(0.0)),
            Figure::plain((reading - plain).max(0.0)),
            Figure::plain(workspace),
            Figure::plain(rate),
        ])
    })
}

/// Returns a policy: read everything, write these paths, no network.
pub(crate) fn policy(writable: &[SpecialPath], root: &std::path::Path) -> Sandbox {
    let entry = |value: SpecialPath, access| SandboxEntry {
        path: EntryPath::Special { value },
        access,
        missing_path_behavior: None,
    };
    let mut entries = vec![entry(SpecialPath::Root, PathAccess::Read)];
    entries.extend(
        writable
            .iter()
            .map(|value| entry(value.clone(), PathAccess::Write)),
    );
    let file_system = FilePermissions::Restricted {
        entries,
        glob_scan_max_depth: None,
    };
    let mut sandbox = Sandbox::new(Permissions::Managed {
        file_system,
        network: NetworkPermission::Restricted,
    });
    sandbox.workspace_roots = PathUri::from_native(root).into_iter().collect();
    sandbox
}

/// Median seconds from start to closed.
fn sequential(
    client: &mut BenchClient,
    count: usize,
    sandbox: Option<&Sandbox>,
) -> anyhow::Result<f64> {
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        client.start_in(sandbox, &[TRUE], ChildStdio::Pipe)?;
        wait_closed(client, 1)?;
        samples.push(start.elapsed().as_secs_f64());
    }
    Ok(median(&samples))
}

/// Processes per second with [`WIDTH`] of them concurrently.
fn concurrent(client: &mut BenchClient, count: usize, sandbox: &Sandbox) -> anyhow::Result<f64> {
    let start = Instant::now();
    for number in 0..count {
        if number >= WIDTH {
            wait_closed(client, 1)?;
        }
        client.start_in(Some(sandbox), &[TRUE], ChildStdio::Pipe)?;
    }
    wait_closed(client, WIDTH)?;
    Ok(count as f64 / start.elapsed().as_secs_f64())
}
