//! The per-user daemon on the remote machine, which runs as long as it is in use.

use super::*;

/// `daemon` with these arguments, for a directory.
fn daemon(program: &Path, directory: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .arg("daemon")
        .args(args)
        .arg("--directory")
        .arg(directory)
        .kill_on_drop(true);
    command
}

/// Parses the line that announces the socket.
fn ready(out: &str) -> serde_json::Value {
    let text = out.strip_prefix("exec-server-ssh ready ").expect(out);
    serde_json::from_str(text).unwrap()
}

/// A directory for a daemon that is stopped at the end of the test.
struct DaemonDirectory(tempfile::TempDir);

impl DaemonDirectory {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("d")
    }

    fn state(&self) -> serde_json::Value {
        let text = fs::read(self.path().join("daemon.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    }
}

impl Drop for DaemonDirectory {
    fn drop(&mut self) {
        let _ = std::process::Command::new(BINARY)
            .args(["daemon", "--stop", "--directory"])
            .arg(self.path())
            .stderr(Stdio::null())
            .status();
    }
}

#[tokio::test]
async fn concurrent_starts_run_one_daemon() {
    let directory = DaemonDirectory::new();
    let marker = proc::marker();
    let mut starters = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let mut starter = daemon(Path::new(BINARY), &directory.path(), &[]);
        starter.env("MARKER", &marker);
        starters.spawn(outcome(starter));
    }
    for (out, err, code) in starters.join_all().await {
        assert_eq!(code, 0, "{err}");
        let state = ready(&out);
        assert_eq!(state["version"], env!("CARGO_PKG_VERSION"));
        assert_eq!(state["kept"], serde_json::Value::Null);
    }
    let pid = directory.state()["pid"].as_u64().unwrap();
    // The server and its guardian. A daemon that found the lock taken may still be about to end.
    let serving = proc::eventually("one daemon", || {
        let serving = proc::bearers(&marker);
        if serving.len() == 2 {
            Ok(serving)
        } else {
            Err(format!("{serving:?}"))
        }
    })
    .await;
    assert!(
        serving
            .iter()
            .any(|(own, _)| u64::try_from(*own) == Ok(pid))
    );
    let (_, err, code) = outcome(daemon(Path::new(BINARY), &directory.path(), &["--stop"])).await;
    assert_eq!(code, 0, "{err}");
    assert!(!directory.path().join("daemon.sock").exists());
}

#[tokio::test]
async fn unused_daemon_ends_and_the_next_command_starts_one() {
    let fixture = SshFixture::new();
    assert_eq!(outcome(fixture.run(&[], &["true"])).await.2, 0);
    let first = fixture.daemon_pid();
    let stop = daemon(Path::new(BINARY), &fixture.daemon_directory(), &["--stop"]);
    assert_eq!(outcome(stop).await.2, 0);
    // The forwarded socket has no listener any more.
    let (out, err, code) = outcome(fixture.run(&[], &["echo", "again"])).await;
    assert_eq!((out.as_str(), code), ("again\n", 0), "{err}");
    assert_ne!(fixture.daemon_pid(), first);

    let directory = DaemonDirectory::new();
    let short = daemon(Path::new(BINARY), &directory.path(), &["--idle", "100ms"]);
    let (out, err, code) = outcome(short).await;
    assert_eq!(code, 0, "{err}");
    let socket = PathBuf::from(ready(&out)["socket"].as_str().unwrap());
    let pid = directory.state()["pid"].as_u64().unwrap();
    proc::eventually("the daemon to end", || {
        let there = Path::new(&format!("/proc/{pid}")).exists();
        if there || socket.exists() {
            Err("there")
        } else {
            Ok(())
        }
    })
    .await;
}

#[tokio::test]
async fn daemon_in_use_is_kept_by_a_newer_build() {
    let directory = DaemonDirectory::new();
    let other = directory.0.path().join("other-build");
    fs::hard_link(BINARY, &other)
        .or_else(|_| fs::copy(BINARY, &other).map(|_| ()))
        .unwrap();
    let (out, err, code) = outcome(daemon(Path::new(BINARY), &directory.path(), &[])).await;
    assert_eq!(code, 0, "{err}");
    let url = format!("unix://{}", ready(&out)["socket"].as_str().unwrap());
    let first = directory.state()["pid"].clone();
    let mut busy = Command::new(BINARY)
        .args(["run", "--url", &url, "--no-tty", "--", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut stdin = busy.stdin.take().unwrap();
    stdin.write_all(b"x").await.unwrap();
    let mut byte = [0];
    let stdout = busy.stdout.as_mut().unwrap();
    tokio::io::AsyncReadExt::read_exact(stdout, &mut byte)
        .await
        .unwrap();
    let (out, err, code) = outcome(daemon(&other, &directory.path(), &[])).await;
    assert_eq!(code, 0, "{err}");
    let kept = ready(&out)["kept"].as_str().unwrap_or_default().to_owned();
    assert!(kept.contains("in use"), "{out}");
    assert_eq!(directory.state()["pid"], first);
    drop(stdin);
    tokio::time::timeout(proc::TIMEOUT, busy.wait())
        .await
        .unwrap()
        .unwrap();
    // The old daemon was asked to end once it is unused, and does.
    let pid = first.as_u64().unwrap();
    proc::eventually("the old one to end", || {
        match Path::new(&format!("/proc/{pid}")).exists() {
            true => Err("there"),
            false => Ok(()),
        }
    })
    .await;
    let (out, err, code) = outcome(daemon(&other, &directory.path(), &[])).await;
    assert_eq!((ready(&out)["kept"].is_null(), code), (true, 0), "{err}");
    assert_ne!(directory.state()["pid"], first);
    // An unused daemon is replaced immediately.
    let second = directory.state()["pid"].clone();
    let (out, err, code) = outcome(daemon(Path::new(BINARY), &directory.path(), &[])).await;
    assert_eq!((ready(&out)["kept"].is_null(), code), (true, 0), "{err}");
    assert_ne!(directory.state()["pid"], second);
}

#[tokio::test]
async fn daemon_has_no_environment_and_no_terminal_of_the_login() {
    let fixture = SshFixture::new();
    let (out, err, code) = outcome(fixture.run(&[], &["env"])).await;
    assert_eq!(code, 0, "{err}");
    assert!(!out.contains("SSH_CONNECTION"), "{out}");
    // A separate session: neither a terminal's hangup nor a signal to the guardian's group reaches it.
    let pid = fixture.daemon_pid();
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, after_name) = stat.rsplit_once(") ").unwrap();
    let fields: Vec<&str> = after_name.split(' ').collect();
    let (session, terminal) = (fields[3], fields[4]);
    assert_eq!(
        (session, terminal),
        (pid.to_string().as_str(), "0"),
        "{stat}"
    );
}

#[tokio::test]
async fn daemon_rejects_a_directory_open_to_other_users() {
    let directory = tempfile::tempdir().unwrap();
    let open = directory.path().join("open");
    fs::create_dir(&open).unwrap();
    let (_, err, code) = outcome(daemon(Path::new(BINARY), &open, &[])).await;
    assert_eq!(code, 1);
    assert!(err.contains("0700"), "{err}");
}
