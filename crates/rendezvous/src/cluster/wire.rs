//! Names, subjects and message bodies that nodes write to each other and to the bucket.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use crate::tenants::share::Rates;

/// Escapes any text to one token of a subject or key: letters, digits, `-` and `_` stay, every
/// other byte becomes `=` and two hexadecimal digits.
pub(crate) fn escape(text: &str) -> String {
    use std::fmt::Write as _;
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_' {
            escaped.push(char::from(byte));
        } else {
            let _ = write!(escaped, "={byte:02X}");
        }
    }
    escaped
}

/// Reverses [`escape`].
pub(crate) fn unescape(token: &str) -> Option<String> {
    let mut text = Vec::with_capacity(token.len());
    let mut rest = token.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'=' {
            let digits = [rest.next()?, rest.next()?];
            let digits = std::str::from_utf8(&digits).ok()?;
            text.push(u8::from_str_radix(digits, 16).ok()?);
        } else {
            text.push(byte);
        }
    }
    String::from_utf8(text).ok()
}

/// Whether a node may have this name. It becomes a part of NATS subjects.
pub fn is_node_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=64).contains(&name.len()) && name.bytes().all(allowed)
}

/// Key of an entry in the bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BucketKey {
    Registration(String),
    Revocation(String, String),
    Claim(String),
    Node(String),
    Secret,
}

impl BucketKey {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut tokens = text.split('.');
        let kind = tokens.next()?;
        let mut next = || tokens.next().and_then(unescape);
        let key = match kind {
            "registration" => Self::Registration(next()?),
            "revocation" => Self::Revocation(next()?, next()?),
            "claim" => Self::Claim(next()?),
            "node" => Self::Node(next()?),
            "secret" => Self::Secret,
            _ => return None,
        };
        tokens.next().is_none().then_some(key)
    }
}

impl std::fmt::Display for BucketKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Registration(id) => write!(f, "registration.{}", escape(id)),
            Self::Revocation(environment, harness) => {
                write!(f, "revocation.{}.{}", escape(environment), escape(harness))
            }
            Self::Claim(id) => write!(f, "claim.{}", escape(id)),
            Self::Node(name) => write!(f, "node.{}", escape(name)),
            Self::Secret => f.write_str("secret"),
        }
    }
}

/// Lease of a node, with the figures that other nodes need.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Lease {
    /// Number of renewals so far.
    pub(crate) beat: u64,
    /// Time of the renewal, in milliseconds since 1970 by the node's own clock.
    pub(crate) at: i64,
    pub(crate) node: crate::router::NodeStatus,
    /// Number of harness sockets connected to the node, by tenant.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) streams: BTreeMap<String, u64>,
    /// Usage of tenants with rate quotas on the node, by tenant.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) rates: BTreeMap<String, Rates>,
}

/// Request to the node of an executor to attach a harness.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct OpenRequest {
    pub(crate) channel: Arc<str>,
    /// The node to which the harness is connected.
    pub(crate) from: Arc<str>,
    pub(crate) environment: Arc<str>,
    pub(crate) registration: Arc<str>,
    pub(crate) token: Arc<str>,
    pub(crate) key: String,
    /// Revision of the claim that led to this node.
    pub(crate) epoch: u64,
}

/// Response to [`OpenRequest`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OpenResponse {
    Yes,
    Offline,
    TooManySockets(usize),
    /// The node does not own the claim, or not any more.
    Moved,
}

/// Control message between the two ends of a channel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ChannelControl {
    /// Total bytes that the receiver grants.
    Grant(u64),
    /// The sender has ended the channel.
    End,
    /// Disconnect the harness, with this reason.
    #[serde(rename = "turn_out")]
    Disconnect(String),
    /// State of one end. The other end replies with its own unless this is an `answer`.
    Sync {
        sent: u64,
        granted: u64,
        from: Arc<str>,
        answer: bool,
    },
}

/// Request to one node or to all nodes.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum NodeRequest {
    /// List the attached environments.
    #[serde(rename = "places")]
    Environments,
    /// List the streams of the executors connected to the node.
    Streams(Option<String>),
    /// Disconnect sockets and streams.
    #[serde(rename = "turn_out")]
    Disconnect {
        #[serde(rename = "whom")]
        target: WireTarget,
        reason: String,
    },
    /// Drain the node: move its connections to other nodes and stop.
    Drain,
}

/// Serialized form of [`crate::router::DisconnectTarget`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WireTarget {
    Environment(String),
    Others(String, String),
    Harness(Option<String>, String),
}

impl From<&crate::router::DisconnectTarget> for WireTarget {
    fn from(target: &crate::router::DisconnectTarget) -> Self {
        use crate::router::DisconnectTarget as W;
        match target.clone() {
            W::Environment(environment) => Self::Environment(environment),
            W::ExecutorExcept {
                environment,
                registration,
            } => Self::Others(environment, registration),
            W::Harness {
                environment,
                harness,
            } => Self::Harness(environment, harness),
        }
    }
}

impl From<WireTarget> for crate::router::DisconnectTarget {
    fn from(target: WireTarget) -> Self {
        match target {
            WireTarget::Environment(environment) => Self::Environment(environment),
            WireTarget::Others(environment, registration) => Self::ExecutorExcept {
                environment,
                registration,
            },
            WireTarget::Harness(environment, harness) => Self::Harness {
                environment,
                harness,
            },
        }
    }
}

/// One part of the response to a [`NodeRequest`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct NodeResponse<T> {
    pub(crate) items: Vec<T>,
    /// Whether another part follows.
    pub(crate) more: bool,
}

/// Maximum items in one message of a response, which must stay well below the message limit of
/// NATS.
pub(crate) const MAX_ITEMS_PER_MESSAGE: usize = 1000;

/// Maximum bytes of a frame in one message.
///
/// nats-server reads 64 KiB at a time. A message that crosses the end of a read is copied to newly
/// allocated memory. Whole frames would nearly all be copied so, at twice the cost for each byte;
/// of small pieces only a few are.
const PIECE_BYTES: usize = 8 << 10;

/// Header of each piece: its number, and whether it is the last piece of its frame.
const PIECE_HEAD: usize = 8;

/// Number of messages for a frame of this size.
pub(crate) fn pieces(bytes: usize) -> u64 {
    bytes.div_ceil(PIECE_BYTES).max(1) as u64
}

/// Splits a frame into messages, numbered from `number` on.
pub(crate) fn split_frame(number: u64, frame: &[u8]) -> impl Iterator<Item = Bytes> {
    let count = pieces(frame.len());
    (0..count).map(move |index| {
        let start = usize::try_from(index).unwrap_or(usize::MAX) * PIECE_BYTES;
        let part = &frame[start..frame.len().min(start + PIECE_BYTES)];
        let mut piece = BytesMut::with_capacity(PIECE_HEAD + part.len());
        piece.put_u64((number + index) << 1 | u64::from(index + 1 == count));
        piece.put_slice(part);
        piece.freeze()
    })
}

/// A piece of a frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FramePiece {
    pub(crate) number: u64,
    pub(crate) is_last: bool,
    pub(crate) bytes: Bytes,
}

impl FramePiece {
    pub(crate) fn parse(mut message: Bytes) -> Option<Self> {
        let head = message.try_get_u64().ok()?;
        Some(Self {
            number: head >> 1,
            is_last: head & 1 == 1,
            bytes: message,
        })
    }
}

/// Topic of a message between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Topic<'a> {
    Open,
    Request,
    /// A piece of a frame for the executor.
    Up(&'a str),
    /// A piece of a frame for the harness.
    Down(&'a str),
    /// A control message to the executor's side.
    ToHome(&'a str),
    /// A control message to the harness's side.
    ToEntry(&'a str),
}

impl<'a> Topic<'a> {
    /// Parses the part of a subject that follows the name of the node.
    pub(crate) fn parse(rest: &'a str) -> Option<Self> {
        let mut tokens = rest.split('.');
        let first = tokens.next()?;
        let topic = match (first, tokens.next(), tokens.next()) {
            ("open", None, None) => Self::Open,
            ("ask", None, None) => Self::Request,
            (_environment, Some(channel), Some("up")) => Self::Up(channel),
            (_environment, Some(channel), Some("down")) => Self::Down(channel),
            (_environment, Some(channel), Some("home")) => Self::ToHome(channel),
            (_environment, Some(channel), Some("entry")) => Self::ToEntry(channel),
            _ => return None,
        };
        tokens.next().is_none().then_some(topic)
    }
}

/// The node to which the harness of a channel is connected.
pub(crate) fn entry_of(channel: &str) -> Option<&str> {
    let (node, _) = channel.split_once(':')?;
    is_node_name(node).then_some(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unescape_restores_any_escaped_text() {
        for text in ["build-7", "a.b~c_d", "token:x", "*", "ü ="] {
            let token = escape(text);
            assert!(
                !token.contains(['.', '*', '>', ' ', '~', ':']),
                "{text}: {token}"
            );
            assert_eq!(unescape(&token).as_deref(), Some(text));
        }
        for bad in ["=", "=1", "=ZZ", "=FF"] {
            assert_eq!(unescape(bad), None, "{bad}");
        }
    }

    #[test]
    fn key_parse_reverses_key_display() {
        for key in [
            BucketKey::Registration("a.b".to_owned()),
            BucketKey::Revocation("*".to_owned(), "token:x".to_owned()),
            BucketKey::Claim("e".to_owned()),
            BucketKey::Node("n-1".to_owned()),
            BucketKey::Secret,
        ] {
            assert_eq!(BucketKey::parse(&key.to_string()), Some(key));
        }
        for other in ["", "x.y", "claim", "claim.a.b", "secret.x"] {
            assert_eq!(BucketKey::parse(other), None, "{other}");
        }
    }

    #[test]
    fn split_frame_yields_numbered_pieces_that_rebuild_the_frame() {
        for length in [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 100_000] {
            let frame: Vec<u8> = (0..length).map(|at| at as u8).collect();
            let cut: Vec<_> = split_frame(7, &frame).map(FramePiece::parse).collect();
            assert_eq!(cut.len() as u64, pieces(length));
            let mut whole = Vec::new();
            for (index, piece) in cut.iter().enumerate() {
                let piece = piece.as_ref().unwrap();
                assert_eq!(piece.number, 7 + index as u64);
                assert_eq!(piece.is_last, index + 1 == cut.len());
                whole.extend_from_slice(&piece.bytes);
            }
            assert_eq!(whole, frame);
        }
        assert_eq!(FramePiece::parse(Bytes::from_static(b"1234567")), None);
    }

    #[test]
    fn topic_parse_accepts_valid_subjects_only() {
        assert_eq!(Topic::parse("open"), Some(Topic::Open));
        assert_eq!(Topic::parse("env.n:1.up"), Some(Topic::Up("n:1")));
        assert_eq!(Topic::parse("env.n:1.entry"), Some(Topic::ToEntry("n:1")));
        for other in ["", "env.n:1", "env.n:1.x", "env.n:1.up.x", "open.x"] {
            assert_eq!(Topic::parse(other), None, "{other}");
        }
        assert_eq!(entry_of("node-1:17"), Some("node-1"));
        assert_eq!(entry_of("17"), None);
    }
}
