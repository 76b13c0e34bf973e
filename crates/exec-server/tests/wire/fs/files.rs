//! Whole files, their metadata, and symbolic links.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use exec_server_testkit::wire::{Transport, bytes, chunk, fields};
use serde_json::json;

use super::{FsFixture, MIB, fifo, names, uri};
use crate::over_all;

over_all! {
    read_file_returns_what_write_file_wrote,
    response_larger_than_a_frame_is_split_into_frames,
}

async fn read_file_returns_what_write_file_wrote(on: Transport) {
    let mut scene = FsFixture::new(on).await;
    let data: Vec<u8> = (0..200_000u32).map(|n| (n * 7) as u8).collect();
    for data in [&data[..], b"", b"short"] {
        scene.write("f", data).await;
        assert_eq!(fs::read(scene.path("f")).unwrap(), data);
        assert_eq!(scene.read("f").await, data);
    }
    let path = scene.root.join(OsStr::from_bytes(b"n\xff #%"));
    let params = json!({"path": uri(&path), "dataBase64": "aGk="});
    scene.client.ok("fs/writeFile", params).await;
    assert_eq!(fs::read(&path).unwrap(), b"hi");
    let read = scene
        .client
        .ok("fs/readFile", json!({"path": uri(&path)}))
        .await;
    assert_eq!(read, json!({"dataBase64": "aGk="}));
    assert_eq!(scene.names().len(), 2, "nothing temporary is left");
}

async fn response_larger_than_a_frame_is_split_into_frames(on: Transport) {
    let mut scene = FsFixture::new(on).await;
    let data = vec![b'x'; 20 * MIB];
    fs::write(scene.path("f"), &data).unwrap();
    // The test client accepts frames of 16 MiB, as compatible clients do.
    assert!(scene.read("f").await == data);
}

#[tokio::test]
async fn read_file_beyond_the_message_limit_suggests_open_and_read_block() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    for (megabytes, expected) in [
        (50, "67108864"),
        (50, "fs/open and fs/readBlock"),
        (513, "536870912"),
    ] {
        let file = fs::File::create(scene.path("f")).unwrap();
        file.set_len(megabytes << 20).unwrap();
        let message = scene.fails("fs/readFile", "f", json!({}), -32600).await;
        assert!(message.contains(expected), "{message}");
    }
}

#[tokio::test]
async fn read_of_a_changing_file_returns_valid_data() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    let path = scene.path("f");
    fs::write(&path, vec![b'a'; MIB]).unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&done);
    let changing = path.clone();
    let changer = std::thread::spawn(move || {
        let file = fs::OpenOptions::new().append(true).open(changing).unwrap();
        let more = vec![b'a'; 300_000];
        while !stop.load(Ordering::Relaxed) {
            for _ in 0..5 {
                std::io::Write::write_all(&mut &file, &more).unwrap();
            }
            file.set_len(10).unwrap();
        }
    });
    // The kernel clears what it truncates during a read, so zeros are possible; nothing else is.
    let whole = |read: &[u8]| read.iter().all(|&byte| byte == b'a' || byte == 0);
    let open = json!({"handleId": "h"});
    scene.ok("fs/open", "f", open).await;
    for _ in 0..100 {
        let read = scene.read("f").await;
        assert!(read.len() >= 10 && whole(&read));
        let params = json!({"handleId": "h", "offset": 0, "len": MIB});
        let block = scene.client.ok("fs/readBlock", params).await;
        let read = bytes(&block["chunk"]);
        assert_eq!(block["eof"], read.len() < MIB);
        assert!(whole(&read));
    }
    done.store(true, Ordering::Relaxed);
    changer.join().unwrap();
}

#[tokio::test]
async fn write_file_sets_mode_and_modification_time() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    let params =
        json!({"dataBase64": "eA==", "mode": 0o4711, "modifiedAtMs": 1_600_000_000_123_i64});
    scene.ok("fs/writeFile", "f", params).await;
    let found = fs::metadata(scene.path("f")).unwrap();
    assert_eq!(found.mode() & 0o7777, 0o4711);
    assert_eq!(
        (found.mtime(), found.mtime_nsec()),
        (1_600_000_000, 123_000_000)
    );
    // Without these fields the mode stays and the time is that of the write.
    scene.write("f", b"y").await;
    let found = fs::metadata(scene.path("f")).unwrap();
    assert_eq!(found.mode() & 0o7777, 0o4711);
    assert!(found.mtime() > 1_600_000_000);
    for params in [
        json!({"dataBase64": "eA==", "mode": 0o10000}),
        json!({"dataBase64": "***"}),
        json!({"dataBase64": "YQ"}),
        json!({"dataBase64": null}),
        json!({}),
    ] {
        scene.fails("fs/writeFile", "f", params, -32602).await;
    }
    assert_eq!(scene.read("f").await, b"y");
    assert_eq!(scene.names(), ["f"]);
}

#[tokio::test]
async fn write_file_keeps_owner_mode_and_links() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    fs::write(scene.path("f"), "old").unwrap();
    fs::set_permissions(scene.path("f"), fs::Permissions::from_mode(0o640)).unwrap();
    // Only root can change the owner of a file.
    let owner = std::os::unix::fs::chown(scene.path("f"), Some(1234), Some(2345)).is_ok();
    symlink("f", scene.path("link")).unwrap();
    scene.write("link", b"new").await;
    let found = fs::symlink_metadata(scene.path("f")).unwrap();
    assert_eq!(found.mode() & 0o7777, 0o640);
    assert!(!owner || (found.uid(), found.gid()) == (1234, 2345));
    assert!(
        fs::symlink_metadata(scene.path("link"))
            .unwrap()
            .is_symlink()
    );
    let message = scene
        .fails(
            "fs/writeFile",
            "link",
            json!({"dataBase64": "", "followSymlinks": false}),
            -32603,
        )
        .await;
    let expected = format!(
        "path `{}` contains a symbolic link",
        scene.path("link").display()
    );
    assert_eq!(message, expected);
}

#[tokio::test]
async fn get_metadata_returns_all_fields() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    fs::write(scene.path("f"), "hello").unwrap();
    fs::set_permissions(scene.path("f"), fs::Permissions::from_mode(0o1640)).unwrap();
    symlink("./f", scene.path("link")).unwrap();
    fifo(&scene.path("fifo"));
    let found = scene.ok("fs/getMetadata", "f", json!({})).await;
    let real = fs::metadata(scene.path("f")).unwrap();
    let compatible = [
        "createdAtMs",
        "isDirectory",
        "isFile",
        "isSymlink",
        "modifiedAtMs",
        "size",
    ];
    for field in compatible {
        assert!(fields(&found).contains(&field), "{found}");
    }
    assert_eq!(found["mode"], 0o1640);
    assert_eq!(found["uid"], real.uid());
    assert_eq!(found["gid"], real.gid());
    assert_eq!(found["inode"], real.ino());
    assert_eq!(found["size"], 5);
    assert!(found.get("symlinkTarget").is_none());
    let link = scene.ok("fs/getMetadata", "link", json!({})).await;
    assert_eq!(link["symlinkTarget"], "./f");
    assert_eq!(
        (&link["isSymlink"], &link["isFile"]),
        (&true.into(), &true.into())
    );
    let pipe = scene
        .ok("fs/getMetadata", "fifo", json!({"followSymlinks": false}))
        .await;
    assert_eq!(
        (&pipe["isDirectory"], &pipe["isFile"]),
        (&false.into(), &false.into())
    );
}

#[tokio::test]
async fn set_metadata_changes_mode_and_time() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    fs::write(scene.path("f"), "").unwrap();
    symlink("f", scene.path("link")).unwrap();
    for (name, follow, mode, time) in [
        ("f", false, 0o000, 5_i64),
        ("link", true, 0o755, -86_400_001),
        ("f", true, 0o600, 1_700_000_000_999),
    ] {
        let params = json!({"mode": mode, "modifiedAtMs": time, "followSymlinks": follow});
        assert_eq!(scene.ok("fs/setMetadata", name, params).await, json!({}));
        let found = scene.ok("fs/getMetadata", "f", json!({})).await;
        assert_eq!(
            (&found["mode"], &found["modifiedAtMs"]),
            (&mode.into(), &time.into())
        );
    }
    // Each field alone.
    scene
        .ok("fs/setMetadata", "f", json!({"mode": 0o640}))
        .await;
    scene
        .ok("fs/setMetadata", "f", json!({"modifiedAtMs": 1000}))
        .await;
    let found = scene.ok("fs/getMetadata", "f", json!({})).await;
    assert_eq!(
        (&found["mode"], &found["modifiedAtMs"]),
        (&0o640.into(), &1000.into())
    );
    scene
        .fails("fs/setMetadata", "no", json!({"mode": 0o600}), -32004)
        .await;
    scene
        .fails("fs/setMetadata", "f", json!({"mode": 0o10000}), -32602)
        .await;
    let refused = json!({"mode": 0, "followSymlinks": false});
    scene.fails("fs/setMetadata", "link", refused, -32603).await;
}

#[tokio::test]
async fn create_symlink_stores_the_given_target() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    scene
        .ok(
            "fs/createSymlink",
            "link",
            json!({"target": "../any where"}),
        )
        .await;
    assert_eq!(
        fs::read_link(scene.path("link")).unwrap().to_str(),
        Some("../any where")
    );
    scene
        .fails("fs/createSymlink", "link", json!({"target": "x"}), -32603)
        .await;
    scene
        .fails(
            "fs/createSymlink",
            "no/link",
            json!({"target": "x"}),
            -32004,
        )
        .await;
    scene
        .fails("fs/createSymlink", "l2", json!({"target": "a\0b"}), -32600)
        .await;
}

#[tokio::test]
async fn hash_covers_the_file_or_its_first_bytes() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    fs::write(scene.path("f"), "hello world").unwrap();
    let hello = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
    let world = "b94d27b9934d3e08a52e52d7da7dabfac484efe37a5380ee9088f7ace2efcde9";
    for (params, sha256, length) in [
        (json!({}), world, 11),
        (json!({"length": 5}), hello, 5),
        (json!({"length": 1000}), world, 11),
    ] {
        let answer = scene.ok("fs/hash", "f", params).await;
        assert_eq!(answer, json!({"sha256": sha256, "length": length}));
    }
    fifo(&scene.path("fifo"));
    for (name, code) in [("fifo", -32600), (".", -32600), ("no", -32004)] {
        scene.fails("fs/hash", name, json!({}), code).await;
    }
}

#[tokio::test]
async fn write_file_writes_special_files_in_place() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    symlink("/dev/null", scene.path("null")).unwrap();
    scene.write("null", b"gone").await;
    assert!(
        fs::symlink_metadata(scene.path("null"))
            .unwrap()
            .is_symlink()
    );
    fifo(&scene.path("fifo"));
    let params = json!({"dataBase64": chunk("x")});
    // No process reads the FIFO.
    scene.fails("fs/writeFile", "fifo", params, -32603).await;
    assert_eq!(names(&scene.root), ["fifo", "null"]);
}
