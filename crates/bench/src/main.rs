//! The bench: starts a server, measures it from outside, and prints how far it is from the floor.
//!
//! Owns the scenarios, the floors and the table. Knows nothing of a server but its command line, its
//! wire and its pid.

mod args;
mod child;
mod client;
mod floor;
mod pattern;
mod report;
mod scenario;
mod server;
mod stats;
mod wire;

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use rustix::process::{Resource, Rlimit};

use crate::args::Args;
use crate::report::Verdict;
use crate::scenario::{Bench, Side};
use crate::server::CommandLine;

fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    if let Some(total) = args.emit_pattern {
        return child::emit(total).map(|()| ExitCode::SUCCESS);
    }
    if let Some(total) = args.check_pattern {
        return child::check(total).map(|()| ExitCode::SUCCESS);
    }
    if let Some(push) = args.answer_websockets {
        return child::answer_websockets(push).map(|()| ExitCode::SUCCESS);
    }
    run(&args)
}

fn run(args: &Args) -> anyhow::Result<ExitCode> {
    raise_descriptor_limit();
    let own = std::env::current_exe().context("cannot find this program")?;
    let server = match &args.server {
        Some(text) => CommandLine::parse(text)?,
        None => CommandLine::program(&own.with_file_name("exec-server")),
    };
    let mut sides = vec![Side {
        name: "server",
        command: server,
    }];
    if let Some(text) = &args.peer {
        sides.push(Side {
            name: "peer",
            command: CommandLine::parse(text)?,
        });
    }
    let bench = Bench {
        own,
        sides,
        quick: args.quick,
    };
    let rows = bench.run(&args.only);
    let mut stdout = std::io::stdout().lock();
    write!(stdout, "{}", report::table(&rows, args.peer.is_some()))?;
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&rows)?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let missed = rows
        .iter()
        .filter(|row| row.verdict() == Some(Verdict::Miss))
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

/// Hundreds of processes and connections need descriptors, here and in the server that inherits
/// the limit; without the right to raise it the scenarios say what failed.
fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
    let _ = rustix::process::setrlimit(
        Resource::Nofile,
        Rlimit {
            current: maximum,
            maximum,
        },
    );
}
