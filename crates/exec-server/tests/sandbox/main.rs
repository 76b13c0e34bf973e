//! Sandboxed processes of the built server as a black box: what they can do, what they cannot do,
//! and that the machine is unchanged afterwards.
//!
//! Every test runs twice: as the user of the tests, often root, and as an unprivileged user.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};

use exec_server_testkit::wire::{ErrorReply, StartBuilder, TestedServer, Transport, WireClient};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;

mod attacker;
mod attacks;
mod equality;
mod files;
mod leftovers;
mod managed;
mod network;
mod own_server;
mod policies;
mod processes;
mod protected;
mod requests;

/// The user that runs the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ServerUser {
    /// The user that runs the tests.
    Own,
    /// `nobody` (65534) if the tests run as root; otherwise the same user.
    Ordinary,
}

const NOBODY: u32 = 65_534;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A server, a client with a session, and a directory with a workspace.
struct SandboxFixture {
    client: WireClient,
    started: u32,
    server: TestedServer,
    user: ServerUser,
    directory: TempDir,
}

/// The result of a command.
#[derive(Debug)]
struct CommandOutcome {
    code: i64,
    stdout: String,
    stderr: String,
    denied: bool,
    exited: Value,
}

impl SandboxFixture {
    async fn new(user: ServerUser) -> Self {
        Self::with_options(user, |_| Vec::new()).await
    }

    /// As [`SandboxFixture::new`], with options of the server that depend on the directory.
    async fn with_options(user: ServerUser, options: impl FnOnce(&Path) -> Vec<String>) -> Self {
        let directory = Self::persistent_directory();
        let options = options(directory.path());
        let built = Path::new(env!("CARGO_BIN_EXE_exec-server"));
        let mut command = if user == ServerUser::Ordinary && is_root() {
            // The build directory may be unreadable for the other user.
            let program = directory.path().join("exec-server");
            std::fs::hard_link(built, &program)
                .or_else(|_| std::fs::copy(built, &program).map(drop))
                .unwrap();
            let mut command = Command::new("setpriv");
            let id = NOBODY;
            command
                .arg(format!("--reuid={id}"))
                .arg(format!("--regid={id}"));
            command.arg("--clear-groups").arg(program);
            command
        } else {
            Command::new(built)
        };
        command.args(options);
        Self::at(user, directory, command).await
    }

    /// Uses a server that this command starts.
    async fn on(user: ServerUser, command: Command) -> Self {
        Self::at(user, Self::persistent_directory(), command).await
    }

    fn persistent_directory() -> TempDir {
        // Directory outside of /tmp, which many policies make writable.
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let open = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(directory.path(), open).unwrap();
        directory
    }

    async fn at(user: ServerUser, directory: TempDir, mut command: Command) -> Self {
        command
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("SERVER_SECRET", "only for the server");
        let mut server = TestedServer::start(Transport::Websocket, command).await;
        let client = server.session().await;
        let fixture = Self {
            client,
            started: 0,
            server,
            user,
            directory,
        };
        fixture.make("work");
        fixture.make("other");
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn own(&self, path: &Path) {
        if self.user == ServerUser::Ordinary && is_root() {
            chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
    }

    /// Creates a directory that the server's user owns.
    fn make(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir(&path).unwrap();
        self.own(&path);
        path
    }

    /// Creates a file that the server's user owns.
    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, text).unwrap();
        self.own(&path);
        path
    }

    fn start_of(&mut self, sandbox: &Value, argv: &[&str]) -> StartBuilder {
        self.started += 1;
        let cwd = format!("file://{}", self.path("work").display());
        StartBuilder::new(&format!("p{}", self.started), argv)
            .with("sandbox", sandbox.clone())
            .with("cwd", cwd)
    }

    /// Runs a shell script under a policy.
    async fn sh(&mut self, sandbox: &Value, script: &str) -> CommandOutcome {
        let start = self.start_of(sandbox, &["/bin/sh", "-c", script]);
        self.run(start).await
    }

    /// Runs a Python script under a policy.
    async fn python(&mut self, sandbox: &Value, script: &str) -> CommandOutcome {
        let script = format!("{PRELUDE}\n{script}");
        let start = self.start_of(sandbox, &["python3", "-c", &script]);
        self.run(start).await
    }

    async fn run(&mut self, start: StartBuilder) -> CommandOutcome {
        let seen = self.client.run(start).await;
        let exited = seen.exited.clone().unwrap();
        CommandOutcome {
            code: seen.exit_code(),
            stdout: seen.text("stdout"),
            stderr: seen.text("stderr"),
            denied: exited["sandboxDenied"] == true,
            exited,
        }
    }

    async fn refused(&mut self, sandbox: &Value, argv: &[&str]) -> ErrorReply {
        let start = self.start_of(sandbox, argv);
        self.client.refused("process/start", start.0).await
    }

    /// The policy that the real client sends for its workspace.
    fn workspace(&self) -> Value {
        self.workspace_and(&[])
    }

    fn workspace_and(&self, more: &[Value]) -> Value {
        let mut entries = vec![
            special("root", "read"),
            special("project_roots", "write"),
            special("slash_tmp", "write"),
            special("tmpdir", "write"),
        ];
        for name in [".git", ".agents", ".codex", ".aws"] {
            entries.push(json!({
                "path": {"type": "special", "value": {"kind": "project_roots", "subpath": name}},
                "access": "read", "missing_path_behavior": "skip",
            }));
        }
        entries.extend_from_slice(more);
        let mut sandbox = policy(entries, "restricted");
        let root = format!("file://{}", self.path("work").display());
        sandbox["workspaceRoots"] = json!([root]);
        sandbox
    }
}

/// Python prelude of the attacks: system calls by name or number, and `refused` prints the errno.
const PRELUDE: &str = r"
import ctypes, errno, os, sys, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(f, *args):
    ctypes.set_errno(0)
    r = f(*args)
    return (r, errno.errorcode.get(ctypes.get_errno(), '-')) if r < 0 else (r, 'OK')
def refused(name, f):
    try:
        r = f()
        if isinstance(r, tuple): print(name, r[1])
        else: print(name, 'OK', r)
    except OSError as e:
        print(name, errno.errorcode.get(e.errno, e))
";

fn policy(entries: Vec<Value>, network: &str) -> Value {
    json!({
        "windowsSandboxLevel": "disabled",
        "permissions": {
            "type": "managed",
            "file_system": {"type": "restricted", "entries": entries},
            "network": network,
        },
    })
}

fn read_only() -> Value {
    policy(vec![special("root", "read")], "restricted")
}

fn special(kind: &str, access: &str) -> Value {
    json!({"path": {"type": "special", "value": {"kind": kind}}, "access": access})
}

fn entry(path: &Path, access: &str) -> Value {
    let uri = format!("file://{}", path.display());
    json!({"path": {"type": "path", "path": uri}, "access": access})
}

/// Entries that grant or deny random ones of these paths; `below` returns a random number below its
/// argument.
fn generated_entries(below: &mut dyn FnMut(usize) -> usize, paths: &[PathBuf]) -> Vec<Value> {
    let mut entries = Vec::new();
    for path in paths {
        if below(2) == 0 {
            entries.push(entry(path, ["read", "write", "deny"][below(3)]));
        }
    }
    entries
}

/// Makes each function a test for both users.
macro_rules! for_both {
    ($($behaviour:ident,)*) => {
        mod own {
            $(#[tokio::test] async fn $behaviour() { super::$behaviour($crate::ServerUser::Own).await; })*
        }
        mod ordinary {
            $(#[tokio::test] async fn $behaviour() {
                super::$behaviour($crate::ServerUser::Ordinary).await;
            })*
        }
    };
}
use for_both;

/// A file that is not declared as a module here would not be compiled, and its tests would not run.
#[test]
fn every_test_file_is_declared() {
    let declared = include_str!("main.rs");
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sandbox")).unwrap();
    let mut seen = 0;
    for file in files {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        seen += 1;
        assert!(
            name == "main" || declared.contains(&format!("\nmod {name};\n")),
            "{name} is not declared"
        );
    }
    assert!(seen > 1);
}
