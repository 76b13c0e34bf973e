//! `fs/watch`, `fs/unwatch` and `fs/watchMissing`, and their notifications.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use exec_server_testkit::proc::{self, eventually};
use exec_server_testkit::wire::{TestedServer, Transport, WireClient, fields};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;

use crate::{over_all, served};

over_all! {
    watch_notifies_changes_until_unwatch,
    watch_missing_notifies_once_when_a_path_appears,
}

fn uri(path: &Path) -> String {
    format!("file://{}", path.display())
}

/// In memory where possible: some disks create only fifty thousand files in a minute.
fn quick_dir() -> TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap_or_else(|_| tempfile::tempdir().unwrap())
}

/// The notifications of one watch, in order.
#[derive(Debug, Default)]
struct WatchNotifications {
    seq: u64,
    /// Changes as `kind path`, relative to the directory of the test.
    changes: Vec<String>,
    overflow: bool,
}

impl WatchNotifications {
    /// Reads the next notification, and checks what holds for each.
    async fn step(&mut self, client: &mut WireClient, dir: &Path) {
        let params = client.notice("fs/changed").await;
        assert_eq!(fields(&params), ["changes", "overflow", "seq", "watchId"]);
        self.seq += 1;
        assert_eq!(params["seq"], self.seq);
        let changes = params["changes"].as_array().unwrap();
        assert!(changes.len() <= 1000);
        self.overflow |= params["overflow"].as_bool().unwrap();
        assert!(!changes.is_empty() || self.overflow, "{params}");
        let name = |path: &Value| {
            let path = path.as_str().unwrap();
            let name = path.strip_prefix(&uri(dir)).unwrap();
            name.trim_start_matches('/').to_owned()
        };
        for change in changes {
            let kind = change["kind"].as_str().unwrap();
            let from = change.get("from").map(|from| format!("{} ", name(from)));
            let from = from.unwrap_or_default();
            self.changes
                .push(format!("{kind} {from}{}", name(&change["path"])));
        }
    }

    /// Creates files until one is notified: after an overflow another may follow that covers them.
    async fn expect_further_changes(&mut self, client: &mut WireClient, dir: &Path) {
        for number in 0.. {
            (self.overflow, self.changes) = (false, Vec::new());
            fs::write(dir.join(format!("after{number}")), "").unwrap();
            let notified = format!("created after{number}");
            while !self.overflow {
                if self.changes.contains(&notified) {
                    return;
                }
                self.step(client, dir).await;
            }
        }
    }

    async fn until(&mut self, client: &mut WireClient, dir: &Path, what: &str) {
        while !self.changes.iter().any(|change| change == what) {
            self.step(client, dir).await;
        }
    }
}

async fn watch_notifies_changes_until_unwatch(on: Transport) {
    let (_server, mut client) = served(on).await;
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir_all(at("real/sub")).unwrap();
    fs::write(at("real/.gitignore"), "*.log\n").unwrap();
    std::os::unix::fs::symlink("real", at("link")).unwrap();
    let params = json!({
        "watchId": "w", "path": uri(&at("link")), "ignore": {"gitignore": true}, "debounceMs": 1,
        "sandbox": null,
    });
    let watching = client.ok("fs/watch", params).await;
    assert_eq!(watching, json!({"path": uri(&at("real"))}));
    let mut notified = WatchNotifications::default();
    let root = at("real");
    fs::write(root.join("sub/no.log"), "").unwrap();
    fs::write(root.join("sub/a b"), "").unwrap();
    notified
        .until(&mut client, &root, "created sub/a%20b")
        .await;
    fs::rename(root.join("sub/a b"), root.join("c")).unwrap();
    notified
        .until(&mut client, &root, "renamed sub/a%20b c")
        .await;
    fs::remove_file(root.join("c")).unwrap();
    notified.until(&mut client, &root, "removed c").await;
    assert!(
        !notified.changes.iter().any(|change| change.contains("log")),
        "{notified:?}"
    );
    // The ignore rules no longer apply once their file is removed.
    fs::remove_dir_all(&root).unwrap();
    notified.until(&mut client, &root, "removed ").await;
    fs::create_dir(&root).unwrap();
    fs::write(root.join("new"), "").unwrap();
    notified.until(&mut client, &root, "created new").await;
    assert!(!notified.overflow, "{notified:?}");

    let ended = client.ok("fs/unwatch", json!({"watchId": "w"})).await;
    assert_eq!(ended, json!({}));
    client.notices();
    let unknown = client.ok("fs/unwatch", json!({"watchId": "w"})).await;
    assert_eq!(unknown, json!({}));
    // The id is free again, and its sequence starts at 1.
    let params = json!({
        "watchId": "w", "path": uri(&root), "recursive": false, "debounceMs": 1,
        "ignore": {"patterns": ["*.tmp"]},
    });
    client.ok("fs/watch", params).await;
    fs::create_dir(root.join("d")).unwrap();
    let mut notified = WatchNotifications::default();
    notified.until(&mut client, &root, "created d").await;
    fs::write(root.join("d/unseen"), "").unwrap();
    fs::write(root.join("x.tmp"), "").unwrap();
    fs::write(root.join("seen"), "").unwrap();
    notified.until(&mut client, &root, "created seen").await;
    let odd = |change: &String| change.contains("unseen") || change.contains("tmp");
    assert!(!notified.changes.iter().any(odd), "{notified:?}");
}

#[tokio::test]
async fn watch_rejects_invalid_params_and_too_many_watches() {
    let (mut server, mut client) = served(Transport::Websocket).await;
    let dir = tempfile::tempdir().unwrap();
    let here = uri(dir.path());
    let long = "x".repeat(257);
    let table = [
        (
            json!({"watchId": long}),
            -32600,
            "must not exceed 256 bytes",
        ),
        (json!({"path": format!("{here}/no")}), -32004, "/no"),
        (json!({"path": "file:///c:/x"}), -32600, "invalid on"),
        (
            json!({"ignore": {"patterns": ["ok", "{a"]}}),
            -32602,
            "`{a`",
        ),
        (
            json!({"ignore": {"patterns": vec!["a"; 257]}}),
            -32602,
            "limit of 256",
        ),
        (json!({"debounceMs": 60_001}), -32602, "limit of 60000"),
    ];
    for (change, code, text) in table {
        let mut params = json!({"watchId": "w", "path": here});
        for (key, value) in change.as_object().unwrap() {
            params[key] = value.clone();
        }
        let refused = client.refused("fs/watch", params).await;
        assert!(
            refused.code == code && refused.message.contains(text),
            "{refused} for {text}"
        );
    }
    for number in 0..32 {
        let params = json!({"watchId": number.to_string(), "path": here});
        client.ok("fs/watch", params).await;
    }
    let more = json!({"watchId": "more", "path": here});
    let refused = client.refused("fs/watch", more.clone()).await;
    assert_eq!(
        (refused.code, refused.message.as_str()),
        (-32600, "at most 32 watches may be active per connection")
    );
    client.ok("fs/unwatch", json!({"watchId": "7"})).await;
    client.ok("fs/watch", more.clone()).await;
    client.ok("fs/unwatch", json!({"watchId": "8"})).await;
    let refused = client.refused("fs/watch", more.clone()).await;
    assert_eq!(
        (refused.code, refused.message.as_str()),
        (-32600, "watch `more` already exists")
    );
    let mut early = server.connect().await;
    let refused = early.refused("fs/watch", more).await;
    assert_eq!(
        (refused.code, refused.message.as_str()),
        (
            -32600,
            "client must call initialize before using filesystem methods"
        )
    );
}

/// Number of inotify instances and of threads that watch.
fn watching(pid: u32) -> (usize, usize) {
    let instances = fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
        .filter(|target| target.as_os_str() == "anon_inode:inotify")
        .count();
    let threads = fs::read_dir(format!("/proc/{pid}/task"))
        .unwrap()
        .filter_map(|entry| fs::read_to_string(entry.ok()?.path().join("comm")).ok())
        .filter(|name| name == "watch\n")
        .count();
    (instances, threads)
}

async fn watches(pid: u32, expected: (usize, usize)) {
    eventually("instances and threads", || match watching(pid) {
        seen if seen == expected => Ok(()),
        seen => Err(format!("{seen:?} instead of {expected:?}")),
    })
    .await;
}

#[tokio::test]
async fn watches_share_one_inotify_instance_and_end_with_their_connection() {
    let (mut server, mut one) = served(Transport::Websocket).await;
    let pid = server.server_pid().await;
    assert_eq!(watching(pid), (0, 0));
    let descriptors = proc::descriptors(pid);
    let dir = tempfile::tempdir().unwrap();
    let watch = |id: &str, ignore: Value| json!({"watchId": id, "path": uri(dir.path()), "ignore": ignore, "debounceMs": 1});
    let mut two = server.session().await;
    one.ok("fs/watch", watch("a", json!({}))).await;
    one.ok("fs/watch", watch("b", json!({}))).await;
    two.ok("fs/watch", watch("a", json!({}))).await;
    watches(pid, (1, 1)).await;
    two.ok("fs/watch", watch("b", json!({"gitignore": true})))
        .await;
    watches(pid, (2, 2)).await;
    let missing = json!({"watchId": 1, "missing": [uri(&dir.path().join("m"))]});
    one.ok("fs/watchMissing", missing).await;
    watches(pid, (3, 2)).await;
    fs::write(dir.path().join("x"), "").unwrap();
    for client in [&mut one, &mut two] {
        let notified = [
            client.notice("fs/changed").await,
            client.notice("fs/changed").await,
        ];
        let ids: BTreeSet<&str> = notified
            .iter()
            .map(|t| t["watchId"].as_str().unwrap())
            .collect();
        assert_eq!(ids, BTreeSet::from(["a", "b"]));
    }
    drop(one);
    watches(pid, (2, 2)).await;
    // A session that ends leaves no watch either.
    two.ok("session/end", Value::Null).await;
    watches(pid, (0, 0)).await;
    drop(two);
    eventually("descriptors", || match proc::descriptors(pid) {
        // Both connections have ended, one of which was watched.
        seen if seen < descriptors => Ok(()),
        seen => Err(format!("{seen} of at most {descriptors}")),
    })
    .await;
}

#[tokio::test]
async fn burst_of_changes_is_notified_completely_or_as_overflow() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let dir = quick_dir();
    let params = json!({"watchId": "w", "path": uri(dir.path())});
    client.ok("fs/watch", params).await;
    for number in 0..50_000 {
        fs::write(dir.path().join(number.to_string()), "").unwrap();
    }
    fs::write(dir.path().join("last"), "").unwrap();
    let mut notified = WatchNotifications::default();
    while !notified.overflow
        && !notified
            .changes
            .iter()
            .any(|change| change == "created last")
    {
        notified.step(&mut client, dir.path()).await;
    }
    if !notified.overflow {
        let seen: BTreeSet<&str> = notified.changes.iter().map(String::as_str).collect();
        for number in 0..50_000 {
            assert!(
                seen.contains(format!("created {number}").as_str()),
                "{number}"
            );
        }
    }
    notified
        .expect_further_changes(&mut client, dir.path())
        .await;
}

#[tokio::test]
async fn watch_of_a_slow_reader_uses_bounded_memory_and_reports_overflow() {
    let (server, mut client) = served(Transport::Websocket).await;
    let pid = server.server_pid().await;
    let dir = quick_dir();
    let params = json!({"watchId": "w", "path": uri(dir.path()), "debounceMs": 0});
    client.ok("fs/watch", params).await;
    proc::forget_peak(pid);
    let before = proc::peak_memory(pid);
    // Long names fill the socket soon.
    let (one, two) = ("1".repeat(200), "2".repeat(200));
    let (one, two) = (dir.path().join(one), dir.path().join(two));
    fs::write(&one, "").unwrap();
    for _ in 0..150_000 {
        fs::rename(&one, &two).unwrap();
        fs::rename(&two, &one).unwrap();
    }
    let mut notified = WatchNotifications::default();
    while !notified.overflow {
        notified.step(&mut client, dir.path()).await;
    }
    let grown = proc::peak_memory(pid).saturating_sub(before);
    assert!(grown < 64 << 20, "grew by {grown} bytes");
    notified
        .expect_further_changes(&mut client, dir.path())
        .await;
}

#[tokio::test]
async fn watch_of_20000_directories_uses_bounded_memory() {
    let (server, mut client) = served(Transport::Websocket).await;
    let pid = server.server_pid().await;
    let dir = quick_dir();
    for outer in 0..200 {
        for inner in 0..100 {
            let name = format!("directory-{outer}/another-{inner}");
            fs::create_dir_all(dir.path().join(name)).unwrap();
        }
    }
    proc::forget_peak(pid);
    let before = proc::peak_memory(pid);
    let params = json!({"watchId": "w", "path": uri(dir.path())});
    client.ok("fs/watch", params).await;
    let grown = proc::peak_memory(pid).saturating_sub(before);
    assert!(grown < 64 << 20, "grew by {grown} bytes");
    fs::write(dir.path().join("directory-199/another-99/x"), "").unwrap();
    let mut notified = WatchNotifications::default();
    notified
        .until(
            &mut client,
            dir.path(),
            "created directory-199/another-99/x",
        )
        .await;
}

#[tokio::test]
async fn watch_error_names_the_inotify_limit_that_is_too_small() {
    // Starts a server in a new user namespace with this inotify limit.
    let mut command = Command::new("unshare");
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .args(["--user", "--map-root-user", "sh", "-c"])
        .arg("echo 30 >/proc/sys/user/max_inotify_watches && exec \"$0\" \"$@\"")
        .arg(env!("CARGO_BIN_EXE_exec-server"));
    let mut server = TestedServer::start(Transport::Websocket, command).await;
    let mut client = server.session().await;
    let dir = tempfile::tempdir().unwrap();
    for number in 0..40 {
        fs::create_dir(dir.path().join(number.to_string())).unwrap();
    }
    let mut params = json!({"watchId": "w", "path": uri(dir.path()), "debounceMs": 1});
    let refused = client.refused("fs/watch", params.clone()).await;
    assert_eq!(refused.code, -32603);
    for part in [
        "fs.inotify.max_user_watches is 30",
        "sysctl fs.inotify.max_user_watches=120",
    ] {
        assert!(refused.message.contains(part), "{refused}");
    }
    // The failed watch leaves nothing behind, and a smaller one works.
    params["ignore"] = json!({"patterns": ["[1-3]?"]});
    client.ok("fs/watch", params).await;
    // A directory that exceeds the limit later is reported as an overflow.
    for number in 0..40 {
        fs::create_dir(dir.path().join(format!("later{number}"))).unwrap();
    }
    let mut notified = WatchNotifications::default();
    while !notified.overflow {
        notified.step(&mut client, dir.path()).await;
    }
}

async fn watch_missing_notifies_once_when_a_path_appears(on: Transport) {
    let (_server, mut client) = served(on).await;
    let info = client.ok("environment/info", Value::Null).await;
    assert_eq!(info["capabilities"]["fsWatchMissing"], true);
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| uri(&dir.path().join(name));
    let make = |name: &str| fs::write(dir.path().join(name), "").unwrap();
    make("there");
    let many: Vec<String> = (0..65).map(|number| at(&format!("m{number}"))).collect();
    let table = [
        (1, json!([at("there")]), Value::Null, false),
        (2, json!([]), Value::Null, false),
        (3, json!(many), Value::Null, false),
        (4, json!([at("m")]), json!(at("nope")), false),
        (5, json!(["file:///C:/x"]), Value::Null, false),
        (6, json!(many[1..]), json!(at("there")), true),
        (6, json!([at("m")]), Value::Null, false),
        (3, json!([at("m")]), Value::Null, false),
        // Replaces watch 6, which sends nothing any more.
        (7, json!([at("a/b")]), Value::Null, true),
    ];
    for (id, missing, present, expected) in table {
        let params = json!({"watchId": id, "missing": missing, "present": present});
        let answer = client.ok("fs/watchMissing", params).await;
        assert_eq!(answer, json!({"watching": expected}), "{id}");
    }
    make("m1");
    make("there");
    fs::create_dir(dir.path().join("a")).unwrap();
    let notified = client.notice("fs/missingChanged").await;
    assert_eq!(notified, json!({"watchId": 7}));
    make("a/b");
    let params = json!({"watchId": 8, "missing": [at("x")], "present": at("there")});
    client.ok("fs/watchMissing", params).await;
    fs::remove_file(dir.path().join("there")).unwrap();
    let notified = client.notice("fs/missingChanged").await;
    assert_eq!(notified, json!({"watchId": 8}));
    // A failed request replaces the watch, too.
    let params = json!({"watchId": 9, "missing": [at("x")]});
    client.ok("fs/watchMissing", params).await;
    let params = json!({"watchId": 10, "missing": []});
    client.ok("fs/watchMissing", params).await;
    make("x");
    let params = json!({"watchId": 11, "missing": [at("y")]});
    client.ok("fs/watchMissing", params).await;
    make("y");
    assert_eq!(
        client.notice("fs/missingChanged").await,
        json!({"watchId": 11})
    );
    assert_eq!(client.notices(), []);
}
