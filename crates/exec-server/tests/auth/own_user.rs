//! Servers without authentication: their own user is served, other users of the machine are not.

use std::fs::Permissions;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use exec_server_testkit::proc::eventually;
use exec_server_testkit::server::ServerProcess;
use tempfile::TempDir;

const BINARY: &str = env!("CARGO_BIN_EXE_exec-server");

/// A user id without a login.
const OTHER: u32 = 65_534;

/// Runs the program with a runtime directory; as another user if a test that runs as root requests
/// it.
fn client(runtime: &Path, args: &[&str], uid: Option<u32>) -> Output {
    let mut command = Command::new(executable(uid));
    command
        .args(args)
        .current_dir("/")
        .env_remove("EXEC_SERVER_URL")
        .env("EXEC_SERVER_HOME", "/nonexistent")
        .env("XDG_RUNTIME_DIR", runtime)
        .stdin(Stdio::null());
    if let Some(uid) = uid {
        command.uid(uid).gid(uid);
    }
    command.output().unwrap()
}

/// Returns the path of the program that a user can execute: the build directory may be unreadable
/// for other users.
fn executable(uid: Option<u32>) -> PathBuf {
    static READABLE: OnceLock<TempDir> = OnceLock::new();
    if uid.is_none() {
        return BINARY.into();
    }
    let directory = READABLE.get_or_init(|| {
        let directory = tempfile::tempdir().unwrap();
        let mode = Permissions::from_mode(0o755);
        std::fs::set_permissions(directory.path(), mode).unwrap();
        std::fs::copy(BINARY, directory.path().join("exec-server")).unwrap();
        directory
    });
    directory.path().join("exec-server")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[tokio::test]
async fn loopback_server_without_authentication_refuses_other_users() {
    let directory = tempfile::tempdir().unwrap();
    for listen in ["ws://127.0.0.1:0", "ws://[::1]:0", "ws://localhost:0"] {
        let server = ServerProcess::listening(tokio::process::Command::new(BINARY), listen).await;
        let args = ["run", "--url", server.url(), "--", "echo", "served"];
        let own = client(directory.path(), &args, None);
        assert_eq!(text(&own.stdout), "served\n", "{own:?}");
        // Only root can be another user.
        if rustix::process::geteuid().is_root() {
            let other = client(directory.path(), &args, Some(OTHER));
            let error = text(&other.stderr);
            assert_eq!(other.status.code(), Some(125), "{error}");
            assert!(
                error.contains("its own user (uid 0) only, not of uid 65534"),
                "{error}"
            );
            assert!(error.contains("--ws-auth capability-token"), "{error}");
        }
    }
}

#[tokio::test]
async fn danger_no_auth_serves_other_users() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = tokio::process::Command::new(BINARY);
    command.arg("--danger-no-auth");
    let server = ServerProcess::start(command).await;
    let uid = rustix::process::geteuid().is_root().then_some(OTHER);
    let args = ["run", "--url", server.url(), "--", "echo", "served"];
    let other = client(directory.path(), &args, uid);
    assert_eq!(text(&other.stdout), "served\n", "{other:?}");
}

#[tokio::test]
async fn serve_without_listen_uses_a_private_socket_that_clients_find() {
    let runtime = tempfile::tempdir().unwrap();
    let socket = runtime.path().join("exec-server/serve.sock");
    let before = client(runtime.path(), &["ps"], None);
    let error = text(&before.stderr);
    assert!(
        error.contains("start one with `exec-server serve`"),
        "{error}"
    );

    let start = || {
        let mut command = tokio::process::Command::new(BINARY);
        command
            .arg("serve")
            .env("XDG_RUNTIME_DIR", runtime.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap()
    };
    let server = start();
    eventually("the socket", || socket.symlink_metadata().map(drop)).await;
    let found = socket.symlink_metadata().unwrap();
    assert!(found.file_type().is_socket());
    assert_eq!(found.permissions().mode() & 0o777, 0o600);
    let parent = socket.parent().unwrap().metadata().unwrap();
    assert_eq!(parent.permissions().mode() & 0o777, 0o700);
    for args in [
        &["ps"][..],
        &["status"],
        &["run", "--on", "serve", "--", "true"],
    ] {
        let output = client(runtime.path(), args, None);
        assert!(output.status.success(), "{args:?} {output:?}");
    }
    let second = start().wait_with_output().await.unwrap();
    let error = text(&second.stderr);
    assert!(
        error.contains("serve.sock") && error.contains("in use"),
        "{error}"
    );
    drop(server);
}

#[tokio::test]
async fn shared_runtime_directory_is_refused() {
    let runtime = tempfile::tempdir().unwrap();
    let directory = runtime.path().join("exec-server");
    std::fs::create_dir(&directory).unwrap();
    std::fs::set_permissions(&directory, Permissions::from_mode(0o755)).unwrap();
    let refused = client(runtime.path(), &["serve"], None);
    let error = text(&refused.stderr);
    assert!(
        error.contains("only this user can use (mode 0700)"),
        "{error}"
    );
}

#[tokio::test]
async fn root_is_warned_about_a_port_without_authentication() {
    // Tests of the project run as root; another user gets no warning.
    let is_root = rustix::process::geteuid().is_root();
    for (flags, expected) in [
        (
            &[][..],
            "every process of root on this machine can use ws://",
        ),
        (&["--danger-no-auth"], "every client that can reach ws://"),
    ] {
        let mut command = tokio::process::Command::new(BINARY);
        command.args(flags);
        let server = ServerProcess::start(command).await;
        if is_root {
            server.wait_logged("exec-server: warning: ").await;
            let printed = server.stderr();
            assert!(printed.contains(expected), "{printed}");
        } else {
            assert_eq!(server.stderr(), "");
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = format!("unix://{}/socket", directory.path().display());
    let server = ServerProcess::listening(tokio::process::Command::new(BINARY), &socket).await;
    let output = client(directory.path(), &["status", "--url", server.url()], None);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(server.stderr(), "", "a socket is private");
}
