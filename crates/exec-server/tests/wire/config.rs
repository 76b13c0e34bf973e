//! `environmentConfig/read`: what the server reports from configuration files of the machine.

use std::path::{Path, PathBuf};

use exec_server_testkit::wire::{TestedServer, Transport, WireClient};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{over_all, program, served};

over_all! {
    config_read_returns_layers_in_order_of_precedence,
}

/// A machine with a separate directory, a user, and a project that the user trusts.
struct ConfiguredMachine {
    root: PathBuf,
    _directory: TempDir,
    _subject: TestedServer,
    client: WireClient,
}

impl ConfiguredMachine {
    async fn new(on: Transport, settings: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        for path in [
            "etc",
            "home",
            "work/.codex",
            "work/sub/.codex",
            "work/.git/refs",
        ] {
            std::fs::create_dir_all(root.join(path)).unwrap();
        }
        let mut command = program();
        command
            .env("HOME", &root)
            .env("CODEX_HOME", root.join("home"));
        let system = format!("client_config.system={}", root.join("etc").display());
        for setting in [&*system].iter().chain(settings) {
            command.args(["--set", setting]);
        }
        let mut subject = TestedServer::start(on, command).await;
        let client = subject.session().await;
        let machine = Self {
            root,
            _directory: directory,
            _subject: subject,
            client,
        };
        machine.trust("");
        machine
    }

    fn write(&self, path: &str, text: impl AsRef<[u8]>) {
        std::fs::write(self.root.join(path), text).unwrap();
    }

    /// Writes the user's configuration: the project is trusted, and `more` is added.
    fn trust(&self, more: &str) {
        let project = self.root.join("work");
        let trust = format!(
            "[projects.'{}']\ntrust_level = 'trusted'\n",
            project.display()
        );
        self.write("home/config.toml", format!("{more}\n{trust}"));
    }

    fn uri(&self, path: &str) -> String {
        uri(&self.root.join(path))
    }

    fn params(&self, config: Value, requirements: Value) -> Value {
        let cwd = self.uri("work/sub");
        json!({"cwd": cwd, "configPaths": config, "requirementsPaths": requirements})
    }
}

fn uri(path: &Path) -> String {
    format!("file://{}", path.display())
}

async fn config_read_returns_layers_in_order_of_precedence(on: Transport) {
    let mut machine = ConfiguredMachine::new(on, &[]).await;
    let info = machine.client.ok("environment/info", Value::Null).await;
    assert_eq!(info["capabilities"]["environmentConfigRead"], true);
    machine.write("etc/config.toml", "model = 'system'\n[a]\nb = 1\nc = 2\n");
    machine.trust("model = 'user'");
    machine.write("work/.codex/config.toml", "[a]\nb = 3\n");
    machine.write("work/sub/.codex/config.toml", "other = true\n");
    machine.write("etc/managed_config.toml", "model = 'managed'\n");
    machine.write("etc/requirements.toml", "must = ['x']\nmay = 1\n");
    let params = machine.params(json!([["model"], ["a", "b"]]), json!([["must"]]));
    let result = machine.client.ok("environmentConfig/read", params).await;
    let layer = |kind: &str, file: &str, toml: &str| {
        let path = machine.root.join(file);
        json!({
            "source": format!("{kind} ({})", path.display()),
            "baseDir": uri(path.parent().unwrap()),
            "toml": toml,
        })
    };
    let config = json!({
        "layers": [
            layer("system", "etc/config.toml", "model = \"system\"\n\n[a]\nb = 1\n"),
            layer("user", "home/config.toml", "model = \"user\"\n"),
            layer("project", "work/.codex/config.toml", "[a]\nb = 3\n"),
            layer("managed", "etc/managed_config.toml", "model = \"managed\"\n"),
        ],
        "cloudInsertionIndex": 1,
    });
    assert_eq!(result["config"], config);
    let requirements = json!({
        "layers": [layer("system", "etc/requirements.toml", "must = [\"x\"]\n")],
        "cloudInsertionIndex": 0,
    });
    assert_eq!(result["requirements"], requirements);
    assert_eq!(result["userHomeDir"], uri(&machine.root));
    assert_eq!(result["codexHomeDir"], machine.uri("home"));
    assert!(result["hostname"].is_string());
}

#[tokio::test]
async fn config_read_without_files_returns_no_layers() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let params = json!({
        "cwd": "file:///nowhere/at/all", "configPaths": [["model"]], "requirementsPaths": [["x"]],
    });
    let result = client.ok("environmentConfig/read", params).await;
    let none = json!({"layers": [], "cloudInsertionIndex": 0});
    assert_eq!((&result["config"], &result["requirements"]), (&none, &none));
    assert!(
        result["codexHomeDir"]
            .as_str()
            .unwrap()
            .ends_with("/.codex")
    );
}

#[tokio::test]
async fn config_read_rejects_invalid_paths() {
    let (_server, mut client) = served(Transport::Websocket).await;
    let many = vec![json!(["x"]); 1025];
    for (cwd, config, requirements, reason) in [
        (
            "file:///",
            json!([]),
            json!([]),
            "at least one config or requirements path is required",
        ),
        (
            "file:///",
            json!([[]]),
            json!([]),
            "TOML paths must contain at least one key segment",
        ),
        (
            "file:///",
            json!([["a"]]),
            json!([[]]),
            "TOML paths must contain",
        ),
        (
            "file:///C:/x",
            json!([["a"]]),
            json!([]),
            "`file:///C:/x` is not valid",
        ),
        ("file:///", json!(many), json!([]), "limit of 1024"),
        ("file:///", json!("a"), json!([]), "configPaths"),
    ] {
        let params = json!({"cwd": cwd, "configPaths": config, "requirementsPaths": requirements});
        let refused = client.refused("environmentConfig/read", params).await;
        assert_eq!(refused.code, -32602, "{refused}");
        let known = refused.message.contains(reason) || reason == "configPaths";
        assert!(known, "{refused}");
    }
    let params = json!({"cwd": "file:///", "configPaths": [["a"]]});
    let refused = client.refused("environmentConfig/read", params).await;
    assert!(refused.message.contains("requirementsPaths"), "{refused}");
}

#[tokio::test]
async fn config_read_error_names_file_line_and_column() {
    let mut machine = ConfiguredMachine::new(Transport::Websocket, &[]).await;
    let params = machine.params(json!([["model"]]), json!([]));
    let start = "failed to load executor-local config: ";
    for (file, text, place) in [
        ("work/.codex/config.toml", &b"a = 1\n  b = \n"[..], ":2:7: "),
        ("work/sub/.codex/config.toml", b"x = [1,", ":1:"),
        ("etc/config.toml", b"a = 1\na = 2\n", ":2:1: "),
        ("etc/managed_config.toml", b"a = '\xff'", ":1:6: not UTF-8"),
        ("home/config.toml", b"[", ":1:"),
    ] {
        machine.write(file, text);
        let failed = machine
            .client
            .refused("environmentConfig/read", params.clone())
            .await;
        assert_eq!(failed.code, -32603);
        let expected = format!("{start}{}{place}", machine.root.join(file).display());
        assert!(
            failed.message.starts_with(&expected),
            "{failed}, not {expected}"
        );
        assert!(!failed.message.contains('\n'), "{failed}");
        std::fs::remove_file(machine.root.join(file)).unwrap();
        machine.trust("");
    }
}

/// Files of a hostile project neither block the server nor fill its memory.
#[tokio::test]
async fn config_read_rejects_fifos_devices_and_large_files() {
    let mut machine = ConfiguredMachine::new(Transport::Websocket, &[]).await;
    let params = machine.params(json!([["model"]]), json!([]));
    let path = machine.root.join("work/sub/.codex/config.toml");
    let made = std::process::Command::new("mkfifo")
        .arg(&path)
        .status()
        .unwrap();
    assert!(made.success());
    let failed = machine
        .client
        .refused("environmentConfig/read", params.clone())
        .await;
    assert!(failed.message.ends_with("not a regular file"), "{failed}");
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
    let failed = machine
        .client
        .refused("environmentConfig/read", params.clone())
        .await;
    assert!(failed.message.ends_with("not a regular file"), "{failed}");
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, vec![b'#'; (1 << 20) + 1]).unwrap();
    let failed = machine
        .client
        .refused("environmentConfig/read", params)
        .await;
    assert!(
        failed.message.contains("limit of 1048576 bytes"),
        "{failed}"
    );
}

/// An installation without Codex names its own directory and files.
#[tokio::test]
async fn config_home_and_file_name_are_settings() {
    let directory = tempfile::tempdir().unwrap();
    let home = directory.path().join("settings");
    std::fs::create_dir_all(&home).unwrap();
    std::fs::write(home.join("tool.toml"), "key = 'mine'").unwrap();
    let setting = format!("client_config.home={}", home.display());
    let settings = [&*setting, "client_config.file=tool.toml"];
    let mut machine = ConfiguredMachine::new(Transport::Websocket, &settings).await;
    machine.write("home/config.toml", "key = 'not this'");
    let params = machine.params(json!([["key"]]), json!([]));
    let result = machine.client.ok("environmentConfig/read", params).await;
    assert_eq!(result["config"]["layers"][0]["toml"], "key = \"mine\"\n");
    assert_eq!(result["codexHomeDir"], uri(&home));
}
