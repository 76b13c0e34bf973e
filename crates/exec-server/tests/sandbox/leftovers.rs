//! What a server leaves behind that was killed together with its guardian.

use exec_server_testkit::proc;
use rustix::process::Signal;
use tokio::process::Command;

use crate::{SandboxFixture, ServerUser};

fn program(state: &std::path::Path) -> Command {
    // The fixture clears the environment of the command itself.
    let mut command = Command::new("env");
    command
        .arg(format!("EXEC_SERVER_STATE_DIR={}", state.display()))
        .arg(env!("CARGO_BIN_EXE_exec-server"));
    command
}

#[tokio::test]
async fn placeholders_of_a_server_killed_with_its_guardian_are_removed_by_the_next_one() {
    let state = tempfile::tempdir_in("/var/tmp").unwrap();
    let state = state.path().join("not/yet");
    let mut fixture = SandboxFixture::on(ServerUser::Own, program(&state)).await;
    let work = fixture.path("work");
    let workspace = fixture.workspace();
    let start = fixture.start_of(&workspace, &["/bin/sh", "-c", "echo up; sleep 600"]);
    let id = start.0["processId"].as_str().unwrap().to_owned();
    fixture.client.start(start).await;
    fixture.client.wrote(&id, "stdout", "up\n").await;
    let placeholders = || -> Vec<String> {
        let entries = std::fs::read_dir(&work).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).collect()
    };
    assert!(placeholders().contains(&".git".to_owned()));
    // Another server does not remove what is in use.
    let other = SandboxFixture::on(ServerUser::Own, program(&state)).await;
    assert!(placeholders().contains(&".git".to_owned()));
    let server = fixture.server.server_pid().await;
    let guardian = fixture.server.guardian_pid();
    let descendants = proc::children(server);
    // Both are stopped first, so that neither can react to the death of the other.
    for pid in [guardian, server] {
        proc::signal(pid, Signal::STOP);
    }
    let descendants: Vec<u32> = descendants.iter().map(|pid| pid.unsigned_abs()).collect();
    for &pid in [guardian, server].iter().chain(&descendants) {
        proc::signal(pid, Signal::KILL);
    }
    proc::eventually("the end of the server and its commands", || {
        // A zombie has no command line.
        let runs = |pid: &&u32| {
            std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
        };
        let left: Vec<_> = descendants.iter().filter(runs).collect();
        left.is_empty().then_some(()).ok_or(format!("{left:?}"))
    })
    .await;
    assert!(placeholders().contains(&".git".to_owned()));
    drop(other);
    let _next = SandboxFixture::on(ServerUser::Own, program(&state)).await;
    assert_eq!(placeholders(), Vec::<String>::new());
}
