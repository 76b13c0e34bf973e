//! Files of the server itself are out of reach of every file method, for every token, under every
//! name; and other processes cannot read its memory and environment.

use std::os::unix::fs::symlink;
use std::path::Path;

use exec_server_protocol::{MethodId, Scope};
use exec_server_testkit::proc;
use exec_server_testkit::server::ServerProcess;
use exec_server_testkit::wire::{WireClient, bytes};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::{AuthFiles, session_with, text_of};

/// Prefix of every secret of the server.
const SECRET: &str = "secret-of-the-server";

/// Requests of a file method for one path; `free` is a path that may be written. Methods without a
/// path return nothing. A method of files without an arm does not compile.
fn requests(method: MethodId, path: &str, free: &str) -> Vec<Value> {
    use MethodId as M;
    let at = |more: Value| {
        let mut params = json!({"path": path});
        for (name, value) in more.as_object().unwrap() {
            params[name] = value.clone();
        }
        params
    };
    match method {
        M::FsReadFile | M::FsGetMetadata | M::FsCanonicalize | M::FsHash => vec![at(json!({}))],
        M::FsReadDirectory => vec![at(json!({})), at(json!({"limit": 10}))],
        M::FsWriteFile => vec![at(json!({"dataBase64": "eA=="}))],
        M::FsCreateDirectory => vec![
            at(json!({"recursive": false})),
            at(json!({"recursive": true})),
        ],
        M::FsRemove => vec![
            at(json!({"recursive": false})),
            at(json!({"recursive": true, "force": true})),
        ],
        M::FsSetMetadata => vec![at(json!({"mode": 0o666}))],
        M::FsCreateSymlink => vec![at(json!({"target": "x"}))],
        M::FsSearch => vec![at(
            json!({"pattern": ".", "regex": true, "gitignore": false}),
        )],
        M::FsWatch => vec![at(json!({"watchId": "w"}))],
        M::FsWalk => {
            let options = json!({"maxDepth": 3, "maxDirectories": 100, "maxEntries": 1000,
                "followDirectorySymlinks": true});
            vec![at(json!({"options": options}))]
        }
        M::FsOpen => ["read", "replace", "update", "atomic"]
            .map(|mode| at(json!({"handleId": "h", "mode": mode})))
            .into(),
        M::FsCopy => vec![
            json!({"sourcePath": path, "destinationPath": free, "recursive": true}),
            json!({"sourcePath": "file:///etc/hostname", "destinationPath": path,
                "recursive": false}),
        ],
        M::FsRename => vec![
            json!({"from": path, "to": free, "overwrite": true}),
            json!({"from": free, "to": path, "overwrite": true}),
        ],
        // These methods have no path, or only report whether something exists. The catalog is read
        // from the user's configuration whatever `cwd` is.
        M::FsClose
        | M::FsReadBlock
        | M::FsWriteBlock
        | M::FsUnwatch
        | M::FsWatchMissing
        | M::CapabilityDiscoverV2 => vec![],
        M::CapabilityDiscoverV1 => vec![json!({"roots": [{"id": "r", "path": path}]})],
        // Reads the user's configuration, which leads to the path.
        M::EnvironmentConfigRead => vec![json!({"cwd": free, "configPaths": [["x"]],
            "requirementsPaths": []})],
        _ => panic!("{method:?} is no method of files"),
    }
}

/// Server with one file of each protected kind, and further names for these files.
struct ReachFixture {
    files: AuthFiles,
    server: ServerProcess,
    /// Files whose content must not change.
    secrets: Vec<String>,
}

impl ReachFixture {
    async fn new() -> Self {
        let files = AuthFiles::new();
        for name in ["state", "codex"] {
            std::fs::create_dir(files.path(name)).unwrap();
        }
        files.write("state/executor.identity", SECRET);
        let mut args = vec!["--ws-auth".to_owned(), "capability-token".to_owned()];
        for (name, scopes) in [("all", ""), ("reader", ":fs:read"), ("writer", ":fs:write")] {
            let file = files.write(name, &format!("{SECRET}-{name}"));
            args.push("--ws-token-file".to_owned());
            args.push(format!("{name}={file}{scopes}"));
        }
        let (ca, program) = (
            files.write("ca.pem", SECRET),
            files.write("credential", SECRET),
        );
        let settings = format!(
            "audit.redact = [\"{SECRET}\"]\nremote.tls_ca = \"{ca}\"\n\
             remote.credential_command = \"{program} --print\"\n"
        );
        let settings = files.write("settings.toml", &settings);
        let socket = text_of(&files.path("socket"));
        let audit = text_of(&files.path("audit.jsonl"));
        for option in [
            "--config",
            &settings,
            "--audit-file",
            &audit,
            "--listen",
            "ws://127.0.0.1:0",
        ] {
            args.push(option.to_owned());
        }
        let program = files.path("exec-server");
        let built = env!("CARGO_BIN_EXE_exec-server");
        std::fs::hard_link(built, &program)
            .or_else(|_| std::fs::copy(built, &program).map(drop))
            .unwrap();
        let mut command = Command::new(&program);
        command
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("EXEC_SERVER_STATE_DIR", files.path("state"))
            .env("CODEX_HOME", files.path("codex"))
            .env("EXEC_SERVER_TOKEN", format!("{SECRET}-in-the-environment"))
            .args(args);
        let server = ServerProcess::listening(command, &format!("unix://{socket}")).await;
        for name in ["reader", "settings.toml"] {
            std::fs::hard_link(files.path(name), files.path(&format!("hard-{name}"))).unwrap();
            symlink(name, files.path(&format!("soft-{name}"))).unwrap();
        }
        symlink("state", files.path("to-state")).unwrap();
        symlink(files.0.path(), files.path("around")).unwrap();
        let secrets = [
            "all",
            "reader",
            "writer",
            "settings.toml",
            "state/executor.identity",
            "ca.pem",
            "credential",
        ];
        Self {
            secrets: secrets.map(|name| text_of(&files.path(name))).into(),
            files,
            server,
        }
    }

    /// Every path that leads to a file of the server.
    fn aliases(&self) -> Vec<String> {
        let mut aliases = self.secrets.clone();
        aliases.extend(
            [
                "exec-server",
                "socket",
                "audit.jsonl",
                "hard-reader",
                "hard-settings.toml",
                "to-state/executor.identity",
                "around/reader",
                "around/around/state/executor.identity",
            ]
            .map(|name| text_of(&self.files.path(name))),
        );
        let (server, guardian) = self.pids();
        let bases = [
            "/proc/self".to_owned(),
            "/proc/thread-self".to_owned(),
            format!("/proc/{server}"),
            format!("/proc/{server}/task/{server}"),
            format!("/proc/{guardian}"),
            format!("/proc/1/root/proc/{server}"),
        ];
        for base in bases {
            for name in [
                "environ",
                "mem",
                "maps",
                "status",
                "fd/0",
                "root/etc/passwd",
                "exe",
            ] {
                aliases.push(format!("{base}/{name}"));
            }
        }
        // The guardian has closed its streams.
        aliases.retain(|alias| {
            let found = std::fs::symlink_metadata(alias);
            !found.is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
        });
        aliases
    }

    /// The pids of the server and its guardian.
    fn pids(&self) -> (i32, u32) {
        let guardian = self.server.pid();
        (proc::children(guardian)[0], guardian)
    }

    async fn client(&self, name: &str) -> WireClient {
        session_with(self.server.url(), &format!("{SECRET}-{name}")).await
    }

    fn contents(&self) -> Vec<(String, Vec<u8>)> {
        let read = |path: &String| (path.clone(), std::fs::read(path).unwrap());
        self.secrets.iter().map(read).collect()
    }
}

#[tokio::test]
async fn files_of_the_server_are_out_of_reach_of_every_method_and_token() {
    let fixture = ReachFixture::new().await;
    let before = fixture.contents();
    let free = format!("file://{}", fixture.files.path("free").display());
    let aliases = fixture.aliases();
    let is_root_of_init_reachable = std::fs::metadata("/proc/1/root/").is_ok();
    for (name, scopes) in [
        ("all", &[Scope::FsRead, Scope::FsWrite][..]),
        ("reader", &[Scope::FsRead]),
        ("writer", &[Scope::FsWrite]),
    ] {
        let mut client = fixture.client(name).await;
        let methods = MethodId::ALL.iter();
        let methods = methods.filter(|method| {
            let mut scopes = method.row().scopes.iter();
            scopes.any(|scope| matches!(scope, Scope::FsRead | Scope::FsWrite))
        });
        for &method in methods {
            let row = method.row();
            for alias in &aliases {
                for params in requests(method, &format!("file://{alias}"), &free) {
                    std::fs::write(fixture.files.path("free"), "mine").unwrap();
                    let config = fixture.files.path("codex/config.toml");
                    let _ = std::fs::remove_file(&config);
                    symlink(alias, &config).unwrap();
                    let what = format!("{name}: {alias}: {} {params}", row.name);
                    let answer = client.call(row.name, params).await;
                    let failure = match answer {
                        // The root of a walk is not a directory, or cannot be listed.
                        Ok(walked) if method == MethodId::FsWalk => {
                            assert_eq!(walked["entries"], json!([]), "{what}");
                            continue;
                        }
                        // The guardian has closed its streams, so this name does not exist.
                        Ok(read)
                            if method == MethodId::EnvironmentConfigRead
                                && alias.ends_with("/fd/0") =>
                        {
                            assert_eq!(read["config"]["layers"], json!([]), "{what}");
                            continue;
                        }
                        // What cannot be read has no capabilities.
                        Ok(found) if method == MethodId::CapabilityDiscoverV1 => {
                            assert!(!found.to_string().contains(SECRET), "{what}: {found}");
                            continue;
                        }
                        Ok(answer) => panic!("{what} gave {answer}"),
                        Err(failure) => failure,
                    };
                    assert!(!failure.message.contains(SECRET), "{what}: {failure}");
                    let allowed = row.scopes.iter().any(|scope| scopes.contains(scope));
                    if failure.message.contains("needs the scope") {
                        assert!(!allowed || method == MethodId::FsOpen, "{what}: {failure}");
                        continue;
                    }
                    assert!(allowed, "{what}: {failure}");
                    // The kernel refuses these opens before the server can identify the file.
                    let by_kernel = match method {
                        // Where the server may not use the root directory of process 1.
                        _ if alias.starts_with("/proc/1/root/") && !is_root_of_init_reachable => {
                            "Permission denied"
                        }
                        MethodId::FsReadDirectory => "Not a directory",
                        MethodId::CapabilityDiscoverV1 => "",
                        MethodId::FsOpen if alias.ends_with("/exec-server") => "Text file busy",
                        _ if alias.ends_with("/socket") => "No such device or address",
                        // The guardian has closed its streams.
                        _ if alias.ends_with("/fd/0") => "No such file or directory",
                        // Processes of another user or namespace.
                        _ if alias.starts_with("/proc") => "Permission denied",
                        _ => "out of reach",
                    };
                    let is_no_file = ["only supports regular files", "is not a file"]
                        .iter()
                        .any(|text| failure.message.contains(text));
                    let is_gone = failure.message.contains("No such file or directory");
                    let is_stream = alias.ends_with("/fd/0");
                    if is_no_file && (alias.ends_with("/socket") || is_stream)
                        || is_gone && is_stream
                    {
                        continue;
                    }
                    let is_by_kernel = failure.message.contains(by_kernel);
                    if is_by_kernel && by_kernel != "out of reach" {
                        continue;
                    }
                    assert_eq!(failure.code, -32600, "{what}: {failure}");
                    assert!(
                        failure.message.contains("out of reach"),
                        "{what}: {failure}"
                    );
                }
            }
        }
    }
    assert_eq!(before, fixture.contents());
    assert!(fixture.files.path("socket").exists());
    proc::eventually("an audited refusal", || {
        let audit = std::fs::read_to_string(fixture.files.path("audit.jsonl")).unwrap();
        let is_audited = audit.contains("\"event\":\"fileRefused\"");
        is_audited.then_some(()).ok_or(audit)
    })
    .await;
    // The other files of the same directory can be used.
    let mut client = fixture.client("all").await;
    let path = format!("file://{}", fixture.files.path("ordinary").display());
    client
        .ok("fs/writeFile", json!({"path": path, "dataBase64": "eA=="}))
        .await;
    let read = client.ok("fs/readFile", json!({"path": path})).await;
    assert_eq!(bytes(&read["dataBase64"]), b"x");
}

#[tokio::test]
async fn directories_of_the_server_cannot_be_listed_or_exchanged() {
    let fixture = ReachFixture::new().await;
    let before = fixture.contents();
    let mut client = fixture.client("all").await;
    let uri = |name: &str| format!("file://{}", fixture.files.path(name).display());
    for (method, params) in [
        ("fs/readDirectory", json!({"path": uri("state")})),
        ("fs/readDirectory", json!({"path": uri("to-state")})),
        (
            "fs/writeFile",
            json!({"path": uri("to-state/new"), "dataBase64": "eA=="}),
        ),
        (
            "fs/createDirectory",
            json!({"path": uri("state/new"), "recursive": true}),
        ),
        (
            "fs/rename",
            json!({"from": uri("state"), "to": uri("free"), "overwrite": true}),
        ),
        (
            "fs/rename",
            json!({"from": uri(""), "to": format!("{}-moved", uri("")), "overwrite": true}),
        ),
        ("fs/remove", json!({"path": uri(""), "recursive": true})),
        ("fs/watch", json!({"path": uri("state"), "watchId": "w"})),
        (
            "fs/copy",
            json!({"sourcePath": uri("state"), "destinationPath": uri("free"), "recursive": true}),
        ),
    ] {
        let failure = client.refused(method, params.clone()).await;
        assert_eq!(failure.code, -32600, "{method} {params}: {failure}");
        assert!(
            failure.message.contains("out of reach"),
            "{method}: {failure}"
        );
    }
    let search = json!({"path": uri(""), "pattern": SECRET, "gitignore": false});
    let found = client.ok("fs/search", search).await;
    assert_eq!(found["matches"], json!([]));
    let options = json!({"maxDepth": 9, "maxDirectories": 100, "maxEntries": 1000,
        "followDirectorySymlinks": true});
    let walked = client
        .ok("fs/walk", json!({"path": uri(""), "options": options}))
        .await;
    assert!(!walked["entries"].to_string().contains("executor.identity"));
    assert_eq!(before, fixture.contents());
}

#[tokio::test]
async fn replaced_or_added_secret_is_immediately_out_of_reach() {
    let fixture = ReachFixture::new().await;
    let mut client = fixture.client("reader").await;
    let path = |name: &str| fixture.files.path(name);
    let uri = |name: &str| format!("file://{}", path(name).display());
    for round in 0..5 {
        fixture.files.write("next", &format!("{SECRET}-{round}"));
        std::fs::rename(path("next"), path("all")).unwrap();
        for method in ["fs/readFile", "fs/hash"] {
            let failure = client.refused(method, json!({"path": uri("all")})).await;
            assert!(failure.message.contains("out of reach"), "{failure}");
        }
        fixture.files.write("state/new", SECRET);
        let read = json!({"path": uri("state/new")});
        let failure = client.refused("fs/readFile", read).await;
        assert!(failure.message.contains("out of reach"), "{failure}");
        std::fs::remove_file(path("state/new")).unwrap();
    }
}

/// A policy hides files by path, which does not cover their other names.
#[tokio::test]
async fn files_of_the_server_are_out_of_reach_under_a_policy() {
    let fixture = ReachFixture::new().await;
    let before = fixture.contents();
    let mut client = fixture.client("all").await;
    let uri = |name: &str| format!("file://{}", fixture.files.path(name).display());
    let entry = |access: &str| json!({"path": {"type": "path", "path": uri("")}, "access": access});
    let root = json!({"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"});
    for entries in [json!([root]), json!([root, entry("write")])] {
        let sandbox = json!({"windowsSandboxLevel": "disabled", "permissions": {"type": "managed",
            "file_system": {"type": "restricted", "entries": entries}, "network": "restricted"}});
        for name in [
            "reader",
            "hard-reader",
            "state/executor.identity",
            "hard-settings.toml",
        ] {
            for (method, more) in [
                ("fs/readFile", json!({})),
                ("fs/hash", json!({})),
                ("fs/writeFile", json!({"dataBase64": "eA=="})),
                (
                    "fs/copy",
                    json!({"destinationPath": uri("free"), "recursive": false}),
                ),
                ("fs/rename", json!({"to": uri("free"), "overwrite": true})),
                ("fs/open", json!({"handleId": "h", "mode": "replace"})),
            ] {
                let mut params = more;
                let path = match method {
                    "fs/copy" => "sourcePath",
                    "fs/rename" => "from",
                    _ => "path",
                };
                params[path] = json!(uri(name));
                params["sandbox"] = sandbox.clone();
                let failure = client.refused(method, params).await;
                assert!(
                    !failure.message.contains(SECRET),
                    "{method} {name}: {failure}"
                );
                assert!(!fixture.files.path("free").exists(), "{method} {name}");
            }
        }
    }
    assert_eq!(before, fixture.contents());
}

#[tokio::test]
async fn discovery_does_not_show_secrets_behind_links() {
    let fixture = ReachFixture::new().await;
    std::fs::create_dir_all(fixture.files.path("plugin/skill")).unwrap();
    symlink("../../reader", fixture.files.path("plugin/skill/SKILL.md")).unwrap();
    let mut client = fixture.client("reader").await;
    let root = format!("file://{}", fixture.files.path("plugin").display());
    let roots = json!({"roots": [{"id": "r", "path": root}]});
    let found = client.ok("capabilityRoots/discoverV1", roots).await;
    assert!(!found.to_string().contains(SECRET), "{found}");
}

#[tokio::test]
async fn tokens_are_in_no_environment_of_the_server() {
    let fixture = ReachFixture::new().await;
    let (server, guardian) = fixture.pids();
    for pid in [server.to_string(), guardian.to_string()] {
        let environment = std::fs::read(Path::new("/proc").join(pid).join("environ"));
        // Only root may read the other process's memory at all.
        let environment = environment.unwrap_or_default();
        let environment = String::from_utf8_lossy(&environment);
        assert!(!environment.contains(SECRET), "{environment}");
    }
}

/// A writer of memory must not find the program's code and tables at known addresses.
#[test]
fn program_is_position_independent_with_read_only_relocations() {
    const DYNAMIC: u32 = 2;
    const RELRO: u32 = 0x6474_e552;
    const FLAGS: u64 = 30;
    const FLAGS_1: u64 = 0x6fff_fffb;
    let program = std::fs::read(env!("CARGO_BIN_EXE_exec-server")).unwrap();
    let number = |at: usize, bytes: usize| {
        let mut value = [0; 8];
        value[..bytes].copy_from_slice(&program[at..at + bytes]);
        u64::from_le_bytes(value)
    };
    assert_eq!(number(16, 2), 3, "not a shared object");
    let (start, size, count) = (number(32, 8), number(54, 2), number(56, 2));
    let headers = (0..count).map(|index| (start + index * size) as usize);
    let of_kind = |kind: u32| headers.clone().find(|&at| number(at, 4) == u64::from(kind));
    assert!(of_kind(RELRO).is_some(), "no read-only relocations");
    let dynamic = of_kind(DYNAMIC).expect("a dynamic section");
    let (offset, bytes) = (number(dynamic + 8, 8), number(dynamic + 32, 8));
    let binds_now = (offset..offset + bytes).step_by(16).any(|at| {
        let (tag, value) = (number(at as usize, 8), number(at as usize + 8, 8));
        (tag == FLAGS && value & 8 != 0) || (tag == FLAGS_1 && value & 1 != 0)
    });
    assert!(binds_now, "functions are bound when they are first called");
}
