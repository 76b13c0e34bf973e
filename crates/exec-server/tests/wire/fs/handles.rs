//! File handles: reading and writing in blocks.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

use exec_server_testkit::proc::eventually;
use exec_server_testkit::wire::{Transport, bytes, chunk};
use serde_json::json;

use super::{FsFixture, MIB, fifo};
use crate::flow::still;
use crate::over_all;

over_all! {
    blocks_written_through_a_handle_read_back_exactly,
    atomic_write_becomes_visible_only_at_commit,
}

async fn blocks_written_through_a_handle_read_back_exactly(on: Transport) {
    let mut scene = FsFixture::new(on).await;
    let data: Vec<u8> = (0..3 * MIB + 5).map(|n| ((n * 31) >> 3) as u8).collect();
    scene
        .ok("fs/open", "f", json!({"handleId": "w", "mode": "replace"}))
        .await;
    let blocks = data.chunks(MIB).enumerate().rev();
    for (n, block) in blocks {
        let params = json!({"handleId": "w", "offset": n * MIB, "chunk": chunk(block)});
        assert_eq!(scene.client.ok("fs/writeBlock", params).await, json!({}));
    }
    scene.client.ok("fs/close", json!({"handleId": "w"})).await;
    assert!(fs::read(scene.path("f")).unwrap() == data);

    let opened = scene.ok("fs/open", "f", json!({"handleId": "r"})).await;
    assert_eq!(opened, json!({"handleId": "r"}));
    for (offset, len) in [
        (0, MIB),
        (3 * MIB, MIB),
        (3 * MIB, 5),
        (3 * MIB + 5, 1),
        (1, 200_000),
        (7, 1),
        (1 << 40, 10),
    ] {
        let params = json!({"handleId": "r", "offset": offset, "len": len});
        let block = scene.client.ok("fs/readBlock", params).await;
        let from = offset.min(data.len());
        let to = (offset + len).min(data.len());
        assert!(bytes(&block["chunk"]) == data[from..to], "{offset} {len}");
        assert_eq!(block["eof"], to - from < len, "{offset} {len}");
    }
}

async fn atomic_write_becomes_visible_only_at_commit(on: Transport) {
    let mut scene = FsFixture::new(on).await;
    fs::write(scene.path("f"), "old").unwrap();
    fs::set_permissions(scene.path("f"), fs::Permissions::from_mode(0o600)).unwrap();
    symlink("f", scene.path("link")).unwrap();
    for (commit, expected) in [(false, "old"), (true, "new content")] {
        let open = json!({"handleId": "w", "mode": "atomic"});
        scene.ok("fs/open", "link", open).await;
        let write = json!({"handleId": "w", "offset": 0, "chunk": chunk("new content")});
        scene.client.ok("fs/writeBlock", write).await;
        assert_eq!(fs::read(scene.path("f")).unwrap(), b"old");
        let close = json!({"handleId": "w", "commit": commit});
        assert_eq!(scene.client.ok("fs/close", close).await, json!({}));
        assert_eq!(fs::read_to_string(scene.path("f")).unwrap(), expected);
        assert_eq!(scene.names(), ["f", "link"], "nothing temporary is left");
    }
    assert_eq!(fs::metadata(scene.path("f")).unwrap().mode() & 0o777, 0o600);
    // A file that does not exist yet is created.
    let open = json!({"handleId": "w", "mode": "atomic"});
    scene.ok("fs/open", "new", open).await;
    let close = json!({"handleId": "w", "commit": true});
    scene.client.ok("fs/close", close).await;
    assert_eq!(fs::read(scene.path("new")).unwrap(), b"");
}

#[tokio::test]
async fn update_keeps_the_bytes_it_does_not_write() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    fs::write(scene.path("f"), "0123456789").unwrap();
    for (name, expected) in [("f", "01xx456789"), ("new", "\0\0xx")] {
        let open = json!({"handleId": "u", "mode": "update"});
        scene.ok("fs/open", name, open).await;
        let write = json!({"handleId": "u", "offset": 2, "chunk": chunk("xx")});
        scene.client.ok("fs/writeBlock", write).await;
        scene.client.ok("fs/close", json!({"handleId": "u"})).await;
        assert_eq!(fs::read_to_string(scene.path(name)).unwrap(), expected);
    }
}

#[tokio::test]
async fn open_rejects_missing_special_and_unsupported_files() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    fs::write(scene.path("f"), "x").unwrap();
    fs::create_dir(scene.path("d")).unwrap();
    symlink("nowhere", scene.path("dangling")).unwrap();
    fifo(&scene.path("fifo"));
    for (name, mode, code) in [
        ("no", "read", -32004),
        ("dangling", "read", -32004),
        ("no/f", "replace", -32004),
        ("no/f", "update", -32004),
        ("no/f", "atomic", -32004),
        ("f/x", "atomic", -32603),
        ("f", "append", -32602),
    ] {
        let open = json!({"handleId": "h", "mode": mode});
        scene.fails("fs/open", name, open, code).await;
    }
    for name in ["d", "fifo"] {
        for mode in ["read", "replace", "update", "atomic"] {
            let open = json!({"handleId": "h", "mode": mode});
            let message = scene.fails("fs/open", name, open, -32600).await;
            assert!(message.ends_with("is not a file"), "{message}");
        }
    }
    // The failed opens did not use up the id.
    scene.ok("fs/open", "f", json!({"handleId": "h"})).await;
    let write = json!({"handleId": "h", "offset": 0, "chunk": "eA=="});
    let failure = scene.client.refused("fs/writeBlock", write).await;
    assert_eq!(failure.code, -32603, "{failure}");
    assert!(failure.message.contains("os error 9"), "{failure}");
    let read = json!({"handleId": "h", "offset": 0, "len": 1});
    scene.client.ok("fs/readBlock", read).await;
}

#[tokio::test]
async fn handles_are_limited_in_number_id_and_block_length() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    fs::write(scene.path("f"), "x").unwrap();
    for n in 0..128 {
        let mode = ["read", "update", "atomic"][n % 3];
        let open = json!({"handleId": n.to_string(), "mode": mode});
        scene.ok("fs/open", "f", open).await;
    }
    let message = scene
        .fails("fs/open", "f", json!({"handleId": "more"}), -32600)
        .await;
    assert!(message.contains("at most 128 file handles"), "{message}");
    scene
        .client
        .ok("fs/close", json!({"handleId": "127"}))
        .await;
    let message = scene
        .fails("fs/open", "f", json!({"handleId": "5"}), -32600)
        .await;
    assert_eq!(message, "file handle `5` already exists");
    let long = "é".repeat(17);
    let message = scene
        .fails("fs/open", "f", json!({"handleId": long}), -32600)
        .await;
    assert_eq!(message, "file handle ID must not exceed 32 bytes");
    let longest = "x".repeat(32);
    scene.ok("fs/open", "f", json!({"handleId": longest})).await;

    let mut refuse = async |method: &str, params, code, message: &str| {
        let failure = scene.client.refused(method, params).await;
        assert_eq!((failure.code, failure.message.as_str()), (code, message));
    };
    let read = |id: &str, len: usize| json!({"handleId": id, "offset": 0, "len": len});
    let write =
        |id: &str, len: usize| json!({"handleId": id, "offset": 0, "chunk": chunk(vec![0; len])});
    for len in [0, MIB + 1] {
        let message = "file read block length must be between 1 and 1048576";
        refuse("fs/readBlock", read("0", len), -32600, message).await;
        let message = "file write block length must be between 1 and 1048576";
        refuse("fs/writeBlock", write("1", len), -32600, message).await;
    }
    let message = "unknown file handle `127`";
    refuse("fs/readBlock", read("127", 1), -32004, message).await;
    refuse("fs/writeBlock", write("127", 1), -32004, message).await;
    scene.client.ok("fs/readBlock", read("0", 1)).await;
    scene
        .client
        .ok("fs/close", json!({"handleId": "127"}))
        .await;
}

/// Long blocks are decoded on another thread, with the same checks.
#[tokio::test]
async fn invalid_base64_is_rejected_in_short_and_long_blocks() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    let open = json!({"handleId": "h", "mode": "replace"});
    scene.ok("fs/open", "f", open).await;
    for len in [1000, 200_000, MIB] {
        let good = chunk(vec![b'g'; len]);
        let write = json!({"handleId": "h", "offset": 0, "chunk": good});
        scene.client.ok("fs/writeBlock", write).await;
        let good = good.as_str().unwrap();
        for bad in [
            format!("*{}", &good[1..]),
            format!("{}*", &good[..good.len() - 1]),
            good[..good.len() - 1].to_owned(),
            format!("QQ=={good}"),
        ] {
            let write = json!({"handleId": "h", "offset": 0, "chunk": bad});
            let failure = scene.client.refused("fs/writeBlock", write).await;
            assert_eq!(failure.code, -32602, "{len} {failure}");
            assert!(failure.message.contains("base64"), "{failure}");
        }
        let other = json!({"handleId": "x", "offset": 0, "chunk": good});
        let failure = scene.client.refused("fs/writeBlock", other).await;
        assert_eq!(failure.code, -32004, "{failure}");
        let late = json!({"handleId": "h", "chunk": good});
        let failure = scene.client.refused("fs/writeBlock", late).await;
        assert_eq!(failure.code, -32602, "{failure}");
        assert!(failure.message.contains("offset"), "{failure}");
    }
    scene.client.ok("fs/close", json!({"handleId": "h"})).await;
    assert!(fs::read(scene.path("f")).unwrap() == vec![b'g'; MIB]);
}

/// All calls are pipelined.
#[tokio::test]
async fn calls_on_one_handle_run_in_order() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    for round in 0..20 {
        let path = scene.uri("f");
        let mut writes = vec![scene.client.queue(
            "fs/open",
            json!({"handleId": "h", "path": path, "mode": "replace"}),
        )];
        for n in 0..50 {
            let text = format!("{round:03} {n:03}");
            let write = json!({"handleId": "h", "offset": 0, "chunk": chunk(text)});
            writes.push(scene.client.queue("fs/writeBlock", write));
        }
        writes.push(scene.client.queue("fs/close", json!({"handleId": "h"})));
        // The id is free again, for another file.
        let mut reads = vec![
            scene
                .client
                .queue("fs/open", json!({"handleId": "h", "path": scene.uri("no")})),
        ];
        let read = json!({"handleId": "h", "offset": 0, "len": 100});
        reads.push(scene.client.queue("fs/readBlock", read));
        scene.client.flush().await;
        for id in writes {
            scene.client.answer(id).await.unwrap();
        }
        for id in reads {
            assert_eq!(scene.client.answer(id).await.unwrap_err().code, -32004);
        }
        let expected = format!("{round:03} 049");
        assert_eq!(fs::read_to_string(scene.path("f")).unwrap(), expected);
    }
}

#[tokio::test]
async fn many_concurrent_block_reads_all_return() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    let file = fs::File::create(scene.path("f")).unwrap();
    file.set_len(200 * MIB as u64).unwrap();
    // More requests than are answered at a time, over two handles.
    let mut asked = Vec::new();
    for handle in ["a", "b"] {
        scene.ok("fs/open", "f", json!({"handleId": handle})).await;
        for n in 0..60 {
            let params = json!({"handleId": handle, "offset": n * MIB, "len": MIB});
            asked.push(scene.client.queue("fs/readBlock", params));
        }
    }
    scene.client.flush().await;
    for id in asked {
        let block = scene.client.answer(id).await.unwrap();
        assert!(bytes(&block["chunk"]) == vec![0; MIB]);
    }
}

#[tokio::test]
async fn closed_connection_removes_uncommitted_writes() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    fs::write(scene.path("f"), "old").unwrap();
    let mut other = scene.server.session().await;
    for handle in ["a", "b"] {
        let open = json!({"handleId": handle, "mode": "atomic", "path": scene.uri("f")});
        other.ok("fs/open", open).await;
    }
    for n in 0..20 {
        let write = json!({"handleId": "a", "offset": n * MIB, "chunk": chunk(vec![1; MIB])});
        other.queue("fs/writeBlock", write);
    }
    other.flush().await;
    assert_eq!(scene.names().len(), 3);
    drop(other);
    let root = scene.root.clone();
    eventually("the temporary file is removed", || {
        let names = super::names(&root);
        if names == ["f"] {
            Ok(())
        } else {
            Err(names.join(" "))
        }
    })
    .await;
    assert_eq!(scene.read("f").await, b"old");
}

#[tokio::test]
async fn server_exit_removes_uncommitted_writes() {
    for on in [Transport::Websocket, Transport::Unix, Transport::Stdio] {
        let mut scene = FsFixture::new(on).await;
        fs::write(scene.path("f"), "old").unwrap();
        let open = json!({"handleId": "a", "mode": "atomic"});
        scene.ok("fs/open", "f", open).await;
        assert_eq!(scene.names().len(), 2);
        let pid = i32::try_from(scene.server.guardian_pid()).unwrap();
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        scene.server.ended().await;
        assert_eq!(scene.names(), ["f"], "{on:?}");
    }
}

/// Three hashes that would take minutes, and other requests meanwhile.
#[tokio::test]
async fn hash_delays_nothing_and_ends_with_its_connection() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    let pid = scene.server.server_pid().await;
    let file = fs::File::create(scene.path("sparse")).unwrap();
    file.set_len(1 << 40).unwrap();
    fs::write(scene.path("f"), "x").unwrap();
    let mut other = scene.server.session().await;
    let params = json!({"path": scene.uri("sparse")});
    let slow: Vec<i64> = (0..3)
        .map(|_| other.queue("fs/hash", params.clone()))
        .collect();
    other.flush().await;
    let open = json!({"path": scene.uri("f"), "handleId": "h"});
    other.ok("fs/open", open).await;
    for _ in 0..20 {
        let read = json!({"handleId": "h", "offset": 0, "len": 1});
        other.ok("fs/readBlock", read).await;
        assert_eq!(scene.read("f").await, b"x");
    }
    let started = exec_server_testkit::wire::StartBuilder::sh("p", "exit 3");
    assert_eq!(other.run(started).await.exit_code(), 3);
    assert!(slow.iter().all(|id| !other.has_answer(*id)));
    drop(other);
    // Every thread of the server is idle again: no hash is computed any more.
    eventually("the server is at rest", still(pid)).await;
    assert_eq!(scene.read("f").await, b"x");
}
