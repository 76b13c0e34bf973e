//! Tests of a rendezvous server in this process, with correct and hostile peers.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod attacks;
mod events;
mod flow;
mod oidc;
mod registry;
mod streams;
mod support;
mod tenants;
