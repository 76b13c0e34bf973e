//! The client against a scripted server: send this, expect that, in wire terms.

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
