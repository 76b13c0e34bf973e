//! System calls that no safe wrapper offers: launching a child without copying this process,
//! reaping with resource usage, socket options, inherited sockets, the guardian and
//! watcher processes, and allocator settings.
//!
//! The only crate of the workspace with unsafe code; each block states why it is sound.

pub mod activation;
pub mod child_ends;
pub mod confine;
mod descriptors;
pub mod guardian;
pub mod launch;
pub mod local_peer;
pub mod memory;
pub mod own;
#[cfg(feature = "tokio")]
pub mod poll;
pub mod probe;
pub mod range_lock;
pub mod reap;
pub mod rlimit;
pub mod socket;
pub mod watcher;
