//! Benchmark: starts a server, measures it from outside, and compares it with the machine's floor.
//!
//! Contains the scenarios, the floors and the table. Uses only the server's command line, its wire
//! protocol and its process id.

mod args;
mod child;
mod client;
mod floor;
mod pattern;
mod placement;
mod report;
mod scenario;
mod server;
mod soak;
mod stats;
mod wire;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use rustix::fs::Advice;
use rustix::process::{Resource, Rlimit};

use crate::args::BenchArgs;
use crate::report::GoalVerdict;
use crate::scenario::{Bench, BenchSide};
use crate::server::{BenchServer, CommandLine};

fn main() -> ExitCode {
    let args = BenchArgs::parse();
    let done = |result: anyhow::Result<()>| result.map(|()| ExitCode::SUCCESS);
    let result = if let Some(total) = args.emit_pattern {
        done(child::emit(total))
    } else if let Some(total) = args.emit_slowly {
        done(child::emit_slowly(total))
    } else if let Some(total) = args.check_pattern {
        done(child::check(total))
    } else if let Some(push) = args.answer_websockets {
        done(child::answer_websockets(push))
    } else if let (Some(count), Some(site)) = (args.proxied_requests, &args.site) {
        done(child::print_figure(child::requests(
            site,
            child::proxy().as_deref(),
            count,
        )))
    } else if let (Some(total), Some(site)) = (args.proxied_streams, &args.site) {
        let count = scenario::network::stream_count();
        done(child::print_figure(child::streams(
            site,
            child::proxy().as_deref(),
            count,
            total,
        )))
    } else if args.echo_websockets {
        done(child::echo_websockets())
    } else {
        run(&args)
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::from(2)
    })
}

fn run(args: &BenchArgs) -> anyhow::Result<ExitCode> {
    raise_descriptor_limit();
    let own = std::env::current_exe().context("cannot find this program")?;
    let server = match &args.server {
        Some(text) => CommandLine::parse(text)?,
        None => CommandLine::program(&copy_as_installed(&own.with_file_name("exec-server"))?),
    };
    let mut sides = vec![BenchSide {
        name: "server",
        command: server,
    }];
    if let Some(text) = &args.peer {
        sides.push(BenchSide {
            name: "peer",
            command: CommandLine::parse(text)?,
        });
    }
    if let Some(duration) = args.soak {
        return Ok(if soak::run(&sides[0].command, duration)? {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        });
    }
    for side in &sides {
        BenchServer::start(&side.command)
            .with_context(|| format!("the {} does not run", side.name))?;
    }
    warn_of_load();
    let bench = Bench {
        own,
        sides,
        quick: args.quick,
        rows: args.rows.clone(),
    };
    let rows = bench.run(&args.only);
    let mut stdout = std::io::stdout().lock();
    write!(stdout, "{}", report::table(&rows, args.peer.is_some()))?;
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report::json(&rows))?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let missed = rows
        .iter()
        .filter(|row| row.verdict() == Some(GoalVerdict::Miss))
        .count();
    if missed > 0 {
        writeln!(
            stdout,
            "\n{missed} of {} rows miss their target",
            rows.len()
        )?;
    }
    Ok(if args.check && missed > 0 {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Copies a program, so that its pages are in the page cache as after an installation. A linker
/// writes single pages, which cost each start time; a copy is cached in pieces as large as its
/// writes, and each touched piece counts as resident.
fn copy_as_installed(program: &Path) -> anyhow::Result<PathBuf> {
    // In the same directory, with the same access for other users.
    let directory = program.with_file_name("installed");
    let (copy, new) = (directory.join("exec-server"), directory.join("new"));
    let forget = |path: &Path| -> std::io::Result<()> {
        let file = std::fs::File::open(path)?;
        file.sync_all()?;
        Ok(rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)?)
    };
    let copied = std::fs::create_dir_all(&directory)
        .and_then(|()| std::fs::copy(program, &new))
        .and_then(|_| forget(&new))
        .and_then(|()| std::fs::rename(&new, &copy));
    copied.with_context(|| format!("cannot copy {} to {}", program.display(), copy.display()))?;
    Ok(copy)
}

/// Raises the limit of open files, which the server inherits; scenarios with hundreds of processes
/// and connections need it. Without the right to do so, those scenarios report what failed.
fn raise_descriptor_limit() {
    /// The kernel's default for the highest limit that a privileged process can set.
    const MAX_DESCRIPTORS: u64 = 1 << 20;
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: Some(MAX_DESCRIPTORS),
        maximum: Some(MAX_DESCRIPTORS),
    };
    if rustix::process::setrlimit(Resource::Nofile, most).is_ok() {
        return;
    }
    let _ = rustix::process::setrlimit(
        Resource::Nofile,
        Rlimit {
            current: maximum,
            maximum,
        },
    );
}

/// Other load on the machine slows floor and server, but not equally.
fn warn_of_load() {
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load
        .split(' ')
        .next()
        .and_then(|load| load.parse::<f64>().ok())
        .unwrap_or(0.0);
    if load > cores / 4.0 {
        eprintln!("load average is {load} on {cores} cores: figures will be less steady");
    }
}
