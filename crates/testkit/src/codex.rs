//! Real Codex CLI as a peer.
//!
//! Finds the binary, creates a new home directory for it, and runs it in two roles: `codex exec`,
//! the client, and `codex exec-server`, the reference server. Needs no login, no key and no
//! network.

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
use crate::server::ServerProcess;

/// Path of the binary, from `CODEX_BIN`.
///
/// # Panics
///
/// The variable is unset or names no file. A test that needs the CLI must not pass without it.
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

/// Version of that binary, for features that not all versions have.
///
/// # Panics
///
/// The version cannot be read.
#[must_use]
pub fn version() -> [u32; 3] {
    let binary = binary();
    let output = std::process::Command::new(&binary)
        .arg("--version")
        .output()
        .unwrap_or_else(|error| panic!("cannot run `{}`: {error}", binary.display()));
    let output = String::from_utf8_lossy(&output.stdout);
    let number = output.split_whitespace().next_back().unwrap_or_default();
    // A pre-release counts as its release.
    let number = number.split(['-', '+']).next().unwrap_or_default();
    let parts: Vec<u32> = number
        .split('.')
        .filter_map(|part| part.parse().ok())
        .collect();
    parts
        .try_into()
        .unwrap_or_else(|_| panic!("`{}` has an unknown version: {output}", binary.display()))
}

/// A new `CODEX_HOME` and an empty project directory, both removed on drop.
#[derive(Debug)]
pub struct CodexHome {
    root: TempDir,
}

impl CodexHome {
    /// Creates the directories.
    ///
    /// # Panics
    ///
    /// No suitable parent directory exists. The CLI does not work fully with a home in the
    /// temporary directory, so the parent is the directory of the test binary or else the user's
    /// cache directory.
    #[must_use]
    pub fn new() -> Self {
        let parent = parent_directories()
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

    /// Value of `CODEX_HOME`.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.root.path().join("home")
    }

    /// Empty directory to work in.
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

    /// Writes the CLI's requirements file, which is normally an administrator's.
    ///
    /// The CLI reads it only from `/etc/codex`. It therefore runs in a mount namespace in which
    /// this directory is an overlay of `/etc`; the kernel must allow users to mount.
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

    /// Overlay of `/etc`, if it exists.
    fn etc(&self) -> PathBuf {
        self.root.path().join("etc")
    }

    /// Command of the binary, with an overlay of `/etc` if there is one.
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

    /// Command of the CLI with this home, and no other variable of the test's environment than
    /// `PATH`.
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

impl Default for CodexHome {
    fn default() -> Self {
        Self::new()
    }
}

/// Starts `codex exec-server` with extra environment variables.
pub async fn exec_server(home: &CodexHome, variables: &[(&str, &str)]) -> ServerProcess {
    let mut command = home.command();
    command.arg("exec-server").envs(variables.iter().copied());
    ServerProcess::start(command).await
}

/// Starts `codex exec-server` with these flags.
pub async fn exec_server_with(home: &CodexHome, flags: &[&str]) -> ServerProcess {
    let mut command = home.command();
    command.arg("exec-server").args(flags);
    ServerProcess::start(command).await
}

/// A registered environment, as the CLI is configured with it.
#[derive(Debug, Clone)]
pub struct CodexRegistry {
    /// URL of the registry: `http://` on this machine.
    pub url: String,
    /// Id of the environment.
    pub environment: String,
    /// Bearer token for the environment.
    pub token: String,
}

/// The CLI as executor; dropping it ends the process.
#[derive(Debug)]
pub struct CodexExecutor {
    child: tokio::process::Child,
    pid: u32,
}

impl CodexExecutor {
    /// Whether the process is running.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for CodexExecutor {
    fn drop(&mut self) {
        crate::server::end(&mut self.child, self.pid);
    }
}

/// Command of `codex exec-server --remote` with an API key.
#[must_use]
pub fn remote_executor_command(
    home: &CodexHome,
    url: &str,
    environment: &str,
    key: &str,
) -> Command {
    let mut command = home.command();
    command
        .env("CODEX_API_KEY", key)
        .args(["exec-server", "--remote", url])
        .args(["--environment-id", environment]);
    command
}

/// Starts `codex exec-server --remote` with extra environment variables.
///
/// # Panics
///
/// If it cannot be started.
#[must_use]
pub fn remote_executor(
    home: &CodexHome,
    registry: &CodexRegistry,
    variables: &[(&str, &str)],
) -> CodexExecutor {
    let CodexRegistry {
        url,
        environment,
        token,
    } = registry;
    let mut command = remote_executor_command(home, url, environment, token);
    command
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let child = command
        .spawn()
        .unwrap_or_else(|error| panic!("cannot start {command:?}: {error}"));
    let pid = child.id().expect("a child that was not awaited has a pid");
    CodexExecutor { child, pid }
}

/// Command of `codex app-server`, which communicates over standard input and output, with an
/// environment of a registry.
#[must_use]
pub fn app_server(home: &CodexHome, registry: &CodexRegistry) -> Command {
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

/// Like [`exec`], in an environment of a registry.
///
/// # Panics
///
/// Same as [`exec`].
pub async fn exec_registered(
    home: &CodexHome,
    model: &FakeModel,
    registry: &CodexRegistry,
    limit: Duration,
) -> CodexRun {
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

/// Result of `codex exec --json`.
#[derive(Debug)]
pub struct CodexRun {
    /// Exit status.
    pub status: ExitStatus,
    /// Standard output of Codex: one JSON event per line.
    pub events: Vec<Value>,
    /// Standard error of Codex.
    pub stderr: String,
}

impl CodexRun {
    /// Returns the completed command items in order, as the CLI displays them.
    pub fn commands(&self) -> impl Iterator<Item = &Value> {
        self.events
            .iter()
            .filter(|event| event["type"] == "item.completed")
            .map(|event| &event["item"])
            .filter(|item| item["type"] == "command_execution")
    }
}

/// Runs `codex exec` with `model` on the exec-server at `server_url` until it exits.
///
/// # Panics
///
/// If it takes longer than `limit`, prints anything but JSON, or fails.
pub async fn exec(
    home: &CodexHome,
    model: &FakeModel,
    server_url: &str,
    limit: Duration,
) -> CodexRun {
    exec_in(home, model, server_url, "danger-full-access", limit).await
}

/// Like [`exec`], with a `sandbox_mode` of the CLI.
///
/// # Panics
///
/// Same as [`exec`].
pub async fn exec_in(
    home: &CodexHome,
    model: &FakeModel,
    server_url: &str,
    sandbox_mode: &str,
    limit: Duration,
) -> CodexRun {
    exec_with(home, model, server_url, sandbox_mode, "", limit).await
}

/// Like [`exec_in`], with additional tables in `config.toml`.
///
/// # Panics
///
/// Same as [`exec`].
pub async fn exec_with(
    home: &CodexHome,
    model: &FakeModel,
    server_url: &str,
    sandbox_mode: &str,
    tables: &str,
    limit: Duration,
) -> CodexRun {
    home.configure(&(config(model, sandbox_mode) + tables));
    run(home, model, &[("CODEX_EXEC_SERVER_URL", server_url)], limit).await
}

/// Like [`exec_with`], with a reviewer: a model reviews requests for permission.
///
/// # Panics
///
/// Same as [`exec`].
pub async fn exec_reviewed(
    home: &CodexHome,
    model: &FakeModel,
    server_url: &str,
    sandbox_mode: &str,
    tables: &str,
    limit: Duration,
) -> CodexRun {
    let nobody = "approval_policy = \"never\"";
    let reviewed = "approval_policy = \"on-request\"\napprovals_reviewer = \"auto_review\"";
    let config = config(model, sandbox_mode).replace(nobody, reviewed);
    home.configure(&(config + tables));
    run(home, model, &[("CODEX_EXEC_SERVER_URL", server_url)], limit).await
}

/// Like [`exec`], on this machine, with additional configuration in `config.toml`.
///
/// # Panics
///
/// Same as [`exec`].
pub async fn exec_configured(
    home: &CodexHome,
    model: &FakeModel,
    more: &str,
    limit: Duration,
) -> CodexRun {
    home.configure(&(config(model, "danger-full-access") + more));
    run(home, model, &[], limit).await
}

async fn run(
    home: &CodexHome,
    model: &FakeModel,
    variables: &[(&str, &str)],
    limit: Duration,
) -> CodexRun {
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
    CodexRun {
        status: output.status,
        events,
        stderr,
    }
}

/// Returns the minimal configuration for `model`, without approval requests.
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

/// Possible parent directories of homes, best first.
fn parent_directories() -> Vec<PathBuf> {
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
