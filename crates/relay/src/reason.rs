//! Why a stream ends: the text of a reset, and what each means to whoever receives it.

use std::fmt;

use crate::limits::MAX_REASON_BYTES;

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+) => {
        /// Why a stream ended.
        ///
        /// Compatible peers know one reason for everything, and take any text.
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Reason {
            $($(#[doc = $doc])+ $name,)+
            /// What a peer said that is none of the above, shortened.
            Other(Box<str>),
        }

        impl Reason {
            /// The text on the wire.
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$name => $text,)+
                    Self::Other(text) => text,
                }
            }

            /// Reads the text of a reset.
            pub fn parse(text: &str) -> Self {
                match text {
                    $($text => Self::$name,)+
                    other => {
                        let mut end = other.len().min(MAX_REASON_BYTES);
                        while !other.is_char_boundary(end) {
                            end -= 1;
                        }
                        Self::Other(other[..end].into())
                    }
                }
            }

            #[cfg(test)]
            pub(crate) fn all() -> Vec<Self> {
                vec![$(Self::$name),+]
            }
        }
    };
}

reasons! {
    /// The peer, or we, had nothing more to say.
    Closed = "closed",
    /// The one reason of compatible peers.
    ProtocolError = "noise_relay_protocol_error",
    /// A frame for a stream that is not, or no longer, there.
    UnknownStream = "unknown_stream",
    /// A frame that makes no sense where it came.
    UnexpectedFrame = "unexpected_frame",
    /// A frame that cannot be decoded.
    InvalidFrame = "invalid_frame",
    /// A handshake that does not decrypt: other keys, other ids, or not a handshake.
    HandshakeFailed = "handshake_failed",
    /// A handshake that was seen before.
    HandshakeReplayed = "handshake_replayed",
    /// The other side of the handshake did not come.
    HandshakeTimeout = "handshake_timeout",
    /// A handshake for a stream that is in use.
    DuplicateStream = "duplicate_stream",
    /// Too many handshakes failed lately.
    HandshakeCooldown = "handshake_cooldown",
    /// The authorization is empty, too long or not text.
    AuthorizationInvalid = "authorization_invalid",
    /// The registry does not know the harness.
    AuthorizationRefused = "authorization_refused",
    /// The harness was admitted once and is not any more.
    AuthorizationRevoked = "authorization_revoked",
    /// The registry could not be asked.
    ValidationUnavailable = "validation_unavailable",
    /// The registry did not answer in time.
    ValidationTimeout = "validation_timeout",
    /// The executor has as many streams as it may.
    TooManyStreams = "too_many_streams",
    /// The executor has as many handshakes to validate as it may.
    TooManyValidations = "too_many_validations",
    /// A record was changed, or sealed with another key.
    DecryptFailed = "decrypt_failed",
    /// A record is longer than allowed.
    RecordTooLong = "record_too_long",
    /// A record came too far ahead of one that is missing.
    ReorderWindow = "reorder_window",
    /// A missing record did not come.
    GapTimeout = "gap_timeout",
    /// A message is empty or longer than allowed.
    MessageLength = "message_length",
    /// More was sent than is being read.
    ReceiveOverflow = "receive_overflow",
    /// The numbers for records are used up.
    SequenceExhausted = "sequence_exhausted",
    /// Nothing was heard of the peer for too long.
    PeerTimeout = "peer_timeout",
    /// The socket is gone, and the peer cannot go on with another.
    SocketLost = "socket_lost",
    /// The meeting point says that the harness's socket is gone; it may come back.
    HarnessDetached = "harness_detached",
    /// The meeting point says that the executor's socket is gone; it may come back.
    ExecutorDetached = "executor_detached",
    /// The peer's process is ending.
    ShuttingDown = "shutting_down",
}

impl Reason {
    /// Whether only a socket is gone, so that a peer that can go on with another may be waited for.
    pub fn is_detachment(&self) -> bool {
        matches!(self, Self::HarnessDetached | Self::ExecutorDetached)
    }

    /// Whether another attempt with a new stream may fare better without anyone's help.
    pub fn is_retryable(&self) -> bool {
        !matches!(
            self,
            Self::Closed
                | Self::AuthorizationInvalid
                | Self::AuthorizationRefused
                | Self::AuthorizationRevoked
        )
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_survives_the_wire_and_none_is_like_another() {
        let mut texts = std::collections::BTreeSet::new();
        for reason in Reason::all() {
            assert_eq!(Reason::parse(reason.as_str()), reason);
            assert!(texts.insert(reason.as_str().to_owned()), "{reason}");
        }
        assert!(texts.len() > 20);
    }

    #[test]
    fn a_strange_reason_is_kept_but_shortened() {
        assert_eq!(Reason::parse("whatever").as_str(), "whatever");
        assert_eq!(Reason::parse(&"ä".repeat(1000)).as_str(), "ä".repeat(128));
    }
}
