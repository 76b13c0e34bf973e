//! Directories and trees: list, walk, create, copy, move, remove.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

use exec_server_testkit::wire::Transport;
use serde_json::{Value, json};

use super::{FsFixture, MIB, fifo, names, uri, walk_options};
use crate::over_all;

over_all! {
    directory_tree_is_created_listed_walked_copied_moved_and_removed,
    listings_above_a_mebibyte_arrive_whole,
}

/// Servers send such responses in pieces where the transport allows it.
async fn listings_above_a_mebibyte_arrive_whole(on: Transport) {
    const COUNT: usize = 6000;
    let mut scene = FsFixture::new(on).await;
    let name = |number: usize| format!("{number:05}{}", "-long".repeat(30));
    fs::create_dir(scene.path("many")).unwrap();
    for number in 0..COUNT {
        fs::write(scene.path("many").join(name(number)), "").unwrap();
    }
    let expected: Vec<String> = (0..COUNT).map(name).collect();
    let listed = scene.ok("fs/readDirectory", "many", json!({})).await;
    assert!(listed.to_string().len() > MIB);
    let entries = listed["entries"].as_array().unwrap().iter();
    let mut found: Vec<_> = entries
        .map(|entry| entry["fileName"].as_str().unwrap().to_owned())
        .collect();
    found.sort();
    assert!(found == expected, "{} names", found.len());
    let options = json!({"options": walk_options()});
    let found = scene.ok("fs/walk", "many", options).await;
    let root = scene.uri("many") + "/";
    let paths = found["entries"].as_array().unwrap().iter().map(|entry| {
        let path = entry["path"].as_str().unwrap();
        path.strip_prefix(&root).unwrap()
    });
    assert!(paths.eq(expected.iter().map(String::as_str)));
    assert_eq!(found["truncated"], false);
}

/// Entries of a walk, relative to the root of the scene.
fn walked(scene: &FsFixture, answer: &Value) -> Vec<String> {
    let root = format!("{}/", uri(&scene.root));
    answer["entries"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| {
            let path = entry["path"].as_str().unwrap().strip_prefix(&root).unwrap();
            let mark = if entry["kind"] == "directory" {
                "/"
            } else {
                ""
            };
            format!("{path}{mark}")
        })
        .collect()
}

async fn directory_tree_is_created_listed_walked_copied_moved_and_removed(on: Transport) {
    let mut scene = FsFixture::new(on).await;
    scene.ok("fs/createDirectory", "a/b/c", json!({})).await;
    scene.write("a/f", b"1").await;
    scene.write("a/b/g", b"2").await;
    fs::set_permissions(scene.path("a/f"), fs::Permissions::from_mode(0o700)).unwrap();
    symlink("f", scene.path("a/link")).unwrap();
    let found = scene
        .ok("fs/walk", ".", json!({"options": walk_options()}))
        .await;
    assert_eq!(
        walked(&scene, &found),
        ["a/", "a/b/", "a/f", "a/b/c/", "a/b/g"]
    );
    assert_eq!(
        (&found["errors"], &found["truncated"]),
        (&json!([]), &json!(false))
    );

    let params = json!({"sourcePath": scene.uri("a"), "destinationPath": scene.uri("x/y"), "recursive": true});
    scene.client.ok("fs/copy", params).await;
    assert_eq!(names(&scene.path("x/y")), ["b", "f", "link"]);
    assert_eq!(
        fs::metadata(scene.path("x/y/f")).unwrap().mode() & 0o777,
        0o700
    );

    let params = json!({"from": scene.uri("x/y"), "to": scene.uri("moved")});
    scene.client.ok("fs/rename", params.clone()).await;
    let gone = scene.client.refused("fs/rename", params).await;
    assert_eq!(gone.code, -32004, "{gone}");
    let params = json!({"from": scene.uri("moved"), "to": scene.uri("a")});
    let taken = scene.client.refused("fs/rename", params).await;
    assert_eq!(taken.code, -32600, "{taken}");
    assert!(taken.message.contains("already exists"), "{taken}");

    let listed = scene.ok("fs/readDirectory", "moved", json!({})).await;
    let mut entries = listed["entries"].as_array().unwrap().clone();
    entries.sort_by_key(|entry| entry["fileName"].as_str().unwrap().to_owned());
    let expected = json!([
        {"fileName": "b", "isDirectory": true, "isFile": false},
        {"fileName": "f", "isDirectory": false, "isFile": true},
        {"fileName": "link", "isDirectory": false, "isFile": true},
    ]);
    assert_eq!(Value::from(entries), expected);
    for name in ["a", "moved", "x", "not there"] {
        assert_eq!(scene.ok("fs/remove", name, json!({})).await, json!({}));
    }
    assert_eq!(scene.names(), [""; 0]);
}

#[tokio::test]
async fn file_names_that_are_not_utf8_can_be_used() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    let name = OsStr::from_bytes(b"bad\xff\"");
    fs::create_dir(scene.root.join(name)).unwrap();
    fs::write(scene.root.join(name).join("in"), "x").unwrap();
    fs::write(scene.path("plain"), "x").unwrap();
    let listed = scene.ok("fs/readDirectory", ".", json!({})).await;
    let entries = listed["entries"].as_array().unwrap();
    let odd = entries
        .iter()
        .find(|one| one["fileName"] == "bad\u{fffd}\"")
        .unwrap();
    let path = uri(&scene.root.join(name));
    assert_eq!(odd["path"], path);
    let plain = entries
        .iter()
        .find(|one| one["fileName"] == "plain")
        .unwrap();
    assert!(plain.get("path").is_none());
    let inside = scene
        .client
        .ok("fs/readDirectory", json!({"path": path}))
        .await;
    assert_eq!(inside["entries"][0]["fileName"], "in");
    let found = scene
        .ok("fs/walk", ".", json!({"options": walk_options()}))
        .await;
    assert_eq!(
        walked(&scene, &found),
        ["bad%FF%22/", "plain", "bad%FF%22/in"]
    );
    let canonical = scene
        .client
        .ok("fs/canonicalize", json!({"path": path}))
        .await;
    assert_eq!(canonical["path"], path);
}

#[tokio::test]
async fn directory_of_100000_entries_is_rejected_by_list_and_truncated_by_walk() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    fs::create_dir(scene.path("many")).unwrap();
    for n in 0..100_000 {
        fs::File::create(scene.path("many").join(format!("{n:06}"))).unwrap();
    }
    let message = scene
        .fails("fs/readDirectory", "many", json!({}), -32603)
        .await;
    assert_eq!(
        message,
        "fs/readDirectory returned 100000 entries; limit is 50000"
    );
    let found = scene
        .ok("fs/walk", "many", json!({"options": walk_options()}))
        .await;
    assert_eq!(found["truncated"], true);
    // The first in order, although the directory has no order.
    let expected: Vec<_> = (0..50_000).map(|n| format!("many/{n:06}")).collect();
    let found = walked(&scene, &found);
    assert_eq!(found[..], expected[..found.len()]);
    assert!(found.len() > 20_000, "{}", found.len());
    let mut options = walk_options();
    options["maxEntries"] = 100.into();
    let found = scene
        .ok("fs/walk", "many", json!({"options": options}))
        .await;
    assert_eq!(walked(&scene, &found), expected[..100]);
    scene.ok("fs/remove", "many", json!({})).await;
    assert_eq!(scene.names(), [""; 0]);
}

/// A directory in memory with so many files of one content.
fn crowded(count: usize) -> tempfile::TempDir {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path();
    fs::create_dir(path.join("many")).unwrap();
    for n in 0..count {
        fs::File::create(path.join("many").join(format!("{n:06}"))).unwrap();
    }
    directory
}

#[tokio::test]
async fn a_directory_of_any_size_is_listed_page_by_page() {
    const COUNT: usize = 120_000;
    let directory = crowded(COUNT);
    let mut scene = FsFixture::new(Transport::Websocket).await;
    let path = uri(&directory.path().join("many"));
    let mut params = json!({"path": path, "limit": 50_000});
    let (mut seen, mut pages) = (Vec::new(), Vec::new());
    loop {
        let page = scene.client.ok("fs/readDirectory", params.clone()).await;
        let entries = page["entries"].as_array().unwrap();
        let mut names: Vec<String> = entries
            .iter()
            .map(|entry| entry["fileName"].as_str().unwrap().to_owned())
            .collect();
        names.sort();
        // Entries that are created between two pages appear only if they sort after the last listed
        // one.
        if pages.is_empty() {
            fs::write(directory.path().join("many/000000-new"), "").unwrap();
            fs::write(directory.path().join("many/999999-new"), "").unwrap();
            fs::remove_file(directory.path().join("many/000000")).unwrap();
            fs::remove_file(directory.path().join("many/119999")).unwrap();
        }
        pages.push(names.len());
        // Every page comes after the one before it.
        assert!(seen.last() < names.first());
        seen.extend(names);
        match page.get("next") {
            Some(next) => params["after"] = next.clone(),
            None => break,
        }
    }
    assert_eq!(pages, [50_000, 50_000, 20_000]);
    let mut expected: Vec<String> = (0..COUNT - 1).map(|n| format!("{n:06}")).collect();
    expected.push("999999-new".to_owned());
    assert_eq!(seen, expected);
}

#[tokio::test]
async fn a_tree_of_any_size_is_walked_page_by_page() {
    const COUNT: usize = 120_000;
    let directory = crowded(COUNT);
    fs::create_dir_all(directory.path().join("a/b")).unwrap();
    fs::write(directory.path().join("a/b/c"), "").unwrap();
    fs::write(directory.path().join("z"), "").unwrap();
    let mut scene = FsFixture::new(Transport::Websocket).await;
    let root = format!("{}/", uri(directory.path()));
    let mut params =
        json!({"path": uri(directory.path()), "options": walk_options(), "limit": 50_000});
    let mut seen: Vec<String> = Vec::new();
    loop {
        let page = scene.client.ok("fs/walk", params.clone()).await;
        assert_eq!(
            (&page["errors"], &page["truncated"]),
            (&json!([]), &json!(false))
        );
        let entries = page["entries"].as_array().unwrap();
        assert!((1..=50_000).contains(&entries.len()), "{}", entries.len());
        seen.extend(entries.iter().map(|entry| {
            let path = entry["path"].as_str().unwrap();
            path.strip_prefix(&root).unwrap().to_owned()
        }));
        match page.get("next") {
            Some(next) => params["after"] = next.clone(),
            None => break,
        }
    }
    let mut expected: Vec<String> = ["a", "a/b", "a/b/c", "many"].map(str::to_owned).to_vec();
    expected.extend((0..COUNT).map(|n| format!("many/{n:06}")));
    expected.push("z".to_owned());
    assert_eq!(seen, expected);
}

#[tokio::test]
async fn page_limits_and_cursors_are_validated() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    fs::create_dir(scene.path("d")).unwrap();
    for name in ["d/1", "d/2", "d/3"] {
        fs::write(scene.path(name), "").unwrap();
    }
    for method in ["fs/readDirectory", "fs/walk"] {
        let options = walk_options();
        for (limit, prefix) in [(0, "limit 0 "), (50_001, "limit 50001 ")] {
            let params = json!({"options": options, "limit": limit});
            let message = scene.fails(method, "d", params, -32602).await;
            assert!(
                message.starts_with(prefix) && message.contains("50000"),
                "{message}"
            );
        }
        for after in ["", "?", "YQ", "Li4=", "YS8uLi9i", "L2V0Yw=="] {
            let params = json!({"options": options, "after": after});
            let message = scene.fails(method, "d", params, -32602).await;
            assert!(message.contains("`after`"), "{message}");
        }
        // A cursor without a limit is the rest, as far as one page goes.
        let params = json!({"options": options, "limit": 1});
        let first = scene.ok(method, "d", params).await;
        let params = json!({"options": options, "after": first["next"]});
        let rest = scene.ok(method, "d", params).await;
        assert_eq!(rest["entries"].as_array().unwrap().len(), 2);
        assert!(rest.get("next").is_none(), "{rest}");
        let null = json!({"options": options, "limit": null, "after": null});
        let whole = scene.ok(method, "d", null).await;
        assert_eq!(whole["entries"].as_array().unwrap().len(), 3);
        assert!(whole.get("next").is_none(), "{whole}");
        let params = json!({"options": options, "limit": 1});
        scene.fails(method, "missing", params, -32004).await;
    }
    let mut options = walk_options();
    options["followDirectorySymlinks"] = true.into();
    let params = json!({"options": options, "limit": 1});
    let message = scene.fails("fs/walk", "d", params, -32602).await;
    assert!(message.contains("follows links"), "{message}");
}

#[tokio::test]
async fn walk_visits_directories_in_a_link_loop_once() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    fs::create_dir_all(scene.path("a/b")).unwrap();
    symlink("..", scene.path("a/b/up")).unwrap();
    symlink(".", scene.path("self")).unwrap();
    symlink("self", scene.path("loop1")).unwrap();
    symlink("loop", scene.path("loop")).unwrap();
    let mut options = walk_options();
    options["followDirectorySymlinks"] = true.into();
    let found = scene.ok("fs/walk", ".", json!({"options": options})).await;
    let expected = ["a/", "loop1/", "self/", "a/b/", "a/b/up/"];
    assert_eq!(walked(&scene, &found), expected);
    assert_eq!(
        (&found["errors"], &found["truncated"]),
        (&json!([]), &json!(false))
    );
}

#[tokio::test]
async fn copy_follows_no_links_and_rejects_copies_into_itself() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    fs::create_dir_all(scene.path("d/sub")).unwrap();
    fs::write(scene.path("d/f"), "x").unwrap();
    symlink("sub", scene.path("d/link")).unwrap();
    symlink("d", scene.path("same")).unwrap();
    fifo(&scene.path("d/fifo"));
    fifo(&scene.path("fifo"));
    let copy = |scene: &FsFixture, from: &str, to: &str, recursive: bool| json!({"sourcePath": scene.uri(from), "destinationPath": scene.uri(to), "recursive": recursive});
    for (from, to, recursive, code, message) in [
        ("no", "q", true, -32004, "os error 2"),
        ("d", "q", false, -32600, "requires recursive: true"),
        ("d", "d", true, -32600, "itself or one of its descendants"),
        (
            "d",
            "d/sub/q",
            true,
            -32600,
            "itself or one of its descendants",
        ),
        (
            "d",
            "same/q",
            true,
            -32600,
            "itself or one of its descendants",
        ),
        ("fifo", "q", false, -32600, "only supports regular files"),
        ("d/f", "d/sub", false, -32603, "os error 21"),
        ("d/link", "d/sub", false, -32603, "os error 17"),
        ("d/f", "no/q", false, -32004, "os error 2"),
    ] {
        let params = copy(&scene, from, to, recursive);
        let failure = scene.client.refused("fs/copy", params).await;
        assert_eq!(failure.code, code, "{from} {to}: {failure}");
        assert!(failure.message.contains(message), "{from} {to}: {failure}");
    }
    assert_eq!(scene.names(), ["d", "fifo", "same"]);
    let params = copy(&scene, "d", "new", true);
    scene.client.ok("fs/copy", params).await;
    assert_eq!(names(&scene.path("new")), ["f", "link", "sub"]);
    assert!(
        fs::symlink_metadata(scene.path("new/link"))
            .unwrap()
            .is_symlink()
    );
}

/// Shared memory is a separate filesystem nearly everywhere; elsewhere this is a plain rename.
#[tokio::test]
async fn rename_moves_trees_to_another_filesystem() {
    let mut scene = FsFixture::new(Transport::Websocket).await;
    let other = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::create_dir_all(scene.path("d/sub")).unwrap();
    fs::write(scene.path("d/sub/f"), "x").unwrap();
    fs::set_permissions(scene.path("d/sub"), fs::Permissions::from_mode(0o711)).unwrap();
    let to = other.path().join("there");
    let params = json!({"from": scene.uri("d"), "to": uri(&to)});
    scene.client.ok("fs/rename", params).await;
    assert_eq!(fs::read(to.join("sub/f")).unwrap(), b"x");
    assert_eq!(fs::metadata(to.join("sub")).unwrap().mode() & 0o777, 0o711);
    assert_eq!(scene.names(), [""; 0]);
    assert_eq!(names(other.path()), ["there"]);
    fs::write(scene.path("f"), "new").unwrap();
    fs::write(other.path().join("f"), "old").unwrap();
    let mut params = json!({"from": scene.uri("f"), "to": uri(&other.path().join("f"))});
    let taken = scene.client.refused("fs/rename", params.clone()).await;
    assert_eq!(taken.code, -32600, "{taken}");
    params["overwrite"] = true.into();
    scene.client.ok("fs/rename", params).await;
    assert_eq!(fs::read(other.path().join("f")).unwrap(), b"new");
    assert_eq!(names(other.path()), ["f", "there"]);
    assert_eq!(scene.names(), [""; 0]);
}
