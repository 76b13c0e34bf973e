//! Runs a command on an execution server and forwards its output and exit code.
//!
//! ```text
//! cargo run -p exec-server-client --example run -- ws://127.0.0.1:4600 ls -l /
//! cargo run -p exec-server-client --example run -- stdio:'ssh host exec-server --listen stdio' uname
//! ```
//!
//! The first argument is the address of the server: `ws://HOST:PORT`, `unix:///PATH`, or `stdio:`
//! and a command that speaks the protocol on its stdin and stdout. Options before the address: `-i`
//! also forwards stdin, `--pull` reads output instead of receiving notifications.

use std::error::Error;
use std::io::{Read as _, Write as _};
use std::process::ExitCode;

use exec_server_client::protocol::PathUri;
use exec_server_client::protocol::process::{
    Delivery, EnvPolicy, Inherit, OutputStream, StartParams, WriteStatus,
};
use exec_server_client::{
    ExecBackend as _, ExecProcess, ExecProcessEvent, ExecServerClient,
    ExecServerClientConnectOptions, RemoteExecServerConnectArgs,
};

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut args = std::env::args().skip(1).peekable();
    let with_input = args.next_if_eq("-i").is_some();
    let delivery = args.next_if_eq("--pull").map(|_| Delivery::Pull);
    let server = args
        .next()
        .ok_or("usage: run [-i] [--pull] SERVER COMMAND...")?;
    let argv: Vec<String> = args.collect();

    let client = connect(&server).await?;
    let cwd = match &client.environment_info().await?.cwd {
        Some(cwd) => cwd.clone(),
        None => PathUri::parse("file:///")?,
    };
    let started = client
        .start(StartParams {
            process_id: "run".to_owned(),
            argv,
            cwd,
            env_policy: Some(EnvPolicy::unfiltered(Inherit::All)),
            pipe_stdin: with_input,
            delivery,
            ..StartParams::default()
        })
        .await?;

    let mut events = started.process.events()?;
    if with_input {
        let process = started.process.clone();
        tokio::spawn(async move {
            if let Err(error) = pass_input_on(&*process).await {
                eprintln!("run: {error}");
            }
        });
    }
    let mut code = 1;
    while let Some(event) = events.recv().await {
        match event {
            ExecProcessEvent::Output {
                stream: OutputStream::Stderr,
                chunk,
                ..
            } => {
                std::io::stderr().write_all(&chunk)?;
            }
            ExecProcessEvent::Output { chunk, .. } => std::io::stdout().write_all(&chunk)?,
            ExecProcessEvent::Exited { exit, .. } => code = exit.exit_code,
            ExecProcessEvent::Gap { bytes, .. } => eprintln!("run: output is missing: {bytes:?}"),
            ExecProcessEvent::Failed(failure) => return Err(failure.into()),
            _ => {}
        }
    }
    std::io::stdout().flush()?;
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

async fn connect(server: &str) -> Result<ExecServerClient, Box<dyn Error>> {
    let Some(command) = server.strip_prefix("stdio:") else {
        let args = RemoteExecServerConnectArgs::new(server, "run-example");
        return Ok(ExecServerClient::connect(args).await?);
    };
    let mut command = command.split_whitespace();
    let mut program = tokio::process::Command::new(command.next().ok_or("no command")?);
    program.args(command);
    let options = ExecServerClientConnectOptions::new("run-example");
    Ok(ExecServerClient::connect_stdio(program, options).await?)
}

async fn pass_input_on(process: &dyn ExecProcess) -> Result<(), Box<dyn Error + Send + Sync>> {
    loop {
        let piece = tokio::task::spawn_blocking(|| {
            let mut piece = vec![0; 64 * 1024];
            let read = std::io::stdin().read(&mut piece)?;
            piece.truncate(read);
            std::io::Result::Ok(piece)
        })
        .await??;
        if piece.is_empty() {
            process.close_stdin().await?;
            return Ok(());
        }
        if process.write(piece.into()).await? != WriteStatus::Accepted {
            return Ok(());
        }
    }
}
