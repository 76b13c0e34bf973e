//! Scopes over every method of the table and many forms of its params: a call without the scope is
//! refused, and has no effect.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use exec_server_protocol::{MethodId, Scope};
use exec_server_testkit::proc;
use exec_server_testkit::server::ServerProcess;
use exec_server_testkit::wire::{ErrorReply, StartBuilder, WireClient};
use serde_json::{Map, Value, json};

use crate::{AuthFiles, session_with, start, text_of};

/// File content that no token without `fs:read` may read.
const SECRET: &str = "what-the-file-says";

/// A process that no token without `exec` may end.
const OWNED: &str = "the-process-of-the-owner";

/// Params by name, in the order in which the type declares them.
type OrderedParams = Vec<(&'static str, Value)>;

/// Params that the method accepts and that have an effect; `file` makes URIs below the tree.
/// A method without an arm does not compile.
fn sample(method: MethodId, file: &dyn Fn(&str) -> Value, owner: &str) -> OrderedParams {
    use MethodId as M;
    let path = |name: &str| ("path", file(name));
    let process = ("processId", json!(OWNED));
    let touch = ["touch", file("made-by-a-process").as_str().unwrap()]
        .map(|text| json!(text.trim_start_matches("file://")));
    let cwd = file("");
    match method {
        M::Initialize => vec![("clientName", json!("test"))],
        M::SessionEnd | M::EnvironmentInfo | M::EnvironmentStatus => vec![],
        M::EnvironmentConfigRead => vec![
            ("cwd", cwd),
            ("configPaths", json!([["model"]])),
            ("requirementsPaths", json!([])),
        ],
        M::CapabilityDiscoverV2 => vec![("cwd", cwd)],
        M::CapabilityDiscoverV1 => vec![("roots", json!([{"id": "r", "path": cwd}]))],
        M::CommandExec => vec![
            ("processId", json!("made")),
            ("argv", json!(touch)),
            ("cwd", json!("/")),
            ("env", json!({"PATH": "/usr/bin:/bin"})),
            ("tty", json!(false)),
        ],
        M::CommandWrite => vec![process, ("chunk", json!("eA=="))],
        M::CommandTerminate | M::ProcessCloseStdin => vec![process],
        M::ProcessStart => vec![
            ("processId", json!("made")),
            ("argv", json!(touch)),
            ("cwd", cwd),
            ("env", json!({"PATH": "/usr/bin:/bin"})),
            ("tty", json!(false)),
        ],
        M::ProcessRead => vec![
            process,
            ("afterSeq", json!(0)),
            ("maxBytes", json!(100)),
            ("waitMs", json!(0)),
            ("sessionId", json!(owner)),
        ],
        M::ProcessWrite => vec![process, ("chunk", json!("eA==")), ("writeId", json!("w"))],
        M::ProcessResize => vec![process, ("rows", json!(3)), ("cols", json!(4))],
        M::ProcessSignal => vec![
            process,
            ("signal", json!("kill")),
            ("scope", json!("tree")),
            ("sessionId", json!(owner)),
        ],
        M::ProcessTerminate => vec![
            process,
            ("mode", json!({"type": "force"})),
            ("wait", json!(false)),
            ("sessionId", json!(owner)),
        ],
        // Without a session the process does not exist, and the wait returns immediately.
        M::ProcessWait => vec![process, ("until", json!("exited")), ("timeoutMs", json!(1))],
        M::ProcessWaitFor => vec![process, ("any", json!([{"exit": true}]))],
        M::ProcessSnapshot => vec![
            process,
            ("maxBytes", json!(100)),
            ("sessionId", json!(owner)),
        ],
        M::ProcessList => vec![("all", json!(true))],
        M::ProcessPauseOutput => vec![process, ("paused", json!(false))],
        M::HttpRequest => vec![
            ("method", json!("GET")),
            ("url", json!("http://127.0.0.1:1/")),
            ("requestId", json!("r")),
        ],
        M::HttpCancel => vec![("requestId", json!("r"))],
        M::FsReadFile | M::FsGetMetadata | M::FsHash | M::FsCanonicalize => vec![path("secret")],
        M::FsReadDirectory => vec![path("")],
        M::FsSearch => vec![path(""), ("pattern", json!("what"))],
        M::FsWalk => vec![
            path(""),
            (
                "options",
                json!({"maxDepth": 3, "maxDirectories": 9, "maxEntries": 99,
                    "followDirectorySymlinks": false}),
            ),
        ],
        M::FsWatch => vec![("watchId", json!("w")), path("")],
        M::FsUnwatch => vec![("watchId", json!("w"))],
        M::FsWatchMissing => vec![
            ("watchId", json!(1)),
            ("missing", json!([file("nothing")])),
            ("present", Value::Null),
        ],
        M::FsOpen => vec![
            ("handleId", json!("h")),
            path("secret"),
            ("mode", json!("read")),
        ],
        M::FsReadBlock => vec![
            ("handleId", json!("h")),
            ("offset", json!(0)),
            ("len", json!(100)),
        ],
        M::FsWriteBlock => vec![
            ("handleId", json!("h")),
            ("offset", json!(0)),
            ("chunk", json!("eA==")),
        ],
        M::FsClose => vec![("handleId", json!("h")), ("commit", json!(true))],
        M::FsWriteFile => vec![path("secret"), ("dataBase64", json!("eA=="))],
        M::FsCreateDirectory => vec![path("made/deep"), ("recursive", json!(true))],
        M::FsCreateSymlink => vec![path("link"), ("target", json!("secret"))],
        M::FsRemove => vec![path("kept"), ("recursive", json!(true))],
        M::FsCopy => vec![
            ("sourcePath", file("secret")),
            ("destinationPath", file("copy")),
            ("recursive", json!(true)),
        ],
        M::FsRename => vec![("from", file("kept")), ("to", file("moved"))],
        M::FsSetMetadata => vec![
            path("secret"),
            ("mode", json!(0o600)),
            ("modifiedAtMs", json!(1000)),
        ],
    }
}

/// The valid spelling of an enum value, and spellings that a decoder must reject.
fn spellings(text: &str) -> [Value; 4] {
    [
        json!({text: null}),
        json!([text]),
        json!({text: [text]}),
        json!(text.to_uppercase()),
    ]
}

/// The sample in every form that a decoder may take for it, or for part of it.
fn shapes(method: MethodId, sample: &OrderedParams, random: &SeededRandom) -> Vec<Value> {
    let whole: Map<String, Value> = sample
        .iter()
        .map(|(name, value)| ((*name).to_owned(), value.clone()))
        .collect();
    let by_position: Vec<Value> = sample.iter().map(|(_, value)| value.clone()).collect();
    let object = Value::Object(whole.clone());
    let mut shapes = vec![
        object.clone(),
        json!(by_position),
        json!([object]),
        json!([]),
        json!({}),
        Value::Null,
        json!(true),
        json!(7),
        json!("text"),
    ];
    let with = |members: &Map<String, Value>, name: &str, value: Value| {
        let mut members = members.clone();
        members.insert(name.to_owned(), value);
        members
    };
    let mut members = vec![
        with(&whole, "unknown", json!({"mode": "read"})),
        with(&whole, "mode", json!("read")),
    ];
    for (name, value) in sample {
        let mut without = whole.clone();
        without.remove(*name);
        members.push(without);
        members.push(with(&whole, name, Value::Null));
        members.push(with(&whole, name, json!([value])));
        members.push(with(&whole, &name.to_uppercase(), value.clone()));
        for spelling in value.as_str().map(spellings).into_iter().flatten() {
            members.push(with(&whole, name, spelling));
        }
    }
    if method == MethodId::FsOpen {
        for mode in ["replace", "update", "atomic"] {
            let spellings = spellings(mode).into_iter().chain([json!(mode)]);
            members.extend(spellings.map(|mode| with(&whole, "mode", mode)));
            let mut by_position = by_position.clone();
            by_position[2] = json!(mode);
            shapes.push(json!(by_position));
        }
    }
    // Members of one form in another.
    for _ in 0..20 {
        let (one, other) = (random.of(&members), random.of(&members));
        let mixed = one.iter().chain(other.iter().filter(|_| random.coin()));
        members.push(
            mixed
                .map(|(name, value)| (name.clone(), value.clone()))
                .collect(),
        );
    }
    shapes.extend(members.into_iter().map(Value::Object));
    shapes
}

/// Pseudo-random numbers from a seed.
struct SeededRandom(std::cell::Cell<u64>);

impl SeededRandom {
    fn next(&self) -> u64 {
        let mut state = self.0.get();
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        self.0.set(state);
        state
    }

    fn coin(&self) -> bool {
        self.next() & 1 == 0
    }

    fn of<T: Clone>(&self, items: &[T]) -> T {
        let index = usize::try_from(self.next() % items.len() as u64).unwrap();
        items[index].clone()
    }
}

/// All entries below a directory: kind, mode, modification time and content.
fn snapshot(root: &Path) -> BTreeMap<PathBuf, (u32, i64, i64, Vec<u8>)> {
    let mut found = BTreeMap::new();
    let mut left = vec![root.to_owned()];
    while let Some(path) = left.pop() {
        let metadata = path.symlink_metadata().unwrap();
        let mut content = Vec::new();
        if metadata.is_dir() {
            let entries = std::fs::read_dir(&path).unwrap();
            left.extend(entries.map(|entry| entry.unwrap().path()));
        } else if metadata.is_file() {
            content = std::fs::read(&path).unwrap();
        }
        let state = (
            metadata.mode(),
            metadata.mtime(),
            metadata.mtime_nsec(),
            content,
        );
        found.insert(path, state);
    }
    found
}

fn is_denied(method: &str, answer: &Result<Value, ErrorReply>) -> bool {
    let start = format!("`{method}` needs the scope `");
    matches!(answer, Err(failure) if failure.code == -32600 && failure.message.starts_with(&start))
}

/// A server with a token for every scope and one for all, and a tree that must not change.
struct Fixture {
    files: AuthFiles,
    server: ServerProcess,
    owner: WireClient,
    tree: PathBuf,
}

impl Fixture {
    async fn new(more: &[&str]) -> Self {
        let files = AuthFiles::new();
        let tree = files.path("tree");
        std::fs::create_dir_all(tree.join("kept/deep")).unwrap();
        std::fs::write(tree.join("secret"), SECRET).unwrap();
        let mut args: Vec<String> = ["--ws-auth", "capability-token"].map(String::from).into();
        let scopes = Scope::ALL.map(|scope| (scope.name(), format!(":{scope}")));
        for (name, scopes) in [("all", String::new())].into_iter().chain(scopes) {
            let name = name.replace(':', "-");
            let file = files.write(&name, &format!("{name}-token"));
            args.push("--ws-token-file".to_owned());
            args.push(format!("{name}={file}{scopes}"));
        }
        args.extend(more.iter().map(|&arg| arg.to_owned()));
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let server = start(&args).await;
        let mut owner = session_with(server.url(), "all-token").await;
        owner
            .start(StartBuilder::sh(OWNED, "sleep 600").piped())
            .await;
        Self {
            files,
            server,
            owner,
            tree,
        }
    }

    async fn session(&self, scope: Scope) -> WireClient {
        let token = format!("{}-token", scope.name().replace(':', "-"));
        session_with(self.server.url(), &token).await
    }

    fn sample(&self, method: MethodId) -> OrderedParams {
        let file = |name: &str| {
            let path = self.tree.join(name);
            json!(format!("file://{}", text_of(&path).trim_end_matches('/')))
        };
        sample(method, &file, &self.owner.session_id())
    }
}

fn object(members: &OrderedParams) -> Value {
    let members = members
        .iter()
        .map(|(name, value)| ((*name).to_owned(), value.clone()));
    Value::Object(members.collect())
}

/// Each scope, as the table of methods defines it.
#[tokio::test]
async fn each_scope_allows_exactly_the_methods_that_name_it() {
    let fixture = Fixture::new(&[]).await;
    for scope in Scope::ALL {
        // In table order `session/end` would be last, but `process/terminate` ends OWNED.
        for &method in MethodId::ALL {
            let row = method.row();
            let mut client = fixture.session(scope).await;
            let sample = object(&fixture.sample(method));
            let answer = client.call(row.name, sample).await;
            let needed = match method {
                // The sample only reads.
                MethodId::FsOpen => &[Scope::FsRead],
                _ => row.scopes,
            };
            let opens = needed.is_empty()
                || needed.contains(&scope)
                || (needed == [Scope::Observe] && scope == Scope::Exec);
            assert_eq!(
                !is_denied(row.name, &answer),
                opens,
                "{scope}: {} {answer:?}",
                row.name
            );
        }
    }
}

#[tokio::test]
async fn params_of_any_form_have_no_effect_without_the_scope() {
    const SEED: u64 = 0x5eed_0fa1;
    let mut fixture = Fixture::new(&[]).await;
    let random = SeededRandom(SEED.into());
    let mut tried = 0;
    for scope in [Scope::FsRead, Scope::Observe, Scope::FsWrite] {
        let before = snapshot(&fixture.tree);
        for &method in MethodId::ALL {
            let row = method.row();
            let shapes = shapes(method, &fixture.sample(method), &random);
            let mut client = fixture.session(scope).await;
            let mut sent = Vec::new();
            for shape in &shapes {
                sent.push(client.queue(row.name, shape.clone()));
            }
            client.flush_and_take().await;
            for (id, shape) in sent.into_iter().zip(&shapes) {
                let answer = client.answer(id).await;
                tried += 1;
                let context = format!("{scope}: {} {shape} {answer:?}", row.name);
                if !row.scopes.is_empty() && !row.scopes.contains(&scope) {
                    assert!(is_denied(row.name, &answer), "{context}");
                } else if let Ok(answer) = &answer {
                    assert!(shape.is_object() || shape.is_null(), "{context}");
                    let answer = answer.to_string();
                    let tells = answer.contains(SECRET) || answer.contains("d2hhdC10aGU");
                    assert!(scope == Scope::FsRead || !tells, "{context}");
                    assert!(
                        scope == Scope::Observe || !answer.contains(OWNED),
                        "{context}"
                    );
                }
            }
        }
        // A token with `fs:write` changed files, but none started a process.
        if scope != Scope::FsWrite {
            assert_eq!(snapshot(&fixture.tree), before, "{scope}");
        }
        assert!(!fixture.tree.join("made-by-a-process").exists(), "{scope}");
        let listed = fixture.owner.ok("process/list", json!({})).await;
        assert_eq!(listed["processes"][0]["running"], true, "{scope}: {listed}");
    }
    assert!(tried > 3000, "{tried}");
}

/// Long data is decoded on another path.
#[tokio::test]
async fn long_params_are_refused_without_the_scope() {
    let fixture = Fixture::new(&[]).await;
    let before = snapshot(&fixture.tree);
    let data = json!("QUJD".repeat(100_000));
    for scope in [Scope::FsRead, Scope::Observe] {
        let mut client = fixture.session(scope).await;
        for (method, field) in [
            (MethodId::FsWriteFile, "dataBase64"),
            (MethodId::FsWriteBlock, "chunk"),
            (MethodId::ProcessWrite, "chunk"),
        ] {
            let mut params = object(&fixture.sample(method));
            params[field] = data.clone();
            let answer = client.call(method.row().name, params).await;
            assert!(is_denied(method.row().name, &answer), "{answer:?}");
        }
    }
    assert_eq!(snapshot(&fixture.tree), before);
}

#[tokio::test]
async fn params_that_are_not_an_object_are_rejected() {
    let fixture = Fixture::new(&[]).await;
    for &method in MethodId::ALL {
        let row = method.row();
        let mut client = session_with(fixture.server.url(), "all-token").await;
        let sample = fixture.sample(method);
        let by_position: Vec<&Value> = sample.iter().map(|(_, value)| value).collect();
        for params in [
            json!(by_position),
            json!([]),
            json!(0),
            json!("x"),
            json!(true),
        ] {
            let refused = client.refused(row.name, params.clone()).await;
            assert_eq!(refused.code, -32602, "{} {params}: {refused}", row.name);
            let start = format!("invalid params for `{}`: ", row.name);
            assert!(refused.message.starts_with(&start), "{params}: {refused}");
        }
    }
}

/// Every request that changes files is in the audit log, in every spelling of its params.
#[tokio::test]
async fn file_changes_are_in_the_audit_log() {
    let directory = tempfile::tempdir().unwrap();
    let log = text_of(&directory.path().join("audit.jsonl"));
    let fixture = Fixture::new(&["--audit-file", &log]).await;
    let mut client = session_with(fixture.server.url(), "all-token").await;
    let mut expected = Vec::new();
    let mut call = async |method: MethodId, params: Value, path: Option<Value>| {
        let name = method.row().name;
        let _ = client.call(name, params).await;
        if let Some(path) = path {
            expected.push((json!(name), path));
        }
    };
    for &method in MethodId::ALL {
        let changes = method.row().changes == exec_server_protocol::table::MethodChanges::Files;
        let sample = fixture.sample(method);
        let first = sample
            .iter()
            .find(|(name, _)| matches!(*name, "path" | "from" | "sourcePath"));
        let path = first.map(|(_, path)| path.clone());
        match method {
            MethodId::FsOpen => {
                for mode in [json!("read"), json!({"read": null})] {
                    let mut params = object(&sample);
                    params["mode"] = mode;
                    call(method, params, None).await;
                }
                for mode in [json!("atomic"), json!({"replace": null}), json!("update")] {
                    let mut params = object(&sample);
                    params["mode"] = mode;
                    call(method, params, path.clone()).await;
                }
            }
            // Through handles that were opened for writing.
            MethodId::FsClose | MethodId::FsWriteBlock => call(method, object(&sample), None).await,
            // Params that cannot be decoded change nothing.
            _ if changes => {
                assert!(path.is_some(), "{method:?}");
                call(method, json!([path]), None).await;
                call(method, object(&sample), path).await;
            }
            // Later calls need the session.
            MethodId::SessionEnd => {}
            _ => call(method, object(&sample), None).await,
        }
    }
    assert!(expected.len() > 8, "{expected:?}");
    let written = proc::eventually("the audit log", || {
        let text = std::fs::read_to_string(&log).unwrap();
        let written: Vec<(Value, Value)> = text
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap())
            .filter(|line| line["event"] == "file")
            .map(|line| (line["method"].clone(), line["path"].clone()))
            .collect();
        if written.len() < expected.len() {
            Err(text)
        } else {
            Ok(written)
        }
    })
    .await;
    assert_eq!(written, expected);
    drop(fixture.files);
}

/// Kind of the paths in a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PathClass {
    /// Below the tree.
    Ordinary,
    /// The file of a token.
    OfServer,
    /// A missing file.
    Missing,
}

/// Whose session a request names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NamedSession {
    /// None: that of the connection.
    Own,
    /// That of the token `all`, which owns the process.
    Owners,
}

/// One request of the table of all of them.
#[derive(Debug, Clone, Copy)]
struct Cell<'a> {
    method: MethodId,
    /// `None` for the token of all scopes, which is the owner's.
    scope: Option<Scope>,
    paths: PathClass,
    session: NamedSession,
    answer: &'a Result<Value, ErrorReply>,
}

impl Cell<'_> {
    fn is_allowed(&self) -> bool {
        let needed = match self.method {
            // The sample only reads.
            MethodId::FsOpen => &[Scope::FsRead],
            _ => self.method.row().scopes,
        };
        self.scope.is_none_or(|scope| {
            needed.is_empty()
                || needed.contains(&scope)
                || (needed == [Scope::Observe] && scope == Scope::Exec)
        })
    }

    fn check(&self) {
        let name = self.method.row().name;
        assert_eq!(!is_denied(name, self.answer), self.is_allowed(), "{self:?}");
        let text = match self.answer {
            Ok(answer) => answer.to_string(),
            Err(failure) => failure.message.clone(),
        };
        // The text of the token, plain and in base64.
        assert!(
            !text.contains("all-token") && !text.contains("YWxsLXRva2Vu"),
            "{self:?}"
        );
        if !self.is_allowed() {
            return;
        }
        if self.paths == PathClass::OfServer {
            let is_empty = match self.method {
                MethodId::FsWalk => text.contains("\"entries\":[]"),
                // They only report that something appears, or what can be read.
                MethodId::FsWatchMissing
                | MethodId::CapabilityDiscoverV1
                | MethodId::CapabilityDiscoverV2 => true,
                MethodId::FsReadDirectory => text.contains("Not a directory"),
                _ => text.contains("out of reach"),
            };
            // Handles and watches are named by an id, not by a path.
            assert!(is_empty || !takes_path(self.method), "{self:?}");
        }
        let names_process = matches!(
            self.method,
            MethodId::ProcessRead
                | MethodId::ProcessWrite
                | MethodId::ProcessSignal
                | MethodId::ProcessTerminate
                | MethodId::ProcessWaitFor
                | MethodId::ProcessWait
                | MethodId::ProcessSnapshot
                | MethodId::ProcessResize
                | MethodId::ProcessCloseStdin
                | MethodId::ProcessPauseOutput
        );
        if names_process && self.session == NamedSession::Own {
            let ignores_unknown = matches!(
                self.method,
                MethodId::ProcessTerminate
                    | MethodId::ProcessWrite
                    | MethodId::ProcessCloseStdin
                    | MethodId::ProcessSignal
            );
            let is_unknown = text.contains("unknown process id") || ignores_unknown;
            assert!(is_unknown, "another session's process: {self:?}");
        }
    }
}

fn takes_path(method: MethodId) -> bool {
    method.row().family == Some("filesystem")
        && !matches!(
            method,
            MethodId::FsClose
                | MethodId::FsReadBlock
                | MethodId::FsWriteBlock
                | MethodId::FsUnwatch
        )
}

/// Method, scope, principal, owner of the session and kind of path decide together.
#[tokio::test]
async fn every_cell_of_method_scope_session_and_path_is_as_the_rules_say() {
    let mut cells = 0;
    for scope in Scope::ALL.map(Some).into_iter().chain([None]) {
        let fixture = Fixture::new(&[]).await;
        let token = fixture.files.path("all");
        for &method in MethodId::ALL {
            if matches!(method, MethodId::Initialize | MethodId::SessionEnd) {
                continue;
            }
            for paths in [PathClass::Ordinary, PathClass::OfServer, PathClass::Missing] {
                let file = |name: &str| {
                    let path = match paths {
                        PathClass::Ordinary => fixture.tree.join(name),
                        PathClass::OfServer => token.clone(),
                        PathClass::Missing => fixture.tree.join("no").join(name),
                    };
                    json!(format!("file://{}", text_of(&path).trim_end_matches('/')))
                };
                // A process may touch any file of its user.
                let is_exec = method.row().scopes.contains(&Scope::Exec);
                if is_exec && paths != PathClass::Ordinary {
                    continue;
                }
                for session in [NamedSession::Own, NamedSession::Owners] {
                    let mut params = object(&sample(method, &file, &fixture.owner.session_id()));
                    let named = params.as_object_mut().unwrap().remove("sessionId");
                    match (session, named) {
                        (NamedSession::Owners, Some(id)) => params["sessionId"] = id,
                        (NamedSession::Owners, None) => continue,
                        (NamedSession::Own, _) => {}
                    }
                    let mut client = match scope {
                        Some(scope) => fixture.session(scope).await,
                        None => session_with(fixture.server.url(), "all-token").await,
                    };
                    let answer = client.call(method.row().name, params).await;
                    let answer = &answer;
                    let cell = Cell {
                        method,
                        scope,
                        paths,
                        session,
                        answer,
                    };
                    cell.check();
                    cells += 1;
                }
            }
        }
        assert_eq!(std::fs::read(&token).unwrap(), b"all-token");
    }
    assert!(cells > 300, "{cells}");
}
