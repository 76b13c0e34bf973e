//! The program under the name of Codex: `codex exec-server`.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use exec_server_testkit::fake_registry::FakeRegistry;
use exec_server_testkit::proc::TIMEOUT;
use exec_server_testkit::wire::{StartBuilder, TestedServer, Transport};
use tokio::process::Command;
use tokio::time::timeout;

struct Output {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

/// Runs a program without input until it exits.
async fn run(program: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_remove("CODEX_API_KEY")
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = timeout(TIMEOUT, command.output()).await;
    let output = output.expect("the program to exit").unwrap();
    Output {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_exec-server"))
}

/// Creates the link in a directory.
async fn install(directory: &Path) -> PathBuf {
    let output = run(
        program(),
        &["install-as-codex", directory.to_str().unwrap()],
    )
    .await;
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    let link = directory.join("codex");
    assert_eq!(output.stdout, format!("{}\n", link.display()));
    link
}

#[tokio::test]
async fn installed_link_answers_version_probes_and_serves() {
    let directory = tempfile::tempdir().unwrap();
    let codex = install(directory.path()).await;
    for argument in ["--version", "-V"] {
        let output = run(&codex, &[argument]).await;
        assert_eq!(output.code, Some(0), "{}", output.stderr);
        assert_eq!(output.stdout, "codex-cli 0.169.0\n");
        assert!(
            output.stderr.starts_with("exec-server: version "),
            "{}",
            output.stderr
        );
    }
    let mut command = Command::new(&codex);
    command.arg("exec-server");
    let mut server = TestedServer::start(Transport::Websocket, command).await;
    let mut client = server.session().await;
    assert_eq!(
        client
            .run(StartBuilder::sh("p", "exit 3"))
            .await
            .exit_code(),
        3
    );

    let output = run(&codex, &["exec", "hello"]).await;
    assert_eq!(output.code, Some(2));
    assert!(
        output.stderr.contains("only `codex exec-server`"),
        "{}",
        output.stderr
    );
}

#[tokio::test]
async fn install_replaces_other_files_only_if_forced() {
    let directory = tempfile::tempdir().unwrap();
    install(directory.path()).await;
    // Installing a second time changes nothing.
    let link = install(directory.path()).await;
    std::fs::remove_file(&link).unwrap();
    std::fs::write(&link, "other").unwrap();
    let place = directory.path().to_str().unwrap();
    let output = run(program(), &["install-as-codex", place]).await;
    assert_eq!(output.code, Some(1));
    assert!(
        output.stderr.contains("--force replaces it"),
        "{}",
        output.stderr
    );
    assert_eq!(std::fs::read(&link).unwrap(), b"other");
    let output = run(program(), &["install-as-codex", "--force", place]).await;
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    assert!(std::fs::read_link(&link).unwrap().is_absolute());
    let missing = directory.path().join("missing");
    let output = run(program(), &["install-as-codex", missing.to_str().unwrap()]).await;
    assert_eq!(output.code, Some(1));
    assert!(output.stderr.contains("missing/codex"), "{}", output.stderr);
}

#[tokio::test]
async fn options_without_effect_cost_one_line() {
    let arguments = [
        "exec-server",
        "-c",
        "model=x",
        "--enable",
        "a",
        "--disable",
        "b",
        "--strict-config",
        "--proxy-private-ips-via-upstream",
        "--linux-sandbox-pid-namespace",
        "isolate",
        "--remote-transport",
        "noise",
        "--listen",
        "stdio",
    ];
    let output = run(program(), &arguments).await;
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    assert_eq!(
        output.stderr,
        "exec-server: ignored, because they have no effect here: -c, --enable, --disable, \
         --strict-config, --proxy-private-ips-via-upstream\n"
    );
}

#[tokio::test]
async fn unsupported_options_are_refused_before_anything_is_registered() {
    let registry = FakeRegistry::start().await;
    let url = registry.url();
    for (options, part) in [
        (
            &["--aws-sigv4", "--remote-transport", "direct"][..],
            "direct transport",
        ),
        (&["--chatgpt-token-stdin"], "only Codex can load the policy"),
        (
            &["--linux-sandbox-pid-namespace", "inherit"],
            "inherit is not supported",
        ),
        (
            &["--registration-bearer-stdin"],
            "newline-terminated registration bearer",
        ),
    ] {
        for forward in [&[][..], &["forward", "--connect", "ws://127.0.0.1:1"]] {
            let remote = ["--remote", &url, "--environment-id", "env"];
            let arguments = [&["exec-server"], forward, &remote, options].concat();
            let output = run(program(), &arguments).await;
            assert_eq!(output.code, Some(1), "{arguments:?}: {}", output.stderr);
            assert!(
                output.stderr.contains(part),
                "{arguments:?}: {}",
                output.stderr
            );
        }
    }
    assert_eq!(registry.seen(), []);
}

#[tokio::test]
async fn bearer_of_standard_input_authenticates_the_registration() {
    use tokio::io::AsyncWriteExt as _;
    let registry = FakeRegistry::start().await;
    let long = format!("{}\n", "x".repeat(16 << 10));
    for (input, expected) in [
        ("secret-1\n", Ok("secret-1")),
        ("secret-1", Err("newline-terminated")),
        ("\n", Err("invalid registration bearer")),
        ("two words\n", Err("invalid registration bearer")),
        (long.as_str(), Err("at most 16 KiB")),
    ] {
        let before = registry.count("register");
        let mut command = Command::new(program());
        command
            .args(["--remote", &registry.url(), "--environment-id", "env"])
            .args(["--registration-bearer-stdin", "--exit-on-stdin-close"])
            .env("EXEC_SERVER_STATE_DIR", std::env::temp_dir())
            .env("CODEX_API_KEY", "other")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(input.as_bytes()).await.unwrap();
        if expected.is_ok() {
            registry.until_count("register", before + 1).await;
            registry.until_attached(true).await;
        }
        drop(stdin);
        let output = timeout(TIMEOUT, child.wait_with_output()).await;
        let output = output.expect("the program to exit").unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        match expected {
            Ok(token) => {
                assert_eq!(output.status.code(), Some(0), "{stderr}");
                let seen = registry.seen();
                assert_eq!(seen[before].token.as_deref(), Some(token));
                assert!(!stderr.contains(token), "{stderr}");
            }
            Err(part) => {
                assert_eq!(output.status.code(), Some(1), "{stderr}");
                assert!(stderr.contains(part), "{stderr}");
                assert_eq!(registry.count("register"), before);
            }
        }
        registry.until_attached(false).await;
    }
}
