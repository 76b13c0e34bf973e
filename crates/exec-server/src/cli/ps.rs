//! `exec-server ps`: lists the processes of a server.

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use exec_server_protocol::process::{List, ListParams, ListResult, ListedProcess};

use super::args::PsArgs;
use super::table::{age, bytes, table};
use super::{connect, print, runtime};

pub(super) fn run(args: &PsArgs) -> anyhow::Result<ExitCode> {
    let mut listed = runtime()?.block_on(async {
        let client = connect(&args.server).await?;
        anyhow::Ok(client.call::<List>(&ListParams { all: true }).await?)
    })?;
    if !args.all {
        listed.processes.retain(|process| process.running);
    }
    let text = if args.json {
        let mut text = serde_json::to_string_pretty(&listed)?;
        text.push('\n');
        text
    } else {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        listing(&listed, u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
    };
    print(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn listing(listed: &ListResult, now_ms: u64) -> String {
    let head = [
        "SESSION", "PROCESS", "PID", "STATE", "AGE", "OUTPUT", "COMMAND",
    ];
    table(
        &head,
        listed.processes.iter().map(|process| row(process, now_ms)),
    )
}

fn row(process: &ListedProcess, now_ms: u64) -> [String; 7] {
    let state = match process.exit_code {
        None => "running".to_owned(),
        Some(code) => format!("exit {code}"),
    };
    let session = process
        .session_id
        .as_deref()
        .unwrap_or("")
        .chars()
        .take(8)
        .collect();
    let output = process.retained_bytes + process.evicted_bytes;
    [
        session,
        process.process_id.clone(),
        process.pid.to_string(),
        state,
        age(now_ms.saturating_sub(process.started_at_ms) / 1000),
        bytes(output),
        process.argv.join(" "),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ps_table_aligns_columns() {
        let process = ListedProcess {
            process_id: "build\n7".to_owned(),
            argv: vec!["make".to_owned(), "test".to_owned()],
            cwd: exec_server_protocol::PathUri::default(),
            tty: false,
            pid: 4321,
            started_at_ms: 1000,
            running: false,
            exit_code: Some(137),
            next_seq: 9,
            retained_bytes: 1024,
            evicted_bytes: 1024,
            discarded_bytes: 0,
            session_id: Some("0123456789".to_owned()),
        };
        let text = listing(
            &ListResult {
                processes: vec![process],
            },
            3_661_000,
        );
        let expected = "\
SESSION   PROCESS   PID   STATE     AGE    OUTPUT   COMMAND
01234567  build\\n7  4321  exit 137  1h01m  2.0 KiB  make test
";
        assert_eq!(text, expected);
    }
}
