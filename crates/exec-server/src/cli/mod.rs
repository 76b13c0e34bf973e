//! The command line: arguments, settings and commands of the `exec-server` program.

mod access;
mod args;
mod codex;
mod completions;
mod config;
mod daemon;
mod doctor;
mod env;
mod error;
mod fleet;
mod forward;
mod fs;
mod init;
mod issuer;
mod kill;
mod lifecycle;
mod log;
#[cfg(feature = "mcp")]
mod mcp;
mod network;
mod on;
mod overview;
mod own_socket;
mod parse;
mod ps;
#[cfg(test)]
#[path = "reference/tests.rs"]
mod reference;
mod registry;
mod remote;
mod rendezvous;
mod run;
mod sandbox;
mod serve;
pub(crate) mod settings;
mod ssh;
mod status;
mod systemd;
mod table;
mod terminal;
mod token;
mod trust;
mod values;

use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::CommandFactory as _;
use exec_server_client::ExecServerClient;
use exec_server_sys::memory;

use args::{CliArgs, CliCommand, ServerArgs};
use on::{CommandLocation, RemoteMachine};

/// Runs the program.
pub fn main() -> ExitCode {
    // The launcher is dispatched first: a sandbox launcher uses no other part of this program.
    if let Some(code) = exec_server_executor::sandbox::dispatch() {
        return code;
    }
    // Applies to clients and servers: both move large blocks.
    memory::return_large_allocations();
    let command = match CliCommand::parse() {
        Ok(command) => command,
        Err(code) => return code,
    };
    let outcome = match command {
        CliCommand::Serve(args) => serve::run(*args, None),
        CliCommand::Run(args) => return run::run(args),
        CliCommand::Ps(args) => ps::run(&args),
        CliCommand::Kill(args) => kill::run(&args),
        CliCommand::Fs(args) => fs::run(&args),
        CliCommand::Cp(args) => fs::run_cp(&args),
        CliCommand::Env(command) => env::run(&command),
        CliCommand::Forward(args) => forward::run(*args),
        #[cfg(feature = "mcp")]
        CliCommand::Mcp(args) => mcp::run(*args),
        #[cfg(feature = "mcp")]
        CliCommand::McpProxy(args) => mcp::run_proxy(*args),
        CliCommand::Rendezvous(args) => rendezvous::run(*args),
        CliCommand::Fleet(args) => fleet::run(&args),
        CliCommand::Init(args) => init::run(&args),
        CliCommand::Token(command) => token::run(command),
        CliCommand::Config(command) => config::run(&command),
        CliCommand::Daemon(args) => daemon::run(args),
        CliCommand::Status(args) => status::run(&args),
        CliCommand::Man { out } => man(out.as_deref()),
        CliCommand::InstallAsCodex { directory, force } => codex::install(&directory, force),
        CliCommand::Doctor(args) => doctor::run(&args),
        CliCommand::Completions { shell } => completions::run(shell),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            error::report(&error);
            ExitCode::FAILURE
        }
    }
}

/// Prints the manual page, or writes all of them.
fn man(out: Option<&Path>) -> anyhow::Result<ExitCode> {
    match out {
        None => {
            let mut page = Vec::new();
            clap_mangen::Man::new(CliArgs::command()).render(&mut page)?;
            print(&page)?;
        }
        Some(directory) => {
            clap_mangen::generate_to(CliArgs::command(), directory)
                .with_context(|| format!("cannot write to {}", directory.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints to standard output; a closed pipe is not a failure.
fn print(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(()),
    }
}

/// A single-threaded runtime, for commands that use one server.
fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")
}

/// Connects to the server of the options; fails if they name none.
async fn connect(server: &ServerArgs) -> anyhow::Result<ExecServerClient> {
    required(server)?.connect().await
}

/// The server of the options.
fn required(server: &ServerArgs) -> anyhow::Result<RemoteMachine> {
    match on::resolve(server)? {
        CommandLocation::There(there) => Ok(there),
        CommandLocation::Here => match own_socket::found() {
            Some(url) if server.on.is_none() => match on::named(&url, server)? {
                CommandLocation::There(there) => Ok(there),
                CommandLocation::Here => bail!("`{url}` is not the URL of a server"),
            },
            _ => bail!(
                "no server given: start one with `exec-server serve`, pass --on ENV or --url URL, \
                 or set EXEC_SERVER_URL"
            ),
        },
    }
}
