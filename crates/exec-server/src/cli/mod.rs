//! The command line: what was typed, what it means, and what to do.

mod args;
mod doctor;
mod kill;
mod ps;
mod run;
mod sandbox;
mod serve;
mod settings;
mod terminal;

use std::io::{self, Write as _};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser as _};
use exec_server_client::{ExecServerClient, ExecServerError, RemoteExecServerConnectArgs};

use args::{Args, Command, ServerArgs};

/// Runs the program.
pub fn main() -> ExitCode {
    // First: a launcher has no use for anything else of this program.
    if let Some(code) = exec_server_executor::sandbox::launcher::dispatch() {
        return code;
    }
    let args = Args::parse();
    let outcome = match args.command {
        None => serve::run(args.serve),
        Some(Command::Serve(args)) => serve::run(args),
        Some(Command::Run(args)) => return run::run(args),
        Some(Command::Ps(args)) => ps::run(&args),
        Some(Command::Kill(args)) => kill::run(&args),
        Some(Command::Doctor(args)) => doctor::run(&args),
        Some(Command::Completions { shell }) => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::command(), "exec-server", &mut script);
            print(&script).map(|()| ExitCode::SUCCESS)
        }
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// Tells what went wrong on standard error, and what to do where that is known.
fn complain(error: &anyhow::Error) {
    eprintln!("Error: {error:#}");
    if let Some(ExecServerError::Connect(_)) = error.downcast_ref() {
        eprintln!(
            "\nhint: `exec-server --listen ws://127.0.0.1:4600` starts a server on this machine"
        );
    }
}

/// Prints to standard output; a reader that has gone away is no failure.
fn print(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(()),
    }
}

/// A runtime for a command that talks to one server.
fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")
}

/// Connects to the server that was named.
async fn connect(url: &str) -> Result<ExecServerClient, ExecServerError> {
    let name = format!("exec-server {}", env!("CARGO_PKG_VERSION"));
    ExecServerClient::connect(RemoteExecServerConnectArgs::new(url, name)).await
}

/// The URL that was given; commands about a server need one.
fn required_url(server: &ServerArgs) -> anyhow::Result<&str> {
    server
        .url
        .as_deref()
        .context("no server given: pass --url URL or set EXEC_SERVER_URL")
}
