//! `exec-server env`, and commands in configured environments.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use exec_server_testkit::server::ServerProcess;
use serde_json::Value;

use super::{BINARY, seen, server};

/// A user's settings, and a directory for files.
struct UserHome {
    directory: tempfile::TempDir,
}

impl UserHome {
    fn new() -> Self {
        Self {
            directory: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().canonicalize().unwrap().join(name)
    }

    fn file(&self) -> PathBuf {
        self.path("settings/environments.toml")
    }

    fn text(&self) -> String {
        std::fs::read_to_string(self.file()).unwrap()
    }

    fn write(&self, text: &str) {
        std::fs::create_dir_all(self.path("settings")).unwrap();
        std::fs::write(self.file(), text).unwrap();
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(BINARY);
        command
            .args(args)
            .current_dir(self.directory.path())
            .env_remove("EXEC_SERVER_URL")
            .env_remove("EXEC_SERVER_TOKEN")
            .env_remove("EXEC_SERVER_TOKEN_FILE")
            .env_remove("CODEX_EXEC_SERVER_URL")
            .env_remove("CODEX_HOME")
            .env("EXEC_SERVER_HOME", self.path("settings"))
            .stdin(Stdio::null());
        command
    }

    fn run(&self, args: &[&str]) -> (String, String, i32) {
        seen(&self.command(args).output().unwrap())
    }

    /// The standard output of a command that must succeed.
    fn ok(&self, args: &[&str]) -> String {
        let (out, err, code) = self.run(args);
        assert_eq!(code, 0, "{args:?}: {out}{err}");
        out
    }

    /// Asserts that a command fails, with these texts on standard error.
    fn fails(&self, args: &[&str], says: &[&str]) {
        let (out, err, code) = self.run(args);
        assert!(code != 0 && code != 101, "{args:?}: {code} {out}{err}");
        for part in says {
            assert!(err.contains(part), "{args:?}: no {part:?} in {err}");
        }
    }
}

/// A server in this directory, so that `pwd` shows where a command ran.
async fn server_in(directory: &Path, args: &[&str]) -> ServerProcess {
    let mut command = tokio::process::Command::new(BINARY);
    command.args(args).current_dir(directory);
    ServerProcess::start(command).await
}

#[tokio::test]
async fn every_command_accepts_an_environment() {
    let home = UserHome::new();
    let there = tempfile::tempdir().unwrap();
    let directory = there.path().canonicalize().unwrap();
    std::fs::write(home.path("token"), "tok123\n").unwrap();
    let token = home.path("token");
    let auth = [
        "--ws-auth",
        "capability-token",
        "--ws-token-file",
        token.to_str().unwrap(),
    ];
    let server = server_in(&directory, &auth).await;
    home.ok(&[
        "env",
        "add",
        "worker",
        server.url(),
        "--token-file",
        "token",
    ]);

    assert_eq!(
        home.ok(&["run", "--on", "worker", "--", "pwd"]).trim(),
        directory.to_str().unwrap()
    );
    std::fs::write(home.path("a"), "one").unwrap();
    home.ok(&["cp", "a", "worker:"]);
    home.ok(&["cp", "--on", "worker", "a", ":b"]);
    assert_eq!(home.ok(&["fs", "--on", "worker", "ls"]), "a\nb\n");
    assert_eq!(home.ok(&["fs", "cat", "--on", "worker", "b"]), "one");
    home.ok(&["cp", "worker:a", "back"]);
    assert!(home.path("back").is_file());

    let mut running = home
        .command(&[
            "run",
            "--on",
            "worker",
            "--",
            "sh",
            "-c",
            "echo up; exec sleep 1000",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut up = [0; 3];
    std::io::Read::read_exact(running.stdout.as_mut().unwrap(), &mut up).unwrap();
    let id = format!("run-{}", running.id());
    assert!(home.ok(&["ps", "--on", "worker"]).contains(&id));
    assert!(home.ok(&["status", "--on", "worker"]).contains("worker"));
    home.ok(&["kill", "--on", "worker", &id]);
    assert_eq!(running.wait().unwrap().code(), Some(143));

    // The token is configured for this environment only; without it the server refuses.
    home.fails(&["ps", "--url", server.url()], &["a token is needed"]);
    home.fails(
        &["ps", "--on", "worker", "--token-file", "token"],
        &["--token-file is for --url", "`worker`"],
    );
}

#[tokio::test]
async fn flag_overrides_variable_and_variable_overrides_file() {
    let home = UserHome::new();
    let directories = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [first, second] = directories
        .each_ref()
        .map(|d| d.path().canonicalize().unwrap());
    let servers = [server_in(&first, &[]).await, server_in(&second, &[]).await];
    let here = home.path("");
    let here = here.to_str().unwrap().trim_end_matches('/');
    let pwd = |args: &[&str], url: Option<&str>| {
        let mut command = home.command(&["run"]);
        command.args(args).args(["--", "pwd"]);
        if let Some(url) = url {
            command.env("EXEC_SERVER_URL", url);
        }
        let (out, err, code) = seen(&command.output().unwrap());
        assert_eq!(code, 0, "{args:?} {err}");
        PathBuf::from(out.trim())
    };
    assert_eq!(pwd(&[], None), Path::new(here));
    home.ok(&["env", "add", "first", servers[0].url(), "--default"]);
    assert_eq!(pwd(&[], None), first);
    assert_eq!(pwd(&["--on", "local"], None), Path::new(here));
    // A flag overrides a variable, and a variable overrides the file.
    assert_eq!(pwd(&[], Some(servers[1].url())), second);
    assert_eq!(pwd(&["--on", "first"], Some(servers[1].url())), first);
    assert_eq!(
        pwd(&["--url", servers[0].url()], Some(servers[1].url())),
        first
    );
    assert_eq!(pwd(&["--on", servers[1].url()], None), second);
    home.ok(&["env", "use", "local"]);
    assert_eq!(pwd(&[], None), Path::new(here));
    home.ok(&["env", "use", "none"]);
    home.fails(
        &["run", "--", "pwd"],
        &["no default environment", "local, first"],
    );
    let mut none = home.command(&["run", "--", "pwd"]);
    let (_, err, code) = seen(&none.env("EXEC_SERVER_URL", "none").output().unwrap());
    assert!(
        code == 125 && err.contains("EXEC_SERVER_URL is `none`"),
        "{err}"
    );
}

#[tokio::test]
async fn program_can_be_an_environment() {
    let home = UserHome::new();
    std::fs::create_dir(home.path("work")).unwrap();
    home.ok(&[
        "env",
        "add",
        "child",
        "--cwd",
        "work",
        "-e",
        "COLOUR=blue",
        "--",
        BINARY,
        "--listen",
        "stdio",
    ]);
    let args = [
        "run",
        "--on",
        "child",
        "--",
        "sh",
        "-c",
        "pwd; echo $COLOUR $EXEC_SERVER_TOKEN",
    ];
    let mut command = home.command(&args);
    command.env("EXEC_SERVER_TOKEN", "tok123");
    let (out, err, code) = seen(&command.output().unwrap());
    assert_eq!(code, 0, "{err}");
    assert_eq!(out, format!("{}\nblue\n", home.path("work").display()));
    home.ok(&["env", "add", "broken", "--", "/nonexistent/server"]);
    home.fails(
        &["run", "--on", "broken", "--", "true"],
        &["`broken`", "/nonexistent/server"],
    );
}

#[tokio::test]
async fn env_status_reports_ready_and_failed_environments() {
    let home = UserHome::new();
    let server = server().await;
    let added = home.ok(&["env", "add", "worker", server.url(), "--default"]);
    let version = env!("CARGO_PKG_VERSION");
    assert!(
        added.contains(&format!("exec-server {version} answered in ")),
        "{added}"
    );
    let all: Value = serde_json::from_str(&home.ok(&["env", "status", "--json"])).unwrap();
    let [local, worker] = &all["environments"].as_array().unwrap()[..] else {
        panic!("{all}");
    };
    assert_eq!(
        (&local["id"], &local["status"]),
        (&"local".into(), &"ready".into())
    );
    assert_eq!(
        (&worker["id"], &worker["status"]),
        (&"worker".into(), &"ready".into())
    );
    assert_eq!(worker["version"], env!("CARGO_PKG_VERSION"));
    assert!(worker["latencyMs"].as_f64().unwrap() > 0.0, "{worker}");
    assert!(
        worker["capabilities"]
            .as_array()
            .is_some_and(|names| !names.is_empty()),
        "{worker}"
    );
    let table = home.ok(&["env", "status"]);
    assert!(
        table.starts_with("ENVIRONMENT") && table.contains("worker*"),
        "{table}"
    );
    assert!(
        table.contains(server.url()) && !table.contains("extensions"),
        "{table}"
    );

    let (_, error, code) = home.run(&["env", "add", "gone", "unix:///nonexistent/socket"]);
    assert_eq!(code, 0, "{error}");
    assert!(
        error.starts_with("exec-server: `gone` does not work yet: ")
            && error.contains("/nonexistent/socket"),
        "{error}"
    );
    let (out, _, code) = home.run(&["env", "status", "--json"]);
    let all: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (code, &all["environments"][2]["status"]),
        (1, &"failed".into()),
        "{all}"
    );
    assert!(
        all["environments"][2]["error"]
            .as_str()
            .unwrap()
            .contains("/nonexistent/socket")
    );
    home.ok(&["env", "status", "worker", "local"]);
    home.fails(&["env", "status", "nobody"], &["`nobody`"]);
}

#[test]
fn env_commands_keep_comments_and_order_of_the_file() {
    let home = UserHome::new();
    home.write("# mine\ndefault = \"b\" # for now\n\n# the first\n[[environments]]\nid = \"a\"\nurl = \"ws://a:1\"\n\n[[environments]]\nid = \"b\"\nurl = \"ws://b:1\"\n");
    home.fails(&["env", "add", "a", "ws://c:1"], &["`a`", "--force"]);
    home.ok(&["env", "add", "--force", "a", "ws://c:1"]);
    home.ok(&[
        "env",
        "add",
        "c",
        "--",
        "ssh",
        "box",
        "exec-server --listen stdio",
    ]);
    let text = home.text();
    for part in [
        "# mine",
        "# for now",
        "# the first\n[[environments]]\nid = \"a\"\nurl = \"ws://c:1\"",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    let listed: Value = serde_json::from_str(&home.ok(&["env", "list", "--json"])).unwrap();
    let shown: Vec<_> = listed["environments"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| {
            (
                entry["id"].as_str().unwrap(),
                entry["default"].as_bool().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        shown,
        [("local", false), ("a", false), ("b", true), ("c", false)]
    );
    let table = home.ok(&["env", "list"]);
    assert!(
        table.contains("ssh box \"exec-server --listen stdio\""),
        "{table}"
    );

    let (_, err, code) = home.run(&["env", "remove", "b"]);
    assert!(code == 0 && err.contains("was the default"), "{err}");
    assert!(
        home.text().contains("default = \"local\" # for now"),
        "{}",
        home.text()
    );
    home.fails(&["env", "remove", "b"], &["`b`"]);
    home.fails(&["env", "use", "b"], &["`b`"]);
    home.ok(&["env", "remove", "a"]);
    home.ok(&["env", "remove", "c"]);
    assert_eq!(home.text().trim(), "# mine\ndefault = \"local\" # for now");
    use std::os::unix::fs::PermissionsExt as _;
    let mode = home.file().metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(std::fs::read_dir(home.path("settings")).unwrap().count(), 1);

    // Inline lists are accepted, too.
    home.write("environments = [{ id = \"a\", url = \"ws://a:1\" }]\n");
    home.ok(&["env", "add", "b", "ws://b:1"]);
    assert!(home.ok(&["env", "list"]).contains("ws://a:1"));
}

#[test]
fn env_errors_name_the_mistake() {
    let home = UserHome::new();
    home.fails(
        &["run", "--on", "nobody", "--", "true"],
        &["`nobody`", "there are: local"],
    );
    home.fails(
        &["run", "--on", "ftp://h", "--", "true"],
        &["ws://HOST:PORT", "unix:///PATH"],
    );
    home.fails(
        &["run", "--on", "a", "--url", "ws://h:1", "--", "true"],
        &["--url"],
    );
    home.fails(&["ps", "--on", "local"], &["--on ENV"]);
    home.fails(
        &["env", "add", "local", "ws://h:1"],
        &["`local` is reserved"],
    );
    home.fails(
        &["env", "add", "a b", "ws://h:1"],
        &["`a b` is not a valid environment id"],
    );
    home.fails(&["env", "add", "a", "http://h"], &["`http://h`"]);
    home.fails(&["env", "add", "a"], &["<URL>"]);
    home.fails(
        &["env", "add", "a", "ws://h:1", "--token-file", "t"],
        &["a token needs `wss://`"],
    );
    assert!(!home.file().exists());
    home.write("\n[[environments]]\nid = \"a\"\nurl = \"ws://\"\n");
    let before = home.text();
    for args in [
        &["env", "list"][..],
        &["env", "use", "local"],
        &["run", "--on", "a", "--", "true"],
    ] {
        home.fails(args, &["environments.toml:4: `url`: `ws://`"]);
    }
    assert_eq!(home.text(), before);
    // A command that does not need the file ignores its errors.
    home.ok(&["run", "--on", "local", "--", "true"]);
}
