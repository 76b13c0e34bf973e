//! What goes wrong between two machines, and what is said about it.

use rustix::process::Signal;

use super::*;

#[tokio::test]
async fn a_port_where_nobody_listens_is_told() {
    let lab = Lab::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("ssh://127.0.0.1:{}", listener.local_addr().unwrap().port());
    drop(listener);
    let mut program = lab.program();
    program
        .arg("run")
        .args(lab.flags(&url))
        .args(["--", "true"]);
    let (_, err, code) = seen(program).await;
    assert_eq!(code, 125, "{err}");
    assert!(
        err.contains(&url) && err.contains("Connection refused"),
        "{err}"
    );
}

#[tokio::test]
async fn nobody_is_asked_for_a_password() {
    let lab = Lab::with(&[
        "AuthenticationMethods password",
        "PasswordAuthentication yes",
    ]);
    let (_, err, code) = seen(lab.run(&[], &["true"])).await;
    assert_eq!(code, 125, "{err}");
    assert!(
        err.contains(&lab.sshd.url()) && err.contains("Permission denied (password)"),
        "{err}"
    );
}

#[tokio::test]
async fn an_unknown_host_is_refused() {
    let lab = Lab::new();
    fs::write(lab.sshd.path().join("known"), "").unwrap();
    let (_, err, code) = seen(lab.run(&[], &["true"])).await;
    assert_eq!(code, 125, "{err}");
    assert!(err.contains("Host key verification failed"), "{err}");
}

#[tokio::test]
async fn a_url_that_is_none_is_explained() {
    let lab = Lab::new();
    let mut program = lab.program();
    program.args(["run", "--url", "ssh://-oProxyCommand=x", "--", "true"]);
    let (_, err, code) = seen(program).await;
    assert_eq!(code, 125, "{err}");
    assert!(err.contains("ssh://[USER@]HOST"), "{err}");
}

#[tokio::test]
async fn a_connection_that_died_is_replaced() {
    let lab = Lab::new();
    assert_eq!(seen(lab.run(&[], &["true"])).await.2, 0);
    let (daemon, masters) = (lab.daemon_pid(), lab.sshd.masters());
    for pid in &masters {
        proc::signal(u32::try_from(*pid).unwrap(), Signal::KILL);
    }
    let (out, err, code) = seen(lab.run(&[], &["echo", "again"])).await;
    assert_eq!((out.as_str(), code), ("again\n", 0), "{err}");
    assert_ne!(lab.sshd.masters(), masters);
    assert_eq!(
        lab.daemon_pid(),
        daemon,
        "the daemon outlives its connections"
    );
}

#[tokio::test]
async fn a_connection_that_hangs_is_replaced() {
    let lab = Lab::new();
    assert_eq!(seen(lab.run(&[], &["true"])).await.2, 0);
    let masters = lab.sshd.masters();
    for pid in &masters {
        proc::signal(u32::try_from(*pid).unwrap(), Signal::STOP);
    }
    let log = lab.sshd.home().join("log");
    let script = format!("echo once >> '{}'; echo again", log.display());
    let (out, err, code) = seen(lab.run(&[], &["sh", "-c", &script])).await;
    assert_eq!((out.as_str(), code), ("again\n", 0), "{err}");
    // Nobody is left who could still pass on what the first was told.
    assert!(lab.sshd.masters().iter().all(|pid| !masters.contains(pid)));
    assert_eq!(fs::read_to_string(log).unwrap(), "once\n");
}

#[tokio::test]
async fn a_command_that_may_run_is_not_started_again() {
    let lab = Lab::new();
    assert_eq!(seen(lab.run(&[], &["true"])).await.2, 0);
    let daemon = u32::try_from(lab.daemon_pid()).unwrap();
    proc::signal(daemon, Signal::STOP);
    let log = lab.sshd.home().join("log");
    let script = format!("echo once >> '{}'", log.display());
    let (_, err, code) = seen(lab.run(&[], &["sh", "-c", &script])).await;
    proc::signal(daemon, Signal::CONT);
    assert_eq!(code, 125, "{err}");
    assert!(err.contains("is not known"), "{err}");
    // It was heard in the end, and nobody has said it twice.
    let (out, err, code) = seen(lab.run(&[], &["sh", "-c", "cat; echo on"])).await;
    assert_eq!((out.as_str(), code), ("on\n", 0), "{err}");
    let times = fs::read_to_string(log).unwrap_or_default();
    assert!(times.is_empty() || times == "once\n", "{times}");
}

#[tokio::test]
async fn a_daemon_that_was_stopped_is_started_again() {
    let lab = Lab::new();
    assert_eq!(seen(lab.run(&[], &["true"])).await.2, 0);
    let before = lab.daemon_pid();
    let mut stop = lab.program();
    stop.args(["daemon", "--stop", "--directory"])
        .arg(lab.place());
    assert_eq!(seen(stop).await.2, 0);
    let (out, err, code) = seen(lab.run(&[], &["echo", "again"])).await;
    assert_eq!((out.as_str(), code), ("again\n", 0), "{err}");
    assert_ne!(lab.daemon_pid(), before);
}

/// A command that says one number after another, waits in the middle to be let on, and says the
/// rest.
const COUNTING: &str = "seq 1 50000; echo waiting >&2; read -r _; seq 50001 200000; exit 3";

#[tokio::test]
async fn a_command_outlives_the_ssh_that_started_it() {
    use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
    // By a forwarded socket, and through standard streams.
    for lines in [&[][..], &["DisableForwarding yes"]] {
        let lab = Lab::with(lines);
        let mut run = lab.run(&["--no-tty"], &["sh", "-c", COUNTING]);
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
            let daemon = lab.daemon_pid();
            let masters = lab.sshd.masters();
            assert_eq!(masters.len(), 1, "{masters:?}");
            for pid in &masters {
                proc::signal(u32::try_from(*pid).unwrap(), Signal::KILL);
            }
            // Another one takes its place, without being asked to.
            proc::eventually("another connection", || match lab.sshd.masters() {
                new if !new.is_empty() && new != masters => Ok(()),
                old => Err(format!("{old:?}")),
            })
            .await;
            stdin.write_all(b"go on\n").await.unwrap();
            drop(stdin);
            let status = child.wait().await.unwrap();
            assert_eq!(status.code(), Some(3));
            assert_eq!(lab.daemon_pid(), daemon);
            reading.await.unwrap()
        };
        let out = tokio::time::timeout(proc::PATIENCE, work).await.unwrap();
        let all: String = (1..=200_000).map(|n| format!("{n}\n")).collect();
        assert!(out == all, "{} bytes of {}", out.len(), all.len());
    }
}

#[tokio::test]
async fn ssh_may_be_killed_again_and_again() {
    let lab = Lab::new();
    // Warm, so that there is something to kill.
    assert_eq!(seen(lab.run(&[], &["true"])).await.2, 0);
    let script = "i=0; while [ $i -lt 300 ]; do i=$((i+1)); echo line $i; sleep 0.01; done";
    let mut run = lab.run(&["--no-tty"], &["sh", "-c", script]);
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
                for pid in lab.sshd.masters() {
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
