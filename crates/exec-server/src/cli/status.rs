//! `exec-server status`: version, latency and load of a server.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Instant;

use exec_server_protocol::environment::Status;
use exec_server_protocol::process::{List, ListParams};
use exec_server_protocol::{NoParams, PathUri};
use serde_json::json;

use super::args::StatusArgs;
use super::table::visible;
use super::{print, required, runtime};

pub(super) fn run(args: &StatusArgs) -> anyhow::Result<ExitCode> {
    let server = required(&args.server)?;
    let report = runtime()?.block_on(async {
        let began = Instant::now();
        let client = server.connect().await?;
        let connected = began.elapsed();
        let sent_at = Instant::now();
        client.call::<Status>(&NoParams).await?;
        let answered = sent_at.elapsed();
        let info = client.environment_info().await.ok();
        // The request is refused if the token lacks the scope `observe`.
        let listed = client.call::<List>(&ListParams { all: true }).await.ok();
        let path = |path: Option<&PathUri>| path.map(ToString::to_string);
        let processes = listed.map(|listed| {
            let sessions: HashSet<_> = listed
                .processes
                .iter()
                .map(|process| process.session_id.clone())
                .collect();
            let running = listed.processes.iter().filter(|process| process.running);
            let retained: u64 = listed.processes.iter().map(|p| p.retained_bytes).sum();
            json!({
                "running": running.count(),
                "readable": listed.processes.len(),
                "sessionsWithProcesses": sessions.len(),
                "retainedBytes": retained,
            })
        });
        anyhow::Ok(json!({
            "url": server.name,
            "version": info.and_then(|info| info.executor_version.clone()),
            "os": info.and_then(|info| info.platform_os.clone()),
            "shell": info.map(|info| info.shell.path.clone()),
            "cwd": info.and_then(|info| path(info.cwd.as_ref())),
            "connectMs": connected.as_secs_f64() * 1000.0,
            "answerMs": answered.as_secs_f64() * 1000.0,
            "processes": processes,
        }))
    })?;
    let text = if args.json {
        format!("{}\n", serde_json::to_string_pretty(&report)?)
    } else {
        as_text(&report)
    };
    print(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn as_text(report: &serde_json::Value) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:10} {value}");
    };
    let known = |name: &str| visible(report[name].as_str().unwrap_or("unknown"));
    line("server", known("url"));
    line("version", known("version"));
    line("system", known("os"));
    line("shell", known("shell"));
    line("directory", known("cwd"));
    let millis = |name: &str| report[name].as_f64().unwrap_or_default();
    let connect = millis("connectMs");
    let answer = millis("answerMs");
    line(
        "answers",
        format!("in {answer:.1} ms, after {connect:.1} ms for the connection"),
    );
    let processes = &report["processes"];
    line(
        "processes",
        match processes["running"].as_u64() {
            Some(running) => format!(
                "{running} running, {} with readable output, in {} sessions; {} bytes retained",
                processes["readable"],
                processes["sessionsWithProcesses"],
                processes["retainedBytes"]
            ),
            None => "not visible with this token (it lacks the scope `observe`)".to_owned(),
        },
    );
    text
}
