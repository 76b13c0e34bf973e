//! Remote mode without IO: everything between a websocket to a meeting point and whole messages.
//!
//! Owns relay frames, the Noise channel, records, acknowledgement, retransmission, flow control and
//! the going-on of a stream over another socket. Has no socket, no clock, no task and no randomness:
//! they are arguments. Knows no JSON-RPC; a message is bytes.
//!
//! ```text
//!  messages ─► Cutter ─► seal ─► Window ─► poll_transmit ═══ meeting point ═══► handle_frame
//!              60 KiB            keeps the                                         │
//!              records           ciphertext                     Reorder ◄──────────┘
//!                                    ▲  acks on every frame       │
//!                                    └────────────────────────────┤
//!                                          messages ◄─ Joiner ◄─ open
//! ```
//!
//! # A stream
//!
//! ```text
//!  harness    Greeting ──────── handshake ───────► Open ── close ──► draining ─► Closed
//!                │ resume, handshake (asks again with heartbeats)          │
//!                ▼                                                         │ all sent and, if the
//!  executor   Pending ── admit ── handshake ─────► Open                    │ peer says so, received
//!                └─ refuse, timeout ─► Closed        └─ reset, timeout ─► Closed
//!
//!  the socket, as an open stream sees it:
//!
//!     Up ── socket_lost ──► Down ── socket_up ──► Resuming ── anything heard ──► Up
//!      │                                             resume{next_seq} + acks, repeated
//!      └── compatible: Closed(socket_lost)
//! ```
//!
//! # Two modes
//!
//! *Compatible*: the peer never acknowledges. The wire is exactly that of such peers, nothing is
//! kept once it was sent, nothing waits for an answer that will not come, and a lost socket ends
//! the stream. Early records wait within 64 numbers and 1 MiB; beyond that the stream ends.
//!
//! *Reliable*: the peer acknowledges. A frame that is lost, doubled, late or out of order, and a
//! socket that breaks, cost nothing but time: records are kept as ciphertext until acknowledged and
//! the very same bytes are sent again, on the same socket or the next. Both windows are bounded, and
//! a reader that is slow holds back its sender, and no other stream.
//!
//! Which it is, is settled by the handshake: a harness of this kind grants *credit* (field 13 of the
//! frame, which others skip) from its first frame, and an executor of this kind answers with credit of
//! its own. Without that sign from the peer a stream is compatible.
//!
//! # What a meeting point should do
//!
//! When a socket ends, it resets the streams on the other side with
//! [`Reason::HarnessDetached`] or [`Reason::ExecutorDetached`]: compatible peers take it as the end,
//! reliable ones wait for the peer's next `resume` and go on. It lets a stream id be claimed again
//! once the socket that claimed it is gone.
//!
//! # What can be forged
//!
//! Frames around the ciphertext are not authenticated: whoever forwards them can drop, delay, reset
//! or falsely acknowledge, and so end a stream. Nobody can read, change, repeat, reorder or add a
//! message; an attempt ends the stream with [`Reason::DecryptFailed`].

#[cfg(feature = "noise")]
mod endpoint;
pub mod frame;
#[cfg(all(feature = "noise", any(test, feature = "fuzzing")))]
pub mod fuzz;
pub mod keys;
pub mod limits;
#[cfg(feature = "noise")]
mod message;
#[cfg(feature = "noise")]
pub mod noise;
pub mod reason;
pub mod registry;
#[cfg(feature = "noise")]
mod reorder;
#[cfg(feature = "noise")]
mod stream;
#[cfg(feature = "noise")]
mod window;

#[cfg(feature = "noise")]
pub use endpoint::{
    Endpoint, Event, ExecutorConfig, HarnessConfig, Role, SendError, Stats, StreamKey,
};
pub use limits::Limits;
pub use reason::Reason;
#[cfg(feature = "noise")]
pub use stream::Mode;
