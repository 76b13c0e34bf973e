//! `run` in a sandbox: what it says about denied operations.

use super::{run_with, seen, targets, text};

#[tokio::test]
async fn run_names_denied_operations_and_the_options_that_allow_them() {
    let (_server, targets) = targets().await;
    // Not in /tmp, which a policy may allow.
    let directory = || tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (work, outside) = (directory(), directory());
    let work = work.path().canonicalize().unwrap();
    let outside = outside.path().canonicalize().unwrap();
    std::fs::write(work.join("secret"), "x").unwrap();
    let (work, outside) = (work.to_str().unwrap(), outside.to_str().unwrap());
    let denied = |what: &str| format!("exec-server: the sandbox denied {what}\n");
    let secret = format!("{work}/secret");
    for url in &targets {
        for (options, script, expected) in [
            (
                vec!["--sandbox", "workspace-write"],
                format!("echo x > {outside}/a"),
                denied(&format!(
                    "access to `{outside}/a`; --writable {outside}/a allows writing there"
                )),
            ),
            (
                vec!["--sandbox", "read-only"],
                "echo x > b".to_owned(),
                denied("access to a file; --writable PATH allows writing there"),
            ),
            (
                vec!["--sandbox", "read-only", "--deny", "secret"],
                format!("cat {secret}"),
                denied(&format!("access to `{secret}`; --deny secret forbids it")),
            ),
            (
                vec!["--sandbox", "read-only"],
                "echo 'connect: Network is unreachable' >&2; exit 1".to_owned(),
                denied("network access; --network on allows it"),
            ),
            // A failure for another reason, and without a sandbox.
            (
                vec!["--sandbox", "read-only"],
                "cat no-such-file".to_owned(),
                String::new(),
            ),
            (
                Vec::new(),
                "echo 'Read-only file system' >&2; exit 1".to_owned(),
                String::new(),
            ),
        ] {
            let mut args = vec!["run", "--no-tty", "--cwd", work];
            args.extend(&options);
            args.extend(["--", "sh", "-c", &script]);
            let output = run_with(url.as_deref(), &args, b"");
            let (out, err, code) = seen(&output);
            assert_eq!((out.as_str(), code == 0), ("", false), "{script}: {err}");
            let said: String = err
                .split_inclusive('\n')
                .filter(|line| line.starts_with("exec-server: "))
                .collect();
            assert_eq!(said, expected, "{url:?} {script}: {err}");
        }
    }
}

#[tokio::test]
async fn option_that_run_names_allows_the_operation() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = directory.path().canonicalize().unwrap().join("a");
    std::fs::write(&file, "").unwrap();
    let script = format!("echo x > {}", file.display());
    let run = |options: &[&str]| {
        let mut args = vec!["run", "--sandbox", "read-only", "--cwd", "/"];
        args.extend(options);
        args.extend(["--", "sh", "-c", &script]);
        seen(&run_with(None, &args, b""))
    };
    let (_, err, _) = run(&[]);
    let (_, advice) = err.split_once("`; ").unwrap();
    let options: Vec<&str> = advice.split(' ').take(2).collect();
    assert_eq!(run(&options), (String::new(), String::new(), 0));
    assert_eq!(text(&std::fs::read(&file).unwrap()), "x\n");
}

#[tokio::test]
async fn run_with_json_reports_denials_in_the_exit_event() {
    let script = "echo x > /etc/denied-by-sandbox";
    let args = [
        "run",
        "--json",
        "--sandbox",
        "read-only",
        "--",
        "sh",
        "-c",
        script,
    ];
    let (out, _, code) = seen(&run_with(None, &args, b""));
    assert_ne!(code, 0);
    let exited = out
        .lines()
        .find(|line| line.contains("\"exited\""))
        .unwrap();
    let exited: serde_json::Value = serde_json::from_str(exited).unwrap();
    assert_eq!(exited["denials"][0]["path"], "/etc/denied-by-sandbox");
}
