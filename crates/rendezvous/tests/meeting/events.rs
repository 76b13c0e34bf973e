//! `GET /events`: what those who look after a meeting point hear of it.

use exec_server_transport::http::{Kind, read_head};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::support::{Meeting, PATIENCE, TOKENS, introduce};

/// Somebody who watches.
struct Watcher(BufReader<TcpStream>);

impl Watcher {
    /// The status instead, if it is not allowed to.
    async fn new(meeting: &Meeting, token: &str) -> Result<Self, u16> {
        let mut stream = TcpStream::connect(&meeting.address).await.unwrap();
        let request = format!(
            "GET /events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\
             Accept: text/event-stream\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let head = read_head(&mut stream, Kind::Response).await.unwrap();
        if head.status != 200 {
            return Err(head.status);
        }
        assert_eq!(head.header("content-type"), Some("text/event-stream"));
        Ok(Self(BufReader::new(stream)))
    }

    /// The next event and what it says; `None` when there are no more.
    async fn next(&mut self) -> Option<(String, Value)> {
        let next = async {
            let mut event = String::new();
            loop {
                let mut line = String::new();
                if self.0.read_line(&mut line).await.unwrap() == 0 {
                    return None;
                }
                if let Some(name) = line.strip_prefix("event: ") {
                    event = name.trim().to_owned();
                } else if let Some(data) = line.strip_prefix("data: ") {
                    return Some((event, serde_json::from_str(data).unwrap()));
                }
            }
        };
        timeout(PATIENCE, next).await.expect("an event in time")
    }

    /// Expects this next; gives what it says.
    async fn hears(&mut self, event: &str) -> Value {
        let (heard, data) = self.next().await.expect("an event");
        assert_eq!(heard, event, "{data}");
        assert!(data["time"].as_u64().is_some(), "{data}");
        data
    }
}

#[tokio::test]
async fn admins_hear_who_comes_and_goes() {
    let meeting = Meeting::start().await;
    let mut all = Watcher::new(&meeting, "root-token").await.unwrap();
    let mut own = Watcher::new(&meeting, "ops-token").await.unwrap();
    let mut executor = meeting.executor("env-1", 1).await;
    let mut harness = meeting.harness("env-1", "alice-token", 2).await;
    introduce(&mut executor, &mut harness, "s").await;
    for watcher in [&mut all, &mut own] {
        let data = watcher.hears("register").await;
        assert_eq!(
            (&data["environment"], &data["tenant"]),
            (&json!("env-1"), &json!("default"))
        );
        let data = watcher.hears("attach").await;
        assert_eq!(data["role"], "executor");
        let data = watcher.hears("attach").await;
        assert_eq!(
            (&data["role"], &data["token"]),
            (&json!("harness"), &json!("alice"))
        );
    }
    // Of another tenant only those hear who look after all.
    meeting.register_as("acme-executor-token", "env-2", 1).await;
    assert_eq!(all.hears("register").await["tenant"], "acme");
    let body = json!({"harness": "token:alice"});
    meeting.post("ops-token", "/cloud/revoke", body).await;
    harness.hears_reset("s", "authorization_revoked").await;
    for watcher in [&mut all, &mut own] {
        // In which order its socket and the call end is anybody's guess.
        let (one, other) = (watcher.next().await.unwrap(), watcher.next().await.unwrap());
        let (revoke, detach) = match &*one.0 {
            "revoke" => (one, other),
            _ => (other, one),
        };
        assert_eq!((&*revoke.0, &*detach.0), ("revoke", "detach"));
        assert_eq!(revoke.1["harness"], "token:alice");
        assert_eq!(detach.1["role"], "harness");
    }
    let path = "/cloud/environment/env-2/remove";
    meeting.post("acme-ops-token", path, json!({})).await;
    assert_eq!(all.hears("remove").await["environment"], "env-2");
    drop(executor);
    for watcher in [&mut all, &mut own] {
        assert_eq!(watcher.hears("detach").await["role"], "executor");
    }
}

#[tokio::test]
async fn who_is_no_admin_any_more_hears_nothing_more() {
    let meeting = Meeting::start().await;
    for token in ["alice-token", "executor-token"] {
        assert_eq!(
            Watcher::new(&meeting, token).await.err(),
            Some(403),
            "{token}"
        );
    }
    assert_eq!(Watcher::new(&meeting, "nobody").await.err(), Some(401));
    let mut watcher = Watcher::new(&meeting, "ops-token").await.unwrap();
    meeting.register("env-1", 1).await;
    watcher.hears("register").await;
    let fewer = TOKENS.replace("ops admin ops-token\n", "");
    meeting.rendezvous.set_tokens(fewer.parse().unwrap()).await;
    assert_eq!(watcher.next().await, None);
}
