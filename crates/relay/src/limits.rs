//! Limits of the relay, each with its reason.

use std::time::Duration;

/// 256 KiB: the largest websocket message that compatible peers accept.
pub const MAX_FRAME_BYTES: usize = 256 << 10;

/// The longest stream id. Real ones are UUIDs; the limit bounds the memory for ids of unknown
/// peers.
pub const MAX_STREAM_ID_BYTES: usize = 256;

/// Bytes of a reset's reason that are kept.
pub const MAX_REASON_BYTES: usize = 256;

/// The longest authorization of a harness.
pub const MAX_AUTHORIZATION_BYTES: usize = 4096;

/// The longest handshake message: the Noise limit.
pub const MAX_HANDSHAKE_BYTES: usize = 65_535;

/// The largest plaintext of one record; senders split here, receivers reject more.
pub const MAX_RECORD_BYTES: usize = 61_440;

/// Bytes that encryption adds to a record: the AES-GCM tag.
pub const TAG_BYTES: usize = 16;

/// Maximum length of a message: 64 MiB.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// How far ahead of the expected record another may arrive, and the most records in flight.
pub const WINDOW_RECORDS: u32 = 64;

/// Bytes held behind a missing record in compatible mode, where the peer will not repeat it.
pub const COMPATIBLE_HELD_BYTES: usize = 1 << 20;

/// Bytes held behind a missing record in reliable mode: a whole window.
pub const RELIABLE_HELD_BYTES: usize = WINDOW_RECORDS as usize * (MAX_RECORD_BYTES + TAG_BYTES);

/// Cost of a message in addition to its bytes, so that empty messages count, too.
pub const MESSAGE_OVERHEAD_BYTES: usize = 64;

/// Resets that wait for a socket; further ones are dropped, and the peer's next frame provokes
/// another.
pub const MAX_QUEUED_RESETS: usize = 256;

/// Ended streams whose reason is kept.
pub const MAX_TOMBSTONES: usize = 256;

/// Handshakes whose hash is kept, so that a replayed one is refused without cryptography.
pub const MAX_REMEMBERED_HANDSHAKES: usize = 1024;

/// Limits of an endpoint; the defaults are those of compatible peers where they have any.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EndpointLimits {
    /// Whether to acknowledge and to grant credit. Without it every stream is compatible.
    pub acknowledge: bool,
    /// Open streams of one executor.
    pub streams: usize,
    /// Handshakes of one executor that wait for admission.
    pub pending: usize,
    /// Time limit for admission.
    pub admission: Duration,
    /// Time limit for the executor's response to the handshake.
    pub handshake: Duration,
    /// Time limit for the first record of a harness, which alone proves that the handshake was not
    /// a replay.
    pub confirmation: Duration,
    /// Failed handshakes after which further ones are refused before decryption; the count
    /// decreases by [`EndpointLimits::failures_per_second`].
    pub failures: u32,
    /// Failed handshakes that are forgotten per second.
    pub failures_per_second: u32,
    /// Queued bytes above which a stream accepts no further message.
    pub send_bytes: usize,
    /// Unread bytes above which a reliable peer gets no more credit.
    pub receive_bytes: usize,
    /// Unread bytes of one stream above which it ends; for compatible peers, which have no flow
    /// control.
    pub unread_bytes: usize,
    /// Received bytes of all streams above which the stream that adds to them ends.
    pub total_received_bytes: usize,
    /// Interval of heartbeats of an idle harness.
    pub heartbeat: Duration,
    /// How long a stream is kept after the last frame of its peer.
    pub linger: Duration,
    /// How long records wait for a missing one in compatible mode before the stream ends.
    pub gap: Duration,
    /// How long an acknowledgement waits for a frame to carry it.
    pub ack_delay: Duration,
}

impl Default for EndpointLimits {
    fn default() -> Self {
        Self {
            acknowledge: true,
            streams: 128,
            pending: 32,
            admission: Duration::from_secs(10),
            handshake: Duration::from_secs(10),
            confirmation: Duration::from_secs(30),
            failures: 64,
            failures_per_second: 8,
            send_bytes: 1 << 20,
            receive_bytes: 4 << 20,
            unread_bytes: MAX_MESSAGE_BYTES + (8 << 20),
            total_received_bytes: 256 << 20,
            heartbeat: Duration::from_secs(10),
            linger: Duration::from_secs(60),
            gap: Duration::from_secs(30),
            ack_delay: Duration::from_millis(20),
        }
    }
}
