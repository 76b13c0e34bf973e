//! Replay of the session that the documentation shows.
//!
//! A line with an arrow to the right is sent, a line with an arrow to the left is expected.
//! In expected lines `"…"` stands for any value.

use serde_json::Value;

use crate::client::{McpClient, program};

#[tokio::test]
async fn documented_mcp_session_matches_the_server() {
    let document = include_str!("../../../../docs/agents.md");
    let (_, session) = document.split_once("```mcp-session\n").unwrap();
    let (session, _) = session.split_once("```").unwrap();
    let work = tempfile::tempdir().unwrap();
    let mut command = program(work.path());
    command.arg("mcp");
    let mut client = McpClient::spawn(command);
    let (mut sent, mut seen) = (0, 0);
    // Values of a response may be needed in the next request.
    let mut session_id = Value::Null;
    for line in session.lines() {
        if let Some(message) = line.strip_prefix("→ ") {
            let message = message.replace("\"SESSION\"", &session_id.to_string());
            client.line(&message).await;
            sent += 1;
        } else if let Some(expected) = line.strip_prefix("← ") {
            let expected: Value = serde_json::from_str(expected).unwrap();
            let message = client.message().await.unwrap();
            assert!(
                is_like(&expected, &message),
                "expected {expected}\nbut got {message}"
            );
            let found = &message["result"]["structuredContent"]["session_id"];
            if found.is_u64() {
                session_id = found.clone();
            }
            seen += 1;
        }
    }
    assert!(sent >= 6 && seen >= 5, "{sent} {seen}");
}

/// Whether a message has the expected fields and values; it may have more.
fn is_like(expected: &Value, message: &Value) -> bool {
    match (expected, message) {
        (Value::String(any), _) if any == "…" => true,
        (Value::String(wanted), Value::String(text)) => match wanted.split_once('…') {
            Some((start, end)) => text.starts_with(start) && text.ends_with(end),
            None => wanted == text,
        },
        (Value::Object(expected), Value::Object(message)) => expected
            .iter()
            .all(|(name, value)| message.get(name).is_some_and(|found| is_like(value, found))),
        (Value::Array(expected), Value::Array(message)) => {
            expected.len() <= message.len()
                && expected
                    .iter()
                    .zip(message)
                    .all(|(one, other)| is_like(one, other))
        }
        _ => expected == message,
    }
}
