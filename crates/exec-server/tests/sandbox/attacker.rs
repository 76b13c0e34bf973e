//! Random attacks from inside sandboxes: generated sequences of commands, file requests and changes by
//! the host, on one tree, under several policies. After each sequence the host checks what no
//! sequence may change.
//!
//! `EXEC_SERVER_ATTACK_SECONDS` sets the duration for each user, and `EXEC_SERVER_ATTACK_SEED`
//! repeats a sequence that failed.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

use exec_server_testkit::proc;
use exec_server_testkit::wire::bytes;
use serde_json::{Value, json};

use crate::managed::{managed, proxy};
use crate::{SandboxFixture, ServerUser, entry, for_both, generated_entries, policy, special};

for_both! {
    random_sequences_change_and_read_nothing_that_their_policies_forbid,
}

/// Content of the files that every policy denies.
const DENIED: &str = "DENIED-CONTENT";

/// Content of the files that only the minimal policy hides.
const OUTSIDE: &str = "OUTSIDE-CONTENT";

/// Variable of the server's environment; see `SandboxFixture`.
const SERVER_SECRET: &str = "only for the server";

/// Content of the server's own files.
const SERVER_FILE: &str = "SERVER-FILE-CONTENT";

/// Duration if the environment does not set one: enough for a few hundred sequences.
const DEFAULT_SECONDS: u64 = 6;

const PROTECTED: [&str; 4] = [".git", ".agents", ".codex", ".aws"];

/// Random numbers that depend only on the seed (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, count: usize) -> usize {
        usize::try_from((self.next() >> 33) % count as u64).unwrap()
    }

    fn pick<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[self.below(of.len())]
    }
}

/// Policies of a sequence. All of them deny the same files and protect the same names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    Workspace,
    Minimal,
    ReadOnly,
    /// Makes `.git/objects` writable.
    Objects,
    /// Grants and denies random paths of the workspace, besides the common entries.
    Generated(u64),
}

/// The network of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CommandNetwork {
    None,
    /// A managed one that denies every host.
    Managed,
    /// That of the machine.
    Enabled,
}

impl CommandNetwork {
    fn random(random: &mut Random) -> Self {
        match random.below(6) {
            0 => Self::Enabled,
            1 => Self::Managed,
            _ => Self::None,
        }
    }
}

/// Sockets outside that no command without a network may reach.
struct HostSockets {
    port: u16,
    reached: Arc<AtomicUsize>,
}

impl HostSockets {
    /// Listens on a port, and on a unix socket that every user may use.
    fn listen(path: &Path) -> Self {
        let reached = Arc::new(AtomicUsize::new(0));
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = tcp.local_addr().unwrap().port();
        let unix = std::os::unix::net::UnixListener::bind(path).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
        // The threads end with the process of the test.
        let count = Arc::clone(&reached);
        std::thread::spawn(move || {
            for accepted in tcp.incoming().flatten() {
                count.fetch_add(1, Ordering::Relaxed);
                drop(accepted);
            }
        });
        let count = Arc::clone(&reached);
        std::thread::spawn(move || {
            for accepted in unix.incoming().flatten() {
                count.fetch_add(1, Ordering::Relaxed);
                drop(accepted);
            }
        });
        Self { port, reached }
    }

    fn reached(&self) -> usize {
        self.reached.load(Ordering::Relaxed)
    }
}

/// Types that `.git` has before a sequence.
const REPOSITORIES: [&str; 4] = ["missing", "directory", "file", "link"];

struct Tree {
    root: PathBuf,
    repository: &'static str,
    /// The directory with the server's own files.
    server: PathBuf,
    /// A unix socket and a port outside.
    socket: PathBuf,
    port: u16,
}

impl Tree {
    fn make(
        fixture: &SandboxFixture,
        sockets: &HostSockets,
        number: usize,
        random: &mut Random,
    ) -> Self {
        let root = format!("s{number}");
        let name = |below: &str| format!("{root}/{below}");
        fixture.make(&root);
        for directory in [
            "work",
            "work/src",
            "work/docs",
            "work/vault",
            "out",
            "out/sub",
        ] {
            fixture.make(&name(directory));
        }
        for (file, content) in [
            ("work/src/a", "a"),
            ("work/src/b.env", DENIED),
            ("work/docs/d", "d"),
            ("work/vault/secret", DENIED),
            ("work/file", "f"),
            ("out/canary", OUTSIDE),
            ("out/sub/x.env", OUTSIDE),
        ] {
            fixture.write(&name(file), content);
        }
        let repository = REPOSITORIES[random.below(REPOSITORIES.len())];
        let git = fixture.path(&name("work/.git"));
        match repository {
            "directory" => {
                for directory in [".git", ".git/hooks", ".git/objects"] {
                    fixture.make(&name(&format!("work/{directory}")));
                }
                fixture.write(&name("work/.git/config"), "c");
            }
            "file" => {
                fixture.make(&name("work/real"));
                fixture.write(&name("work/.git"), "gitdir: real\n");
            }
            "link" => {
                fixture.make(&name("work/real"));
                std::os::unix::fs::symlink("real", git).unwrap();
            }
            _ => {}
        }
        Self {
            root: fixture.path(&root),
            repository,
            server: fixture.path("server"),
            socket: fixture.path("socket"),
            port: sockets.port,
        }
    }

    fn policy(&self, which: Policy, network: CommandNetwork) -> Value {
        let work = self.root.join("work");
        let mut entries = match which {
            Policy::Minimal => vec![special("minimal", "read"), entry(&work, "write")],
            Policy::ReadOnly => vec![special("root", "read")],
            Policy::Workspace | Policy::Objects => vec![
                special("root", "read"),
                special("project_roots", "write"),
                special("slash_tmp", "write"),
            ],
            Policy::Generated(seed) => {
                let mut random = Random(seed | 1);
                let names = ["", "src", "src/new", "docs", "file", "new", "link"];
                let paths = names.map(|name| work.join(name));
                let mut entries = vec![special("root", "read")];
                entries.extend(generated_entries(&mut |count| random.below(count), &paths));
                entries
            }
        };
        if which == Policy::Objects {
            entries.push(entry(&work.join(".git/objects"), "write"));
        }
        entries.push(entry(&work.join("vault"), "deny"));
        entries.push(json!({"access": "deny", "path": {"type": "glob_pattern",
            "pattern": format!("{}/**/*.env", work.display())}}));
        let network = match network {
            CommandNetwork::Enabled => "enabled",
            CommandNetwork::None | CommandNetwork::Managed => "restricted",
        };
        let mut sandbox = policy(entries, network);
        let uri = format!("file://{}", work.display());
        sandbox["workspaceRoots"] = json!([uri]);
        sandbox["cwd"] = json!(uri);
        sandbox
    }

    /// Paths that attacks use, relative to the working directory or absolute.
    fn path(&self, random: &mut Random) -> String {
        let path = random.pick(&[
            ".",
            "src",
            "src/a",
            "src/b.env",
            "src/new",
            "vault",
            "vault/secret",
            "vault/new",
            "docs",
            "docs/d",
            "file",
            "new",
            "new/x",
            "link",
            "link/x",
            "link/secret",
            "link/b.env",
            "link/canary",
            ".git",
            ".git/hooks",
            ".git/hooks/pre-commit",
            ".git/config",
            ".git/objects",
            ".git/objects/o",
            ".codex",
            ".codex/config",
            ".aws",
            ".agents",
            ".agents/x",
            "real",
            "real/config",
            "../out",
            "../out/canary",
            "../out/sub",
            "../out/new",
            "../work",
            "..",
            "/proc/self/cwd/vault/secret",
            "/proc/self/root$OUT/canary",
            "/proc/self/cwd/../out/canary",
            "/proc/1/root$OUT/canary",
            "/proc/thread-self/cwd/src/b.env",
            "/proc/self/fd/9",
            "/dev/fd/9/../secret",
            "$OUT/canary",
            "$WORK/src/b.env",
            "$WORK/.git/hooks/post-commit",
            "/tmp/$NAME",
            "src/../vault/secret",
            "./src/./b.env",
            "//$WORK/vault",
            "$SERVER/token",
            "$SERVER/settings.toml",
            "$SERVER/state/executor.identity",
            "$SERVER/state",
            "$SOCKET",
            "/proc/self/environ",
            "/proc/1/environ",
            "/proc/self/mem",
        ]);
        let text = |path: PathBuf| path.display().to_string();
        path.replace("$SERVER", &text(self.server.clone()))
            .replace("$SOCKET", &text(self.socket.clone()))
            .replace("$OUT", &text(self.root.join("out")))
            .replace("$WORK", &text(self.root.join("work")))
            .replace("$NAME", &text(self.root.clone()).replace('/', "_"))
    }

    /// One line of a shell script.
    fn line(&self, random: &mut Random) -> String {
        let (one, two) = (self.path(random), self.path(random));
        let mode = random.pick(&[
            "0", "100", "200", "300", "400", "500", "700", "777", "1777", "1555", "4755",
        ]);
        let line = random.pick(&[
            "chmod @M @P",
            "chmod @M @P",
            "chmod -R @M @P",
            "mkdir -p @P",
            "mkdir @P",
            "rm -rf @P",
            "rmdir @P",
            "mv -T @P @Q",
            "mv @P @Q",
            "ln @P @Q",
            "ln -s @Q @P",
            "ln -sfn @Q @P",
            "cat @P",
            "cat < @P",
            "echo x > @P",
            "echo x >> @P",
            "cp -r @P @Q",
            "cp @P @Q",
            "touch @P",
            "touch -d @1 @P",
            "truncate -s 0 @P",
            "exec 9< @P; cat <&9",
            "exec 9< @P; cat /proc/self/fd/9",
            "exec 9< @P",
            "cat @P/*",
            "(cd @P && cat secret b.env canary *)",
            "find @P -type f -exec cat {} +",
            "tar cf - @P | tar xOf -",
            "cat /proc/*/environ",
            "cat /proc/[0-9]*/root$OUT/canary",
            "chown -h 1:1 @P",
            "ls -la @P",
            "stat @P",
            "mount --bind @P @Q",
            "unshare -r mount --bind @P @Q",
            "(sleep 0.02; chmod 700 @P; cat @P; echo x > @P) &",
            "setsid sh -c 'mkdir -p @P; echo x > @P' &",
            "exec 8> @P; echo x >&8",
            "mkfifo @P",
            "dd if=@P of=@Q conv=notrunc",
            "readlink -f @P",
            "mv @P @P.bak",
            "install -m @M @P @Q",
            "curl -s -m 1 --noproxy '*' http://127.0.0.1:@N/",
            "curl -s -m 1 http://127.0.0.1:@N/",
            "curl -s -m 1 --unix-socket $SOCKET http://x/",
            "setsid sh -c 'sleep 0.05; curl -s -m 1 --unix-socket $SOCKET http://x/' &",
            "ln $SERVER/token @P",
            "ln -s $SERVER/token @P",
            "cat $SERVER/token $SERVER/settings.toml",
        ]);
        line.replace("$SERVER", &self.server.display().to_string())
            .replace("$SOCKET", &self.socket.display().to_string())
            .replace("@N", &self.port.to_string())
            .replace("$OUT", &self.root.join("out").display().to_string())
            .replace("@M", mode)
            .replace("@P", &one)
            .replace("@Q", &two)
    }

    fn script(&self, random: &mut Random) -> String {
        let mut script = "exec 2>&1\n".to_owned();
        for _ in 0..3 + random.below(8) {
            let _ = writeln!(script, "{}", self.line(random));
        }
        script
    }

    /// A file request, without its policy.
    fn request(&self, random: &mut Random) -> (&'static str, Value) {
        let work = self.root.join("work");
        let uri = |path: String| {
            let path = if path.starts_with('/') {
                path
            } else {
                format!("{}/{path}", work.display())
            };
            json!(format!("file://{}", path.replace("/./", "/")))
        };
        let (one, two) = (uri(self.path(random)), uri(self.path(random)));
        let follow = random.below(2) == 0;
        match random.below(18) {
            13 => ("fs/hash", json!({"path": one})),
            14 => ("fs/canonicalize", json!({"path": one})),
            15 => (
                "fs/open",
                json!({"path": one, "handleId": "h", "mode": "read"}),
            ),
            16 => (
                "fs/watch",
                json!({"path": one, "watchId": "w", "recursive": follow}),
            ),
            17 => (
                "capabilityRoots/discoverV1",
                json!({"roots": [{"id": "r", "path": one}]}),
            ),
            0 => ("fs/readFile", json!({"path": one})),
            1 => (
                "fs/writeFile",
                json!({"path": one, "dataBase64": "eA==", "followSymlinks": follow}),
            ),
            2 => (
                "fs/createDirectory",
                json!({"path": one, "recursive": follow}),
            ),
            3 => (
                "fs/remove",
                json!({"path": one, "recursive": follow, "force": false}),
            ),
            4 => (
                "fs/rename",
                json!({"from": one, "to": two, "overwrite": follow}),
            ),
            5 => (
                "fs/copy",
                json!({"sourcePath": one, "destinationPath": two, "recursive": follow}),
            ),
            6 => (
                "fs/createSymlink",
                json!({"path": one, "target": self.path(random)}),
            ),
            7 => ("fs/setMetadata", json!({"path": one, "mode": 0o777})),
            8 => ("fs/readDirectory", json!({"path": one, "links": follow})),
            9 => (
                "fs/walk",
                json!({"path": one, "options": {"maxDepth": 4, "maxDirectories": 50, "maxEntries": 100,
                "followDirectorySymlinks": follow}}),
            ),
            10 => ("fs/search", json!({"path": one, "pattern": "CONTENT"})),
            11 => (
                "fs/open",
                json!({"path": one, "handleId": "h", "mode": random.pick(&["replace", "update", "atomic"])}),
            ),
            _ => (
                "fs/getMetadata",
                json!({"path": one, "followSymlinks": follow}),
            ),
        }
    }
}

/// Everything about the files below a path that nothing may change.
fn snapshot(path: &Path, into: &mut BTreeMap<PathBuf, String>) {
    let Ok(found) = std::fs::symlink_metadata(path) else {
        return;
    };
    let mut text = format!(
        "mode {:o}, owner {}:{}, changed {}.{:09}",
        found.mode(),
        found.uid(),
        found.gid(),
        found.mtime(),
        found.mtime_nsec()
    );
    if found.is_symlink() {
        let _ = write!(text, ", to {}", std::fs::read_link(path).unwrap().display());
    } else if found.is_file() {
        let content = std::fs::read(path).unwrap();
        let _ = write!(
            text,
            ", {} links, {:?}",
            found.nlink(),
            String::from_utf8_lossy(&content)
        );
    } else if found.is_dir() {
        for entry in std::fs::read_dir(path).unwrap() {
            snapshot(&entry.unwrap().path(), into);
        }
    }
    into.insert(path.to_owned(), text);
}

/// As [`snapshot`], without the times of directories: a call that is refused in the end may have
/// created and removed a temporary file where its policy lets it write.
fn content(path: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    snapshot(path, &mut found);
    for (path, text) in &mut found {
        if std::fs::symlink_metadata(path).is_ok_and(|found| found.is_dir())
            && let Some(at) = text.find(", changed")
        {
            text.truncate(at);
        }
    }
    found
}

/// The fixed part of a tree: outside, denied files, and protected names that exist.
fn fixed(tree: &Tree, objects: bool) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    snapshot(&tree.root.join("out"), &mut found);
    let work = tree.root.join("work");
    for name in ["vault", "src/b.env"] {
        snapshot(&work.join(name), &mut found);
    }
    if matches!(tree.repository, "file" | "link") {
        snapshot(&work.join("real"), &mut found);
    }
    for name in PROTECTED {
        snapshot(&work.join(name), &mut found);
    }
    if objects {
        found.retain(|path, _| !path.starts_with(work.join(".git/objects")));
    }
    found
}

/// Searches a response for content that it must not contain.
fn leaks(text: &str, hides_outside: bool) -> Option<&'static str> {
    [DENIED, SERVER_SECRET, SERVER_FILE]
        .into_iter()
        .chain(hides_outside.then_some(OUTSIDE))
        .find(|content| text.contains(content))
}

/// The text of a response, with the content of files decoded.
fn decoded(answer: &Value) -> String {
    let mut text = answer.to_string();
    if let Some(data) = answer["dataBase64"].as_str() {
        let data = base64_turbo::STANDARD.decode(data).unwrap();
        text.push_str(&String::from_utf8_lossy(&data));
    }
    text
}

/// Renames directories of the workspace while other steps run, as a user outside would.
struct HostRenames(Arc<AtomicBool>, Option<std::thread::JoinHandle<()>>);

impl HostRenames {
    fn begin(work: &Path) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let (stop, work) = (Arc::clone(&done), work.to_owned());
        let thread = std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                for (from, to) in [
                    ("docs", "docs.moved"),
                    ("file", "docs"),
                    ("docs", "file"),
                    ("docs.moved", "docs"),
                ] {
                    let _ = std::fs::rename(work.join(from), work.join(to));
                }
                std::thread::sleep(Duration::from_micros(300));
            }
        });
        Self(done, Some(thread))
    }
}

impl Drop for HostRenames {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        if let Some(thread) = self.1.take() {
            thread.join().unwrap();
        }
    }
}

fn seconds() -> Duration {
    let set = std::env::var("EXEC_SERVER_ATTACK_SECONDS").ok();
    Duration::from_secs(set.map_or(DEFAULT_SECONDS, |text| text.parse().unwrap()))
}

async fn random_sequences_change_and_read_nothing_that_their_policies_forbid(user: ServerUser) {
    let fresh = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap();
    let given = std::env::var("EXEC_SERVER_ATTACK_SEED").ok();
    let first: u64 = given.as_ref().map_or_else(
        || u64::try_from(fresh.as_nanos() % u128::from(u64::MAX)).unwrap() | 1,
        |text| text.parse().unwrap(),
    );
    let mut fixture = SandboxFixture::with_options(user, server_files).await;
    for name in ["server", "server/state"] {
        fixture.own(&fixture.path(name));
    }
    let sockets = HostSockets::listen(&fixture.path("socket"));
    let end = Instant::now() + seconds();
    let mut seed = first;
    let mut count = 0;
    while Instant::now() < end || count == 0 {
        let log = sequence(&mut fixture, &sockets, count, seed).await;
        if let Err((what, log)) = log {
            panic!("EXEC_SERVER_ATTACK_SEED={seed}, sequence {count}: {what}\n{log}");
        }
        count += 1;
        seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15) | 1;
        if given.is_some() {
            break;
        }
    }
    eprintln!("{count} sequences from seed {first} as {user:?}");
}

/// Creates files of the server with secrets; returns the options that name them.
fn server_files(directory: &Path) -> Vec<String> {
    let path = |name: &str| directory.join("server").join(name);
    std::fs::create_dir_all(path("state")).unwrap();
    let token = path("token").display().to_string();
    let settings = format!("audit.redact = [\"{SERVER_FILE}\"]\nremote.token_file = \"{token}\"\n");
    for (name, content) in [
        ("token", SERVER_FILE),
        ("settings.toml", &settings),
        ("state/executor.identity", "identity"),
    ] {
        let path = path(name);
        std::fs::write(&path, content).unwrap();
        // Only the policy and the server's own rules keep others from reading it.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    }
    vec![
        "--config".to_owned(),
        path("settings.toml").display().to_string(),
    ]
}

/// Runs one sequence; returns what it must not have done, and its steps.
async fn sequence(
    fixture: &mut SandboxFixture,
    sockets: &HostSockets,
    number: usize,
    seed: u64,
) -> Result<(), (String, String)> {
    let mut random = Random(seed);
    let marker = proc::marker();
    let tree = Tree::make(fixture, sockets, number, &mut random);
    let mut may_reach = false;
    let reached = sockets.reached();
    let work = tree.root.join("work");
    let objects = random.below(4) == 0 && tree.repository == "directory";
    // Under the other policies, a command may read files outside and copy them into the workspace.
    let minimal = random.below(4) == 0;
    let policies: &[Policy] = match (minimal, objects) {
        (true, _) => &[Policy::Minimal],
        (false, true) => &[
            Policy::Workspace,
            Policy::Minimal,
            Policy::ReadOnly,
            Policy::Objects,
        ],
        (false, false) => &[Policy::Workspace, Policy::Minimal, Policy::ReadOnly],
    };
    let before = fixed(&tree, objects);
    let missing: Vec<_> = PROTECTED
        .iter()
        .filter(|name| std::fs::symlink_metadata(work.join(name)).is_err())
        .collect();
    let mut log = format!("repository: {}\n", tree.repository);
    for _ in 0..2 + random.below(5) {
        let which = match random.below(3) {
            0 if !minimal => Policy::Generated(random.next()),
            _ => policies[random.below(policies.len())],
        };
        let network = CommandNetwork::random(&mut random);
        may_reach |= network == CommandNetwork::Enabled;
        let sandbox = tree.policy(which, network);
        let renames = (random.below(4) == 0).then(|| HostRenames::begin(&work));
        match random.below(8) {
            0..=3 => {
                // Sometimes starts two commands.
                let mut ids = Vec::new();
                for _ in 0..1 + random.below(2) {
                    let script = tree.script(&mut random);
                    let renamed = renames.is_some();
                    let _ = writeln!(log, "{which:?}, {network:?}, renames {renamed}:\n{script}");
                    let mut start = fixture
                        .start_of(&sandbox, &["/bin/sh", "-c", &script])
                        .with("cwd", format!("file://{}", work.display()))
                        .with("timeoutMs", 500)
                        .marked(&marker);
                    if network == CommandNetwork::Managed {
                        start = managed(start, proxy(json!({}), json!({})));
                    }
                    let id = start.0["processId"].as_str().unwrap().to_owned();
                    // A refused start counts as a refused access.
                    match fixture.client.call("process/start", start.0).await {
                        Ok(_) => ids.push(id),
                        Err(refusal) => {
                            let _ = writeln!(log, "refused: {}", refusal.message);
                        }
                    }
                }
                for id in ids {
                    let seen = fixture.client.closed(&id).await;
                    let output = seen.text("stdout");
                    if let Some(content) = leaks(&output, minimal) {
                        return Err((format!("a command printed {content}"), log));
                    }
                }
                let alive = proc::bearers(&marker);
                if !alive.is_empty() {
                    return Err((
                        format!("{alive:?} are alive after the end of all commands"),
                        log,
                    ));
                }
            }
            4..=6 => {
                let (method, mut params) = tree.request(&mut random);
                let _ = writeln!(log, "{which:?}: {method} {params}");
                if method == "capabilityRoots/discoverV1" {
                    params["roots"][0]["sandbox"] = sandbox;
                } else {
                    params["sandbox"] = sandbox;
                }
                let is_quiet = renames.is_none();
                let whole = is_quiet.then(|| content(&tree.root));
                let answer = fixture.client.call(method, params).await;
                if let Err(refusal) = &answer {
                    let _ = writeln!(log, "refused: {}", refusal.message);
                    let left = is_quiet.then(|| content(&tree.root));
                    // A removal that fails in the middle of a tree has removed a part of it.
                    let is_whole = method != "fs/remove" && method != "fs/copy";
                    if is_whole && left != whole {
                        return Err((format!("refused {method} has changed the tree"), log));
                    }
                }
                if let Ok(answer) = answer {
                    if let Some(content) = leaks(&decoded(&answer), minimal) {
                        return Err((format!("{method} returned {content}"), log));
                    }
                    if method == "fs/watch" {
                        let _ = fixture
                            .client
                            .call("fs/unwatch", json!({"watchId": "w"}))
                            .await;
                    }
                    if method == "fs/open" {
                        let read = json!({"handleId": "h", "offset": 0, "len": 1000});
                        if let Ok(block) = fixture.client.call("fs/readBlock", read).await {
                            let text =
                                String::from_utf8_lossy(&bytes(&block["chunk"])).into_owned();
                            if let Some(content) = leaks(&text, minimal) {
                                return Err((format!("an open file contains {content}"), log));
                            }
                        }
                        let close = json!({"handleId": "h", "commit": true});
                        let _ = fixture.client.call("fs/close", close).await;
                    }
                }
            }
            _ => {
                let _ = writeln!(log, "the host opens the workspace again");
                let open = std::fs::Permissions::from_mode(0o755);
                for path in [&work, &work.join("src"), &work.join("docs")] {
                    if std::fs::symlink_metadata(path).is_ok_and(|found| found.is_dir()) {
                        std::fs::set_permissions(path, open.clone()).unwrap();
                    }
                }
            }
        }
        drop(renames);
        if !may_reach && sockets.reached() != reached {
            return Err(("a socket outside was reached".to_owned(), log));
        }
        let after = fixed(&tree, objects);
        if after != before {
            let changed = |(path, text): (&PathBuf, &String)| {
                let new = after.get(path);
                (new != Some(text)).then(|| format!("{}: {text} became {new:?}", path.display()))
            };
            let mut changes: Vec<_> = before.iter().filter_map(changed).collect();
            let new = after.keys().filter(|path| !before.contains_key(*path));
            changes.extend(new.map(|path| format!("{} is new", path.display())));
            return Err((changes.join("; "), log));
        }
        for name in &missing {
            let path = work.join(name);
            if let Ok(found) = std::fs::symlink_metadata(&path) {
                return Err((format!("{} exists: {found:?}", path.display()), log));
            }
        }
    }
    let _ = std::fs::remove_dir_all(&tree.root);
    let name = tree.root.as_os_str().as_bytes();
    let _ = std::fs::remove_dir_all(format!(
        "/tmp/{}",
        String::from_utf8_lossy(name).replace('/', "_")
    ));
    Ok(())
}
