//! The commands of `docs/everyday.md`, as a person types them, and exactly what they print.

use std::path::Path;
use std::process::Stdio;

use exec_server_testkit::proc::TIMEOUT;
use tokio::io::AsyncBufReadExt as _;
use tokio::process::Command;

use super::{BINARY, text};

/// A command, and the lines that follow it.
fn tasks() -> Vec<(&'static str, Vec<&'static str>)> {
    let document = include_str!("../../../../docs/everyday.md");
    let mut tasks: Vec<(&str, Vec<&str>)> = Vec::new();
    for block in document.split("```console\n").skip(1) {
        let block = block.split("```").next().unwrap();
        for line in block.lines() {
            match line.strip_prefix("$ ") {
                Some(command) => tasks.push((command, Vec::new())),
                None => tasks.last_mut().unwrap().1.push(line),
            }
        }
    }
    for (_, expected) in &mut tasks {
        while expected.last().is_some_and(|line| line.is_empty()) {
            expected.pop();
        }
    }
    tasks
}

/// Whether a line is the expected one, where `…` stands for any text.
fn is_like(expected: &str, line: &str) -> bool {
    let mut parts = expected.split('…');
    let Some(mut rest) = line.strip_prefix(parts.next().unwrap_or_default()) else {
        return false;
    };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else {
        return rest.is_empty();
    };
    for part in middle {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

fn shell(line: &str, top: &Path, directory: &str) -> Command {
    let mut command = Command::new("bash");
    let socket = format!("unix://{}/run/exec-server/serve.sock", top.display());
    command
        .args(["-c", line])
        .env_clear()
        .env("PATH", format!("{}/bin:/usr/bin:/bin", top.display()))
        .env("HOME", top.join("home"))
        .env("XDG_RUNTIME_DIR", top.join("run"))
        .env("LANG", "C.UTF-8")
        .env("SOCKET", socket)
        .current_dir(top.join(directory))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    command
}

#[tokio::test]
async fn everyday_tasks_print_what_is_documented() {
    let tasks = tasks();
    assert!(tasks.len() >= 60, "{}", tasks.len());
    let directory = tempfile::tempdir().unwrap();
    let top = directory.path().canonicalize().unwrap();
    for name in ["bin", "run", "home/work", "home/served"] {
        std::fs::create_dir_all(top.join(name)).unwrap();
    }
    std::os::unix::fs::symlink(BINARY, top.join("bin/exec-server")).unwrap();
    let mut server = shell("exec exec-server serve", &top, "home/served")
        .spawn()
        .unwrap();
    let mut announced = tokio::io::BufReader::new(server.stdout.take().unwrap()).lines();
    announced.next_line().await.unwrap().unwrap();
    let mut failures = String::new();
    for (command, expected) in tasks {
        let line = format!("exec 2>&1; {command}");
        let output = tokio::time::timeout(TIMEOUT, shell(&line, &top, "home/work").output());
        let output = output.await.expect(command).unwrap();
        let mut printed = text(&output.stdout)
            .replace(top.join("home").to_str().unwrap(), "/home/me")
            .replace(top.join("run").to_str().unwrap(), "/run/user/1000");
        if let Some(code @ 1..) = output.status.code() {
            printed.push_str(&format!("[exit code {code}]\n"));
        }
        let lines: Vec<&str> = printed.trim_end().lines().collect();
        let mut pairs = expected.iter().zip(&lines);
        if expected.len() != lines.len() || !pairs.all(|(one, other)| is_like(one, other)) {
            failures.push_str(&format!("$ {command}\n{printed}\n"));
        }
    }
    assert!(
        failures.is_empty(),
        "these print something else:\n{failures}"
    );
}
