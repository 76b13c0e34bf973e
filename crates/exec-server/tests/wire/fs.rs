//! `fs/*`: every method on paths and handles, its options and its errors.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use exec_server_protocol::PathUri;
use exec_server_testkit::wire::{TestedServer, Transport, WireClient, bytes, chunk};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::served;

mod faults;
mod files;
mod handles;
mod trees;

/// Bytes in a mebibyte.
const MIB: usize = 1 << 20;

/// A server, a client with a session on it, and a directory to work in.
struct FsFixture {
    client: WireClient,
    server: TestedServer,
    root: PathBuf,
    _directory: TempDir,
}

impl FsFixture {
    async fn new(on: Transport) -> Self {
        let (server, client) = served(on).await;
        Self::of(server, client)
    }

    fn of(server: TestedServer, client: WireClient) -> Self {
        let directory = tempfile::tempdir().unwrap();
        // Without symbolic links in the path.
        let root = directory.path().canonicalize().unwrap();
        std::fs::set_permissions(&root, std::fs::Permissions::from_mode(0o755)).unwrap();
        Self {
            client,
            server,
            root,
            _directory: directory,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    fn uri(&self, name: &str) -> String {
        uri(&self.path(name))
    }

    /// `params` with the path of `name` added.
    fn at(&self, name: &str, mut params: Value) -> Value {
        params["path"] = self.uri(name).into();
        params
    }

    async fn ok(&mut self, method: &str, name: &str, params: Value) -> Value {
        let params = self.at(name, params);
        self.client.ok(method, params).await
    }

    /// A call that must fail with this code; returns its message.
    async fn fails(&mut self, method: &str, name: &str, params: Value, code: i64) -> String {
        let params = self.at(name, params);
        let failure = self.client.refused(method, params.clone()).await;
        assert_eq!(failure.code, code, "{method} {params}: {failure}");
        failure.message
    }

    async fn read(&mut self, name: &str) -> Vec<u8> {
        let read = self.ok("fs/readFile", name, json!({})).await;
        bytes(&read["dataBase64"])
    }

    async fn write(&mut self, name: &str, data: &[u8]) {
        let params = json!({"dataBase64": chunk(data)});
        assert_eq!(self.ok("fs/writeFile", name, params).await, json!({}));
    }

    fn names(&self) -> Vec<String> {
        names(&self.root)
    }
}

fn uri(path: &Path) -> String {
    PathUri::from_native(path).unwrap().as_str().to_owned()
}

/// The sorted names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn fifo(path: &Path) {
    let made = std::process::Command::new("mkfifo").arg(path).status();
    assert!(made.unwrap().success());
}

/// The usual limits of a walk.
fn walk_options() -> Value {
    json!({"maxDepth": 64, "maxDirectories": 10_000, "maxEntries": 50_000,
           "followDirectorySymlinks": false})
}
