//! What nodes write to each other and to the bucket: names, subjects, bodies.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use crate::tenants::share::Rates;

/// One token of a subject or a key, made of any text: letters, digits, `-` and `_` stay, the rest is
/// `=` and two hexadecimal digits.
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

/// The text that was escaped.
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

/// Whether a node may be called so: it is a part of subjects.
pub fn is_node_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=64).contains(&name.len()) && name.bytes().all(allowed)
}

/// The keys of the bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Key {
    Registration(String),
    Revocation(String, String),
    Claim(String),
    Node(String),
    Secret,
}

impl Key {
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

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Registration(id) => write!(f, "registration.{}", escape(id)),
            Self::Revocation(place, who) => {
                write!(f, "revocation.{}.{}", escape(place), escape(who))
            }
            Self::Claim(id) => write!(f, "claim.{}", escape(id)),
            Self::Node(name) => write!(f, "node.{}", escape(name)),
            Self::Secret => f.write_str("secret"),
        }
    }
}

/// A node's lease: that it is there, and what others want to know of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Lease {
    /// How often it was renewed.
    pub(crate) beat: u64,
    /// When, in milliseconds since 1970 by the node's own clock.
    pub(crate) at: i64,
    pub(crate) node: crate::router::Node,
    /// Sockets of harnesses that came to it, by tenant.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) streams: BTreeMap<String, u64>,
    /// What tenants with quotas of that use there, by tenant.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) rates: BTreeMap<String, Rates>,
}

/// Asks the node of an executor to take in a harness.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Open {
    pub(crate) channel: Arc<str>,
    /// The node that the harness came to.
    pub(crate) from: Arc<str>,
    pub(crate) environment: Arc<str>,
    pub(crate) registration: Arc<str>,
    pub(crate) token: Arc<str>,
    pub(crate) key: String,
    /// The claim by which it was found.
    pub(crate) epoch: u64,
}

/// The answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Opened {
    Yes,
    Offline,
    TooManySockets(usize),
    /// The claim is not ours, or not any more.
    Moved,
}

/// What the two ends of a channel tell each other besides frames.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Control {
    /// Bytes that may be sent in all.
    Grant(u64),
    /// Nothing more will come, and nothing more is wanted.
    End,
    /// The harness must go, for this reason.
    TurnOut(String),
    /// Where we are; the same is expected from the other side if it does not `answer`.
    Sync {
        sent: u64,
        granted: u64,
        from: Arc<str>,
        answer: bool,
    },
}

/// What a node may be asked, or all of them.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Ask {
    /// What is attached there.
    Places,
    /// The streams of its executors.
    Streams(Option<String>),
    /// To turn somebody out.
    TurnOut { whom: Whom, reason: String },
    /// To send everybody elsewhere and to end.
    Drain,
}

/// As [`crate::router::Whom`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Whom {
    Environment(String),
    Others(String, String),
    Harness(Option<String>, String),
}

impl From<&crate::router::Whom> for Whom {
    fn from(whom: &crate::router::Whom) -> Self {
        use crate::router::Whom as W;
        match whom.clone() {
            W::Environment(environment) => Self::Environment(environment),
            W::Others {
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

impl From<Whom> for crate::router::Whom {
    fn from(whom: Whom) -> Self {
        match whom {
            Whom::Environment(environment) => Self::Environment(environment),
            Whom::Others(environment, registration) => Self::Others {
                environment,
                registration,
            },
            Whom::Harness(environment, harness) => Self::Harness {
                environment,
                harness,
            },
        }
    }
}

/// A part of the answer to an [`Ask`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer<T> {
    pub(crate) items: Vec<T>,
    /// Another part follows.
    pub(crate) more: bool,
}

/// Items of an answer in one message, which must stay well below what NATS takes.
pub(crate) const ITEMS_AT_ONCE: usize = 1000;

/// Bytes of a frame in one message.
///
/// A message that does not end within one read of nats-server, which are of 64 KiB, is copied there
/// to memory that is new each time. Whole frames would all be such messages, and cost it twice the
/// time for each byte; of these few are.
const PIECE_BYTES: usize = 8 << 10;

/// Before each piece: its number, and whether it is the last of its frame.
const PIECE_HEAD: usize = 8;

/// How many messages a frame of so many bytes is.
pub(crate) fn pieces(bytes: usize) -> u64 {
    bytes.div_ceil(PIECE_BYTES).max(1) as u64
}

/// The messages that a frame is, numbered from `number` on.
pub(crate) fn cut(number: u64, frame: &[u8]) -> impl Iterator<Item = Bytes> {
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

/// A part of a frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) number: u64,
    pub(crate) is_last: bool,
    pub(crate) bytes: Bytes,
}

impl Piece {
    pub(crate) fn parse(mut message: Bytes) -> Option<Self> {
        let head = message.try_get_u64().ok()?;
        Some(Self {
            number: head >> 1,
            is_last: head & 1 == 1,
            bytes: message,
        })
    }
}

/// What a message between nodes is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Topic<'a> {
    Open,
    Ask,
    /// A part of a frame for the executor.
    Up(&'a str),
    /// A part of a frame for the harness.
    Down(&'a str),
    /// A word to the end at the executor.
    ToHome(&'a str),
    /// A word to the end at the harness.
    ToEntry(&'a str),
}

impl<'a> Topic<'a> {
    /// Of what comes after the name of the node in a subject.
    pub(crate) fn parse(rest: &'a str) -> Option<Self> {
        let mut tokens = rest.split('.');
        let first = tokens.next()?;
        let topic = match (first, tokens.next(), tokens.next()) {
            ("open", None, None) => Self::Open,
            ("ask", None, None) => Self::Ask,
            (_environment, Some(channel), Some("up")) => Self::Up(channel),
            (_environment, Some(channel), Some("down")) => Self::Down(channel),
            (_environment, Some(channel), Some("home")) => Self::ToHome(channel),
            (_environment, Some(channel), Some("entry")) => Self::ToEntry(channel),
            _ => return None,
        };
        tokens.next().is_none().then_some(topic)
    }
}

/// The node that a channel's harness came to.
pub(crate) fn entry_of(channel: &str) -> Option<&str> {
    let (node, _) = channel.split_once(':')?;
    is_node_name(node).then_some(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_text_is_a_token_and_back() {
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
    fn keys_are_read_as_they_are_written() {
        for key in [
            Key::Registration("a.b".to_owned()),
            Key::Revocation("*".to_owned(), "token:x".to_owned()),
            Key::Claim("e".to_owned()),
            Key::Node("n-1".to_owned()),
            Key::Secret,
        ] {
            assert_eq!(Key::parse(&key.to_string()), Some(key));
        }
        for other in ["", "x.y", "claim", "claim.a.b", "secret.x"] {
            assert_eq!(Key::parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_frame_is_cut_and_put_together() {
        for length in [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 100_000] {
            let frame: Vec<u8> = (0..length).map(|at| at as u8).collect();
            let cut: Vec<_> = cut(7, &frame).map(Piece::parse).collect();
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
        assert_eq!(Piece::parse(Bytes::from_static(b"1234567")), None);
    }

    #[test]
    fn subjects_say_what_they_are_about() {
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
