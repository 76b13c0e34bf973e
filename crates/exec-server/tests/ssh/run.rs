//! Commands on the remote machine, as if they ran locally.

use super::*;

#[tokio::test]
async fn remote_command_has_stdout_stderr_and_exit_code() {
    let fixture = SshFixture::new();
    let script = "echo out; echo err >&2; pwd; exit 7";
    let (out, err, code) = outcome(fixture.run(&[], &["sh", "-c", script])).await;
    let home = fixture.sshd.home();
    assert_eq!(
        (out.as_str(), code),
        (format!("out\n{}\n", home.display()).as_str(), 7),
        "{err}"
    );
    assert_eq!(err, "err\n");
    let (_, err, code) = outcome(fixture.run(&[], &["no-such-program"])).await;
    assert_eq!(code, 127, "{err}");
    let (_, err, code) = outcome(fixture.run(&["--timeout", "200ms"], &["sleep", "60"])).await;
    assert_eq!(code, 124, "{err}");
}

#[tokio::test]
async fn next_command_reuses_connection_and_daemon() {
    let fixture = SshFixture::new();
    assert_eq!(outcome(fixture.run(&[], &["true"])).await.2, 0);
    let (daemon, masters) = (fixture.daemon_pid(), fixture.sshd.masters());
    assert_eq!(masters.len(), 1, "{masters:?}");
    let logins = fixture.sshd.log().matches("Accepted publickey").count();
    let sessions = fixture.sshd.log().matches("Starting session").count();
    for _ in 0..3 {
        assert_eq!(outcome(fixture.run(&[], &["true"])).await.2, 0);
    }
    assert_eq!(
        (fixture.daemon_pid(), fixture.sshd.masters()),
        (daemon, masters)
    );
    let log = fixture.sshd.log();
    assert_eq!(log.matches("Accepted publickey").count(), logins);
    // sshd did not start a process for the second command.
    assert_eq!(log.matches("Starting session").count(), sessions);
}

/// The file that remembers the remote directory between commands.
fn remembered(fixture: &SshFixture) -> PathBuf {
    let files = tree(&fixture.sshd.path().join("run"));
    let mut found = files
        .iter()
        .filter(|path| path.extension() == Some("cwd".as_ref()));
    found
        .next()
        .expect("the directory to be remembered")
        .clone()
}

#[tokio::test]
async fn command_uses_the_remembered_directory_and_notices_changes() {
    let fixture = SshFixture::new();
    let home = format!("{}\n", fixture.sshd.home().display());
    for _ in 0..3 {
        assert_eq!(
            outcome(fixture.run(&[], &["pwd"])).await,
            (home.clone(), String::new(), 0)
        );
    }
    let (out, err, code) = outcome(fixture.run(&["--cwd", "/usr"], &["pwd"])).await;
    assert_eq!((out.as_str(), code), ("/usr\n", 0), "{err}");
    let (_, err, code) = outcome(fixture.run(&[], &["no-such-program"])).await;
    assert_eq!(code, 127, "{err}");
    let (_, err, code) = outcome(fixture.run(&["--cwd", "/no/such"], &["pwd"])).await;
    assert!(code == 125 && err.contains("`/no/such`"), "{err}");
    // A wrong stored directory is detected and corrected.
    fs::write(remembered(&fixture), "file:///no/such").unwrap();
    let (out, err, code) = outcome(fixture.run(&[], &["pwd"])).await;
    assert_eq!((out, code), (home.clone(), 0), "{err}");
    fs::write(remembered(&fixture), "file:///usr").unwrap();
    let (out, err, code) = outcome(fixture.run(&[], &["pwd"])).await;
    assert_eq!((out.as_str(), code), ("/usr\n", 0), "{err}");
    assert!(
        err.contains("file:///usr") && err.contains(home.trim()),
        "{err}"
    );
    let (out, err, code) = outcome(fixture.run(&[], &["pwd"])).await;
    assert_eq!((out, err.as_str(), code), (home.clone(), "", 0));
    fs::write(remembered(&fixture), "nonsense").unwrap();
    assert_eq!(outcome(fixture.run(&[], &["pwd"])).await.0, home);
    // The command still receives input and the end of input.
    let output = output_of(fixture.run(&[], &["cat"]), b"in").await;
    assert_eq!(
        (&output.stdout[..], output.status.code()),
        (&b"in"[..], Some(0))
    );
}

#[tokio::test]
async fn concurrent_commands_share_one_ssh_connection() {
    let fixture = SshFixture::new();
    let runs = (0..6).map(|number| {
        let text = number.to_string();
        outcome(fixture.run(&[], &["echo", &text]))
    });
    let mut tasks = tokio::task::JoinSet::new();
    for run in runs {
        tasks.spawn(run);
    }
    let mut seen: Vec<_> = tasks.join_all().await;
    seen.sort();
    for (number, (out, err, code)) in seen.into_iter().enumerate() {
        assert_eq!((out, code), (format!("{number}\n"), 0), "{err}");
    }
    assert_eq!(fixture.sshd.masters().len(), 1);
}

#[tokio::test]
async fn remote_command_receives_all_input() {
    let fixture = SshFixture::new();
    let input: Vec<u8> = (0..10_000_000u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let output = output_of(fixture.run(&[], &["cat"]), &input).await;
    assert!(output.status.success(), "{output:?}");
    assert!(
        output.stdout == input,
        "{} bytes came back",
        output.stdout.len()
    );
}

#[tokio::test]
async fn remote_command_with_tty_has_a_terminal() {
    let fixture = SshFixture::new();
    let script = "test -t 0 && test -t 1 && read -r line && echo \"got $line\"";
    let output = output_of(fixture.run(&["--tty"], &["sh", "-c", script]), b"hello\n").await;
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output:?}");
    assert!(out.contains("got hello"), "{out}");
}

#[tokio::test]
async fn url_path_is_the_working_directory() {
    let fixture = SshFixture::new();
    let place = fixture.sshd.path().join("work dir");
    fs::create_dir(&place).unwrap();
    fs::write(place.join("x"), "").unwrap();
    let url = format!("{}{}", fixture.sshd.url(), place.display()).replace(' ', "%20");
    let program = |command: &str| {
        let mut program = fixture.program();
        program
            .arg(command)
            .args(fixture.flags(&url))
            .args(["--remote-binary", BINARY]);
        program
    };
    let mut run = program("run");
    run.args(["--", "pwd"]);
    let (out, err, code) = outcome(run).await;
    assert_eq!((out, code), (format!("{}\n", place.display()), 0), "{err}");
    let mut list = program("fs");
    list.arg("ls");
    assert_eq!(outcome(list).await.0, "x\n");
}

#[tokio::test]
async fn files_are_copied_to_and_from_the_remote_machine() {
    let fixture = SshFixture::new();
    let (here, there) = (fixture.sshd.path().join("here"), fixture.sshd.home());
    fs::write(&here, "content").unwrap();
    let copy = |from: String, to: String| {
        let mut program = fixture.program();
        let flags = fixture.flags("unused");
        program
            .arg("cp")
            .args(&flags[2..])
            .args(["--remote-binary", BINARY, &from, &to]);
        program
    };
    let remote = format!("{}:{}", fixture.sshd.url(), there.join("copy").display());
    let local = here.display().to_string();
    let (_, err, code) = outcome(copy(local.clone(), remote.clone())).await;
    assert_eq!(code, 0, "{err}");
    assert_eq!(fs::read(there.join("copy")).unwrap(), b"content");
    let back = format!("{local}.back");
    assert_eq!(outcome(copy(remote, back.clone())).await.2, 0);
    assert_eq!(fs::read(back).unwrap(), b"content");
}

#[tokio::test]
async fn stdio_is_used_when_forwarding_is_disabled() {
    let fixture = SshFixture::with(&["DisableForwarding yes"]);
    for _ in 0..2 {
        let input = b"through standard streams".repeat(10_000);
        let output = output_of(fixture.run(&[], &["cat"]), &input).await;
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && output.stdout == input, "{err}");
    }
    let (_, err, code) = outcome(fixture.run(&[], &["sh", "-c", "exit 9"])).await;
    assert_eq!(code, 9, "{err}");
}
