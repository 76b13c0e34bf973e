//! The system calls that no safe wrapper offers: starting a child without copying this process,
//! reaping with resource usage, a few socket options, sockets that a service manager hands over, the
//! guardian in front of a server, and its memory.
//!
//! The only module of the workspace with unsafe code; each block says why it is sound.

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
