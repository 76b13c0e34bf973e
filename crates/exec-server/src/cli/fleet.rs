//! `exec-server fleet`: administration of rendezvous servers.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use exec_server_registry::api::RegistryApi;
use exec_server_registry::auth::RegistryAuth;
use exec_server_registry::{Proxies, RegistryOptions};
use exec_server_transport::Secret;
use exec_server_transport::tls::TlsClientOptions;
use serde_json::{Value, json};

use super::args::{FleetArgs, FleetCommand};
use super::settings::{state_directory, variable};
use super::table::{self, table, visible};
use super::{error, print, runtime, terminal};

/// Default URL of a rendezvous server.
const DEFAULT_URL: &str = "http://127.0.0.1:4700";

/// Maximum number of environments that `top` shows.
const BUSIEST: usize = 10;

pub(super) fn run(args: &FleetArgs) -> anyhow::Result<ExitCode> {
    let access = FleetAccess::of(args)?;
    let api = access.to(&access.url)?;
    runtime()?
        .block_on(act(args, &access, &api))
        .map_err(|error| error::of_registry(error, &access.token_origin))?;
    Ok(ExitCode::SUCCESS)
}

/// Connection options of rendezvous servers, and the admin token.
struct FleetAccess {
    url: String,
    token: Secret,
    /// Description of the token's source, for messages.
    token_origin: String,
    tls: TlsClientOptions,
    plain: bool,
}

impl FleetAccess {
    fn of(args: &FleetArgs) -> anyhow::Result<Self> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let url = args
            .url
            .clone()
            .or_else(|| set("EXEC_SERVER_FLEET_URL"))
            .unwrap_or_else(|| DEFAULT_URL.to_owned());
        let given = args
            .admin_token_file
            .clone()
            .or_else(|| set("EXEC_SERVER_FLEET_TOKEN_FILE").map(PathBuf::from));
        let file = match given {
            Some(file) => file,
            None => state_directory()
                .map(|state| state.join("rendezvous/admin.token"))
                .filter(|file| file.exists())
                .context("an admin token is needed: --admin-token-file FILE")?,
        };
        let token = Secret::read(&file)
            .with_context(|| format!("cannot read the token in {}", file.display()))?;
        if token.expose().is_empty() {
            bail!("the token in {} is empty", file.display());
        }
        let mut tls = TlsClientOptions::default();
        let pin = args.tls_pin.clone().or_else(|| set("EXEC_SERVER_TLS_PIN"));
        tls.pin = pin.map(|pin| pin.parse()).transpose()?;
        let ca = args.tls_ca.clone();
        tls.ca_file = ca.or_else(|| set("EXEC_SERVER_TLS_CA").map(PathBuf::from));
        Ok(Self {
            url,
            token,
            token_origin: format!("the token in {}", file.display()),
            tls,
            plain: args.danger_plain_http,
        })
    }

    /// The API of a rendezvous server, or of another node of its fleet.
    fn to(&self, url: &str) -> anyhow::Result<RegistryApi> {
        let mut options = RegistryOptions::new(RegistryAuth::bearer(self.token.clone()));
        options.tls = self.tls.clone();
        options.proxies = Proxies::of_variables(variable);
        options.danger_plain_http = self.plain;
        Ok(RegistryApi::new(url, options)?)
    }
}

async fn act(args: &FleetArgs, access: &FleetAccess, api: &RegistryApi) -> anyhow::Result<()> {
    match &args.command {
        FleetCommand::Nodes => {
            let answer = api.get("cloud/nodes").await?;
            show(args.json, &answer, nodes_table)
        }
        FleetCommand::Environments { tenant, remove } if remove.is_empty() => {
            let mut answer = api.get("cloud/environments").await?;
            if let (Some(tenant), Some(listed)) = (tenant, answer["environments"].as_array_mut()) {
                listed.retain(|environment| environment["tenant"] == **tenant);
            }
            show(args.json, &answer, environments_table)
        }
        FleetCommand::Environments { tenant, remove } => {
            remove_environments(args.json, api, remove, tenant.as_deref()).await
        }
        FleetCommand::Streams {
            environment,
            tenant,
        } => {
            let mut path = "cloud/streams".to_owned();
            let mut mark = '?';
            for (name, value) in [("environment_id", environment), ("tenant", tenant)] {
                if let Some(value) = value {
                    let _ = write!(path, "{mark}{name}={}", segment(value)?);
                    mark = '&';
                }
            }
            show(args.json, &api.get(&path).await?, streams_table)
        }
        FleetCommand::Revoke { who: None, .. } => {
            let answer = api.get("cloud/revocations").await?;
            show(args.json, &answer, revocations_table)
        }
        FleetCommand::Revoke {
            who: Some(who),
            environment,
            tenant,
            undo,
        } => {
            let place = (environment.as_deref(), tenant.as_deref());
            revoke(args.json, api, who, place, *undo).await
        }
        FleetCommand::Drain { node } => {
            let answer = api.post("cloud/drain", &json!({"node": node})).await?;
            show(args.json, &answer, |_| format!("{node} is draining\n"))
        }
        FleetCommand::Top { interval, count } => top(args, access, api, *interval, *count).await,
    }
}

async fn remove_environments(
    json: bool,
    api: &RegistryApi,
    remove: &[String],
    tenant: Option<&str>,
) -> anyhow::Result<()> {
    for id in remove {
        let mut path = format!("cloud/environment/{}/remove", segment(id)?);
        if let Some(tenant) = tenant {
            let _ = write!(path, "?tenant={}", segment(tenant)?);
        }
        api.post(&path, &json!({}))
            .await
            .with_context(|| format!("cannot remove `{id}`"))?;
        if !json {
            print(format!("removed {id}\n").as_bytes())?;
        }
    }
    if json {
        return show(true, &json!({"removed": remove}), |_| String::new());
    }
    Ok(())
}

/// Revokes a harness in an environment and a tenant, or undoes that.
async fn revoke(
    json: bool,
    api: &RegistryApi,
    who: &str,
    (environment, tenant): (Option<&str>, Option<&str>),
    undo: bool,
) -> anyhow::Result<()> {
    let body = json!({"harness": who, "environment_id": environment, "tenant": tenant});
    let path = if undo { "cloud/permit" } else { "cloud/revoke" };
    let answer = api.post(path, &body).await?;
    if undo && answer["permitted"] != true && !json {
        bail!("`{who}` was not revoked{}", in_environment(environment));
    }
    show(json, &answer, |answer| match undo {
        true => format!("{who} is permitted again\n"),
        false => format!(
            "revoked {}{}; sockets ended: {}\n",
            text(&answer["revoked"]),
            in_environment(environment),
            answer["sockets_ended"]
        ),
    })
}

fn in_environment(environment: Option<&str>) -> String {
    environment.map_or(String::new(), |environment| format!(" in `{environment}`"))
}

/// Percent-encodes text for one segment or value of a URL.
fn segment(text: &str) -> anyhow::Result<&str> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    if text.is_empty() || matches!(text, "." | "..") || !text.bytes().all(allowed) {
        bail!("`{text}` is not a valid name of an environment or tenant");
    }
    Ok(text)
}

fn show(as_json: bool, answer: &Value, table: impl Fn(&Value) -> String) -> anyhow::Result<()> {
    let text = match as_json {
        true => format!("{}\n", serde_json::to_string_pretty(answer)?),
        false => table(answer),
    };
    print(text.as_bytes())
}

/// A value that another machine sent, escaped for one cell of a table.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => visible(text),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

fn list<'a>(answer: &'a Value, name: &str) -> &'a [Value] {
    answer[name].as_array().map_or(&[], Vec::as_slice)
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}

fn age(since_ms: &Value) -> String {
    let since = since_ms.as_u64().unwrap_or(0);
    table::age(now_ms().saturating_sub(since) / 1000)
}

fn nodes_table(answer: &Value) -> String {
    let row = |node: &Value| {
        let state = if node["draining"] == true {
            "draining"
        } else {
            "up"
        };
        vec![
            text(&node["name"]),
            state.to_owned(),
            age(&node["started_at"]),
            text(&node["executors"]),
            text(&node["harnesses"]),
            text(&node["streams"]),
            text(&node["version"]),
            text(&node["url"]),
        ]
    };
    let head = [
        "NODE",
        "STATE",
        "AGE",
        "EXECUTORS",
        "HARNESSES",
        "STREAMS",
        "VERSION",
        "URL",
    ];
    table(&head, list(answer, "nodes").iter().map(row))
}

fn environments_table(answer: &Value) -> String {
    let row = |environment: &Value| {
        vec![
            text(&environment["tenant"]),
            text(&environment["environment_id"]),
            match environment["online"] == true {
                true => "online".to_owned(),
                false => "offline".to_owned(),
            },
            text(&environment["node"]),
            text(&environment["harnesses"]),
            text(&environment["streams"]),
            text(&environment["owner"]),
            text(&environment["name"]),
        ]
    };
    let head = [
        "TENANT",
        "ENVIRONMENT",
        "STATE",
        "NODE",
        "HARNESSES",
        "STREAMS",
        "OWNER",
        "NAME",
    ];
    table(&head, list(answer, "environments").iter().map(row))
}

fn streams_table(answer: &Value) -> String {
    let row = |stream: &Value| {
        vec![
            text(&stream["tenant"]),
            text(&stream["environment_id"]),
            text(&stream["stream_id"]),
            text(&stream["token"]),
            text(&stream["key"]).chars().take(16).collect(),
            text(&stream["harness_node"]),
            text(&stream["executor_node"]),
        ]
    };
    let head = [
        "TENANT",
        "ENVIRONMENT",
        "STREAM",
        "TOKEN",
        "KEY",
        "FROM NODE",
        "TO NODE",
    ];
    table(&head, list(answer, "streams").iter().map(row))
}

fn revocations_table(answer: &Value) -> String {
    let row = |revoked: &Value| {
        vec![
            text(&revoked["tenant"]),
            text(&revoked["harness"]),
            text(&revoked["environment"]),
            age(&revoked["revoked_at"]),
        ]
    };
    let head = ["TENANT", "WHO", "ENVIRONMENT", "AGO"];
    table(&head, list(answer, "revocations").iter().map(row))
}

/// One snapshot of nodes, environments and usage.
struct FleetSnapshot {
    at: Instant,
    nodes: Value,
    environments: Value,
    /// Usage of each node that responded, by its name.
    usage: Vec<Value>,
}

impl FleetSnapshot {
    async fn take(
        access: &FleetAccess,
        api: &RegistryApi,
        others: &mut HashMap<String, RegistryApi>,
    ) -> anyhow::Result<Self> {
        let nodes = api.get("cloud/nodes").await?;
        let environments = api.get("cloud/environments").await?;
        let own = api.get("cloud/usage").await?;
        let mut usage = vec![own];
        for node in list(&nodes, "nodes") {
            let (Some(name), Some(url)) = (node["name"].as_str(), node["url"].as_str()) else {
                continue;
            };
            if usage[0]["node"] == *name {
                continue;
            }
            if !others.contains_key(name) {
                // A node that cannot be reached appears in the list of nodes only; the other
                // figures exclude it.
                let Ok(api) = access.to(url) else { continue };
                others.insert(name.to_owned(), api);
            }
            if let Ok(used) = others[name].get("cloud/usage").await {
                usage.push(used);
            }
        }
        Ok(Self {
            at: Instant::now(),
            nodes,
            environments,
            usage,
        })
    }

    fn json(&self) -> Value {
        json!({
            "nodes": self.nodes["nodes"],
            "usage": self.usage,
            "environments": self.busiest(),
        })
    }

    fn busiest(&self) -> Vec<&Value> {
        let mut all: Vec<_> = list(&self.environments, "environments").iter().collect();
        all.sort_by_key(|environment| {
            let count = |name: &str| environment[name].as_u64().unwrap_or(0);
            std::cmp::Reverse((count("streams"), count("harnesses")))
        });
        all.truncate(BUSIEST);
        all
    }

    /// Growth per second of a node's counter since `before`.
    fn rate(&self, before: Option<&Self>, node: &Value, pick: impl Fn(&Value) -> u64) -> f64 {
        let Some(before) = before else { return 0.0 };
        let find = |snapshot: &Self| {
            let found = snapshot.usage.iter().find(|usage| usage["node"] == *node);
            found.map(&pick)
        };
        let (Some(now), Some(then)) = (find(self), find(before)) else {
            return 0.0;
        };
        let seconds = (self.at - before.at).as_secs_f64();
        now.saturating_sub(then) as f64 / seconds.max(0.001)
    }

    fn screen(&self, before: Option<&Self>) -> String {
        let count = |value: &Value| value.as_u64().unwrap_or(0);
        let per_second = |rate: f64| format!("{}/s", table::bytes(rate as u64));
        let total = |name: &str| -> u64 {
            let nodes = list(&self.nodes, "nodes").iter();
            nodes.map(|node| count(&node[name])).sum()
        };
        let all = list(&self.environments, "environments");
        let mut screen = format!(
            "{} nodes, {} environments ({} online), {} harnesses, {} streams\n\n",
            list(&self.nodes, "nodes").len(),
            all.len(),
            total("executors"),
            total("harnesses"),
            total("streams"),
        );
        let rows = list(&self.nodes, "nodes").iter().map(|node| {
            let name = &node["name"];
            let usage = self.usage.iter().find(|usage| usage["node"] == *name);
            let known = |shown: String| match usage {
                Some(_) => shown,
                None => "?".to_owned(),
            };
            let rate = |field: &'static str| {
                per_second(self.rate(before, name, |usage| count(&usage[field])))
            };
            vec![
                text(name),
                match node["draining"] == true {
                    true => "draining".to_owned(),
                    false => "up".to_owned(),
                },
                text(&node["executors"]),
                text(&node["harnesses"]),
                text(&node["streams"]),
                known(rate("received_bytes")),
                known(rate("sent_bytes")),
                known(table::bytes(
                    usage.map_or(0, |usage| count(&usage["backlog_bytes"])),
                )),
            ]
        });
        let head = [
            "NODE",
            "STATE",
            "EXECUTORS",
            "HARNESSES",
            "STREAMS",
            "IN",
            "OUT",
            "WAITING",
        ];
        screen.push_str(&table(&head, rows));
        screen.push('\n');
        screen.push_str(&self.tenants(before));
        screen.push('\n');
        let rows = self.busiest().into_iter().map(|environment| {
            vec![
                text(&environment["tenant"]),
                text(&environment["environment_id"]),
                text(&environment["node"]),
                text(&environment["harnesses"]),
                text(&environment["streams"]),
            ]
        });
        let head = ["TENANT", "ENVIRONMENT", "NODE", "HARNESSES", "STREAMS"];
        screen.push_str(&table(&head, rows));
        screen
    }

    /// Table of the tenants' usage on all nodes that responded.
    fn tenants(&self, before: Option<&Self>) -> String {
        /// Executors, streams, bytes, refusals and waits.
        type Sums = [u64; 5];
        let sum = |snapshot: &Self| {
            let mut sums: HashMap<String, Sums> = HashMap::new();
            for tenant in snapshot
                .usage
                .iter()
                .flat_map(|usage| list(usage, "tenants"))
            {
                let sum = sums.entry(text(&tenant["tenant"])).or_default();
                let names = ["executors", "streams", "received_bytes", "refused", "waits"];
                for (sum, name) in sum.iter_mut().zip(names) {
                    *sum += tenant[name].as_u64().unwrap_or(0);
                }
            }
            sums
        };
        let then = before.map(sum).unwrap_or_default();
        let seconds = before.map_or(1.0, |before| (self.at - before.at).as_secs_f64());
        let mut rows: Vec<_> = sum(self).into_iter().collect();
        // Tenants without any activity are left out.
        rows.retain(|(name, sums)| name == "default" || sums.iter().any(|sum| *sum > 0));
        rows.sort_by(|(a, one), (b, other)| other[1].cmp(&one[1]).then_with(|| a.cmp(b)));
        let rows = rows.into_iter().map(|(name, now)| {
            let then = then.get(&name).copied().unwrap_or(now);
            let bytes = now[2].saturating_sub(then[2]) as f64 / seconds.max(0.001);
            vec![
                name,
                now[0].to_string(),
                now[1].to_string(),
                format!("{}/s", table::bytes(bytes as u64)),
                now[3].to_string(),
                now[4].to_string(),
            ]
        });
        let head = [
            "TENANT",
            "EXECUTORS",
            "STREAMS",
            "TRAFFIC",
            "REFUSED",
            "HELD BACK",
        ];
        table(&head, rows)
    }
}

async fn top(
    args: &FleetArgs,
    access: &FleetAccess,
    api: &RegistryApi,
    interval: Duration,
    count: Option<u64>,
) -> anyhow::Result<()> {
    let mut others = HashMap::new();
    let mut before: Option<FleetSnapshot> = None;
    let mut looks = tokio::time::interval(interval.max(Duration::from_millis(100)));
    let live = terminal::is_interactive() && !args.json;
    for _ in 0..count.unwrap_or(u64::MAX) {
        looks.tick().await;
        let snapshot = match FleetSnapshot::take(access, api, &mut others).await {
            Ok(snapshot) => snapshot,
            // A later request may succeed. A failure of the first one is more likely a mistake in
            // the arguments.
            Err(error) if before.is_some() && live => {
                let shown = visible(&error::message(&error));
                print(format!("\x1b[H\x1b[2J{shown}\n").as_bytes())?;
                continue;
            }
            Err(error) => return Err(error),
        };
        let text = if args.json {
            format!("{}\n", snapshot.json())
        } else {
            let mut screen = snapshot.screen(before.as_ref());
            if live {
                let rows = terminal::size().map_or(24, |size| size.rows as usize);
                let lines: Vec<_> = screen.lines().take(rows.saturating_sub(1)).collect();
                screen = format!("\x1b[H\x1b[2J{}\n", lines.join("\n"));
            }
            screen
        };
        print(text.as_bytes())?;
        before = Some(snapshot);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(bytes: u64, seconds: u64) -> FleetSnapshot {
        let start = Instant::now();
        FleetSnapshot {
            at: start + Duration::from_secs(seconds),
            nodes: json!({"nodes": [
                {"name": "a", "executors": 2, "harnesses": 3, "streams": 3, "draining": false},
                {"name": "b", "executors": 1, "harnesses": 0, "streams": 0, "draining": true},
            ]}),
            environments: json!({"environments": [
                {"tenant": "default", "environment_id": "x", "node": "a", "streams": 1},
                {"tenant": "acme", "environment_id": "y\n", "node": "a", "streams": 2},
            ]}),
            usage: vec![json!({
                "node": "a", "received_bytes": bytes, "sent_bytes": 2 * bytes,
                "backlog_bytes": 1024,
                "tenants": [
                    {"tenant": "acme", "executors": 1, "streams": 2, "received_bytes": bytes},
                    {"tenant": "default", "executors": 0, "streams": 0, "received_bytes": 0},
                    {"tenant": "other", "executors": 0, "streams": 0, "received_bytes": 0},
                ],
            })],
        }
    }

    #[test]
    fn fleet_screen_shows_rates_per_node_and_tenant() {
        let (before, after) = (snapshot(1000, 0), snapshot(1000 + 4096, 2));
        let screen = after.screen(Some(&before));
        let expected = "\
2 nodes, 2 environments (3 online), 3 harnesses, 3 streams

NODE  STATE     EXECUTORS  HARNESSES  STREAMS  IN         OUT        WAITING
a     up        2          3          3        2.0 KiB/s  4.0 KiB/s  1.0 KiB
b     draining  1          0          0        ?          ?          ?

TENANT   EXECUTORS  STREAMS  TRAFFIC    REFUSED  HELD BACK
acme     1          2        2.0 KiB/s  0        0
default  0          0        0 B/s      0        0

TENANT   ENVIRONMENT  NODE  HARNESSES  STREAMS
acme     y\\n          a     -          2
default  x            a     -          1
";
        // The times of the two snapshots differ by approximately two seconds, not exactly.
        assert_eq!(screen, expected);
        assert!(before.screen(None).contains("0 B/s"));
        assert_eq!(after.json()["environments"][0]["environment_id"], "y\n");
    }

    #[test]
    fn environment_names_are_escaped_in_urls() {
        assert_eq!(segment("build-7").unwrap(), "build-7");
        for bad in ["", "..", "a/b", "a?b", "a b", "%41"] {
            assert!(segment(bad).is_err(), "{bad}");
        }
    }
}
