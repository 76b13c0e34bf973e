//! Three meeting points that are one, on a real nats-server, and what may happen to them.

use std::sync::Arc;
use std::time::Duration;

use exec_server::registry::{RegistryAuth, RegistryConnectArgs};
use exec_server::{CollectOptions, ExecBackend as _, ExecProcess, ExecServerClient};
use exec_server_testkit::http::request;
use exec_server_testkit::nats::Nats;
use exec_server_testkit::proc::PATIENCE;
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::Command;
use tokio::time::timeout;

use super::stage::{Running, program};
use super::{collect, lines, sh};

/// Much longer than anything here should take, and than leases and back-offs last.
const LONG: Duration = Duration::from_secs(60);

struct Fleet {
    directory: TempDir,
    nats: Nats,
    nodes: Vec<Option<Running>>,
}

impl Fleet {
    async fn new(count: usize) -> Self {
        Self::on(Nats::start().await, count).await
    }

    async fn on(nats: Nats, count: usize) -> Self {
        let mut fleet = Self {
            directory: tempfile::tempdir().unwrap(),
            nats,
            nodes: Vec::new(),
        };
        for _ in 0..count {
            fleet.add(&[]).await;
        }
        fleet.wait_nodes(count).await;
        fleet
    }

    /// Until every node knows every other.
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
        timeout(LONG, all)
            .await
            .expect("the nodes to find each other");
    }

    /// The other nodes, as a node tells executors of them.
    async fn registries(&self, node: usize) -> Vec<String> {
        let (status, answer) = self.register(node, "probe").await;
        assert_eq!(status, 200, "{answer}");
        let found = answer["registries"].as_array().cloned();
        let found = found.unwrap_or_default().into_iter();
        found.map(|url| url.as_str().unwrap().to_owned()).collect()
    }

    /// One more node, with these options.
    async fn add(&mut self, options: &[&str]) -> usize {
        let mut command = program(self.directory.path());
        command
            .args(["rendezvous", "--listen", "127.0.0.1:0", "--log", "info"])
            .args(["--nats", &self.nats.url()])
            .args(["--node-name", &format!("node-{}", self.nodes.len())])
            .arg("--state-dir")
            .arg(self.directory.path().join("rendezvous"))
            .args(options);
        self.nodes.push(Some(Running::start(command).await));
        self.nodes.len() - 1
    }

    fn node(&self, node: usize) -> &Running {
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
        timeout(LONG, asked).await.expect("an answer")
    }

    /// Registers an environment of which there is no executor.
    async fn register(&self, node: usize, name: &str) -> (u16, Value) {
        let key = exec_server_transport::identity::generate();
        let body = json!({
            "security_profile": "noise_hybrid_ik_v1",
            "executor_public_key": key.public_key(),
        });
        let path = format!("/cloud/environment/{name}/register");
        self.call(node, "executor", "POST", &path, &body).await
    }

    fn executor_command(&self, node: usize, name: &str, home: &str) -> Command {
        let home = self.directory.path().join(home);
        std::fs::create_dir_all(&home).unwrap();
        let mut command = program(&home);
        command
            .args(["--remote", self.url(node), "--environment-id", name])
            .arg("--remote-token-file")
            .arg(self.directory.path().join("rendezvous/executor.token"))
            .current_dir(&home);
        command
    }

    /// An executor that dials this node first.
    async fn executor(&self, node: usize, name: &str) -> Running {
        Running::start(self.executor_command(node, name, name)).await
    }

    fn args(&self, node: usize, name: &str) -> RegistryConnectArgs {
        let auth = RegistryAuth::bearer(self.token("harness"));
        RegistryConnectArgs::new(self.url(node), name, auth, "test")
    }

    /// A harness that comes to this node.
    async fn connect(&self, node: usize, name: &str) -> ExecServerClient {
        let connect = ExecServerClient::connect_registry(self.args(node, name));
        timeout(LONG, connect).await.expect("a connection").unwrap()
    }

    /// What a node says of an environment.
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
        let waited = timeout(LONG, wait).await;
        assert!(waited.is_ok(), "`{name}` is not online={online} at {node}");
    }

    /// Dies without a word.
    async fn kill(&mut self, node: usize) {
        self.nodes[node].take().unwrap().end(Signal::KILL).await;
    }

    /// Until a node has logged something.
    async fn wait_logged(&self, node: usize, text: &str) {
        let logged = async {
            while !self.node(node).stderr().contains(text) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let logged = timeout(LONG, logged).await;
        assert!(
            logged.is_ok(),
            "no `{text}` in:\n{}",
            self.node(node).stderr()
        );
    }
}

/// A script that prints numbers for about this many seconds, and how many.
fn counting(seconds: usize) -> (String, usize) {
    let count = seconds * 50;
    let script = format!("for i in $(seq 1 {count}); do echo $i; sleep 0.02; done");
    (script, count)
}

/// Waits for the whole output of what [`counting`] started.
async fn counted(started: Arc<dyn ExecProcess>, count: usize) {
    let output = started.output(CollectOptions::default());
    let output = timeout(LONG, output).await.expect("its end").unwrap();
    assert!(
        output.stdout == lines(count),
        "{} bytes instead of {}",
        output.stdout.len(),
        lines(count).len()
    );
}

#[tokio::test]
async fn a_harness_at_one_node_uses_an_executor_at_another() {
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
        // It is seen to go.
        let gone = async {
            while fleet.listed(other, "box").await.unwrap()["streams"] != 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE, gone).await.expect("the stream to end");
    }
    let (status, answer) = fleet
        .call(
            1,
            "harness",
            "POST",
            "/cloud/environment/nowhere/connect",
            &json!({
                "harness_public_key": exec_server_transport::identity::generate().public_key(),
            }),
        )
        .await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (409, &json!("environment_offline"))
    );
}

#[tokio::test]
async fn bulk_between_nodes_is_byte_exact_and_a_slow_reader_stops_nobody() {
    let fleet = Fleet::new(2).await;
    let _executor = fleet.executor(0, "box").await;
    let client = fleet.connect(1, "box").await;
    // One that does not read what comes.
    let slow = fleet.connect(1, "box").await;
    let stuck = slow
        .start(sh("stuck", "head -c 40000000 /dev/zero"))
        .await
        .unwrap();
    let (output, _) = collect(&client, "p", "seq 1 1500000").await;
    assert!(output == lines(1_500_000), "{} bytes", output.len());
    // And up.
    let started = client.start(sh("up", "sha256sum")).await.unwrap();
    let block = bytes::Bytes::from(lines(200_000));
    for _ in 0..4 {
        started.process.write(block.clone()).await.unwrap();
    }
    started.process.close_stdin().await.unwrap();
    let output = started.process.output(CollectOptions::default());
    let output = timeout(LONG, output).await.unwrap().unwrap();
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
async fn a_node_dies_and_its_streams_go_on_elsewhere() {
    let mut fleet = Fleet::new(3).await;
    // One executor at the node that dies, one not; harnesses at every node.
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
    tokio::time::sleep(Duration::from_secs(1)).await;
    fleet.kill(0).await;
    let before = std::time::Instant::now();
    for client in &clients {
        // Whoever still answers goes on.
        let (output, _) = collect(client, "after", "echo after").await;
        assert_eq!(output, b"after\n");
    }
    assert!(
        before.elapsed() < Duration::from_secs(30),
        "{:?}",
        before.elapsed()
    );
    for process in running {
        counted(process, count).await;
    }
    fleet.wait_online(2, "here", true).await;
}

#[tokio::test]
async fn a_node_that_was_paused_finds_itself_fenced() {
    let fleet = Fleet::new(3).await;
    let executor = fleet.executor(0, "box").await;
    assert_eq!(
        collect(&fleet.connect(1, "box").await, "p", "echo one")
            .await
            .0,
        b"one\n"
    );
    fleet.node(0).signal(Signal::STOP);
    // Others believe it dead, and say so.
    fleet.wait_logged(1, "believed dead").await;
    fleet.wait_online(2, "box", false).await;
    // The same identity comes back elsewhere, while the old socket still seems to be there.
    executor.signal_both(Signal::STOP);
    let mark = fleet.directory.path().join("box/mark");
    std::fs::write(&mark, "two\n").unwrap();
    let show = format!("cat {}", mark.display());
    let second = Running::start(fleet.executor_command(1, "box", "box")).await;
    fleet.wait_online(2, "box", true).await;
    let client = fleet.connect(2, "box").await;
    let (script, count) = counting(6);
    let running = client.start(sh("count", &script)).await.unwrap();
    fleet.node(0).signal(Signal::CONT);
    fleet
        .wait_logged(0, "has taken the place of the one here")
        .await;
    // Its harnesses are led to the one executor that there is.
    let late = fleet.connect(0, "box").await;
    assert_eq!(collect(&late, "late", &show).await.0, b"two\n");
    counted(running.process, count).await;
    let listed = fleet.listed(0, "box").await.unwrap();
    assert_eq!(listed["online"], true, "{listed}");
    executor.signal(Signal::KILL);
    drop(second);
}

#[tokio::test]
async fn nats_dies_and_comes_back() {
    let mut fleet = Fleet::new(2).await;
    let _executor = fleet.executor(0, "box").await;
    let (near, far) = (fleet.connect(0, "box").await, fleet.connect(1, "box").await);
    let (script, count) = counting(12);
    let near_count = near.start(sh("near", &script)).await.unwrap().process;
    let far_count = far.start(sh("far", &script)).await.unwrap().process;
    fleet.nats.die().await;
    // Nobody new is taken in, and is told why.
    let refused = async {
        loop {
            let body = json!({
                "harness_public_key": exec_server_transport::identity::generate().public_key(),
            });
            let path = "/cloud/environment/box/connect";
            let (status, answer) = fleet.call(0, "harness", "POST", path, &body).await;
            if status == 503 {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let answer = timeout(LONG, refused).await.expect("a refusal");
    let text = answer["error"]["message"].as_str().unwrap();
    assert!(text.contains("store") || text.contains("NATS"), "{text}");
    // Streams of one node do not notice.
    assert_eq!(collect(&near, "still", "echo still").await.0, b"still\n");
    fleet.nats.open().await;
    assert_eq!(collect(&far, "again", "echo again").await.0, b"again\n");
    let fresh = fleet.connect(1, "box").await;
    assert_eq!(collect(&fresh, "fresh", "echo fresh").await.0, b"fresh\n");
    counted(near_count, count).await;
    counted(far_count, count).await;
}

#[tokio::test]
async fn a_bucket_that_is_deleted_is_made_again_from_what_the_nodes_know() {
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
        .ask("$JS.API.STREAM.DELETE.KV_exec-server", "")
        .await;
    assert_eq!(answer["success"], true, "{answer}");
    fleet.wait_logged(0, "the bucket is gone").await;
    fleet.wait_online(0, "box", true).await;
    fleet.wait_online(1, "box", true).await;
    // What was open stays, what is new works, and nothing is forgotten.
    assert_eq!(collect(&client, "p", "echo here").await.0, b"here\n");
    let fresh = fleet.connect(1, "box").await;
    assert_eq!(collect(&fresh, "q", "echo there").await.0, b"there\n");
    for node in [0, 1] {
        // The other node may just have found out.
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
        let answer = timeout(LONG, revoked).await.expect("an answer");
        let harness = &answer["revocations"][0]["harness"];
        assert_eq!(harness, "token:mallory", "{answer}");
    }
}

#[tokio::test]
async fn of_two_executors_with_one_identity_the_newer_has_the_environment() {
    let fleet = Fleet::new(3).await;
    let first = fleet.executor(0, "box").await;
    let client = fleet.connect(2, "box").await;
    let mark = fleet.directory.path().join("box/mark");
    std::fs::write(&mark, "same\n").unwrap();
    let show = format!("cat {}", mark.display());
    // It must not fight for its place yet.
    first.signal_both(Signal::STOP);
    let second = Running::start(fleet.executor_command(1, "box", "box")).await;
    fleet
        .wait_logged(0, "has taken the place of the one here")
        .await;
    let again = fleet.connect(2, "box").await;
    assert_eq!(collect(&again, "who", &show).await.0, b"same\n");
    drop((client, again));
    // When the older wakes up it dials again, and is then the newer. One of them is always there.
    first.signal_both(Signal::CONT);
    fleet
        .wait_logged(1, "has taken the place of the one here")
        .await;
    second.end(Signal::KILL).await;
    fleet.wait_online(2, "box", true).await;
    // The one that is left comes back by itself; whoever comes while it does is told so.
    let last = async {
        loop {
            match ExecServerClient::connect_registry(fleet.args(1, "box")).await {
                Ok(client) => return client,
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    };
    let last = timeout(LONG, last).await.expect("a connection");
    assert_eq!(collect(&last, "p", &show).await.0, b"same\n");
}

#[tokio::test]
async fn a_harness_that_is_revoked_at_one_node_is_out_at_all() {
    let fleet = Fleet::new(3).await;
    let _executor = fleet.executor(0, "box").await;
    let args = fleet.args(1, "box");
    let key = args.identity.public_key().fingerprint();
    let client = ExecServerClient::connect_registry(args.clone())
        .await
        .unwrap();
    let other = fleet.connect(1, "box").await;
    let revocation = json!({"harness": format!("key:{key}"), "environment_id": "box"});
    let (status, answer) = fleet
        .call(2, "admin", "POST", "/cloud/revoke", &revocation)
        .await;
    assert_eq!(status, 200, "{answer}");
    let ended = async {
        while fleet.listed(2, "box").await.unwrap()["streams"] != 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let ended = timeout(Duration::from_secs(3), ended).await;
    ended.expect("the stream to end");
    let mut closed = client.closed();
    let closed = closed.wait_for(Option::is_some);
    timeout(LONG, closed).await.unwrap().unwrap();
    for node in [0, 1, 2] {
        let mut args = args.clone();
        args.registry_url = fleet.url(node).to_owned();
        let error = ExecServerClient::connect_registry(args).await.unwrap_err();
        assert!(error.to_string().contains("403"), "{error}");
    }
    assert_eq!(collect(&other, "p", "echo in").await.0, b"in\n");
}

#[tokio::test]
async fn a_wrong_clock_on_one_node_harms_nobody() {
    let mut fleet = Fleet::new(1).await;
    for offset in ["-300", "300"] {
        fleet.add(&["--clock-offset", offset]).await;
    }
    fleet.wait_nodes(3).await;
    // The addresses of all nodes end at the same time.
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
    // An executor at each, and a harness from each to each.
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
async fn a_full_jetstream_lets_nobody_in_and_those_who_are_there_go_on() {
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
    let (status, answer) = timeout(LONG, full).await.expect("a full store");
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
async fn a_node_hands_its_sockets_over_before_it_ends() {
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
        counted(process, count).await;
    }
    fleet.wait_online(1, "box", true).await;
    assert_eq!(fleet.registries(1).await.len(), 1, "it has left");
}
