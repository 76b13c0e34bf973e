//! Client tests with a scripted server that sends and expects raw protocol messages.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests too")]

mod calls;
mod collecting;
mod deciding;
mod discovery;
mod environments;

mod handshake;
mod processes;
mod pulling;
mod recovery;
mod server;
