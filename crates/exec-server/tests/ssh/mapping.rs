//! Path mapping of ssh environments: local paths are translated to remote ones.

use super::*;

/// A local root and a remote one, with some files.
fn roots(fixture: &SshFixture) -> (PathBuf, PathBuf) {
    let (local, remote) = (fixture.sshd.path().join("l"), fixture.sshd.path().join("r"));
    fs::create_dir_all(local.join("sub")).unwrap();
    fs::create_dir_all(remote.join("sub/deep")).unwrap();
    fs::write(remote.join("sub/deep/file"), "needle\n").unwrap();
    (local, remote)
}

fn flags<'a>(local: &'a Path, remote: &'a Path) -> [&'a str; 4] {
    [
        "--local-root",
        local.to_str().unwrap(),
        "--remote-root",
        remote.to_str().unwrap(),
    ]
}

#[tokio::test]
async fn command_runs_in_the_remote_counterpart_of_its_directory() {
    let fixture = SshFixture::new();
    let (local, remote) = roots(&fixture);
    let flags = flags(&local, &remote);
    let mut run = fixture.run(&flags, &["pwd"]);
    run.current_dir(local.join("sub"));
    let (out, err, code) = outcome(run).await;
    assert_eq!(
        (out, code),
        (format!("{}\n", remote.join("sub").display()), 0),
        "{err}"
    );
    let mut run = fixture.run(&[&flags[..], &["--cwd", "sub/deep"]].concat(), &["pwd"]);
    run.current_dir(&local);
    assert_eq!(
        outcome(run).await.0,
        format!("{}\n", remote.join("sub/deep").display())
    );
    // The path of the URL is the remote root.
    let url = format!("{}{}", fixture.sshd.url(), remote.display());
    let mut run = fixture.program();
    run.arg("run")
        .args(fixture.flags(&url))
        .args(["--remote-binary", BINARY, "--local-root"])
        .arg(&local)
        .args(["--", "pwd"])
        .current_dir(&local);
    assert_eq!(outcome(run).await.0, format!("{}\n", remote.display()));
}

#[tokio::test]
async fn paths_outside_the_roots_are_rejected() {
    let fixture = SshFixture::new();
    let (local, remote) = roots(&fixture);
    let flags = flags(&local, &remote);
    for cwd in ["/", "..", "sub/../../r"] {
        let mut run = fixture.run(&[&flags[..], &["--cwd", cwd]].concat(), &["pwd"]);
        run.current_dir(&local);
        let (out, err, code) = outcome(run).await;
        assert_eq!((out.as_str(), code), ("", 125), "{cwd}: {err}");
        assert!(
            err.contains("outside of the local root") && err.contains(local.to_str().unwrap()),
            "{cwd}: {err}"
        );
    }
    let outside = remote.join("sub");
    let args = [&flags[..], &["ls", outside.to_str().unwrap()]].concat();
    let mut list = fixture.fs(&args);
    list.current_dir(&local);
    let (_, err, code) = outcome(list).await;
    assert_eq!(code, 1);
    assert!(err.contains("outside of the local root"), "{err}");
    // A path outside the remote root has no local name.
    std::os::unix::fs::symlink("/etc", remote.join("link")).unwrap();
    let args = [&flags[..], &["ls", "link/../sub"]].concat();
    let mut list = fixture.fs(&args);
    list.current_dir(&local);
    let (_, err, code) = outcome(list).await;
    assert_eq!(code, 1);
    assert!(err.contains("outside of the remote root"), "{err}");
    let nowhere = remote.join("nowhere");
    let args = [
        "--local-root",
        local.to_str().unwrap(),
        "--remote-root",
        nowhere.to_str().unwrap(),
    ];
    let (_, err, code) = outcome(fixture.run(&args, &["true"])).await;
    assert_eq!(code, 125);
    assert!(
        err.contains("remote root") && err.contains("nowhere"),
        "{err}"
    );
}

#[tokio::test]
async fn file_commands_print_local_paths() {
    let fixture = SshFixture::new();
    let (local, remote) = roots(&fixture);
    // Roots may be reached through links, on either side.
    let (linked, there) = (
        fixture.sshd.path().join("ll"),
        fixture.sshd.path().join("rl"),
    );
    std::os::unix::fs::symlink(&local, &linked).unwrap();
    std::os::unix::fs::symlink(&remote, &there).unwrap();
    for (local, remote) in [(&local, &remote), (&linked, &there)] {
        let flags = flags(local, remote);
        let fs = |args: &[&str]| {
            let mut command = fixture.fs(&[&flags[..], args].concat());
            command.current_dir(local);
            outcome(command)
        };
        let file = local.join("sub/deep/file").display().to_string();
        let (out, err, code) = fs(&["walk", "sub"]).await;
        assert_eq!(code, 0, "{err}");
        assert!(out.lines().any(|line| line == file), "{out}");
        let real = remote.canonicalize().unwrap().display().to_string();
        assert!(!out.contains(&real), "{out}");
        let (out, err, _) = fs(&["search", "needle", "sub"]).await;
        assert_eq!(out, format!("{file}:1:needle\n"), "{err}");
        assert_eq!(fs(&["cat", "sub/deep/../deep/file"]).await.0, "needle\n");
        fs::write(local.join("up"), "sent").unwrap();
        let (_, err, code) = fs(&["put", "up", "sub/up"]).await;
        assert_eq!(code, 0, "{err}");
        assert_eq!(fs::read(remote.join("sub/up")).unwrap(), b"sent");
        let (_, err, code) = fs(&["get", "sub/up", "down"]).await;
        assert_eq!(code, 0, "{err}");
        assert_eq!(fs::read(local.join("down")).unwrap(), b"sent");
    }
}

#[tokio::test]
async fn watch_prints_local_paths() {
    use tokio::io::{AsyncBufReadExt as _, BufReader};
    let fixture = SshFixture::new();
    let (local, remote) = roots(&fixture);
    let args = [&flags(&local, &remote)[..], &["watch", "."]].concat();
    let mut watch = fixture.fs(&args);
    watch
        .current_dir(&local)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = watch.spawn().unwrap();
    let mut err = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut out = BufReader::new(child.stdout.take().unwrap()).lines();
    let reported = async {
        let watching = err.next_line().await.unwrap().unwrap();
        assert_eq!(watching, format!("watching {}", local.display()));
        fs::write(remote.join("sub/new"), "x").unwrap();
        out.next_line().await.unwrap().unwrap()
    };
    let line = tokio::time::timeout(proc::TIMEOUT, reported).await.unwrap();
    assert_eq!(
        line,
        format!("created   {}", local.join("sub/new").display())
    );
}

#[tokio::test]
async fn environment_stores_its_roots() {
    let fixture = SshFixture::new();
    let (local, remote) = roots(&fixture);
    let url = format!("{}{}", fixture.sshd.url(), remote.display());
    let mut add = fixture.program();
    add.args(["env", "add", "far", &url, "--remote-binary", BINARY])
        .arg("--local-root")
        .arg(&local);
    for option in fixture.sshd.options() {
        add.arg("--ssh-option").arg(option);
    }
    let (_, err, code) = outcome(add).await;
    assert_eq!(code, 0, "{err}");
    let far = |args: &[&str]| {
        let mut program = fixture.program();
        program.args(args).current_dir(local.join("sub"));
        outcome(program)
    };
    let (out, err, code) = far(&["run", "--on", "far", "--", "pwd"]).await;
    assert_eq!(
        (out, code),
        (format!("{}\n", remote.join("sub").display()), 0),
        "{err}"
    );
    let (out, err, _) = far(&["fs", "--on", "far", "search", "needle"]).await;
    let file = local.join("sub/deep/file").display().to_string();
    assert_eq!(out, format!("{file}:1:needle\n"), "{err}");
    let (_, err, code) = far(&["run", "--on", "far", "--cwd", "/", "--", "pwd"]).await;
    assert_eq!(code, 125);
    assert!(err.contains("outside of the local root"), "{err}");
    let (out, err, code) = far(&["env", "status", "--json", "far"]).await;
    assert_eq!(code, 0, "{err}");
    let status: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(status["environments"][0]["status"], "ready", "{out}");
    assert_eq!(far(&["ps", "--on", "far"]).await.2, 0);
}
