//! Reset reasons: why a stream ended.

use std::fmt;

use crate::limits::MAX_REASON_BYTES;

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+) => {
        /// Why a stream ended.
        ///
        /// Compatible peers send one reason for every failure, and accept any text.
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum EndReason {
            $($(#[doc = $doc])+ $name,)+
            /// Another text that a peer sent, shortened.
            Other(Box<str>),
        }

        impl EndReason {
            /// Returns the text on the wire.
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$name => $text,)+
                    Self::Other(text) => text,
                }
            }

            /// Parses the text of a reset.
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
    /// The peer or this end closed the stream.
    Closed = "closed",
    /// The only failure reason of compatible peers.
    ProtocolError = "noise_relay_protocol_error",
    /// A frame for a stream that does not exist or has ended.
    UnknownStream = "unknown_stream",
    /// A frame that is not valid in the stream's state.
    UnexpectedFrame = "unexpected_frame",
    /// A frame that cannot be decoded.
    InvalidFrame = "invalid_frame",
    /// A handshake that cannot be decrypted: wrong keys, wrong ids, or not a handshake.
    HandshakeFailed = "handshake_failed",
    /// A handshake that was received before.
    HandshakeReplayed = "handshake_replayed",
    /// The other side's handshake message did not arrive in time.
    HandshakeTimeout = "handshake_timeout",
    /// A handshake for a stream id that is in use.
    DuplicateStream = "duplicate_stream",
    /// Too many recent handshakes failed.
    HandshakeCooldown = "handshake_cooldown",
    /// The authorization is empty, too long or not UTF-8.
    AuthorizationInvalid = "authorization_invalid",
    /// The registry refused the harness.
    AuthorizationRefused = "authorization_refused",
    /// The harness was admitted, and its authorization was revoked later.
    AuthorizationRevoked = "authorization_revoked",
    /// The registry rejected the credentials of the executor itself. Sent as the payload of the
    /// executor's handshake message, not in a reset.
    ExecutorRejected = "executor_credentials_rejected",
    /// The registry could not be reached.
    ValidationUnavailable = "validation_unavailable",
    /// The registry did not respond in time.
    ValidationTimeout = "validation_timeout",
    /// The executor has reached its limit of streams.
    TooManyStreams = "too_many_streams",
    /// The executor has reached its limit of handshakes in validation.
    TooManyValidations = "too_many_validations",
    /// A record was changed, or encrypted with another key.
    DecryptFailed = "decrypt_failed",
    /// A record is longer than allowed.
    RecordTooLong = "record_too_long",
    /// A record is too far ahead of a missing one.
    ReorderWindow = "reorder_window",
    /// A missing record did not arrive in time.
    GapTimeout = "gap_timeout",
    /// A message is empty or longer than allowed.
    MessageLength = "message_length",
    /// The peer sent more than the reader consumed.
    ReceiveOverflow = "receive_overflow",
    /// No sequence number is left for another record.
    SequenceExhausted = "sequence_exhausted",
    /// The peer sent no frame for too long.
    PeerTimeout = "peer_timeout",
    /// The socket was lost, and the peer cannot resume on another.
    SocketLost = "socket_lost",
    /// The rendezvous server reports that the harness's socket was lost; the harness may return.
    HarnessDetached = "harness_detached",
    /// The rendezvous server reports that the executor's socket was lost; the executor may return.
    ExecutorDetached = "executor_detached",
    /// The peer's process is ending.
    ShuttingDown = "shutting_down",
}

impl EndReason {
    /// Whether only a socket was lost, so that a reliable peer may return.
    pub fn is_detachment(&self) -> bool {
        matches!(self, Self::HarnessDetached | Self::ExecutorDetached)
    }

    /// Whether a new stream may succeed without any intervention.
    pub fn is_retryable(&self) -> bool {
        !matches!(
            self,
            Self::Closed
                | Self::AuthorizationInvalid
                | Self::AuthorizationRefused
                | Self::AuthorizationRevoked
                | Self::ExecutorRejected
        )
    }
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_round_trips_and_is_unique() {
        let mut texts = std::collections::BTreeSet::new();
        for reason in EndReason::all() {
            assert_eq!(EndReason::parse(reason.as_str()), reason);
            assert!(texts.insert(reason.as_str().to_owned()), "{reason}");
        }
        assert!(texts.len() > 20);
    }

    #[test]
    fn unknown_reason_is_kept_and_shortened() {
        assert_eq!(EndReason::parse("whatever").as_str(), "whatever");
        assert_eq!(
            EndReason::parse(&"ä".repeat(1000)).as_str(),
            "ä".repeat(128)
        );
    }
}
