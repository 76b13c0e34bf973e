//! Decoder of received messages, in one pass.
//!
//! Cheaper than the envelope of the protocol crate, which protects a server against hostile input
//! and scans a message twice: here the client's cost must not hide the server's.

use std::borrow::Cow;
use std::ops::Range;

use anyhow::{Context as _, bail};
use serde::Deserialize;
use serde_json::value::RawValue;

/// One received message with the fields that scenarios use.
#[derive(Debug)]
pub(crate) enum BenchMessage<'a> {
    /// Response to a request.
    Response {
        /// Id of the request.
        id: i64,
        /// The result as text.
        result: &'a str,
    },
    /// Response with long base64 data.
    Data {
        /// Id of the request.
        id: i64,
        /// The data as base64.
        text: &'a [u8],
    },
    /// `process/output`.
    Output {
        /// Number of the process.
        process: u64,
        /// Sequence number of the event.
        seq: u64,
        /// The bytes as base64.
        chunk: Cow<'a, [u8]>,
    },
    /// `process/exited`.
    Exited {
        /// Number of the process.
        process: u64,
        /// Exit code.
        code: i32,
    },
    /// `process/closed`.
    Closed {
        /// Number of the process.
        process: u64,
        /// Sequence number of the event, which equals the number of all events.
        seq: u64,
    },
    /// `http/request/bodyDelta`.
    Delta {
        /// The bytes as base64.
        chunk: Cow<'a, [u8]>,
        /// Whether this is the last piece of the HTTP body.
        done: bool,
    },
    /// Any other message.
    Other,
}

/// The texts are not optional: inside an `Option`, serde would copy them instead of borrowing.
#[derive(Deserialize)]
struct Envelope<'a> {
    id: Option<i64>,
    #[serde(borrow, default)]
    method: Cow<'a, str>,
    #[serde(borrow)]
    params: Option<NotificationParams<'a>>,
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

/// Params of all notifications.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct NotificationParams<'a> {
    #[serde(borrow, default)]
    process_id: Cow<'a, str>,
    seq: Option<u64>,
    #[serde(borrow, default)]
    chunk: Cow<'a, str>,
    #[serde(borrow, default)]
    delta_base64: Cow<'a, str>,
    #[serde(default)]
    done: bool,
    #[serde(borrow)]
    error: Option<Cow<'a, str>>,
    exit_code: Option<i32>,
}

/// Id on the wire of the process with this number.
pub(crate) fn process_id(number: u64) -> String {
    format!("bench-{number}")
}

impl<'a> BenchMessage<'a> {
    /// Decodes one message; an error response becomes an error.
    pub(crate) fn decode(text: &'a [u8]) -> anyhow::Result<Self> {
        let Some(cut) = long_chunk(text) else {
            return Self::decode_whole(text);
        };
        let rest = [&text[..cut.start], &text[cut.end..]].concat();
        Ok(match BenchMessage::decode_whole(&rest)? {
            BenchMessage::Response { id, .. } => Self::Data {
                id,
                text: &text[cut],
            },
            BenchMessage::Output { process, seq, .. } => Self::Output {
                process,
                seq,
                chunk: Cow::Borrowed(&text[cut]),
            },
            BenchMessage::Delta { done, .. } => Self::Delta {
                chunk: Cow::Borrowed(&text[cut]),
                done,
            },
            _ => Self::Other,
        })
    }

    fn decode_whole(text: &'a [u8]) -> anyhow::Result<Self> {
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
                chunk: bytes(params.chunk),
            },
            "process/exited" => Self::Exited {
                process: process()?,
                code: params.exit_code.context("process/exited has no exitCode")?,
            },
            "process/closed" => Self::Closed {
                process: process()?,
                seq: seq?,
            },
            "http/request/bodyDelta" => {
                if let Some(error) = params.error {
                    bail!("the body broke off: {error}");
                }
                Self::Delta {
                    chunk: bytes(params.delta_base64),
                    done: params.done,
                }
            }
            _ => Self::Other,
        })
    }
}

fn bytes(text: Cow<'_, str>) -> Cow<'_, [u8]> {
    match text {
        Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
        Cow::Owned(text) => Cow::Owned(text.into_bytes()),
    }
}

/// Returns the range of the value of `chunk`, `dataBase64` or `deltaBase64` in a long message, if
/// it contains no escapes.
///
/// A JSON parser scans the value at a quarter of the speed of this search, which would dominate the
/// client's cost in a stream. The rest of the message is parsed normally.
fn long_chunk(text: &[u8]) -> Option<Range<usize>> {
    const KEYS: [&[u8]; 3] = [b"\"chunk\":\"", b"\"dataBase64\":\"", b"\"deltaBase64\":\""];
    /// The key is within this distance; in a message that is not much longer the search is not
    /// worthwhile.
    const HEAD: usize = 256;
    if text.len() < 4 * HEAD {
        return None;
    }
    let start = KEYS.iter().find_map(|key| {
        let mut parts = text[..HEAD].windows(key.len());
        Some(parts.position(|part| part == *key)? + key.len())
    })?;
    let (blocks, _) = text[start..].as_chunks::<64>();
    let skipped = blocks.iter().take_while(|block| is_plain(block)).count() * 64;
    let special = |byte: &u8| *byte == b'"' || *byte == b'\\';
    let end = start + skipped + text[start + skipped..].iter().position(special)?;
    (text[end] == b'"').then_some(start..end)
}

/// Whether a block contains neither quote nor backslash; branch-free, so that the compiler
/// vectorizes it.
fn is_plain(block: &[u8; 64]) -> bool {
    let special = |byte: u8| u8::from(byte == b'"') | u8::from(byte == b'\\');
    block.iter().fold(0, |seen, &byte| seen | special(byte)) == 0
}

fn excerpt(text: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(&text[..text.len().min(200)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_both_servers_are_decoded() {
        let decode = |text: &'static str| BenchMessage::decode(text.as_bytes()).unwrap();
        assert!(matches!(
            decode(r#"{"id":7,"result":{"status":"accepted"}}"#),
            BenchMessage::Response {
                id: 7,
                result: r#"{"status":"accepted"}"#
            }
        ));
        assert!(matches!(
            decode(r#"{"id":7,"result":{"a":[1]},"jsonrpc":"2.0"}"#),
            BenchMessage::Response {
                id: 7,
                result: r#"{"a":[1]}"#
            }
        ));
        assert!(matches!(
            decode(
                r#"{"method":"process/output","params":{"processId":"bench-3","seq":2,"stream":"stdout","chunk":"aGk="}}"#
            ),
            BenchMessage::Output {
                process: 3,
                seq: 2,
                chunk: Cow::Borrowed(b"aGk=")
            }
        ));
        assert!(matches!(
            decode(
                r#"{"method":"process/exited","params":{"exitCode":137,"processId":"bench-3","seq":4,"usage":{"userMs":1}}}"#
            ),
            BenchMessage::Exited {
                process: 3,
                code: 137
            }
        ));
        assert!(matches!(
            decode(r#"{"method":"process/closed","params":{"processId":"bench-3","seq":5}}"#),
            BenchMessage::Closed { process: 3, seq: 5 }
        ));
        assert!(matches!(
            decode(r#"{"method":"later/thing"}"#),
            BenchMessage::Other
        ));
    }

    #[test]
    fn long_chunk_is_found_at_any_position() {
        for len in [900, 1_024, 87_384] {
            let text = "Zm9v".repeat(len / 4);
            let first = format!(
                r#"{{"method":"process/output","params":{{"chunk":"{text}","processId":"bench-1","seq":9}}}}"#
            );
            let last = format!(
                r#"{{"params":{{"processId":"bench-1","seq":9,"chunk":"{text}"}},"method":"process/output"}}"#
            );
            let escaped = last.replacen("Zm9v", r"\u005am9v", 1);
            for message in [first, last, escaped] {
                let BenchMessage::Output {
                    process: 1,
                    seq: 9,
                    chunk,
                } = BenchMessage::decode(message.as_bytes()).unwrap()
                else {
                    panic!("{message}")
                };
                assert!(*chunk == *text.as_bytes());
            }
        }
    }

    #[test]
    fn error_responses_and_unknown_processes_are_rejected() {
        for text in [
            r#"{"error":{"code":-32603,"message":"m"},"id":1}"#,
            r#"{"method":"process/closed","params":{"processId":"x","seq":5}}"#,
            r#"{"id":1}"#,
            "[]",
        ] {
            assert!(BenchMessage::decode(text.as_bytes()).is_err(), "{text}");
        }
    }
}
