//! Remote mode: the meeting point, and executors and harnesses that meet there.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod faults;
mod guide;
mod meeting;
mod rendezvous;
mod stub;
