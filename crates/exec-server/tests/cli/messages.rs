//! Help pages and error messages: exact text, on the right stream.

use std::process::{Command, Stdio};

use exec_server::executor::log::OutputStream;
use exec_server::executor::{Executor, ExecutorConfig, ProcessSpec, PtySize, Stdio as ChildStdio};
use exec_server_testkit::proc::eventually;
use exec_server_testkit::server::ServerProcess;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{BINARY, run_with, seen, server, text};

/// Every command and subcommand that has a help page.
const PAGES: &[&[&str]] = &[
    &["serve"],
    &["run"],
    &["ps"],
    &["kill"],
    &["cp"],
    &["fs"],
    &["fs", "ls"],
    &["fs", "cat"],
    &["fs", "put"],
    &["fs", "get"],
    &["fs", "stat"],
    &["fs", "rm"],
    &["fs", "mv"],
    &["fs", "cp"],
    &["fs", "walk"],
    &["fs", "search"],
    &["fs", "watch"],
    &["env"],
    &["env", "list"],
    &["env", "add"],
    &["env", "remove"],
    &["env", "status"],
    &["env", "use"],
    &["env", "trust"],
    &["daemon"],
    &["token"],
    &["token", "new"],
    &["token", "sign"],
    &["token", "inspect"],
    &["config"],
    &["config", "show"],
    &["status"],
    &["doctor"],
    &["rendezvous"],
    &["rendezvous", "token-add"],
    &["fleet"],
    &["fleet", "nodes"],
    &["fleet", "environments"],
    &["fleet", "streams"],
    &["fleet", "revoke"],
    &["fleet", "drain"],
    &["fleet", "top"],
    &["forward"],
    &["mcp"],
    &["mcp", "config"],
    &["mcp-proxy"],
    &["install-as-codex"],
    &["completions"],
    &["man"],
];

/// Verbs that begin the help of a command or option.
const VERBS: &str = "Accept Add Administer Allocate Allow Announce Append Ask Authenticate Check Choose Collect \
    Connect Continue Count Copy Create Deny Descend Disable Enable End Exclude Expire Find Follow Forward \
    Give Grant Handle Ignore Include Install Join Keep Let Limit List Listen Log Make Move Name Offer \
    Pass Present Print Read Refresh Register Remove Replace Report Require Resolve Restrict Revoke Run \
    Search Send Serve Set Show Sign Skip Start Stop Store Tolerate Translate Trust Use Wait Watch \
    Work Write";

fn page(command: &[&str], help: &str) -> String {
    let mut args = command.to_vec();
    args.push(help);
    let mut program = Command::new(BINARY);
    let output = program.args(&args).env("COLUMNS", "80").output().unwrap();
    let (out, err, code) = seen(&output);
    assert_eq!((code, err.as_str()), (0, ""), "{args:?}");
    out
}

/// Asserts the exact error, with its exit code.
#[track_caller]
fn fails(output: &std::process::Output, code: i32, expected: &str) {
    assert_eq!(
        seen(output),
        (String::new(), format!("exec-server: {expected}\n"), code)
    );
}

#[test]
fn short_help_fits_on_one_screen() {
    for command in PAGES.iter().copied().chain([&[][..]]) {
        let help = page(command, "-h");
        let lines = help.lines().count();
        assert!(lines <= 45, "{command:?} -h has {lines} lines: {help}");
        assert!(!help.contains("--tls-client-cert"), "{command:?}: {help}");
    }
}

#[test]
fn help_shows_commands_in_groups() {
    let help = page(&[], "-h");
    let groups: Vec<(usize, &str)> = ["Use:", "Serve:", "Reach:", "Agents:"]
        .into_iter()
        .map(|group| (help.find(&format!("\n{group}\n")).expect(group), group))
        .collect();
    assert!(groups.is_sorted(), "{help}");
    for name in ["run", "doctor", "forward", "mcp-proxy"] {
        assert!(help.contains(&format!("\n  {name} ")), "{name}: {help}");
    }
}

#[test]
fn long_help_ends_with_the_connection_options() {
    for command in [
        &["run"][..],
        &["ps"],
        &["kill"],
        &["cp"],
        &["fs"],
        &["fs", "ls"],
        &["status"],
        &["env", "trust"],
        &["mcp"],
        &["mcp-proxy"],
    ] {
        let help = page(command, "--help");
        let headings: Vec<&str> = help
            .lines()
            .filter(|line| !line.starts_with(' ') && line.ends_with(':'))
            .take_while(|line| !["Examples:", "Example:", "Exit codes:"].contains(line))
            .collect();
        assert_eq!(headings.last(), Some(&"Connection:"), "{command:?}: {help}");
        let (_, group) = help.split_once("\nConnection:\n").unwrap();
        for flag in [
            "--on <",
            "--url <",
            "--token-file <",
            "--tls-pin <",
            "--ssh-option <",
        ] {
            assert!(group.contains(flag), "{command:?}: no {flag} in {group}");
        }
    }
}

#[test]
fn every_line_of_help_begins_with_a_verb() {
    let verbs: Vec<&str> = VERBS.split_ascii_whitespace().collect();
    let begins =
        |line: &str| verbs.contains(&line.split([' ', ',', ';', ':']).next().unwrap_or(""));
    let mut seen = 0;
    for command in PAGES {
        let mut program = Command::new(BINARY);
        program.args(*command).arg("--help").env("COLUMNS", "1000");
        let help = text(&program.output().unwrap().stdout);
        let first = help.lines().next().unwrap_or_default();
        assert!(begins(first), "{command:?} begins with {first:?}");
        // In the long form an option's help is on the line below it, indented by ten.
        let mut is_option = false;
        let options = help.lines().take_while(|line| !line.starts_with("Example"));
        for line in options {
            let indent = line.len() - line.trim_start().len();
            let about = line.trim_start();
            if is_option && indent == 10 && !about.starts_with("[possible") {
                assert!(begins(about), "{command:?}: {about:?}");
                seen += 1;
            }
            is_option =
                (indent == 2 || indent == 6) && (about.starts_with("--") || about.starts_with("-"));
            if is_option && about.contains("  ") {
                let (_, about) = about.rsplit_once("  ").unwrap();
                assert!(begins(about), "{command:?}: {about:?}");
                seen += 1;
                is_option = false;
            }
        }
    }
    assert!(seen > 150, "{seen}");
}

#[test]
fn man_pages_and_completions_cover_every_command() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().to_str().unwrap();
    let written = run_with(None, &["man", "--out", out], b"");
    assert_eq!(seen(&written).2, 0);
    for command in PAGES {
        let name = format!("exec-server-{}.1", command.join("-"));
        let page = std::fs::read_to_string(directory.path().join(&name)).unwrap();
        assert!(!page.contains("Options of"), "{name}");
        assert!(page.contains("OPTIONS"), "{name}");
    }
    for shell in ["bash", "zsh", "fish"] {
        let (script, _, _) = seen(&run_with(None, &["completions", shell], b""));
        for name in ["mcp-proxy", "rendezvous", "net-allow", "admin-token-file"] {
            assert!(script.contains(name), "{shell}: {name}");
        }
    }
}

/// Runs the program in a new terminal; returns its output and exit code.
async fn on_terminal(args: &[&str]) -> (String, i32) {
    let executor = Executor::new(ExecutorConfig::default()).unwrap();
    let argv = std::iter::once(BINARY).chain(args.iter().copied());
    let spec = ProcessSpec {
        argv: argv.map(str::to_owned).collect(),
        cwd: "/".into(),
        stdio: ChildStdio::Terminal(PtySize {
            rows: 31,
            cols: 120,
        }),
        ..ProcessSpec::default()
    };
    let process = executor.start(spec).await.unwrap();
    let ended = process.wait_for(|log| log.close().and(log.exit().cloned()));
    let exit = tokio::time::timeout(std::time::Duration::from_secs(30), ended);
    let exit = exit.await.expect("the end of the program");
    let all = process
        .with_log(|log| log.cut(OutputStream::Pty, None))
        .bytes;
    (text(&all).replace("\r\n", "\n"), exit.code)
}

#[tokio::test]
async fn no_arguments_on_a_terminal_print_an_introduction() {
    let (shown, code) = on_terminal(&[]).await;
    assert_eq!(code, 0, "{shown}");
    assert!(shown.starts_with("exec-server "), "{shown}");
    let commands = shown
        .lines()
        .filter(|line| line.starts_with("  exec-server "));
    assert_eq!(commands.count(), 5, "{shown}");
    assert!(
        shown.contains("`exec-server -h` lists all commands"),
        "{shown}"
    );
    // Without a terminal it starts a server, as programs that start it expect.
    let server = ServerProcess::start(tokio::process::Command::new(BINARY)).await;
    assert!(
        server.url().starts_with("ws://127.0.0.1:"),
        "{}",
        server.url()
    );
}

#[test]
fn commands_of_similar_programs_work_or_get_a_hint() {
    let run = |args: &[&str]| run_with(None, args, b"");
    assert_eq!(
        seen(&run(&["exec", "--", "echo", "hello"])),
        ("hello\n".to_owned(), String::new(), 0)
    );
    let version = concat!("exec-server ", env!("CARGO_PKG_VERSION"), "\n");
    assert_eq!(seen(&run(&["version"])).0, version);
    for (args, advice) in [
        (
            &["ssh", "me@box"][..],
            "there is no command `ssh`; for a shell on a machine: exec-server run --on ssh://me@box \
             -- bash",
        ),
        (
            &["shell"],
            "there is no command `shell`; for a shell here: exec-server run -- bash; elsewhere: \
             exec-server run --on ENV -- bash",
        ),
        (
            &["attach", "1"],
            "there is no command `attach`; `run` stays attached to its command and reconnects by \
             itself; to see what runs: exec-server ps",
        ),
    ] {
        fails(&run(args), 2, advice);
    }
    let (_, error, code) = seen(&run(&["runn"]));
    assert!(
        code == 2 && error.starts_with("exec-server: unrecognized subcommand 'runn'"),
        "{error}"
    );
    let (_, error, code) = seen(&run(&["run", "--nonsense"]));
    assert!(
        code == 2 && error.starts_with("exec-server: unexpected argument '--nonsense'"),
        "{error}"
    );
}

#[test]
fn invalid_url_error_shows_examples() {
    let expected = "`nonsense` is not a URL; try ws://HOST:PORT or ssh://HOST";
    fails(
        &run_with(None, &["ps", "--url", "nonsense"], b""),
        1,
        expected,
    );
    fails(
        &run_with(Some("nonsense"), &["ps"], b""),
        1,
        &format!("EXEC_SERVER_URL: {expected}"),
    );
}

#[test]
fn missing_token_file_error_names_its_option() {
    let missing = "cannot read the token in /no/such/token: No such file or directory";
    let ps = |options: &[&str], variables: &[(&str, &str)]| {
        let mut command = Command::new(BINARY);
        command
            .arg("ps")
            .args(options)
            .env("EXEC_SERVER_HOME", "/nonexistent")
            .env("EXEC_SERVER_URL", "ws://127.0.0.1:1")
            .envs(variables.iter().copied());
        command.output().unwrap()
    };
    fails(
        &ps(&["--token-file", "/no/such/token"], &[]),
        1,
        &format!("--token-file: {missing}"),
    );
    fails(
        &ps(&[], &[("EXEC_SERVER_TOKEN_FILE", "/no/such/token")]),
        1,
        &format!("EXEC_SERVER_TOKEN_FILE: {missing}"),
    );
}

#[tokio::test]
async fn refused_token_error_names_its_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, format!("{name}-token\n")).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (right, wrong) = (file("right"), file("wrong"));
    let mut command = tokio::process::Command::new(BINARY);
    command.args(["--ws-auth", "capability-token", "--ws-token-file", &right]);
    let server = ServerProcess::start(command).await;
    let url = server.url();
    fails(
        &run_with(Some(url), &["ps", "--token-file", &wrong], b""),
        1,
        &format!("the token in {wrong} was not accepted by `{url}`"),
    );
    fails(
        &run_with(Some(url), &["ps"], b""),
        1,
        &format!(
            "a token is needed for `{url}`: pass --token-file FILE or set EXEC_SERVER_TOKEN_FILE"
        ),
    );
    let ps = run_with(Some(url), &["ps", "--token-file", &right], b"");
    assert_eq!(seen(&ps).2, 0);
}

#[tokio::test]
async fn wrong_scheme_error_suggests_the_other_scheme() {
    let plain = server().await;
    let tls_url = plain.url().replacen("ws://", "wss://", 1);
    fails(
        &run_with(Some(&tls_url), &["ps"], b""),
        1,
        &format!(
            "cannot connect to `{tls_url}`: this port does not speak TLS; try {}",
            plain.url()
        ),
    );
    let mut command = tokio::process::Command::new(BINARY);
    command.arg("--tls-self-signed");
    let secure = ServerProcess::listening(command, "wss://127.0.0.1:0").await;
    let plain_url = secure.url().replacen("wss://", "ws://", 1);
    fails(
        &run_with(Some(&plain_url), &["ps"], b""),
        1,
        &format!(
            "cannot connect to `{plain_url}`: this port speaks TLS; try {}",
            secure.url()
        ),
    );
}

#[test]
fn missing_admin_token_error_names_its_option() {
    let mut command = Command::new(BINARY);
    command
        .args(["fleet", "nodes"])
        .env("EXEC_SERVER_STATE_DIR", "/nonexistent")
        .env_remove("EXEC_SERVER_FLEET_TOKEN_FILE");
    let expected = "an admin token is needed: --admin-token-file FILE";
    fails(&command.output().unwrap(), 1, expected);
}

#[tokio::test]
async fn errors_name_the_path_once_without_codes() {
    let server = server().await;
    let url = Some(server.url());
    for (args, expected) in [
        (
            &["fs", "ls", "/no/such"][..],
            "cannot list `/no/such`: No such file or directory",
        ),
        (
            &["fs", "cat", "/no/such"],
            "cannot read `/no/such`: No such file or directory",
        ),
        (
            &["fs", "rm", "/no/such"],
            "cannot remove `/no/such`: No such file or directory",
        ),
        (
            &["cp", ":/usr", "/tmp/x"],
            "cannot copy `/usr`: it is a directory (use -r)",
        ),
        (
            &["fs", "cp", "/usr", "/tmp/x"],
            "cannot copy `/usr`: it is a directory (use -r)",
        ),
    ] {
        fails(&run_with(url, args, b""), 1, expected);
    }
    let run = run_with(url, &["run", "--cwd", "/no/such", "--", "true"], b"");
    let expected = "cannot use working directory `/no/such`: No such file or directory";
    fails(&run, 125, expected);
}

#[test]
fn shell_command_line_error_suggests_sh() {
    let run = |command: &[&str]| {
        let args = [&["run", "--"], command].concat();
        let (out, error, code) = seen(&run_with(None, &args, b""));
        assert_eq!((out.as_str(), code), ("", 127), "{error}");
        error
    };
    assert_eq!(
        run(&["cd /tmp && ls"]),
        "exec-server: cannot execute `cd /tmp && ls`: No such file or directory\n\n\
         hint: `run` starts programs without a shell; with one: exec-server run -- sh -c 'cd /tmp && \
         ls'\n"
    );
    let error = run(&["cd", "it's"]);
    assert!(error.ends_with("-- sh -c 'cd it'\\''s'\n"), "{error}");
    let error = run(&["no-such-program"]);
    assert!(!error.contains("hint"), "{error}");
}

#[tokio::test]
async fn control_characters_in_remote_names_are_escaped() {
    let directory = tempfile::tempdir().unwrap();
    let name = "a\x1b]0;title\x07b";
    std::fs::write(directory.path().join(name), "x\n").unwrap();
    let at = directory.path().to_str().unwrap();
    let server = server().await;
    let url = server.url();
    let missing = format!("{at}/\x1b[2J");
    for args in [
        &["fs", "--url", url, "ls", at][..],
        &["fs", "--url", url, "walk", at],
        &["fs", "--url", url, "search", "x", at],
        &["fs", "--url", url, "ls", &missing],
        &["fs", "--url", url, "cat", &missing],
        &["cp", "--url", url, &format!(":{missing}"), "/tmp/x"],
        &["kill", "--url", url, "\x1b[2J"],
        &["run", "--url", url, "--", "\x1b[2J"],
        &["run", "--on", "\x1b[2J", "--", "true"],
    ] {
        let (shown, _) = on_terminal(args).await;
        assert!(shown.contains("\\u{1b}"), "{args:?}: {shown:?}");
        assert!(!shown.contains('\x1b'), "{args:?}: {shown:?}");
    }
}

/// The response of a plain HTTP request for a page.
async fn browsed(url: &str) -> String {
    let address = url.split_once("://").unwrap().1;
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!(
        "GET / HTTP/1.1\r\nHost: {address}\r\nAccept: text/html,*/*;q=0.8\r\nConnection: \
         close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn browser_gets_one_line_about_the_server() {
    let server = server().await;
    let answer = browsed(server.url()).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(body.starts_with("This is an exec-server."), "{answer}");
    assert_eq!(body.lines().count(), 1, "{answer}");

    let state = tempfile::tempdir().unwrap();
    let mut command = tokio::process::Command::new(BINARY);
    command
        .args(["rendezvous", "--listen", "127.0.0.1:0", "--state-dir"])
        .arg(state.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let mut child = command.spawn().unwrap();
    let mut lines = {
        use tokio::io::AsyncBufReadExt as _;
        tokio::io::BufReader::new(child.stdout.take().unwrap()).lines()
    };
    let url = lines.next_line().await.unwrap().unwrap();
    let answer = browsed(&url).await;
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(
        body.starts_with("This is an exec-server rendezvous server."),
        "{answer}"
    );
    assert_eq!(body.lines().count(), 1, "{answer}");
}

#[tokio::test]
async fn info_log_has_connections_sessions_and_processes() {
    let mut command = tokio::process::Command::new(BINARY);
    command.args(["--log", "info"]);
    let server = ServerProcess::start(command).await;
    let ran = run_with(Some(server.url()), &["run", "--", "true"], b"");
    assert_eq!(seen(&ran).2, 0);
    for line in [
        "connection opened",
        "session attached",
        "process started",
        "process exited",
        "session ended",
        "connection closed",
    ] {
        eventually(line, || {
            let logged = server.stderr();
            logged.contains(line).then_some(()).ok_or(logged)
        })
        .await;
    }
}

#[tokio::test]
async fn run_names_a_stopped_server_as_the_reason() {
    let mut server = server().await;
    let mut running = tokio::process::Command::new(BINARY)
        .args(["run", "--url", server.url(), "--", "sh", "-c"])
        .arg("trap '' TERM; echo up; while :; do sleep 0.05; done")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut up = [0; 3];
    let stdout = running.stdout.as_mut().unwrap();
    stdout.read_exact(&mut up).await.unwrap();
    exec_server_testkit::proc::signal(server.pid(), rustix::process::Signal::TERM);
    let output = running.wait_with_output().await.unwrap();
    let (_, error, code) = seen(&output);
    assert_eq!(code, 137, "{error}");
    assert!(
        error.starts_with("exec-server: the server ")
            && error.ends_with(", which ended the command\n"),
        "{error}"
    );
    server.ended().await;
}

#[test]
fn refused_connection_error_suggests_serve() {
    let (_, error, code) = seen(&run_with(Some("ws://127.0.0.1:1"), &["ps"], b""));
    assert_eq!(code, 1);
    assert_eq!(
        error,
        "exec-server: cannot connect to `ws://127.0.0.1:1`: Connection refused\n\n\
         hint: `exec-server serve --listen ws://127.0.0.1:4600` starts a server on this machine\n"
    );
}
