//! Failures between two machines, and their error messages.

use rustix::process::Signal;

use super::*;

#[tokio::test]
async fn error_for_a_refused_connection_names_the_url() {
    let fixture = SshFixture::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("ssh://127.0.0.1:{}", listener.local_addr().unwrap().port());
    drop(listener);
    let mut program = fixture.program();
    program
        .arg("run")
        .args(fixture.flags(&url))
        .args(["--", "true"]);
    let (_, err, code) = outcome(program).await;
    assert_eq!(code, 125, "{err}");
    assert!(
        err.contains(&url) && err.contains("Connection refused"),
        "{err}"
    );
}

#[tokio::test]
async fn ssh_never_prompts_for_a_password() {
    let fixture = SshFixture::with(&[
        "AuthenticationMethods password",
        "PasswordAuthentication yes",
    ]);
    let (_, err, code) = outcome(fixture.run(&[], &["true"])).await;
    assert_eq!(code, 125, "{err}");
    assert!(
        err.contains(&fixture.sshd.url()) && err.contains("Permission denied (password)"),
        "{err}"
    );
}

#[tokio::test]
async fn unknown_host_key_is_rejected() {
    let fixture = SshFixture::new();
    fs::write(fixture.sshd.path().join("known"), "").unwrap();
    let (_, err, code) = outcome(fixture.run(&[], &["true"])).await;
    assert_eq!(code, 125, "{err}");
    assert!(err.contains("Host key verification failed"), "{err}");
}

#[tokio::test]
async fn invalid_ssh_url_error_shows_the_syntax() {
    let fixture = SshFixture::new();
    let mut program = fixture.program();
    program.args(["run", "--url", "ssh://-oProxyCommand=x", "--", "true"]);
    let (_, err, code) = outcome(program).await;
    assert_eq!(code, 125, "{err}");
    assert!(err.contains("ssh://[USER@]HOST"), "{err}");
}

#[tokio::test]
async fn killed_ssh_connection_is_replaced() {
    let fixture = SshFixture::new();
    assert_eq!(outcome(fixture.run(&[], &["true"])).await.2, 0);
    let (daemon, masters) = (fixture.daemon_pid(), fixture.sshd.masters());
    for pid in &masters {
        proc::signal(u32::try_from(*pid).unwrap(), Signal::KILL);
    }
    let (out, err, code) = outcome(fixture.run(&[], &["echo", "again"])).await;
    assert_eq!((out.as_str(), code), ("again\n", 0), "{err}");
    assert_ne!(fixture.sshd.masters(), masters);
    assert_eq!(
        fixture.daemon_pid(),
        daemon,
        "the daemon outlives its connections"
    );
}

#[tokio::test]
async fn hanging_ssh_connection_is_replaced() {
    let fixture = SshFixture::new();
    assert_eq!(outcome(fixture.run(&[], &["true"])).await.2, 0);
    let masters = fixture.sshd.masters();
    for pid in &masters {
        proc::signal(u32::try_from(*pid).unwrap(), Signal::STOP);
    }
    let log = fixture.sshd.home().join("log");
    let script = format!("echo once >> '{}'; echo again", log.display());
    let (out, err, code) = outcome(fixture.run(&[], &["sh", "-c", &script])).await;
    assert_eq!((out.as_str(), code), ("again\n", 0), "{err}");
    // The killed connections can no longer forward the first request.
    assert!(
        fixture
            .sshd
            .masters()
            .iter()
            .all(|pid| !masters.contains(pid))
    );
    assert_eq!(fs::read_to_string(log).unwrap(), "once\n");
}

#[tokio::test]
async fn command_that_may_have_started_is_not_sent_again() {
    let fixture = SshFixture::new();
    assert_eq!(outcome(fixture.run(&[], &["true"])).await.2, 0);
    let daemon = u32::try_from(fixture.daemon_pid()).unwrap();
    proc::signal(daemon, Signal::STOP);
    let log = fixture.sshd.home().join("log");
    let script = format!("echo once >> '{}'", log.display());
    let (_, err, code) = outcome(fixture.run(&[], &["sh", "-c", &script])).await;
    proc::signal(daemon, Signal::CONT);
    assert_eq!(code, 125, "{err}");
    assert!(err.contains("is not known"), "{err}");
    // The request was received in the end, and was not sent twice.
    let (out, err, code) = outcome(fixture.run(&[], &["sh", "-c", "cat; echo on"])).await;
    assert_eq!((out.as_str(), code), ("on\n", 0), "{err}");
    let times = fs::read_to_string(log).unwrap_or_default();
    assert!(times.is_empty() || times == "once\n", "{times}");
}

#[tokio::test]
async fn stopped_daemon_is_started_by_the_next_command() {
    let fixture = SshFixture::new();
    assert_eq!(outcome(fixture.run(&[], &["true"])).await.2, 0);
    let before = fixture.daemon_pid();
    let mut stop = fixture.program();
    stop.args(["daemon", "--stop", "--directory"])
        .arg(fixture.daemon_directory());
    assert_eq!(outcome(stop).await.2, 0);
    let (out, err, code) = outcome(fixture.run(&[], &["echo", "again"])).await;
    assert_eq!((out.as_str(), code), ("again\n", 0), "{err}");
    assert_ne!(fixture.daemon_pid(), before);
}

/// A command that prints half of its numbers, waits for a line of input, and prints the rest.
const COUNTING: &str = "seq 1 50000; echo waiting >&2; read -r _; seq 50001 200000; exit 3";

#[tokio::test]
async fn command_survives_the_end_of_its_ssh_process() {
    use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
    // Through a forwarded socket, and through standard input and output.
    for lines in [&[][..], &["DisableForwarding yes"]] {
        let fixture = SshFixture::with(lines);
        let mut run = fixture.run(&["--no-tty"], &["sh", "-c", COUNTING]);
        run.stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = run.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let mut stdout = child.stdout.take().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap()).lines();
        let reading = tokio::spawn(async move {
            let mut all = String::new();
            stdout.read_to_string(&mut all).await.unwrap();
            all
        });
        let work = async {
            assert_eq!(stderr.next_line().await.unwrap().unwrap(), "waiting");
            let daemon = fixture.daemon_pid();
            let masters = fixture.sshd.masters();
            assert_eq!(masters.len(), 1, "{masters:?}");
            for pid in &masters {
                proc::signal(u32::try_from(*pid).unwrap(), Signal::KILL);
            }
            // The client opens another connection by itself.
            proc::eventually("another connection", || match fixture.sshd.masters() {
                new if !new.is_empty() && new != masters => Ok(()),
                old => Err(format!("{old:?}")),
            })
            .await;
            stdin.write_all(b"go on\n").await.unwrap();
            drop(stdin);
            let status = child.wait().await.unwrap();
            assert_eq!(status.code(), Some(3));
            assert_eq!(fixture.daemon_pid(), daemon);
            reading.await.unwrap()
        };
        let out = tokio::time::timeout(proc::TIMEOUT, work).await.unwrap();
        let all: String = (1..=200_000).map(|n| format!("{n}\n")).collect();
        assert!(out == all, "{} bytes of {}", out.len(), all.len());
    }
}

#[tokio::test]
async fn output_is_complete_when_ssh_is_killed_repeatedly() {
    let fixture = SshFixture::new();
    // An open connection, so that there is a process to kill.
    assert_eq!(outcome(fixture.run(&[], &["true"])).await.2, 0);
    let script = "i=0; while [ $i -lt 300 ]; do i=$((i+1)); echo line $i; sleep 0.01; done";
    let mut run = fixture.run(&["--no-tty"], &["sh", "-c", script]);
    run.stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = run.spawn().unwrap();
    let output = child.wait_with_output();
    tokio::pin!(output);
    let mut killed = 0;
    let output = loop {
        tokio::select! {
            output = &mut output => break output.unwrap(),
            () = tokio::time::sleep(std::time::Duration::from_millis(400)) => {
                for pid in fixture.sshd.masters() {
                    if let Some(pid) = rustix::process::Pid::from_raw(pid) {
                        killed += usize::from(rustix::process::kill_process(pid, Signal::KILL).is_ok());
                    }
                }
            }
        }
    };
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{err}");
    assert!(killed > 0);
    let all: String = (1..=300).map(|n| format!("line {n}\n")).collect();
    assert_eq!(String::from_utf8_lossy(&output.stdout), all, "{err}");
}
