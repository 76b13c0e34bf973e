//! `GET /events`: the event stream for administrators.

use exec_server_transport::http::{HeadKind, read_head};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::support::{TIMEOUT, TOKENS, TestServer, open_stream};

/// A client of the event stream.
struct TestEventClient(BufReader<TcpStream>);

impl TestEventClient {
    /// Returns the HTTP status as an error if the request is refused.
    async fn new(server: &TestServer, token: &str) -> Result<Self, u16> {
        let mut stream = TcpStream::connect(&server.address).await.unwrap();
        let request = format!(
            "GET /events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\
             Accept: text/event-stream\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let head = read_head(&mut stream, HeadKind::Response).await.unwrap();
        if head.status != 200 {
            return Err(head.status);
        }
        assert_eq!(head.header("content-type"), Some("text/event-stream"));
        Ok(Self(BufReader::new(stream)))
    }

    /// Returns the next event with its data, or `None` at the end of the stream.
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
        timeout(TIMEOUT, next).await.expect("an event in time")
    }

    /// Expects this event next and returns its data.
    async fn expect(&mut self, event: &str) -> Value {
        let (received, data) = self.next().await.expect("an event");
        assert_eq!(received, event, "{data}");
        assert!(data["time"].as_u64().is_some(), "{data}");
        data
    }
}

#[tokio::test]
async fn admins_receive_register_attach_revoke_and_detach_events() {
    let server = TestServer::start().await;
    let mut all = TestEventClient::new(&server, "root-token").await.unwrap();
    let mut own = TestEventClient::new(&server, "ops-token").await.unwrap();
    let mut executor = server.executor("env-1", 1).await;
    let mut harness = server.harness("env-1", "alice-token", 2).await;
    open_stream(&mut executor, &mut harness, "s").await;
    for client in [&mut all, &mut own] {
        let data = client.expect("register").await;
        assert_eq!(
            (&data["environment"], &data["tenant"]),
            (&json!("env-1"), &json!("default"))
        );
        let data = client.expect("attach").await;
        assert_eq!(data["role"], "executor");
        let data = client.expect("attach").await;
        assert_eq!(
            (&data["role"], &data["token"]),
            (&json!("harness"), &json!("alice"))
        );
    }
    // Only the operator of all tenants receives events of another tenant.
    server.register_as("acme-executor-token", "env-2", 1).await;
    assert_eq!(all.expect("register").await["tenant"], "acme");
    let body = json!({"harness": "token:alice"});
    server.post("ops-token", "/cloud/revoke", body).await;
    harness.expect_reset("s", "authorization_revoked").await;
    for client in [&mut all, &mut own] {
        // The end of the socket and the end of the request are in no fixed order.
        let (one, other) = (client.next().await.unwrap(), client.next().await.unwrap());
        let (revoke, detach) = match &*one.0 {
            "revoke" => (one, other),
            _ => (other, one),
        };
        assert_eq!((&*revoke.0, &*detach.0), ("revoke", "detach"));
        assert_eq!(revoke.1["harness"], "token:alice");
        assert_eq!(detach.1["role"], "harness");
    }
    let path = "/cloud/environment/env-2/remove";
    server.post("acme-ops-token", path, json!({})).await;
    assert_eq!(all.expect("remove").await["environment"], "env-2");
    drop(executor);
    for client in [&mut all, &mut own] {
        assert_eq!(client.expect("detach").await["role"], "executor");
    }
}

#[tokio::test]
async fn event_stream_requires_admin_and_ends_when_the_token_is_removed() {
    let server = TestServer::start().await;
    for token in ["alice-token", "executor-token"] {
        assert_eq!(
            TestEventClient::new(&server, token).await.err(),
            Some(403),
            "{token}"
        );
    }
    assert_eq!(
        TestEventClient::new(&server, "nobody").await.err(),
        Some(401)
    );
    let mut client = TestEventClient::new(&server, "ops-token").await.unwrap();
    server.register("env-1", 1).await;
    client.expect("register").await;
    let fewer = TOKENS.replace("ops admin ops-token\n", "");
    server.rendezvous.set_tokens(fewer.parse().unwrap()).await;
    assert_eq!(client.next().await, None);
}
