//! The guide of docs/remote.md, typed as it stands there.

use std::process::Stdio;
use std::time::Duration;

use exec_server_testkit::http;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::meeting::PATIENCE;

const DOCUMENT: &str = include_str!("../../../../docs/remote.md");

/// What is to be typed on one of the machines of the guide.
fn typed(machine: &str) -> String {
    let prompt = format!("    {machine}$ ");
    let mut found = DOCUMENT
        .lines()
        .filter_map(|line| line.strip_prefix(&prompt));
    let command = found
        .next()
        .unwrap_or_else(|| panic!("nothing for {machine}"));
    assert!(found.next().is_none(), "more than one line for {machine}");
    command.to_owned()
}

/// A shell that has the built binary as `exec-server`, in the directory of the guide.
fn shell(directory: &std::path::Path, home: &str, command: &str) -> Command {
    let bin = std::path::Path::new(env!("CARGO_BIN_EXE_exec-server"));
    let bin = bin.parent().unwrap().display().to_string();
    let home = directory.join(home);
    std::fs::create_dir_all(&home).unwrap();
    let mut shell = Command::new("/bin/sh");
    shell
        .env_clear()
        .env("PATH", format!("{bin}:/usr/local/bin:/usr/bin:/bin"))
        .env("HOME", home)
        .current_dir(directory)
        .args(["-c", &format!("exec {command}")])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .kill_on_drop(true);
    shell
}

async fn end(mut child: Child) {
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
    kill_process(Pid::from_raw(pid.unwrap()).unwrap(), Signal::TERM).unwrap();
    timeout(PATIENCE, child.wait()).await.unwrap().unwrap();
}

#[tokio::test]
async fn the_guide_works_as_it_is_written() {
    let directory = tempfile::tempdir().unwrap();
    // Its port may be taken here.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = free.local_addr().unwrap().port().to_string();
    drop(free);
    let command = |machine| typed(machine).replace("4700", &port);

    let mut meet = shell(directory.path(), "meet-home", &command("meet"));
    let mut meet = meet.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(meet.stdout.take().unwrap()).lines();
    let url = timeout(PATIENCE, lines.next_line()).await.unwrap().unwrap();
    assert_eq!(url, Some(format!("http://127.0.0.1:{port}")));
    let executor = shell(directory.path(), "box-home", &command("box"))
        .spawn()
        .unwrap();
    let token = std::fs::read_to_string(directory.path().join("meet/admin.token")).unwrap();
    let list = format!("http://127.0.0.1:{port}/cloud/environments");
    let online = async {
        loop {
            let (_, listed) = http::request("GET", &list, Some(token.trim()), "").await;
            if listed["environments"][0]["online"] == true {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, online)
        .await
        .expect("the executor attaches");

    let mut here = shell(directory.path(), "here-home", &command("here"));
    let output = timeout(PATIENCE, here.output()).await.unwrap().unwrap();
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), name);
    assert!(output.status.success());
    end(executor).await;
    end(meet).await;
}
