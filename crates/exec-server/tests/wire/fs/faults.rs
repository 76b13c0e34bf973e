//! Errors of the operating system, and paths that do not exist.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use exec_server_testkit::wire::{TestedServer, Transport, chunk};
use serde_json::{Value, json};
use tokio::process::Command;

use super::{FsFixture, MIB, fifo, uri, walk_options};
use crate::program;

/// A call: method, file name, params, error code and part of the message.
type FaultCase = (&'static str, &'static str, Value, i64, &'static str);

async fn check(scene: &mut FsFixture, rows: Vec<FaultCase>) {
    for (method, name, params, code, message) in rows {
        let printed = scene.fails(method, name, params, code).await;
        assert!(printed.contains(message), "{method} {name}: {printed}");
        let path = scene.path(name).display().to_string();
        assert!(
            printed.contains(&path) || !message.starts_with("os error"),
            "{printed}"
        );
    }
}

#[tokio::test]
async fn fs_errors_have_the_code_of_their_cause() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    fs::create_dir_all(scene.path("d/e")).unwrap();
    fs::write(scene.path("f"), "hello").unwrap();
    symlink("loop", scene.path("loop")).unwrap();
    symlink("f", scene.path("lf")).unwrap();
    symlink("d", scene.path("ld")).unwrap();
    symlink("nowhere", scene.path("dangling")).unwrap();
    fifo(&scene.path("fifo"));
    let none = || json!({});
    let x = || json!({"dataBase64": "eA=="});
    let long: &'static str = Box::leak("n".repeat(300).into_boxed_str());
    let rows = vec![
        // ENOENT
        ("fs/readFile", "no", none(), -32004, "os error 2"),
        ("fs/readFile", "dangling", none(), -32004, "os error 2"),
        ("fs/writeFile", "no/f", x(), -32004, "os error 2"),
        ("fs/getMetadata", "no", none(), -32004, "os error 2"),
        ("fs/getMetadata", "dangling", none(), -32004, "os error 2"),
        ("fs/canonicalize", "dangling", none(), -32004, "os error 2"),
        ("fs/readDirectory", "no", none(), -32004, "os error 2"),
        (
            "fs/walk",
            "no",
            json!({"options": walk_options()}),
            -32004,
            "os error 2",
        ),
        (
            "fs/remove",
            "no",
            json!({"force": false}),
            -32004,
            "os error 2",
        ),
        (
            "fs/createDirectory",
            "no/d",
            json!({"recursive": false}),
            -32004,
            "os error 2",
        ),
        // ENOTDIR
        ("fs/readFile", "f/x", none(), -32603, "os error 20"),
        ("fs/writeFile", "f/x", x(), -32603, "os error 20"),
        ("fs/getMetadata", "f/x", none(), -32603, "os error 20"),
        ("fs/readDirectory", "f", none(), -32603, "os error 20"),
        ("fs/createDirectory", "f/x", none(), -32603, "os error 20"),
        ("fs/remove", "f/x", none(), -32603, "os error 20"),
        // EISDIR
        ("fs/writeFile", "d", x(), -32603, "os error 21"),
        // EEXIST
        ("fs/createDirectory", "f", none(), -32603, "os error 17"),
        (
            "fs/createDirectory",
            "d",
            json!({"recursive": false}),
            -32603,
            "os error 17",
        ),
        (
            "fs/createSymlink",
            "f",
            json!({"target": "x"}),
            -32603,
            "os error 17",
        ),
        // ENOTEMPTY
        (
            "fs/remove",
            "d",
            json!({"recursive": false}),
            -32603,
            "os error 39",
        ),
        // ELOOP
        ("fs/readFile", "loop", none(), -32603, "os error 40"),
        ("fs/writeFile", "loop", x(), -32603, "os error 40"),
        ("fs/getMetadata", "loop/x", none(), -32603, "os error 40"),
        // ENAMETOOLONG
        ("fs/readFile", long, none(), -32603, "os error 36"),
        // ENXIO
        ("fs/writeFile", "fifo", x(), -32603, "os error 6"),
        // Paths that are not regular files.
        ("fs/readFile", "d", none(), -32600, "is not a file"),
        ("fs/readFile", "fifo", none(), -32600, "is not a file"),
        // Values above a limit.
        (
            "fs/walk",
            "d",
            json!({"options": {"maxDepth": 0, "maxDirectories": 0, "maxEntries": 1, "followDirectorySymlinks": false}}),
            -32600,
            "filesystem walk limits must be greater than zero",
        ),
        (
            "fs/walk",
            "d",
            json!({"options": {"maxDepth": 65, "maxDirectories": 1, "maxEntries": 1, "followDirectorySymlinks": false}}),
            -32600,
            "filesystem walk limits exceed maximums: depth=64, directories=10000, entries=50000",
        ),
    ];
    check(&mut scene, rows).await;

    // Without following links one message covers all of them.
    let link = "contains a symbolic link";
    let no = || json!({"followSymlinks": false});
    let no_x = || json!({"followSymlinks": false, "dataBase64": "eA=="});
    let once = || json!({"followSymlinks": false, "recursive": false});
    let rows = vec![
        ("fs/readFile", "lf", no(), -32603, link),
        ("fs/readFile", "ld/x", no(), -32603, link),
        ("fs/readFile", "loop", no(), -32603, link),
        ("fs/readFile", "d", no(), -32600, "is not a file"),
        ("fs/readFile", "no", no(), -32004, "os error 2"),
        ("fs/writeFile", "lf", no_x(), -32603, link),
        ("fs/writeFile", "dangling", no_x(), -32603, link),
        ("fs/writeFile", "ld/x", no_x(), -32603, link),
        ("fs/writeFile", "fifo", no_x(), -32600, "is not a file"),
        ("fs/getMetadata", "lf", no(), -32600, link),
        ("fs/getMetadata", "dangling", no(), -32600, link),
        ("fs/getMetadata", "ld/x", no(), -32603, link),
        ("fs/createDirectory", "ld/x", no(), -32603, link),
        ("fs/createDirectory", "ld", no(), -32603, link),
        ("fs/createDirectory", "ld/x", once(), -32603, link),
        ("fs/remove", "lf", once(), -32600, link),
        ("fs/remove", "ld/e", once(), -32603, link),
        (
            "fs/remove",
            "d",
            no(),
            -32603,
            "recursive no-follow removal is unsupported",
        ),
        ("fs/setMetadata", "lf", no(), -32603, link),
    ];
    check(&mut scene, rows).await;

    // EINVAL, and a target that is not empty.
    for (from, to, overwrite, code) in [
        ("d", "d/e/x", false, -32600),
        ("f", "d", true, -32603),
        ("d", "f", true, -32603),
    ] {
        let params = json!({"from": scene.uri(from), "to": scene.uri(to), "overwrite": overwrite});
        let failure = scene.client.refused("fs/rename", params).await;
        assert_eq!(failure.code, code, "{from} {to}: {failure}");
    }
    assert_eq!(scene.read("f").await, b"hello");
    assert_eq!(scene.names().len(), 7, "{:?}", scene.names());
}

#[tokio::test]
async fn fs_methods_resolve_dot_dot_and_reject_foreign_paths() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    fs::create_dir(scene.path("d")).unwrap();
    fs::write(scene.path("f"), "x").unwrap();
    let root = uri(&scene.root);
    for (path, expected) in [
        (format!("{root}/d/../f"), 0),
        (format!("{root}/d/%2e%2e/f"), 0),
        (format!("{root}%2Ff"), 0),
        (format!("{root}/d%2F..%2Ff"), 0),
        (format!("{root}/no%2F..%2Ff"), -32004),
        (format!("{root}/f%00"), -32602),
        ("file:///C:/x".to_owned(), -32600),
        ("file://server/x".to_owned(), -32600),
        ("/etc/passwd".to_owned(), -32602),
        (format!("{root}/f?q"), -32602),
    ] {
        for method in [
            "fs/readFile",
            "fs/getMetadata",
            "fs/canonicalize",
            "fs/hash",
        ] {
            let answer = scene.client.call(method, json!({"path": path})).await;
            let code = answer.as_ref().map_or_else(|failure| failure.code, |_| 0);
            assert_eq!(code, expected, "{method} {path}: {answer:?}");
        }
    }
    // Both ends of a copy or a move are paths.
    for method in ["fs/copy", "fs/rename"] {
        for (good, bad) in [
            ("sourcePath", "destinationPath"),
            ("destinationPath", "sourcePath"),
        ] {
            let rename = |name: &str| match (method, name) {
                ("fs/rename", "sourcePath") => "from".to_owned(),
                ("fs/rename", _) => "to".to_owned(),
                _ => name.to_owned(),
            };
            let params = json!({rename(good): scene.uri("f"), rename(bad): "file:///C:/x", "recursive": true});
            let failure = scene.client.refused(method, params).await;
            assert_eq!(failure.code, -32600, "{failure}");
        }
    }
}

/// A server for which two empty directories are a small and a read-only filesystem.
async fn server_with_small_filesystems(root: &std::path::Path) -> TestedServer {
    let script = "set -e; mount -t tmpfs -o size=1m none \"$ROOT/small\"; \
                  mount -t tmpfs -o ro none \"$ROOT/fixed\"; exec \"$0\" \"$@\"";
    let mut command = Command::new("unshare");
    command
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script])
        .arg(env!("CARGO_BIN_EXE_exec-server"))
        .env("ROOT", root);
    TestedServer::start(Transport::Websocket, command).await
}

#[tokio::test]
async fn full_disk_leaves_the_old_content() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().canonicalize().unwrap();
    fs::create_dir(root.join("small")).unwrap();
    fs::create_dir(root.join("fixed")).unwrap();
    let mut server = server_with_small_filesystems(&root).await;
    let client = server.session().await;
    let mut scene = FsFixture {
        client,
        server,
        root,
        _directory: directory,
    };
    scene.write("small/f", b"old").await;
    let large = || json!({"dataBase64": chunk(vec![1; 2 * MIB])});
    let full = "os error 28";
    check(
        &mut scene,
        vec![("fs/writeFile", "small/f", large(), -32603, full)],
    )
    .await;
    check(
        &mut scene,
        vec![("fs/writeFile", "small/new", large(), -32603, full)],
    )
    .await;
    // Pipelined: the close is sent before the response of the failed write.
    for commit in [false, true] {
        let open = json!({"handleId": "h", "mode": "atomic", "path": scene.uri("small/f")});
        let mut asked = vec![scene.client.queue("fs/open", open)];
        for n in 0..2 {
            let write = json!({"handleId": "h", "offset": n * MIB, "chunk": chunk(vec![1; MIB])});
            asked.push(scene.client.queue("fs/writeBlock", write));
        }
        let close = json!({"handleId": "h", "commit": commit});
        asked.push(scene.client.queue("fs/close", close));
        scene.client.flush().await;
        let mut codes = Vec::new();
        for id in asked {
            let answer = scene.client.answer(id).await;
            codes.push(answer.map_or_else(|failure| failure.code, |_| 0));
        }
        assert_eq!((codes[0], codes[2]), (0, -32603));
        assert_eq!(codes[3], if commit { -32600 } else { 0 });
        assert_eq!(scene.read("small/f").await, b"old");
    }
    fs::write(scene.root.join("large"), vec![1; 2 * MIB]).unwrap();
    let target = scene.root.join("large");
    symlink(&target, scene.root.join("link")).unwrap();
    let params = json!({"sourcePath": scene.uri("link"), "destinationPath": scene.uri("small/c"), "recursive": false});
    // A link is copied as a link; its target does not fit.
    scene.client.ok("fs/copy", params).await;
    let params = json!({"sourcePath": scene.uri("large"), "destinationPath": scene.uri("small/f"), "recursive": false});
    let failure = scene.client.refused("fs/copy", params).await;
    assert_eq!(failure.code, -32603, "{failure}");
    assert_eq!(scene.read("small/f").await, b"old");
    let listed = scene.ok("fs/readDirectory", "small", json!({})).await;
    assert_eq!(listed["entries"].as_array().unwrap().len(), 2, "{listed}");
    // EROFS
    let fixed = "os error 30";
    let x = || json!({"dataBase64": "eA=="});
    let rows = vec![
        ("fs/writeFile", "fixed/f", x(), -32603, fixed),
        ("fs/createDirectory", "fixed/d", json!({}), -32603, fixed),
        (
            "fs/open",
            "fixed/f",
            json!({"handleId": "r", "mode": "replace"}),
            -32603,
            fixed,
        ),
    ];
    check(&mut scene, rows).await;
    // EBUSY: a mount point.
    let rows = vec![(
        "fs/remove",
        "small",
        json!({"recursive": false}),
        -32603,
        "os error 16",
    )];
    check(&mut scene, rows).await;
}

/// The loopback interface has a file for its speed, but no speed.
#[tokio::test]
async fn read_error_of_a_disk_is_reported_and_closes_the_handle() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    let path = "file:///sys/class/net/lo/speed";
    for method in ["fs/readFile", "fs/hash"] {
        let failure = scene.client.refused(method, json!({"path": path})).await;
        assert_eq!(failure.code, -32600, "{failure}");
        assert!(failure.message.contains("os error 22"), "{failure}");
    }
    let open = json!({"path": path, "handleId": "h"});
    scene.client.ok("fs/open", open).await;
    let read = json!({"handleId": "h", "offset": 0, "len": 10});
    let failure = scene.client.refused("fs/readBlock", read.clone()).await;
    assert_eq!(failure.code, -32600, "{failure}");
    // The failed read has closed the handle.
    let failure = scene.client.refused("fs/readBlock", read).await;
    assert_eq!(failure.code, -32004, "{failure}");
}

#[tokio::test]
async fn permission_errors_are_reported_for_an_unprivileged_user() {
    let root = rustix::process::geteuid().is_root();
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let command = if root {
        // The binary may be in a directory that other users cannot read.
        let copy = directory.path().join("exec-server");
        fs::copy(env!("CARGO_BIN_EXE_exec-server"), &copy).unwrap();
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
            .arg(copy);
        command
    } else {
        program()
    };
    let mut server = TestedServer::start(Transport::Websocket, command).await;
    let client = server.session().await;
    let mut scene = FsFixture::of(server, client);
    fs::create_dir_all(scene.path("closed/in")).unwrap();
    fs::write(scene.path("secret"), "s").unwrap();
    fs::write(scene.path("mine"), "m").unwrap();
    for (name, mode) in [("secret", 0o000), ("closed", 0o000), ("mine", 0o666)] {
        fs::set_permissions(scene.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    fs::set_permissions(&scene.root, fs::Permissions::from_mode(0o555)).unwrap();
    let x = || json!({"dataBase64": "eA=="});
    let denied = "os error 13";
    let rows = vec![
        ("fs/readFile", "secret", json!({}), -32600, denied),
        (
            "fs/open",
            "secret",
            json!({"handleId": "h"}),
            -32600,
            denied,
        ),
        ("fs/hash", "secret", json!({}), -32600, denied),
        ("fs/writeFile", "new", x(), -32600, denied),
        (
            "fs/open",
            "new",
            json!({"handleId": "h", "mode": "replace"}),
            -32600,
            denied,
        ),
        (
            "fs/open",
            "mine",
            json!({"handleId": "h", "mode": "atomic"}),
            -32600,
            denied,
        ),
        ("fs/createDirectory", "d", json!({}), -32600, denied),
        (
            "fs/createSymlink",
            "l",
            json!({"target": "x"}),
            -32600,
            denied,
        ),
        ("fs/readDirectory", "closed", json!({}), -32600, denied),
        ("fs/getMetadata", "closed/in", json!({}), -32600, denied),
        (
            "fs/getMetadata",
            "closed/in",
            json!({"followSymlinks": false}),
            -32600,
            denied,
        ),
        ("fs/remove", "mine", json!({}), -32600, denied),
    ];
    check(&mut scene, rows).await;
    if root {
        // EPERM: another user owns the file.
        let rows = vec![(
            "fs/setMetadata",
            "mine",
            json!({"mode": 0}),
            -32600,
            "os error 1",
        )];
        check(&mut scene, rows).await;
    }
    // A file that may be written but not replaced is written in place.
    scene.write("mine", b"longer than before").await;
    scene.write("mine", b"short").await;
    assert_eq!(fs::read(scene.path("mine")).unwrap(), b"short");
    let found = scene
        .ok("fs/walk", ".", json!({"options": walk_options()}))
        .await;
    assert_eq!(found["entries"].as_array().unwrap().len(), 3);
    assert_eq!(found["errors"][0]["path"], scene.uri("closed"));
    let message = found["errors"][0]["message"].as_str().unwrap();
    assert!(message.contains(denied), "{message}");
    for name in ["closed", "."] {
        fs::set_permissions(scene.path(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
}
