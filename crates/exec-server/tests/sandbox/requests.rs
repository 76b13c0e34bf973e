//! File requests under a policy: the same results as without one, within the limits of the policy.

use std::path::Path;

use exec_server_testkit::proc;
use exec_server_testkit::wire::{bytes, chunk};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{SandboxFixture, ServerUser, entry, for_both, policy, read_only, special};

for_both! {
    every_file_method_works_in_a_workspace,
    file_requests_cannot_write_outside_the_workspace,
    file_requests_cannot_read_denied_paths,
    file_requests_under_a_minimal_policy_see_only_system_files,
    file_requests_cannot_change_protected_names,
    file_requests_do_not_follow_planted_symlinks,
    denied_file_stays_denied_after_it_is_replaced,
    handles_stream_files_under_a_policy,
    running_helper_reads_the_current_content,
    killed_helper_fails_at_most_one_request,
    helpers_are_limited_and_end_with_the_server,
    policies_without_file_restrictions_start_no_helper,
    file_requests_reject_invalid_policies,
    capability_discovery_applies_the_policy_of_each_root,
}

const INTERNAL: i64 = -32603;
const DENIED: i64 = -32600;
const INVALID_PARAMS: i64 = -32602;
const NOT_FOUND: i64 = -32004;

fn uri(path: &Path) -> String {
    format!("file://{}", path.display())
}

impl SandboxFixture {
    /// The workspace's policy, for requests: they name the working directory in the policy.
    fn request_policy(&self, more: &[Value]) -> Value {
        let mut sandbox = self.workspace_and(more);
        sandbox["cwd"] = json!(uri(&self.path("work")));
        sandbox
    }

    async fn fs(
        &mut self,
        sandbox: &Value,
        method: &str,
        path: &Path,
        more: Value,
    ) -> Result<Value, (i64, String)> {
        let mut params = more;
        let key = match method {
            "fs/copy" => "sourcePath",
            "fs/rename" => "from",
            _ => "path",
        };
        params[key] = json!(uri(path));
        params["sandbox"] = sandbox.clone();
        let answer = self.client.call(method, params).await;
        answer.map_err(|failure| (failure.code, failure.message))
    }

    async fn code(&mut self, sandbox: &Value, method: &str, path: &Path, more: Value) -> i64 {
        match self.fs(sandbox, method, path, more).await {
            Ok(answer) => panic!("{method} {} gave {answer}", path.display()),
            Err((code, _)) => code,
        }
    }

    /// Pids of the helpers of the server: its children that are launchers.
    async fn helpers(&self) -> Vec<i32> {
        helpers_of(self.server.server_pid().await)
    }
}

/// Pids of the helpers of a server: its children that are launchers.
fn helpers_of(server: u32) -> Vec<i32> {
    let children = proc::children(server).into_iter();
    children
        .filter(|pid| {
            std::fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| String::from_utf8_lossy(&line).contains("sandbox-launcher"))
        })
        .filter(|&pid| !is_standby(pid) && !is_spare(pid))
        .collect()
}

/// Whether a process is the launcher that forks others.
pub(crate) fn is_standby(pid: i32) -> bool {
    is_called(pid, "exec-standby")
}

/// Whether a process is a launcher that waits for its command.
pub(crate) fn is_spare(pid: i32) -> bool {
    is_called(pid, "exec-spare")
}

fn is_called(pid: i32, name: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name)
}

/// Every method that changes files, with its params, for a name that exists.
fn changes(directory: &Path) -> Vec<(&'static str, &'static str, Value)> {
    let to = |name: &str| json!(uri(&directory.join(name)));
    vec![
        ("fs/writeFile", "f", json!({"dataBase64": chunk("new")})),
        ("fs/writeFile", "g", json!({"dataBase64": chunk("new")})),
        ("fs/createDirectory", "d/e", json!({})),
        ("fs/setMetadata", "f", json!({"mode": 0o600})),
        ("fs/createSymlink", "l", json!({"target": "f"})),
        (
            "fs/copy",
            "f",
            json!({"destinationPath": to("copy"), "recursive": false}),
        ),
        (
            "fs/rename",
            "f",
            json!({"to": to("moved"), "overwrite": true}),
        ),
        ("fs/open", "h", json!({"handleId": "r", "mode": "replace"})),
        ("fs/open", "h", json!({"handleId": "u", "mode": "update"})),
        ("fs/open", "h", json!({"handleId": "a", "mode": "atomic"})),
    ]
}

async fn every_file_method_works_in_a_workspace(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let secret = fixture.write("other/secret", "s");
    // The policy has a denied path, so that reading needs a helper, too.
    let sandbox = fixture.request_policy(&[entry(&secret, "deny")]);
    let work = fixture.path("work");
    fixture.write("work/f", "old");
    for (method, name, more) in changes(&work) {
        let done = fixture.fs(&sandbox, method, &work.join(name), more).await;
        assert!(done.is_ok(), "{method}: {done:?}");
    }
    let text = |name: &str| std::fs::read_to_string(work.join(name)).unwrap();
    assert_eq!(
        (text("copy"), text("moved"), text("g")),
        ("new".into(), "new".into(), "new".into())
    );
    assert!(work.join("d/e").is_dir() && work.join("h").exists());
    assert_eq!(std::fs::read_link(work.join("l")).unwrap(), Path::new("f"));

    let file = work.join("moved");
    let found = fixture
        .fs(&sandbox, "fs/readFile", &file, json!({}))
        .await
        .unwrap();
    assert_eq!(bytes(&found["dataBase64"]), b"new");
    let inside = fixture
        .fs(&sandbox, "fs/getMetadata", &file, json!({}))
        .await
        .unwrap();
    let outside = fixture
        .fs(&Value::Null, "fs/getMetadata", &file, json!({}))
        .await
        .unwrap();
    assert_eq!(inside, outside);
    // Owners are those of the machine, not of a user namespace.
    let etc = Path::new("/etc/passwd");
    let owned = fixture
        .fs(&sandbox, "fs/getMetadata", etc, json!({}))
        .await
        .unwrap();
    assert_eq!((&owned["uid"], &owned["gid"]), (&json!(0), &json!(0)));
    let whole = fixture
        .fs(&sandbox, "fs/canonicalize", &work.join("d/.."), json!({}))
        .await;
    assert_eq!(whole.unwrap()["path"], uri(&work));
    let listed = fixture
        .fs(&sandbox, "fs/readDirectory", &work, json!({"links": true}))
        .await;
    let listed = listed.unwrap();
    let link = listed["entries"]
        .as_array()
        .unwrap()
        .iter()
        .find(|one| one["fileName"] == "l");
    assert_eq!(link.unwrap()["symlinkTarget"], "f");
    let options = json!({"maxDepth": 3, "maxDirectories": 10, "maxEntries": 100,
        "followDirectorySymlinks": false});
    let walked = fixture
        .fs(&sandbox, "fs/walk", &work, json!({"options": options}))
        .await
        .unwrap();
    let paths = walked["entries"].to_string();
    assert!(
        paths.contains("work/d/e") && paths.contains("work/moved"),
        "{walked}"
    );
    let hash = fixture
        .fs(&sandbox, "fs/hash", &file, json!({}))
        .await
        .unwrap();
    assert_eq!(hash["length"], 3);
    let search = json!({"pattern": "n[e]w", "gitignore": false});
    let found = fixture
        .fs(&sandbox, "fs/search", &work, search)
        .await
        .unwrap();
    assert_eq!(found["matches"].as_array().unwrap().len(), 3, "{found}");
    let bad = fixture
        .code(&sandbox, "fs/search", &work, json!({"pattern": "("}))
        .await;
    assert_eq!(bad, INVALID_PARAMS);
    let gone = fixture
        .fs(&sandbox, "fs/remove", &work.join("d"), json!({}))
        .await;
    assert!(gone.is_ok() && !work.join("d").exists(), "{gone:?}");
    // The limit is the same as without a policy.
    for (method, name, more, code) in [
        ("fs/readFile", "none", json!({}), NOT_FOUND),
        ("fs/readFile", "", json!({}), DENIED),
        (
            "fs/readFile",
            "l",
            json!({"followSymlinks": false}),
            INTERNAL,
        ),
        ("fs/createDirectory", "moved", json!({}), INTERNAL),
    ] {
        let inside = fixture
            .fs(&sandbox, method, &work.join(name), more.clone())
            .await;
        let outside = fixture
            .fs(&Value::Null, method, &work.join(name), more)
            .await;
        assert_eq!(inside, outside, "{method} {name}");
        assert_eq!(inside.unwrap_err().0, code, "{method} {name}");
    }
}

async fn file_requests_cannot_write_outside_the_workspace(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    fixture.write("other/f", "old");
    let other = fixture.path("other");
    for sandbox in [read_only(), fixture.request_policy(&[])] {
        for (method, name, more) in changes(&other) {
            let code = fixture
                .code(&sandbox, method, &other.join(name), more)
                .await;
            assert_eq!(code, INTERNAL, "{method}");
        }
        let code = fixture
            .code(&sandbox, "fs/remove", &other.join("f"), json!({}))
            .await;
        assert_eq!(code, INTERNAL);
        let found = fixture
            .fs(&sandbox, "fs/readFile", &other.join("f"), json!({}))
            .await
            .unwrap();
        assert_eq!(bytes(&found["dataBase64"]), b"old");
    }
    assert_eq!(std::fs::read_dir(&other).unwrap().count(), 1);
    assert_eq!(std::fs::read_to_string(other.join("f")).unwrap(), "old");
}

async fn file_requests_cannot_read_denied_paths(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let (file, directory) = (
        fixture.write("other/secret", "s"),
        fixture.make("other/closed"),
    );
    fixture.write("other/closed/f", "s");
    let sandbox = policy(
        vec![
            special("root", "read"),
            entry(&file, "deny"),
            entry(&directory, "deny"),
        ],
        "restricted",
    );
    for (method, path) in [
        ("fs/readFile", file.clone()),
        ("fs/hash", file.clone()),
        ("fs/open", file.clone()),
        ("fs/readFile", directory.join("f")),
        ("fs/getMetadata", directory.join("f")),
        ("fs/readDirectory", directory.clone()),
        ("fs/canonicalize", directory.join("f")),
    ] {
        let more = json!({"handleId": "h"});
        assert_eq!(
            fixture.code(&sandbox, method, &path, more).await,
            DENIED,
            "{method}"
        );
    }
    let search = json!({"pattern": "s", "gitignore": false});
    let found = fixture
        .fs(&sandbox, "fs/search", &fixture.path("other"), search)
        .await
        .unwrap();
    assert_eq!(found["matches"], json!([]));
    let watch = json!({"watchId": "w"});
    let refused = fixture
        .fs(&sandbox, "fs/watch", &fixture.path("other"), watch)
        .await;
    assert_eq!(refused.unwrap_err().0, INVALID_PARAMS);
}

async fn file_requests_under_a_minimal_policy_see_only_system_files(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let file = fixture.write("other/f", "s");
    let sandbox = policy(vec![special("minimal", "read")], "restricted");
    assert_eq!(
        fixture
            .code(&sandbox, "fs/readFile", &file, json!({}))
            .await,
        NOT_FOUND
    );
    let passwd = Path::new("/etc/passwd");
    assert!(
        fixture
            .fs(&sandbox, "fs/readFile", passwd, json!({}))
            .await
            .is_ok()
    );
}

async fn capability_discovery_applies_the_policy_of_each_root(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    fixture.make("work/.codex-plugin");
    fixture.write("work/.codex-plugin/plugin.json", "{}");
    for name in ["open", "closed"] {
        fixture.make(&format!("work/{name}"));
        fixture.write(&format!("work/{name}/SKILL.md"), name);
    }
    let (work, open) = (fixture.path("work"), fixture.path("work/open"));
    let denied = policy(
        vec![
            special("root", "read"),
            entry(&fixture.path("work/closed"), "deny"),
        ],
        "restricted",
    );
    let minimal = policy(vec![special("minimal", "read")], "restricted");
    let alone = policy(vec![entry(&open, "read")], "restricted");
    let dynamic = policy(vec![special("project_roots", "read")], "restricted");
    let root =
        |path: &Path, sandbox: &Value| json!({"id": "r", "path": uri(path), "sandbox": sandbox});
    let roots = json!({"roots": [
        root(&work, &denied),
        root(&work, &minimal),
        root(&open, &alone),
        root(&work, &dynamic),
        root(&work, &Value::Null),
    ]});
    let found = fixture.client.ok("capabilityRoots/discoverV1", roots).await;
    let skills = |at: usize| found["roots"][at]["skills"].as_array().unwrap().len();
    let error = |at: usize| found["roots"][at]["error"].as_str().unwrap_or_default();
    assert_eq!((skills(0), error(0)), (1, ""), "{found}");
    let warning = found["roots"][0]["warnings"][0].as_str().unwrap();
    assert!(warning.contains("work/closed"), "{warning}");
    assert!(
        skills(1) == 0 && error(1).contains("failed to inspect"),
        "{found}"
    );
    // The enclosing plugin cannot be seen under this policy, and neither can anything else.
    assert_eq!((skills(2), error(2)), (1, ""), "{found}");
    assert_eq!(found["roots"][2]["namespaceManifests"], json!([]));
    assert!(error(3).contains("requires cwd"), "{found}");
    assert_eq!((skills(4), error(4)), (2, ""), "{found}");
    assert!(found["roots"][4]["plugin"].is_object());
}

async fn file_requests_cannot_change_protected_names(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    fixture.make("work/.git");
    fixture.write("work/.git/config", "c");
    let (work, sandbox) = (fixture.path("work"), fixture.request_policy(&[]));
    let data = json!({"dataBase64": chunk("x")});
    for (method, name, more) in [
        ("fs/writeFile", ".git/config", data.clone()),
        ("fs/writeFile", ".codex", data.clone()),
        ("fs/writeFile", ".codex/config", data),
        ("fs/createDirectory", ".agents/x", json!({})),
        ("fs/remove", ".git", json!({})),
        ("fs/setMetadata", ".aws", json!({"mode": 0o777})),
        // The file is renamed to another mount of the view: a copy would stay if the source cannot
        // be removed.
        (
            "fs/rename",
            ".git/config",
            json!({"to": uri(&work.join("stolen")), "overwrite": true}),
        ),
        (
            "fs/rename",
            ".git",
            json!({"to": uri(&work.join("x")), "overwrite": true}),
        ),
    ] {
        assert!(
            fixture.code(&sandbox, method, &work.join(name), more).await < 0,
            "{method} {name}"
        );
    }
    assert_eq!(
        std::fs::read_to_string(work.join(".git/config")).unwrap(),
        "c"
    );
    proc::eventually("an unchanged workspace", || {
        let names: Vec<_> = std::fs::read_dir(&work).unwrap().collect();
        if names.len() == 1 {
            Ok(())
        } else {
            Err(format!("{names:?}"))
        }
    })
    .await;
}

async fn file_requests_do_not_follow_planted_symlinks(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let secret = fixture.write("other/secret", "s");
    let sandbox = fixture.request_policy(&[entry(&secret, "deny")]);
    let work = fixture.path("work");
    // The request is sent once before a helper exists and once while one runs.
    for round in 0..2 {
        let script = format!(
            "ln -sfn {0}/secret file{round}; ln -sfn {0} dir{round}",
            fixture.path("other").display()
        );
        assert_eq!(fixture.sh(&sandbox, &script).await.code, 0);
        let data = json!({"dataBase64": chunk("x")});
        for (method, name, more, code) in [
            ("fs/readFile", "file", json!({}), DENIED),
            ("fs/readFile", "dir/secret", json!({}), DENIED),
            ("fs/writeFile", "file", data.clone(), INTERNAL),
            ("fs/writeFile", "dir/new", data, INTERNAL),
            ("fs/remove", "dir/secret", json!({}), INTERNAL),
            ("fs/createDirectory", "dir/new", json!({}), INTERNAL),
        ] {
            let name = match name.split_once('/') {
                Some((link, rest)) => format!("{link}{round}/{rest}"),
                None => format!("{name}{round}"),
            };
            let found = fixture
                .code(&sandbox, method, &work.join(&name), more)
                .await;
            assert!(found == code || found == DENIED, "{method} {name}: {found}");
        }
    }
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), "s");
    assert_eq!(std::fs::read_dir(fixture.path("other")).unwrap().count(), 1);
}

async fn denied_file_stays_denied_after_it_is_replaced(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let secret = fixture.write("other/secret", "one");
    let sandbox = policy(
        vec![special("root", "read"), entry(&secret, "deny")],
        "restricted",
    );
    for text in ["two", "three"] {
        assert_eq!(
            fixture
                .code(&sandbox, "fs/readFile", &secret, json!({}))
                .await,
            DENIED
        );
        // The running helper has masked the file that is replaced.
        let next = fixture.write("other/next", text);
        std::fs::rename(next, &secret).unwrap();
    }
    assert_eq!(
        fixture
            .code(&sandbox, "fs/readFile", &secret, json!({}))
            .await,
        DENIED
    );
}

async fn handles_stream_files_under_a_policy(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let pinned = fixture.write("work/pinned", "old");
    let sandbox =
        fixture.request_policy(&[entry(&pinned, "read"), entry(&fixture.path("none"), "deny")]);
    let work = fixture.path("work");
    let big: Vec<u8> = (0..600_000u32).map(|n| n as u8).collect();
    for mode in ["replace", "update", "atomic"] {
        let path = work.join(mode);
        let open = json!({"handleId": mode, "mode": mode});
        fixture.fs(&sandbox, "fs/open", &path, open).await.unwrap();
        let block = json!({"handleId": mode, "offset": 0, "chunk": chunk(&big)});
        fixture.client.ok("fs/writeBlock", block).await;
        fixture
            .client
            .ok("fs/close", json!({"handleId": mode, "commit": true}))
            .await;
        assert_eq!(std::fs::read(&path).unwrap(), big, "{mode}");
        let open = json!({"handleId": "read"});
        fixture.fs(&sandbox, "fs/open", &path, open).await.unwrap();
        let block = json!({"handleId": "read", "offset": 0, "len": 600_000});
        let read = fixture.client.ok("fs/readBlock", block).await;
        assert_eq!(bytes(&read["chunk"]), big);
        fixture
            .client
            .ok("fs/close", json!({"handleId": "read"}))
            .await;
    }
    // A file that may not be replaced cannot be replaced by an atomic write.
    let open = json!({"handleId": "p", "mode": "atomic"});
    if fixture.fs(&sandbox, "fs/open", &pinned, open).await.is_ok() {
        let close = json!({"handleId": "p", "commit": true});
        fixture.client.refused("fs/close", close).await;
    }
    assert_eq!(std::fs::read_to_string(&pinned).unwrap(), "old");
    let data = json!({"dataBase64": chunk(&big)});
    fixture
        .fs(&sandbox, "fs/writeFile", &work.join("whole"), data)
        .await
        .unwrap();
    assert_eq!(std::fs::read(work.join("whole")).unwrap(), big);
    let info = fixture.client.ok("environment/info", json!({})).await;
    assert_eq!(info["capabilities"]["sandboxedFileStreaming"], true);
}

/// The requests are repeated for files of every size; the results are the same as without a policy.
async fn running_helper_reads_the_current_content(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let secret = fixture.write("other/secret", "s");
    let sandbox = policy(
        vec![special("root", "read"), entry(&secret, "deny")],
        "restricted",
    );
    let sizes = [0, 1, 4096, 32 << 10, (32 << 10) + 1, 300_000];
    let files = sizes.map(|size| {
        let text = "0123456789abcdef".repeat(size / 16 + 1);
        fixture.write(&format!("work/{size}"), &text[..size])
    });
    let (missing, directory) = (fixture.path("work/missing"), fixture.path("work"));
    for round in 0..3 {
        for file in &files {
            let read = fixture.fs(&sandbox, "fs/readFile", file, json!({})).await;
            let data = bytes(&read.unwrap()["dataBase64"]);
            assert!(data == std::fs::read(file).unwrap(), "{round} {file:?}");
        }
        for path in [&missing, &directory] {
            let held = fixture.fs(&sandbox, "fs/readFile", path, json!({})).await;
            let plain = fixture
                .fs(&Value::Null, "fs/readFile", path, json!({}))
                .await;
            assert_eq!(held, plain);
        }
        let denied = fixture.code(&sandbox, "fs/readFile", &secret, json!({}));
        assert_eq!(denied.await, DENIED);
        // The content of a file may change at any time.
        std::fs::write(&files[2], format!("round {round}")).unwrap();
    }
    // More concurrent requests than helpers.
    let params = json!({"path": uri(&files[3]), "sandbox": sandbox});
    let mut asked = Vec::new();
    for _ in 0..64 {
        asked.push(fixture.client.send("fs/readFile", params.clone()).await);
    }
    for id in asked {
        let read = fixture.client.answer(id).await.unwrap();
        assert_eq!(bytes(&read["dataBase64"]).len(), sizes[3]);
    }
    assert!((1..=4).contains(&fixture.helpers().await.len()));
}

async fn killed_helper_fails_at_most_one_request(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let secret = fixture.write("other/secret", "s");
    let sandbox = policy(
        vec![special("root", "read"), entry(&secret, "deny")],
        "restricted",
    );
    let file = fixture.write("other/f", "x");
    let zeros = Path::new("/dev/zero");
    assert!(
        fixture
            .fs(&sandbox, "fs/readFile", &file, json!({}))
            .await
            .is_ok()
    );
    let first = fixture.helpers().await;
    assert_eq!(first.len(), 1);
    // If the idle helper is killed, one request may fail; the next one does not.
    proc::signal(first[0].unsigned_abs(), Signal::KILL);
    proc::eventually("the helper's end", || {
        let state = std::fs::read_to_string(format!("/proc/{}/stat", first[0]));
        match state {
            Ok(state) if !state.contains(") Z") => Err(state),
            _ => Ok(()),
        }
    })
    .await;
    let met = fixture.fs(&sandbox, "fs/readFile", &file, json!({})).await;
    if met.is_err() {
        let next = fixture.fs(&sandbox, "fs/readFile", &file, json!({})).await;
        assert!(next.is_ok());
    }
    // If the working helper is killed, one request fails.
    assert!(
        fixture
            .fs(&sandbox, "fs/readFile", zeros, json!({}))
            .await
            .is_err()
    );
    let large = fixture.path("other/large");
    std::fs::File::create(&large)
        .unwrap()
        .set_len(1 << 42)
        .unwrap();
    fixture.own(&large);
    let params = json!({"path": uri(&large), "sandbox": sandbox});
    let asked = fixture.client.send("fs/hash", params).await;
    let server = fixture.server.server_pid().await;
    let helper = proc::eventually("a helper at work", || {
        // The launcher's child does the work. The one before it may have ended a moment ago.
        let helpers = helpers_of(server);
        let helper = helpers.first().ok_or("no helper")?;
        let inner = proc::children(helper.unsigned_abs());
        let inner = *inner.first().ok_or("no child")?;
        let stat = std::fs::read_to_string(format!("/proc/{inner}/stat")).map_err(|_| "gone")?;
        if stat.contains(") R") {
            Ok(inner)
        } else {
            Err("idle")
        }
    })
    .await;
    proc::signal(helper.unsigned_abs(), Signal::KILL);
    let failure = fixture.client.answer(asked).await.unwrap_err();
    assert_eq!(failure.code, INTERNAL);
    assert!(failure.message.contains("fs sandbox helper"), "{failure}");
    assert!(
        fixture
            .fs(&sandbox, "fs/readFile", &file, json!({}))
            .await
            .is_ok()
    );
}

async fn helpers_are_limited_and_end_with_the_server(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let mut most = 0;
    for n in 0..20 {
        let secret = fixture.write(&format!("other/secret{n}"), "s");
        let sandbox = policy(
            vec![special("root", "read"), entry(&secret, "deny")],
            "restricted",
        );
        assert_eq!(
            fixture
                .code(&sandbox, "fs/readFile", &secret, json!({}))
                .await,
            DENIED
        );
        most = most.max(fixture.helpers().await.len());
    }
    assert!((2..=17).contains(&most), "{most}");
    let helpers = fixture.helpers().await;
    proc::signal(fixture.server.server_pid().await, Signal::KILL);
    fixture.server.ended().await;
    proc::eventually("no helpers", || {
        let left: Vec<_> = helpers
            .iter()
            .filter(|pid| {
                std::fs::read(format!("/proc/{pid}/cmdline"))
                    .is_ok_and(|line| String::from_utf8_lossy(&line).contains("sandbox-launcher"))
            })
            .collect();
        if left.is_empty() {
            Ok(())
        } else {
            Err(format!("{left:?}"))
        }
    })
    .await;
}

async fn policies_without_file_restrictions_start_no_helper(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let file = fixture.path("other/f");
    let everything = policy(vec![special("root", "write")], "restricted");
    let unrestricted = json!({"windowsSandboxLevel": "disabled", "permissions":
        {"type": "managed", "file_system": {"type": "unrestricted"}, "network": "restricted"}});
    let external = json!({"windowsSandboxLevel": "disabled", "permissions":
        {"type": "external", "network": "restricted"}});
    let disabled = json!({"windowsSandboxLevel": "disabled", "permissions": {"type": "disabled"}});
    for sandbox in [everything, unrestricted, external, disabled] {
        let data = json!({"dataBase64": chunk("x")});
        fixture
            .fs(&sandbox, "fs/writeFile", &file, data)
            .await
            .unwrap();
        fixture
            .fs(&sandbox, "fs/readFile", &file, json!({}))
            .await
            .unwrap();
    }
    assert!(fixture.helpers().await.is_empty());
    let found = fixture
        .fs(&read_only(), "fs/readFile", &file, json!({}))
        .await
        .unwrap();
    assert_eq!(bytes(&found["dataBase64"]), b"x");
    assert_eq!(fixture.helpers().await.len(), 1);
    // A watch runs in the server, if the policy lets everything be read.
    let watch = json!({"watchId": "w"});
    fixture
        .fs(&read_only(), "fs/watch", &fixture.path("other"), watch)
        .await
        .unwrap();
}

async fn file_requests_reject_invalid_policies(user: ServerUser) {
    let mut fixture = SandboxFixture::new(user).await;
    let file = fixture.write("work/f", "x");
    let foreign = json!({"path": {"type": "path", "path": "file:///c:/x"}, "access": "deny"});
    let sandbox = policy(vec![special("root", "read"), foreign], "restricted");
    let (code, message) = fixture
        .fs(&sandbox, "fs/readFile", &file, json!({}))
        .await
        .unwrap_err();
    assert_eq!(code, DENIED);
    assert!(
        message.contains("invalid sandbox permission path URI"),
        "{message}"
    );
    let mut foreign = read_only();
    foreign["cwd"] = json!("file:///C:/x");
    for sandbox in [
        foreign.clone(),
        json!({"windowsSandboxLevel": "disabled", "permissions": {"type": "disabled"},
            "cwd": "file:///C:/x"}),
    ] {
        let code = fixture
            .code(&sandbox, "fs/readFile", &file, json!({}))
            .await;
        assert_eq!(code, INVALID_PARAMS);
    }
    let refused = fixture.refused(&foreign, &["true"]).await;
    assert_eq!(refused.code, INVALID_PARAMS, "{refused}");
    let data = json!({"dataBase64": chunk("x")});
    let (code, message) = fixture
        .fs(&fixture.workspace(), "fs/writeFile", &file, data)
        .await
        .unwrap_err();
    assert_eq!(code, INVALID_PARAMS);
    assert!(message.contains("requires cwd"), "{message}");
    let code = fixture
        .code(&json!({"permissions": 7}), "fs/readFile", &file, json!({}))
        .await;
    assert_eq!(code, INVALID_PARAMS);
}
