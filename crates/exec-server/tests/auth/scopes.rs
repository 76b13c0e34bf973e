//! The scopes of tokens.

use exec_server_testkit::wire::{self, StartBuilder, WireClient};
use serde_json::{Value, json};

use crate::{AuthFiles, session_with, start};

/// Asserts that the method is refused because the token lacks this scope.
async fn assert_needs_scope(client: &mut WireClient, method: &str, params: Value, scope: &str) {
    let failure = client.call(method, params).await.unwrap_err();
    assert_eq!(failure.code, -32600, "{method}: {failure}");
    let text = format!("`{method}` needs the scope `{scope}`, which this token does not have");
    assert_eq!(failure.message, text);
}

#[tokio::test]
async fn token_allows_only_the_methods_of_its_scopes() {
    let files = AuthFiles::new();
    let mut args = vec!["--ws-auth".to_owned(), "capability-token".to_owned()];
    for (name, scopes) in [
        ("all", ""),
        ("exec", ":exec"),
        ("reader", ":fs:read"),
        ("writer", ":fs:write"),
        ("observer", ":observe"),
    ] {
        let file = files.write(name, &format!("{name}-token"));
        args.push("--ws-token-file".to_owned());
        args.push(format!("{name}={file}{scopes}"));
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let server = start(&args).await;
    let url = server.url();

    let path = format!("file://{}", files.path("file").display());
    let list = json!({"all": true});
    let start = json!({"processId": "p", "argv": ["sleep", "60"], "cwd": "file:///",
        "env": {}, "tty": false});
    let write = json!({"path": path, "dataBase64": "aGk="});
    let read = json!({"path": path});

    let mut all = session_with(url, "all-token").await;
    all.call("fs/writeFile", write.clone()).await.unwrap();
    all.call("process/start", start.clone()).await.unwrap();

    let mut exec = session_with(url, "exec-token").await;
    exec.call("process/start", start.clone()).await.unwrap();
    exec.call("process/list", list.clone()).await.unwrap();
    assert_needs_scope(&mut exec, "fs/readFile", read.clone(), "fs:read").await;
    assert_needs_scope(&mut exec, "fs/writeFile", write.clone(), "fs:write").await;

    let mut reader = session_with(url, "reader-token").await;
    reader.call("fs/readFile", read.clone()).await.unwrap();
    reader.call("environment/info", Value::Null).await.unwrap();
    assert_needs_scope(&mut reader, "fs/writeFile", write.clone(), "fs:write").await;
    assert_needs_scope(&mut reader, "process/start", start.clone(), "exec").await;
    assert_needs_scope(&mut reader, "process/list", list.clone(), "observe").await;
    let replace = json!({"handleId": "h", "path": path, "mode": "replace"});
    assert_needs_scope(&mut reader, "fs/open", replace, "fs:write").await;

    let mut writer = session_with(url, "writer-token").await;
    writer.call("fs/writeFile", write.clone()).await.unwrap();
    assert_needs_scope(&mut writer, "fs/readFile", read.clone(), "fs:read").await;

    let mut observer = session_with(url, "observer-token").await;
    let listed = observer.call("process/list", list).await.unwrap();
    assert_eq!(listed["processes"].as_array().unwrap().len(), 2);
    let session = listed["processes"][0]["sessionId"].clone();
    let kill = json!({"processId": "p", "sessionId": session});
    assert_needs_scope(&mut observer, "process/terminate", kill, "exec").await;
    let exec_params =
        json!({"processId": "q", "argv": ["true"], "cwd": "/", "env": {}, "tty": false});
    assert_needs_scope(&mut observer, "command/exec", exec_params, "exec").await;
    assert_needs_scope(&mut observer, "fs/readFile", read, "fs:read").await;
    assert_needs_scope(&mut observer, "no/suchMethod", json!({}), "exec").await;
}

/// A server with a token of all scopes, one for observing and one for reading files.
async fn observed(files: &AuthFiles) -> exec_server_testkit::server::ServerProcess {
    let mut args = vec!["--ws-auth".to_owned(), "capability-token".to_owned()];
    for (name, scopes) in [
        ("all", ""),
        ("observer", ":observe"),
        ("reader", ":fs:read"),
    ] {
        let file = files.write(name, &format!("{name}-token"));
        args.push("--ws-token-file".to_owned());
        args.push(format!("{name}={file}{scopes}"));
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    start(&args).await
}

#[tokio::test]
async fn observe_scope_reads_output_of_other_sessions() {
    let files = AuthFiles::new();
    let server = observed(&files).await;
    let mut owner = session_with(server.url(), "all-token").await;
    let script = "echo seen; read line; exit 4";
    owner.start(StartBuilder::sh("p", script).piped()).await;
    let there = json!({"processId": "p", "sessionId": owner.session_id()});
    let with = |field: &str, value: Value| {
        let mut params = there.clone();
        params[field] = value;
        params
    };

    let mut observer = session_with(server.url(), "observer-token").await;
    let read = with("waitMs", json!(60_000));
    let read = observer.ok("process/read", read).await;
    assert_eq!(wire::bytes(&read["chunks"][0]["chunk"]), b"seen\n");
    let snapshot = observer.ok("process/snapshot", there.clone()).await;
    assert_eq!(wire::bytes(&snapshot["stdout"]), b"seen\n");
    let waiting = observer.send("process/wait", there.clone()).await;
    owner
        .ok("process/closeStdin", json!({"processId": "p"}))
        .await;
    let waited = observer.answer(waiting).await.unwrap();
    assert_eq!(waited["exitCode"], 4);

    for method in ["process/read", "process/snapshot", "process/wait"] {
        let failure = observer.refused(method, json!({"processId": "p"})).await;
        assert_eq!(failure.message, "unknown process id p", "{method}");
        let failure = observer
            .refused(method, with("processId", json!("q")))
            .await;
        assert_eq!(failure.message, "unknown process id q", "{method}");
        let failure = observer
            .refused(method, with("sessionId", json!("nobody")))
            .await;
        assert!(failure.message.contains("nobody"), "{method}: {failure}");
    }
    let write = json!({"processId": "p", "chunk": "eA==", "writeId": "1"});
    assert_needs_scope(&mut observer, "process/write", write, "exec").await;
    let mut reader = session_with(server.url(), "reader-token").await;
    for method in ["process/read", "process/snapshot", "process/wait"] {
        assert_needs_scope(&mut reader, method, there.clone(), "observe").await;
    }
}

#[tokio::test]
async fn reads_of_an_observer_acknowledge_nothing() {
    const BYTES: usize = 5_000_000;
    let files = AuthFiles::new();
    let server = observed(&files).await;
    let mut owner = session_with(server.url(), "all-token").await;
    let emit = format!("head -c {BYTES} /dev/zero");
    owner
        .start(StartBuilder::sh("p", &emit).with("delivery", "pull"))
        .await;
    owner.pulls("p");
    let mut observer = session_with(server.url(), "observer-token").await;
    // Acknowledges all output; what is retained for the owner must stay.
    let ahead = json!({"processId": "p", "sessionId": owner.session_id(), "afterSeq": 1_000_000});
    observer.ok("process/read", ahead).await;
    let (mut after, mut seen) = (0, 0);
    loop {
        let params = json!({"processId": "p", "afterSeq": after, "waitMs": 60_000});
        let read = owner.ok("process/read", params).await;
        assert_eq!(read["evicted"], Value::Null, "after {after}");
        for chunk in read["chunks"].as_array().unwrap() {
            seen += wire::bytes(&chunk["chunk"]).len();
        }
        after = read["nextSeq"].as_u64().unwrap() - 1;
        if read["closed"] == true {
            break;
        }
    }
    assert_eq!(seen, BYTES);
}

#[tokio::test]
async fn session_is_resumed_only_with_the_token_of_its_owner() {
    let files = AuthFiles::new();
    let one = files.write("one", "one-token");
    let two = files.write("two", "two-token");
    let server = start(&[
        "--ws-auth",
        "capability-token",
        "--ws-token-file",
        &format!("one={one}"),
        "--ws-token-file",
        &format!("two={two}"),
    ])
    .await;
    let first = session_with(server.url(), "one-token").await;
    let id = first.session["sessionId"].clone();
    drop(first);
    let resume = json!({"clientName": "test", "resumeSessionId": id});
    let mut thief = crate::connect_with(server.url(), "two-token")
        .await
        .unwrap();
    let failure = thief.call("initialize", resume.clone()).await.unwrap_err();
    assert_eq!(failure.code, -32600, "{failure}");
    assert!(
        failure.message.starts_with("unknown session id"),
        "{failure}"
    );
    let mut owner = crate::connect_with(server.url(), "one-token")
        .await
        .unwrap();
    let answer = owner.initialize(resume).await;
    assert_eq!(answer["sessionId"], id);
}
