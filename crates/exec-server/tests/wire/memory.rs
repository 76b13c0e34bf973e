//! Memory of the server under peers that do not read and peers that do not finish what they send.

use std::path::Path;
use std::time::{Duration, Instant};

use exec_server_testkit::proc::{self, TIMEOUT, eventually};
use exec_server_testkit::wire::{StartBuilder, TestedServer, Transport, WireClient};
use exec_server_transport::{ConnectOptions, Link, connect};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::task::JoinHandle;

use crate::flow::still;
use crate::program;

const MIB: u64 = 1 << 20;

/// Maximum memory of the server in these tests: data and stacks of threads.
const LIMIT: u64 = 256 * MIB;

/// Peers of each kind.
const HOSTILE: usize = 20;

/// Latency in which the server must respond on any machine.
const NOISE: Duration = Duration::from_millis(15);

/// The server's program under a limit of memory.
fn limited() -> Command {
    let server = program();
    let server = server.as_std();
    let mut command = Command::new("/bin/sh");
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin");
    let script = format!("ulimit -d {} && exec \"$0\" \"$@\"", LIMIT / 1024);
    command.args(["-c", &script]).arg(server.get_program());
    command
}

fn uri(path: &Path) -> String {
    format!("file://{}", path.display())
}

/// Files whose responses are large.
struct LargeFiles {
    directory: tempfile::TempDir,
}

impl LargeFiles {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        // Sparse: it costs no disk.
        let file = std::fs::File::create(directory.path().join("large")).unwrap();
        file.set_len(32 * MIB).unwrap();
        std::fs::write(directory.path().join("small"), vec![b'x'; 100_000]).unwrap();
        let many = directory.path().join("many");
        std::fs::create_dir(&many).unwrap();
        for n in 0..5000 {
            let name = format!("{n}-a-name-that-is-neither-short-nor-very-long");
            std::fs::write(many.join(name), b"needle").unwrap();
        }
        for n in 0..20 {
            let skill = directory.path().join("plugin").join(n.to_string());
            std::fs::create_dir_all(&skill).unwrap();
            std::fs::write(skill.join("SKILL.md"), vec![b'x'; 900_000]).unwrap();
        }
        Self { directory }
    }

    fn uri(&self, name: &str) -> String {
        uri(&self.directory.path().join(name))
    }

    /// Sends requests for large responses and reads none of them.
    async fn send_large_requests(&self, client: &mut WireClient) {
        client
            .ok(
                "fs/open",
                json!({"handleId": "h", "path": self.uri("large")}),
            )
            .await;
        // Its output is retained, and each request for it has a large response.
        let writer = StartBuilder::sh("writer", "head -c 1000000 /dev/zero; exec sleep 600")
            .with("delivery", json!("pull"));
        client.ok("process/start", writer.0).await;
        let roots: Vec<Value> = (0..8)
            .map(|n| json!({"id": n.to_string(), "path": self.uri("plugin")}))
            .collect();
        for _ in 0..30 {
            let pattern =
                json!({"path": self.uri("many"), "pattern": "needle", "maxMatches": 5000});
            client.queue("fs/search", pattern);
            client.queue("process/snapshot", json!({"processId": "writer"}));
            client.queue(
                "process/read",
                json!({"processId": "writer", "afterSeq": 0}),
            );
            client.queue("capabilityRoots/discoverV1", json!({"roots": roots}));
            client.queue("process/list", json!({}));
            client.queue("fs/readFile", json!({"path": self.uri("large")}));
            client.queue(
                "fs/readBlock",
                json!({"handleId": "h", "offset": 0, "len": MIB}),
            );
            client.queue("fs/readDirectory", json!({"path": self.uri("many")}));
            client.queue("fs/walk", json!({"path": self.uri("many"), "options": {}}));
        }
        client.flush().await;
    }

    /// Median duration of requests that a client usually sends.
    async fn usual(&self, client: &mut WireClient, tag: &str) -> Duration {
        let mut times = Vec::new();
        for n in 0..15 {
            let started_at = Instant::now();
            let seen = client
                .run(StartBuilder::sh(&format!("{tag}{n}"), "echo hello"))
                .await;
            assert_eq!(seen.text("stdout"), "hello\n");
            let read = client
                .ok("fs/readFile", json!({"path": self.uri("small")}))
                .await;
            assert_eq!(read["dataBase64"].as_str().unwrap().len(), 133_336);
            let written = json!({"path": self.uri("written"), "dataBase64": "A".repeat(400_000)});
            client.ok("fs/writeFile", written).await;
            let listed = client
                .ok("fs/readDirectory", json!({"path": self.uri("")}))
                .await;
            assert!(listed["entries"].as_array().unwrap().len() >= 3);
            times.push(started_at.elapsed());
        }
        times.sort();
        times[times.len() / 2]
    }
}

/// A connection that sends 45 MiB of a message and not its end.
async fn unfinished(url: &str) -> JoinHandle<()> {
    let Link {
        incoming,
        mut outgoing,
    } = connect(url, &ConnectOptions::default()).await.unwrap();
    tokio::spawn(async move {
        for n in 0..45 {
            outgoing.push_fragment((n == 0, false), vec![b' '; MIB as usize]);
            if outgoing.flush().await.is_err() {
                break;
            }
        }
        // The task runs until the test ends it.
        std::future::pending::<()>().await;
        drop(incoming);
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_peers_neither_end_nor_slow_down_a_server_under_a_limit_of_memory() {
    let mut server = TestedServer::start(Transport::Websocket, limited()).await;
    let pid = server.server_pid().await;
    let large = LargeFiles::new();
    let mut client = server.session().await;
    // One client first warms up caches and pools, which are allocated once.
    large.usual(&mut client, "warm").await;
    let usual = large.usual(&mut client, "usual").await;

    let mut readers = Vec::new();
    for _ in 0..HOSTILE {
        let mut reader = server.session().await;
        large.send_large_requests(&mut reader).await;
        readers.push(reader);
    }
    let mut writers = Vec::new();
    for _ in 0..HOSTILE {
        writers.push(unfinished(server.url()).await);
    }
    // The memory of the server has reached its maximum here.
    eventually("the server is at rest", still(pid)).await;
    let besieged = large.usual(&mut client, "besieged").await;
    let peak = proc::peak_memory(pid);
    println!(
        "usual {usual:?}, besieged {besieged:?}, peak {} MiB",
        peak / MIB
    );
    assert!(peak < LIMIT, "{} MiB", peak / MIB);
    assert!(
        besieged <= usual * 3 + NOISE,
        "{besieged:?} instead of {usual:?}"
    );

    // A large file and a large message still pass.
    let all = async {
        let read = client
            .ok("fs/readFile", json!({"path": large.uri("large")}))
            .await;
        assert_eq!(
            read["dataBase64"].as_str().unwrap().len() as u64,
            (32 * MIB).div_ceil(3) * 4
        );
        let mut late = server.session().await;
        let written = json!({"path": large.uri("written"), "dataBase64": "A".repeat(1_300_000)});
        assert_eq!(late.ok("fs/writeFile", written).await, json!({}));
    };
    tokio::time::timeout(TIMEOUT, all)
        .await
        .expect("room for others");
    let seen = client.run(StartBuilder::sh("last", "exit 7")).await;
    assert_eq!(seen.exit_code(), 7);
    for writer in writers {
        writer.abort();
    }
    drop(readers);
}

#[tokio::test]
async fn file_truncated_while_it_is_sent_yields_the_bytes_read_so_far() {
    let mut server = TestedServer::start(Transport::Unix, program()).await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("f");
    std::fs::write(&path, vec![b'x'; 24 << 20]).unwrap();
    let mut client = server.session().await;
    let id = client
        .send("fs/readFile", json!({"path": uri(&path)}))
        .await;
    eventually("the server is at rest", still(server.server_pid().await)).await;
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(6 << 20).unwrap();
    let read = client.answer(id).await.unwrap();
    let data = read["dataBase64"].as_str().unwrap();
    let bytes = exec_server_testkit::wire::bytes(&Value::String(data.to_owned()));
    assert!(bytes.len() <= 6 << 20, "{}", bytes.len());
    assert!(bytes.iter().all(|byte| *byte == b'x'));
    assert!(bytes.len() >= 5 << 20, "{}", bytes.len());
    // The connection stays open.
    let read = client.ok("fs/readFile", json!({"path": uri(&path)})).await;
    assert_eq!(
        read["dataBase64"].as_str().unwrap().len(),
        (6 << 20) / 3 * 4
    );
}
