//! `exec-server token`, and clients with a token.

use std::os::unix::fs::PermissionsExt as _;

use serde_json::Value;
use tokio::io::AsyncBufReadExt as _;

use crate::{AuthFiles, output, program, session_with, start, text_of};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim().to_owned()
}

#[tokio::test]
async fn token_new_writes_a_private_file_and_never_overwrites() {
    let files = AuthFiles::new();
    let path = text_of(&files.path("token"));
    let made = output(&["token", "new", "--out", &path]).await;
    assert!(made.status.success(), "{made:?}");
    assert_eq!(text(&made.stderr), "");
    let token = std::fs::read_to_string(&path).unwrap().trim().to_owned();
    assert_eq!(token.len(), 64);
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let again = output(&["token", "new", "--out", &path]).await;
    assert_eq!(again.status.code(), Some(1));

    // The hash that it prints is enough for a server.
    let hash = text(&made.stdout);
    let again = output(&["token", "hash", &path]).await;
    assert_eq!(text(&again.stdout), hash);
    let server = start(&["--ws-auth", "capability-token", "--ws-token-sha256", &hash]).await;
    session_with(server.url(), &token).await;

    let shown = output(&["token", "inspect", &path]).await;
    assert!(shown.status.success());
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(shown["sha256"], hash.as_str());
    assert!(!shown.to_string().contains(&token));
    let other = output(&["token", "new"]).await;
    assert_ne!(text(&other.stdout), token);
    assert!(text(&other.stderr).starts_with("sha256: "));
}

#[tokio::test]
async fn signed_tokens_can_be_created_used_and_inspected() {
    let files = AuthFiles::new();
    let secret = files.write("secret", &"s".repeat(40));
    let server = start(&[
        "--ws-auth",
        "signed-bearer-token",
        "--ws-shared-secret-file",
        &secret,
        "--ws-audience",
        "here",
    ])
    .await;
    let sign = |more: &[&'static str]| {
        let fixed = [
            "token",
            "sign",
            "--secret-file",
            &secret,
            "--audience",
            "here",
        ];
        let args: Vec<String> = fixed.iter().chain(more).map(ToString::to_string).collect();
        async move {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let made = output(&args).await;
            assert!(made.status.success(), "{made:?}");
            text(&made.stdout)
        }
    };
    let token = sign(&["--scope", "fs:read,observe", "--subject", "ci"]).await;
    let mut client = session_with(server.url(), &token).await;
    let start = serde_json::json!({"processId": "p", "argv": ["true"], "cwd": "file:///",
        "env": {}, "tty": false});
    let failure = client.call("process/start", start).await.unwrap_err();
    assert!(failure.message.contains("`exec`"), "{failure}");

    let file = files.write("jwt", &token);
    let shown = output(&["token", "inspect", &file, "--secret-file", &secret]).await;
    assert!(shown.status.success(), "{shown:?}");
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(shown["valid"], true);
    assert_eq!(shown["claims"]["sub"], "ci");
    assert_eq!(shown["scopes"], "fs:read observe");

    let wrong = files.write("wrong", &"t".repeat(40));
    let shown = output(&["token", "inspect", &file, "--secret-file", &wrong]).await;
    assert_eq!(shown.status.code(), Some(1));
    assert!(text(&shown.stdout).contains("invalid websocket jwt"));

    let short = files.write("short", "s");
    let refused = output(&["token", "sign", "--secret-file", &short]).await;
    assert_eq!(refused.status.code(), Some(1));
    let refused = output(&["token", "sign", "--secret-file", &secret, "--scope", "root"]).await;
    assert!(text(&refused.stderr).contains("unknown scope `root`"));
}

#[tokio::test]
async fn client_reads_token_from_file_or_variable_and_hides_it_from_commands() {
    let files = AuthFiles::new();
    let file = files.write("token", "tok123\n");
    let server = start(&["--ws-auth", "capability-token", "--ws-token-file", &file]).await;
    let run = |args: &[&str], env: &[(&str, &str)]| {
        let mut command = program();
        command
            .args(["run", "--url", server.url()])
            .args(args)
            .args(["--", "env"])
            .envs(env.iter().copied())
            .kill_on_drop(true);
        async move { command.output().await.unwrap() }
    };
    for (args, env) in [
        (&["--token-file", &file][..], &[][..]),
        (&[], &[("EXEC_SERVER_TOKEN_FILE", file.as_str())]),
        (&[], &[("EXEC_SERVER_TOKEN", "tok123")]),
    ] {
        let output = run(args, env).await;
        assert!(output.status.success(), "{args:?} {env:?}: {output:?}");
        let seen = text(&output.stdout);
        assert!(seen.contains("PATH=") && !seen.contains("tok123"), "{seen}");
    }
    let refused = run(&[], &[]).await;
    assert_eq!(refused.status.code(), Some(125));
    let stderr = text(&refused.stderr);
    assert!(
        stderr.starts_with("exec-server: a token is needed for `ws://")
            && stderr.contains("pass --token-file FILE"),
        "{stderr}"
    );
    let broken = files.write("broken", "a\nb");
    let refused = run(&["--token-file", &broken], &[]).await;
    let stderr = text(&refused.stderr);
    assert!(
        stderr.contains("characters that an HTTP header cannot contain"),
        "{stderr}"
    );

    // Commands that run locally do not get it either.
    let mut here = program();
    here.args(["run", "--", "env"])
        .env("EXEC_SERVER_TOKEN", "tok123")
        .env("EXEC_SERVER_TOKEN_FILE", &file)
        .kill_on_drop(true);
    let seen = text(&here.output().await.unwrap().stdout);
    assert!(
        seen.contains("PATH=") && !seen.contains("EXEC_SERVER_TOKEN"),
        "{seen}"
    );
}

#[tokio::test]
async fn init_makes_a_server_and_the_line_for_its_clients() {
    let files = AuthFiles::new();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = format!("wss://{}", free.local_addr().unwrap());
    drop(free);
    let directory = text_of(&files.path("made"));
    let init = [
        "init",
        "--directory",
        &directory,
        "--host",
        "127.0.0.1",
        "--listen",
        &listen,
    ];
    let made = output(&init).await;
    let report = text(&made.stdout);
    assert!(made.status.success(), "{made:?}");
    for (name, expected) in [
        ("network.token", 0o600),
        ("key.pem", 0o600),
        ("network.toml", 0o644),
    ] {
        let mode = std::fs::metadata(files.path("made").join(name)).unwrap();
        assert_eq!(mode.permissions().mode() & 0o777, expected, "{name}");
    }
    let token = std::fs::read_to_string(files.path("made/network.token")).unwrap();
    let settings = std::fs::read_to_string(files.path("made/network.toml")).unwrap();
    assert!(!settings.contains(token.trim()), "only the hash is in it");

    // The printed commands, as they are typed: first the server's, then the client's.
    let bin = files.path("bin");
    std::fs::create_dir(&bin).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_exec-server"), bin.join("exec-server")).unwrap();
    let shell = |line: &str| {
        let mut command = tokio::process::Command::new("sh");
        command
            .args(["-c", line])
            .env_clear()
            .env("PATH", format!("{}:/usr/bin:/bin", bin.display()))
            .env("EXEC_SERVER_HOME", files.path("home"))
            .current_dir(bin.parent().unwrap())
            .stdin(std::process::Stdio::null())
            .kill_on_drop(true);
        command
    };
    let after = |heading: &str| {
        let mut lines = report.lines().skip_while(|line| !line.starts_with(heading));
        lines.nth(1).unwrap().trim().to_owned()
    };
    let mut server = shell(&format!("exec {}", after("Start the server")))
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut printed = tokio::io::BufReader::new(server.stdout.take().unwrap());
    printed.read_line(&mut line).await.unwrap();
    assert_eq!(line.trim(), listen);
    let added = shell(&after("On the other machine"))
        .output()
        .await
        .unwrap();
    assert!(added.status.success(), "{added:?}");
    let mut run = shell("exec-server run --on 127_0_0_1 -- echo served");
    let ran = run.output().await.unwrap();
    assert_eq!(text(&ran.stdout), "served", "{ran:?}");

    let again = output(&init).await;
    assert_eq!(again.status.code(), Some(1));
    assert!(
        text(&again.stderr).contains("exists; remove it"),
        "{again:?}"
    );
    let plain = output(&["init", "--listen", "ws://127.0.0.1:4600"]).await;
    assert!(
        text(&plain.stderr).contains("must be a wss:// URL"),
        "{plain:?}"
    );
}
