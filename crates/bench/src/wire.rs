//! Received messages, decoded in one pass over their text.
//!
//! Leaner than the envelope of the protocol crate, which guards a server against hostile input and
//! walks a message twice: here the client's cost must not hide the server's.

use std::borrow::Cow;

use anyhow::{Context as _, bail};
use serde::Deserialize;
use serde_json::value::RawValue;

/// One received message; everything the scenarios look at.
#[derive(Debug)]
pub(crate) enum Message<'a> {
    /// The answer to a request.
    Response {
        /// Which request.
        id: i64,
        /// Its result as text.
        result: &'a str,
    },
    /// `process/output`.
    Output {
        /// Which process.
        process: u64,
        /// The event's number.
        seq: u64,
        /// The bytes as base64.
        chunk: Cow<'a, str>,
    },
    /// `process/exited`.
    Exited {
        /// Which process.
        process: u64,
        /// How it ended.
        code: i32,
    },
    /// `process/closed`.
    Closed {
        /// Which process.
        process: u64,
        /// The event's number, which is the number of all events.
        seq: u64,
    },
    /// Something that no scenario asks for.
    Other,
}

/// Texts are no options here: inside one, serde would copy them instead of borrowing.
#[derive(Deserialize)]
struct Envelope<'a> {
    id: Option<i64>,
    #[serde(borrow, default)]
    method: Cow<'a, str>,
    #[serde(borrow)]
    params: Option<Params<'a>>,
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

/// The params of all notifications in one.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Params<'a> {
    #[serde(borrow, default)]
    process_id: Cow<'a, str>,
    seq: Option<u64>,
    #[serde(borrow, default)]
    chunk: Cow<'a, str>,
    exit_code: Option<i32>,
}

/// The id on the wire of the process with this number.
pub(crate) fn process_id(number: u64) -> String {
    format!("bench-{number}")
}

impl<'a> Message<'a> {
    /// Decodes one message; an error answer is an error.
    pub(crate) fn decode(text: &'a [u8]) -> anyhow::Result<Self> {
        let envelope: Envelope<'a> = serde_json::from_slice(text)
            .with_context(|| format!("malformed message: {}", excerpt(text)))?;
        if let Some(error) = envelope.error {
            bail!("the server answered {}", error.get());
        }
        if envelope.method.is_empty() {
            let (Some(id), Some(result)) = (envelope.id, envelope.result) else {
                bail!(
                    "neither request, notification nor response: {}",
                    excerpt(text)
                );
            };
            return Ok(Self::Response {
                id,
                result: result.get(),
            });
        };
        let Some(params) = envelope.params else {
            return Ok(Self::Other);
        };
        let process = || {
            let id = &*params.process_id;
            let number = id
                .strip_prefix("bench-")
                .and_then(|number| number.parse().ok());
            number.with_context(|| format!("`{id}` was never started"))
        };
        let seq = params.seq.context("a process event has no seq");
        Ok(match &*envelope.method {
            "process/output" => Self::Output {
                process: process()?,
                seq: seq?,
                chunk: params.chunk,
            },
            "process/exited" => Self::Exited {
                process: process()?,
                code: params.exit_code.context("process/exited has no exitCode")?,
            },
            "process/closed" => Self::Closed {
                process: process()?,
                seq: seq?,
            },
            _ => Self::Other,
        })
    }
}

fn excerpt(text: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(&text[..text.len().min(200)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_what_both_servers_send() {
        let decode = |text: &'static str| Message::decode(text.as_bytes()).unwrap();
        assert!(matches!(
            decode(r#"{"id":7,"result":{"status":"accepted"}}"#),
            Message::Response {
                id: 7,
                result: r#"{"status":"accepted"}"#
            }
        ));
        assert!(matches!(
            decode(
                r#"{"method":"process/output","params":{"processId":"bench-3","seq":2,"stream":"stdout","chunk":"aGk="}}"#
            ),
            Message::Output {
                process: 3,
                seq: 2,
                chunk: Cow::Borrowed("aGk=")
            }
        ));
        assert!(matches!(
            decode(
                r#"{"method":"process/exited","params":{"exitCode":137,"processId":"bench-3","seq":4,"usage":{"userMs":1}}}"#
            ),
            Message::Exited {
                process: 3,
                code: 137
            }
        ));
        assert!(matches!(
            decode(r#"{"method":"process/closed","params":{"processId":"bench-3","seq":5}}"#),
            Message::Closed { process: 3, seq: 5 }
        ));
        assert!(matches!(
            decode(r#"{"method":"later/thing"}"#),
            Message::Other
        ));
    }

    #[test]
    fn refuses_errors_and_strangers() {
        for text in [
            r#"{"error":{"code":-32603,"message":"m"},"id":1}"#,
            r#"{"method":"process/closed","params":{"processId":"x","seq":5}}"#,
            r#"{"id":1}"#,
            "[]",
        ] {
            assert!(Message::decode(text.as_bytes()).is_err(), "{text}");
        }
    }
}
