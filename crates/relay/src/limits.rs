//! Named bounds of the relay, with where each number comes from.

use std::time::Duration;

/// Bytes of one frame: what compatible peers accept as one websocket message.
pub const MAX_FRAME_BYTES: usize = 256 << 10;

/// Bytes of a stream id. Real ones are UUIDs; the bound keeps what we remember of strangers small.
pub const MAX_STREAM_ID_BYTES: usize = 256;

/// Bytes of a reset's reason that are kept.
pub const MAX_REASON_BYTES: usize = 256;

/// Bytes of an authorization that a harness may present.
pub const MAX_AUTHORIZATION_BYTES: usize = 4096;

/// Bytes of a handshake message: the Noise limit.
pub const MAX_HANDSHAKE_BYTES: usize = 65_535;

/// Plaintext bytes of one record; senders cut here, receivers refuse more.
pub const MAX_RECORD_BYTES: usize = 61_440;

/// Bytes that sealing adds to a record.
pub const TAG_BYTES: usize = 16;

/// Bytes of one message.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// How far ahead of the expected record another may arrive, and how many a sender has under way.
pub const WINDOW_RECORDS: u32 = 64;

/// Bytes that wait for a missing record when the peer will not send it again.
pub const COMPATIBLE_HELD_BYTES: usize = 1 << 20;

/// Bytes that wait for a missing record when the peer will send it again: a whole window.
pub const RELIABLE_HELD_BYTES: usize = WINDOW_RECORDS as usize * (MAX_RECORD_BYTES + TAG_BYTES);

/// What a message costs besides its bytes, so that many empty ones are not free.
pub const MESSAGE_OVERHEAD_BYTES: usize = 64;

/// Resets that wait for a socket; a peer that provokes more loses some, and asks again.
pub const MAX_QUEUED_RESETS: usize = 256;

/// Ended streams whose reason is remembered.
pub const MAX_TOMBSTONES: usize = 256;

/// Handshakes that are remembered, so that a copy of one costs no cryptography.
pub const MAX_REMEMBERED_HANDSHAKES: usize = 1024;

/// What an endpoint may be told; the defaults are those of compatible peers where they have any.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Limits {
    /// Whether to acknowledge, and to show the peer that we do. Without it every stream is
    /// compatible.
    pub acknowledge: bool,
    /// Streams of one executor.
    pub streams: usize,
    /// Handshakes of one executor that wait to be admitted.
    pub pending: usize,
    /// How long admission may take.
    pub admission: Duration,
    /// How long a harness waits for the executor's part of the handshake.
    pub handshake: Duration,
    /// How long an executor waits for the first record of a harness, which alone shows that the
    /// handshake was not a copy of somebody else's.
    pub confirmation: Duration,
    /// Failed handshakes before further ones are refused unseen; they come back at
    /// [`Limits::failures_per_second`].
    pub failures: u32,
    /// How fast failed handshakes are forgiven.
    pub failures_per_second: u32,
    /// Queued bytes above which a stream takes no further message.
    pub send_bytes: usize,
    /// Unread bytes above which a peer that keeps to flow control sends nothing more.
    pub receive_bytes: usize,
    /// Unread bytes of one stream above which it ends; for peers that know no flow control.
    pub unread_bytes: usize,
    /// Received bytes of all streams above which the one that adds to them ends.
    pub total_received_bytes: usize,
    /// How often an idle harness shows that it is there.
    pub heartbeat: Duration,
    /// How long a stream outlives the last sign of its peer.
    pub linger: Duration,
    /// How long a missing record may hold up those after it when nobody will send it again.
    pub gap: Duration,
    /// How long an acknowledgement waits for something to travel with.
    pub ack_delay: Duration,
}

impl Default for Limits {
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
