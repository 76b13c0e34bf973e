//! Every extension that the server lists is implemented.

use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt, symlink};

use exec_server_testkit::site::{HttpSite, answer};
use exec_server_testkit::wire::{StartBuilder, Transport, WireClient};
use serde_json::{Value, json};

use crate::{over_all, served};

over_all! {
    every_listed_extension_works,
    initialize_and_environment_info_return_the_same_environment,
}

async fn initialize_and_environment_info_return_the_same_environment(on: Transport) {
    let (_server, mut client) = served(on).await;
    let info = client.ok("environment/info", Value::Null).await;
    assert_eq!(client.session["environmentInfo"], info);
    assert_eq!(info["platformOs"], "linux");
    assert_eq!(
        client.ok("environment/status", json!({})).await,
        json!({"status": "ready"})
    );
}

/// Tries each name that the server lists with the smallest request that shows its effect; a name
/// that is unknown to this test fails it.
async fn every_listed_extension_works(on: Transport) {
    let (_server, mut client) = served(on).await;
    let info = client.ok("environment/info", Value::Null).await;
    let names: Vec<&str> = info["extensions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap())
        .collect();
    assert!(names.len() > 20, "{names:?}");
    assert!(
        names.is_sorted() && names.contains(&"session/end"),
        "{names:?}"
    );
    for name in &names {
        // These methods end the session, so they are probed last.
        if !name.starts_with("session/end") {
            probe(&mut client, name).await;
        }
    }
    probe(&mut client, "session/end").await;
    client.initialize(json!({"clientName": "test"})).await;
    probe(&mut client, "session/end#graceMs").await;
}

async fn probe(client: &mut WireClient, name: &str) {
    let id = format!("for {name}");
    let here = |script: &str| StartBuilder::sh(&id, script);
    let known = json!({"processId": id});
    match name {
        "initialize#detachGraceMs" => assert!(client.session["detachGraceMs"].is_u64()),
        "initialize#resumeKey" => match &client.session["resumeKey"] {
            // Over a pipe there is no session to resume.
            Value::Null => assert_eq!(client.session["detachGraceMs"], 0),
            key => assert_eq!(key.as_str().unwrap().len(), 32),
        },
        "initialize#serverInstance" => {
            assert_eq!(client.session["serverInstance"].as_str().unwrap().len(), 32);
            assert!(client.session["serverStartedAtMs"].as_u64().unwrap() > 1_700_000_000_000);
        }
        "session/end#graceMs" => {
            let directory = tempfile::tempdir().unwrap();
            let file = directory.path().join("said");
            let file = file.to_str().unwrap();
            let script = format!(
                "trap 'echo bye > {file}; exit' TERM; echo up; \
                                  while :; do sleep 0.02; done"
            );
            client.start(here(&script)).await;
            client.wrote(&id, "stdout", "up").await;
            let ended = client.ok("session/end", json!({"graceMs": 60_000})).await;
            assert_eq!(ended, json!({}));
            assert_eq!(std::fs::read_to_string(file).unwrap(), "bye\n");
        }
        "session/end" => assert_eq!(client.ok(name, Value::Null).await, json!({})),
        name if name.starts_with("fs/getMetadata#")
            || name.starts_with("fs/copy#")
            || name.starts_with("fs/createDirectory#")
            || name.starts_with("fs/setMetadata#")
            || name.starts_with("fs/open#")
            || name.starts_with("fs/readDirectory#")
            || name.starts_with("fs/walk#")
            || name.starts_with("fs/writeFile#")
            || matches!(
                name,
                "fs/close#commit" | "fs/createSymlink" | "fs/hash" | "fs/rename" | "fs/setMetadata"
            ) =>
        {
            probe_files(client, name).await;
        }
        "fs/search" => {
            let params = json!({"path": "file:///proc/version", "pattern": "^Linux"});
            assert_eq!(client.ok(name, params).await["matches"][0]["column"], 1);
        }
        "fs/watch" | "fs/changed" | "fs/unwatch" => {
            let dir = tempfile::tempdir().unwrap();
            let path = format!("file://{}", dir.path().display());
            let params = json!({"watchId": id, "path": path});
            assert_eq!(client.ok("fs/watch", params).await, json!({"path": path}));
            std::fs::write(dir.path().join("x"), "").unwrap();
            let reported = client.notice("fs/changed").await;
            assert_eq!(
                (&reported["watchId"], &reported["seq"]),
                (&json!(id), &json!(1))
            );
            let ended = client.ok("fs/unwatch", json!({"watchId": id})).await;
            assert_eq!(ended, json!({}));
            client.notices();
        }
        "http/cancel" => {
            let params = json!({"requestId": "nobody"});
            assert_eq!(client.ok(name, params).await, json!({"cancelled": false}));
        }
        "http/request#decompress" => {
            let site = HttpSite::saying(answer("200 OK", "", "")).await;
            let params = json!({
                "method": "GET", "url": site.url("/"), "requestId": id, "decompress": true
            });
            client.ok("http/request", params).await;
            assert!(site.requests()[0].header("accept-encoding").is_some());
        }
        "process/closeStdin" => {
            client.start(here("cat").piped()).await;
            assert_eq!(client.ok(name, known).await, json!({"status": "accepted"}));
            assert_eq!(client.closed(&id).await.exit_code(), 0);
        }
        "process/resize" => {
            client.start(here("sleep 600").tty()).await;
            let params = json!({"processId": id, "rows": 3, "cols": 4});
            assert_eq!(client.ok(name, params).await, json!({}));
        }
        "process/wait" => {
            client.start(here("exit 3")).await;
            assert_eq!(client.ok(name, known).await["exitCode"], 3);
        }
        "process/waitFor" => {
            client.start(here("echo up; sleep 600")).await;
            let params = json!({"processId": id, "any": [{"exit": true}, {"regex": "u(p)"}]});
            let fired = client.ok(name, params).await;
            assert_eq!(
                (&fired["fired"], &fired["match"]["text"]),
                (&json!(1), &json!("up"))
            );
        }
        "process/snapshot" => {
            client.start(here("exit 3")).await;
            client.closed(&id).await;
            assert_eq!(client.ok(name, known).await["exitCode"], 3);
        }
        "process/waitFor#sessionId" => {
            client.run(here("exit 3")).await;
            for (session, known) in [
                (client.session_id().to_owned(), true),
                ("nobody".to_owned(), false),
            ] {
                let any = json!([{"exit": true}]);
                let params = json!({"processId": id, "sessionId": session, "any": any});
                match known {
                    true => assert_eq!(client.ok("process/waitFor", params).await["exitCode"], 3),
                    false => drop(client.refused("process/waitFor", params).await),
                }
            }
        }
        "process/read#sessionId" | "process/snapshot#sessionId" | "process/wait#sessionId" => {
            let method = name.split_once('#').unwrap().0;
            client.run(here("exit 3")).await;
            let session = client.session_id();
            let params = json!({"processId": id, "sessionId": session});
            assert_eq!(client.ok(method, params).await["exitCode"], 3);
            // A server that ignores the field would find the process all the same.
            let params = json!({"processId": id, "sessionId": "nobody"});
            client.refused(method, params).await;
        }
        "process/list" => assert!(client.ok(name, json!({})).await["processes"].is_array()),
        "process/list#all" => {
            client.start(here("sleep 600")).await;
            let listed = client.ok("process/list", json!({"all": true})).await;
            let listed = listed["processes"].as_array().unwrap();
            assert!(
                listed.iter().all(|one| one["sessionId"].is_string()),
                "{listed:?}"
            );
        }
        "process/pauseOutput" => {
            client.start(here("read x; echo late").piped()).await;
            let pause = json!({"processId": id, "paused": true});
            assert_eq!(client.ok(name, pause.clone()).await, json!({}));
            // Idempotent.
            assert_eq!(client.ok(name, pause).await, json!({}));
            let line = json!({"processId": id, "chunk": "Cg==", "writeId": "w"});
            client.ok("process/write", line).await;
            // The process ends, but no notification is sent.
            let until = json!({"processId": id, "until": "closed"});
            client.ok("process/wait", until).await;
            assert_eq!(client.notices(), []);
            let resume = json!({"processId": id, "paused": false});
            assert_eq!(client.ok(name, resume).await, json!({}));
            assert_eq!(client.closed(&id).await.text("stdout"), "late\n");
            let unknown = json!({"processId": "unknown", "paused": true});
            assert_eq!(client.refused(name, unknown).await.code, -32600);
        }
        "process/read#evicted" => {
            client.run(here("head -c 3000000 /dev/zero")).await;
            let read = client.ok("process/read", known).await;
            assert!(read["evicted"]["bytes"].as_u64().unwrap() > 1_000_000);
        }
        "process/closed#inheritedOutput" => {
            let closed = client.run(here("true")).await.closed.clone().unwrap();
            assert_eq!(closed["inheritedOutput"], false);
        }
        "process/exited#usage" => {
            let exited = client.run(here("true")).await.exited.clone().unwrap();
            assert!(exited["usage"]["maxRssBytes"].as_u64().unwrap() > 0);
        }
        "process/start#enforcement" | "process/exited#denials" => {
            let entries = json!([
                {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"}
            ]);
            let sandbox = json!({
                "permissions": {
                    "type": "managed",
                    "file_system": {"type": "restricted", "entries": entries},
                    "network": "restricted"
                },
                "windowsSandboxLevel": "disabled"
            });
            let script = "echo x > /etc/exec-server-was-here";
            let started = client.start(here(script).with("sandbox", sandbox)).await;
            assert_eq!(started["enforcement"]["level"], "full");
            let exited = client.closed(&id).await.exited.clone().unwrap();
            assert_eq!(exited["sandboxDenied"], true, "{exited}");
            assert!(!exited["denials"].as_array().unwrap().is_empty());
        }
        "process/signal#scope" => {
            client.start(here("sleep 600")).await;
            let params = json!({"processId": id, "signal": "terminate", "scope": "tree"});
            assert_eq!(client.ok("process/signal", params).await, json!({}));
            assert_eq!(client.closed(&id).await.exit_code(), 143);
        }
        "process/signal#sessionId" => {
            client.start(here("sleep 600")).await;
            let session = client.session_id();
            let params = json!({"processId": id, "signal": "kill", "sessionId": session});
            client.ok("process/signal", params).await;
            assert_eq!(client.closed(&id).await.exit_code(), 137);
        }
        "process/start#delivery" => {
            let seen = client.run(here("echo x").with("delivery", "pull")).await;
            assert!(seen.output.is_empty(), "{seen:?}");
        }
        "process/start#listDescendants" => {
            let script = "sleep 600 >/dev/null 2>&1 & until pgrep -P $$ sleep; do :; done";
            let start = here(script).with("listDescendants", true);
            let closed = client.run(start).await.closed.clone().unwrap();
            assert_eq!(closed["descendants"][0]["command"], "sleep 600", "{closed}");
            assert!(closed["descendants"][0]["pid"].is_i64(), "{closed}");
        }
        "process/start#limits" => {
            let limits = json!({"openFiles": 77});
            let seen = client.run(here("ulimit -n").with("limits", limits)).await;
            assert_eq!(seen.text("stdout"), "77\n");
        }
        "process/start#size" => {
            let size = json!({"rows": 33, "cols": 111});
            let seen = client.run(here("stty size").tty().with("size", size)).await;
            assert_eq!(seen.text("pty"), "33 111\r\n");
        }
        "process/start#startId" => {
            let named = || here("echo $$; sleep 600").with("startId", "once");
            let first = client.start(named()).await;
            assert_eq!(client.start(named()).await, first);
            let other = here("true").with("startId", "twice");
            client.refused("process/start", other.0).await;
        }
        "process/start#timeoutMs" => {
            let seen = client.run(here("sleep 600").with("timeoutMs", 1)).await;
            assert_eq!(seen.exited.as_ref().unwrap()["timedOut"], true);
        }
        "process/terminate#mode" => {
            client
                .start(here(
                    "trap 'exit 9' TERM; echo up; while :; do sleep 0.1; done",
                ))
                .await;
            client.wrote(&id, "stdout", "up").await;
            let mode = json!({"type": "graceful", "timeoutMs": 60_000});
            client
                .ok("process/terminate", json!({"processId": id, "mode": mode}))
                .await;
            assert_eq!(client.closed(&id).await.exit_code(), 9);
        }
        "process/terminate#wait" => {
            client.start(here("sleep 600")).await;
            let params = json!({"processId": id, "wait": true});
            assert_eq!(client.ok("process/terminate", params).await["gone"], true);
        }
        "process/terminate#sessionId" => {
            client.start(here("sleep 600")).await;
            let params = json!({"processId": id, "sessionId": client.session_id()});
            assert_eq!(
                client.ok("process/terminate", params).await["running"],
                true
            );
        }
        "process/start#graceMs" => {
            let stubborn = here("trap '' TERM; sleep 600; sleep 600");
            // The pause is long enough for the shell to set its trap.
            let limited = stubborn.with("timeoutMs", 1_000).with("graceMs", 1);
            assert_eq!(client.run(limited).await.exit_code(), 137);
        }
        // Both notifications are awaited by name.
        "command/exec" | "command/exec/exited" | "command/exec/outputDelta" => {
            let params = json!({
                "processId": id, "argv": ["/bin/echo", "x"], "cwd": "/", "env": {}, "tty": false,
            });
            assert_eq!(client.ok("command/exec", params).await["running"], true);
            let seen = client.exited(&id).await;
            assert_eq!((seen.exit_code(), seen.text("stdout").as_str()), (0, "x\n"));
        }
        "command/exec/write" => {
            client.start(here("read line; exit 5").tty()).await;
            let params = json!({"processId": id, "chunk": "Cg=="});
            assert_eq!(client.ok(name, params).await, json!({"accepted": true}));
            assert_eq!(client.closed(&id).await.exit_code(), 5);
        }
        "command/exec/terminate" => {
            client.start(here("sleep 600")).await;
            assert_eq!(client.ok(name, known).await, json!({"running": true}));
        }
        other => panic!("no test of the extension {other}"),
    }
}

/// Like [`probe`], for the extensions of `fs/*`.
async fn probe_files(client: &mut WireClient, name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let uri = |name: &str| format!("file://{}/{name}", root.display());
    let odd = root.join(std::ffi::OsStr::from_bytes(b"\xff"));
    std::fs::write(root.join("f"), "abc").unwrap();
    symlink("f", root.join("l")).unwrap();
    let found = async |client: &mut WireClient, path: &str| {
        client
            .ok("fs/getMetadata", json!({"path": uri(path)}))
            .await
    };
    match name.split_once('#') {
        Some(("fs/getMetadata", "symlinkTarget")) => {
            assert_eq!(found(client, "l").await["symlinkTarget"], "f");
        }
        Some(("fs/getMetadata", field)) => assert!(found(client, "f").await[field].is_u64()),
        Some(("fs/open", "identity")) => {
            let mut identities = Vec::new();
            for (handle, path) in [("1", "f"), ("2", "l"), ("3", "other")] {
                std::fs::write(root.join("other"), "").unwrap();
                let open = json!({"handleId": handle, "path": uri(path), "identity": true});
                identities.push(client.ok("fs/open", open).await["identity"].clone());
                client.ok("fs/close", json!({"handleId": handle})).await;
            }
            assert!(identities[0].is_string());
            assert_eq!(identities[0], identities[1]);
            assert_ne!(identities[0], identities[2]);
        }
        Some(("fs/open", "createMode")) => {
            let open = json!({
                "handleId": "h", "path": uri("new"), "mode": "update", "createMode": 0o600,
            });
            client.ok("fs/open", open).await;
            client.ok("fs/close", json!({"handleId": "h"})).await;
            assert_eq!(found(client, "new").await["mode"], 0o600);
        }
        Some(("fs/createDirectory", _)) => {
            let params = json!({"path": uri("d"), "createMode": 0o750});
            client.ok("fs/createDirectory", params).await;
            assert_eq!(found(client, "d").await["mode"], 0o750);
        }
        Some(("fs/copy", _)) => {
            std::fs::write(root.join("other"), "").unwrap();
            for to in ["new", "other", "other"] {
                let params = json!({
                    "sourcePath": uri("f"), "destinationPath": uri(to), "recursive": false,
                    "hardLink": true,
                });
                client.ok("fs/copy", params).await;
                let inode = found(client, "f").await["inode"].clone();
                assert_eq!(found(client, to).await["inode"], inode);
            }
            assert_eq!(found(client, "f").await["hardLinks"], 3);
            assert_eq!(std::fs::read_dir(&root).unwrap().count(), 4);
        }
        Some((method @ ("fs/writeFile" | "fs/setMetadata"), "owner")) => {
            let owner = json!({"uid": 4321, "gid": 8765});
            let mut params = json!({"path": uri("f"), "owner": owner, "mode": 0o4755});
            if method == "fs/writeFile" {
                params["dataBase64"] = "".into();
            }
            client.ok(method, params).await;
            let found = found(client, "f").await;
            let is_kept = found["uid"] == 4321 && found["gid"] == 8765;
            let mode = if is_kept { 0o4755 } else { 0o755 };
            assert_eq!(found["mode"], mode, "{found}");
            assert!(is_kept || !rustix::process::geteuid().is_root(), "{found}");
        }
        Some(("fs/writeFile", "createMode")) => {
            for (name, mode) in [("new", 0o600), ("f", 0o644)] {
                std::fs::set_permissions(root.join("f"), PermissionsExt::from_mode(0o644)).unwrap();
                let params = json!({"path": uri(name), "dataBase64": "", "createMode": 0o600});
                client.ok("fs/writeFile", params).await;
                assert_eq!(found(client, name).await["mode"], mode, "{name}");
            }
        }
        Some(("fs/readDirectory", "metadata")) => {
            let params = json!({"path": uri(""), "links": true, "metadata": true});
            let listed = client.ok("fs/readDirectory", params).await;
            for entry in listed["entries"].as_array().unwrap() {
                let name = entry["fileName"].as_str().unwrap();
                let stat = std::fs::symlink_metadata(root.join(name)).unwrap();
                let expected = json!({
                    "size": stat.len(), "mode": stat.mode() & 0o7777, "uid": stat.uid(),
                    "gid": stat.gid(), "inode": stat.ino(), "device": stat.dev(),
                    "hardLinks": stat.nlink(), "allocated": stat.blocks() * 512,
                    "modifiedAtMs": stat.mtime() * 1000 + stat.mtime_nsec() / 1_000_000,
                });
                assert_eq!(entry["metadata"], expected, "{name}");
            }
        }
        Some(("fs/open" | "fs/close", mode)) => {
            let mode = if mode == "commit" { "atomic" } else { mode };
            let open = json!({"handleId": "h", "path": uri("f"), "mode": mode});
            client.ok("fs/open", open).await;
            let block = json!({"handleId": "h", "offset": 0, "chunk": "eHk="});
            client.ok("fs/writeBlock", block).await;
            client
                .ok("fs/close", json!({"handleId": "h", "commit": true}))
                .await;
            let expected: &[u8] = if mode == "atomic" { b"xy" } else { b"xyc" };
            assert_eq!(std::fs::read(root.join("f")).unwrap(), expected);
        }
        Some(("fs/readDirectory", "path")) => {
            std::fs::remove_file(root.join("f")).unwrap();
            std::fs::write(odd, "").unwrap();
            let listed = client
                .ok("fs/readDirectory", json!({"path": uri("")}))
                .await;
            assert_eq!(listed["entries"][0]["path"], uri("%FF"));
        }
        Some((method, "limit" | "after" | "next")) => {
            let options = json!({"maxDepth": 0, "maxDirectories": 1, "maxEntries": 9,
                "followDirectorySymlinks": false});
            std::fs::write(root.join("g"), "").unwrap();
            let mut params = json!({"path": uri(""), "options": options, "limit": 1});
            let first = client.ok(method, params.clone()).await;
            assert_eq!(first["entries"].as_array().unwrap().len(), 1);
            params["after"] = first["next"].clone();
            let second = client.ok(method, params).await;
            assert_eq!(second["entries"].as_array().unwrap().len(), 1);
            assert_ne!(first["entries"], second["entries"]);
        }
        Some(("fs/readDirectory", _)) => {
            std::fs::remove_file(root.join("f")).unwrap();
            let listed = client
                .ok("fs/readDirectory", json!({"path": uri(""), "links": true}))
                .await;
            let dangling = json!({"entries": [{
                "fileName": "l", "isDirectory": false, "isFile": false, "symlinkTarget": "f",
            }]});
            assert_eq!(listed, dangling);
        }
        Some(("fs/writeFile", field)) => {
            let mut params = json!({"path": uri("f"), "dataBase64": ""});
            params[field] = json!(0o640);
            client.ok("fs/writeFile", params).await;
            let found = found(client, "f").await;
            assert!(
                found["mode"] == 0o640 || found["modifiedAtMs"] == 0o640,
                "{found}"
            );
        }
        _ => {
            let (params, result) = match name {
                "fs/createSymlink" => (json!({"path": uri("new"), "target": "f"}), json!({})),
                "fs/rename" => (json!({"from": uri("f"), "to": uri("new")}), json!({})),
                "fs/setMetadata" => (json!({"path": uri("f"), "mode": 0o640}), json!({})),
                _ => {
                    let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
                    (
                        json!({"path": uri("f")}),
                        json!({"sha256": abc, "length": 3}),
                    )
                }
            };
            assert_eq!(client.ok(name, params).await, result);
            let there = match name {
                "fs/createSymlink" | "fs/rename" => "new",
                _ => "f",
            };
            let size = found(client, there).await["size"].clone();
            assert_eq!(size, 3);
        }
    }
}
