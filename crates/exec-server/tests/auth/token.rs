//! `exec-server token`, and clients with a token.

use std::os::unix::fs::PermissionsExt as _;

use serde_json::Value;

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
    assert_eq!(made.stdout, b"");
    let token = std::fs::read_to_string(&path).unwrap().trim().to_owned();
    assert_eq!(token.len(), 64);
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let again = output(&["token", "new", "--out", &path]).await;
    assert_eq!(again.status.code(), Some(1));

    // The hash that it prints on standard error is enough for a server.
    let hash = text(&made.stderr).replace("sha256: ", "");
    let server = start(&["--ws-auth", "capability-token", "--ws-token-sha256", &hash]).await;
    session_with(server.url(), &token).await;

    let shown = output(&["token", "inspect", &path]).await;
    assert!(shown.status.success());
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(shown["sha256"], hash.as_str());
    assert!(!shown.to_string().contains(&token));
    let other = output(&["token", "new"]).await;
    assert_ne!(text(&other.stdout), token);
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
