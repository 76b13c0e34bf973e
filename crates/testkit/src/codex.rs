//! The real Codex CLI as a peer.
//!
//! Owns finding the binary, a fresh home for it and its two roles here: `codex exec`, the client,
//! and `codex exec-server`, the reference server. Needs no login, no key and no network.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use tokio::process::Command;
use tokio::time::timeout;

use crate::fake_model::FakeModel;
use crate::server::Server;

/// The binary that `CODEX_BIN` names.
///
/// # Panics
///
/// If the variable is unset or names no file. A test that needs the CLI must not pass without it.
#[must_use]
pub fn binary() -> PathBuf {
    let Some(path) = env::var_os("CODEX_BIN").filter(|path| !path.is_empty()) else {
        panic!(
            "CODEX_BIN is not set, so there is no Codex CLI to test against: \
             run `make interop`, which installs one and sets it, or point it at a native `codex` binary"
        );
    };
    let path = PathBuf::from(path);
    assert!(
        path.is_file(),
        "CODEX_BIN names `{}`, which is not a file: unset it and run `make interop`",
        path.display()
    );
    path
}

/// The version of that binary, for what not all versions can do.
///
/// # Panics
///
/// If it does not say.
#[must_use]
pub fn version() -> [u32; 3] {
    let binary = binary();
    let said = std::process::Command::new(&binary)
        .arg("--version")
        .output()
        .unwrap_or_else(|error| panic!("cannot run `{}`: {error}", binary.display()));
    let said = String::from_utf8_lossy(&said.stdout);
    let number = said.split_whitespace().next_back().unwrap_or_default();
    // A release to come counts as the release.
    let number = number.split(['-', '+']).next().unwrap_or_default();
    let parts: Vec<u32> = number
        .split('.')
        .filter_map(|part| part.parse().ok())
        .collect();
    parts
        .try_into()
        .unwrap_or_else(|_| panic!("`{}` is of no known version: {said}", binary.display()))
}

/// A fresh `CODEX_HOME` with an empty project beside it, both removed on drop.
#[derive(Debug)]
pub struct Home {
    root: TempDir,
}

impl Home {
    /// Makes the directories.
    ///
    /// # Panics
    ///
    /// If no suitable place exists: the CLI does not work fully with a home in the temporary
    /// directory, so this is the directory of the test binary or, failing that, the user's cache.
    #[must_use]
    pub fn new() -> Self {
        let parent = places()
            .into_iter()
            .find(|place| !is_temporary(place))
            .expect("a target directory or a home directory outside the temporary directory");
        fs::create_dir_all(&parent)
            .unwrap_or_else(|error| panic!("cannot create `{}`: {error}", parent.display()));
        let root = tempfile::Builder::new()
            .prefix("codex-")
            .tempdir_in(&parent);
        let root =
            root.unwrap_or_else(|error| panic!("cannot write to `{}`: {error}", parent.display()));
        let home = Self { root };
        for directory in [home.path(), home.work()] {
            fs::create_dir(&directory)
                .unwrap_or_else(|error| panic!("cannot create `{}`: {error}", directory.display()));
        }
        home
    }

    /// What `CODEX_HOME` is set to.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.root.path().join("home")
    }

    /// An empty directory to work in.
    #[must_use]
    pub fn work(&self) -> PathBuf {
        self.root.path().join("work")
    }

    /// Writes `config.toml`.
    ///
    /// # Panics
    ///
    /// If it cannot be written.
    pub fn configure(&self, text: &str) {
        let path = self.path().join("config.toml");
        fs::write(&path, text)
            .unwrap_or_else(|error| panic!("cannot write `{}`: {error}", path.display()));
    }

    /// Lays down what the machine requires of the CLI, as an administrator does.
    ///
    /// Only `/etc/codex` can say it. So the CLI runs with a view of `/etc` of its own, in which this
    /// lies above what is there; that takes a kernel which lets users mount.
    ///
    /// # Panics
    ///
    /// If it cannot be written.
    pub fn require(&self, text: &str) {
        let directory = self.etc().join("codex");
        fs::create_dir_all(&directory)
            .unwrap_or_else(|error| panic!("cannot create `{}`: {error}", directory.display()));
        let path = directory.join("requirements.toml");
        fs::write(&path, text)
            .unwrap_or_else(|error| panic!("cannot write `{}`: {error}", path.display()));
    }

    /// What is laid over `/etc`, if anything.
    fn etc(&self) -> PathBuf {
        self.root.path().join("etc")
    }

    /// The binary, with its own view of `/etc` if there is something to see.
    fn program(&self) -> Command {
        let etc = self.etc();
        if !etc.exists() {
            return Command::new(binary());
        }
        let script = r#"mount -t overlay overlay -o "lowerdir=$1:/etc" /etc && shift && exec "$@""#;
        let mut command = Command::new("unshare");
        command
            .args(["--map-root-user", "--mount", "--", "sh", "-c", script, "sh"])
            .arg(etc)
            .arg(binary());
        command
    }

    /// The CLI with this home and nothing else of our environment but `PATH`.
    fn command(&self) -> Command {
        let mut command = self.program();
        command
            .env_clear()
            .env("PATH", env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.root.path())
            .env("CODEX_HOME", self.path())
            .current_dir(self.work());
        command
    }
}

impl Default for Home {
    fn default() -> Self {
        Self::new()
    }
}

/// Starts `codex exec-server` with extra environment variables.
pub async fn exec_server(home: &Home, variables: &[(&str, &str)]) -> Server {
    let mut command = home.command();
    command.arg("exec-server").envs(variables.iter().copied());
    Server::start(command).await
}

/// Starts `codex exec-server` with these flags.
pub async fn exec_server_with(home: &Home, flags: &[&str]) -> Server {
    let mut command = home.command();
    command.arg("exec-server").args(flags);
    Server::start(command).await
}

/// Where environments are registered, as the CLI is told.
#[derive(Debug, Clone)]
pub struct Registry {
    /// Its address, `http://` on this machine.
    pub url: String,
    /// Which environment is meant.
    pub environment: String,
    /// The bearer token for it.
    pub token: String,
}

/// The CLI's executor; dropping it ends the process.
#[derive(Debug)]
pub struct Executor {
    child: tokio::process::Child,
    pid: u32,
}

impl Executor {
    /// Whether the process is still there.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        crate::server::end(&mut self.child, self.pid);
    }
}

/// Starts `codex exec-server --remote` with extra environment variables.
///
/// # Panics
///
/// If it cannot be started.
#[must_use]
pub fn remote_executor(home: &Home, registry: &Registry, variables: &[(&str, &str)]) -> Executor {
    let mut command = home.command();
    command
        .envs(variables.iter().copied())
        .env("CODEX_API_KEY", &registry.token)
        .args(["exec-server", "--remote", &registry.url])
        .args(["--environment-id", &registry.environment])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let child = command
        .spawn()
        .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
    let pid = child.id().expect("a child that was not awaited has a pid");
    Executor { child, pid }
}

/// The command line of `codex app-server`, which speaks on its standard input and output, with an
/// environment of a registry.
#[must_use]
pub fn app_server(home: &Home, registry: &Registry) -> Command {
    let mut command = home.command();
    command
        .arg("app-server")
        .env("CODEX_EXEC_SERVER_NOISE_REGISTRY_URL", &registry.url)
        .env(
            "CODEX_EXEC_SERVER_NOISE_ENVIRONMENT_ID",
            &registry.environment,
        )
        .env("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", &registry.token)
        .kill_on_drop(true);
    command
}

/// As [`exec`], on an environment of a registry.
///
/// # Panics
///
/// As [`exec`].
pub async fn exec_registered(
    home: &Home,
    model: &FakeModel,
    registry: &Registry,
    limit: Duration,
) -> Run {
    home.configure(&config(model, "danger-full-access"));
    let variables = [
        ("CODEX_EXEC_SERVER_NOISE_REGISTRY_URL", &*registry.url),
        (
            "CODEX_EXEC_SERVER_NOISE_ENVIRONMENT_ID",
            &registry.environment,
        ),
        ("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN", &registry.token),
    ];
    run(home, model, &variables, limit).await
}

/// What `codex exec --json` left behind.
#[derive(Debug)]
pub struct Run {
    /// How it ended.
    pub status: ExitStatus,
    /// Its stdout, one JSON event per line.
    pub events: Vec<Value>,
    /// Its stderr.
    pub stderr: String,
}

impl Run {
    /// The completed command items, in order: what a user of the CLI is shown.
    pub fn commands(&self) -> impl Iterator<Item = &Value> {
        self.events
            .iter()
            .filter(|event| event["type"] == "item.completed")
            .map(|event| &event["item"])
            .filter(|item| item["type"] == "command_execution")
    }
}

/// Runs `codex exec` with `model` on the exec-server at `server_url` until it ends by itself.
///
/// # Panics
///
/// If it takes longer than `limit`, prints something other than JSON, or fails.
pub async fn exec(home: &Home, model: &FakeModel, server_url: &str, limit: Duration) -> Run {
    exec_in(home, model, server_url, "danger-full-access", limit).await
}

/// As [`exec`], under a `sandbox_mode` of the CLI.
///
/// # Panics
///
/// As [`exec`].
pub async fn exec_in(
    home: &Home,
    model: &FakeModel,
    server_url: &str,
    sandbox_mode: &str,
    limit: Duration,
) -> Run {
    exec_with(home, model, server_url, sandbox_mode, "", limit).await
}

/// As [`exec_in`], with more tables in `config.toml`.
///
/// # Panics
///
/// As [`exec`].
pub async fn exec_with(
    home: &Home,
    model: &FakeModel,
    server_url: &str,
    sandbox_mode: &str,
    tables: &str,
    limit: Duration,
) -> Run {
    home.configure(&(config(model, sandbox_mode) + tables));
    run(home, model, &[("CODEX_EXEC_SERVER_URL", server_url)], limit).await
}

/// As [`exec_with`], with somebody to ask: a model reviews what needs permission.
///
/// # Panics
///
/// As [`exec`].
pub async fn exec_reviewed(
    home: &Home,
    model: &FakeModel,
    server_url: &str,
    sandbox_mode: &str,
    tables: &str,
    limit: Duration,
) -> Run {
    let nobody = "approval_policy = \"never\"";
    let reviewed = "approval_policy = \"on-request\"\napprovals_reviewer = \"auto_review\"";
    let config = config(model, sandbox_mode).replace(nobody, reviewed);
    home.configure(&(config + tables));
    run(home, model, &[("CODEX_EXEC_SERVER_URL", server_url)], limit).await
}

/// As [`exec`], on this machine, with more in `config.toml`.
///
/// # Panics
///
/// As [`exec`].
pub async fn exec_configured(home: &Home, model: &FakeModel, more: &str, limit: Duration) -> Run {
    home.configure(&(config(model, "danger-full-access") + more));
    run(home, model, &[], limit).await
}

async fn run(home: &Home, model: &FakeModel, variables: &[(&str, &str)], limit: Duration) -> Run {
    let mut command = home.command();
    command
        .envs(variables.iter().copied())
        .args(["exec", "--json", "--skip-git-repo-check", "-C"])
        .arg(home.work())
        .arg("follow the script")
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let output = match timeout(limit, command.output()).await {
        Ok(output) => output.unwrap_or_else(|error| panic!("cannot run {command:?}: {error}")),
        Err(_) => panic!(
            "`codex exec` with {variables:?} did not end within {limit:?}; the model was asked: {:#?}",
            model.inputs()
        ),
    };
    let stdout = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let events = stdout
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<Vec<_>, _>>()
        .unwrap_or_else(|error| {
            panic!("`codex exec` printed no JSON: {error}\n{stdout}\n{stderr}")
        });
    assert!(
        output.status.success(),
        "`codex exec` ended with {}\n{stdout}\n{stderr}",
        output.status
    );
    Run {
        status: output.status,
        events,
        stderr,
    }
}

/// Enough for the CLI to run with `model` and without asking anyone.
fn config(model: &FakeModel, sandbox_mode: &str) -> String {
    format!(
        r#"model = "scripted"
model_provider = "fake"
approval_policy = "never"
sandbox_mode = "{sandbox_mode}"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.fake]
name = "fake"
base_url = "{}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
supports_websockets = false
"#,
        model.base_url()
    )
}

/// Where homes may be made, the best first.
fn places() -> Vec<PathBuf> {
    let executable = env::current_exe().ok();
    let target = executable
        .as_deref()
        .and_then(Path::parent)
        .map(|deps| deps.join("testkit"));
    let cache = env::var_os("XDG_CACHE_HOME")
        .filter(|path| !path.is_empty())
        .map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cache")));
    target
        .into_iter()
        .chain(cache.map(|cache| cache.join("exec-server/testkit")))
        .collect()
}

fn is_temporary(path: &Path) -> bool {
    path.starts_with("/tmp") || path.starts_with(env::temp_dir())
}
