//! System calls that no safe wrapper offers: launching a child without copying this process,
//! reaping with resource usage, socket options, inherited sockets, the guardian process and
//! allocator settings.
//!
//! The only module of the workspace with unsafe code; each block states why it is sound.

#![allow(unsafe_code)]

pub mod activation;
pub(crate) mod child_ends;
pub(crate) mod confine;
pub mod guardian;
pub(crate) mod launch;
pub mod memory;
pub mod own;
pub mod poll;
pub(crate) mod probe;
pub(crate) mod reap;
pub(crate) mod rlimit;
pub mod socket;
