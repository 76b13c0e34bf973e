//! Three rendezvous nodes that form one service over a real nats-server, and their failures.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base64_turbo::URL_SAFE_NO_PAD;
use exec_server::protocol::process::Condition;
use exec_server::registry::{RegistryAuth, RegistryConnectArgs};
use exec_server::{
    CollectOptions, ExecBackend as _, ExecProcess, ExecServerClient, WaitForRequest,
};
use exec_server_testkit::http::request;
use exec_server_testkit::nats::Nats;
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::time::timeout;

use super::operators::{block, dist_file, items};
use super::stage::{RunningProgram, finished, program};
use super::{collect, lines, sh};

/// Much longer than any step here should take, and than leases and back-offs last.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum time until a revoked harness or executor is disconnected, at every node.
const REVOCATION_LIMIT: Duration = Duration::from_secs(1);

struct Fleet {
    directory: TempDir,
    nats: Nats,
    /// NATS servers of the nodes, and their other options.
    options: Vec<String>,
    nodes: Vec<Option<RunningProgram>>,
}

impl Fleet {
    async fn new(count: usize) -> Self {
        Self::on(Nats::start().await, count).await
    }

    async fn on(nats: Nats, count: usize) -> Self {
        let options = ["--nats".to_owned(), nats.url()];
        Self::with(nats, &options, count).await
    }

    async fn with(nats: Nats, options: &[String], count: usize) -> Self {
        let mut fleet = Self {
            directory: tempfile::tempdir().unwrap(),
            nats,
            options: options.to_vec(),
            nodes: Vec::new(),
        };
        for _ in 0..count {
            fleet.add(&[]).await;
        }
        fleet.wait_nodes(count).await;
        fleet
    }

    /// Waits until every node knows every other.
    async fn wait_nodes(&self, count: usize) {
        let all = async {
            for node in 0..self.nodes.len() {
                if self.nodes[node].is_none() {
                    continue;
                }
                while self.registries(node).await.len() + 1 < count {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        };
        timeout(TIMEOUT, all)
            .await
            .expect("the nodes should find each other");
    }

    /// The URLs of the other nodes, as a node returns them to executors.
    async fn registries(&self, node: usize) -> Vec<String> {
        let (status, answer) = self.register(node, "probe").await;
        assert_eq!(status, 200, "{answer}");
        let found = answer["registries"].as_array().cloned();
        let found = found.unwrap_or_default().into_iter();
        found.map(|url| url.as_str().unwrap().to_owned()).collect()
    }

    /// Starts one more node, with these options.
    async fn add(&mut self, options: &[&str]) -> usize {
        let mut command = program(self.directory.path());
        command
            .args(["rendezvous", "--listen", "127.0.0.1:0", "--log", "info"])
            .args(&self.options)
            .args(["--node-name", &format!("node-{}", self.nodes.len())])
            .arg("--state-dir")
            .arg(self.directory.path().join("rendezvous"))
            .args(options);
        self.nodes.push(Some(RunningProgram::start(command).await));
        self.nodes.len() - 1
    }

    fn node(&self, node: usize) -> &RunningProgram {
        self.nodes[node].as_ref().unwrap()
    }

    fn url(&self, node: usize) -> &str {
        &self.node(node).line
    }

    fn token(&self, role: &str) -> String {
        let file = self
            .directory
            .path()
            .join(format!("rendezvous/{role}.token"));
        std::fs::read_to_string(file).unwrap().trim().to_owned()
    }

    async fn call(
        &self,
        node: usize,
        role: &str,
        method: &str,
        path: &str,
        body: &Value,
    ) -> (u16, Value) {
        let url = format!("{}{path}", self.url(node));
        let body = match body {
            Value::Null => String::new(),
            body => body.to_string(),
        };
        let token = self.token(role);
        let asked = request(method, &url, Some(&token), &body);
        timeout(TIMEOUT, asked).await.expect("an answer")
    }

    /// Registers an environment that has no executor.
    async fn register(&self, node: usize, name: &str) -> (u16, Value) {
        self.register_as(node, "executor", name).await
    }

    async fn register_as(&self, node: usize, token: &str, name: &str) -> (u16, Value) {
        let key = exec_server_registry::identity::generate();
        let body = json!({
            "security_profile": "noise_hybrid_ik_v1",
            "executor_public_key": key.public_key(),
        });
        let path = format!("/cloud/environment/{name}/register");
        self.call(node, token, "POST", &path, &body).await
    }

    /// Adds a token, and waits until all nodes know it.
    async fn add_token(&self, name: &str, role: &str, tenant: &str) {
        let state = self.directory.path().join("rendezvous");
        let mut command = program(self.directory.path());
        command
            .args(["rendezvous", "token-add", name, "--role", role])
            .args(["--tenant", tenant, "--state-dir"])
            .arg(&state)
            .arg("--out")
            .arg(state.join(format!("{name}.token")));
        let output = finished(command).await;
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        for node in 0..self.nodes.len() {
            self.node(node).signal(Signal::HUP);
            let known = async {
                let path = "/cloud/environments";
                while self.call(node, name, "GET", path, &Value::Null).await.0 == 401 {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            };
            timeout(TIMEOUT, known)
                .await
                .expect("the token to be known");
        }
    }

    fn executor_command(&self, node: usize, name: &str, home: &str) -> Command {
        self.executor_as(node, "executor", name, home)
    }

    fn executor_as(&self, node: usize, token: &str, name: &str, home: &str) -> Command {
        let home = self.directory.path().join(home);
        std::fs::create_dir_all(&home).unwrap();
        let token = format!("rendezvous/{token}.token");
        let mut command = program(&home);
        command
            .args(["--remote", self.url(node), "--environment-id", name])
            .arg("--remote-token-file")
            .arg(self.directory.path().join(token))
            .current_dir(&home);
        command
    }

    /// An executor that connects to this node first.
    async fn executor(&self, node: usize, name: &str) -> RunningProgram {
        RunningProgram::start(self.executor_command(node, name, name)).await
    }

    fn args(&self, node: usize, name: &str) -> RegistryConnectArgs {
        self.args_as(node, "harness", name)
    }

    fn args_as(&self, node: usize, token: &str, name: &str) -> RegistryConnectArgs {
        let auth = RegistryAuth::bearer(self.token(token));
        RegistryConnectArgs::new(self.url(node), name, auth, "test")
    }

    /// A harness that connects to this node.
    async fn connect(&self, node: usize, name: &str) -> ExecServerClient {
        let connect = ExecServerClient::connect_registry(self.args(node, name));
        timeout(TIMEOUT, connect)
            .await
            .expect("a connection")
            .unwrap()
    }

    /// The entry of an environment in a node's list.
    async fn listed(&self, node: usize, name: &str) -> Option<Value> {
        let (status, answer) = self
            .call(node, "admin", "GET", "/cloud/environments", &Value::Null)
            .await;
        if status != 200 {
            return None;
        }
        let list = answer["environments"].as_array()?;
        let found = list.iter().find(|listed| listed["environment_id"] == name);
        found.cloned()
    }

    /// Revokes a token, harness or environment.
    async fn revoke(&self, node: usize, whom: &Value) {
        let (status, answer) = self
            .call(node, "admin", "POST", "/cloud/revoke", whom)
            .await;
        assert_eq!(status, 200, "{answer}");
    }

    /// The usage that a node reports about itself.
    async fn usage(&self, node: usize) -> Value {
        let path = "/cloud/usage";
        let answered = async {
            loop {
                let (status, answer) = self.call(node, "admin", "GET", path, &Value::Null).await;
                // A node whose view of the revocations is not current refuses all requests for a moment.
                if status == 503 {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
                assert_eq!(status, 200, "{answer}");
                return answer;
            }
        };
        timeout(TIMEOUT, answered).await.expect("the usage")
    }

    /// Waits until a node has this many sockets of a kind.
    async fn wait_sockets_at(&self, node: usize, kind: &str, count: usize) {
        let wait = async {
            while self.usage(node).await[kind] != count {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let waited = timeout(TIMEOUT, wait).await;
        assert!(waited.is_ok(), "not {count} {kind} at {node}");
    }

    /// Waits until all nodes have this many sockets of a kind.
    async fn wait_sockets(&self, kind: &str, counts: &[usize]) {
        for (node, count) in counts.iter().enumerate() {
            self.wait_sockets_at(node, kind, *count).await;
        }
    }

    async fn wait_online(&self, node: usize, name: &str, online: bool) {
        let wait = async {
            loop {
                let listed = self.listed(node, name).await;
                if listed.is_some_and(|listed| listed["online"] == online) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let waited = timeout(TIMEOUT, wait).await;
        assert!(waited.is_ok(), "`{name}` is not online={online} at {node}");
    }

    /// Kills a node.
    async fn kill(&mut self, node: usize) {
        self.nodes[node].take().unwrap().end(Signal::KILL).await;
    }

    /// Waits until a node has logged a text.
    async fn wait_logged(&self, node: usize, text: &str) {
        let logged = async {
            while !self.node(node).stderr().contains(text) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let logged = timeout(TIMEOUT, logged).await;
        assert!(
            logged.is_ok(),
            "no `{text}` in:\n{}",
            self.node(node).stderr()
        );
    }
}

/// Fails if a revoked harness stayed connected longer than [`REVOCATION_LIMIT`].
fn assert_revoked_in_time(revoked: Instant) {
    let took = revoked.elapsed();
    eprintln!("out after {took:?}");
    assert!(took < REVOCATION_LIMIT, "{took:?}");
}

/// A script that prints numbers for about this many seconds, and their count.
fn counting(seconds: usize) -> (String, usize) {
    let count = seconds * 50;
    let script = format!("for i in $(seq 1 {count}); do echo $i; sleep 0.02; done");
    (script, count)
}

/// Waits until the script of [`counting`] has printed this number.
async fn wait_for_line(process: &dyn ExecProcess, number: usize) {
    let line = Condition::Regex {
        regex: format!("(?m)^{number}$"),
        stream: None,
    };
    let printed = process.wait_for(WaitForRequest {
        any: vec![line],
        after_seq: 0,
        timeout: None,
    });
    timeout(TIMEOUT, printed)
        .await
        .expect("its output")
        .unwrap();
}

/// Waits for the whole output of the script of [`counting`].
async fn assert_counted_all(started: Arc<dyn ExecProcess>, count: usize) {
    let output = started.output(CollectOptions::default());
    let output = timeout(TIMEOUT, output).await.expect("its end").unwrap();
    assert!(
        output.stdout == lines(count),
        "{} bytes instead of {}",
        output.stdout.len(),
        lines(count).len()
    );
}

#[tokio::test]
async fn harness_at_one_node_uses_an_executor_at_another() {
    let fleet = Fleet::new(3).await;
    let _executor = fleet.executor(0, "box").await;
    for node in [0, 1, 2] {
        let client = fleet.connect(node, "box").await;
        assert_eq!(
            collect(&client, "p", "echo hello; exit 3").await,
            (b"hello\n".to_vec(), 3)
        );
        let other = (node + 1) % 3;
        let listed = fleet.listed(other, "box").await.unwrap();
        assert_eq!(
            (&listed["online"], &listed["streams"]),
            (&json!(true), &json!(1)),
            "{listed}"
        );
        drop(client);
        // The end of the stream reaches the node of the executor.
        let gone = async {
            while fleet.listed(other, "box").await.unwrap()["streams"] != 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(TIMEOUT, gone).await.expect("the stream to end");
    }
    let (status, answer) = fleet
        .call(
            1,
            "harness",
            "POST",
            "/cloud/environment/nowhere/connect",
            &json!({
                "harness_public_key": exec_server_registry::identity::generate().public_key(),
            }),
        )
        .await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (409, &json!("environment_offline"))
    );
}

#[tokio::test]
async fn bulk_data_between_nodes_is_exact_despite_a_slow_reader() {
    let fleet = Fleet::new(2).await;
    let _executor = fleet.executor(0, "box").await;
    let client = fleet.connect(1, "box").await;
    // A client that does not read its output.
    let slow = fleet.connect(1, "box").await;
    let stuck = slow
        .start(sh("stuck", "head -c 40000000 /dev/zero"))
        .await
        .unwrap();
    let (output, _) = collect(&client, "p", "seq 1 1500000").await;
    assert!(output == lines(1_500_000), "{} bytes", output.len());
    // Also a slow reader in the direction from client to executor.
    let started = client.start(sh("up", "sha256sum")).await.unwrap();
    let block = bytes::Bytes::from(lines(200_000));
    for _ in 0..4 {
        started.process.write(block.clone()).await.unwrap();
    }
    started.process.close_stdin().await.unwrap();
    let output = started.process.output(CollectOptions::default());
    let output = timeout(TIMEOUT, output).await.unwrap().unwrap();
    let (expected, _) = collect(
        &client,
        "q",
        "for i in 1 2 3 4; do seq 1 200000; done | sha256sum",
    )
    .await;
    assert_eq!(output.stdout, expected);
    let output = stuck.process.output(CollectOptions::default());
    drop(output);
}

#[tokio::test]
async fn streams_of_a_killed_node_continue_at_other_nodes() {
    let mut fleet = Fleet::new(3).await;
    // One executor at the node that is killed, one elsewhere; harnesses at every node.
    let _executors = [
        fleet.executor(0, "here").await,
        fleet.executor(1, "there").await,
    ];
    let (script, count) = counting(6);
    let mut running = Vec::new();
    let mut clients = Vec::new();
    for environment in ["here", "there"] {
        for node in [0, 1, 2] {
            let client = fleet.connect(node, environment).await;
            let id = format!("{environment}-{node}");
            running.push(client.start(sh(&id, &script)).await.unwrap().process);
            clients.push(client);
        }
    }
    for process in &running {
        wait_for_line(&**process, 20).await;
    }
    fleet.kill(0).await;
    let before = Instant::now();
    for client in &clients {
        // Clients of the remaining nodes continue.
        let (output, _) = collect(client, "after", "echo after").await;
        assert_eq!(output, b"after\n");
    }
    assert!(
        before.elapsed() < Duration::from_secs(30),
        "{:?}",
        before.elapsed()
    );
    for process in running {
        assert_counted_all(process, count).await;
    }
    fleet.wait_online(2, "here", true).await;
}

#[tokio::test]
async fn paused_node_is_fenced_when_it_continues() {
    let fleet = Fleet::new(3).await;
    let executor = fleet.executor(0, "box").await;
    assert_eq!(
        collect(&fleet.connect(1, "box").await, "p", "echo one")
            .await
            .0,
        b"one\n"
    );
    /// The pause is much longer than a lease.
    const PAUSED: Duration = Duration::from_secs(20);
    fleet.node(0).signal(Signal::STOP);
    let paused = Instant::now();
    // The other nodes treat it as dead, and log that.
    fleet.wait_logged(1, "treated as dead").await;
    fleet.wait_online(2, "box", false).await;
    // The same identity connects to another node, while the old socket still seems open.
    executor.signal_both(Signal::STOP);
    let mark = fleet.directory.path().join("box/mark");
    std::fs::write(&mark, "two\n").unwrap();
    let show = format!("cat {}", mark.display());
    let second = RunningProgram::start(fleet.executor_command(1, "box", "box")).await;
    fleet.wait_online(2, "box", true).await;
    let client = fleet.connect(2, "box").await;
    let (script, count) = counting(20);
    let running = client.start(sh("count", &script)).await.unwrap();
    tokio::time::sleep(PAUSED.saturating_sub(paused.elapsed())).await;
    fleet.node(0).signal(Signal::CONT);
    fleet.wait_logged(0, "has replaced the one here").await;
    // Harnesses at the node without an executor are routed to the only live executor.
    let late = fleet.connect(0, "box").await;
    assert_eq!(collect(&late, "late", &show).await.0, b"two\n");
    assert_counted_all(running.process, count).await;
    // All nodes report the same location of the environment.
    for node in [0, 1, 2] {
        let listed = fleet.listed(node, "box").await.unwrap();
        assert_eq!(
            (&listed["online"], &listed["node"]),
            (&json!(true), &json!("node-1")),
            "{listed}"
        );
    }
    executor.signal(Signal::KILL);
    drop(second);
}

#[tokio::test]
async fn nodes_recover_after_nats_restarts() {
    let mut fleet = Fleet::new(2).await;
    let _executor = fleet.executor(0, "box").await;
    let (near, far) = (fleet.connect(0, "box").await, fleet.connect(1, "box").await);
    let (script, count) = counting(12);
    let near_count = near.start(sh("near", &script)).await.unwrap().process;
    let far_count = far.start(sh("far", &script)).await.unwrap().process;
    fleet.nats.die().await;
    // New connections are refused, with the reason.
    let refused = async {
        loop {
            let body = json!({
                "harness_public_key": exec_server_registry::identity::generate().public_key(),
            });
            let path = "/cloud/environment/box/connect";
            let (status, answer) = fleet.call(0, "harness", "POST", path, &body).await;
            if status == 503 {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let answer = timeout(TIMEOUT, refused).await.expect("a refusal");
    let text = answer["error"]["message"].as_str().unwrap();
    assert!(text.contains("store") || text.contains("NATS"), "{text}");
    // Streams within one node are unaffected.
    assert_eq!(collect(&near, "still", "echo still").await.0, b"still\n");
    fleet.nats.open().await;
    assert_eq!(collect(&far, "again", "echo again").await.0, b"again\n");
    let fresh = fleet.connect(1, "box").await;
    assert_eq!(collect(&fresh, "fresh", "echo fresh").await.0, b"fresh\n");
    assert_counted_all(near_count, count).await;
    assert_counted_all(far_count, count).await;
}

#[tokio::test]
async fn deleted_bucket_is_restored_from_the_nodes() {
    let fleet = Fleet::new(2).await;
    let _executor = fleet.executor(0, "box").await;
    let (status, _) = fleet.register(1, "registered").await;
    assert_eq!(status, 200);
    let client = fleet.connect(1, "box").await;
    let revocation = json!({"harness": "token:mallory"});
    let (status, _) = fleet
        .call(1, "admin", "POST", "/cloud/revoke", &revocation)
        .await;
    assert_eq!(status, 200);
    let answer = fleet
        .nats
        .request("$JS.API.STREAM.DELETE.KV_exec-server", "")
        .await;
    assert_eq!(answer["success"], true, "{answer}");
    fleet.wait_logged(0, "the bucket was deleted").await;
    fleet.wait_online(0, "box", true).await;
    fleet.wait_online(1, "box", true).await;
    // Open streams stay, new ones work, and no registration is lost.
    assert_eq!(collect(&client, "p", "echo here").await.0, b"here\n");
    let fresh = fleet.connect(1, "box").await;
    assert_eq!(collect(&fresh, "q", "echo there").await.0, b"there\n");
    for node in [0, 1] {
        // The other node may need a moment to see the revocation.
        fleet.wait_online(node, "registered", false).await;
        let path = "/cloud/revocations";
        let revoked = async {
            loop {
                let (status, answer) = fleet.call(node, "admin", "GET", path, &Value::Null).await;
                if status == 200 {
                    return answer;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let answer = timeout(TIMEOUT, revoked).await.expect("an answer");
        let harness = &answer["revocations"][0]["harness"];
        assert_eq!(harness, "token:mallory", "{answer}");
    }
}

#[tokio::test]
async fn newer_executor_with_the_same_identity_takes_over() {
    let fleet = Fleet::new(3).await;
    let first = fleet.executor(0, "box").await;
    let client = fleet.connect(2, "box").await;
    let mark = fleet.directory.path().join("box/mark");
    std::fs::write(&mark, "same\n").unwrap();
    let show = format!("cat {}", mark.display());
    // The first executor is stopped, so that it does not reconnect yet.
    first.signal_both(Signal::STOP);
    let second = RunningProgram::start(fleet.executor_command(1, "box", "box")).await;
    fleet.wait_logged(0, "has replaced the one here").await;
    let again = fleet.connect(2, "box").await;
    assert_eq!(collect(&again, "who", &show).await.0, b"same\n");
    drop((client, again));
    // When the first one continues, it reconnects and is the newer. One of them is always attached.
    first.signal_both(Signal::CONT);
    fleet.wait_logged(1, "has replaced the one here").await;
    second.end(Signal::KILL).await;
    fleet.wait_online(2, "box", true).await;
    // The other one reconnects by itself; a harness that connects meanwhile gets a retryable error.
    let last = async {
        loop {
            match ExecServerClient::connect_registry(fleet.args(1, "box")).await {
                Ok(client) => return client,
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    };
    let last = timeout(TIMEOUT, last).await.expect("a connection");
    assert_eq!(collect(&last, "p", &show).await.0, b"same\n");
}

#[tokio::test]
async fn revoked_harness_is_disconnected_at_all_nodes() {
    let fleet = Fleet::new(3).await;
    let _executor = fleet.executor(0, "box").await;
    let args = fleet.args(1, "box");
    let key = args.identity.public_key().fingerprint();
    let client = ExecServerClient::connect_registry(args.clone())
        .await
        .unwrap();
    let other = fleet.connect(1, "box").await;
    let revoked = Instant::now();
    let revocation = json!({"harness": format!("key:{key}"), "environment_id": "box"});
    fleet.revoke(2, &revocation).await;
    fleet.wait_sockets("harnesses", &[0, 1, 0]).await;
    let ended = async {
        while fleet.listed(2, "box").await.unwrap()["streams"] != 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(TIMEOUT, ended).await.expect("the stream to end");
    assert_revoked_in_time(revoked);
    let mut closed = client.closed();
    let closed = closed.wait_for(Option::is_some);
    timeout(TIMEOUT, closed).await.unwrap().unwrap();
    for node in [0, 1, 2] {
        let mut args = args.clone();
        args.registry_url = fleet.url(node).to_owned();
        let error = ExecServerClient::connect_registry(args).await.unwrap_err();
        assert!(error.to_string().contains("403"), "{error}");
    }
    assert_eq!(collect(&other, "p", "echo in").await.0, b"in\n");
}

#[tokio::test]
async fn revoked_token_ends_its_streams_at_all_nodes() {
    let fleet = Fleet::new(3).await;
    let _executor = fleet.executor(0, "box").await;
    fleet.add_token("mallory", "harness", "default").await;
    // One client is at the executor's node, the others elsewhere, one of them at the node that
    // revokes.
    let (script, _) = counting(30);
    let mut clients = Vec::new();
    for node in [0, 1, 2] {
        let connect = ExecServerClient::connect_registry(fleet.args_as(node, "mallory", "box"));
        let client = timeout(TIMEOUT, connect)
            .await
            .expect("a connection")
            .unwrap();
        let started = client.start(sh(&format!("p{node}"), &script)).await;
        wait_for_line(&*started.unwrap().process, 10).await;
        clients.push(client);
    }
    // Another client receives much output and reads none of it.
    let home = fleet.directory.path().join("stuck");
    std::fs::create_dir_all(&home).unwrap();
    let mut stuck = program(&home);
    let url = fleet.url(1).replace("http://", "registry+http://");
    stuck
        .args(["run", "--url", &format!("{url}/box"), "--token-file"])
        .arg(fleet.directory.path().join("rendezvous/mallory.token"))
        .args([
            "--",
            "sh",
            "-c",
            "echo go; exec cat /dev/zero | tr '\\0' '\\n'",
        ]);
    let stuck = RunningProgram::start(stuck).await;
    stuck.signal_both(Signal::STOP);
    let other = fleet.connect(1, "box").await;
    let (script, count) = counting(4);
    let running = other.start(sh("other", &script)).await.unwrap();
    wait_for_line(&*running.process, 10).await;

    let revoked = Instant::now();
    fleet.revoke(2, &json!({"harness": "token:mallory"})).await;
    fleet.wait_sockets("harnesses", &[0, 1, 0]).await;
    assert_revoked_in_time(revoked);
    for node in [0, 1, 2] {
        let (_, streams) = fleet
            .call(node, "admin", "GET", "/cloud/streams", &Value::Null)
            .await;
        let streams = streams["streams"].as_array().unwrap();
        assert!(
            streams.len() == 1 && streams[0]["token"] == "harness",
            "{streams:?}"
        );
    }
    for client in clients {
        let mut closed = client.closed();
        let closed = closed.wait_for(Option::is_some);
        timeout(TIMEOUT, closed).await.unwrap().unwrap();
    }
    assert_counted_all(running.process, count).await;
    stuck.end(Signal::KILL).await;
}

#[tokio::test]
async fn revocation_works_while_a_node_is_stopped() {
    let fleet = Fleet::new(3).await;
    fleet.add_token("mallory", "harness", "default").await;
    fleet.add_token("builder", "executor", "default").await;
    let mut executors = Vec::new();
    for (node, name) in [(0, "a"), (0, "b"), (0, "c"), (1, "d")] {
        let command = fleet.executor_as(node, "builder", name, name);
        executors.push(RunningProgram::start(command).await);
    }
    let _other = fleet.executor(1, "other").await;
    let mut clients = Vec::new();
    for (node, token, name) in [(1, "mallory", "a"), (2, "harness", "d")] {
        let connect = ExecServerClient::connect_registry(fleet.args_as(node, token, name));
        let client = timeout(TIMEOUT, connect)
            .await
            .expect("a connection")
            .unwrap();
        assert_eq!(collect(&client, "p", "echo in").await.0, b"in\n");
        clients.push(client);
    }
    fleet.node(0).signal(Signal::STOP);
    // A harness whose executor is at that node, then an executor at another.
    for (revoked, node, kind, left) in [
        ("token:mallory", 1, "harnesses", 0),
        ("token:builder", 1, "executors", 1),
    ] {
        let began = Instant::now();
        let body = json!({"harness": revoked});
        let out = async {
            while fleet.usage(node).await[kind] != left {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            assert_revoked_in_time(began);
        };
        let both = async { tokio::join!(fleet.revoke(2, &body), out) };
        timeout(TIMEOUT, both).await.expect("to be out");
    }
    fleet.wait_sockets_at(2, "harnesses", 0).await;
    // When the stopped node continues, it learns of the revocation, too.
    fleet.node(0).signal(Signal::CONT);
    fleet.wait_sockets_at(0, "executors", 0).await;
}

#[tokio::test]
async fn token_removed_from_one_nodes_file_is_disconnected_there() {
    let mut fleet = Fleet::new(1).await;
    fleet.add_token("mallory", "harness", "default").await;
    fleet.add_token("builder", "executor", "default").await;
    let file = fleet.directory.path().join("tokens-1");
    let tokens = fleet.directory.path().join("rendezvous/tokens");
    let tokens = std::fs::read_to_string(tokens).unwrap();
    std::fs::write(&file, &tokens).unwrap();
    fleet.add(&["--tokens", file.to_str().unwrap()]).await;
    fleet.wait_nodes(2).await;
    let _executors = [
        fleet.executor(0, "box").await,
        RunningProgram::start(fleet.executor_as(0, "builder", "built", "built")).await,
    ];
    let mut clients = Vec::new();
    for node in [0, 1] {
        let connect = ExecServerClient::connect_registry(fleet.args_as(node, "mallory", "box"));
        clients.push(
            timeout(TIMEOUT, connect)
                .await
                .expect("a connection")
                .unwrap(),
        );
    }
    fleet.wait_sockets("harnesses", &[1, 1]).await;
    let mut watcher = EventWatcher::new(&fleet, 0, "admin").await;
    let gone = ["mallory", "builder"];
    let left = tokens.lines().filter(|line| {
        let name = line.split_ascii_whitespace().next();
        name.is_none_or(|name| !gone.contains(&name))
    });
    let left: Vec<_> = left.collect();
    assert_eq!(left.len() + gone.len(), tokens.lines().count());
    std::fs::write(&file, left.join("\n")).unwrap();
    // The harness at that node, and the executor wherever it is attached.
    watcher.wait_for_event("detach", "built").await;
    fleet.wait_sockets("harnesses", &[1, 0]).await;
    let error = ExecServerClient::connect_registry(fleet.args_as(1, "mallory", "box")).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("401"), "{error}");
    // The other node still has the token, and accepts both again.
    watcher.wait_for_event("attach", "built").await;
    let connect = ExecServerClient::connect_registry(fleet.args_as(0, "mallory", "box"));
    clients.push(
        timeout(TIMEOUT, connect)
            .await
            .expect("a connection")
            .unwrap(),
    );
    for client in [&clients[0], &clients[2]] {
        assert_eq!(collect(client, "p", "echo in").await.0, b"in\n");
    }
}

#[tokio::test]
async fn wrong_clock_on_one_node_is_tolerated() {
    let mut fleet = Fleet::new(1).await;
    for offset in ["-300", "300"] {
        fleet.add(&["--clock-offset", offset]).await;
    }
    fleet.wait_nodes(3).await;
    // The addresses that all nodes return expire at the same time.
    let mut ends = Vec::new();
    for node in [0, 1, 2] {
        let (status, answer) = fleet.register(node, &format!("clock-{node}")).await;
        assert_eq!(status, 200, "{answer}");
        let url = answer["url"].as_str().unwrap();
        let end = url.split("exp=").nth(1).unwrap().split('&').next().unwrap();
        ends.push(end.parse::<u64>().unwrap());
    }
    let (first, last) = (ends.iter().min().unwrap(), ends.iter().max().unwrap());
    assert!(last - first < 30, "{ends:?}");
    // An executor at each node, and a harness from each node to each executor.
    let mut executors = Vec::new();
    for node in [0, 1, 2] {
        executors.push(fleet.executor(node, &format!("box-{node}")).await);
    }
    for from in [0, 1, 2] {
        for to in [0, 1, 2] {
            let client = fleet.connect(from, &format!("box-{to}")).await;
            assert_eq!(collect(&client, "p", "echo in time").await.0, b"in time\n");
        }
    }
}

#[tokio::test]
async fn full_jetstream_refuses_registrations_and_keeps_streams() {
    let nats = Nats::with("max_file_store: 200KB").await;
    let fleet = Fleet::on(nats, 2).await;
    let _executor = fleet.executor(0, "box").await;
    let client = fleet.connect(1, "box").await;
    let full = async {
        for number in 0.. {
            let (status, answer) = fleet.register(0, &format!("filler-{number}")).await;
            if status != 200 {
                return (status, answer);
            }
        }
        unreachable!("it ends when the store is full")
    };
    let (status, answer) = timeout(TIMEOUT, full).await.expect("a full store");
    assert_eq!(
        (status, &answer["error"]["code"]),
        (503, &json!("store_unavailable"))
    );
    for number in 0..3 {
        let (output, _) = collect(&client, &format!("p{number}"), "seq 1 1000").await;
        assert_eq!(output, lines(1000));
    }
}

#[tokio::test]
async fn full_disk_under_jetstream_refuses_registrations_and_recovers() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can mount a disk that is small enough to be filled");
        return;
    }
    let mut fleet = Fleet::on(Nats::on_disk(4 << 20).await, 2).await;
    let _executor = fleet.executor(0, "box").await;
    let (near, far) = (fleet.connect(0, "box").await, fleet.connect(1, "box").await);
    fleet.nats.fill_disk();
    let full = async {
        for number in 0.. {
            let (status, answer) = fleet.register(0, &format!("filler-{number}")).await;
            if status != 200 {
                return (status, answer);
            }
        }
        unreachable!("it ends when the disk is full")
    };
    let (status, answer) = timeout(TIMEOUT, full).await.expect("a full disk");
    assert_eq!(
        (status, &answer["error"]["code"]),
        (503, &json!("store_unavailable")),
        "{answer}"
    );
    fleet.wait_logged(0, "was not renewed").await;
    for client in [&near, &far] {
        let (output, _) = collect(client, "still", "seq 1 1000").await;
        assert_eq!(output, lines(1000));
    }
    // Once there is space again, only the processes that gave up must be started again.
    fleet.nats.free_disk();
    fleet.nats.die().await;
    fleet.nats.open().await;
    let taken_in = async {
        while fleet.register(1, "late").await.0 != 200 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(TIMEOUT, taken_in)
        .await
        .expect("the registration to be accepted again");
    fleet.wait_online(1, "box", true).await;
    for client in [&near, &far] {
        assert_eq!(collect(client, "after", "echo after").await.0, b"after\n");
    }
    let fresh = fleet.connect(1, "box").await;
    assert_eq!(collect(&fresh, "fresh", "echo fresh").await.0, b"fresh\n");
}

#[tokio::test]
async fn tenants_are_isolated_and_limited_across_nodes() {
    let nats = Nats::start().await;
    let options = [
        "--nats",
        &nats.url(),
        "--quota",
        "acme environments=2 streams=1",
    ];
    let options = options.map(str::to_owned);
    let fleet = Fleet::with(nats, &options, 2).await;
    for tenant in ["acme", "globex"] {
        for role in ["executor", "harness", "admin"] {
            fleet
                .add_token(&format!("{tenant}-{role}"), role, tenant)
                .await;
        }
    }
    // Both tenants call it `box`, and connect at the node of the other tenant's executor.
    let start = async |node, tenant: &str| {
        let token = format!("{tenant}-executor");
        RunningProgram::start(fleet.executor_as(node, &token, "box", &format!("home-{tenant}")))
            .await
    };
    let _executors = [start(0, "acme").await, start(1, "globex").await];
    let connect = async |node, tenant: &str| {
        let args = fleet.args_as(node, &format!("{tenant}-harness"), "box");
        let connect = ExecServerClient::connect_registry(args);
        timeout(TIMEOUT, connect).await.expect("an answer")
    };
    let mut clients = Vec::new();
    for (node, tenant) in [(1, "acme"), (0, "globex")] {
        let client = connect(node, tenant).await.unwrap();
        let (home, _) = collect(&client, "p", "readlink /proc/$PPID/cwd").await;
        let home = String::from_utf8(home).unwrap();
        assert!(
            home.trim_end().ends_with(&format!("home-{tenant}")),
            "{home}"
        );
        clients.push(client);
    }
    // An admin of one tenant sees nothing of the other, at any node.
    for node in [0, 1] {
        let listed = fleet
            .call(
                node,
                "acme-admin",
                "GET",
                "/cloud/environments",
                &Value::Null,
            )
            .await;
        assert_eq!(listed.0, 200, "{}", listed.1);
        let listed = listed.1["environments"].as_array().unwrap().clone();
        assert!(
            listed.len() == 1 && listed[0]["tenant"] == "acme",
            "{listed:?}"
        );
    }
    // The only stream that `acme` may have is open at node 1: no other is accepted at either.
    for node in [0, 1] {
        let refused = async {
            loop {
                match connect(node, "acme").await {
                    Err(error) => return error.to_string(),
                    // A node learns of the other nodes' streams with their leases.
                    Ok(client) => drop(client),
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        let error = timeout(TIMEOUT, refused).await.expect("a refusal");
        let expected = "tenant `acme` has reached its quota of 1 streams";
        assert!(error.contains(expected), "{error}");
        let other = connect(node, "globex").await.unwrap();
        assert_eq!(collect(&other, "q", "echo in").await.0, b"in\n");
    }
    // Two environments at any nodes, and no more.
    assert_eq!(fleet.register_as(1, "acme-executor", "second").await.0, 200);
    for node in [0, 1] {
        let refused = async {
            loop {
                let third = format!("third-{node}");
                let (status, answer) = fleet.register_as(node, "acme-executor", &third).await;
                if status != 200 {
                    return (status, answer);
                }
            }
        };
        let (status, answer) = timeout(TIMEOUT, refused).await.expect("a refusal");
        assert_eq!(
            (status, &answer["error"]["code"]),
            (403, &json!("quota_exceeded")),
            "{answer}"
        );
        let name = format!("more-{node}");
        assert_eq!(
            fleet.register_as(node, "globex-executor", &name).await.0,
            200
        );
    }
}

#[tokio::test]
async fn nodes_share_the_bandwidth_quota_of_a_tenant() {
    const QUOTA: f64 = (1 << 20) as f64;
    const OVER: Duration = Duration::from_secs(2);
    let nats = Nats::start().await;
    let options = ["--nats", &nats.url(), "--quota", "* bandwidth=1M"].map(str::to_owned);
    let fleet = Fleet::with(nats, &options, 2).await;
    let _executors = [fleet.executor(0, "a").await, fleet.executor(1, "b").await];
    // The node sends itself as many messages as possible.
    let flood = async |node, name: &str| {
        let home = fleet.directory.path().join(format!("flood-{name}"));
        std::fs::create_dir_all(&home).unwrap();
        let url = fleet.url(node).replace("http://", "registry+http://");
        let mut run = program(&home);
        run.args(["run", "--url", &format!("{url}/{name}"), "--token-file"])
            .arg(fleet.directory.path().join("rendezvous/harness.token"))
            .args(["--", "yes", &"x".repeat(1000)]);
        RunningProgram::start(run).await
    };
    let received = async |node| {
        let usage = fleet.usage(node).await;
        usage["received_bytes"].as_f64().unwrap()
    };
    // The share of the quota that passes each node.
    let parts = async || {
        let began = Instant::now();
        let before = [received(0).await, received(1).await];
        tokio::time::sleep(OVER).await;
        let after = [received(0).await, received(1).await];
        let whole = QUOTA * began.elapsed().as_secs_f64();
        [0, 1].map(|node| (after[node] - before[node]) / whole)
    };
    let wait = async |enough: fn([f64; 2]) -> bool| {
        let mut last = [0.0; 2];
        let wait = async {
            while !enough(last) {
                last = parts().await;
            }
        };
        let waited = timeout(TIMEOUT, wait).await;
        assert!(waited.is_ok(), "{last:?}");
        last
    };
    // A single busy node gets the whole quota, although there is another node.
    let first = flood(0, "a").await;
    wait(|[a, b]| a > 0.8 && b < 0.1).await;
    // Two busy nodes get half of it each, and together not more than the quota.
    let second = flood(1, "b").await;
    wait(|[a, b]| a > 0.35 && b > 0.35 && a + b < 1.2).await;
    let [a, b] = parts().await;
    assert!((0.7..1.25).contains(&(a + b)), "{a} and {b}");
    // The remaining busy node gets the whole quota again.
    first.end(Signal::KILL).await;
    wait(|[a, b]| a < 0.1 && b > 0.8).await;
    second.end(Signal::KILL).await;
}

#[tokio::test]
async fn nodes_share_the_handshake_quota_of_a_tenant() {
    const QUOTA: f64 = 3.0;
    const OVER: Duration = Duration::from_secs(5);
    let nats = Nats::start().await;
    let options = ["--nats", &nats.url(), "--quota", "* handshakes=3"].map(str::to_owned);
    let fleet = Fleet::with(nats, &options, 2).await;
    let _executor = fleet.executor(0, "box").await;
    // One connection after the other at both nodes, as fast as they are accepted.
    let connect_repeatedly = async |node| loop {
        let connect = ExecServerClient::connect_registry(fleet.args(node, "box"));
        let _ = timeout(TIMEOUT, connect).await.expect("an answer");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    let made = async |node| {
        let usage = fleet.usage(node).await;
        let tenants = usage["tenants"].as_array().unwrap().iter();
        let made = tenants.map(|tenant| tenant["handshakes"].as_f64().unwrap());
        made.sum::<f64>()
    };
    let measured = async {
        loop {
            let began = Instant::now();
            let before = made(0).await + made(1).await;
            tokio::time::sleep(OVER).await;
            let part =
                (made(0).await + made(1).await - before) / (QUOTA * began.elapsed().as_secs_f64());
            if (0.5..1.3).contains(&part) {
                return;
            }
        }
    };
    tokio::select! {
        measured = timeout(TIMEOUT, measured) => measured.expect("the quota to be kept"),
        () = connect_repeatedly(0) => unreachable!("connects without end"),
        () = connect_repeatedly(1) => unreachable!("connects without end"),
    }
}

/// A subscriber to `/events`, and the events it has received.
struct EventWatcher {
    lines: Lines<BufReader<TcpStream>>,
    received: Vec<(String, Value)>,
}

impl EventWatcher {
    async fn new(fleet: &Fleet, node: usize, token: &str) -> Self {
        let host = fleet.url(node).strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(host).await.unwrap();
        let token = fleet.token(token);
        let request = format!(
            "GET /events HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut lines = BufReader::new(stream).lines();
        let status = timeout(TIMEOUT, lines.next_line())
            .await
            .expect("an answer");
        assert_eq!(status.unwrap().as_deref(), Some("HTTP/1.1 200 OK"));
        let received = Vec::new();
        Self { lines, received }
    }

    /// Waits for an event of an environment; returns its data.
    async fn wait_for_event(&mut self, event: &str, environment: &str) -> Value {
        let wait_for_event = async {
            let mut received = String::new();
            loop {
                let line = self.lines.next_line().await.unwrap().expect("more events");
                if let Some(name) = line.strip_prefix("event: ") {
                    received = name.to_owned();
                } else if let Some(data) = line.strip_prefix("data: ") {
                    let data: Value = serde_json::from_str(data).unwrap();
                    self.received.push((received.clone(), data.clone()));
                    if received == event && data["environment"] == environment {
                        return data;
                    }
                }
            }
        };
        let received = timeout(TIMEOUT, wait_for_event).await;
        received.unwrap_or_else(|_| panic!("no {event} of {environment}: {:?}", self.received))
    }

    /// How often an event of an environment was received.
    fn count(&self, event: &str, environment: &str) -> usize {
        let received = self.received.iter();
        received
            .filter(|(received, data)| received == event && data["environment"] == environment)
            .count()
    }
}

#[tokio::test]
async fn events_of_every_node_are_received_at_each_node() {
    let mut fleet = Fleet::new(2).await;
    for tenant in ["acme", "globex"] {
        for role in ["executor", "admin"] {
            let name = format!("{tenant}-{role}");
            fleet.add_token(&name, role, tenant).await;
        }
    }
    let mut all = EventWatcher::new(&fleet, 0, "admin").await;
    let mut acme = EventWatcher::new(&fleet, 1, "acme-admin").await;
    // The subscription to the other nodes takes some milliseconds to start.
    for (watcher, node) in [(&mut all, 1), (&mut acme, 0)] {
        let wait_for_event = async {
            for number in 0.. {
                let name = format!("early-{node}-{number}");
                let registered = fleet.register_as(node, "acme-executor", &name).await;
                assert_eq!(registered.0, 200, "{}", registered.1);
                let received = watcher.wait_for_event("register", &name);
                if timeout(Duration::from_millis(200), received).await.is_ok() {
                    return;
                }
            }
        };
        timeout(TIMEOUT, wait_for_event)
            .await
            .expect("an event of the other node");
    }
    // Messages that were not sent by a node are ignored.
    let forged = r#"{"event":"a\ndata: {}","tenant":"acme","data":{"node":"x"}}"#;
    for message in ["", "nonsense", "7", forged] {
        fleet.nats.publish_message("exec-server.e", message).await;
    }
    // Each event once, regardless of the node, and only those of the admin's tenant.
    let start = async |node, tenant: &str, name: &str| {
        let token = format!("{tenant}-executor");
        RunningProgram::start(fleet.executor_as(node, &token, name, name)).await
    };
    let executors = [
        start(0, "globex", "theirs").await,
        start(1, "globex", "theirs-too").await,
        start(0, "acme", "near").await,
        start(1, "acme", "far").await,
    ];
    for node in [0, 1] {
        let last = format!("last-{node}");
        let registered = fleet.register_as(node, "acme-executor", &last).await;
        assert_eq!(registered.0, 200, "{}", registered.1);
    }
    for watcher in [&mut all, &mut acme] {
        let mut received = Vec::new();
        for (event, environment) in [
            ("attach", "near"),
            ("attach", "far"),
            ("register", "last-0"),
            ("register", "last-1"),
        ] {
            if watcher.count(event, environment) == 0 {
                watcher.wait_for_event(event, environment).await;
            }
            received.push(watcher.count(event, environment));
        }
        assert_eq!(received, [1; 4], "{:?}", watcher.received);
        for (_, data) in &watcher.received {
            let at = match data["environment"].as_str().unwrap() {
                "near" | "theirs" | "last-0" => "node-0",
                "far" | "theirs-too" | "last-1" => "node-1",
                _ => continue,
            };
            assert_eq!(data["node"], at, "{data}");
        }
    }
    for theirs in ["theirs", "theirs-too"] {
        assert_eq!(all.count("attach", theirs), 1, "{:?}", all.received);
        assert_eq!(acme.count("attach", theirs), 0, "{:?}", acme.received);
    }
    assert!(
        acme.received
            .iter()
            .all(|(_, data)| data["tenant"] == "acme")
    );

    // Without NATS a node still reports its own events, and those of others after NATS is back.
    fleet.nats.die().await;
    let [_theirs, _theirs_too, near, _far] = executors;
    near.end(Signal::KILL).await;
    all.wait_for_event("detach", "near").await;
    fleet.nats.open().await;
    let again = async {
        while fleet.register_as(1, "acme-executor", "again").await.0 != 200 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(TIMEOUT, again).await.expect("NATS to be back");
    all.wait_for_event("register", "again").await;
    // Nodes subscribe only while a client watches.
    assert!(fleet.nats.has_subscriber("exec-server.e").await);
    drop((all, acme));
    let unheard = async {
        while fleet.nats.has_subscriber("exec-server.e").await {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(TIMEOUT, unheard)
        .await
        .expect("no subscription to be left");
}

/// Asserts that two nodes with these options cooperate.
async fn assert_nodes_cooperate(nats: Nats, options: &[String]) {
    let fleet = Fleet::with(nats, options, 2).await;
    let _executor = fleet.executor(0, "box").await;
    let client = fleet.connect(1, "box").await;
    assert_eq!(collect(&client, "p", "echo in").await.0, b"in\n");
}

#[tokio::test]
async fn node_without_nats_reports_the_error_once() {
    // A port without a listener.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("nats://{}", free.local_addr().unwrap());
    drop(free);
    let error = start_error(&["--nats".to_owned(), url.clone()]).await;
    let refused = error.matches("refused").count();
    assert!(error.contains(&url) && refused == 1, "{error}");
}

/// The error of a node that does not start with these options.
async fn start_error(options: &[String]) -> String {
    let directory = tempfile::tempdir().unwrap();
    let mut command = program(directory.path());
    command
        .args(["rendezvous", "--listen", "127.0.0.1:0", "--state-dir"])
        .arg(directory.path().join("rendezvous"))
        .args(options);
    let output = finished(command).await;
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[tokio::test]
async fn nodes_connect_to_nats_with_tls_and_password() {
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let certificate = params.self_signed(&key).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let authority = directory.path().join("authority.pem");
    std::fs::write(&authority, certificate.pem()).unwrap();
    let nats = Nats::configured(|directory| {
        let path = |name: &str| directory.join(name).display().to_string();
        std::fs::write(path("cert.pem"), certificate.pem()).unwrap();
        std::fs::write(path("key.pem"), key.serialize_pem()).unwrap();
        format!(
            "tls {{ cert_file: \"{}\", key_file: \"{}\" }}\n\
             authorization {{ user: ann, password: geheim }}\n",
            path("cert.pem"),
            path("key.pem")
        )
    })
    .await;
    let to = |who: &str| {
        [
            "--nats".to_owned(),
            format!("tls://{who}{}", nats.address()),
        ]
    };
    let trust = ["--nats-ca".to_owned(), authority.display().to_string()];
    // The certificate is not trusted.
    let error = start_error(&to("ann:geheim@")).await;
    assert!(error.contains("cannot reach NATS"), "{error}");
    assert!(!error.contains("geheim"), "{error}");
    // A wrong password.
    let error = start_error(&[to("ann:falsch@"), trust.clone()].concat()).await;
    assert!(error.contains("authorization violation"), "{error}");
    assert!(!error.contains("falsch"), "{error}");
    let options = [to("ann:geheim@"), trust].concat();
    assert_nodes_cooperate(nats, &options).await;
}

/// A JWT for NATS, signed with one of its keys.
fn nats_jwt(issuer: &nkeys::KeyPair, subject: &nkeys::KeyPair, name: &str, nats: Value) -> String {
    let text = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let header = text(json!({"typ": "JWT", "alg": "ed25519-nkey"}));
    let claims = text(json!({
        "jti": name, "iat": 1_700_000_000, "iss": issuer.public_key(), "name": name,
        "sub": subject.public_key(), "nats": nats,
    }));
    let message = format!("{header}.{claims}");
    let signature = issuer.sign(message.as_bytes()).unwrap();
    format!("{message}.{}", URL_SAFE_NO_PAD.encode(signature))
}

#[tokio::test]
async fn nodes_connect_to_nats_with_a_credentials_file() {
    let [operator, account, system, user] = [
        nkeys::KeyPair::new_operator(),
        nkeys::KeyPair::new_account(),
        nkeys::KeyPair::new_account(),
        nkeys::KeyPair::new_user(),
    ];
    let limits = |storage: i64| {
        json!({
            "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1,
            "wildcards": true, "conn": -1, "leaf": -1,
            "mem_storage": storage, "disk_storage": storage, "streams": storage,
            "consumer": storage,
        })
    };
    let of_account = |key: &nkeys::KeyPair, name: &str, storage| {
        let claims = json!({"type": "account", "version": 2, "limits": limits(storage)});
        nats_jwt(&operator, key, name, claims)
    };
    let of_operator = json!({
        "type": "operator", "version": 2, "system_account": system.public_key(),
    });
    let of_operator = nats_jwt(&operator, &operator, "operator", of_operator);
    let preload = format!(
        "{}: {}\n  {}: {}",
        account.public_key(),
        of_account(&account, "meet", -1),
        system.public_key(),
        of_account(&system, "system", 0)
    );
    let nats = Nats::configured(|_| {
        format!(
            "operator: {of_operator}\nsystem_account: {}\nresolver: MEMORY\n\
             resolver_preload {{\n  {preload}\n}}\n",
            system.public_key()
        )
    })
    .await;
    let of_user = json!({"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1});
    let of_user = nats_jwt(&account, &user, "node", of_user);
    let directory = tempfile::tempdir().unwrap();
    let credentials = directory.path().join("meet.creds");
    let text = format!(
        "-----BEGIN NATS USER JWT-----\n{of_user}\n------END NATS USER JWT------\n\n\
         -----BEGIN USER NKEY SEED-----\n{}\n------END USER NKEY SEED------\n",
        user.seed().unwrap()
    );
    std::fs::write(&credentials, text).unwrap();
    let to = ["--nats".to_owned(), nats.url()];
    let error = start_error(&to).await;
    assert!(error.contains("authorization violation"), "{error}");
    let creds = |path: &std::path::Path| ["--nats-creds".to_owned(), path.display().to_string()];
    let missing = directory.path().join("missing.creds");
    let error = start_error(&[to.clone(), creds(&missing)].concat()).await;
    assert!(error.contains("missing.creds"), "{error}");
    assert_nodes_cooperate(nats, &[to, creds(&credentials)].concat()).await;
}

#[tokio::test]
async fn node_hands_over_its_sockets_on_sigterm() {
    let mut fleet = Fleet::new(3).await;
    let _executor = fleet.executor(0, "box").await;
    let (script, count) = counting(5);
    let mut running = Vec::new();
    let mut clients = Vec::new();
    for node in [0, 1, 2] {
        let client = fleet.connect(node, "box").await;
        let started = client
            .start(sh(&format!("p{node}"), &script))
            .await
            .unwrap();
        running.push(started.process);
        clients.push(client);
    }
    let node = fleet.nodes[0].take().unwrap();
    assert_eq!(node.end(Signal::TERM).await, Some(0));
    for process in running {
        assert_counted_all(process, count).await;
    }
    fleet.wait_online(1, "box", true).await;
    assert_eq!(fleet.registries(1).await.len(), 1, "it has left");
}

#[tokio::test]
async fn fleet_manifest_for_kubernetes_starts_nodes() {
    let manifest = dist_file("kubernetes/fleet.yaml");
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name).display().to_string();
    // nats-server accepts its configuration.
    std::fs::write(path("nats.conf"), block(&manifest, "nats.conf: |")).unwrap();
    let mut check = Command::new("nats-server");
    check
        .args(["-t", "-c", &path("nats.conf")])
        .env("PATH", "/usr/sbin:/usr/local/bin:/usr/bin:/bin")
        .env("POD_NAME", "nats-0")
        .env("NATS_PASSWORD", "geheim");
    let output = finished(check).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    // Nodes with these arguments cooperate, here over a single NATS server.
    let nats =
        Nats::configured(|_| "authorization { user: meet, password: geheim }\n".to_owned()).await;
    let other = dist_file("kubernetes/rendezvous.yaml");
    std::fs::write(path("tokens"), block(&other, "tokens: |")).unwrap();
    std::fs::write(path("quotas"), block(&other, "quotas: |")).unwrap();
    let mut nodes = Vec::new();
    for number in 0..2 {
        let mut args: Vec<String> = items(&manifest, "args:")
            .into_iter()
            .map(|arg| {
                arg.trim_matches('"')
                    .replace("$(POD_NAME)", &format!("rendezvous-{number}"))
                    .replace(
                        "$(NATS_PASSWORD)@nats:4222",
                        &format!("geheim@{}", nats.address()),
                    )
            })
            .collect();
        for (flag, with) in [
            ("--listen", "http://127.0.0.1:0".to_owned()),
            ("--metrics-listen", "127.0.0.1:0".to_owned()),
            ("--nats-replicas", "1".to_owned()),
            ("--state-dir", path(&format!("state-{number}"))),
            ("--tokens", path("tokens")),
            ("--quotas", path("quotas")),
        ] {
            let at = args.iter().position(|arg| arg == flag).expect(flag);
            args[at + 1] = with;
        }
        let mut command = program(home.path());
        command.args(&args);
        nodes.push(RunningProgram::start(command).await);
    }
    for node in &nodes {
        let health = format!("{}/readyz", node.line);
        assert_eq!(request("GET", &health, None, "").await.0, 200);
    }
}
