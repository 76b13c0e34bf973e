//! `exec-server ps`: what runs on a server.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use exec_server_protocol::process::{List, ListParams, ListResult, ListedProcess};

use super::args::PsArgs;
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
        table(&listed, u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
    };
    print(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn table(listed: &ListResult, now_ms: u64) -> String {
    let mut rows = vec![
        [
            "SESSION", "PROCESS", "PID", "STATE", "AGE", "OUTPUT", "COMMAND",
        ]
        .map(str::to_owned),
    ];
    rows.extend(listed.processes.iter().map(|process| row(process, now_ms)));
    let mut widths = [0; 7];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in &rows {
        let (last, cells) = row
            .split_last()
            .map_or((String::new(), &row[..]), |(last, cells)| {
                (last.clone(), cells)
            });
        for (cell, width) in cells.iter().zip(widths) {
            let _ = write!(text, "{cell:width$}  ");
        }
        let _ = writeln!(text, "{last}");
    }
    text
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
    // A name or an argument may hold anything; the table stays one line each.
    let visible = |text: &str| text.escape_debug().to_string();
    [
        session,
        visible(&process.process_id),
        process.pid.to_string(),
        state,
        age(now_ms.saturating_sub(process.started_at_ms) / 1000),
        bytes(output),
        visible(&process.argv.join(" ")),
    ]
}

pub(super) fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

pub(super) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{count} B")
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_line_up() {
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
        let text = table(
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
        assert_eq!(
            (age(59), age(61), age(90_000)),
            ("59s".into(), "1m01s".into(), "1d01h".into())
        );
        assert_eq!(
            (bytes(7), bytes(1536)),
            ("7 B".to_owned(), "1.5 KiB".to_owned())
        );
    }
}
