//! Replay of the session in `docs/wire.md`.
//!
//! A line with an arrow to the right is sent, a line with an arrow to the left is expected, a line of
//! dashes is a lost connection. `SESSION` stands for the id of the session. Notifications and responses
//! are compared in any order: only that of the messages of one process is fixed.

use exec_server_testkit::wire::{TestedServer, Transport, WireClient};
use serde_json::Value;

use crate::program;

/// The next messages until one is like the expected one; others are kept.
async fn expect(client: &mut WireClient, kept: &mut Vec<Value>, expected: &Value) -> Value {
    if let Some(at) = kept.iter().position(|message| is_like(expected, message)) {
        return kept.remove(at);
    }
    loop {
        let message: Value = serde_json::from_str(&client.text().await).unwrap();
        let error = message["error"]["message"].as_str().unwrap_or_default();
        if is_like(expected, &message) || error.contains("attached") {
            return message;
        }
        let is_response = message["id"].is_i64() && message["id"] == expected["id"];
        assert!(!is_response, "expected {expected}\nbut got {message}");
        kept.push(message);
    }
}

#[tokio::test]
async fn documented_session_matches_the_server() {
    let document = include_str!("../../../../docs/wire.md");
    let (_, session) = document.split_once("```wire-session\n").unwrap();
    let (session, _) = session.split_once("```").unwrap();
    let mut subject = TestedServer::start(Transport::Websocket, program()).await;
    let mut client = subject.connect().await;
    let (mut id, mut kept) = (String::new(), Vec::new());
    let (mut sent, mut seen) = (0, 0);
    let mut last = String::new();
    for line in session.lines() {
        let line = line.replace("SESSION", &id);
        if let Some(message) = line.strip_prefix("→ ") {
            client.send_text(message).await;
            last = message.to_owned();
            sent += 1;
        } else if let Some(expected) = line.strip_prefix("← ") {
            let expected: Value = serde_json::from_str(expected).unwrap();
            let mut message = expect(&mut client, &mut kept, &expected).await;
            // The server may not have noticed yet that the first connection is lost.
            while message["error"]["message"]
                .as_str()
                .is_some_and(|text| text.contains("attached"))
            {
                client.send_text(&last).await;
                message = expect(&mut client, &mut kept, &expected).await;
            }
            if let Some(session) = message["result"]["sessionId"].as_str() {
                id = session.to_owned();
            }
            seen += 1;
        } else {
            assert!(line.starts_with("--"), "{line}");
            drop(client);
            client = subject.connect().await;
            kept.clear();
        }
    }
    assert!(sent >= 9 && seen >= 9, "{sent} {seen}");
}

/// Whether a message has the expected fields and values; it may have more.
fn is_like(expected: &Value, message: &Value) -> bool {
    match (expected, message) {
        (Value::String(wanted), Value::String(text)) => match wanted.split_once('…') {
            Some((start, end)) => text.starts_with(start) && text.ends_with(end),
            None => wanted == text,
        },
        (Value::Object(expected), Value::Object(message)) => expected
            .iter()
            .all(|(name, value)| message.get(name).is_some_and(|found| is_like(value, found))),
        (Value::Array(expected), Value::Array(message)) => {
            expected.len() == message.len()
                && expected
                    .iter()
                    .zip(message)
                    .all(|(one, other)| is_like(one, other))
        }
        _ => expected == message,
    }
}
