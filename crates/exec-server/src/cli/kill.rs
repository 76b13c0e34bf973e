//! `exec-server kill`: end processes of a server.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use exec_server_client::ExecServerClient;
use exec_server_protocol::process::{
    List, ListParams, ListedProcess, Signal, SignalName, SignalParams, Terminate, TerminateMode,
    TerminateParams,
};

use super::args::{KillArgs, SignalArg};
use super::error::notice;
use super::table::visible;
use super::{connect, print, runtime};

pub(super) fn run(args: &KillArgs) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(async {
        let client = connect(&args.server).await?;
        let process = find(&client, &args.target).await?;
        match args.signal {
            Some(signal) => send(&client, process, signal).await,
            None => end(&client, process, args).await,
        }
    })
}

/// The one running process that is meant.
async fn find(client: &ExecServerClient, target: &[String]) -> anyhow::Result<ListedProcess> {
    let (session, id) = match target {
        [id] => ("", id),
        [session, id] => (session.as_str(), id),
        _ => bail!("expected [SESSION] PROCESS"),
    };
    let listed = client.call::<List>(&ListParams { all: true }).await?;
    let mut found: Vec<ListedProcess> = listed
        .processes
        .into_iter()
        .filter(|process| process.process_id == *id)
        .filter(|process| {
            process
                .session_id
                .as_deref()
                .unwrap_or("")
                .starts_with(session)
        })
        .collect();
    if found.len() > 1 && found.iter().any(|process| process.running) {
        found.retain(|process| process.running);
    }
    match (found.pop(), found.len()) {
        (Some(process), 0) => Ok(process),
        (None, _) => {
            bail!("there is no process `{id}` on this server; `exec-server ps` lists them")
        }
        (Some(_), more) => {
            bail!(
                "{} sessions have a process `{id}`; type the session's id before it",
                more + 1
            )
        }
    }
}

async fn send(
    client: &ExecServerClient,
    process: ListedProcess,
    signal: SignalArg,
) -> anyhow::Result<ExitCode> {
    let signal = match signal {
        SignalArg::Interrupt => SignalName::Interrupt,
        SignalArg::Terminate => SignalName::Terminate,
        SignalArg::Kill => SignalName::Kill,
        SignalArg::Hangup => SignalName::Hangup,
        SignalArg::Quit => SignalName::Quit,
        SignalArg::User1 => SignalName::User1,
        SignalArg::User2 => SignalName::User2,
        SignalArg::Stop => SignalName::Stop,
        SignalArg::Continue => SignalName::Continue,
    };
    let params = SignalParams {
        process_id: process.process_id,
        signal,
        scope: None,
        session_id: process.session_id,
    };
    client.call::<Signal>(&params).await?;
    Ok(ExitCode::SUCCESS)
}

async fn end(
    client: &ExecServerClient,
    process: ListedProcess,
    args: &KillArgs,
) -> anyhow::Result<ExitCode> {
    let mode = if args.force {
        TerminateMode::Force
    } else {
        let timeout_ms = u64::try_from(args.grace.as_millis()).unwrap_or(u64::MAX);
        TerminateMode::Graceful { timeout_ms }
    };
    let params = TerminateParams {
        process_id: process.process_id.clone(),
        mode: Some(mode),
        wait: true,
        session_id: process.session_id,
    };
    // Beyond the grace the server itself takes a while to be sure that all are gone.
    let wait = args.grace + Duration::from_secs(15);
    let result = client.call_waiting::<Terminate>(&params, wait).await?;
    if args.json {
        print(format!("{}\n", serde_json::to_string_pretty(&result)?).as_bytes())?;
    }
    let survivors = result.survivors.unwrap_or_default();
    if survivors.is_empty() {
        if !args.json {
            let what = if result.running {
                "ended"
            } else {
                "had ended already"
            };
            let id = visible(&process.process_id);
            print(format!("{id} {what}, nothing of it is left\n").as_bytes())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    for survivor in &survivors {
        notice(&visible(&format!(
            "could not end pid {}: {}",
            survivor.pid, survivor.command
        )));
    }
    Ok(ExitCode::FAILURE)
}
