//! `exec-server kill`: end processes of a server.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use exec_server_client::ExecServerClient;
use exec_server_protocol::process::{
    List, ListParams, ListedProcess, Signal, SignalName, SignalParams, Terminate, TerminateMode,
    TerminateParams,
};

use super::args::KillArgs;
use super::error::{self, notice};
use super::table::visible;
use super::{connect, print, runtime};

pub(super) fn run(args: &KillArgs) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(async {
        let client = connect(&args.server).await?;
        let listed = client.call::<List>(&ListParams { all: true }).await?;
        let targets = targets(&listed.processes, &args.target)?;
        let mut code = ExitCode::SUCCESS;
        for process in targets {
            let outcome = match args.signal {
                Some(signal) => send(&client, process, signal).await,
                None => end(&client, process, args).await,
            };
            match outcome {
                Ok(true) => {}
                Ok(false) => code = ExitCode::FAILURE,
                Err(error) => {
                    error::report(&error);
                    code = ExitCode::FAILURE;
                }
            }
        }
        Ok(code)
    })
}

/// Resolves the arguments to processes. An argument is an id, a pid, or the beginning of a session id
/// with a process id (SESSION/ID).
fn targets(listed: &[ListedProcess], words: &[String]) -> anyhow::Result<Vec<ListedProcess>> {
    let mut found = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let (session, id) = match word.split_once('/') {
            Some((session, id)) => (session, id),
            None if has_session(listed, word) && !is_process(listed, word) => {
                let Some(id) = words.next() else {
                    bail!("`{word}` is a session; type the id of a process after it");
                };
                (word.as_str(), id.as_str())
            }
            None => ("", word.as_str()),
        };
        found.push(find(listed, session, id)?);
    }
    Ok(found)
}

fn has_session(listed: &[ListedProcess], prefix: &str) -> bool {
    let mut sessions = listed
        .iter()
        .filter_map(|process| process.session_id.as_deref());
    sessions.any(|id| id.starts_with(prefix))
}

fn is_process(listed: &[ListedProcess], word: &str) -> bool {
    listed.iter().any(|process| is_named(process, word))
}

/// Whether an argument names the process by its id or its pid.
fn is_named(process: &ListedProcess, word: &str) -> bool {
    process.process_id == word || (process.running && process.pid.to_string() == word)
}

/// Returns the only process that matches; fails if there are several.
fn find(listed: &[ListedProcess], session: &str, id: &str) -> anyhow::Result<ListedProcess> {
    let in_session = |process: &&ListedProcess| {
        let own = process.session_id.as_deref().unwrap_or("");
        own.starts_with(session)
    };
    let all = || listed.iter().filter(in_session);
    let mut found: Vec<&ListedProcess> = all().filter(|one| one.process_id == id).collect();
    if found.is_empty() {
        found = all().filter(|one| is_named(one, id)).collect();
    }
    if found.len() > 1 && found.iter().any(|process| process.running) {
        found.retain(|process| process.running);
    }
    match found[..] {
        [process] => Ok(process.clone()),
        [] => bail!("there is no process `{id}` on this server; `exec-server ps` lists them"),
        _ => bail!(
            "{} sessions have a process `{id}`; type SESSION/{id}, with the beginning of the \
             session's id",
            found.len()
        ),
    }
}

async fn send(
    client: &ExecServerClient,
    process: ListedProcess,
    signal: SignalName,
) -> anyhow::Result<bool> {
    let params = SignalParams {
        process_id: process.process_id,
        signal,
        scope: None,
        session_id: process.session_id,
    };
    client.call::<Signal>(&params).await?;
    Ok(true)
}

async fn end(
    client: &ExecServerClient,
    process: ListedProcess,
    args: &KillArgs,
) -> anyhow::Result<bool> {
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
    // After the grace period the server needs time to check that all processes have exited.
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
            print(format!("{id} {what}, all its processes have exited\n").as_bytes())?;
        }
        return Ok(true);
    }
    for survivor in &survivors {
        notice(&visible(&format!(
            "could not end pid {}: {}",
            survivor.pid, survivor.command
        )));
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(session: &str, id: &str, pid: i32) -> ListedProcess {
        ListedProcess {
            process_id: id.to_owned(),
            argv: Vec::new(),
            cwd: exec_server_protocol::PathUri::default(),
            tty: false,
            pid,
            started_at_ms: 0,
            running: true,
            exit_code: None,
            next_seq: 1,
            retained_bytes: 0,
            evicted_bytes: 0,
            discarded_bytes: 0,
            session_id: Some(session.to_owned()),
        }
    }

    #[test]
    fn kill_accepts_ids_and_pids_as_ps_prints_them() {
        let listed = [
            process("27902b9d-1", "run-461", 464),
            process("3f2a0000-2", "build", 500),
            process("27902b9d-1", "build", 501),
        ];
        let pids = |words: &[&str]| -> anyhow::Result<Vec<i32>> {
            let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
            let found = targets(&listed, &words)?;
            Ok(found.iter().map(|process| process.pid).collect())
        };
        assert_eq!(pids(&["run-461"]).unwrap(), [464]);
        assert_eq!(pids(&["464", "500"]).unwrap(), [464, 500]);
        assert_eq!(pids(&["3f2a", "build", "501"]).unwrap(), [500, 501]);
        assert_eq!(pids(&["2790/build"]).unwrap(), [501]);
        for (words, says) in [
            (&["build"][..], "type SESSION/build"),
            (&["3f2a"], "`3f2a` is a session"),
            (&["nothing"], "no process `nothing`"),
            (&["465"], "no process `465`"),
        ] {
            let error = pids(words).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
