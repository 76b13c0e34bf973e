//! Runs the guide for three machines in docs/remote.md as it is printed.

use std::path::Path;
use std::process::Stdio;

use exec_server_testkit::proc::TIMEOUT;
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::time::timeout;

use super::stage::RunningProgram;

/// The shell blocks of a section.
fn blocks(section: &str) -> Vec<String> {
    let guide = include_str!("../../../../docs/remote.md");
    let (_, rest) = guide.split_once(&format!("\n## {section}\n")).unwrap();
    let section = rest.split("\n## ").next().unwrap();
    let blocks = section.split("```sh\n").skip(1);
    blocks
        .map(|block| block.split("```").next().unwrap().to_owned())
        .collect()
}

/// A shell on one of the machines, with a separate home and the files that users copy.
fn shell(home: &Path, script: &str, pin: &str) -> Command {
    std::fs::create_dir_all(home.join(".local")).unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_exec-server"));
    let path = format!(
        "{}:/usr/local/bin:/usr/bin:/bin",
        program.parent().unwrap().display()
    );
    let mut command = Command::new("/bin/sh");
    command
        .args(["-eu", "-c", script])
        .env_clear()
        .env("PATH", path)
        .env("HOME", home)
        .env("PIN", pin)
        .current_dir(home.parent().unwrap())
        .stdin(Stdio::null())
        .kill_on_drop(true);
    command
}

#[tokio::test]
async fn guide_for_three_machines_works_as_printed() {
    let directory = tempfile::tempdir().unwrap();
    let home = |name: &str| directory.path().join(name);
    let port = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap().port()
    };
    // All machines are this one, on a free port.
    let blocks: Vec<String> = blocks("In five minutes")
        .iter()
        .map(|block| {
            block
                .replace(
                    "registry://meet.example:4700",
                    &format!("registry+https://127.0.0.1:{port}"),
                )
                .replace("meet.example:4700", &format!("127.0.0.1:{port}"))
                .replace("0.0.0.0:4700", &format!("127.0.0.1:{port}"))
        })
        .collect();
    let [tokens, rendezvous, executor, client] = &blocks[..] else {
        panic!("{blocks:#?}");
    };
    let made = shell(&home("meet"), tokens, "").output().await.unwrap();
    assert!(made.status.success(), "{made:?}");
    let rendezvous = format!("exec {}", rendezvous.trim_start());
    let deployment = RunningProgram::start(shell(&home("meet"), &rendezvous, "")).await;
    let stderr = deployment.stderr();
    let pin = stderr
        .lines()
        .find_map(|line| line.strip_prefix("tls pin: "));
    let pin = pin.unwrap_or_else(|| panic!("{stderr}"));
    let executor = format!("cd build-7; exec {}", executor.trim_start());
    let executor = executor.replace("build-7.token", "../build-7.token");
    let executor = RunningProgram::start(shell(&home("build-7"), &executor, pin)).await;
    let fingerprint = executor.stderr();
    let fingerprint = fingerprint
        .lines()
        .find_map(|line| line.strip_prefix("key: "));
    let fingerprint = fingerprint.expect("the executor prints its key");
    let used = shell(&home("yours"), client, pin).output();
    let used = timeout(TIMEOUT, used).await.unwrap().unwrap();
    let stderr = String::from_utf8_lossy(&used.stderr);
    assert!(used.status.success(), "{stderr}");
    let stdout = String::from_utf8_lossy(&used.stdout);
    let lines: Vec<&str> = stdout.lines().collect();
    let node = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    assert_eq!(lines[..2], [node.as_str(), "hello"], "{stdout}");
    assert!(lines[2].ends_with(fingerprint), "{stdout}");
    assert!(home("build-7").join("greeting.txt").exists());
}
