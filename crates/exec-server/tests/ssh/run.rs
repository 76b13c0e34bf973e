//! Commands there, as if they ran here.

use super::*;

#[tokio::test]
async fn a_command_has_streams_and_an_exit_code() {
    let lab = Lab::new();
    let script = "echo out; echo err >&2; pwd; exit 7";
    let (out, err, code) = seen(lab.run(&[], &["sh", "-c", script])).await;
    let home = lab.sshd.home();
    assert_eq!(
        (out.as_str(), code),
        (format!("out\n{}\n", home.display()).as_str(), 7),
        "{err}"
    );
    assert_eq!(err, "err\n");
    let (_, err, code) = seen(lab.run(&[], &["no-such-program"])).await;
    assert_eq!(code, 127, "{err}");
    let (_, err, code) = seen(lab.run(&["--timeout", "200ms"], &["sleep", "60"])).await;
    assert_eq!(code, 124, "{err}");
}

#[tokio::test]
async fn the_next_command_finds_everything_ready() {
    let lab = Lab::new();
    assert_eq!(seen(lab.run(&[], &["true"])).await.2, 0);
    let (daemon, masters) = (lab.daemon_pid(), lab.sshd.masters());
    assert_eq!(masters.len(), 1, "{masters:?}");
    let logins = lab.sshd.log().matches("Accepted publickey").count();
    let sessions = lab.sshd.log().matches("Starting session").count();
    for _ in 0..3 {
        assert_eq!(seen(lab.run(&[], &["true"])).await.2, 0);
    }
    assert_eq!((lab.daemon_pid(), lab.sshd.masters()), (daemon, masters));
    let log = lab.sshd.log();
    assert_eq!(log.matches("Accepted publickey").count(), logins);
    // Not even a process was started by sshd.
    assert_eq!(log.matches("Starting session").count(), sessions);
}

/// What is remembered of a machine from one command to the next.
fn remembered(lab: &Lab) -> PathBuf {
    let files = tree(&lab.sshd.path().join("run"));
    let mut found = files
        .iter()
        .filter(|path| path.extension() == Some("cwd".as_ref()));
    found
        .next()
        .expect("the directory to be remembered")
        .clone()
}

#[tokio::test]
async fn a_command_is_started_with_the_first_words_where_it_was_before() {
    let lab = Lab::new();
    let home = format!("{}\n", lab.sshd.home().display());
    for _ in 0..3 {
        assert_eq!(
            seen(lab.run(&[], &["pwd"])).await,
            (home.clone(), String::new(), 0)
        );
    }
    let (out, err, code) = seen(lab.run(&["--cwd", "/usr"], &["pwd"])).await;
    assert_eq!((out.as_str(), code), ("/usr\n", 0), "{err}");
    let (_, err, code) = seen(lab.run(&[], &["no-such-program"])).await;
    assert_eq!(code, 127, "{err}");
    let (_, err, code) = seen(lab.run(&["--cwd", "/no/such"], &["pwd"])).await;
    assert!(code == 125 && err.contains("`/no/such`"), "{err}");
    // What is not so any more is noticed.
    fs::write(remembered(&lab), "file:///no/such").unwrap();
    let (out, err, code) = seen(lab.run(&[], &["pwd"])).await;
    assert_eq!((out, code), (home.clone(), 0), "{err}");
    fs::write(remembered(&lab), "file:///usr").unwrap();
    let (out, err, code) = seen(lab.run(&[], &["pwd"])).await;
    assert_eq!((out.as_str(), code), ("/usr\n", 0), "{err}");
    assert!(
        err.contains("file:///usr") && err.contains(home.trim()),
        "{err}"
    );
    let (out, err, code) = seen(lab.run(&[], &["pwd"])).await;
    assert_eq!((out, err.as_str(), code), (home.clone(), "", 0));
    fs::write(remembered(&lab), "nonsense").unwrap();
    assert_eq!(seen(lab.run(&[], &["pwd"])).await.0, home);
    // Input and its end go where they went before.
    let output = output_of(lab.run(&[], &["cat"]), b"in").await;
    assert_eq!(
        (&output.stdout[..], output.status.code()),
        (&b"in"[..], Some(0))
    );
}

#[tokio::test]
async fn many_at_once_share_one_connection() {
    let lab = Lab::new();
    let runs = (0..6).map(|number| {
        let text = number.to_string();
        seen(lab.run(&[], &["echo", &text]))
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
    assert_eq!(lab.sshd.masters().len(), 1);
}

#[tokio::test]
async fn input_arrives_whole() {
    let lab = Lab::new();
    let input: Vec<u8> = (0..10_000_000u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let output = output_of(lab.run(&[], &["cat"]), &input).await;
    assert!(output.status.success(), "{output:?}");
    assert!(
        output.stdout == input,
        "{} bytes came back",
        output.stdout.len()
    );
}

#[tokio::test]
async fn a_terminal_is_a_terminal() {
    let lab = Lab::new();
    let script = "test -t 0 && test -t 1 && read -r line && echo \"got $line\"";
    let output = output_of(lab.run(&["--tty"], &["sh", "-c", script]), b"hello\n").await;
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output:?}");
    assert!(out.contains("got hello"), "{out}");
}

#[tokio::test]
async fn the_path_of_the_url_is_where_commands_run() {
    let lab = Lab::new();
    let place = lab.sshd.path().join("work dir");
    fs::create_dir(&place).unwrap();
    fs::write(place.join("x"), "").unwrap();
    let url = format!("{}{}", lab.sshd.url(), place.display()).replace(' ', "%20");
    let program = |command: &str| {
        let mut program = lab.program();
        program
            .arg(command)
            .args(lab.flags(&url))
            .args(["--remote-binary", BINARY]);
        program
    };
    let mut run = program("run");
    run.args(["--", "pwd"]);
    let (out, err, code) = seen(run).await;
    assert_eq!((out, code), (format!("{}\n", place.display()), 0), "{err}");
    let mut list = program("fs");
    list.arg("ls");
    assert_eq!(seen(list).await.0, "x\n");
}

#[tokio::test]
async fn files_are_copied_there_and_back() {
    let lab = Lab::new();
    let (here, there) = (lab.sshd.path().join("here"), lab.sshd.home());
    fs::write(&here, "content").unwrap();
    let copy = |from: String, to: String| {
        let mut program = lab.program();
        let flags = lab.flags("unused");
        program
            .arg("cp")
            .args(&flags[2..])
            .args(["--remote-binary", BINARY, &from, &to]);
        program
    };
    let remote = format!("{}:{}", lab.sshd.url(), there.join("copy").display());
    let local = here.display().to_string();
    let (_, err, code) = seen(copy(local.clone(), remote.clone())).await;
    assert_eq!(code, 0, "{err}");
    assert_eq!(fs::read(there.join("copy")).unwrap(), b"content");
    let back = format!("{local}.back");
    assert_eq!(seen(copy(remote, back.clone())).await.2, 0);
    assert_eq!(fs::read(back).unwrap(), b"content");
}

#[tokio::test]
async fn where_nothing_may_be_forwarded_streams_carry_it() {
    let lab = Lab::with(&["DisableForwarding yes"]);
    for _ in 0..2 {
        let input = b"through standard streams".repeat(10_000);
        let output = output_of(lab.run(&[], &["cat"]), &input).await;
        let err = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && output.stdout == input, "{err}");
    }
    let (_, err, code) = seen(lab.run(&[], &["sh", "-c", "exit 9"])).await;
    assert_eq!(code, 9, "{err}");
}
