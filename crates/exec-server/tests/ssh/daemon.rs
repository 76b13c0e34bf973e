//! The daemon of the far side: one per user, there as long as it is needed.

use super::*;

/// `daemon` with these arguments, for a directory.
fn daemon(program: &Path, place: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .arg("daemon")
        .args(args)
        .arg("--directory")
        .arg(place)
        .kill_on_drop(true);
    command
}

/// The line that tells where it is.
fn ready(out: &str) -> serde_json::Value {
    let text = out.strip_prefix("exec-server-ssh ready ").expect(out);
    serde_json::from_str(text).unwrap()
}

/// A directory for a daemon that is ended when the test is.
struct Place(tempfile::TempDir);

impl Place {
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

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::process::Command::new(BINARY)
            .args(["daemon", "--stop", "--directory"])
            .arg(self.path())
            .stderr(Stdio::null())
            .status();
    }
}

#[tokio::test]
async fn many_starters_start_one() {
    let place = Place::new();
    let marker = proc::marker();
    let mut starters = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let mut starter = daemon(Path::new(BINARY), &place.path(), &[]);
        starter.env("MARKER", &marker);
        starters.spawn(seen(starter));
    }
    for (out, err, code) in starters.join_all().await {
        assert_eq!(code, 0, "{err}");
        let state = ready(&out);
        assert_eq!(state["version"], env!("CARGO_PKG_VERSION"));
        assert_eq!(state["kept"], serde_json::Value::Null);
    }
    let pid = place.state()["pid"].as_u64().unwrap();
    let serving = proc::bearers(&marker);
    // The server, and the guardian in front of it.
    assert_eq!(serving.len(), 2, "{serving:?}");
    assert!(
        serving
            .iter()
            .any(|(own, _)| u64::try_from(*own) == Ok(pid))
    );
    let (_, err, code) = seen(daemon(Path::new(BINARY), &place.path(), &["--stop"])).await;
    assert_eq!(code, 0, "{err}");
    assert!(!place.path().join("daemon.sock").exists());
}

#[tokio::test]
async fn it_ends_when_nobody_needs_it_and_comes_back_when_somebody_does() {
    let lab = Lab::new();
    assert_eq!(seen(lab.run(&[], &["true"])).await.2, 0);
    let first = lab.daemon_pid();
    let stop = daemon(Path::new(BINARY), &lab.place(), &["--stop"]);
    assert_eq!(seen(stop).await.2, 0);
    // What was forwarded leads nowhere now.
    let (out, err, code) = seen(lab.run(&[], &["echo", "again"])).await;
    assert_eq!((out.as_str(), code), ("again\n", 0), "{err}");
    assert_ne!(lab.daemon_pid(), first);

    let place = Place::new();
    let short = daemon(Path::new(BINARY), &place.path(), &["--idle", "100ms"]);
    let (out, err, code) = seen(short).await;
    assert_eq!(code, 0, "{err}");
    let socket = PathBuf::from(ready(&out)["socket"].as_str().unwrap());
    let pid = place.state()["pid"].as_u64().unwrap();
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
async fn one_that_is_in_use_goes_on_beside_a_newer_build() {
    let place = Place::new();
    let other = place.0.path().join("other-build");
    fs::hard_link(BINARY, &other)
        .or_else(|_| fs::copy(BINARY, &other).map(|_| ()))
        .unwrap();
    let (out, err, code) = seen(daemon(Path::new(BINARY), &place.path(), &[])).await;
    assert_eq!(code, 0, "{err}");
    let url = format!("unix://{}", ready(&out)["socket"].as_str().unwrap());
    let first = place.state()["pid"].clone();
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
    let (out, err, code) = seen(daemon(&other, &place.path(), &[])).await;
    assert_eq!(code, 0, "{err}");
    let kept = ready(&out)["kept"].as_str().unwrap_or_default().to_owned();
    assert!(kept.contains("in use"), "{out}");
    assert_eq!(place.state()["pid"], first);
    drop(stdin);
    tokio::time::timeout(proc::PATIENCE, busy.wait())
        .await
        .unwrap()
        .unwrap();
    // It was told that it is no longer wanted, and goes when it can.
    let pid = first.as_u64().unwrap();
    proc::eventually("the old one to end", || {
        match Path::new(&format!("/proc/{pid}")).exists() {
            true => Err("there"),
            false => Ok(()),
        }
    })
    .await;
    let (out, err, code) = seen(daemon(&other, &place.path(), &[])).await;
    assert_eq!((ready(&out)["kept"].is_null(), code), (true, 0), "{err}");
    assert_ne!(place.state()["pid"], first);
    // One that nobody uses makes way at once.
    let second = place.state()["pid"].clone();
    let (out, err, code) = seen(daemon(Path::new(BINARY), &place.path(), &[])).await;
    assert_eq!((ready(&out)["kept"].is_null(), code), (true, 0), "{err}");
    assert_ne!(place.state()["pid"], second);
}

#[tokio::test]
async fn it_does_not_take_the_login_with_it() {
    let lab = Lab::new();
    let (out, err, code) = seen(lab.run(&[], &["env"])).await;
    assert_eq!(code, 0, "{err}");
    assert!(!out.contains("SSH_CONNECTION"), "{out}");
    // A session of its own, so that no terminal's end reaches it, nor a signal to its guardian's.
    let pid = lab.daemon_pid();
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
async fn a_place_for_all_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let open = place.path().join("open");
    fs::create_dir(&open).unwrap();
    let (_, err, code) = seen(daemon(Path::new(BINARY), &open, &[])).await;
    assert_eq!(code, 1);
    assert!(err.contains("0700"), "{err}");
}
