//! `fs/search`: what it finds, what it rejects, and when it stops.

use std::fs;
use std::path::Path;

use exec_server_testkit::proc::eventually;
use exec_server_testkit::wire::{Transport, fields};
use serde_json::{Value, json};

use crate::{over_all, served};

over_all! {
    search_returns_matches_with_context_lines,
}

fn uri(path: &Path) -> String {
    format!("file://{}", path.display())
}

async fn search_returns_matches_with_context_lines(on: Transport) {
    let (_server, mut client) = served(on).await;
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("b.txt"), "one\ntwo needle\nthree\n").unwrap();
    fs::write(dir.path().join("a b.txt"), "NEEDLE").unwrap();
    fs::write(dir.path().join(".gitignore"), "skipped\n").unwrap();
    fs::write(dir.path().join("skipped"), "needle").unwrap();
    let params = json!({
        "path": uri(dir.path()), "pattern": "needle", "caseSensitive": false, "contextLines": 1,
        "sandbox": null,
    });
    let found = client.ok("fs/search", params).await;
    assert_eq!(
        found,
        json!({
            "matches": [
                {"path": format!("{}/a%20b.txt", uri(dir.path())), "line": 1, "column": 1,
                    "text": "NEEDLE", "before": [], "after": []},
                {"path": format!("{}/b.txt", uri(dir.path())), "line": 2, "column": 5,
                    "text": "two needle", "before": ["one"], "after": ["three"]},
            ],
            "filesSearched": 2,
            "truncated": false,
        })
    );
    let params = json!({
        "path": uri(dir.path()), "pattern": "needle", "gitignore": false, "maxMatches": 1,
        "globs": ["skip*"],
    });
    let found = client.ok("fs/search", params).await;
    assert_eq!(found["matches"][0]["text"], "needle");
    assert_eq!(fields(&found), ["filesSearched", "matches", "truncated"]);
}

#[tokio::test]
async fn search_rejects_invalid_params() {
    let (mut server, mut client) = served(Transport::Websocket).await;
    let dir = tempfile::tempdir().unwrap();
    let here = uri(dir.path());
    let glob = "x".repeat(4097);
    let table = [
        (json!({"pattern": "("}), -32602, "unclosed group"),
        (json!({"pattern": "a\\nb"}), -32602, "not allowed"),
        (json!({"pattern": "\\w{500}{500}"}), -32602, "size limit"),
        (
            json!({"pattern": "x".repeat(65_537)}),
            -32602,
            "65537 bytes exceeds the limit of 65536",
        ),
        (
            json!({"pattern": "x", "globs": ["a", "{b"]}),
            -32602,
            "`{b`",
        ),
        (
            json!({"pattern": "x", "globs": vec!["a"; 257]}),
            -32602,
            "limit of 256",
        ),
        (
            json!({"pattern": "x", "globs": [glob]}),
            -32602,
            "limit of 4096 bytes",
        ),
        (
            json!({"pattern": "x", "contextLines": 101}),
            -32602,
            "limit of 100 lines",
        ),
        (
            json!({"pattern": "x", "maxMatches": -1}),
            -32602,
            "maxMatches",
        ),
        (
            json!({"pattern": "x", "path": format!("{here}/no")}),
            -32004,
            "/no",
        ),
        (
            json!({"pattern": "x", "path": "file:///c:/x"}),
            -32600,
            "invalid on",
        ),
        (json!({}), -32602, "pattern"),
    ];
    for (mut params, code, text) in table {
        if params.get("path").is_none() {
            params["path"] = Value::from(here.clone());
        }
        let refused = client.refused("fs/search", params.clone()).await;
        assert!(
            refused.code == code && (refused.message.contains(text) || text == "maxMatches"),
            "{refused} for {text}"
        );
    }
    let mut early = server.connect().await;
    let params = json!({"path": here, "pattern": "x"});
    let refused = early.refused("fs/search", params).await;
    assert_eq!(
        (refused.code, refused.message.as_str()),
        (
            -32600,
            "client must call initialize before using filesystem methods"
        )
    );
}

/// One large file under many names: a search that takes longer than any test would wait.
fn fill_with_endless_work(dir: &Path) {
    let line = "there is nothing to be found on this line of text\n";
    fs::write(dir.join("0"), line.repeat((16 << 20) / line.len())).unwrap();
    for number in 1..4000 {
        fs::hard_link(dir.join("0"), dir.join(number.to_string())).unwrap();
    }
}

/// Number of files below `dir` that a process has open.
fn open_below(pid: u32, dir: &Path) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .filter(|target| target.starts_with(dir))
        .count()
}

#[tokio::test]
async fn search_ends_with_its_connection_or_session() {
    let (mut server, mut client) = served(Transport::Websocket).await;
    let pid = server.server_pid().await;
    let dir = tempfile::tempdir().unwrap();
    fill_with_endless_work(dir.path());
    let params = json!({"path": uri(dir.path()), "pattern": "needle"});
    client.send("fs/search", params.clone()).await;
    let search_started = || match open_below(pid, dir.path()) {
        0 => Err("nothing is open"),
        _ => Ok(()),
    };
    eventually("the search to begin", search_started).await;
    drop(client);
    // The search would take minutes; three checks make a gap between two files unlikely.
    for _ in 0..3 {
        eventually("the search to end", || match open_below(pid, dir.path()) {
            0 => Ok(()),
            open => Err(format!("{open} open")),
        })
        .await;
    }
    // The same when the session ends while the connection stays open.
    let mut client = server.session().await;
    let search = client.send("fs/search", params).await;
    eventually("the search to begin", search_started).await;
    client.ok("session/end", Value::Null).await;
    let answer = client.answer(search).await.unwrap_err();
    assert_eq!(
        (answer.code, answer.message.as_str()),
        (-32600, "the session has ended")
    );
}

#[tokio::test]
async fn running_searches_do_not_delay_other_requests() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let dir = tempfile::tempdir().unwrap();
    fill_with_endless_work(dir.path());
    for _ in 0..20 {
        let params = json!({"path": uri(dir.path()), "pattern": "needle"});
        client.send("fs/search", params).await;
    }
    let params = json!({"path": uri(dir.path())});
    let found = client.ok("fs/getMetadata", params).await;
    assert_eq!(found["isDirectory"], true);
}
