//! Tools for files.

use serde_json::{Value, json};

use crate::client::{McpClient, text};

async fn started() -> (tempfile::TempDir, McpClient) {
    let work = tempfile::tempdir().unwrap();
    let client = McpClient::start(work.path(), &[]).await;
    (work, client)
}

#[tokio::test]
async fn write_file_and_read_file_return_exact_content() {
    let (work, mut client) = started().await;
    let lines: String = (1..=5000).map(|line| format!("line {line}\n")).collect();
    let arguments = json!({"path": "new/dir/a.txt", "content": lines});
    let wrote = client.tool("write_file", arguments).await;
    assert_eq!(wrote["bytes"], lines.len());
    assert_eq!(
        std::fs::read_to_string(work.path().join("new/dir/a.txt")).unwrap(),
        lines
    );
    let arguments = json!({"path": "new/dir/a.txt", "offset": 100, "limit": 2});
    let result = client.result("read_file", arguments).await;
    let read = &result["structuredContent"];
    assert_eq!(read["content"], "line 100\nline 101\n");
    assert_eq!(
        (&read["last_line"], &read["next_offset"]),
        (&json!(101), &json!(102))
    );
    assert!(text(&result).ends_with("[more from line 102: read_file with offset 102]\n"));
    // The file is read in parts of limited size, line by line to the end.
    let (mut offset, mut all) = (json!(1), String::new());
    while !offset.is_null() {
        let arguments =
            json!({"path": "new/dir/a.txt", "offset": offset, "max_output_tokens": 2500});
        let read = client.tool("read_file", arguments).await;
        let content = read["content"].as_str().unwrap();
        assert!(content.len() <= 10_000);
        all += content;
        offset = read["next_offset"].clone();
    }
    assert_eq!(all, lines);
    let script = json!({"path": "run.sh", "content": "#!/bin/sh\necho ran\n", "executable": true});
    client.tool("write_file", script).await;
    let ran = client
        .tool("exec_command", json!({"cmd": "./run.sh"}))
        .await;
    assert_eq!(ran["output"], "ran\n");
}

#[tokio::test]
async fn files_that_are_not_text_are_refused_with_size_and_kind() {
    let (work, mut client) = started().await;
    for (content, expected) in [
        (
            &b"\x7fELF\x02\x01\0\0"[..],
            "`f` (8 bytes) is an ELF executable or library, not text;",
        ),
        (
            b"a\nb\0",
            "`f` (4 bytes) is binary data with NUL bytes, not",
        ),
        (
            b"a\nb\xe9\n",
            "`f` (5 bytes) is not UTF-8 text: byte 0xE9 in line 2;",
        ),
    ] {
        std::fs::write(work.path().join("f"), content).unwrap();
        let edit = json!({"path": "f", "old_text": "a", "new_text": "c"});
        for (tool, arguments) in [("read_file", json!({"path": "f"})), ("edit", edit)] {
            let error = client.fails(tool, arguments).await;
            assert!(error.starts_with(expected), "{tool}: {error}");
        }
        assert_eq!(std::fs::read(work.path().join("f")).unwrap(), content);
    }
    // The part that was asked for is text.
    let first = json!({"path": "f", "limit": 1});
    assert_eq!(client.tool("read_file", first).await["content"], "a\n");
}

/// Calls a tool until there is nothing more, as the end of each text says how; returns the texts.
async fn all_parts(
    client: &mut McpClient,
    tool: &str,
    arguments: Value,
    parameter: &str,
) -> String {
    let (mut arguments, mut all) = (arguments, String::new());
    loop {
        let result = client.result(tool, arguments.clone()).await;
        let text = text(&result);
        let Some((part, rest)) = text.rsplit_once(&format!("more: {tool} with {parameter} "))
        else {
            return all + &text;
        };
        let next = rest.strip_suffix("]\n").unwrap();
        arguments[parameter] = serde_json::from_str(next).unwrap();
        let (part, _) = part.rsplit_once('[').unwrap();
        assert!(!part.is_empty(), "{text}");
        all += part;
    }
}

#[tokio::test]
async fn truncated_answers_name_the_call_that_returns_the_rest() {
    let (work, mut client) = started().await;
    let (mut names, mut tree, mut lines) = (String::new(), String::new(), String::new());
    tree += "sub/\n";
    std::fs::create_dir(work.path().join("sub")).unwrap();
    for number in 0..25 {
        let name = format!("sub/f{number:02}");
        std::fs::write(work.path().join(&name), "x\ny\n").unwrap();
        names += &format!("f{number:02}\n");
        tree += &format!("{name}\n");
        lines += &format!("{name}:1: x\n{name}:2: y\n");
    }
    let arguments = json!({"path": "sub", "max_entries": 10});
    assert_eq!(
        all_parts(&mut client, "list_dir", arguments, "after").await,
        names
    );
    let arguments = json!({"depth": 2, "max_entries": 7});
    assert_eq!(
        all_parts(&mut client, "list_dir", arguments, "after").await,
        tree
    );
    let arguments = json!({"pattern": "x|y", "max_matches": 7});
    assert_eq!(
        all_parts(&mut client, "search", arguments, "offset").await,
        lines
    );
    // Matches that have no room are not cut in the middle.
    let arguments = json!({"pattern": "x|y", "max_output_tokens": 20});
    assert_eq!(
        all_parts(&mut client, "search", arguments, "offset").await,
        lines
    );
}

#[tokio::test]
async fn edit_applies_a_patch_completely_or_not_at_all() {
    let (work, mut client) = started().await;
    let path = |name: &str| work.path().join(name);
    std::fs::write(path("a"), "one\ntwo\nthree\n").unwrap();
    std::fs::write(path("b"), "gone\n").unwrap();
    std::fs::write(path("c"), "moved\nkept\n").unwrap();
    let patch = "*** Begin Patch\n*** Update File: a\n one\n-two\n+2\n*** Delete File: b\n\
                 *** Update File: c\n*** Move to: sub/d\n-moved\n+changed\n\
                 *** Add File: sub/e\n+new\n*** End Patch";
    let done = client.tool("edit", json!({"patch": patch})).await;
    assert_eq!(done["files"].as_array().unwrap().len(), 5, "{done}");
    let content = |name: &str| std::fs::read_to_string(path(name)).ok();
    assert_eq!(content("a").unwrap(), "one\n2\nthree\n");
    assert_eq!((content("b"), content("c")), (None, None));
    assert_eq!(content("sub/d").unwrap(), "changed\nkept\n");
    assert_eq!(content("sub/e").unwrap(), "new\n");
    let arguments = json!({"path": "a", "old_text": "three\n", "new_text": "3\n"});
    client.tool("edit", arguments).await;
    assert_eq!(content("a").unwrap(), "one\n2\n3\n");
    // If one change does not apply, no file is changed.
    let patch = "*** Begin Patch\n*** Update File: a\n-one\n+1\n*** Update File: sub/d\n-zzz\n\
                 *** End Patch";
    let printed = client.fails("edit", json!({"patch": patch})).await;
    assert!(
        printed.contains("sub/d") && printed.contains("zzz"),
        "{printed}"
    );
    assert_eq!(content("a").unwrap(), "one\n2\n3\n");
    client.fails("edit", json!({"patch": "no patch"})).await;
    let printed = client
        .fails("edit", json!({"patch": "x", "path": "a"}))
        .await;
    assert!(printed.starts_with("give either `patch`, or"), "{printed}");
    let other_names = json!({"file_path": "a", "old_string": "3", "new_string": "three"});
    client.tool("edit", other_names).await;
    assert_eq!(content("a").unwrap(), "one\n2\nthree\n");
}

#[tokio::test]
async fn list_dir_and_search_return_entries_and_matches() {
    let (work, mut client) = started().await;
    for (name, content) in [
        ("a.rs", "fn main() {}\n"),
        ("sub/b.rs", "// hello\nfn other() {}\n// bye\n"),
        ("sub/c.txt", "fn nothing\n"),
    ] {
        let path = work.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    let result = client.result("list_dir", json!({})).await;
    assert_eq!(text(&result), "a.rs\nsub/\n");
    let listed = client.tool("list_dir", json!({"depth": 2})).await;
    let names: Vec<&str> = listed["entries"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["a.rs", "sub", "sub/b.rs", "sub/c.txt"]);
    let listed = client.tool("list_dir", json!({"max_entries": 1})).await;
    assert_eq!(listed["truncated"], true);
    let arguments = json!({"pattern": "fn \\w+", "globs": ["*.rs"], "context_lines": 1});
    let result = client.result("search", arguments).await;
    let found = &result["structuredContent"];
    assert_eq!(found["matches"].as_array().unwrap().len(), 2, "{found}");
    let text = text(&result);
    assert!(
        text.contains("sub/b.rs-1- // hello\nsub/b.rs:2: fn other() {}\n"),
        "{text}"
    );
    let none = client.tool("search", json!({"pattern": "absent"})).await;
    assert_eq!(none["matches"], json!([]));
}

#[tokio::test]
async fn watch_once_returns_at_a_change_or_timeout() {
    let (work, mut client) = started().await;
    let params = json!({"name": "watch_once", "arguments": {"timeout_ms": 60_000}});
    let id = client.send("tools/call", params).await;
    // The watch starts some time after the call; the writer repeats until one change is seen.
    let path = work.path().to_owned();
    let writer = tokio::spawn(async move {
        for number in 0.. {
            std::fs::write(path.join(format!("f{number}")), "x").unwrap();
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    });
    let answer = client.answer(id).await;
    writer.abort();
    let changes = &answer["result"]["structuredContent"]["changes"];
    assert!(
        changes[0]["path"].as_str().unwrap().starts_with('f'),
        "{answer}"
    );
    let arguments = json!({"path": "/etc", "recursive": false, "timeout_ms": 50});
    let nothing = client.tool("watch_once", arguments).await;
    assert_eq!(nothing["timed_out"], true);
}
