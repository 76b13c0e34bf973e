//! Relay protocol of remote mode without IO: everything between a websocket to a rendezvous server
//! and whole messages.
//!
//! Implements relay frames, the Noise channel, records, acknowledgement, retransmission, flow
//! control, and resuming a stream over another socket. Uses no socket, clock, task or random
//! source: they are arguments. A message is bytes; JSON-RPC is handled in `service` and `client`.
//!
//! ```text
//!  messages ─► Splitter ─► seal ─► Window ─► poll_transmit ══ rendezvous ═══► handle_frame
//!              60 KiB              keeps the                                       │
//!              records             ciphertext                   Reorder ◄──────────┘
//!                                      ▲  acks on every frame     │
//!                                      └──────────────────────────┤
//!                                        messages ◄─ Assembler ◄─ open
//! ```
//!
//! # A stream
//!
//! ```text
//!  harness    Handshaking ───── handshake ───────► Open ── close ──► draining ─► Closed
//!                │ resume, handshake (repeated with heartbeats)            │
//!                ▼                                                         │ all sent and, if the
//!  executor   Pending ── admit ── handshake ─────► Open                    │ peer acknowledges,
//!                └─ refuse, timeout ─► Closed        └─ reset, timeout ─► Closed    received
//!
//!  the socket, as an open stream sees it:
//!
//!     Up ── socket_lost ──► Down ── socket_up ──► Resuming ── any frame received ──► Up
//!      │                                             resume{next_seq} + acks, repeated
//!      └── compatible: Closed(socket_lost)
//! ```
//!
//! # Two modes
//!
//! *Compatible*: the peer never acknowledges. The wire is exactly that of such peers: sent records
//! are not kept, nothing waits for an acknowledgement, and a lost socket ends the stream. Early
//! records wait within 64 sequence numbers and 1 MiB; a record beyond that ends the stream.
//!
//! *Reliable*: the peer acknowledges. Lost, duplicated, late or reordered frames and broken sockets
//! cost only time: records are kept as ciphertext until they are acknowledged, and the same bytes
//! are sent again, on the same socket or the next. Both windows are bounded. A slow reader holds
//! back its own sender and no other stream.
//!
//! The handshake selects the mode: a reliable harness grants *credit* (field 13 of the frame, which
//! other peers skip) from its first frame, and a reliable executor answers with its own credit. If
//! the peer grants no credit, the stream is compatible.
//!
//! # What a rendezvous server should do
//!
//! When a socket ends, the server resets the streams on the other side with
//! [`EndReason::HarnessDetached`] or [`EndReason::ExecutorDetached`]: compatible peers end the stream,
//! reliable ones wait for the peer's next `resume` and continue. A stream id can be claimed again
//! once the socket that claimed it has closed.
//!
//! # What can be forged
//!
//! Frames around the ciphertext are not authenticated: a rendezvous server can drop, delay, reset
//! or falsely acknowledge them, and so end a stream. It cannot read, change, repeat, reorder or add
//! a message; an attempt ends the stream with [`EndReason::DecryptFailed`].

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
    Endpoint, EndpointEvent, EndpointRole, RelayExecutorConfig, RelayHarnessConfig, SendError,
    StreamKey, StreamStats,
};
pub use limits::EndpointLimits;
pub use reason::EndReason;
#[cfg(feature = "noise")]
pub use stream::Mode;
