//! `exec-server env`: the list of environments of this user.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use exec_server_client::environment::connect::Connect;
use exec_server_client::environment::{EnvironmentsFile, LOCAL};
use exec_server_client::registry::RegistryUrl;
use exec_server_protocol::NoParams;
use exec_server_protocol::environment::{EnvironmentInfo, Status};
use serde_json::{Value, json};
use toml_edit::{Array, ArrayOfTables, DocumentMut, InlineTable, Item, Table, value};

use super::args::{EnvAddArgs, EnvCommand};
use super::error::{self, notice};
use super::table::{table, visible};
use super::{on, print, runtime, ssh, trust};

/// How long a new environment may take to respond; behind ssh, a server may be installed first.
const TRY_LIMIT: Duration = Duration::from_secs(30);

/// Name on the command line that stands for no environment.
const NONE: &str = "none";

pub(super) fn run(command: &EnvCommand) -> anyhow::Result<ExitCode> {
    match command {
        EnvCommand::List { json } => list(*json),
        EnvCommand::Add(args) => add(args),
        EnvCommand::Remove { id } => remove(id),
        EnvCommand::Status { ids, timeout, json } => status(ids, *timeout, *json),
        EnvCommand::Use { id } => choose(id),
        EnvCommand::Trust(args) => trust::run(args),
    }
}

fn list(as_json: bool) -> anyhow::Result<ExitCode> {
    let list = on::list()?;
    let target = |id: &str| match list.entry(id) {
        Some(entry) => entry.connect.target(),
        None => "this machine".to_owned(),
    };
    let is_default = |id: &str| list.default.as_deref() == Some(id);
    if as_json {
        let environments: Vec<Value> = list
            .ids()
            .map(|id| {
                json!({
                    "id": id,
                    "default": is_default(id),
                    "remote": list.entry(id).is_some(),
                    "target": target(id),
                })
            })
            .collect();
        let text = serde_json::to_string_pretty(&json!({ "environments": environments }))?;
        print(format!("{text}\n").as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    let rows = list.ids().map(|id| {
        let mark = if is_default(id) { "*" } else { "" };
        [id.to_owned(), mark.to_owned(), target(id)]
    });
    print(table(&["ENVIRONMENT", "DEFAULT", "TARGET"], rows).as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// The table of a new environment.
fn entry(args: &EnvAddArgs) -> anyhow::Result<Table> {
    let mut entry = Table::new();
    entry["id"] = value(&args.id);
    if let Some(url) = &args.url {
        let connect_target = match url {
            url if url.starts_with(ssh::SCHEME) => "ssh",
            url if RegistryUrl::matches(url) => "registry",
            _ => "url",
        };
        entry[connect_target] = value(url);
    }
    if let [program, rest @ ..] = &args.program[..] {
        entry["program"] = value(program);
        if !rest.is_empty() {
            entry["args"] = value(rest.iter().collect::<Array>());
        }
    }
    // `env add` may run in another directory than later commands, so relative paths become
    // absolute.
    let absolute = |path: &Path| -> anyhow::Result<Item> {
        let path = std::path::absolute(path)?;
        let text = path
            .to_str()
            .with_context(|| format!("{} is not valid UTF-8", path.display()))?;
        Ok(value(text))
    };
    if let Some(path) = &args.token_file {
        entry["auth_token_file"] = absolute(path)?;
    }
    if let Some(path) = &args.cwd {
        entry["cwd"] = absolute(path)?;
    }
    if !args.ssh_option.is_empty() {
        entry["ssh_options"] = value(args.ssh_option.iter().collect::<Array>());
    }
    if let Some(binary) = &args.remote_binary {
        entry["remote_binary"] = value(binary);
    }
    if let Some(path) = &args.local_root {
        entry["local_root"] = absolute(path)?;
    }
    if let Some(path) = &args.remote_root {
        entry["remote_root"] = value(path);
    }
    if let Some(pin) = &args.tls_pin {
        entry["tls_pin"] = value(pin);
    }
    let mut variables = InlineTable::new();
    for setting in &args.env {
        let (name, text) = setting
            .split_once('=')
            .with_context(|| format!("--env {setting}: expected NAME=VALUE"))?;
        variables.insert(name, text.into());
    }
    if !variables.is_empty() {
        entry["env"] = value(variables);
    }
    Ok(entry)
}

fn add(args: &EnvAddArgs) -> anyhow::Result<ExitCode> {
    edit(|document| {
        let mut entry = entry(args)?;
        let tables = environments(document)?;
        match position(tables, &args.id) {
            Some(_) if !args.force => {
                bail!(
                    "there is an environment `{}` already; --force replaces it",
                    args.id
                )
            }
            Some(at) => {
                if let Some(old) = tables.get_mut(at) {
                    // Comments before the entry are kept.
                    *entry.decor_mut() = old.decor().clone();
                    let place = old.position();
                    *old = entry;
                    old.set_position(place);
                }
            }
            None => tables.push(entry),
        }
        if args.default {
            set_default(document, &args.id);
        }
        Ok(())
    })?;
    print(format!("added `{}`\n", args.id).as_bytes())?;
    try_out(args)
}

/// Connects to a new environment and prints its version and latency. A failed connection is not an
/// error of `add`: the machine may be switched off.
fn try_out(args: &EnvAddArgs) -> anyhow::Result<ExitCode> {
    let list = on::list()?;
    let Some(entry) = list.entry(&args.id).filter(|_| !args.no_try) else {
        return Ok(ExitCode::SUCCESS);
    };
    let connect = on::connect_target(&entry.connect, None)?;
    let probe_result = runtime()?.block_on(probe(connect, TRY_LIMIT));
    match probe_result {
        Ok(answer) => print(
            format!(
                "exec-server {} answered in {:.1} ms; to use it: exec-server run --on {} -- uname -a\n",
                visible(answer.version().unwrap_or("of unknown version")),
                millis(answer.latency),
                args.id
            )
            .as_bytes(),
        )?,
        Err(error) => notice(&format!(
            "`{}` does not work yet: {}",
            args.id,
            error::message(&error)
        )),
    }
    Ok(ExitCode::SUCCESS)
}

fn remove(id: &str) -> anyhow::Result<ExitCode> {
    edit(|document| {
        let tables = environments(document)?;
        let Some(at) = position(tables, id) else {
            bail!("there is no environment `{id}`; `exec-server env list` shows them");
        };
        tables.remove(at);
        if tables.is_empty() {
            document.remove("environments");
        }
        if document.get("default").and_then(Item::as_str) == Some(id) {
            let local = document.get("include_local").and_then(Item::as_bool);
            let default = if local.unwrap_or(true) { LOCAL } else { NONE };
            set_default(document, default);
            notice(&format!("`{id}` was the default; now it is `{default}`"));
        }
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

fn choose(id: &str) -> anyhow::Result<ExitCode> {
    edit(|document| {
        let known = id == LOCAL
            || id.eq_ignore_ascii_case(NONE)
            || position(environments(document)?, id).is_some();
        if !known {
            bail!("there is no environment `{id}`; `exec-server env list` shows them");
        }
        if document
            .get("environments")
            .and_then(Item::as_array_of_tables)
            .is_some_and(ArrayOfTables::is_empty)
        {
            document.remove("environments");
        }
        set_default(document, id);
        Ok(())
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Sets the default environment; comments beside the key are kept.
fn set_default(document: &mut DocumentMut, id: &str) {
    match document.get_mut("default").and_then(Item::as_value_mut) {
        Some(old) => {
            let decor = old.decor().clone();
            *old = id.into();
            *old.decor_mut() = decor;
        }
        None => document["default"] = value(id),
    }
}

/// Edits `environments.toml`. The new text is parsed before it replaces the old file.
fn edit(change: impl FnOnce(&mut DocumentMut) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let configured = on::configured();
    let path = configured
        .own_file()
        .context("no directory for settings: set EXEC_SERVER_HOME or HOME")?;
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            if let Some(other) = configured.file() {
                bail!(
                    "the environments are read from {}; copy that file to {} to change them",
                    other.display(),
                    path.display()
                );
            }
            String::new()
        }
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    // A file with a syntax error is not changed, and the error is reported as by every other
    // command.
    EnvironmentsFile::parse(&text, path)?;
    let mut document: DocumentMut = text
        .parse()
        .with_context(|| format!("cannot understand {}", path.display()))?;
    change(&mut document)?;
    let text = document.to_string();
    EnvironmentsFile::parse(&text, path).context("this change would make the file invalid")?;
    replace(path, &text).with_context(|| format!("cannot write {}", path.display()))
}

/// Replaces the text of a file atomically. The file may contain tokens, so only this user can read
/// it.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
    let directory = path.parent().unwrap_or(Path::new("/"));
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)?;
    let aside = directory.join(format!(".{}.{}", "environments.toml", std::process::id()));
    let written = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&aside)
        .and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.sync_all()
        })
        // If the path is a link, the target of the link is replaced.
        .and_then(|()| std::fs::rename(&aside, real(path)));
    if written.is_err() {
        let _ = std::fs::remove_file(&aside);
    }
    written
}

/// Target of a path with all links resolved, if it exists.
fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Tables of the environments; inline tables are converted to ordinary ones.
fn environments(document: &mut DocumentMut) -> anyhow::Result<&mut ArrayOfTables> {
    let item = document
        .entry("environments")
        .or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new()));
    if let Item::Value(inline) = item {
        let owned = std::mem::take(inline.as_array_mut().context("no list of environments")?);
        let tables = owned
            .into_iter()
            .filter_map(|entry| match entry {
                toml_edit::Value::InlineTable(table) => Some(table.into_table()),
                _ => None,
            })
            .collect::<ArrayOfTables>();
        *item = Item::ArrayOfTables(tables);
    }
    item.as_array_of_tables_mut()
        .context("no list of environments")
}

fn position(tables: &ArrayOfTables, id: &str) -> Option<usize> {
    tables
        .iter()
        .position(|table| table.get("id").and_then(Item::as_str) == Some(id))
}

/// Status of an environment.
#[derive(Debug)]
struct EnvironmentReport {
    id: String,
    default: bool,
    target: String,
    /// `None` for this machine.
    outcome: Option<Result<ProbeAnswer, String>>,
}

#[derive(Debug)]
struct ProbeAnswer {
    connect: Duration,
    latency: Duration,
    info: Option<EnvironmentInfo>,
}

fn status(ids: &[String], timeout: Duration, as_json: bool) -> anyhow::Result<ExitCode> {
    let list = on::list()?;
    if let Some(unknown) = ids.iter().find(|id| !list.ids().any(|known| known == **id)) {
        bail!("there is no environment `{unknown}`; `exec-server env list` shows them");
    }
    let wanted = |id: &str| ids.is_empty() || ids.iter().any(|wanted| wanted == id);
    let reports = runtime()?.block_on(async {
        let probe_result: Vec<_> = list
            .ids()
            .filter(|id| wanted(id))
            .map(|id| {
                let connect = list.entry(id).map(|entry| {
                    let own = on::connect_target(&entry.connect, None);
                    own.unwrap_or_else(|_| Arc::clone(&entry.connect))
                });
                let target = connect.as_ref().map(|connect| connect.target());
                let asking = connect.map(|connect| tokio::spawn(probe(connect, timeout)));
                (id.to_owned(), target, asking)
            })
            .collect();
        let mut reports = Vec::new();
        for (id, target, asking) in probe_result {
            let outcome = match asking {
                None => None,
                Some(asking) => Some(match asking.await {
                    Ok(answer) => answer.map_err(|error| error::message(&error)),
                    Err(error) => Err(error.to_string()),
                }),
            };
            reports.push(EnvironmentReport {
                default: list.default.as_deref() == Some(&id),
                target: target.unwrap_or_else(|| "this machine".to_owned()),
                id,
                outcome,
            });
        }
        reports
    });
    let text = if as_json {
        let reports: Vec<Value> = reports.iter().map(EnvironmentReport::as_json).collect();
        format!(
            "{}\n",
            serde_json::to_string_pretty(&json!({ "environments": reports }))?
        )
    } else {
        as_table(&reports)
    };
    print(text.as_bytes())?;
    let ready = reports
        .iter()
        .all(|report| !matches!(report.outcome, Some(Err(_))));
    Ok(if ready {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Connects to an environment and measures its latency.
async fn probe(connect: Arc<dyn Connect>, limit: Duration) -> anyhow::Result<ProbeAnswer> {
    let asking = async {
        let began = Instant::now();
        let client = connect.connect().await?;
        let connect = began.elapsed();
        let probe_result = Instant::now();
        client.call::<Status>(&NoParams).await?;
        let latency = probe_result.elapsed();
        let info = client.environment_info().await.ok().cloned();
        if client.supports("session/end").await.unwrap_or(false) {
            // Ends the session immediately, because it will not be resumed.
            let _ = client.end_session().await;
        }
        anyhow::Ok(ProbeAnswer {
            connect,
            latency,
            info,
        })
    };
    match tokio::time::timeout(limit, asking).await {
        Ok(answer) => answer,
        Err(_) => bail!("no answer within {limit:?}"),
    }
}

impl ProbeAnswer {
    fn version(&self) -> Option<&str> {
        self.info.as_ref()?.executor_version.as_deref()
    }

    /// Names of the supported features of the compatible protocol, in the order of the handshake.
    fn capabilities(&self) -> Vec<&str> {
        let capabilities = self.info.iter().flat_map(|info| &info.capabilities);
        capabilities
            .filter(|(_, has)| **has)
            .map(|(name, _)| name.as_str())
            .collect()
    }

    fn extensions(&self) -> &[String] {
        self.info.as_ref().map_or(&[], |info| &info.extensions)
    }
}

impl EnvironmentReport {
    fn as_json(&self) -> Value {
        let mut report = json!({
            "id": self.id,
            "default": self.default,
            "target": self.target,
            "status": match self.outcome {
                None | Some(Ok(_)) => "ready",
                Some(Err(_)) => "failed",
            },
        });
        match &self.outcome {
            None => report["version"] = json!(env!("CARGO_PKG_VERSION")),
            Some(Err(error)) => report["error"] = json!(error),
            Some(Ok(answer)) => {
                let info = answer.info.as_ref();
                report["version"] = json!(answer.version());
                report["os"] = json!(info.and_then(|info| info.platform_os.as_deref()));
                report["shell"] = json!(info.map(|info| &info.shell.path));
                report["connectMs"] = json!(millis(answer.connect));
                report["latencyMs"] = json!(millis(answer.latency));
                report["capabilities"] = json!(answer.capabilities());
                report["extensions"] = json!(answer.extensions());
            }
        }
        report
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

fn as_table(reports: &[EnvironmentReport]) -> String {
    let rows = reports.iter().map(|report| {
        let (state, version, latency, about) = match &report.outcome {
            None => (
                "ready",
                env!("CARGO_PKG_VERSION").to_owned(),
                String::new(),
                report.target.clone(),
            ),
            Some(Err(error)) => ("failed", String::new(), String::new(), error.clone()),
            Some(Ok(answer)) => (
                "ready",
                answer.version().unwrap_or("unknown").to_owned(),
                format!("{:.1} ms", millis(answer.latency)),
                report.target.clone(),
            ),
        };
        let id = if report.default {
            format!("{}*", report.id)
        } else {
            report.id.clone()
        };
        [id, state.to_owned(), version, latency, about]
    });
    table(
        &[
            "ENVIRONMENT",
            "STATUS",
            "VERSION",
            "LATENCY",
            "TARGET OR ERROR",
        ],
        rows,
    )
}
